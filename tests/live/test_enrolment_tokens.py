"""The file tokens.json, which an operator may have changed."""

import json
from contextlib import closing

import numpy as np
import pytest

from tflite_export.device.live import wire
from tfpfl.checks import InvalidArgument
from tfpfl.live import serve as module
from tfpfl.live.book import Book, BookError
from tfpfl.live.serve import serve, write_tokens


@pytest.fixture
def opened(make_run, tmp_path):
    """(run, book, tokens of its clients)."""
    with make_run(tmp_path / "run") as run, closing(Book(tmp_path / "book", run.config.run_id)) as book:
        yield run, book, write_tokens(run, book)


@pytest.mark.parametrize("token", [None, 7, {}, "", "\u00e9\u00e9\u00e9", "x" * 201, "two\nlines"])
def test_a_token_that_no_device_could_show_or_that_all_could_guess_is_refused(opened, token):
    """Otherwise `null`, written to take a token away, would be the token 'None'."""
    run, book, tokens = opened
    (run.folder / "tokens.json").write_text(json.dumps(tokens | {3: token}))
    with pytest.raises(InvalidArgument, match="tokens.json is damaged.*token of client 3 must be a text"):
        write_tokens(run, book)
    assert book.member_with(tokens[3]).client == 3 and book.member_with(str(token)) is None


def test_without_the_file_the_devices_that_have_joined_are_not_shut_out(opened):
    """New tokens were made for all without a word, such as in a copy of the run folder that lacks this file."""
    run, book, tokens = opened
    (run.folder / "tokens.json").unlink()
    assert write_tokens(run, book) != tokens  # nobody has joined
    book.join(4, wire.Signer().public, 1.0)
    kept = (run.folder / "tokens.json").read_text()
    (run.folder / "tokens.json").unlink()
    with pytest.raises(
        InvalidArgument, match=r"tokens.json is missing, and devices have joined .*: put a copy back; or"
    ):
        write_tokens(run, book)
    assert book.members()[4].key is not None and not (run.folder / "tokens.json").exists()
    (run.folder / "tokens.json").write_text(kept)
    assert write_tokens(run, book) == {int(i): token for i, token in json.loads(kept).items()}
    assert book.members()[4].key is not None
    (run.folder / "tokens.json").write_text("{}")
    write_tokens(run, book)
    assert book.members()[4].key is None


def test_a_token_of_two_clients_is_refused(opened):
    run, book, tokens = opened
    (run.folder / "tokens.json").write_text(json.dumps(tokens | {6: tokens[2]}))
    with pytest.raises(InvalidArgument, match="gives clients 2 and 6 the same token"):
        write_tokens(run, book)
    assert book.member_with(tokens[2]).client == 2 and book.member_with(tokens[6]).client == 6


def test_two_clients_may_change_their_tokens(opened):
    """Both have to join again then, and no other client."""
    run, book, tokens = opened
    for client in tokens:
        book.join(client, wire.Signer().public, 0.0)
    (run.folder / "tokens.json").write_text(json.dumps(tokens | {2: tokens[6], 6: tokens[2]}))
    write_tokens(run, book)
    assert book.member_with(tokens[2]).client == 6 and book.member_with(tokens[6]).client == 2
    assert [i for i, member in book.members().items() if member.key is None] == [2, 6]


@pytest.mark.parametrize("named", [list, np.array, iter, lambda ids: [np.int64(i) for i in ids]])
def test_a_client_gets_another_token_however_it_is_named(opened, named):
    run, book, tokens = opened
    again = write_tokens(run, book, named([2]))
    assert [i for i in tokens if again[i] != tokens[i]] == [2] and book.member_with(tokens[2]) is None


@pytest.mark.parametrize("named", [list, np.array, iter, lambda ids: [np.int64(i) for i in ids]])
def test_a_client_is_revoked_however_it_is_named(make_run, tmp_path, named, monkeypatch):
    """SQLite keeps a NumPy number as bytes: the lost device went on taking part."""

    class Served:
        def __init__(self, rounds, *_, **__):
            self.rounds = rounds

        async def run(self, *_):
            members = self.rounds.book.members()
            assert [i for i, member in members.items() if member.revoked] == [2]
            assert [event[2:4] for event in self.rounds.book.events()][-1] == ("revoked", None)
            json.dumps(self.rounds.book.events())  # what operators watch

    monkeypatch.setattr(module, "LiveServer", Served)
    monkeypatch.setattr(module, "bundles_of", lambda run, browser: {})
    with make_run(tmp_path / "run") as run:
        monkeypatch.setattr(run, "write_summary", lambda: None)
        serve(run, revoked=named([2]))


def test_who_is_no_client_cannot_be_revoked(opened):
    run, book, _ = opened
    with pytest.raises(BookError, match="has no client 99: nobody was revoked"):
        book.revoke(99, 1.0)
    assert book.events() == []
    for wrong in ([99], ["2"], [2.0]):
        with pytest.raises(InvalidArgument, match="no client 99|by their ids, whole numbers"):
            write_tokens(run, book, wrong)
