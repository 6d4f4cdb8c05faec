"""The device program: a TensorFlow Lite file without weights, which computes what a PFLEGO client computes.

theta is an input, flat float32 [P], and so is its gradient an output: a new theta needs no new file. Each example has a
weight: 1 / N_i, or 0 if it only fills up a batch. So a client's examples may come in chunks of any size, and the
gradients of the chunks add up to the gradient of all examples. Signatures (N examples, M features, K
classes):

    features        theta [P], x [N, ...] -> phi [N, M]
    predict         theta, x, kernel [M, K], bias [K] -> probabilities [N, K]; predictions, if not of classes
    personalize     phi, labels int32 [N], weights [N], kernel, bias, steps int32 [], beta []
                    -> kernel, bias after so many gradient steps on the head, loss there, loss_before
    head_step       phi, labels, weights, kernel, bias, beta -> kernel, bias, loss_before; one step, without WHILE
    joint_gradient  theta, x, labels, weights, kernel, bias -> dtheta [P], dkernel, dbias, loss
    round           theta, x, labels, weights, kernel, bias, steps, beta, rate
                    -> dtheta, kernel, bias, loss: a client's whole visit, with one forward and one backward pass

Of a head that is not for classes, such as of a regression, float32 targets [N, K] stand in the place of labels.
"""

import os
import re
import sys
import tempfile
import weakref
from contextlib import contextmanager

import absl.logging
import numpy as np
import tensorflow as tf
from tensorflow.lite.python.convert import ConverterError

from tflite_export.convert.gradients import GRADIENTS, PLAIN, STOPS, UnsupportedLayerError
from tflite_export.convert.gradients import features as builtin_features
from tflite_export.device.kinds import Kind
from tflite_export.device.ops import check_builtin
from tflite_export.device.runtime import no_news_of_the_interpreter
from tfpfl.checks import InvalidArgument
from tfpfl.models.layers import flatten as layers_of
from tfpfl.models.trunk import Trunk

SIGNATURES = ("features", "predict", "personalize", "head_step", "joint_gradient", "round")
NEED_GRADIENT = ("joint_gradient", "round")
STATIC_BATCH = 32
# model -> its programs: without weights, they are those of all its clients
_CONVERTED: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_ADVICE = {"Conv2DTranspose": "take UpSampling2D and Conv2D"}


class QuantizationError(UnsupportedLayerError):
    """The converter has no int8 for a model, of which it has a float file."""


def convert_program(model, *, batch=None, num_classes=None, safeguard=True, signatures=SIGNATURES) -> bytes:
    """The device program of a split model as the content of a .tflite file; builtin operations only.

    Args:
        model: a float32 `SplitModel`. Its weights are not in the file.
        batch: the number of examples N, for a program with fixed shapes; None leaves it open.
        num_classes: the number of classes K, likewise.
        safeguard: take the head back to where it was if the steps raised its loss (PFLEGO's `safeguard`).
        signatures: the names of the signatures that the file has.

    Raises:
        UnsupportedLayerError: a layer of the backbone has no gradient in builtin operations.
        ValueError: the model is not float32.
    """
    check_float32(model)
    converted = _CONVERTED.setdefault(getattr(model, "split", model), {})  # a `Packed` is made anew for each client
    key = batch, num_classes, safeguard, tuple(signatures)
    if key not in converted:
        functions = program_functions(model, batch, num_classes, safeguard)
        converted[key] = convert({name: functions[name] for name in signatures})
    return converted[key]


