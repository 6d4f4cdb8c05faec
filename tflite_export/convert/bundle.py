"""Exports one client's model as a bundle: a folder with everything that an app needs.

layout.py lists the files of a bundle and says what is in them.
"""

import os
import platform
import shutil
import uuid
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import tensorflow as tf

from tflite_export.convert.backbone import (
    BACKBONES,
    TRUNKS,
    convert_backbone,
    convert_predict,
    convert_trunk,
    quality,
)
from tflite_export.convert.browser import ROOM, browser_files
from tflite_export.convert.check import drawn_examples, file_bounds, write_check
from tflite_export.convert.personal import ExportError, personal_model
from tflite_export.convert.program import (
    NEED_GRADIENT,
    SIGNATURES,
    STATIC_BATCH,
    QuantizationError,
    convert_program,
    example_spec,
    flatten,
    program_functions,
)
from tflite_export.convert.several import Packed
from tflite_export.convert.texts import model_card
from tflite_export.device import layout
from tflite_export.device.chunks import trunk_output
from tflite_export.device.files import describe
from tflite_export.device.head_file import SavedHead, head_bytes, theta_sha256
from tflite_export.device.manifest import MOST_ROOM
from tflite_export.device.ops import minimum_runtime, operations
from tflite_export.device.runtime import FORMAT, WHILE_SINCE, Bundle, Runtime, write_manifest
from tflite_export.device.verification import verify
from tfpfl.checks import warn_user

__all__ = ["ExportError", "export"]

TESTED_RUNTIMES = ("tf.lite 2.14.1", "ai-edge-litert 1.4.0", "ai-edge-litert 2.3.0")  # tests/tflite_export
_MEASURED = 256  # training examples on which files are measured, where there are no test examples
_WRONG = 0.01  # a relative error that is no rounding, nor the ties of a pooling layer


