"""Simulates unreliable clients: dropouts, slow clients, a deadline, clients that join and leave.

    a sampled client i drops out with probability p_i; otherwise it takes
        T_i(t) = s_i * N_i * passes * exp(jitter * z),  z ~ N(0, 1)             seconds
    where s_i = seconds * exp(seconds_spread * z_i) are its seconds per example and pass through the backbone;
    after `deadline` seconds the server goes on without it.

If a round has two exchanges, each takes half of T_i(t); a client that drops out does so before the end of the first or
after it, with probability 1/2 each.

The work of a client that does not come back is lost: it sends nothing, and its state does not change. The clock is
virtual. The server waits for the last client that comes back; if a client does not, it waits until the deadline, if
there is one. Everything is a function of (seed, round, client), and does not depend on the algorithm.

`arrival` is the probability that a sampled client comes back in time, (1 - p_i) P[T_i <= deadline]. PFLEGO divides by
it, which keeps its step unbiased (inverse probability weighting).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from statistics import NormalDist
from typing import Any

import numpy as np

from tfpfl.checks import InvalidArgument, check_numbers
from tfpfl.data.cohorts import cohort
from tfpfl.data.population import Population
from tfpfl.data.randomness import Stream, uniform

_NORMAL = NormalDist()
_MOST_SECONDS, _FARTHEST = 1e30, 7.04  # virtual seconds; a normal number is never farther from 0, see `_normal`


@dataclass(frozen=True)
class Availability:
    """How reliable and how fast the clients are. By default all are there, and come back at once.

    Args:
        dropout: mean probability that a sampled client does not come back, in [0, 1).
        dropout_spread: how much clients differ: p_i is drawn uniformly from dropout - dropout_spread to
            dropout + dropout_spread.
        seconds: virtual seconds that the median client needs per example and pass; 0 turns the virtual clock off.
        seconds_spread: how much clients differ in speed: standard deviation of log s_i over clients.
        jitter: how much one client's speed varies between rounds: standard deviation of log T_i(t) over rounds.
        deadline: virtual seconds after which a round ends; None: the round waits for all clients that come back.
        joins: {round: ids of clients that take part from this round on and not before}.
        leaves: {round: ids of clients that no longer take part from this round on}.

    Raises:
        InvalidArgument: a number is negative or not finite; a probability p_i could lie outside [0, 1); `deadline` is
            not positive, or is given while `seconds` is 0; the slowest client could take more than 1e30 virtual
            seconds for an example, or the deadline is later; `joins` or `leaves` has a round below 1, a round twice, no
            clients for a round, or what is no client id; a client joins and leaves in the same round.
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
            check_numbers(**{name: value})
            if not 0 <= value < np.inf:
                shown = name.replace("seconds", "client_seconds")  # as in the configuration of a run
                raise InvalidArgument(f"{shown} must be a finite number of at least 0, found {value}")
        low, high = self.dropout - self.dropout_spread, self.dropout + self.dropout_spread
        if low < 0 or high >= 1:
            raise InvalidArgument(
                f"a client's probability of dropping out lies in [0, 1); dropout={self.dropout} and "
                f"dropout_spread={self.dropout_spread} give {low:.3g} to {high:.3g}"
            )
        if self.deadline is not None:
            check_numbers(deadline=self.deadline)
        if self.deadline is not None and not (self.deadline > 0 and self.seconds > 0):
            raise InvalidArgument(
                "a deadline must be positive, and needs `seconds` above 0, the time per example and pass; found "
                f"deadline={self.deadline}, seconds={self.seconds} (round_deadline and client_seconds of a run)"
            )
        with np.errstate(over="ignore"):
            times = np.exp(np.float64(_FARTHEST) * (self.seconds_spread + self.jitter))
        slowest = self.seconds * times if np.isfinite(times) else np.inf  # 0 times infinity is NaN
        if slowest > _MOST_SECONDS or (self.deadline or 0) > _MOST_SECONDS:
            raise InvalidArgument(
                f"the virtual clock goes up to {_MOST_SECONDS:g} seconds: seconds={self.seconds:g}, seconds_spread="
                f"{self.seconds_spread:g} and jitter={self.jitter:g} let a client take {slowest:.3g} seconds for one "
                f"example, and deadline={self.deadline}. Take smaller numbers"
            )
        for name in ("joins", "leaves"):
            object.__setattr__(self, name, _changes(name, getattr(self, name)))
        joined, left = ({(t, i) for t, some in changes for i in some} for changes in (self.joins, self.leaves))
        if both := sorted(joined & left):
            t, i = both[0]
            raise InvalidArgument(f"client {i} both joins and leaves in round {t}: leave out one of the two")

    @property
    def is_perfect(self) -> bool:
        """Whether all clients take part in all rounds and always come back at once."""
        return self == Availability()

    def present(self, round_num: int, client_ids) -> np.ndarray:
        """Those of the given clients that take part in training in this round: int64 [n]."""
        ids = np.asarray(client_ids, np.int64)
        last = np.full(len(ids), -1)  # round of a client's last change so far; who joins in some round begins as absent
        there = ~np.isin(ids, [i for _, some in self.joins for i in some])
        for changes, becomes in ((self.joins, True), (self.leaves, False)):
            for t, some in changes:
                hit = np.isin(ids, some) & (t <= round_num) & (t > last)
                last[hit], there[hit] = t, becomes
        return ids[there]

    def dropout_of(self, seed: int, client_ids) -> np.ndarray:
        """The clients' probabilities p_i of dropping out of a round: float64 [n]."""
        where = 2 * uniform(seed, Stream.CLIENT_DROPOUT, 0, client_ids) - 1
        return self.dropout + self.dropout_spread * where

    def drops(self, seed: int, round_num: int, client_ids) -> np.ndarray:
        """Draws which of the given clients drop out of a round: bool [n]."""
        return uniform(seed, Stream.DROPS, round_num, client_ids) < self.dropout_of(seed, client_ids)

    def median_seconds(self, seed: int, client_ids, work) -> np.ndarray:
        """The virtual seconds that each client's visit takes in its median round: float64 [n].

        Args:
            seed: the run's seed.
            client_ids: int [n].
            work: [n], every client's number of examples times its passes through the backbone.
        """
        z = _normal(uniform(seed, Stream.CLIENT_SPEED, 0, client_ids))
        return self.seconds * np.exp(self.seconds_spread * z) * np.asarray(work, np.float64)

    def visit_seconds(self, seed: int, round_num: int, client_ids, work) -> np.ndarray:
        """The virtual seconds that each client's visit takes in this round: float64 [n]; see `median_seconds`."""
        z = _normal(uniform(seed, Stream.JITTER, round_num, client_ids))
        return self.median_seconds(seed, client_ids, work) * np.exp(self.jitter * z)

    def arrival(self, seed: int, client_ids, work) -> np.ndarray:
        """The probability that a sampled client comes back in time: float64 [n]; 0 for one that is always too late.

        For the arguments see `median_seconds`.
        """
        in_time = np.ones(len(client_ids))
        if self.deadline is not None:
            ratio = np.log(self.deadline / self.median_seconds(seed, client_ids, work))
            in_time = (
                np.array([_NORMAL.cdf(r / self.jitter) for r in ratio]) if self.jitter else (ratio >= 0).astype(float)
            )
        return (1 - self.dropout_of(seed, client_ids)) * in_time

    def arrival_in(self, population: Population, seed: int, passes: Sequence[float]) -> np.ndarray:
        """`arrival` of all clients of a population, checked: float64 [I].

        Args:
            population: the clients.
            seed: seed of the run.
            passes: passes through the backbone per example of a visit, of each kind; their sum counts.

        Raises:
            InvalidArgument: `joins` or `leaves` names another client, or no client is ever in time.
        """
        ids = population.client_ids
        moved = {i for _, some in (*self.joins, *self.leaves) for i in some}
        if unknown_ids := sorted(moved - set(ids.tolist())):
            raise InvalidArgument(
                f"joins and leaves must name clients of the population; it does not have the clients {unknown_ids}"
            )
        work = population.num_examples * (sum(passes) if self.seconds else 1.0)
        arrival = self.arrival(seed, ids, work)
        if not arrival.any():
            fastest = self.median_seconds(seed, ids, work).min()
            raise InvalidArgument(
                f"round_deadline={self.deadline} is too short for every client: the fastest takes {fastest:.3g} s. "
                "Take a larger one"
            )
        return arrival

    def of_round(self, seed: int, round_num: int, population: Population, work: np.ndarray) -> "Arrivals":
        """Draws the cohort of a round among the clients that are there, and which of them come back.

        Args:
            seed: seed of the run.
            round_num: the round.
            population: the clients and their sampling.
            work: float [I], for all of them; see `median_seconds`.
        """
        if self.is_perfect:
            came = cohort(seed, round_num, population)
            return Arrivals(came, came[:0], came[:0], 0.0, came[:0])
        sampled = cohort(seed, round_num, population, self.present(round_num, population.client_ids))
        return self.round(seed, round_num, sampled, work[np.searchsorted(population.client_ids, sampled)])

    def round(self, seed: int, round_num: int, client_ids, work) -> "Arrivals":
        """Draws which clients of a cohort come back, drop out or are late; for `work` see `median_seconds`."""
        ids = np.asarray(client_ids, np.int64)
        drops = self.drops(seed, round_num, ids)
        seconds = self.visit_seconds(seed, round_num, ids, work)
        late = ~drops & (seconds > (np.inf if self.deadline is None else self.deadline))
        came = ~drops & ~late
        waited = float(seconds[came].max(initial=0.0))
        if self.deadline is not None and not came.all():
            waited = self.deadline
        half = drops & (uniform(seed, Stream.BETWEEN, round_num, ids) < 0.5) | late
        half &= seconds / 2 <= (np.inf if self.deadline is None else self.deadline)
        return Arrivals(ids[came], ids[drops], ids[late], waited, ids[half])


