"""Asynchronous rounds of a run: what is counted, kept and refused; over HTTP; and their log, computed again."""

import hashlib
import zlib

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from helpers.live import EXACT, Cut, device, in_threads, join, live_theta, serving, simulated
from helpers.marks import slow_but
from tflite_export.convert.program import flatten
from tflite_export.device import payload
from tflite_export.device.live import wire
from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.live.async_replay import replay
from tfpfl.live.async_rounds import AsyncRounds
from tfpfl.live.async_virtual import Phones, simulate
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused, Rules
from tfpfl.runs.store import StoreError
from tfpfl.runs.training import DivergedError
from tfpfl.studies.records import Record


def joined(run, clients=range(10), now=0.0, **rules):
    return join(AsyncRounds(run, Rules(**{"buffer": 2, "wait_for": 10} | rules), now), clients, now)


def body_of(rounds, client, theta, value=1e-3):
    gradient = np.broadcast_to(np.float32(value), rounds.model.num_backbone_weights)
    about = {"theta": theta, "examples": int(rounds.population.info(client).num_examples), "loss": 0.5, "scores": []}
    return wire.pack(about, payload.encode(gradient))


def send(rounds, client, value=1e-3, now=1.0, theta=None, number=None):
    """Sends a client's next update, of the newest theta unless another is named."""
    work = rounds.work(client, now)
    body = body_of(rounds, client, theta or work["theta"], value)
    return rounds.update(client, number or work["round"], body, now)


def moved(run):
    return live_theta(run) - flatten(run.model.initial_theta)


@pytest.fixture
def whole(make_run, tmp_path):
    """A new run with all clients in every round; its first 20 rounds are not scored."""
    with make_run(tmp_path / "whole", participation=1.0, rounds=30, evaluate_every=0) as run:
        yield run


def test_the_server_steps_at_every_second_arrival(whole):
    rounds, alpha = joined(whole), whole.population.num_examples / whole.population.num_examples.sum()
    assert [rounds.work(i, 1.0)["round"] for i in range(10)] == [1] * 10
    old = rounds.view.theta
    for client in (0, 1, 1):
        send(rounds, client)
    assert whole.store.round_num == 1 and rounds.view.theta != old
    assert np.allclose(moved(whole), -0.01 * 1e-3 * (alpha[0] + alpha[1]) * 10 / 2, rtol=1e-4)  # m = 10, as if equal
    send(rounds, 2, theta=old)
    rows = whole.store.history()
    assert [(r["clients"], r["came"], r["updates"], r["staleness"]) for r in rows] == [
        (2, "0 1", 2, 0.0),
        (2, "1 2", 2, 0.5),
    ]
    gap = 10 + 0.2 * (1 - 10)  # of client 1, which came twice in a row
    step = (alpha[0] + 2 * alpha[1] * (1 + gap / 10) / 2 + alpha[2]) * 10 / 2
    assert np.allclose(moved(whole), -0.01 * 1e-3 * step, rtol=1e-4)
    rate = whole.config.hyperparameters["rho"] * alpha[1]
    assert rounds.work(1, 2.0)["settings"]["head_rate"] == pytest.approx(rate * gap / 2)  # as theta's step
    rounds.close()


def test_what_a_run_costs_counts_every_visit_of_a_client_in_a_step(whole):
    rounds = joined(whole)
    for client in (0, 0, 0, 1):
        send(rounds, client)
    rounds.close()
    summary = whole.write_summary()
    assert [row["clients"] for row in whole.store.history()] == [1, 2] and summary["client_visits"] == 4
    assert summary["bytes_down"] == 4 * 4 * rounds.update_size
    assert Record.read(whole.folder).spent("passes")[-1] == 4 * sum(summary["passes"].values())


def test_what_is_counted_and_what_is_not(whole):
    rounds = joined(whole, staleness=1)
    first = rounds.work(0, 1.0)["theta"]
    body = body_of(rounds, 0, first)
    assert rounds.update(0, 1, body, 1.0) == {"counted": True, "round": 1}
    assert rounds.update(0, 1, body, 1.0) == {"counted": True, "round": 1}  # the same bytes again
    assert rounds.async_server.count == 1

    def refused(status, client, number, body):
        with pytest.raises(Refused) as error:
            rounds.update(client, number, body, 1.0)
        assert error.value.status == status, str(error.value)

    refused(409, 0, 1, body_of(rounds, 0, first, 2e-3))  # other bytes
    refused(409, 0, 3, body_of(rounds, 0, first))  # not the next visit
    refused(409, 1, 1, body_of(rounds, 1, hashlib.sha256(b"x").hexdigest()))  # a theta that was never sent
    refused(422, 1, 1, body_of(rounds, 1, first)[:-4])
    send(rounds, 1)
    refused(410, 1, 2, body_of(rounds, 1, first))  # a theta before the client's last arrival
    assert rounds.update(2, 1, body_of(rounds, 2, first), 1.0)["counted"]  # one step old, as is allowed
    send(rounds, 3)
    refused(410, 4, 1, body_of(rounds, 4, first))  # two steps old
    assert send(rounds, 4) == {"counted": True, "round": 1}
    assert rounds.book.arrivals(4)[0].arrival.since == 4  # and its gap begins anew
    assert rounds.async_server.count == 5 and whole.store.round_num == 2
    assert [event[2] for event in rounds.book.events()].count("arrived") == 5
    rounds.close()


