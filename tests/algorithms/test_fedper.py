"""FedPer against GradientTape, against PFLEGO, and as FedAvg whose head stays at home."""

import numpy as np
import pytest

from helpers.marks import slow_but
from helpers.rounds import play, shared
from helpers.toys import client_loss, distance, gradient, initial_states, objective
from tfpfl.algorithms import fedavg, fedper, pflego
from tfpfl.models import tree
from tfpfl.models.weights import Weights

ETA = 0.3
SOLVER = {"eta": 0.1, "epochs": 2, "batch_size": 3, "momentum": 0.9}


def test_one_step_with_everyone_is_written_out(data):
    """theta' = theta - eta sum alpha_i grad_theta l_i, and W_i' = W_i - eta grad_W l_i, without alpha_i."""
    algorithm = fedper(data.model, data.population, eta=ETA, steps=1)
    theta, heads = data.model.theta(), initial_states(algorithm, data.population)
    slope = gradient(lambda theta: objective(data, theta, heads), theta)[0]
    head_slopes = {i: gradient(lambda h: client_loss(data, i, theta, h), heads[i])[0] for i in data.ids}  # noqa: B023
    (found,), states = play(algorithm, data, [data.ids])
    assert distance(found, tree.add_scaled(theta, -ETA, slope)) < 1e-9
    assert distance(states, {i: tree.add_scaled(heads[i], -ETA, head_slopes[i]) for i in data.ids}) < 1e-9


def test_one_step_with_everyone_is_pflego_eq3(data):
    path, heads = play(fedper(data.model, data.population, eta=ETA, steps=1), data, [data.ids] * 3)
    sibling = pflego(data.model, data.population, tau=1, rho=ETA, rule="eq3", server_opt="sgd")
    expected, expected_heads = play(sibling, data, [data.ids] * 3)
    assert distance(path, [server.theta for server in expected]) < 1e-9
    assert distance(heads, expected_heads) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("weighting", slow_but(["examples", "uniform"], "uniform"))
def test_it_is_fedavg_whose_head_stays_at_home(data, weighting):
    """A visit from an equal model, and several rounds of one client, whose private head might as well be shared."""
    w = shared(data)
    algorithm = fedper(data.model, data.population, **SOLVER, weighting=weighting)
    average = fedavg(data.model, data.population, **SOLVER, weighting=weighting)
    for i in data.ids:
        found = algorithm.client_update(w.theta, w.head, data.visit(i))
        expected = average.client_update(w, (), data.visit(i))
        assert distance(found.update, expected.update.theta) < 1e-9
        assert distance(algorithm.local_model(w.theta, found), average.local_model(w, expected)) < 1e-9
        assert distance((found.weight, found.metrics), (expected.weight, expected.metrics)) < 1e-9
    all_classes = int(np.argmax(data.population.num_classes))  # its own head is as wide as the shared one
    alone, states = play(algorithm, data, [(all_classes,)] * 3, server=w.theta, states={all_classes: w.head})
    expected, _ = play(average, data, [(all_classes,)] * 3, server=w)
    assert distance(alone, [server.theta for server in expected]) < 1e-9
    assert distance(states[all_classes], expected[-1].head) < 1e-9


def test_personal_models_have_their_own_width(data):
    algorithm = fedper(data.model, data.population, steps=1)
    path, states = play(algorithm, data)
    for i in data.ids:
        found = algorithm.personal_model(path[-1], states[i], data.visit(i))
        assert isinstance(found, Weights) and found.head.bias.shape == data.population.num_classes[i]


def test_refusals(data):
    for wrong in ({"eta": -1.0}, {"steps": 0}, {"momentum": -1.0}, {"weighting": "alpha"}, {"head_init": "ones"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            fedper(data.model, data.population, **wrong)


@pytest.mark.slow
def test_momentum_that_is_kept_goes_on_in_the_next_visit(data):
    """Two visits of one client are one of twice the steps, of head and backbone; without, the momentum starts anew."""
    options = {"eta": 0.1, "momentum": 0.9}
    whole, heads = play(fedper(data.model, data.population, steps=6, **options), data, [(1,)])
    ends = {}
    for keep in (True, False):
        algorithm = fedper(data.model, data.population, steps=3, keep_momentum=keep, **options)
        path, states = play(algorithm, data, [(1,), (1,)])
        found = algorithm.personal_model(path[-1], states[1], data.visit(1))
        ends[keep] = distance(found, Weights(whole[-1], heads[1]))
        if keep:
            message, output = path[-1], algorithm.client_update(path[-1], states[1], data.visit(1, 3))
            expected = Weights(tree.add(message, output.update), output.state.head)
            assert distance(algorithm.local_model(message, output), expected) < 1e-12
    assert ends[True] < 1e-9 and ends[False] > 1e-3
    with pytest.raises(ValueError, match="keep_momentum keeps.*needs one above 0; found momentum=0.0"):
        fedper(data.model, data.population, keep_momentum=True)
