"""Examples for programs that take a fixed number of them. Needs NumPy only."""

import numpy as np


def filled_up(array: np.ndarray, rows: int) -> np.ndarray:
    """An array with rows of zeros at its end, so that it has `rows` of them."""
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