def test_a_client_that_was_away_or_came_later_is_owed_nothing_for_that_time(whole):
    rounds = joined(whole, clients=range(9), wait_for=9, awake=90.0)
    rounds.work(8, 0.0)
    for _ in range(3):
        send(rounds, 0, now=1.0)
    join(rounds, [9], 2.0)
    send(rounds, 0, now=3.0)
    send(rounds, 9, now=3.0)
    send(rounds, 8, now=200.0)  # it asks again after 200 s
    assert [(one.arrival.client, one.arrival.since) for one in rounds.book.arrivals(3)] == [(0, 3), (9, 4), (8, 5)]
    rounds.close()


def test_a_client_that_was_away_is_owed_nothing_if_it_is_asked_for_scores_first(make_run, tmp_path):
    with make_run(tmp_path / "run", participation=1.0, rounds=30, evaluate_every=1) as run:
        rounds = joined(run, awake=90.0, deadline=1e6)
        send(rounds, 8, now=1.0)
        for client in range(7):  # seven arrivals while client 8 is away
            while rounds.work(client, 2.0)["kind"] == wire.SCORE:
                work = rounds.work(client, 2.0)
                rounds.score(client, work["round"], {"theta": work["theta"], "scores": []}, 2.0)
            send(rounds, client, now=2.0)
        count = rounds.async_server.count
        while (work := rounds.work(8, 500.0))["kind"] == wire.SCORE:
            rounds.score(8, work["round"], {"theta": work["theta"], "scores": []}, 501.0)
        assert work["kind"] == wire.VISIT and count == 8
        send(rounds, 8, now=502.0)
        assert rounds.book.arrivals(count)[0].arrival.since == count  # its gap is this arrival alone
        rounds.close()


@pytest.mark.parametrize("first", ["its last update", "a refused update", "a join"])
def test_a_client_that_was_away_is_owed_nothing_whatever_it_sends_first(whole, first):
    """A device that did not get the answer to its update sends it again at its next start, before it asks for work."""
    rounds = joined(whole, awake=90.0)
    work = rounds.work(8, 1.0)
    body = body_of(rounds, 8, work["theta"])
    rounds.update(8, 1, body, 1.0)
    for client in range(7):  # seven arrivals while client 8 is away
        send(rounds, client, now=1.0)
    if first == "its last update":
        assert rounds.update(8, 1, body, 500.0)["counted"]
    elif first == "a join":
        info = rounds.population.info(8)
        about = {"protocol": 1, "examples": int(info.num_examples), "classes": int(info.num_classes)}
        rounds.join("token 8", about | {"key": wire.Signer().public}, 500.0)
    else:
        with pytest.raises(Refused):
            rounds.update(8, 7, body, 500.0)
    send(rounds, 8, now=501.0)
    assert rounds.book.arrivals(8)[0].arrival.since == 8  # its gap is this arrival alone
    rounds.close()


def test_a_client_that_was_at_work_for_long_is_not_away_also_if_its_update_is_refused(whole):
    rounds = joined(whole, awake=90.0, max_norm=1.0)
    send(rounds, 8, now=1.0)
    theta = rounds.work(8, 1.0)["theta"]
    for client in range(7):  # seven arrivals while client 8 computes
        send(rounds, client, now=1.0)
    with pytest.raises(Refused, match="the gradient's norm is") as refused:
        rounds.update(8, 2, body_of(rounds, 8, theta, 1.0), 500.0)
    assert refused.value.status == 422
    rounds.update(8, 2, body_of(rounds, 8, theta), 501.0)
    assert rounds.book.arrivals(8)[0].arrival.since == 1  # its gap is the whole time
    rounds.close()


