"""Gradients of a backbone's operations, made of operations that the runtime of a phone has.

TensorFlow's own gradients use operations such as ReluGrad, MaxPoolGrad and Conv2DBackpropFilter, which TensorFlow Lite
does not have. Here are the same gradients in terms of slices, comparisons, matrix products and forward convolutions.
`tf.gradients` takes them where the forward pass was built within `builtin_gradients()`; the Keras model stays as it is.

Images are [N, H, W, C] with N open and H, W, C known. Strides are square, dilation is 1.
"""

from typing import Any

import tensorflow as tf

from tfpfl.checks import InvalidArgument

PREFIX = "TfpflBuiltin"

# Operations whose gradient in TensorFlow already consists of builtin operations, for any number of examples.
PLAIN = {"MatMul", "Reshape", "Identity", "Squeeze", "ExpandDims", "Neg", "EnsureShape"}


class UnsupportedLayerError(InvalidArgument):
    """A layer has no gradient in builtin operations. The message names it and says what to do."""


def builtin_gradients():
    """A context in which operations that are added to the current graph get the gradients of this file."""
    graph = tf.compat.v1.get_default_graph()
    return graph.gradient_override_map({name: PREFIX + name for name in GRADIENTS})


def _relu(op, dy):
    return dy * _where(op.outputs[0] > 0)


def _relu6(op, dy):
    y = op.outputs[0]
    return dy * _where(y > 0) * _where(y < 6)


def _leaky_relu(op, dy):
    positive = _where(op.inputs[0] > 0)
    return dy * (positive + op.get_attr("alpha") * (1 - positive))


def _tanh(op, dy):
    return dy * (1 - tf.square(op.outputs[0]))


def _sigmoid(op, dy):
    y = op.outputs[0]
    return dy * y * (1 - y)


def _bias_add(op, dy):
    _channels_last(op)
    return dy, tf.reduce_sum(dy, list(range(dy.shape.rank - 1)))


def _add(op, dy):
    """One of the two may be a bias that was broadcast; its gradient is a sum."""
    return tuple(_unbroadcast(op, value, dy) for value in op.inputs)


def _sub(op, dy):
    return tuple(_unbroadcast(op, value, part) for value, part in zip(op.inputs, (dy, -dy), strict=True))


def _mul(op, dy):
    a, b = op.inputs
    return _unbroadcast(op, a, dy * b), _unbroadcast(op, b, dy * a)


def _concat(op, dy):
    *parts, axis = op.inputs
    axis = int(tf.get_static_value(axis))
    return (*tf.split(dy, [int(p.shape[axis]) for p in parts], axis), None)


def _pad(op, dy):
    paddings = tf.get_static_value(op.inputs[1])
    slices = [slice(None)] + [slice(int(a), -int(b) or None) for a, b in paddings[1:]]
    return dy[tuple(slices)], None


def _mean(op, dy):
    """GlobalAveragePooling, and any mean over axes that are known."""
    x, axes = op.inputs[0], tf.get_static_value(op.inputs[1])
    axes = {int(a) % x.shape.rank for a in axes.reshape(-1)}
    if 0 in axes:
        _refuse(op, "a mean over examples: the features of an example must not depend on others")
    count = 1
    for a in axes:
        count *= int(x.shape[a])
    shape = [-1] + [1 if a in axes else int(x.shape[a]) for a in range(1, x.shape.rank)]
    return tf.reshape(dy, shape) * (tf.ones_like(x) / count), None


def _max_pool(op, dy):
    """The gradient goes to the maximum of each window; of several equal ones, to the first in reading order."""
    x, y = op.inputs[0], op.outputs[0]
    (kh, kw), s, (top, left) = _window(op, op.get_attr("ksize")[1:3], x, y)
    lowest = tf.constant(x.dtype.min, x.dtype)
    padded = _resized(x, top, left, *_covered(y, kh, kw, s), fill=lowest)
    parts, open_windows = [], None
    for a in range(kh):
        for b in range(kw):
            is_maximum = tf.equal(_phase(padded, a, b, s, y), y)
            first = is_maximum if open_windows is None else tf.logical_and(is_maximum, open_windows)
            parts.append(((a, b), dy * _where(first)))
            if (a, b) != (kh - 1, kw - 1):
                rest = tf.logical_not(is_maximum)
                open_windows = rest if open_windows is None else tf.logical_and(open_windows, rest)
    return _scattered(parts, s, top, left, x)


