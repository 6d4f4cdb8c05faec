"""Tools of the engines: functions that TensorFlow traces once, work on threads, and sums of nested structures."""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument, check_numbers, traced_by_design


def relaxed(function, *types):
    """Makes a `tf.function` that is not traced again when the number of examples, classes or clients changes.

    Args:
        function: the function of tensors to trace.
        types: one for every argument: (value in the first call) -> its type in all calls, a structure of TensorSpec;
            None if the argument always has the shapes of the first call. Without `types`, TensorFlow traces twice: for
            the shapes of the first call, and for all others.
    """
    graph = traced_by_design(tf.function(function, autograph=False, reduce_retracing=True))
    if not any(types):
        return graph

    def run(*arguments):
        # This is not an input signature, which would refuse values of another structure; here they are traced again.
        if not graph.experimental_get_tracing_count():
            given = zip(arguments, types, strict=True)
            graph.get_concrete_function(*(value if of is None else of(value) for value, of in given))
        return graph(*arguments)

    run.experimental_get_tracing_count = graph.experimental_get_tracing_count
    return run


def any_number(structure):
    """The type of arrays [n, ...] for every n: the same shapes with an open first axis. An argument of `relaxed`."""

    def of(leaf):
        return tf.TensorSpec([None, *np.shape(leaf)[1:]], tf.convert_to_tensor(leaf).dtype)

    return tf.nest.map_structure(of, structure)


def total(structures: list):
    """Adds structures of tensors leaf by leaf, in the order of the list."""
    return tf.nest.map_structure(lambda *leaves: tf.add_n(leaves), *structures)


def in_order(function: Callable, items, threads: int):
    """Computes function(item) for every item on `threads` threads, and yields the results in the order of the items."""
    return map(function, items) if threads == 1 else _pool(threads).map(function, items)


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="tfpfl-client")


def default_threads() -> int:
    """The number of CPU cores that this process may use; on systems that do not say it, such as macOS, of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(threads: int | None) -> int:
    """The number of clients that run at the same time: `threads`, or for None the number of cores.

    Raises:
        InvalidArgument: `threads` is less than 1, or no whole number.
    """
    if threads is None:
        return default_threads()
    check_numbers(threads=threads)
    if not 1 <= threads < math.inf or threads != int(threads):
        raise InvalidArgument(f"threads must be at least 1, found {threads}: a whole number, or None for all cores")
    return int(threads)
