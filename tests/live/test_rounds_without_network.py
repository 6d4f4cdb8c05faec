"""`LiveRounds` alone, with a clock of the test: deadlines, quorum, absent clients, and what it refuses to begin."""

import csv
import hashlib
import json

import numpy as np
import pytest

from helpers.live import EXACT, join
from tflite_export.convert.program import flatten
from tflite_export.device import payload
from tflite_export.device.live import wire
from tfpfl.checks import InvalidArgument, TfpflWarning
from tfpfl.data.cohorts import cohort
from tfpfl.data.population import Population, Sampling
from tfpfl.live import rounds as module
from tfpfl.live.plan import visit_settings
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused, Rules
from tfpfl.live.serve import serve, write_tokens
from tfpfl.runs.training import DivergedError
from tfpfl.studies.new_clients import adapt_new_clients


def joined(run, rules, clients=range(10), now=0.0):
    """The rounds of a run that these clients have joined at a time."""
    return join(LiveRounds(run, rules, now), clients, now)


def send(rounds, client, value=1e-3, now=1.0, **other):
    """Sends a gradient of one value from a client to the open round."""
    gradient = np.full(rounds.model.num_backbone_weights, value, np.float32)
    info = rounds.population.info(client)
    about = {"theta": rounds.view.theta, "examples": int(info.num_examples), "loss": 0.5, "scores": []}
    body = wire.pack(about | other, payload.encode(gradient))
    return rounds.update(client, rounds.view.round_num, body, now)


def moved(run):
    return flatten(run.algorithm.message(run.training().server_state())) - flatten(run.model.initial_theta)


def test_a_round_ends_at_its_deadline_with_a_quorum_and_its_step_is_the_sum_of_who_came(make_run, tmp_path):
    with make_run(tmp_path / "run", participation=1.0, rounds=1, evaluate_every=0) as run:
        rounds = joined(run, Rules(wait_for=10, deadline=10, quorum=0.55))
        for i in range(5):
            send(rounds, i, loss=0.1 * i)
        rounds.tick(11.0)  # five of ten are less than 5.5: too few
        assert rounds.view.kind == wire.VISIT and rounds.view.deadline == 21.0
        send(rounds, 5, loss=2.0)
        rounds.tick(20.0)
        assert rounds.view.kind == wire.VISIT
        rounds.tick(21.0)
        assert rounds.view.kind == wire.SCORE  # the last round is evaluated
        with pytest.raises(Refused, match="over") as refused:
            send(rounds, 6)
        assert refused.value.status == 410
        rounds.tick(31.0)
        assert rounds.view.kind == wire.DONE and run.store.round_num == 1
        (row,) = run.store.history()
        assert (row["clients"], row["dropped"], row["came"]) == (6, 4, "0 1 2 3 4 5")
        losses, sizes = [0, 0.1, 0.2, 0.3, 0.4, 2.0], run.population.num_examples[:6]
        assert row["loss"] == pytest.approx(np.average(losses, weights=sizes))
        numbers = rounds.model.num_backbone_weights
        assert row["bytes_down"] == 10 * 4 * numbers  # all had been invited
        assert row["bytes_up"] == 6 * len(payload.encode(np.zeros(numbers, np.float32)))
        alpha = run.population.num_examples[:6].sum() / run.population.num_examples.sum()
        assert np.allclose(moved(run), -0.01 * alpha * 1e-3, rtol=1e-4)  # rho times the sum of alpha_i g_i; I = r
        members = rounds.book.members()
        assert members[0].arrival == 1.0 and members[9].arrival == 0.5
        rounds.close()


def test_a_clock_that_is_set_back_between_two_starts_moves_no_deadline_away(make_run, tmp_path):
    """With the old deadline, a round that waits for one client would last as long as the clock was wrong."""
    with make_run(tmp_path / "run", participation=1.0, rounds=2, evaluate_every=0) as run:
        joined(run, Rules(wait_for=10, deadline=10), now=1e6).close()
        rounds = LiveRounds(run, Rules(wait_for=10, deadline=10), 1e6 + 5)
        assert rounds.view.deadline == 1e6 + 15  # those who were interrupted have the whole time again
        rounds.close()
        rounds = LiveRounds(run, Rules(wait_for=10, deadline=3), 1e6 + 5)
        assert rounds.view.deadline == 1e6 + 10  # what devices were told holds
        rounds.close()
        rounds = LiveRounds(run, Rules(wait_for=10, deadline=10), 1000.0)
        assert rounds.view.deadline == 1010.0
        rounds.close()


