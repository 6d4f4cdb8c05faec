"""What everyone who can open the page sees of live rounds: numbers of clients, never which."""

import asyncio
import http.client
import json
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from helpers.live import join, score, send, serving
from tflite_export.device.layout import BROWSER_PROGRAM, HEAD, MANIFEST, THETA
from tfpfl.live import shown as module
from tfpfl.live.page import LivePage
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Rules
from tfpfl.live.shown import Shown
from tfpfl.live.watch import Watch

TOKEN = "an-operators-token-of-a-test"


def names(found) -> set:
    """The names of all entries, however deep."""
    if isinstance(found, list):
        return set().union(*map(names, found))
    return set(found).union(*map(names, found.values())) if isinstance(found, dict) else set()


@pytest.mark.slow
def test_it_says_how_many_are_here_rounds_and_bytes_and_names_no_client(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_ROUNDS", 2)
    with make_run(tmp_path / "run", participation=1.0, rounds=20, evaluate_every=2) as run:
        rounds = LiveRounds(run, Rules(wait_for=9, deadline=10, awake=25), 0.0)
        watch, made = Watch(rounds, TOKEN), []

        async def written(function):
            made.append(function)
            return function()

        now = 1.0
        shown = Shown(watch, lambda: now, written)

        def ask(at, since=0):
            nonlocal now
            now = at
            return asyncio.run(shown.state(since))

        join(rounds, range(8))
        found = ask(1.0)
        assert (found["doing"], found["saved"], found["rounds"], found["clients"]) == ("none", 0, 20, 10)
        assert found["counts"] == {"late": 0, "working": 0, "sent": 0, "here": 8}
        assert found["round"] is None and found["history"] == []
        join(rounds, [8], now=2.0)  # round 1 opens
        for i in range(7):
            send(rounds, i, now=3.0)
        found = ask(4.0)
        assert found["round"] == {"number": 1, "invited": 9, "came": 7}
        assert found["counts"] == {"late": 0, "working": 2, "sent": 7, "here": 0}
        before = len(made)
        assert ask(4.2) == found and ask(4.4) == found and len(made) == before  # made once for many visitors
        rounds.tick(12.0)
        for i in range(9):
            send(rounds, i, now=13.0)
        for i in range(9):
            score(rounds, i, 14.0, value=i / 8)
        for i in range(9):
            send(rounds, i, now=15.0)
        found = ask(16.0)
        size = run.model.num_backbone_weights
        assert [row["round"] for row in found["history"]] == [1, 2]  # the others are asked for with the last one
        assert [row["clients"] for row in found["history"]] == [7, 9]
        assert [row["score"] for row in found["history"]] == [None, pytest.approx(0.5)]
        assert found["history"][0]["bytes_down"] == 9 * 4 * size
        assert [row["round"] for row in ask(16.1, since=2)["history"]] == [3] and ask(16.2, since=9)["history"] == []
        assert found["bytes"] == {
            way: sum(row[f"bytes_{way}"] for since in (0, 2) for row in ask(16.3, since)["history"])
            for way in ("up", "down")
        }
        assert not names(found) & {"client", "members", "waiting", "events", "heard", "id", "loss"}
        assert not [name for name in run.federation.client_names if name in json.dumps(found)]
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        rounds.close()


@pytest.fixture
def page(tmp_path):
    """A page as it is built, with a bundle."""
    folder, bundle = tmp_path / "page", tmp_path / "bundle"
    folder.mkdir()
    bundle.mkdir()
    (folder / "index.html").write_text("<title>page</title>")
    for name in (MANIFEST, BROWSER_PROGRAM, THETA, HEAD):
        (bundle / name).write_bytes(name.encode())
    return LivePage(folder, bundle)


@pytest.mark.parametrize("there", ["page and watch", "page", "watch"])
def test_a_server_with_a_page_shows_it_to_everyone(run, page, there):
    how = {"page": (lambda bundles: page) if "page" in there else None, "watch": TOKEN if "watch" in there else None}
    with serving(run, **how) as (address, _, tokens):

        def ask(target, method="GET"):
            with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
                connection.request(method, target)
                answer = connection.getresponse()
                return answer.status, answer.headers, answer.read()

        status, headers, body = ask("/v1/shown?since=0")
        if there != "page and watch":
            assert status == 404
            return
        assert status == 200 and headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers
        assert json.loads(body)["clients"] == 10
        assert not [token for token in (TOKEN, *tokens.values()) if token.encode() in body]
        for since in ("-1", "x", "1e3", "9" * 20):
            assert ask(f"/v1/shown?since={since}")[0] == 400
        assert ask("/v1/shown", "POST")[0] == 405
