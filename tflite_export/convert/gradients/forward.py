"""A forward pass of a backbone in operations that the converter takes.

Keras writes some layers in operations that TensorFlow Lite does not have, such as the training form of a batch
normalization in LayerNormalization, or Erf in GELU. They are put in other words in the graph, after Keras has built it;
a backbone without such operations stays as it is, operation by operation.
"""

import functools
import operator

import numpy as np
import tensorflow as tf

from tflite_export.convert.gradients.common import dims, product
from tflite_export.convert.gradients.elementwise import erf
from tflite_export.convert.gradients.images import convolution
from tflite_export.convert.gradients.sizes import known
from tflite_export.convert.gradients.table import builtin_gradients


def features(model, parts, x):
    """phi(x; theta) [N, M] of the weights `parts`, in a graph that `tf.gradients` can differentiate on a device.

    Returns:
        (phi, of_gradient). What `tf.gradients` finds must go through of_gradient: the gradient of a layer that has one
        of its own (tf.custom_gradient), such as swish, uses tensors of before they were put in other words.
    """
    new: dict = {}
    with builtin_gradients():
        words = _WORDS | {"MatMul": _keep_activation, "Conv2D": convolution}
        phi = _in_other_words(model.features(parts, x), words, new)
    return phi, lambda y: _in_other_words(y, _IN_PAIRS, new)


def fixed_features(model, theta, x, int8=False):
    """phi(x; theta) [N, M] of weights that never change: for prediction alone."""
    return fixed(model.features(theta, x), int8)


def fixed(y, int8=False):
    """A result of weights that never change, in operations that the converter takes, for a file of full int8 or not."""
    return _in_other_words(y, _WORDS | _IN_INT8 if int8 else _WORDS)


@tf.autograph.experimental.do_not_convert
def _in_other_words(phi, words, new=None):
    """The same tensor, computed without the operations of `words`; whatever they do not lead to is shared.

    `new` has what was put in other words before, {name of a tensor: the tensor in its place}, and gets what is now.
    """
    ops = phi.graph.get_operations()
    new = {} if new is None else new
    for op in ops:
        if any(t.name in new for t in op.outputs):
            continue
        inputs = [new.get(t.name, t) for t in op.inputs]
        outputs = words[op.type](op, inputs) if op.type in words else None
        if outputs is None and any(t.name in new for t in op.inputs):
            types = [t.dtype for t in op.outputs]
            copy = phi.graph.create_op(op.type, inputs, types, attrs=dict(op.node_def.attr), name=op.name)
            outputs = copy.outputs
            for old, output in zip(op.outputs, outputs, strict=True):
                output.set_shape(old.shape)  # Keras may know more of it than the graph
        if outputs is not None:
            new |= {old.name: output for old, output in zip(op.outputs, outputs, strict=False)}
    return new.get(phi.name, phi)


def _keep_activation(op, inputs):
    """A product, and 0 that only the device computes.

    The converter (TensorFlow 2.14 to 2.21) puts a ReLU behind a product into a FULLY_CONNECTED, and if its matrix is an
    input replaces that by a BATCH_MATMUL, which has no place for the ReLU: it is lost without a word. It does not do so
    where something that is not constant is added to the product, as the bias of a layer is.
    """
    matrix = inputs[1]
    if not _may_lose(op, matrix):
        return None
    transposed = op.get_attr("transpose_b")
    kept = tf.matmul(*inputs, transpose_a=op.get_attr("transpose_a"), transpose_b=transposed)
    row = tf.stop_gradient(matrix[:, 0] if transposed else matrix[0])
    return [kept + 0.0 * row]


def _may_lose(op, matrix) -> bool:
    """Whether the converter may lose an activation behind this product with a matrix, see `_keep_activation`."""
    return tf.get_static_value(matrix) is None and not _is_added_to(op.outputs[0], 4)


def _is_added_to(product, depth) -> bool:
    """Whether all that follows a product directly adds something that is not constant."""
    consumers = product.consumers()
    if not consumers or not depth:
        return False
    for op in consumers:
        if op.type in _NOTHING:
            if not _is_added_to(op.outputs[0], depth - 1):
                return False
        elif op.type not in ("BiasAdd", "Add", "AddV2"):
            return False
        elif any(tf.get_static_value(t) is not None for t in op.inputs if t is not product):
            return False
    return True


