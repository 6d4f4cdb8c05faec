"""Updates that come slowly: each is taken, and no client can keep the others from sending."""

import hashlib
import json
import socket
import time
from contextlib import closing, suppress

import numpy as np
import pytest

from helpers.live import Talker, serving
from tflite_export.device import payload
from tflite_export.device.live import wire
from tfpfl.live import server as server_module
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
