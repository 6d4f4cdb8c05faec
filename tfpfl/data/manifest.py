"""The manifest of a federation: its format, its files and its hash."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfpfl.checks import InvalidArgument

FORMAT = 1
SPLITS = ("train", "validation", "test")
FILES = ("x.raw", "labels.raw", "labels_local.raw", "index.raw")


class FederationError(InvalidArgument):
    """A folder is no federation, is incomplete, was changed, or has a newer format; or it exists and must not."""


def plain_values(value: Any) -> Any:
    """Converts arguments to the types of JSON, so that a manifest that is read equals the one that was written."""
    if isinstance(value, Mapping):
        return {str(k): plain_values(v) for k, v in value.items()}
    if isinstance(value, list | tuple | range | np.ndarray):
        return [plain_values(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def manifest_hash(manifest: dict) -> str:
    """The sha256 of a manifest as canonical JSON, without its entry 'hash': 64 hexadecimal digits.

    Raises:
        ValueError: the manifest contains NaN or infinity, which JSON does not have.
    """
    content = {k: v for k, v in manifest.items() if k != "hash"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