def _layer_norm(op, inputs):
    """The statistics of the input over all axes but the channels: LayerNormalization of Keras 2 has examples there."""
    if not op.get_attr("is_training"):
        return None
    x, scale, offset, *_ = inputs
    if op.inputs[0].op.type == "Reshape" and (sizes := known(op.inputs[0].op.inputs[1])) is not None:
        x.set_shape([None if np.isnan(n) else int(n) for n in sizes])
    channels = 1 if op.get_attr("data_format") == b"NCHW" else x.shape.rank - 1
    if channels == 1 and x.shape[0] == 1:  # Keras 2 puts the examples in the place of channels
        shape = dims(op, x.shape)
        y = tf.reshape(_normalized(op.get_attr("epsilon"))(tf.reshape(x, [-1, product(shape[2:])])), shape)
        if _is(scale, 1) and _is(offset, 0):
            return [y]
        return [y * tf.reshape(scale, [1, -1, 1, 1]) + tf.reshape(offset, [1, -1, 1, 1])]
    axes = [a for a in range(x.shape.rank) if a != channels]
    shape = [-1 if a == channels else 1 for a in range(x.shape.rank)]
    centred = x - tf.reduce_mean(x, axes, keepdims=True)
    variance = tf.reduce_mean(tf.square(centred), axes, keepdims=True)
    y = centred * tf.math.rsqrt(variance + op.get_attr("epsilon"))
    return [y * tf.reshape(scale, shape) + tf.reshape(offset, shape)]


def _normalized(epsilon):
    """Rows [N, M] with mean 0 and variance 1 each, whose gradient is computed in one piece."""

    @tf.custom_gradient
    def normalize(x):
        centred = x - tf.reduce_mean(x, 1, keepdims=True)
        inverse = tf.math.rsqrt(tf.reduce_mean(tf.square(centred), 1, keepdims=True) + epsilon)
        y = centred * inverse

        def pull_back(dy):
            along = tf.reduce_mean(dy * y, 1, keepdims=True)
            return inverse * (dy - tf.reduce_mean(dy, 1, keepdims=True) - y * along)

        return y, pull_back

    return normalize


def _is(t, number) -> bool:
    """Whether the graph knows that all numbers of a tensor are this one."""
    value = tf.get_static_value(t.op.inputs[1] if t.op.type == "Fill" else t)
    return value is not None and bool(np.all(value == number))


def _erf(op, inputs):
    return [erf(inputs[0]) if op.type == "Erf" else 1 - erf(inputs[0])]


@tf.custom_gradient
def _stable_softplus(x):
    """log(1 + e^x), for which the converter writes just that: it is infinite, or stays at 88.7, for a larger x."""
    return tf.maximum(x, 0.0) + tf.math.log(1.0 + tf.exp(-tf.abs(x))), lambda dy: dy * tf.sigmoid(x)


def _softplus(op, inputs):
    return [_stable_softplus(inputs[0])]


def _softsign(op, inputs):
    return [inputs[0] / (1 + tf.abs(inputs[0]))]


def _divide_no_nan(op, inputs):
    """a / b, and 0 where b is 0."""
    a, b = inputs
    zero = tf.equal(b, 0.0)
    return [tf.where(zero, tf.zeros_like(a), a / tf.where(zero, tf.ones_like(b), b))]


def _einsum(op, inputs):
    """A product of two arrays as one of matrices: axes that only one has, that both have, and that are summed."""
    equation = op.get_attr("equation").decode()
    if len(inputs) != 2 or "." in equation:
        return None
    (left, right), out = equation.split("->")[0].split(","), equation.split("->")[1]
    shared = [c for c in left if c in right and c in out]
    summed = [c for c in left if c in right and c not in out]
    own = [[c for c in names if c not in shared + summed] for names in (left, right)]
    if any(len(set(names)) < len(names) for names in (left, right, out)) or set(own[0] + own[1]) - set(out):
        return None
    size = dict(zip(left, dims(op, inputs[0].shape), strict=True))
    size |= {c: n for c, n in zip(right, dims(op, inputs[1].shape), strict=True) if size.get(c, -1) == -1}

    def matrix(x, names, order):
        x = x if names == "".join(sum(order, [])) else tf.transpose(x, [names.index(c) for c in sum(order, [])])
        sizes = [product([size[c] for c in group]) for group in order if group is not shared or shared]
        return tf.reshape(x, sizes)

    second = matrix(inputs[1], right, [shared, summed, own[1]])
    y = tf.matmul(matrix(inputs[0], left, [shared, own[0], summed]), second)
    if _may_lose(op, inputs[1]):
        y += 0.0 * tf.stop_gradient(second[..., :1, :])  # see `_keep_activation`
    names = [*shared, *own[0], *own[1]]
    y = tf.reshape(y, [size[c] for c in names])
    return [y if names == list(out) else tf.transpose(y, [names.index(c) for c in out])]


# ADD in place of ADD_N, which LiteRT does not give to its fast library.
_IN_PAIRS = {"AddN": lambda op, inputs: [functools.reduce(operator.add, inputs)]}
# All int8 numbers are finite. The converter writes x - x == 0, with which a file in int8 ends the process that runs it.
_IN_INT8 = {"IsFinite": lambda op, inputs: [tf.ones_like(inputs[0], tf.bool)]}
_NOTHING = {"Identity", "EnsureShape", "Squeeze", "Reshape", "ExpandDims"}  # what the converter may remove
_WORDS = {
    "FusedBatchNormV3": _layer_norm,
    "Erf": _erf,
    "Erfc": _erf,
    "Softplus": _softplus,
    "Softsign": _softsign,
    "DivNoNan": _divide_no_nan,
    "Einsum": _einsum,
}
