"""Stores that tfpfl did not write like that: each is refused in one line, and none of them is believed or run."""

import json
import random
import shutil
import sqlite3
import zlib
from contextlib import closing

import numpy as np
import pytest

from helpers import small_runs as runs
from helpers.marks import slow_but
from helpers.stores import as_format
from tfpfl.runs import store_file
from tfpfl.runs.config import RunError
from tfpfl.runs.protocols import Score
from tfpfl.runs.run import Run
from tfpfl.runs.store import FORMAT_VERSION, RunStore, StoreError
from tfpfl.runs.store_content import checksum, pack
from tfpfl.studies.records import Record

CLIENTS, ROUNDS = 4, 3
COHORTS = {1: (0, 1, 2), 2: (1, 3), 3: (0, 3)}


def scores(t):
    """One of all clients, and one of each client of the round; client 2 has no test examples."""
    found = [Score(t, i, "personal", "test", i * (i != 2), 1 / (t + i), i / 4) for i in range(CLIENTS)]
    found[2] = found[2]._replace(loss=np.nan, score=np.nan)
    return found + [Score(t, i, "local copy", "validation", 5, 0.1 * t, 0.2) for i in COHORTS[t]]


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """A store of three rounds, each with a cohort, scores and a matrix."""
    path = tmp_path_factory.mktemp("intact") / "state.sqlite"
    with RunStore(path, "run") as store:
        for t, cohort in COHORTS.items():
            row = {"round": t, "clients": len(cohort), "loss": 1 / t, "seconds": 0.25}
            states = {i: (np.full((3, 2), t + i / 8),) for i in cohort}
            store.commit_round(t, (np.arange(5.0) * t,), states, row, scores(t), {"A": np.eye(CLIENTS) / t})
    return path


@pytest.fixture
def path(intact, tmp_path):
    return shutil.copy(intact, tmp_path / "state.sqlite")


def everything(path, read_only=False):
    """All that is in a store, as text."""
    with RunStore(path, "run", read_only=read_only) as store:
        states = store.client_states(range(CLIENTS), lambda i: None, like=(np.zeros((1, 1)),))
        matrices = [store.matrices(t) for t in range(1, store.round_num + 1)]
        server = store.server_state((np.zeros(5),))
        found = [store.round_num, store.history(), store.evaluations(), server, states, matrices, store.matrix_rounds()]
    return repr(found)


def change(path, *statements):
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(*([statement] if isinstance(statement, str) else statement))
        db.commit()


def refused(path, match):
    """Whoever writes or reads it is told in one line, and the file stays as it is."""
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(StoreError, match=match) as error:
            everything(path, read_only)
        assert "\n" not in str(error.value) and str(path) in str(error.value)
    assert path.read_bytes() == before


