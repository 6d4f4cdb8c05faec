"""Ditto: its global path is FedAvg's; its personal models are Local's without lambda, and GradientTape's with it."""

import pytest

from helpers.marks import slow_but
from helpers.rounds import by_hand, loss_of, play, shared
from helpers.toys import distance, identical, initial_states, toy
from tfpfl.algorithms import ditto, fedavg, local
from tfpfl.models import tree

SOLVER = {"epochs": 2, "batch_size": 2, "momentum": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("eta_p", slow_but([0.1, 0.3], 0.3))
def test_without_lambda_the_personal_models_are_local_training(eta_p):
    data = toy(classes=(4,) * 5)  # own heads are as wide as the shared one
    algorithm = ditto(data.model, data.population, lam=0.0, eta=0.1, eta_p=eta_p, **SOLVER)
    start = {i: state.v for i, state in initial_states(algorithm, data.population).items()}
    _, expected = play(local(data.model, data.population, eta=eta_p, **SOLVER), data, states=start)
    _, states = play(algorithm, data)
    assert distance({i: state.v for i, state in states.items()}, expected) < 1e-9
    assert distance(expected, start) > 1e-2


@pytest.fixture(scope="module")
def fedavg_path(data):
    return play(fedavg(data.model, data.population, eta=0.1, **SOLVER), data)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"lam": 0.0}, marks=pytest.mark.slow),
        pytest.param({"lam": 1.0, "anchor": "local"}, marks=pytest.mark.slow),
        {"lam": 50.0, "implicit_prox": True},
        pytest.param({"steps_p": 7, "init": "first_broadcast"}, marks=pytest.mark.slow),
    ],
)
def test_the_global_path_is_fedavgs(data, fedavg_path, options):
    path, _ = play(ditto(data.model, data.population, eta=0.1, **options, **SOLVER), data)
    assert identical(path, fedavg_path)


@pytest.mark.parametrize("anchor", ["received", "local"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_personal_model_descends_on_its_penalized_loss(data, anchor, momentum):
    lam, eta_p, w = 0.8, 0.2, shared(data)
    work = {"eta": 0.1, "steps": 3, "eta_p": eta_p, "steps_p": 5, "momentum": momentum}
    algorithm = ditto(data.model, data.population, lam=lam, anchor=anchor, **work)
    state = initial_states(algorithm, data.population)[2]
    output = algorithm.client_update(w, state, data.visit(2))
    to = w if anchor == "received" else tree.add(w, output.update)

    def penalized(v):
        apart = tree.subtract(v, to)
        return loss_of(data, 2)(v) + lam / 2 * tree.dot(apart, apart)

    assert distance(output.state.v, by_hand(penalized, state.v, eta_p, 5, momentum)) < 1e-9
    assert identical(algorithm.local_model(w, output), output.state.v)


@pytest.mark.parametrize("init", ["w0", "first_broadcast"])
def test_where_a_personal_model_starts(data, init):
    """One visit without lambda from the start: w^0 or the w that came."""
    algorithm = ditto(data.model, data.population, lam=0.0, eta=0.1, init=init, steps=4)
    state, w = initial_states(algorithm, data.population)[0], shared(data)
    start = w if init == "first_broadcast" else algorithm.init_server()
    assert identical(algorithm.personal_model(w, state, data.visit(0)), start)
    output = algorithm.client_update(w, state, data.visit(0))
    assert distance(output.state.v, by_hand(loss_of(data, 0), start, 0.1, 4)) < 1e-9
    later = algorithm.personal_model(algorithm.init_server(), output.state, data.visit(0))
    assert identical(later, output.state.v)  # from now on it is the client's own


def test_what_is_sent_does_not_depend_on_the_personal_model(data):
    algorithm, w = ditto(data.model, data.population, eta=0.1, steps=3), shared(data)
    state = initial_states(algorithm, data.population)[0]
    other = state._replace(v=tree.scale(2, state.v))
    a, b = (algorithm.client_update(w, s, data.visit(0)) for s in (state, other))
    assert identical((a.update, a.weight), (b.update, b.weight)) and distance(a.state.v, b.state.v) > 1e-3


def test_a_stiff_lambda_warns_and_its_implicit_step_is_stable(data):
    stiff = {"lam": 100.0, "eta": 0.001, "eta_p": 0.1, "steps": 50}
    with pytest.warns(UserWarning, match="lam=100.0 with a rate of 0.1"):
        ditto(data.model, data.population, **stiff)
    algorithm, w = ditto(data.model, data.population, **stiff, implicit_prox=True), shared(data)
    state = initial_states(algorithm, data.population)[0]
    assert distance(algorithm.client_update(w, state, data.visit(0)).state.v, w) < 0.05


def test_refusals(data):
    for wrong in ({"lam": -1.0}, {"eta": -1.0}, {"eta_p": -1.0}, {"steps_p": 0}, {"anchor": "old"}, {"init": "zeros"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ditto(data.model, data.population, **wrong)
