"""Writes the folder of a federation. The folder appears complete, or not at all."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from tfpfl.checks import InvalidArgument, check_numbers, check_type, one_line, warn_user
from tfpfl.data.manifest import (
    SPLITS,
    FederationError,
    check_manifest,
    files_of_examples,
    format_of,
    manifest_hash,
    plain_values,
)
from tfpfl.data.randomness import Stream, generator
from tfpfl.data.source import Source
from tfpfl.data.targets import check_values


def absent(out: str | os.PathLike) -> Path:
    """The absolute path of a folder that does not exist yet.

    Raises:
        FederationError: the folder exists, also as a link that leads nowhere; or it would be inside of a file.
        InvalidArgument: `out` is no path.
    """
    check_type("out", out, (str, os.PathLike), "the path of the folder to make")
    out = Path(os.path.abspath(out))
    if os.path.lexists(out):
        raise FederationError(
            f"{out} exists already{_held(out)}. Open it with Federation.load, or build into another folder"
        )
    inside = next(path for path in out.parents if os.path.lexists(path))
    if not inside.is_dir():
        raise FederationError(f"{out} cannot be made: {inside} is no folder. Build into another one")
    return out


def _held(out: Path) -> str:
    """What the federation in a folder is, for a message; nothing if there is none that can be read."""
    try:
        manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
        made, clients = manifest["partitioner"], len(manifest["clients"]["train"])
        arguments = ", ".join(f"{name}={value}" for name, value in made["arguments"].items())
        found = f"{manifest['source']['name']}, {made['name']}({arguments}), {clients} clients"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    return f" ({one_line(found)[:200]})"


def describe_source(source: Source) -> dict:
    """The entries of the manifest about the source: name, version, options, preprocessing, classes, shape and dtype."""
    return {
        "source": {"name": source.name, "version": source.version, "options": plain_values(source.options)},
        "preprocessing": {"scale": float(source.scale), "shift": float(source.shift)},
        "class_names": list(source.class_names),
        "example_shape": list(source.x_train.shape[1:]),
        "dtype": source.x_train.dtype.name,
    }


def cut_validation(
    rows: list[list[np.ndarray]],
    y: np.ndarray,
    group: np.ndarray | None,
    fraction: float,
    seed: int,
    names: Sequence[Any],
    given: Sequence[bool] | None = None,
) -> None:
    """Moves floor(fraction * N_i) of every client's training examples to its validation part.

    Every class gives its share to within one example: the examples are shuffled, sorted by class, and taken at equal
    distances from a random start. Examples of one group, such as the rotations of one drawing, stay together.

    Args:
        rows: per client a list [train, validation, test] of indices, int [n] each; changed in place.
        y: int [N], the class of every example.
        group: int [N], the group of every example, or None if there are no groups.
        fraction: the fraction of each client's training examples, in [0, 1).
        seed: the seed of the cut, >= 0.
        names: the clients' names, for errors.
        given: bool per client: it has validation examples already, and is left as it is. None: no client has.

    Raises:
        InvalidArgument: `fraction` is outside [0, 1), or a client would keep fewer than 2 training examples.
    """
    check_numbers(validation=fraction)
    if not 0 <= fraction < 1:
        raise InvalidArgument(f"validation must lie in [0, 1), found {fraction}")
    for i, row in enumerate(rows):
        train = row[0]
        if not (given and given[i]) and fraction:
            rng = generator(seed, Stream.VALIDATION, i)
            unit = train if group is None else np.unique(group[train])
            count = int(fraction * len(unit) + 1e-9)
            if count:
                of_unit = y[unit] if group is None else y[train][np.unique(group[train], return_index=True)[1]]
                mixed = rng.permutation(len(unit))
                ordered = mixed[np.argsort(of_unit[mixed], kind="stable")]
                taken = ordered[((np.arange(count) + rng.random()) * len(unit) / count).astype(np.int64)]
                out = np.isin(train if group is None else group[train], unit[taken])
                row[0], row[1] = train[~out], train[out]
        if len(row[0]) < 2:
            raise InvalidArgument(
                f"client {names[i]} has {len(row[0])} training examples left of {sum(map(len, row))}: "
                f"{len(row[1])} were set aside for validation, {len(row[2])} for test. Every client needs at least 2: "
                "take fewer clients, or give this client more examples, or leave it out"
            )


def write_federation(
    out: Path,
    pools: Sequence[Sequence[np.ndarray]],
    y: np.ndarray,
    rows: Sequence[Sequence[np.ndarray]],
    manifest: dict[str, Any],
    names: Iterable[str] | None,
) -> Path:
    """Writes a federation to a temporary folder, syncs it to disk, and renames it to `out`.

    Args:
        out: the folder to make; it must not exist yet.
        pools: for each file of examples, the source's training and test examples. Indices count through both, one after
            the other.
        y: int [N], the global class of every example of the pools; or float32 [N, D], its targets, if the manifest
            has an entry 'targets'.
        rows: per client the indices of its train, validation and test examples.
        manifest: the entries about the source and the partition.
        names: the names of the clients, or None.

    Returns:
        `out`.

    Raises:
        InvalidArgument: a label is outside [0, C), an example is not finite, training and test examples differ in dtype
            or shape, a target is no number of its sort, an entry of the manifest could not be read again, or the rows
            use an example that does not exist, or one example twice for training, or for training and for test.
        FederationError: another process has made `out` meanwhile.
    """
    _check_arguments(manifest)
    targets = manifest.get("targets")
    if targets is None:
        num_labels = len(manifest["class_names"])
        if y.min() < 0 or y.max() >= num_labels:
            raise InvalidArgument(f"labels must be class ids 0..{num_labels - 1}, found {y.min()}..{y.max()}")
    counts = np.array([[len(part) for part in row] for row in rows], np.int64)
    order = np.concatenate([part for row in rows for part in row]).astype(np.int64)
    client_of = np.repeat(np.arange(len(rows)), counts.sum(1))
    is_test = np.repeat(np.tile([False, False, True], len(rows)), counts.ravel())
    _check_order(order, is_test, len(y))
    for pool in pools:
        _check_alike(*pool)

    files_of_x = files_of_examples(manifest)
    contents: dict[str, Iterable[np.ndarray]]
    contents = {name: _examples(pool, order, client_of) for name, pool in zip(files_of_x, pools, strict=True)}
    of_clients: dict[str, list] = {split: counts[:, i].tolist() for i, split in enumerate(SPLITS)}
    if targets is None:
        # K_i is the size of the union of the parts' classes; a local label is the rank of its class in that union.
        labels = y[order].astype(np.int64)
        pairs, place = np.unique(client_of * num_labels + labels, return_inverse=True)
        num_classes = np.bincount(pairs // num_labels, minlength=len(rows))
        first = np.cumsum(num_classes) - num_classes
        local = place.reshape(-1) - first[client_of]
        of_clients["classes"] = [part.tolist() for part in np.split(pairs % num_labels, first[1:])]
        _say_untrained(counts, client_of, labels, names, manifest["class_names"])
        contents |= {"labels.raw": [labels.astype("<i4")], "labels_local.raw": [local.astype("<i4")]}
    else:
        num_classes = np.full(len(rows), targets["width"])
        with np.errstate(over="ignore"):  # the check says it
            values = y[order].astype("<f4")
        for i, own in enumerate(np.split(values, np.cumsum(counts.sum(1))[:-1])):  # `Source(...)` itself checks nothing
            check_values(own, targets["sort"], f"client {i}:")
        contents["targets.raw"] = [values]
    start = np.cumsum(counts.sum(1)) - counts.sum(1)
    contents["index.raw"] = [np.column_stack([start, counts, num_classes]).astype("<i8")]
    out.parent.mkdir(parents=True, exist_ok=True)
    with _partial_folder(out) as partial:
        files = {name: _write_blocks(partial / name, blocks) for name, blocks in contents.items()}
        if names:
            of_clients["names"] = list(names)
        manifest = {"format": format_of(manifest)} | manifest
        manifest |= {"num_examples": len(order), "clients": of_clients, "files": files}
        manifest["hash"] = manifest_hash(manifest)
        try:
            check_manifest(manifest)
        except FederationError as error:  # as `load` would say it, of a folder that is finished
            raise InvalidArgument(f"the federation could not be opened again: {error}. Give another value") from None
        with open(partial / "manifest.json", "w", encoding="utf-8") as file:
            json.dump(manifest, file, ensure_ascii=True, allow_nan=False)
            sync_file(file)
        sync_folder(partial)
        try:
            os.rename(partial, out)  # fails where another process has filled `out` meanwhile
        except OSError as error:
            raise FederationError(f"cannot move the finished federation to {out}: {error}") from None
        sync_folder(out.parent)
    return out


@contextmanager
def _partial_folder(out: Path) -> Iterator[Path]:
    """Makes a folder beside `out` to write in, and removes it after an error. Nobody can remove it after kill -9.

    So each building first removes what killed ones have left beside it. A folder is locked while it is written. Where
    machines share a folder, none sees the other's locks of folders, so each removes only what has its mark.
    """
    mark = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    for left in out.parent.glob(".*.partial"):
        if re.fullmatch(rf"\..+\.{mark}[0-9a-f]{{8}}\.partial", left.name):
            with suppress(OSError):  # what cannot be locked may be in use
                if (lock := _locked(left)) is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(lock)
    lock = None
    while lock is None:  # again where another process has removed it in the moment before it was locked
        partial = out.with_name(f".{out.name}.{mark}{uuid.uuid4().hex[:8]}.partial")
        partial.mkdir()
        try:
            lock = _locked(partial)
        except OSError:
            partial.rmdir()
            raise
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Waits until no other process is in such a block for this file or folder, whose own folder must exist.

    The lock is `.NAME.lock` beside it. It ends with the process, also with a killed one.
    """
    with open(path.with_name(f".{path.name}.lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _locked(folder: Path) -> int | None:
    """Locks a folder until this number is closed or the process ends; None if it is gone, or another process has it.

    Raises:
        OSError: it cannot be locked at all, such as on a file system without locks.
    """
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(number), os.stat(folder)):
            return number
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(number)
        raise
    os.close(number)
    return None


def _check_order(order: np.ndarray, is_test: np.ndarray, num_examples: int) -> None:
    """Checks that every example of a partition exists, and that a training example is used only once.

    Args:
        order: int [n], the examples that the partition uses.
        is_test: bool [n], whether each is used for test.
        num_examples: the number of examples in the pool.
    """
    if not len(order) or order.min() < 0 or order.max() >= num_examples:
        raise InvalidArgument(f"the partition is empty, or uses examples outside 0..{num_examples - 1}")
    trained, tested = np.zeros((2, num_examples), np.int64)
    np.add.at(trained, order[~is_test], 1)
    np.add.at(tested, order[is_test], 1)
    if (trained > 1).any():
        bad = int(np.argmax(trained > 1))
        raise InvalidArgument(f"the partition gives example {bad} out for training {trained[bad]} times, not once")
    if (trained & (tested > 0)).any():
        bad = int(np.argmax(trained & (tested > 0)))
        raise InvalidArgument(f"the partition gives example {bad} out for training and for test")


def _check_alike(train: np.ndarray, test: np.ndarray) -> None:
    """Checks that training and test examples can be in one file: `Source(...)` itself checks nothing."""
    one, other = ((x.dtype.newbyteorder("="), x.shape[1:]) for x in (train, test))
    if len(test) and one != other:
        raise InvalidArgument(
            f"training and test examples must be alike in dtype and shape, found {one[0]} {one[1]} and {other[0]} "
            f"{other[1]}: what is changed in one part of a source is to be changed in both"
        )


def _check_arguments(manifest: dict) -> None:
    """Checks that JSON has the arguments of the partitioner and of the source, before large files are written."""
    for what, entry in (("the partitioner", "partitioner"), ("the source", "source")):
        values = manifest[entry].get("arguments", manifest[entry].get("options", {}))
        for name, value in values.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError):
                raise InvalidArgument(
                    f"the argument {name} of {what} is {one_line(repr(value), 60)}, which the manifest cannot keep: "
                    "give texts, finite numbers, True, False, None, or lists and dicts of these"
                ) from None


