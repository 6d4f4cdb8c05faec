"""Files for inference: the backbone with constant weights in several precisions, and backbone and head in one; and the
frozen trunk below the backbone, if there is one.

Constant weights let a runtime pack them once, so these run several times faster than the program's `features`.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tflite_export.convert.gradients import fixed, fixed_features
from tflite_export.convert.program import check_float32, convert, example_spec
from tflite_export.device import layout
from tflite_export.device.kinds import Kind
from tfpfl.checks import InvalidArgument
from tfpfl.models.weights import Weights

BACKBONES = {
    layout.BACKBONE: "float32",
    layout.BACKBONE_FLOAT16: "float16",
    layout.BACKBONE_DYNAMIC_INT8: "dynamic int8",
    layout.BACKBONE_INT8: "full int8",
}
TRUNKS = {layout.TRUNK: "float32", layout.TRUNK_FLOAT16: "float16", layout.TRUNK_INT8: "full int8"}
_CALIBRATION = 100


class Quality(NamedTuple):
    """What a precision costs, on examples that it was not calibrated with.

    A plain cosine says little: features of a ReLU network point the same way whatever happens (0.99998 was seen beside
    72 % agreement), so it is taken of features minus their mean over the examples.
    """

    centred_cosine: float
    head_agreement: float | None  # the part of the examples on which the head says the same class; None: no classes
    accuracy: float | None  # of the head on these features, if it is for classes


def convert_backbone(model, theta, precision: str = "float32", calibration=None) -> bytes:
    """phi(x; theta) with constant theta: signature `features`, x float32 [N, ...] -> phi float32 [N, M].

    Args:
        model: a float32 `SplitModel`.
        theta: its backbone's weights.
        precision: 'float32'; 'float16' (weights); 'dynamic int8' (weights, activations where it runs); 'full int8'
            (all of it, between a float32 input and output).
        calibration: x [n, ...], examples from which 'full int8' takes the ranges of activations: of 100 of them,
            evenly from the first to the last, since they may be sorted by class.

    Raises:
        ValueError: an unknown precision, or no calibration data where they are needed.
    """
    check_float32(model)
    constants, int8 = tuple(tf.constant(w) for w in theta), precision == "full int8"

    def features(x):
        return {"phi": fixed_features(model, constants, x, int8)}

    spec = example_spec(model)
    return convert({"features": _function(features, spec)}, _configure(precision, calibration, spec))


def convert_trunk(trunk, precision: str = "float32", calibration=None, batch: int | None = None) -> bytes:
    """The frozen layers: signature `trunk`, raw float32 [N, ...] -> x float32 [N, ...], the program's examples.

    Args:
        trunk: a `tfpfl.models.trunk.Trunk` of float32.
        precision, calibration: as in `convert_backbone`; calibration is raw [n, ...], n >= 1.
        batch: the number of examples, if it is to be fixed.

    Raises:
        ValueError: as `convert_backbone`.
    """
    check_float32(trunk)
    weights = tuple(tf.constant(w) for w in trunk.weights)
    spec = tf.TensorSpec([batch, *trunk.input_shape], tf.float32, "raw")
    int8 = precision == "full int8"
    function = _function(lambda raw: {"x": fixed(trunk.apply(weights, raw), int8)}, spec)
    return convert({"trunk": function}, _configure(precision, calibration, spec, "trunk"))


def convert_predict(model, weights: Weights, trunk=None) -> bytes:
    """A whole model for inference: signature `predict`, x -> probabilities [N, K], or predictions, as in the program.

    Args:
        model: a float32 `SplitModel`.
        weights: its weights.
        trunk: the frozen layers below it; x are then their examples.
    """
    check_float32(model)
    theta, head = tf.nest.map_structure(tf.constant, weights)
    frozen = None if trunk is None else tuple(tf.constant(w) for w in trunk.weights)

    def predict(x):
        x = x if trunk is None else fixed(trunk.apply(frozen, x))
        return {
            Kind(model.kind.text).output: model.kind.mean(
                tf.matmul(fixed_features(model, theta, x), head.kernel) + head.bias
            )
        }

    return convert({"predict": _function(predict, example_spec(trunk or model))})


def quality(phi, head, y=None, *, reference, is_classes=True) -> Quality:
    """Compares features with float32 features.

    Args:
        phi: float32 [n, M], what a file of another precision computed.
        head: a `Head`, or (kernel, bias).
        y: int [n], the labels of the examples, if known.
        reference: float32 [n, M], the float32 features of the same examples.
        is_classes: whether the head is for classes.
    """
    kernel, bias = map(np.asarray, head)
    a, b = (p - reference.mean(0) for p in (phi, reference))
    cosine = float((a * b).sum() / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-30))
    if not is_classes:
        return Quality(cosine, None, None)
    found, expected = ((p @ kernel + bias).argmax(1) for p in (phi, reference))
    return Quality(cosine, float((found == expected).mean()), None if y is None else float((found == y).mean()))


def _function(function, spec):
    return tf.function(function, input_signature=[spec])


def _configure(precision, calibration, spec, signature="features"):
    if precision not in BACKBONES.values():
        raise InvalidArgument(f"unknown precision {precision!r}: one of {', '.join(BACKBONES.values())}")
    if precision == "full int8" and (calibration is None or not len(calibration)):
        raise InvalidArgument("full int8 needs examples of the client to calibrate with: give calibration")

    def configure(converter):
        if precision == "float32":
            return
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if precision == "float16":
            converter.target_spec.supported_types = [tf.float16]
        elif precision == "full int8":
            converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
            chosen = np.linspace(0, len(calibration) - 1, min(_CALIBRATION, len(calibration))).astype(int)
            some = np.asarray(calibration)[chosen].astype(spec.dtype.as_numpy_dtype)
            rows = spec.shape[0] or 1
            calls = -(-len(some) // rows)
            batches = np.resize(some, (calls, rows, *some.shape[1:]))  # the last one is filled up with the first ones
            converter.representative_dataset = lambda: ((signature, {spec.name: x}) for x in batches)

    return configure
