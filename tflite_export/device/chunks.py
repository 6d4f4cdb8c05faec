"""Examples for programs that take a fixed number of them. Needs NumPy only."""

import numpy as np


def filled_up(x: np.ndarray, rows: int) -> np.ndarray:
    """Examples, at least one, with copies of the first at their end, so that there are `rows` of them.

    Of an example of zeros some networks make NaN, such as the mean over the tokens that are not masked, and NaN times a
    weight of 0 is NaN. A copy does what the example itself does.
    """
    return np.concatenate([x, np.broadcast_to(x[:1], (rows - len(x), *x.shape[1:]))])


def with_zeros(array: np.ndarray, rows: int) -> np.ndarray:
    """What belongs to examples, such as their weights, with zeros at its end, so that it has `rows` rows."""
    return np.pad(array, [(0, rows - len(array))] + [(0, 0)] * (array.ndim - 1))


def trunk_output(trunk, raw: np.ndarray, batch: int, chunk: int) -> np.ndarray:
    """What a file with a frozen trunk makes of examples.

    Args:
        trunk: the `Runtime` of the file.
        raw: float32 [N, ...], at least one example.
        batch: how many examples a file of fixed shapes takes.
        chunk: how many are computed at a time by another file.

    Returns:
        x, float32 [N, ...].
    """
    fixed = trunk.has_fixed_rows("trunk", "raw")
    chunk = batch if fixed else chunk
    parts = []
    for start in range(0, len(raw), chunk):
        part = raw[start : start + chunk]
        x = trunk("trunk", raw=filled_up(part, batch) if fixed else part)["x"]
        parts.append(x[: len(part)])
    return np.concatenate(parts)
