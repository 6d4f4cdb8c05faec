"""What a server of live rounds must not forget: members, the open round, what arrived in it, and what happened.

It is a SQLite file beside the run's state. An update is on disk before its device hears that it was counted; the
server's step itself is a round of the run's store. If the server is killed anywhere, it goes on from the two.
"""

import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tfpfl.checks import TfpflError

FORMAT = 1
_PATIENCE = 5000  # milliseconds for which a statement waits while another process has the file locked
_TABLES = """
CREATE TABLE about (format INTEGER, run_id TEXT);
CREATE TABLE member (client INTEGER PRIMARY KEY, token BLOB UNIQUE, key TEXT, joined REAL, revoked INTEGER DEFAULT 0,
    invited INTEGER DEFAULT 0, arrived INTEGER DEFAULT 0);
CREATE TABLE opened (round INTEGER PRIMARY KEY, theta TEXT, at REAL, deadline REAL, closed INTEGER DEFAULT 0);
CREATE TABLE invitation (round INTEGER, client INTEGER, arrival REAL, PRIMARY KEY (round, client));
CREATE TABLE arrived (round INTEGER, client INTEGER, sha256 TEXT, body BLOB, PRIMARY KEY (round, client));
CREATE TABLE score (round INTEGER, client INTEGER, rows TEXT, PRIMARY KEY (round, client));
CREATE TABLE event (number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL, what TEXT, round INTEGER, client INTEGER);
"""


class BookError(TfpflError, RuntimeError):
    """The file live.sqlite is damaged, of another run, or of a newer version, or cannot be written."""


class Member(NamedTuple):
    """A client that may take part."""

    client: int
    key: str | None  # the device's public key; None: it has not joined yet
    revoked: bool
    invited: int  # to how many rounds that are over
    arrived: int  # in how many of these its update came

    @property
    def arrival(self) -> float:
        """The estimated probability that its update comes when it is invited; 1 if it always came."""
        return (self.arrived + 1) / (self.invited + 1)


class OpenRound(NamedTuple):
    """The round that is under way."""

    number: int
    theta: str  # sha256 of the message
    opened: float  # seconds since 1970
    deadline: float
    closed: bool  # whether the server has stepped, so that no update is taken any more
    arrival: dict[int, float]  # {client: its probability to arrive, as it was when it was invited}
    told: float  # when the deadline was set, or moved last

    def deadline_of(self, now: float, seconds: float) -> float:
        """The deadline for a server that goes on with the round; it leaves at least so many seconds.

        If the clock was set back since the old deadline was set, this one says nothing.
        """
        return now + seconds if now < self.told else max(self.deadline, now + seconds)


