"""Metrics of the user's own by name: runs keep them, every table shows them alike, and no stranger's code is run."""

import json
import shlex
import shutil
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from tfpfl.algorithms import own
from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.runs import Metric, RunConfig, metrics, own_methods, own_metrics, read_config, register_metric
from tfpfl.runs.command import command
from tfpfl.runs.run import Run
from tfpfl.studies import Record, tables

MINE = """
from pathlib import Path
import numpy as np
from tfpfl.runs import Metric

Path("{marker}").touch()  # what a stranger's file would do

def worst_recall(labels, logits):
    right = logits.argmax(1) == labels
    return min(right[labels == c].mean() for c in np.unique(labels))

WORST = Metric("worst_recall", worst_recall, unit="fraction")
MISSED = Metric("missed", lambda labels, logits: 1 - worst_recall(labels, logits), unit="fraction", direction="min")
NUMBER = 3

def broken(labels, logits):
    return helper(labels)

def helper(labels):
    return {{}}[7]
"""


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch, tmp_path):
    """A cache of its own; and what the test loads is forgotten at its end."""
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    for name, there in (("METRICS", metrics.METRICS), ("_described", metrics._described)):
        monkeypatch.setattr(metrics, name, dict(there))
    for module in (own_metrics, own_methods):
        monkeypatch.setattr(module, "METRICS", metrics.METRICS)
    yield
    new_process()


def new_process():
    """Forgets what was loaded, as a new process has; consent stays."""
    own_metrics._loaded.clear()
    metrics._described.clear()
    for name in set(metrics.METRICS) - set(metrics.NAMES):
        del metrics.METRICS[name]
    metrics.METRICS.update({metric.name: metric for metric in reversed(metrics._BUILT_IN)})
    for name in [name for name in sys.modules if name.startswith(own.PREFIX)]:
        del sys.modules[name]


@pytest.fixture
def mine(tmp_path):
    """(the file of the metrics, the mark that it was run)."""
    (tmp_path / "mine").mkdir()
    file, marker = tmp_path / "mine" / "mine.py", tmp_path / "was_run"
    file.write_text(MINE.format(marker=marker))
    return file, marker


def call(*words, code=0):
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == code and (code == 0 or "Traceback" not in done.output), done.output
    return " ".join(done.output.split())


def shown(folder):
    """The metric of a run as tables show it, without any code of it."""
    table = tables.metrics(Record.read(folder).results, "")
    return dict(zip(table.headings, [table.cells(h)[0] for h in table.headings], strict=True))


@pytest.mark.slow
def test_a_run_keeps_its_metrics(mine, six_clients, short_end, tmp_path, monkeypatch):
    file, marker = mine
    out = tmp_path / "run"
    words = ["run", "--algorithm", "local", "--steps", 1, "--federation", six_clients.path, "--rounds", 1, "--out", out]
    words += ["--patience", 9, "--metric", f"{file}:WORST", "--monitor", f"{file}:MISSED"]
    assert "worst_recall, %" in call(*words)
    config = read_config(out)
    assert config.metrics == ("worst_recall", "missed") and config.monitor == "missed"
    entry = config.own_metrics["missed"]
    assert (entry["name"], entry["place"], entry["direction"]) == ("mine.py:MISSED", str(file), "min")
    assert (out / "metric_missed.py").read_bytes() == file.read_bytes()
    again = shlex.split(command(config, out))
    assert f"{out / 'metric_worst_recall.py'}:WORST" in again and again[again.index("--monitor") + 1] == "missed"
    given = {"algorithm": "local", "hyperparameters": {"steps": 1}, "metrics": again[again.index("--metric") + 1 :][:1]}
    assert RunConfig(**given).own_metrics["worst_recall"]["sha256"] == entry["sha256"]

    file.write_text("raise AssertionError('the changed file is run')")
    marker.unlink()
    new_process()
    read_config(out)
    recall = shown(out)["worst_recall, %"]
    assert not marker.exists()
    assert recall in call("evaluate", out) and marker.exists()  # from the copy

    sent = shutil.copytree(out, tmp_path / "sent")
    marker.unlink()
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "theirs"))
    new_process()
    for refused in (["evaluate", sent], ["resume", sent, "--rounds", 3]):
        said = call(*refused, code=1)
        assert "the metric worst_recall (mine.py:WORST) of the run" in said and "use --allow-code" in said
    with Run.open(sent) as run:
        assert run.keras_model(0) is not None  # a model needs no metric
    assert not marker.exists()
    (sent / "metric_missed.py").rename(tmp_path / "away.py")
    said = call("evaluate", sent, "--allow-code", code=1)
    assert f"metric_missed.py is missing: without it the run's metric missed (a copy of {file}) is unknown" in said
    (tmp_path / "away.py").rename(sent / "metric_missed.py")
    call("evaluate", sent, "--allow-code")
    (sent / "metric_missed.py").write_text("raise AssertionError('of a stranger')")
    new_process()
    assert "metric_missed.py was changed: its sha256" in call("evaluate", sent, code=1)


