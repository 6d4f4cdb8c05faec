"""Graphs that are traced once, threads, and sums of structures."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument


def in_order(function: Callable, items, threads: int):
    """function(item) of every item, computed on threads, given in order."""
    return map(function, items) if threads == 1 else _pool(threads).map(function, items)


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="tfpfl-client")


def default_threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def relaxed(function, *types):
    """A graph that is not traced again for another number of examples, classes or clients.

    Args:
        types: for every argument, a function of its value in the first call that gives its type for all calls, a
            structure of TensorSpec; or None, if later values have the shapes of the first. Without types, the first
            trace is for the first call's shapes, and a second one for all others.
    """
    graph = tf.function(function, autograph=False, reduce_retracing=True)
    if not any(types):
        return graph

    def run(*arguments):
        # Not an input signature: values of another structure are traced again, where a signature would refuse them.
        if not graph.experimental_get_tracing_count():
            given = zip(arguments, types, strict=True)
            graph.get_concrete_function(*(value if of is None else of(value) for value, of in given))
        return graph(*arguments)

    run.experimental_get_tracing_count = graph.experimental_get_tracing_count
    return run


def any_number(structure):
    """For `relaxed`: the type of arrays [n, ...] for every n."""

    def of(leaf):
        return tf.TensorSpec([None, *np.shape(leaf)[1:]], tf.convert_to_tensor(leaf).dtype)

    return tf.nest.map_structure(of, structure)


def total(structures: list):
    """The sum of structures of tensors, in the order given."""
    return tf.nest.map_structure(lambda *leaves: tf.add_n(leaves), *structures)


def check_threads(threads: int | None) -> int:
    """How many clients run at a time.

    Raises:
        ValueError: fewer than one.
    """
    if threads is not None and threads < 1:
        raise InvalidArgument(f"threads must be at least 1, found {threads}")
    return threads or default_threads()
