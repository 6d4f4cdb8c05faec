"""FedFomo: its weights by hand, its limits, which models a client gets, and what it never trains on."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import loss_of, play, shared
from helpers.toys import distance, identical, initial_states, toy
from tfpfl.algorithms import fedfomo
from tfpfl.algorithms.fedfomo import EPSILON, Message
from tfpfl.algorithms.parts.local_training import local_solver, support_and_query
from tfpfl.data.population import Sampling
from tfpfl.data.randomness import client_key
from tfpfl.models import tree
from tfpfl.models.losses import client_loss

SOLVER = {"eta": 0.1, "epochs": 2, "batch_size": 2, "momentum": 0.5}
FULL = {"eta": 0.1, "steps": 3, "validation_fraction": 0.0}  # all examples for both, so that losses are `loss_of`
VISITED = {"own_model": "visited"}  # the own model is one of the candidates that the server chooses


def sent(*models) -> Message:
    return Message(tf.stack([tree.to_vector(m) for m in models]), tf.fill([len(models)], True))


def visited(algorithm, data, client, w, old):
    """The state of a client that was there before."""
    state = initial_states(algorithm, data.population)[client]
    return state._replace(theta=w, old=old, started=tf.constant(True))


def better(data, client, w, steps):
    """A model that fits this client better: some steps of gradient descent."""
    return local_solver(eta=0.2, steps=steps)(client_loss(data.model), w, data.visit(client))[0]


def test_weights_are_the_papers(data):
    """Two models that help, one that does not, one that is no model."""
    algorithm, old = fedfomo(data.model, data.population, **FULL, **VISITED), shared(data)
    w = shared(data, seed=8)
    models = [better(data, 2, old, 3), tree.scale(5.0, shared(data, seed=5)), better(data, 2, old, 9)]
    message = sent(*models, better(data, 2, old, 20))._replace(valid=tf.constant([True, True, True, False]))
    output = algorithm.client_update(message, visited(algorithm, data, 2, w, old), data.visit(2))
    loss, u = loss_of(data, 2), []
    for m in models:
        apart = tree.subtract(m, old)
        u.append(max(0.0, float((loss(old) - loss(m)) / (tf.sqrt(tree.dot(apart, apart)) + EPSILON))))
    assert u[0] > 0 and u[1] == 0 and u[2] > 0
    weights = output.update.weights.numpy()
    assert distance(weights, np.array([*u, 0]) / sum(u)) < 1e-9
    assert (weights >= 0).all() and abs(weights.sum() - 1) < 1e-9
    mixed = tree.add(tree.scale(weights[0], models[0]), tree.scale(weights[2], models[2]))
    assert distance(output.state.old, mixed) < 1e-9  # where local training starts
    by_steps = tree.add_scaled(
        tree.add_scaled(old, weights[0], tree.subtract(models[0], old)), weights[2], tree.subtract(models[2], old)
    )
    assert distance(mixed, by_steps) < 1e-9  # "old + sum of steps towards the others", as the paper has it
    trained, _ = local_solver(eta=0.1, steps=3)(client_loss(data.model), mixed, data.visit(2))
    assert distance(output.state.theta, trained) < 1e-9
    assert identical(output.update.model, tree.to_vector(output.state.theta))
    assert identical(algorithm.local_model(message, output), output.state.theta)


@pytest.mark.slow
@pytest.mark.parametrize("which", slow_but(["worse", "none"], "worse"))
@pytest.mark.parametrize("own_model", slow_but(["always", "visited"], "always"))
def test_where_nobody_helps_the_model_stays(data, which, own_model):
    algorithm = fedfomo(data.model, data.population, own_model=own_model, **FULL)
    old = better(data, 2, shared(data), 200)
    w = better(data, 2, old, 10)
    message = sent(shared(data, seed=5), shared(data, seed=6))
    if which == "none":
        message = sent(w, w)._replace(valid=tf.constant([False, False]))
    output = algorithm.client_update(message, visited(algorithm, data, 2, w, old), data.visit(2))
    assert not output.update.weights.numpy().any()
    assert identical(output.state.old, w)
    trained, _ = local_solver(eta=0.1, steps=3)(client_loss(data.model), w, data.visit(2))
    assert distance(output.state.theta, trained) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("candidates", "cohorts"), slow_but([(1, [range(5)] * 5), (3, [[1]] * 4)], (3, [[1]] * 4)))
def test_with_only_its_own_model_it_is_local_training(data, candidates, cohorts):
    """P starts as the identity, so that of one candidate a client gets its own; or nobody else was there."""
    options = {"candidates": candidates, "validation_fraction": 0.0} | SOLVER | VISITED
    algorithm = fedfomo(data.model, data.population, **options)
    start = {i: s.theta for i, s in initial_states(algorithm, data.population).items()}  # heads of all classes
    expected, alone = dict(start), local_solver(**SOLVER)
    for t, cohort in enumerate(cohorts, 1):
        for i in cohort:
            expected[i] = alone(client_loss(data.model), expected[i], data.visit(i, t))[0]
    _, states = play(algorithm, data, cohorts)
    assert distance({i: s.theta for i, s in states.items()}, expected) < 1e-9
    assert distance(expected, start) > 1e-2


@pytest.mark.slow
def test_a_client_never_trains_on_its_validation_examples(data):
    """They are drawn at its first visit and stay the same; others may be anything."""
    algorithm = fedfomo(data.model, data.population, validation_fraction=0.3, **SOLVER)
    state = initial_states(algorithm, data.population)[1]
    nothing = algorithm.message(algorithm.init_server(), tf.constant(1))
    first = algorithm.client_update(nothing, state, data.visit(1, 1))
    assert identical(first.state.split, client_key(0, 1, [1])[0])
    later = algorithm.client_update(nothing, first.state, data.visit(1, 5))
    assert identical(later.state.split, first.state.split)

    visit = data.visit(1, 5)
    rows = visit._replace(x=tf.range(9), key=first.state.split)
    support, query = support_and_query(rows, 0.3)
    assert sorted([*support.x.numpy(), *query.x.numpy()]) == list(range(9)) and len(query.x) == 3
    for part, same in ((query, True), (support, False)):
        x = tf.tensor_scatter_nd_add(visit.x, part.x[:1, None], [[3.0, 1.0, -2.0, 1.0]])
        other = algorithm.client_update(nothing, first.state, visit._replace(x=x))
        assert identical(other.state.theta, later.state.theta) == same

    # and the weights come from them: another example there changes a weight, one of the others does not
    algorithm = fedfomo(data.model, data.population, validation_fraction=0.3, **SOLVER, **VISITED)
    message = sent(better(data, 1, first.state.old, 2), better(data, 1, first.state.old, 15))
    weights = algorithm.client_update(message, first.state, visit).update.weights
    assert (weights.numpy() > 0).all()
    for part, same in ((query, False), (support, True)):
        x = tf.tensor_scatter_nd_add(visit.x, part.x[:1, None], [[0.3, 0.1, -0.2, 0.1]])
        other = algorithm.client_update(message, first.state, visit._replace(x=x))
        assert identical(other.update.weights, weights) == same


@pytest.mark.parametrize("own_model", ["always", "visited"])
def test_candidates_are_the_last_uploads_that_helped_most(data, own_model):
    """Of equals the one with the lowest id; with 'always' never the client's own, which it has."""
    algorithm = fedfomo(data.model, data.population, candidates=3, own_model=own_model, **FULL)
    models = tf.reshape(tf.range(5.0 * 4), [5, 4])
    models = tf.concat([models, tf.zeros([5, len(tree.to_vector(shared(data))) - 4])], 1)
    P = tf.constant([[1, 5, 0, 7, 3], [0, 0, 0, 0, 0.0], [9, 1, 1, 2, 1], [0] * 5, [0, 0, 0, 0, 1]], tf.float64)
    server = algorithm.init_server()._replace(
        models=tf.cast(models, tf.float64), P=P, last=tf.constant([False, True, True, True, True])
    )
    chosen = {
        "visited": ((0, [3, 1, 4]), (1, [1, 2, 3]), (2, [3, 1, 2]), (4, [4, 1, 2])),
        "always": ((0, [3, 1, 4]), (1, [2, 3, 4]), (2, [3, 1, 4]), (4, [1, 2, 3])),
    }
    for client, expected in chosen[own_model]:
        message = algorithm.message(server, tf.constant(client))
        assert message.models.numpy()[:, 0].tolist() == [4.0 * i for i in expected] and message.valid.numpy().all()
    few = algorithm.message(server._replace(last=tf.constant([False, False, True, False, True])), tf.constant(0))
    assert few.valid.numpy().tolist() == [True, True, False]
    assert few.models.numpy()[:2, 0].tolist() == [16.0, 8.0]
    assert not algorithm.message(algorithm.init_server(), tf.constant(0)).valid.numpy().any()


