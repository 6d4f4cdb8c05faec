"""Computes the asynchronous rounds of a run again from their log, without a network: theta is the same, bit for bit.

The log says who arrived, with which theta, and in which order. What a client sent is computed again by the program of
its bundle, from its examples and the head of its visit before; the server is that of the live rounds. Bits are the same
if the devices ran the same version of the same runtime on the same kind of processor; the hashes in the log show which
updates are.
"""

import hashlib
from typing import NamedTuple

import numpy as np

from tflite_export.convert.program import flatten
from tflite_export.device import payload as payloads
from tflite_export.device.client import Update
from tflite_export.device.head_file import theta_sha256
from tfpfl.checks import InvalidArgument
from tfpfl.live.async_book import AsyncBook, Logged
from tfpfl.live.async_pflego import check_asynchronous, server_of
from tfpfl.live.async_virtual import Phones
from tfpfl.runs.folders import LIVE


class Replayed(NamedTuple):
    """How a replay compares with the log."""

    steps: int
    updates: int  # that belong to these steps
    same_updates: int  # whose bytes are those that were sent
    same_steps: int  # after which theta has the same bits
    away: float  # the largest difference of a weight of theta at the end

    @property
    def exact(self) -> bool:
        """Whether every update and every theta is the same, bit for bit."""
        return self.same_updates == self.updates and self.same_steps == self.steps and self.away == 0.0


def replay(run, interpreter=None) -> Replayed:
    """Replays the log of a run; nothing of the run is changed.

    Args:
        run: an open `tfpfl.runs.run.Run` whose live rounds were asynchronous.
        interpreter: class of the interpreter, see `DeviceClient`.

    Raises:
        InvalidArgument: the run has no such rounds.
    """
    path = run.folder / LIVE
    if not path.exists():
        raise InvalidArgument(f"{run.folder} has no log: only live rounds have one (tfpfl serve RUN --async buffer=K)")
    book = AsyncBook(path, run.config.run_id)
    try:
        thetas, buffer = book.versions(), book.buffer
        log = [one for one in book.arrivals() if one.number <= run.store.round_num * buffer]
    finally:
        book.close()
    check_asynchronous(run)
    phones = Phones(run, interpreter)
    server = server_of(run.algorithm, buffer, run.algorithm.init_server())
    next_of: dict[tuple[int, int], Logged] = {(one.arrival.client, one.arrival.visit): one for one in log}
    begun: dict[int, Update] = {}  # {client: the visit that it is in}

    def begin(client: int) -> None:
        """Computes a client's next visit, if it began with the present theta."""
        logged = next_of.get((client, server.visits[client] + 1))
        if logged is not None and logged.arrival.version == server.version and client not in begun:
            ticket = server.begin(client)
            begun[client] = phones.visit(client, theta(), ticket.per_step, logged.payload)

    def theta() -> np.ndarray:
        return flatten(run.algorithm.message(server.state))

    same_updates, same_steps = 0, 0
    for client in server.alphas:
        begin(client)
    for logged in log:
        client = logged.arrival.client
        update = begun.pop(client)
        same_updates += hashlib.sha256(update.payload).hexdigest() == logged.payload_sha256
        phones.commit(client, update)
        if server.take(logged.arrival, payloads.decode(update.payload, run.model.num_backbone_weights)):
            same_steps += theta_sha256(theta()) == thetas[server.version]
            for other in server.alphas:
                begin(other)
        else:
            begin(client)
    live = flatten(run.algorithm.message(run.training().server_state()))
    away = float(np.abs(live - theta()).max())
    return Replayed(server.version, len(log), same_updates, same_steps, away)
