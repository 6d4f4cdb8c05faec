"""Live rounds in which the server learns the sum of the updates alone: docs/secure.md.

A round has attempts, and an attempt four phases. In each, the clients that are still there send one message, which is
on disk before it is acknowledged. What clients send in a phase says what the next one is; so a server that was killed
goes on with what it reads. If too few clients are left, the attempt fails: what came is deleted, and the round begins
again with new keys and the same members.
"""

import hashlib
import logging
import time
from contextlib import closing
from typing import NamedTuple

import numpy as np

from tflite_export.device.errors import InvalidInput
from tflite_export.device.live import wire
from tflite_export.device.live.secure import shamir
from tflite_export.device.live.secure.codec import LARGEST, Codec, CodecError
from tflite_export.device.live.secure.exchange import BOX, LEAST, Peer, checked_peer
from tflite_export.device.live.secure.masks import Attempt, SecureError
from tflite_export.device.live.wire import KEYS, MASKED, PHASES, SHARES, UNMASK
from tfpfl.checks import InvalidArgument
from tfpfl.data.places import is_places
from tfpfl.live import secure_graph as graph
from tfpfl.live.book import Book, OpenRound
from tfpfl.live.plan import visit_settings
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused, Rules, Stepped, View, whole
from tfpfl.live.secure_book import FAILED, SecureBook
from tfpfl.live.secure_messages import by_client, peer_of, public_keys, told_of
from tfpfl.live.secure_sum import Circle, Shares, open_sum, without_few

_logger = logging.getLogger(__name__)
_TOO_OLD = "this run aggregates securely, and this client cannot: update it (docs/secure.md)"


def check_secure(run, rules: Rules) -> None:
    """Checks that a run can have secure rounds with these rules.

    Raises:
        InvalidArgument: it cannot; the message says why.
    """
    if rules.buffer is not None:
        raise InvalidArgument("--secure needs cohorts, whose masks cancel: with --async there are none")
    if rules.max_norm is not None:
        raise InvalidArgument(
            "--max-norm measures the gradient of one device, and with --secure the server has none: give "
            "--secure-clip, with which the device bounds it"
        )
    if rules.payload != "float32":
        raise InvalidArgument(f"--payload {rules.payload} is for gradients that the server reads: leave it out")
    plan, people = run.config.sampling_plan(), run.population.num_clients
    fewest = {"range": plan.low, "binomial": 0}.get(plan.kind, int(plan.expected(people)))
    if fewest < LEAST:
        raise InvalidArgument(
            f"{run.folder} may draw {fewest} clients for a round: a sum over fewer than {LEAST} says what one of them "
            "sent. Give --cohort with more, but none by chance (sampling 'binomial')"
        )
    most = plan.high if plan.kind == "range" else int(plan.expected(people))
    places = is_places(run.federation)  # their N_i are told later; the weights make no codec impossible
    examples = rules.most_examples if places else int(run.population.num_examples.max())
    try:
        Codec(run.model.num_backbone_weights, most, rules.clip, 1.0, examples)
    except CodecError as error:
        raise InvalidArgument(
            f"{run.folder}: {error}. A gradient has at most {LARGEST} numbers, and N_i times the clients of a cohort "
            f"is below 2^31{', so that a smaller --most-examples helps' if places else ''}"
        ) from error


class Phase(NamedTuple):
    """What is known in a phase; made of the messages on disk, and never changed."""

    attempt: Attempt
    name: str
    codec: Codec
    keys: dict[int, Peer] = {}
    neighbours: dict[int, tuple[int, ...]] = {}
    thresholds: dict[int, int] = {}
    boxed: frozenset = frozenset()
    survivors: frozenset = frozenset()

    @property
    def circle(self) -> Circle:
        """Who is in the attempt, from the third phase on."""
        return Circle(self.neighbours, self.thresholds, self.boxed, self.survivors)


