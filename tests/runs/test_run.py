"""The run folder: what is in it, and that its parts say the same."""

import csv
import io
import json
import math
import os
import shutil
import warnings

import keras
import numpy as np
import pytest
from rich.console import Console

from helpers import people
from helpers import small_runs as runs
from helpers.marks import slow_but
from tfpfl.checks import InvalidArgument, TfpflWarning
from tfpfl.data import catalog
from tfpfl.data.federation import Federation
from tfpfl.runs.config import RunConfig, RunError, read_config
from tfpfl.runs.federations import open_federation
from tfpfl.runs.needs import agreeing
from tfpfl.runs.protocols import results
from tfpfl.runs.results import write_history
from tfpfl.runs.run import Run
from tfpfl.studies.tables import comparison


@pytest.fixture(scope="module")
def finished(federation, tmp_path_factory):
    """A run of 12 rounds, with an empty one among them."""
    asked = {"rounds": 12, "sampling": "binomial", "participation": 0.2, "evaluate_every": 1}
    folder = runs.train(tmp_path_factory.mktemp("runs") / "run", federation, **asked).folder
    return folder


def table(path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("folder", [None, 3, b"run"])
def test_what_is_no_path_is_no_run_folder(folder):
    with pytest.raises(InvalidArgument, match="the run folder must be a path; found"):
        Run.open(folder)


def test_the_files_of_a_run(finished):
    names = {p.name for p in finished.iterdir()}
    assert names - {"state.sqlite.lock"} == {
        "config.json", "state.sqlite", "history.csv", "clients.csv", "summary.json", "tensorboard"
    }  # fmt: skip


def test_config_says_everything(finished, federation):
    config = json.loads((finished / "config.json").read_text())
    assert config["hyperparameters"]["tau"] == 4 and config["hyperparameters"]["rho"] == 0.001  # given, and default
    assert (config["federation_hash"], config["federation"]) == (federation.hash, str(federation.path))
    assert (config["dataset"], config["partition"], config["clients"]) == ("arrays", "from_clients", 6)
    assert (config["network"], config["labels"], config["data_seed"]) == ("mlp200", "local", 0)
    assert config["versions"]["tensorflow"] and config["versions"]["keras"] == keras.__version__
    assert None not in (config["seed"], config["rounds"], config["validation"], config["format"])
    with Run.open(finished) as run:
        assert run.config.resolved(federation) == run.config  # nothing is left open
        assert run.changed_versions == {}


def test_summary(finished):
    summary = json.loads((finished / "summary.json").read_text())
    with Run.open(finished) as run:
        history, evaluations, took_part = run.store.history(), run.store.evaluations(), run.took_part
    busy = [row for row in history if row["clients"]]
    assert 0 < len(busy) < 12
    assert (summary["algorithm"], summary["dataset"], summary["engine"]) == ("pflego", "arrays", "local")
    assert (summary["rounds"], summary["stopped"]) == (12, None)
    assert summary["seconds_per_round_median"] == pytest.approx(np.median([row["seconds"] for row in busy]))
    visits = sum(row["clients"] for row in history)
    theta = 4 * 200 + 200  # mlp200 on 4 numbers; 4 bytes each, down and up
    assert summary["client_visits"] == visits
    assert summary["passes"] == {"forward": 1, "backward": 1}
    assert summary["bytes_down"] == summary["bytes_up"] == visits * 4 * theta
    wanted = {"model", "clients", "mean", "when", "split", "accuracy", "accuracy_ci95", "loss"}
    assert all(wanted <= set(row) for row in summary["results"])
    assert [row["accuracy"] for row in summary["results"]] == [r.accuracy for r in results(evaluations, took_part)]
    assert (summary["clients_seen"], summary["clients_never_seen"]) == (len(took_part), 6 - len(took_part))
    sides = {"seen", "unseen"} & {row["clients"] for row in summary["results"]}
    assert sides in (set(), {"seen", "unseen"})
    models = {(row["model"], row["clients"], row["split"]) for row in summary["results"]}
    assert models == {
        (model, clients, split)
        for model, clients in (("personal", "all"), *(("personal", s) for s in sides), ("local copy", "sampled"))
        for split in ("validation", "test")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eval_model", "label"), slow_but([("global", "global"), ("local", "personal")], ("global", "global"))
)
def test_results_say_which_model_was_scored(federation, tmp_path, eval_model, label):
    """Where a hyperparameter decides it; and a comparison of runs finds it."""
    asked = {"algorithm": "scaffold", "rounds": 1, "hyperparameters": {"steps": 2, "eval_model": eval_model}}
    folder = runs.train(tmp_path / "run", federation, **asked).folder
    summary = json.loads((folder / "summary.json").read_text())
    assert {r["model"] for r in summary["results"] if r["clients"] == "all"} == {label, "global"}
    with Run.open(folder) as run:
        table = comparison([(summary, results(run.store.evaluations()))], "title")
    console = Console(width=100, file=io.StringIO())
    console.print(table)
    assert "±" in next(line for line in console.file.getvalue().splitlines() if "SCAFFOLD" in line)


def test_history_csv_is_the_store(finished):
    with Run.open(finished) as run:
        history = run.store.history()
    rows = table(finished / "history.csv")
    assert [int(row["round"]) for row in rows] == list(range(1, 13))
    for row, stored in zip(rows, history, strict=True):
        assert {k: float(v) for k, v in row.items() if v != ""} == stored
    assert any(row["loss"] == "" for row in rows)  # the empty round


def test_history_csv_names_the_rejected_clients(tmp_path):
    """Whatever their names look like; the store keeps the numbers, which are read again."""
    x, y = np.zeros((8, 2), np.float32), np.arange(8) % 2
    names = ["hospital 1", "x; 0: y", "2"]
    federation = Federation.from_clients({name: (x + i, y) for i, name in enumerate(names)}, out=tmp_path / "three")
    numbers = {name: i for i, name in enumerate(federation.client_names)}
    first, strange, plain = (numbers[name] for name in names)
    why = "its work is not finite"
    history = [{"round": 1}, {"round": 2, "rejected_clients": f"{first}: {why}; {strange}: {why}; {plain}: {why}"}]
    write_history(tmp_path / "history.csv", history, federation)
    _, row = csv.DictReader((tmp_path / "history.csv").open(encoding="utf-8"))
    named = [f"{first} (hospital 1)", f"{strange} (x; 0: y)", "2" if plain == 2 else f"{plain} (2)"]
    assert row["rejected_clients"] == "; ".join(f"{name}: {why}" for name in named)
    assert "hospital" not in history[1]["rejected_clients"]


def test_clients_csv_is_the_federation_and_the_last_evaluation(finished, federation):
    with Run.open(finished) as run:
        last = {(e.client_id, e.split): e for e in run.store.evaluations(12) if e.model == "personal"}
        used = run.took_part
    rows = table(finished / "clients.csv")
    assert [int(row["client"]) for row in rows] == list(range(6))
    for i, row in enumerate(rows):
        assert int(row["num_examples"]) == int(row["train_examples"]) == federation.num_examples("train")[i]
        assert int(row["num_classes"]) == runs.CLASSES[i]
        assert row["used_from_round"] == str(used.get(i, ""))
        assert 0 <= float(row["train_accuracy"]) <= 1 and math.isfinite(float(row["train_loss"]))
        for split in ("validation", "test"):
            assert int(row[f"{split}_examples"]) == last[i, split].num_examples > 0
            assert float(row[f"{split}_accuracy"]) == pytest.approx(last[i, split].accuracy)
            assert float(row[f"{split}_loss"]) == pytest.approx(last[i, split].loss, rel=1e-6)


@pytest.mark.slow
def test_evaluate_makes_lost_tables_again_and_loses_nothing(federation, tmp_path):
    def stop(training, row):
        training.stop_reason = "the electricity bill"

    stopping = runs.Callback()
    stopping.round = stop
    folder = runs.train(tmp_path / "run", federation, [stopping], rounds=3).folder
    before = {name: (folder / name).read_bytes() for name in ("summary.json", "history.csv", "clients.csv")}
    assert json.loads(before["summary.json"])["stopped"] == "the electricity bill"
    for name in ("history.csv", "clients.csv"):
        (folder / name).unlink()
    with Run.open(folder, engine="local") as run:
        run.evaluate()
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_presets_are_written_out(federation, tmp_path):
    run = Run.create(RunConfig(preset="exact", hyperparameters={"tau": 3}), tmp_path / "run", federation)
    run.close()
    hyper = json.loads((tmp_path / "run" / "config.json").read_text())["hyperparameters"]
    assert (hyper["rule"], hyper["server_opt"], hyper["tau"]) == ("exact", "sgd", 3)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"rounds": 9}, True),
        ({"seed": 1}, False),
        ({"hyperparameters": {"beta": 0.06}}, False),
        ({"participation": 0.4}, False),
        ({"evaluate_every": 4}, False),
    ],
)
def test_what_makes_another_run(federation, change, same):
    one, other = (runs.config(**c).resolved(federation).run_id for c in ({}, change))
    assert (one == other) == same


