"""What an operator sees of live rounds: the state behind a token, its page, and `tfpfl watch`."""

import asyncio
import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from rich.console import Console

from helpers.live import Talker, device, join, score, send, serving
from tflite_export.device import payload
from tflite_export.device.live import wire
from tflite_export.device.live.client import ServerError
from tfpfl.checks import InvalidArgument, Unavailable
from tfpfl.cli import main
from tfpfl.live import watch as module
from tfpfl.live.async_rounds import AsyncRounds
from tfpfl.live.demo import processes, start_server
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused, Rules
from tfpfl.live.shown import Shown
from tfpfl.live.watch import Watch, operator_token
from tfpfl.live.watch_table import WatchTable
from tfpfl.live.watching import STATES, WatchedServer
from tfpfl.models import tree

TOKEN = "an-operators-token-of-a-test"


def states(found):
    return {row["client"]: row["state"] for row in found["members"]}


@pytest.mark.slow
def test_the_state_says_who_is_here_who_is_late_bytes_and_curves(make_run, tmp_path):
    with make_run(tmp_path / "run", participation=1.0, rounds=20, evaluate_every=2) as run:
        rounds = LiveRounds(run, Rules(wait_for=9, deadline=10, awake=25), 0.0)
        watch = Watch(rounds, TOKEN)
        join(rounds, range(8))
        found = watch.state(0, 1.0)
        assert (found["doing"], found["saved"], found["round"], found["history"]) == ("none", 0, None, [])
        assert states(found) == dict.fromkeys(range(8), "here") | {8: "not joined", 9: "not joined"}
        assert found["counts"] == dict.fromkeys(STATES, 0) | {"here": 8, "not joined": 2}
        join(rounds, [8], now=2.0)  # round 1 opens
        for i in range(7):
            send(rounds, i, now=3.0, loss=0.25)
        found = watch.state(0, 6.0)
        assert states(found) == dict.fromkeys(range(7), "sent") | {7: "working", 8: "working", 9: "not joined"}
        expected = {"number": 1, "began": 2.0, "deadline": 12.0, "moved": False, "came": list(range(7))}
        assert found["round"] == expected | {"invited": list(range(9)), "waiting": [7, 8]}
        found = watch.state(0, 7.5)
        assert [row["client"] for row in found["members"][:2]] == [7, 8]  # who needs a look comes first
        assert states(found)[7] == "late" and found["counts"]["late"] == 2
        rounds.tick(12.0)
        found = watch.state(0, 12.1)
        assert found["saved"] == 1 and found["round"]["number"] == 2
        (row,) = found["history"]
        size = run.model.num_backbone_weights
        assert (row["round"], row["clients"], row["dropped"], row["loss"], row["scores"]) == (1, 7, 2, 0.25, {})
        assert row["bytes_down"] == 9 * 4 * size and row["bytes_up"] == found["bytes"]["up"] > 7 * 4 * size
        for i in range(9):
            send(rounds, i, now=13.0)
        assert rounds.view.kind == wire.SCORE
        for i in range(6):
            score(rounds, i, 14.0, value=i / 10)
        found = watch.state(1, 14.5)
        assert found["doing"] == "score" and found["round"]["waiting"] == [6, 7, 8] and found["history"] == []
        assert states(found)[0] == "sent" and states(found)[6] == "working"
        rounds.tick(24.0)
        found = watch.state(1, 24.1)
        (row,) = found["history"]
        assert row["scores"] == {"personal": {"score": pytest.approx(0.25), "loss": pytest.approx(0.25)}}
        assert {m["client"]: m["score"] for m in found["members"]}[5] == 0.5
        for i in (0, 1):
            send(rounds, i, now=25.0)
        rounds.tick(34.0)
        rounds.book.revoke(1, 35.0)
        rounds.refresh()
        found = watch.state(2, 41.0)
        assert found["round"]["moved"] and found["round"]["deadline"] == 44.0
        # 0 was heard of 16 s ago; 2 to 5 when they scored, and the round waits for them; they are not awake any more
        assert states(found) == {0: "sent", 1: "revoked", 9: "not joined"} | dict.fromkeys(range(2, 9), "late")
        assert [e["what"] for e in found["events"]][-2:] == ["extended", "revoked"] and len(found["events"]) == 30
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        rounds.close()