@dataclass(frozen=True)
class Arrivals:
    """Which clients of a cohort came back, and how long the round took."""

    came: np.ndarray  # int64, ids of the clients that came back, in the order of the cohort
    dropped: np.ndarray  # int64, ids of those that dropped out
    late: np.ndarray  # int64, ids of those that missed the deadline
    seconds: float  # virtual seconds of the round
    between: np.ndarray  # int64, ids of those dropped or late that had finished the first of two exchanges


def _normal(values) -> np.ndarray:
    return np.array([_NORMAL.inv_cdf(min(max(v, 1e-12), 1 - 1e-12)) for v in values])


def _whole(number) -> int:
    """A whole number, but not True or False, which are no rounds or clients."""
    given: Any = "" if isinstance(number, bool) else number
    return index(given)


def _changes(name: str, given) -> tuple:
    """Converts {round: ids}, or pairs (round, ids), to ((round, (id, ...)), ...), sorted by round."""
    try:
        pairs = given.items() if isinstance(given, dict) else given
        found = tuple(sorted((_whole(t), tuple(sorted(map(_whole, some)))) for t, some in pairs))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} must be {{round: client ids}}, found {given!r}") from error
    for t, some in found:
        if t < 1 or not some or min(some) < 0:
            raise InvalidArgument(
                f"{name} must be {{round: client ids}} with rounds from 1, ids from 0 and at least one id; found "
                f"{{{t}: {some}}}"
            )
    if len({t for t, _ in found}) < len(found):
        raise InvalidArgument(f"{name} names a round twice, found {given!r}")
    return found


def changes(name: str, written: tuple) -> tuple:
    """Converts texts 'ROUND:ID,ID,...' to the argument of `Availability`, ((round, ids), ...)."""
    found = []
    for text in written:
        match = re.fullmatch(r"(\d+):(\d+(?:,\d+)*)", text) if isinstance(text, str) else None
        if match is None:
            raise InvalidArgument(f"{name} is written ROUND:ID,ID,..., such as 20:3,4; found {text!r}")
        found.append((int(match[1]), tuple(map(int, match[2].split(",")))))
    return tuple(found)