def test_a_run_that_is_continued_says_what_of_it_is_not_as_asked(finished, federation, tmp_path):
    """It keeps its own configuration. Nothing is said of what was not asked for, of rounds, and of what is the same."""
    folder = shutil.copytree(finished, tmp_path / "run")
    asked = {"rounds": 12, "sampling": "binomial", "participation": 0.2, "evaluate_every": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error", TfpflWarning)
        with Run.create_or_resume(runs.config(**asked), folder, federation) as run:
            assert run.store.round_num == 12
        with Run.create_or_resume(read_config(finished), folder) as run:
            assert run.store.round_num == 12
    other = runs.federation(tmp_path / "other", validation=0.1)
    for change, data, said in (
        ({"seed": 3}, federation, "seed is 0 and not 3"),
        ({"hyperparameters": {"tau": 4, "beta": 0.7}}, federation, r"beta is 0\.\d+ and not 0.7"),
        ({"dataset": "synthetic", "clients": 7}, None, "dataset is arrays and not synthetic, clients is 6 and not 7"),
        ({"data_seed": 5, "validation": 0.3}, None, r"validation is \S+ and not 0.3, data_seed is \S+ and not 5"),
        ({"partition_args": {"K": 9}}, None, r"K is \S+ and not 9"),
        ({"network": "conv_bn"}, federation, r"network is \S+ and not conv_bn"),
        ({"objective": "fair:1", "dropout": 0.3}, None, "objective is mean and not fair:1, dropout is 0.0 and not 0.3"),
        ({"schedule": "cosine"}, None, "schedule is None and not cosine"),
        ({}, other, f"federation is of hash {federation.hash[:8]} and not of hash {other.hash[:8]}"),
    ):
        with pytest.warns(TfpflWarning, match=f"keeps its own configuration: .*{said}.* take another folder"):
            with Run.create_or_resume(runs.config(**asked | change), folder, data) as run:
                assert run.config.run_id == read_config(finished).run_id


def test_numbers_of_numpy_are_numbers(federation):
    given = {"tau": np.int64(4), "beta": np.float32(0.5)}
    config = runs.config(hyperparameters=given, seed=np.int32(3))
    assert config.hyperparameters == {"tau": 4, "beta": 0.5} and type(config.hyperparameters["tau"]) is int
    assert config.resolved(federation).run_id == runs.config(
        hyperparameters={"tau": 4, "beta": 0.5}, seed=3
    ).resolved(federation).run_id  # fmt: skip


@pytest.mark.slow
def test_your_own_backbone_from_a_file(federation, tmp_path):
    backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(7, activation="tanh")])
    path = tmp_path / "mine.keras"
    backbone.save(path)
    changes = {"network": str(path), "rounds": 2}
    folder = runs.train(tmp_path / "run", federation, **changes).folder
    config = json.loads((folder / "config.json").read_text())
    assert (config["network"], len(config["network_hash"])) == ("network.keras", 64)
    path.unlink()  # the run has its own copy
    with Run.open(folder, rounds=3) as run:
        assert run.model.num_features == 7
        np.testing.assert_array_equal(run.model.initial_theta[0], backbone.get_weights()[0])
        run.train()
        assert run.store.round_num == 3
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(7)]).save(folder / "network.keras")
    with pytest.raises(RunError, match="network.keras was changed"):
        Run.open(folder)
    (folder / "network.keras").unlink()
    with pytest.raises(RunError, match="network.keras is missing"):
        Run.open(folder)


