"""Saves a run in one SQLite file: server and client states, history, evaluations, matrices.

A round is one transaction. If it is interrupted (kill -9, a full disk, a power cut), the file holds the last whole
round and nothing of the next. States are nested structures of arrays. They are stored as safetensors with a checksum;
the caller gives the structure in which they are returned, so that nothing in the file is ever executed.

SQLite keeps committed rounds in `FILE-wal` until the file is closed: copy both files, or copy after the run.
"""

import json
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save
from tensorflow import nest

from tfpfl.checks import InvalidArgument
from tfpfl.runs.locks import InUse, Lock
from tfpfl.runs.protocols import Score

FORMAT_VERSION = 2  # 1 had no matrices
_APPLICATION_ID = int.from_bytes(b"tfpf", "big")  # in the file's header: this SQLite file is one of ours
_SCHEMA = """
CREATE TABLE run (run_id TEXT NOT NULL);
CREATE TABLE server (round INTEGER PRIMARY KEY, state BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE client (id INTEGER PRIMARY KEY, round INTEGER NOT NULL, state BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE history (round INTEGER PRIMARY KEY, row TEXT NOT NULL);
CREATE TABLE evaluation (
    round INTEGER, client INTEGER, model TEXT, split TEXT, num_examples INTEGER, loss REAL, accuracy REAL,
    PRIMARY KEY (round, client, model, split)
) WITHOUT ROWID;
"""
_MATRICES = """
CREATE TABLE IF NOT EXISTS matrix (
    round INTEGER, name TEXT, value BLOB NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (round, name)
)
"""


class StoreError(InvalidArgument):
    """The store cannot be used, or could not save a round. The message says why, and what is still saved."""


class OtherRun(StoreError):
    """The file holds the rounds of another run."""


