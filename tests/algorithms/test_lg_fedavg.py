"""LG-FedAvg: no body leaves a client; FedAvg where there are no bodies, and while it pretrains."""

import keras
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import COHORTS, by_hand, loss_of, nothing_arrives, play, shared
from helpers.toys import distance, identical, initial_states, toy
from tfpfl.algorithms import fedavg, lg_fedavg
from tfpfl.algorithms.lg_fedavg import Body, Shared
from tfpfl.models import SplitModel, tree
from tfpfl.models.weights import Weights

SOLVER = {"eta": 0.1, "epochs": 2, "batch_size": 2, "momentum": 0.5}
SOME = [(0, 2, 3), (2, 3), (0, 2), (3,), (2, 3)]  # 1 and 4 never come, 0 leaves


def sizes(structure):
    return sorted(int(tf.size(leaf)) for leaf in tf.nest.flatten(structure))


def test_no_weight_of_a_body_is_in_any_message(data):
    algorithm = lg_fedavg(data.model, data.population, **SOLVER)
    (*_, server), states = play(algorithm, data)
    message = algorithm.message(server)
    output = algorithm.client_update(message, states[1], data.visit(1))
    head = sizes(data.model.shared_head(4))
    assert sizes(message) == sizes(output.update) == sizes(server) == head  # kernel and bias, and nothing else


def without_a_body():
    """The features are the inputs: the private part is empty."""
    data = toy()
    backbone = keras.Sequential([keras.Input((4,), dtype="float64"), keras.layers.Flatten(dtype="float64")])
    return data._replace(model=SplitModel(backbone))


@pytest.mark.slow
@pytest.mark.parametrize("weighting", slow_but(["examples", "uniform"], "uniform"))
def test_without_a_private_part_it_is_fedavg(weighting):
    data = without_a_body()
    path, _ = play(lg_fedavg(data.model, data.population, weighting=weighting, **SOLVER), data)
    expected, _ = play(fedavg(data.model, data.population, weighting=weighting, **SOLVER), data)
    assert distance([server.head for server in path], [server.head for server in expected]) < 1e-9
    assert not expected[-1].theta and distance(path[0].head, path[-1].head) > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_body_and_head_descend_together(data, momentum):
    algorithm = lg_fedavg(data.model, data.population, eta=0.1, steps=5, momentum=momentum)
    message, own = shared(data), shared(data, seed=5).theta
    output = algorithm.client_update(Shared(message.head, (), ()), Body(own, tf.constant(True)), data.visit(2))
    expected = by_hand(loss_of(data, 2), Weights(own, message.head), 0.1, 5, momentum)
    assert distance(output.state.theta, expected.theta) < 1e-9
    assert distance(output.update.head, tree.subtract(expected.head, message.head)) < 1e-9
    assert distance(algorithm.local_model(Shared(message.head, (), ()), output), expected) < 1e-9


