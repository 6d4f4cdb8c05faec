"""`SecureRounds` alone, with a clock of the test: dropouts, attempts that fail, kills, and what is refused."""

import json
import random

import numpy as np
import pytest

from helpers.live import join, live_theta
from helpers.live_fuzzer import damaged, strange
from helpers.marks import slow_but
from helpers.secure import Phone, joined
from tflite_export.convert.program import flatten
from tflite_export.device import payload
from tflite_export.device.live import wire
from tflite_export.device.live.secure.masks import SecureError
from tfpfl.checks import InvalidArgument
from tfpfl.live import secure_rounds
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused, Rules
from tfpfl.live.secure_rounds import SecureRounds
from tfpfl.live.secure_sum import open_sum
from tfpfl.live.watch import Watch
from tfpfl.runs.store import StoreError

RULES = {"wait_for": 10, "deadline": 10, "phase": 5, "awake": 1e6, "secure": True, "clip": 1.0}


@pytest.fixture
def secure_run(make_run, tmp_path):
    with make_run(tmp_path / "run", participation=1.0, rounds=1, evaluate_every=0) as run:
        yield run


def gradients(run, clients=range(10)):
    draw = np.random.default_rng(3)
    return {i: draw.normal(0, 1e-3, run.model.num_backbone_weights).astype(np.float32) for i in clients}


def answer(rounds, phones, now=1.0):
    """All of these phones answer, until nothing is left to do for them."""
    while any([(work := p.step(rounds, now)) and work["kind"] in wire.PHASES for p in phones.values()]):
        pass


def without(phones, *gone):
    return {i: phone for i, phone in phones.items() if i not in gone}


def check_step(run, given, clients):
    """The step is rho times the sum of alpha_i g_i of these clients; all are in the cohort, so I = r."""
    sizes = run.population.num_examples / run.population.num_examples.sum()
    expected = sum(sizes[i] * given[i].astype(np.float64) for i in clients)
    moved = live_theta(run) - flatten(run.model.initial_theta)
    assert np.abs(moved + 0.01 * expected).max() < 1e-8 and np.abs(moved).max() > 1e-6


def reasons(rounds):
    return [event[2] for event in rounds.book.events() if event[2].startswith("failed")]


@pytest.mark.parametrize("phase", slow_but(wire.PHASES, wire.MASKED, wire.UNMASK, ci=(wire.KEYS, wire.SHARES)))
def test_thirty_percent_drop_out_in_a_phase(secure_run, tmp_path, phase):
    given = gradients(secure_run)
    rounds, phones = joined(secure_run, Rules(**RULES), tmp_path, given)
    for name in wire.PHASES:
        here = without(phones, 1, 4, 8) if wire.PHASES.index(name) >= wire.PHASES.index(phase) else phones
        assert rounds.view.kind == name
        for phone in here.values():
            phone.step(rounds, 1.0)
            if rounds.view.kind != name:
                break  # enough shares have come
        if rounds.view.kind == name:
            rounds.tick(4.0)  # before the deadline it waits
            assert rounds.view.kind == name and rounds.view.waiting <= {1, 4, 8}
            rounds.tick(30.0)
    assert rounds.view.kind == wire.SCORE and not reasons(rounds)
    rounds.tick(99.0)
    counted = range(10) if phase == wire.UNMASK else [0, 2, 3, 5, 6, 7, 9]
    check_step(secure_run, given, counted)
    (row,) = secure_run.store.history()
    assert row["came"] == " ".join(map(str, counted)) and abs(row["loss"] - 0.5) < 1e-3
    for i, phone in phones.items():
        assert rounds.state(i, 1)["state"] == ("counted" if i in counted else "over"), phone
    rounds.close()


