"""Numbers over clients, and over rounds.

Everywhere NaN stands for "this client has no examples in this split" (or "this round was not evaluated"): such entries
are left out, and `num_tested` counts the others, so that a mean is never read without how many it is over. Where
nothing is left, the result is NaN.
"""

import math

import numpy as np


def num_tested(values) -> int:
    """How many clients the numbers below are over."""
    return len(_present(values))


def mean_over_clients(values) -> float:
    """The unweighted mean: every client counts the same."""
    present = _present(values)
    return float(present.mean()) if len(present) else math.nan


def pooled(values, num_examples) -> float:
    """The mean over all clients' examples: a client counts as often as it has examples; one with none is left out.

    A NaN of a client that does have examples stays visible in the result.

    Args:
        values: [n], each a mean over one client's examples.
        num_examples: int [n].
    """
    values, num_examples = np.asarray(values, np.float64), np.asarray(num_examples, np.float64)
    if values.shape != num_examples.shape:
        raise ValueError(f"one number of examples for each value, found {num_examples.shape} for {values.shape}")
    tested = num_examples > 0
    if not tested.any():
        return math.nan
    return float(values[tested] @ num_examples[tested] / num_examples[tested].sum())


def ci95(values) -> float:
    """Half the width of the 95 % interval of the mean over clients: 1.96 std / sqrt(n), std with n and not n - 1."""
    present = _present(values)
    return float(1.96 * present.std() / math.sqrt(len(present))) if len(present) else math.nan


def worst(values, fraction: float = 0.1) -> float:
    """The mean of the lowest `fraction` of the clients, rounded up to whole clients: by default the worst decile."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie in (0, 1], found {fraction}")
    present = np.sort(_present(values))
    # 0.1 * 30 is slightly more than 3 in floating point, and means 3.
    return mean_over_clients(present[: math.ceil(fraction * len(present) - 1e-9)])


def last(values, n: int = 10) -> float:
    """The mean of the last n evaluated rounds; of all of them where there are fewer."""
    if n < 1:
        raise ValueError(f"n must be at least 1, found {n}")
    return mean_over_clients(_present(values)[-n:])


def _present(values) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 1:
        raise ValueError(f"expected one value for each client, a vector; found shape {values.shape}")
    return values[~np.isnan(values)]
