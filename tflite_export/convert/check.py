"""Writes check.npz: inputs for every signature, and the outputs that TensorFlow and GradientTape compute for them.

Any runtime on any machine can then say whether it computes the same: see verification.py. The inputs are
drawn, not taken from the client: half of them noise, half drawings with constant regions, in which windows of a pooling
layer have several equal maxima.
"""

import numpy as np
import tensorflow as tf

from tflite_export.convert.program import flatten
from tflite_export.convert.several import Packed
from tflite_export.device.kinds import Kind
from tflite_export.device.layout import CHECK
from tfpfl.algorithms.parts import linear_head as heads
from tfpfl.algorithms.parts.optimizers import sgd
from tfpfl.models import tree
from tfpfl.models.heads import CLASSIFICATION
from tfpfl.models.weights import Head

EXAMPLES = 12
STEPS = 50
BETA, RATE = 0.01, 0.1


def write_check(folder, theta, head, personal) -> dict:
    """Writes check.npz, and returns for the manifest what `verify` compares and how exact it must be."""
    rng = np.random.default_rng(0)
    model, trunk, k = personal.model, personal.trunk, head.bias.shape[0]
    x = drawn_examples(trunk or model, EXAMPLES, rng)
    if model.reads != "whole":
        x[: EXAMPLES // 2] = x[: EXAMPLES // 2].round()
    of_trunk = {}
    if trunk is not None:
        raw, x = x, np.asarray(trunk(x))
        of_trunk = {"raw": raw, "trunk.x": x}
    kind, given = model.kind, _labels(rng, model.kind.label, k)
    values = {"x": x, **given, "kernel": head.kernel, "bias": head.bias}
    values |= of_trunk | {"steps": np.int32(STEPS), "beta": np.float32(BETA), "rate": np.float32(RATE)}

    theta, head = tf.nest.map_structure(tf.constant, (tuple(theta), Head(*head)))
    phi = model.features(theta, x)
    (labels,) = given.values()
    targets = kind.targets(labels, k, tf.float32)
    values["features.phi"] = phi
    values[f"predict.{Kind(kind.text).output}"] = kind.mean(tf.matmul(phi, head.kernel) + head.bias)
    values["head_step.kernel"], values["head_step.bias"] = fit(head, phi, targets, 1, kind=kind)
    fitted = fit(head, phi, targets, STEPS, safeguard=personal.training["safeguard"], kind=kind)
    values["personalize.kernel"], values["personalize.bias"] = fitted
    values["personalize.loss"] = heads.loss(fitted, phi, targets, kind)
    unsure = 0.0
    if personal.rounds:
        loss, dtheta, dhead = gradient(model, theta, head, x, targets)
        values["joint_gradient.dtheta"], values["joint_gradient.loss"] = dtheta, loss
        unsure = moved_by_rounding(model, theta, head, x, targets, dtheta)
        values["joint_gradient.dkernel"], values["joint_gradient.dbias"] = dhead
        loss, dtheta, dhead = gradient(model, theta, fitted, x, targets)
        values["round.dtheta"], values["round.loss"] = dtheta, loss
        values["round.kernel"], values["round.bias"] = tree.add_scaled(fitted, -RATE, dhead)
    np.savez(folder / CHECK, **{name: np.asarray(value) for name, value in values.items()})
    # In overlapping pooling windows, two pixels may differ by less than runtimes round: the gradient then goes to one
    # or to the other, and only a norm over all weights is comparable.
    overlapping = any(_overlaps(layer) for layer in getattr(model.backbone, "layers", ()))
    if not overlapping and unsure < 1e-5:
        return {"max_relative": 1e-5, "l2_relative": 1e-5}
    return {"max_relative": None, "l2_relative": 1e-3 if unsure < 3e-4 else 3 * unsure}


def moved_by_rounding(model, theta, head, x, targets, dtheta):
    """How much of the gradient is decided by rounding: by how much it moves, in L2, if theta does in its last digit.

    In a deep network of ReLUs some units are nearer to their kink than runtimes round, and are on in one, off in other.
    """
    rng = np.random.default_rng(0)
    moved = tuple(w * (1 + 1.2e-7 * rng.uniform(-1, 1, w.shape).astype(np.float32)) for w in theta)
    difference = gradient(model, moved, head, x, targets)[1] - dtheta
    return float(np.linalg.norm(difference) / (np.linalg.norm(dtheta) + 1e-30))


def _labels(rng, kind, k) -> dict:
    """Drawn labels or targets, by the name of the program's input."""
    if kind.is_classes:
        return {"labels": rng.integers(0, k, EXAMPLES).astype(np.int32)}
    drawn = rng.poisson(1.0, (EXAMPLES, k)) if "real" not in kind.sorts else rng.standard_normal((EXAMPLES, k))
    return {"targets": np.minimum(drawn, 1 if kind.name == "multilabel" else 9).astype(np.float32)}


def drawn_examples(model, count, rng) -> np.ndarray:
    """Noise float32 [count, ...], tokens int32 where the backbone takes whole numbers, or several arrays, packed."""
    if isinstance(model, Packed):
        return model.arrays.drawn(count, rng)
    shape = (count, *model.input_shape)
    if model.reads == "whole":
        return rng.integers(0, model.vocabulary or 2, shape).astype(np.int32)
    return rng.random(shape, np.float32)


def fit(head, phi, targets, steps, beta=BETA, safeguard=False, kind=CLASSIFICATION):
    """The head after `steps` gradient steps; with `safeguard`, the old head if they raised the loss."""
    found = heads.fit(head, phi, targets, steps, sgd(beta), kind)
    if not safeguard:
        return found
    return tree.where(heads.loss(found, phi, targets, kind) <= heads.loss(head, phi, targets, kind), found, head)


def gradient(model, theta, head, x, targets):
    """Loss and gradients of a client's mean loss: (loss, dtheta flat [P], dhead)."""
    with tf.GradientTape() as tape:
        tape.watch((theta, head))
        loss = heads.loss(head, model.features(theta, x), targets, model.kind)
    dtheta, dhead = tape.gradient(loss, (theta, head), unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return loss, flatten(tree.dense(dtheta)), dhead


def _overlaps(layer):
    size, strides = getattr(layer, "pool_size", None), getattr(layer, "strides", None)
    if size is None or strides is None or "Max" not in type(layer).__name__:
        return False
    return any(a > b for a, b in zip(np.broadcast_to(size, 2), np.broadcast_to(strides, 2), strict=True))