SHOWN = 5  # at most so many clients and classes are named


def _say_untrained(
    counts: np.ndarray, client_of: np.ndarray, labels: np.ndarray, names: Iterable[str] | None, classes: Sequence[str]
) -> None:
    """Warns of test examples whose class their client does not have among its training examples.

    Args:
        counts: int [I, 3], the numbers of train, validation and test examples.
        client_of, labels: int [n], the client and the class of every example, ordered by client and split.
        names: the names of the clients, or None.
        classes: the names of the classes.
    """
    split = np.repeat(np.tile(np.arange(3), len(counts)), counts.ravel())
    code = client_of * len(classes) + labels
    lost = code[(split == 2) & ~np.isin(code, np.unique(code[split == 0]))]
    if not len(lost):
        return
    pairs, numbers = np.unique(lost, return_counts=True)
    named = list(names) if names else None
    shown = "; ".join(
        f"client {one_line(named[pair // len(classes)] if named else pair // len(classes), 40)}: class "
        f"{one_line(classes[pair % len(classes)], 40)}, {number} example{'s' if number > 1 else ''}"
        for pair, number in zip(pairs[:SHOWN].tolist(), numbers[:SHOWN].tolist(), strict=True)
    )
    more = f"; and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
    nowhere = np.setdiff1d(labels[split == 2], labels[split == 0])
    if len(nowhere):
        listed = ", ".join(one_line(classes[k], 40) for k in nowhere[:SHOWN].tolist())
        more += f". No client at all has training examples of class {listed}{', ...' if len(nowhere) > SHOWN else ''}"
    warn_user(
        f"{len(lost)} of {counts[:, 2].sum()} test examples are of a class that their client lacks in training "
        f"({shown}{more}). They count in every test score: give these clients training examples of the class, or leave "
        "the test examples out"
    )


