"""The rounds of a live run: who is invited, what an update must be, and when the server steps.

It knows no network and no clock: the caller says what time it is, so that a simulation can drive it as a server does.

A round has two parts. In the first, its members (fixed when it opens) visit: each sends one update, which is on disk
before it is acknowledged. The round closes when all have come, or at the deadline if a quorum has; with fewer, the
deadline moves. What was accepted always counts. Then the server steps. If the round is evaluated, all awake clients
score the new theta in the second part, and send losses and scores. At the end the round is one transaction of the run's
store, as in a simulation.
"""

import hashlib
import time
from typing import Any

import numpy as np
import tensorflow as tf

from tflite_export.convert.program import flatten, unflatten
from tflite_export.device import payload as payloads
from tflite_export.device.head_file import theta_sha256
from tflite_export.device.live import wire
from tfpfl.checks import InvalidArgument
from tfpfl.data.cohorts import cohort
from tfpfl.engines import aggregation
from tfpfl.engines.visit import GLOBAL
from tfpfl.live.book import Book, Member, OpenRound
from tfpfl.live.clients import Clients, score_rows
from tfpfl.live.plan import visit_settings
from tfpfl.live.rules import Refused, Rules, Stepped, View, whole
from tfpfl.models import tree
from tfpfl.runs import protocols
from tfpfl.runs.folders import LIVE
from tfpfl.runs.results import write_history
from tfpfl.runs.training import DivergedError


