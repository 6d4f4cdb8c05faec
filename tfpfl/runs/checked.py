"""Checks of single entries of a configuration: their types, and the files that they name."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tfpfl.checks import InvalidArgument
from tfpfl.data.arrays import as_written
from tfpfl.data.manifest import plain_values


def file_hash(path: Path) -> str:
    """The sha256 of a network's file, in hexadecimal digits.

    Raises:
        InvalidArgument: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InvalidArgument(f"the network {path} cannot be read: {error.strerror}") from error


def plain_entry(name: str, value: Any) -> Any:
    """An entry of a configuration as config.json keeps it: a path as text, a list as a tuple, numbers as Python's.

    Raises:
        InvalidArgument: the arguments of a source or a partitioner hold what JSON cannot keep.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return tuple(map(as_written, value))
    if name not in ("source", "partition_args") or not isinstance(value, dict):
        return as_written(value)
    value = plain_values(value)
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} must hold texts, numbers and lists of them, found {value!r}: {error}") from None
    return value


def typed(name: str, value: Any, kind: Any) -> Any:
    """Checks the type of an entry, and converts an integer to a float if a float is wanted.

    Args:
        name: the name of the entry, for the message.
        value: what was given; NumPy's numbers are converted to Python's.
        kind: the wanted type, such as `int | None`.

    Raises:
        InvalidArgument: the value has another type, or the integer is too large for a float.
    """
    value = as_written(value)
    if isinstance(value, int) and not isinstance(value, bool) and kind in (float, float | None):
        try:
            value = float(value)
        except OverflowError:
            raise InvalidArgument(f"{name} must be a float, found an integer that is too large for one") from None
    if isinstance(value, bool) and kind in (int, int | None) or not isinstance(value, kind):
        wanted = kind.__name__ if isinstance(kind, type) else str(kind).replace(" | ", " or ")
        raise InvalidArgument(f"{name} must be {wanted}, found {value!r}")
    return value
