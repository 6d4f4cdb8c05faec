"""FedCP: its listing written out by GradientTape over rounds with absent clients; its limits; its parts in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.rounds import by_hand, nothing_arrives, play
from helpers.toys import distance, gradient, identical, initial_states, toy_of
from tfpfl.algorithms import build_algorithm, fedcp, get_method
from tfpfl.algorithms.fedcp import Policy, Shared, context_of, gates, initial_policy, mmd
from tfpfl.models import SplitModel, tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Head

WORK = {"eta": 0.1, "steps": 3}


def say(phi, v, own, head, policy):
    """What the two heads say together."""
    m, a = phi.shape[1], (phi * v) @ policy.kernel + policy.bias
    mean, variance = tf.nn.moments(a, 1, keepdims=True)
    a = tf.maximum((a - mean) / (variance + 1e-5) ** 0.5 * policy.scale + policy.shift, 0)
    r, s = (tf.exp(part) / (tf.exp(a[:, :m]) + tf.exp(a[:, m:])) for part in (a[:, :m], a[:, m:]))
    return (r * phi) @ own.kernel + own.bias + (s * phi) @ head.kernel + head.bias


def apart(a, b):
    """The MMD, from the difference of each pair."""

    def k(p, q):
        squares = tf.reduce_sum((p[:, None] - q[None]) ** 2, 2)
        return sum(tf.reduce_mean(tf.exp(-squares / (2 * c))) for c in (10.0, 15.0, 20.0, 50.0))

    return k(a, a) + k(b, b) - 2 * k(a, b)


def direction(own):
    return tf.reduce_sum(own.kernel, 1) / tf.norm(tf.reduce_sum(own.kernel, 1))


def test_rounds_are_written_out(data):
    lam, cohorts = 30.0, [(0, 2), (1, 2), (0, 2)]  # 3 and 4 never come
    algorithm = fedcp(data.model, data.population, lam=lam, **WORK)
    path, states = play(algorithm, data, cohorts)
    server, heads = algorithm.init_server(), initial_states(algorithm, data.population)
    for t, cohort in enumerate(cohorts):
        total, moved = sum(data.population.num_examples[i] for i in cohort), tree.zeros_like(server)
        for i in cohort:
            x, y = data.data[i]
            theta, head, policy = server
            v, received = direction(heads[i]), data.model.features(theta, tf.constant(x))

            def f(values, x=x, y=y, v=v, received=received, head=head):
                phi = data.model.features(values.theta, tf.constant(x))
                z = say(phi, v, values.head, head, values.policy)
                cross = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, z))
                return cross + lam * apart(phi, received)

            trained = by_hand(f, Shared(theta, heads[i], policy), 0.1, 3)
            heads[i], change = trained.head, tree.subtract(trained, server)
            change = change._replace(head=tree.scale(0.5, change.head))
            moved = tree.add_scaled(moved, data.population.num_examples[i] / total, change)
        server = tree.add(server, moved)
        assert distance(path[t], server) < 1e-9
    for i in data.ids:
        assert distance(states[i], heads[i]) < 1e-9
        phi = data.model.features(server.theta, data.visit(i).x)
        found = algorithm.predictor(path[-1], states[i], data.visit(i))(phi)
        assert distance(found, say(phi, direction(heads[i]), heads[i], server.head, server.policy)) < 1e-9


@pytest.mark.slow
def test_the_mmd_holds_features_near_to_those_of_the_received_backbone(data):
    """It is not in lam = 0, and with a large lam features stay where they were."""
    algorithms = [fedcp(data.model, data.population, lam=lam, eta=0.01, steps=60) for lam in (0.0, 200.0)]
    server, state = algorithms[0].init_server(), initial_states(algorithms[0], data.population)[1]
    x, moved = data.visit(1).x, []
    for algorithm in algorithms:
        theta = tree.add(server, algorithm.client_update(server, state, data.visit(1)).update).theta
        moved.append(float(mmd(data.model.features(theta, x), data.model.features(server.theta, x))))
    assert moved[1] < 0.5 * moved[0]


def silent(policy: Policy, sign: float) -> Policy:
    """A policy that opens all gates of the personal head (sign 1), of the global head (-1), or both by half (0)."""
    m = policy.kernel.shape[0]
    shift = np.repeat([max(sign, 0.0), max(-sign, 0.0)], m) * 100
    return policy._replace(scale=tf.zeros_like(policy.scale), shift=tf.constant(shift))


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_limits_in_which_it_is_another_model(data, sign):
    """Gates that are all open are a head on all features; half open ones are those of `personal_model`."""
    algorithm = fedcp(data.model, data.population, lam=0.0, **WORK)
    server, visit = algorithm.init_server(), data.visit(1)
    rng = np.random.default_rng(5)
    own = Head(*(tf.constant(rng.standard_normal(w.shape)) for w in server.head))
    server = server._replace(policy=silent(server.policy, sign))
    phi = data.model.features(server.theta, visit.x)
    kernel = {1.0: own.kernel, -1.0: server.head.kernel, 0.0: (own.kernel + server.head.kernel) / 2}[sign]
    expected = phi @ kernel + own.bias + server.head.bias
    assert distance(algorithm.predictor(server, own, visit)(phi), expected) < 1e-9
    if sign == 0:
        assert distance(data.model.logits(algorithm.personal_model(server, own, visit), visit.x), expected) < 1e-9
    if sign == 1:  # then a visit trains theta and W_i as FedPer's, on a head with the global bias beside its own
        objective = client_loss(data.model)

        def of(values):
            weights = algorithm.personal_model(server, own, visit)
            head = Head(values.head.kernel, values.head.bias + server.head.bias)
            return objective(weights._replace(theta=values.theta, head=head), visit.x, visit.y)

        trained = by_hand(of, Shared(server.theta, own, ()), 0.1, 3)
        output = algorithm.client_update(server, own, visit)
        assert distance(output.state, trained.head) < 1e-9
        assert distance(tree.add(server.theta, output.update.theta), trained.theta) < 1e-9


def test_mini_batches(data):
    """With one mini-batch the size of all examples, steps are those with all; smaller ones differ."""
    all_of_them, big, small = (fedcp(data.model, data.population, batch_size=size, **WORK) for size in (None, 50, 2))
    server, state = big.init_server(), initial_states(big, data.population)[1]
    one, other, third = (a.client_update(server, state, data.visit(1)).update for a in (all_of_them, big, small))
    assert distance(one, other) < 1e-9 and distance(one, third) > 1e-4


def test_parts(data):
    rng = np.random.default_rng(0)
    phi = tf.constant(rng.standard_normal((6, data.model.num_features)))
    policy, own = initial_policy(data.model), Head(tf.constant(rng.standard_normal((phi.shape[1], 3))), None)
    v = context_of(own)
    assert distance(v, direction(own)) < 1e-12
    assert not np.any(context_of(Head(tf.zeros_like(own.kernel), None)))  # and no NaN
    r = gates(policy, v, phi).numpy()
    assert (r > 0).all() and (r < 1).all() and r.std(0).min() > 1e-3  # each example has gates of its own
    other = tf.constant(rng.standard_normal((6, phi.shape[1])))
    assert abs(float(mmd(phi, other)) - float(apart(phi, other))) < 1e-12
    slope = gradient(lambda a: mmd(a, phi), tf.identity(phi))[0]
    assert abs(float(mmd(phi, phi))) < 1e-12 and distance(slope, 0 * phi) < 1e-12
    again = SplitModel(data.model.backbone, seed=1)
    assert not identical(initial_policy(again), policy) and identical(initial_policy(data.model), policy)


@pytest.mark.slow
def test_absent_and_new_clients(data):
    some = [(0, 2, 3), (2, 3)]  # 1 and 4 never come
    algorithm = fedcp(data.model, data.population, **WORK)
    path, states = play(algorithm, data, some)
    fresh, visit = initial_states(algorithm, data.population), data.visit(1)
    assert identical(states[1], fresh[1]) and identical(states[4], algorithm.init_server().head)
    assert identical(nothing_arrives(algorithm, data, path[-1]), path[-1])
    adapt, phi = algorithm.adapt, data.model.features(path[-1].theta, visit.x)
    carry, losses = adapt.start(path[-1], fresh[1], visit), []
    assert distance(adapt.predictor(carry, visit)(phi), algorithm.predictor(path[-1], fresh[1], visit)(phi)) < 1e-12
    for n in range(20):
        losses.append(float(data.model.kind.loss(adapt.predictor(carry, visit)(phi), visit.y)))
        carry = adapt.epoch(carry, visit, tf.constant(n))
    assert all(after < before for before, after in zip(losses, losses[1:], strict=False))
    theta, head, policy = path[-1]
    v = direction(fresh[1])
    first = by_hand(  # the first epoch: a step of the new client's head alone
        lambda own: data.model.kind.loss(say(phi, v, own, head, policy), visit.y), fresh[1], 0.1, 1
    )
    assert distance(adapt.epoch(adapt.start(path[-1], fresh[1], visit), visit, tf.constant(0)).head, first) < 1e-9


@pytest.mark.slow
def test_gates_matter(data):
    """What clients predict is not what they would with gates of 1/2, the head of `personal_model`."""
    algorithm = fedcp(data.model, data.population, **WORK)
    path, states = play(algorithm, data, [(0, 1, 2, 3, 4)])
    differs = 0.0
    for i in data.ids:
        visit = data.visit(i)
        weights = algorithm.personal_model(path[-1], states[i], visit)
        z = algorithm.predictor(path[-1], states[i], visit)(data.model.features(weights.theta, visit.x))
        differs = max(differs, distance(z, data.model.logits(weights, visit.x)))
    assert differs > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["regression", "multilabel"])
def test_other_kinds(kind):
    """Every kind's loss is minimized: a visit with lam = 0 lowers it."""
    data = toy_of(kind)
    algorithm = build_algorithm("fedcp", data.model, data.population, lam=0.0, eta=0.02, steps=40)
    server, state, visit = algorithm.init_server(), initial_states(algorithm, data.population)[1], data.visit(1)

    def loss(at, own):
        phi = data.model.features(at.theta, visit.x)
        return float(data.model.kind.loss(algorithm.predictor(at, own, visit)(phi), visit.y))

    output = algorithm.client_update(server, state, visit)
    moved = tree.add(server, output.update)
    assert loss(Shared(moved.theta, server.head, moved.policy), output.state) < 0.95 * loss(server, state)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lam", -1.0), ("lam", float("nan")), ("weighting", "q"), ("eta", -1.0), ("steps", 0), ("momentum", -1.0)]
    + [("batch_size", 0), ("epochs", 0)],
)
def test_a_bad_hyperparameter_is_refused_by_name(data, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        fedcp(data.model, data.population, **{name: value})


def test_another_objective_is_refused():
    with pytest.raises(ValueError, match="Use fedper or fedrep"):
        get_method("fedcp").check_objective("fair:1")
