"""Writes first inputs and a dictionary for the fuzzer: `python device_core/tests/seeds.py FOLDER`. Needs NumPy only."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from tflite_export.device.head_file import SavedHead, head_bytes
from tflite_export.device.manifest import RULES
from tflite_export.device.payload import encode

FILES = {"theta.bin": bytes(24), "head.bin": bytes(76)}  # what tests/fuzz.c puts beside the manifest


def manifests():
    """Manifests that are right, of a bundle with 6 weights and a head of 2 classes."""
    described = {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in FILES.items()}
    model = {
        "example_shape": [3], "num_features": 2, "num_classes": 2, "num_backbone_weights": 6, "static_batch": 32,
        "theta": [{"name": "kernel", "shape": [3, 2], "offset": 0}],
    }  # fmt: skip
    least = {
        "format": 1, "model": model, "files": described, "preprocessing": {}, "signatures": {},
        "training": {"tau": 5, "beta": 0.1, "rho": None, "head_rate": 1e-5, "safeguard": True, "rounds": False},
        "labels": {"names": ["a", "é\ud83d\n"], "class_ids": [0, 1]},
        "check": {"max_relative": None, "l2_relative": 0.01},
    }  # fmt: skip
    signature = {"inputs": {"x": "float32[-1, 3]"}, "outputs": {"phi": "float32[]"}}
    more = {
        "signatures": {"features": signature}, "quality": {"a.tflite": {"x": [1.5e300, -0.0, 12345678901234567890]}},
        "runtimes": {"tested": ["a"], "minimum": {"b": "1"}}, "memory": [{"x": [None, False, {}]}],
        "browser": {"room": 16, "batch": 8, "head_batch": 8},
        "preprocessing": {"scale": 0.0625, "stored_dtype": "u1", "columns": ["a", "b"]},
    }  # fmt: skip
    trunk = {"trunk": {"file": "theta.bin", "raw_shape": [4, 4, 1], "sha256": "ab" * 32}}
    kinds = ("multilabel", "poisson", "quantile:0.25", "quantile:1.5e-05", "huber:2.5", "huber:1e+06")
    others = [least | trunk | {"model": model | {"kind": kind, "example_dtype": "float32"}} for kind in kinds]
    all_of_them = [least, least | more, *others, least | {"model": model | {"example_dtype": "int32", "num_tokens": 9}}]
    return [json.dumps(least | more, indent=2, ensure_ascii=True), *map(json.dumps, all_of_them)]


def words(rule):
    """The names of entries in the rules."""
    for part in (getattr(rule, "of", None), *(rule.values() if isinstance(rule, dict) else ())):
        if part is not None:
            yield from words(part)
    yield from rule if isinstance(rule, dict) else ()


def main(folder):
    folder = Path(folder)
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    rng, seeds = np.random.default_rng(0), []
    seeds += [bytes([reader]) + text.encode() for text in manifests() for reader in (0, 1)]
    for m, k in ((3, 2), (1, 1), (0, 0)):
        head = SavedHead(rng.random((m, k), np.float32), rng.random(k, np.float32), "ab" * 32)
        seeds.append(b"\2" + head_bytes(head))
        if names := ("a", "é\n\U0001f600")[:k]:
            seeds += [b"\2" + head_bytes(head._replace(labels=names)), b"\2" + head_bytes(head, names)]
    for size in (0, 1, 7, 1024, 1025):
        seeds += [b"\3" + encode(rng.standard_normal(size), kind) for kind in ("float32", "int8")]
    for i, seed in enumerate(seeds):
        (folder / "corpus" / f"seed{i}").write_bytes(seed)
    tokens = {f'\\"{name}\\"' for name in words(RULES)} | {"true", "null", "NaN", "-Infinity", "1e400", "\\\\ud800"}
    tokens |= {"huber:", "quantile:", "regression", "int32", "TFPFLH02", "TFPFLH03"}
    (folder / "words").write_text("".join(f'"{token}"\n' for token in sorted(tokens)))


if __name__ == "__main__":
    main(*sys.argv[1:])