NEVER_ENDS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS round, 'x' AS row FROM n"
SCHEMA = {
    "a view instead of a table, which never ends": (
        ("DROP TABLE history", f"CREATE VIEW history AS {NEVER_ENDS}"), "has no table 'history'"),
    "a view more": ((f"CREATE VIEW more AS {NEVER_ENDS}",), "has a strange view 'more'"),
    "a trigger that deletes": (
        ("CREATE TRIGGER t AFTER INSERT ON history BEGIN DELETE FROM client; END",), "has a strange trigger 't'"),
    "a trigger before deleting": (
        ("CREATE TRIGGER gone BEFORE DELETE ON server BEGIN SELECT RAISE(IGNORE); END",), "strange trigger 'gone'"),
    "a table more": (("CREATE TABLE more (x)",), "has a strange table 'more'"),
    "a virtual table": (("CREATE VIRTUAL TABLE words USING fts5(x)",), "has a strange table 'words"),
    "an index more": (("CREATE INDEX quick ON client (round)",), "has a strange index 'quick'"),
    "an index of an expression": (("CREATE INDEX e ON history (abs(round))",), "has a strange index 'e'"),
    "statistics": (("CREATE INDEX i ON client (round)", "ANALYZE", "DROP INDEX i"), "has a strange table 'sqlite_stat"),
    "a table less": (("DROP TABLE matrix",), "has no index 'sqlite_autoindex_matrix_1'"),
    "no checksums": (("DROP TABLE checksum",), "has no table 'checksum'"),
    "a column more": (("ALTER TABLE history ADD COLUMN x",), "has a changed table 'history'"),
    "a column that is computed": (
        ("ALTER TABLE client ADD COLUMN x AS (id + 1)",), "has a changed table 'client'"),
    "a column of another name": (("ALTER TABLE evaluation RENAME COLUMN loss TO cost",), "changed table 'evaluation'"),
    "a default": (
        ("DROP TABLE run", "CREATE TABLE run (run_id TEXT NOT NULL DEFAULT 'run')", "INSERT INTO run VALUES ('run')"),
        "has a changed table 'run'"),
    "an older format in the header": (("PRAGMA user_version = 2",), "strange table 'checksum'.*a file of format 2"),
    "a format below zero": (("PRAGMA user_version = -5",), "a file of format 1"),
    "another application": (("PRAGMA application_id = 7",), "not one that tfpfl wrote"),
}  # fmt: skip
CONTENT = {
    "no run": (("DELETE FROM run",), "must name one run, found none"),
    "two runs": (("INSERT INTO run VALUES ('other')",), "must name one run, found"),
    "a run of bytes": (("UPDATE run SET run_id = x'ff'",), "must name one run"),
    "another run": (("UPDATE run SET run_id = 'ruN'",), "belongs to run 'ruN'"),
    "no server state": (("DELETE FROM server",), "its server state is missing, but the table history has 3 rows"),
    "two server states": (("INSERT INTO server SELECT 2, state, crc FROM server",), "one server state, found some"),
    "a server state of an earlier round": (("UPDATE server SET round = 2",), "of round 2, but the table history has 3"),
    "a server state of a later round": (("UPDATE server SET round = 4",), "of round 4, but the table history has 3"),
    "a server state of a round below zero": (("UPDATE server SET round = -1",), r"found some of rounds \[-1\]"),
    "a server state of text": (("UPDATE server SET state = 'x'",), "server state is damaged"),
    "a server state of a client": (
        ("UPDATE server SET (state, crc) = (SELECT state, crc FROM client WHERE id = 0)",), "server state is damaged"),
    "states of two clients swapped": (
        ("UPDATE client SET id = 9 WHERE id = 0", "UPDATE client SET id = 0 WHERE id = 3",
         "UPDATE client SET id = 3 WHERE id = 9"), "state of client 0 is damaged: its checksum is wrong"),
    "a state of another client": (
        ("UPDATE client SET (state, crc) = (SELECT state, crc FROM client WHERE id = 3) WHERE id = 0",),
        "state of client 0 is damaged"),
    "a state of an earlier round": (("UPDATE client SET round = 1 WHERE id = 0",), "round 1, but its last round was 3"),
    "a client less": (("DELETE FROM client WHERE id = 2",), "client 2 has no state, but its last round was 1"),
    "a client more": (
        ("INSERT INTO client SELECT 99, round, state, crc FROM client WHERE id = 0",), "client 99 .* was in no round"),
    "a client below zero": (("UPDATE client SET id = -2 WHERE id = 2",), "state of client -2, and ids begin with 0"),
    "a state of a round that is not there": (("UPDATE client SET round = 8 WHERE id = 0",), "table client .* 1 to 8"),
    "a round of text": (("UPDATE client SET round = 'x' WHERE id = 0",), "the table client has 4 rows, of rounds"),
    "a checksum of text": (("UPDATE client SET crc = 'x' WHERE id = 0",), "client 0 is damaged"),
    "a history of one round less": (("DELETE FROM history WHERE round = 2",), "table history has 2 rows"),
    "an empty history": (("DELETE FROM history",), "the table history is empty"),
    "a history of other rounds": (("UPDATE history SET round = 5 WHERE round = 3",), "rows, of rounds 1 to 5"),
    "rows of the history swapped": (
        ("UPDATE history SET round = 9 WHERE round = 1", "UPDATE history SET round = 1 WHERE round = 2",
         "UPDATE history SET round = 2 WHERE round = 9"), "history of round 1 is damaged"),
    "a loss in the history": (
        ("UPDATE history SET row = replace(row, '0.5', '0.7') WHERE round = 2",), "history of round 2 is damaged"),
    "a history of bytes": (("UPDATE history SET row = x'7b7d' WHERE round = 2",), "history of round 2 is damaged"),
    "a history that is no text": (
        ("UPDATE history SET row = CAST(x'ff' AS TEXT) WHERE round = 2",), "decode to UTF-8|is damaged"),
    "an accuracy of 7": (
        ("UPDATE evaluation SET accuracy = 7 WHERE round = 2 AND client = 1",), "evaluation of round 2 is damaged"),
    "an accuracy a little higher": (
        ("UPDATE evaluation SET accuracy = accuracy + 1e-15 WHERE round = 2 AND client = 1",), "evaluation of round 2"),
    "a score less": (("DELETE FROM evaluation WHERE round = 3 AND client = 1",), "evaluation of round 3 is damaged"),
    "no scores of a round": (("DELETE FROM evaluation WHERE round = 3",), "evaluation of round 3 is damaged"),
    "no scores at all": (("DELETE FROM evaluation",), "evaluation of round 1 is damaged"),
    "a score more": (
        ("INSERT INTO evaluation VALUES (1, 99, 'personal', 'test', 5, 0.5, 0.5)",), "evaluation of round 1 is"),
    "scores of a round that is not there": (
        ("INSERT INTO evaluation VALUES (7, 1, 'personal', 'test', 5, 0.5, 0.5)",), "table evaluation .* 1 to 7"),
    "scores moved to another round": (
        ("UPDATE evaluation SET model = 'old' WHERE round = 2",), "evaluation of round 2 is damaged"),
    "a matrix changed": (("UPDATE matrix SET crc = crc + 1 WHERE round = 2",), "A of round 2 is damaged"),
    "a matrix of another name": (("UPDATE matrix SET name = 'B' WHERE round = 2",), "matrices of round 2 is damaged"),
    "a matrix of another round": (
        ("UPDATE matrix SET (value, crc) = (SELECT value, crc FROM matrix WHERE round = 1) WHERE round = 2",),
        "A of round 2 is damaged"),
    "a matrix without a name": (("UPDATE matrix SET name = NULL WHERE round = 2",), "whose name is no text"),
    "a matrix less": (("DELETE FROM matrix WHERE round = 2",), "list of matrices of round 2 is damaged"),
    "a list of clients changed": (("UPDATE checksum SET clients = '[0]'",), "list of clients of round 1 is damaged"),
    "a checksum of scores changed": (
        ("UPDATE checksum SET evaluation_crc = 5 WHERE round = 3",), "evaluation of round 3 is damaged"),
    "checksums of a round less": (("DELETE FROM checksum WHERE round = 1",), "the table checksum has 2 rows"),
}  # fmt: skip
SAFETENSORS_OF_OTHER_NAMES = b"\x37" + bytes(7) + b'{"x":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}} ' + bytes(8)
OLD = {  # what only possible values can show, because files of format 2 have no checksums of rounds
    "no server state": (("DELETE FROM server",), "its server state is missing"),
    "an accuracy of 7": (("UPDATE evaluation SET accuracy = 7 WHERE client = 1",), "the accuracy 7.0, which is"),
    "an accuracy below zero": (("UPDATE evaluation SET accuracy = -1e-9",), "which is outside"),
    "an accuracy of text": (("UPDATE evaluation SET accuracy = 'x'",), "the accuracy 'x'"),
    "a loss of bytes": (("UPDATE evaluation SET loss = x'00'",), "which is no number"),
    "a client below zero": (("UPDATE evaluation SET client = -1 WHERE client = 1",), "is of client -1"),
    "a client of text": (("UPDATE evaluation SET client = 'x' WHERE client = 1",), "is of client 'x'"),
    "a strange split": (("UPDATE evaluation SET split = 'tset'",), "split 'tset'; a split is one of train"),
    "fewer than no examples": (("UPDATE evaluation SET num_examples = -1",), "is of -1 examples"),
    "a round of text": (("UPDATE evaluation SET round = 'x' WHERE round = 2",), "the table evaluation has"),
    "a history that is no JSON": (("UPDATE history SET row = '{' WHERE round = 2",), "round 2 is damaged: .* JSON"),
    "a history that is a list": (("UPDATE history SET row = '[]' WHERE round = 2",), "a JSON object of round 2"),
    "a history of another round": (("UPDATE history SET row = '{\"round\": 1}' WHERE round = 2",), "of round 2, found"),
    "a history without an end": (
        (("UPDATE history SET row = ? WHERE round = 2", ["[" * 100_000]),), "history of round 2 is damaged"),
    "a state cut off": (("UPDATE client SET state = substr(state, 1, 9) WHERE id = 1",), "is damaged"),
    "a state of other names": (
        (("UPDATE client SET state = ?, crc = ? WHERE id = 1",
          [SAFETENSORS_OF_OTHER_NAMES, zlib.crc32(SAFETENSORS_OF_OTHER_NAMES)]),), "client 1 cannot be read"),
    "a state that is no safetensors": (
        (("UPDATE client SET state = ?, crc = ? WHERE id = 1", [b"x" * 99, zlib.crc32(b"x" * 99)]),), "cannot be read"),
}  # fmt: skip


