"""Slow devices: each update is taken, no client can keep the others from sending, and what nobody reads is dropped."""

import asyncio
import hashlib
import json
import socket
import threading
import time
from contextlib import closing, suppress

import numpy as np
import pytest

from helpers.live import Talker, serving
from tflite_export.device import payload
from tflite_export.device.live import wire
from tfpfl.live import server as server_module
from tfpfl.live import thetas
from tfpfl.live.rules import Rules


class Uploading:
    """A client's update of round 1 whose body is sent in parts."""

    def __init__(self, talker, rounds):
        gradient = np.full(rounds.model.num_backbone_weights, 1e-3, np.float32)
        n = int(rounds.population.info(talker.client).num_examples)
        about = {"theta": rounds.view.theta, "examples": n, "loss": 0.5, "scores": []}
        self.body, target = wire.pack(about, payload.encode(gradient)), "/v1/update/1"
        headers = talker.stamp("PUT", target, self.body).headers()
        headers |= {wire.BODY: hashlib.sha256(self.body).hexdigest(), "Content-Length": len(self.body), "Host": "x"}
        host, port = talker.place.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.socket.sendall(f"PUT {target} HTTP/1.1\r\n{head}\r\n".encode() + self.body[:100])

    def answer(self):
        """(status, JSON) of the answer."""
        found = b""
        while b"\r\n\r\n" not in found or not found.endswith(b"}"):
            assert (more := self.socket.recv(10_000)), found
            found += more
        return int(found.split(b" ")[1]), json.loads(found.partition(b"\r\n\r\n")[2])


@pytest.fixture
def live(make_run, tmp_path):
    """(rounds, the ten clients, who have joined and are invited to round 1)."""
    with make_run(tmp_path / "run", participation=1.0) as run:
        with serving(run, Rules(wait_for=10, deadline=1000)) as (address, rounds, tokens):
            talkers = [Talker(address) for _ in tokens]
            for client, talker in enumerate(talkers):
                assert talker.join(run, client, tokens[client])[0] == 200
            yield rounds, talkers


@pytest.mark.slow
def test_a_large_update_may_take_long_as_long_as_something_comes(live, monkeypatch):
    """As over a slow uplink: 50 MB need 80 seconds at 5 Mbit/s. One that has stopped is given up."""
    monkeypatch.setattr(server_module, "SLOWEST_BODY", 6.0)
    rounds, talkers = live
    with closing(Uploading(talkers[0], rounds).socket) as stopped:
        sending = Uploading(talkers[1], rounds)
        for part in range(6):
            time.sleep(1.1)  # a fifth of it, so that a busy machine does not matter
            sending.socket.sendall(sending.body[100 + 100 * part : 200 + 100 * part])
        sending.socket.sendall(sending.body[700:])
        assert sending.answer() == (200, {"counted": True, "round": 1})
        sending.socket.close()
        assert b" 408 " in stopped.recv(1000)


def test_a_client_sends_one_update_at_a_time(live):
    """Otherwise one that never ends its updates could take all the places that there are."""
    rounds, talkers = live
    first = Uploading(talkers[0], rounds)
    others = [Uploading(talkers[0], rounds) for _ in range(server_module._LARGE_AT_ONCE + 5)]
    for other in others:
        status, about = other.answer()
        assert status == 429 and "on its way already" in about["error"]
        other.socket.close()
    good = Uploading(talkers[1], rounds)
    good.socket.sendall(good.body[100:])
    assert good.answer()[0] == 200
    first.socket.sendall(first.body[100:])
    assert first.answer()[0] == 200
    Uploading(talkers[2], rounds).socket.close()
    for _ in range(300):  # one whose connection is lost may be sent again, when the server has seen that it is
        again = Uploading(talkers[2], rounds)
        with suppress(ConnectionError):  # a refusal may close the connection before the rest is sent
            again.socket.sendall(again.body[100:])
            status, _ = again.answer()
            if status != 429:
                break
        again.socket.close()
        time.sleep(0.2)
    assert status == 200
    for done in (first, good, again):
        done.socket.close()


