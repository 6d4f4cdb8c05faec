"""APFL: FedAvg at one end, Local at the other, and its listing written out between them."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import COHORTS, loss_of, nothing_arrives, play, shared
from helpers.toys import distance, gradient, identical, initial_states, toy
from tfpfl.algorithms import apfl, fedavg, local
from tfpfl.algorithms.apfl import Personal
from tfpfl.models import tree

SOLVER = {"eta": 0.1, "epochs": 2, "batch_size": 2, "momentum": 0.5}
SOME = [(0, 2, 3), (2, 3), (0, 2), (3,), (2, 3)]  # 1 and 4 never come, 0 leaves


@pytest.fixture(scope="module")
def fedavg_path(data):
    return play(fedavg(data.model, data.population, **SOLVER), data)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    slow_but(
        [{"mixing": 0.0}, {"mixing": 0.3}, {"mixing": 1.0}, {"eta_a": 0.5}, {"init": "first_broadcast"}],
        {"mixing": 0.3},
    ),
    ids=str,
)
def test_the_global_path_is_fedavgs(data, fedavg_path, options):
    path, _ = play(apfl(data.model, data.population, **options, **SOLVER), data)
    assert distance(path, fedavg_path) < 1e-9


@pytest.mark.slow
def test_mixing_0_is_fedavg(data, fedavg_path):
    algorithm = apfl(data.model, data.population, mixing=0.0, **SOLVER)
    path, states = play(algorithm, data)
    for i in data.ids:
        assert distance(algorithm.personal_model(path[-1], states[i], data.visit(i)), fedavg_path[-1]) < 1e-9
        assert identical(states[i].v, algorithm.init_server())  # v_i never moves


@pytest.mark.slow
def test_mixing_1_is_local_training():
    data = toy(classes=(4,) * 5)  # own heads are as wide as the shared one
    algorithm = apfl(data.model, data.population, mixing=1.0, **SOLVER)
    start = {i: state.v for i, state in initial_states(algorithm, data.population).items()}
    _, expected = play(local(data.model, data.population, **SOLVER), data, states=start)
    path, states = play(algorithm, data)
    assert distance({i: state.v for i, state in states.items()}, expected) < 1e-9
    for i in data.ids:
        assert distance(algorithm.personal_model(path[-1], states[i], data.visit(i)), expected[i]) < 1e-9


def mixed(a, v, w):
    return tree.add(tree.scale(a, v), tree.scale(1 - a, w))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("eta_a", "seeds", "ends_at"), [(0, (3, 5), 0.6), (0.02, (3, 5), None), (50, (3, 5), 0), (50, (5, 3), 1)]
)
def test_a_visit_is_written_out(data, eta_a, seeds, ends_at, momentum):
    """All gradients before all steps; a_i runs into 0 and into 1 where the one model or the other is much better."""
    (w, v), a, eta, steps = (shared(data, s) for s in seeds), 0.6, 0.2, 4
    work = {"eta": eta, "steps": steps, "momentum": momentum}
    algorithm = apfl(data.model, data.population, mixing=0.1, eta_a=eta_a, **work)
    output = algorithm.client_update(w, Personal(v, tf.constant(a, tf.float64), tf.constant(True)), data.visit(1))
    w_i, velocities = w, [tree.zeros_like(w)] * 2
    for _ in range(steps):
        slope_w, slope = (gradient(loss_of(data, 1), m)[0] for m in (w_i, mixed(a, v, w_i)))
        last = loss_of(data, 1)(mixed(a, v, w_i))
        new_a = float(np.clip(a - eta_a * tree.dot(slope, tree.subtract(v, w_i)), 0, 1))
        velocities = [
            tree.add_scaled(g, momentum, s) for g, s in zip((slope_w, tree.scale(a, slope)), velocities, strict=True)
        ]
        w_i, v = (tree.add_scaled(m, -eta, s) for m, s in zip((w_i, v), velocities, strict=True))
        a = new_a
    assert distance((output.state.v, output.state.a), (v, a)) < 1e-9
    assert distance(output.update, tree.subtract(w_i, w)) < 1e-9
    assert distance(algorithm.local_model(w, output), mixed(a, v, w_i)) < 1e-9
    assert distance(output.metrics["loss"], last) < 1e-9
    assert a == ends_at if ends_at is not None else abs(a - 0.6) > 1e-3


def test_the_rate_of_a_is_the_derivative_of_the_loss(data):
    """<grad l(vbar), v - w> is d l(vbar) / d a."""
    w, v, a, eta_a = shared(data), shared(data, seed=5), tf.constant(0.6, tf.float64), 0.01
    algorithm = apfl(data.model, data.population, eta_a=eta_a, eta=0.1, steps=1)
    output = algorithm.client_update(w, Personal(v, a, tf.constant(True)), data.visit(1))
    slope = gradient(lambda a: loss_of(data, 1)(mixed(a, v, w)), a)[0]
    assert distance(output.state.a, a - eta_a * slope) < 1e-9 and abs(float(slope)) > 1e-3


@pytest.mark.slow
def test_a_client_mixes_its_model_with_the_newest(data):
    algorithm = apfl(data.model, data.population, mixing=0.3, eta_a=0.5, **SOLVER)
    (*_, w), states = play(algorithm, data, SOME)
    assert distance(states[0].a, 0.3) > 1e-4  # it has learned how much
    for i in data.ids:
        found = algorithm.personal_model(w, states[i], data.visit(i))
        assert distance(found, mixed(states[i].a, states[i].v, w)) < 1e-9
    left = play(algorithm, data, SOME[:3])[1][0]
    assert identical(states[0], left)  # who left has v_i and a_i of its last visit


@pytest.mark.slow
@pytest.mark.parametrize("init", slow_but(["w0", "first_broadcast"], "w0"))
def test_who_never_came_mixes_the_initial_model_or_none(data, init):
    algorithm = apfl(data.model, data.population, mixing=0.3, init=init, **SOLVER)
    path, states = play(algorithm, data, SOME)
    w, fresh = path[-1], initial_states(algorithm, data.population)
    expected = mixed(0.3, algorithm.init_server(), w) if init == "w0" else w
    for i in (1, 4):
        assert identical(states[i], fresh[i])
        assert distance(algorithm.personal_model(w, states[i], data.visit(i)), expected) < 1e-9
    late = algorithm.client_update(w, fresh[4], data.visit(4, 6))
    start = algorithm.init_server() if init == "w0" else w
    from_there = fresh[4]._replace(v=start, started=tf.constant(True))
    assert identical(late.state, algorithm.client_update(w, from_there, data.visit(4, 6)).state)
    later = algorithm.personal_model(algorithm.init_server(), late.state, data.visit(4))
    assert distance(later, mixed(0.3, late.state.v, algorithm.init_server())) < 1e-9  # now v_i is the client's own


@pytest.mark.slow
def test_clients_are_weighed_as_in_fedavg(data):
    for weighting, expected in (("examples", [6, 9, 4, 7, 5]), ("uniform", [1] * 5)):
        algorithm = apfl(data.model, data.population, weighting=weighting, **SOLVER)
        w, states = algorithm.init_server(), initial_states(algorithm, data.population)
        assert [float(algorithm.client_update(w, states[i], data.visit(i)).weight) for i in data.ids] == expected


@pytest.mark.slow
def test_a_round_in_which_nothing_arrives_changes_nothing(data):
    algorithm = apfl(data.model, data.population, **SOLVER)
    w = play(algorithm, data, COHORTS[:1])[0][-1]
    assert identical(nothing_arrives(algorithm, data, w), w)


@pytest.mark.parametrize(
    ("name", "value"),
    [("mixing", -0.1), ("mixing", 1.1), ("eta_a", -1.0), ("eta", -1.0), ("momentum", -1.0), ("steps", 0)]
    + [("init", "zeros"), ("weighting", "q")],
)
def test_a_bad_hyperparameter_is_refused_by_name(data, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        apfl(data.model, data.population, **{name: value})
