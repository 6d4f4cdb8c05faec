"""A bundle that was made by hand, without TensorFlow: 6 weights and a head of 2 classes, and no program."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np

from tflite_export.device.runtime import manifest_hash


def described(path: Path) -> dict:
    """The entry of a file in a manifest."""
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_files(folder: Path) -> None:
    """The files that a manifest must name."""
    folder.mkdir(exist_ok=True)
    (folder / "theta.bin").write_bytes(np.arange(6, dtype="<f4").tobytes())
    (folder / "head.bin").write_bytes(bytes(52 + 4 * 3 * 2))
    (folder / "labels.txt").write_text("a\nb\n")


def manifest_of(folder: Path) -> dict:
    """A right manifest of these files, without its hash."""
    model = {
        "example_shape": [3], "num_features": 2, "num_classes": 2, "num_backbone_weights": 6, "static_batch": 32,
        "theta": [{"name": "kernel", "shape": [3, 2], "offset": 0}],
    }  # fmt: skip
    training = {"tau": 5, "beta": 0.1, "rho": 0.01, "head_rate": 0.1, "safeguard": True, "rounds": True}
    tensors = {"inputs": {"x": "float32[-1, 3]", "steps": "int32[]"}, "outputs": {"phi": "float32[-1, 2]"}}
    return {
        "format": 1, "model": model, "training": training, "preprocessing": {"scale": 0.0625, "stored_dtype": "uint8"},
        "files": {name: described(folder / name) for name in ("theta.bin", "head.bin", "labels.txt")},
        "labels": {"names": ["a", "ü 漢\u2028😀\ud800"], "class_ids": [0, 1]}, "signatures": {"features": tensors},
        "quality": {"backbone.tflite": {"cosine": 0.1 + 0.2, "tiny": 5e-324, "large": 1e16, "bytes": 2**70}},
        "runtimes": {"tested": ["a"], "minimum": {"tf.lite": "2"}}, "memory": [{"peak": -0.0, "nothing": None}],
        "check": {"max_relative": None, "l2_relative": 0.01, "outputs": {"round.bias": 1e-4}, "files": {"b": 0.1}},
        "browser": {"room": 16, "batch": 8, "head_batch": 8},
    }  # fmt: skip


def write_manifest(folder: Path, manifest, **options) -> None:
    """Writes a manifest with the hash that it must name, however wrong it is otherwise."""
    if isinstance(manifest, dict):
        manifest = {**manifest, "hash": manifest_hash(manifest)}
    (folder / "manifest.json").write_text(json.dumps(manifest, **options), encoding="utf-8")


def renamed(bundle, folder: Path, names) -> Path:
    """A copy of a bundle in a new folder, whose classes have these names; its hashes are right."""
    shutil.copytree(bundle.folder, folder)
    manifest = {name: entry for name, entry in bundle.manifest.items() if name != "hash"}
    write_manifest(folder, manifest | {"labels": manifest["labels"] | {"names": list(names)}})
    return folder
