"""How a server runs live rounds, what polls are answered from, and how a message is refused."""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from tflite_export.device import payload as payloads
from tflite_export.device.live import wire
from tfpfl.checks import InvalidArgument, TfpflError, warn_user
from tfpfl.data.population import Population

MOST_SCORE = 1e30  # a loss that is larger was not computed


class Refused(TfpflError):
    """A device's message was not taken. `status` is HTTP's."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class View(NamedTuple):
    """What polls are answered from; replaced as a whole, so that it can be read at any moment."""

    kind: str  # wire.VISIT, SCORE, NOTHING (no round is open) or DONE
    round_num: int
    theta: str = ""  # sha256 of the message that is visited or scored
    waiting: frozenset = frozenset()  # the clients that have something to do
    deadline: float = math.inf
    settings: dict = {}  # {client: tau and the rates of its visit}
    splits: tuple = ()  # what a visit scores as well


def whole(change):
    """A change of a round, on disk and in memory. If it fails, only a new start of the server goes on, from the disk.

    Otherwise a part of it could be done twice, such as a secure sum be opened again, over other clients.
    """

    @functools.wraps(change)
    def changed(rounds, *arguments):
        try:
            return change(rounds, *arguments)
        except BaseException as error:
            rounds.failed = error
            rounds.view = View(wire.NOTHING, rounds.view.round_num)
            raise

    return changed


class Stepped(NamedTuple):
    """A round after the server's step, before it is committed."""

    number: int
    server: Any  # the server's state after it
    told: dict[int, dict]  # {client: what it said}, of those who are counted
    loss: float | None  # the mean over their examples
    received: int  # bytes


@dataclass
class Rules:
    """How a server runs its rounds.

    Args:
        deadline: seconds from the invitation to the end of a round, and of the time for scores.
        quorum: the part of the members that must have come for a round to end at its deadline, in (0, 1].
        awake: a client is invited if it was heard of in the last so many seconds.
        wait_for: no round opens before so many clients have joined.
        max_norm: a longer gradient (L2) is refused; None: any that is finite is taken.
        payload: 'float32' or 'int8'.
        joins: so many devices may join from one address in a minute.
        most_examples: in a run on places, a device that says that it has more training examples is refused.
        buffer: K, the arrivals after which the server of asynchronous rounds steps; None: rounds have cohorts.
        staleness: of asynchronous rounds: an update of a theta before the last so many steps is refused.
        secure: whether the server learns the sum of the updates alone; see docs/secure.md.
        threshold: of secure rounds: the part of a client's neighbours that can open its masks is larger, in [0.5, 1).
        clip: of secure rounds: a device makes a longer gradient (L2) as long as this.
        phase: of secure rounds: seconds for each message after the visits.

    Raises:
        InvalidArgument: a number is out of range.
    """

    deadline: float = 60.0
    quorum: float = 0.6
    awake: float = 90.0
    wait_for: int = 1
    max_norm: float | None = None
    payload: str = "float32"
    joins: int = 30
    most_examples: int = 100_000
    buffer: int | None = None
    staleness: int = 1000
    secure: bool = False
    threshold: float = 0.5
    clip: float = 100.0
    phase: float = 20.0

    def check_clients(self, population: Population, are_enrolled: bool) -> None:
        """Checks `wait_for` against a run's clients; warns if rounds may invite nobody, and still count.

        Args:
            population: the run's clients.
            are_enrolled: whether they are places, which devices take when they join; then no round is empty.

        Raises:
            InvalidArgument: it is more than there are clients.
        """
        clients, rate = population.num_clients, population.clients_per_round / population.num_clients
        if self.wait_for > clients:
            raise InvalidArgument(f"wait_for is {self.wait_for}, but the run has {clients} clients")
        # secure rounds begin with three clients or more; cohorts of other kinds have their sizes at random anyway
        if self.secure or are_enrolled or population.sampling.kind != "fixed" or self.wait_for * rate >= 1:
            return
        warn_user(
            f"a round may begin when {self.wait_for} of {clients} clients have joined, and invites {rate:.3g} of them: "
            f"{1 - self.wait_for * rate:.0%} of such rounds would invite nobody, and count as rounds of the run. Take "
            f"--wait-for {math.ceil(1 / rate)} or more, or invite more with --cohort"
        )

    def __post_init__(self):
        for name in ("deadline", "awake", "phase"):
            if not 0 < getattr(self, name) < 1e9:
                raise InvalidArgument(f"{name} must be a positive number of seconds, found {getattr(self, name)}")
        if not 0 < self.quorum <= 1:
            raise InvalidArgument(f"quorum must lie in (0, 1], found {self.quorum}")
        if self.most_examples < 1:
            raise InvalidArgument(f"most_examples must be positive, found {self.most_examples}")
        if self.wait_for < 1 or self.joins < 1 or (self.max_norm is not None and not self.max_norm > 0):
            found = f"{self.wait_for}, {self.joins} and {self.max_norm}"
            raise InvalidArgument(f"wait_for, joins and max_norm must be positive, found {found}")
        if (self.buffer is not None and self.buffer < 1) or self.staleness < 0:
            raise InvalidArgument(f"buffer is at least 1 and staleness 0, found {self.buffer} and {self.staleness}")
        if not 0.5 <= self.threshold < 1 or not 0 < self.clip < 1e30:
            found = f"{self.threshold} and {self.clip}"
            raise InvalidArgument(f"threshold lies in [0.5, 1) and clip is positive, found {found}")
        if self.payload not in payloads.KINDS:
            raise InvalidArgument(f"unknown payload {self.payload!r}: one of {', '.join(payloads.KINDS)}")
