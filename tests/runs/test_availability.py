"""Who comes back from a round, and when; and what it does to a run."""

import json
from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from math import prod

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from helpers import small_runs
from helpers.toys import client_loss, distance, gradient, initial_states, objective, run, toy
from tfpfl.algorithms import pflego_exact
from tfpfl.cli import main
from tfpfl.data import cohorts
from tfpfl.data.population import Population, Sampling
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import tree
from tfpfl.runs.availability import Availability
from tfpfl.runs.protocols import LOCAL_COPY
from tfpfl.runs.run import Run
from tfpfl.studies.records import Record

MANY = np.arange(20000)
RHO = 0.3


# ---- PFLEGO stays unbiased


def expectation(data, start, algorithm, sampled, arrival):
    """The mean of (theta, heads) after a round, over every set of those sampled that may come back."""
    engine, expected = Simulation(algorithm), tree.scale(0, start)
    for came in product((False, True), repeat=len(sampled)):
        probability = prod(a if c else 1 - a for a, c in zip(arrival[list(sampled)], came, strict=True))
        ids = [i for i, c in zip(sampled, came, strict=True) if c]
        result = start
        if ids:
            server, heads = run(engine, data, cohort=ids)
            result = server.theta, heads
        expected = tree.add_scaled(expected, probability, result)
    return expected


def full_step(data, theta, heads):
    slope, slopes = gradient(lambda theta, heads: objective(data, theta, heads), theta, heads)
    return tree.add_scaled(theta, -RHO, slope), {i: tree.add_scaled(heads[i], -RHO, slopes[i]) for i in heads}


@pytest.mark.slow
@pytest.mark.parametrize(
    "arrival",
    [
        pytest.param(np.full(5, 0.7), id="30 %", marks=pytest.mark.slow),
        pytest.param(np.array([0.7, 0.35, 1.0, 0.9, 0.5]), id="differing"),
    ],
)
def test_the_mean_over_all_dropouts_is_the_full_step(arrival):
    """In float64, over all 32 sets that may come back of everybody, and over all cohorts of two and who comes back."""
    data = toy()
    everyone = replace(data.population, arrival=arrival)
    algorithm = pflego_exact(data.model, everyone, tau=1, rho=RHO)
    start = algorithm.init_server().theta, initial_states(algorithm, data.population)
    wanted = full_step(data, *start)
    assert distance(start[0], wanted[0]) > 1e-3
    assert distance(expectation(data, start, algorithm, range(5), arrival), wanted) < 1e-9

    two = replace(toy(sampling=Sampling("fixed", 0.4)).population, arrival=arrival)
    algorithm, pairs = pflego_exact(data.model, two, tau=1, rho=RHO), list(combinations(range(5), 2))
    mean = tree.scale(0, start)
    for pair in pairs:
        mean = tree.add_scaled(mean, 1 / len(pairs), expectation(data, start, algorithm, pair, arrival))
    assert distance(mean, wanted) < 1e-9


@pytest.mark.table
@pytest.mark.slow
def test_without_knowing_the_probabilities_the_step_is_too_short():
    data, arrival = toy(), np.full(5, 0.7)
    algorithm = pflego_exact(data.model, data.population, tau=1, rho=RHO)
    start = algorithm.init_server().theta, initial_states(algorithm, data.population)
    found = expectation(data, start, algorithm, range(5), arrival)
    shorter = tree.add_scaled(tree.scale(0.3, start), 0.7, full_step(data, *start))
    assert distance(found, shorter) < 1e-9 and distance(found, full_step(data, *start)) > 1e-3


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling("fixed", 0.5),
        pytest.param(Sampling("binomial", 0.4), marks=pytest.mark.slow),
        Sampling("range", low=2, high=4),
    ],
    ids=lambda sampling: sampling.kind,
)
def test_while_clients_are_away_the_mean_is_the_full_step_of_the_others(sampling):
    """A step from one point for each set that the cohort may be, as often as the run draws it in 6,000 rounds."""
    data, present = toy(sampling=sampling), Availability(leaves={3: [1, 4]}).present(5, np.arange(5))
    assert present.tolist() == [0, 2, 3]
    algorithm = pflego_exact(data.model, data.population, tau=1, rho=RHO)
    engine, start = Simulation(algorithm), algorithm.init_server().theta
    drawn = Counter(tuple(cohorts.cohort(0, t, data.population, present)) for t in range(1, 6001))
    mean = tree.scale(0, start)
    for ids, times in drawn.items():
        after = run(engine, data, cohort=ids)[0].theta if ids else start
        mean = tree.add_scaled(mean, times / 6000, tree.subtract(after, start))
    heads = {i: h for i, h in initial_states(algorithm, data.population).items() if i in present}
    alpha = {i: float(data.population.info(i, "float64").alpha) for i in heads}

    def theirs(theta, heads):
        return tf.add_n([alpha[i] * client_loss(data, i, theta, heads[i]) for i in heads])

    wanted = tree.scale(-RHO, gradient(theirs, start, heads)[0])
    assert distance(mean, wanted) < 0.06 * distance(wanted, tree.scale(0, wanted))


