"""The server of asynchronous rounds: it steps at every K arrivals. It knows no network, no clock and no disk.

The same object is driven by devices over HTTP (`async_rounds`), by a log (`async_replay`) and by a virtual clock
(`clocked`).

    m_i <- m_i + MEMORY (gap - m_i)         gap: the arrivals of all clients since i's last one, this one included
    w   =  alpha_i m_i / K                  i arrives K / m_i times a step: this is alpha_i over its rate
    theta <- optimizer(theta, sum of the K arrivals' w g)

So every client moves theta by alpha_i g_i a step, however often it comes. In the long run this is exact, also while m_i
is a poor estimate: the sum of a client's m_i is the sum of its gaps, which is the number of all arrivals, but for what
is owed at the two ends, about 1 / MEMORY gaps. A weight from the share of the arrivals so far would be wrong by about
1 / sqrt(n) after n arrivals of the client; this one by about 1 / (MEMORY n). The first m_i is the first gap, but at
least the number of clients, as if all came equally often: so equal clients are weighted equally from the beginning.

A client's gap begins anew when it comes back after it was away (`begin`): it is not paid for time in which it was off.

Source:
    The buffer: Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous
    Aggregation, AISTATS 2022, arXiv 2106.06639. There each update counts the same, and fast clients dominate. That
    updates have to be weighted by how often a client comes: Leconte, Nguyen, Moulines: FAVANO, arXiv 2305.16099; and,
    with a memory at the client, Iakovidou, Kim: AREA, arXiv 2405.10123. The estimate by gaps is ours.
"""

import heapq
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

MEMORY = 0.2  # the part of m_i that the newest gap is


class Arrival(NamedTuple):
    """An update of the log."""

    client: int
    visit: int  # the client's n-th, from 1
    version: int  # of theta, that it was computed with: the number of steps before
    since: int  # the number of arrivals of all clients at which its gap begins


class Ticket(NamedTuple):
    """What a client begins a visit with."""

    visit: int
    version: int
    since: int
    per_step: float  # how often the client arrives in a step, as far as is known


class AsyncServer:
    """The server's state, the sum in the buffer, and the clients' rates.

    Args:
        alphas: {client: its weight alpha_i in the objective}.
        buffer: K; the server steps at every K arrivals.
        state: the server's state.
        step: (state, the weighted sum of K gradients [P]) -> the next state.
        total: zeros [P], in the dtype of the sum.
    """

    def __init__(self, alphas: Mapping[int, float], buffer: int, state: Any, step: Callable, total: np.ndarray):
        self.alphas, self.buffer, self.state = dict(alphas), buffer, state
        self._step, self._total = step, total
        self.count = 0  # arrivals of all clients
        self.visits = dict.fromkeys(self.alphas, 0)  # {client: its arrivals}
        self._since = dict.fromkeys(self.alphas, 0)  # {client: the count at which its gap begins}
        self._least = dict.fromkeys(self.alphas, 0)  # {client: the version at its last arrival}
        self._gap: dict[int, float] = {}  # {client: m_i}

    @property
    def version(self) -> int:
        """The number of steps that were taken."""
        return self.count // self.buffer

    def begin(self, client: int, away: bool = False) -> Ticket:
        """A client asks for work.

        Args:
            client: its number.
            away: whether it was away until now, so that its gap begins here.
        """
        if away:
            self._since[client] = self.count
        return Ticket(self.visits[client] + 1, self.version, self._since[client], self.per_step(client))

    def resume(self, client: int, version: int) -> None:
        """An update comes, and nobody knows when its visit began: its gap does not begin before its theta was there."""
        self._since[client] = max(self._since[client], version * self.buffer)

    def per_step(self, client: int) -> float:
        """How often a client arrives in a step, as measured; before its first arrival as if all came equally often."""
        return self.buffer / self._gap.get(client, float(len(self.alphas)))

    def arrival(self, client: int, version: int) -> Arrival:
        """A client's next arrival, with the gap that began when it did."""
        return Arrival(client, self.visits[client] + 1, version, self._since[client])

    def may_have(self, client: int, version: int) -> bool:
        """Whether a client's next update can be one of this theta: one that was there after its last arrival."""
        return self._least[client] <= version <= self.version

    def remember(self, arrival: Arrival) -> float:
        """Counts an arrival. Returns the weight of its gradient."""
        client, self.count = arrival.client, self.count + 1
        gap = self.count - arrival.since
        old = self._gap.get(client)
        self._gap[client] = float(max(gap, len(self.alphas))) if old is None else old + MEMORY * (gap - old)
        self.visits[client], self._since[client], self._least[client] = arrival.visit, self.count, self.version
        return self.alphas[client] * self._gap[client] / self.buffer

    def take(self, arrival: Arrival, gradient: np.ndarray) -> bool:
        """Counts an arrival with its gradient [P], and steps if it is the K-th. Returns whether it did."""
        self._total += self._total.dtype.type(self.remember(arrival)) * gradient
        if self.count % self.buffer:
            return False
        self.state = self._step(self.state, self._total.copy())
        self._total[:] = 0
        return True


class Timed(NamedTuple):
    """An arrival by a virtual clock."""

    seconds: float  # since the start
    arrival: Arrival


def clocked(
    server: AsyncServer,
    visit: Callable[[Arrival, Any, float], np.ndarray],
    seconds: Callable[[int, int], float],
    until: Callable[[float], bool],
) -> list[Timed]:
    """Drives a server by a virtual clock: every client is always at work, and begins anew when it has arrived.

    Of those that arrive at the same moment, the one with the smallest number is first, and all begin anew after all.

    Args:
        server: a server before its first arrival.
        visit: (arrival, the server's state when the visit began, how often the client arrives in a step) -> gradient.
            It is called in the order of the arrivals.
        seconds: (client, number of its visit) -> the virtual seconds that it takes.
        until: (virtual seconds since the start) -> whether to stop; asked after every step of the server.

    Returns:
        The log.
    """
    log: list[Timed] = []
    working: list[tuple] = []

    def begin(client, now):
        ticket = server.begin(client)
        heapq.heappush(working, (now + seconds(client, ticket.visit), client, ticket, server.state))

    for client in server.alphas:
        begin(client, 0.0)
    while True:
        now, came = working[0][0], []
        while working and working[0][0] == now:
            _, client, ticket, state = heapq.heappop(working)
            came.append(client)
            arrival = Arrival(client, *ticket[:3])
            log.append(Timed(now, arrival))
            if server.take(arrival, visit(arrival, state, ticket.per_step)) and until(now):
                return log
        for client in came:
            begin(client, now)