def test_no_more_candidates_than_a_cohort_has():
    for sampling, expected in (
        (Sampling("fixed", 0.4), 2),
        (Sampling("range", low=1, high=3), 3),
        (Sampling("binomial", 0.2), 5),
        (Sampling(), 5),
    ):
        data = toy(sampling=sampling)
        algorithm = fedfomo(data.model, data.population)
        assert algorithm.message(algorithm.init_server(), tf.constant(0)).models.shape[0] == expected
        assert fedfomo(data.model, data.population, candidates=1).message(
            algorithm.init_server(), tf.constant(0)
        ).models.shape[0] == 1  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", slow_but([0.0, 0.5], 0.5))
def test_the_server_credits_those_whose_models_were_sent(data, epsilon):
    """P grows by the normalized weights, in the columns of the candidates; absent rows stay. Uploads are kept."""
    algorithm = fedfomo(data.model, data.population, candidates=2, epsilon=epsilon, **FULL, **VISITED)
    cohorts = [(0, 1, 2), (0, 3), (1, 3, 4), (0, 1, 4)]
    server, states, P = algorithm.init_server(), initial_states(algorithm, data.population), np.eye(5)
    assert identical(server.P, P)
    before, credited = (), 0
    for t, cohort in enumerate(cohorts, 1):
        outputs = {}
        for i in cohort:
            message = algorithm.message(server, tf.constant(i))
            outputs[i] = algorithm.client_update(message, states[i], data.visit(i, t))
            weights = outputs[i].update.weights.numpy()
            assert (weights >= 0).all() and (abs(weights.sum() - 1) < 1e-9 or not weights.any())
            for model, weight, valid in zip(message.models, weights, message.valid, strict=True):
                [j] = [j for j in range(5) if identical(model, server.models[j]) and (not valid or j in before)][:1]
                P[i, j] += weight
                credited += weight > 0
        [server], states = play(algorithm, data, [cohort], server, states, first=t)
        assert distance(server.P, P) < 1e-9 and int(server.rounds) == t
        for i in cohort:
            assert distance(server.models[i], outputs[i].update.model) < 1e-12
        assert [i for i in range(5) if server.last[i]] == sorted(cohort)
        before = cohort
    assert credited >= 4


