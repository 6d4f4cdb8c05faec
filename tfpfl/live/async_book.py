"""What a server of asynchronous rounds must not forget: the log of the arrivals, and which theta every step made.

Arrival number n belongs to step ceil(n / K), so nothing else has to be kept to go on after a kill: the arrivals that
the run's store has not stepped with yet still have their bodies.
"""

import hashlib
import os
from typing import NamedTuple

from tfpfl.checks import InvalidArgument
from tfpfl.live.arrivals import Arrival
from tfpfl.live.book import Book

_TABLES = (
    "CREATE TABLE buffer (size INTEGER)",
    """CREATE TABLE arrival (number INTEGER PRIMARY KEY, client INTEGER, visit INTEGER, version INTEGER, since INTEGER,
    payload TEXT, payload_sha256 TEXT, sha256 TEXT, body BLOB, UNIQUE (client, visit))""",
    "CREATE TABLE version (number INTEGER PRIMARY KEY, theta TEXT)",
)


class Logged(NamedTuple):
    """A row of the log."""

    number: int  # of the arrival, from 1
    arrival: Arrival
    payload: str  # 'float32' or 'int8'
    payload_sha256: str
    body: bytes | None  # what was sent, until the step is saved


class AsyncBook(Book):
    """The open file.

    Args:
        path, run_id: see `Book`.
        buffer: K; None: that of the log, which must be there.

    Raises:
        BookError: see `Book`.
        InvalidArgument: the run has begun with another buffer, or with rounds that are not asynchronous.
    """

    def __init__(self, path: str | os.PathLike, run_id: str, buffer: int | None = None):
        super().__init__(path, run_id)
        try:
            self.buffer = self._begun(buffer)
        except InvalidArgument:
            self.close()
            raise

    def _begun(self, buffer: int | None) -> int:
        found = self.asynchronous
        if found is None:
            if buffer is not None and self.is_secure:
                raise InvalidArgument(
                    f"{self.path} has secure rounds, whose devices send masked updates only: give --secure"
                )
            if buffer is None or self._rows("SELECT 1 FROM event WHERE what = 'opened'"):
                raise InvalidArgument(
                    f"{self.path} has rounds with cohorts, which are not asynchronous: leave --async out of tfpfl "
                    "serve; tfpfl replay is for runs of tfpfl serve --async"
                )
            with self._transaction():
                for table in _TABLES:
                    self._db.execute(table)
                self._db.execute("INSERT INTO buffer VALUES (?)", (buffer,))
            self._made = ("buffer", "arrival", "version")
            return buffer
        if buffer not in (None, found):
            raise InvalidArgument(f"{self.path} has begun with --async buffer={found}, and goes on with it only")
        return found

    def put_arrival(
        self, number: int, arrival: Arrival, payload: str, payload_sha256: str, body: bytes, at: float
    ) -> None:
        """Keeps what a client sent; when this returns, it is on disk."""
        with self._transaction():
            row = (number, *arrival, payload, payload_sha256, hashlib.sha256(body).hexdigest(), body)
            self._db.execute("INSERT INTO arrival VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._log(at, "arrived", arrival.visit, arrival.client)

    def counted(self, number: int, client: int) -> str | None:
        """The sha256 of what a client sent in its visit of this number; None if nothing came."""
        found = self._rows("SELECT sha256 FROM arrival WHERE client = ? AND visit = ?", client, number)
        return found[0][0] if found else None

    def arrivals(self, after: int = 0) -> list[Logged]:
        """The log, from the arrival after this number on."""
        query = """SELECT number, client, visit, version, since, payload, payload_sha256, body FROM arrival
            WHERE number > ? ORDER BY number"""
        return [Logged(row[0], Arrival(*row[1:5]), *row[5:]) for row in self._rows(query, after)]

    def unheard(self) -> dict[int, float]:
        """For how many seconds before the last event nothing had come of a client: {client: seconds}."""
        clock, before, heard = 0.0, None, {}
        for at, what, client in self._rows("SELECT at, what, client FROM event ORDER BY number"):
            clock += 0.0 if before is None else max(at - before, 0.0)  # it may have been set back between two starts
            before = at
            if client is not None and what != "revoked":
                heard[client] = clock
        return {client: clock - at for client, at in heard.items()}

    def end_step(self, version: int, theta: str, at: float) -> None:
        """Ends a step that the run's store has: keeps which theta it made, and only the hashes of what was sent."""
        with self._transaction():
            self._db.execute("INSERT INTO version VALUES (?, ?)", (version, theta))
            of_step = ((version - 1) * self.buffer, version * self.buffer)
            self._db.execute("UPDATE arrival SET body = NULL WHERE number > ? AND number <= ?", of_step)
            if version:  # 0 is the theta before the first step
                self._log(at, "stepped", version, None)
        self._forget_deleted()

    def versions(self) -> list[str]:
        """sha256 of theta after 0, 1, ... steps."""
        return [theta for (theta,) in self._rows("SELECT theta FROM version ORDER BY number")]

    def scored(self) -> list[int]:
        """The steps after which scores came that the run's store does not have yet."""
        return [number for (number,) in self._rows("SELECT DISTINCT round FROM score ORDER BY round")]

    def end_scores(self, number: int) -> None:
        """Forgets the scores after a step: the run's store has them."""
        with self._transaction():
            self._db.execute("DELETE FROM score WHERE round = ?", (number,))
