"""FedAvg in its limits: no step, one client, clients that are alike, and one step."""

import pytest
import tensorflow as tf

from helpers.toys import client_loss, clients, distance, gradient, identical, run, toy
from tfpfl.algorithms import fedavg
from tfpfl.algorithms.parts.local_training import local_solver
from tfpfl.models import tree
from tfpfl.models.losses import client_loss as split_loss
from tfpfl.models.weights import Weights


def start(data) -> Weights:
    return Weights(data.model.theta(), data.model.shared_head(data.population.shared_labels()))


def trained_alone(data, client_id, rounds, w, **work):
    """What this client reaches by itself, its momentum reset at every round."""
    for t in range(1, rounds + 1):
        w, _ = local_solver(**work)(split_loss(data.model), w, data.visit(client_id, t))
    return w


@pytest.mark.parametrize("work", [{}, {"epochs": 2, "batch_size": 4, "momentum": 0.9}], ids=str)
def test_eta_0_leaves_the_model(work):
    data = toy()
    server, _ = run(fedavg(data.model, data.population, eta=0.0, **work), data, rounds=2)
    assert identical(server, start(data))


@pytest.mark.slow
@pytest.mark.parametrize("work", [{"steps": 5}, {"epochs": 2, "batch_size": 4, "momentum": 0.5}], ids=str)
def test_one_client_is_plain_local_training(work):
    data = toy(examples=(9,), classes=(3,))
    server, _ = run(fedavg(data.model, data.population, eta=0.3, **work), data, rounds=3)
    assert distance(server, trained_alone(data, 0, 3, start(data), eta=0.3, **work)) < 1e-9


@pytest.mark.slow
def test_clients_with_the_same_data_train_as_one():
    single = toy(examples=(9,), classes=(3,))
    data = toy(examples=(9,) * 4, classes=(3,) * 4)._replace(data=clients((9,), (3,)) * 4)
    several, _ = run(fedavg(data.model, data.population, eta=0.3, steps=5), data, rounds=3)
    alone, _ = run(fedavg(single.model, single.population, eta=0.3, steps=5), single, rounds=3)
    assert distance(several, alone) < 1e-9


def average(data, cohort, weights, **work):
    models = [trained_alone(data, i, 1, start(data), **work) for i in cohort]
    total = tree.scale(0, models[0])
    for weight, model in zip(weights, models, strict=True):
        total = tree.add_scaled(total, weight / sum(weights), model)
    return total


@pytest.mark.parametrize(("weighting", "weights"), [("examples", (9, 7, 5)), ("uniform", (1, 1, 1))])
def test_the_new_model_is_the_weighted_average_of_the_cohort(weighting, weights):
    data, work = toy(), {"eta": 0.3, "epochs": 2, "batch_size": 4, "momentum": 0.5}
    server, _ = run(fedavg(data.model, data.population, weighting=weighting, **work), data, cohort=[1, 3, 4])
    assert distance(server, average(data, (1, 3, 4), weights, **work)) < 1e-9


def test_one_full_step_of_everyone_is_gradient_descent_on_the_objective():
    """FedSGD: sum_i alpha_i grad l_i at one point."""
    data = toy()
    server, _ = run(fedavg(data.model, data.population, eta=0.3, steps=1), data, rounds=4)
    w, alpha = start(data), data.population.num_examples / data.population.num_examples.sum()
    for _ in range(4):
        (slope,) = gradient(lambda w: tf.add_n([alpha[i] * client_loss(data, i, *w) for i in data.ids]), w)
        w = tree.add_scaled(w, -0.3, slope)
    assert distance(server, w) < 1e-9


def test_the_local_model_is_the_copy_and_the_personal_one_the_average():
    data = toy()
    algorithm = fedavg(data.model, data.population, eta=0.3, steps=3)
    w, visit = algorithm.init_server(), data.visit(2)
    output = algorithm.client_update(w, (), visit)
    assert distance(algorithm.local_model(w, output), trained_alone(data, 2, 1, w, eta=0.3, steps=3)) < 1e-9
    assert algorithm.personal_model(w, (), visit) is w


@pytest.mark.parametrize(
    ("name", "value"),
    [("eta", -1.0), ("steps", 0), ("epochs", 0), ("batch_size", 0), ("momentum", -0.1), ("weighting", "q")],
)
def test_a_bad_hyperparameter_is_refused_by_name(name, value):
    data = toy()
    with pytest.raises(ValueError, match=rf"\b{name}\b.*{value}"):
        fedavg(data.model, data.population, **{name: value})
