"""Live rounds where the server asks and devices answer, as in Flower: what a node is asked, and what its answer means.

It knows no network: who calls brings questions to nodes and answers back. A node is a connection, and its number may
change; a client is found by its token. The other side is `tflite_export.device.live.asked`.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tflite_export.device.head_file import SavedHead, head_bytes
from tflite_export.device.live import wire
from tflite_export.device.live.asked import ABOUT, BODY, FILE, HEAD, JOIN, THETA, Record
from tfpfl.live.plan import check_exported
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused, Rules
from tfpfl.live.serve import bundles_of, programs_of, write_tokens

_REST = 10.0  # seconds until a node whose answer was of no use is asked again


class Question(NamedTuple):
    """What a node is asked; its answer belongs to it."""

    node: int
    kind: str  # asked.JOIN, or wire.VISIT, SCORE or DONE
    round_num: int  # 0 of kinds that have none
    record: Record


class Asking:
    """The rounds of a run.

    Args:
        run: an open `tfpfl.runs.run.Run` of PFLEGO; its rounds so far are continued.
        rules: how rounds are run.
        patience: seconds after which a node that has not answered is asked again.
        log: (text) -> None, told what happens.

    Raises:
        InvalidArgument: devices cannot take part in this run.
        BookError: live.sqlite of the run folder cannot be used.
    """

    def __init__(self, run, rules: Rules, *, patience: float = 120.0, log: Callable[[str], None] = lambda text: None):
        check_exported(run, "rounds on Flower's nodes")
        self.bundles, self.patience, self.log = bundles_of(run), patience, log
        self.rounds = LiveRounds(run, rules, time.time())
        self.tokens = write_tokens(run, self.rounds.book)
        self.rounds.refresh()
        self.rounds.programs = programs_of(self.bundles)
        self._clients: dict[int, int] = {}  # {node: client}
        self._bare: set[int] = set()  # the nodes that have no bundle yet
        self._replaced: set[int] = set()  # nodes whose client has come back as another node
        self._open: dict[int, tuple[Question, float]] = {}  # {node: (what it was asked last, when)}
        self._rests: dict[int, float] = {}  # {node: until when it is not asked}
        self._told: set[int] = set()  # the nodes that know that the run is over
        self._here: set[int] = set()
        self._over: float | None = None  # since when the run is over

    def questions(self, nodes: Iterable[int], now: float) -> list[Question]:
        """What is to be asked now; to be called about every second.

        Args:
            nodes: those that are connected.
            now: seconds since 1970.

        Raises:
            DivergedError: theta is not finite after a round. All earlier rounds are saved.
        """
        self._here = set(nodes)
        for node in self._clients.keys() - self._here:  # it says who it is when it comes back
            del self._clients[node]
            self._open.pop(node, None)
        for client in self._clients.values():
            self.rounds.seen[client] = now
        self.rounds.tick(now)
        found = []
        for node in sorted(self._here - self._replaced):
            _, since = self._open.get(node, (None, -self.patience))
            if now - since < self.patience or now < self._rests.get(node, 0.0):
                continue
            question = self._question(node, now)
            if question is not None:
                self._open[node] = question, now
                found.append(question)
        return found

    def _question(self, node: int, now: float) -> Question | None:
        client = self._clients.get(node)
        if client is None:
            return Question(node, JOIN, 0, {ABOUT: json.dumps({"kind": JOIN, "protocol": wire.PROTOCOL})})
        work = self.rounds.work(client, now)
        if work is None or node in self._told:
            return None
        work["counted"] = self.rounds.book.last_counted(client)
        record: Record = {ABOUT: json.dumps(work | {"run": self.rounds.book.live_id})}
        if work["kind"] != wire.DONE:
            record[THETA] = self.rounds.thetas[work["theta"]]
        if node in self._bare:
            head = self.rounds.head(client)
            record[HEAD] = head_bytes(SavedHead(head.kernel, head.bias, "00" * 32))
            folder = self.bundles[int(self.rounds.population.info(client).num_classes)]
            record |= {FILE + path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        return Question(node, work["kind"], work.get("round", 0), record)

    def hear(self, question: Question, answer: Mapping, now: float) -> None:
        """Takes a node's answer; when this returns, what counts is on disk.

        An answer that cannot be used is told to the log, and the node is asked again after a while.

        Args:
            question: what it was asked; an answer to an earlier one is left aside, since it was asked anew.
            answer: a record.
            now: seconds since 1970.
        """
        if not self._closed(question):
            return
        try:
            self._take(question, answer, now)
        except (Refused, wire.WireError) as error:
            self._rest(question, str(error), now)

    def failed(self, question: Question, why: str, now: float) -> None:
        """Notes that a node could not answer; after a while it is asked again, and first who it is."""
        if self._closed(question):
            self._rest(question, why, now)
            self._clients.pop(question.node, None)

    def _closed(self, question: Question) -> bool:
        """Takes the question off the list. Returns whether it was the node's last one."""
        if self._open.get(question.node, (None, 0.0))[0] is not question:
            return False
        del self._open[question.node]
        return True

    def _rest(self, question: Question, why: str, now: float) -> None:
        self._rests[question.node] = now + _REST
        self.log(f"{self._name(question.node)} was asked for {question.kind}: {why}")

    def _name(self, node: int) -> str:
        return f"client {self._clients[node]}" if node in self._clients else f"node {node}"

    def _take(self, question: Question, answer: Mapping, now: float) -> None:
        about = wire.read_json(wire.entry(dict(answer), ABOUT, str).encode())
        if question.kind == JOIN:
            self._join(question.node, about, now)
            return
        client = self._clients[question.node]
        if question.kind == wire.VISIT:
            if not isinstance(body := answer.get(BODY), bytes):
                raise wire.WireError("the answer has no update")
            self.rounds.update(client, question.round_num, body, now)
            self.log(f"round {question.round_num}: client {client} is counted")
        elif question.kind == wire.SCORE:
            self.rounds.score(client, question.round_num, about, now)
        else:
            self._told.add(question.node)
        self._bare.discard(question.node)

    def _join(self, node: int, about: dict, now: float) -> None:
        client = self.rounds.join(wire.entry(about, "token", str, 1, 200), about, now)["client"]
        for other in [n for n, i in self._clients.items() if i == client]:
            del self._clients[other]
            self._open.pop(other, None)  # what it still answers is of nobody; the device sends it by the new node
            self._replaced.add(other)
        self._clients[node] = client
        if "program" not in about:
            self._bare.add(node)
        self.log(f"client {client} is here, as node {node}")

    def is_over(self, now: float) -> bool:
        """Whether the last round is saved, and all nodes know it or had time to answer."""
        if self.rounds.view.kind != wire.DONE:
            return False
        self._over = now if self._over is None else self._over
        return now - self._over > self.patience or self._here - self._replaced <= self._told

    def close(self) -> None:
        """Closes the book; the run stays open."""
        self.rounds.close()
