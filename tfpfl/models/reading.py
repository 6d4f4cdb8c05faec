"""What the graph of a backbone does with its input, and how it ends: read off once, when a `SplitModel` is made."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument, one_line
from tfpfl.data.layout import parts_of
from tfpfl.models.inputs import Inputs

# Operations that only pass values on, in another shape or order.
_PASS = frozenset(
    ("Identity", "Reshape", "StridedSlice", "Slice", "Squeeze", "ExpandDims", "Transpose", "Split", "SplitV", "Unpack")
    + ("Pack", "ConcatV2", "EnsureShape", "StopGradient", "Snapshot", "Tile", "BroadcastTo")
)
_TAKES_PARTS = frozenset(("StridedSlice", "Slice", "Split", "SplitV", "Unpack"))
# Operations for which it makes no difference whether a whole number is an integer or a float.
_EITHER = frozenset(("Shape", "ShapeN", "Size", "Rank", "NotEqual", "Equal", "ZerosLike", "OnesLike"))
_DRAWS = ("Random", "TruncatedNormal", "Multinomial", "StatefulUniform", "StatefulStandardNormal", "RngReadAndSkip")
_BY_SEED = ("Stateless", "RandomIndexShuffle", "RandomGammaGrad")  # have such names, but are functions of their inputs
_CONVOLVES = frozenset(("Conv2D", "DepthwiseConv2dNative", "Conv3D"))
_CALLS = frozenset(
    ("PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "StatelessIf", "Case")
    + ("StatelessCase",)
)
SATURATING = {"Softmax": "softmax", "LogSoftmax": "log-softmax", "Sigmoid": "sigmoid"}


class Traced(NamedTuple):
    """What the graph of a backbone shows."""

    activation_bytes: int  # the size of all floating-point numbers of a forward pass of one example
    reads: list[str]  # of each array: 'numbers'; 'whole': it is only cast to integers; 'mixed': a part of it is
    # Of each array: the numbers of rows of the tables whose rows it names, as it is; whether all of it does.
    tables: list[dict[int, bool]]
    convolves: bool  # whether it has convolutions, and no loop, such as over the words of a text
    ending: str | None  # 'softmax', 'log-softmax' or 'sigmoid' if the last operation is one of these
    linear: bool  # whether the last operation is a product with a matrix, with or without a bias


def trace(apply: Callable, weights: tuple, inputs: Inputs, dtype: np.dtype, variables: Sequence[Any] = ()) -> Traced:
    """Traces a backbone for one example and reads its graph.

    Args:
        apply: function (weights, x as Keras takes it) -> features.
        weights: the weights, arrays.
        inputs: the arrays of x.
        dtype: the dtype of x; arrays that Keras declares as integer get integers.
        variables: those that `apply` puts other values in the place of.

    Raises:
        InvalidArgument: a layer reads one of the variables all the same, needs variables in place of values, asks for
            the value of a tensor, or draws random numbers in its own code; or a name is not allowed.
    """
    given: list[Any] = []

    def forward(theta: tuple, x: Any) -> Any:
        given[:] = parts_of(x, inputs.shape)
        return apply(theta, inputs.for_keras(given))

    theta = tuple(tf.TensorSpec(w.shape, w.dtype) for w in weights)
    spec = inputs.spec(1, [tf.int32 if integer else dtype for integer in inputs.integer])
    try:
        graph = tf.function(forward, autograph=False).get_concrete_function(theta, spec)
    except InvalidArgument:
        raise
    except (AttributeError, TypeError, ValueError) as error:  # the model took numbers before, with its variables
        if isinstance(error, AttributeError):
            raise InvalidArgument(
                "a layer uses its weights as variables, or asks for the value of a tensor; but weights are tensors "
                "when a method trains, and a tensor of a graph has no value yet. In the layer's call, read each weight "
                "as its attribute (self.kernel), without value() or read_value(), change none with assign (what it "
                "counts would differ from engine to engine), and take functions of TensorFlow in place of NumPy's. "
                f"TensorFlow said: {one_line(error, 300)}"
            ) from error
        raise InvalidArgument(
            "the backbone cannot be made a graph, in which a tensor has no value yet. In the call of a layer or a "
            "model of your own, take tf.where or tf.cond in place of Python's if and while on tensors. The name of a "
            "model has letters from A to z, digits, _ and - only, as in keras.Sequential(..., name='my_model'). "
            f"TensorFlow said: {one_line(error, 300)}"
        ) from error
    _check_replaced(graph.graph, variables)
    _check_draws(graph.graph)
    outputs = [t for op in graph.graph.get_operations() if op.type not in ("Placeholder", "Const") for t in op.outputs]
    size = int(sum((t.shape.num_elements() or 0) * t.dtype.size for t in outputs if t.dtype.is_floating))
    reads = ["whole" if integer else _reads(x) for x, integer in zip(given, inputs.integer, strict=True)]
    kinds = {op.type for op in graph.graph.get_operations()}
    tables = [_tables(x) for x in given]
    last = _last(graph.outputs[0])
    convolves = bool(kinds & _CONVOLVES) and not kinds & _CALLS
    return Traced(size, reads, tables, convolves, SATURATING.get(last.type), _is_linear(last))


def _check_replaced(graph: Any, variables: Sequence[Any]) -> None:
    """Checks that a graph reads none of these variables, since each has another value that stands for it."""
    held = {id(tensor) for tensor, _ in graph.captures}
    names = [v.name for v in variables if id(getattr(v, "handle", None)) in held]
    if names:
        raise InvalidArgument(
            f"weights {', '.join(names)} are not read from the attributes to which their layer assigned them, so that "
            "they could not be trained. In the layer's call, read each weight as its own attribute (self.kernel), from "
            "no list or dict, and in no tf.function of the layer's own"
        )


def _check_draws(graph: Any) -> None:
    """Checks that a graph draws no random numbers from a state, which no key determines.

    Loops, branches and a layer's own tf.function are functions of the graph.
    """
    found = [(op.type, op.name) for op in graph.get_operations()]
    if any(kind in _CALLS for kind, _ in found):
        inner = graph.as_graph_def().library.function
        found += [(op.op, f"{op.name} of {function.signature.name}") for function in inner for op in function.node_def]
    for kind, name in found:
        if any(word in kind for word in _DRAWS) and not kind.startswith(_BY_SEED):
            raise InvalidArgument(
                f"the backbone draws random numbers in its own code ({kind} in {name}), so that no two "
                "evaluations would agree. Use Keras's Dropout or GaussianNoise, which draw from the client's key in "
                "training, or tf.random.stateless_* with a fixed seed"
            )


def vocabulary(layers: list[Any], traced: Traced) -> list[int | None]:
    """For each array that a model of these layers takes: how many rows its Embedding has, the fewest if it has several.

    None for numbers, and for whole numbers that are not looked up as they are, such as those that a layer hashes first.
    Of several Embeddings those count that look up all of an array: columns may have an Embedding of their own each.
    """
    rows = [int(layer.input_dim) for layer in layers if "Embedding" in {c.__name__ for c in type(layer).__mro__}]
    alone = len(rows) == 1 and traced.reads.count("whole") == 1

    def fewest(looked_up: dict[int, bool]) -> int | None:
        return min((n for n, all_of_it in looked_up.items() if n in rows and (all_of_it or alone)), default=None)

    found = zip(traced.reads, traced.tables, strict=True)
    return [fewest(looked_up) if reads == "whole" else None for reads, looked_up in found]


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


def _tables(x: Any) -> dict[int, bool]:
    """{rows of a table: whether all of x} of what the input x of a graph is looked up in, only cast or reshaped."""
    found: dict[int, bool] = {}
    left, seen = [(x, True)], {x.name}
    while left:
        tensor, all_of_it = left.pop()
        for op in tensor.consumers():
            if op.type in ("GatherV2", "ResourceGather") and op.inputs[1].name == tensor.name:
                rows = op.inputs[0].shape[0]
                found[rows] = all_of_it or found.get(rows, False)
            elif op.type in _PASS or op.type == "Cast" or _counts_from_the_end(op, tensor):
                is_part = op.type in _TAKES_PARTS and op.outputs[0].shape.num_elements() != tensor.shape.num_elements()
                left += [(t, all_of_it and not is_part) for t in op.outputs if t.name not in seen]
                seen |= {t.name for t in op.outputs}
    return found


def _counts_from_the_end(op: Any, x: Any) -> bool:
    """Whether an operation is where(x < 0, ..., x), which Keras 3 looks up for negative numbers."""
    if op.type != "SelectV2" or op.inputs[2].name != x.name or op.inputs[0].op.type != "Less":
        return False
    low, high = op.inputs[0].op.inputs
    return low.name == x.name and tf.get_static_value(high) == 0


def _last(output: Any) -> Any:
    """The last operation that computes something."""
    op = output.op
    while op.type in _PASS and len(op.inputs):
        op = op.inputs[0].op
    return op


def _is_linear(op: Any) -> bool:
    # A bias, and no skip connection: Keras 3.15 adds the row of a single example as a bias, too.
    if op.type in ("BiasAdd", "Add", "AddV2") and _last(op.inputs[1]).outputs[0].shape.rank == 1:
        op = _last(op.inputs[0])
    return op.type == "MatMul"
