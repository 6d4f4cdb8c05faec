"""Statistics over clients, over rounds and over seeds.

In all functions NaN stands for "this client has no examples in this split" or "this round was not evaluated". Such
values are left out; `num_tested` counts the others. If no value is left, the result is NaN.

Infinity stands for "this client has examples, but its model diverged" (see `tfpfl.runs.scores.or_worst`). Such values
are not left out: the mean is infinite then, and so are the standard deviation and the width of an interval.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special, stats

from tfpfl.checks import InvalidArgument


class Wilcoxon(NamedTuple):
    """The result of a signed-rank test of paired values; see `wilcoxon`."""

    statistic: float  # W+, the sum of the ranks of positive differences
    p_value: float  # one-sided; the null hypothesis is that clients do not have more
    pairs: int  # number of ranked pairs
    zeros: int  # number of pairs without a difference, which are left out


def num_tested(values) -> int:
    """The number of clients with a value, that is, not NaN."""
    return len(_present(values))


def mean_over_clients(values) -> float:
    """The unweighted mean: every client has the same weight."""
    present = _present(values)
    if (present == math.inf).any() and (present == -math.inf).any():  # such gains have no mean
        return math.nan
    return float(present.mean()) if len(present) else math.nan


def pooled(values, num_examples) -> float:
    """The mean over all clients' examples: clients are weighted by their number of examples.

    Clients without examples are left out. If a client with examples has NaN, the result is NaN.

    Args:
        values: [n], each the mean over one client's examples.
        num_examples: int [n].

    Raises:
        InvalidArgument: the two shapes differ.
    """
    values, num_examples = np.asarray(values, np.float64), np.asarray(num_examples, np.float64)
    if values.shape != num_examples.shape:
        raise InvalidArgument(
            f"values and num_examples must have one shape, found {values.shape} and {num_examples.shape}"
        )
    tested = num_examples > 0
    if not tested.any():
        return math.nan
    return float(values[tested] @ num_examples[tested] / num_examples[tested].sum())


def ci95(values) -> float:
    """Half the width of Student's 95 % interval of the mean over clients: t(0.975, n - 1) s / sqrt(n).

    Here s is the standard deviation that divides by n - 1, and t(0.975, n - 1) the quantile of Student's distribution
    with n - 1 degrees of freedom: 12.7 for 2 clients, 2.78 for 5, 2.26 for 10, 1.98 for 100. The clients count as a
    sample of all that might take part. NaN for a single client, which says nothing of others; infinite if a value is.
    """
    present = _present(values)
    if len(present) < 2:
        return math.nan
    if not np.isfinite(present).all():
        return math.inf
    # stdtrit is what scipy.stats.t.ppf calls, without its checks: one interval a round adds up.
    return float(special.stdtrit(len(present) - 1, 0.975) * present.std(ddof=1) / math.sqrt(len(present)))


def rounds_ci95(rounds: Sequence[tuple], transform: Callable = np.asarray) -> float:
    """Half the 95 % interval of the mean over rounds of `transform(pooled(...))`, with the clients as a sample.

    It is that of the delete-one jackknife (Efron and Stein, 1981) with Student's quantile of n - 1. In one round with
    equal n_i it is that of `ci95`. If very few clients have most of the examples it is still too narrow: with 10
    clients and sizes exp(2 z), z ~ N(0, 1), it has the truth in it in 87 of 100 cases.

    A client is left out of all of its rounds at once. So the interval becomes narrower with the number of different
    clients that were scored, and not with the number of rounds in which the same ones were. A round whose only client
    is left out counts no more. NaN with fewer than two clients.

    Args:
        rounds: [(ids, values, num_examples)], each [n_t]: the clients of a round, the mean over each one's examples,
            and how many these are; clients with 0 are left out.
        transform: what is done with the pooled mean of a round, such as np.sqrt where values are squares.
    """
    means, found = [], []
    for ids, values, counts in rounds:
        i, x, n = np.asarray(ids), np.asarray(values, np.float64), np.asarray(counts, np.float64)
        mean, tested = pooled(x, n), n > 0
        if tested.any() and not math.isfinite(mean):
            return abs(mean)
        if tested.any():
            means.append(float(transform(mean)))
            found.append((i[tested], x[tested], n[tested]))
    clients = np.unique(np.concatenate([i for i, _, _ in found])) if found else np.zeros(0)
    if len(clients) < 2:
        return math.nan
    total, number = np.full(len(clients), sum(means)), np.full(len(clients), len(means))
    for mean, (i, x, n) in zip(means, found, strict=True):
        at = np.searchsorted(clients, i)
        if len(i) == 1:
            number[at] -= 1
            total[at] -= mean
        else:
            total[at] += transform((x @ n - x * n) / (n.sum() - n)) - mean
    # The variance is (n - 1) / n sum (d_i - mean d)^2, where s^2 divides by n - 1.
    return (len(clients) - 1) * ci95(total / number)


def crossed(values) -> tuple[float, float]:
    """The mean over seeds and clients, and half its 95 % interval: seeds and clients are both samples.

    With the same clients in every seed, values are mean + effect of the seed + effect of the client + rest, and the
    variance of the mean is estimated as (MS_seeds + MS_clients - MS_rest) / (S n), where MS are the mean squares of the
    two-way analysis of variance; at least as (the larger of MS_seeds and MS_clients) / (S n). The width is Student's
    factor, with Satterthwaite's degrees of freedom, times the root. So one lucky seed, or a few lucky clients, cannot
    make it narrow.

    Args:
        values: [S, n], a row for each seed. A client with NaN in any seed is left out.

    Returns:
        (mean, half the width); the width is infinite with fewer than 2 seeds or 2 clients.

    Raises:
        InvalidArgument: values are not a matrix.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 2:
        raise InvalidArgument(f"values must be a matrix with a row for each seed, found shape {values.shape}")
    values = values[:, ~np.isnan(values).any(0)]
    seeds, clients = values.shape
    if not values.size:
        return math.nan, math.nan
    if not np.isfinite(values).all():
        return mean_over_clients(values.ravel()), math.inf
    mean = values.mean()
    if seeds < 2 or clients < 2:
        return float(mean), math.inf
    by_seed, by_client = values.mean(1, keepdims=True), values.mean(0, keepdims=True)
    squares = np.array(
        [
            clients * ((by_seed - mean) ** 2).sum() / (seeds - 1),
            seeds * ((by_client - mean) ** 2).sum() / (clients - 1),
            ((values - by_seed - by_client + mean) ** 2).sum() / ((seeds - 1) * (clients - 1)),
        ]
    )
    freedom = np.array([seeds - 1, clients - 1, (seeds - 1) * (clients - 1)])
    signs = np.array([1, 1, -1])
    larger = int(squares[1] > squares[0])
    if signs @ squares < squares[larger]:
        signs = np.eye(3)[larger]
    total = signs @ squares
    if not total > 0:
        return float(mean), 0.0
    satterthwaite = total**2 / ((signs * squares) ** 2 / freedom).sum()
    return float(mean), float(stats.t.ppf(0.975, satterthwaite) * math.sqrt(total / (seeds * clients)))