def test_the_store_that_is_made_strange_is_read(path):
    assert everything(path) == everything(path, read_only=True)


@pytest.mark.parametrize("case", SCHEMA)
def test_only_tables_of_tfpfl(path, case):
    statements, match = SCHEMA[case]
    try:
        change(path, *statements)
    except sqlite3.OperationalError as error:
        if "no such module" not in str(error):
            raise
        pytest.skip("this SQLite has no virtual tables of this kind")
    refused(path, match)


@pytest.mark.parametrize("case", CONTENT)
def test_content_that_was_changed(path, case):
    statements, match = CONTENT[case]
    change(path, *statements)
    refused(path, match)


@pytest.mark.parametrize("case", OLD)
def test_impossible_values_in_an_older_format(path, case):
    statements, match = OLD[case]
    as_format(path, 2)
    change(path, *statements)
    with pytest.raises(StoreError, match=match) as error:
        everything(path)
    assert "\n" not in str(error.value)
    with pytest.raises(StoreError):
        everything(path, read_only=True)


def test_reading_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(store_file, "SECONDS", 0.05)
    with RunStore() as store:
        with pytest.raises(StoreError, match="takes more than 0.05 seconds of processor time"):
            with store._errors(), store._file.reading():
                store._db.execute(f"SELECT max(round) FROM ({NEVER_ENDS})").fetchone()
        store.commit_round(1, (), {}, {"round": 1})
        assert store.history() == [{"round": 1}]


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("flips", slow_but([150, 5000], 150))
def test_a_flipped_bit_changes_nothing_or_is_found(intact, path, flips):
    data, true = intact.read_bytes(), everything(path)
    found = 0
    for bit in random.Random(flips).sample(range(8 * len(data)), flips):
        path.write_bytes(flipped(data, bit))
        try:
            assert everything(path, read_only=True) == true, bit
        except StoreError:
            found += 1
    assert found  # most bits are those of empty places