# ---- the model itself


def test_dropouts_have_their_probability():
    drops = Availability(dropout=0.3).drops(0, 5, MANY)
    assert drops.mean() == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / len(MANY)))
    spread = Availability(dropout=0.3, dropout_spread=0.2)
    p = spread.dropout_of(0, MANY)
    assert p.min() >= 0.1 and p.max() <= 0.5 and p.mean() == pytest.approx(0.3, abs=0.005)
    rounds = np.mean([spread.drops(0, t, MANY[:500]) for t in range(1, 401)], axis=0)
    assert np.abs(rounds - p[:500]).max() < 5 * np.sqrt(0.25 / 400)
    assert (spread.drops(3, 2, [5, 9]) == spread.drops(3, 2, [9, 5])[::-1]).all()  # of client and round alone


def test_arrival_is_how_often_clients_come_back_in_time():
    clients = Availability(dropout=0.2, seconds=1e-3, seconds_spread=0.7, jitter=0.5, deadline=2.0)
    ids, work = np.arange(40), np.linspace(500, 3000, 40)
    found = clients.arrival(0, ids, work)
    assert found.min() < 0.4 and found.max() > 0.75
    came = np.mean([np.isin(ids, clients.round(0, t, ids, work).came) for t in range(1, 2001)], axis=0)
    assert np.abs(came - found).max() < 5 * np.sqrt(0.25 / 2000)
    always = replace(clients, jitter=0.0)
    assert set(always.arrival(0, ids, work)) == {0.0, 0.8}


def test_the_clock_waits_for_the_last_or_for_the_deadline():
    clients = Availability(seconds=0.01, seconds_spread=1.0)
    ids, work = np.arange(10), np.full(10, 100.0)
    seconds = clients.visit_seconds(0, 1, ids, work)
    assert np.median(Availability(seconds=0.01, seconds_spread=1.0).median_seconds(0, MANY, np.ones(20000))) == (
        pytest.approx(0.01, rel=0.05)
    )
    assert clients.round(0, 1, ids, work).seconds == seconds.max()
    limit = float(np.sort(seconds)[6]) + 1e-9
    late = replace(clients, deadline=limit).round(0, 1, ids, work)
    assert late.came.tolist() == ids[seconds <= limit].tolist() and len(late.late) == 3
    assert late.seconds == limit
    enough = replace(clients, deadline=float(seconds.max()) + 1).round(0, 1, ids, work)
    assert enough.seconds == seconds.max() and not len(enough.late)


def test_the_clock_waits_for_nobody_who_drops_out_but_where_there_is_a_deadline():
    clients = Availability(dropout=0.5, seconds=0.01, seconds_spread=1.0)
    ids, work = np.arange(10), np.full(10, 100.0)
    slowest = int(clients.visit_seconds(0, 1, ids, work).argmax())
    t = next(t for t in range(1, 50) if clients.drops(0, t, ids)[slowest] and not clients.drops(0, t, ids).all())
    seconds, drops = clients.visit_seconds(0, t, ids, work), clients.drops(0, t, ids)
    assert clients.round(0, t, ids, work).seconds == seconds[~drops].max() < seconds.max()
    late = float(seconds.max()) + 1  # nobody is too late, but the server does not know that some have dropped out
    found = replace(clients, deadline=late).round(0, t, ids, work)
    assert found.seconds == late and not len(found.late) and found.dropped.tolist() == ids[drops].tolist()


def test_the_slowest_clock_that_is_allowed_stays_finite():
    slow = Availability(seconds=1e12, seconds_spread=3.0, jitter=2.5, deadline=1e30)
    found = slow.round(0, 1, MANY, np.full(len(MANY), 1e6))
    assert len(found.came) == len(MANY) and np.isfinite(found.seconds) and found.seconds > 1e18


def test_clients_join_and_leave():
    clients = Availability(joins={5: [1, 2], 9: [3]}, leaves=((5, (0,)), (7, (1,)), (9, (2,))))
    present = {t: clients.present(t, np.arange(5)).tolist() for t in (1, 4, 5, 7, 9)}
    assert present == {1: [0, 4], 4: [0, 4], 5: [1, 2, 4], 7: [2, 4], 9: [3, 4]}
    back = Availability(leaves={2: [0]}, joins={4: [0]})
    assert [0 in back.present(t, np.arange(2)) for t in (1, 2, 3, 4, 5)] == [False, False, False, True, True]