def test_metrics_of_one_content_have_the_modules_of_their_own_folders(tmp_path):
    """Before, the first one that a process loaded was taken for both, and their runs had one identity."""
    code = "from helper_83 import VALUE\ndef share(labels, logits):\n    return VALUE\n"
    for folder, value in (("a", 0.25), ("b", 0.5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.py").write_text(code)
        (tmp_path / folder / "helper_83.py").write_text(f"VALUE = {value}\n")
    a, b = (f"{tmp_path / folder / 'm.py'}:share" for folder in "ab")
    first, second = (RunConfig(metrics=[name]) for name in (a, b))
    assert first.run_id != second.run_id
    for config, value in ((first, 0.25), (second, 0.5)):
        assert own_metrics.loaded_metric(config.own_metrics["share"]).metric.function(None, None) == value
    with pytest.raises(InvalidArgument, match="two metrics have the name share: .*a/m.py and .*b/m.py"):
        RunConfig(metrics=[a, b])
    (tmp_path / "a" / "helper_83.py").write_text("VALUE = 0.75\n")
    changed = RunConfig(metrics=[a])
    assert changed.run_id != first.run_id
    assert metrics.METRICS["share"].function(None, None) == 0.75

    # a run folder says which; a run that is older than this entry has the identity of the file alone
    (entry,) = first.own_metrics.values()
    older = {k: v for k, v in entry.items() if k != "beside"}
    assert RunConfig(metrics=["share"], own_metrics={"share": entry}).run_id == first.run_id
    of_the_file = RunConfig(metrics=["share"], own_metrics={"share": entry | {"beside": ""}}).run_id
    assert RunConfig(metrics=["share"], own_metrics={"share": older}).run_id == of_the_file != first.run_id
    content = (tmp_path / "a" / "m.py").read_bytes()
    new_process()
    with pytest.raises(InvalidArgument, match=r"m.py imports from beside it \(helper_83.py\) was changed since the"):
        own_methods.metric_again(own_methods.Code(entry, content, tmp_path / "a" / "m.py"))
    assert own_methods.metric_again(own_methods.Code(older, content, tmp_path / "a" / "m.py")).metric.name == "share"
    assert own_metrics.loaded_metric(older) and not own_metrics.loaded_metric(entry)


def test_a_stranger_cannot_name_other_code(mine):
    file, marker = mine
    good = RunConfig(metrics=[f"{file}:WORST"]).own_metrics["worst_recall"]
    new_process()
    marker.unlink()
    for change in (
        {"kind": "entry point"}, {"kind": "registered"}, {"kind": "module"}, {"name": "other.py:WORST"},
        {"place": "/x/other.txt"}, {"sha256": "../x"}, {"direction": "up"}, {"unit": 3}, {"more": "x"},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="own_metrics: "):
            RunConfig(metrics=["worst_recall"], own_metrics={"worst_recall": good | change})
    config = RunConfig(metrics=["worst_recall"], own_metrics={"worst_recall": good})
    assert config.own_metrics and RunConfig(own_metrics={"worst_recall": good}).own_metrics == {}
    assert not marker.exists()


@pytest.mark.slow
def test_a_run_folder_cannot_name_a_file_to_run(mine, a_run):
    file, marker = mine
    marker.unlink(missing_ok=True)
    path = a_run / "config.json"
    raw = json.loads(path.read_text())
    for name, value in (("metrics", [f"{file}:WORST"]), ("monitor", f"{file}:WORST")):
        path.write_text(json.dumps(raw | {"patience": 3, name: value}))
        with pytest.raises(InvalidArgument, match=f"{name} must be short names, found"):
            read_config(a_run)
        assert not marker.exists()


def test_what_is_no_metric(mine, tmp_path):
    file, _ = mine
    for name, said in {
        f"{file}:WORTS": "unknown function in .*mine.py 'WORTS'",
        f"{file}:NUMBER": "NUMBER in .*mine.py is int, neither a function .labels, logits. -> number nor a tfpfl.runs",
        f"{tmp_path}/no.py:f": "no.py cannot be read: No such file",
        "no_such_81:f": "there is no module 'no_such_81'",
    }.items():
        with pytest.raises(InvalidArgument, match=said):
            RunConfig(metrics=[name])
    other = tmp_path / "other.py"
    other.write_text("def worst_recall(labels, logits):\n    return 1\n")
    with pytest.raises(InvalidArgument, match="two metrics have the name worst_recall: .*mine.py and .*other.py"):
        RunConfig(metrics=[f"{file}:WORST", f"{other}:worst_recall"])


def test_an_error_of_a_metric_names_its_place(mine):
    file, _ = mine
    RunConfig(metrics=[f"{file}:broken"])
    line = file.read_text().splitlines().index("    return {}[7]") + 1
    with pytest.raises(InvalidArgument, match=rf"metric broken raised KeyError in helper \({file}, line {line}\): 7"):
        metrics.METRICS["broken"](np.array([0]), np.zeros((1, 2)))


def test_a_configuration_keeps_the_unit_of_a_registered_metric(tmp_path):
    """So a table shows it alike where the function is not known; it is no part of the run's identity."""
    register_metric(Metric("share", lambda labels, logits: 0.25, unit="fraction", direction="min"))
    config = RunConfig(metrics=["share"])
    assert metrics.shown("share", 0.25) == "25.00"
    raw = json.loads(json.dumps(config.own_metrics))
    new_process()
    assert metrics.shown("share", 0.25) == "0.25"
    assert RunConfig(metrics=["share"]).run_id == config.run_id  # before, nothing was kept
    RunConfig(metrics=["share"], own_metrics=raw)
    assert metrics.shown("share", 0.25) == "25.00" and metrics.known_metrics(["share"])[0].direction == "min"


def test_ones_own_metric_may_have_the_name_of_one_for_other_kinds(tmp_path):
    """A run with it could not be read any more by another process, and tables had tfpfl's unit and direction."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from tfpfl.runs import Metric\n\n\ndef nll(targets, outputs):\n    return 0.5\n\n\n"
        "f1 = Metric('f1', nll, unit='s', direction='min')\n"
    )
    config = RunConfig(kind="regression", metrics=[f"{file}:nll", f"{file}:f1"])
    new_process()
    again = RunConfig(kind="regression", metrics=config.metrics, own_metrics=config.own_metrics)
    assert again.run_id == config.run_id
    assert metrics.shown("f1", 0.25) == "0.25 s" and metrics.direction_of("f1") == "min"
    assert metrics.direction_of("nll") == "max"
    RunConfig(kind="multilabel", metrics=["f1"])
    assert metrics.shown("f1", 0.25) == "25.00" and metrics.direction_of("f1") == "max"


def test_a_registered_metric_is_not_replaced_by_one_of_tfpfl_with_its_name(tmp_path):
    """A run that was resumed by another process went on with another function."""
    register_metric(Metric("nll", lambda labels, logits: 0.25))
    config = RunConfig(metrics=["nll", "ece"])
    own_methods.load_metrics(config, tmp_path)
    new_process()
    with pytest.raises(InvalidArgument, match="nll of the run .* is not tfpfl's metric of this name.*register_metric"):
        own_methods.load_metrics(config, tmp_path)
    own_methods.load_metrics(RunConfig(metrics=["nll", "ece"]), tmp_path)
