"""Whether personalization helps, makes no difference, or hurts: gains of personal methods, with intervals.

A gain is the score of a client's model minus that of the same client, seed and split with a baseline: 'fedavg', one
model for all, or 'local', nobody shares. Its interval is that of `tfpfl.runs.statistics.crossed`, in which seeds and
clients are both samples: many clients of one seed, or many seeds of few clients, do not make it narrow.
"""

import math
from typing import NamedTuple

import numpy as np

from tfpfl.runs import statistics
from tfpfl.runs.protocols import EV_ALL
from tfpfl.studies.records import Record

BASELINES = ("fedavg", "local")
BOUND = 1.0  # points: gains within it are no difference


class Gain(NamedTuple):
    """A mean gain over seeds and clients, and half its 95 % interval; in points of accuracy, or in the score's unit."""

    mean: float
    half: float

    def verdict(self, bound: float = BOUND) -> str:
        """'helps', 'hurts', 'no difference' (the interval lies within the bound), or 'unclear'.

        Examples:
            >>> Gain(5.0, 2.0).verdict(), Gain(-5.0, 2.0).verdict()
            ('helps', 'hurts')
            >>> Gain(0.1, 0.5).verdict(), Gain(2.0, 3.0).verdict(), Gain(2.0, math.inf).verdict()
            ('no difference', 'unclear', 'unclear')
        """
        low, high = self.mean - self.half, self.mean + self.half
        if -bound <= low and high <= bound:
            return "no difference"
        if low > 0:
            return "helps"
        return "hurts" if high < 0 else "unclear"


def matrix(records: list[Record], ids: list[int] | None = None) -> np.ndarray:
    """float [S, n]: the test score of each client (EV-all) in the run of each seed; accuracies in %.

    Smaller scores that are better, such as errors, have a minus, so that a larger number is always better.

    Args:
        records: one for each seed.
        ids: the clients; default: all that have a score in one of the runs. Without a score, a client has NaN.
    """
    named = records[0].score
    factor = (100 if named.is_fraction else 1) * (1 if named.larger_is_better else -1)
    each = [record.per_client() for record in records]
    ids = sorted(set().union(*each)) if ids is None else ids
    return factor * np.array([[row.get(i, math.nan) for i in ids] for row in each], np.float64)


def gain(records: list[Record], baseline: list[Record]) -> Gain:
    """The gain of a method over a baseline; both with the same seeds, in the same order, on the same split."""
    ids = sorted(set().union(*(record.per_client() for record in [*records, *baseline])))
    pairs = zip(matrix(records, ids), matrix(baseline, ids), strict=True)
    return Gain(*statistics.crossed([statistics.gains(mine, theirs) for mine, theirs in pairs]))


def chosen(validated: dict[str, float], larger_is_better: bool = True) -> str:
    """The method with the best score on validation examples: test examples do not choose what is judged on them."""
    return (max if larger_is_better else min)(validated, key=lambda name: validated[name])


def validated(records: list[Record]) -> float:
    """The mean score on validation examples over the seeds (EV-all)."""
    results = [record.result(EV_ALL._replace(split="validation")) for record in records]
    return float(np.mean([math.nan if result is None else result.score for result in results]))