def _examples(pools: Sequence[np.ndarray], order: np.ndarray, client_of: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the examples `order` in blocks of about 16 MB. Indices count through both pools, one after the other."""
    edge, chunk = len(pools[0]), max(1, 2**24 // max(pools[0][:1].nbytes, 1))
    dtype = pools[0].dtype.newbyteorder("=")  # in which the files are read
    for begin in range(0, len(order), chunk):
        part = order[begin : begin + chunk]
        block = np.empty((len(part), *pools[0].shape[1:]), dtype)
        inside = part < edge
        block[inside] = pools[0][part[inside]]
        block[~inside] = pools[1][part[~inside] - edge]
        if block.dtype.kind == "f" and not np.isfinite(block).all():  # `Source(...)` itself checks nothing
            bad = np.flatnonzero(~np.isfinite(block).reshape(len(part), -1).all(1))
            raise InvalidArgument(
                f"examples must be finite: {len(bad)} are not, the first is of client {client_of[begin + bad[0]]}"
            )
        yield block


def _write_blocks(path: Path, blocks: Iterable[np.ndarray]) -> dict[str, Any]:
    """Writes the arrays one after the other and syncs the file; returns {'bytes', 'sha256'} for the manifest."""
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for block in blocks:
            data = np.ascontiguousarray(block).data.cast("B")
            file.write(data)
            digest.update(data)
            size += data.nbytes
        sync_file(file)
    return {"bytes": size, "sha256": digest.hexdigest()}


def sync_file(file: IO[Any]) -> None:
    """Writes what is still in memory of an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Writes to the disk which names a folder has. Some file systems cannot, and do it by themselves."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(handle)
