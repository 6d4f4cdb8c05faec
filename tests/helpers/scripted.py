"""A device in C or in Python, and a server of one client that asks for what a test wants."""

import hashlib
import json

import numpy as np
import pytest
import tensorflow as tf

from helpers.native import NativeError
from helpers.native_live import OWN_CLOCK, NativeLive, Proxy, live_programs
from helpers.phone_bundles import CLASSES, drawn
from tflite_export.device.live import wire
from tflite_export.device.live.client import LiveDevice, ServerError

LANGUAGES = ["C", "Python"]


class Script:
    """A server of one client, which asks for the work that it is given and for no more."""

    def __init__(self, bundle, *kinds):
        self.files = {path.name: path.read_bytes() for path in bundle.folder.iterdir()}
        self.head = self.files["head.bin"]
        self.numbers = self.files["theta.bin"]  # of theta, float32
        self.theta = hashlib.sha256(self.numbers).hexdigest()
        settings = {name: bundle.manifest["training"][name] for name in ("tau", "beta", "head_rate")}
        work = {"round": 1, "theta": self.theta, "payload": "float32", "settings": settings}
        work["splits"] = ["train", "test"]
        self.work = [work | {"kind": kind} for kind in kinds]
        self.update, self.score = (200, {"counted": True}), (200, {})
        self.sent: list = []  # (path, body) of updates and scores
        self.joined: list = []  # what devices said when they joined
        self.runs: list = []  # of which run each answer to that says the server is; without one it does not say it
        self.secure: list = []  # whether each answer to that says that the rounds are secure
        self.times: list = []  # when work was asked for, by the device's clock, which its rests alone move
        self.clock = lambda: 0.0

    def move(self, factor):
        """From now on, theta is the bundle's times this factor; so is that of all work to come."""
        self.numbers = (np.frombuffer(self.files["theta.bin"], "<f4") * np.float32(factor)).tobytes()
        self.theta = hashlib.sha256(self.numbers).hexdigest()
        for work in self.work:
            work["theta"] = self.theta

    def gate(self, path, headers):
        """An answer that comes first, if there is one: (status, JSON)."""

    def __call__(self, method, path, body, headers):
        name = path.removeprefix("/v1/").split("?")[0]
        if (first := self.gate(name, headers)) is not None:
            return first[0], [], json.dumps(first[1]).encode()
        if name.startswith(("update/", "score/")):
            self.sent.append((name, body))
            status, answer = self.update if name.startswith("update/") else self.score
            return status, [], json.dumps(answer).encode()
        if name == "head" or name.startswith(("bundle/", "theta/")):
            files = self.files | {"head": self.head, self.theta: self.numbers}
            return 200, [], files[name.rpartition("/")[2]]
        if name == "work":
            self.times.append(self.clock())
        answers = {"join": {"client": 0, "classes": CLASSES}, "bundle": {"files": sorted(self.files)}}
        if name == "join":
            self.joined.append(json.loads(body))
            answers["join"] |= {"run": self.runs.pop(0)} if self.runs else {}
            answers["join"] |= {"secure": self.secure.pop(0)} if self.secure else {}
        return 200, [], json.dumps(answers.get(name) or (self.work.pop(0) if self.work else {"kind": "done"})).encode()


def examples_of(train=9, classes=CLASSES):
    """A device's data: so many training examples, and five for tests."""
    return {"train": drawn("classification", train), "test": drawn("classification", 5, 1), "classes": classes}


def begun(language, script, address, folder, litert, patience=20.0, secure=False, examples=None):
    """(A device, what it says), which rests by a clock of its own, so that its rests take no time."""
    given = address, folder, examples or examples_of(), "token"
    if language == "C":
        device = NativeLive(live_programs() / OWN_CLOCK, *given, litert, patience=patience, secure=secure)
        script.clock = device.time
        return device, device.told
    told, now = [], [1000.0]
    how = {"interpreter": tf.lite.Interpreter, "patience": patience, "log": told.append, "secure": secure}
    device = LiveDevice(*given, **how)
    script.clock = device._rests.clock = lambda: now[0]
    device._rests.sleep = lambda seconds: now.append(now.pop() + seconds)
    return device, told


def told_by(language, script, folder, litert, patience=20.0, errors=0, examples=None):
    """What a device says that works until the server is done; it is asked to go on after so many errors."""
    with Proxy() as proxy:
        proxy.ask = script
        device, told = begun(language, script, proxy.address, folder, litert, patience, examples=examples)
        try:
            for _ in range(errors):
                with pytest.raises((NativeError, ServerError, wire.WireError)):
                    device.run()
            device.run()
        finally:
            device.close()
    return told
