"""A run that was interrupted and resumed is, bit for bit, the run that was not."""

import hashlib
import json
import multiprocessing
import random
import sqlite3
import time

import pytest

from helpers import small_runs as runs
from helpers.marks import slow_but
from helpers.stores import as_format
from tfpfl.checks import InvalidArgument
from tfpfl.runs.run import Run
from tfpfl.runs.store import StoreError

# Processes to be killed come from a server that has imported everything once.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tfpfl.runs.run", "helpers.small_runs"])

CASES = {
    "pflego": {"algorithm": "pflego"},
    "pflego, binomial": {"algorithm": "pflego", "sampling": "binomial", "participation": 0.2, "rounds": 14},
    "fedavg": {
        "algorithm": "fedavg",
        "evaluate_every": 1,
        "hyperparameters": {"batch_size": 7, "epochs": 2, "momentum": 0.9},
    },
    "local": {"algorithm": "local", "evaluate_every": 1, "hyperparameters": {"batch_size": 7, "steps": 5}},
    "fedavg, FedYogi of Adam": {  # the server's optimizer has a state, the clients' starts anew
        "algorithm": "fedavg",
        "evaluate_every": 1,
        "hyperparameters": {"steps": 3, "server_opt": "yogi", "server_eta": 0.1, "client_opt": "adam"},
    },
}


