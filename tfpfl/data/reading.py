"""Reads the examples of clients inside TensorFlow graphs, from the memory-mapped files of a federation."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from tfpfl.checks import InvalidArgument, traced_by_design
from tfpfl.data.layout import Array, Layout, packed
from tfpfl.data.manifest import SPLITS
from tfpfl.data.population import Tensor

if TYPE_CHECKING:
    from tfpfl.data.federation import Federation


def split_number(split: str) -> int:
    """The place of a split in `SPLITS`.

    Raises:
        InvalidArgument: there is no such split.
    """
    if split not in SPLITS:
        raise InvalidArgument(f"unknown split {split!r}: one of {', '.join(SPLITS)}")
    return SPLITS.index(split)


def label_space(labels: str) -> str:
    """The argument, after a check.

    Raises:
        InvalidArgument: it is neither 'local' nor 'global'.
    """
    if labels not in ("local", "global"):
        raise InvalidArgument(f"unknown label space {labels!r}: one of local, global")
    return labels


def decoded_in_graph(layout: Layout, raw: Any, dtype: Any) -> Any:
    """Converts stored examples to what a model takes, in a graph: raw * scale + shift; tokens stay whole numbers."""
    import tensorflow as tf  # slow to import, and neither building nor describing needs it

    def decoded(array: Array, raw: Tensor) -> Tensor:
        x = tf.cast(raw, tf.int32 if layout.whole(array) else dtype or tf.float32)
        x = x if array.scale == 1 else x * tf.constant(array.scale, x.dtype)
        return x if array.shift == 0 else x + tf.constant(array.shift, x.dtype)

    return layout.each(decoded, raw)


def cohort_reader(federation: "Federation", place: int, labels: str, dtype: Any) -> Callable:
    """Makes the function of `Federation.cohort_reader`.

    `ImmutableConst` memory-maps the files into the graph once. `tf.data.FixedLengthRecordDataset` with offsets reads
    the same bytes but takes 2 to 3 ms per client instead of 0.4, mostly to set up its iterators.

    Args:
        federation: the federation.
        place: the number of the split in a client's row of index.raw.
        labels: 'local' or 'global'.
        dtype: the dtype of the examples and of targets; None for float32.
    """
    import tensorflow as tf  # slow to import, and neither building nor describing needs it

    total, layout = federation.manifest["num_examples"], federation.layout
    targets = federation.targets
    labels_file = {"local": "labels_local.raw", "global": "labels.raw"}[label_space(labels)]

    def mapped(name: str, dtype: Any, shape: list[int]) -> Tensor:
        return tf.raw_ops.ImmutableConst(dtype=dtype, shape=shape, memory_region_name=str(federation.path / name))

    def in_graph(client_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # On the CPU: otherwise an accelerator would get the whole file. Gathered, not sliced: a slice may share the
        # read-only memory, and an operation that then writes to it in place ends the process.
        with tf.device("CPU"):
            counts = tf.gather(mapped("index.raw", tf.int64, [federation.num_clients, 5]), client_ids)
            start, sizes = tf.reduce_sum(counts[:, : 1 + place], 1), counts[:, 1 + place]
            rows = tf.ragged.range(start, start + sizes).values
            arrays = [(a.file, tf.as_dtype(a.dtype), [total, *a.shape]) for a in layout.arrays]
            x = packed([tf.gather(mapped(*array), rows) for array in arrays], layout.shape)
            if targets is None:
                y = tf.gather(mapped(labels_file, tf.int32, [total]), rows)
            else:
                y = tf.gather(mapped("targets.raw", tf.float32, [total, targets.width]), rows)
                y = tf.cast(y, dtype or tf.float32)
        return federation.decode(x, dtype), y, tf.cast(sizes, tf.int32)

    # TensorFlow caches eager kernels by path for the whole process: a folder that is built again would be read from
    # the old mapping. A tf.function has its own kernels.
    eagerly = traced_by_design(tf.function(in_graph))

    def read(client_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (eagerly if tf.executing_eagerly() else in_graph)(tf.cast(client_ids, tf.int64))

    return read


_RANGES: WeakKeyDictionary = WeakKeyDictionary()  # federation -> {place: (smallest, largest, whether all are whole)}


def value_range(federation: "Federation", place: int = 0) -> tuple[float, float, bool]:
    """The smallest and the largest number of all examples as stored, and whether all are whole numbers.

    All examples are read once, and the result is kept as long as the federation lives.

    Args:
        federation: the federation.
        place: which array of the examples, if they are several.
    """
    known = _RANGES.setdefault(federation, {})
    if place not in known:
        array = federation.layout.arrays[place]
        count = federation.manifest["num_examples"] * math.prod(array.shape)
        stored = np.memmap(federation.path / array.file, np.dtype(array.dtype), mode="r", shape=(count,))
        low, high, whole = math.inf, -math.inf, True
        for start in range(0, count, 2**22):
            part = stored[start : start + 2**22]
            low, high = min(low, float(part.min())), max(high, float(part.max()))
            whole = whole and (part.dtype.kind != "f" or bool((part == np.floor(part)).all()))
        known[place] = low, high, whole
    return known[place]
