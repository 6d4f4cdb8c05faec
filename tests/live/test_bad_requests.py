"""What a server of live rounds answers to requests that are wrong: a clear status, and the run goes on unharmed."""

import hashlib
import json
import random
import socket
import struct
import time
import zlib

import numpy as np
import psutil
import pytest

from helpers.live import Talker, serving
from helpers.live_fuzzer import Fuzzer
from tflite_export.device import payload
from tflite_export.device.live import wire
from tfpfl.live import server as server_module
from tfpfl.live.rules import Rules


@pytest.fixture
def live(make_run, tmp_path):
    """(run, rounds, tokens, address): everyone is invited to every round."""
    with make_run(tmp_path / "run", participation=1.0) as run:
        with serving(run, Rules(wait_for=10, deadline=1000, max_norm=100.0)) as (address, rounds, tokens):
            yield run, rounds, tokens, address


@pytest.fixture
def talkers(live):
    """All ten clients, joined: round 1 is open, and all are invited."""
    run, rounds, tokens, address = live
    found = [Talker(address) for _ in tokens]
    for client, talker in enumerate(found):
        assert talker.join(run, client, tokens[client])[0] == 200
    assert rounds.view.kind == wire.VISIT and len(rounds.view.waiting) == 10
    return found


def test_who_may_not_join(live):
    run, rounds, tokens, address = live
    talker = Talker(address)
    wrong = {
        401: {"token": "x" * 32},
        409: {"examples": 5},
        400: {"examples": "many"},
    }
    for status, other in wrong.items():
        found, answer = talker.join(run, 0, tokens[0], **other)
        assert found == status and answer["error"], (status, answer)
    for other in ({"protocol": 2}, {"classes": 7}, {"program": "00" * 32}):
        assert talker.join(run, 0, tokens[0], **other)[0] == 409
    for other in ({"key": "AAAA"}, {"key": wire.to_text(b"\x04" + bytes(64))}, {"token": None}, {"classes": True}):
        assert talker.join(run, 0, tokens[0], **other)[0] == 400
    rounds.book.revoke(3, 0.0)
    assert talker.join(run, 3, tokens[3])[0] == 403
    assert talker.join(run, 0, "\ud800" * 9)[0] == 401
    assert talker.send("POST", "/v1/join", b"{}", {"Content-Encoding": "gzip"})[0] == 415
    for body in (b"", b"no", b"[1]", b"{" * 9000, b"[" * 9000, b"\xff\xfe"):
        assert talker.send("POST", "/v1/join", body, {})[0] in (400, 413)
    assert talker.send("POST", "/v1/join", b" " * 50_000, {})[0] == 413
    found = [talker.send("POST", "/v1/join", b"{}", {})[0] for _ in range(31)]
    assert found[0] == 400 and found[-1] == 429  # thirty within a minute are taken
    assert not any(m.key for m in rounds.book.members().values())


def test_a_request_that_is_not_signed_right_is_refused(live, talkers):
    run, rounds, tokens, address = live
    first, second = talkers[:2]
    ask = ("GET", "/v1/work?wait=0")
    good = first.stamp(*ask)
    assert first.send(*ask, headers=good.headers())[0] == 200
    assert "came before" in first.send(*ask, headers=good.headers())[1]["error"]  # a replay
    wrong = {
        "nothing": {},
        "another path": first.stamp("GET", "/v1/work?wait=1").headers(),
        "another method": first.stamp("PUT", ask[1]).headers(),
        "another body": first.stamp(*ask, b"x").headers(),
        "another client's key": second.stamp(*ask)._replace(client="0").headers(),
        "no client": first.stamp(*ask)._replace(client="77").headers(),
        "thousands of digits": first.stamp(*ask)._replace(client="1" * 5000).headers(),
        "zeros": first.stamp(*ask)._replace(client="00").headers(),
        "no number": first.stamp(*ask)._replace(client="-1").headers(),
        "no time": first.stamp(*ask)._replace(time="1e9").headers(),
        "changed time": first.stamp(*ask)._replace(time=str(int(time.time()) + 1)).headers(),
        "short nonce": first.stamp(*ask)._replace(nonce="AAAA").headers(),
        "no signature": first.stamp(*ask)._replace(signature=wire.to_text(bytes(64))).headers(),
        "not base64": first.stamp(*ask)._replace(signature="?" * 88).headers(),
    }
    for name, headers in wrong.items():
        status, answer = first.send(*ask, headers=headers)
        assert status == 401 and answer["error"], name
    for away in (-400, 400):
        first.clock = lambda away=away: time.time() + away
        answer = first.send(*ask)[1]
        assert "clock" in answer["error"] and abs(answer["time"] - time.time()) < 60
    first.clock = lambda: time.time() - 200  # the server is not as old
    assert "before the server started" in first.send(*ask)[1]["error"]
    first.clock = time.time
    rounds.book.revoke(0, 0.0)
    rounds.refresh()
    assert first.send(*ask)[0] == 403


