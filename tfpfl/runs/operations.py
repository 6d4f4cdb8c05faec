"""Floating point operations of a TensorFlow function, counted in its graph.

TensorFlow's profiler counts products of matrices, convolutions, biases and pooling in one graph. It does not look into
loops and functions, as those of recurrent layers, and has no or a wrong number for some operations, which are counted
here: those of Einsum, of convolutions in groups and of the gradients of depthwise and of three-dimensional ones.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.checks import Unavailable, verbose

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
LOOPS = ("While", "StatelessWhile")
BRANCHES = ("If", "StatelessIf")


class Place(NamedTuple):
    """Where a function is called from."""

    inputs: dict[str, Any]  # {its input's name: the tensor, of another graph, that it is}
    outer: "Place | None"  # where that graph is called from


def count_operations(function: Callable, *specs: tf.TensorSpec) -> int:
    """The floating point operations of a function of one example, for inputs of these shapes.

    What its outputs do not need is not counted. A loop counts as often as it is run for inputs of zeros, and of two
    branches the longer one counts.

    Raises:
        Unavailable: this TensorFlow has no such profiler, or how long a loop is, or how large what it computes, cannot
            be found out.
    """
    if getattr(tf.compat.v1, "profiler", None) is None:
        raise Unavailable(f"operations cannot be counted: TensorFlow {tf.__version__} has no tf.compat.v1.profiler")
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    outputs, needed = [output.name for output in traced.outputs], _needed(traced.outputs)
    whole = traced.graph.as_graph_def(add_shapes=True)
    for called in whole.library.function:  # Keras traces some for any number of examples, and here there is one
        for attributes in (*(node.attr for node in called.node_def), *(arg.attr for arg in called.arg_attr.values())):
            for shape in attributes["_output_shapes"].list.shape if "_output_shapes" in attributes else ():
                if shape.dim and shape.dim[0].size < 0:
                    shape.dim[0].size = 1
    with tf.Graph().as_default() as graph:
        pruned = type(whole)(node=[n for n in whole.node if n.name in needed], library=whole.library)
        tf.graph_util.import_graph_def(pruned, name="")
        return _Counter(whole.library).count(graph, [graph.get_tensor_by_name(name) for name in outputs], None)


class _Counter:
    """Counts the operations of graphs that call functions of a library."""

    def __init__(self, library: Any) -> None:
        self.library, self.functions = library, {f.signature.name: f for f in library.function}

    def count(self, graph: Any, outputs: Iterable, place: Place | None) -> int:
        """The operations that some tensors of a graph take."""
        found, needed, profiled = 0, _needed(outputs), _profiled(graph)
        for op in graph.get_operations():
            if op.name not in needed:
                continue
            used = needed[op.name]
            if op.type in COUNTED and (own := self._own(op)) is not None:
                found += own
            elif op.type in CALLS:
                found += self._called(op, "f", used, place)
            elif op.type in BRANCHES:
                found += max(self._called(op, name, used, place) for name in ("then_branch", "else_branch"))
            elif op.type in LOOPS:
                if (body := self._called(op, "body", range(len(op.outputs)), place)) != 0:
                    found += self._steps(op, place) * body
            else:
                found += profiled.get(op.name, 0)
        return found

    def _own(self, op: Any) -> int | None:
        try:
            return COUNTED[op.type](op)
        except TypeError as error:  # None is no number
            raise Unavailable(
                f"operations cannot be counted: {op.name} ({op.type}) has an open number of places"
            ) from error

    def _called(self, op: Any, attribute: str, used: Iterable[int], place: Place | None) -> int:
        # There is no public name for it.
        from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

        inputs = list(op.inputs)[1 if op.type in BRANCHES else 0 :]
        called = function_def_to_graph(
            self.functions[op.get_attr(attribute).name], input_shapes=[t.shape for t in inputs]
        )
        named = {t.op.name: given for t, given in zip(called.inputs, inputs, strict=True)}
        return self.count(called, [called.outputs[i] for i in used], Place(named, place))

    def _steps(self, op: Any, place: Place | None) -> int:
        """How many steps a loop takes.

        The inputs of TensorFlow's loops are a counter, the largest number of steps or -1, and, in the gradient of a
        loop, the number of that loop's steps. The first output is the counter at the end.
        """
        try:
            most = int(self._value(op.inputs[1], place))
            if most < 0:
                is_gradient = "grad" in op.get_attr("body").name
                most = int(self._value(op.inputs[2] if is_gradient else op.outputs[0], place))
        except (tf.errors.OpError, TypeError, ValueError) as error:
            raise Unavailable(
                f"operations cannot be counted: it is not known how many steps the loop {op.name} takes"
            ) from error
        return most

    def _value(self, t: Any, place: Place | None) -> np.ndarray:
        """The value of a tensor where all inputs of the counted function are zeros."""
        if (known := tf.get_static_value(t)) is not None:
            return known
        fed, needed = {}, _needed([t])
        for op in t.graph.get_operations():
            if op.type == "Placeholder" and op.name in needed:
                given = op.outputs[0]
                if place is None:
                    fed[given.name] = np.zeros(given.shape, given.dtype.as_numpy_dtype)
                else:
                    fed[given.name] = self._value(place.inputs[op.name], place.outer)
        nodes = t.graph.as_graph_def()
        with tf.Graph().as_default() as graph:
            of_it = type(nodes)(node=[n for n in nodes.node if n.name in needed], library=self.library)
            tf.graph_util.import_graph_def(of_it, name="")
            with tf.compat.v1.Session(graph=graph) as session:
                return session.run(t.name, fed)


def _needed(outputs: Iterable) -> dict[str, set[int]]:
    """{name of an operation: the places of its outputs} that these tensors need."""
    needed: dict[str, set[int]] = {}
    seen: set[str] = set()
    left = [(t.op, t.value_index) for t in outputs]
    while left:
        op, place = left.pop()
        needed.setdefault(op.name, set()).update(() if place is None else (place,))
        if op.name not in seen:
            seen.add(op.name)
            left += [*((t.op, t.value_index) for t in op.inputs), *((other, None) for other in op.control_inputs)]
    return needed


def _profiled(graph: Any) -> dict[str, int]:
    """{name of an operation: its operations, as the profiler counts them}."""
    profiler = tf.compat.v1.profiler
    options = {**profiler.ProfileOptionBuilder.float_operation(), "output": "none"}
    with _unwarned():
        nodes, found = [profiler.profile(graph, cmd="scope", options=options)], {}
    while nodes:
        node = nodes.pop()
        found[node.name] = node.float_ops
        nodes += node.children
    return found


def _einsum(op: Any) -> int | None:
    """A multiplication and an addition for each combination of all indices."""
    equation = op.get_attr("equation").decode()
    if "." in equation:
        return None
    sizes: dict[str, int] = {}
    for names, t in zip(equation.split("->")[0].split(","), op.inputs, strict=True):
        sizes |= dict(zip(names, t.shape, strict=True))
    return 2 * math.prod(sizes.values()) if len(op.inputs) > 1 else 0


def _convolution(op: Any) -> int | None:
    """Of groups only: each number of the output takes all of the filter's numbers that lead to it."""
    x, kernel = op.inputs[0].shape, op.inputs[1].shape
    channels = 1 if op.get_attr("data_format").startswith(b"NC") else -1
    if int(x[channels]) == int(kernel[-2]):
        return None  # the profiler's number
    return 2 * math.prod(op.outputs[0].shape) * math.prod(kernel[:-1])