@pytest.mark.parametrize("phase", slow_but(wire.PHASES[1:], wire.MASKED, ci=(wire.SHARES, wire.UNMASK)))
def test_with_fewer_than_the_threshold_the_round_fails_and_begins_again(secure_run, tmp_path, phase):
    given = gradients(secure_run)
    rounds, phones = joined(secure_run, Rules(**RULES), tmp_path, given)
    while rounds.view.kind != phase:
        answer_once(rounds, phones)
    for i in (0, 1, 2, 3) if phase != wire.UNMASK else (0, 1, 2, 3, 4):
        phones[i].step(rounds, 2.0)
    held = tables(rounds)
    rounds.tick(60.0)
    (why,) = reasons(rounds)
    assert "are needed" in why and rounds.view.kind == wire.NOTHING
    assert secure_run.store.round_num == 0 and rounds.state(0, 1)["state"] == "open"
    assert held["message"] and not any(tables(rounds).values())  # what came is deleted, and there is no sum
    rounds.tick(60.5)
    assert rounds.view.kind == wire.NOTHING  # it rests
    rounds.tick(61.5)
    assert rounds.view.kind == wire.KEYS and rounds.work(0, 61.5)["attempt"] == 2
    secrets = {i: phones[i].state.attempt()["secrets"] for i in phones}
    answer(rounds, phones, 62.0)
    rounds.tick(99.0)
    check_step(secure_run, given, range(10))
    again = {i: phones[i].state.attempt()["secrets"] for i in phones}
    assert all(secrets[i][name] != again[i][name] for i in phones for name in secrets[i])
    rounds.close()


def test_after_an_attempt_that_failed_nobody_is_late_at_once(secure_run, tmp_path):
    rounds, phones = joined(secure_run, Rules(**RULES), tmp_path, gradients(secure_run))
    watch = Watch(rounds, "an-operators-token-of-a-test")
    for client in (0, 1, 2):
        phones[client].step(rounds, 1.0)
    assert watch.state(0, 4.0)["round"]["came"] == [0, 1, 2]
    for client in range(3, 10):
        phones[client].step(rounds, 1.0)
    rounds.tick(60.0)  # nobody has sent shares
    assert reasons(rounds)
    rounds.tick(61.0)
    rounds.book.revoke(9, 61.5)
    rounds.refresh()
    found = watch.state(0, 62.0)
    expected = {"began": 61.0, "deadline": 71.0, "moved": False, "came": [], "waiting": list(range(9))}
    assert {name: found["round"][name] for name in expected} == expected
    assert found["counts"]["working"] == 9 and found["counts"]["late"] == 0
    assert watch.state(0, 66.5)["counts"]["late"] == 9
    rounds.close()


def test_a_sum_with_other_examples_than_its_clients_have_is_not_used(secure_run, tmp_path):
    """One device masks another number of examples than it has. Nobody can see which one, but the sum tells."""
    given, expected = gradients(secure_run), int(secure_run.population.num_examples.sum())
    rounds, phones = joined(secure_run, Rules(**RULES), tmp_path, given)
    liar = phones[int(secure_run.population.num_examples.argmin())]  # with one more, its number is still a possible one
    liar.about["examples"] += 1
    while rounds.view.kind != wire.UNMASK:
        answer_once(rounds, phones)
    held = tables(rounds)
    answer_once(rounds, phones)
    assert reasons(rounds) == [
        f"failed: the sum has {expected + 1} examples, and its clients {expected}: one of them has other examples than "
        "when it joined, or sent other words"
    ]
    assert rounds.view.kind == wire.NOTHING and secure_run.store.round_num == 0
    assert held["message"] and not any(tables(rounds).values())
    liar.about["examples"] -= 1
    rounds.tick(3.0)
    assert rounds.view.kind == wire.KEYS and rounds.work(0, 3.0)["attempt"] == 2
    answer(rounds, phones, 3.0)
    rounds.tick(99.0)
    check_step(secure_run, given, range(10))
    rounds.close()


def answer_once(rounds, phones, now=1.0):
    """All of these phones send the message of the present phase."""
    phase = rounds.view.kind
    for phone in phones.values():
        if rounds.view.kind == phase:
            phone.step(rounds, now)


def tables(rounds):
    """{table: number of rows} of what is kept of clients' messages."""
    return {t: rounds.book._rows(f"SELECT COUNT(*) FROM {t}")[0][0] for t in ("message", "opened_sum", "arrived")}


def test_too_few_keys_only_move_the_deadline(secure_run, tmp_path):
    rounds, phones = joined(secure_run, Rules(**RULES), tmp_path, gradients(secure_run))
    answer_once(rounds, without(phones, *range(5, 10)))
    rounds.tick(11.0)
    assert rounds.view.kind == wire.KEYS and rounds.view.deadline == 21.0
    answer_once(rounds, phones)
    assert rounds.view.kind == wire.SHARES
    rounds.close()