def test_scores_that_come_late_are_shown(make_run, tmp_path, monkeypatch):
    """Of asynchronous rounds: one slow client is waited for while the others make any number of steps."""
    monkeypatch.setattr(module, "MOST_ROUNDS", 33)
    with make_run(tmp_path / "run", participation=1.0, rounds=60, evaluate_every=5) as run:
        rounds = AsyncRounds(run, Rules(buffer=1, wait_for=10, deadline=1e6, awake=1e6), 0.0)
        join(rounds, range(10))
        watch = Watch(rounds, TOKEN)
        at = iter(range(10, 10**6))
        server = WatchedServer("http://127.0.0.1:1", TOKEN)
        server._asked = lambda target: json.loads(json.dumps(watch.state(int(target.partition("=")[2]), next(at))))

        def step():
            while (work := rounds.work(0, 1.0))["kind"] == wire.SCORE:
                scored(0, work["round"], work["theta"])
            gradient = np.zeros(rounds.model.num_backbone_weights, np.float32)
            n = int(rounds.population.info(0).num_examples)
            about = {"theta": work["theta"], "examples": n, "loss": 0.5, "scores": []}
            rounds.update(0, work["round"], wire.pack(about, payload.encode(gradient)), 1.0)

        def scored(client, number, theta):
            examples = int(run.federation.num_examples("test")[client])
            rows = [{"split": "test", "examples": examples, "loss": 0.25, "score": 0.5}]
            rounds.score(client, number, {"theta": theta, "scores": rows}, 2.0)

        async def written(function):
            return function()

        assert server.state()["scoring"] is None
        for _ in range(40):
            step()
        found = server.state()
        assert found["scoring"] == 5 and len(found["history"]) == 40 and not any(r["scores"] for r in found["history"])
        page = Shown(watch, lambda: next(at), written)
        assert asyncio.run(page.state(0))["scoring"] == 5
        for client in range(1, 10):  # the scores of steps 5 and 10 come at last
            for number in (5, 10):
                scored(client, number, rounds._scoring[number].theta)
        for _ in range(3):
            step()
        for _ in range(2):
            found = server.state()
            assert [row["round"] for row in found["history"]] == list(range(1, 44)) and found["scoring"] == 15
            assert [row["round"] for row in found["history"] if row["scores"]] == [5, 10]
        assert [row["round"] for row in watch.history if row["scores"]] == [5, 10]
        rounds.close()


def test_the_model_that_clients_predict_with_is_shown_before_the_one_that_they_share(run):
    """As of Ditto, whose history names the shared model first."""
    rounds = LiveRounds(run, Rules(wait_for=2), 0.0)
    row = {"round": 1, "clients": 2, "loss": 0.5, "seconds": 0.1}
    scores = {"global test accuracy": 0.75, "local copy test accuracy": 0.25, "personal test accuracy": 0.5}
    run.store.commit_round(1, tree.arrays(run.training().server_state()), {}, row | scores)
    watch = Watch(rounds, TOKEN)
    found = watch.state(0, 1.0)
    text = shown(found)
    assert "accuracy, all clients" in text and text.count("all clients") == 1
    assert re.search("all clients .*50.0 %", text) and re.search("shared model .*75.0 %", text)
    assert list(found["history"][0]["scores"]) == ["personal", "global", "local copy"]
    rounds.close()


def test_asynchronous_rounds_begin_with_the_first_and_end_with_the_last(make_run, tmp_path):
    with make_run(tmp_path / "run", participation=1.0, rounds=1, evaluate_every=1) as run:
        rounds = AsyncRounds(run, Rules(buffer=1, wait_for=10), 0.0)
        join(rounds, range(10))
        found = Watch(rounds, TOKEN).state(0, 0.5)
        assert found["round"]["number"] == 1 and {e["what"] for e in found["events"]} == {"joined"}
        theta, n = rounds.work(0, 1.0)["theta"], int(rounds.population.info(0).num_examples)
        about = {"theta": theta, "examples": n, "loss": 0.5, "scores": []}
        rounds.update(0, 1, wire.pack(about, payload.encode(np.zeros(rounds.update_size, np.float32))), 1.0)
        found = Watch(rounds, TOKEN).state(0, 1.5)
        assert (found["doing"], found["saved"], found["round"]["number"]) == ("score", 1, 1)
        assert "Round 1 is saved; devices score its theta" in shown(found)
        rounds.close()