def worst(values, fraction: float = 0.1, direction: str = "max") -> float:
    """The mean of the lowest `fraction` of the values; by default of the worst tenth of the clients.

    The number of clients is rounded up. With direction='min', where smaller is better, it is that of the highest.

    Raises:
        InvalidArgument: `fraction` is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise InvalidArgument(f"fraction must lie in (0, 1], found {fraction}")
    present = np.sort(_present(values))[:: 1 if direction == "max" else -1]
    # In floating point 0.1 * 30 is slightly more than 3, and must not be rounded up to 4.
    return mean_over_clients(present[: math.ceil(fraction * len(present) - 1e-9)])


def std(values) -> float:
    """The standard deviation over clients. It divides by n and not by n - 1, because these are all clients."""
    present = _present(values)
    if not np.isfinite(present).all():
        return math.inf
    return float(present.std()) if len(present) else math.nan


def deciles(values) -> np.ndarray:
    """The nine deciles [9]: the values that 10, 20, ..., 90 % of the clients do not exceed, interpolated."""
    present, tenths = _present(values), np.arange(1, 10) / 10
    if not len(present):
        return np.full(9, math.nan)
    # The largest number stands in for infinity, because NumPy would give NaN between the two; there is infinity.
    numbers = np.minimum(present, present[np.isfinite(present)].max(initial=0.0))
    ends = np.quantile(present, tenths, method="higher")
    return np.where(np.isinf(ends), ends, np.quantile(numbers, tenths))


def jain(values) -> float:
    """Jain's fairness index (sum x)^2 / (n sum x^2): 1 if all values are equal, 1 / n if one client has everything.

    It is NaN if a value is infinite.

    Raises:
        InvalidArgument: a value is negative.
    """
    present = _not_negative(values)
    if not np.isfinite(present).all():
        return math.nan
    squares = len(present) * (present**2).sum()
    return float(present.sum() ** 2 / squares) if squares else (1.0 if len(present) else math.nan)


def gini(values) -> float:
    """The Gini coefficient: the mean of |x_i - x_j| over all i, j, divided by twice the mean; 0 if all are equal.

    It is NaN if a value is infinite.

    Raises:
        InvalidArgument: a value is negative.
    """
    present = np.sort(_not_negative(values))
    if not np.isfinite(present).all():
        return math.nan
    n, total = len(present), present.sum()
    return float((2 * np.arange(1, n + 1) - n - 1) @ present / (n * total)) if total else (0.0 if n else math.nan)


def gains(values, than) -> np.ndarray:
    """The differences values - than [n], client by client; NaN if one of the two is NaN.

    Two values that are equal to twelve digits have no difference, because the mean of the same ten scores depends on
    their order in the last bit. Differences are rounded to nine digits, so that equal ones are ties in ranks. Both is
    decided for each client alone, whatever values other clients have. Two infinite values are equal.

    Raises:
        InvalidArgument: they are not two vectors of the same length.
    """
    values, than = np.asarray(values, np.float64), np.asarray(than, np.float64)
    if values.shape != than.shape or values.ndim != 1:
        raise InvalidArgument(
            f"clients are compared one by one: give two vectors of one length, found {values.shape} and {than.shape}"
        )
    alike = np.isinf(values) & (values == than)
    values, than = np.where(alike, 0.0, values), np.where(alike, 0.0, than)
    differences = values - than
    noise = 1e-12 * np.maximum(np.abs(values), np.abs(than))
    differences[np.isfinite(differences) & (np.abs(differences) <= noise)] = 0.0
    return np.array([float(f"{d:.9g}") for d in differences])


def share_worse(values, than, direction: str = "max") -> float:
    """The share of the clients whose value is less than in `than`; equal values do not count.

    With direction='min', where smaller is better, it is the share of those whose value is more.
    """
    d = gains(values, than) * (1 if direction == "max" else -1)
    return mean_over_clients(np.where(np.isnan(d), math.nan, d < 0))


def wilcoxon(values, than, direction: str = "max") -> Wilcoxon:
    """Wilcoxon's one-sided signed-rank test that clients have more in `values` than in `than`.

    With direction='min', where smaller is better, it tests that they have less.

    FedAMP (arXiv 2007.03797) reports this test. Zero differences are left out; see `signed_rank_p` for the p-value.
    Infinite gains have the highest ranks.
    """
    present = ranked(_present(gains(values, than) * (1 if direction == "max" else -1)))
    differences = present[present != 0]
    zeros = len(present) - len(differences)
    if not len(differences):
        return Wilcoxon(math.nan, math.nan, 0, zeros)
    ranks = stats.rankdata(np.abs(differences))
    w_plus = float(ranks[differences > 0].sum())
    return Wilcoxon(w_plus, signed_rank_p(differences, "greater"), len(differences), zeros)


EXACT_PAIRS = 50


def signed_rank_p(differences, alternative: str) -> float:
    """The p-value of Wilcoxon's signed-rank test; NaN without differences.

    It is exact for up to `EXACT_PAIRS` differences, with ties too: the share of the 2^n sign patterns whose rank sum is
    at least as extreme as the one found. For more it is scipy's normal approximation. (With ties, releases of scipy
    differ in when they approximate: p-values below 0.05 of 10 to 50 pairs were 0.75 to 1.4 times the exact ones.)

    Args:
        differences: [n], finite and not 0.
        alternative: 'greater' (one-sided) or 'two-sided'.
    """
    differences = np.asarray(differences, np.float64)
    if len(differences) > EXACT_PAIRS:
        return float(stats.wilcoxon(differences, alternative=alternative).pvalue)
    if not len(differences):
        return math.nan
    ranks = np.rint(2 * stats.rankdata(np.abs(differences))).astype(int)  # twice the ranks: ties have halves
    share = np.zeros(ranks.sum() + 1)  # share[w]: of the sign patterns, those with the rank sum w
    share[0] = 1
    for rank in ranks:
        share[rank:] = share[rank:] + share[:-rank]
        share /= 2
    w_plus = ranks[differences > 0].sum()
    above, below = share[w_plus:].sum(), share[: w_plus + 1].sum()
    return float(above if alternative == "greater" else min(1.0, 2 * min(above, below)))


def ranked(differences) -> np.ndarray:
    """The differences with a large number in place of infinity, for which scipy gives NaN; the ranks stay the same."""
    most = 2 * np.abs(differences[np.isfinite(differences)]).max(initial=1.0)
    return np.clip(differences, -most, most)


def over_seeds(values) -> tuple[float, float]:
    """The mean over seeds, and half the width of its 95 % interval.

    The interval is Student's, as that of `ci95`; NaN for a single seed, infinite if a value is.
    """
    return mean_over_clients(values), ci95(values)


def _not_negative(values) -> np.ndarray:
    present = _present(values)
    if (present < -1e-5).any():
        raise InvalidArgument(f"this index needs values of at least 0, found {present.min()}")
    return np.maximum(present, 0)  # a deviance of 0 may be rounded to less


def _present(values) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 1:
        raise InvalidArgument(f"values must be a vector with one value for each client, found shape {values.shape}")
    return values[~np.isnan(values)]
