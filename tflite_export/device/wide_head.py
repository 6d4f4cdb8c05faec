"""Fits a head into a program with room for more classes. Needs NumPy only.

Some runtimes cannot resize tensors (LiteRT.js), so their program has a fixed number of columns. A smaller head
gets closed columns: their kernel is 0, and their bias is so low that their probability is exactly 0. They do not change
the loss, their gradient is exactly 0, and after any number of steps the other columns equal those of the smaller head.
"""

import numpy as np

CLOSED = np.float32(-1e30)  # the bias of a closed column; not infinite, as 0 times infinity is NaN


def widened(kernel: np.ndarray, bias: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """A head, kernel [M, K] and bias [K], with closed columns up to `room` >= K: (kernel [M, room], bias [room])."""
    more = room - len(bias)
    return np.pad(kernel, [(0, 0), (0, more)]), np.concatenate([bias, np.full(more, CLOSED)]).astype(np.float32)
