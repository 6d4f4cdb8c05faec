"""What everyone who can open the page sees of live rounds: how many clients are here, never which.

The operator sees more, with a token: see watch.py. An answer is made at most twice a second, however many ask, and the
thread that writes is asked for no more than that: no visitor can keep devices from sending.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tfpfl.live.watch import KEPT, Watch
from tfpfl.runs.protocols import LOCAL_COPY

MOST_ROUNDS = 500  # in one answer
STATES = ("late", "working", "sent", "here")  # of the clients that are here; see watching.py


class Shown:
    """The public part of the state of live rounds.

    Args:
        watch: the whole state.
        clock: () -> seconds since 1970.
        written: runs a function in the thread that writes.
    """

    def __init__(self, watch: Watch, clock: Callable[[], float], written: Callable[..., Awaitable[Any]]):
        self._watch, self._clock, self._written = watch, clock, written
        self._kept: dict[str, Any] = {}
        self._rounds: list[dict] = []
        self._at = -float("inf")
        self._making = asyncio.Lock()

    async def state(self, since: int) -> dict:
        """All that is shown.

        Args:
            since: the rounds begin with the one after this one, and are at most `MOST_ROUNDS`.
        """
        async with self._making:
            if not 0 <= self._clock() - self._at < KEPT:
                await self._written(self._make)
        return self._kept | {"history": self._rounds[since:][:MOST_ROUNDS]}

    def _make(self) -> None:
        now = self._clock()
        found = self._watch.state(0, now)
        opened, counts, about = found["round"], found["counts"], found["run"]
        self._kept = {
            "protocol": found["protocol"],
            "doing": found["doing"],
            "saved": found["saved"],
            "scoring": found["scoring"],
            "rounds": about["rounds"],
            "clients": about["clients"],
            "wait_for": about["wait_for"],
            "counts": {state: counts[state] for state in STATES},
            "round": opened and {"number": opened["number"], **{k: len(opened[k]) for k in ("invited", "came")}},
            "bytes": found["bytes"],
            "score": about["score"],
        }
        self._rounds, self._at = [_row(row) for row in self._watch.history], now


def _row(row: dict) -> dict:
    """A saved round: how many clients it had, its bytes and seconds, and the mean score of what they predict with."""
    told = {name: row[name] for name in ("round", "clients", "seconds", "bytes_up", "bytes_down")}
    model = next((model for model in row["scores"] if model != LOCAL_COPY), None)
    return told | {"score": row["scores"][model].get("score") if model is not None else None}
