"""Local: nothing is sent, and nobody matters to anybody."""

import pytest
import tensorflow as tf

from helpers.toys import clients, distance, identical, run, toy
from tfpfl.algorithms import local
from tfpfl.algorithms.parts.local_training import local_solver
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights

WORK = {"eta": 0.3, "epochs": 2, "batch_size": 4, "momentum": 0.5}


def test_nothing_is_sent():
    data = toy()
    algorithm = local(data.model, data.population, **WORK)
    engine = Simulation(algorithm)
    state = algorithm.init_client(data.population.info(0))
    metrics = engine.next(engine.initialize(), [state], [data.visit(0)]).client_metrics[0]
    assert int(metrics["bytes_down"]) == int(metrics["bytes_up"]) == 0
    output = algorithm.client_update((), state, data.visit(0))
    assert not tf.nest.flatten(output.update) and not tf.nest.flatten(algorithm.init_server())
    assert set(output.metrics) == {"loss"}


@pytest.mark.slow
def test_a_client_is_independent_of_the_data_of_all_others():
    data = toy()
    others = data._replace(
        data=[d if i == 2 else o for i, (d, o) in enumerate(zip(data.data, clients(seed=8), strict=True))]
    )
    algorithm = local(data.model, data.population, **WORK)
    _, states = run(algorithm, data, rounds=3)
    _, states_of_others = run(algorithm, others, rounds=3)
    _, alone = run(algorithm, data, rounds=3, cohort=[2])
    assert identical(states[2], states_of_others[2]) and identical(states[2], alone[2])
    assert distance(states[1], states_of_others[1]) > 1e-3


@pytest.mark.slow
def test_every_client_goes_on_from_where_it_was():
    data = toy()
    _, states = run(local(data.model, data.population, **WORK), data, rounds=3)
    for i in data.ids:
        w = Weights(data.model.theta(), data.model.head(data.population.info(i)))
        for t in (1, 2, 3):
            w, _ = local_solver(**WORK)(client_loss(data.model), w, data.visit(i, t))
        assert distance(states[i], w) < 1e-9


def test_all_clients_start_from_one_backbone_and_heads_of_their_own():
    data = toy()
    algorithm = local(data.model, data.population)
    states = [algorithm.init_client(data.population.info(i)) for i in data.ids]
    assert all(identical(s.theta, data.model.theta()) for s in states)
    assert [s.head.bias.shape[0] for s in states] == [2, 3, 2, 4, 3]
    assert distance(states[0].head.kernel, states[2].head.kernel) > 0.1


def test_the_model_that_a_client_predicts_with_is_its_own():
    data = toy()
    algorithm = local(data.model, data.population, **WORK)
    visit = data.visit(0)
    output = algorithm.client_update((), algorithm.init_client(visit.info), visit)
    assert algorithm.personal_model((), output.state, visit) is output.state
    assert algorithm.local_model((), output) is output.state
