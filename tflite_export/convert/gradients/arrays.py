"""Gradients of operations that move numbers: joining, cutting, turning and repeating arrays."""

import tensorflow as tf

from tflite_export.convert.gradients.common import constant, dims, folded, product, refuse


def concat(op, dy):
    *parts, axis = op.inputs
    axis = int(tf.get_static_value(axis))
    return (*tf.split(dy, [int(p.shape[axis]) for p in parts], axis), None)


def split(op, *dys):
    return None, tf.concat(dys, int(constant(op, 0, "axes")))


def split_sizes(op, *dys):
    return tf.concat(dys, int(constant(op, 2, "axes"))), None, None


def unpack(op, *dys):
    return tf.stack(dys, op.get_attr("axis"))


def pack(op, dy):
    return tuple(tf.unstack(dy, len(op.inputs), op.get_attr("axis")))


def pad(op, dy):
    paddings = tf.get_static_value(op.inputs[1])
    slices = [slice(None)] + [slice(int(a), -int(b) or None) for a, b in paddings[1:]]
    return dy[tuple(slices)], None


def transpose(op, dy):
    order = [int(a) for a in constant(op, 1, "axes")]
    return tf.transpose(dy, [order.index(a) for a in range(len(order))]), None


def reverse(op, dy):
    return tf.reverse(dy, [int(a) for a in constant(op, 1, "axes")]), None


def strided_slice(op, dy):
    """What was cut off gets zeros. The steps must be 1."""
    paddings = _cut_off(op)
    x = dims(op, op.inputs[0].shape)
    left = [n if n == -1 else n - a - b for n, (a, b) in zip(x, paddings, strict=True)]
    return tf.pad(tf.reshape(dy, left), paddings), None, None, None


def _cut_off(op):
    """[(before, after)] of every axis of the sliced array: how many numbers the slice leaves out."""
    x, (begin, end, steps) = op.inputs[0].shape, (constant(op, i, "places") for i in (1, 2, 3))
    masks = {n: op.get_attr(f"{n}_mask") for n in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}

    def said(mask, i):
        return bool(masks[mask] >> i & 1)

    named = [i for i in range(len(begin)) if not said("new_axis", i) and not said("ellipsis", i)]
    paddings: list = []
    for i in range(len(begin)):
        if said("ellipsis", i):
            paddings += [(0, 0)] * (x.rank - len(named))
        elif not said("new_axis", i):
            size = x[len(paddings)]
            if said("shrink_axis", i):
                whole, first, last = False, int(begin[i]), int(begin[i]) + 1
                last = last if last or size is None else size
            else:
                first = 0 if said("begin", i) else int(begin[i])
                whole = first == 0 and said("end", i)
                last = size if said("end", i) else int(end[i])
                if steps[i] != 1:
                    refuse(op, f"a slice in steps of {steps[i]}")
            if size is None and not whole:
                refuse(op, "a slice of the examples")
            if not whole:
                first, last = (min(max(n + size if n < 0 else n, 0), size) for n in (first, last))
            paddings.append((0, 0) if whole else (first, size - last))
    return paddings + [(0, 0)] * (x.rank - len(paddings))


def tile(op, dy):
    """Repetitions follow one another as a whole: an axis more, in front of the one that is repeated."""
    x, times = dims(op, op.inputs[0].shape), [int(n) for n in constant(op, 1, "repetitions")]
    for axis, n in enumerate(times):
        if n != 1:
            after = [x[axis]] + [m if m == -1 else m * t for m, t in zip(x[axis + 1 :], times[axis + 1 :], strict=True)]
            grouped = tf.reshape(dy, [product(x[:axis]), n, product(after)])
            dy = tf.reshape(tf.reduce_sum(grouped, 1), x[:axis] + after)
    return dy, None


def nearest(op, dy):
    """UpSampling2D of whole factors: a pixel gets the sum of its copies' gradients."""
    n, h, w, c = dims(op, op.inputs[0].shape)
    height, width = (int(m) for m in constant(op, 1, "sizes"))
    if height % h or width % w or op.get_attr("align_corners"):
        refuse(op, f"a resize from {h} x {w} to {height} x {width} pixels; take a whole factor")
    dy = folded(op, dy, [n, h, width, c], 1, height // h)
    return folded(op, dy, [n, h, w, c], 2, width // w), None


def gather(op, dy):
    """Rows of a table, as an Embedding takes them; the gradients of a row that is taken several times add up."""
    table, rows = op.inputs[0], op.inputs[1]
    if op.get_attr("batch_dims") or int(constant(op, 2, "axes")) or None in table.shape.as_list():
        refuse(op, "a choice of rows of an array that is no table")
    count, *row = dims(op, table.shape)
    flat = tf.reshape(tf.cast(rows, tf.int32), [-1, 1])
    summed = tf.scatter_nd(flat, tf.reshape(dy, [-1, product(row)]), [count, product(row)])
    return tf.reshape(summed, [count, *row]), None, None


def space_to_batch(op, dy):
    """The two come around a dilated convolution, and undo each other."""
    back = tf.batch_to_space if op.type == "SpaceToBatchND" else tf.space_to_batch
    return back(dy, op.inputs[1], op.inputs[2]), None, None