class Killed(BaseException):
    """The server's power is gone."""


STEPS = ("begin_attempt", "begin_phase", "put_message", "put_sum", "open_round", "end_round", "fail")


@pytest.mark.parametrize("step", slow_but(STEPS, "put_message", "put_sum", ci=("fail", "begin_phase")))
def test_a_server_that_is_killed_goes_on(secure_run, tmp_path, step):
    """It dies after each call of a function that writes, and is started again; phones are killed all the time, too."""
    given, rules = gradients(secure_run), Rules(**RULES)
    rounds, phones = joined(secure_run, rules, tmp_path, {i: given[i] for i in range(9)})
    phones[9], dead, fails = Phone(rounds, 9, tmp_path / "phone9", given[9]), [0], step == "fail"

    def killing(book):
        real = getattr(book, step)

        def killed(*arguments, **named):
            real(*arguments, **named)
            dead[0] += 1
            raise Killed

        if dead[0] < 12:
            setattr(book, step, killed)

    killing(rounds.book)
    now = 1.0
    for _ in range(200):
        now += 0.5
        try:
            if rounds.view.kind == wire.DONE:
                break
            if rounds.book.members()[9].key is None:
                rounds.join("token 9", phones[9].about, now)
            if fails and rounds.view.kind == wire.MASKED:  # nobody sends words in the first attempt
                now, fails = rounds.view.deadline, False
            rounds.tick(now)
            for phone in phones.values():
                phone.restart()
                phone.step(rounds, now)
            if rounds.view.kind == wire.SCORE:
                rounds.tick(now + 100)
        except Killed:
            rounds.close()
            while True:
                try:
                    rounds = SecureRounds(secure_run, rules, now)
                    killing(rounds.book)
                    break
                except Killed:
                    continue
        except Refused as refused:
            assert refused.status in (409, 410), refused
    assert rounds.view.kind == wire.DONE and secure_run.store.round_num == 1
    assert dead[0] > 0
    check_step(secure_run, given, range(10))
    assert rounds.book.members()[0].arrived == 1
    rounds.close()


def test_messages_again_late_and_others(secure_run, tmp_path):
    rounds, phones = joined(secure_run, Rules(**RULES), tmp_path, gradients(secure_run))
    body = phones[0].body(json.loads(json.dumps(rounds.work(0, 1.0))))
    for _ in range(2):
        assert rounds.message(0, 1, wire.KEYS, body, 1.0) == {"kept": True, "round": 1, "attempt": 1}
    assert rounds.work(0, 1.0) is None
    refusals = [
        (lambda: rounds.message(0, 1, wire.KEYS, body + b" ", 1.0), 409, "another message of client 0"),
        (lambda: rounds.message(1, 1, wire.KEYS, body, 1.0), 400, "signature"),
        (lambda: rounds.message(1, 1, wire.SHARES, b'{"attempt": 1, "boxes": {}}', 1.0), 409, "has not begun"),
        (lambda: rounds.message(1, 1, wire.KEYS, b'{"attempt": 2}', 1.0), 410, "attempt 2 of round 1 is over"),
        (lambda: rounds.message(1, 7, wire.KEYS, b'{"attempt": 1}', 1.0), 410, "round 7 is over"),
        (lambda: rounds.message(1, 1, wire.KEYS, b"[]", 1.0), 400, "JSON object"),
        (lambda: rounds.update(1, 1, b"", 1.0), 410, "updates are masked"),
    ]
    for call, status, words in refusals:
        with pytest.raises((Refused, wire.WireError), match=words) as refused:
            call()
        assert getattr(refused.value, "status", 400) == status
    answer_once(rounds, without(phones, 9))
    late = phones[9].body(json.loads(json.dumps(rounds.work(9, 1.0))))
    rounds.tick(99.0)
    with pytest.raises(Refused, match="phase keys of round 1 is over") as refused:
        rounds.message(9, 1, wire.KEYS, late, 99.0)
    assert refused.value.status == 410
    with pytest.raises(Refused, match="does not take part") as refused:
        rounds.message(9, 1, wire.SHARES, b'{"attempt": 1, "boxes": {}}', 99.0)
    assert refused.value.status == 409
    for boxes in ({}, {"1": "AA=="}, {"01": ""}, {str(i): wire.to_text(bytes(92)) for i in range(2, 9)}, 3):
        with pytest.raises((Refused, wire.WireError)):
            rounds.message(0, 1, wire.SHARES, json.dumps({"attempt": 1, "boxes": boxes}).encode(), 1.0)
    answer_once(rounds, phones)
    work = rounds.work(0, 1.0)
    for about, words in (({"theta": "00" * 32}, bytes(8)), ({"theta": rounds.view.theta}, bytes(8))):
        with pytest.raises(Refused):
            rounds.message(0, 1, wire.MASKED, wire.pack({"attempt": 1} | about, words), 1.0)
    answer_once(rounds, phones)
    assert work["kind"] == wire.MASKED and rounds.view.kind == wire.UNMASK
    bad = {"attempt": 1, "self": {str(i): wire.to_text(b"\xff" * 32) for i in range(1, 9)}, "mask": {}}
    with pytest.raises(Refused, match="must send the shares"):
        rounds.message(0, 1, wire.UNMASK, json.dumps(bad).encode(), 1.0)
    rounds.close()