class RunStore:
    """The saved rounds and states of a run, in one file or in memory. Only one process at a time can write the file.

    A client that never took part uses no space, and neither does an algorithm whose clients have no state.

    Args:
        path: the file; it is made if it does not exist. None (default): keep everything in memory.
        run_id: identifies the run, for example the hash of its configuration; a file of another run is refused.
            None (default): accept the file of any run.
        read_only: only read the file, which must exist; possible while another process writes it.
        lock: the lock of the file, if the caller has it already; `close` releases it. Default: it is taken here.

    Raises:
        OtherRun: the file belongs to another run.
        StoreError: the file is not a store, is damaged, belongs to a newer version, or is being written by another
            process.
    """

    def __init__(
        self,
        path: str | os.PathLike | None = None,
        run_id: str | None = None,
        *,
        read_only: bool = False,
        lock: Lock | None = None,
    ):
        self._path = path
        self._name = "the store in memory" if path is None else str(path)
        self._lock = lock if lock or path is None or read_only else _lock(path)
        self._db = cast(sqlite3.Connection, None)  # until it is open
        place = ":memory:" if path is None else f"{Path(path).absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        try:
            with self._errors():
                # No isolation level: this class begins and ends the transactions itself.
                self._db = sqlite3.connect(place, isolation_level=None, uri=True)
                self._open(run_id, read_only)
        except BaseException:
            self.close()
            raise

    def _open(self, run_id: str | None, read_only: bool) -> None:
        application_id = self._value("PRAGMA application_id")
        version = self._value("PRAGMA user_version")
        new = not self._value("SELECT count(*) FROM sqlite_master")
        if not new and application_id != _APPLICATION_ID:
            raise StoreError(f"{self._name} is an SQLite file, but not one that tfpfl wrote")
        if version > FORMAT_VERSION:
            raise StoreError(
                f"{self._name} has format {version}, from a newer tfpfl; this one reads up to {FORMAT_VERSION}"
            )
        if not new and self._torn():
            raise StoreError(f"{self._name} is damaged or cut off: its last page is not whole")
        if read_only:
            if new or version < FORMAT_VERSION:
                found = "holds nothing" if new else f"has format {version}: `tfpfl evaluate` converts it"
                raise StoreError(f"{self._name} {found}")
            self.run_id = self._found_run(run_id)
            return
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        if new:
            with self._transaction():
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                self._db.execute("INSERT INTO run VALUES (?)", (run_id or "",))
        self.run_id = self._found_run(run_id)
        if new or version < FORMAT_VERSION:
            with self._transaction():
                self._db.execute(_MATRICES)
                self._db.execute(f"PRAGMA user_version = {FORMAT_VERSION}")

    def _found_run(self, run_id: str | None) -> str:
        found = self._value("SELECT run_id FROM run")
        if run_id is not None and found != run_id:
            raise OtherRun(f"{self._name} belongs to run {found!r}, not to {run_id!r}")
        return found

    def _torn(self) -> bool:
        """Whether the file ends within a page, which SQLite would read as zeros; not if the WAL can repair it."""
        if self._path is None or os.path.getsize(self._path) % self._value("PRAGMA page_size") == 0:
            return False
        wal = Path(f"{self._path}-wal")
        return not wal.exists() or wal.stat().st_size == 0

    @property
    def round_num(self) -> int:
        """The number of the last committed round; 0 if there is none."""
        with self._errors():
            return self._value("SELECT coalesce(max(round), 0) FROM server")

    def server_state(self, initial: Any) -> Any:
        """The server's state after the last round, in the structure of `initial`; before the first round, `initial`.

        Raises:
            StoreError: what is stored does not have the leaves of `initial` (their number, dtypes and ranks).
        """
        with self._errors():
            row = self._db.execute("SELECT state, crc FROM server ORDER BY round DESC LIMIT 1").fetchone()
        return initial if row is None else _unpack(row[0], row[1], initial, f"{self._name}: the server state")

    def client_ids(self) -> np.ndarray:
        """The ids of the clients that have a stored state, ascending: int64 [n]."""
        with self._errors():
            return np.array([i for (i,) in self._db.execute("SELECT id FROM client ORDER BY id")], np.int64)

    def client_states(self, client_ids: Iterable[int], default: Callable[[int], Any], like: Any = None) -> list:
        """The states of these clients, in the order of `client_ids`.

        Args:
            client_ids: the clients.
            default: (client id) -> the state of a client that has none stored, usually `algorithm.init_client`.
            like: a state of any client, which gives the structure; default: `default` of a client. The sizes of arrays
                may differ between clients (heads of K_i columns); structure, dtypes and ranks may not.

        Returns:
            One structure of NumPy arrays for each client, or what `default` returned.

        Raises:
            StoreError: a stored state is damaged, or does not have the structure of `like`.
        """
        states = []
        for client_id in map(int, client_ids):
            with self._errors():
                row = self._db.execute("SELECT state, crc FROM client WHERE id = ?", (client_id,)).fetchone()
            if row is None:
                states.append(default(client_id))
            else:
                like = default(client_id) if like is None else like
                states.append(_unpack(row[0], row[1], like, f"{self._name}: the state of client {client_id}"))
        return states

    def commit_round(
        self,
        round_num: int,
        server_state: Any,
        client_states: dict[int, Any],
        history_row: dict,
        evaluation_rows: Iterable[Score] = (),
        matrices: dict[str, Any] | None = None,
    ) -> None:
        """Saves one round, completely or not at all; after the return it is on disk.

        Args:
            round_num: one more than the last committed round.
            server_state: the server's state after the round.
            client_states: {client id: state} of the clients that took part.
            history_row: {name: value}, of JSON's types and NumPy's numbers and arrays; floats are kept exactly, also
                NaN and infinity.
            evaluation_rows: the scores of this round.
            matrices: {name: array}, the algorithm's matrices after this round.

        Raises:
            StoreError: `round_num` is not the next round, or the file could not be written. Earlier rounds are kept.
            InvalidArgument: an evaluation is of another round.
        """
        done = self.round_num
        if round_num != done + 1:
            raise StoreError(f"{self._name} holds rounds up to {done}: the next is {done + 1}, not {round_num}")
        evaluation_rows = [Score(*row) for row in evaluation_rows]
        if any(row.round_num != round_num for row in evaluation_rows):
            others = sorted({row.round_num for row in evaluation_rows} - {round_num})
            raise InvalidArgument(f"all evaluations must be of round {round_num}, found some of {others}")
        # What can fail for a reason other than the file is done before the transaction.
        server = _pack(server_state)
        clients = [(int(i), round_num, *_pack(state)) for i, state in client_states.items() if nest.flatten(state)]
        history = json.dumps(history_row, default=_plain)
        named = [(round_num, name, *_pack(matrix)) for name, matrix in (matrices or {}).items()]
        # SQLite would store a NumPy number as bytes, and NaN as NULL.
        evaluations = [
            (round_num, int(e.client_id), e.model, e.split, int(e.num_examples), float(e.loss), float(e.accuracy))
            for e in evaluation_rows
        ]
        with self._errors(f"round {round_num} was not saved, round {done} is the last whole one"), self._transaction():
            self._db.execute("DELETE FROM server")
            self._db.execute("INSERT INTO server VALUES (?, ?, ?)", (round_num, *server))
            self._db.executemany("INSERT OR REPLACE INTO client VALUES (?, ?, ?, ?)", clients)
            self._db.execute("INSERT INTO history VALUES (?, ?)", (round_num, history))
            self._db.executemany("INSERT INTO evaluation VALUES (?, ?, ?, ?, ?, ?, ?)", evaluations)
            self._db.executemany("INSERT INTO matrix VALUES (?, ?, ?, ?)", named)

    def check_size(self, state: Any) -> None:
        """Checks that a server state is small enough to be saved; to be called before the work of a round.

        Raises:
            StoreError: the state is larger than SQLite allows for one value.
        """
        size = sum(np.asarray(leaf).nbytes for leaf in nest.flatten(state))
        limit = self._db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)
        if size + 100_000 > limit:  # names, shapes and the other columns
            raise StoreError(
                f"{self._name} cannot take a server state of {size / 1e9:.3g} GB: a value in SQLite has at most "
                f"{limit / 1e9:.3g} GB. Take fewer clients or a smaller network"
            )

    def history(self) -> list[dict]:
        """The history rows, in the order of the rounds."""
        with self._errors():
            return [json.loads(row) for (row,) in self._db.execute("SELECT row FROM history ORDER BY round")]

    def evaluations(self, round_num: int | None = None) -> list[Score]:
        """The evaluations of one round or of all, ordered by round, client, model and split."""
        query = "SELECT * FROM evaluation WHERE ? IS NULL OR round = ? ORDER BY round, client, model, split"
        with self._errors():
            rows = [Score(*row) for row in self._db.execute(query, (round_num, round_num))]
        return [row._replace(loss=_nan(row.loss), accuracy=_nan(row.accuracy)) for row in rows]

    def matrix_rounds(self) -> list[int]:
        """The rounds for which matrices were saved, ascending."""
        with self._errors():
            return [t for (t,) in self._db.execute("SELECT DISTINCT round FROM matrix ORDER BY round")]

    def matrices(self, round_num: int) -> dict[str, np.ndarray]:
        """The matrices that were saved for this round: {name: array}; {} if there are none.

        Raises:
            StoreError: a stored matrix is damaged.
        """
        with self._errors():
            rows = self._db.execute(
                "SELECT name, value, crc FROM matrix WHERE round = ? ORDER BY name", (round_num,)
            ).fetchall()
        return {name: _load(value, crc, f"{self._name}: {name} of round {round_num}")[0] for name, value, crc in rows}

    def close(self) -> None:
        """Closes the file, so that other processes can write it. Saved rounds are safe without it."""
        if self._db is not None:
            self._db.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> "RunStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _value(self, query: str) -> Any:
        return self._db.execute(query).fetchone()[0]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite has rolled back by itself after some errors
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _errors(self, kept: str = "") -> Iterator[None]:
        """Converts errors of SQLite to `StoreError`: which file, what happened, and what is kept."""
        try:
            yield
        except (sqlite3.Error, OverflowError, json.JSONDecodeError) as error:
            found = str(error)
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the lowest byte; the others say more of the same code
            if code == sqlite3.SQLITE_NOTADB:
                found = "this is not an SQLite file"
            elif code == sqlite3.SQLITE_CORRUPT:
                found = f"the file is damaged or cut off ({found})"
            raise StoreError(f"{self._name}: {kept + ': ' if kept else ''}{found}") from error