def test_a_deadline_that_was_moved_while_the_clock_was_ahead_is_forgotten_with_it(make_run, tmp_path):
    with make_run(tmp_path / "run", participation=1.0, rounds=2, evaluate_every=0) as run:
        rounds = joined(run, Rules(wait_for=10, deadline=10), now=1000.0)
        rounds.tick(1e6)
        assert rounds.view.deadline == 1e6 + 10  # nobody has come
        rounds.close()
        rounds = LiveRounds(run, Rules(wait_for=10, deadline=10), 1020.0)
        assert rounds.view.deadline == 1030.0
        rounds.close()


def test_who_comes_rarely_counts_more(make_run, tmp_path):
    """A client whose probability to come is estimated as 1/2 has twice the weight, and twice the rate of its head."""
    with make_run(tmp_path / "run", participation=1.0, rounds=2, evaluate_every=0) as run:
        rounds = joined(run, Rules(wait_for=10, deadline=10, quorum=0.9, awake=1e6))
        rate = rounds.work(9, 1.0)["settings"]["head_rate"]
        for i in range(9):
            send(rounds, i)
        rounds.tick(10.0)
        rounds.tick(20.0)  # the time for scores is over, too
        before = moved(run)
        assert rounds.view.round_num == 2
        assert rounds.work(9, 21.0)["settings"]["head_rate"] == pytest.approx(2 * rate)
        always = visit_settings(run, rounds.population, 0, 1.0)
        assert rounds.work(0, 21.0)["settings"]["head_rate"] == pytest.approx(always["head_rate"])
        for i in range(10):
            send(rounds, i, now=22.0)
        rounds.tick(40.0)
        alpha = run.population.num_examples / run.population.num_examples.sum()
        assert np.allclose(moved(run) - before, -0.01 * (alpha.sum() + alpha[9]) * 1e-3, rtol=1e-3)
        rounds.close()


def test_a_gradient_may_be_as_long_as_the_largest_norm(make_run, tmp_path):
    with make_run(tmp_path / "run", participation=1.0, rounds=1, evaluate_every=0) as run:
        rounds = joined(run, Rules(wait_for=10, deadline=10, max_norm=0.2))
        at_most = 0.2 / np.sqrt(rounds.model.num_backbone_weights)  # of every number, where all are equal
        with pytest.raises(Refused, match="the gradient's norm is 0.22, and at most 0.2 is taken") as refused:
            send(rounds, 0, value=1.1 * at_most)
        assert refused.value.status == 422 and 0 in rounds.view.waiting
        assert send(rounds, 0, value=0.9 * at_most)["counted"]
        rounds.close()


def test_few_awake_clients_do_not_stop_the_run(make_run, tmp_path):
    """With three of ten awake and a cohort of one in ten, most rounds have nobody, and the next tick opens another."""
    with make_run(tmp_path / "run", participation=0.1, rounds=20, evaluate_every=0) as run:
        rounds = joined(run, Rules(deadline=10, awake=1e6), clients=(1, 4, 7))
        for now in range(1, 200):
            for i in sorted(rounds.view.waiting) if rounds.view.kind == wire.VISIT else ():
                send(rounds, i, now=now)
            rounds.tick(now)
            if rounds.view.kind == wire.DONE:
                break
        drawn = [cohort(0, t, run.population, np.array([1, 4, 7])).tolist() for t in range(1, 21)]
        assert [list(map(int, row["came"].split())) for row in run.store.history()] == drawn
        assert sum(map(len, drawn)) < 10 and run.store.round_num == 20
        rounds.close()


