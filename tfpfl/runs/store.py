"""Saves a run in one SQLite file: server and client states, history, evaluations, matrices.

A round is one transaction. If it is interrupted (kill -9, a full disk, a power cut), the file holds the last whole
round and nothing of the next. States are nested structures of arrays. They are stored as safetensors; the caller gives
the structure in which they are returned, so that nothing in the file is ever executed. Everything has a checksum, which
also covers the run, the round and the client that it belongs to.

SQLite keeps committed rounds in `FILE-wal` until the file is closed: copy both files, or copy after the run.
"""

import json
import os
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, cast

import numpy as np
from tensorflow import nest

from tfpfl.checks import InvalidArgument, check_whole_number
from tfpfl.data.kinds import ACCURACY, ScoreName
from tfpfl.runs import store_content as content
from tfpfl.runs.locks import InUse, Lock
from tfpfl.runs.protocols import Score
from tfpfl.runs.store_convert import convert
from tfpfl.runs.store_file import FORMAT_VERSION, StoreFile
from tfpfl.runs.store_file import StoreError as StoreError

SEED = "seed "  # how the id of a run begins whose store was made without one: `Training` writes its seed there


class OtherRun(StoreError):
    """The file holds the rounds of another run."""


class RunStore:
    """The saved rounds and states of a run, in one file or in memory. Only one process at a time can write the file.

    A client that never took part uses no space, and neither does an algorithm whose clients have no state.

    Args:
        path: the file; it is made if it does not exist. None (default): keep everything in memory.
        run_id: identifies the run, for example the hash of its configuration; a file of another run is refused.
            None (default): accept the file of any run; `Training` then keeps its seed in it.
        read_only: only read the file, which must exist; possible while another process writes it.
        lock: the lock of the file, if the caller has it already; `close` releases it. Default: it is taken here.
        named: the score that is saved; one that is a fraction must lie in [0, 1]. Default: the accuracy; what a file
            has already may then be any score, until `set_score` says which.

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
        named: ScoreName | None = None,
    ):
        self._named, self._is_named = named or ACCURACY, named is not None
        self._lock = lock if lock or path is None or read_only else _lock(path)
        self._file, self._db = cast(StoreFile, None), cast(sqlite3.Connection, None)  # until it is open
        try:
            self._file = StoreFile(path, read_only)
            self._db, self._name, self._errors = self._file.db, self._file.name, self._file.errors
            with self._errors():
                self._open(run_id, read_only)
        except BaseException:
            self.close()
            raise

    def _open(self, run_id: str | None, read_only: bool) -> None:
        if read_only and not self._file.format:
            raise StoreError(f"{self._name} holds nothing")
        if not read_only:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
        if not self._file.format:
            with self._file.transaction():
                self._file.create(since=0)
                self._db.execute("INSERT INTO run VALUES (?)", (run_id or "",))
        with self._file.reading():
            self.run_id = self._found_run(run_id)
            self._check_rounds()
            if not read_only:  # who only reads checks what it reads
                self.history()
                self.evaluations()
        if not read_only and self._file.format < FORMAT_VERSION:
            convert(self._file, self.run_id)

    def reading(self) -> AbstractContextManager[None]:
        """All that a block reads is of one moment, also while another process trains."""
        return self._file.reading()

    def set_score(self, named: ScoreName) -> None:
        """Says which score is saved.

        Raises:
            StoreError: a saved one cannot be this.
        """
        if (named, True) != (self._named, self._is_named):
            self._named, self._is_named = named, True
            self.evaluations()

    def _found_run(self, run_id: str | None) -> str:
        found = [name for (name,) in self._db.execute("SELECT run_id FROM run").fetchmany(2)]
        if len(found) != 1 or not isinstance(found[0], str):
            raise StoreError(f"{self._name} is damaged: it must name one run, found {found or 'none'}")
        if run_id is not None and found[0] != run_id:
            raise OtherRun(f"{self._name} belongs to run {found[0]!r}, not to {run_id!r}")
        return found[0]

    def _check_rounds(self) -> None:
        """Checks that the rounds of all tables belong together, and that no client's state is missing or too many."""
        servers = [t for (t,) in self._db.execute("SELECT round FROM server").fetchmany(2)]
        last = servers[0] if servers else 0
        if len(servers) > 1 or min(servers, default=1) < 1:
            raise StoreError(f"{self._name} is damaged: it must have one server state, found some of rounds {servers}")
        tables = ["history", "client", "evaluation", *["matrix", "checksum", "metric"][: self._file.format - 1]]
        for table in tables:
            query = f"SELECT count(*), min(round), max(round), sum(typeof(round) != 'integer') FROM {table}"
            count, low, high, strange = self._db.execute(query).fetchone()
            each = table in ("history", "checksum")  # these have one row for each round
            if (each and count != last) or (count and (strange or not 1 <= low <= high <= last)):
                found = f"has {count} rows, of rounds {low!r} to {high!r}" if count else "is empty"
                raise StoreError(
                    f"{self._name} is damaged: its server state is {f'of round {last}' if servers else 'missing'}, but "
                    f"the table {table} {found}"
                )
        stored = dict(self._db.execute("SELECT id, round FROM client"))
        if stored and min(stored) < 0:
            raise StoreError(f"{self._name} is damaged: it has a state of client {min(stored)}, and ids begin with 0")
        if "matrix" in tables and self._file.value("SELECT count(*) FROM matrix WHERE typeof(name) != 'text'"):
            raise StoreError(f"{self._name} is damaged: it has a matrix whose name is no text")
        if self._bound:
            rows = self._db.execute("SELECT round, clients, clients_crc FROM checksum ORDER BY round").fetchall()
            for t, ids, crc in rows:
                content.check(ids, crc, self._of("clients", t), f"{self._name}: the list of clients of round {t}", str)
            content.check_clients(self._name, stored, ((t, ids) for t, ids, _ in rows))

    def check_seed(self, seed: int) -> None:
        """Checks that the saved rounds are not of another seed, if `keep_seed` kept one.

        Raises:
            OtherRun: they are.
        """
        if self.run_id.startswith(SEED) and self.run_id != f"{SEED}{seed}" and self.round_num:
            raise OtherRun(
                f"{self._name} holds {self.round_num} rounds of {self.run_id}, and the training has seed {seed}: they "
                "would be continued with the clients and draws of another run. Take the seed of before, or a new store"
            )

    def keep_seed(self, seed: int) -> None:
        """Keeps the seed of the rounds to come, in a store without rounds that was made without a `run_id`.

        Raises:
            StoreError: the file could not be written.
        """
        if self.round_num or not (self.run_id == "" or self.run_id.startswith(SEED)):
            return
        with self._errors(), self._file.transaction():
            self._db.execute("UPDATE run SET run_id = ?", (f"{SEED}{seed}",))
        self.run_id = f"{SEED}{seed}"

    @property
    def _bound(self) -> bool:
        """Whether checksums also cover what a content belongs to; those of formats 1 and 2 are of arrays alone."""
        return self._file.format >= 3

    def _of(self, kind: str, *which: Any) -> tuple:
        return (kind, self.run_id, *which) if self._bound else ()

    def _sums(self, kind: str, round_num: int | None = None) -> dict[int, int]:
        """{round: checksum} of what a round has of this kind; {} for older formats, which have none."""
        if not self._bound:
            return {}
        query = f"SELECT round, {kind}_crc FROM checksum WHERE ? IS NULL OR round = ? ORDER BY round"
        return dict(self._db.execute(query, (round_num, round_num)))

    @property
    def round_num(self) -> int:
        """The number of the last committed round; 0 if there is none."""
        with self._errors():
            return self._file.value("SELECT coalesce(max(round), 0) FROM server")

    def server_state(self, initial: Any) -> Any:
        """The server's state after the last round, in the structure of `initial`; before the first round, `initial`.

        Raises:
            StoreError: what is stored does not have the leaves of `initial` (their number, dtypes and shapes).
        """
        with self._errors():
            row = self._db.execute("SELECT state, crc, round FROM server ORDER BY round DESC LIMIT 1").fetchone()
        if row is None:
            return initial
        data, crc, t = row
        content.check(data, crc, self._of("server", t), what := f"{self._name}: the server state")
        return content.unpack(data, initial, what, same_shapes=True)

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
                row = self._db.execute("SELECT state, crc, round FROM client WHERE id = ?", (client_id,)).fetchone()
            if row is None:
                states.append(default(client_id))
            else:
                data, crc, t = row
                what = f"{self._name}: the state of client {client_id}"
                content.check(data, crc, self._of("client", client_id, t), what)
                like = default(client_id) if like is None else like
                states.append(content.unpack(data, like, what))
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
            InvalidArgument: an evaluation is of another round, of an unknown split, or has an accuracy outside [0, 1].
        """
        done, round_num = self.round_num, _whole(round_num)
        if round_num != done + 1:
            raise StoreError(f"{self._name} holds rounds up to {done}: the next is {done + 1}, not {round_num}")
        evaluation_rows = [Score(*row) for row in evaluation_rows]
        if any(row.round_num != round_num for row in evaluation_rows):
            others = sorted({row.round_num for row in evaluation_rows} - {round_num})
            raise InvalidArgument(f"all evaluations must be of round {round_num}, found some of {others}")
        # What can fail for a reason other than the file is done before the transaction.
        server = self._packed(server_state, "server", round_num)
        states = {int(i): state for i, state in client_states.items() if nest.flatten(state)}
        clients = [(i, round_num, *self._packed(state, "client", i, round_num)) for i, state in states.items()]
        history = json.dumps(history_row, default=content.json_value)
        named = [
            (round_num, name, *self._packed(matrix, "matrix", round_num, name))
            for name, matrix in (matrices or {}).items()
        ]
        scores = sorted((content.score_row(e, self._named) for e in evaluation_rows), key=lambda row: row[1:4])
        metrics = sorted((row for e in evaluation_rows for row in content.metric_rows(e)), key=lambda row: row[1:5])
        names = [name for _, name, *_ in named]
        sums = content.sums(self.run_id, round_num, states, history, scores, names, metrics)
        with (
            self._errors(f"round {round_num} was not saved, round {done} is the last whole one"),
            self._file.transaction(),
        ):
            self._db.execute("DELETE FROM server")
            self._db.execute("INSERT INTO server VALUES (?, ?, ?)", (round_num, *server))
            self._db.executemany("INSERT OR REPLACE INTO client VALUES (?, ?, ?, ?)", clients)
            self._db.execute("INSERT INTO history VALUES (?, ?)", (round_num, history))
            self._db.executemany("INSERT INTO evaluation VALUES (?, ?, ?, ?, ?, ?, ?)", scores)
            self._db.executemany("INSERT INTO metric VALUES (?, ?, ?, ?, ?, ?)", metrics)
            self._db.executemany("INSERT INTO matrix VALUES (?, ?, ?, ?)", named)
            self._db.execute("INSERT INTO checksum VALUES (?, ?, ?, ?, ?, ?)", sums)

    def add_scores(self, round_num: int, entries: dict, evaluation_rows: Iterable[Score]) -> None:
        """Adds what was measured after a saved round to it, completely or not at all; in place of what it had.

        Args:
            round_num: a committed round.
            entries: {name: value}, for its row of the history.
            evaluation_rows: all its scores.

        Raises:
            StoreError: there is no such round, a score is of another one, or the file could not be written.
            InvalidArgument: a score has an impossible value.
        """
        evaluation_rows, round_num = [Score(*row) for row in evaluation_rows], _whole(round_num)
        if not 1 <= round_num <= self.round_num or any(row.round_num != round_num for row in evaluation_rows):
            raise StoreError(f"{self._name} has no round {round_num}, or a score is of another round")
        history = json.dumps(self.history()[round_num - 1] | entries, default=content.json_value)
        scores = sorted((content.score_row(e, self._named) for e in evaluation_rows), key=lambda row: row[1:4])
        metrics = sorted((row for e in evaluation_rows for row in content.metric_rows(e)), key=lambda row: row[1:5])
        names = list(self.matrices(round_num))
        with self._errors(f"the scores of round {round_num} were not saved"), self._file.transaction():
            clients = json.loads(self._file.value(f"SELECT clients FROM checksum WHERE round = {int(round_num)}"))
            sums = content.sums(self.run_id, round_num, clients, history, scores, names, metrics)
            for table in ("evaluation", "metric"):
                self._db.execute(f"DELETE FROM {table} WHERE round = ?", (round_num,))
            self._db.execute("UPDATE history SET row = ? WHERE round = ?", (history, round_num))
            self._db.executemany("INSERT INTO evaluation VALUES (?, ?, ?, ?, ?, ?, ?)", scores)
            self._db.executemany("INSERT INTO metric VALUES (?, ?, ?, ?, ?, ?)", metrics)
            self._db.execute("INSERT OR REPLACE INTO checksum VALUES (?, ?, ?, ?, ?, ?)", sums)

    def _packed(self, state: Any, kind: str, *which: Any) -> tuple[bytes, int]:
        data = content.pack(state)
        return data, content.checksum(data, *self._of(kind, *which))

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

    def history(self, since: int = 0) -> list[dict]:
        """The history rows, in the order of the rounds.

        Args:
            since: only rounds after this one.

        Raises:
            StoreError: a row is damaged.
        """
        since = _whole(since)
        with self._errors(), self._file.reading():
            rows = dict(self._db.execute("SELECT round, row FROM history WHERE round > ? ORDER BY round", (since,)))
            sums = {t: crc for t, crc in self._sums("history").items() if t > since}
        for t, crc in sums.items():
            content.check(rows.get(t), crc, self._of("history", t), f"{self._name}: the history of round {t}", str)
        return [content.history_row(text, t, f"{self._name}: the history of round {t}") for t, text in rows.items()]

    def evaluations(self, round_num: int | None = None) -> list[Score]:
        """The evaluations of one round or of all, ordered by round, client, model and split.

        Raises:
            StoreError: a score is damaged, missing or impossible.
        """
        round_num = None if round_num is None else _whole(round_num)
        query = "SELECT * FROM evaluation WHERE ? IS NULL OR round = ? ORDER BY round, client, model, split"
        with self._errors(), self._file.reading():
            rows = self._db.execute(query, (round_num, round_num)).fetchall()
            metrics = self._metrics(round_num)
            sums = self._sums("evaluation", round_num)
        if self._bound:
            by_round, others = ({t: list(g) for t, g in groupby(r, lambda row: row[0])} for r in (rows, metrics))
            found = {t: content.scores_text(by_round.get(t, []), others.get(t, [])) for t in by_round | others}
            for t in sorted(sums.keys() | found.keys()):
                what = f"{self._name}: the evaluation of round {t}"
                content.check(found.get(t, b"[]"), sums.get(t), self._of("evaluation", t), what)
        is_known = self._is_named or not self._bound  # in such old formats all scores are accuracies
        return content.scores(rows, f"{self._name}: the scores", metrics, self._named, is_known)

    def _metrics(self, round_num: int | None) -> list[tuple]:
        if self._file.format < 4:  # only read, otherwise it would have been converted
            return []
        query = "SELECT * FROM metric WHERE ? IS NULL OR round = ? ORDER BY round, client, model, split, name"
        return self._db.execute(query, (round_num, round_num)).fetchall()

    def matrix_rounds(self) -> list[int]:
        """The rounds for which matrices were saved, ascending."""
        if self._file.format < 2:  # only read, otherwise it would have been converted
            return []
        with self._errors(), self._file.reading():
            return [t for (t,) in self._db.execute("SELECT DISTINCT round FROM matrix ORDER BY round")]

    def matrices(self, round_num: int) -> dict[str, np.ndarray]:
        """The matrices that were saved for this round: {name: array}; {} if there are none.

        Raises:
            StoreError: a stored matrix is damaged or missing.
        """
        if self._file.format < 2:
            return {}
        round_num = _whole(round_num)
        query = "SELECT name, value, crc FROM matrix WHERE round = ? ORDER BY name"
        with self._errors(), self._file.reading():
            rows = self._db.execute(query, (round_num,)).fetchall()
            sums = self._sums("matrix", round_num)
        for t, crc in sums.items():
            what = f"{self._name}: the list of matrices of round {t}"
            content.check(content.as_text([name for name, *_ in rows]), crc, self._of("matrices", t), what)
        found = {}
        for name, data, crc in rows:
            content.check(
                data, crc, self._of("matrix", round_num, name), what := f"{self._name}: {name} of round {round_num}"
            )
            stored = content.arrays(data, what)
            if len(stored) != 1:
                raise StoreError(f"{what} must be one array, found {len(stored)}")
            found[name] = stored[0]
        return found

    def close(self) -> None:
        """Closes the file, so that other processes can write it. Saved rounds are safe without it."""
        if self._file is not None:
            self._file.db.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> "RunStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole(round_num: int) -> int:
    """The number of a round as Python's int: SQLite takes NumPy's for bytes, and finds and keeps other rounds."""
    check_whole_number(0, round_num=round_num)
    return int(round_num)


def _lock(path: str | os.PathLike) -> Lock:
    try:
        return Lock(path)
    except InUse as error:
        raise StoreError(
            f"{path} is being written by another process, or a second time by this one: {error}"
        ) from error
    except OSError as error:
        raise StoreError(f"cannot write beside {path}: {error.strerror}") from error