def _avg_pool(op, dy):
    x, y = op.inputs[0], op.outputs[0]
    (kh, kw), s, (top, left) = _window(op, op.get_attr("ksize")[1:3], x, y)

    def inside(position, size, length, before):  # how many pixels of a window lie on the image
        return sum(0 <= position * s + a - before < length for a in range(size))

    rows = [inside(i, kh, int(x.shape[1]), top) for i in range(y.shape[1])]
    columns = [inside(j, kw, int(x.shape[2]), left) for j in range(y.shape[2])]
    share = tf.constant([[[[1 / (r * c)] for c in columns] for r in rows]], x.dtype)
    return _scattered([((a, b), dy * share) for a in range(kh) for b in range(kw)], s, top, left, x)


def _conv2d(op, dy):
    x, kernel = op.inputs
    kh, kw, channels_in, channels_out = (int(n) for n in kernel.shape)
    if channels_in != x.shape[3]:
        _refuse(op, "a convolution in groups; take groups=1")
    if any(d != 1 for d in op.get_attr("dilations")):
        _refuse(op, "a dilated convolution; take dilation_rate=1")
    _, s, (top, left) = _window(op, (kh, kw), x, op.outputs[0])
    covered = _covered(op.outputs[0], kh, kw, s)

    # The kernel's gradient: every pixel that it ever lay on, as rows of a matrix, times dy.
    padded = _resized(x, top, left, *covered)
    patches = tf.concat([_phase(padded, a, b, s, dy) for a in range(kh) for b in range(kw)], 3)
    patches = tf.reshape(patches, [-1, kh * kw * channels_in])
    d_kernel = tf.matmul(patches, tf.reshape(dy, [-1, channels_out]), transpose_a=True)

    # The input's: a forward convolution of dy, spread out by the stride, with the kernel turned by 180 degrees. The
    # turn is a reverse of ONE axis: `tf.reverse(kernel, [0, 1])` of a kernel that is not constant converts, runs, and
    # gives wrong numbers in the runtime of TensorFlow 2.14.
    turned = tf.reverse(tf.reshape(kernel, [kh * kw, channels_in, channels_out]), [0])
    turned = tf.reshape(tf.transpose(turned, [0, 2, 1]), [kh, kw, channels_out, channels_in])
    spread = dy
    if s > 1:
        zeros = tf.zeros_like(dy)
        spread = tf.nn.depth_to_space(tf.concat([dy] + [zeros] * (s * s - 1), 3), s)
    height, width = int(x.shape[1]), int(x.shape[2])
    spread = _resized(spread, kh - 1 - top, kw - 1 - left, height + kh - 1, width + kw - 1)
    d_x = tf.nn.conv2d(spread, turned, 1, "VALID")
    return d_x, tf.reshape(d_kernel, [kh, kw, channels_in, channels_out])


def _frozen_batch_norm(op, dy, *_):
    """BatchNormalization with statistics that do not move; its scale and offset may train."""
    if op.get_attr("is_training"):
        _refuse(op, "a normalization by the statistics of its input, such as LayerNormalization")
    _channels_last(op)
    x, scale, _, mean, variance = op.inputs
    inverse = tf.math.rsqrt(variance + op.get_attr("epsilon"))
    axes = list(range(dy.shape.rank - 1))
    d_scale = tf.reduce_sum(dy * ((x - mean) * inverse), axes)
    return dy * (scale * inverse), d_scale, tf.reduce_sum(dy, axes), None, None


GRADIENTS = {
    "Relu": _relu,
    "Relu6": _relu6,
    "LeakyRelu": _leaky_relu,
    "Tanh": _tanh,
    "Sigmoid": _sigmoid,
    "BiasAdd": _bias_add,
    "Add": _add,
    "AddV2": _add,
    "Sub": _sub,
    "Mul": _mul,
    "ConcatV2": _concat,
    "Pad": _pad,
    "Mean": _mean,
    "MaxPool": _max_pool,
    "AvgPool": _avg_pool,
    "Conv2D": _conv2d,
    "FusedBatchNormV3": _frozen_batch_norm,
}
for _name, _function in GRADIENTS.items():
    tf.RegisterGradient(PREFIX + _name)(_function)


