"""What the graph of a backbone does with its input, and how it ends: read off once, when a `SplitModel` is made."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# Operations that only pass values on, in another shape or order.
_PASS = frozenset(
    ("Identity", "Reshape", "StridedSlice", "Slice", "Squeeze", "ExpandDims", "Transpose", "Split", "SplitV", "Unpack")
    + ("Pack", "ConcatV2", "EnsureShape", "StopGradient", "Snapshot", "Tile", "BroadcastTo")
)
# Operations for which it makes no difference whether a whole number is an integer or a float.
_EITHER = frozenset(("Shape", "ShapeN", "Size", "Rank", "NotEqual", "Equal", "ZerosLike", "OnesLike"))
SATURATING = {"Softmax": "softmax", "LogSoftmax": "log-softmax", "Sigmoid": "sigmoid"}


class Traced(NamedTuple):
    """What the graph of a backbone shows."""

    activation_bytes: int  # the size of all floating-point numbers of a forward pass of one example
    reads: str  # 'numbers'; 'whole': the input is only cast to integers; 'mixed': a part of it is
    ending: str | None  # 'softmax', 'log-softmax' or 'sigmoid' if the last operation is one of these


def trace(apply: Callable, weights: tuple, input_shape: tuple, dtype: np.dtype) -> Traced:
    """Traces a backbone for one example and reads its graph.

    Args:
        apply: function (weights, x) -> features.
        weights: the weights, arrays.
        input_shape: the shape of one example.
        dtype: the dtype of x.
    """
    given: list[Any] = []

    def forward(theta: tuple, x: Any) -> Any:
        given.append(x)
        return apply(theta, x)

    theta = tuple(tf.TensorSpec(w.shape, w.dtype) for w in weights)
    graph = tf.function(forward, autograph=False).get_concrete_function(theta, tf.TensorSpec([1, *input_shape], dtype))
    outputs = [t for op in graph.graph.get_operations() if op.type not in ("Placeholder", "Const") for t in op.outputs]
    size = int(sum((t.shape.num_elements() or 0) * t.dtype.size for t in outputs if t.dtype.is_floating))
    return Traced(size, _reads(given[-1]), _ending(graph.outputs[0]))


def _reads(x: Any) -> str:
    """How the input x of a graph is used, see `Traced.reads`."""
    whole = numbers = False
    left, seen = [x], {x.name}
    while left:
        for op in left.pop().consumers():
            if op.type in _PASS or (op.type == "Cast" and op.outputs[0].dtype.is_floating):
                new = [t for t in op.outputs if t.name not in seen]
                seen |= {t.name for t in new}
                left += new
            elif op.type == "Cast" and op.outputs[0].dtype.is_integer:
                whole = True
            elif op.type not in _EITHER:
                numbers = True
    return ("mixed" if numbers else "whole") if whole else "numbers"


def _ending(output: Any) -> str | None:
    op = output.op
    while op.type in _PASS and len(op.inputs):
        op = op.inputs[0].op
    return SATURATING.get(op.type)
