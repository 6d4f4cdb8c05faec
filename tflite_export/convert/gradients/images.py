"""Gradients of convolutions and pools.

Images are [N, H, W, C] with N open and H, W, C known. Layers for sequences compute with images of height 1.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tflite_export.convert.gradients.common import channels_last, refuse, times_transposed, where

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
    pixels = _pixels(padded, kh, kw, s, y)
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


def convolution(op, inputs):
    """A Conv2D as a product of patches and a matrix, with its gradient; None if it has none.

    LiteRT gives a product to its fast library also where the matrix is not constant, but not a CONV_2D: 22 GFLOP/s in
    place of 53. The patches are copied by one GATHER.
    """
    x, kernel = inputs
    kh, kw, channels_in, channels_out = (int(n) for n in kernel.shape)
    if channels_in != x.shape[3] or any(d != 1 for d in op.get_attr("dilations")):
        return None
    _, s, (top, left) = _window(op, (kh, kw), x, op.outputs[0])
    y = op.outputs[0]
    (height, width), (rows, columns) = ((int(n) for n in t.shape[1:3]) for t in (x, y))
    pixelwise = (kh, kw) == s == (1, 1)

    @tf.custom_gradient
    def convolve(x, kernel):
        if pixelwise:
            patches = x
        else:
            patches = _patches(x, _places((rows, columns), (kh, kw), s, (top, left), (height, width)), (height, width))
        product = tf.matmul(tf.reshape(patches, [1, -1, kh * kw * channels_in]), _matrix(kernel))

        def pull_back(dy):
            dy = tf.reshape(dy, [-1, rows, columns, channels_out])
            flat = tf.reshape(dy, [-1, channels_out])
            if channels_in < _FEW_CHANNELS and not pixelwise:  # one product for each example
                each = tf.reshape(patches, [-1, rows * columns, kh * kw * channels_in])
                products = tf.matmul(each, tf.reshape(dy, [-1, rows * columns, channels_out]), transpose_a=True)
                d_kernel = tf.reduce_sum(products, 0)
            else:  # one for each pixel of the kernel
                padded = _resized(x, top, left, *_covered(y, kh, kw, s))
                pixels = [tf.reshape(p, [-1, channels_in]) for p in _pixels(padded, kh, kw, s, y)]
                products = [tf.matmul(p, flat, transpose_a=True) for p in pixels]
                d_kernel = products[0] if len(products) == 1 else tf.concat(products, 0)
            if pixelwise:
                d_x = times_transposed(flat, _matrix(kernel))
            elif 3 * rows * columns < 2 * height * width:  # fewer windows than pixels: a product for each of its pixels
                offsets = [(a, b) for a in range(kh) for b in range(kw)]
                parts = [times_transposed(flat, kernel[a, b]) for a, b in offsets]
                parts = [tf.reshape(p, [-1, rows, columns, channels_in]) for p in parts]
                d_x = _scattered(list(zip(offsets, parts, strict=True)), s, top, left, x)
            else:
                # A convolution of dy, spread out by the stride, with the kernel turned by 180 degrees: dy's pixels are
                # met in the opposite order, and the kernel stays as it is but for its channels.
                turned = tf.reshape(tf.transpose(kernel, [0, 1, 3, 2]), [kh * kw * channels_out, channels_in])
                places = _places_back((height, width), (rows, columns), (kh, kw), s, (top, left))
                around = _patches(dy, places, (rows, columns))
                d_x = tf.matmul(tf.reshape(around, [1, -1, kh * kw * channels_out]), turned)
            d_x = tf.reshape(d_x, [-1, height, width, channels_in])
            return d_x, tf.reshape(d_kernel, [kh, kw, channels_in, channels_out])

        return tf.reshape(product, [-1, rows, columns, channels_out]), pull_back

    return [convolve(x, kernel)]


def _matrix(kernel):
    """A kernel [kh, kw, channels in, channels out] as a matrix with a row for each pixel and channel."""
    kh, kw, channels_in, channels_out = (int(n) for n in kernel.shape)
    return tf.reshape(kernel, [kh * kw * channels_in, channels_out])


def _patches(x, places, size):
    """Of each image, its pixels at `places`, which are numbers in reading order; -1 is a pixel outside, of zeros."""
    height, width = size
    pixels = tf.reshape(x, [-1, height * width, int(x.shape[3])])
    places = places.reshape(-1)
    if (places < 0).any():
        pixels = tf.pad(pixels, [[0, 0], [0, 1], [0, 0]])
        places = np.where(places < 0, height * width, places)
    return tf.gather(pixels, places.astype(np.int32), axis=1)


def _places(out, kernel, s, before, size):
    """int [rows, columns, kh, kw]: which pixel of an image of `size` each pixel of a kernel lies on; -1: on none."""
    down, right = (
        np.arange(n)[:, None] * step + np.arange(k) - first
        for n, k, step, first in zip(out, kernel, s, before, strict=True)
    )
    return _numbered(down, right, size)


def _places_back(size, out, kernel, s, before):
    """int [height, width, kh, kw]: in which window each pixel of the kernel lies on a pixel of the image; -1: none."""
    axes = []
    for n, m, k, step, first in zip(size, out, kernel, s, before, strict=True):
        start = np.arange(n)[:, None] + first - np.arange(k)
        axes.append(np.where((start % step == 0) & (start // step < m), start // step, -1))
    down, right = axes
    return _numbered(down, right, out)


def _numbered(down, right, size):
    """Places (down, right) in an image of `size`, in reading order; -1 outside."""
    down, right = down[:, None, :, None], right[None, :, None, :]
    inside = (down >= 0) & (down < size[0]) & (right >= 0) & (right < size[1])
    return np.where(inside, down * size[1] + right, -1)


def conv2d(op, dy):
    """Convolutions that `convolution` does not put in other words."""
    if int(op.inputs[1].shape[2]) != op.inputs[0].shape[3]:
        refuse(op, "a convolution in groups; take groups=1")
    refuse(op, "a dilated convolution; take dilation_rate=1")


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
    pixels = _pixels(padded, kh, kw, s, dy)
    d_kernel = tf.stack([tf.reduce_sum(pixel * dy, [0, 1, 2]) for pixel in pixels])

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
    """Height and width of the padded image that all windows together cover, rounded up to whole strides."""
    cells = (int(y.shape[i + 1]) + (k - 1) // s[i] for i, k in enumerate((kh, kw)))
    if s[0] == s[1]:
        return tuple(n * s[i] for i, n in enumerate(cells))
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


def _pixels(padded, kh, kw, s, y):
    """The pixel at each offset (a, b) of every window, in reading order: the shape of y, with `padded`'s channels.

    Strides are undone by SPACE_TO_DEPTH, which moves whole rows, where both are equal: a STRIDED_SLICE takes 4 times
    as long.
    """
    height, width = int(y.shape[1]), int(y.shape[2])
    if s[0] != s[1]:
        ends = (height - 1) * s[0] + 1, (width - 1) * s[1] + 1
        return [padded[:, a : a + ends[0] : s[0], b : b + ends[1] : s[1], :] for a in range(kh) for b in range(kw)]
    s = s[0]
    phases = [padded] if s == 1 else tf.split(tf.nn.space_to_depth(padded, s), s * s, 3)
    pixels = []
    for a in range(kh):
        for b in range(kw):
            phase, down, right = phases[a % s * s + b % s], a // s, b // s
            whole = (height, width) == tuple(phase.shape[1:3])
            pixels.append(phase if whole else phase[:, down : down + height, right : right + width, :])
    return pixels


def _scattered(parts, s, top, left, x):
    """The transpose of `_pixels`: [((a, b), values for offset (a, b) of every window)] added up in an image like x."""
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