def test_a_score_of_no_examples_is_refused(make_run, tmp_path):
    """A client without examples of a split has no score there; a 0 would count in the mean over clients."""
    with make_run(tmp_path / "run", participation=1.0, rounds=1) as run:
        rounds = joined(run, Rules(wait_for=10))
        for i in range(10):
            send(rounds, i)
        assert rounds.view.kind == wire.SCORE and not run.federation.num_examples("validation").any()
        row = {"split": "validation", "examples": 0, "loss": 0.0, "score": 0.0}
        with pytest.raises(Refused, match="a score of no validation examples came"):
            rounds.score(0, 1, {"theta": rounds.view.theta, "scores": [row]}, 1.0)
        assert 0 in rounds.view.waiting and not rounds.book.scores(1)
        rounds.close()


def test_scores_are_those_of_the_theta_that_is_saved_also_after_a_restart(make_run, tmp_path):
    """A round that has closed at its deadline stays closed: no update comes in between the scores and the end."""
    with make_run(tmp_path / "run", participation=1.0, rounds=1, evaluate_every=1) as run:
        rounds = joined(run, Rules(wait_for=10, deadline=10, quorum=0.6))
        for i in range(6):
            send(rounds, i)
        rounds.tick(10.0)
        theta = rounds.view.theta
        examples = int(run.federation.num_examples("test")[0])
        score = {"split": "test", "examples": examples, "loss": 0.5, "score": 1.0}
        rounds.score(0, 1, {"theta": theta, "scores": [score]}, 11.0)
        rounds.close()
        again = LiveRounds(run, rounds.rules, 12.0)  # as after kill -9
        assert again.view.kind == wire.SCORE and again.view.theta == theta and 0 not in again.view.waiting
        with pytest.raises(Refused):
            send(again, 6)
        again.tick(30.0)
        live = flatten(run.algorithm.message(run.training().server_state())).astype("<f4").tobytes()
        assert hashlib.sha256(live).hexdigest() == theta
        assert [e.client_id for e in run.store.evaluations()] == [0]
        again.close()


class Killed(BaseException):
    """The server's process has ended."""


@pytest.mark.parametrize("moment", ["before the book knows of it", "before the table is written"])
def test_the_history_is_written_after_a_kill_at_the_end_of_the_last_round(make_run, tmp_path, monkeypatch, moment):
    def killed(*_):
        raise Killed

    with make_run(tmp_path / "run", participation=1.0, rounds=1, evaluate_every=0) as run:
        rounds, table = joined(run, Rules(wait_for=10, deadline=10)), run.folder / "history.csv"
        for i in range(10):
            send(rounds, i)
        with monkeypatch.context() as patched, pytest.raises(Killed):
            if moment == "before the table is written":
                patched.setattr(module, "write_history", killed)
            else:
                patched.setattr(rounds.book, "end_round", killed)
            rounds.tick(20.0)  # the scores of the last round are not waited for any more
        assert run.store.round_num == 1 and not table.exists()
        rounds.close()
        again = LiveRounds(run, rounds.rules, 21.0)
        again.tick(21.0)
        assert again.view.kind == wire.DONE
        assert [row["round"] for row in csv.DictReader(table.open())] == ["1"]
        again.close()


@pytest.mark.slow
def test_what_it_does_not_begin(make_run, tmp_path):
    with make_run(tmp_path / "simulated") as run:
        run.config.rounds = 1
        run.train()
        with pytest.raises(InvalidArgument, match="Rounds of a simulation cannot go on live"):
            LiveRounds(run, Rules(), 0.0)
        assert not (run.folder / "live.sqlite").exists()
    with make_run(tmp_path / "clipped", clip_norm=1.0, on_broken="reject") as run:
        with pytest.raises(InvalidArgument, match="clip_norm"):
            LiveRounds(run, Rules(), 0.0)
    with make_run(tmp_path / "dropouts", dropout=0.3) as run:
        with pytest.raises(InvalidArgument, match="drop out"):
            LiveRounds(run, Rules(), 0.0)
    for name, value, why in (
        ("patience", 2, "without --patience"),
        ("metrics", ("balanced_accuracy",), r"\(balanced_accuracy\), and devices"),
    ):
        with make_run(tmp_path / name) as run:
            setattr(run.config, name, value)
            with pytest.raises(InvalidArgument, match=why):
                LiveRounds(run, Rules(), 0.0)


