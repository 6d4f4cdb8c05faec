"""Divides a source among clients, for `Federation.build`."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfpfl.checks import InvalidArgument, unknown, warn_user
from tfpfl.data.manifest import plain_values
from tfpfl.data.partitioners import PARTITIONERS, Labels, Partition
from tfpfl.data.source import Source
from tfpfl.data.targets import Targets, strata
from tfpfl.data.writing import absent, cut_validation, describe_source, write_federation

TOGETHER = "windows that overlap or rotations of one drawing"


def build_federation(
    source: Source,
    partitioner: str | Callable[..., Partition],
    partition_args: Mapping[str, Any],
    *,
    clients: int | None,
    seed: int,
    validation: float,
    out: str | os.PathLike,
) -> Path:
    """Writes the federation of `Federation.build`, which has the same arguments and errors.

    The targets of a source without classes are one class to the partitioner.

    Returns:
        The folder.
    """
    folder = absent(out)
    if isinstance(partitioner, str):
        if partitioner not in PARTITIONERS:
            raise InvalidArgument(unknown("partitioner", partitioner, PARTITIONERS))
        name, share_out = partitioner, PARTITIONERS[partitioner]
    else:
        share_out = partitioner
        name = getattr(partitioner, "__name__", type(partitioner).__name__)
    defaults = getattr(share_out, "__kwdefaults__", None) or {}  # recorded too: a later version may have others
    y = np.concatenate([source.y_train, source.y_test])
    kinds = y if source.targets is None else strata(y, source.targets)
    n = len(source.y_train)
    labels = Labels(kinds[:n], kinds[n:], source.key_train, source.key_test)
    part = share_out(labels, clients, seed, **partition_args)
    shift = 0 if part.pooled else n
    rows = [[train, np.empty(0, np.int64), test + shift] for train, test in zip(part.train, part.test, strict=True)]
    group = None
    if source.group_train is not None:  # only training examples have groups; give test examples ids of their own
        group = np.concatenate([source.group_train, -1 - np.arange(len(source.y_test))])
        if part.pooled and len(np.unique(source.group_train)) < len(source.group_train):
            raise InvalidArgument(
                f"examples of {source.name} belong together, such as {TOGETHER}, and {name} joins the training and the "
                "test set before it cuts a test part, so that some of them would be in both. Keep the sets apart, with "
                "pooled=False (--no-partition-pooled), or take the partition natural"
            )
    names = part.names or [str(i) for i in range(len(rows))]
    cut_validation(rows, kinds, group, validation, seed, names)
    if group is not None and (number := _beside_training(rows, group)):
        warn_user(
            f"{number} of {sum(len(row[1]) for row in rows)} validation examples belong together with training "
            f"examples of another client, such as {TOGETHER}: {name} divides them among clients. Scores on validation "
            "examples are too good; test examples are not among them. The partition natural keeps them together"
        )
    manifest = describe_source(source) | {
        "partitioner": {"name": name, "arguments": plain_values(defaults | dict(partition_args))},
        "seed": int(seed),
        "validation": float(validation),
    }
    if source.targets is not None:
        del manifest["class_names"]
        manifest["targets"] = Targets.named(source.targets, y.shape[1], source.class_names).entry()
    return write_federation(folder, [(source.x_train, source.x_test)], y, rows, manifest, part.names)


def _beside_training(rows: list[list[np.ndarray]], group: np.ndarray) -> int:
    """The number of validation examples, of all clients, with an example of their group in some client's training."""
    training = np.unique(group[np.concatenate([row[0] for row in rows])])
    return sum(int(np.isin(group[row[1]], training).sum()) for row in rows)
