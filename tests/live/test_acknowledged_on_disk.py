"""The book of live rounds: what is acknowledged is on disk."""

from contextlib import closing
from functools import partial

import pytest

from tfpfl.live.async_book import AsyncBook
from tfpfl.live.book import Book
from tfpfl.live.secure_book import SecureBook


@pytest.mark.parametrize(
    "kind", [Book, partial(AsyncBook, buffer=2), SecureBook], ids=["plain", "asynchronous", "secure"]
)
def test_what_is_acknowledged_is_on_disk(kind, tmp_path):
    """SQLite waits for the disk at every commit (2 is FULL), with a new file and with one that was there."""
    for _ in range(2):
        with closing(kind(tmp_path / "live.sqlite", "this run")) as book:
            assert book._rows("PRAGMA synchronous") == [(2,)]