def test_many_clients_and_rounds_are_told_in_parts(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_MEMBERS", 4)
    monkeypatch.setattr(module, "MOST_ROUNDS", 2)
    with make_run(tmp_path / "run", participation=1.0, rounds=15, evaluate_every=0) as run:
        rounds = LiveRounds(run, Rules(), 0.0)
        join(rounds, [0])
        for t in range(5):
            send(rounds, 0, now=float(t))
        watch = Watch(rounds, TOKEN)
        found = watch.state(0, 5.0)
        assert len(found["members"]) == 4 and found["left_off"] == 6 and found["members"][0]["client"] == 0
        assert [row["round"] for row in found["history"]] == [1, 2]
        assert [row["round"] for row in watch.state(4, 5.1)["history"]] == [5]
        assert watch.state(9, 5.2)["history"] == []
        assert [row["round"] for row in run.store.history(since=3)] == [4, 5] and len(run.store.history()) == 5
        assert watch.state(0, 5.3)["members"] is watch.state(0, 5.4)["members"]  # made once for many watchers
        assert watch.is_watched(15.0) and not watch.is_watched(16.0)
        rounds.close()


def test_the_operators_token_is_kept_and_compared_as_a_whole(make_run, tmp_path):
    token = operator_token(tmp_path)
    path = tmp_path / "operator.token"
    assert operator_token(tmp_path) == token and len(token) == 32 and path.stat().st_mode & 0o777 == 0o600
    with make_run(tmp_path / "run") as run:
        rounds = LiveRounds(run, Rules(), 0.0)
        watch = Watch(rounds, token)
        watch.check(f"Bearer {token}")
        for header in ("", token, f"Basic {token}", "Bearer", "Bearer ", f"Bearer {token[:-1]}", f"Bearer {token}x"):
            with pytest.raises(Refused, match="for the operator") as refused:
                watch.check(header)
            assert refused.value.status == 401
        rounds.close()
    for wrong in ("", "short", "two words and more than that", "ünïcödé-ünïcödé-ünïcödé"):
        path.write_text(wrong)
        with pytest.raises(InvalidArgument, match="holds no token"):
            operator_token(tmp_path)


class Page(HTMLParser):
    """The elements of a page, and the texts inside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.inside, self.ids = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.inside.append(tag)
        self.ids.add(dict(attributes).get("id"))

    def handle_data(self, data):
        assert not (self.inside and self.inside[-1] in ("script", "style") and data.strip()), data


@pytest.fixture
def live(make_run, tmp_path):
    """(run, rounds, {client: token}, address, ask) of a server; ask(target, token) -> (status, headers, body)."""
    with make_run(tmp_path / "run", participation=1.0) as run:
        with serving(run, Rules(wait_for=10, deadline=1000), watch=TOKEN) as (address, rounds, tokens):

            def ask(target, token=None, method="GET"):
                with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
                    connection.request(method, target, headers={"Authorization": f"Bearer {token}"} if token else {})
                    answer = connection.getresponse()
                    return answer.status, answer.headers, answer.read()

            yield run, rounds, tokens, address, ask


def test_the_page_loads_and_asks_its_own_server_only_and_has_no_inline_script(live):
    run, rounds, tokens, address, ask = live
    status, headers, body = ask("/watch")
    page = Page(body.decode())
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'" and "unsafe" not in headers["Content-Security-Policy"]
    assert {policy[f"{what}-src"] for what in ("script", "style", "connect")} == {"'self'"}
    assert {policy[what] for what in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
    loaded = [e.get("src") or e.get("href") for tag, e in page.elements if tag in ("script", "link", "img", "a")]
    assert loaded == ["data:,", "watch/page.css", "watch/page.js"]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith(("on", "style"))]
    kinds = {"page.css": "text/css", "page.js": "text/javascript"}
    for name, kind in kinds.items():
        status, headers, body = ask(f"/watch/{name}")
        assert status == 200 and headers["Content-Type"].startswith(kind) and "default-src" in str(headers)
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", body.decode())
    script = body.decode()
    assert set(re.findall(r"\$\('([\w-]+)'\)", script)) <= page.ids
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", script)
    for target in ("/watch/", "/watch/index.html", "/watch/../tokens.json", "/watch/%2e%2e/server.py"):
        assert ask(target)[0] == 404, target


def test_the_state_is_for_the_operator_only(live):
    run, rounds, tokens, address, ask = live
    for token in (None, "wrong", tokens[0], TOKEN + "x"):
        status, headers, body = ask("/v1/watch", token)
        assert status == 401 and "for the operator" in json.loads(body)["error"]
        assert b"members" not in body and "Access-Control-Allow-Origin" not in headers
    status, headers, body = ask("/v1/watch?since=0", TOKEN)
    found = json.loads(body)
    assert status == 200 and headers["Cache-Control"] == "no-store" and found["run"]["clients"] == 10
    assert TOKEN.encode() not in body and not [token for token in tokens.values() if token.encode() in body]
    for since in ("-1", "x", "1e3", "%D9%A3", "9" * 20):
        assert ask(f"/v1/watch?since={since}", TOKEN)[0] == 400
    assert ask("/v1/watch", TOKEN, "OPTIONS")[0] == 405
    assert ask("/v1/watch", "x" * 7000)[0] == 401


def test_a_server_without_a_watch_has_no_page(run):
    with serving(run) as (address, _, _):
        for target in ("/watch", "/v1/watch"):
            with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
                connection.request("GET", target)
                assert connection.getresponse().status == 404


def test_the_command_prints_a_state_and_ends(live, tmp_path):
    run, rounds, tokens, address, ask = live
    (tmp_path / "operator.token").write_text(TOKEN + "\n")
    talker = Talker(address)
    assert talker.join(run, 3, tokens[3])[0] == 200
    rounds.book.revoke(4, 1.0)
    rounds.refresh()

    def said(*arguments, **environment):
        found = CliRunner().invoke(main, ["watch", *map(str, arguments)], env={"COLUMNS": "100"} | environment)
        return found.exit_code, found.output

    for how in ((address, "--token", TOKEN), (address, "--run", tmp_path), (f"{address}/watch#{TOKEN}",)):
        code, output = said(*how, "--once")
        assert code == 0, output
        assert "0 of 4 rounds are saved" in output and "1 of the 10 clients that it needs have joined" in output
        assert re.search(r"3 .*here", output) and re.search(r"4 .*revoked", output)
        assert output.count("not joined") == 9 and "1 here, 8 not joined, 1 revoked" in output
    assert said(address, "--once", TFPFL_OPERATOR_TOKEN=TOKEN)[0] == 0
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
        wrong = {
            (address, "--token", "x"): "refused (401): this is for the operator",
            (address,): "the operator's token is missing",
            (closed, "--token", "x", "--patience", "0.2"): "does not answer for 0.2 s",
            ("http://example.org", "--token", "x"): "others could read the operator's token",
            ("ftp://x", "--token", "x"): "a server's address is such as",
            (address, "--run", tmp_path / "nothing"): "operator.token",
        }
        for arguments, told in wrong.items():
            for once in (["--once"], []):
                code, output = said(*arguments, *once)
                assert code == 1 and told in " ".join(output.split()), (arguments, output)
                assert "Traceback" not in output and output.count("\n") < 6


def as_in_a_terminal():
    """In a shell's background jobs SIGINT is ignored, and processes that they start inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_ctrl_c_ends_the_command_cleanly(live, monkeypatch):
    address, asked, real = live[3], [], Watch.state
    monkeypatch.setattr(Watch, "state", lambda self, *arguments: (asked.append(1), real(self, *arguments))[1])
    command = [sys.executable, "-m", "tfpfl", "watch", address]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "preexec_fn": as_in_a_terminal}
    environment = {**os.environ, "TFPFL_OPERATOR_TOKEN": TOKEN, "COLUMNS": "100"}
    with subprocess.Popen(command, env=environment, **how) as process:
        try:
            until = time.monotonic() + 120
            while len(asked) < 2 and time.monotonic() < until:  # the second question comes when the first was answered
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            output = process.communicate(timeout=1800)[0].decode()
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert "0 of 4 rounds are saved" in output and "Traceback" not in output


