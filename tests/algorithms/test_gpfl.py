"""GPFL: its listing written out by GradientTape over rounds with absent clients, for conditions of both tables."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.normalized import model_for
from helpers.quick import quick
from helpers.rounds import COHORTS, nothing_arrives, play
from helpers.toys import distance, gradient, identical, initial_states, toy, toy_of
from tfpfl.algorithms import build_algorithm, gpfl
from tfpfl.algorithms.gpfl import Shared, branch, unit
from tfpfl.algorithms.gpfl import distance as away
from tfpfl.checks import InvalidArgument
from tfpfl.models import tree
from tfpfl.models.valve import ValvedModel, with_valve
from tfpfl.studies import battery

WORK = {"eta": 0.1, "steps": 3}


def half(b, c):
    h = tf.maximum(tf.reshape(c[None] @ b.kernel, [-1]) + b.bias, 0)
    mean, variance = tf.nn.moments(h, 0)
    return (h - mean) / (variance + 1e-5) ** 0.5 * b.scale + b.shift


def valve(v, phi, c):
    return tf.maximum((1 + half(v.gamma, c)) * phi + half(v.beta, c), 0)


def cross(z, y):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, z))


def risk(data, i, g, p, frozen, lam):
    """What client i minimizes, of (theta, table, valve, head)."""
    x, y = data.data[i]
    frozen = tf.identity(frozen)  # the tape must not take it for the table that is trained

    def of(theta, table, v, head):
        phi = data.model.features(theta, tf.constant(x))
        s = valve(v, phi, g)
        z = valve(v, phi, p) @ head.kernel + head.bias
        cosines = tf.math.l2_normalize(s, 1, 1e-24) @ tf.transpose(tf.math.l2_normalize(table, 1))
        return cross(z, y) + cross(cosines, y) + lam * tf.norm(s - tf.gather(frozen, y))

    return of


def conditions(data, i, table):
    y = data.data[i][1]
    return tf.reduce_mean(table, 0), tf.add_n([table[k] for k in y.tolist()]) / len(y)


@pytest.mark.parametrize("which", slow_but(["received", "trained"], "received", ci=("trained",)))
def test_rounds_are_written_out(data, which):
    algorithm = gpfl(data.model, data.population, lam=0.3, mu=0.2, conditions=which, **WORK)
    path, states = play(algorithm, data)
    server, start = algorithm.init_server(), initial_states(algorithm, data.population)
    heads = {i: start[i].head for i in data.ids}
    zeros = tf.zeros([data.model.num_features], tf.float64)
    old = dict.fromkeys(data.ids, (zeros, zeros))
    for t, cohort in enumerate(COHORTS):
        total, moved = sum(data.population.num_examples[i] for i in cohort), tree.zeros_like(server)
        for i in cohort:
            g, p = conditions(data, i, server.table) if which == "received" else old[i]
            now = (*server, heads[i])
            for _ in range(3):
                by = gradient(risk(data, i, g, p, server.table, 0.3), *now)
                decay = (tree.zeros_like(now[0]), now[1], now[2], tree.zeros_like(now[3]))
                now = tree.add_scaled(now, -0.1, tree.add_scaled(by, 0.2, decay))
            heads[i], old[i] = now[3], conditions(data, i, now[1])
            change = tree.subtract(Shared(*now[:3]), server)
            moved = tree.add_scaled(moved, data.population.num_examples[i] / total, change)
        server = tree.add(server, moved)
        assert distance(path[t], server) < 1e-9
    for i in data.ids:
        assert distance(states[i].head, heads[i]) < 1e-9 and distance(tuple(states[i].conditions), old[i]) < 1e-9
        _, p = conditions(data, i, server.table) if which == "received" else old[i]
        x = data.visit(i).x
        found = algorithm.model.logits(algorithm.personal_model(path[-1], states[i], data.visit(i)), x)
        expected = valve(server.valve, data.model.features(server.theta, x), p) @ heads[i].kernel + heads[i].bias
        assert distance(found, expected) < 1e-9


def test_a_visit_with_mini_batches_and_without_the_magnitude(data):
    """With one mini-batch the size of all examples, steps are those with all; with lam = 0 the frozen table is free."""
    algorithm = gpfl(data.model, data.population, lam=0.0, **WORK)
    big = gpfl(data.model, data.population, lam=0.0, batch_size=50, **WORK)
    server, state = algorithm.init_server(), initial_states(algorithm, data.population)[1]
    one, other = (a.client_update(server, state, data.visit(1)) for a in (algorithm, big))
    assert distance(one.update, other.update) < 1e-9
    strong = gpfl(data.model, data.population, lam=0.5, **WORK).client_update(server, state, data.visit(1))
    assert distance(one.update, strong.update) > 1e-3


@pytest.mark.slow
def test_the_magnitude_brings_features_near_to_the_embeddings(data):
    algorithm = gpfl(data.model, data.population, lam=3.0, mu=0.0, eta=0.01, steps=200)
    server, state = algorithm.init_server(), initial_states(algorithm, data.population)[1]
    trained = tree.add(server, algorithm.client_update(server, state, data.visit(1)).update)
    x, y = data.data[1]
    g, _ = conditions(data, 1, server.table)

    def far(at):
        s = valve(at.valve, data.model.features(at.theta, tf.constant(x)), g)
        return float(tf.norm(s - tf.gather(server.table, y)))

    # What the valve lets through is at least 0, so that no features come nearer than the negative part of the table.
    nearest = float(tf.norm(tf.minimum(tf.gather(server.table, y), 0)))
    assert nearest <= far(trained) < nearest + 0.5 * (far(server) - nearest)


def test_parts(data):
    rng = np.random.default_rng(0)
    v = gpfl(data.model, data.population).init_server().valve
    c = tf.constant(rng.standard_normal(data.model.num_features))
    assert distance(branch(v.gamma, c), half(v.gamma, c)) < 1e-12
    rows = tf.constant([[3.0, 4.0], [0.0, 0.0]], tf.float64)
    assert distance(unit(rows), tf.constant([[0.6, 0.8], [0.0, 0.0]], tf.float64)) < 1e-12
    slope = gradient(lambda a: away(a, rows), rows)[0]
    assert float(away(rows, rows)) == 0 and slope.numpy().tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert distance(away(rows, 0 * rows), 5.0) < 1e-12


@pytest.mark.slow
def test_absent_and_new_clients(data):
    some = [(0, 2, 3), (2, 3), (0, 2), (3,)]  # 1 and 4 never come
    algorithm = gpfl(data.model, data.population, **WORK)
    path, states = play(algorithm, data, some)
    fresh = initial_states(algorithm, data.population)
    for i in (1, 4):
        assert identical(states[i], fresh[i])
        found = algorithm.personal_model(path[-1], states[i], data.visit(i))
        assert identical(found.head, fresh[i].head) and identical(found.theta[:-2], path[-1].theta)
    assert identical(nothing_arrives(algorithm, data, path[-1]), path[-1])
    carry = algorithm.adapt.start(path[-1], fresh[1], data.visit(1))
    before = algorithm.adapt.model(carry)
    after = algorithm.adapt.model(algorithm.adapt.epoch(carry, data.visit(1), tf.constant(0)))
    assert identical(before.theta, after.theta) and distance(before.head, after.head) > 1e-6


def test_the_model_has_a_valve(data):
    model = with_valve(data.model)
    assert isinstance(model, ValvedModel) and with_valve(model) is model and model.inner is data.model
    theta, x, m = data.model.theta(), data.visit(1).x, data.model.num_features
    scale, shift = tf.constant(np.linspace(-1, 2, m)), tf.constant(np.linspace(1, -1, m))
    expected = tf.nn.relu(data.model.features(theta, x) * scale + shift)
    assert distance(model.features((*theta, scale, shift), x), expected) < 1e-12
    assert distance(model.features(model.theta(), x), tf.nn.relu(data.model.features(theta, x))) < 1e-12
    again = gpfl(model, data.population, **WORK)  # as a run builds it
    assert identical(again.init_server(), gpfl(data.model, data.population, **WORK).init_server())
    assert again.model is model
    with pytest.raises(InvalidArgument, match="cannot have train_from, adapters"):
        gpfl(toy(adapters="lora:2").model, data.population)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lam", -1.0), ("mu", -1.0), ("conditions", "no"), ("weighting", "q"), ("head_init", "no"), ("eta", -1.0)]
    + [("steps", 0), ("momentum", -1.0)],
)
def test_a_bad_hyperparameter_is_refused_by_name(data, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        gpfl(data.model, data.population, **{name: value})


def test_kinds_without_classes_are_refused():
    other = toy_of("regression")
    with pytest.raises(ValueError, match="GPFL is for classification only"):
        gpfl(other.model, other.population)


@pytest.mark.slow
def test_a_round_that_is_run_again_and_again_has_the_same_bits(tmp_path):
    """TensorFlow learns in some rounds which operations are short; a sum of three terms then began with another one."""
    federation = battery.small_federation(tmp_path / "federation")
    algorithm = build_algorithm("gpfl", model_for("gpfl"), battery.small_population(federation), **quick("gpfl"))
    subject = battery.Subject(algorithm, federation)
    visits, states = subject.visits([1, 5], 7), subject.trained.states([1, 5])
    first = subject.engine.next(subject.trained.server, states, visits)
    for _ in range(100):
        assert identical(subject.engine.next(subject.trained.server, states, visits), first)
