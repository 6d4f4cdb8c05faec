"""Who has taken part: what is drawn again from the seed, against what the store and the federation say."""

import csv
import json
import sqlite3

import numpy as np
import pytest
import tensorflow as tf

from helpers import small_runs as runs
from tfpfl.algorithms.contract import ClientData
from tfpfl.data import Population, Sampling, cohort
from tfpfl.data.randomness import client_key
from tfpfl.runs.config import RunConfig
from tfpfl.runs.participation import counts, took_part
from tfpfl.runs.protocols import LOCAL_COPY, Score
from tfpfl.runs.run import Run
from tfpfl.studies.records import Record


def stored_first(folder):
    """{client id: the first round in which its state was saved}, from the store's own lists."""
    with sqlite3.connect(f"file:{folder / 'state.sqlite'}?mode=ro", uri=True) as db:
        first = {}
        for t, ids in db.execute("SELECT round, clients FROM checksum ORDER BY round"):
            first = dict.fromkeys(json.loads(ids), t) | first
    db.close()
    return first


@pytest.mark.slow
def test_with_clients_that_drop_out_are_late_join_and_leave(six_clients, short_end, tmp_path):
    """PFLEGO's clients have a state, so the store lists whose work came back."""
    how = {"dropout": 0.3, "client_seconds": 0.01, "jitter": 0.6, "round_deadline": 0.6, "joins": ("3:1",)}
    run = runs.train(tmp_path / "run", six_clients, rounds=6, evaluate_every=0, **how)
    record, truth = Record.read(run.folder), stored_first(run.folder)
    assert record.took_part == truth and 0 < len(truth) < 6
    assert sum(row["dropped"] for row in record.history) and sum(row["late"] for row in record.history)
    assert record.seen_counts() == (len(truth), 6 - len(truth))
    assert (record.summary["clients_seen"], record.summary["clients_never_seen"]) == record.seen_counts()
    with open(run.folder / "clients.csv", newline="", encoding="utf-8") as file:
        used = {int(row["client"]): row["used_from_round"] for row in csv.DictReader(file)}
    assert used == {i: str(truth.get(i, "")) for i in range(6)} and "" in used.values()
    with Run.open(run.folder) as opened:
        assert opened.took_part == truth and opened.seen_counts == record.seen_counts()
        assert {r.clients for r in opened.results() if r.model == "personal"} == {"all", "seen", "unseen"}
    (run.folder / "clients.csv").unlink()  # which has the numbers of examples: without them the clock is unknown
    unknown = Record.read(run.folder)
    assert unknown.took_part is None and unknown.seen_counts() is None
    assert {r.clients for r in unknown.results if r.model == "personal"} == {"all"}


def test_a_usual_run_and_one_of_new_clients(a_run):
    record = Record.read(a_run)
    assert record.took_part == stored_first(a_run)
    config = RunConfig(clients=9, data_seed=4, new_clients=3, participation=0.5)
    assert len(config.training_ids(9, 4)) == 6


def history_of(config, population, rounds=8):
    return [{"round": t, "clients": len(cohort(config.seed, t, population))} for t in range(1, rounds + 1)]


@pytest.mark.parametrize(
    "how",
    [{"participation": 0.2}, {"sampling": "binomial", "participation": 0.2},
     {"sampling": "range", "sampling_range": (1, 3)}, {"new_clients": 3, "participation": 0.34}],
    ids=str,
)  # fmt: skip
def test_every_kind_of_sampling(how):
    config = RunConfig(clients=10, data_seed=1, seed=5, **how)
    ids = config.training_ids(10, 1)
    population = Population([9] * len(ids), [2] * len(ids), sampling=config.sampling_plan(), client_ids=ids)
    first = took_part(config, history_of(config, population), [])
    for i in ids.tolist():
        rounds = [t for t in range(1, 9) if i in cohort(5, t, population)]
        assert first.get(i) == (rounds[0] if rounds else None)
    assert set(first) <= set(ids.tolist())
    assert counts(first, 10, 8) == (len(first), 10 - len(first)) and counts(None, 10, 8) is None
    assert counts(first, 10, 0) == (0, 10)