def test_an_update_that_cannot_be_used_is_refused_and_a_good_one_counts_once(live, talkers):
    run, rounds, _, _ = live
    talker, size = talkers[4], run.model.num_backbone_weights
    gradient = np.full(size, 1e-3, np.float32)
    n = int(run.population.info(4).num_examples)
    about = {"theta": rounds.view.theta, "examples": n, "loss": 0.5, "scores": []}

    def answer(about=about, sent=None, number=1, body=None):
        sent = payload.encode(gradient) if sent is None else sent
        return talker.send("PUT", f"/v1/update/{number}", wire.pack(about, sent) if body is None else body)[0]

    score = {"split": "test", "examples": int(run.federation.num_examples("test")[4]), "loss": 0.5, "score": 0.5}
    assert answer(about | {"theta": "00" * 32}) == 409
    assert answer(number=2) == 409
    assert answer(number=10**9) == 404
    assert answer(number=0) == 410
    assert answer(about | {"examples": n + 1}) == 422
    for other in ({"loss": float("nan")}, {"loss": None}, {"scores": {}}, {"scores": [1]}, {"scores": [score] * 2}):
        assert answer(about | other) == 400, other
    for other in ({"split": "all"}, {"examples": 0.5}, {"score": 1.5}, {"loss": float("inf")}):
        assert answer(about | {"scores": [score | other]}) == 400, other
    assert answer(about | {"scores": [score | {"examples": 10**6}]}) == 422
    assert answer(sent=payload.encode(np.full(size + 1, 1e-3, np.float32))) == 422
    assert answer(sent=payload.encode(np.full(size, 10.0, np.float32))) == 422  # longer than max_norm
    bad = bytearray(payload.encode(gradient))
    bad[16:20] = struct.pack("<f", float("nan"))
    assert answer(sent=bytes(bad)) == 422  # the checksum
    bad[12:16] = struct.pack("<I", zlib.crc32(bytes(bad[16:])))
    assert answer(sent=bytes(bad)) == 422  # NaN
    whole = wire.pack(about, payload.encode(gradient))
    for body in (b"\x00", whole[:3], whole[:20], whole[:-1], struct.pack("<I", 2**32 - 1) + whole[4:]):
        assert answer(body=body) in (400, 422), body[:20]
    assert answer(body=whole + bytes(40_000)) == 413
    assert rounds.view.waiting == frozenset(range(10)) and run.store.round_num == 0
    assert answer() == 200 and answer() == 200  # the same bytes again
    assert answer(about | {"loss": 0.6}) == 409  # others
    assert rounds.view.waiting == frozenset(range(10)) - {4} and list(rounds.book.bodies(1)) == [4]
    scores = json.dumps({"theta": rounds.view.theta, "scores": []}).encode()
    assert talker.send("PUT", "/v1/score/1", scores)[0] == 410


def test_an_update_that_was_replaced_on_its_way_is_refused(live, talkers):
    """The client signs the hash of its update. Another update, good by itself, does not fit the hash."""
    run, rounds, _, _ = live
    talker, size, target = talkers[4], run.model.num_backbone_weights, "/v1/update/1"
    n = int(run.population.info(4).num_examples)
    about = {"theta": rounds.view.theta, "examples": n, "loss": 0.5, "scores": []}
    own, other = (wire.pack(about, payload.encode(np.full(size, value, np.float32))) for value in (1e-3, -1e-3))

    def signed(announced):
        digest = hashlib.sha256(announced).hexdigest()
        return talker.stamp("PUT", target, own).headers() | {wire.BODY: digest}

    status, found = talker.send("PUT", target, other, signed(own))
    assert status == 400 and "was changed on its way" in found["error"]
    status, found = talker.send("PUT", target, other, signed(other))  # nor can its hash be replaced
    assert status == 401 and "changed on its way" in found["error"]
    assert rounds.book.bodies(1) == {} and rounds.view.waiting == frozenset(range(10))
    assert talker.send("PUT", target, own)[0] == 200  # and the client sends it again
    assert rounds.book.bodies(1) == {4: own}


