"""The book of live rounds: what is acknowledged is on disk."""

import logging
from contextlib import closing
from functools import partial

import pytest

from helpers.live import Talker, serving
from tfpfl.live.async_book import AsyncBook
from tfpfl.live.book import Book, BookError
from tfpfl.live.secure_book import SecureBook


@pytest.mark.parametrize(
    "kind", [Book, partial(AsyncBook, buffer=2), SecureBook], ids=["plain", "asynchronous", "secure"]
)
def test_what_is_acknowledged_is_on_disk(kind, tmp_path):
    """SQLite waits for the disk at every commit (2 is FULL), with a new file and with one that was there."""
    for _ in range(2):
        with closing(kind(tmp_path / "live.sqlite", "this run")) as book:
            assert book._rows("PRAGMA synchronous") == [(2,)]


def fill(book, room=0):
    """From now on, the disk is full but for so many pages: SQLite's own limit gives the same error."""
    (pages,) = book._rows("PRAGMA page_count")[0]
    book._db.execute(f"PRAGMA max_page_count = {pages + room}")


def test_a_full_disk_is_told_and_what_was_acknowledged_stays(tmp_path):
    with closing(Book(tmp_path / "live.sqlite", "this run")) as book:
        book.set_tokens({0: "a token", 1: "another"})
        book.open_round(1, "theta", [0, 1], 0.0, 1.0)
        book.put(1, 0, b"x" * 10_000, 0.5)
        fill(book)
        for _ in range(2):
            with pytest.raises(BookError, match="live.sqlite cannot be written: database or disk is full"):
                book.put(1, 1, b"y" * 50_000, 0.5)
        assert list(book.bodies(1)) == [0] and book.counted(1, 1) is None
        fill(book, 100)
        book.put(1, 1, b"y" * 50_000, 0.5)
        assert list(book.bodies(1)) == [0, 1]


def test_the_log_of_a_server_that_cannot_write_has_the_reason_in_one_line(run, caplog):
    with serving(run) as (address, rounds, tokens):
        rounds.book._db.execute("PRAGMA query_only = ON")
        status, found = Talker(address).join(run, 0, tokens[0])
        assert status == 500 and "log" in found["error"]
        rounds.book._db.execute("PRAGMA query_only = OFF")
        assert Talker(address).join(run, 0, tokens[0])[0] == 200
    (record,) = (r for r in caplog.records if r.levelno == logging.ERROR)
    assert "POST /v1/join: " in record.getMessage() and "cannot be written: attempt to write" in record.getMessage()
    assert not record.exc_info
