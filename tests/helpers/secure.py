"""Clients of secure aggregation without a network: an attempt in memory, and devices that answer a server's rounds."""

import json
from typing import NamedTuple

import numpy as np

from tflite_export.device import payload
from tflite_export.device.head_file import SavedHead
from tflite_export.device.live import wire
from tflite_export.device.live.secure import exchange
from tflite_export.device.live.secure.masks import Attempt, PrivateKey
from tflite_export.device.live.secure.state import SecureState
from tflite_export.device.live.secure.visits import SecureVisits
from tflite_export.device.live.state import Pending
from tfpfl.live import secure_graph as graph
from tfpfl.live.secure_rounds import SecureRounds
from tfpfl.live.secure_sum import Circle, Shares, open_sum, without_few

FIRST = Attempt("run", 1, 1)


class Told(NamedTuple):
    """What the server holds of an attempt."""

    attempt: Attempt
    circle: Circle
    keys: dict  # {client: Peer}
    masked: dict  # {survivor: uint32 [size]}
    shares: dict  # {client: Shares}

    def opened(self):
        """The sum of the survivors' words."""
        return open_sum(self.attempt, self.circle, self.keys, self.masked, self.shares)


def aggregated(words, gone=(), part=0.5, attempt=FIRST) -> Told:
    """An attempt in memory.

    Args:
        words: {client: uint32 [size]}.
        gone: for each of the four phases, the clients that send nothing in it and later.
        part: see `Rules.threshold`.
        attempt: its name.
    """
    gone = [frozenset().union(*gone[: phase + 1]) for phase in range(4)] if gone else [frozenset()] * 4
    secrets = {i: exchange.Secrets.drawn() for i in words if i not in gone[0]}
    keys = {
        i: exchange.Peer(i, PrivateKey(s.mask).public, PrivateKey(s.share).public) for i, s in sorted(secrets.items())
    }
    near = graph.neighbours(attempt, keys, part)
    limits = {i: graph.threshold_of(len(n), part) for i, n in near.items()}
    boxes = {
        i: exchange.close(attempt, i, secrets[i], [keys[j] for j in near[i]], limits[i])
        for i in keys
        if i not in gone[1]
    }
    boxed = without_few(near, limits, boxes)
    masked, held = {}, {}
    for i in sorted(boxed - gone[2]):
        mine = {j: boxes[j][i] for j in near[i] if j in boxed}
        held[i] = exchange.open_boxes(attempt, i, secrets[i], {j: keys[j] for j in near[i]}, mine)
        masked[i] = exchange.mask(attempt, i, secrets[i], [keys[j] for j in held[i]], words[i])
    circle = Circle(near, limits, boxed, frozenset(masked))
    shares = {}
    for i in sorted(masked.keys() - gone[3]):
        answered = exchange.answer(held[i], [j for j in near[i] if j in masked], limits[i])
        shares[i] = Shares(*answered)
    return Told(attempt, circle, keys, masked, shares)


class Phone:
    """A device of secure rounds that computes no visit: its gradient is given.

    Args:
        rounds: the server's `SecureRounds`.
        client: its number.
        folder: what it keeps.
        gradient: float32 [P].
        loss: what it says.
    """

    def __init__(self, rounds: SecureRounds, client: int, folder, gradient, loss=0.5):
        self.client, self.folder, self.gradient, self.loss = client, folder, gradient, loss
        self.folder.mkdir(exist_ok=True)
        path, info = folder / "key.pem", rounds.info(client)
        self.signer = wire.Signer(path.read_bytes() if path.exists() else None)
        path.write_bytes(self.signer.pem)
        self.about = {"protocol": 1, "examples": int(info.num_examples), "classes": int(info.num_classes), "secure": 1}
        self.about["key"] = self.signer.public
        self.restart()

    def restart(self):
        """The process was killed, and another one begins."""
        self.state = SecureState(self.folder)
        self.visits = SecureVisits(self.state, self.client, self.signer)

    def visit(self, work) -> Pending:
        about = {"theta": work["theta"], "examples": self.about["examples"], "loss": self.loss, "scores": []}
        head = SavedHead(np.zeros((2, 2), np.float32), np.zeros(2, np.float32), "00" * 32)
        return Pending(work["round"], wire.pack(about, payload.encode(self.gradient)), head)

    def body(self, work) -> bytes:
        """The message that answers this work."""
        if work["kind"] == wire.KEYS:
            self.state.keep_visit(self.visit(work))
        return self.visits.message(work, self.state.visit(2, 2) if work["kind"] != wire.SHARES else None)

    def step(self, rounds: SecureRounds, now) -> dict | None:
        """Asks for work and answers it. Returns the work."""
        work = rounds.work(self.client, now)
        if work is None or work["kind"] not in wire.PHASES:
            return work
        work = json.loads(json.dumps(work))  # as it comes over HTTP
        rounds.message(self.client, work["round"], work["kind"], self.body(work), now)
        return work


def joined(run, rules, folder, gradients, now=0.0):
    """(rounds, {client: phone}) of a run that these clients have joined, each with its gradient."""
    rounds = SecureRounds(run, rules, now)
    rounds.book.set_tokens({i: f"token {i}" for i in run.population.client_ids.tolist()})
    rounds.refresh()
    phones = {i: Phone(rounds, i, folder / f"phone{i}", g) for i, g in gradients.items()}
    for i, phone in phones.items():
        rounds.join(f"token {i}", phone.about, now)
    return rounds, phones


def random_words(draw, size):
    """uint32 [size]."""
    return draw.integers(0, 2**32, size, dtype=np.uint32)
