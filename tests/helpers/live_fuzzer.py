"""Damages requests of live rounds in many ways."""

import hashlib
import http.client
import json

import numpy as np

from tflite_export.device import payload
from tflite_export.device.live import wire


def damaged(draw, content):
    """Bytes with one thing wrong: a bit, a part that is missing or twice, other bytes, or nothing."""
    content, how = bytearray(content), draw.randrange(6)
    if how == 0 and content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif how == 1:
        del content[draw.randrange(len(content) + 1) :]
    elif how == 2:
        place = draw.randrange(len(content) + 1)
        content[place:place] = content[place : place + draw.randrange(200)]
    elif how == 3:
        place = draw.randrange(len(content) + 1)
        content[place : place + 8] = draw.randbytes(draw.randrange(16))
    elif how == 4:
        return draw.randbytes(draw.randrange(300))
    return bytes(content)


def strange(draw, value):
    """A JSON value with one entry that is something else."""
    others = [None, True, -1, 0, 1e400, 2**70, "", "x" * 500, [], {}, [[]], {"a": 1}, "\x00", "é", "\ud800"]
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        if draw.random() < 0.2:
            return {k: v for k, v in value.items() if k != name}
        return value | {name: strange(draw, value[name]) if draw.random() < 0.5 else draw.choice(others)}
    return draw.choice(others)


class Fuzzer:
    """Sends requests that are damaged in many ways, most of them with a right signature."""

    def __init__(self, draw, run, rounds, talkers, tokens):
        self.draw, self.run, self.rounds, self.talkers, self.tokens = draw, run, rounds, talkers, tokens
        self.connection = None

    def one(self):
        """Sends one request. Returns the status and the body of the answer."""
        draw = self.draw
        client = draw.randrange(len(self.talkers))
        talker = self.talkers[client]
        method, target, body = draw.choice([self.join, self.work, self.update, self.score, self.other])(client)
        if draw.random() < 0.2:
            text = damaged(draw, target.encode()).decode("latin1")
            target = "/" + "".join(c for c in text if c in "/?=.%" or (c.isascii() and c.isalnum()))
        if draw.random() < 0.05:
            method = draw.choice(["GET", "PUT", "POST", "DELETE", "PATCH", "HEAD", "BREW"])
        headers = {} if target.startswith("/v1/join") else talker.stamp(method, target, body).headers()
        if headers:
            headers[wire.BODY] = hashlib.sha256(body).hexdigest()
        if headers and draw.random() < 0.2:
            name = draw.choice(list(headers))
            text = damaged(draw, headers[name].encode()).decode("latin1")
            headers[name] = "".join(c for c in text if c.isprintable())
        if self.connection is None:
            self.connection = http.client.HTTPConnection(talker.place, timeout=30)
        try:
            self.connection.request(method, target, body or None, {k: v.encode("latin1") for k, v in headers.items()})
            answer = self.connection.getresponse()
            found = answer.status, answer.read()
        except (http.client.HTTPException, ConnectionError):
            found = 0, b""  # the server has closed the connection in the middle of a body that is too large
        if found[0] in (0, 400, 408, 413):
            self.connection.close()
            self.connection = None
        return found

    def join(self, client):
        info = self.run.population.info(client)
        about = {"protocol": 1, "token": self.tokens[client], "examples": int(info.num_examples)}
        about |= {"classes": int(info.num_classes), "key": self.talkers[client].signer.public}
        about = strange(self.draw, about)
        return "POST", "/v1/join", self.maybe_damaged(json.dumps(about).encode())

    def work(self, _):
        return "GET", f"/v1/work?wait={self.draw.choice(['0', '0.01', '-1', 'nan', '1e999', 'x', ''])}", b""

    def about(self, client):
        return {
            "theta": self.draw.choice([self.rounds.view.theta, "00" * 32]),
            "examples": int(self.run.population.info(client).num_examples),
            "loss": 0.5,
            "scores": [{"split": "test", "examples": 3, "loss": 0.1, "score": 0.5}],
        }

    def update(self, client):
        about = self.about(client)
        size = self.run.model.num_backbone_weights + self.draw.choice([0, 0, 0, 1, -1])
        gradient = np.full(size, self.draw.choice([1e-3, 1e3]), np.float32)
        sent = payload.encode(gradient, self.draw.choice(payload.KINDS))
        if about["theta"] == self.rounds.view.theta:  # something else is wrong, so that no update is accepted
            about = strange(self.draw, about | {"examples": -5})
        body = wire.pack(about if isinstance(about, dict) else {"x": about}, sent)
        return "PUT", f"/v1/update/{self.draw.choice([0, 1, 1, 2, 99999])}", self.maybe_damaged(body)

    def score(self, client):
        about = strange(self.draw, self.about(client))
        return "PUT", f"/v1/score/{self.draw.choice([0, 1, 2])}", self.maybe_damaged(json.dumps(about).encode())

    def other(self, _):
        names = ["theta/" + "0" * 64, f"theta/{self.rounds.view.theta}", "head", "bundle/manifest.json", "bundle/.."]
        return "GET", f"/v1/{self.draw.choice(names)}", b""

    def maybe_damaged(self, body):
        return damaged(self.draw, body) if self.draw.random() < 0.5 else body