def test_an_update_keeps_its_place_until_it_is_written(live, monkeypatch):
    """While the server is busy with a step or a commit, updates that have come wait for it in memory."""
    rounds, talkers = live
    busy, go, update = threading.Event(), threading.Event(), rounds.update

    def slow(*given):
        busy.set()
        assert go.wait(60)
        return update(*given)

    monkeypatch.setattr(rounds, "update", slow)
    first = Uploading(talkers[0], rounds)
    first.socket.sendall(first.body[100:])
    assert busy.wait(60)
    second = Uploading(talkers[0], rounds)
    status, about = second.answer()
    assert status == 429 and "on its way already" in about["error"]
    go.set()
    assert first.answer() == (200, {"counted": True, "round": 1})
    third = Uploading(talkers[0], rounds)  # its place is free again
    third.socket.sendall(third.body[100:])
    assert third.answer() == (200, {"counted": True, "round": 1})
    for one in (first, second, third):
        one.socket.close()


class Writer:
    """What aiohttp gives an answer to write to; it notes what is copied."""

    def __init__(self, blocks=False):
        self.pieces, self.transport, self.is_aborted, self._blocks = [], self, False, blocks

    def abort(self):
        self.is_aborted = True

    async def write(self, piece):
        if self._blocks:
            await asyncio.sleep(60)
        self.pieces.append(bytes(piece))


def test_answers_share_their_theta():
    content = np.random.default_rng(0).bytes(thetas._PIECE * 2 + 5)
    body, writer = thetas.Shared(b"head", content), Writer()
    asyncio.run(body.write(writer))
    assert b"".join(writer.pieces) == b"head" + content and body.size == len(content) + 4
    assert max(map(len, writer.pieces)) == thetas._PIECE and not writer.is_aborted


def test_a_device_that_does_not_read_an_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr(thetas, "_SLOWEST_PIECE", 0.01)
    writer = Writer(blocks=True)
    with pytest.raises(ConnectionResetError, match="no more of an answer was read in 0.01 s"):
        asyncio.run(thetas.Shared(b"x").write(writer))
    assert writer.is_aborted


@pytest.mark.parametrize("target", ["/v1/theta/{}", "/v1/work?wait=0&have=none"])
def test_its_connection_ends_and_others_get_the_whole_theta(live, monkeypatch, target):
    rounds, talkers = live
    monkeypatch.setattr(thetas, "_SLOWEST_PIECE", 0.5)
    is_cut_off, write = threading.Event(), thetas.Shared.write

    async def written(*given):
        try:
            await write(*given)
        except ConnectionResetError:
            is_cut_off.set()
            raise

    monkeypatch.setattr(thetas.Shared, "write", written)
    content = np.random.default_rng(0).bytes(40_000_000)  # more than sockets hold
    rounds.thetas = {rounds.view.theta: content}
    target = target.format(rounds.view.theta)
    head = "".join(f"{n}: {v}\r\n" for n, v in (talkers[0].stamp("GET", target).headers() | {"Host": "x"}).items())
    host, port = talkers[0].place.split(":")
    with closing(socket.socket()) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect((host, int(port)))
        lazy.sendall(f"GET {target} HTTP/1.1\r\n{head}\r\n".encode())
        assert is_cut_off.wait(60)
        lazy.settimeout(60)
        assert sum(map(len, iter(lambda: lazy.recv(1_000_000), b""))) < len(content)  # what was on its way, and the end
    status, found = talkers[1].send("GET", target)
    assert status == 200 and found[-len(content) :] == content


def test_the_json_of_an_update_is_short(live):
    """Read, it takes many times its size in memory."""
    rounds, talkers = live
    long = wire.pack({"theta": "x" * 17_000}, b"")
    status, about = talkers[0].send("PUT", "/v1/update/1", long)
    assert status == 400 and "the JSON of a body has at most 16384 bytes, and this one 17013" in about["error"]