@pytest.mark.parametrize("number", [0.25, 1 / 3], ids=["accuracy", "loss"])
def test_every_flipped_bit_of_a_number_is_found(intact, path, number):
    data = intact.read_bytes()
    where = data.index(np.array(number, ">f8").tobytes())
    for bit in range(8 * where, 8 * where + 64):
        path.write_bytes(flipped(data, bit))
        with pytest.raises(StoreError):
            everything(path, read_only=True)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_older_format_is_read_and_continued_and_then_has_checksums(path, number):
    true = everything(path) if number >= 2 else None
    as_format(path, number)
    old = everything(path, read_only=True)
    assert true in (None, old)
    assert everything(path) == old  # this converted it
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (FORMAT_VERSION,)
    with RunStore(path, "run") as store:
        row = {"round": 4, "clients": 1, "seconds": 0.5}
        store.commit_round(4, (np.zeros(5),), {1: (np.ones((3, 2)),)}, row)
    change(path, "UPDATE evaluation SET accuracy = 0.75 WHERE round = 1 AND client = 1")
    refused(path, "evaluation of round 1 is damaged")


def test_an_older_format_that_is_damaged_is_not_converted(path):
    as_format(path, 2)
    change(path, "UPDATE client SET crc = crc + 1 WHERE id = 3")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="client's state of id 3, round 3 is damaged: its checksum is wrong"):
        RunStore(path, "run")
    assert path.read_bytes() == before


def test_impossible_scores_are_not_saved():
    good = Score(1, 0, "personal", "test", 3, 0.5, 0.5)
    with RunStore() as store:
        for wrong in ({"score": 1.01}, {"score": -1e-3}, {"client_id": -1}, {"split": "tests"}):
            with pytest.raises(ValueError, match="a score of round 1 "):
                store.commit_round(1, (), {}, {}, [good._replace(**wrong)])
        store.commit_round(1, (), {}, {}, [good])


# A run: its clients are known, and what its history must have.