def export(
    source,
    client: int | str | None = None,
    out: str | os.PathLike = "bundle",
    *,
    rounds: bool | None = None,
    inference: bool = True,
    browser: bool = False,
    room: int = ROOM,
    **given,
):
    """Writes a client's bundle to the new folder `out`. If it fails, there is no folder.

    Args:
        source: a run folder, an open `tfpfl.runs.run.Run`, or (SplitModel, theta, head).
        client: its number or its name, as in `tfpfl.data.find_client`; for a run.
        out: the folder to make.
        rounds: whether the client can take part in rounds. This needs the gradient of theta, which some layers do not
            have. None: yes if the run is PFLEGO, or there is no run, and a device can compute its rounds; a warning
            says why it cannot.
        inference: whether to write the files that only predict, backbone*.tflite and predict.tflite.
        browser: whether to write what `write_site` needs: the program in fixed shapes, and up to 128 of the client's
            training examples, which everyone who has the bundle can see.
        room: with `browser`, the program has room for at least so many classes, 1 to 65,536.
        **given: for (SplitModel, theta, head): `training` (tau, beta, rho, head_rate, safeguard), `labels` (K names),
            `train` and `test` (x, y), to calibrate int8 with and to measure with, `preprocessing` (scale, shift,
            stored_dtype) and the name of the `dataset`, which say how a drawing becomes an example.

    Returns:
        The open `Bundle`.

    Raises:
        ExportError: an unknown client, a run without rounds or heads, a model with batch_norm='local' or 'shared', or
            `out` exists; or TensorFlow's converter made a program that computes something else.
        UnsupportedLayerError: a layer that the device cannot train.
    """
    out = Path(out)
    if out.exists() or out.is_symlink():  # also a link that leads nowhere, which no folder can take the place of
        raise ExportError(f"{out} exists already: take another folder, or remove it")
    if not isinstance(room, int | np.integer) or not 1 <= room <= MOST_ROOM:
        raise ExportError(f"room must be a whole number of classes from 1 to {MOST_ROOM}, found {room!r}")
    personal = personal_model(source, client, rounds, **given)
    if personal.trunk is not None and personal.trunk.reads != "numbers":
        raise ExportError(
            "the frozen trunk takes whole numbers, and a device's trunk takes floats: freeze no Embedding"
        )
    if personal.model.reads not in ("numbers", "whole"):
        raise ExportError(
            "the backbone takes a part of its input as whole numbers (such as tokens for an Embedding), and the rest "
            "as floats: the device's program takes one array of one kind, and such a model cannot be exported"
        )
    several = isinstance(personal.model, Packed)
    if browser and (several or personal.model.reads == "whole"):
        what = "several arrays" if several else "whole numbers"
        raise ExportError(f"the page in a browser shows pictures, and this model takes {what}: leave browser out")
    if personal.model.batch_statistics:
        raise ExportError(
            f"the model has batch_norm={personal.model.batch_norm!r}, and the device's program cannot move statistics: "
            "such a model cannot be exported. Use Run.keras_model, or train with batch_norm='frozen'"
        )
    if not out.parent.is_dir():
        raise ExportError(f"{out.parent} is not a folder")
    if browser and (personal.trunk is not None or not personal.model.kind.label.is_classes):
        raise ExportError(
            "a page in a browser has no program for a frozen trunk (train_from), nor for labels that are not classes: "
            "export without browser, for an app"
        )
    temporary = out.with_name(f"{out.name}.{uuid.uuid4().hex[:8]}.new")
    temporary.mkdir()
    try:
        manifest = _write_files(temporary, personal, inference, int(room) if browser else 0)
        write_manifest(temporary, manifest)
        _check_numbers(temporary)
        os.rename(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Bundle(out)


def _write_files(folder, personal, inference, room):
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
    if personal.trunk is not None:
        if not inference:  # else it is one of those files
            _save(folder, layout.TRUNK, convert_trunk(personal.trunk))
        _save(folder, layout.TRUNK_STATIC, convert_trunk(personal.trunk, batch=STATIC_BATCH))
    measured = _write_inference(folder, personal) if inference else {}
    manifest = {
        "format": FORMAT,
        **personal.about,
        "model": {
            "example_shape": list(model.input_shape),
            **_inputs(model),
            "num_features": model.num_features,
            "num_classes": k,
            "num_backbone_weights": model.num_backbone_weights,
            "static_batch": STATIC_BATCH,
            **({} if model.kind.label.is_classes else {"kind": model.kind.text}),
            "theta": _offsets(model),
        },
        **_about_trunk(personal.trunk),
        "training": {**personal.training, "rounds": personal.rounds},
        "preprocessing": personal.preprocessing,
        "labels": {"names": personal.labels, "class_ids": personal.class_ids},
        "signatures": _signatures(personal, names, safeguard),
        "quality": measured,
        "runtimes": {
            "tested": list(TESTED_RUNTIMES),
            "minimum": {"tf.lite": minimum_runtime(folder / layout.PROGRAM), "ai-edge-litert": WHILE_SINCE},
        },
        "memory": [],  # `python -m tflite_export bench BUNDLE --record` writes it
        "made_with": _versions(),
    }
    if room:
        files, manifest["browser"] = browser_files(model, personal.weights, personal, room)
        for name, content in files.items():
            _save(folder, name, content)
    manifest["check"] = write_check(folder, theta, head, personal)
    if files := file_bounds(folder, personal, measured):
        manifest["check"]["files"] = files
    _save(folder, layout.MODEL_CARD, model_card(manifest, personal).encode())
    manifest["files"] = {path.name: _describe(path) for path in sorted(folder.iterdir())}
    return manifest


def _check_numbers(folder) -> None:
    """Checks that TensorFlow Lite computes what TensorFlow does: a converter can drop an operation without a word.

    Only features, predictions and the gradient of theta, and whether they are right at all; `verify` measures how exact
    all is. `file_bounds` has looked at the files of another precision.
    """
    bundle = Bundle(folder, check=False)
    bound = max(_WRONG, bundle.manifest["check"]["l2_relative"])
    for c in verify(bundle, interpreter=tf.lite.Interpreter).comparisons:
        checked = c.file not in layout.INEXACT and (c.output in ("x", "phi", "dtheta") or c.signature == "predict")
        if checked and not c.l2_relative <= bound:
            raise ExportError(
                f"the conversion went wrong: {c.output} of the signature {c.signature!r} of {c.file} is not what "
                f"TensorFlow {tf.__version__} computes (relative L2 error {c.l2_relative:.1g}). Nothing was written. "
                "It is the converter's fault; another layer in place of an unusual one may help"
            )


def _about_trunk(trunk) -> dict:
    if trunk is None:
        return {}
    return {"trunk": {"file": layout.TRUNK, "raw_shape": list(trunk.input_shape), "sha256": trunk.hash}}


def _write_inference(folder, personal):
    """The whole model; the backbone, and its trunk, in each precision, with what that costs on test examples.

    Where there are fewer than two, which no statistic can be centred with, on training examples; else on random ones.
    """
    model, (theta, head), trunk = personal.model, personal.weights, personal.trunk
    _save(folder, layout.PREDICT, convert_predict(model, personal.weights, trunk))
    if (split := personal.measured_on) is None:
        raw = drawn_examples(trunk or model, 64, np.random.default_rng(0))
        x = raw if trunk is None else np.asarray(trunk(raw))
    else:
        raw, x = personal.raw(split), personal.examples(split)[0]
        if split == "train":  # there may be many, and sorted by class
            some = np.linspace(0, len(x) - 1, min(_MEASURED, len(x))).astype(int)
            raw, x = raw[some], x[some]
    y = personal.test[1] if split == "test" else None  # the accuracy on what it was trained with would say little
    x = x.astype(example_spec(model).dtype.as_numpy_dtype, copy=False)
    theta = tuple(map(tf.constant, theta))
    reference = _in_parts(lambda part: model.features(theta, part), x)
    told = {"test": "the client's test examples", "train": "the client's training examples"}
    on = {"examples": len(x), "on": told.get(split, "random numbers")}
    calibration, raw_calibration = (
        (personal.train[0], personal.raw("train")) if personal.train and len(personal.train[0]) else (None, None)
    )
    if calibration is not None and len(calibration) < 2:
        warn_user(
            "one training example says nothing of the ranges that int8 needs, so the files of full int8 are left out. "
            "Export a client that has more, or give more of its examples"
        )
        calibration = raw_calibration = None
    if getattr(model, "whole", False):  # tokens among floats would be rounded like those
        calibration = None
    measured, is_classes = {}, model.kind.label.is_classes

    def measure(name, precision, converted, features):
        try:
            content = converted()
        except QuantizationError as error:
            warn_user(f"{name} is left out: {error}")
            return
        runtime = Runtime(_save(folder, name, content), tf.lite.Interpreter)
        measured[name] = {
            "precision": precision,
            **quality(features(runtime), head, y, reference=reference, is_classes=is_classes)._asdict(),
            **on,
        }

    def of_backbone(runtime):
        return _in_parts(lambda part: runtime("features", x=part)["phi"], x)

    def of_trunk(runtime):
        return _in_parts(
            lambda part: model.features(theta, trunk_output(runtime, part, STATIC_BATCH, STATIC_BATCH)), raw
        )

    for name, precision in BACKBONES.items():
        if precision != "full int8" or calibration is not None:  # else there is nothing to take the ranges from
            measure(name, precision, partial(convert_backbone, model, theta, precision, calibration), of_backbone)
    for name, precision in TRUNKS.items() if trunk is not None else ():
        if precision != "full int8" or raw_calibration is not None:
            batch = None if name == layout.TRUNK else STATIC_BATCH
            measure(name, precision, partial(convert_trunk, trunk, precision, raw_calibration, batch), of_trunk)
    return measured


def _in_parts(function, x):
    """What `function` makes of examples, so many at a time that memory does not grow with their number."""
    parts = (x[start : start + STATIC_BATCH] for start in range(0, len(x), STATIC_BATCH))
    return np.concatenate([np.asarray(function(part)) for part in parts])


def _inputs(model):
    """For a model of whole numbers, its examples' dtype, and how many tokens its Embedding has, if that is known.

    Of several arrays, what each is and where it stands in an example.
    """
    if isinstance(model, Packed):
        return {"inputs": model.about}
    if model.reads != "whole":
        return {}
    return {"example_dtype": "int32"} | ({"num_tokens": model.vocabulary} if model.vocabulary else {})


def _offsets(model):
    """Where each of the backbone's weights is in theta, in numbers (not bytes)."""
    rows, offset = [], 0
    if model.adapters is not None:
        names = model.adapters.names
    else:
        names = [getattr(variable, "path", variable.name) for variable in model.backbone.trainable_weights]
    for weight, name in zip(model.initial_theta, names, strict=True):
        rows.append({"name": name, "shape": list(weight.shape), "offset": offset})
        offset += int(weight.size)
    return rows


def _signatures(personal, names, safeguard):
    """Inputs and outputs of the dynamic program and of the trunk, such as 'float32[-1, 200]'; -1 is open."""
    functions = program_functions(personal.model, None, None, safeguard)
    described = {}
    if (trunk := personal.trunk) is not None:
        inputs, outputs = (f"float32{[-1, *map(int, shape)]}" for shape in (trunk.input_shape, trunk.shape))
        described["trunk"] = {"inputs": {"raw": inputs}, "outputs": {"x": outputs}}
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
    row = describe(path)
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