class LiveRounds(Clients):
    """The live rounds of a run.

    Args:
        run: an open `tfpfl.runs.run.Run`.
        rules: see `Rules`.
        now: seconds since 1970.

    Raises:
        InvalidArgument: devices cannot take part in this run; `wait_for` is more than there are clients.
    """

    def __init__(self, run, rules: Rules, now: float):
        super().__init__(run, rules)
        if not run.availability.is_perfect:
            raise InvalidArgument(f"{run.folder} simulates clients that drop out; live clients do so themselves")
        rules.check_clients(self.population, self.enrolled is not None)
        if run.store.round_num and not (run.folder / LIVE).exists():
            raise InvalidArgument(
                f"{run.folder} has {run.store.round_num} rounds and no {LIVE}. If devices computed them, put back a "
                "copy of it. Rounds of a simulation cannot go on live: make a new folder: tfpfl run --create-only"
            )
        self._training = run.training()
        self._server = self._training.server_state()
        self.book = self._open_book(run.folder / LIVE)
        self.saved = run.store.round_num  # the last round that is saved; any thread may read it
        self.told: set[int] = set()  # the clients that know that the run is over
        self.programs: dict[int, str] = {}  # {K: sha256 of the program that devices with K classes must have}
        self._stepped: Stepped | None = None
        self._ticks = False  # no round opens before the first `tick`: a server that never listened has none
        self.thetas: dict[str, bytes] = {}
        self._members = self.book.members()
        # {client: when it was last heard of}; a new start of the server is not the devices' fault
        self.seen = {i: now for i, m in self._members.items() if m.key is not None}
        self.view = View(wire.NOTHING, 0)
        try:
            opened = self.book.open_now()
            self._enrol(opened.number if opened else run.store.round_num + 1)
            self._recover(now)
        except BaseException:
            self.close(has_begun=False)
            raise

    def _open_book(self, path) -> Book:
        """The file of members and of what arrived."""
        book = Book(path, self.run.config.run_id)
        if (buffer := book.asynchronous) is not None:
            book.close()
            raise InvalidArgument(f"{path} has asynchronous rounds: give --async buffer={buffer}")
        if book.is_secure:
            book.close()
            raise InvalidArgument(
                f"{path} has secure rounds, which a run keeps: without them the devices would send what they may have "
                "hidden before; give --secure, or make a new folder: tfpfl run --create-only"
            )
        return book

    def _waits_for_more(self, number: int, invited: int, here: int, now: float) -> bool:
        """Whether a round does not open with so few clients; a 'binomial' cohort may have nobody."""
        return False

    # What devices ask and send

    def member(self, client: int) -> Member:
        """A client that has joined.

        Raises:
            Refused: there is no such client, or it has not joined (401).
        """
        member = self._members.get(client)
        if member is None or member.key is None:
            raise Refused(401, f"client {client} has not joined: join with its token first")
        return member

    def join(self, token: str, about: dict, now: float) -> dict:
        """Takes a device in, or takes it in again with another key.

        Args:
            token: the enrolment token.
            about: 'protocol', 'examples' (N_i), 'classes' (K_i), 'key', and of a device that has a bundle 'program',
                the sha256 of its program.tflite; of one that has joined before 'run', as it was told then.
            now: seconds since 1970.

        Returns:
            What the device needs: client, classes, rounds, run.

        Raises:
            Refused: the token is unknown (401) or revoked (403), or the device's numbers or its program are not those
                of the run (409).
            WireError: an entry is missing or wrong.
        """
        member = self.book.member_with(token)
        if member is None:
            raise Refused(401, "this token is unknown: ask for one")
        if member.revoked:
            raise Refused(403, "this token was revoked: ask for a new one")
        if (found := wire.entry(about, "protocol", int)) != wire.PROTOCOL:
            raise Refused(409, f"the server speaks protocol {wire.PROTOCOL}, the device {found}: update the older one")
        if "run" in about and wire.entry(about, "run", str) != self.book.live_id:
            raise Refused(409, "the device has the head of another run: start it with another --state")
        told = {name: wire.entry(about, name, int) for name in ("examples", "classes")}
        info = self.population.info(member.client) if self.enrolled is None else None
        for name, found in told.items():
            if info is not None and found != (expected := int(getattr(info, f"num_{name}"))):
                raise Refused(409, f"client {member.client} has {expected} {name} in this run, and the device {found}")
        needed = "tf" if self.vectors else "litert"
        if (found := wire.entry({"runtime": "litert"} | about, "runtime", str)) != needed:
            start = "start it with --runtime tf" if self.vectors else "start it without --runtime tf"
            raise Refused(409, f"devices of this run compute with {needed}, and this one with {found[:20]}: {start}")
        key = wire.PublicKey(wire.entry(about, "key", str, 1, 200))
        if self.enrolled is not None:
            self.on_enrolled(self.enrolled.checked(member.client, **told))
        program = self.programs.get(told["classes"])
        if "program" in about and wire.entry(about, "program", str) != program:
            raise Refused(409, "the device has another program than this run's: delete its bundle, and join again")
        if self.enrolled is not None:
            self.enrolled.add(member.client, **told)
        self.book.join(member.client, wire.to_text(key.bytes), now)
        self._members = self.book.members()
        self._heard(member.client, now)
        self.tick(now)
        about = {"client": member.client, "classes": told["classes"], "rounds": self.run.config.rounds}
        return about | {"run": self.book.live_id}

    def work(self, client: int, now: float) -> dict | None:
        """What a client has to do now; None: nothing yet. It only reads, and so any thread may call it."""
        view = self.view
        self._heard(client, now)
        if view.kind == wire.DONE:
            self.told.add(client)
            return {"kind": wire.DONE}
        if client not in view.waiting:
            return None
        about = {"kind": view.kind, "round": view.round_num, "theta": view.theta}
        about["seconds"] = round(max(view.deadline - now, 0.0), 3)
        if view.kind == wire.VISIT:
            about |= {"settings": view.settings[client], "payload": self.rules.payload, "splits": list(view.splits)}
        else:
            about["splits"] = list(self._splits)
        return about

    def update(self, client: int, number: int, body: bytes, now: float) -> dict:
        """Takes a member's update; when this returns, it is on disk and will be counted.

        The same bytes again are fine, also when the round is long over.

        Raises:
            Refused: there is no such round, the client was not invited, sent another update already (409), the round
                is over without it (410), or the update cannot be used (422).
            WireError: the body cannot be read.
        """
        self._heard(client, now)
        self._check_on()
        known = self.book.counted(number, client)
        if known is not None:
            if known != hashlib.sha256(body).hexdigest():
                raise Refused(409, f"another update of client {client} was counted in round {number}")
            return {"counted": True, "round": number}
        view = self.view
        if view.kind != wire.VISIT or number != view.round_num:
            over = number < view.round_num or (number == view.round_num and view.kind != wire.VISIT)
            raise Refused(
                410 if over else 409,
                f"round {number} is over, and this update was not counted" if over else f"there is no round {number}",
            )
        if client not in view.waiting:
            raise Refused(409, f"client {client} is not invited to round {number}")
        about, payload = wire.unpack(body)
        self._check_update(client, about, payload, view)
        self.book.put(number, client, body, now)
        self.view = view._replace(waiting=view.waiting - {client})
        if not self.view.waiting:
            self._close(now)
        return {"counted": True, "round": number}

    def score(self, client: int, number: int, about: dict, now: float) -> dict:
        """Takes a client's losses and scores of the theta after a round.

        Raises:
            Refused: no scores of this round are wanted (410), or they are of another theta (409).
            WireError: an entry is missing or wrong.
        """
        view = self.view
        self._heard(client, now)
        self._check_on()
        if view.kind != wire.SCORE or number != view.round_num:
            raise Refused(410, f"no scores of round {number} are wanted now")
        if wire.entry(about, "theta", str) != view.theta:
            raise Refused(409, "these scores are of another theta")
        beside = None if self.algorithm.global_model is None else GLOBAL
        self.book.put_score(number, client, self._check_scores(about, client, self._splits, beside), now)
        self.view = view._replace(waiting=view.waiting - {client})
        if not self.view.waiting:
            self._commit(now)
        return {"round": number}

    # What the server does

    def _heard(self, client: int, now: float) -> None:
        """Notes that a client is awake."""
        self.seen[client] = now

    def refresh(self) -> None:
        """Reads the members again, after tokens were made or revoked; the open round does not wait for them."""
        self._members = self.book.members()
        self.view = self.view._replace(waiting=self.view.waiting - self._gone())

    def _gone(self) -> set[int]:
        """The clients whose token was revoked, or that have a new one and have not joined with it."""
        return {i for i, m in self._members.items() if m.revoked or m.key is None}

    def tick(self, now: float) -> None:
        """Opens a round where none is, and ends one whose deadline is over; to be called about every second.

        Raises:
            DivergedError: theta is not finite after the round. All earlier rounds are saved.
        """
        self._ticks = True
        self._check_on()
        if self.view.kind == wire.NOTHING:
            self._open(now)
        elif self.view.kind == wire.VISIT and (now >= self.view.deadline or not self.view.waiting):
            number, waiting = self.view.round_num, len(self.view.waiting)  # who was revoked meanwhile is in neither
            came = sum(self.book.counted(number, i) is not None for i in self._open_round.arrival)
            if not waiting or came >= max(1, int(np.ceil(self.rules.quorum * (came + waiting) - 1e-9))):
                self._close(now)
            else:
                self.book.extend(self.view.round_num, now + self.rules.deadline, now)
                self.view = self.view._replace(deadline=now + self.rules.deadline)
        elif self.view.kind == wire.SCORE and (now >= self.view.deadline or not self.view.waiting):
            self._commit(now)

    def _are_enough(self) -> bool:
        """Whether as many have joined as the first round waits for, or all who may."""
        members = [m for m in self._members.values() if not m.revoked]
        joined = sum(m.key is not None for m in members)
        return 0 < joined >= min(self.rules.wait_for, len(members))

    def awake(self, now: float) -> np.ndarray:
        """The clients that were heard of lately, ascending: int64 [n]."""
        there = [i for i, m in self._members.items() if m.key is not None and not m.revoked]
        return np.array([i for i in there if now - self.seen.get(i, -np.inf) <= self.rules.awake], np.int64)

    def _recover(self, now: float) -> None:
        """Goes on where an earlier server was stopped, killed or not."""
        self._open_round: Any = self.book.open_now()
        if self._open_round is not None and self._open_round.number <= self.run.store.round_num:
            self.book.end_round(self._open_round.number, now)  # it was committed, and only this was left to do
            self._open_round, self._members = None, self.book.members()
            self.write_history()
        if self._open_round is not None:
            opened = self._open_round
            theta = self._publish(self._theta(self._server))
            if theta != opened.theta:
                raise InvalidArgument(
                    f"{self.book.path} has round {opened.number} open for another theta than the run's: one of the two "
                    "was replaced"
                )
            if opened.number > self.run.config.rounds:
                raise InvalidArgument(f"round {opened.number} is open: give --rounds {opened.number} or more")
            self._go_on(opened, now)
        self.refresh()

    def _go_on(self, opened: OpenRound, now: float) -> None:
        """Goes on with a round that an earlier server has opened."""
        here = set(self.book.bodies(opened.number))
        waiting = frozenset() if opened.closed else frozenset(opened.arrival) - here
        self._invite(opened, waiting, opened.deadline_of(now, self.rules.deadline))
        if not waiting:
            self._close(now)

    def _theta(self, server) -> np.ndarray:
        """The message of a server state, flat: float32 [P]."""
        message = self.algorithm.message(server)
        return self.vectors.message(message) if self.vectors else flatten(message)

    def _publish(self, theta: np.ndarray) -> str:
        """Makes a theta available by its hash, and forgets older ones."""
        name = theta_sha256(theta)
        self.thetas = {name: theta.astype("<f4").tobytes()}
        return name

    @whole
    def _open(self, now: float) -> None:
        number = self.run.store.round_num + 1
        if number > self.run.config.rounds:
            self.view = View(wire.DONE, number - 1)
            self.write_history()  # also if an earlier server was killed before it did
            return
        if not self._are_enough():
            return
        if self.enrolled is not None:
            if len(self.enrolled.ids) < self.population.sampling.high:  # of 'range' cohorts; 0 of others
                return
            self._enrol(number, opens=True)
        awake = self.awake(now)
        if not len(awake):
            return
        present = None if len(awake) == len(self.ids) else awake
        ids = [int(i) for i in cohort(self.run.config.seed, number, self.population, present)]
        if self._waits_for_more(number, len(ids), len(awake), now):
            return
        if self.enrolled is not None:
            self.enrolled.count(number)
        theta = self._publish(self._theta(self._server))
        self.book.open_round(number, theta, ids, now, now + self.rules.deadline)
        self._open_round = self.book.open_now()
        self._invite(self._open_round, frozenset(ids), now + self.rules.deadline)
        if not ids:
            self._close(now)

    def _invite(self, opened: OpenRound, waiting: frozenset, deadline: float) -> None:
        settings: dict[int, dict] = {i: {} for i in opened.arrival}
        if not self.vectors:
            settings = {i: visit_settings(self.run, self.population, i, p) for i, p in opened.arrival.items()}
        splits = self._splits if self._training.is_evaluated(opened.number, self.run.config.rounds) else ()
        self.view = View(wire.VISIT, opened.number, opened.theta, waiting, deadline, settings, splits)
        self._began = time.perf_counter()

    @property
    def _splits(self) -> tuple:
        return tuple(self._training.splits)

    @whole
    def _close(self, now: float) -> None:
        """Steps with all that came, and asks for scores if the round is evaluated."""
        number = self._open_round.number
        if not self._open_round.closed:
            self.book.close_round(number, now)
        self._stepped = self._step_of(number)
        theta = self._theta(self._stepped.server)
        if not np.isfinite(theta).all():
            self.failed = DivergedError(
                f"round {number} diverged: theta is not finite after the server's step. All earlier rounds are saved. "
                "A smaller rho, or --max-norm, may help in a new run"
            )
            self.view = View(wire.NOTHING, number)
            return
        if self._training.is_evaluated(number, self.run.config.rounds):
            waiting = frozenset(self.awake(now).tolist()) & set(self.ids) - set(self.book.scores(number))
            self.view = View(wire.SCORE, number, self._publish(theta), waiting, now + self.rules.deadline)
            if waiting:
                return
        self._commit(now)

    def _step_of(self, number: int) -> Stepped:
        """The server's step with all that came."""
        updates = {i: wire.unpack(body) for i, body in self.book.bodies(number).items()}
        told = {i: about for i, (about, _) in updates.items()}
        payload = {i: content for i, (_, content) in updates.items()}
        loss = None
        if told:
            sizes = np.array([about["examples"] for about in told.values()], np.float64)
            loss = float(sizes @ [float(about["loss"]) for about in told.values()] / sizes.sum())
        return Stepped(number, self._after(payload), told, loss, sum(map(len, payload.values())))

    def _after(self, sent: dict[int, bytes]):
        """The server's state after a step with these updates, added in the order of the clients."""
        if self.vectors:
            updates = {i: payloads.decode(payload) for i, payload in sent.items()}
            return self.vectors.step(self._step, self._server, updates, self._open_round.number)
        if not sent:
            return self._server
        total = np.zeros(self.model.num_backbone_weights, np.float32)
        for client, payload in sent.items():
            total += np.float32(self._weight_of(client)) * payloads.decode(payload, len(total))
        return self._after_sum(total, list(sent))

    def _weight_of(self, client: int) -> float:
        """What the gradient of a client of the open round counts in the sum."""
        info = self.population.info(client)
        if self.algorithm.aggregate == "mean":
            return float(info.num_examples)
        return float(info.alpha) / self._open_round.arrival[client]

    def _after_sum(self, total: np.ndarray, clients: list[int]):
        """The server's state after a step with the weighted sum of these clients' gradients, float32 [P]."""
        weights = sum(map(self._weight_of, clients))
        gradient = tuple(map(tf.constant, unflatten(total, self.model)))
        found = aggregation.Contribution((gradient,), tf.constant(weights, tf.float32), ())
        server = tf.nest.map_structure(tf.convert_to_tensor, self._server)  # NumPy's int32 + 1 would be int64
        return self._step(server, aggregation.finish(self.algorithm, found, clients), found.weight)

    @whole
    def _commit(self, now: float) -> None:
        """Saves the round in the run's store, and opens the next one."""
        assert self._stepped is not None
        (number, server, told, loss, received), invited = self._stepped, self._open_round.arrival
        row: dict[str, Any] = {"round": number, "clients": len(told), "dropped": len(invited) - len(told)}
        row["came"] = " ".join(map(str, told))
        row |= {} if loss is None else {"loss": loss}
        down = self.vectors.message_size if self.vectors else self.model.num_backbone_weights
        row |= {"bytes_down": 4 * down * len(invited), "bytes_up": received}
        personal, local = self._training.model_name, protocols.LOCAL_COPY
        rows = [r for i, about in told.items() for r in score_rows(about["scores"], number, i, local)]
        rows += [r for i, found in self.book.scores(number).items() for r in score_rows(found, number, i, personal)]
        for (model, split), score in protocols.summarize(rows, self.run.config.score).items():
            row |= {f"{model} {split} {name}": value for name, value in score.items()}
        row["seconds"] = time.perf_counter() - self._began
        self.run.store.commit_round(number, tree.arrays(server), {}, row, rows)
        self._server, self._stepped = server, None
        self.saved = number
        self.book.end_round(number, now)
        self._open_round, self._members = None, self.book.members()
        self.view = View(wire.NOTHING, number)
        if rows:
            self.write_history()
        if self._ticks and (told or number == self.run.config.rounds):
            self._open(now)  # after a round without clients, the next tick does

    def write_history(self) -> None:
        """Writes history.csv of the run folder, with all saved rounds."""
        write_history(self.run.folder / "history.csv", self.run.store.history(), self.run.federation)

    def close(self, has_begun: bool = True) -> None:
        """Closes the book; the run stays open. If nothing `has_begun`, it may then have rounds of another kind."""
        if not has_begun:
            self.book.take_back()
        self.book.close()
