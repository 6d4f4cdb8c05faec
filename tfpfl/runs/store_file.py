"""Opens the SQLite file of a store: only tables that tfpfl made, no code of others, and a limit for every reading.

What an SQLite file holds can run when it is read: a view or a trigger is a program. So a file is refused unless its
tables are those of its format, word by word, and there is nothing else in it.
"""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tfpfl.checks import InvalidArgument

FORMAT_VERSION = 4  # 1 had no matrices, 2 no checksums of rounds, 3 no metrics besides loss and accuracy
APPLICATION_ID = int.from_bytes(b"tfpf", "big")  # in the file's header: this SQLite file is one of ours
SECONDS = 120.0  # of processor time that one reading may take; waiting for a disk does not count
_STEPS = 100_000  # of SQLite's virtual machine from one look at the clock to the next
_TABLES = {  # name -> (the format that added it, how it is made)
    "run": (1, "CREATE TABLE run (run_id TEXT NOT NULL)"),
    "server": (1, "CREATE TABLE server (round INTEGER PRIMARY KEY, state BLOB NOT NULL, crc INTEGER NOT NULL)"),
    "client": (
        1,
        "CREATE TABLE client (id INTEGER PRIMARY KEY, round INTEGER NOT NULL, state BLOB NOT NULL, crc INTEGER NOT "
        "NULL)",
    ),
    "history": (1, "CREATE TABLE history (round INTEGER PRIMARY KEY, row TEXT NOT NULL)"),
    "evaluation": (
        1,
        "CREATE TABLE evaluation ( round INTEGER, client INTEGER, model TEXT, split TEXT, num_examples INTEGER, loss "
        "REAL, accuracy REAL, PRIMARY KEY (round, client, model, split) ) WITHOUT ROWID",
    ),
    "matrix": (
        2,
        "CREATE TABLE matrix ( round INTEGER, name TEXT, value BLOB NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY "
        "(round, name) )",
    ),
    "checksum": (
        3,
        "CREATE TABLE checksum (round INTEGER PRIMARY KEY, clients TEXT NOT NULL, clients_crc INTEGER NOT NULL, "
        "history_crc INTEGER NOT NULL, evaluation_crc INTEGER NOT NULL, matrix_crc INTEGER NOT NULL)",
    ),
    "metric": (
        4,
        "CREATE TABLE metric ( round INTEGER, client INTEGER, model TEXT, split TEXT, name TEXT, value REAL, PRIMARY "
        "KEY (round, client, model, split, name) ) WITHOUT ROWID",
    ),
}
_INDEXES = {"sqlite_autoindex_matrix_1": 2}  # SQLite makes it for the primary key


class StoreError(InvalidArgument):
    """The store cannot be used, or could not save a round. The message says why, and what is still saved."""


def _only_reading(path: str | os.PathLike) -> str:
    """The mode in which a file can be read. In a folder that is not writable, SQLite cannot make the files beside it.

    Raises:
        StoreError: what was written last is in such a file, and cannot be read there.
    """
    path = Path(path).absolute()
    if os.access(path.parent, os.W_OK):
        return "ro"
    last = path.with_name(f"{path.name}-wal")
    if os.path.exists(last) and last.stat().st_size:  # unlike Path.exists, no error in a folder that cannot be entered
        raise StoreError(
            f"{path} is being written, or its process was killed, and it lies in a folder that you cannot write: its "
            f"last rounds are in {last.name}, which can only be read where it can be written. Copy the run folder"
        )
    return "ro&immutable=1"  # nobody writes it now