def program_functions(model, batch, num_classes, safeguard) -> dict:
    """{signature: tf.function} of the device program. For the arguments see `convert_program`."""
    m, k = model.num_features, num_classes

    def spec(name, shape, dtype=tf.float32):
        return tf.TensorSpec(shape, dtype, name)

    theta = spec("theta", [model.num_backbone_weights])
    x, phi = example_spec(model, batch), spec("phi", [batch, m])
    kind = model.kind
    labels = spec("labels", [batch], tf.int32) if kind.label.is_classes else spec("targets", [batch, k])
    examples = [labels, spec("weights", [batch])]
    head = [spec("kernel", [m, k]), spec("bias", [k])]
    said = Kind(kind.text).output
    steps, beta, rate = spec("steps", [], tf.int32), spec("beta", []), spec("rate", [])

    def features(theta, x):
        return {"phi": _record(model, theta, x)[0]}

    def predict(theta, x, kernel, bias):
        return {said: kind.mean(tf.matmul(_record(model, theta, x)[0], kernel) + bias)}

    def personalize(phi, labels, weights, kernel, bias, steps, beta):
        targets = kind.targets(labels, tf.shape(bias)[0], tf.float32)
        kernel, bias, before, after = _fit_head(kind, phi, targets, weights, kernel, bias, steps, beta, safeguard)
        return {"kernel": kernel, "bias": bias, "loss_before": before, "loss": after}

    def head_step(phi, labels, weights, kernel, bias, beta):
        targets = kind.targets(labels, tf.shape(bias)[0], tf.float32)
        dkernel, dbias = _head_gradient(phi, _errors(kind, phi, targets, weights, kernel, bias))
        before = _loss(kind, phi, targets, weights, kernel, bias)
        return {"kernel": kernel - beta * dkernel, "bias": bias - beta * dbias, "loss_before": before}

    def joint_gradient(theta, x, labels, weights, kernel, bias):
        phi, pull_back = _record(model, theta, x)
        dtheta, dkernel, dbias, loss = _joint(
            kind, phi, pull_back, kind.targets(labels, tf.shape(bias)[0], tf.float32), weights, kernel, bias
        )
        return {"dtheta": dtheta, "dkernel": dkernel, "dbias": dbias, "loss": loss}

    def round_(theta, x, labels, weights, kernel, bias, steps, beta, rate):
        phi, pull_back = _record(model, theta, x)
        targets = kind.targets(labels, tf.shape(bias)[0], tf.float32)
        kernel, bias, _, _ = _fit_head(kind, phi, targets, weights, kernel, bias, steps, beta, safeguard)
        dtheta, dkernel, dbias, loss = _joint(kind, phi, pull_back, targets, weights, kernel, bias)
        return {"dtheta": dtheta, "kernel": kernel - rate * dkernel, "bias": bias - rate * dbias, "loss": loss}

    specs = {
        "features": (features, [theta, x]),
        "predict": (predict, [theta, x, *head]),
        "personalize": (personalize, [phi, *examples, *head, steps, beta]),
        "head_step": (head_step, [phi, *examples, *head, beta]),
        "joint_gradient": (joint_gradient, [theta, x, *examples, *head]),
        "round": (round_, [theta, x, *examples, *head, steps, beta, rate]),
    }
    return {n: tf.function(f, input_signature=s, autograph=False) for n, (f, s) in specs.items()}


def example_spec(model, batch=None) -> tf.TensorSpec:
    """The type of the input x: int32 where the backbone takes whole numbers, such as tokens, else float32."""
    dtype = tf.int32 if model.reads == "whole" else tf.float32
    return tf.TensorSpec([batch, *model.input_shape], dtype, "x")


def _record(model, theta, x):
    """A forward pass: (phi [N, M], pull_back). pull_back maps the gradient of phi to that of theta, flat [P]."""
    parts = _unflatten(theta, model)
    phi, of_gradient = builtin_features(model, parts, x)

    def pull_back(dphi):
        check_differentiable(phi, parts, model.backbone)
        gradients = tf.gradients(phi, list(parts), grad_ys=dphi)
        flat = [tf.reshape(tf.zeros_like(p) if g is None else g, [-1]) for p, g in zip(parts, gradients, strict=True)]
        return of_gradient(tf.concat(flat, 0))

    return phi, pull_back


