"""Loops of the graph that go forward and backward through a backbone.

TensorFlow writes the operations of a loop's body into the graph around the loop, as a cycle. Its pass that replaces
kernels by those of oneDNN then meets them in no fixed order, and it replaces the gradient of a max pooling only if it
has met the pooling before. By chance, local steps would take half as long again. A function that is not inlined has no
cycle. A call of it costs some 20 microseconds, so bodies without such a gradient stay as they are.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpfl.checks import traced_by_design


def training_loop(condition: Callable, body: Callable, start: tuple, at_a_time: int = 1) -> Any:
    """`tf.while_loop`, whose body is a function of its own if it goes back through max pooling.

    Args:
        condition, body, start: as in `tf.while_loop`.
        at_a_time: steps that may overlap.
    """

    def step(*carry: Any) -> Any:
        return body(*carry) if tf.executing_eagerly() else for_a_loop(body, *carry)(*carry)

    return tf.while_loop(condition, step, start, parallel_iterations=at_a_time)


def for_a_loop(function: Callable, *arguments: Any) -> Any:
    """Traces a function that the body of a loop calls, for arguments of these types; it may go back through pooling."""
    graph = traced_by_design(tf.function(function, autograph=False)).get_concrete_function(*arguments)
    return _apart(function).get_concrete_function(*arguments) if _pools_back(graph.graph) else graph


def _pools_back(graph: Any) -> bool:
    return any(op.type == "MaxPoolGrad" for op in graph.get_operations())


def _apart(function: Callable) -> Any:
    return traced_by_design(tf.function(function, autograph=False, experimental_attributes={"_noinline": True}))
