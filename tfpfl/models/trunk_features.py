"""The features of a trunk: computed once for every example, kept in a folder, and read as a federation of their own.

The folder is that of a federation whose examples are the features; the labels are copied. Its manifest says in the
entry 'trunk' which trunk and which federation they are of. While it is computed, it is a hidden folder that ends in
.partial. A file in it has the sha256 of every block of features that is on the disk, so that another process goes on
after the last one if this one is killed.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument, traced_by_design
from tfpfl.data.federation import Federation
from tfpfl.data.manifest import FederationError, manifest_hash
from tfpfl.data.writing import alone, sync_file, sync_folder
from tfpfl.models.split import SplitModel
from tfpfl.models.trunk import Trunk

STORED = ("float16", "float32", "float64")
BLOCK_BYTES = 2**24  # of features; after each block the file is synced to the disk
_AT_ONCE = 2**28  # bytes of activations of the examples that go through the trunk together
_PROBES = 8  # examples that are computed again whenever the folder is opened
# What a probe may differ by, relative to the largest feature: other batches and versions round in another way.
_ROUNDING = {"float16": 1e-2, "float32": 1e-4, "float64": 1e-9}


def trunk_federation(
    model: SplitModel,
    federation: Federation,
    cache: str | os.PathLike | None = None,
    *,
    dtype: str | None = None,
    report: Callable[[int, int], None] | None = None,
) -> tuple[Federation, SplitModel]:
    """The federation whose examples are the features of a model's trunk, and the model that takes them.

    The features are computed once and kept. Another call, also by another process at the same time, opens what is
    there. Training the model above on them gives what training the whole model gives, without the trunk's work.

    Args:
        model: a `SplitModel` with `train_from`.
        federation: the federation of the examples.
        cache: the folder that has the folders of features, one for each trunk, federation and dtype. Default: beside
            the federation's folder, as NAME.trunks.
        dtype: in which the features are stored: 'float16', 'float32' or 'float64'. Default: the model's. 'float16'
            halves the size and rounds the features to three digits.
        report: function (examples that are done, examples in all), called from time to time while they are computed.

    Returns:
        (features, above): a `Federation` with the same clients, splits and labels, and `model.above`.

    Raises:
        InvalidArgument: the model has no trunk; its input is not the federation's example; a feature is not finite.
        FederationError: the folder was changed, or it was written by another trunk.

    Examples:
        >>> from tfpfl.models import build_network
        >>> model = SplitModel(build_network("fedavg_cnn", (16, 16, 1)), train_from="dense")
        >>> model.num_backbone_weights, model.above.input_shape
        (33280, (64,))
    """
    trunk = model.trunk
    if trunk is None or model.above is None:
        raise InvalidArgument("the model has no trunk: all of its backbone trains. Give SplitModel a train_from")
    stored = dtype or str(trunk.dtype)
    if stored not in STORED:
        raise InvalidArgument(f"dtype must be one of {', '.join(STORED)}, found {stored!r}")
    if trunk.input_shape != federation.example_shape:
        raise InvalidArgument(
            f"the trunk takes examples of shape {trunk.input_shape}, the federation's are {federation.example_shape}"
        )
    folder = features_folder(trunk, federation, cache, stored)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            if not folder.exists():  # otherwise another process has just made it
                _compute(trunk, federation, folder, stored, report)
    return _opened(trunk, federation, folder, stored), model.above


def features_folder(
    trunk: Trunk, federation: Federation, cache: str | os.PathLike | None = None, dtype: str | None = None
) -> Path:
    """The folder in which `trunk_federation` keeps the features; it may not exist yet. For arguments see there."""
    place = federation.path.with_name(f"{federation.path.name}.trunks") if cache is None else Path(cache)
    key = "-".join((trunk.hash, federation.hash, dtype or str(trunk.dtype)))
    return Path(os.path.abspath(place)) / hashlib.sha256(key.encode()).hexdigest()[:32]


def _described(trunk: Trunk, federation: Federation, stored: str) -> dict[str, Any]:
    """The manifest of the features, without what depends on the file of the features."""
    manifest = federation.manifest
    of_trunk = {name: manifest[name] for name in ("example_shape", "dtype", "preprocessing")}
    of_trunk |= {"hash": trunk.hash, "federation_hash": federation.hash}
    made = {"example_shape": list(trunk.shape), "dtype": stored, "preprocessing": {"scale": 1.0, "shift": 0.0}}
    return {k: v for k, v in manifest.items() if k != "hash"} | made | {"trunk": of_trunk}


def _forward(trunk: Trunk, federation: Federation, stored: str) -> Callable[[np.ndarray], np.ndarray]:
    """Makes a function from stored examples [n, ...] to their features [n, ...]."""

    (array,) = federation.layout.arrays
    as_stored = trunk.reads == "whole" and (array.scale, array.shift) == (1, 0)  # ids, all of which no float holds

    def forward(weights: tuple, raw: Any) -> Any:
        return trunk.apply(weights, raw if as_stored else federation.decode(raw, trunk.dtype))

    weights = tuple(map(tf.constant, trunk.weights))
    example = tf.TensorSpec([None, *federation.example_shape], federation.manifest["dtype"])
    signature = [tuple(tf.TensorSpec(w.shape, w.dtype) for w in weights), example]
    graph = traced_by_design(tf.function(forward, signature, autograph=False))
    at_once = max(1, min(256, _AT_ONCE // max(trunk.activation_bytes, 1)))

    def features(raw: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # what is too large for float16 is refused by the caller
            parts = [graph(weights, raw[i : i + at_once]).numpy().astype(stored) for i in range(0, len(raw), at_once)]
        return np.concatenate(parts)

    return features


def _compute(
    trunk: Trunk, federation: Federation, folder: Path, stored: str, report: Callable[[int, int], None] | None
) -> None:
    """Computes the features of all examples, or those that are missing, and renames the finished folder."""
    manifest, partial = _described(trunk, federation, stored), _partial(folder)
    partial.mkdir(exist_ok=True)
    total, row = manifest["num_examples"], math.prod(trunk.shape) * np.dtype(stored).itemsize
    block = max(1, min(BLOCK_BYTES // row, 4096))
    done, digest = _done(partial, block * row)
    forward = _forward(trunk, federation, stored)
    raw = np.memmap(
        federation.path / "x.raw", federation.manifest["dtype"], mode="r", shape=(total, *federation.example_shape)
    )
    with open(partial / "x.raw", "r+b") as file, open(partial / "blocks", "a", encoding="ascii") as blocks:
        file.truncate(done * block * row)
        file.seek(0, os.SEEK_END)
        for start in range(done * block, total, block):
            phi = forward(np.asarray(raw[start : start + block]))
            if not np.isfinite(phi).all():
                bad = start + int(np.argmin(np.isfinite(phi).reshape(len(phi), -1).all(1)))
                shutil.rmtree(partial, ignore_errors=True)
                raise InvalidArgument(
                    f"the trunk's features of example {bad} of {federation.path} are not finite as {stored}: "
                    + ("store them as float32" if stored == "float16" else "look at the trunk's weights")
                )
            file.write(phi.tobytes())
            sync_file(file)
            digest.update(phi.tobytes())
            blocks.write(f"{hashlib.sha256(phi.tobytes()).hexdigest()}\n")
            sync_file(blocks)
            if report is not None:
                report(min(start + block, total), total)
    manifest["files"] = dict(manifest["files"]) | {"x.raw": {"bytes": total * row, "sha256": digest.hexdigest()}}
    for name in set(manifest["files"]) - {"x.raw"}:
        shutil.copyfile(federation.path / name, partial / name)
        with open(partial / name, "r+b") as copy:
            sync_file(copy)
    (partial / "blocks").unlink()
    manifest["hash"] = manifest_hash(manifest)
    with open(partial / "manifest.json", "w", encoding="utf-8") as text:
        json.dump(manifest, text, ensure_ascii=True, allow_nan=False)
        sync_file(text)
    sync_folder(partial)
    os.rename(partial, folder)
    sync_folder(folder.parent)


def _done(partial: Path, size: int) -> tuple[int, Any]:
    """How many blocks of `size` bytes an earlier process has finished, and the sha256 of them; makes missing files."""
    digest, lines = hashlib.sha256(), []
    for name in ("x.raw", "blocks"):
        (partial / name).touch()
    for line in (partial / "blocks").read_bytes().splitlines(keepends=True):
        if not re.fullmatch(rb"[0-9a-f]{64}\n", line):
            break
        lines.append(line)
    done = 0
    with open(partial / "x.raw", "rb") as file:
        for line in lines:
            block = file.read(size)
            if len(block) != size or hashlib.sha256(block).hexdigest() != line.decode().strip():
                break  # the last one may be shorter, and is computed again
            digest.update(block)
            done += 1
    (partial / "blocks").write_bytes(b"".join(lines[:done]))
    return done, digest


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _opened(trunk: Trunk, federation: Federation, folder: Path, stored: str) -> Federation:
    """Opens a finished folder: its files are hashed, its manifest is compared, and some examples are computed again."""
    hint = f"Delete {folder}, and the features are computed again"
    try:
        features = Federation.load(folder)
    except FederationError as error:
        raise FederationError(f"{error}. {hint}") from error
    expected = _described(trunk, federation, stored)
    differ = [name for name in expected if name != "files" and features.manifest.get(name) != expected[name]]
    files = {k: v for k, v in expected["files"].items() if k != "x.raw"}
    if differ or any(features.manifest["files"].get(name) != entry for name, entry in files.items()):
        what = ", ".join(differ) or "files"
        raise FederationError(f"{folder} has features of another trunk or federation (they differ in {what}). {hint}")
    total = expected["num_examples"]
    rows = np.unique(np.linspace(0, total - 1, _PROBES).astype(np.int64))
    raw, kept = (
        np.memmap(f.path / "x.raw", f.manifest["dtype"], mode="r", shape=(total, *f.example_shape))[rows]
        for f in (federation, features)
    )
    again = _forward(trunk, federation, str(trunk.dtype))(np.asarray(raw)).astype(np.float64)
    largest = max(np.abs(again).max(), np.finfo(np.float64).tiny)  # which is 0 if all features are
    step = np.finfo(stored).smallest_subnormal  # float16 rounds the smallest numbers by as much, whatever their size
    differ_by = np.maximum(np.abs(again - kept).max() - step, 0) / largest
    most = max(_ROUNDING[stored], _ROUNDING[str(trunk.dtype)])
    if not differ_by <= most:
        raise FederationError(
            f"{folder} does not have this trunk's features: {len(rows)} examples were computed again, and differ by "
            f"{differ_by:.2g} of the largest feature, over {most:g}. {hint}"
        )
    return features
