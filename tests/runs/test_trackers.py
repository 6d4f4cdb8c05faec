"""MLflow and Weights & Biases: the callbacks without the libraries, and with them where they are installed."""

import importlib.util
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from helpers import small_runs as runs
from tfpfl.checks import Unavailable
from tfpfl.cli import main
from tfpfl.runs import Run, Tracker, trackers
from tfpfl.runs.config import RunConfig
from tfpfl.runs.store import RunStore
from tfpfl.runs.training import DivergedError


def installed(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed, an extra")


class Memory(Tracker):
    """Keeps in a dict what a library would be told."""

    def __init__(self, told, **how):
        super().__init__(**how)
        self.told = told

    def _open(self, identity):
        self.told.setdefault("opened", []).append(identity)
        return max((step for step, _ in self.told.get("numbers", [])), default=0)

    def _parameters(self, values):
        self.told["parameters"] = values

    def _numbers(self, values, step):
        self.told.setdefault("numbers", []).append((step, values))

    def _artifacts(self, files):
        self.told["artifacts"] = [file.name for file in files]

    def _close(self, done):
        self.told.setdefault("closed", []).append(done)


@pytest.mark.slow
def test_what_is_told_of_a_run_and_of_its_continuation(six_clients, short_end, tmp_path):
    told = {}
    with pytest.raises(KeyboardInterrupt):
        runs.train(tmp_path / "run", six_clients, [Memory(told), runs.Interrupt(2)], rounds=3)
    assert told["closed"] == [False] and [step for step, _ in told["numbers"][:2]] == [1, 2]
    with Run.open(tmp_path / "run") as run:
        run.train([Memory(told, tables=True)])
        history, (result,) = run.store.history(), [r for r in run.results() if r[:5] == trackers_result(run)]
    first, again = told["opened"]
    assert first == again and first[0] == "run" and len(first[1]) == 16
    assert told["parameters"]["algorithm"] == "pflego" and told["parameters"]["tau"] == 4
    assert told["closed"] == [False, True]
    assert told["artifacts"] == ["config.json", "history.csv", "clients.csv", "summary.json"]
    # the round before the interruption stands there twice: the process may have ended before it was written
    *_, second, third, results = told["numbers"]
    assert (second[0], third[0], results[0]) == (2, 3, 3)
    assert third[1] == {k: v for k, v in history[-1].items() if k != "round"}
    assert results[1]["result last10 personal test accuracy"] == result.accuracy


@pytest.mark.slow
def test_rounds_without_a_tracker_are_told_when_there_is_one_again(six_clients, short_end, tmp_path):
    told = {}
    runs.train(tmp_path / "run", six_clients, [Memory(told)], rounds=2)
    for rounds, callbacks in ((4, []), (5, [Memory(told)])):
        with Run.open(tmp_path / "run", rounds=rounds) as run:
            run.train(callbacks)
    assert {step for step, _ in told["numbers"]} == {1, 2, 3, 4, 5} and told["closed"] == [True, True]


class Away(Memory):
    """A server that is away in some calls of `_numbers`."""

    def __init__(self, told, away):
        super().__init__(told)
        self.calls, self.away = 0, away

    def _numbers(self, values, step):
        self.calls += 1
        if self.calls in self.away:
            raise ConnectionError("the server is away")
        super()._numbers(values, step)

    def _close(self, done):
        if self.calls in self.away:
            raise ConnectionError("the server is away")
        super()._close(done)


@pytest.mark.slow
def test_a_server_that_is_away_for_a_while_gets_all_rounds(six_clients, tmp_path):
    told = {}
    with pytest.warns(UserWarning, match=r"Away did not take the numbers of round 2 \(ConnectionError.*goes on"):
        runs.train(tmp_path / "run", six_clients, [Away(told, {2, 3})], rounds=4)
    assert [step for step, _ in told["numbers"]] == [1, 2, 3, 4, 4] and told["closed"] == [True]


@pytest.mark.slow
def test_a_server_that_stays_away_does_not_end_the_run(six_clients, tmp_path):
    told = {}
    with pytest.warns(UserWarning) as warned:
        run = runs.train(tmp_path / "run", six_clients, [Away(told, range(3, 99))], rounds=4)
    said = [str(w.message) for w in warned if "Away" in str(w.message)]
    assert [step for step, _ in told["numbers"]] == [1, 2] and "closed" not in told
    assert len(said) == 3 and "round 3" in said[0] and "the end of the run" in said[1]
    assert "from round 3 on. history.csv" in said[2]
    assert (run.folder / "summary.json").exists()


@pytest.mark.slow
def test_a_run_is_closed_also_if_its_files_are_not_taken_and_the_next_one_begins_anew(six_clients, tmp_path):
    class Full(Away):
        def _artifacts(self, files):
            raise OSError("the disk is full")

        def _close(self, done):
            Memory._close(self, done)

    told = {}
    tracker = Full(told, {3, 4})  # with the results, which are sent twice
    tracker._tables = True
    with pytest.warns(UserWarning, match="Full did not take the end of the run .OSError"):
        runs.train(tmp_path / "first", six_clients, [tracker], rounds=2)
    assert told.pop("closed") == [True] and [step for step, _ in told.pop("numbers")] == [1, 2]
    told["numbers"], tracker.away = [], ()
    with pytest.warns(UserWarning, match="Full did not take the end"):
        runs.train(tmp_path / "second", six_clients, [tracker], rounds=1)
    assert [step for step, _ in told["numbers"]] == [1, 1] and told["closed"] == [True]


def test_a_plain_training_sends_at_its_end_what_was_not_taken():
    told = {}
    tracker = Away(told, {2})
    tracker.start(SimpleNamespace(store=RunStore()), 2)
    for t in (1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tracker.round(None, {"round": t, "loss": 0.5})
    tracker.end(None)
    assert [step for step, _ in told["numbers"]] == [1, 2] and told["closed"] == [True]


def test_parameters_of_one_name_are_both_told():
    config = RunConfig(algorithm="ditto", init="stax", hyperparameters={"init": "first_broadcast", "lam": 2.0})
    found = trackers.parameters(SimpleNamespace(config=config))
    assert (found["init"], found["hyperparameters.init"], found["lam"]) == ("stax", "first_broadcast", 2.0)
    found = trackers.parameters(SimpleNamespace(config=RunConfig(head_init="zeros")))
    assert found["head_init"] == "zeros" and "hyperparameters.head_init" not in found


@pytest.mark.slow
def test_a_run_that_diverges_is_not_done(six_clients, tmp_path):
    told = {}
    with pytest.raises(DivergedError):
        runs.train(tmp_path / "run", six_clients, [Memory(told)], algorithm="fedavg", hyperparameters={"eta": 1e38})
    assert told["closed"] == [False]


def trackers_result(run):
    from tfpfl.runs import EV_ALL

    return tuple(EV_ALL._replace(model="personal"))


def test_a_plain_training_is_told_of_too():
    told, tracker = {}, None
    tracker = Memory(told, name="mine")
    training = SimpleNamespace(store=RunStore())
    tracker.start(training, 2)
    tracker.round(
        training, {"round": 1, "loss": 0.5, "rejected_clients": "3: norm", "personal test loss": float("nan")}
    )
    tracker.end(training)
    assert told == {"opened": [("mine", "")], "numbers": [(1, {"loss": 0.5})], "closed": [True]}


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_library_that_is_missing_is_said_before_the_run(name, tmp_path, monkeypatch):
    def missing(wanted):
        raise ImportError(f"No module named {wanted!r}")

    monkeypatch.setattr(trackers, "import_module", missing)
    with pytest.raises(Unavailable, match=f"pip install '..{name}.'"):
        trackers.TRACKERS[name]()
    done = CliRunner().invoke(main, ["run", "--log", name, "--out", str(tmp_path / "run")])
    assert done.exit_code == 1 and f"needs the package {name}" in done.output and not (tmp_path / "run").exists()


def test_artifacts_without_a_library_are_refused(tmp_path):
    done = CliRunner().invoke(main, ["run", "--log-tables", "--out", str(tmp_path / "run")])
    assert done.exit_code == 1 and "add --log mlflow or --log wandb" in done.output


@pytest.mark.slow
def test_mlflow_has_the_run(six_clients, short_end, tmp_path, monkeypatch):
    installed("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow import MlflowClient

    def tracker():
        return trackers.MLflow(folder=tmp_path / "mlruns", tables=True)

    with pytest.raises(KeyboardInterrupt):
        runs.train(tmp_path / "run", six_clients, [tracker(), runs.Interrupt(2)], rounds=3)
    with Run.open(tmp_path / "run") as run:
        run.train([tracker()])
        history = run.store.history()
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlruns' / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("tfpfl").experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "run"
    assert found.data.params["algorithm"] == "pflego" and found.data.params["tau"] == "4"
    values = {m.step: m.value for m in client.get_metric_history(found.info.run_id, "loss")}
    assert values == {row["round"]: pytest.approx(row["loss"]) for row in history}
    assert found.data.metrics["result/last10/personal/test/accuracy"] <= 1
    assert {f.path for f in client.list_artifacts(found.info.run_id)} >= {"history.csv", "summary.json"}


@pytest.mark.slow
def test_wandb_has_the_run_and_asks_nobody(six_clients, tmp_path):
    """In a process whose connections all fail."""
    installed("wandb")
    program = f"""
import socket, sys
from unittest import mock
real = socket.socket.connect
def connect(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise AssertionError(f"a connection to {{address}}")
    return real(self, address)
socket.socket.connect = connect
from helpers import small_runs
from tfpfl.data import Federation
from tfpfl.runs import trackers
with mock.patch("tfpfl.runs.protocols.LAST_ROUNDS", 1):
    small_runs.train("run", Federation.load({str(six_clients.path)!r}), [trackers.WandB(tables=True)], rounds=2)
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    path = os.pathsep.join(["tests", *sys.path[:1], os.getcwd()])
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=env | {"PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in path.split(os.pathsep) if p)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    content, history = file.read_bytes(), runs.saved(tmp_path / "run")["history"]
    for text in ("pflego", "result/last10/personal/test/accuracy", str(history[0]["loss"]), str(history[1]["loss"])):
        assert text.encode() in content