def test_strange_paths_and_methods(live, talkers):
    talker = talkers[0]
    for target in (
        "/v1/theta/" + "0" * 64,
        "/v1/bundle/..%2Ftokens.json",
        "/v1/bundle/nothing",
        "/tokens.json",
        "/v2/work",
    ):
        assert talker.send("GET", target)[0] in (404, 410), target
    assert talker.send("DELETE", "/v1/work")[0] == 405
    for wait in ("nan", "-5", "inf"):
        assert talker.send("GET", f"/v1/work?wait={wait}")[0] == 200  # there is work, so nothing waits
    assert talker.send("GET", "/v1/work?wait=long")[0] == 400
    assert talker.send("GET", "/v1/health", headers={})[1] == {"protocol": 1, "round": 1, "doing": "visit"}
    assert b"tfpfl_waiting 10.0" in talker.send("GET", "/metrics", headers={})[1]


@pytest.mark.slow
def test_slow_and_broken_connections_are_closed_and_others_are_served(live, talkers, monkeypatch):
    """Half of them never end a head, half never a body. The time for a head begins when the client connects."""
    monkeypatch.setattr(server_module, "SLOWEST_HEAD", 4.0)
    monkeypatch.setattr(server_module, "SLOWEST_BODY", 3.0)
    host, port = talkers[0].place.split(":")
    headers = talkers[0].stamp("PUT", "/v1/score/1", b"x" * 100).headers()
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    begun = b"GET /v1/work HTTP/1.1\r\nHost: x\r\nX-Slow: "
    whole = f"PUT /v1/score/1 HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n{head}\r\nx".encode()
    slow = []
    for number in range(40):
        slow.append(socket.create_connection((host, int(port)), timeout=60))
        slow[-1].sendall(begun if number < 20 else whole)  # at once: a busy machine may take seconds for all forty
    assert talkers[1].send("GET", "/v1/work?wait=0")[0] == 200
    for connection in slow[:20]:
        assert connection.recv(1000) == b""  # closed
    for connection in slow[20:]:
        assert b" 408 " in connection.recv(1000).partition(b"\r\n")[0] + b" "
    for connection in slow:
        connection.close()
    assert talkers[1].send("GET", "/v1/work?wait=0")[0] == 200


@pytest.mark.parametrize("cases", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_request_makes_the_server_fail(make_run, tmp_path, cases, caplog):
    with make_run(tmp_path / "run", participation=1.0) as run:
        rules = Rules(wait_for=10, deadline=1e6, max_norm=100.0, joins=10**9)
        with serving(run, rules) as (address, rounds, tokens):
            talkers = [Talker(address) for _ in tokens]
            for client, talker in enumerate(talkers):
                assert talker.join(run, client, tokens[client])[0] == 200
            before = 0
            fuzzer, found = Fuzzer(random.Random(1), run, rounds, talkers, tokens), {}
            for case in range(cases):
                status, body = fuzzer.one()
                found[status] = found.get(status, 0) + 1
                assert status < 500, body
                assert b"Traceback" not in body and str(run.folder).encode() not in body
                if case == cases // 2:
                    before = psutil.Process().memory_info().rss
            grown = psutil.Process().memory_info().rss - before
            assert rounds.view.waiting == frozenset(range(10)) and run.store.round_num == 0
            assert not rounds.book.bodies(1) and talkers[0].send("GET", "/v1/work?wait=0")[1]["kind"] == "visit"
    assert set(found) >= {200, 400, 401, 404, 409} and not caplog.records, found
    assert grown < 30e6, f"{grown / 1e6:.0f} MB more after {cases // 2} requests"
