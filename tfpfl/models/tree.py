"""Arithmetic on nested structures of tensors. With it, formulas for vectors apply to all weights of a model."""

from typing import Any

import numpy as np
import tensorflow as tf

from tfpfl.data.population import Tensor

Tree = Any  # a nested structure of tensors: tuples, NamedTuples, dicts


def as_dtype(number: Any, dtype: Any) -> Tensor:
    """Converts a number or a tensor to a tensor of `dtype`.

    `tf.cast` would round a Python number to float32 first, also if `dtype` is float64.
    """
    return tf.cast(number, dtype) if tf.is_tensor(number) else tf.constant(number, dtype)


def as_tensor(number: Any, dtype: Any) -> Tensor:
    """A tensor as it is, and any other number as a tensor of `dtype`."""
    return number if tf.is_tensor(number) else as_dtype(number, dtype)


def arrays(a: Tree) -> Tree:
    """Converts all tensors of a structure to NumPy arrays; not possible inside a graph."""
    return tf.nest.map_structure(np.asarray, a)


def names(a: Tree, whole: str = "") -> list[str]:
    """The names of the leaves of a structure, in the order of `tf.nest.flatten`: 'head.kernel', 'slots[0]'.

    Args:
        a: the structure.
        whole: what a single tensor is called.
    """
    if isinstance(a, dict):
        parts = [(f"[{key!r}]", a[key]) for key in sorted(a)]
    elif isinstance(a, tuple | list):
        fields = getattr(a, "_fields", None)
        parts = [(f".{fields[i]}" if fields else f"[{i}]", part) for i, part in enumerate(a)]
    else:
        return [whole]
    found = [name + after for name, part in parts for after in names(part)]
    return [name.removeprefix(".") for name in found] if whole else found


def dense(a: Tree) -> Tree:
    """Converts leaves that hold only some rows to tensors: TensorFlow gives the gradient of an Embedding as such."""
    return tf.nest.map_structure(tf.convert_to_tensor, a)


def shaped(a: Tree, like: Tree) -> Tree:
    """The structure a, of which the graph knows that its shapes are those of `like`.

    TensorFlow forgets a part of the shape of some gradients, such as that of a Dense layer on sequences, and TFF adds
    up only what has a known shape.
    """
    for x, y in zip(tf.nest.flatten(a), tf.nest.flatten(like), strict=True):
        if not x.shape.is_fully_defined():
            x.set_shape(y.shape)
    return a


def add(a: Tree, b: Tree) -> Tree:
    """The sum a + b of two structures."""
    return tf.nest.map_structure(tf.add, a, b)


def subtract(a: Tree, b: Tree) -> Tree:
    """The difference a - b of two structures."""
    return tf.nest.map_structure(tf.subtract, a, b)


def scale(factor: Any, a: Tree) -> Tree:
    """The structure a times the scalar `factor`."""
    return tf.nest.map_structure(lambda x: as_dtype(factor, x.dtype) * x, a)


def add_scaled(a: Tree, factor: Any, b: Tree) -> Tree:
    """The structure a + factor * b, with a scalar `factor`."""
    return tf.nest.map_structure(lambda x, y: x + as_dtype(factor, x.dtype) * y, a, b)


def dot(a: Tree, b: Tree) -> Tensor:
    """The inner product <a, b> of two structures: a scalar []."""
    return tf.add_n([tf.reduce_sum(x * y) for x, y in zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)])


def zeros_like(a: Tree) -> Tree:
    """A structure like a, filled with zeros."""
    return tf.nest.map_structure(tf.zeros_like, a)


def where(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """The structure a if the scalar `condition` is true, else b."""
    return tf.nest.map_structure(lambda x, y: tf.where(condition, x, y), a, b)


def to_vector(a: Tree) -> Tensor:
    """All numbers of a structure in one vector: [d]."""
    return tf.concat([tf.reshape(x, [-1]) for x in tf.nest.flatten(a)], 0)


def from_vector(vector: Tensor, like: Tree) -> Tree:
    """The inverse of `to_vector`: the numbers of a vector [d] in the structure and the shapes of `like`."""
    leaves = tf.nest.flatten(like)
    parts = tf.split(vector, [tf.size(x) for x in leaves])
    return tf.nest.pack_sequence_as(like, [tf.reshape(p, tf.shape(x)) for p, x in zip(parts, leaves, strict=True)])


def num_rows(x: Tree) -> Tensor:
    """The number of examples, int32 [], in an array [N, ...], or in a dict or a tuple of such arrays."""
    return tf.shape(tf.nest.flatten(x)[0])[0]


def rows(x: Tree, start: Any, stop: Any) -> Tree:
    """The examples start..stop-1 of an array [N, ...], or of a dict or a tuple of such arrays."""
    return tf.nest.map_structure(lambda array: array[start:stop], x)


def gather_rows(x: Tree, places: Tensor) -> Tree:
    """The examples at these places of an array [N, ...], or of a dict or a tuple of such arrays."""
    return tf.nest.map_structure(lambda array: tf.gather(array, places), x)


def all_finite(a: Tree) -> Tensor:
    """Whether all floating-point numbers of a structure are finite: bool [].

    It is also false if the sum of one tensor overflows.
    """
    leaves = map(tf.convert_to_tensor, tf.nest.flatten(a))  # a client's weight and metrics may be numbers of Python
    checks = [tf.math.is_finite(tf.reduce_sum(x)) for x in leaves if x.dtype.is_floating]
    return tf.reduce_all(tf.stack(checks)) if checks else tf.constant(True)


def num_bytes(a: Tree) -> Tensor:
    """The number of bytes that the tensors of a structure occupy: int64 []."""
    sizes = [tf.size(x, tf.int64) * x.dtype.size for x in tf.nest.flatten(a)]
    return tf.add_n(sizes) if sizes else tf.constant(0, tf.int64)