def _fit_head(kind, phi, targets, weights, kernel, bias, steps, beta, safeguard):
    """`steps` gradient steps on the head: (kernel, bias, the loss before, the loss after)."""
    before = _loss(kind, phi, targets, weights, kernel, bias)
    # A step is two products: the bias is the kernel's last row, and what does not change is computed once.
    wide, m = tf.concat([phi, tf.ones_like(phi[:, :1])], 1), kernel.shape[0]
    pull = tf.transpose(wide) * weights

    def body(step, head):
        errors = kind.error(tf.matmul(wide, head), targets)
        return step + 1, tf.ensure_shape(head - beta * tf.matmul(pull, errors), head.shape)

    start = (tf.constant(0), tf.concat([kernel, bias[tf.newaxis]], 0))
    _, head = tf.while_loop(lambda step, _: step < steps, body, start, parallel_iterations=1)
    new_kernel, new_bias = head[:m], head[m]
    after = _loss(kind, phi, targets, weights, new_kernel, new_bias)
    if safeguard:  # also restores the head if the loss is NaN
        keep = after <= before
        new_kernel, new_bias = tf.where(keep, new_kernel, kernel), tf.where(keep, new_bias, bias)
        after = tf.where(keep, after, before)
    return new_kernel, new_bias, before, after


def _joint(kind, phi, pull_back, targets, weights, kernel, bias):
    """The gradient of theta and head at one point, and the loss there: (dtheta [P], dkernel, dbias, loss)."""
    errors = _errors(kind, phi, targets, weights, kernel, bias)
    dtheta = pull_back(tf.matmul(errors, kernel, transpose_b=True))
    return dtheta, *_head_gradient(phi, errors), _loss(kind, phi, targets, weights, kernel, bias)


def convert(functions: dict, configure=None) -> bytes:
    """Converts functions to one .tflite file that has a signature for each, with builtin operations only.

    Args:
        functions: {name: tf.function with an input signature}.
        configure: called with the `tf.lite.TFLiteConverter`, to choose a quantization; None: no quantization.

    Returns:
        The content of the file.

    Raises:
        InvalidInput: the file would need operations that are not builtin.
        QuantizationError: the converter cannot quantize the model.
    """
    module = tf.Module()
    module.functions = functions  # keeps the constants of the functions in memory
    with tempfile.TemporaryDirectory() as folder, _quiet_converter():
        signatures = {name: f.get_concrete_function() for name, f in functions.items()}
        # Without this option the overridden gradients would be looked for among TensorFlow's when it is loaded again.
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
        tf.saved_model.save(module, folder, signatures=signatures, options=options)
        # From a SavedModel: `from_concrete_functions` loses the names of the signatures' outputs.
        converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=list(signatures))
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
        if configure is not None:
            configure(converter)
        try:
            content = converter.convert()
        except ConverterError as error:
            raise UnsupportedLayerError(_not_builtin(str(error))) from None
        except RuntimeError as error:
            if converter.representative_dataset is None:  # of full int8
                raise
            raise QuantizationError(f"the converter of TensorFlow Lite cannot quantize this model: {error}") from None
    check_builtin(content)
    return content


def _not_builtin(said: str) -> str:
    """What to say of a model that TensorFlow Lite cannot express, from the many lines that its converter says."""
    found = sorted(set(re.findall(r"tf\.(?!lite)[A-Z]\w+", said)))
    which = f": {', '.join(found)}" if found else ""
    loop = ""
    if "TensorList" in said:
        loop = "A GRU or LSTM has such unless it is made with unroll=True, for examples of a fixed length. "
    return (
        f"the model needs operations that TensorFlow Lite has not built in{which}. {loop}`tfpfl model` writes a "
        "client's model as a Keras file"
    )


@contextmanager
def _quiet_converter():
    """A context that hides TensorFlow's warnings during conversion, also those from C++. Errors are raised as usual."""
    verbosity = absl.logging.get_verbosity()
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        absl.logging.set_verbosity(absl.logging.ERROR)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        with no_news_of_the_interpreter():  # with which it calibrates int8
            yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        absl.logging.set_verbosity(verbosity)


def check_float32(model) -> None:
    """Raises `InvalidArgument` if a model or trunk, or one of its layers, does not compute in float32."""
    if model.dtype != np.float32:
        raise InvalidArgument(f"a device computes in float32, but this model is {model.dtype}")
    for layer in layers_of(model.model if isinstance(model, Trunk) else model.backbone):
        if "float16" in (found := str(getattr(layer, "compute_dtype", ""))):  # or bfloat16
            raise InvalidArgument(
                f"a device computes in float32, but layer {layer.name!r} ({type(layer).__name__}) computes in {found} "
                "(mixed precision): build the same network in float32, and give it these weights, which are float32"
            )


