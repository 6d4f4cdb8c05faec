"""Fine-tuning: none is the base method, some is local training from its model, and training never sees it."""

from functools import partial

import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import COHORTS, by_hand, loss_of, play, shared
from helpers.toys import distance, identical, initial_states
from tfpfl.algorithms import fedavg, fedavg_ft, fedbabu, fedper, fedprox, fedprox_ft, finetuned, lg_fedavg, pflego
from tfpfl.algorithms.parts.local_training import local_solver
from tfpfl.algorithms.transforms import with_objective
from tfpfl.models.losses import client_loss, cross_entropy
from tfpfl.models.weights import Weights
from tfpfl.studies import battery

SOLVER = {"eta": 0.1, "epochs": 2, "batch_size": 2, "momentum": 0.5}


def personal(algorithm, data, message, i=1, state=()):
    return algorithm.personal_model(message, state, data.visit(i))


@pytest.mark.parametrize("none", slow_but([{"steps_ft": 0}, {"epochs_ft": 0}], {"steps_ft": 0}))
@pytest.mark.parametrize("part", ["full", "head", "body"])
def test_none_is_the_base_method(data, none, part):
    w = shared(data)
    algorithm = fedavg_ft(data.model, data.population, **none, part=part, batch_size=2)
    assert identical(personal(algorithm, data, w), w)


def test_by_default_it_is_one_more_visit(data):
    """The fine-tuned model is what FedAvg's client would hold after local work on the same batches."""
    w, base = shared(data), fedavg(data.model, data.population, **SOLVER)
    held = base.local_model(w, base.client_update(w, (), data.visit(1)))
    assert distance(personal(fedavg_ft(data.model, data.population, **SOLVER), data, w), held) < 1e-9


@pytest.mark.parametrize("part", ["full", "head", "body"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_full_batch_steps_are_gradient_descent_on_the_part(data, part, momentum):
    w, loss = shared(data), loss_of(data, 1)
    if part == "full":
        expected = by_hand(loss, w, 0.2, 5, momentum)
    elif part == "head":
        expected = Weights(w.theta, by_hand(lambda h: loss(Weights(w.theta, h)), w.head, 0.2, 5, momentum))
    else:
        expected = Weights(by_hand(lambda t: loss(Weights(t, w.head)), w.theta, 0.2, 5, momentum), w.head)
    algorithm = fedavg_ft(data.model, data.population, eta_ft=0.2, steps_ft=5, part=part, momentum=momentum)
    assert distance(personal(algorithm, data, w), expected) < 1e-9


def test_mini_batches_on_cached_features_are_mini_batches_on_the_examples(data):
    """part='head' against a solver whose objective computes the features of every batch."""
    w, visit = shared(data), data.visit(3)
    batches = {"batch_size": 2, "momentum": 0.5}
    algorithm = finetuned(fedavg(data.model, data.population), eta_ft=0.1, epochs_ft=3, part="head", **batches)

    def objective(head, x, y):
        return cross_entropy(tf.matmul(data.model.features(w.theta, x), head.kernel) + head.bias, y)

    expected, _ = local_solver(eta=0.1, epochs=3, **batches)(objective, w.head, visit)
    found = algorithm.personal_model(w, (), visit)
    assert distance(found.head, expected) < 1e-9
    assert identical(found.theta, w.theta)


def test_no_penalty_while_fine_tuning(data):
    w = shared(data)
    near = fedprox_ft(data.model, data.population, mu=5.0, **SOLVER)
    assert identical(personal(near, data, w), personal(fedavg_ft(data.model, data.population, **SOLVER), data, w))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["fedavg_ft", "fedprox_ft", "fedbabu"], "fedavg_ft"))
def test_training_does_not_see_it(data, name):
    """Bit for bit: the base method, and its path with the personal models of all clients computed after every round."""
    stragglers = {"mu": 0.7, "straggler": 0.5, "straggler_policy": "drop", "weighting": "uniform"}
    algorithm, without = {
        "fedavg_ft": (fedavg_ft, fedavg),
        "fedprox_ft": (partial(fedprox_ft, **stragglers), partial(fedprox, **stragglers)),
        "fedbabu": (fedbabu, partial(fedbabu, steps_ft=0)),
    }[name]
    algorithm, without = (build(data.model, data.population, **SOLVER) for build in (algorithm, without))
    expected, _ = play(without, data)
    server, path, states = None, [], initial_states(algorithm, data.population)
    for t, cohort in enumerate(COHORTS, 1):
        (server,), states = play(algorithm, data, [cohort], server, states, first=t)
        path.append(server)
        before = tf.nest.map_structure(tf.identity, (server, states))
        for i in data.ids:
            personal(algorithm, data, algorithm.message(server), i, states[i])
        assert identical(before, (server, states))
    assert identical(path, expected)


def test_any_algorithm_can_be_fine_tuned(data):
    """PFLEGO's heads, of each client's own width, after more head steps with theta fixed."""
    base = pflego(data.model, data.population, tau=3, beta=0.1)
    algorithm = finetuned(base, eta_ft=0.3, steps_ft=4, part="head")
    (*_, server), states = play(base, data)
    for i in data.ids:
        theta = server.theta
        found = personal(algorithm, data, theta, i, states[i])
        expected = by_hand(lambda h: loss_of(data, i)(Weights(theta, h)), states[i], 0.3, 4)  # noqa: B023
        assert distance(found, Weights(theta, expected)) < 1e-9
    changed = {"personal_model": None, "adapt": None, "begins": None}
    assert algorithm._replace(**changed) == base._replace(**changed)
    new = initial_states(base, data.population)[2]
    assert distance(personal(algorithm, data, server.theta, 2, new).head, new) > 1e-3


@pytest.mark.parametrize(
    ("base", "part", "shares"),
    [
        pytest.param(fedavg, "full", None, marks=pytest.mark.slow),
        (fedavg, "head", "backbone"),
        (fedavg, "body", "head"),
        (fedper, "head", "backbone"),
        (fedper, "body", None),
        (lg_fedavg, "body", "head"),
        (lg_fedavg, "head", None),
    ],
)
def test_what_is_not_fine_tuned_stays_shared(data, base, part, shares):
    def build(model, population):
        return finetuned(base(model, population, eta=0.1, steps=2), eta_ft=0.1, steps_ft=2, part=part)

    assert build(data.model, data.population).shares == shares
    if base is fedavg:
        [finding] = battery.check_algorithm(build, checks=[battery.what_is_shared_is_declared])
        assert finding.status == "ok", finding.why


def test_fair_weighs_with_the_loss_before_fine_tuning_also_without_a_global_model(data):
    base = fedper(data.model, data.population, steps=3)
    fair = with_objective(finetuned(base, steps_ft=5), "fair:1")
    theta, state, visit = base.init_server(), base.init_client(data.visit(2).info), data.visit(2)
    w = base.personal_model(theta, state, visit)
    expected = float(client_loss(data.model)(w, visit.x, visit.y)) * len(visit.y)
    assert abs(float(fair.client_update(theta, state, visit).weight) - expected) < 1e-12


def test_refusals(data):
    for wrong in (
        {"part": "tail"},
        {"eta_ft": -1.0},
        {"steps_ft": -1},
        {"batch_size": 0},
        {"steps_ft": 1, "epochs_ft": 1},
    ):
        match = "not both" if len(wrong) == 2 else next(iter(wrong))
        for build in (fedavg_ft, fedprox_ft, fedbabu):
            with pytest.raises(ValueError, match=match):
                build(data.model, data.population, **wrong)
