"""Gradients of sums, means, maxima and matrix products, and of what is made of them."""

import tensorflow as tf

from tflite_export.convert.gradients.common import axes_of, channels_last, dims, kept, refuse, unbroadcast, where


def mean(op, dy):
    """GlobalAveragePooling, and any mean over axes that are known."""
    x = op.inputs[0]
    axes = axes_of(op, x)
    if any(x.shape[a] is None for a in axes) or (0 in axes and x.shape[0] != 1):
        refuse(op, "a mean over examples: the features of an example must not depend on others")
    count = 1
    for a in axes:
        count *= int(x.shape[a])
    return tf.reshape(dy, kept(op, x, axes)) * (tf.ones_like(x) / count), None


def total(op, dy):
    x = op.inputs[0]
    return tf.reshape(dy, kept(op, x, axes_of(op, x))) * tf.ones_like(x), None


def largest(op, dy):
    """GlobalMaxPooling; several equal maxima share the gradient, as in TensorFlow."""
    x, y = op.inputs[0], op.outputs[0]
    axes = axes_of(op, x)
    shape = kept(op, x, axes)
    is_maximum = where(tf.equal(x, tf.reshape(y, shape)))
    share = tf.reshape(dy, shape) / tf.reduce_sum(is_maximum, sorted(axes), keepdims=True)
    return is_maximum * share, None


def softmax(op, dy):
    y = op.outputs[0]
    return y * (dy - tf.reduce_sum(dy * y, -1, keepdims=True))


def batch_matmul(op, dy):
    a, b = op.inputs
    turned_a, turned_b = op.get_attr("adj_x"), op.get_attr("adj_y")
    if b.shape.rank == 2 and not turned_a and not turned_b:  # one matrix for all, as in a Dense layer
        rows, columns = (int(n) for n in b.shape)
        flat = tf.reshape(dy, [-1, columns])
        da = tf.reshape(tf.matmul(flat, b, transpose_b=True), dims(op, a.shape))
        return da, tf.matmul(tf.reshape(a, [-1, rows]), flat, transpose_a=True)
    if turned_a:
        da = tf.matmul(b, dy, transpose_a=turned_b, transpose_b=True)
    else:
        da = tf.matmul(dy, b, transpose_b=not turned_b)
    if turned_b:
        db = tf.matmul(dy, a, transpose_a=True, transpose_b=turned_a)
    else:
        db = tf.matmul(a, dy, transpose_a=not turned_a)
    return unbroadcast(op, a, da), unbroadcast(op, b, db)


def frozen_batch_norm(op, dy, *_):
    """BatchNormalization with statistics that do not move; its scale and offset may train."""
    if op.get_attr("is_training"):
        refuse(op, "a normalization by the statistics of its input, over other axes than LayerNormalization's")
    channels_last(op)
    x, scale, _, mean, variance = op.inputs
    inverse = tf.math.rsqrt(variance + op.get_attr("epsilon"))
    axes = list(range(dy.shape.rank - 1))
    d_scale = tf.reduce_sum(dy * ((x - mean) * inverse), axes)
    return dy * (scale * inverse), d_scale, tf.reduce_sum(dy, axes), None, None