@pytest.mark.parametrize("case", slow_but(CASES, ci=("pflego", "fedavg, FedYogi of Adam")))
def test_interrupted_at_several_rounds(case, federation, shared_run, short_end, tmp_path):
    asked = {"rounds": 7} | CASES[case]
    rounds = asked["rounds"]
    whole = shared_run if case == "pflego" else runs.train(tmp_path / "whole", federation, **asked).folder
    folder = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        runs.train(folder, federation, [runs.Interrupt(1)], **asked)
    for last in (4, 6) if case == "pflego" else (4,):
        assert len(runs.saved(folder)["history"]) < last
        with Run.open(folder) as run, pytest.raises(KeyboardInterrupt):
            run.train([runs.Interrupt(last)])
        assert len(runs.saved(folder)["history"]) == last
    with Run.open(folder) as run:
        run.train()
    expected = runs.saved(whole)
    assert runs.saved(folder) == expected
    evaluated = {*range(3, rounds, 3), rounds - 1, rounds} if "pflego" in case else set(range(1, rounds + 1))
    assert len(expected["history"]) == rounds and {row[0] for row in expected["evaluation"]} == evaluated
    clients = {i for i, *_ in expected["client"]}
    assert clients == (set() if "fedavg" in case else set(range(6)))
    for name in ("clients.csv", "config.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_through_tff(tff, federation, tmp_path):
    asked = {"engine": "tff", "rounds": 4}
    whole = runs.train(tmp_path / "whole", federation, **asked)
    folder = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        runs.train(folder, federation, [runs.Interrupt(2)], **asked)
    with Run.open(folder) as run:
        run.train()
    assert runs.saved(folder) == runs.saved(whole.folder)
    assert len(runs.saved(folder)["history"]) == 4


@pytest.mark.slow
def test_more_rounds_give_the_states_of_a_longer_run(federation, shared_run, short_end, tmp_path):
    whole = runs.saved(shared_run)
    runs.train(tmp_path / "extended", federation, rounds=2)
    with Run.open(tmp_path / "extended", rounds=7) as run:
        run.train()
    extended = runs.saved(tmp_path / "extended")
    assert (extended["server"], extended["client"]) == (whole["server"], whole["client"])
    # Rounds 1 and 2 are the last two of the shorter run only; what both evaluate is the same.
    rounds = [{row[0] for row in found["evaluation"]} for found in (whole, extended)]
    assert rounds[1] - rounds[0] == {1, 2} and rounds[0] <= rounds[1]
    assert [row for row in extended["evaluation"] if row[0] in rounds[0]] == whole["evaluation"]
    with Run.open(tmp_path / "extended") as run:
        assert run.config.rounds == 7


@pytest.mark.slow
def test_a_run_of_an_older_format_keeps_its_cohorts(federation, tmp_path):
    """Those of the version that wrote format 4: [5], [2, 4], [0], [0, 2, 3, 4], [0, 1, 2, 3, 5], [2]."""
    asked = {"format": 4, "sampling": "range", "sampling_range": (1, 5), "rounds": 6}
    with pytest.raises(KeyboardInterrupt):
        runs.train(tmp_path / "run", federation, [runs.Interrupt(2)], **asked)
    with Run.open(tmp_path / "run") as run:
        assert run.config.format == 4
        run.train()
    found = runs.saved(tmp_path / "run")
    assert [row["clients"] for row in found["history"]] == [1, 2, 1, 4, 5, 1]
    assert {i: last for i, last, *_ in found["client"]} == {0: 5, 1: 5, 2: 6, 3: 5, 4: 4, 5: 5}


OLDER = {"fedfomo": {"own_model": "visited"}, "pgfed": {"init": "newest"}, "pgfedmo": {"init": "newest"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(OLDER, "fedfomo"))
def test_a_run_of_an_older_format_goes_on_as_it_was_trained(federation, tmp_path, name):
    """What a method now does by default is not in its config.json: the older rule is used, and the run's id stays."""
    asked = {"algorithm": name, "hyperparameters": OLDER[name] | {"steps": 2, "eta": 0.1}, "rounds": 4}
    whole = runs.train(tmp_path / "whole", federation, **asked)
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        runs.train(folder, federation, [runs.Interrupt(2)], **asked)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for option in (*OLDER[name], "keep_momentum"):
        config["hyperparameters"].pop(option, None)
    for option in [name for name in config["hyperparameters"] if name.startswith(("client_", "server_"))]:
        del config["hyperparameters"][option]
    for entry in ("own_method", "own_metrics", "metrics", "monitor"):
        del config[entry]
    config["format"] = 5
    path.write_text(json.dumps(config))
    identity = {k: v for k, v in config.items() if k not in ("rounds", "versions", "federation")}
    run_id = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    with sqlite3.connect(folder / "state.sqlite") as store:  # as an older version would have written it
        store.execute("UPDATE run SET run_id = ?", (run_id,))
    store.close()
    as_format(folder / "state.sqlite", 2)
    with Run.open(folder) as run:
        assert run.config.format == 5 and run.config.run_id == run_id
        assert {k: run.config.hyperparameters[k] for k in OLDER[name]} == OLDER[name]
        run.train()
    found, expected = runs.saved(folder), runs.saved(whole.folder)
    assert [row[:3] for row in found["client"]] == [row[:3] for row in expected["client"]]  # a checksum is of its run
    assert found["evaluation"] == expected["evaluation"]


@pytest.mark.table
@pytest.mark.slow
def test_early_stopping_stops_where_it_would_have(federation, tmp_path):
    asked = {"patience": 3, "rounds": 60, "evaluate_every": 1, "hyperparameters": {"beta": 1.0}}
    whole = runs.train(tmp_path / "whole", federation, **asked)
    expected = runs.saved(whole.folder)
    stopped = len(expected["history"])
    assert 4 <= stopped < 60 and whole.stop_reason
    folder = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        runs.train(folder, federation, [runs.Interrupt(stopped - 1)], **asked)
    for _ in range(2):  # the second time there is nothing left to do
        with Run.open(folder) as run:
            run.train()
            assert run.stop_reason == whole.stop_reason
        assert runs.saved(folder) == expected


@pytest.mark.slow
def test_rounds_that_were_saved_but_not_evaluated_are_not_complete(federation, short_end, tmp_path):
    """A run that was extended, and killed between its last round and its evaluation, has an older summary."""
    folder = tmp_path / "run"
    runs.train(folder, federation, rounds=2)
    with Run.open(folder, rounds=4) as run, pytest.raises(KeyboardInterrupt):
        run.train([runs.Interrupt(4)])
    with Run.open(folder) as run:
        assert run.store.round_num == 4 and not run.is_complete
        run.train()
        assert run.is_complete
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 4
    (folder / "summary.json").write_text("[]")
    with Run.open(folder) as run:
        assert not run.is_complete


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(a_run):
    before = runs.saved(a_run), {name: (a_run / name).read_bytes() for name in ("clients.csv", "summary.json")}
    with Run.open(a_run) as run:
        run.train()
    assert (runs.saved(a_run), {name: (a_run / name).read_bytes() for name in before[1]}) == before


def test_fewer_rounds_than_there_are_is_refused_and_more_than_a_run_can_have(a_run):
    config = (a_run / "config.json").read_bytes()
    for rounds, message in ((2, "has 7 rounds already"), (0, "rounds must lie in 1"), (3 * 10**9, "must lie in 1..2")):
        with pytest.raises(InvalidArgument, match=message):
            Run.open(a_run, rounds=rounds)
    assert (a_run / "config.json").read_bytes() == config
    Run.open(a_run).close()  # not left locked


@pytest.mark.slow
def test_a_full_disk_loses_no_saved_round(federation, tmp_path):
    whole = runs.saved(runs.train(tmp_path / "whole", federation).folder)
    folder = tmp_path / "run"

    class Fill(runs.Callback):
        def round(self, training, row):
            if row["round"] == 5:  # SQLite's own limit, which gives the error of a full disk
                pages = training.store._db.execute("PRAGMA page_count").fetchone()[0]
                training.store._db.execute(f"PRAGMA max_page_count = {pages}")

    with pytest.raises(StoreError, match=r"round \d+ was not saved, round \d+ is the last whole one.*full"):
        runs.train(folder, federation, [Fill()])
    done = len(runs.saved(folder)["history"])
    assert 5 <= done < 14
    assert len((folder / "history.csv").read_text().splitlines()) == 1 + done
    with Run.open(folder) as run:
        run.train()
    assert runs.saved(folder) == whole


def continue_run(folder):
    with Run.open(folder) as run:
        run.train()


@pytest.mark.table
@pytest.mark.slow
def test_killed_at_random_moments(federation, tmp_path):
    whole = runs.saved(runs.train(tmp_path / "whole", federation, rounds=200, evaluate_every=20).folder)
    folder = tmp_path / "killed"
    Run.create(runs.config(rounds=200, evaluate_every=20), folder, federation).close()
    rng = random.Random(0)
    done, kills = 0, []
    for _ in range(3):
        process = processes.Process(target=continue_run, args=(folder,))
        process.start()
        deadline = time.monotonic() + 60
        while len(runs.saved(folder)["history"]) < done + rng.randint(2, 30) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.02)
        process.kill()
        process.join()
        assert process.exitcode == -9
        done = len(runs.saved(folder)["history"])
        kills.append(done)
    assert 0 < kills[0] < kills[1] < kills[2] < 200
    continue_run(folder)
    assert runs.saved(folder) == whole
