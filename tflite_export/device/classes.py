"""Classes that come and go on a device: a head grows by a column, loses one, or makes one of two. Needs NumPy only.

A softmax does not change if one vector is added to all columns of its head, so 0 is no neutral value for a new column;
the mean of the other columns is. Before any training the new class is then never more probable than the most probable
other class.
"""

import numpy as np

from tflite_export.device.head_file import HeadError, SavedHead, is_unicode

MOST = 4096  # classes of a head that grows


def with_class(head: SavedHead, name: str) -> SavedHead:
    """A head with one more class at its end: kernel and bias are the means of the others.

    Raises:
        HeadError: there is such a class already, the name is no line of text, or there are too many.
    """
    names = _names(head)
    if not isinstance(name, str):
        raise HeadError(f"the name of a class is a text, found {name!r}")
    if not name or name != " ".join(name.split()) or len(name) > 200 or not is_unicode(name):
        raise HeadError(f"the name of a class is a line of 1 to 200 characters, found {name[:40]!r}")
    if name in names:
        raise HeadError(f"there is a class {name!r} already: {', '.join(names[:20])}")
    if len(names) >= MOST:
        raise HeadError(f"a head has at most {MOST} classes")
    kernel = np.concatenate([head.kernel, head.kernel.mean(1, keepdims=True)], 1)
    bias = np.append(head.bias, head.bias.mean())
    return _changed(head, kernel, bias, (*names, name))


def without_class(head: SavedHead, name: str) -> SavedHead:
    """A head without a class; the probabilities of the others keep their ratios.

    Raises:
        HeadError: there is no such class, or only two are there.
    """
    names, i = _names(head), place_of(head, name)
    _enough(names, "leave out")
    kept = [j for j in range(len(names)) if j != i]
    return _changed(head, head.kernel[:, kept], head.bias[kept], tuple(names[j] for j in kept))


def with_merged(head: SavedHead, name: str, into: str) -> SavedHead:
    """A head in which two classes are one, of the name `into`.

    Its column is the mean of the two and its bias is log 2 larger than theirs: where both are equally probable, its
    probability is the sum of theirs, and everywhere else it is smaller, until the head is fitted again.

    Raises:
        HeadError: there is no such class, the two are one, or only two are there.
    """
    names, i, j = _names(head), place_of(head, name), place_of(head, into)
    if i == j:
        raise HeadError(f"{name!r} cannot be merged with itself")
    _enough(names, "merge")
    kernel, bias = head.kernel.copy(), head.bias.copy()
    kernel[:, j] = (head.kernel[:, i] + head.kernel[:, j]) / 2
    bias[j] = (head.bias[i] + head.bias[j]) / 2 + np.log(2)
    return without_class(head._replace(kernel=kernel, bias=bias), name)


def place_of(head: SavedHead, name: str) -> int:
    """The position of a class.

    Raises:
        HeadError: there is no such class.
    """
    names = _names(head)
    if name not in names:
        raise HeadError(f"there is no class {str(name)[:40]!r}; there are {', '.join(names[:20])}")
    return names.index(name)


def _names(head: SavedHead) -> tuple[str, ...]:
    assert head.labels is not None  # a `DeviceClient` gives every head its names
    return head.labels


def _enough(names, what):
    if len(names) <= 2:
        raise HeadError(f"a head has at least 2 classes: there is none to {what}")


def _changed(head, kernel, bias, names) -> SavedHead:
    return SavedHead(kernel.astype(np.float32), bias.astype(np.float32), head.theta_sha256, names)
