"""The optimizers against those of Keras, over several steps."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfpfl.algorithms.parts.optimizers import OPTIMIZERS, adam, optimizer, sgd

KERAS = {
    "sgd": (sgd(0.25), keras.optimizers.SGD(0.25)),
    "momentum": (sgd(0.25, momentum=0.5), keras.optimizers.SGD(0.25, momentum=0.5)),
    "adam": (adam(0.25, 0.875, 0.96875, 2**-20), keras.optimizers.Adam(0.25, 0.875, 0.96875, 2**-20)),
}  # numbers that float32 holds exactly: Keras keeps its rates in it


def gradients(w):
    """Of something curved, so that a wrong step shows in the next one."""
    return tuple(tf.sin(3 * x) + x for x in w)


@pytest.mark.parametrize("name", KERAS)
def test_steps_are_those_of_keras(name):
    ours, theirs = KERAS[name]
    weights = (tf.constant([0.5, -1.0, 2.0], tf.float64), tf.constant([[1.5]], tf.float64))
    variables = [tf.Variable(w) for w in weights]
    slots = ours.init(weights)
    for _ in range(7):
        theirs.apply_gradients(zip(gradients([tf.convert_to_tensor(v) for v in variables]), variables, strict=True))
        slots, weights = ours.step(slots, weights, gradients(weights))
    for w, v in zip(weights, variables, strict=True):
        assert w.dtype == tf.float64
        # Keras writes Adam's step as lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + epsilon): its epsilon is not scaled.
        np.testing.assert_allclose(w, v, rtol=0, atol=2e-5 if name == "adam" else 1e-12)


def test_adam_is_algorithm_1_of_its_paper():
    rate, beta_1, beta_2, epsilon = 0.1, 0.9, 0.999, 1e-3
    ours = adam(rate, beta_1, beta_2, epsilon)
    w, m, v = np.array([0.5, -1.0, 2.0]), 0.0, 0.0
    weights = (tf.constant(w),)
    slots = ours.init(weights)
    for t in range(1, 6):
        g = np.sin(3 * w) + w
        m, v = beta_1 * m + (1 - beta_1) * g, beta_2 * v + (1 - beta_2) * g**2
        w = w - rate * (m / (1 - beta_1**t)) / (np.sqrt(v / (1 - beta_2**t)) + epsilon)
        slots, weights = ours.step(slots, weights, gradients(weights))
    np.testing.assert_allclose(weights[0], w, atol=1e-12)
    assert int(slots.step) == 5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_structures_and_dtypes_stay(name):
    for dtype in (tf.float32, tf.float64):
        weights = {"a": tf.ones([2], dtype), "b": (tf.ones([], dtype),)}
        step = optimizer(name, 0.1)
        slots = step.init(weights)
        new_slots, new_weights = step.step(slots, weights, weights)
        for old, new in ((slots, new_slots), (weights, new_weights)):
            tf.nest.assert_same_structure(old, new)
            pairs = zip(tf.nest.flatten(old), tf.nest.flatten(new), strict=True)
            assert all(o.dtype == n.dtype and o.shape == n.shape for o, n in pairs)


def test_bad_requests():
    with pytest.raises(ValueError, match="unknown optimizer 'lion': one of sgd, momentum, adam"):
        optimizer("lion", 0.1)
    with pytest.raises(ValueError, match="must not be negative, found -0.1"):
        optimizer("sgd", -0.1)