@pytest.mark.slow
def test_exploration_draws_from_the_last_uploads(data):
    """With epsilon = 1 candidates differ from client to client and from round to round, and are a function of both."""
    algorithm = fedfomo(data.model, data.population, candidates=1, epsilon=1.0, **FULL, **VISITED)
    vectors = tf.tile(tf.range(5, dtype=tf.float64)[:, None], [1, len(tree.to_vector(shared(data)))])
    last = tf.constant([True, True, False, True, True])
    drawn = []
    for t in range(40):
        server = algorithm.init_server()._replace(models=vectors, last=last, rounds=tf.constant(t))
        drawn.append([int(algorithm.message(server, tf.constant(i)).models[0, 0]) for i in range(5)])
        assert drawn[-1] == [int(algorithm.message(server, tf.constant(i)).models[0, 0]) for i in range(5)]
    counts = np.bincount(np.ravel(drawn), minlength=5)
    assert counts[2] == 0 and (np.delete(counts, 2) > 25).all()  # 50 expected of each, with a deviation of 6
    assert len({tuple(d) for d in drawn}) > 30
    half = fedfomo(data.model, data.population, candidates=1, epsilon=0.5, **FULL, **VISITED)
    servers = [half.init_server()._replace(models=vectors, last=last, rounds=tf.constant(t)) for t in range(60)]
    own = sum(int(half.message(s, tf.constant(i)).models[0, 0]) == i for s in servers for i in (0, 3))
    assert 50 < own < 100  # 120 messages; its own where there is no exploration, or by chance: 75 expected


