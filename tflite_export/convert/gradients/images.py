"""Gradients of convolutions and pools.

Images are [N, H, W, C] with N open and H, W, C known. Layers for sequences compute with images of height 1.
"""

from typing import Any

import tensorflow as tf

from tflite_export.convert.gradients.common import channels_last, refuse, where

_FEW_CHANNELS = 16


def max_pool(op, dy):
    """The gradient goes to the maximum of each window; of several equal ones, to the first in reading order.

    Each pixel of a window takes what is left of dy if it is the maximum, in arithmetic: a third of the time of AND and
    NOT. Windows that tile the image are cut out by SPACE_TO_DEPTH, which moves whole rows; others by strided slices.
    """
    x, y = op.inputs[0], op.outputs[0]
    (kh, kw), s, (top, left) = _window(op, op.get_attr("ksize")[1:3], x, y)
    height, width = _covered(y, kh, kw, s)
    padded = _resized(x, top, left, height, width, fill=tf.constant(x.dtype.min, x.dtype))
    if kh == kw and s == (kh, kw) and kh > 1:
        pixels = tf.split(tf.nn.space_to_depth(padded, kh), kh * kw, 3)
    else:
        pixels = [_phase(padded, a, b, s, y) for a in range(kh) for b in range(kw)]
    parts, left_over = [], dy
    for i, pixel in enumerate(pixels):
        part = left_over * where(tf.equal(pixel, y))
        parts.append(((i // kw, i % kw), part))
        if i < len(pixels) - 1:
            left_over = left_over - part
    return _scattered(parts, s, top, left, x)


def avg_pool(op, dy):
    x, y = op.inputs[0], op.outputs[0]
    (kh, kw), s, (top, left) = _window(op, op.get_attr("ksize")[1:3], x, y)

    def inside(start, size, length):  # how many pixels of a window lie on the image
        return sum(0 <= start + a < length for a in range(size))

    rows = [inside(i * s[0] - top, kh, int(x.shape[1])) for i in range(y.shape[1])]
    columns = [inside(j * s[1] - left, kw, int(x.shape[2])) for j in range(y.shape[2])]
    share = tf.constant([[[[1 / (r * c)] for c in columns] for r in rows]], x.dtype)
    return _scattered([((a, b), dy * share) for a in range(kh) for b in range(kw)], s, top, left, x)


def conv2d(op, dy):
    x, kernel = op.inputs
    kh, kw, channels_in, channels_out = (int(n) for n in kernel.shape)
    if channels_in != x.shape[3]:
        refuse(op, "a convolution in groups; take groups=1")
    if any(d != 1 for d in op.get_attr("dilations")):
        refuse(op, "a dilated convolution; take dilation_rate=1")
    _, s, (top, left) = _window(op, (kh, kw), x, op.outputs[0])
    covered = _covered(op.outputs[0], kh, kw, s)

    # The kernel's gradient: every pixel that it ever lay on, as rows of a matrix, times dy.
    padded, rows = _resized(x, top, left, *covered), tf.reshape(dy, [-1, channels_out])
    pixels = [_phase(padded, a, b, s, dy) for a in range(kh) for b in range(kw)]
    if channels_in < _FEW_CHANNELS:  # one product of patches; with many channels one for each pixel is faster
        pixels = [tf.concat(pixels, 3)]
    products = [tf.matmul(tf.reshape(p, [-1, p.shape[3]]), rows, transpose_a=True) for p in pixels]
    d_kernel = products[0] if len(products) == 1 else tf.concat(products, 0)

    # The input's: a forward convolution of dy, spread out by the stride, with the kernel turned by 180 degrees; as
    # patches times a matrix, which LiteRT 2.3 computes in 60 % of the time of a CONV_2D whose kernel is not constant.
    # The turn is a reverse of ONE axis: `tf.reverse(kernel, [0, 1])` of a kernel that is not constant converts, runs,
    # and gives wrong numbers in the runtime of TensorFlow 2.14.
    if (kh, kw) == s == (1, 1):
        d_x = tf.matmul(rows, tf.reshape(kernel, [channels_in, channels_out]), transpose_b=True)
        return tf.reshape(d_x, [-1, *x.shape[1:]]), tf.reshape(d_kernel, [1, 1, channels_in, channels_out])
    turned = tf.reverse(tf.reshape(kernel, [kh * kw, channels_in, channels_out]), [0])
    turned = tf.reshape(tf.transpose(turned, [0, 2, 1]), [kh * kw * channels_out, channels_in])
    spread = _spread(dy, x, kh, kw, s, top, left)
    around = tf.concat([_phase(spread, a, b, (1, 1), x) for a in range(kh) for b in range(kw)], 3)
    d_x = tf.matmul(tf.reshape(around, [-1, kh * kw * channels_out]), turned)
    d_x = tf.reshape(d_x, [-1, *x.shape[1:]])
    return d_x, tf.reshape(d_kernel, [kh, kw, channels_in, channels_out])


def depthwise(op, dy):
    """Every channel has kernels of its own, `multiplier` of them."""
    x, kernel = op.inputs
    kh, kw, channels, multiplier = (int(n) for n in kernel.shape)
    if any(d != 1 for d in op.get_attr("dilations")):
        refuse(op, "a dilated convolution; take dilation_rate=1")
    _, s, (top, left) = _window(op, (kh, kw), x, op.outputs[0])

    # The kernel's gradient: a sum over all places of the pixel that was there, times dy.
    padded = _resized(x, top, left, *_covered(op.outputs[0], kh, kw, s))
    if multiplier > 1:  # a copy of each channel for each of its kernels
        padded = tf.gather(padded, [c for c in range(channels) for _ in range(multiplier)], axis=3)
    places = [_phase(padded, a, b, s, dy) for a in range(kh) for b in range(kw)]
    d_kernel = tf.stack([tf.reduce_sum(place * dy, [0, 1, 2]) for place in places])

    # The input's: as of `conv2d`, but each channel of dy meets its own kernel only.
    turned = tf.reverse(tf.reshape(kernel, [kh * kw, channels * multiplier]), [0])
    turned = tf.reshape(turned, [kh, kw, channels * multiplier, 1])
    d_x = tf.nn.depthwise_conv2d(_spread(dy, x, kh, kw, s, top, left), turned, [1, 1, 1, 1], "VALID")
    if multiplier > 1:
        _, height, width, _ = x.shape
        d_x = tf.reduce_sum(tf.reshape(d_x, [-1, height * width * channels, multiplier]), 2)
        d_x = tf.reshape(d_x, [-1, height, width, channels])
    return d_x, tf.reshape(d_kernel, [kh, kw, channels, multiplier])


def _spread(dy, x, kh, kw, s, top, left):
    """dy with its pixels as far apart as the strides, in an image on which a kernel meets each pixel of x once."""
    height, width = int(x.shape[1]), int(x.shape[2])
    spread = _interleaved({(0, 0): dy}, s)
    return _resized(spread, kh - 1 - top, kw - 1 - left, height + kh - 1, width + kw - 1)


def _window(op, size, x, y):
    """((kh, kw), (stride down, stride right), (top, left)): the geometry of a convolution or pooling."""
    channels_last(op)
    s = tuple(int(n) for n in op.get_attr("strides")[1:3])
    before = [0, 0]
    if op.get_attr("padding") == b"SAME":
        for axis in (0, 1):
            missing = (int(y.shape[axis + 1]) - 1) * s[axis] + int(size[axis]) - int(x.shape[axis + 1])
            before[axis] = max(missing, 0) // 2
    elif op.get_attr("padding") != b"VALID":
        refuse(op, "explicitly padded; take a ZeroPadding2D layer")
    return (int(size[0]), int(size[1])), s, tuple(before)


def _covered(y, kh, kw, s):
    """Height and width of the padded image that all windows together cover."""
    return (int(y.shape[1]) - 1) * s[0] + kh, (int(y.shape[2]) - 1) * s[1] + kw


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
    height, width = (int(y.shape[1]) - 1) * s[0] + 1, (int(y.shape[2]) - 1) * s[1] + 1
    return padded[:, a : a + height : s[0], b : b + width : s[1], :]


def _scattered(parts, s, top, left, x):
    """The transpose of `_phase`: [((a, b), values for offset (a, b) of every window)] added up in an image like x."""
    offsets_a, offsets_b = {a // s[0] for (a, _), _ in parts}, {b // s[1] for (_, b), _ in parts}
    height, width = int(parts[0][1].shape[1]) + max(offsets_a), int(parts[0][1].shape[2]) + max(offsets_b)
    phases: dict[tuple[int, int], Any] = {}
    for (a, b), values in parts:  # rows a, a + s, ... are phase a % s, moved down by a // s
        moved = _resized(values, a // s[0], b // s[1], height, width)
        key = (a % s[0], b % s[1])
        phases[key] = moved if key not in phases else phases[key] + moved
    return _resized(_interleaved(phases, s), -top, -left, int(x.shape[1]), int(x.shape[2]))


def _interleaved(phases, s):
    """One image of the phases {(a, b): pixels a, a + s, ... by b, b + s, ...}; those that are missing are 0."""
    first = next(iter(phases.values()))
    if s == (1, 1):
        return first
    zeros = first if len(phases) == s[0] * s[1] else tf.zeros_like(first)
    rows = [[phases.get((a, b), zeros) for b in range(s[1])] for a in range(s[0])]
    if s[0] == s[1]:
        return tf.nn.depth_to_space(tf.concat([phase for row in rows for phase in row], 3), s[0])
    _, height, width, channels = first.shape
    wide = [tf.reshape(tf.concat(row, 3), [-1, height, width * s[1], channels]) for row in rows]
    return tf.reshape(tf.concat(wide, 2), [-1, height * s[0], width * s[1], channels])
