"""Numbers over clients, over rounds and over seeds.

Everywhere NaN stands for "this client has no examples in this split" (or "this round was not evaluated"): such entries
are left out, and `num_tested` counts the others, so that a mean is never read without how many it is over. Where
nothing is left, the result is NaN.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

from tfpfl.checks import InvalidArgument


class Wilcoxon(NamedTuple):
    """The signed-rank test of paired values; see `wilcoxon`."""

    statistic: float  # W+, the sum of the ranks of positive differences
    p_value: float  # of "no greater", one-sided
    pairs: int  # that the ranks are over
    zeros: int  # pairs without a difference, which are dropped


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
        raise InvalidArgument(f"one number of examples for each value, found {num_examples.shape} for {values.shape}")
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
        raise InvalidArgument(f"fraction must lie in (0, 1], found {fraction}")
    present = np.sort(_present(values))
    # 0.1 * 30 is slightly more than 3 in floating point, and means 3.
    return mean_over_clients(present[: math.ceil(fraction * len(present) - 1e-9)])


def std(values) -> float:
    """The standard deviation over clients, with n and not n - 1: the clients are all there are."""
    present = _present(values)
    return float(present.std()) if len(present) else math.nan


def deciles(values) -> np.ndarray:
    """[9]: the values that 10, 20, .. 90 % of the clients do not exceed (interpolated)."""
    present = _present(values)
    return np.quantile(present, np.arange(1, 10) / 10) if len(present) else np.full(9, math.nan)


def jain(values) -> float:
    """Jain's fairness index (sum x)^2 / (n sum x^2): 1 where all have the same, 1 / n where one has everything.

    Raises:
        ValueError: a negative value.
    """
    present = _not_negative(values)
    squares = len(present) * (present**2).sum()
    return float(present.sum() ** 2 / squares) if squares else math.nan


def gini(values) -> float:
    """The Gini coefficient, the mean |x_i - x_j| over all i, j by twice the mean: 0 where all have the same.

    Raises:
        ValueError: a negative value.
    """
    present = np.sort(_not_negative(values))
    n, total = len(present), present.sum()
    return float((2 * np.arange(1, n + 1) - n - 1) @ present / (n * total)) if total else math.nan


def gains(values, than) -> np.ndarray:
    """[n], values - than, client by client; NaN where either is.

    Raises:
        ValueError: not as many of one as of the other.
    """
    values, than = np.asarray(values, np.float64), np.asarray(than, np.float64)
    if values.shape != than.shape or values.ndim != 1:
        raise InvalidArgument(f"clients are compared one by one, in two vectors; found {values.shape} and {than.shape}")
    return values - than


def share_worse(values, than) -> float:
    """The share of the clients that have less than with `than`; equal is not worse."""
    return mean_over_clients(np.where(np.isnan(d := gains(values, than)), math.nan, d < 0))


def wilcoxon(values, than) -> Wilcoxon:
    """Wilcoxon's signed-rank test that clients have more than with `than`: one-sided, zero differences dropped.

    As FedAMP (arXiv 2007.03797) reports it. The p-value is scipy's: exact for few pairs without ties, otherwise by the
    normal approximation. Without any pair that differs it is NaN.
    """
    present = _present(gains(values, than))
    zeros = int((present == 0).sum())
    if zeros == len(present):
        return Wilcoxon(math.nan, math.nan, 0, zeros)
    found = stats.wilcoxon(present[present != 0], alternative="greater")
    return Wilcoxon(float(found.statistic), float(found.pvalue), len(present) - zeros, zeros)


def over_seeds(values) -> tuple[float, float]:
    """The mean over seeds and half its 95 % interval: Student's t with n - 1 degrees; NaN for a single seed."""
    present = _present(values)
    if not len(present):
        return math.nan, math.nan
    if len(present) == 1:
        return float(present[0]), math.nan
    half = stats.t.ppf(0.975, len(present) - 1) * present.std(ddof=1) / math.sqrt(len(present))
    return float(present.mean()), float(half)


def last(values, n: int = 10) -> float:
    """The mean of the last n evaluated rounds; of all of them where there are fewer."""
    if n < 1:
        raise InvalidArgument(f"n must be at least 1, found {n}")
    return mean_over_clients(_present(values)[-n:])


def _not_negative(values) -> np.ndarray:
    present = _present(values)
    if (present < 0).any():
        raise InvalidArgument(f"shares of a sum need values of at least 0, found {present.min()}")
    return present


def _present(values) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 1:
        raise InvalidArgument(f"expected one value for each client, a vector; found shape {values.shape}")
    return values[~np.isnan(values)]
