"""A device that is asked by messages, where LiveDevice asks by HTTP: each question has one answer. Flower works so.

    with closing(AskedDevice("device-7", examples, token)) as device:
        answer = device.answer(question)

Questions and answers are records: {'about': JSON as text, and names of parts: bytes}. The device keeps in its folder
what `LiveDevice` keeps, so it may be a new process for each question. An update stays there until a later question says
whether it was counted; if the same round is asked for again, the same bytes are sent again.
"""

import hashlib
import json

import numpy as np

from tflite_export.device.errors import InvalidInput
from tflite_export.device.layout import MANIFEST, PROGRAM
from tflite_export.device.live import wire
from tflite_export.device.live.answers import round_and_theta, splits_of
from tflite_export.device.live.state import Pending, State
from tflite_export.device.live.work import Work, about_device, check_examples, keep_bundle, keep_first_head
from tflite_export.device.runtime import Bundle

ABOUT, THETA, HEAD, BODY, FILE = "about", "theta", "head", "body", "bundle/"  # FILE begins the names of bundle files
JOIN = "join"  # a kind of question, besides those of wire

Record = dict[str, str | bytes]


class AskedDevice:
    """One device.

    Args:
        folder: what the device keeps between questions; see state.py.
        examples: see `Work`.
        token: the enrolment token.
        interpreter: class of the interpreter, see `Runtime`.

    Raises:
        InvalidInput: there are no training examples, or another process works with the folder.
    """

    def __init__(self, folder, examples: dict, token: str, *, interpreter=None):
        check_examples(examples)
        self.state, self._examples, self._token, self._interpreter = State(folder), examples, token, interpreter

    def close(self) -> None:
        """Lets another process use the folder."""
        self.state.close()

    def answer(self, question: Record) -> Record:
        """Does what is asked.

        Args:
            question: 'about' says the kind and, but for 'join', which run this is. 'join': who is there. 'visit': a
                round with the part 'theta'. 'score': losses and scores with 'theta'. 'done': the run is over. All but
                the first also say which update of the device was the last to count, as 'counted': [round, sha256]. To
                a device without a bundle, the first of them has the files of one, and the first head.

        Raises:
            InvalidInput: the question cannot be read; the bundle, the head or theta is damaged; or the folder is of
                another run.
        """
        about = wire.read_json(_text(question))
        kind = wire.entry(about, "kind", str)
        if "run" in about:  # servers of before do not say it
            self.state.keep_run(wire.entry(about, "run", str, 1, 100))
        if kind == JOIN:
            return {ABOUT: json.dumps(self._who())}
        self._take_bundle(question)
        work = Work(self.state, self._examples, self._interpreter)
        pending = self._settle(work, about)
        if kind == wire.VISIT:
            if pending is None or not _is_for(pending, about):
                pending = work.visit(about, _theta(about, question))
                self.state.keep(pending)
            return {ABOUT: json.dumps({"round": pending.round_num}), BODY: pending.body}
        self.state.drop()
        found = {}
        if kind == wire.SCORE:
            number, name = round_and_theta(about)
            work.receive(_theta(about, question))
            found = {"round": number, "theta": name, "scores": work.scores(splits_of(about))}
        return {ABOUT: json.dumps(found)}

    def _who(self) -> dict:
        about = {**about_device(self._examples, self.state.signer()), "token": self._token}
        if (self.state.bundle / MANIFEST).exists() and self.state.head.exists():
            about["program"] = Bundle(self.state.bundle).manifest["files"][PROGRAM]["sha256"]
        if (known := self.state.run()) is not None:
            about["run"] = known
        return about

    def _take_bundle(self, question: Record) -> None:
        if not (self.state.bundle / MANIFEST).exists():
            names = [name for name in question if name.startswith(FILE)]
            keep_bundle(self.state, {name.removeprefix(FILE): _part(question, name) for name in names}.items())
        if not self.state.head.exists():
            keep_first_head(self.state, _part(question, HEAD))

    def _settle(self, work: Work, about: dict) -> Pending | None:
        """Makes the head of an update current that was counted; returns an update that was not."""
        pending = self.state.pending(work.client.bundle.num_features, work.client.bundle.num_classes)
        if pending is None or [pending.round_num, hashlib.sha256(pending.body).hexdigest()] != about.get("counted"):
            return pending
        work.client.start_from(pending.head)
        self.state.drop()
        return None


def _is_for(pending: Pending, work: dict) -> bool:
    """Whether an update is what a visit asks for."""
    about, _ = wire.unpack(pending.body)
    return (pending.round_num, about["theta"]) == round_and_theta(work)


def _theta(about: dict, question: Record) -> np.ndarray:
    content = _part(question, THETA)
    if hashlib.sha256(content).hexdigest() != round_and_theta(about)[1]:
        raise InvalidInput("the server's theta does not have the hash that it was announced with")
    return np.frombuffer(content, "<f4").astype(np.float32)


def _part(record: Record, name: str) -> bytes:
    part = record.get(name)
    if not isinstance(part, bytes):
        raise InvalidInput(f"the message has no part {name!r}")
    return part


def _text(record: Record) -> bytes:
    text = record.get(ABOUT)
    if not isinstance(text, str):
        raise InvalidInput("the message does not say what it is about")
    return text.encode()
