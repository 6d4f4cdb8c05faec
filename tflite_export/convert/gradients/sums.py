"""Gradients of sums, means, maxima and matrix products, and of what is made of them."""

import math

import numpy as np
import tensorflow as tf

from tflite_export.convert.gradients.common import (
    axes_of,
    channels_last,
    dims,
    kept,
    product,
    refuse,
    times_transposed,
    unbroadcast,
    where,
)


def mean(op, dy):
    """GlobalAveragePooling, and any mean over axes that are known."""
    x = op.inputs[0]
    axes = axes_of(op, x)
    if any(x.shape[a] is None for a in axes) or (0 in axes and x.shape[0] != 1):
        refuse(op, "a mean over examples: the features of an example must not depend on others")
    count = math.prod(int(x.shape[a]) for a in axes)
    return _repeated(op, dy / count, x, axes), None


def total(op, dy):
    x = op.inputs[0]
    return _repeated(op, dy, x, _not_of_examples(op, x, "a sum")), None


def _not_of_examples(op, x, what):
    """The axes of a reduction; of those with an open number of places, one is that of the examples."""
    axes = axes_of(op, x)
    if any(x.shape[a] is None for a in axes):
        refuse(op, f"{what} over examples: the features of an example must not depend on others")
    return axes


def _repeated(op, dy, x, axes):
    """dy, the gradient of a sum over `axes`, once for each number of x that was summed.

    Where they are neighbours, by a product with ones or a GATHER: array of ones of an open size take longer.
    """
    sizes, first, last = dims(op, x.shape), min(axes, default=0), max(axes, default=-1)
    inner, times, after = product(sizes[:first]), product(sizes[first : last + 1]), product(sizes[last + 1 :])
    if len(axes) != last - first + 1 or times < 2 or after < 1:
        return tf.reshape(dy, kept(op, x, axes)) * tf.ones_like(x)
    if after == 1:
        copies = tf.matmul(tf.reshape(dy, [inner, 1]), tf.ones([1, times], dy.dtype))
    else:
        copies = tf.gather(tf.reshape(dy, [inner, 1, after]), np.zeros(times, np.int32), axis=1)
    return tf.reshape(copies, sizes)


def largest(op, dy):
    """GlobalMaxPooling; several equal maxima share the gradient, as in TensorFlow."""
    x, y = op.inputs[0], op.outputs[0]
    axes = _not_of_examples(op, x, "a maximum")
    shape = kept(op, x, axes)
    is_maximum = where(tf.equal(x, tf.reshape(y, shape)))
    share = tf.reshape(dy, shape) / tf.reduce_sum(is_maximum, sorted(axes), keepdims=True)
    return is_maximum * share, None


def softmax(op, dy):
    y = op.outputs[0]
    return y * (dy - tf.reduce_sum(dy * y, -1, keepdims=True))


def matmul(op, dy):
    """A product of two matrices."""
    a, b = op.inputs
    turned_a, turned_b = op.get_attr("transpose_a"), op.get_attr("transpose_b")
    if turned_a or turned_b or None in b.shape.as_list():
        return _both(a, b, dy, turned_a, turned_b)
    return times_transposed(dy, b), tf.matmul(a, dy, transpose_a=True)


def batch_matmul(op, dy):
    a, b = op.inputs
    turned_a, turned_b = op.get_attr("adj_x"), op.get_attr("adj_y")
    if b.shape.rank == 2 and not turned_a and not turned_b:  # one matrix for all, as in a Dense layer
        rows, columns = (int(n) for n in b.shape)
        flat = tf.reshape(dy, [-1, columns])
        da = tf.reshape(times_transposed(flat, b), dims(op, a.shape))
        return da, tf.matmul(tf.reshape(a, [-1, rows]), flat, transpose_a=True)
    da, db = _both(a, b, dy, turned_a, turned_b)
    return unbroadcast(op, a, da), unbroadcast(op, b, db)


def _both(a, b, dy, turned_a, turned_b):
    """The gradients of the factors of a product, each of which may have been turned."""
    if turned_a:
        da = tf.matmul(b, dy, transpose_a=turned_b, transpose_b=True)
    else:
        da = tf.matmul(dy, b, transpose_b=not turned_b)
    if turned_b:
        return da, tf.matmul(dy, a, transpose_a=True, transpose_b=turned_a)
    return da, tf.matmul(a, dy, transpose_a=not turned_a)


def frozen_batch_norm(op, dy, *_):
    """BatchNormalization with statistics that do not move; its scale and offset may train."""
    if op.get_attr("is_training"):
        refuse(op, "a normalization by the statistics of its input, over other axes than LayerNormalization's")
    channels_last(op)
    x, scale, _, mean, variance = op.inputs
    inverse = tf.math.rsqrt(variance + op.get_attr("epsilon"))
    axes = list(range(dy.shape.rank - 1))
    d_scale = tf.reduce_sum(dy * (x - mean), axes) * inverse
    return dy * (scale * inverse), d_scale, tf.reduce_sum(dy, axes), None, None