def test_the_server_never_gets_a_gradient(secure_run, tmp_path):
    """What phones send does not depend on their gradients but through words with masks: no message has them."""
    given = gradients(secure_run)
    rounds, phones = joined(secure_run, Rules(**RULES), tmp_path, given)
    sent = []
    real = rounds.book.put_message
    rounds.book.put_message = lambda *a: (sent.append(a), real(*a))
    answer(rounds, phones)
    masked = {a[3]: np.frombuffer(wire.unpack(a[4])[1], "<u4") for a in sent if a[2] == wire.MASKED}
    assert len(masked) == 10 and len({a[3] for a in sent}) == 10
    for i, words in masked.items():
        signed = words[:-3].view(np.int32).astype(np.float64)
        assert abs(np.corrcoef(signed, given[i])[0, 1]) < 5 / np.sqrt(len(signed))
        assert 0.45 < (words > 2**31).mean() < 0.55
    assert not [a for a in sent if b"loss" in a[4] or b"examples" in a[4]]
    rounds.close()


def test_a_device_answers_once(secure_run, tmp_path):
    """A server that asks for other survivors, or for an attempt again, gets nothing, nor after a kill."""
    rounds, phones = joined(secure_run, Rules(**RULES), tmp_path, gradients(secure_run))
    works = {}
    for phase in wire.PHASES:
        works[phase] = json.loads(json.dumps(rounds.work(0, 1.0)))
        if phase != wire.UNMASK:
            answer_once(rounds, phones)
    phone, visit = phones[0], phones[0].state.visit(2, 2)
    masked = phone.state.message(wire.MASKED)
    fewer = works[wire.MASKED] | {"boxes": dict(list(works[wire.MASKED]["boxes"].items())[:6])}
    assert phone.visits.message(fewer, visit) == masked  # never another vector with these masks
    with pytest.raises(SecureError, match="nothing is revealed"):
        phone.visits.message(works[wire.UNMASK] | {"survivors": [1, 2]}, None)
    first = phone.visits.message(works[wire.UNMASK], None)
    phone.restart()
    assert phone.visits.message(works[wire.UNMASK], None) == first
    with pytest.raises(SecureError, match="does not answer twice"):
        phone.visits.message(works[wire.UNMASK] | {"survivors": [1, 2, 3, 4, 5, 6]}, None)
    other = phone.visits.message(works[wire.KEYS] | {"attempt": 2}, visit)
    assert phone.visits.message(works[wire.KEYS] | {"attempt": 2}, visit) == other
    with pytest.raises(SecureError, match="never come back"):
        phone.visits.message(works[wire.KEYS], visit)
    with pytest.raises(SecureError, match="no keys of this attempt"):
        phone.visits.message(works[wire.UNMASK], None)
    phone.visits.refuse("something was wrong")
    with pytest.raises(SecureError, match="something was wrong"):
        phone.visits.message(works[wire.KEYS] | {"attempt": 2}, visit)
    late = Phone(rounds, 1, tmp_path / "another", np.zeros(3, np.float32))
    with pytest.raises(SecureError, match="no keys of this attempt"):
        late.visits.message(works[wire.SHARES], None)
    rounds.close()


