"""Divides a source among clients, for `Federation.build`."""

import os
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from tfpfl.checks import InvalidArgument, check_type, unknown, warn_user
from tfpfl.data.arrays import as_written, plain
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
    check_type("the source", source, Source, "a tfpfl.Source, or the name of one, such as 'digits'")
    if not isinstance(partitioner, str) and not callable(partitioner):
        raise InvalidArgument(
            "the partitioner must be the name of one, such as 'dirichlet', or a function (labels, clients, seed) -> "
            f"Partition; found {partitioner!r}"
        )
    if isinstance(partitioner, str):
        if partitioner not in PARTITIONERS:
            raise InvalidArgument(unknown("partitioner", partitioner, PARTITIONERS))
        name, share_out = partitioner, PARTITIONERS[partitioner]
    else:
        share_out = partitioner
        name = getattr(partitioner, "__name__", type(partitioner).__name__)
    validation = as_written(validation)
    defaults = getattr(share_out, "__kwdefaults__", None) or {}  # recorded too: a later version may have others
    if isinstance(partitioner, str):
        _check_arguments(name, defaults, partition_args)
        partition_args = {argument: as_written(value) for argument, value in partition_args.items()}
    y = np.concatenate([source.y_train, source.y_test])
    kinds = y if source.targets is None else strata(y, source.targets)
    n = len(source.y_train)
    labels = Labels(kinds[:n], kinds[n:], source.key_train, source.key_test)
    try:
        signature(share_out).bind(labels, clients, seed, **partition_args)
    except TypeError as error:
        raise InvalidArgument(
            f"the partitioner {name} is called with labels, clients, seed and the arguments that were given: {error}"
        ) from None
    part = share_out(labels, clients, seed, **partition_args)
    part = _checked(part, name, n, len(source.y_test))
    if callable(partitioner) and clients is not None and len(part.train) != clients:
        raise InvalidArgument(
            f"{name} makes {len(part.train)} clients, and {clients} were asked for. If the function decides the number "
            "itself, leave clients out"
        )
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
            "examples are too good. Test examples are not counted here: they are those of the source, which keeps them "
            "apart, but for omniglot with augment=before_split. The partition natural keeps the others together"
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


# What an argument of a partitioner must be, by the type of its default.
_WANTED: dict[type, tuple[Any, str]] = {
    bool: (bool | np.bool_, "True or False"),
    int: (int | np.integer, "a whole number"),
    float: (int | float | np.integer | np.floating, "a number"),
}


def _check_arguments(name: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Checks the names of the arguments of a partitioner, and that they are numbers where their defaults are."""
    for argument, value in given.items():
        if argument not in known:
            raise InvalidArgument(unknown(f"argument of partitioner {name}", argument, known))
        is_used = argument != "test_fraction" or given.get("pooled", known.get("pooled", True))
        if not is_used and value != known[argument]:
            raise InvalidArgument(
                f"test_fraction of partitioner {name} is for pooled=True (--partition-pooled): with pooled=False, the "
                "test examples are those of the source"
            )
        kind = type(known[argument])
        wanted, words = _WANTED.get(kind, (object, ""))
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind in (int, float)):
            raise InvalidArgument(f"{argument} of partitioner {name} must be {words}, found {value!r}")


def _checked(part: Partition, name: str, num_train: int, num_test: int) -> Partition:
    """The partition with arrays int64 and names that are texts, after the check that it is one of these data.

    It must come before the indices of both sets are joined: then -1 and num_train are examples of the other set.
    """
    check_type(f"what the partitioner {name} returns", part, Partition, "a tfpfl.data.Partition")
    sizes = {"train": num_train + num_test if part.pooled else num_train}
    sizes["test"] = sizes["train"] if part.pooled else num_test
    found: dict[str, list[np.ndarray]] = {}
    for what, size in sizes.items():
        found[what] = [np.asarray(own) for own in getattr(part, what)]
        for i, own in enumerate(found[what]):
            if own.ndim != 1 or (own.dtype.kind not in "iu" and len(own)):
                raise InvalidArgument(
                    f"{name} gives client {i} no list of {what} examples but {own.dtype} of shape {own.shape}: a "
                    "partitioner returns the indices of examples, integers"
                )
            if len(own) and not 0 <= int(own.min()) <= int(own.max()) < size:
                bad = int(own.min() if own.min() < 0 else own.max())
                where = "both sets together have" if part.pooled else f"the {what} set has"
                todo = "" if part.pooled else (
                    ". Indices into the train and the test set, one after the other, need Partition(..., pooled=True); "
                    f"otherwise those in `{what}` count through the {what} set alone"
                )  # fmt: skip
                raise InvalidArgument(
                    f"{name} gives client {i} the {what} example {bad}, but {where} the examples 0..{size - 1}{todo}"
                )
    if len(found["train"]) != len(found["test"]) or not found["train"]:
        raise InvalidArgument(
            f"{name} returns training examples of {len(found['train'])} clients and test examples of "
            f"{len(found['test'])}: it must be one array for each client in both, at least one"
        )
    as_int = {what: [own.astype(np.int64) for own in parts] for what, parts in found.items()}
    owner = np.repeat(np.arange(len(found["test"])), [len(own) for own in found["test"]])
    pairs, counts = np.unique(owner * sizes["test"] + np.concatenate(as_int["test"]), return_counts=True)
    if (counts > 1).any():
        client, twice = divmod(int(pairs[counts > 1][0]), sizes["test"])
        raise InvalidArgument(
            f"{name} gives client {client} the test example {twice} {counts[counts > 1][0]} times: it would count more "
            "than others in the client's score. Give it once"
        )
    names = None
    if part.names is not None and len(part.names):
        names = [str(value) for value in part.names]
        odd = [f"{plain(value)!r} is no text" for value in part.names if not isinstance(value, str)]
        if len(names) != len(found["train"]):
            odd.append(f"{len(names)} names for {len(found['train'])} clients")
        if len(set(names)) < len(names):
            odd.append(f"{len(names)} names, of which only {len(set(names))} differ")
        if odd:
            raise InvalidArgument(
                f"{name} returns names that clients cannot have ({odd[0]}): give a different text for each client, or "
                "names=None"
            )
    return Partition(as_int["train"], as_int["test"], part.pooled, names)


def _beside_training(rows: list[list[np.ndarray]], group: np.ndarray) -> int:
    """The number of validation examples, of all clients, with an example of their group in some client's training."""
    training = np.unique(group[np.concatenate([row[0] for row in rows])])
    return sum(int(np.isin(group[row[1]], training).sum()) for row in rows)