class StoreFile:
    """The connection to a store's file, or to one in memory. The caller begins and ends transactions.

    Args:
        path: the file; None: in memory.
        read_only: open an existing file for reading only.

    Attributes:
        db: the connection.
        name: the file's name in messages.
        format: the format of the file; 0 if there is nothing in it yet.

    Raises:
        StoreError: the file cannot be opened, is damaged, from a newer version, or holds anything that tfpfl does not
            write.
    """

    def __init__(self, path: str | os.PathLike | None, read_only: bool):
        self.name = "the store in memory" if path is None else str(path)
        self._path, self._until = path, float("inf")
        place = ":memory:"
        if path is not None:
            place = f"{Path(path).absolute().as_uri()}?mode={_only_reading(path) if read_only else 'rwc'}"
        with self.errors():
            self.db = sqlite3.connect(place, isolation_level=None, uri=True, check_same_thread=False)
        try:
            self.db.set_progress_handler(self._is_too_long, _STEPS)
            with self.errors():
                self.db.execute("PRAGMA trusted_schema = OFF")
                self.db.execute("PRAGMA cell_size_check = ON")
                with self.reading():
                    self.format = self._checked_format()
        except BaseException:
            self.db.close()
            raise

    def _is_too_long(self) -> bool:
        return time.thread_time() > self._until

    def _checked_format(self) -> int:
        """The format of the file, after a check of its header and of its tables."""
        found = self.db.execute("SELECT type, name, sql FROM sqlite_master").fetchmany(100)
        if not found:
            return 0
        if self.value("PRAGMA application_id") != APPLICATION_ID:
            raise StoreError(f"{self.name} is an SQLite file, but not one that tfpfl wrote")
        version = self.value("PRAGMA user_version")
        if version > FORMAT_VERSION:
            raise StoreError(
                f"{self.name} has format {version}, from a newer tfpfl; this one reads up to {FORMAT_VERSION}"
            )
        if self._torn():
            raise StoreError(f"{self.name} is damaged or cut off: its last page is not whole")
        version = max(version, 1)  # 0: killed while the file was made
        made = {("table", name): sql for name, (since, sql) in _TABLES.items() if since <= version}
        made |= {("index", name): "" for name, since in _INDEXES.items() if since <= version}
        have = {(str(kind), str(name)): " ".join(str(sql or "").split()) for kind, name, sql in found}
        for what in sorted(have.keys() | made.keys()):
            if have.get(what) != made.get(what):
                why = "has no" if what not in have else "has a changed" if what in made else "has a strange"
                raise StoreError(
                    f"{self.name} {why} {what[0]} {what[1]!r}: this is not how tfpfl makes a file of format {version}. "
                    "It was changed or damaged; put back a copy of it"
                )
        return version

    def create(self, since: int) -> None:
        """Makes the tables that a file of format `since` does not have, and writes this format into the header."""
        for added, sql in _TABLES.values():
            if added > since:
                self.db.execute(sql)
        self.db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        self.db.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        self.format = FORMAT_VERSION

    def _torn(self) -> bool:
        """Whether the file ends within a page, which SQLite would read as zeros; not if the WAL can repair it."""
        if self._path is None or os.path.getsize(self._path) % self.value("PRAGMA page_size") == 0:
            return False
        wal = Path(f"{self._path}-wal")
        return not wal.exists() or wal.stat().st_size == 0

    def value(self, query: str) -> Any:
        """The first value of the first row of a query that has one."""
        return self.db.execute(query).fetchone()[0]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that the block writes is saved, or nothing of it."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:  # SQLite has rolled back by itself after some errors
                self.db.execute("ROLLBACK")
            raise

    @contextmanager
    def reading(self) -> Iterator[None]:
        """All that the block reads is of one moment, also while another process writes; it ends after `SECONDS`."""
        self._until = time.thread_time() + SECONDS
        if self.db.in_transaction:  # a part of a reading has its own limit
            yield
            return
        try:
            self.db.execute("BEGIN")
            yield
        finally:
            self._until = float("inf")
            if self.db.in_transaction:
                self.db.execute("COMMIT")

    @contextmanager
    def errors(self, kept: str = "") -> Iterator[None]:
        """Converts errors of SQLite to `StoreError`: which file, what happened, and what is kept."""
        try:
            yield
        except (sqlite3.Error, OverflowError, MemoryError, UnicodeDecodeError) as error:
            found = str(error) or "it asks for more memory than there is"
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the lowest byte; the others say more of the same code
            if code == sqlite3.SQLITE_NOTADB:
                found = "this is not an SQLite file"
            elif code == sqlite3.SQLITE_CORRUPT:
                found = f"the file is damaged or cut off ({found})"
            elif code == sqlite3.SQLITE_INTERRUPT:
                found = f"reading it takes more than {SECONDS:g} seconds of processor time: it is damaged"
            raise StoreError(f"{self.name}: {kept + ': ' if kept else ''}{found}") from error