# ---- in a run


CLOCK = {"dropout": 0.3, "client_seconds": 0.01, "client_seconds_spread": 0.8, "jitter": 0.3, "round_deadline": 0.9}
CLOCK |= {"participation": 1.0, "rounds": 7}


@pytest.mark.slow
def test_a_run_with_dropouts_a_clock_and_a_deadline(federation, short_end, tmp_path):
    run = small_runs.train(tmp_path / "run", federation, **CLOCK)
    record = Record.read(tmp_path / "run")
    came = np.array([row["clients"] for row in record.history])
    lost = np.array([row["dropped"] + row["late"] for row in record.history])
    assert (came + lost == 6).all() and lost.min() < lost.max() and came.max() > 0
    seconds = [row["virtual_seconds"] for row in record.history]
    assert max(seconds) == 0.9 and record.spent("virtual seconds").tolist() == pytest.approx(np.cumsum(seconds))
    work = run.population.num_examples * sum(run.passes)
    assert run.population.arrival.tolist() == run.availability.arrival(0, run.population.client_ids, work).tolist()


@pytest.mark.slow
def test_a_run_with_dropouts_is_repeated_and_resumed_exactly(federation, short_end, tmp_path):
    run = small_runs.train(tmp_path / "run", federation, **CLOCK)
    again = small_runs.train(tmp_path / "again", federation, [small_runs.Interrupt(99)], **CLOCK)
    assert small_runs.saved(run.folder) == small_runs.saved(again.folder)
    with pytest.raises(KeyboardInterrupt):
        small_runs.train(tmp_path / "half", federation, [small_runs.Interrupt(4)], **CLOCK)
    with Run.open(tmp_path / "half") as half:
        half.train()
    assert small_runs.saved(tmp_path / "half")["server"] == small_runs.saved(run.folder)["server"]


@pytest.mark.slow
def test_who_joins_or_leaves_touches_nobody_elses_state(federation, short_end, tmp_path):
    """FedPer at full participation: the others' states depend on theta alone; Local's on nothing."""
    how = {"algorithm": "local", "participation": 1.0, "rounds": 6, "hyperparameters": {"steps": 3}}
    plain = small_runs.train(tmp_path / "plain", federation, **how)
    moved = small_runs.train(tmp_path / "moved", federation, joins=("3:1",), leaves=("5:4",), **how)

    def states(run):
        with Run.open(run.folder) as opened:
            ids = opened.store.client_ids().tolist()
            return dict(zip(ids, opened.training().client_states(ids), strict=True)), opened.store.history()

    (before, _), (after, history) = states(plain), states(moved)
    assert [row["clients"] for row in history] == [5] * 2 + [6] * 2 + [5] * 2
    for i in (0, 2, 3, 5):
        assert distance(before[i], after[i]) == 0
    assert distance(before[1], after[1]) > 0 and distance(before[4], after[4]) > 0


@pytest.mark.table
@pytest.mark.slow
def test_rounds_that_nobody_survives_change_nothing(federation, short_end, tmp_path):
    """With joins for everybody in round 4, the first three rounds are empty."""
    run = small_runs.train(tmp_path / "run", federation, joins=("4:0,1,2,3,4,5",), participation=1.0, rounds=5)
    with Run.open(run.folder) as opened:
        assert [row["clients"] for row in opened.store.history()] == [0, 0, 0, 6, 6]


@pytest.mark.table
@pytest.mark.slow
def test_broken_clients_in_a_run_are_counted_and_named(federation, short_end, tmp_path):
    """A limit that some clients of round 1 pass and others do not, and from round 4 on all, since rates are smaller."""
    how = {"algorithm": "fedavg", "labels": "global", "schedule": "step:3:0.001", "on_broken": "reject", "rounds": 7}
    free = small_runs.train(tmp_path / "free", federation, **how)
    assert all(row["rejected"] == 0 for row in Record.read(free.folder).history)
    limit = Record.read(free.folder).history[0]["update_norm"]  # the mean of three clients: one or two lie above it
    tight = small_runs.train(tmp_path / "tight", federation, max_norm=limit, evaluate_every=1, **how)
    rows = Record.read(tight.folder).history
    rejected = [row for row in rows if row["rejected"]]
    assert 0 < len(rejected) < len(rows)
    assert 0 < rows[0]["rejected"] < rows[0]["clients"] and not any(row["rejected"] for row in rows[3:])
    assert all(row["rejected_clients"].count("its update is too large") == row["rejected"] for row in rejected)
    named = {
        (row["round"], int(part.split(":")[0])) for row in rejected for part in row["rejected_clients"].split("; ")
    }
    scored = {(e.round_num, e.client_id) for e in Record.read(tight.folder).evaluations if e.model == LOCAL_COPY}
    assert scored and not named & scored  # a rejected client's own copy is no result


