"""What the gradients share: refusals, sums over what was broadcast, and sizes."""

import math

import numpy as np
import tensorflow as tf

from tflite_export.convert.gradients.sizes import known
from tfpfl.checks import InvalidArgument


class UnsupportedLayerError(InvalidArgument):
    """A layer has no gradient in builtin operations. The message names it and says what to do."""


def refuse(op, what):
    """Raises `UnsupportedLayerError`: the operation is `what`."""
    raise UnsupportedLayerError(
        f"{op.name} is {what}. This is for rounds; for inference and personalization of the head, export with "
        "rounds=False"
    )


def where(condition):
    """1.0 where the condition holds, else 0.0."""
    return tf.cast(condition, tf.float32)


def channels_last(op):
    """Refuses an operation on images whose channels come first."""
    if op.get_attr("data_format") != b"NHWC":
        refuse(op, "in data format channels_first; take channels_last")


def dims(op, shape) -> list:
    """The sizes of a shape for a reshape: -1 for the axis that is open, of which there may be one."""
    if shape.rank is None or shape.as_list().count(None) > 1:
        refuse(op, f"on an array of an open shape, {shape}")
    return [-1 if n is None else int(n) for n in shape]


def product(sizes) -> int:
    """How many numbers axes of these sizes have together, or -1 if one of them is open (-1)."""
    return -1 if -1 in sizes else math.prod(sizes)


def constant(op, i, what):
    """The value of input `i` of an operation, which the graph must know."""
    value = known(op.inputs[i])
    if value is None or np.isnan(value).any():
        refuse(op, f"with {what} that are not constant")
    return value


def unbroadcast(op, value, dy):
    """dy summed over the axes along which `value` was broadcast."""
    sizes = dims(op, value.shape)
    missing = dy.shape.rank - len(sizes)
    axes = list(range(missing))
    axes += [a + missing for a, n in enumerate(sizes) if n == 1 and dy.shape[a + missing] != 1]
    if not axes:
        return dy
    return tf.reshape(tf.reduce_sum(dy, axes), sizes)


def kept(op, x, axes) -> list:
    """The shape of x after a sum over `axes` that keeps them with size 1."""
    return [1 if a in axes else n for a, n in enumerate(dims(op, x.shape))]


def axes_of(op, x) -> set:
    """The axes of a sum, mean or maximum, which are its second input."""
    return {int(a) % x.shape.rank for a in constant(op, 1, "axes").reshape(-1)}


def folded(op, dy, sizes, axis, times):
    """dy summed over `times` neighbours: its axis `axis` has times * sizes[axis] numbers, and `sizes` is what is left.

    A number that was repeated `times` times, one after the other, gets the sum of its repetitions' gradients.
    """
    if times == 1:
        return dy
    before, after = product(sizes[: axis + 1]), product(sizes[axis + 1 :])
    return tf.reshape(tf.reduce_sum(tf.reshape(dy, [before, times, after]), 1), sizes)


def times_transposed(rows, matrix):
    """rows [N, K] times the transpose of `matrix` [M, K].

    As a product of an array of rank 3: one of two matrices becomes a FULLY_CONNECTED, which LiteRT gives to its fast
    library only if the matrix is constant. It takes a third of the time so.
    """
    columns, inner = (int(n) for n in matrix.shape)
    return tf.reshape(tf.matmul(tf.reshape(rows, [1, -1, inner]), matrix, transpose_b=True), [-1, columns])
