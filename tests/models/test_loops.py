"""Loops over passes with max pooling call a function that is not inlined; others stay as they are."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfpfl.algorithms import build_algorithm
from tfpfl.algorithms.contract import ClientData
from tfpfl.algorithms.parts.local_training import value_and_gradient
from tfpfl.data.population import ClientInfo, Population
from tfpfl.models import SplitModel
from tfpfl.models.loops import for_a_loop, training_loop


def calls_apart(graph) -> dict[str, bool]:
    """{function of the graph's library that goes back through max pooling: whether it is not inlined}."""
    library = graph.as_graph_def().library.function
    return {f.signature.name: f.attr["_noinline"].b for f in library if any(n.op == "MaxPoolGrad" for n in f.node_def)}


def called(graph) -> set[str]:
    """The functions that the graph and its functions call."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for f in definition.library.function for node in f.node_def)]
    return {value.func.name for node in nodes for value in node.attr.values() if value.func.name}


def objective(pooled):
    def function(w, x):
        h = tf.nn.conv2d(x, w, 1, "SAME")
        return tf.reduce_sum(tf.square(tf.nn.max_pool2d(h, 2, 2, "SAME") if pooled else h))

    return function


@pytest.mark.parametrize("pooled", [True, False])
def test_steps_in_a_loop_are_the_same_steps(pooled):
    rng = np.random.default_rng(0)
    x, start = tf.constant(rng.normal(size=(5, 6, 6, 1))), tf.constant(rng.normal(size=(3, 3, 1, 2)))
    loss = objective(pooled)

    def step(n, w):
        return n + 1, w - 0.01 * value_and_gradient(lambda w: loss(w, x), w)[1]

    loop = tf.function(lambda w: training_loop(lambda n, w: n < 3, step, (0, w))[1], autograph=False)
    graph = loop.get_concrete_function(start).graph
    apart = [name for name, alone in calls_apart(graph).items() if alone]
    assert bool(apart) == pooled and set(apart) <= called(graph)
    expected = start
    for n in range(3):
        _, expected = step(n, expected)
    np.testing.assert_allclose(loop(start), expected, rtol=1e-13)
    np.testing.assert_allclose(training_loop(lambda n, w: n < 3, step, (0, start))[1], expected, rtol=1e-13)  # eager


@pytest.mark.parametrize("pooled", [True, False])
def test_a_function_that_a_loop_calls(pooled):
    x, w = tf.ones([2, 4, 4, 1], tf.float64), tf.ones([3, 3, 1, 2], tf.float64)
    loss = objective(pooled)
    graph = for_a_loop(lambda w: value_and_gradient(lambda w: loss(w, x), w), w)
    assert graph.function_def.attr["_noinline"].b == pooled
    np.testing.assert_allclose(graph(w)[1], value_and_gradient(lambda w: loss(w, x), w)[1], rtol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedrep", "scaffold", "fedas", "gpfl"])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_local_training_of_every_kind_of_method_goes_through_it(name, batch_size):
    """No gradient of a pooling is in a loop's body: each is in a function that is not inlined."""
    layers = [keras.layers.Conv2D(2, 3, activation="relu"), keras.layers.MaxPooling2D(2), keras.layers.Flatten()]
    model = SplitModel(keras.Sequential([keras.layers.Input((6, 6, 1)), *layers]))
    algorithm = build_algorithm(name, model, Population([9], [3]), batch_size=batch_size)
    info = ClientInfo(np.int32(0), np.int32(9), np.int32(3), np.float32(1))
    data = ClientData(tf.ones([9, 6, 6, 1]), tf.range(9) % 3, info, tf.constant([3, 4]))
    given = algorithm.message(algorithm.init_server()), algorithm.init_client(info), data
    graph = tf.function(algorithm.client_update, autograph=False).get_concrete_function(*given).graph
    found = calls_apart(graph)
    assert found and all(found.values()) and not any(op.type == "MaxPoolGrad" for op in graph.get_operations())


@pytest.mark.parametrize("pooled", [True, False])
def test_a_step_runs_once(pooled):
    """Also what TensorFlow may not drop, such as a print or an assertion in an objective of the user's own."""
    x, w, ran = tf.ones([2, 4, 4, 1], tf.float64), tf.ones([3, 3, 1, 2], tf.float64), []
    loss = objective(pooled)

    def step(n, w):
        tf.py_function(lambda n: ran.append(int(n)), [n], [])
        return n + 1, w - 0.1 * value_and_gradient(lambda w: loss(w, x), w)[1]

    tf.function(lambda w: training_loop(lambda n, w: n < 3, step, (0, w))[1], autograph=False)(w)
    assert ran == [0, 1, 2]