@pytest.mark.slow
def test_new_clients_take_no_part_in_live_rounds_either(make_run, tmp_path):
    """They have no token; `tfpfl new-clients` lets them adapt afterwards, for which it needs theta alone."""
    with make_run(tmp_path / "run", participation=1.0, rounds=1, evaluate_every=0, new_clients=3) as run:
        ids = run.population.client_ids.tolist()
        rounds = LiveRounds(run, Rules(wait_for=7, awake=1e6), 0.0)
        assert rounds.ids == ids and len(ids) == 7
        assert list(write_tokens(run, rounds.book)) == ids
        rounds.close()
        rounds = joined(run, Rules(wait_for=7, deadline=10, awake=1e6), clients=ids)
        for client in ids:
            send(rounds, client)
        rounds.tick(20.0)
        assert run.store.history()[0]["came"] == " ".join(map(str, ids))
        rounds.close()
        found = adapt_new_clients(run, epochs=1)
        assert len(found.client_ids) == 3 and not set(found.client_ids) & set(ids)


def test_a_run_that_diverges_ends_before_the_round_is_saved(make_run, tmp_path):
    with make_run(tmp_path / "run", EXACT | {"rho": 10.0}, participation=1.0) as run:
        rounds = joined(run, Rules(wait_for=10, awake=1e6))
        for i in range(10):
            send(rounds, i, value=3e38)
        with pytest.raises(DivergedError, match="round 1 diverged"):
            rounds.tick(2.0)
        assert run.store.round_num == 0
        rounds.close()


@pytest.mark.parametrize("ends", [KeyboardInterrupt, DivergedError("round 2 diverged")])
def test_a_server_that_is_stopped_or_diverges_leaves_history_and_summary(make_run, tmp_path, ends):
    """No other command can write them: the heads of a live run are elsewhere."""

    def started(address):
        raise ends

    with make_run(tmp_path / "run", participation=1.0, rounds=20, evaluate_every=0) as run:
        rounds = joined(run, Rules(wait_for=10))
        for i in range(10):
            send(rounds, i)
        rounds.tick(2.0)
        rounds.close()
        (run.folder / "tokens.json").write_text(json.dumps({i: f"token {i}" for i in range(10)}))
        with pytest.raises((KeyboardInterrupt, DivergedError)):
            serve(run, Rules(wait_for=10), port=0, on_start=started)
        summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
        assert (summary["rounds"], summary["clients_seen"]) == (1, 10)
        assert summary["stopped"] == (None if ends is KeyboardInterrupt else "round 2 diverged")
        assert len((run.folder / "history.csv").read_text(encoding="utf-8").splitlines()) == 2


def test_a_lower_number_of_rounds_than_the_open_one_is_refused(make_run, tmp_path):
    with make_run(tmp_path / "run", participation=1.0, evaluate_every=0) as run:
        rounds = joined(run, Rules(wait_for=10))
        rounds.close()
        run.config.rounds = 0
        with pytest.raises(InvalidArgument, match="round 1 is open: give --rounds 1"):
            LiveRounds(run, Rules(), 1.0)


def test_a_new_token_ends_the_old_one(make_run, tmp_path):
    with make_run(tmp_path / "run") as run:
        rounds = joined(run, Rules(wait_for=10), clients=(0, 1))
        rounds.book.set_tokens({0: "another", 1: "token 1"})
        rounds.refresh()
        assert rounds.member(1).client == 1
        with pytest.raises(Refused, match="has not joined"):
            rounds.member(0)
        with pytest.raises(Refused, match="unknown"):
            rounds.join("token 0", {}, 1.0)
        rounds.close()


