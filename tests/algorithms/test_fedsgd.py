"""FedSGD against gradient descent on the whole objective, and as FedAvg with one step."""

import pytest

from helpers.rounds import COHORTS, play, shared
from helpers.toys import distance, gradient, identical, objective
from tfpfl.algorithms import fedavg, fedsgd
from tfpfl.models import tree
from tfpfl.models.weights import Weights

ETA = 0.2


def test_everyone_is_gradient_descent_on_the_objective(data):
    path, _ = play(fedsgd(data.model, data.population, eta=ETA), data, [data.ids] * 4, server=shared(data))
    w = shared(data)
    for found in path:
        slope = gradient(lambda w: objective(data, w.theta, dict.fromkeys(data.ids, w.head)), w)[0]
        w = tree.add_scaled(w, -ETA, slope)
        assert distance(found, w) < 1e-9
    assert distance(shared(data), w) > 0.01


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_is_fedavg_with_one_full_batch_step(data, weighting):
    path, _ = play(fedsgd(data.model, data.population, eta=ETA, weighting=weighting), data)
    average = fedavg(data.model, data.population, eta=ETA, steps=1, weighting=weighting)
    expected, _ = play(average, data)
    assert distance(path, expected) < 1e-9
    assert len(path) == len(COHORTS)


def test_a_client_holds_what_it_received_until_the_server_has_stepped(data):
    algorithm, w = fedsgd(data.model, data.population, eta=ETA), shared(data)
    output = algorithm.client_update(w, (), data.visit(1))
    assert identical(algorithm.local_model(w, output), w)
    assert isinstance(output.update, Weights)


def test_refusals(data):
    with pytest.raises(ValueError, match="eta"):
        fedsgd(data.model, data.population, eta=-0.1)
    with pytest.raises(ValueError, match="weighting"):
        fedsgd(data.model, data.population, weighting="alpha")