@pytest.mark.slow
@pytest.mark.parametrize("init", slow_but(["w0", "mean"], "w0"))
def test_who_never_came_who_left_and_who_joins_late(data, init):
    algorithm = fedfomo(data.model, data.population, candidates=5, init=init, **FULL)
    path, states = play(algorithm, data, [(0, 1, 2), (1, 2), (1, 2)])
    server, first = path[-1], initial_states(algorithm, data.population)
    assert identical(states[4], first[4]) and identical(server.P[4], np.eye(5)[4])
    message = algorithm.message(server, tf.constant(4))
    assert message.valid.numpy().sum() == 2  # client 0 left: its upload is no longer sent
    start = first[4].theta
    if init == "mean":
        start = tree.scale(0.5, tree.add(states[1].theta, states[2].theta))
    assert distance(algorithm.personal_model(message, states[4], data.visit(4)), start) < 1e-9
    assert identical(algorithm.personal_model(message, states[0], data.visit(0)), states[0].theta)
    weights = algorithm.client_update(message, states[4], data.visit(4)).update.weights.numpy()
    loss = loss_of(data, 4)
    assert ((weights > 0)[message.valid] == [bool(loss(states[i].theta) < loss(start)) for i in (1, 2)]).all()
    nothing = algorithm.message(algorithm.init_server(), tf.constant(4))
    assert identical(algorithm.personal_model(nothing, first[4], data.visit(4)), first[4].theta)  # nobody's models yet


def test_the_own_model_is_a_candidate_after_a_pause_too(data):
    """Somebody's model is better than theta_i^old and worse than theta_i: it does not replace theta_i as a whole."""
    old = shared(data)
    w, other = better(data, 2, old, 30), better(data, 2, old, 3)
    loss = loss_of(data, 2)
    assert loss(w) < loss(other) < loss(old)
    gains = [(loss(old) - loss(m)) / (tf.sqrt(tree.dot(*2 * [tree.subtract(m, old)])) + EPSILON) for m in (other, w)]
    share = float(gains[0] / (gains[0] + gains[1]))
    starts = {}
    for own_model in ("always", "visited"):
        algorithm = fedfomo(data.model, data.population, own_model=own_model, **FULL)
        output = algorithm.client_update(sent(other), visited(algorithm, data, 2, w, old), data.visit(2))
        starts[own_model] = output.state.old
        weight = share if own_model == "always" else 1.0
        assert output.update.weights.shape == (1,) and abs(float(output.update.weights[0]) - weight) < 1e-9
    assert distance(starts["always"], tree.add_scaled(w, share, tree.subtract(other, w))) < 1e-9
    assert distance(starts["visited"], other) < 1e-9 and loss(starts["visited"]) > loss(w)


def test_with_own_candidates_only_others_are_credited(data):
    """P grows by the weights of the models that were sent; the diagonal, the own model, stays 1."""
    path, _ = play(fedfomo(data.model, data.population, candidates=3, **FULL), data, [(0, 1, 2), (0, 1, 3), (1, 3)])
    P = path[-1].P.numpy()
    assert (np.diag(P) == 1).all() and (P - np.eye(5) > 0).any()
    assert ((P - np.eye(5)).sum(1) <= 2 + 1e-9).all()  # at most 1 a visit


def test_refusals(data):
    wrong = [
        {"own_model": "never"},
        {"candidates": 0},
        {"validation_fraction": 1.5},
        {"epsilon": -0.1},
        {"init": "x"},
        {"eta": -1.0},
    ]
    for options in [*wrong, {"epochs": 0}]:
        with pytest.raises(ValueError, match=next(iter(options))):
            fedfomo(data.model, data.population, **options)