def test_data_that_were_replaced_are_not_taken_from_the_cache(tmp_path, monkeypatch):
    """Also if the new file has the same name, size and time; the same content has the same federation again."""
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TFPFL_PEOPLE", str(tmp_path))
    file = people.vowels(tmp_path)
    config = RunConfig(dataset="vowels", partition="natural", rounds=1)
    before, first = file.stat(), file.read_bytes()
    made = open_federation(config)
    other = first.replace(b"0,0,0,0,0,0", b"0,0,0,0,0,7", 1)
    file.write_bytes(other)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert other != first and file.stat().st_size == before.st_size
    assert open_federation(config).hash != made.hash
    file.write_bytes(first)
    assert open_federation(config).path == made.path
    assert open_federation(RunConfig(dataset="vowels", partition="natural", seed=1)).path != made.path
    for partition_args, source in (({"pooled": False}, {}), ({}, {"pixels": "unit"})):  # the defaults
        same = RunConfig(dataset="vowels", partition="natural", partition_args=partition_args, source=source)
        assert open_federation(same).path == made.path


def test_a_new_version_of_a_prepared_data_set_is_another_one(tmp_path, monkeypatch):
    for version in ("1.0.0", "3.0.9", "3.0.10"):
        (tmp_path / "mnist" / version).mkdir(parents=True)
        (tmp_path / "mnist" / version / "dataset_info.json").touch()
        assert catalog.identity("mnist", tmp_path) == version
    assert {catalog.identity(name, tmp_path) for name in ("cifar10", "digits", "vowels")} == {""}