def check_differentiable(phi, parts, backbone) -> None:
    """Refuses a backbone that the device cannot train.

    Raises:
        UnsupportedLayerError: an operation between theta and phi has no gradient in builtin operations. The message
            names its layer.
    """
    moving = {id(p) for p in parts}
    needed = _ancestors(phi.op)
    for op in phi.graph.get_operations():
        if op not in needed or not any(id(t) in moving for t in op.inputs):
            continue
        if not any(t.dtype.is_floating for t in op.outputs):
            continue  # a shape: nothing is differentiated through it
        if op.type in STOPS:
            continue
        moving.update(id(t) for t in op.outputs)
        if op.type not in GRADIENTS and op.type not in PLAIN:
            raise UnsupportedLayerError(_unsupported(op, backbone))


def _ancestors(op):
    found, open_ops = set(), [op]
    while open_ops:
        op = open_ops.pop()
        if op not in found:
            found.add(op)
            open_ops.extend(t.op for t in op.inputs)
    return found


def _unsupported(op, backbone):
    layers = {layer.name: layer for layer in getattr(backbone, "_flatten_layers", lambda: [])()}
    # A layer's operations are named after it; when it is called again, Keras 3 appends a number to the scope.
    scopes = [name for scope in reversed(op.name.split("/")) for name in (scope, re.sub(r"_\d+$", "", scope))]
    layer = next((layers[name] for name in scopes if name in layers), None)
    kind = type(layer).__name__ if layer is not None and layer is not backbone else None
    what = f"layer {layer.name!r} ({kind})" if kind else f"operation {op.name!r}"
    advice = _ADVICE.get(kind, "take layers whose gradient the device has")
    return (
        f"{what} cannot be trained on a device: {op.type} has no gradient in builtin operations. For rounds on the "
        f"device {advice} (docs/on_device.md lists them: dense, convolution, pooling, normalization and attention "
        "layers, GRU and LSTM with unroll=True, Embedding, and the usual activations); for inference and "
        "personalization of the head alone, export with rounds=False"
    )


def _unflatten(theta, model):
    shapes = [w.shape for w in model.initial_theta]
    parts = tf.split(theta, [int(np.prod(s)) for s in shapes])
    return tuple(tf.reshape(p, s) for p, s in zip(parts, shapes, strict=True))


def flatten(theta) -> np.ndarray:
    """theta as one vector, float32 [P]: the backbone's weights in their order, each row-major."""
    return np.concatenate([np.asarray(w, np.float32).reshape(-1) for w in theta])


def unflatten(flat, model) -> tuple:
    """The inverse of `flatten`: a tuple of arrays with the shapes of the model's theta."""
    shapes = [w.shape for w in model.initial_theta]
    ends = np.cumsum([int(np.prod(s)) for s in shapes])
    return tuple(p.reshape(s) for p, s in zip(np.split(np.asarray(flat), ends[:-1]), shapes, strict=True))


def _errors(kind, phi, targets, weights, kernel, bias):
    """The loss's gradient with respect to the outputs [N, K]."""
    return kind.error(tf.matmul(phi, kernel) + bias, targets) * weights[:, tf.newaxis]


def _head_gradient(phi, errors):
    return tf.matmul(phi, errors, transpose_a=True), tf.reduce_sum(errors, 0)


def _loss(kind, phi, targets, weights, kernel, bias):
    """The weighted sum of the examples' losses; with weights 1 / N their mean."""
    z = tf.matmul(phi, kernel) + bias
    if kind.label.is_classes:
        losses = -targets * tf.nn.log_softmax(z)
    elif kind.label.name == "multilabel":  # TensorFlow's own form of it has an operation that is not builtin
        losses = tf.maximum(z, 0.0) - z * targets + tf.math.log(1.0 + tf.exp(-tf.abs(z)))
    else:
        losses = kind.losses(z, targets)
    return tf.reduce_sum(weights * tf.reduce_sum(losses, 1))