@contextmanager
def answering(*answers):
    """(address, what it got) of a server that gives these (status, headers, body), the last one again and again."""
    left, got = list(answers), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            got.append((self.path, self.headers.get("Authorization")))
            status, headers, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def test_what_another_server_answers_is_an_error_in_one_line():
    strange = [b"", b"no", b"[]", b"{}", b'{"history": 3}', b'{"history": [], "saved": "x"}', b"[" * 100_000]
    for body in strange[:-2] + strange[-1:]:
        with answering((200, {}, body)) as (address, _):
            with pytest.raises(Unavailable, match="not as a server of live rounds does"):
                WatchedServer(address, "t", patience=0).state()
    with answering((404, {}, b"")) as (address, _), pytest.raises(Unavailable, match="is no server of live rounds"):
        WatchedServer(address, "t", patience=0).state()
    with answering((200, {}, b"{}")) as (elsewhere, got):
        with answering((302, {"Location": f"{elsewhere}/v1/watch"}, b"")) as (address, _):
            with pytest.raises(Unavailable, match="302"):
                WatchedServer(address, "the token", patience=0).state()
        assert got == []  # the token went to nobody else


def test_a_server_that_was_away_is_read_on(monkeypatch):
    """Rows of the history come once, in parts; a proxy of the environment does not get the token."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    part = [{"saved": n, "history": [{"round": t} for t in r]} for n, r in ((45, range(1, 31)), (45, range(31, 46)))]
    part.append({"saved": 45, "history": [{"round": t, "scores": {}} for t in range(26, 46)]})
    good = [(200, {}, json.dumps(answer).encode()) for answer in part]
    told = []
    with answering(good[0], (503, {}, b"x"), good[1], good[2]) as (address, got):
        server = WatchedServer(address, "t", patience=60, waiting=lambda *about: told.append(about))
        assert [row["round"] for row in server.state()["history"]] == list(range(1, 46))
        history = server.state()["history"]  # the scores of some came later
        assert [row["round"] for row in history if "scores" in row] == list(range(26, 46)) and len(history) == 45
    assert [path for path, _ in got] == [f"/v1/watch?since={n}" for n in (0, 30, 30, 25)]
    assert {token for _, token in got} == {"Bearer t"} and told[0][0] == "status 503" and 0 < told[0][1] <= 60


def shown(state, width=100, lines=None, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding)
    Console(file=file, width=width).print(WatchTable(state, lines))
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def test_the_table_shows_what_fits_and_never_breaks():
    member = {"name": "[red]x\n\x1b[31m", "invited": 3, "came": 1, "heard": 3700.0, "score": None}
    rows = [member | {"client": i, "state": "late" if i < 2 else "here"} for i in range(30)]
    about = {"name": "run", "rounds": 9, "clients": 30, "wait_for": 1}
    about["score"] = {"name": "accuracy", "fraction": True, "larger_is_better": True}
    history = [{"round": t, "loss": 1 / t, "scores": {}} for t in range(1, 7)]
    history[3]["scores"] = {"personal": {"score": 0.5}, "local copy": {"score": None}}
    opened = {
        "number": 7,
        "began": 0.0,
        "deadline": 90.0,
        "moved": True,
        "came": [5],
        "invited": [0, 1, 5],
        "waiting": [0, 1],
    }
    state = {"run": about, "doing": "visit", "saved": 6, "at": 30.0, "round": opened, "members": rows, "left_off": 5}
    state |= {"counts": {"late": 2, "here": 28}, "bytes": {"up": 12_345_678, "down": 10}, "history": history}
    state["events"] = [
        {"at": 0.0, "what": "arrived", "round": 7, "client": 5},
        {"at": 0.0, "what": "new", "round": 7, "client": None},
    ]
    text = shown(state)
    assert "6 of 9 rounds are saved" in text and "30 of 30 clients are here, 2 late" in text
    assert "Round 7: 1 of 3 updates have come, 60 s are left; the deadline was moved" in text
    assert "10 bytes to devices, 12.3 MB from them" in text and "50.0 % -> 50.0 %" in text and "1 -> 0.1667" in text
    assert "client 5 sent its update of round 7" in text and "round 7 new" in text
    assert "\x1b" not in text and "[red]x" in text and text.count("1 of 3") == 31 and "5 clients are not shown" in text
    small = shown(state, lines=24)
    assert small.count("late ") == 2 and small.count("1 of 3") == 6 and "30 clients are not shown" in small
    alone = {"number": 7, "began": None, "deadline": None, "moved": False, "came": [], "invited": [], "waiting": []}
    assert "Round 7: devices send updates at their own speed" in shown(state | {"round": alone})
    for other in (state | {"doing": "done", "round": None}, state | {"doing": "none", "round": None, "history": []}):
        assert shown(other, width=40, encoding="ascii") and shown(other, width=200)


def listening(process):
    """(address, port) of every socket that waits for others, of a process and those that it started."""
    found = set()
    for one in (process, *process.children(recursive=True)):
        sockets = getattr(one, "net_connections", None) or one.connections  # the older name of psutil
        for kind, states in (("tcp", {psutil.CONN_LISTEN}), ("udp", None)):
            found |= {(kind, *s.laddr) for s in sockets(kind) if states is None or s.status in states}
    return found


def test_a_server_opens_one_port_on_the_loopback(run):
    before = listening(psutil.Process())
    with serving(run, watch=TOKEN) as (address, _, _):
        assert listening(psutil.Process()) - before == {("tcp", "127.0.0.1", urlsplit(address).port)}
    assert listening(psutil.Process()) == before


@pytest.mark.slow
def test_tfpfl_serve_opens_one_port_on_the_loopback_and_says_how_to_watch(run, tmp_path):
    folder = run.folder
    run.close()
    with processes() as started:
        process, address = start_server(folder, tmp_path / "log")
        started.append(process)
        assert listening(psutil.Process(process.pid)) == {("tcp", "127.0.0.1", urlsplit(address).port)}
        found = CliRunner().invoke(main, ["watch", address, "--run", str(folder), "--once"], env={"COLUMNS": "100"})
        assert found.exit_code == 0 and "0 of 4 rounds are saved" in found.output, found.output
        assert listening(psutil.Process(process.pid)) == {("tcp", "127.0.0.1", urlsplit(address).port)}
        log, token = (tmp_path / "log").read_text(), (folder / "operator.token").read_text().strip()
        assert f"tfpfl watch {address} --run {folder}" in log and f"{address}/watch" in log and token not in log


def test_a_revoked_device_is_told_and_the_others_go_on(live, tmp_path):
    run, rounds, tokens, address, ask = live
    found = device(run, address, tmp_path, 3, tokens[3])
    assert found.step(wait=0)
    rounds.book.revoke(3, time.time())
    rounds.refresh()
    with pytest.raises(ServerError, match=r"refused \(403\): the token of client 3 was revoked: ask for a new one"):
        found.step(wait=0)
    found.close()
    with pytest.raises(ServerError, match="403"):  # nor does it come in again
        device(run, address, tmp_path / "again", 3, tokens[3])
    others = [Talker(address) for _ in range(9)]
    for talker, client in zip(others, sorted(set(range(10)) - {3}), strict=True):
        assert talker.join(run, client, tokens[client])[0] == 200
    assert others[0].send("GET", "/v1/work?wait=0")[1]["kind"] == "visit"  # the round has opened without it
    assert rounds.view.waiting == frozenset(range(10)) - {3}