@pytest.mark.parametrize("failing", ["commit_round", "end_step"])
def test_a_step_that_cannot_be_saved_ends_the_server_and_a_new_start_saves_it(whole, monkeypatch, failing):
    """The state in memory is ahead of the disk: no later step could be saved, and theta would stay the old one."""
    rounds = joined(whole)

    def full(*_):
        raise StoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(whole.store if failing == "commit_round" else rounds.book, failing, full)
        send(rounds, 0)
        with pytest.raises(StoreError):
            send(rounds, 1)
    assert rounds.work(2, 1.0) is None  # no work of an old theta
    with pytest.raises(StoreError):  # and not that the run is over: the device sends it again
        rounds.update(2, 1, body_of(rounds, 2, "any"), 1.0)
    with pytest.raises(StoreError, match="the disk is full"):
        rounds.tick(2.0)
    rounds.close()
    rounds = AsyncRounds(whole, Rules(buffer=2, wait_for=10), 3.0)
    assert whole.store.round_num == 1 and [r["came"] for r in whole.store.history()] == ["0 1"]
    send(rounds, 2, now=4.0)
    send(rounds, 3, now=4.0)
    assert whole.store.round_num == 2
    rounds.close()


def test_scores_that_cannot_be_saved_end_the_server_and_a_new_start_saves_them(make_run, tmp_path, monkeypatch):
    """It had waited for ever: nobody was asked for scores any more, and the run was not over."""
    with make_run(tmp_path / "run", participation=1.0, rounds=1, evaluate_every=1) as run:
        rounds = joined(run, deadline=10.0)
        send(rounds, 0)
        send(rounds, 1)

        def full(*_):
            raise StoreError("the disk is full")

        rows = [{"split": "test", "examples": 0, "loss": 0.25, "score": 0.5}]
        with monkeypatch.context() as patched:
            patched.setattr(run.store, "add_scores", full)
            for client in range(10):
                examples = int(run.federation.num_examples("test")[client])
                about = {"theta": rounds.work(client, 2.0)["theta"], "scores": [rows[0] | {"examples": examples}]}
                if client < 9:
                    rounds.score(client, 1, about, 2.0)
            with pytest.raises(StoreError):
                rounds.score(9, 1, about, 2.0)
        for call in (lambda: rounds.tick(3.0), lambda: rounds.score(9, 1, about, 3.0)):
            with pytest.raises(StoreError, match="the disk is full"):
                call()
        rounds.close()
        rounds = AsyncRounds(run, Rules(buffer=2, wait_for=10, deadline=10.0), 4.0)
        assert len(run.store.evaluations(1)) == 10 and rounds.view.kind == wire.DONE
        rounds.close()


def test_nobody_waits_for_the_scores_of_a_client_with_a_new_token(make_run, tmp_path):
    with make_run(tmp_path / "run", participation=1.0, rounds=1, evaluate_every=1) as run:
        rounds = joined(run)
        send(rounds, 0)
        send(rounds, 1)
        rounds.book.set_tokens({3: "another"})
        rounds.refresh()
        assert rounds._scoring[1].waiting == frozenset(range(10)) - {3}
        rounds.close()


@pytest.mark.parametrize("stopped_for", [1.0, 5000.0])
def test_who_was_away_before_a_start_of_the_server_is_away_after_it(whole, stopped_for):
    """And who was there is not made away by a server that was stopped for long."""
    rounds = joined(whole, awake=90.0)
    send(rounds, 8, now=1.0)
    for client in range(7):  # seven arrivals while client 8 is away
        send(rounds, client, now=1000.0)
    rounds.close()
    start = 1000.0 + stopped_for
    rounds = AsyncRounds(whole, Rules(buffer=2, wait_for=10, awake=90.0), start)
    send(rounds, 8, now=start + 2.0)
    send(rounds, 0, now=start + 2.0)
    assert [(one.arrival.client, one.arrival.since) for one in rounds.book.arrivals(8)] == [(8, 8), (0, 2)]
    rounds.close()


def test_who_was_away_is_away_after_a_start_also_if_the_clock_was_set_back_before(whole):
    rounds, rules = joined(whole, now=1e6, awake=90.0), Rules(buffer=2, wait_for=10, awake=90.0)
    send(rounds, 8, now=1e6 + 1.0)
    rounds.close()
    rounds = AsyncRounds(whole, rules, 1000.0)
    for client in range(7):
        send(rounds, client, now=1000.0 + 100 * client)
    rounds.close()
    rounds = AsyncRounds(whole, rules, 1700.0)
    send(rounds, 8, now=1702.0)
    assert rounds.book.arrivals(8)[0].arrival.since == 8  # it was paid for all arrivals since its last one
    rounds.close()


