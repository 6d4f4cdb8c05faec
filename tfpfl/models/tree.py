"""Arithmetic on nested structures of tensors, as the papers write it for vectors."""

import numpy as np
import tensorflow as tf


def as_dtype(number, dtype):
    """A number or tensor as a tensor of `dtype`. (`tf.cast` rounds Python numbers to float32 on the way to float64.)"""
    return tf.cast(number, dtype) if tf.is_tensor(number) else tf.constant(number, dtype)


def arrays(a):
    """As NumPy arrays, outside of graphs."""
    return tf.nest.map_structure(np.asarray, a)


def add(a, b):
    """a + b."""
    return tf.nest.map_structure(tf.add, a, b)


def subtract(a, b):
    """a - b."""
    return tf.nest.map_structure(tf.subtract, a, b)


def scale(factor, a):
    """factor * a."""
    return tf.nest.map_structure(lambda x: as_dtype(factor, x.dtype) * x, a)


def add_scaled(a, factor, b):
    """a + factor * b: a step of length `factor` along b."""
    return tf.nest.map_structure(lambda x, y: x + as_dtype(factor, x.dtype) * y, a, b)


def dot(a, b):
    """<a, b>."""
    return tf.add_n([tf.reduce_sum(x * y) for x, y in zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)])


def zeros_like(a):
    """0 in the shape of a."""
    return tf.nest.map_structure(tf.zeros_like, a)


def where(condition, a, b):
    """a where the scalar `condition` holds, else b."""
    return tf.nest.map_structure(lambda x, y: tf.where(condition, x, y), a, b)


def to_vector(a):
    """All numbers of a side by side: [d]."""
    return tf.concat([tf.reshape(x, [-1]) for x in tf.nest.flatten(a)], 0)


def from_vector(vector, like):
    """The inverse: numbers [d] in the structure and the shapes of `like`."""
    leaves = tf.nest.flatten(like)
    parts = tf.split(vector, [tf.size(x) for x in leaves])
    return tf.nest.pack_sequence_as(like, [tf.reshape(p, tf.shape(x)) for p, x in zip(parts, leaves, strict=True)])


def all_finite(a):
    """Whether no floating-point number in a is NaN, infinite, or so large that a sum overflows: bool []."""
    checks = [tf.math.is_finite(tf.reduce_sum(x)) for x in tf.nest.flatten(a) if x.dtype.is_floating]
    return tf.reduce_all(tf.stack(checks)) if checks else tf.constant(True)


def num_bytes(a):
    """Bytes that a takes on the wire, without framing: int64 []."""
    sizes = [tf.size(x, tf.int64) * x.dtype.size for x in tf.nest.flatten(a)]
    return tf.add_n(sizes) if sizes else tf.constant(0, tf.int64)
