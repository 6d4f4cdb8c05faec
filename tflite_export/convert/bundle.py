"""Exports one client's model as a bundle: a folder with everything that an app needs.

layout.py lists the files of a bundle and says what is in them.
"""

import hashlib
import os
import platform
import shutil
import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import tensorflow as tf

from tflite_export.convert import texts
from tflite_export.convert.backbone import BACKBONES, convert_backbone, convert_predict, quality
from tflite_export.convert.browser import browser_files
from tflite_export.convert.check import write_check
from tflite_export.convert.personal import ExportError, personal_model
from tflite_export.convert.program import (
    NEED_GRADIENT,
    SIGNATURES,
    STATIC_BATCH,
    convert_program,
    flatten,
    program_functions,
)
from tflite_export.device import layout
from tflite_export.device.head_file import SavedHead, head_bytes, theta_sha256
from tflite_export.device.ops import minimum_runtime, operations
from tflite_export.device.runtime import FORMAT, WHILE_SINCE, Bundle, write_manifest

__all__ = ["ExportError", "export"]

TESTED_RUNTIMES = ("tf.lite 2.14.1", "ai-edge-litert 1.4.0", "ai-edge-litert 2.3.0")  # tests/tflite_export


def export(
    source,
    client: int | str | None = None,
    out: str | os.PathLike = "bundle",
    *,
    rounds: bool | None = None,
    inference: bool = True,
    browser: bool = False,
    **given,
):
    """Writes a client's bundle to the new folder `out`. If it fails, there is no folder.

    Args:
        source: a run folder, an open `tfpfl.runs.run.Run`, or (SplitModel, theta, head).
        client: its number or its name, as in `tfpfl.data.find_client`; for a run.
        out: the folder to make.
        rounds: whether the client can take part in rounds. This needs the gradient of theta, which some layers do not
            have. None: yes if the run's algorithm is PFLEGO.
        inference: whether to write the files that only predict, backbone*.tflite and predict.tflite.
        browser: whether to write what `write_site` needs: the program in fixed shapes, and up to 128 of the client's
            training examples, which everyone who has the bundle can see.
        **given: for (SplitModel, theta, head): `training` (tau, beta, rho, head_rate, safeguard), `labels` (K names),
            `train` and `test` (x, y), to calibrate int8 with and to measure with, `preprocessing` (scale, shift,
            stored_dtype) and the name of the `dataset`, which say how a drawing becomes an example.

    Returns:
        The open `Bundle`.

    Raises:
        ExportError: an unknown client, a run without rounds or heads, a model with batch_norm='local' or 'shared', or
            `out` exists.
        UnsupportedLayerError: a layer that the device cannot train.
    """
    out = Path(out)
    if out.exists():
        raise ExportError(f"{out} exists already: take another folder, or remove it")
    personal = personal_model(source, client, rounds, **given)
    if personal.model.reads != "numbers":
        raise ExportError(
            "the backbone takes whole numbers (such as tokens for an Embedding), and the device's program takes "
            "floats: such a model cannot be exported"
        )
    if personal.model.batch_statistics:
        raise ExportError(
            f"the model has batch_norm={personal.model.batch_norm!r}, and the device's program cannot move statistics: "
            "such a model cannot be exported. Use Run.keras_model, or train with batch_norm='frozen'"
        )
    if not out.parent.is_dir():
        raise ExportError(f"{out.parent} is not a folder")
    temporary = out.with_name(f"{out.name}.{uuid.uuid4().hex[:8]}.new")
    temporary.mkdir()
    try:
        manifest = _write_files(temporary, personal, inference, browser)
        write_manifest(temporary, manifest)
        os.rename(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Bundle(out)


def _write_files(folder, personal, inference, browser):
    model, (theta, head) = personal.model, personal.weights
    k, flat = head.bias.shape[0], flatten(theta)
    names = [s for s in SIGNATURES if personal.rounds or s not in NEED_GRADIENT]
    safeguard = personal.training["safeguard"]
    sizes = {"signatures": names, "safeguard": safeguard}
    _save(folder, layout.PROGRAM, convert_program(model, **sizes))
    _save(folder, layout.STATIC_PROGRAM, convert_program(model, batch=STATIC_BATCH, num_classes=k, **sizes))
    _save(folder, layout.THETA, flat.astype("<f4").tobytes())
    _save(folder, layout.HEAD, head_bytes(SavedHead(*head, theta_sha256(flat))))
    _save(folder, layout.LABELS, ("\n".join(personal.labels) + "\n").encode())
    measured = _write_inference(folder, personal) if inference else {}
    manifest = {
        "format": FORMAT,
        **personal.about,
        "model": {
            "example_shape": list(model.input_shape),
            "num_features": model.num_features,
            "num_classes": k,
            "num_backbone_weights": model.num_backbone_weights,
            "static_batch": STATIC_BATCH,
            "theta": _offsets(model),
        },
        "training": {**personal.training, "rounds": personal.rounds},
        "preprocessing": personal.preprocessing,
        "labels": {"names": personal.labels, "class_ids": personal.class_ids},
        "signatures": _signatures(model, names, safeguard),
        "quality": measured,
        "runtimes": {
            "tested": list(TESTED_RUNTIMES),
            "minimum": {"tf.lite": minimum_runtime(folder / layout.PROGRAM), "ai-edge-litert": WHILE_SINCE},
        },
        "memory": [],  # `python -m tflite_export bench BUNDLE --record` writes it
        "made_with": _versions(),
    }
    if browser:
        files, manifest["browser"] = browser_files(model, personal.weights, personal)
        for name, content in files.items():
            _save(folder, name, content)
    manifest["check"] = write_check(folder, model, theta, head, personal)
    for name, text in texts.texts(manifest, personal).items():
        _save(folder, name, text.encode())
    manifest["files"] = {path.name: _describe(path) for path in sorted(folder.iterdir())}
    return manifest


def _write_inference(folder, personal):
    """The whole model; the backbone in each precision, with what that costs on test (or random) examples."""
    model, (theta, head), measured = personal.model, personal.weights, {}
    _save(folder, layout.PREDICT, convert_predict(model, personal.weights))
    x, y = personal.test if personal.test is not None and len(personal.test[0]) else (None, None)
    if x is None:
        x = np.random.default_rng(0).random((64, *model.input_shape), np.float32)
    reference = np.asarray(model.features(tuple(map(tf.constant, theta)), x))
    for name, precision in BACKBONES.items():
        calibration = None if personal.train is None else personal.train[0]
        if precision == "full int8" and calibration is None:
            continue  # there are no examples to take the ranges from
        path = _save(folder, name, convert_backbone(model, theta, precision, calibration))
        found = quality(path, head, x, y, reference=reference)
        data = "random numbers" if y is None else "the client's test examples"
        measured[name] = {"precision": precision, **found._asdict(), "examples": len(x), "on": data}
    return measured


def _offsets(model):
    """Where each of the backbone's weights is in theta, in numbers (not bytes)."""
    rows, offset = [], 0
    for weight, variable in zip(model.initial_theta, model.backbone.trainable_weights, strict=True):
        name = getattr(variable, "path", variable.name)
        rows.append({"name": name, "shape": list(weight.shape), "offset": offset})
        offset += int(weight.size)
    return rows


def _signatures(model, names, safeguard):
    """Inputs and outputs of the dynamic program, such as 'float32[-1, 200]'; -1 is open."""
    functions = program_functions(model, None, None, safeguard)
    described = {}
    for name in names:
        concrete = functions[name].get_concrete_function()
        inputs = {spec.name: spec for spec in functions[name].input_signature}
        described[name] = {
            "inputs": {n: _tensor(s) for n, s in inputs.items()},
            "outputs": {n: _tensor(t) for n, t in sorted(concrete.structured_outputs.items())},
        }
    return described


def _tensor(t):
    return f"{t.dtype.name}{[-1 if n is None else int(n) for n in t.shape]}"


def _save(folder, name, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def _describe(path):
    row = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    if path.suffix == ".tflite":
        row |= {"operations": operations(path), "minimum_runtime": minimum_runtime(path)}
    return row


def _versions():
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("tfpfl", "tensorflow", "keras", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
