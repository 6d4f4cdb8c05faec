"""What is read of a run's folder, against the run."""

import numpy as np
import pytest

from helpers import small_runs as runs
from tfpfl.checks import InvalidArgument
from tfpfl.runs.config import RunError
from tfpfl.runs.protocols import EV_ALL, EV_LOCAL
from tfpfl.runs.run import Run
from tfpfl.runs.store import RunStore, StoreError
from tfpfl.studies.records import Record
from tfpfl.studies.run_groups import by_setting, check_comparable


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Six small clients."""
    return runs.federation(tmp_path_factory.mktemp("data") / "federation")


@pytest.mark.slow
def test_a_record_tells_what_the_run_does(a_run):
    record = Record.read(a_run)
    with Run.open(a_run) as run:
        assert record.history == run.store.history() and record.rounds == 7
        assert record.evaluations == run.store.evaluations()
        assert record.results == run.results()
        summary = run.write_summary()
    assert record.summary == summary
    assert (record.title, record.predicts) == ("PFLEGO", "personal")
    np.testing.assert_allclose(record.spent("bytes")[-1], summary["bytes_down"] + summary["bytes_up"])
    np.testing.assert_allclose(record.spent("passes")[-1], 2 * summary["client_visits"])
    assert record.spent("rounds").tolist() == list(range(1, 8))
    assert (np.diff(record.spent("seconds")) > 0).all()
    assert record.curve() == {t: row["personal test accuracy"] for t, row in by_round(record) if t in record.curve()}
    assert record.result(EV_ALL).accuracy == pytest.approx(np.mean(list(record.per_client().values())))
    assert record.result(EV_LOCAL).clients == "sampled"
    with pytest.raises(ValueError, match="one of rounds, bytes, passes, flops, seconds, virt.*; found 'euros'"):
        record.spent("euros")
    with pytest.raises(ValueError, match="has no virtual clock: it was run without client_seconds"):
        record.spent("virtual seconds")


def by_round(record):
    """(round, row)."""
    return [(row["round"], row) for row in record.history]


@pytest.mark.slow
def test_a_run_is_read_while_it_is_written(tmp_path, federation):
    with Run.create(runs.config(), tmp_path / "run", federation) as run:
        with pytest.raises(RunError, match="has no rounds yet"):
            Record.read(tmp_path / "run")
        run.training().run(3)
        record = Record.read(tmp_path / "run")
        assert record.rounds == 3 and record.summary == {}
        with pytest.raises(ValueError, match="no summary.json"):
            record.spent("passes")
        run.training().run(5)
        assert Record.read(tmp_path / "run").rounds == 5
        assert record.rounds == 3


def of_matrices(folder) -> Record:
    """A record of four rounds with matrices in rounds 2 and 4."""
    rows = [{"round": t} for t in (1, 2, 3, 4)]
    with RunStore(folder / "state.sqlite") as store:
        for row in rows:
            t = row["round"]
            store.commit_round(t, np.zeros(1), {}, row, matrices={"A": t * np.eye(2)} if t % 2 == 0 else {})
    return Record(folder, runs.config(), rows, [], {})


def test_matrices_of_a_round_that_has_none_are_refused_as_a_run_does(tmp_path):
    record = of_matrices(tmp_path)
    assert record.matrices(2)["A"][0, 0] == 2 and record.matrices()["A"][0, 0] == 4
    with pytest.raises(InvalidArgument, match="matrices are saved in evaluated rounds: 2, 4; not 3"):
        record.matrices(3)


def test_matrices_are_those_of_a_records_rounds(tmp_path):
    record = of_matrices(tmp_path).until(3)
    assert record.matrix_rounds == [2] and record.matrices()["A"][0, 0] == 2


def test_reading_changes_nothing_and_needs_a_store(a_run, tmp_path):
    before = runs.saved(a_run)
    Record.read(a_run)
    assert runs.saved(a_run) == before
    with (
        RunStore(a_run / "state.sqlite", read_only=True) as store,
        pytest.raises(StoreError, match="readonly"),
    ):
        store.commit_round(8, (), {}, {"round": 8})
    with pytest.raises(RunError, match="not a run folder"):
        Record.read(tmp_path)
    (a_run / "state.sqlite").unlink()
    with pytest.raises(RunError, match="the run's state is lost"):
        Record.read(a_run)


@pytest.mark.slow
def test_what_stands_side_by_side(tmp_path, federation):
    for name, changes in {
        "a": {"seed": 1},
        "b": {"seed": 2},
        "c": {"seed": 1, "hyperparameters": {"beta": 0.01}},
        "d": {"seed": 1, "algorithm": "fedavg", "hyperparameters": {"steps": 2}, "labels": "local"},
    }.items():
        runs.train(tmp_path / name, federation, rounds=1, **changes)
    records = [Record.read(tmp_path / name) for name in "abcd"]
    check_comparable(records)
    grouped = by_setting(records)
    assert {name: [r.config.seed for r in members] for name, members in grouped.items()} == {
        "PFLEGO (beta=0.05)": [1, 2],
        "PFLEGO (beta=0.01)": [1],
        "FedAvg": [1],
    }
    other = runs.federation(tmp_path / "other", validation=0.4)
    runs.train(tmp_path / "e", other, rounds=1)
    with pytest.raises(ValueError, match="cannot be compared: validation is 0.2 and 0.4"):
        check_comparable([*records, Record.read(tmp_path / "e")])


@pytest.mark.slow
def test_clients_that_are_kept_out_of_training(tmp_path, federation):
    run = runs.train(tmp_path / "run", federation, new_clients=2, rounds=2)
    assert len(run.population.client_ids) == 4
    assert {e.client_id for e in Record.read(tmp_path / "run").evaluations} <= set(run.population.client_ids.tolist())
    fewer = Run.create(runs.config(new_clients=3), tmp_path / "fewer", federation)
    fewer.close()
    assert set(fewer.population.client_ids) < set(run.population.client_ids)  # the same draw, one more
    with pytest.raises(ValueError, match="new_clients=6 leaves no client to train: the federation has 6 clients"):
        Run.create(runs.config(new_clients=6), tmp_path / "none", federation)


ENTRIES_OF_FORMAT_2 = (
    "algorithm", "preset", "hyperparameters", "dataset", "source", "partition", "partition_args", "clients",
    "validation", "data_seed", "federation", "federation_hash", "network", "network_hash", "head_init", "labels",
    "participation", "sampling", "sampling_range", "rounds", "seed", "engine", "cohort", "evaluate_every", "patience",
    "versions", "format",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_of_the_format_before_goes_on(tmp_path, federation):
    """Format 2 had no entry `new_clients`, and called `grouping` `cohort`; its run_id is that of then."""
    import hashlib
    import json

    config = runs.config(rounds=1, grouping="one_by_one")
    config.format = 2
    with Run.create(config, tmp_path / "run", federation) as run:
        run.train()
        run_id = run.config.run_id
    path = tmp_path / "run" / "config.json"
    raw = json.loads(path.read_text())
    assert raw.pop("grouping") == "one_by_one"
    raw = {name: raw[name] for name in ENTRIES_OF_FORMAT_2 if name != "cohort"} | {"cohort": "plain"}
    assert raw["hyperparameters"].pop("head_rate") == "rho"  # which is younger
    path.write_text(json.dumps(raw))
    identity = {name: value for name, value in raw.items() if name not in ("rounds", "versions", "federation")}
    assert run_id == hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    with Run.open(tmp_path / "run", rounds=2) as run:
        assert run.config.run_id == run_id
        run.train()
        assert run.store.round_num == 2
