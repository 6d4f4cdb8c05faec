"""The manifest of a federation: what its entries may be, its files and its hash.

The hash says that nothing was changed by accident. It says nothing about whoever wrote the folder, who can compute it
anew. So every entry is checked before it is used.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tfpfl.checks import DEEPEST, InvalidArgument, levels
from tfpfl.data.arrays import plain
from tfpfl.data.layout import Layout

FORMAT = 4  # the newest one; see `format_of`
SPLITS = ("train", "validation", "test")
SORTS = ("real", "count", "binary")  # of targets, see tfpfl/data/targets.py
FILES = ("x.raw", "labels.raw", "labels_local.raw", "index.raw")  # of a federation with classes


_COUNT = {"type": "integer", "minimum": 0, "maximum": 2**62}
_FLOAT32 = {"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}


def _entries(**properties: dict) -> dict:
    """The schema of an object that has all these entries, and may have others."""
    return {"type": "object", "required": list(properties), "properties": properties}


_FILE = _entries(bytes=_COUNT, sha256={"type": "string", "pattern": "^[0-9a-f]{64}$"})
_NAMES = {"type": "array", "minItems": 1, "maxItems": 2**31 - 1, "items": {"type": "string"}}
_TARGETS = _entries(
    sort={"enum": list(SORTS)},
    width={"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
    names={"anyOf": [{"type": "null"}, _NAMES]},
)
# What the lists with an item for every client hold is checked by `_check_clients`: a schema takes seconds for many.
SCHEMA = _entries(
    hash={"type": "string"},
    source=_entries(name={"type": "string"}, version={"type": "string"}, options={"type": "object"}),
    partitioner=_entries(name={"type": "string"}, arguments={"type": "object"}),
    seed=_COUNT,
    validation={"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    num_examples={"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
    clients=_entries(**{name: {"type": "array"} for name in SPLITS})
    | {"properties": {name: {"type": "array"} for name in (*SPLITS, "classes", "names")}},
)
_SHAPE = {
    "type": "array",
    "minItems": 1,
    "maxItems": 16,
    "items": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
}
_DTYPE = {"enum": ["uint8", "int32", "float16", "float32", "float64"]}  # 16 and 64 bits only for a trunk's features
SCHEMA["properties"]["trunk"] = _entries(example_shape=_SHAPE)  # only there: what the trunk's own examples are
_ARRAY = _entries(name={"type": "string"}, shape=_SHAPE, dtype=_DTYPE, scale=_FLOAT32, shift=_FLOAT32)
_INPUTS = _entries(
    kind={"enum": ["dict", "tuple"]}, arrays={"type": "array", "minItems": 1, "maxItems": 1000, "items": _ARRAY}
)
SCHEMA_OF_ARRAY = _entries(preprocessing=_entries(scale=_FLOAT32, shift=_FLOAT32), example_shape=_SHAPE, dtype=_DTYPE)
SCHEMA_OF_SEVERAL = _entries(inputs=_INPUTS)
SCHEMA_OF_CLASSES = _entries(class_names=_NAMES, clients={"required": ["classes"]})
SCHEMA_OF_TARGETS = _entries(targets=_TARGETS)


class FederationError(InvalidArgument):
    """A folder is no federation, is incomplete, was changed, or has a newer format; or it exists and must not."""


def format_of(manifest: dict) -> int:
    """The format of a federation: the lowest one, so that older versions read what they know.

    1 has classes and examples uint8 or float32, 2 has examples int32, 3 has targets instead of classes, and 4 has
    examples of several arrays.
    """
    if "inputs" in manifest:
        return 4
    if "targets" in manifest:
        return 3
    return 2 if manifest["dtype"] == "int32" else 1


def files_of(manifest: dict) -> tuple[str, ...]:
    """The names of a federation's files beside manifest.json, in their order."""
    of_y = ("targets.raw",) if "targets" in manifest else FILES[1:3]
    return (*files_of_examples(manifest), *of_y, "index.raw")


def files_of_examples(manifest: dict) -> tuple[str, ...]:
    """The files of the examples: one, or one for each of several arrays."""
    return tuple(array.file for array in Layout.of_manifest(manifest).arrays)