class Book:
    """The open file; one process at a time uses it, since the run folder is locked.

    Args:
        path: the file; made if it does not exist.
        run_id: the run's.

    Raises:
        BookError: the file is of another run or a newer version, or is damaged.
    """

    def __init__(self, path: str | os.PathLike, run_id: str):
        self.path = Path(path)
        with ExitStack() as failed:
            try:
                if not self.path.exists():
                    self.path.touch(0o600)  # the files that SQLite makes beside it are for the same people
                self._db = sqlite3.connect(path, _PATIENCE / 1000, isolation_level=None, check_same_thread=False)
                failed.enter_context(closing(self._db))
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")  # what is acknowledged is on disk
                self._db.execute("PRAGMA secure_delete=ON")  # what is deleted is overwritten, in every build of SQLite
                if not self._rows("SELECT 1 FROM sqlite_master WHERE name = 'about'"):
                    with self._transaction():
                        for table in filter(None, map(str.strip, _TABLES.split(";"))):
                            self._db.execute(table)
                        self._db.execute("INSERT INTO about VALUES (?, ?)", (FORMAT, run_id))
                (found,) = self._db.execute("SELECT format, run_id FROM about").fetchall()
            except (sqlite3.Error, OSError, ValueError) as error:
                raise BookError(
                    f"{path} cannot be read: {error}. Put back a copy of it: without it, a run that has saved rounds "
                    "cannot go on. One that has none can, and devices join it again with another --state"
                ) from error
            if found != (FORMAT, run_id):
                raise BookError(
                    f"{path} is of format {found[0]} and run {found[1]!r}, not of format {FORMAT}, {run_id!r}"
                )
            failed.pop_all()

    _made: tuple[str, ...] = ()  # the tables of asynchronous or secure rounds that this opening has made

    def take_back(self) -> None:
        """Takes away that rounds are asynchronous or secure, if this opening has made them so."""
        with self._transaction():
            for table in self._made:
                self._db.execute(f"DROP TABLE {table}")
        self._made = ()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All that the block writes is on disk at its end, or nothing of it.

        Raises:
            BookError: it cannot be written.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:  # SQLite has rolled back by itself after some errors
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                raise BookError(
                    f"{self.path} cannot be written: {error}. What devices were told to be counted is there: when it "
                    "can be written again, start the server, and it goes on"
                ) from error
            raise

    def _rows(self, query: str, *arguments) -> list[tuple]:
        with closing(self._db.execute(query, arguments)) as found:
            return found.fetchall()

    @property
    def live_id(self) -> str:
        """What tells these live rounds from others, also from those of a run that was made again with the same id."""
        if not self._rows("SELECT 1 FROM sqlite_master WHERE name = 'live'"):
            with self._transaction():
                self._db.execute("CREATE TABLE live (id TEXT)")
                self._db.execute("INSERT INTO live VALUES (?)", (secrets.token_hex(8),))
        return self._rows("SELECT id FROM live")[0][0]

    @property
    def asynchronous(self) -> int | None:
        """The size of the buffer, if the run's rounds are asynchronous; see `AsyncBook`."""
        if not self._rows("SELECT 1 FROM sqlite_master WHERE name = 'buffer'"):
            return None
        return self._rows("SELECT size FROM buffer")[0][0]

    @property
    def is_secure(self) -> bool:
        """Whether the run has secure rounds; see `SecureBook`."""
        return bool(self._rows("SELECT 1 FROM sqlite_master WHERE name = 'attempt'"))

    def set_tokens(self, tokens: Mapping[int, str]) -> None:
        """Keeps the hashes of these clients' enrolment tokens. A client with another token than before joins anew."""
        hashed = [(i, _hashed(token)) for i, token in tokens.items()]
        with self._transaction():  # first the old tokens go: two clients may have changed theirs
            query = "UPDATE member SET token = NULL, key = NULL, revoked = 0 WHERE client = ? AND token != ?"
            self._db.executemany(query, hashed)
            query = """INSERT INTO member (client, token) VALUES (?, ?)
                ON CONFLICT (client) DO UPDATE SET token = excluded.token WHERE token IS NULL"""
            self._db.executemany(query, hashed)

    def member_with(self, token: str) -> Member | None:
        """Whose token this is; looked up by its hash, so the time that it takes says nothing of the token."""
        found = self._rows("SELECT client FROM member WHERE token = ?", _hashed(token))
        return self.members()[found[0][0]] if found else None

    def members(self) -> dict[int, Member]:
        """All clients that have a token, joined or not: {client: member}, ascending."""
        query = "SELECT client, key, revoked, invited, arrived FROM member ORDER BY client"
        return {client: Member(client, key, bool(r), *counts) for client, key, r, *counts in self._rows(query)}

    def join(self, client: int, key: str, at: float) -> None:
        """Keeps a device's public key, in place of an earlier one of the client."""
        with self._transaction():
            self._db.execute("UPDATE member SET key = ?, joined = ? WHERE client = ?", (key, at, client))
            self._log(at, "joined", None, client)

    def revoke(self, client: int, at: float) -> None:
        """Takes a client's token and key away, until it gets another token."""
        with self._transaction():
            found = self._db.execute("UPDATE member SET revoked = 1 WHERE client = ?", (client,)).rowcount
            if found != 1:  # who is to be refused must not be let in by mistake
                raise BookError(f"{self.path} has no client {client!r}: nobody was revoked")
            self._log(at, "revoked", None, client)

    def open_round(self, number: int, theta: str, clients: Iterable[int], at: float, deadline: float) -> None:
        """Fixes who is invited to a round, with their probabilities to arrive."""
        members = self.members()
        with self._transaction():
            self._db.execute("INSERT INTO opened VALUES (?, ?, ?, ?, 0)", (number, theta, at, deadline))
            rows = [(number, i, members[i].arrival) for i in map(int, clients)]
            self._db.executemany("INSERT INTO invitation VALUES (?, ?, ?)", rows)
            self._log(at, "opened", number, None)

    def extend(self, number: int, deadline: float, at: float) -> None:
        """Moves the deadline of the open round."""
        with self._transaction():
            self._db.execute("UPDATE opened SET deadline = ? WHERE round = ?", (deadline, number))
            self._log(at, "extended", number, None)

    def close_round(self, number: int, at: float) -> None:
        """Notes that the server steps with what has come; from now on no update of this round is taken."""
        with self._transaction():
            self._db.execute("UPDATE opened SET closed = 1 WHERE round = ?", (number,))
            self._log(at, "closed", number, None)

    def open_now(self) -> OpenRound | None:
        """The open round, if there is one."""
        for number, theta, at, deadline, closed in self._rows("SELECT * FROM opened ORDER BY round DESC LIMIT 1"):
            invited = self._rows("SELECT client, arrival FROM invitation WHERE round = ? ORDER BY client", number)
            query = """SELECT at FROM event WHERE round = ? AND what IN ('opened', 'extended')
                ORDER BY number DESC LIMIT 1"""
            ((told,),) = self._rows(query, number)
            return OpenRound(number, theta, at, deadline, bool(closed), dict(invited), told)
        return None

    def put(self, number: int, client: int, body: bytes, at: float) -> None:
        """Keeps what a client sent in a round; when this returns, it is on disk."""
        with self._transaction():
            row = (number, client, hashlib.sha256(body).hexdigest(), body)
            self._db.execute("INSERT INTO arrived VALUES (?, ?, ?, ?)", row)
            self._log(at, "arrived", number, client)

    def counted(self, number: int, client: int) -> str | None:
        """The sha256 of what a client sent in a round, this one or an earlier one; None if nothing came."""
        found = self._rows("SELECT sha256 FROM arrived WHERE round = ? AND client = ?", number, client)
        return found[0][0] if found else None

    def state(self, number: int, client: int) -> str:
        """What became of a client in a round: 'counted', 'open' (the round goes on) or 'over' (it ended without it)."""
        if self.counted(number, client) is not None:
            return "counted"
        opened = self.open_now()
        return "open" if opened is not None and opened.number == number and not opened.closed else "over"

    def last_counted(self, client: int) -> tuple[int, str] | None:
        """(round, sha256) of the last that a client sent; None if nothing came."""
        query = "SELECT round, sha256 FROM arrived WHERE client = ? ORDER BY round DESC LIMIT 1"
        return next(iter(self._rows(query, client)), None)

    def bodies(self, number: int) -> dict[int, bytes]:
        """{client: what it sent in this round}, ascending."""
        return dict(self._rows("SELECT client, body FROM arrived WHERE round = ? ORDER BY client", number))

    def put_score(self, number: int, client: int, rows: list[dict], at: float) -> None:
        """Keeps a client's scores after a round, in place of earlier ones."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO score VALUES (?, ?, ?)", (number, client, json.dumps(rows)))
            self._log(at, "scored", number, client)

    def scores(self, number: int) -> dict[int, list[dict]]:
        """{client: its scores after this round}, ascending."""
        found = self._rows("SELECT client, rows FROM score WHERE round = ? ORDER BY client", number)
        return {client: json.loads(rows) for client, rows in found}

    def end_round(self, number: int, at: float) -> None:
        """Ends a round that the run's store has: counts who came, and keeps only the hash of what they sent."""
        with self._transaction():
            invited = "SELECT client FROM invitation WHERE round = ?"
            came = "SELECT client FROM arrived WHERE round = ?"
            self._db.execute(f"UPDATE member SET invited = invited + 1 WHERE client IN ({invited})", (number,))
            self._db.execute(f"UPDATE member SET arrived = arrived + 1 WHERE client IN ({came})", (number,))
            self._db.execute("UPDATE arrived SET body = NULL WHERE round = ?", (number,))
            for table in ("opened", "invitation", "score"):
                self._db.execute(f"DELETE FROM {table} WHERE round = ?", (number,))
            self._log(at, "ended", number, None)
        self._forget_deleted()

    def _forget_deleted(self) -> None:
        """Empties the write-ahead log, which has what was deleted; if somebody reads the file, another time."""
        self._db.execute("PRAGMA busy_timeout=0")  # devices wait for what this thread writes, and not for a reader
        try:
            with suppress(sqlite3.OperationalError):
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            self._db.execute(f"PRAGMA busy_timeout={_PATIENCE}")

    def events(self, last: int | None = None) -> list[tuple[int, float, str, int | None, int | None]]:
        """All that happened, or the last so many: (number, seconds since 1970, what, round, client), ascending."""
        return self._rows("SELECT * FROM event ORDER BY number DESC LIMIT ?", -1 if last is None else last)[::-1]

    def _log(self, at: float, what: str, number: int | None, client: int | None) -> None:
        self._db.execute("INSERT INTO event (at, what, round, client) VALUES (?, ?, ?, ?)", (at, what, number, client))

    def close(self) -> None:
        """Closes the file; all that was kept is on disk without it."""
        self._db.close()


def _hashed(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
