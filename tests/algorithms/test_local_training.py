"""The client's own SGD: against Keras, and its mini-batches one by one."""

from collections import Counter
from itertools import permutations

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from helpers.rounds import play
from helpers.toys import backbone, distance, gradient, identical, run, toy
from helpers.toys import client_loss as reference_loss
from tfpfl.algorithms import build_algorithm
from tfpfl.algorithms.contract import ClientData
from tfpfl.algorithms.parts.local_training import local_solver, shuffled, value_and_gradient, whole_gradient
from tfpfl.data.population import ClientInfo, Population
from tfpfl.data.randomness import client_key
from tfpfl.models import SplitModel, split, tree
from tfpfl.models.losses import MeanLoss, client_loss
from tfpfl.models.weights import Weights


def client(n, key=(3, 4)) -> ClientData:
    """x are the numbers 0 .. n-1."""
    info = ClientInfo(np.int32(0), np.int32(n), np.int32(2), 1.0)
    return ClientData(tf.range(n, dtype=tf.float64), tf.zeros([n], tf.int32), info, tf.constant(key))


def batches(n, **work):
    """What the solver saw: the examples of every step."""
    seen = []

    def objective(w, x, y):
        tf.py_function(lambda x: seen.append(x.numpy().astype(int).tolist()), [x], [])
        return tf.reduce_sum(w[0])

    solve = tf.function(lambda: local_solver(eta=0.1, **work)(objective, (tf.zeros([1], tf.float64),), client(n)))
    solve()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "batch_size", "sizes"), [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 10, [3]), (5, 1, [1] * 5)]
)
def test_an_epoch_visits_each_example_once_and_keeps_the_last_part(n, batch_size, sizes):
    seen = batches(n, epochs=3, batch_size=batch_size)
    assert [len(b) for b in seen] == 3 * sizes
    per_epoch = [sum(seen[i : i + len(sizes)], []) for i in range(0, len(seen), len(sizes))]
    assert all(sorted(epoch) == list(range(n)) for epoch in per_epoch)
    if n >= 8:
        assert len({tuple(epoch) for epoch in per_epoch}) == 3  # another order every time


@pytest.mark.slow
def test_steps_go_on_into_the_next_epoch():
    seen = batches(10, steps=5, batch_size=4)
    assert [len(b) for b in seen] == [4, 4, 2, 4, 4]
    assert seen == batches(10, epochs=2, batch_size=4)[:5]


def test_the_whole_batch_needs_no_shuffle():
    assert batches(4, steps=2) == [[0, 1, 2, 3]] * 2
    assert batches(4, epochs=2) == [[0, 1, 2, 3]] * 2
    assert len(batches(4)) == 50  # the PFLEGO study's tau


def test_shuffles_are_functions_of_seed_round_client_and_epoch():
    def order(seed=0, round_num=1, client_id=0, epoch=0):
        return tuple(shuffled(30, client_key(seed, round_num, [client_id])[0], epoch).numpy())

    assert order() == order()
    others = [order(seed=1), order(round_num=2), order(client_id=1), order(epoch=1)]
    assert len({order(), *others}) == 5
    assert all(sorted(o) == list(range(30)) for o in others)