def _where(condition):
    return tf.cast(condition, tf.float32)


def _refuse(op, what):
    raise UnsupportedLayerError(
        f"{op.name} is {what}. This is for rounds; for inference and personalization of the head, export with "
        "rounds=False"
    )


def _channels_last(op):
    if op.get_attr("data_format") != b"NHWC":
        _refuse(op, "in data format channels_first; take channels_last")


def _unbroadcast(op, value, dy):
    """dy summed over the axes along which `value` was broadcast."""
    if value.shape.rank is None or None in value.shape[1:].as_list():
        _refuse(op, f"a broadcast of an open shape, {value.shape}")
    missing = dy.shape.rank - value.shape.rank
    axes = list(range(missing))
    axes += [a + missing for a, n in enumerate(value.shape) if n == 1 and dy.shape[a + missing] != 1]
    if not axes:
        return dy
    return tf.reshape(tf.reduce_sum(dy, axes), [-1 if n is None else n for n in value.shape])


def _window(op, size, x, y):
    """((kh, kw), stride, (top, left)): the geometry of a convolution or pooling."""
    _channels_last(op)
    _, s, s_w, _ = op.get_attr("strides")
    if s != s_w:
        _refuse(op, f"strided by {s} x {s_w}; take the same stride both ways")
    before = [0, 0]
    if op.get_attr("padding") == b"SAME":
        for axis in (0, 1):
            missing = (int(y.shape[axis + 1]) - 1) * s + int(size[axis]) - int(x.shape[axis + 1])
            before[axis] = max(missing, 0) // 2
    elif op.get_attr("padding") != b"VALID":
        _refuse(op, "explicitly padded; take a ZeroPadding2D layer")
    return (int(size[0]), int(size[1])), int(s), tuple(before)


def _covered(y, kh, kw, s):
    """Height and width of the padded image that all windows together cover."""
    return (int(y.shape[1]) - 1) * s + kh, (int(y.shape[2]) - 1) * s + kw


def _resized(x, top, left, height, width, fill=None):
    """x with `top` rows and `left` columns put before it (cut off if negative), made `height` x `width` at the end."""
    bottom, right = height - int(x.shape[1]) - top, width - int(x.shape[2]) - left
    cut = [slice(max(-a, 0), -max(-b, 0) or None) for a, b in ((top, bottom), (left, right))]
    if any(c != slice(0, None) for c in cut):
        x = x[:, cut[0], cut[1], :]
    padding = [[0, 0], [max(top, 0), max(bottom, 0)], [max(left, 0), max(right, 0)], [0, 0]]
    if not any(a or b for a, b in padding):
        return x
    return tf.pad(x, padding) if fill is None else tf.pad(x, padding, constant_values=fill)


def _phase(padded, a, b, s, y):
    """The pixel at offset (a, b) of every window: the shape of y, with the channels of `padded`."""
    height, width = (int(y.shape[1]) - 1) * s + 1, (int(y.shape[2]) - 1) * s + 1
    return padded[:, a : a + height : s, b : b + width : s, :]


def _scattered(parts, s, top, left, x):
    """The transpose of `_phase`: [((a, b), values for offset (a, b) of every window)] added up in an image like x."""
    offsets_a, offsets_b = {a // s for (a, _), _ in parts}, {b // s for (_, b), _ in parts}
    height, width = int(parts[0][1].shape[1]) + max(offsets_a), int(parts[0][1].shape[2]) + max(offsets_b)
    phases: dict[tuple[int, int], Any] = {}
    for (a, b), values in parts:  # rows a, a + s, ... are phase a % s, moved down by a // s
        moved = _resized(values, a // s, b // s, height, width)
        key = (a % s, b % s)
        phases[key] = moved if key not in phases else phases[key] + moved
    zeros = tf.zeros_like(next(iter(phases.values())))
    grid = [phases.get((a, b), zeros) for a in range(s) for b in range(s)]
    image = grid[0] if s == 1 else tf.nn.depth_to_space(tf.concat(grid, 3), s)
    return _resized(image, -top, -left, int(x.shape[1]), int(x.shape[2]))
