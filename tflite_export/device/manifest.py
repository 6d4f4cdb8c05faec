"""What the entries of a bundle's manifest may be. Needs NumPy only, as everything on a device.

The hash in a manifest says that nothing was changed by accident. Whoever sends a bundle can compute it anew, so every
entry that is used is checked when the bundle is opened.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tflite_export.device.arrays import check_sizes
from tflite_export.device.errors import InvalidInput, shown
from tflite_export.device.head_file import repeated
from tflite_export.device.kinds import PATTERN
from tflite_export.device.layout import HEAD, THETA

LARGEST = 2**31 - 1
LARGEST_NUMBER = 3.4e38  # float32 has no larger ones
MOST_STATIC_BATCH = 4096  # examples in a program of fixed shapes, for which memory is taken; tfpfl writes 32
MOST_ROOM = 2**16  # classes of a program for browsers
HEAD_HEADER = 52  # bytes; see head_file.py


class Number(NamedTuple):
    """A number in [low, high]; `whole` excludes fractions, `none` allows null."""

    low: float = -LARGEST_NUMBER
    high: float = LARGEST_NUMBER
    whole: bool = False
    none: bool = False


class Text(NamedTuple):
    """A text that the pattern matches from its beginning to its end."""

    pattern: str = "(?s:.*)"
    what: str = "a text"


class Several(NamedTuple):
    """A list of at least `least` items, or (`named`) an object with any names; each item follows `of`."""

    of: Any
    least: int = 0
    named: str | None = None  # the pattern of the names


class Optional(NamedTuple):
    """An entry that may be missing."""

    of: Any


MANY = Number(1, MOST_STATIC_BATCH, whole=True)
COUNT, ID = Number(1, LARGEST, whole=True), Number(0, LARGEST, whole=True)
_TENSORS = Several(
    Text(r"(float32|int32)\[(-?[0-9]+(, -?[0-9]+)*)?\]", "a dtype and a shape"), named="[A-Za-z0-9_]{1,40}"
)
_SHAPE = Several(COUNT, least=1)
_FILE = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,80}"  # no folder
_SHA256 = Text("[0-9a-f]{64}", "64 hexadecimal digits")
_ARRAY = {
    "name": Text(),
    "shape": Several(COUNT),
    "dtype": Text("float32|int32", "float32 or int32"),
    "offset": ID,
    "num_tokens": Optional(COUNT),
}
# A dict here is an object that has these entries, and may have others.
RULES = {
    "model": {
        "example_shape": _SHAPE,
        "example_dtype": Optional(Text("float32|int32", "float32 or int32")),
        "num_tokens": Optional(COUNT),
        "inputs": Optional({"kind": Text("dict|tuple", "dict or tuple"), "arrays": Several(_ARRAY, least=1)}),
        "num_features": COUNT,
        "num_classes": COUNT,
        "num_backbone_weights": COUNT,
        "static_batch": MANY,
        "kind": Optional(Text(PATTERN, "a kind of labels besides classification")),
        "theta": Several({"name": Text(), "shape": Several(COUNT), "offset": ID}),
    },
    "trunk": Optional({"file": Text(_FILE, "a file name"), "raw_shape": _SHAPE, "sha256": _SHA256}),
    "training": {
        "tau": COUNT,
        "beta": Number(0),
        "rho": Number(0, none=True),
        "head_rate": Number(0, none=True),
        "safeguard": bool,
        "rounds": bool,
    },
    "preprocessing": {
        "scale": Optional(Number()),
        "shift": Optional(Number()),
        "stored_dtype": Optional(Text()),
        "columns": Optional(Several(Text(), least=1)),  # of a table, in the order of an example's numbers
    },
    "labels": {
        "names": Several(Text("(?s:.+)", "a text of one or more characters"), least=1),
        "class_ids": Several(ID, least=1),
    },
    "signatures": Several({"inputs": _TENSORS, "outputs": _TENSORS}, named="[A-Za-z0-9_]{1,40}"),
    "files": Several(
        {
            "bytes": Number(0, 2**62, whole=True),
            "sha256": _SHA256,
            "operations": Optional(Several(COUNT, named=".{1,80}")),
        },
        named=_FILE,
    ),
    "quality": Optional(Several(dict, named=".{1,80}")),
    "runtimes": Optional({"tested": Several(Text()), "minimum": Several(Text(), named=".{1,80}")}),
    "memory": Optional(Several(dict)),
    "check": {
        "max_relative": Number(0, none=True),
        "l2_relative": Number(0),
        "outputs": Optional(Several(Number(0), named="[A-Za-z0-9_.]{1,80}")),
        "files": Optional(Several(Number(0), named=_FILE)),
    },
    "browser": Optional({"room": Number(1, MOST_ROOM, whole=True), "batch": MANY, "head_batch": MANY}),
}


def check_manifest(manifest: dict) -> None:
    """Checks the entries of a manifest: types, ranges, and whether sizes that follow from one another agree.

    Raises:
        InvalidInput: an entry is missing or wrong. The message names it.
    """
    _check(manifest, RULES, "")
    model, files = manifest["model"], manifest["files"]
    p, m, k = (model[name] for name in ("num_backbone_weights", "num_features", "num_classes"))
    wanted = {THETA: 4 * p, HEAD: HEAD_HEADER + 4 * (m + 1) * k}
    for name, size in wanted.items():
        if name not in files:
            raise InvalidInput(f"files.{name} is missing")
        if files[name]["bytes"] != size:
            raise InvalidInput(f"files.{name}.bytes is {files[name]['bytes']}, but the sizes in model take {size}")
    end = 0
    for i, row in enumerate(model["theta"]):
        if row["offset"] != end:
            raise InvalidInput(f"model.theta[{i}].offset is {row['offset']}, but the weights before take {end} numbers")
        end += math.prod(row["shape"])
    if end != p:
        raise InvalidInput(f"model.num_backbone_weights is {p}, but model.theta has {end} numbers")
    names, ids = manifest["labels"]["names"], manifest["labels"]["class_ids"]
    if len(names) != k or len(ids) > k:  # a head that clients share may be wider than this client's classes
        raise InvalidInput(f"labels has {len(names)} names and {len(ids)} class_ids for {k} classes")
    if (twice := repeated(names)) is not None:
        raise InvalidInput(f"labels.names must differ, found {shown(twice)} twice")
    if "inputs" in model:
        check_sizes(model["inputs"], model["example_shape"])
    trunk = manifest.get("trunk")
    if trunk is not None and trunk["file"] not in files:
        raise InvalidInput(f"trunk.file is {trunk['file']}, which is not among the files")
    room = manifest.get("browser", {}).get("room")
    if room is not None and room < k:
        raise InvalidInput(f"browser.room is {room}, but the model has {k} classes")


def check_entry(name: str, value: Any) -> None:
    """Checks one entry of a manifest, such as 'training', by itself.

    Raises:
        InvalidInput: it is wrong. The message names what is.
    """
    _check(value, RULES[name], name)


def _check(value: Any, rule: Any, place: str) -> None:
    if isinstance(rule, Optional):
        rule = rule.of
    if isinstance(rule, dict):
        _expect(isinstance(value, dict), value, place, "an object")
        for name, entry in rule.items():
            inner = f"{place}.{name}" if place else name
            if name in value:
                _check(value[name], entry, inner)
            elif not isinstance(entry, Optional):
                raise InvalidInput(f"{inner} is missing")
    elif isinstance(rule, Several):
        _check_several(value, rule, place)
    elif isinstance(rule, Number):
        _check_number(value, rule, place)
    elif isinstance(rule, Text):
        _expect(isinstance(value, str) and re.fullmatch(rule.pattern, value) is not None, value, place, rule.what)
    else:
        _expect(isinstance(value, rule), value, place, {bool: "true or false", dict: "an object"}[rule])


def _check_several(value: Any, rule: Several, place: str) -> None:
    if rule.named is None:
        _expect(isinstance(value, list) and len(value) >= rule.least, value, place, f"a list of {rule.least} or more")
        for i, item in enumerate(value):
            _check(item, rule.of, f"{place}[{i}]")
        return
    _expect(isinstance(value, Mapping), value, place, "an object")
    for name, item in value.items():
        _expect(re.fullmatch(rule.named, name) is not None, name, f"a name in {place}", "a plain name")
        _check(item, rule.of, f"{place}.{name}")


def _check_number(value: Any, rule: Number, place: str) -> None:
    if value is None and rule.none:
        return
    kinds = int if rule.whole else (int, float)
    fine = isinstance(value, kinds) and not isinstance(value, bool) and rule.low <= value <= rule.high
    what = f"{'an integer' if rule.whole else 'a number'} from {rule.low} to {rule.high}"
    _expect(fine, value, place, what)


def _expect(fine: bool, value: Any, place: str, what: str) -> None:
    if not fine:
        raise InvalidInput(f"{place} must be {what}, found {shown(value)}")
