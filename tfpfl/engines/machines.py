"""Where the work of a round is done, beside this process. It changes no number of a run, and is not part of it."""

from dataclasses import dataclass

from tfpfl.checks import InvalidArgument, TfpflError


class MachinesError(TfpflError, RuntimeError):
    """The machines that should do a round's work do not do it. The rounds before are saved."""


@dataclass(frozen=True)
class Machines:
    """Other processes, on this machine or others.

    Args:
        address: of a Ray cluster ('host:port', or 'auto'); None starts a Ray of our own on this machine.
        workers: 'host:port' of TFF workers (`tfpfl worker`); none: one of our own on this machine.
        deadline: seconds that a shard of a round may take before another TFF worker gets it; of a Ray cluster, which
            gives a lost shard to another node by itself, seconds without any news before the round is given up.
        isolate: our own TFF worker on this machine gets a network of its own, so that nobody else reaches its port.

    Raises:
        ValueError: names the argument, and says what it may be.
    """

    address: str | None = None
    workers: tuple[str, ...] = ()
    deadline: float = 600.0
    isolate: bool = False

    def __post_init__(self):
        if self.deadline <= 0:
            raise InvalidArgument(f"deadline must be positive seconds, found {self.deadline}")
        for worker in self.workers:
            host, _, port = worker.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise InvalidArgument(f"a worker is given as HOST:PORT, found {worker!r}")
        if len(set(self.workers)) < len(self.workers):
            raise InvalidArgument(f"a worker is named twice in {', '.join(self.workers)}")
        if self.isolate and self.workers:
            raise InvalidArgument("isolate is for a TFF worker of our own: leave it out, or give no workers")