def test_each_client_of_a_cohort_is_as_slow_as_its_own_work():
    """A clock without chance: in time is who has few examples, whatever its place in the cohort, and who is there."""
    config = RunConfig(clients=12, data_seed=1, seed=5, new_clients=3, participation=0.34, client_seconds=1.0,
                       round_deadline=4.5, joins=("4:1",))  # fmt: skip
    ids = config.training_ids(12, 1)
    assert ids.tolist() == [1, 2, 3, 5, 6, 7, 8, 10, 11]
    work = np.array([1, 8, 2, 7, 3, 6, 9, 4, 5])
    population = Population(work, [2] * 9, sampling=Sampling("fixed", rate=0.34), client_ids=ids)
    in_time, first, history = set(ids[work <= 4].tolist()), {}, []
    for t in range(1, 13):
        came = in_time & set(cohort(5, t, population, ids if t >= 4 else ids[1:]).tolist())
        history.append({"round": t, "clients": len(came)})
        first = dict.fromkeys(came, t) | first
    assert took_part(config, history, [], work) == first and set(first) == in_time
    assert took_part(config, history, [], work[::-1]) is None


def test_who_was_rejected_has_not_taken_part():
    config = RunConfig(clients=10, data_seed=0, participation=0.2, on_broken="reject")
    population = Population([9] * 10, [2] * 10, sampling=Sampling("fixed", rate=0.2))
    history = history_of(config, population, rounds=1)
    good, bad = cohort(0, 1, population).tolist()
    history[0]["rejected_clients"] = f"{bad}: its update is too large"
    assert took_part(config, history, [Score(1, good, LOCAL_COPY, "test", 5, 0.1, 0.9)]) == {good: 1}


def test_a_device_that_came_without_scores_has_taken_part():
    """In live rounds the history says who came. A device without test examples has no scores to send."""
    history = [{"round": 1, "clients": 2, "came": "3 5"}, {"round": 2, "clients": 0, "came": ""}]
    scores = [Score(1, 5, LOCAL_COPY, "test", 5, 0.1, 0.9)]
    assert took_part(RunConfig(clients=10, data_seed=0, participation=0.2), history, scores) == {3: 1, 5: 1}


def test_in_a_round_without_a_secure_sum_nobody_has_taken_part():
    """Fewer clients than the quorum came: the server could use the work of none of them."""
    config = RunConfig(clients=10, data_seed=0, participation=0.2)
    population = Population([9] * 10, [2] * 10, sampling=Sampling("fixed", rate=0.2))
    history = history_of(config, population, rounds=3)
    history[1] |= {"clients": 0, "too_few": 2}
    seen = {i: 1 for i in cohort(0, 1, population).tolist()}
    assert took_part(config, history, []) == dict.fromkeys(cohort(0, 3, population).tolist(), 3) | seen


@pytest.mark.slow
def test_a_straggler_that_fedprox_drops_has_not_taken_part(six_clients, tmp_path):
    """Against the weights of its visits: of who is dropped they are 0."""
    how = {"hyperparameters": {"straggler": 0.7, "straggler_policy": "drop", "steps": 1}}
    run = runs.train(tmp_path / "run", six_clients, algorithm="fedprox", rounds=2, participation=1.0, **how)
    with Run.open(run.folder) as opened:
        algorithm, found = opened.algorithm, opened.took_part
    expected = {}
    for t in (1, 2):
        for i, key in enumerate(client_key(0, t, range(6))):
            x, y = six_clients.arrays(i, labels="global")
            data = ClientData(x, y, algorithm.population.info(i, "float32"), tf.constant(key))
            if float(algorithm.client_update(algorithm.init_server(), (), data).weight) > 0:
                expected.setdefault(i, t)
    assert found == expected and 0 < len(found) < 6


def test_what_contradicts_the_run_is_unknown():
    config = RunConfig(clients=10, data_seed=0, participation=0.2)
    population = Population([9] * 10, [2] * 10, sampling=Sampling("fixed", rate=0.2))
    history = history_of(config, population)
    ids = cohort(0, 3, population).tolist()

    def scored(*which):
        return [Score(3, i, LOCAL_COPY, "test", 5, 0.1, 0.9) for i in which]

    assert took_part(config, history, scored(*ids)) is not None
    assert took_part(config, history, scored(ids[0], next(i for i in range(10) if i not in ids))) is None
    assert took_part(config, [*history[:3], history[3] | {"clients": 3}], []) is None


def test_what_was_scored_tells_of_a_clock_that_is_unknown():
    config = RunConfig(clients=4, data_seed=0, participation=0.5, client_seconds=1.0, round_deadline=9.0)
    history = [{"round": 1, "clients": 1}, {"round": 2, "clients": 2}, {"round": 3, "clients": 0}]
    scores = [Score(t, i, LOCAL_COPY, "test", 5, 0.1, 0.9) for t, i in ((1, 2), (2, 2), (2, 0))]
    assert took_part(config, history, scores) == {2: 1, 0: 2}
    assert took_part(config, history, scores[:1]) is None  # round 2 was not evaluated
