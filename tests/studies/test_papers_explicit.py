"""Explicit and implicit fine-tuning: closed forms, autodiff of the whole objective, and going on after a stop."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf

from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run
from tfpfl.studies.new_clients import CannotAdapt
from tfpfl.studies.papers import explicit

DIGITS = {
    "dataset": "digits",
    "partition": "dirichlet",
    "partition_args": {"alpha": 1.0, "min_samples": 20},
    "clients": 6,
    "labels": "global",
    "participation": 0.5,
    "validation": 0.0,
    "evaluate_every": 0,
    "hyperparameters": {"eta": 0.02, "epochs": 1, "batch_size": 20},
}


def trained(folder, algorithm, rounds):
    with Run.create(RunConfig(algorithm=algorithm, rounds=rounds, **DIGITS), folder) as run:
        run.train()
    return folder


def test_steps_on_quadratics_have_a_closed_form():
    """l_j = |w - m_j|^2 / 2: the exact objective's minimum is at (m_i + mu mean of the others) / (1 + mu)."""
    rng = np.random.default_rng(0)
    m, w_0, mu, eta = rng.normal(size=(5, 3)), tf.constant(rng.normal(size=3)), 0.7, 0.1
    steps = list(explicit.fine_tune(lambda w, j: w - m[j], w_0, 2, 5, mu=mu, eta=eta, steps=6))
    best = (m[2] + mu * np.delete(m, 2, 0).mean(0)) / (1 + mu)
    for s, w in enumerate(steps):
        np.testing.assert_allclose(w, best + (1 - eta * (1 + mu)) ** s * (w_0 - best), rtol=1e-12)
    asked = []
    own = list(explicit.fine_tune(lambda w, j: (asked.append(j), w - m[j])[1], w_0, 2, 5, mu=0, eta=eta, steps=6))
    np.testing.assert_allclose(own[-1], m[2] + (1 - eta) ** 6 * (w_0 - m[2]), rtol=1e-12)
    assert asked == [2] * 6  # the implicit way asks nobody else


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory):
    """A FedAvg run on digits, and its folder."""
    return trained(tmp_path_factory.mktemp("fedavg") / "run", "fedavg", 2)


def whole_objective(run, weights, i, mu):
    """l_i + mu / (I - 1) sum_{j != i} l_j, written down."""
    risk = client_loss(run.algorithm.model)

    def of(j):
        x, y = run.federation.arrays(j, "train", labels="global")
        return risk(weights, tf.constant(x), tf.constant(y))

    people = run.federation.num_clients
    return of(i) + mu / (people - 1) * tf.add_n([of(j) for j in range(people) if j != i])


@pytest.mark.slow
def test_explicit_gradient_is_that_of_the_whole_objective(fedavg):
    with Run.open(fedavg) as run:
        of, score, weights = explicit._parts(run)
        np.testing.assert_array_equal(weights.head.kernel, run.training().server_state().head.kernel)
        x, y = run.federation.arrays(1, "test", labels="global")
        right = np.argmax(run.algorithm.model.logits(weights, x), 1) == y
        assert score(weights, 1) == right.mean()
        with tf.GradientTape() as tape:
            tape.watch(weights)
            value = whole_objective(run, weights, 3, 0.4)
        expected = tape.gradient(value, weights)
        found = explicit.gradient(of, weights, 3, run.federation.num_clients, 0.4)
        for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        assert isinstance(found, Weights)


@pytest.mark.slow
def test_fine_tuning_goes_on_where_it_was(fedavg, monkeypatch):
    saved, told = [], []
    some = explicit.measure(
        {"run": fedavg}, scale="smoke", save=lambda d: saved.append(json.dumps(d)), tell=told.append
    )
    assert len(some["clients"]) == len(saved) == 2 and told[-1] == "fine-tuned: 2 of 2 clients"
    monkeypatch.setitem(explicit.CLIENTS, "laptop", 3)
    kept, tuned = json.loads(saved[-1]), []
    kept["clients"] = {client: row | {"mark": 1} for client, row in kept["clients"].items()}
    more = explicit.measure({"run": fedavg}, scale="laptop", kept=kept, tell=tuned.append)
    assert len(tuned) == 1 and sum("mark" in row for row in more["clients"].values()) == 2
    other = explicit.measure({"run": fedavg}, scale="smoke", kept=kept | {"rounds": 9}, tell=tuned.append)
    assert other == some  # what was kept was of another run
    for row in some["clients"].values():
        assert row["implicit"][0] == row["explicit"][0] and len(row["explicit"]) == explicit.STEPS + 1


def made_curves():
    rows = {"0": (0.5, 0.7, 0.6), "1": (0.4, 0.5, 0.5), "2": (None, None, None)}  # before, explicit, implicit
    clients = {}
    for client, (before, high, low) in rows.items():
        clients[client] = {
            kind: [before] * explicit.STEPS + [last] for kind, last in (("explicit", high), ("implicit", low))
        }
    return {"rounds": 4, "steps": explicit.STEPS, "clients": clients}


def test_gains_of_fine_tuning():
    found = explicit.numbers(made_curves())
    assert found["explicit gain (points)"]["value"] == pytest.approx(15)
    assert found["implicit gain (points)"]["value"] == pytest.approx(10)
    assert found["explicit above implicit (points)"]["value"] == pytest.approx(5)
    assert found["explicit above implicit (points)"]["half"] == pytest.approx(
        math.tan(math.pi * 0.475) * 5  # Student's t for two clients, whose distance is 10
    )
    assert found["accuracy before (%)"]["value"] == pytest.approx(45)
    assert found["clients that fine-tuned"] == {"value": 2}  # the third has no test examples
    above, below = explicit.draw(made_curves()).axes
    assert above.lines[0].get_ydata()[-1] == pytest.approx(60) and above.lines[1].get_ydata()[-1] == pytest.approx(55)
    assert sum(patch.get_height() for patch in below.patches) == 4  # two clients, two ways


@pytest.mark.slow
def test_a_run_without_a_global_model_is_refused(tmp_path):
    with pytest.raises(CannotAdapt, match="neither a common model nor a common backbone"):
        explicit.measure({"run": trained(tmp_path / "run", "fedamp", 1)})