@pytest.mark.parametrize(("client", "since"), {"new": (9, 8), "back": (8, 8), "slow": (7, 2)}.values())
def test_a_start_of_the_server_during_a_visit_makes_no_client_away_or_owed_more(whole, client, since):
    """A client that had joined just before was paid for all arrivals since the run began, with one huge step."""
    rounds = joined(whole, clients=range(9), wait_for=9, awake=90.0)
    send(rounds, 8, now=1.0)
    send(rounds, 7, now=1.0)
    body = body_of(rounds, 7, rounds.work(7, 1.0)["theta"])
    for other in range(6):  # six arrivals while client 7 computes and client 8 is away
        send(rounds, other, now=1000.0)
    if client != 7:
        if client == 9:
            join(rounds, [9], 1000.0)
        body = body_of(rounds, client, rounds.work(client, 1000.0)["theta"])
    rounds.close()
    rounds = AsyncRounds(whole, Rules(buffer=2, wait_for=9, awake=90.0), 1001.0)
    rounds.update(client, 1 if client == 9 else 2, body, 1002.0)
    assert rounds.book.arrivals(8)[0].arrival.since == since
    rounds.close()


def test_it_diverges_before_the_step_is_saved(make_run, tmp_path):
    with make_run(tmp_path / "run", EXACT | {"rho": 10.0}, participation=1.0) as run:
        rounds = joined(run)
        send(rounds, 0, value=3e38)
        send(rounds, 1, value=3e38)
        with pytest.raises(DivergedError, match="step 1 diverged"):
            rounds.tick(2.0)
        assert run.store.round_num == 0
        rounds.close()


def test_what_cannot_be_asynchronous(make_run, run, whole, tmp_path):
    with pytest.raises(InvalidArgument, match="participation is 0.5"):
        AsyncRounds(run, Rules(buffer=2), 0.0)
    sampled = {**EXACT, "weighting": "sampled"}
    with make_run(tmp_path / "sampled", sampled, participation=1.0) as other:
        with pytest.raises(InvalidArgument, match="--weighting alpha"):
            AsyncRounds(other, Rules(buffer=2), 0.0)
    with make_run(tmp_path / "drops", EXACT, participation=1.0, dropout=0.3) as other:
        with pytest.raises(InvalidArgument, match="simulates when clients come, drop out or are late"):
            simulate(other, 2, lambda client, number: 1.0, 1)
    rounds = joined(whole)
    rounds.close()
    with pytest.raises(InvalidArgument, match="has begun with --async buffer=2"):
        AsyncRounds(whole, Rules(buffer=3), 0.0)
    with pytest.raises(InvalidArgument, match="give --async buffer=2"):
        LiveRounds(whole, Rules(), 0.0)
    LiveRounds(run, Rules(), 0.0).close()
    rounds = join(LiveRounds(run, Rules(), 0.0))
    rounds.close()
    with pytest.raises(InvalidArgument, match="rounds with cohorts, which are not asynchronous"):
        replay(run)


def test_the_options_are_told_what_is_wrong(run):
    folder = run.folder
    run.close()
    cases = {
        ("serve", folder, "--async", "5"): "it is written buffer=K",
        ("serve", folder, "--async", "buffer=0"): "it is written buffer=K",
        ("serve", folder, "--async", "buffer=2", "--quorum", "0.5"): "--quorum belongs to cohorts",
        ("serve", folder, "--staleness", "5"): "--staleness belongs to --async",
        ("serve", folder, "--async", "buffer=2"): "make the run with --participation 1",
        ("replay", folder): "has no log",
    }
    for arguments, told in cases.items():
        found = CliRunner().invoke(main, list(map(str, arguments)))
        assert found.exit_code in (1, 2) and told in " ".join(found.output.split()), (arguments, found.output)
    assert not (folder / "live.sqlite").exists()


