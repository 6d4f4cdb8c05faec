"""Who comes back from a round, and when: dropouts, slow clients, a deadline, clients that join and leave.

    a sampled client i drops out with probability p_i; otherwise it takes
        T_i(t) = s_i * N_i * passes * exp(jitter * z),  z ~ N(0, 1)             seconds
    with s_i = seconds * exp(seconds_spread * z_i), its seconds an example and pass through the backbone;
    after `deadline` seconds the server goes on without it.

What a client that does not come back has done is lost: it sends nothing and its state stays. The clock is virtual: the
server waits for the last of those that come, and to the deadline, where it has one, if somebody does not. Everything is
a function of (seed, round, client), and never of the algorithm.

The probability that a sampled client comes back in time is known, (1 - p_i) P[T_i <= deadline]: `arrival`. PFLEGO
divides by it, which keeps its step unbiased (inverse probability weighting).
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data.randomness import Stream, uniform

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Availability:
    """How reliable clients are.

    Args:
        dropout: the probability that a sampled client does not come back, in [0, 1).
        dropout_spread: p_i is uniform in [dropout - dropout_spread, dropout + dropout_spread], drawn per client.
        seconds: of a median client, for an example and a pass through the backbone; 0: no clock.
        seconds_spread: standard deviation of log s_i over clients.
        jitter: standard deviation of the logarithm of a client's time over rounds.
        deadline: seconds after which a round ends; None: it waits.
        joins: {round: ids of clients that take part from this round on}; until then they do not.
        leaves: {round: ids of clients that take no part from this round on}.

    Raises:
        ValueError: names the argument, and says what it may be.
    """

    dropout: float = 0.0
    dropout_spread: float = 0.0
    seconds: float = 0.0
    seconds_spread: float = 0.0
    jitter: float = 0.0
    deadline: float | None = None
    joins: tuple = ()
    leaves: tuple = ()

    def __post_init__(self):
        for name in ("dropout", "dropout_spread", "seconds", "seconds_spread", "jitter"):
            value = getattr(self, name)
            if not 0 <= value < np.inf:
                raise InvalidArgument(f"{name} must be a number that is not negative, found {value}")
        low, high = self.dropout - self.dropout_spread, self.dropout + self.dropout_spread
        if low < 0 or high >= 1:
            raise InvalidArgument(
                f"a client's probability of dropping out lies in [0, 1); dropout={self.dropout} and "
                f"dropout_spread={self.dropout_spread} give {low:.3g} to {high:.3g}"
            )
        if self.deadline is not None and not (self.deadline > 0 and self.seconds > 0):
            raise InvalidArgument(
                f"a deadline is positive, and needs `seconds`, what a pass takes; found deadline={self.deadline}, "
                f"seconds={self.seconds}"
            )
        for name in ("joins", "leaves"):
            object.__setattr__(self, name, _changes(name, getattr(self, name)))

    @property
    def is_perfect(self) -> bool:
        """Whether everybody always comes back at once."""
        return self == Availability()

    def present(self, round_num: int, client_ids) -> np.ndarray:
        """Of these clients, those that take part in training at the time: int64 [n]."""
        ids = np.asarray(client_ids, np.int64)
        last = np.full(len(ids), -1)  # the last change before or in this round; who joins later is not there at first
        there = ~np.isin(ids, [i for _, some in self.joins for i in some])
        for changes, becomes in ((self.joins, True), (self.leaves, False)):
            for t, some in changes:
                hit = np.isin(ids, some) & (t <= round_num) & (t > last)
                last[hit], there[hit] = t, becomes
        return ids[there]

    def dropout_of(self, seed: int, client_ids) -> np.ndarray:
        """p_i: float64 [n]."""
        where = 2 * uniform(seed, Stream.CLIENT_DROPOUT, 0, client_ids) - 1
        return self.dropout + self.dropout_spread * where

    def drops(self, seed: int, round_num: int, client_ids) -> np.ndarray:
        """Who drops out of a round: bool [n]."""
        return uniform(seed, Stream.DROPS, round_num, client_ids) < self.dropout_of(seed, client_ids)

    def median_seconds(self, seed: int, client_ids, work) -> np.ndarray:
        """What a visit takes the client in the median round: float64 [n].

        Args:
            work: [n], examples times passes.
        """
        z = _normal(uniform(seed, Stream.CLIENT_SPEED, 0, client_ids))
        return self.seconds * np.exp(self.seconds_spread * z) * np.asarray(work, np.float64)

    def visit_seconds(self, seed: int, round_num: int, client_ids, work) -> np.ndarray:
        """What a visit takes in this round: float64 [n]; `work` as in `median_seconds`."""
        z = _normal(uniform(seed, Stream.JITTER, round_num, client_ids))
        return self.median_seconds(seed, client_ids, work) * np.exp(self.jitter * z)

    def arrival(self, seed: int, client_ids, work) -> np.ndarray:
        """The probability that a sampled client comes back in time: float64 [n]; `work` as in `median_seconds`.

        It is 0 for a client that is always too late.
        """
        in_time = np.ones(len(client_ids))
        if self.deadline is not None:
            ratio = np.log(self.deadline / self.median_seconds(seed, client_ids, work))
            in_time = (
                np.array([_NORMAL.cdf(r / self.jitter) for r in ratio]) if self.jitter else (ratio >= 0).astype(float)
            )
        return (1 - self.dropout_of(seed, client_ids)) * in_time

    def round(self, seed: int, round_num: int, client_ids, work) -> "Arrivals":
        """What becomes of a cohort; `work` as in `median_seconds`."""
        ids = np.asarray(client_ids, np.int64)
        drops = self.drops(seed, round_num, ids)
        seconds = self.visit_seconds(seed, round_num, ids, work)
        late = ~drops & (seconds > (np.inf if self.deadline is None else self.deadline))
        came = ~drops & ~late
        waited = float(seconds[came].max(initial=0.0))
        if self.deadline is not None and not came.all():
            waited = self.deadline
        return Arrivals(ids[came], ids[drops], ids[late], waited)


@dataclass(frozen=True)
class Arrivals:
    """What became of a cohort."""

    came: np.ndarray  # int64, ascending client ids
    dropped: np.ndarray
    late: np.ndarray
    seconds: float  # that the round took, on the virtual clock


def _normal(values) -> np.ndarray:
    return np.array([_NORMAL.inv_cdf(min(max(v, 1e-12), 1 - 1e-12)) for v in values])


def _changes(name: str, given) -> tuple:
    """((round, (ids ...)), ...), by round; from a dict, or from such a tuple."""
    pairs = given.items() if isinstance(given, dict) else given
    try:
        found = tuple(sorted((int(t), tuple(sorted(int(i) for i in some))) for t, some in pairs))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} is {{round: client ids}}, found {given!r}") from error
    for t, some in found:
        if t < 1 or not some or min(some) < 0:
            raise InvalidArgument(f"{name} is {{round from 1 on: client ids}}, found {t}: {some}")
    if len({t for t, _ in found}) < len(found):
        raise InvalidArgument(f"{name} names a round twice, found {given!r}")
    return found
