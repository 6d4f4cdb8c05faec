"""The file tokens.json, which an operator may have changed."""

import json
from contextlib import closing

import pytest

from tflite_export.device.live import wire
from tfpfl.checks import InvalidArgument
from tfpfl.live.book import Book
from tfpfl.live.serve import write_tokens


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