def plain_values(value: Any) -> Any:
    """Converts arguments to the types of JSON, so that a manifest that is read equals the one that was written."""
    if isinstance(value, Mapping):
        return {str(k): plain_values(v) for k, v in value.items()}
    if isinstance(value, list | tuple | range | np.ndarray):
        return [plain_values(v) for v in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return plain(value)


def manifest_hash(manifest: dict) -> str:
    """The sha256 of a manifest as canonical JSON, without its entry 'hash': 64 hexadecimal digits.

    Raises:
        ValueError: the manifest contains NaN or infinity, which JSON does not have.
    """
    content = {k: v for k, v in manifest.items() if k != "hash"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> dict:
    """Reads the manifest of a federation, and checks its hash and every entry.

    Raises:
        FederationError: the folder is no federation, its manifest was changed, or it has another format.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FederationError(f"{folder} is not a federation: it has no manifest.json") from None
    except NotADirectoryError:
        raise FederationError(
            f"{folder} is a file or in one, and a federation is a folder. Federation.from_table, or tfpfl partition "
            "--from FILE, makes one of a table"
        ) from None
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, long numbers
        raise FederationError(f"{folder} is not a federation: its manifest.json cannot be read ({error})") from None
    if not isinstance(manifest, dict) or "format" not in manifest or "hash" not in manifest:
        raise FederationError(f"{folder} is not a federation: its manifest.json names no format and hash")
    if manifest["format"] is True or manifest["format"] not in range(1, FORMAT + 1):
        raise FederationError(
            f"{folder} has federation format {_cut(repr(manifest['format']))}; this version of tfpfl reads formats "
            f"1 to {FORMAT}: update tfpfl, or build the federation again"
        )
    try:
        found = manifest_hash(manifest)
    except (ValueError, RecursionError) as error:  # Python reads Infinity and NaN, which are not JSON
        raise FederationError(f"{folder}/manifest.json was changed: {error}") from error
    if found != manifest["hash"]:
        raise FederationError(
            f"{folder}/manifest.json was changed: it says hash {str(manifest['hash'])[:12]}, its content has "
            f"{found[:12]}"
        )
    try:
        check_manifest(manifest)
    except FederationError as error:
        raise FederationError(f"{folder}/manifest.json was changed: {error}") from None
    return manifest


def check_manifest(manifest: dict) -> None:
    """Checks every entry of a manifest: its type, its range, and whether the sizes of the files follow from the others.

    Raises:
        FederationError: an entry is missing or wrong. The message names it.
    """
    if levels(manifest) > DEEPEST:
        raise FederationError(f"it has more than {DEEPEST} levels")
    wrong = next((error for schema in _schemas(manifest) for error in _validator()(schema).iter_errors(manifest)), None)
    if wrong is not None:
        raise FederationError(f"{wrong.json_path.removeprefix('$.')} is wrong: {_cut(wrong.message)}")
    clients = len(manifest["clients"]["train"])
    if not clients:
        raise FederationError("clients.train is wrong: there are no clients")
    total, layout = manifest["num_examples"], Layout.of_manifest(manifest)
    targets = manifest.get("targets")
    if targets and targets["names"] and len(targets["names"]) != targets["width"]:
        raise FederationError(f"targets.names has {len(targets['names'])} names, targets.width is {targets['width']}")
    names = [entry["name"] for entry in manifest.get("inputs", {}).get("arrays", [])]
    if names and manifest["inputs"]["kind"] == "dict" and names != sorted(set(names)):
        raise FederationError(f"inputs.arrays must be in the order of their names, found {_cut(repr(names))}")
    for i, array in enumerate(layout.arrays):
        if layout.whole(array) and (array.scale, array.shift) != (1, 0):
            raise FederationError(
                f"inputs.arrays[{i}] is int32, which is read as it is: scale must be 1 and shift 0, found "
                f"{array.scale} and {array.shift}"
            )
    sizes = {a.file: total * math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in layout.arrays} | {
        "labels.raw": 4 * total,
        "labels_local.raw": 4 * total,
        "targets.raw": 4 * total * (targets["width"] if targets else 0),
        "index.raw": 8 * 5 * clients,
    }
    for name in files_of(manifest):
        found, wanted = manifest["files"][name]["bytes"], sizes[name]
        if found != wanted:
            raise FederationError(
                f"files.{name}.bytes is {found}, but num_examples {total}, example_shape "
                f"{_cut(repr(manifest.get('example_shape', layout.shape)))}, dtype {_cut(str(layout.dtype))} and the "
                f"{clients} items of clients.train take {wanted}"
            )
    _check_clients(manifest["clients"], clients, total, None if targets else len(manifest["class_names"]))


def _schemas(manifest: dict) -> Iterator[dict]:
    """What a manifest must be; the last one needs that the others hold."""
    yield SCHEMA
    yield SCHEMA_OF_SEVERAL if "inputs" in manifest else SCHEMA_OF_ARRAY
    yield SCHEMA_OF_TARGETS if "targets" in manifest else SCHEMA_OF_CLASSES
    yield _entries(files=_entries(**dict.fromkeys(files_of(manifest), _FILE)))


def check_index(manifest: dict, index: np.ndarray) -> None:
    """Checks index.raw, int64 [I, 5], against a manifest that `check_manifest` accepts.

    Raises:
        FederationError: they do not say the same.
    """
    clients = manifest["clients"]
    counts = np.array([clients[split] for split in SPLITS]).T
    ends = np.cumsum(counts.sum(1))
    targets = manifest.get("targets")
    outputs = np.full(len(ends), targets["width"]) if targets else [len(c) for c in clients["classes"]]
    expected = np.column_stack([ends - counts.sum(1), counts, outputs])
    if not np.array_equal(index, expected):
        bad = int(np.argmax((index != expected).any(1)))
        found, wanted = index[bad].tolist(), expected[bad].tolist()
        raise FederationError(f"index.raw was changed: client {bad} has {found}, by clients in manifest.json {wanted}")


def check_labels(manifest: dict, index: np.ndarray, labels: np.ndarray, local: np.ndarray) -> None:
    """Checks the labels of all examples, int32 [N], against a manifest and an index that were checked.

    Raises:
        FederationError: a label is none of its client's classes, or a local label is not the rank of its class.
    """
    classes = list(chain.from_iterable(manifest["clients"]["classes"]))
    k = np.repeat(index[:, 4], index[:, 1:4].sum(1))
    first = np.repeat(np.cumsum(index[:, 4]) - index[:, 4], index[:, 1:4].sum(1))
    inside = (local >= 0) & (local < k)
    named = np.asarray(classes, np.int64)[first + np.where(inside, local, 0)]
    for file, wrong in (("labels_local.raw", ~inside), ("labels.raw", named != labels)):
        if wrong.any():
            raise FederationError(
                f"{file} was changed: the label of example {int(np.argmax(wrong))} is no class of its client"
            )


def _check_clients(clients: dict, number: int, total: int, labels: int | None) -> None:
    for name, values in clients.items():
        if name in (*SPLITS, "classes", "names") and len(values) != number:
            raise FederationError(f"clients.{name} has {len(values)} items, clients.train {number}")

    def check(name: str, values: list, fine: Callable[[Any], bool], wanted: str) -> None:
        bad = next((i for i, value in enumerate(values) if not fine(value)), None)
        if bad is not None:
            raise FederationError(f"clients.{name}[{bad}] must be {wanted}, found {_cut(repr(values[bad]))}")

    check("train", clients["train"], lambda n: type(n) is int and 1 <= n <= total, "a count from 1 on")
    for split in SPLITS[1:]:
        check(split, clients[split], lambda n: type(n) is int and 0 <= n <= total, "a count from 0 on")
    check("names", clients.get("names", []), lambda name: isinstance(name, str), "a text")
    if labels is not None:
        check(
            "classes",
            clients["classes"],
            lambda c: isinstance(c, list) and bool(c) and all(type(k) is int and 0 <= k < labels for k in c)
            and all(a < b for a, b in zip(c, c[1:], strict=False)),
            f"a list of class ids, ascending, from 0 to {labels - 1} as in class_names",
        )  # fmt: skip
    added = sum(sum(clients[split]) for split in SPLITS)
    if added != total:
        raise FederationError(f"num_examples is {total}, but clients.train, .validation and .test add up to {added}")


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator  # here: most commands open no federation
    from jsonschema.validators import extend

    # 1.0 is an integer for the standard, and not for an array's shape
    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    return extend(Draft202012Validator, type_checker=types)


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