class SecureRounds(LiveRounds):
    """The secure rounds of a run.

    Args:
        run: an open `tfpfl.runs.run.Run`.
        rules: with `secure`.
        now: seconds since 1970.

    Raises:
        InvalidArgument: see `LiveRounds`; or its rounds cannot be secure.
    """

    def __init__(self, run, rules: Rules, now: float):
        check_secure(run, rules)
        self._phase: Phase | None = None
        self._public: set[bytes] = set()  # the keys that came in the first phase
        self._again: float | None = None  # when the round begins again after an attempt that failed
        self._told_of = 0  # the last round of which the log says that it waits
        super().__init__(run, rules, now)

    def _open_book(self, path) -> SecureBook:
        if not self._exported:
            raise InvalidArgument(
                f"{self.run.folder}: --secure is for devices with the exported program of PFLEGO; devices with "
                "TensorFlow cannot mask yet"
            )
        if path.exists():
            with closing(Book(path, self.run.config.run_id)) as book:
                if book.asynchronous is not None:
                    super()._open_book(path)  # refuses it
        return SecureBook(path, self.run.config.run_id)

    @property
    def message_size(self) -> int:
        """The most bytes of a message but for the masked words."""
        neighbours = graph.degree(self.run.population.num_clients, self.rules.threshold)
        return 1024 + 200 * max(graph.COMPLETE, neighbours)

    def _waits_for_more(self, number: int, invited: int, here: int, now: float) -> bool:
        if invited < LEAST and self._told_of < number:  # once: it may wait for long
            self._told_of = number
            why = f"waits: {invited} of {here} clients that are here would be invited, and {LEAST} are needed"
            self.book.note(why, number, now)
            _logger.warning("round %d %s", number, why)
        return invited < LEAST

    # What devices ask and send

    def require(self, version: str | None) -> None:
        """Refuses a client that does not say that it speaks this protocol (409)."""
        if version != "1":
            raise Refused(409, _TOO_OLD)

    def join(self, token: str, about: dict, now: float) -> dict:
        """`LiveRounds.join`, of a device that speaks the protocol of secure rounds; another one is refused (409)."""
        self.require(str(about.get("secure")))
        told = super().join(token, about, now) | {"secure": True}
        if self.view.kind == KEYS:  # it may be a member with a new token
            self._show(self._open_round, self.view.deadline)
        return told

    def work(self, client: int, now: float) -> dict | None:
        """`LiveRounds.work`; while an attempt is open, what the device has to do in its phase."""
        view = self.view
        if view.kind not in PHASES:
            return super().work(client, now)
        self._heard(client, now)
        if client not in view.waiting:
            return None
        about = {"kind": view.kind, "round": view.round_num, "seconds": round(max(view.deadline - now, 0.0), 3)}
        return about | view.settings[client]

    def update(self, client: int, number: int, body: bytes, now: float) -> dict:
        """Refuses an update that is not masked, unless it was counted before the rounds were secure."""
        if (known := self.book.counted(number, client)) and known == hashlib.sha256(body).hexdigest():
            return {"counted": True, "round": number}
        raise Refused(410, "this run aggregates securely: updates are masked, and this one was not counted")

    def message(self, client: int, number: int, phase: str, body: bytes, now: float) -> dict:
        """Takes a message of a phase; when this returns, it is on disk.

        Raises:
            Refused: another message of the client is there, or it does not take part (409); the phase or the attempt is
                over (410); or it cannot be used (422).
            WireError: it cannot be read.
        """
        self._heard(client, now)
        self._check_on()
        view, known = self.view, self._phase
        about, words = wire.unpack(body) if phase == MASKED else (wire.read_json(body), b"")
        attempt = wire.entry(about, "attempt", int, 1)
        if known is None or view.kind not in PHASES or (number, attempt) != (view.round_num, known.attempt.number):
            raise Refused(410, f"attempt {attempt} of round {number} is over")
        done = {"kept": True, "round": number, "attempt": attempt}
        before = self.book.message(number, attempt, phase, client)
        if before is not None:
            if before != hashlib.sha256(body).hexdigest():
                raise Refused(409, f"another message of client {client} is kept in phase {phase} of round {number}")
            return done
        if phase != view.kind:
            over = PHASES.index(phase) < PHASES.index(view.kind)
            when = "is over" if over else "has not begun"
            raise Refused(410 if over else 409, f"phase {phase} of round {number} {when}")
        if client not in view.waiting:
            raise Refused(409, f"client {client} does not take part in phase {phase} of round {number}")
        try:
            getattr(self, f"_check_{phase}")(client, about, words, known)
        except wire.WireError:
            raise
        except InvalidInput as error:
            raise Refused(422, str(error)) from None
        self.book.put_message(number, attempt, phase, client, body, now, self._members[client].key)
        if phase == KEYS:
            self._public |= public_keys(about)
        self.view = view._replace(waiting=view.waiting - {client})
        if not (self.view.waiting or self._lacks_members()) or (phase == UNMASK and self._can_open()):
            self._advance(now)
        return done

    def _check_keys(self, client: int, about: dict, _, known: Phase) -> None:
        peer = checked_peer(known.attempt, told_of(client, self._members[client].key, about))
        if peer.mask == peer.share or not self._public.isdisjoint((peer.mask, peer.share)):
            raise SecureError("every key of an attempt must be another one: devices refuse two that are equal")

    def _check_shares(self, client: int, about: dict, _, known: Phase) -> None:
        boxes = by_client(about, "boxes", BOX)
        if boxes.keys() != set(known.neighbours[client]):
            raise SecureError(f"client {client} must send one box for each of its neighbours")

    def _check_masked(self, client: int, about: dict, words: bytes, known: Phase) -> None:
        if wire.entry(about, "theta", str) != self.view.theta:
            raise Refused(409, "these words are of another theta")
        if len(words) != 4 * known.codec.words:
            raise SecureError(f"{known.codec.words} words are expected, and {len(words) / 4:g} came")

    def _check_unmask(self, client: int, about: dict, _, known: Phase) -> None:
        boxed = known.boxed & set(known.neighbours[client])
        for name, wanted in (("self", boxed & known.survivors), ("mask", boxed - known.survivors)):
            shares = by_client(about, name, shamir.SIZE)
            if shares.keys() != wanted or any(int.from_bytes(s, "big") >= shamir.ORDER for s in shares.values()):
                raise SecureError(f"client {client} must send the shares {name!r} of {sorted(wanted)}")

    # What the server does

    def _invite(self, opened: OpenRound, waiting: frozenset, deadline: float) -> None:
        """Begins the first attempt of a round that has just been opened."""
        self._began, self._again = time.perf_counter(), None
        self._begin(opened, deadline)

    @whole
    def _begin(self, opened: OpenRound, deadline: float) -> None:
        weights = {i: self._weight_of(i) for i in opened.arrival}
        sizes = {i: int(self.population.info(i).num_examples) for i in opened.arrival}
        about = {"threshold": self.rules.threshold, "weights": weights, "clip": self.rules.clip}
        about |= {"max_weight": max(weights.values(), default=1.0), "max_examples": max(sizes.values(), default=1)}
        self.book.begin_attempt(opened.number, about)
        self._show(opened, deadline)

    def _codec(self, opened: OpenRound, about: dict) -> Codec:
        try:
            return Codec(
                self.update_size, len(opened.arrival), about["clip"], about["max_weight"], about["max_examples"]
            )
        except CodecError as error:
            why = f"{self.run.folder}: {error}. Take smaller cohorts or a smaller --secure-clip"
            raise InvalidArgument(why) from error

    def _go_on(self, opened: OpenRound, now: float) -> None:
        self._began = time.perf_counter()
        attempt = self.book.attempt(opened.number)
        if opened.closed:
            self.view = View(wire.NOTHING, opened.number, opened.theta)
            self._close(now)
        elif attempt is None and self.book.bodies(opened.number):  # sent before rounds were secure, and told to count
            self._close(now)
        elif attempt is None or attempt.phase == FAILED:
            self._begin(opened, now + self.rules.deadline)
        else:
            self._show(opened, now + (self.rules.deadline if attempt.phase == KEYS else self.rules.phase))
            if not self.view.waiting and not self._lacks_members():
                self._advance(now)

    def _show(self, opened: OpenRound, deadline: float) -> None:
        """Makes the phase of the attempt that is under way the present one, from what is on disk."""
        kept = self.book.attempt(opened.number)
        assert kept is not None
        attempt = Attempt(self.run.config.run_id, opened.number, kept.number)
        known = Phase(attempt, kept.phase, self._codec(opened, kept.about))
        base, found = {"attempt": kept.number}, {}
        read = {phase: self.book.messages(opened.number, kept.number, phase) for phase in (KEYS, SHARES)}
        if kept.phase == KEYS:
            self._public = set().union(*(public_keys(wire.read_json(body)) for body in read[KEYS].values()))
            codec = {name: getattr(known.codec, name) for name in _CODEC}
            run, theta = self.run.config.run_id, opened.theta
            for i, arrival in opened.arrival.items():
                settings = visit_settings(self.run, self.population, i, arrival)
                own = {"settings": settings, "weight": kept.about["weights"][str(i)]}
                found[i] = base | own | {"run": run, "theta": theta, "codec": codec}
        else:
            identities = self.book.identities(opened.number, kept.number)
            told = {i: told_of(i, identities[i], wire.read_json(body)) for i, body in read[KEYS].items()}
            keys = {i: peer_of(about) for i, about in told.items()}
            near = graph.neighbours(attempt, keys, kept.about["threshold"])
            limits = {i: graph.threshold_of(len(n), kept.about["threshold"]) for i, n in near.items()}
            known = known._replace(keys=keys, neighbours=near, thresholds=limits)
            if kept.phase == SHARES:
                found = {i: base | {"threshold": limits[i], "peers": [told[j] for j in near[i]]} for i in keys}
            else:
                boxed = without_few(near, limits, read[SHARES])
                known = known._replace(boxed=boxed)
                if kept.phase == MASKED:
                    boxes = {i: wire.read_json(body)["boxes"] for i, body in read[SHARES].items()}
                    for i in boxed:
                        found[i] = base | {"boxes": {str(j): boxes[j][str(i)] for j in near[i] if j in boxed}}
                else:
                    survivors = frozenset(self.book.messages(opened.number, kept.number, MASKED))
                    known = known._replace(survivors=survivors)
                    for i in survivors:
                        found[i] = base | {"survivors": [j for j in near[i] if j in survivors]}
        came = self.book.messages(opened.number, kept.number, kept.phase)
        self._phase = known
        waiting = frozenset(found) - came.keys() - self._gone()
        self.view = View(kept.phase, opened.number, opened.theta, waiting, deadline, found)

    def tick(self, now: float) -> None:
        """`LiveRounds.tick`; it also ends a phase whose time is over, and begins the next attempt."""
        self._ticks = True
        self._check_on()
        if (self._again is not None or self.view.kind == KEYS) and self._give_up(now):
            return
        if self._again is not None:
            if now >= self._again:
                self._again = None
                self._begin(self._open_round, now + self.rules.deadline)
            return
        if self.view.kind not in PHASES:
            super().tick(now)
            return
        if self.view.kind == KEYS and not self.view.waiting:  # members may have joined with a new token meanwhile
            self._show(self._open_round, self.view.deadline)
        view, lacks = self.view, self._lacks_members()
        if now < view.deadline and (view.waiting or lacks):
            return
        assert self._phase is not None
        came = len(self.book.messages(view.round_num, self._phase.attempt.number, view.kind))
        few = came < max(LEAST, int(np.ceil(self.rules.quorum * (came + len(view.waiting)) - 1e-9)))
        if view.kind == KEYS and (view.waiting or lacks) and few:  # nobody has done anything yet that would be lost
            self.book.extend(view.round_num, now + self.rules.deadline, now)
            self._show(self._open_round, now + self.rules.deadline)  # also to those who have joined with a new token
        else:
            self._advance(now)

    def _lacks_members(self) -> bool:
        """Whether too few have sent keys for a sum, and members with a new token may still join."""
        if self.view.kind != KEYS or all(self._members[i].key for i in self._open_round.arrival):
            return False
        assert self._phase is not None
        return len(self.book.messages(self.view.round_num, self._phase.attempt.number, KEYS)) < LEAST

    @whole
    def _give_up(self, now: float) -> bool:
        """Ends a round of which too many members were revoked, without a sum: no attempt could have one."""
        opened = self._open_round
        left = [i for i in opened.arrival if not self._members[i].revoked]
        if len(left) >= LEAST:
            return False
        why = f"{len(left)} of {len(opened.arrival)} clients are not revoked, and {LEAST} are needed: it has no sum"
        self.book.fail(opened.number, why, now)
        _logger.warning("round %d failed: %s", opened.number, why)
        self._phase = self._again = None
        self._close(now)
        return True

    def _can_open(self) -> bool:
        """Whether enough neighbours of each client have answered."""
        known = self._phase
        assert known is not None
        return not known.circle.short_of(self._answered(known))

    def _answered(self, known: Phase) -> list[int]:
        waiting = self.view.waiting
        came = self.book.messages(known.attempt.round_num, known.attempt.number, UNMASK)
        return [i for i in came if i not in waiting]

    @whole
    def _advance(self, now: float) -> None:
        """Ends a phase: the next one begins, the sum is opened, or the attempt fails."""
        known, opened = self._phase, self._open_round
        assert known is not None
        number, attempt = opened.number, known.attempt.number
        came = self.book.messages(number, attempt, known.name)
        if known.name == UNMASK:
            self._open_sum(known, came, now)
            return
        here = came.keys()
        if known.name == SHARES:
            here = without_few(known.neighbours, known.thresholds, came)
        if len(here) < LEAST:
            self._fail(f"{len(here)} clients are left after phase {known.name}, and {LEAST} are needed", now)
            return
        if known.name == MASKED:
            circle = known._replace(survivors=frozenset(came)).circle
            if short := circle.short_of(came):
                t, left = known.thresholds[short[0]], len(set(known.neighbours[short[0]]) & came.keys())
                self._fail(f"client {short[0]} has {left} neighbours left, and {t} are needed to take masks off", now)
                return
        following = PHASES[PHASES.index(known.name) + 1]
        self.book.begin_phase(number, following, now)
        self._show(opened, now + self.rules.phase)
        if not self.view.waiting:  # all of them were revoked meanwhile
            self._advance(now)

    def _open_sum(self, known: Phase, came: dict[int, bytes], now: float) -> None:
        """Takes the masks off, and steps; or fails."""
        number, attempt = known.attempt.round_num, known.attempt.number
        if short := known.circle.short_of(came):
            i = short[0]
            left = len(set(known.neighbours[i]) & came.keys())
            self._fail(f"{left} neighbours of client {i} have revealed shares, {known.thresholds[i]} are needed", now)
            return
        sent = self.book.messages(number, attempt, MASKED)
        masked = {i: np.frombuffer(wire.unpack(body)[1], "<u4") for i, body in sent.items()}
        shares = {}
        for i, body in came.items():
            about = wire.read_json(body)
            shares[i] = Shares(*(by_client(about, name, shamir.SIZE) for name in ("self", "mask")))
        try:
            total = open_sum(known.attempt, known.circle, known.keys, masked, shares)
        except InvalidInput as error:
            self._fail(str(error), now)
            return
        expected = sum(int(self.population.info(i).num_examples) for i in sent)
        sums = known.codec.decode(total)
        if sums.examples != expected:
            why = (
                f"the sum has {sums.examples} examples, and its clients {expected}: one of them has other examples "
                "than when it joined, or sent other words"
            )
            self._fail(why, now)
            return
        self.book.put_sum(number, total, sent, sums.clipped, now)
        self._open_round = self.book.open_now()
        self._close(now)

    def _fail(self, why: str, now: float) -> None:
        """Ends an attempt without a sum. After a pause, which becomes longer, the round begins again."""
        opened = self._open_round
        kept = self.book.attempt(opened.number)
        assert kept is not None
        self.book.fail(opened.number, why, now)
        _logger.warning("round %d, attempt %d failed: %s", opened.number, kept.number, why)
        self._phase, self._again = None, now + min(2.0 ** min(kept.number - 1, 60), self.rules.deadline)
        self.view = View(wire.NOTHING, opened.number, opened.theta)

    def _step_of(self, number: int) -> Stepped:
        """The server's step with the sum."""
        found = self.book.opened_sum(number)
        if found is None:  # see `_go_on` and `_give_up`, where nothing came
            return super()._step_of(number)
        total, clients, size = found
        kept = self.book.attempt(number)
        assert kept is not None
        codec = self._codec(self._open_round, kept.about)
        sums = codec.decode(total)
        told: dict = {i: {"scores": []} for i in clients}
        server = self._after_sum(sums.gradient.astype(np.float32), clients)
        return Stepped(number, server, told, sums.loss / sums.examples, size)


_CODEC = ("size", "clients", "clip", "max_weight", "max_examples", "exponent", "loss_exponent")
