"""Asynchronous rounds: whoever is there works at its own speed, and the server steps at every K arrivals.

`AsyncServer` decides what an arrival counts and when the server steps. This adds members, the log on disk, the run's
store and scores. As `LiveRounds`, it knows no network and no clock.

A client's visits are numbered. Its next one has the number of its arrivals plus one, so a visit needs no invitation: an
update is counted once because (client, visit) is once in the log. Theta of an update is named by its hash.
"""

import hashlib
import time
from typing import Any, NamedTuple

import numpy as np

from tflite_export.device import payload as payloads
from tflite_export.device.head_file import theta_sha256
from tflite_export.device.live import wire
from tfpfl.checks import InvalidArgument
from tfpfl.live.arrivals import AsyncServer
from tfpfl.live.async_book import AsyncBook, Logged
from tfpfl.live.async_pflego import check_asynchronous, server_of
from tfpfl.live.clients import score_rows
from tfpfl.live.plan import visit_settings
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused, Rules, View, whole
from tfpfl.models import tree
from tfpfl.runs import protocols
from tfpfl.runs.training import DivergedError

_NO_DEADLINE = 1e9  # seconds
_THETAS, _THETA_BYTES = 16, 64_000_000  # so many of the last thetas can be fetched, if they are not larger together
_MOST_SCORED = 12  # thetas whose scores are waited for at the same time


class Scoring(NamedTuple):
    """A theta that clients score."""

    theta: str
    waiting: frozenset
    deadline: float


