"""Where an algorithm differs from its paper or its authors' code, its page says so, and what it says is true."""

import inspect
import sys

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import play
from helpers.toys import client_loss, distance, gradient, initial_states, toy
from tfpfl.algorithms import apfl, ditto, fedavg, get_method, pflego
from tfpfl.algorithms.pflego import PRESETS
from tfpfl.data.population import Population, Sampling
from tfpfl.models import tree
from tfpfl.runs.config import RunConfig

TOLD = {
    "pflego": [
        "The code takes the number of clients that came. Here it is the expected number",
        "With sampling 'range' or 'binomial', the code divides by the number of clients that came, the preset by the "
        "expected number",
        "takes these decisions from the authors' code, and its distribution of first weights",
        "28 of 100 for 0.29, here 29",
        "sets a tenth aside for validation, except with --validation 0",
    ],
    "pfedme": ["trains all clients in every round", "The default lambda is that of the authors' code, 15"],
    "ditto": ["where the paper weighs them equally (weighting='uniform')"],
    "apfl": ["where the paper weighs them equally (weighting='uniform')"],
    "pgfed": ["predicts with w^0, as in the authors' code", "in the authors' code a client keeps it (`keep_momentum`)"],
    "fedper": ["keeps the momentum of its last visit (`keep_momentum`)"],
    "feddyn": ["keeps the momentum of its last visit (`keep_momentum`)"],
    "fedfomo": ["own model is always among those that it mixes, besides the M that it receives, as in NVlabs' code"],
}


@pytest.mark.parametrize("name", TOLD)
def test_the_file_of_the_method_tells_it(name):
    """Its docstring is the part of the method's page on where it differs."""
    module = sys.modules[inspect.unwrap(get_method(name).builder).__module__]
    words = " ".join(module.__doc__.split())
    for told in TOLD[name]:
        assert told in words
    assert "Both divide by the actual number" not in words  # only the code does, the paper does not


def test_what_the_preset_code_is_told_to_do_otherwise():
    population = Population([10] * 100, [2] * 100, sampling=Sampling("fixed", 0.29))
    assert int(100 * 0.29) == 28 and population.clients_per_round == 29
    assert RunConfig(algorithm="pflego", preset="code").validation == 0.1


@pytest.mark.parametrize("cohort", [(1,), (0, 2, 3)])
def test_under_range_the_preset_code_divides_by_the_expected_number(cohort):
    """theta moves by rho I / E[r] times the mean gradient, whoever came; the code has I / r."""
    data = toy(sampling=Sampling("range", low=1, high=3))
    options = PRESETS["code"] | {"tau": 1, "rho": 0.01, "server_opt": "sgd"}
    algorithm = pflego(data.model, data.population, **options)
    theta, heads = data.model.theta(), initial_states(algorithm, data.population)
    (server,), _ = play(algorithm, data, [cohort])
    total = sum(data.population.num_examples[i] for i in cohort)
    move = tree.zeros_like(theta)
    for i in cohort:
        slope = gradient(lambda theta: client_loss(data, i, theta, heads[i]), theta)[0]  # noqa: B023
        move = tree.add_scaled(move, data.population.num_examples[i] / total, slope)
    assert distance(server.theta, tree.add_scaled(theta, -0.01 * 5 / 2, move)) < 1e-9


@pytest.mark.parametrize("build", slow_but([ditto, apfl], ditto))
def test_weights_of_the_papers_are_an_option(build):
    """The global model is the mean of the clients' copies: by N_i, or each the same."""
    data = toy()
    for weighting in ("examples", "uniform"):
        options = {"eta": 0.1, "steps": 2, "weighting": weighting}
        (found,), _ = play(build(data.model, data.population, **options), data, [(1, 2)])
        average = fedavg(data.model, data.population, **options)
        start = average.init_server()
        moves = [average.client_update(start, (), data.visit(i)).update for i in (1, 2)]
        n = np.array([data.population.num_examples[i] for i in (1, 2)]) if weighting == "examples" else np.ones(2)
        expected = tree.add(start, tree.add(*(tree.scale(w, m) for w, m in zip(n / n.sum(), moves, strict=True))))
        assert distance(found, expected) < 1e-9


def test_a_reported_loss_is_of_the_last_step():
    """Of the last mini-batch, before its step: neither of all examples nor of the model that is sent."""
    data = toy()
    work = {"eta": 0.3, "batch_size": 2}
    average, before = (fedavg(data.model, data.population, steps=n, **work) for n in (8, 7))
    start, visit = average.init_server(), data.visit(1)
    output, at = average.client_update(start, (), visit), before.client_update(start, (), visit).update
    w = tree.add(start, at)
    per_example = [float(average_loss(data, w, visit.x[n : n + 1], visit.y[n : n + 1])) for n in range(len(visit.y))]
    pairs = {(per_example[a] + per_example[b]) / 2 for a in range(9) for b in range(a)}
    found = float(output.metrics["loss"])
    assert min(abs(found - pair) for pair in pairs) < 1e-9  # step 8 of batches of 2 has two of the nine examples
    assert abs(found - np.mean(per_example)) > 1e-3


def average_loss(data, w, x, y):
    """The mean cross-entropy of a model on some examples."""
    scores = data.model.features(w.theta, x) @ w.head.kernel + w.head.bias
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))