def _lock(path: str | os.PathLike) -> Lock:
    try:
        return Lock(path)
    except InUse as error:
        raise StoreError(
            f"{path} is being written by another process, or a second time by this one: {error}"
        ) from error
    except OSError as error:
        raise StoreError(f"cannot write beside {path}: {error.strerror}") from error


def _pack(state: Any) -> tuple[bytes, int]:
    """The leaves of a structure as safetensors, in the order of `nest.flatten`: the bytes and their checksum."""
    leaves = [np.asarray(leaf, order="C") for leaf in nest.flatten(state)]
    data = save({str(i): leaf for i, leaf in enumerate(leaves)})
    return data, zlib.crc32(data)


def _load(data: bytes, crc: int, what: str) -> list[np.ndarray]:
    if zlib.crc32(data) != crc:
        raise StoreError(f"{what} is damaged: its checksum is wrong")
    try:
        stored = load(data)
    except SafetensorError as error:
        raise StoreError(f"{what} cannot be read: {error}") from error
    return [stored[str(i)] for i in range(len(stored))]


def _unpack(data: bytes, crc: int, like: Any, what: str) -> Any:
    leaves = _load(data, crc, what)
    wanted = [np.asarray(leaf) for leaf in nest.flatten(like)]
    kinds, wanted_kinds = ([f"{leaf.dtype}, rank {leaf.ndim}" for leaf in group] for group in (leaves, wanted))
    if len(leaves) != len(wanted):
        raise StoreError(f"{what} has {len(leaves)} arrays, but this algorithm and model have {len(wanted)}")
    for i, (found, expected) in enumerate(zip(kinds, wanted_kinds, strict=True)):
        if found != expected:
            raise StoreError(f"{what} has in array {i}: {found}; this algorithm and model have {expected}")
    return nest.pack_sequence_as(like, leaves)


def _plain(value: Any) -> Any:
    """Converts NumPy's numbers and arrays, and tensors, to JSON's types."""
    if not hasattr(value, "__array__"):
        raise TypeError(f"a history row holds numbers, text, lists and dicts; found {type(value).__name__}")
    return np.asarray(value).tolist()


def _nan(value: float | None) -> float:
    return np.nan if value is None else value
