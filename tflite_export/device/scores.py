"""Loss and accuracy of a head, and the choice of held-out examples. Needs NumPy only."""

from typing import NamedTuple

import numpy as np

from tflite_export.device.runtime import BundleError


class Score(NamedTuple):
    """Loss and accuracy of a head on labelled examples."""

    loss: float  # mean cross-entropy in nats
    accuracy: float  # in [0, 1]


def cut(x, y, part):
    """Sets a part of the examples of each class aside: ((x, y) to fit, (x, y) held out).

    Raises:
        BundleError: the part is not in (0, 1), or there are fewer than 4 examples.
    """
    if not 0 < part < 1:
        raise BundleError(f"the held-out part must lie in (0, 1), found {part}")
    if len(x) < 4:
        raise BundleError(f"{len(x)} examples are too few to hold some out; give held_out examples, or None")
    order = np.argsort(y, kind="stable")
    every = max(int(round(1 / part)), 2)
    out = np.zeros(len(x), bool)
    out[order[every - 1 :: every]] = True
    return (x[~out], y[~out]), (x[out], y[out])


def log_softmax(logits):
    """The logarithm of softmax of each row of `logits`, [N, K]."""
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def score(phi, y, kernel, bias) -> Score:
    """Loss and accuracy of a head, kernel [M, K] and bias [K], on features [N, M] with labels [N]."""
    log_p = log_softmax(phi @ kernel + bias)
    return Score(float(-log_p[np.arange(len(y)), y].mean()), float((log_p.argmax(1) == y).mean()))