class AsyncRounds(LiveRounds):
    """The asynchronous rounds of a run. A round is a step of the server.

    Args:
        run: an open `tfpfl.runs.run.Run` of PFLEGO, with all clients in every round.
        rules: with `buffer`.
        now: seconds since 1970.

    Raises:
        InvalidArgument: devices cannot take part in this run, its rounds cannot be asynchronous, or the run folder has
            other rounds already.
    """

    def __init__(self, run, rules: Rules, now: float):
        check_asynchronous(run)
        self.async_server: AsyncServer
        self._versions: dict[str, int] = {}  # {sha256 of a theta: the last step that made it}
        self._scoring: dict[int, Scoring] = {}  # {step: who scores its theta}; replaced, never changed
        self._begun: set[int] = set()  # the clients whose first gap has begun
        super().__init__(run, rules, now)

    def _open_book(self, path) -> AsyncBook:
        return AsyncBook(path, self.run.config.run_id, self.rules.buffer)

    # What devices ask and send

    def work(self, client: int, now: float) -> dict | None:
        """What a client has to do now; None: nothing yet. It writes nothing, and so any thread may call it."""
        view = self.view
        self._heard(client, now)
        if view.kind == wire.DONE:
            self.told.add(client)
            return {"kind": wire.DONE}
        for number, scoring in self._scoring.items():
            if client in scoring.waiting:
                about = {"kind": wire.SCORE, "round": number, "theta": scoring.theta, "splits": list(self._splits)}
                return about | {"seconds": round(max(scoring.deadline - now, 0.0), 3)}
        if view.kind != wire.VISIT:
            return None
        away = client not in self._begun
        self._begun.add(client)
        ticket = self.async_server.begin(client, away)
        about = {"kind": wire.VISIT, "round": ticket.visit, "theta": view.theta, "seconds": _NO_DEADLINE, "splits": []}
        settings = visit_settings(self.run, self.population, client, ticket.per_step)
        return about | {"settings": settings, "payload": self.rules.payload}

    def update(self, client: int, number: int, body: bytes, now: float) -> dict:
        """Takes the update of a client's visit; when this returns, it is on disk and is counted.

        The same bytes again are fine at any time.

        Raises:
            Refused: another update was counted in this visit, it is not the client's next one, or its theta was never
                sent (409); its theta is too old, or the run is over (410); or it cannot be used (422).
            WireError: the body cannot be read.
        """
        self._check_on()
        was_at_work = client in self._begun
        self._heard(client, now)
        known = self.book.counted(number, client)
        if known is not None:
            if known != hashlib.sha256(body).hexdigest():
                raise Refused(409, f"another update of client {client} was counted in its visit {number}")
            return {"counted": True, "round": number}
        if self.view.kind != wire.VISIT:
            raise Refused(410, "no updates are taken now: the run is over, or has not begun")
        server = self.async_server
        if number != server.visits[client] + 1:
            raise Refused(409, f"the next visit of client {client} is {server.visits[client] + 1}, not {number}")
        about, payload = wire.unpack(body)
        theta = wire.entry(about, "theta", str)
        version = self._versions.get(theta)
        if version is None:
            raise Refused(409, f"the theta {theta[:12]} was never sent")
        if not server.may_have(client, version) or server.version - version > self.rules.staleness:
            # A visit that is not counted is not made up for: one update would count too much.
            self._begun.discard(client)
            late = f"of step {version}, and {server.version} were taken"
            raise Refused(410, f"the theta of this update is {late}: it is too old, ask for work again")
        if not was_at_work:  # it asked an earlier start of the server, which did not write down when
            server.resume(client, version)
        self._begun.add(client)  # for however long, with a theta that it may have: refused or not, it was not away
        self._check_update(client, about, payload, self.view._replace(theta=theta, splits=()))
        arrival = server.arrival(client, version)
        kind = "float32" if len(payload) == payloads.num_bytes(self.model.num_backbone_weights) else "int8"
        self.book.put_arrival(server.count + 1, arrival, kind, hashlib.sha256(payload).hexdigest(), body, now)
        self._take(arrival, payload, now)
        return {"counted": True, "round": number}

    def score(self, client: int, number: int, about: dict, now: float) -> dict:
        """Takes a client's losses and scores of the theta after a step.

        Raises:
            Refused: no scores of this step are wanted (410), or they are of another theta (409).
            WireError: an entry is missing or wrong.
        """
        self.seen[client] = now  # it has asked for work before, and then been at work
        self._check_on()
        scoring = self._scoring.get(number)
        if scoring is None:
            raise Refused(410, f"no scores of step {number} are wanted now")
        if wire.entry(about, "theta", str) != scoring.theta:
            raise Refused(409, "these scores are of another theta")
        self.book.put_score(number, client, self._check_scores(about, client, self._splits), now)
        left = scoring._replace(waiting=scoring.waiting - {client})
        self._scoring = {**self._scoring, number: left}
        if not left.waiting:
            self._end_scores(number)
        return {"round": number}

    # What the server does

    def _heard(self, client: int, now: float) -> None:
        """Notes that a client is awake. If it was away, its gap begins with its next visit, whatever it sends before.

        It may send the last update again first, or join.
        """
        if now - self.seen.get(client, -np.inf) > self.rules.awake:
            self._begun.discard(client)
        super()._heard(client, now)

    @property
    def oldest_scored(self) -> int | None:
        """The first saved step whose scores may still come; None: there is none."""
        return min(self._scoring, default=None)

    def refresh(self) -> None:
        """Reads the members again, after tokens were made or revoked; nobody waits for the scores of revoked ones."""
        super().refresh()
        gone = self._gone()
        self._scoring = {n: s._replace(waiting=s.waiting - gone) for n, s in self._scoring.items()}

    def tick(self, now: float) -> None:
        """Begins when enough clients have joined, and ends scores whose time is over; to be called about every second.

        Raises:
            DivergedError: theta is not finite after a step. All earlier steps are saved.
        """
        self._check_on()
        if self.view.kind == wire.NOTHING and self._are_enough():
            self._show(wire.VISIT)
        for number, scoring in self._scoring.items():
            if now >= scoring.deadline or not scoring.waiting:
                self._end_scores(number)

    def _show(self, kind: str) -> None:
        self.view = View(kind, self.saved, self._newest, frozenset(), _NO_DEADLINE)

    def _recover(self, now: float) -> None:
        """Goes on where an earlier server was stopped, killed or not."""
        self._began = time.perf_counter()
        # Who was away when the server stopped is away now; the time for which it was stopped is nobody's fault.
        before = self.book.unheard()
        self.seen = {client: now - before.get(client, 0.0) for client in self.seen}
        self.async_server = server_of(self.algorithm, self.book.buffer, self._server)
        known = self.book.versions()
        self._publish(self._theta(self._server))
        if len(known) == self.saved:  # also before the first step: the step was saved, and only this was left to do
            self.book.end_step(self.saved, self._newest, now)
            known.append(self._newest)
        if len(known) != self.saved + 1 or known[-1] != self._newest:
            raise InvalidArgument(f"{self.book.path} has {len(known) - 1} steps, and the run others: one was replaced")
        self._versions = {theta: version for version, theta in enumerate(known)}
        for logged in self.book.arrivals():
            if before.get(logged.arrival.client, 0.0) <= self.rules.awake:
                self._begun.add(logged.arrival.client)
            if logged.body is None:
                self.async_server.remember(logged.arrival)
            else:
                self._take(logged.arrival, wire.unpack(logged.body)[1], now)
        if self.saved >= self.run.config.rounds:
            self._finish(now)
        for number in self.book.scored():
            if number not in self._scoring:
                self._end_scores(number)
        if self.view.kind == wire.NOTHING and self.async_server.count:
            self._show(wire.VISIT)

    def _publish(self, theta: np.ndarray) -> str:
        """Makes a theta available by its hash, and forgets old ones that nobody scores."""
        name, self._newest = (theta_sha256(theta),) * 2
        scored = {s.theta for s in self._scoring.values()}
        most = max(2, min(_THETAS, _THETA_BYTES // theta.nbytes))
        last = [n for n in self.thetas if n != name][-most + 1 :]
        kept = {n: self.thetas[n] for n in self.thetas if n in scored or n in last}
        self.thetas = kept | {name: theta.astype("<f4").tobytes()}
        return name

    @whole
    def _take(self, arrival, payload: bytes, now: float) -> None:
        """Counts an arrival that is in the log, and saves the step that it may have made."""
        gradient = payloads.decode(payload, self.model.num_backbone_weights)
        if self.async_server.take(arrival, gradient) and self.async_server.version > self.saved:
            self._save(self.async_server.version, now)

    @whole
    def _save(self, number: int, now: float) -> None:
        server = self.async_server.state
        theta = self._theta(server)
        if not np.isfinite(theta).all():
            self.failed = DivergedError(
                f"step {number} diverged: theta is not finite. All earlier steps are saved. A smaller rho, or "
                "--max-norm, may help in a new run"
            )
            self.view = View(wire.NOTHING, self.saved)
            return
        row = self._row(number, self.book.arrivals((number - 1) * self.async_server.buffer))
        self.run.store.commit_round(number, tree.arrays(server), {}, row)
        self.saved, self._server, self._began = number, server, time.perf_counter()
        self._publish(theta)
        self.book.end_step(number, self._newest, now)
        self._versions[self._newest] = number
        if number >= self.run.config.rounds:
            self._finish(now)
        elif self._training.is_evaluated(number, self.run.config.rounds):
            self._ask_for_scores(number, now)
        if self.view.kind == wire.VISIT:
            self._show(wire.VISIT)

    def _row(self, number: int, logged: list[Logged]) -> dict[str, Any]:
        """The row of the history of a step."""
        bodies = [wire.unpack(one.body or b"") for one in logged]
        came = sorted({one.arrival.client for one in logged})
        sizes = np.array([about["examples"] for about, _ in bodies], np.float64)
        return {
            "round": number,
            "clients": len(came),
            "came": " ".join(map(str, came)),
            "updates": len(logged),
            "staleness": float(np.mean([number - 1 - one.arrival.version for one in logged])),
            "loss": float(sizes @ [float(about["loss"]) for about, _ in bodies] / sizes.sum()),
            "bytes_down": 4 * self.model.num_backbone_weights * len(logged),
            "bytes_up": sum(len(payload) for _, payload in bodies),
            "seconds": time.perf_counter() - self._began,
        }

    def _finish(self, now: float) -> None:
        """After the last step: the run is over when its theta is scored."""
        last = self.saved
        if self._training.is_evaluated(last, self.run.config.rounds) and not self.run.store.evaluations(last):
            self._ask_for_scores(last, now)
        self._show(wire.SCORE if last in self._scoring else wire.DONE)
        if self.view.kind == wire.DONE:
            self.write_history()

    def _ask_for_scores(self, number: int, now: float) -> None:
        """Asks all clients for scores of the newest theta; a client is asked when it asks for work next."""
        there = frozenset(i for i, m in self._members.items() if m.key is not None and not m.revoked)
        if waiting := there - set(self.book.scores(number)):
            if len(self._scoring) >= _MOST_SCORED:
                self._end_scores(min(self._scoring))
            scoring = Scoring(self._newest, waiting, now + self.rules.deadline)
            self._scoring = {**self._scoring, number: scoring}

    @whole
    def _end_scores(self, number: int) -> None:
        """Saves the scores of a step."""
        self._scoring = {n: s for n, s in self._scoring.items() if n != number}
        personal = self._training.model_name
        rows = [r for i, found in self.book.scores(number).items() for r in score_rows(found, number, i, personal)]
        if rows:
            entries = {
                f"{model} {split} {name}": value
                for (model, split), score in protocols.summarize(rows, self.run.config.score).items()
                for name, value in score.items()
            }
            self.run.store.add_scores(number, entries, rows)
        self.book.end_scores(number)
        if self.view.kind == wire.SCORE and number == self.saved:
            self._show(wire.DONE)
        if rows or self.view.kind == wire.DONE:
            self.write_history()
