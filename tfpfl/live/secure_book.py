"""What a server of secure rounds must not forget besides: the attempt under way, its messages, and the sum."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tflite_export.device.live.wire import KEYS
from tfpfl.live.book import Book

_TABLES = """
CREATE TABLE attempt (round INTEGER PRIMARY KEY, number INTEGER, phase TEXT, about TEXT);
CREATE TABLE message (round INTEGER, number INTEGER, phase TEXT, client INTEGER, sha256 TEXT, body BLOB,
    identity TEXT, PRIMARY KEY (round, number, phase, client));
CREATE TABLE opened_sum (round INTEGER PRIMARY KEY, words BLOB, received INTEGER);
"""


FAILED = "failed"  # the phase of an attempt that has failed


class OpenAttempt(NamedTuple):
    """The attempt of a round that is under way."""

    number: int
    phase: str
    about: dict[str, Any]  # what was fixed when it began: the codec, the weights, the threshold


class SecureBook(Book):
    """The open file of a run with secure rounds.

    Args and raises: see `Book`.
    """

    def __init__(self, path, run_id: str):
        super().__init__(path, run_id)
        if self.is_secure:
            return
        with self._transaction():
            for table in filter(None, map(str.strip, _TABLES.split(";"))):
                self._db.execute(table)
        self._made = ("attempt", "message", "opened_sum")

    def begin_attempt(self, number: int, about: dict) -> None:
        """Begins the next attempt of a round with these members' numbers; what came in an earlier one is deleted."""
        with self._transaction():
            before = self._rows("SELECT number FROM attempt WHERE round = ?", number)
            attempt = before[0][0] + 1 if before else 1
            self._db.execute("DELETE FROM message WHERE round = ?", (number,))
            row = (number, attempt, KEYS, json.dumps(about))
            self._db.execute("INSERT OR REPLACE INTO attempt VALUES (?, ?, ?, ?)", row)

    def attempt(self, number: int) -> OpenAttempt | None:
        """The last attempt of a round, if it had one."""
        for attempt, phase, about in self._rows("SELECT number, phase, about FROM attempt WHERE round = ?", number):
            return OpenAttempt(attempt, phase, json.loads(about))
        return None

    def begin_phase(self, number: int, phase: str, at: float) -> None:
        """Notes that a phase of the attempt begins; no message of an earlier one is taken any more."""
        with self._transaction():
            self._db.execute("UPDATE attempt SET phase = ? WHERE round = ?", (phase, number))
            self._log(at, f"phase {phase}", number, None)

    def put_message(
        self, number: int, attempt: int, phase: str, client: int, body: bytes, at: float, identity: str | None
    ) -> None:
        """Keeps a message, and the public key of the device that sent it; when this returns, it is on disk."""
        with self._transaction():
            row = (number, attempt, phase, client, hashlib.sha256(body).hexdigest(), body, identity)
            self._db.execute("INSERT INTO message VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self._log(at, f"sent {phase}", number, client)

    def message(self, number: int, attempt: int, phase: str, client: int) -> str | None:
        """The sha256 of a client's message in an attempt; None if it sent none."""
        query = "SELECT sha256 FROM message WHERE round = ? AND number = ? AND phase = ? AND client = ?"
        found = self._rows(query, number, attempt, phase, client)
        return found[0][0] if found else None

    def messages(self, number: int, attempt: int, phase: str) -> dict[int, bytes]:
        """{client: its message} of a phase, ascending."""
        query = "SELECT client, body FROM message WHERE round = ? AND number = ? AND phase = ? ORDER BY client"
        return dict(self._rows(query, number, attempt, phase))

    def identities(self, number: int, attempt: int) -> dict[int, str]:
        """{client: the public key of the device that sent its keys in an attempt}."""
        query = "SELECT client, identity FROM message WHERE round = ? AND number = ? AND phase = ?"
        return dict(self._rows(query, number, attempt, KEYS))

    def fail(self, number: int, why: str, at: float) -> None:
        """Notes that an attempt has failed, and deletes what came in it."""
        with self._transaction():
            self._db.execute("DELETE FROM message WHERE round = ?", (number,))
            self._db.execute("UPDATE attempt SET phase = ? WHERE round = ?", (FAILED, number))
            self._log(at, f"failed: {why}", number, None)
        self._forget_deleted()

    def note(self, what: str, number: int, at: float) -> None:
        """Keeps what the operator should know of a round."""
        with self._transaction():
            self._log(at, what, number, None)

    def put_sum(self, number: int, total: np.ndarray, sent: Mapping[int, bytes], clipped: int, at: float) -> None:
        """Keeps the sum and who is in it, and deletes masked words and shares, in one step. The round is then closed.

        Args:
            number: the round.
            total: uint32 [size].
            sent: {client: its masked words}, of those who are in the sum.
            clipped: of how many of them the gradient was clipped.
            at: seconds since 1970.
        """
        with self._transaction():
            ((received,),) = self._rows("SELECT SUM(LENGTH(body)) FROM message WHERE round = ?", number)
            self._db.execute(
                "INSERT INTO opened_sum VALUES (?, ?, ?)", (number, total.astype("<u4").tobytes(), received)
            )
            rows = [(number, client, hashlib.sha256(body).hexdigest(), None) for client, body in sent.items()]
            self._db.executemany("INSERT INTO arrived VALUES (?, ?, ?, ?)", rows)
            self._db.execute("DELETE FROM message WHERE round = ?", (number,))
            self._db.execute("UPDATE opened SET closed = 1 WHERE round = ?", (number,))
            for client in sent:
                self._log(at, "arrived", number, client)
            if clipped:
                self._log(at, f"had {clipped} of {len(sent)} gradients clipped", number, None)
            self._log(at, "closed", number, None)
        self._forget_deleted()

    def opened_sum(self, number: int) -> tuple[np.ndarray, list[int], int] | None:
        """(the sum, uint32 [size]; who is in it; bytes of the attempt's messages) of a round; None: not open yet."""
        for words, received in self._rows("SELECT words, received FROM opened_sum WHERE round = ?", number):
            clients = self._rows("SELECT client FROM arrived WHERE round = ? ORDER BY client", number)
            return np.frombuffer(words, "<u4").astype(np.uint32), [client for (client,) in clients], received
        return None

    def end_round(self, number: int, at: float) -> None:
        """Ends a round as `Book.end_round` does, and deletes its sum, messages and attempts."""
        with self._transaction():
            for table in ("opened_sum", "message", "attempt"):
                self._db.execute(f"DELETE FROM {table} WHERE round = ?", (number,))
        super().end_round(number, at)