@pytest.mark.slow
def test_one_client_trains_alone(data):
    """Its body is at home and its head goes around: FedAvg with that client."""
    path, states = play(lg_fedavg(data.model, data.population, **SOLVER), data, [(3,)] * 3)
    expected, _ = play(fedavg(data.model, data.population, **SOLVER), data, [(3,)] * 3)
    assert distance(Weights(states[3].theta, path[-1].head), expected[-1]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("new_body", slow_but(["initial", "average"], "average"))
def test_pretraining_is_fedavg_and_bodies_start_where_it_ends(data, new_body):
    """Who misses the whole pretraining starts there as well."""
    rounds = 2
    algorithm = lg_fedavg(data.model, data.population, pretrain_rounds=rounds, new_body=new_body, **SOLVER)
    path, states = play(algorithm, data, COHORTS[:rounds])
    expected, _ = play(fedavg(data.model, data.population, **SOLVER), data, COHORTS[:rounds])
    assert distance([(server.theta, server.head) for server in path], expected) < 1e-9
    for i in data.ids:
        assert identical(algorithm.personal_model(path[-1], states[i], data.visit(i)), Weights(*path[-1][1::-1]))

    plain = lg_fedavg(data.model, data.population, **SOLVER)
    start = {i: Body(expected[-1].theta, tf.constant(True)) for i in data.ids}
    ours, states = play(algorithm, data, [(0, 4), (0, 1)], path[-1], states, first=3)
    wanted, bodies = play(plain, data, [(0, 4)], Shared(expected[-1].head, (), ()), start, first=3)
    assert distance(ours[0].head, wanted[0].head) < 1e-9
    assert distance(states[4].theta, bodies[4].theta) < 1e-9
    assert [bool(states[i].own) for i in data.ids] == [True, True, False, False, True]
    assert (distance(ours[-1].theta, path[-1].theta) == 0) == (new_body == "initial")  # then bodies are not sent


def test_a_new_client_may_start_from_the_average_body(data):
    """Of the last cohort, weighted as the heads are."""
    algorithm = lg_fedavg(data.model, data.population, new_body="average", **SOLVER)
    (*_, server), states = play(algorithm, data, SOME)
    average = tree.add(*(tree.scale(n / (4 + 7), states[i].theta) for i, n in ((2, 4), (3, 7))))
    new = algorithm.init_client(data.population.info(4))
    assert distance(algorithm.personal_model(server, new, data.visit(4)), Weights(average, server.head)) < 1e-9
    output = algorithm.client_update(server, new, data.visit(4))
    alone = fedavg(data.model, data.population, **SOLVER).client_update(
        Weights(average, server.head), (), data.visit(4)
    )
    assert distance(output.state.theta, tree.add(average, alone.update.theta)) < 1e-9
    held = algorithm.personal_model(server, states[0], data.visit(0))  # has a body of its own
    assert identical(held, Weights(states[0].theta, server.head))


@pytest.mark.slow
def test_sharing_bodies_does_not_change_who_has_one(data):
    """If all start in round 1, where the body sent is theta^0."""
    ours, theirs = (lg_fedavg(data.model, data.population, new_body=b, **SOLVER) for b in ("average", "initial"))
    cohorts = [data.ids, *COHORTS]
    path, states = play(ours, data, cohorts)
    expected, bodies = play(theirs, data, cohorts)
    assert distance([server.head for server in path], [server.head for server in expected]) < 1e-9
    assert distance([states[i].theta for i in data.ids], [bodies[i].theta for i in data.ids]) < 1e-9


def test_who_never_came_predicts_with_the_initial_body_under_the_newest_head(data):
    algorithm = lg_fedavg(data.model, data.population, **SOLVER)
    (*_, server), states = play(algorithm, data, SOME)
    fresh = initial_states(algorithm, data.population)
    for i in data.ids:
        assert identical(states[i], fresh[i]) == (i in (1, 4))
        found = algorithm.personal_model(algorithm.message(server), states[i], data.visit(i))
        assert identical(found, Weights(states[i].theta if i in (0, 2, 3) else data.model.theta(), server.head))
    left = play(algorithm, data, SOME[:3])[1][0]
    assert identical(states[0], left)  # who left has the body of its last visit


@pytest.mark.parametrize("options", [{}, {"pretrain_rounds": 2}, {"new_body": "average"}], ids=str)
def test_a_round_in_which_nothing_arrives_changes_nothing(data, options):
    algorithm = lg_fedavg(data.model, data.population, **options, **SOLVER)
    server = play(algorithm, data, COHORTS[:1])[0][-1]
    assert identical(nothing_arrives(algorithm, data, server), server)  # the count of rounds stays too


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eta", -1.0),
        ("steps", 0),
        ("weighting", "q"),
        ("pretrain_rounds", -1),
        ("pretrain_rounds", 1.5),
        ("new_body", "theta"),
    ],
)
def test_a_bad_hyperparameter_is_refused_by_name(data, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        lg_fedavg(data.model, data.population, **{name: value})
