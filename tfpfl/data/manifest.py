"""The manifest of a federation: its format, its files, its hash."""

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
    """The folder is not a federation, or one that is incomplete, changed, or made by a newer version."""


def plain_values(value: Any) -> Any:
    """Arguments as JSON holds them, so that a manifest read back equals the one written."""
    if isinstance(value, Mapping):
        return {str(k): plain_values(v) for k, v in value.items()}
    if isinstance(value, list | tuple | range | np.ndarray):
        return [plain_values(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def manifest_hash(manifest: dict) -> str:
    content = {k: v for k, v in manifest.items() if k != "hash"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