def test_a_round_does_not_wait_for_a_revoked_client_and_what_it_sent_counts(make_run, tmp_path):
    with make_run(tmp_path / "run", participation=1.0, rounds=2, evaluate_every=0) as run:
        rounds = joined(run, Rules(wait_for=10, deadline=10, quorum=1.0, awake=1e6))
        send(rounds, 0)
        for client in (0, 1, 2):
            rounds.book.revoke(client, 2.0)
        rounds.refresh()
        assert [rounds.member(client).revoked for client in (0, 1, 3)] == [True, True, False]
        for i in range(3, 9):
            send(rounds, i, now=3.0)
        rounds.tick(11.0)  # client 9 is missing, and the quorum is all who are left
        assert rounds.view.kind == wire.VISIT and rounds.view.deadline == 21.0
        rounds.close()
        again = LiveRounds(run, rounds.rules, 12.0)  # a new start knows it, too
        assert again.view.waiting == {9}
        send(again, 9, now=13.0)
        assert again.view.kind == wire.SCORE and again.view.waiting == frozenset(range(3, 10))
        again.tick(23.0)
        assert again.view.round_num == 2 and again.view.waiting == frozenset(range(3, 10))
        assert run.store.history()[0]["came"] == "0 3 4 5 6 7 8 9"
        for client in range(3, 10):
            again.book.revoke(client, 24.0)
        again.refresh()
        again.tick(25.0)  # nobody is left to score, either
        again.tick(26.0)
        assert again.view.kind == wire.DONE and run.store.history()[1]["clients"] == 0
        again.close()


def test_a_round_does_not_wait_for_a_client_with_a_new_token(make_run, tmp_path):
    """Its device cannot sign any more; it joins again, and has the next round."""
    with make_run(tmp_path / "run", participation=1.0, rounds=2, evaluate_every=0) as run:
        rounds = joined(run, Rules(wait_for=10, deadline=10, quorum=1.0, awake=1e6))
        rounds.book.set_tokens({3: "another"})
        rounds.refresh()
        assert rounds.view.waiting == frozenset(range(10)) - {3}
        rounds.close()
        rounds = LiveRounds(run, rounds.rules, 1.0)  # nor after a new start
        assert rounds.view.waiting == frozenset(range(10)) - {3}
        rounds.close()


def test_rounds_begin_without_the_clients_that_are_revoked(make_run, tmp_path):
    """--wait-for all: a client that was revoked before it joined would keep the others waiting for ever."""
    with make_run(tmp_path / "run") as run:
        rounds = joined(run, Rules(wait_for=10), clients=range(9))
        assert rounds.view.kind == wire.NOTHING
        rounds.book.revoke(9, 1.0)
        rounds.refresh()
        rounds.tick(2.0)
        assert rounds.view.kind == wire.VISIT
        rounds.book.set_tokens({9: "another"})  # takes it in again
        assert not rounds.book.members()[9].revoked
        rounds.close()


def clients_of(number, **sampling):
    return Population([9] * number, [2] * number, sampling=Sampling(**sampling))


@pytest.mark.parametrize(
    ("wait_for", "population", "said"),
    [
        (1, clients_of(6, kind="fixed", rate=0.2), "invites 0.167 of them: 83% of such .* Take --wait-for 6 or more"),
        (4, clients_of(5, kind="fixed", rate=0.2), "20% of such rounds would invite nobody.*Take --wait-for 5 or more"),
    ],
)
def test_rounds_that_would_invite_nobody_are_told(wait_for, population, said):
    with pytest.warns(TfpflWarning, match=said):
        Rules(wait_for=wait_for).check_clients(population, False)


def test_where_no_round_is_empty_or_sizes_are_random_nothing_is_told(recwarn):
    fixed, binomial = clients_of(6, kind="fixed", rate=0.2), clients_of(6, kind="binomial", rate=0.2)
    Rules(wait_for=6).check_clients(fixed, False)
    Rules(wait_for=1).check_clients(fixed, True)  # places
    Rules(wait_for=1, secure=True).check_clients(fixed, False)
    Rules(wait_for=1).check_clients(binomial, False)
    assert not [w for w in recwarn if w.category is TfpflWarning]
    with pytest.raises(InvalidArgument, match="wait_for is 7, but the run has 6 clients"):
        Rules(wait_for=7).check_clients(fixed, False)
