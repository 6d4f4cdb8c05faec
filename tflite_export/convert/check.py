"""Writes check.npz: inputs for every signature, and the outputs that TensorFlow and GradientTape compute for them.

Any runtime on any machine can then say whether it computes the same: see verification.py. The inputs are
drawn, not taken from the client: half of them noise, half drawings with constant regions, in which windows of a pooling
layer have several equal maxima.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tflite_export.convert.personal import ExportError
from tflite_export.convert.program import STATIC_BATCH, flatten
from tflite_export.convert.several import Packed
from tflite_export.device import layout
from tflite_export.device.chunks import trunk_output
from tflite_export.device.kinds import Kind
from tflite_export.device.layout import CHECK
from tflite_export.device.runtime import Runtime
from tflite_export.device.verification import smallest
from tfpfl.algorithms.parts import linear_head as heads
from tfpfl.algorithms.parts.optimizers import sgd
from tfpfl.checks import warn_user
from tfpfl.models import tree
from tfpfl.models.heads import CLASSIFICATION
from tfpfl.models.weights import Head

EXAMPLES = 12
STEPS = 50
EXACT = 1e-5
DRAWS = 5  # of weights that move in their last digit: whether a unit crosses its kink differs from one to the next
NEAR, NEAR_DRAWS = 10, 8  # last digits, and draws, in which a unit near its kink is looked for
BETA, RATE = 0.01, 0.1
MOST = 1e4  # of a predicted count
FAR = {"float16": 0.1, "dynamic int8": 0.5, "full int8": 0.5}  # relative L2 errors that are no rounding any more
ALIKE = 0.5  # the centred cosine below which features have little in common
LEAST = 1e-3  # the bound of a file whose weights lose little: a runtime may compute in float16, too


def write_check(folder, theta, head, personal) -> dict:
    """Writes check.npz, and returns for the manifest what `verify` compares and how exact it must be."""
    rng = np.random.default_rng(0)
    model, trunk, k = personal.model, personal.trunk, head.bias.shape[0]
    x = drawn_examples(trunk or model, EXAMPLES, rng)
    if model.reads != "whole":
        x[: EXAMPLES // 2] = x[: EXAMPLES // 2].round()
    x = _moderate(personal, theta, head, x)
    inputs: dict[str, Any] = {"x": x}
    if trunk is not None:
        inputs |= {"raw": x, "x": np.asarray(trunk(x))}
    inputs |= {**_labels(rng, model.kind.label, k), "kernel": head.kernel, "bias": head.bias}
    beta = _beta(model, theta, head, inputs)
    inputs |= {"steps": np.int32(STEPS), "beta": np.float32(beta), "rate": np.float32(RATE)}
    frozen = () if trunk is None else trunk.weights
    found = _answers(personal, theta, frozen, head, inputs)
    if wrong := [name for name, value in found.items() if not np.isfinite(value).all()]:
        raise ExportError(
            f"of drawn examples TensorFlow itself computes NaN or infinity ({', '.join(wrong)}), so that nothing could "
            "be compared with it. Look at the weights: they may be far too large; or the examples may have another "
            "scale than the network expects"
        )
    _say_constant(np.asarray(found["features.phi"]))
    np.savez(folder / CHECK, **{name: np.asarray(value) for name, value in (inputs | found).items()})
    moved = []
    for draw in range(DRAWS):
        other_theta, other_frozen, other_head = (_in_the_last_digit(w, draw) for w in (theta, frozen, head))
        moved.append(_answers(personal, other_theta, other_frozen, other_head, inputs))
    further = []
    if personal.rounds:
        further = [
            _gradients(personal, _in_the_last_digit(theta, draw, NEAR), head, inputs, found)
            for draw in range(NEAR_DRAWS)
        ]
    return _bounds(model, found, moved, further, _in_double(personal, head, found["features.phi"], inputs))


def _moderate(personal, theta, head, x) -> np.ndarray:
    """Drawn examples whose predicted counts are no larger than MOST; they are exp(z), which soon overflows.

    So it is where a model was trained on smaller numbers than the drawn ones in [0, 1). Whole numbers stay as they are.
    """
    model, trunk = personal.model, personal.trunk
    if model.kind.label.name != "poisson" or model.reads == "whole":
        return x
    whole = np.zeros(x.shape[1:], bool)
    if isinstance(model, Packed):
        rows: Any = model.about["arrays"]
        whole = np.concatenate([np.full(int(np.prod(row["shape"])), row["dtype"] == "int32") for row in rows])
    theta = tuple(map(tf.constant, theta))
    for _ in range(40):
        z = model.features(theta, x if trunk is None else trunk(x)) @ head.kernel + head.bias
        if np.max(z) <= np.log(MOST):  # False if it is NaN
            break
        x = np.where(whole, x, x / 10).astype(np.float32)
    return x


def _say_constant(phi: np.ndarray) -> None:
    if (phi == phi[:1]).all():
        warn_user(
            f"the backbone gives the same features{'' if phi.any() else ', all 0,'} for {len(phi)} different drawn "
            "examples: if it does so for the client's, no head can tell them apart, and `verify` compares little. "
            "Look at the run's losses: it may have diverged; or the examples may have another scale than the network "
            "expects"
        )


def _beta(model, theta, head, inputs) -> float:
    """A rate with which no step on the head raises its loss: BETA, or a tenth of it, ...

    Where they raise it, `safeguard` takes the old head back, and the check would say nothing of the steps; without
    `safeguard`, numbers overflow. So it is where examples in [0, 1) are far from those that the backbone expects. And
    steps that swing to and fro make of rounding what no runtime could repeat, also if they end with a lower loss.
    """
    kind, beta = model.kind, BETA
    theta, head = tf.nest.map_structure(tf.constant, (tuple(theta), Head(*head)))
    phi = model.features(theta, inputs["x"])
    targets = kind.targets(inputs[Kind(kind.text).input], len(inputs["bias"]), tf.float32)

    def falls(beta):
        fitted, last = head, heads.loss(head, phi, targets, kind)
        for _ in range(STEPS):
            fitted = fit(fitted, phi, targets, 1, beta, kind=kind)
            loss = heads.loss(fitted, phi, targets, kind)
            if not loss <= last + EXACT * abs(last):  # also if it is NaN
                return False
            last = loss
        return True

    while beta > 1e-9 and not falls(beta):
        beta /= 10
    return beta


def file_bounds(folder, personal, quality) -> dict:
    """How far files may be from TensorFlow's float32 on check.npz, in L2: {file name: bound}; for `verify`.

    That is for files of another precision three times as far as TensorFlow Lite is here, or 0.1 more if that is less;
    and for predict.tflite above a frozen trunk three times what rounding makes of both.

    Args:
        folder: of the bundle, with the files and check.npz.
        personal: what is exported.
        quality: {file name: its `Quality` as a dict}.

    Raises:
        ExportError: a file of another precision is not near the network at all.
    """
    values, bounds = dict(np.load(folder / CHECK)), {}
    for name in (n for n in layout.INEXACT if (folder / n).exists()):
        runtime = Runtime(folder / name, tf.lite.Interpreter)
        if runtime.can("trunk"):
            what, found = "trunk.x", trunk_output(runtime, values["raw"], STATIC_BATCH, EXAMPLES)
        else:
            what, found = "features.phi", runtime("features", x=values["x"])["phi"]
        away, cosine = _apart(found, values[what])[1], quality[name]["centred_cosine"]
        # Drawn examples may be outside of the ranges for which int8 was calibrated: there the client's examples count.
        if not (away <= FAR[quality[name]["precision"]] or (cosine >= ALIKE and "int8" in quality[name]["precision"])):
            raise ExportError(
                f"the conversion went wrong: {name} does not compute what the network does (relative L2 error "
                f"{away:.1g} on drawn examples, centred cosine {cosine:.2f} on {quality[name]['on']}). Nothing was "
                "written. inference=False (--no-inference) exports without the files that only predict"
            )
        bounds[name] = round(max(LEAST, min(3 * away, away + 0.1)), 8)
    if personal.trunk is not None and (folder / layout.PREDICT).exists():
        exported = (personal.trunk.weights, *personal.weights)
        raw = values["raw"]
        found = _whole(personal, exported, raw)
        moved = (_whole(personal, [_in_the_last_digit(w, draw) for w in exported], raw) for draw in range(DRAWS))
        bounds[layout.PREDICT] = round(max(EXACT, 3 * max(_apart(other, found)[1] for other in moved)), 8)
    return bounds


def _whole(personal, weights, raw):
    """The predictions with the weights of trunk, backbone and head."""
    frozen, theta, head = weights
    frozen, theta, head = tf.nest.map_structure(tf.constant, (tuple(frozen), tuple(theta), Head(*head)))
    phi = personal.model.features(theta, personal.trunk.apply(frozen, raw))
    return personal.model.kind.mean(tf.matmul(phi, head.kernel) + head.bias)


def _answers(personal, theta, frozen, head, inputs) -> dict:
    """What every signature gives, by TensorFlow: {'signature.output': value}."""
    model, trunk, values = personal.model, personal.trunk, {}
    if trunk is not None:
        values["trunk.x"] = trunk.apply(tuple(map(tf.constant, frozen)), inputs["raw"])
    kind, x, k = model.kind, inputs["x"], len(inputs["bias"])
    theta, head = tf.nest.map_structure(tf.constant, (tuple(theta), Head(*head)))
    phi = model.features(theta, x)
    targets = kind.targets(inputs[Kind(kind.text).input], k, tf.float32)
    values["features.phi"] = phi
    values[f"predict.{Kind(kind.text).output}"] = kind.mean(tf.matmul(phi, head.kernel) + head.bias)
    beta = float(inputs["beta"])
    values["head_step.kernel"], values["head_step.bias"] = fit(head, phi, targets, 1, beta, kind=kind)
    values["head_step.loss_before"] = values["personalize.loss_before"] = heads.loss(head, phi, targets, kind)
    fitted = fit(head, phi, targets, STEPS, beta, personal.training["safeguard"], kind)
    values["personalize.kernel"], values["personalize.bias"] = fitted
    values["personalize.loss"] = heads.loss(fitted, phi, targets, kind)
    if personal.rounds:
        loss, dtheta, dhead = gradient(model, theta, head, x, targets)
        values["joint_gradient.dtheta"], values["joint_gradient.loss"] = dtheta, loss
        values["joint_gradient.dkernel"], values["joint_gradient.dbias"] = dhead
        loss, dtheta, dhead = gradient(model, theta, fitted, x, targets)
        values["round.dtheta"], values["round.loss"] = dtheta, loss
        values["round.kernel"], values["round.bias"] = tree.add_scaled(fitted, -RATE, dhead)
    return values


def _gradients(personal, theta, head, inputs, found) -> dict:
    """The gradients of these weights theta, at the head before its steps and after them, as in `_answers`."""
    kind, x = personal.model.kind, inputs["x"]
    targets = kind.targets(inputs[Kind(kind.text).input], len(inputs["bias"]), tf.float32)
    heads_at = {"joint_gradient": head, "round": Head(found["personalize.kernel"], found["personalize.bias"])}
    theta, heads_at = tf.nest.map_structure(tf.constant, (tuple(theta), heads_at))
    return {
        f"{name}.dtheta": gradient(personal.model, theta, Head(*at), x, targets)[1] for name, at in heads_at.items()
    }


def _in_double(personal, head, phi, inputs) -> dict:
    """What the steps on the head give in double precision, from the same features."""
    kind, phi, k = personal.model.kind, tf.cast(phi, tf.float64), len(inputs["bias"])
    head = Head(*(tf.constant(w, tf.float64) for w in head))
    targets = kind.targets(inputs[Kind(kind.text).input], k, tf.float64)
    beta = float(inputs["beta"])
    values = dict(zip(("head_step.kernel", "head_step.bias"), fit(head, phi, targets, 1, beta, kind=kind), strict=True))
    values["head_step.loss_before"] = values["personalize.loss_before"] = heads.loss(head, phi, targets, kind)
    fitted = fit(head, phi, targets, STEPS, beta, personal.training["safeguard"], kind)
    values |= {"personalize.kernel": fitted.kernel, "personalize.bias": fitted.bias}
    with tf.GradientTape() as tape:
        tape.watch(fitted)
        loss = heads.loss(fitted, phi, targets, kind)
    stepped = tree.add_scaled(fitted, -RATE, tape.gradient(loss, fitted))
    return values | {"personalize.loss": loss, "round.kernel": stepped[0], "round.bias": stepped[1]}


def _bounds(model, found, moved, further, double) -> dict:
    """How exact a device must be: to 1e-5, or to three times of what rounding makes of it in TensorFlow itself.

    That is by how much a result moves with weights that move in their last digit, or by how much it is off from double
    precision. In a deep network rounding grows from layer to layer, and in a bias that is nearly 0 from step to step: a
    runtime that sums in another order is no more exact.

    Args:
        model: the network.
        found: {'signature.output': value}.
        moved: the same for weights that move in their last digit, for each draw.
        further: the gradients of theta alone for weights that move NEAR times as far, for each draw.
        double: what was computed in double precision.
    """
    outputs, least = {}, smallest(model.kind.label.is_classes, len(found["head_step.bias"]))
    for name, value in found.items():
        others = [other[name] for other in (*moved, double) if name in other]
        unsure = max(max(_apart(other, value, least)) for other in others)
        if 3 * unsure > EXACT and not name.endswith(".dtheta"):
            outputs[name] = round(3 * unsure, 8)
    own = {"outputs": outputs} if outputs else {}
    least = least if least == 1 else 1e-30
    unsure = 0.0
    for name in (n for n in found if n.endswith(".dtheta") and np.any(found[n])):  # a head of zeros has no gradient
        off = [_apart(other[name], found[name], least)[1] for other in moved]
        jump = max(_apart(other[name], found[name], least)[1] for other in further)
        # A gradient moves as far as the weights do, until a unit, such as a ReLU, crosses its kink: it jumps then. A
        # kink so near is crossed by one runtime, and not by the next.
        crossed = jump > 10 * NEAR * min(off)
        unsure = max(unsure, *off, jump / 3 if crossed else 0.0)
    # In overlapping pooling windows, two pixels may differ by less than runtimes round: the gradient then goes to one
    # or to the other, and only a norm over all weights is comparable.
    overlapping = any(_overlaps(layer) for layer in getattr(model.backbone, "layers", ()))
    if not overlapping and unsure < EXACT:
        return {"max_relative": EXACT, "l2_relative": EXACT, **own}
    return {"max_relative": None, "l2_relative": 1e-3 if unsure < 3e-4 else 3 * unsure, **own}


def _apart(found, expected, least=1e-6) -> tuple[float, float]:
    """How far a result is from another: its largest number, and in L2; as `verify` measures it."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    largest, norm = np.abs(expected).max(), np.linalg.norm(expected)
    away = np.abs(found - expected).max() / max(largest, least), np.linalg.norm(found - expected) / max(norm, least)
    return float(away[0]), float(away[1])


def _in_the_last_digit(weights, draw, times=1) -> tuple:
    """Weights that differ from these as rounding does, or so many times as far."""
    rng = np.random.default_rng(draw)
    tensors = [tf.constant(w) for w in weights]
    return tuple(
        w * (1 + times * 1.2e-7 * rng.uniform(-1, 1, w.shape).astype(np.float32)) if w.dtype.is_floating else w
        for w in tensors
    )


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