def worked(run, steps, killed=None):
    """A run's log and scores when ten clients work at ten speeds; the server dies after every third `killed`."""
    alive, calls = [], [0]

    def start():
        if alive:
            alive.pop().close()
        while True:
            try:
                rounds = AsyncRounds(run, Rules(buffer=4, wait_for=10, deadline=1e6), 0.0)
                break
            except Cut:
                continue
        rounds.refresh()
        alive.append(rounds)
        where = {"commit_round": run.store, "add_scores": run.store}.get(killed, rounds.book)
        if killed is not None:
            real = getattr(type(where), killed)

            def dying(*arguments):
                real(where, *arguments)
                calls[0] += 1
                if calls[0] % 3 == 0:
                    raise Cut

            setattr(where, killed, dying)

    def call(function):
        for _ in range(20):
            try:
                return function(alive[0])
            except Cut:
                start()
        raise AssertionError("it never comes to an end")

    def visited(i, work):
        seed = zlib.crc32(repr((i, work["round"], work["theta"])).encode())
        gradient = np.random.default_rng(seed).normal(size=run.model.num_backbone_weights).astype(np.float32)
        return body_of(alive[0], i, work["theta"], gradient)

    start()
    join(alive[0])
    working = {}  # {client: (when it is done, its update)}
    for now in range(2000):
        if alive[0].view.kind == wire.DONE:
            break
        for i in range(10):
            if alive[0].view.kind != wire.VISIT:  # the run is over, and these are too late
                working.clear()
            if i in working and working[i][0] <= now:
                number, body = working.pop(i)[1:]
                answer = call(lambda r, i=i, n=number, b=body: r.update(i, n, b, 1.0))
                assert answer == {"counted": True, "round": number}
                continue
            while i not in working and (work := call(lambda r, i=i: r.work(i, 1.0))) is not None:
                if work["kind"] == wire.DONE:
                    break
                if work["kind"] == wire.VISIT:
                    working[i] = (now + 1 + 2 * i, work["round"], visited(i, work))
                    break
                examples = int(run.federation.num_examples("test")[i])
                scores = [{"split": "test", "examples": examples, "loss": 0.5, "score": 1 / (i + 1)}]
                about = {"theta": work["theta"], "scores": scores}
                try:
                    call(lambda r, i=i, w=work, a=about: r.score(i, w["round"], a, 1.0))
                except Refused as error:  # it was the last one, or the server does not ask for them any more
                    assert error.status == 410
    assert run.store.round_num == steps and (killed is None or calls[0] >= 3)
    log = [one._replace(body=None) for one in alive[0].book.arrivals()]
    alive.pop().close()
    return live_theta(run), log, run.store.evaluations()


KILLED = {name: name for name in ("put_arrival", "end_step", "commit_round", "put_score", "add_scores", "end_scores")}


@pytest.mark.parametrize("step", slow_but(KILLED, "put_arrival", ci=("commit_round", "end_step")))
def test_a_server_that_is_killed_counts_every_update_once(make_run, tmp_path, step):
    """Theta has the same bits as without a kill, and so has the log."""
    settings = {"participation": 1.0, "rounds": 6, "evaluate_every": 0}
    with make_run(tmp_path / "quiet", **settings) as quiet, make_run(tmp_path / "killed", **settings) as run:
        theta, log, scores = worked(quiet, 6)
        found, log_found, scores_found = worked(run, 6, step)
        assert found.tobytes() == theta.tobytes() and log_found == log and len(log) == 24
        last = [s for s in scores if s.round_num == 6]
        assert [s for s in scores_found if s.round_num == 6] == last and len(last) == 10


def test_the_log_of_devices_gives_the_same_bits(make_run, tmp_path):
    """Over HTTP, with a server that is started twice. A log of other bits is told from this one."""
    with make_run(tmp_path / "run", participation=1.0, rounds=3) as run:
        for most in (2, None):
            with serving(run, Rules(wait_for=3, buffer=3)) as (address, rounds, tokens):

                def work(client, address=address, tokens=tokens, most=most):
                    found = device(run, address, tmp_path, client, tokens[client])
                    found.run(most)
                    found.close()

                in_threads([lambda i=i: work(i) for i in range(3)])
        assert run.store.round_num == 3 and {e.round_num for e in run.store.evaluations()} >= {3}
        found = replay(run, tf.lite.Interpreter)
        assert found.exact and (found.steps, found.updates) == (3, 9)
        book = rounds._open_book(rounds.book.path)
        book._db.execute("UPDATE arrival SET since = since - 1 WHERE number = 8")
        book.close()
        assert not replay(run, tf.lite.Interpreter).exact


@pytest.mark.slow
def test_equal_clients_by_the_virtual_clock_are_rounds_of_all_clients(make_run, tmp_path):
    """With a buffer of all clients, the step is that of the engine's round."""
    with make_run(tmp_path / "run", participation=1.0, rounds=3) as run:
        expected, heads, _ = simulated(run, 3)
        phones = Phones(run, tf.lite.Interpreter)
        theta, log = simulate(run, 10, lambda client, visit: 2.0, 3, phones=phones)
        assert np.abs(theta - expected).max() < 1e-5 and log[-1].seconds == 6.0 and len(log) == 30
        for client, head in heads.items():
            for found, wanted in zip(phones.client(client).head, head, strict=True):
                assert np.abs(found - np.asarray(wanted)).max() < 1e-5