@pytest.mark.slow
def test_every_order_is_equally_likely():
    """All 24 of four examples, by the chi-square test. Rotations alone put every example at every place, too."""
    counts = Counter(tuple(shuffled(4, client_key(5, t, [2])[0], 0).numpy().tolist()) for t in range(2400))
    assert set(counts) <= set(permutations(range(4)))
    statistic = sum((counts[order] - 100) ** 2 / 100 for order in permutations(range(4)))
    assert statistic < stats.chi2.isf(1e-4, 23)  # 57; for rotations it is 12,000


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_training_is_that_of_keras(momentum, batch_size):
    """The same batches through keras.optimizers.SGD and GradientTape."""
    data = toy()
    visit = data.visit(1)
    weights = Weights(data.model.theta(), data.model.head(visit.info))
    work = {"eta": 0.25, "epochs": 3, "batch_size": batch_size, "momentum": momentum}
    found, loss = tf.function(lambda w, v: local_solver(**work)(client_loss(data.model), w, v))(weights, visit)

    variables = tf.nest.map_structure(tf.Variable, weights)
    optimizer = keras.optimizers.SGD(0.25, momentum=momentum)
    n, size = len(visit.y), batch_size or len(visit.y)
    for epoch in range(3):
        order = shuffled(n, visit.key, epoch).numpy() if batch_size else np.arange(n)
        for start in range(0, n, size):
            rows = order[start : start + size]
            part = data._replace(data={1: (visit.x.numpy()[rows], visit.y.numpy()[rows])})
            now = tf.nest.map_structure(tf.convert_to_tensor, variables)
            last = reference_loss(part, 1, now.theta, now.head)
            slopes = gradient(lambda w: reference_loss(part, 1, w.theta, w.head), now)  # noqa: B023
            optimizer.apply_gradients(zip(tf.nest.flatten(slopes), tf.nest.flatten(variables), strict=True))
    assert distance(found, variables) < 1e-12
    assert abs(loss - last) < 1e-12


def test_eta_0_goes_nowhere():
    data = toy()
    visit = data.visit(0)
    weights = Weights(data.model.theta(), data.model.head(visit.info))
    solve = local_solver(eta=0.0, steps=3, batch_size=2, momentum=0.9)
    assert identical(solve(client_loss(data.model), weights, visit)[0], weights)


def test_value_and_gradient_of_a_structure_with_an_unused_part():
    w = {"used": tf.constant([2.0, 3.0]), "unused": tf.constant([[1.0]])}
    value, slope = value_and_gradient(lambda w: tf.reduce_sum(w["used"] ** 3), w)
    assert float(value) == 35.0
    np.testing.assert_allclose(slope["used"], [12.0, 27.0])
    np.testing.assert_array_equal(slope["unused"], [[0.0]])


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, found 0"),
        ({"epochs": -1}, "epochs must be at least 1, found -1"),
        ({"batch_size": 0}, "batch_size must be at least 1, found 0"),
        ({"steps": 2.0}, "steps must be a whole number >= 1, found 2.0"),
        ({"epochs": 1, "batch_size": 4.5}, "batch_size must be a whole number >= 1, found 4.5"),
        ({"steps": 1, "epochs": 1}, "in steps or in epochs, not both; found steps=1, epochs=1"),
        ({"eta": -0.1}, "eta must be a finite number >= 0, found -0.1"),
        ({"eta": float("nan")}, "eta must be a finite number >= 0, found nan"),
        ({"momentum": float("inf")}, "momentum must be a finite number >= 0, found inf"),
    ],
)
def test_bad_work_is_refused_by_name(work, message):
    with pytest.raises(ValueError, match=message):
        local_solver(**{"eta": 0.1} | work)


@pytest.mark.parametrize("chunk", [1, 2, 4, 9, 512])
def test_a_whole_gradient_in_chunks_is_the_gradient(chunk):
    """Of nine examples; the last chunk may be smaller."""
    data = toy()
    weights = Weights(data.model.theta(), data.model.shared_head(4))
    objective, visit = client_loss(data.model), data.visit(1)
    assert len(visit.y) == 9
    value, found = tf.function(lambda w: whole_gradient(objective, w, visit, chunk))(weights)
    expected, slope = value_and_gradient(lambda w: objective(w, visit.x, visit.y), weights)
    assert abs(float(value - expected)) < 1e-12 and distance(found, slope) < 1e-12


