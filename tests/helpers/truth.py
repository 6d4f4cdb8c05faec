"""The expected results of a device's computations, by GradientTape, and inputs for them."""

import numpy as np
import tensorflow as tf

from tflite_export.convert.program import flatten
from tfpfl.models import tree
from tfpfl.models.losses import cross_entropy
from tfpfl.models.weights import Head


def varied(model, seed=0):
    """The model's initial theta plus noise, so that the biases are not 0."""
    rng = np.random.default_rng(seed)
    return tuple(
        w + np.float32(0.02) * np.asarray(rng.standard_normal(w.shape), np.float32) for w in model.initial_theta
    )


def examples(model, num_examples, num_classes, seed=1):
    """Half noise; half drawings of constant regions, in which windows have several equal maxima. Or tokens."""
    rng = np.random.default_rng(seed)
    if model.reads == "whole":
        x = rng.integers(0, model.vocabulary, (num_examples, *model.input_shape)).astype(np.int32)
        return x, rng.integers(0, num_classes, num_examples).astype(np.int32)
    x = rng.random((num_examples, *model.input_shape), np.float32)
    x[: num_examples // 2] = x[: num_examples // 2].round()
    return x, rng.integers(0, num_classes, num_examples).astype(np.int32)


def random_head(model, num_classes, seed=2):
    rng = np.random.default_rng(seed)
    kernel = 0.3 * rng.standard_normal((model.num_features, num_classes))
    return Head(kernel.astype(np.float32), 0.1 * rng.standard_normal(num_classes).astype(np.float32))


def true_gradient(model, theta, head, x, y):
    """(loss, dtheta, dkernel, dbias) of the whole objective by one GradientTape."""
    theta, head = tf.nest.map_structure(tf.constant, (theta, head))
    with tf.GradientTape() as tape:
        tape.watch((theta, head))
        loss = cross_entropy(tf.matmul(model.features(theta, x), head.kernel) + head.bias, y)
    dtheta, dhead = tape.gradient(loss, (theta, head))
    return float(loss), flatten(tree.dense(dtheta)), *map(np.asarray, dhead)


def true_steps(phi, y, head, steps, beta):
    """Gradient descent on the head, by GradientTape."""
    head = tf.nest.map_structure(tf.constant, head)
    for _ in range(steps):
        with tf.GradientTape() as tape:
            tape.watch(head)
            loss = cross_entropy(tf.matmul(phi, head.kernel) + head.bias, y)
        head = tf.nest.map_structure(lambda w, g: w - beta * g, head, tape.gradient(loss, head))
    return Head(*map(np.asarray, head))


def runner(content, signature):
    return tf.lite.Interpreter(model_content=content).get_signature_runner(signature)


def relative(found, expected):
    """The largest error in units of the largest number."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def relative_l2(found, expected):
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
