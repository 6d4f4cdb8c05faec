"""How long a device rests after the server has refused what it sent.

The same examples with the same theta would be refused again, and a visit costs the device energy and both sides bytes.
So the first refusal is followed by 5 s of rest, or by as many as the work named, if these are fewer. After each further
one in a row, the rest is twice as long, from 5 s on, up to 3 minutes. What the server takes ends the row. Updates and
scores have each a row of their own.

Not every answer that refuses is one. 410 says that it came too late, and the next work will be another one. 409 does,
too: the round is not this device's, or it has another theta. Only if the server asks for the same round again, and says
409 again, does it refuse.
"""

import math
import time
from collections.abc import Callable

from tflite_export.device.live import wire

UPDATE, SCORES = "update", "scores"
FIRST, LONGEST = 5.0, 180.0  # seconds


class Rests:
    """The rests of one device.

    Args:
        log: (text) -> None, told how long a rest is.
    """

    def __init__(self, log: Callable[[str], None]):
        self._log, self._left, self._until = log, FIRST, -math.inf
        self._rounds: dict[str, int] = {}  # {what: the round in which it was refused last}
        self._rows: dict[str, int] = {}  # {what: refusals since the last success}
        self.clock: Callable[[], float] = time.monotonic
        self.sleep: Callable[[float], None] = time.sleep

    def begin(self, work: dict) -> None:
        """A work begins; it says how many seconds are left for it."""
        self._left = wire.entry_or(work, "seconds", float, 0, FIRST)

    def taken(self, what: str) -> None:
        """The server has taken an update or scores: the next refusal is the first one again."""
        self._rounds.pop(what, None)
        self._rows.pop(what, None)

    def refused(self, what: str, status: int, number: int) -> None:
        """The server has not taken an update or scores of a round, and said so with this status."""
        again = self._rounds.get(what) == number
        if status == 410:
            return
        self._rounds[what] = number
        if status == 409 and not again:
            return
        before = self._rows.get(what, 0)
        self._rows[what] = before + 1
        rest = min(FIRST * 2.0 ** min(before, 60), LONGEST)
        if before == 0:
            rest = min(rest, self._left)
        self._until = self.clock() + rest
        self._log(f"rests for {rest:g} s before it asks for work again")

    def are_over(self, most: float) -> bool:
        """Rests, but not longer than `most` seconds. Returns whether the device may ask again."""
        left = self._until - self.clock()
        if left <= 0:
            return True
        self.sleep(max(min(left, most), 0.0))
        return self.clock() >= self._until