def test_what_cannot_be_is_refused_at_the_start(make_run, secure_run, tmp_path):
    for rules, words in (
        ({"max_norm": 1.0}, "--secure-clip"),
        ({"payload": "int8"}, "leave it out"),
        ({"buffer": 3}, "--async"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            SecureRounds(secure_run, Rules(**RULES | rules), 0.0)
    with make_run(tmp_path / "few", participation=0.2) as run:
        with pytest.raises(InvalidArgument, match="may draw 2 clients"):
            SecureRounds(run, Rules(**RULES), 0.0)
    with make_run(tmp_path / "binomial", participation=0.9, sampling="binomial") as run:
        with pytest.raises(InvalidArgument, match="may draw 0 clients"):
            SecureRounds(run, Rules(**RULES), 0.0)
    with make_run(tmp_path / "secure") as run:
        rounds = SecureRounds(run, Rules(**RULES), 0.0)
        about = {"protocol": 1, "examples": 1, "classes": 1, "key": wire.Signer().public}
        with pytest.raises(Refused, match="this client cannot") as refused:
            rounds.join("token", about, 0.0)
        assert refused.value.status == 409
        for version in (None, "0", "2"):
            with pytest.raises(Refused, match="this client cannot"):
                rounds.require(version)
        rounds.close()
        with pytest.raises(InvalidArgument, match="give --secure"):  # it has begun so
            LiveRounds(run, Rules(), 0.0)
    for bad in ({"threshold": 0.4}, {"threshold": 1.0}, {"clip": 0.0}, {"phase": 0.0}):
        with pytest.raises(InvalidArgument):
            Rules(**bad)


def test_a_round_waits_for_three_clients(secure_run, tmp_path):
    given = gradients(secure_run)
    rounds, phones = joined(secure_run, Rules(**RULES | {"wait_for": 1}), tmp_path, dict(list(given.items())[:2]))
    for now in (1.0, 2.0):
        rounds.tick(now)
        assert rounds.view.kind == wire.NOTHING
    (why,) = [event[2] for event in rounds.book.events() if event[2].startswith("waits")]  # once, and not every second
    assert why == "waits: 1 of 1 clients that are here would be invited, and 3 are needed"
    more, _ = joined_more(rounds, tmp_path, given, 2)
    rounds.tick(2.0)
    assert rounds.view.kind == wire.KEYS and rounds.view.waiting == {0, 1, 2}
    answer(rounds, phones | more)
    rounds.tick(99.0)
    check_step(secure_run, given, [0, 1, 2])
    rounds.close()


@pytest.mark.parametrize("phase", wire.PHASES)
def test_a_round_with_fewer_than_three_clients_that_are_not_revoked_ends_without_a_sum(make_run, tmp_path, phase):
    """Otherwise the run would try the same round again and again, and the other clients would get none."""
    with make_run(tmp_path / "run", participation=0.3, rounds=2, evaluate_every=0) as run:
        rounds, phones = joined(run, Rules(**RULES), tmp_path, gradients(run))
        invited = sorted(rounds.view.waiting)
        assert len(invited) == 3
        while rounds.view.kind != phase:
            answer_once(rounds, phones)
        rounds.book.revoke(invited[0], 2.0)  # a device that is lost, as `tfpfl serve --revoke` has it
        rounds.close()
        rounds = SecureRounds(run, rounds.rules, 3.0)
        others = without(phones, invited[0])
        for now in range(4, 30):
            if rounds.view.round_num == 2:
                break
            answer_once(rounds, others, float(now))
            rounds.tick(float(now))
        assert rounds.view.kind == wire.KEYS and rounds.view.round_num == 2 and run.store.round_num == 1
        (row,) = run.store.history()
        assert (row["clients"], row["dropped"], row["came"]) == (0, 3, "")
        assert np.array_equal(live_theta(run), flatten(run.model.initial_theta))
        assert "2 of 3 clients are not revoked" in reasons(rounds)[-1]
        assert rounds.state(invited[1], 1)["state"] == "over"
        answer(rounds, others, 31.0)
        rounds.tick(99.0)
        assert run.store.round_num == 2 and len(run.store.history()[1]["came"].split()) == 3
        rounds.close()


@pytest.mark.parametrize("closed", [False, True])
def test_a_plain_round_that_is_open_when_rounds_become_secure_ends_with_what_it_counted(make_run, tmp_path, closed):
    """These clients were told that they are counted; in a closed round their updates had been lost."""
    with make_run(tmp_path / "run", participation=1.0, rounds=2, evaluate_every=0) as run:
        given = gradients(run)
        plain = LiveRounds(run, Rules(wait_for=10, deadline=10, awake=1e6), 0.0)
        join(plain, range(10))
        for i in (3, 5, 8):
            examples = int(run.population.num_examples[i])
            about = {"theta": plain.view.theta, "examples": examples, "loss": 0.5, "scores": []}
            plain.update(i, 1, wire.pack(about, payload.encode(given[i])), 1.0)
        if closed:  # it was killed before the round was saved
            plain.book.close_round(1, 2.0)
        plain.close()
        rounds = SecureRounds(run, Rules(**RULES), 3.0)
        rounds.tick(99.0)  # no scores come
        check_step(run, given, (3, 5, 8))
        (row,) = run.store.history()
        assert (row["came"], row["loss"]) == ("3 5 8", 0.5) and rounds.state(5, 1)["state"] == "counted"
        assert (rounds.view.kind, rounds.view.round_num) == (wire.KEYS, 2)
        rounds.close()


def test_with_three_of_ten_clients_the_step_is_that_of_plain_rounds(secure_run, make_run, tmp_path):
    given = gradients(secure_run, range(3))
    rounds, phones = joined(secure_run, Rules(**RULES | {"wait_for": 3}), tmp_path, given)
    answer(rounds, phones)
    rounds.tick(99.0)
    rounds.close()
    with make_run(tmp_path / "plain", participation=1.0, rounds=1, evaluate_every=0) as run:
        plain = LiveRounds(run, Rules(wait_for=3, deadline=10, awake=1e6), 0.0)
        join(plain, given)
        for i, gradient in given.items():
            about = {"theta": plain.view.theta, "examples": phones[i].about["examples"], "loss": 0.5, "scores": []}
            plain.update(i, 1, wire.pack(about, payload.encode(gradient)), 1.0)
        plain.tick(99.0)
        plain.close()
        assert run.store.round_num == secure_run.store.round_num == 1
        moved = live_theta(run) - flatten(run.model.initial_theta)
        assert np.abs(live_theta(secure_run) - live_theta(run)).max() < 1e-7 < 0.1 * np.abs(moved).max()


def joined_more(rounds, folder, given, client):
    phone = Phone(rounds, client, folder / f"phone{client}", given[client])
    rounds.join(f"token {client}", phone.about, 1.0)
    return {client: phone}, rounds


def _read(body):
    """A body of JSON; or why it is none."""
    try:
        return json.loads(body)
    except ValueError as error:
        return str(error) + body[:40].hex()


@pytest.mark.slow
def test_damaged_messages_are_refused_and_the_round_goes_on(secure_run, tmp_path):
    given, draw = gradients(secure_run), random.Random(27)
    rounds, phones = joined(secure_run, Rules(**RULES), tmp_path, given)
    for phase in wire.PHASES:
        taken = 0
        for _ in range(150):
            client = draw.randrange(10)
            work = rounds.work(client, 1.0)
            if work is None:
                continue
            body = phones[client].body(json.loads(json.dumps(work)))
            if phase in (wire.SHARES, wire.UNMASK) or (phase == wire.KEYS and draw.random() < 0.6):
                bad = json.dumps(strange(draw, json.loads(body))).encode()
            else:  # of boxes and shares nobody but their receiver can see that a bit is wrong
                bad = damaged(draw, body)
            if len(bad) == len(body) if phase == wire.MASKED else _read(bad) == _read(body):
                continue  # other words are words, too; and spaces in JSON are of no account
            before = rounds.book.message(1, 1, phase, client)
            with pytest.raises((Refused, wire.WireError)):
                rounds.message(client, 1, phase, bad, 1.0)
            taken += 1
            assert rounds.book.message(1, 1, phase, client) == before
        assert taken > 50
        answer_once(rounds, phones)
    rounds.tick(99.0)
    check_step(secure_run, given, range(10))
    rounds.close()


def test_a_round_may_fail_more_often_than_a_float_can_double(secure_run, tmp_path, monkeypatch):
    """The pause before the next attempt is at most the deadline; 2^1024 ended the server."""
    rounds, _ = joined(secure_run, Rules(**RULES), tmp_path, gradients(secure_run))
    kept = rounds.book.attempt(1)
    monkeypatch.setattr(rounds.book, "attempt", lambda number: kept._replace(number=2000))
    rounds._fail("too few", 7.0)
    assert rounds._again == 7.0 + RULES["deadline"] and reasons(rounds)
    rounds.close()


@pytest.mark.parametrize("fails", ["commit_round", "end_round"])
def test_after_a_full_disk_the_sum_is_not_opened_again(make_run, tmp_path, monkeypatch, fails):
    """A second sum over fewer clients would say what the ones between them sent."""
    with make_run(tmp_path / "run", participation=1.0, rounds=30, evaluate_every=0) as run:
        given, opened = gradients(run), []
        rounds, phones = joined(run, Rules(**RULES), tmp_path, given)
        monkeypatch.setattr(secure_rounds, "open_sum", lambda *about: opened.append(about) or open_sum(*about))
        while rounds.view.kind != wire.UNMASK:
            answer_once(rounds, phones)

        def full(*_):
            raise StoreError("the disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(run.store if fails == "commit_round" else rounds.book, fails, full)
            with pytest.raises(StoreError, match="the disk is full"):
                answer_once(rounds, phones)
        for call in (lambda: rounds.tick(60.0), lambda: phones[9].step(rounds, 60.0) or rounds.tick(60.0)):
            with pytest.raises(StoreError, match="the disk is full"):
                call()
        with pytest.raises(StoreError, match="the disk is full"):  # and not 410, after which a device forgets its visit
            rounds.message(9, 1, wire.UNMASK, b"{}", 60.0)
        assert rounds.state(0, 1)["state"] == "counted" and len(opened) == 1
        rounds.close()
        again = SecureRounds(run, Rules(**RULES), 61.0)
        assert run.store.round_num == 1 and len(opened) == 1 and not reasons(again)
        check_step(run, given, range(10))
        again.close()


@pytest.mark.parametrize("key_of", [3, 0])
def test_a_client_with_a_key_that_is_there_already_is_refused_and_the_others_go_on(secure_run, tmp_path, key_of):
    """Its neighbours refuse two keys that are equal, so that every attempt would fail."""
    given = gradients(secure_run)
    rounds, phones = joined(secure_run, Rules(**RULES), tmp_path, given)
    phones[0].step(rounds, 1.0)
    phone, work = phones[3], rounds.work(3, 1.0)
    phone.body(work)
    kept = phone.state.attempt()
    kept["secrets"]["share"] = phones[key_of].state.attempt()["secrets"]["mask"]
    phone.state.keep_attempt(kept)
    phone.state._delete(wire.KEYS)
    body = phone.visits.message(work, phone.state.visit(2, 2))
    rounds.close()
    rounds = SecureRounds(secure_run, Rules(**RULES), 1.0)  # a new start knows the keys that came before
    with pytest.raises(Refused, match="every key of an attempt must be another one") as refused:
        rounds.message(3, 1, wire.KEYS, body, 1.0)
    assert refused.value.status == 422
    for name in wire.PHASES:
        answer_once(rounds, without(phones, 3))
        if rounds.view.kind == name:
            rounds.tick(30.0)
    assert not reasons(rounds)
    rounds.tick(99.0)
    check_step(secure_run, given, [i for i in range(10) if i != 3])
    rounds.close()


def test_a_round_waits_for_members_with_new_tokens_if_the_others_are_too_few(secure_run, tmp_path):
    """Attempts would fail and begin again, with the same two clients."""
    given = gradients(secure_run)
    rounds, phones = joined(secure_run, Rules(**RULES), tmp_path, given)
    rounds.book.set_tokens({i: f"new token {i}" for i in range(2, 10)})
    rounds.refresh()
    for now in range(1, 62, 5):
        rounds.tick(float(now))
        answer_once(rounds, without(phones, *range(2, 10)), float(now))
    assert not reasons(rounds) and rounds.view.kind == wire.KEYS and not rounds.view.waiting
    for i in range(2, 10):
        rounds.join(f"new token {i}", phones[i].about, 62.0)
    rounds.tick(63.0)
    assert rounds.view.waiting == frozenset(range(2, 10)) and rounds.book.attempt(1).number == 1
    answer(rounds, phones, 64.0)
    rounds.tick(199.0)
    check_step(secure_run, given, range(10))
    rounds.close()
