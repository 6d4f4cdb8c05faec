"""Is personalization needed? Compares each client's own head with one head for all, on held-out examples.

The authors of PFLEGO name this question first among their open points. The shared head is fitted for the comparison, on
the features of all clients' training examples, until it has converged. Where a client's head has its own classes only,
the shared head chooses among the same classes; so a gain is not the mere knowledge of the classes that a client has.

Over clients: Wilcoxon's signed-rank tests of the clients' gains in the score and in the loss, two-sided, because an
outlier among the clients must not decide; and Student's interval of the mean gain. Personal heads help if one of the
two tests says so at 2.5 % (both together: at most 5 %, after Bonferroni), with the mean on the same side. The loss sees
more than a score that only counts right answers; where they contradict each other, the score decides.

Client by client: Student's paired test of the losses of its held-out examples, because the mean loss is what a client
wants to be small; then the procedure of Benjamini and Hochberg (1995) over the clients, so that at most 5 % of the
clients that are named are expected to be named wrongly. It needs no assumption how the gains are spread over the
clients, which a shrunken gain (empirical Bayes) would need.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from tfpfl.checks import InvalidArgument, check_choice
from tfpfl.data.kinds import ScoreName
from tfpfl.runs import statistics
from tfpfl.runs.metrics import times, word
from tfpfl.runs.results import json_row
from tfpfl.studies.shared_head import HeldOut, held_out_of

LEVEL = 0.05
VERDICTS = {
    "help": "personal heads help",
    "hurt": "personal heads hurt: one shared head is better",
    "none": "it is not shown that personal heads help: one shared head may be as good",
    "few": f"too few clients to tell: with fewer than seven no test over clients reaches p < {LEVEL / 2:g}",
}
SPLITS = ("validation", "test")


class ClientAdvice(NamedTuple):
    """What is known of one client."""

    client: int
    name: str
    examples: int  # held-out ones
    own_score: float
    shared_score: float
    gain: float  # how much better the own head's score is; less than 0 if it is worse
    loss_gain: float  # how much less the own head's mean loss is
    p_value: float  # of the paired test of the losses, two-sided; NaN with fewer than two examples, or an infinite loss
    adjusted: float  # the p-value after Benjamini and Hochberg
    better: str  # 'own' or 'shared', where the test tells them apart; else ''


class Advice(NamedTuple):
    """Whether personal heads help, and which clients should rather use the shared one."""

    verdict: str  # a key of `VERDICTS`
    named: ScoreName
    gain: float  # mean over clients of how much better the own head's score is
    half: float  # half its 95 % interval over clients (Student's t); NaN for one client, infinite if a gain is
    p_value: float  # Wilcoxon's signed-rank test, two-sided; 1 if no client differs
    loss_gain: float  # the same three for the mean loss
    loss_half: float
    loss_p_value: float
    clients: list[ClientAdvice]
    left_out: int = 0  # clients that never took part, which have no head of their own, or have no held-out examples
    split: str = "validation"

    @property
    def to_shared(self) -> list[ClientAdvice]:
        """The clients that should rather use the shared head, the surest first."""
        return sorted((c for c in self.clients if c.better == "shared"), key=lambda c: c.adjusted)

    @property
    def sentence(self) -> str:
        """The advice in one sentence or two."""
        sign, factor = 1 if self.named.larger_is_better else -1, times(self.named)
        changes = [sign * factor * x for x in (self.gain, self.gain - self.half, self.gain + self.half)]
        digits, name = ("+.1f", "") if self.named.is_fraction else ("+.3g", f"{word(self.named)} ")
        mean, low, high = (f"{x:{digits}}" for x in (changes[0], min(changes), max(changes)))
        points = " points" if self.named.is_fraction else ""
        interval = f" [{low}, {high}]" if math.isfinite(self.half) else ""  # one client, or one that diverged, has none
        told = f"{VERDICTS[self.verdict]}: {name}{mean}{points}{interval}, p={self.p_value:.2g}"
        if self.verdict in ("help", "hurt") and self.p_value >= LEVEL / 2:
            told += f" (by the loss: {-self.loss_gain:+.3g}, p={self.loss_p_value:.2g})"
        clear = [c for c in self.clients if c.better == "own"]
        shared = self.to_shared
        if shared:
            names = ", ".join(c.name for c in shared[:10]) + (", ..." if len(shared) > 10 else "")
            told += f"; {len(shared)} of {len(self.clients)} clients should use the shared head: {names}"
        elif self.verdict == "help":
            told += f"; for none of {len(self.clients)} clients the shared head is shown to be better"
        if clear and self.verdict != "help":
            told += f"; {len(clear)} of {len(self.clients)} are better with their own: "
            told += ", ".join(c.name for c in clear[:10]) + (", ..." if len(clear) > 10 else "")
        return told

    def entries(self) -> dict[str, Any]:
        """The advice as values of JSON; NaN is None."""
        found = self._asdict() | {"clients": [json_row(c._asdict()) for c in self.clients], "sentence": self.sentence}
        found["score"] = found.pop("named").name
        return json_row(found)


def decide(clients: Sequence[HeldOut], named: ScoreName, *, left_out: int = 0, split: str = "validation") -> Advice:
    """Decides whether personal heads help, from what both heads do on held-out examples.

    Args:
        clients: one for each client with held-out examples.
        named: the score's name, unit and direction.
        left_out, split: for the result.

    Raises:
        InvalidArgument: there is no client.
    """
    if not clients:
        raise InvalidArgument("there is nothing to compare: no client that took part has held-out examples")
    sign = 1 if named.larger_is_better else -1
    gains = sign * statistics.gains(*_pairs([(c.own_score, c.shared_score) for c in clients]))
    losses = statistics.gains(*_pairs([(np.mean(c.shared_losses), np.mean(c.own_losses)) for c in clients]))
    (gain, half, p, side), (loss_gain, loss_half, loss_p, loss_side) = map(_over_clients, (gains, losses))
    by_score, by_loss = _said(gain, p, side), _said(loss_gain, loss_p, loss_side)
    verdict = {1: "help", -1: "hurt", 0: "none" if len(clients) > 6 else "few"}[by_score or by_loss]
    each = np.array([_paired(c.shared_losses, c.own_losses) for c in clients])
    adjusted = benjamini_hochberg(each)
    found = [
        ClientAdvice(
            c.client, c.name, len(c.own_losses), c.own_score, c.shared_score, float(gains[i]), float(losses[i]),
            float(each[i]), float(adjusted[i]),
            {1: "own", -1: "shared"}.get(np.sign(losses[i]), "") if adjusted[i] < LEVEL else "",
        )
        for i, c in enumerate(clients)
    ]  # fmt: skip
    return Advice(verdict, named, gain, half, p, loss_gain, loss_half, loss_p, found, left_out, split)


def advise(run: Any, split: str = "validation") -> Advice:
    """Whether the clients of a run need heads of their own.

    Each client's own head is the model with which it predicts after the last round. The shared head stands on the same
    backbone; if clients have backbones of their own, on that of the global model. Only clients that took part have a
    head of their own; the others are left out.

    Args:
        run: an open `Run` with at least one round. It is only read.
        split: the held-out examples: 'validation', or 'test'.

    Raises:
        InvalidArgument: the clients of the run's method have no models of their own, or share no backbone; there are no
            held-out examples; or the run has no rounds.
    """
    check_choice(split=(split, SPLITS))
    found, people = held_out_of(run, split)
    return decide(found, run.config.score, left_out=people - len(found), split=split)


def benjamini_hochberg(p_values: np.ndarray) -> np.ndarray:
    """The p-values, adjusted for the false discovery rate (Benjamini and Hochberg, 1995): float [n]; NaN stays NaN.

    Examples:
        >>> benjamini_hochberg(np.array([0.01, 0.04, 0.03])).tolist()
        [0.03, 0.04, 0.04]
    """
    found = np.array(p_values, np.float64)
    there = np.flatnonzero(~np.isnan(found))
    order = there[np.argsort(-found[there])]  # the largest first
    ranks = np.arange(len(order), 0, -1)
    found[order] = np.minimum(1, np.minimum.accumulate(found[order] * len(order) / np.maximum(ranks, 1)))
    return found


def _pairs(values: Sequence[tuple[Any, Any]]) -> np.ndarray:
    """float [2, n]: the first of each pair, and the second."""
    return np.array(values, np.float64).T


def _over_clients(gains: np.ndarray) -> tuple[float, float, float, float]:
    """(mean, half its 95 % interval, p-value of Wilcoxon's test, on whose side its ranks are: more than 0 for own)."""
    mean, half = statistics.over_seeds(gains)
    differ = statistics.ranked(gains[gains != 0])  # `statistics.gains` has rounded what is equal but for rounding
    if not len(differ):
        return mean, half, 1.0, 0.0
    plus = float(stats.rankdata(np.abs(differ)) @ (differ > 0))
    side = plus - len(differ) * (len(differ) + 1) / 4
    return mean, half, statistics.signed_rank_p(differ, "two-sided"), side


def _said(gain: float, p_value: float, side: float) -> int:
    """What one of the two tests over clients says: 1 that own heads are better, -1 that they are worse, or 0."""
    if not (p_value < LEVEL / 2 and side * gain > 0):  # also where the gains have no mean
        return 0
    return 1 if gain > 0 else -1


def _paired(losses: np.ndarray, others: np.ndarray) -> float:
    """Student's two-sided p-value that two losses of the same examples have one mean.

    It is NaN with fewer than two examples, or with an infinite loss. What is rounding depends on the size of
    the losses: those of small targets, such as 0.000001 A, are tiny themselves.
    """
    both = np.array([losses, others], np.float64)
    if both.shape[1] < 2 or not np.isfinite(both).all():
        return math.nan
    d, rounding = both[0] - both[1], 1e-12 * np.abs(both).max()
    largest = np.abs(d).max()
    if np.ptp(d) <= max(1e-9 * largest, rounding):  # all are equal: the test of signs
        return 1.0 if largest <= rounding else 2.0 ** (1 - len(d))
    return float(stats.ttest_1samp(d, 0.0).pvalue)