def convolutional(seed=0, n=37):
    """A convolutional model in float64, one client's examples, and the objective's weights."""
    layers = [
        keras.layers.Input((8, 8, 1), dtype="float64"),
        keras.layers.Conv2D(3, 3, activation="relu", dtype="float64"),
        keras.layers.MaxPooling2D(2, dtype="float64"),
        keras.layers.Flatten(dtype="float64"),
    ]
    model = SplitModel(keras.Sequential(layers))
    assert model.dtype == "float64"
    rng = np.random.default_rng(seed)
    info = ClientInfo(np.int32(0), np.int32(n), np.int32(3), 1.0)
    x, y = tf.constant(rng.normal(size=(n, 8, 8, 1))), tf.constant(np.arange(n) % 3, tf.int32)
    return model, ClientData(x, y, info, tf.constant([3, 4])), Weights(model.theta(), model.shared_head(3))


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_full_batch_steps_in_blocks_are_full_batch_steps(monkeypatch, momentum):
    """37 examples in blocks of 8, against GradientTape on all of them at once."""
    model, data, start = convolutional()
    monkeypatch.setattr(split, "BLOCK_BYTES", 8 * model.activation_bytes)
    objective, sizes = client_loss(model), []
    assert objective.block == 8

    def seen(weights, x, y):
        tf.py_function(lambda y: sizes.append(len(y)), [y], [])
        return objective(weights, x, y)

    solve = local_solver(eta=0.3, steps=3, momentum=momentum)
    found, value = tf.function(lambda w: solve(MeanLoss(seen, objective.block), w, data))(start)
    assert sorted(sizes) == sorted(3 * [8, 8, 8, 8, 5])
    weights, velocity = start, tree.zeros_like(start)
    for _ in range(3):
        expected, slope = value_and_gradient(lambda w: objective(w, data.x, data.y), weights)
        velocity = tree.add_scaled(slope, momentum, velocity)
        weights = tree.add_scaled(weights, -0.3, velocity)
    assert distance(found, weights) < 1e-13 and abs(float(value - expected)) < 1e-13
    assert distance(found, start) > 1e-3


def test_mini_batches_and_objectives_without_a_block_are_not_divided(monkeypatch):
    model, data, start = convolutional()
    monkeypatch.setattr(split, "BLOCK_BYTES", 8 * model.activation_bytes)
    sizes = []

    def seen(weights, x, y):
        tf.py_function(lambda y: sizes.append(len(y)), [y], [])
        return client_loss(model)(weights, x, y)

    tf.function(lambda: local_solver(eta=0.1, epochs=1, batch_size=20)(MeanLoss(seen, 8), start, data))()
    tf.function(lambda: local_solver(eta=0.1, steps=1)(seen, start, data))()
    assert sizes == [20, 17, 37]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedrep", "fedbabu", "scaffold", "pgfed", "ditto"])
def test_a_method_computes_its_full_batch_steps_in_blocks(monkeypatch, name):
    """Blocks change what a client sends by rounding alone."""
    model, data, _ = convolutional()
    updates = []
    for block in (8, 1000):
        monkeypatch.setattr(split, "BLOCK_BYTES", block * model.activation_bytes)
        algorithm = build_algorithm(name, model, Population([37], [3]))
        message = algorithm.message(algorithm.init_server(), *([np.int32(0)] if algorithm.message_per_client else []))
        state = algorithm.init_client(data.info)
        graph = tf.function(algorithm.client_update, autograph=False)
        updates.append(graph(message, state, data).update)
    assert 0 < distance(*updates) < 1e-11


@pytest.mark.parametrize("name", ["fedrep", "fedbabu", "fedas", "fedavg", "pflego"])
def test_a_backbone_without_weights_that_train(name):
    """The head alone learns, where the method trains it."""
    data = toy()
    frozen = backbone()
    frozen.trainable = False
    data = data._replace(model=SplitModel(frozen))
    assert data.model.initial_theta == ()
    server, states = run(build_algorithm(name, data.model, data.population), data)
    assert all(np.isfinite(part).all() for part in tf.nest.flatten((server, states)))


@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize("work", [{"steps": 3}, {"epochs": 2}])
def test_numbers_of_numpy_are_numbers(work, number):
    """NumPy's int64, in which a loop over an array counts, ended round 1 with an error of TensorFlow."""
    data = toy()

    def after(batch_size, **work):
        algorithm = build_algorithm("fedavg", data.model, data.population, eta=0.1, batch_size=batch_size, **work)
        return play(algorithm, data, cohorts=[(0, 2)])[0][-1]

    assert identical(after(number(4), **{name: number(value) for name, value in work.items()}), after(4, **work))