def _gradient_of(numbers_of_the_filter: Callable) -> Callable:
    """Counts a gradient of a convolution, which takes as many operations as the convolution.

    Args:
        numbers_of_the_filter: (shape of the filter) -> how many of its numbers lead to one number of the output.
    """

    def count(op: Any) -> int | None:
        of_filter = op.type.startswith(("Conv3DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter"))
        dy = op.inputs[2].shape
        kernel = op.outputs[0].shape if of_filter else op.inputs[1].shape
        return 2 * math.prod(dy) * numbers_of_the_filter(kernel)

    return count


_OF_DEPTHWISE = _gradient_of(lambda kernel: math.prod(kernel[:2]))
_OF_3D = _gradient_of(lambda kernel: math.prod(kernel[:4]))
COUNTED: dict[str, Callable[[Any], int | None]] = {
    "Einsum": _einsum,
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "DepthwiseConv2dNativeBackpropFilter": _OF_DEPTHWISE,
    "DepthwiseConv2dNativeBackpropInput": _OF_DEPTHWISE,
    "Conv3DBackpropFilterV2": _OF_3D,
    "Conv3DBackpropInputV2": _OF_3D,
}


@contextmanager
def _unwarned() -> Iterator[None]:
    """Drops the warning of TensorFlow's profiler that it calls a deprecated function: only TensorFlow can mend this.

    Nothing is dropped with TFPFL_VERBOSE=1.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return verbose() or "flops_registry" not in record.getMessage()

    logger = tf.get_logger()
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
