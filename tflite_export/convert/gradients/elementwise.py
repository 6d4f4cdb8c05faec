"""Gradients of operations that compute every number by itself: arithmetic and activations."""

import math

import tensorflow as tf

from tflite_export.convert.gradients.common import channels_last, constant, unbroadcast, where

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def relu(op, dy):
    return dy * where(op.outputs[0] > 0)


def relu6(op, dy):
    y = op.outputs[0]
    return dy * where(y > 0) * where(y < 6)


def leaky_relu(op, dy):
    positive = where(op.inputs[0] > 0)
    return dy * (positive + op.get_attr("alpha") * (1 - positive))


def elu(op, dy):
    y = op.outputs[0]
    return dy * (1 + tf.minimum(y, 0.0))


def selu(op, dy):
    """At 0, where the two slopes differ, it is that of positive numbers, as in TensorFlow."""
    y = op.outputs[0]
    negative = where(y < 0)
    return dy * (_SELU_SCALE * (1 - negative) + (y + _SELU_SCALE * _SELU_ALPHA) * negative)


def softplus(op, dy):
    return dy * tf.sigmoid(op.inputs[0])


def tanh(op, dy):
    return dy * (1 - tf.square(op.outputs[0]))


def sigmoid(op, dy):
    y = op.outputs[0]
    return dy * y * (1 - y)


def exp(op, dy):
    return dy * op.outputs[0]


def log(op, dy):
    return dy / op.inputs[0]


def sqrt(op, dy):
    return dy * 0.5 / op.outputs[0]


def rsqrt(op, dy):
    y = op.outputs[0]
    return dy * (-0.5 * y * y * y)


def square(op, dy):
    return dy * (2 * op.inputs[0])


def absolute(op, dy):
    x = op.inputs[0]
    return dy * (where(x > 0) - where(x < 0))


def power(op, dy):
    """A power with a constant exponent."""
    exponent = float(constant(op, 1, "exponents"))
    x = op.inputs[0]
    slope = {1.0: 1.0, 2.0: 2 * x, 3.0: 3 * tf.square(x)}
    return dy * slope.get(exponent, exponent * tf.pow(x, exponent - 1)), None


def bias_add(op, dy):
    channels_last(op)
    return dy, tf.reduce_sum(dy, list(range(dy.shape.rank - 1)))


def add(op, dy):
    """One of the two may be a bias that was broadcast; its gradient is a sum."""
    return tuple(unbroadcast(op, value, dy) for value in op.inputs)


def sub(op, dy):
    return tuple(unbroadcast(op, value, part) for value, part in zip(op.inputs, (dy, -dy), strict=True))


def mul(op, dy):
    a, b = op.inputs
    return unbroadcast(op, a, dy * b), unbroadcast(op, b, dy * a)


def divide(op, dy):
    a, b = op.inputs
    share = dy / b
    return unbroadcast(op, a, share), unbroadcast(op, b, -share * op.outputs[0])


def squared_difference(op, dy):
    a, b = op.inputs
    slope = dy * (2 * (a - b))
    return unbroadcast(op, a, slope), unbroadcast(op, b, -slope)


def maximum(op, dy):
    """Of two equal numbers, the first gets the gradient, as in TensorFlow."""
    a, b = op.inputs
    first = where(a >= b if op.type == "Maximum" else a <= b)
    return unbroadcast(op, a, dy * first), unbroadcast(op, b, dy * (1 - first))


def select(op, dy):
    condition, a, b = op.inputs
    first = where(condition)
    return None, unbroadcast(op, a, dy * first), unbroadcast(op, b, dy * (1 - first))


# erf(x) is tanh(x * p(x * x)); p was fitted on [0, 3.95] by weighted least squares, to errors of 6e-8. In float32 erf
# is then off by 1.4e-7 at most.
_ERF = (1.1283797, 0.102765478, -0.000184384931, -0.000625718269, 8.97119608e-05, -5.98556198e-06, 1.58950812e-07)


@tf.custom_gradient
def erf(x):
    """The error function, which TensorFlow Lite does not have."""
    inside = tf.minimum(tf.maximum(x, -3.95), 3.95)
    u = tf.square(inside)
    p = u * _ERF[-1] + _ERF[-2]
    for coefficient in _ERF[-3::-1]:
        p = p * u + coefficient
    return tf.tanh(inside * p), lambda dy: dy * (2 / math.sqrt(math.pi)) * tf.exp(-tf.square(x))