def rewritten(folder, t, change):
    """Changes the history's row of a round, with the checksum that belongs to it."""
    with closing(sqlite3.connect(folder / "state.sqlite")) as db:
        (run_id,), (text,) = (
            db.execute(query).fetchone()
            for query in ("SELECT run_id FROM run", f"SELECT row FROM history WHERE round = {t}")
        )
        row = json.dumps(change(json.loads(text)))
        crc = checksum(row.encode(), "history", run_id, t)
        db.execute("UPDATE history SET row = ? WHERE round = ?", (row, t))
        db.execute("UPDATE checksum SET history_crc = ? WHERE round = ?", (crc, t))
        db.commit()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda row: {"round": 2}, "history of round 2 has no number for clients, seconds"),
        (lambda row: row | {"seconds": "long"}, "history of round 2 has no number for seconds"),
        (lambda row: row | {"clients": 99}, "history of round 2 has clients = 99"),
        (lambda row: row | {"bytes_up": None}, "history of round 2 has no number for bytes_up"),
        (lambda row: row | {"personal test accuracy": 7}, "has personal test accuracy = 7"),
        (lambda row: row | {"seconds": float("inf")}, "has seconds = inf"),
    ],
)
def test_a_history_that_no_run_has(a_run, change, match):
    rewritten(a_run, 2, change)
    for read in (Run.open, Record.read):
        with pytest.raises(StoreError, match=match):
            read(a_run)
    rewritten(a_run, 2, lambda row: {"round": 2, "clients": 0, "seconds": 0.0})
    Run.open(a_run).close()  # and it was not left open


def with_sums(path, *changes):
    """Changes a store, and computes the checksums of what was changed again, as whoever sends a file can do."""
    with closing(sqlite3.connect(path)) as db:
        (run_id,) = db.execute("SELECT run_id FROM run").fetchone()
        for statement, content, of in changes:
            data = content.encode() if isinstance(content, str) else content
            db.execute(statement, (content, checksum(data, of[0], run_id, *of[1:])))
        db.commit()


STRANGE = {
    "a list of clients of text": (
        ("UPDATE checksum SET clients = ?, clients_crc = ? WHERE round = 2", '["x"]', ("clients", 2)),
        "the list of the clients of round 2 cannot be read"),
    "a list of clients that is a number": (
        ("UPDATE checksum SET clients = ?, clients_crc = ? WHERE round = 2", "7", ("clients", 2)),
        "the list of the clients of round 2 cannot be read"),
    "a server state of another size": (
        ("UPDATE server SET state = ?, crc = ?", pack((np.zeros(4),)), ("server", 3)),
        r"server state has in array 0: float64, shape \[4\]; this algorithm and model have float64, shape \[5\]"),
    "no matrix": (
        ("UPDATE matrix SET value = ?, crc = ? WHERE round = 2", pack(()), ("matrix", 2, "A")),
        "A of round 2 must be one array, found 0"),
    "two matrices in one": (
        ("UPDATE matrix SET value = ?, crc = ? WHERE round = 2", pack((np.eye(2), np.eye(2))), ("matrix", 2, "A")),
        "A of round 2 must be one array, found 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", STRANGE)
def test_strange_content_with_the_checksums_that_belong_to_it(path, case):
    change_, match = STRANGE[case]
    with_sums(path, change_)
    refused(path, match)


@pytest.mark.slow
def test_clients_that_a_run_does_not_have(a_run):
    """In a file of format 2 the row is believed, because it has no checksum of the round."""
    intact = (a_run / "state.sqlite").read_bytes()
    as_format(a_run / "state.sqlite", 2)
    data = pack((np.zeros((3, 2), np.float32),))
    for statement, what in (
        (("INSERT INTO client VALUES (99, 7, ?, ?)", [data, checksum(data)]), "a state"),
        (("INSERT INTO evaluation VALUES (7, 99, 'personal', 'test', 5, 0.5, 0.5)", []), "scores"),
    ):
        change(a_run / "state.sqlite", statement)
        for read in (Record.read, Run.open):
            with pytest.raises(StoreError, match=f"{what} of client 99, which is not a client of this run"):
                read(a_run)
        (a_run / "state.sqlite").write_bytes(intact)
        as_format(a_run / "state.sqlite", 2)
    before = runs.saved(a_run)
    Record.read(a_run)
    with Run.open(a_run, rounds=8) as run:
        assert run.store.round_num == 7
        run.train()
    assert runs.saved(a_run)["history"][:7] == before["history"]
    with pytest.raises(RunError, match="more than 7"):
        Run.open(a_run, rounds=7)