@pytest.mark.slow
def test_a_round_of_which_everybody_is_rejected_has_no_means(six_clients, short_end, tmp_path):
    """A mean over nobody is 0/0: it is in no row, so the history is JSON, and the report and the curves are drawn."""
    run = small_runs.train(tmp_path / "run", six_clients, on_broken="reject", max_norm=1e-9, rounds=3)
    rows = small_runs.saved(run.folder)["history"]
    assert len(rows) == 3 and all(row["rejected"] == row["clients"] == 3 for row in rows)
    json.dumps(rows, allow_nan=False)
    assert not {"loss", "update_norm"} & set(rows[0])
    done = CliRunner().invoke(main, ["report", str(run.folder), "--out", str(tmp_path / "report.html")])
    assert done.exit_code == 0 and (tmp_path / "report.html").stat().st_size > 10_000, done.output


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dropout": 1.0}, "give 1 to 1"),
        ({"dropout": 0.1, "dropout_spread": 0.2}, "give -0.1 to 0.3"),
        ({"dropout": -0.1}, "dropout must be a finite number of at least 0, found -0.1"),
        ({"jitter": float("nan")}, "jitter must be a finite number of at least 0, found nan"),
        ({"round_deadline": 3.0}, "a deadline must be positive, and needs `seconds`"),
        ({"client_seconds": 1.0, "round_deadline": 0.0}, "found deadline=0.0"),
        ({"client_seconds": 1e300}, r"the virtual clock goes up to 1e\+30 seconds: seconds=1e\+300"),
        ({"client_seconds": 1.0, "client_seconds_spread": 1e300}, "let a client take inf seconds for one example"),
        ({"client_seconds": 1.0, "jitter": 20.0}, r"jitter=20 let a client take .*e\+61 seconds"),
        ({"jitter": 1e3}, "seconds=0.*jitter=1000 let a client take inf seconds"),
        ({"client_seconds": 1.0, "round_deadline": 1e300}, r"deadline=1e\+300. Take smaller numbers"),
        ({"client_seconds": 1.0, "round_deadline": float("inf")}, "deadline=inf"),
        ({"joins": ("3",)}, "joins is written ROUND:ID,ID,..., such as 20:3,4; found '3'"),
        ({"leaves": ("0:1",)}, "leaves must be .round: client ids. with rounds from 1"),
        ({"joins": ("3:1", "3:2")}, "joins names a round twice"),
        ({"joins": ("1:0", "4:0,2"), "leaves": ("4:0",)}, "client 0 both joins and leaves in round 4"),
        ({"max_norm": 1.0}, "need on_broken 'reject'"),
        ({"on_broken": "ignore"}, "on_broken must be one of stop, reject; found 'ignore'"),
        ({"on_broken": "reject", "clip_norm": 0.0}, "clip_norm must be positive"),
    ],
)
def test_bad_input(change, reason):
    with pytest.raises(ValueError, match=reason):
        small_runs.config(**change)


@pytest.mark.parametrize("joins", [{2.9: [1]}, {3: [1.9]}, {3: "12"}, {3: [True]}, {True: [1]}, {3: 1}])
def test_ids_and_rounds_are_whole_numbers(joins):
    with pytest.raises(ValueError, match="joins must be .round: client ids., found"):
        Availability(joins=joins)
    assert Availability(joins={np.int64(3): np.array([2, 1])}).joins == ((3, (1, 2)),)


def test_what_only_the_federation_can_tell(federation, tmp_path):
    with pytest.raises(ValueError, match=r"it does not have the clients \[77\]"):
        small_runs.train(tmp_path / "a", federation, joins=("3:77",))
    with pytest.raises(ValueError, match="too short for every client: the fastest takes"):
        small_runs.train(tmp_path / "b", federation, client_seconds=1.0, round_deadline=1e-3)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="arrival is a probability for each of the 2 clients"):
        Population([1, 1], [1, 1], arrival=[0.5])


def test_who_drops_out_has_ended_the_first_exchange_only_if_that_was_before_the_deadline():
    slow = Availability(dropout=0.5, seconds=1.0, seconds_spread=1.0, deadline=8.0)
    free = replace(slow, deadline=None)
    ids, work = np.arange(200), np.full(200, 10.0)
    half = slow.visit_seconds(0, 1, ids, work) / 2
    found, without = slow.round(0, 1, ids, work), free.round(0, 1, ids, work)
    assert (half[found.between] <= 8).all() and len(found.between) > 10
    kept = [i for i in without.between if half[i] <= 8]  # of those who drop out, the same half
    assert sorted(set(found.between) & set(found.dropped)) == sorted(kept) and len(kept) < len(without.between)
