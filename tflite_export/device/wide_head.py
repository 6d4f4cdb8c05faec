"""A head in a program that has room for more classes. NumPy only.

Where a runtime cannot resize (LiteRT.js), the program has a fixed number of columns, and a narrower head is widened by
closed ones: kernel 0 and a bias so low that their probability is exactly 0. They take no part in the loss, their
gradient is exactly 0, and after any number of steps the other columns are those of the narrow head.
"""

import numpy as np

CLOSED = np.float32(-1e30)  # finite: 0 times it is 0


def widened(kernel: np.ndarray, bias: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """(kernel [M, room], bias [room]) of a head [M, K], [K]; K <= room."""
    more = room - len(bias)
    return np.pad(kernel, [(0, 0), (0, more)]), np.concatenate([bias, np.full(more, CLOSED)]).astype(np.float32)
