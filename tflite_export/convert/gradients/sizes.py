"""What a graph knows of the shapes, axes and places that it computes from the shapes of its arrays."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

_BOTH: dict[str, Callable[..., Any]] = {
    "Mul": operator.mul,
    "Add": operator.add,
    "AddV2": operator.add,
    "Sub": operator.sub,
    "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
}


def known(t) -> np.ndarray | None:
    """The value of a tensor of whole numbers, with NaN where it depends on the number of examples; None: not known."""
    value = tf.get_static_value(t)
    if value is not None:
        return np.asarray(value, float)
    op = t.op
    if op.type in ("Shape", "ShapeN"):
        shape = op.inputs[t.value_index].shape
        return None if shape.rank is None else np.array([np.nan if n is None else n for n in shape], float)
    inputs: list[Any] = [known(i) for i in op.inputs]
    if not inputs or any(i is None for i in inputs):
        return None
    if op.type in _BOTH:
        return _BOTH[op.type](*inputs)
    if op.type in ("Identity", "Cast"):
        return inputs[0]
    if op.type == "Reshape":
        return inputs[0].reshape([int(n) for n in inputs[1]])
    if op.type == "Pack":
        return np.stack(inputs, op.get_attr("axis"))
    if op.type == "ConcatV2":
        return np.concatenate(inputs[:-1], int(inputs[-1]))
    if op.type == "Range":
        return np.arange(*inputs)
    if op.type == "Prod":
        return np.prod(inputs[0], axis=tuple(int(a) for a in inputs[1].reshape(-1)))
    if op.type == "GatherV2" and not np.isnan(inputs[1]).any():
        return np.take(inputs[0], inputs[1].astype(int), axis=int(inputs[2]))
    if op.type == "StridedSlice" and inputs[0].ndim == 1 and not np.isnan(np.concatenate(inputs[1:])).any():
        begin, end, step = (int(i[0]) for i in inputs[1:])
        if op.get_attr("shrink_axis_mask"):
            return inputs[0][begin]
        first = None if op.get_attr("begin_mask") else begin
        return inputs[0][first : None if op.get_attr("end_mask") else end : step]
    return None
