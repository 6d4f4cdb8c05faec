"""`Book`, the file of live rounds: what it keeps of updates, who may read it, and which files it refuses."""

import hashlib
import os
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from helpers.live import join, score, send
from tflite_export.device.live import wire
from tfpfl.checks import InvalidArgument
from tfpfl.live.book import FORMAT, Book, BookError
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused, Rules


def kept_updates(book):
    """How many updates are in the file, byte for byte."""
    return book._rows("SELECT count(*) FROM arrived WHERE body IS NOT NULL")[0][0]


def test_after_a_round_only_the_hash_of_each_update_is_kept(make_run, tmp_path):
    with make_run(tmp_path / "run", participation=1.0, rounds=1, evaluate_every=0) as run:
        rounds = LiveRounds(run, Rules(wait_for=10, awake=1e6), 0.0)
        join(rounds, range(10))
        for client in range(10):
            send(rounds, client, 1.0, loss=0.5 + client)
        assert rounds.view.kind == wire.SCORE  # until the scores have come, the updates are needed after a kill
        sent = rounds.book.bodies(1)
        assert kept_updates(rounds.book) == len(sent) == len(set(sent.values())) == 10
        for client in range(10):
            score(rounds, client, 2.0, 1.0)
        assert rounds.view.kind == wire.DONE and run.store.round_num == 1
        assert kept_updates(rounds.book) == 0
        for client, body in sent.items():  # so that the same bytes, sent again, are known
            assert rounds.book.counted(1, client) == hashlib.sha256(body).hexdigest()
        rounds.close()


def test_what_is_deleted_is_no_longer_in_the_files(tmp_path):
    """Also where SQLite is built without it, and while the server runs or after it was killed."""
    body = np.random.default_rng(0).bytes(20_000)
    with closing(Book(tmp_path / "live.sqlite", "run")) as book:
        book.put(1, 0, body, 1.0)
        on_disk = lambda: b"".join(path.read_bytes() for path in tmp_path.iterdir())  # noqa: E731
        pieces = [body[at : at + 50] for at in range(0, len(body) - 50, 500)]
        assert all(piece in on_disk() for piece in pieces)
        book.end_round(1, 2.0)
        assert book._rows("PRAGMA secure_delete") == [(1,)] and not any(piece in on_disk() for piece in pieces)


def test_nobody_waits_for_a_reader_of_the_file(tmp_path):
    """A checkpoint waits by default; all members would wait with it."""
    with closing(Book(tmp_path / "live.sqlite", "run")) as book, closing(sqlite3.connect(book.path)) as reader:
        book.put(1, 0, b"an update", 1.0)
        reader.execute("BEGIN")
        assert reader.execute("SELECT COUNT(*) FROM arrived").fetchall() == [(1,)]
        said = []
        book._db.set_trace_callback(said.append)
        book.end_round(1, 2.0)
        at = said.index("PRAGMA wal_checkpoint(TRUNCATE)")
        assert (said[at - 1], said[at + 1]) == ("PRAGMA busy_timeout=0", "PRAGMA busy_timeout=5000")
        reader.execute("ROLLBACK")
        assert reader.execute("SELECT body FROM arrived").fetchall() == [(None,)]


def test_only_its_owner_may_read_the_book_and_the_files_beside_it(tmp_path):
    """SQLite writes first into live.sqlite-wal, so the updates are there, too."""
    before = os.umask(0)  # as where everybody may read and write new files
    try:
        with closing(Book(tmp_path / "live.sqlite", "run")) as book:
            book.put(1, 0, b"an update", 1.0)
            modes = {path.name: path.stat().st_mode & 0o77 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("live.sqlite", "live.sqlite-wal", "live.sqlite-shm"), 0)


def test_the_book_of_another_run_or_of_a_newer_version_is_refused(tmp_path):
    path = tmp_path / "live.sqlite"
    with closing(Book(path, "run")) as book:
        book.set_tokens({3: "token"})
    with pytest.raises(BookError, match=f"is of format {FORMAT} and run 'run', not of format {FORMAT}, 'other'"):
        Book(path, "other")
    assert list(tmp_path.iterdir()) == [path]  # it is closed: SQLite has nothing beside it any more
    with closing(Book(path, "run")) as book:  # it is as it was
        assert list(book.members()) == [3]
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE about SET format = ?", (FORMAT + 1,))
    with pytest.raises(BookError, match=f"is of format {FORMAT + 1} and run 'run'"):
        Book(path, "run")


@pytest.mark.parametrize("what", ["is no database", "does not say whose it is", "lies in no folder"])
def test_a_book_that_cannot_be_read_is_refused_and_stays_as_it_is(tmp_path, what):
    path = tmp_path / "folder" / "live.sqlite"
    if what != "lies in no folder":
        path.parent.mkdir()
    if what == "is no database":
        path.write_bytes(b"these are no pages of SQLite " * 500)
    if what == "does not say whose it is":
        with closing(Book(path, "run")) as book:
            book._db.execute("DELETE FROM about")
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(BookError, match="cannot be read: .* Put back a copy of it: without it, .* cannot go on"):
        Book(path, "run")
    assert (path.read_bytes() if path.exists() else None) == before


def test_without_the_book_live_rounds_cannot_go_on_and_the_error_says_what_to_do(make_run, tmp_path):
    """A device has the head of the rounds that it knows, so other rounds refuse it."""
    with make_run(tmp_path / "run", participation=1.0, rounds=1, evaluate_every=0) as run:
        rounds = LiveRounds(run, Rules(wait_for=10, awake=1e6), 0.0)
        join(rounds, range(10))
        known = rounds.book.live_id
        rounds.close()
        (run.folder / "live.sqlite").unlink()
        rounds = LiveRounds(run, Rules(wait_for=10, awake=1e6), 0.0)
        rounds.book.set_tokens({0: "token 0"})
        info = run.population.info(0)
        about = {"protocol": 1, "examples": int(info.num_examples), "classes": int(info.num_classes), "run": known}
        with pytest.raises(Refused, match="another --state"):
            rounds.join("token 0", about | {"key": wire.Signer().public}, 1.0)
        join(rounds, range(10), 1.0)
        for client in range(10):
            send(rounds, client, 2.0)
        rounds.tick(1e5)
        assert run.store.round_num == 1
        rounds.close()
        (run.folder / "live.sqlite").unlink()
        with pytest.raises(InvalidArgument, match="has 1 rounds and no live.sqlite.* put back a copy"):
            LiveRounds(run, Rules(), 2.0)
