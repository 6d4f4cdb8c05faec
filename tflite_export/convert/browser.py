"""Writes what a page in a browser needs besides theta and head: a program of fixed shapes, and a client's examples.

LiteRT.js runs signatures of fixed shapes only. `program_browser.tflite` has those of program.tflite, with 32 examples
where the backbone is computed and 128 where only the head is, with `room` columns in the head (see wide_head.py), and
`features_one`, `features` of a single example.

`client.safetensors` holds examples of the client and TensorFlow's results of a round on the first n of them:

    x [N, ...] as the federation stores it, labels int32 [N]
    round_<n>.dtheta [P], .kernel [M, K], .bias [K], .loss []; round_<n>.losses [tau]: the loss before every step on the
    head, and at the joint point

The page shows a round with it. It makes a client's examples public, so a bundle has it only if `browser` is given.
"""

import numpy as np
import tensorflow as tf
from safetensors.numpy import save

from tflite_export.convert.check import fit, gradient
from tflite_export.convert.program import SIGNATURES, STATIC_BATCH, check_float32, convert, program_functions
from tflite_export.device.drawing import drawing_settings
from tflite_export.device.layout import BROWSER_PROGRAM, CLIENT
from tfpfl.algorithms.parts import linear_head as heads
from tfpfl.checks import InvalidArgument
from tfpfl.models import tree
from tfpfl.models.weights import Head

ROOM = 16  # the program has room for at least so many classes
HEAD_BATCH = 128
EXAMPLES = 128  # at most so many of the client's examples are written


def convert_browser_program(model, room: int, *, safeguard=True, signatures=SIGNATURES) -> bytes:
    """The device program in fixed shapes, with a head of `room` columns. The arguments are `convert_program`'s.

    Raises:
        UnsupportedLayerError: a layer of the backbone has no gradient in builtin operations.
        ValueError: the model is not float32.
    """
    check_float32(model)
    batches = {name: HEAD_BATCH if name in ("personalize", "head_step") else STATIC_BATCH for name in signatures}
    of_batch = {n: program_functions(model, n, room, safeguard) for n in {1, *batches.values()}}
    functions = {name: of_batch[n][name] for name, n in batches.items()}
    return convert({**functions, "features_one": of_batch[1]["features"]})


def browser_files(model, weights, personal, room: int = ROOM) -> tuple[dict, dict]:
    """The files for a browser: ({file name: content}, their entry in the manifest). The head has `room` columns."""
    k = weights.head.bias.shape[0]
    signatures = [s for s in SIGNATURES if personal.rounds or s not in ("joint_gradient", "round")]
    room = max(room, k)
    options = {"safeguard": personal.training["safeguard"], "signatures": signatures}
    files = {BROWSER_PROGRAM: convert_browser_program(model, room, **options)}
    about = {
        "room": room,
        "batch": STATIC_BATCH,
        "head_batch": HEAD_BATCH,
        "drawing": drawing_settings(
            personal.about.get("dataset"), model.input_shape, personal.preprocessing, personal.antialias
        ),
        "client": None,
    }
    if personal.train is not None and len(personal.train[0]) and personal.train[1] is not None:
        files[CLIENT], about["client"] = _client(model, weights, personal)
    return files, about


def _client(model, weights, personal):
    rows = in_turn(personal.train[1], EXAMPLES)
    x, y = np.ascontiguousarray(personal.train[0][rows], np.float32), np.asarray(personal.train[1])[rows]
    tensors = {"x": _stored(x, personal.preprocessing), "labels": y.astype(np.int32)}
    sizes = sorted({min(STATIC_BATCH, len(x)), len(x)}) if personal.rounds else []
    for n in sizes:
        found = reference_round(model, weights, x[:n], y[:n], personal.training)
        tensors |= {f"round_{n}.{name}": np.asarray(value, np.float32) for name, value in found.items()}
    # safetensors writes the memory as it lies, whatever its strides are.
    return save({name: np.ascontiguousarray(a) for name, a in tensors.items()}), {
        "examples": len(x),
        "of": len(personal.train[0]),
        "rounds": sizes,
    }


def reference_round(model, weights, x, y, training) -> dict:
    """A client's work in a round, computed by TensorFlow: {'dtheta', 'kernel', 'bias', 'loss', 'losses'}."""
    theta, head = tf.nest.map_structure(tf.constant, (tuple(weights.theta), Head(*weights.head)))
    targets, steps = tf.one_hot(y, head.bias.shape[0]), training["tau"] - 1
    phi = model.features(theta, x)
    fitted = fit(head, phi, targets, steps, training["beta"], training["safeguard"])
    loss, dtheta, dhead = gradient(model, theta, fitted, x, targets)
    losses, stepped = [], head
    for _ in range(steps):
        losses.append(heads.loss(stepped, phi, targets))
        stepped = fit(stepped, phi, targets, 1, training["beta"])
    kernel, bias = tree.add_scaled(fitted, -training["head_rate"], dhead)
    return {"dtheta": dtheta, "kernel": kernel, "bias": bias, "loss": loss, "losses": [*losses, loss]}


def in_turn(y, count: int) -> np.ndarray:
    """The rows of at most `count` examples with labels y: the first of each class, then the second of each, ..."""
    turn = np.zeros(len(y), int)  # an example's rank within its class
    for label in np.unique(y):
        rows = np.flatnonzero(y == label)
        turn[rows] = np.arange(len(rows))
    return np.lexsort((y, turn))[:count]


def _stored(x, preprocessing):
    """Examples as the federation stores them: uint8, if they are decoded from it to the same numbers."""
    if preprocessing.get("stored_dtype") == "uint8":
        scale, shift = (np.float32(preprocessing.get(name, usual)) for name, usual in (("scale", 1), ("shift", 0)))
        raw = np.rint((x - shift) / scale).astype(np.uint8)
        if np.array_equal(raw.astype(np.float32) * scale + shift, x):
            return raw
        raise InvalidArgument("the examples are not what the preprocessing makes of uint8")
    return x
