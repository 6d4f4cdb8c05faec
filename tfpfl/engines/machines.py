"""The other processes that do the work of a round. The choice does not change a run's numbers or its identity."""

from dataclasses import dataclass
from types import NoneType

from tfpfl.checks import InvalidArgument, TfpflError, check_listed, check_numbers, check_type

MOST_SECONDS = 1e9  # 30 years; gRPC takes a much longer deadline for one that has passed, and Ray takes no infinity


class MachinesError(TfpflError, RuntimeError):
    """A TFF worker or the Ray cluster does not answer or has lost a round's work. All earlier rounds are saved."""


@dataclass(frozen=True)
class Machines:
    """The processes that do the work of a round, on this machine or on others.

    Args:
        address: the Ray cluster, 'host:port' or 'auto'. None (default): start Ray on this machine.
        workers: 'host:port' of every TFF worker (`tfpfl worker` starts one). Empty (default): start one worker on this
            machine.
        deadline: seconds, default 600. TFF: after this time a shard is given to another worker. Ray (which reschedules
            by itself): after this time without any result the round is aborted.
        isolate: whether the TFF worker that is started on this machine gets a network namespace of its own, so that no
            other user or machine can reach its port. None (default): wherever this system allows it; elsewhere a
            warning says who can reach the port. True: refuse to work without. False: never.

    Raises:
        InvalidArgument: an argument has a wrong type; `deadline` is not positive, or above 1e9; a worker is not
            HOST:PORT or is named twice; or `isolate` is given together with `workers`.
    """

    address: str | None = None
    workers: tuple[str, ...] = ()
    deadline: float = 600.0
    isolate: bool | None = None

    def __post_init__(self) -> None:
        given = (self.workers,) if isinstance(self.workers, str) else self.workers
        check_listed("workers", given, "['localhost:8000']")
        given = tuple(worker.strip() if isinstance(worker, str) else worker for worker in given)  # of 'a:1, b:2'
        object.__setattr__(self, "workers", given)  # a list cannot be the key of a cache
        check_type("address", self.address, (str, NoneType), "the text HOST:PORT or 'auto', or None")
        check_numbers(deadline=self.deadline)
        if not 0 < self.deadline <= MOST_SECONDS:
            raise InvalidArgument(
                f"deadline must be a positive number of seconds, at most {MOST_SECONDS:g}, found {self.deadline}"
            )
        for worker in self.workers:
            check_type("a worker", worker, str, "the text HOST:PORT")
            host, _, port = worker.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise InvalidArgument(f"a worker is given as HOST:PORT, found {worker!r}")
        if len(set(self.workers)) < len(self.workers):
            raise InvalidArgument(f"a worker is named twice in {', '.join(self.workers)}")
        if self.isolate is not None and self.workers:
            raise InvalidArgument(
                "isolation is for the TFF worker that this process starts, but there are others: "
                f"{', '.join(self.workers)}. Leave out what is said of isolation, or the workers"
            )