def test_federations_in_the_cache_are_made_once_and_again_when_lost(tmp_path, monkeypatch):
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    config = RunConfig(clients=5, partition_args={"K": 3}, rounds=1, hyperparameters={"tau": 1})
    made = open_federation(config)
    assert made.path.is_relative_to(tmp_path / "cache") and made.num_clients == 5
    assert open_federation(config).path == made.path
    with Run.create(config, tmp_path / "run") as run:
        assert run.federation.path == made.path
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "another machine"))
    made.path.rename(tmp_path / "gone")
    with Run.open(tmp_path / "run") as run:
        assert run.federation.hash == made.hash
        assert run.federation.path.is_relative_to(tmp_path / "another machine")


def test_other_versions_are_told(finished):
    path = finished / "config.json"
    before = path.read_text()
    config = json.loads(before)
    config["versions"]["tensorflow"] = "1.0"
    path.write_text(json.dumps(config))
    try:
        with Run.open(finished) as run:
            assert run.changed_versions["tensorflow"][0] == "1.0" and len(run.changed_versions) == 1
    finally:
        path.write_text(before)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"clients": 7}, "clients is 7, and 6 in the data"),
        ({"partition_args": {"K": 2}}, "partition_args K is 2, and None"),
        ({"validation": 0.5}, r"validation is 0\.5, and 0\.\d in the data"),
        ({"data_seed": 9}, "data_seed is 9, and 0 in the data"),
        ({"source": {"pixels": "signed"}}, "source pixels is 'signed', and 'unit' in the data"),
        ({"source": {"only_classes": "first_half"}}, "source only_classes is 'first_half', and None in the data"),
    ],
)
def test_a_configuration_that_contradicts_the_given_federation_is_refused(six_clients, tmp_path, given, said):
    with pytest.raises(InvalidArgument, match=f"{said}.*Leave these entries out"):
        Run.create(RunConfig(**given), tmp_path / "run", six_clients)
    assert not list(tmp_path.iterdir())
    with Run.create(RunConfig(clients=6), tmp_path / "run", six_clients) as run:
        assert run.config.clients == 6


def test_a_configuration_agrees_with_the_data_that_were_made_as_it_says(tmp_path, monkeypatch):
    """Also after a run was made of it, whose configuration has the values of the data."""
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path))
    source = {"pixels": "signed", "only_classes": "first_half", "seed": 2, "step": None}
    config = RunConfig(clients=6, validation=0.2, data_seed=4, source=source)
    data = open_federation(config)
    assert agreeing(config, data) is data and agreeing(config.resolved(data), data) is data
    for name, value in (("pixels", "unit"), ("only_classes", "second_half")):
        with pytest.raises(InvalidArgument, match=f"source {name} is '{value}', and '{source[name]}' in the data"):
            agreeing(RunConfig(source=source | {name: value}), data)


def test_a_shared_head_of_mixed_labels_is_told(six_clients, tmp_path):
    with pytest.warns(TfpflWarning, match="FedAvg has one head for clients with different classes.*--labels local"):
        Run.create(
            RunConfig(algorithm="fedavg", labels="local", participation=1.0), tmp_path / "a", six_clients
        ).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error", TfpflWarning)
        for name, labels in (("fedavg", None), ("fedper", "local")):
            config = RunConfig(algorithm=name, labels=labels, participation=1.0)
            Run.create(config, tmp_path / name, six_clients).close()


def test_rounds_of_one_client_are_told(six_clients, tmp_path):
    with pytest.warns(TfpflWarning, match="a round has 1 of the 6 clients.*take --participation 1"):
        Run.create(RunConfig(participation=0.2), tmp_path / "few", six_clients).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error", TfpflWarning)
        Run.create(RunConfig(participation=0.5), tmp_path / "more", six_clients).close()
