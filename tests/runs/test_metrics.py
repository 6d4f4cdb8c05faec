"""Metrics besides accuracy and loss: their values, and that every engine, store, table and callback has them."""

import csv
import io
import json
import math
import sqlite3
import warnings
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console
from scipy.special import log_softmax, softmax
from sklearn.metrics import balanced_accuracy_score, f1_score, top_k_accuracy_score

from helpers import small_runs as runs
from helpers.stores import as_format
from helpers.toys import backbone, identical
from tfpfl import SplitModel, Training, build_algorithm
from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.data import Sampling
from tfpfl.data.kinds import KINDS
from tfpfl.runs import EarlyStopping, Metric, Run, RunConfig, metrics, own_metrics, read_config, register_metric
from tfpfl.runs.metrics import METRICS, measurer
from tfpfl.runs.protocols import EV_ALL, EV_LOCAL, LOCAL_COPY, PROTOCOLS, Score, curve, find, results
from tfpfl.runs.store import RunStore, StoreError
from tfpfl.studies import Record, comparison, tables
from tfpfl.studies.paper_tables import paper_table


def hits(labels, logits):
    return (logits.argmax(1) == labels).mean()


def entropy(labels, logits):
    return -log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean()


@pytest.fixture(autouse=True)
def no_metric_is_left(monkeypatch):
    monkeypatch.setattr(metrics, "METRICS", dict(metrics.METRICS))


@pytest.mark.parametrize("classes", [1, 2, 5])
def test_values_are_those_of_scikit_learn(classes):
    rng = np.random.default_rng(classes)
    for n in (1, 2, 40):
        labels, logits = rng.integers(0, classes, n), rng.normal(size=(n, classes)).astype(np.float32)
        found, given = logits.argmax(1), (labels, logits)
        assert metrics.macro_f1(*given) == pytest.approx(f1_score(labels, found, average="macro", zero_division=0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # predictions of a class that no label has, and single classes
            assert metrics.balanced_accuracy(*given) == pytest.approx(balanced_accuracy_score(labels, found))
        if classes > 2:
            expected = top_k_accuracy_score(labels, logits, k=2, labels=range(classes))
            assert metrics.top2_accuracy(*given) == pytest.approx(expected)
        else:
            assert metrics.top2_accuracy(*given) == 1
        p = softmax(logits, axis=1)
        distances = [sum((p[i, k] - (k == labels[i])) ** 2 for k in range(classes)) for i in range(n)]
        assert metrics.brier(*given) == pytest.approx(np.mean(distances), rel=1e-5)


def test_calibration_error_by_hand():
    """Three examples in the bin [0.8, 0.866...) of which two are right, and one in [0.533, 0.6) that is wrong."""
    p = np.array([[0.81, 0.19], [0.83, 0.17], [0.15, 0.85], [0.45, 0.55]])
    labels = np.array([0, 1, 1, 0])
    expected = (abs(2 - (0.81 + 0.83 + 0.85)) + 0.55) / 4
    assert metrics.ece(labels, np.log(p)) == pytest.approx(expected)
    assert metrics.ece(np.array([0, 1]), np.array([[1e3, 0.0], [0.0, 1e3]])) == 0  # sure, and right


def trained(federation, store=None, **given):
    """Two rounds of a small model, evaluated after the second."""
    name, grouping = given.pop("name", "pflego"), given.pop("grouping", "auto")
    population = federation.population(Sampling("fixed", 0.5), given.pop("labels", "local"), shared_slots=True)
    algorithm = build_algorithm(name, SplitModel(backbone("float32")), population)
    training = Training(algorithm, federation, seed=1, evaluate_every=2, store=store, grouping=grouping, **given)
    training.run(rounds=2)
    return training


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine", "grouping"),
    [
        ("pflego", "local", "auto"),  # one pass for the cohort, and one for the evaluation
        pytest.param("pflego", "local", "one_by_one", marks=pytest.mark.slow),
        pytest.param("ditto", "local", "auto", marks=pytest.mark.slow),  # a global model beside the personal ones
        pytest.param("fedamp", "local", "stacked", marks=pytest.mark.slow),
        pytest.param("fedper", "tff", "auto", marks=pytest.mark.slow),
    ],
)
def test_a_metric_gets_the_labels_and_logits_of_the_scores(name, engine, grouping, six_clients, short_end, request):
    """Accuracy and loss, computed as metrics, are those of the evaluation: for every model, client and split."""
    if engine == "tff":
        request.getfixturevalue("tff")
    training = trained(six_clients, name=name, engine=engine, grouping=grouping, metrics=[hits, entropy])
    rows = training.store.evaluations()
    assert {e.split for e in rows} == {"validation", "test"} and LOCAL_COPY in {e.model for e in rows}
    for e in rows:
        assert e.metrics["hits"] == pytest.approx(e.accuracy, abs=1e-12)
        assert e.metrics["entropy"] == pytest.approx(e.loss, abs=1e-5)
    last = training.store.history()[-1]
    for model, split in {(e.model, e.split) for e in rows}:
        assert last[f"{model} {split} hits"] == pytest.approx(last[f"{model} {split} accuracy"])


@pytest.mark.slow
def test_a_metric_on_ray(six_clients, short_end, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    register_metric(hits)
    folder = runs.train(tmp_path / "run", six_clients, engine="ray", rounds=2, metrics=["hits"]).folder
    rows = Record.read(folder).evaluations
    assert {LOCAL_COPY, "personal"} == {e.model for e in rows}
    assert all(e.metrics["hits"] == pytest.approx(e.accuracy, abs=1e-12) for e in rows)


@pytest.mark.slow
def test_the_numbers_of_a_run_are_the_same_with_metrics_and_without(six_clients, short_end):
    """To the last bit: states, scores and history."""
    plain, measured = trained(six_clients), trained(six_clients, metrics=["macro_f1", "accuracy", "loss"])
    assert [m.name for m in measured.metrics] == ["macro_f1"]
    assert measured.store.evaluations() != plain.store.evaluations()
    assert [e._replace(metrics={}) for e in measured.store.evaluations()] == plain.store.evaluations()
    for a, b in zip(plain.store.history(), measured.store.history(), strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {
            k: v for k, v in b.items() if k != "seconds" and not k.endswith("macro_f1")
        }
    assert identical(plain.server_state(), measured.server_state())


@pytest.mark.slow
def test_a_run_writes_its_metrics_everywhere(six_clients, short_end, tmp_path):
    folder = runs.train(tmp_path / "run", six_clients, rounds=3, metrics=["macro_f1", hits]).folder
    with open(folder / "history.csv", encoding="utf-8") as file:
        (*_, last) = csv.DictReader(file)
    record = Record.read(folder)
    found = record.result(EV_ALL)
    by_round = record.curve(EV_ALL, "macro_f1")
    assert float(last["personal test macro_f1"]) == by_round[3]
    assert found.metrics["hits"] == pytest.approx(found.accuracy)
    assert found.metrics["macro_f1"] == pytest.approx(np.mean(list(by_round.values())))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["results"][0]["metrics"].keys() == {"macro_f1", "hits"}
    with open(folder / "clients.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            assert row["test_hits"] == row["test_accuracy"] and 0 <= float(row["train_macro_f1"]) <= 1
    table = tables.metrics(record.results, "all")
    assert table.headings[4:] == ["hits", "macro_f1, %"]
    assert comparison.other_metrics([record]) == ["hits", "macro_f1"]
    (row,) = comparison.rows([record])
    table = tables.metrics_of_algorithms([row], ["hits", "macro_f1"])
    assert table.cells("macro_f1, %") == [f"{row['macro_f1']:.2f} ± {row['macro_f1 ±']:.2f}"]
    assert row["hits ±"] == pytest.approx(row["accuracy ±"] / 100)  # over the clients, as that of the accuracy
    assert row["macro_f1"] == pytest.approx(100 * found.metrics["macro_f1"]) and row["hits"] == found.metrics["hits"]
    assert len(list((folder / "tensorboard").iterdir())) == 1
    # elsewhere, where the user's function is not known, the run is read, and says what it lacks before it trains
    del metrics.METRICS["hits"]
    with Run.open(folder, rounds=4) as run:
        assert run.keras_model(0) is not None
        with pytest.raises(InvalidArgument, match="unknown metric 'hits'.*FILE.py:FUNCTION.*register_metric"):
            run.train()
        register_metric(hits)
        run.train()
        assert run.store.round_num == 4


@pytest.mark.slow
def test_a_run_of_an_older_format_has_no_metrics_and_goes_on(a_run):
    config = json.loads((a_run / "config.json").read_text())
    with Run.open(a_run) as run:
        before = run.store.evaluations()
    del config["metrics"], config["monitor"]
    config["format"] = 6
    (a_run / "config.json").write_text(json.dumps(config))
    identity = read_config(a_run).run_id
    as_format(a_run / "state.sqlite", 2)  # whose checksums do not say which run it is
    with closing(sqlite3.connect(a_run / "state.sqlite")) as db:
        db.execute("UPDATE run SET run_id = ?", (identity,))
        db.commit()
    with RunStore(a_run / "state.sqlite", read_only=True) as store:
        assert store.evaluations() == before
    with Run.open(a_run, rounds=8) as run:
        assert run.config.metrics == () and run.config.monitor == "accuracy" and run.config.run_id == identity
        run.train()
        assert run.store.round_num == 8


def with_metrics(t):
    return [Score(t, i, "personal", "test", 9, 0.5, 0.25, {"b": 0.1 * i, "a": math.nan}) for i in (0, 1)]


def test_the_store_gives_metrics_back_and_finds_changed_ones(tmp_path):
    path = tmp_path / "state.sqlite"
    with RunStore(path, "run") as store:
        for t in (1, 2):
            store.commit_round(t, (), {}, {"round": t}, with_metrics(t))
        store.commit_round(3, (), {}, {"round": 3}, [e._replace(metrics={}) for e in with_metrics(3)])
    with RunStore(path, "run", read_only=True) as store:
        found = store.evaluations()
        assert store.evaluations(2) == found[2:4]
    assert [e.metrics["b"] for e in found[:4]] == [0.0, 0.1, 0.0, 0.1] and found[4].metrics == {}
    assert all(math.isnan(e.metrics["a"]) for e in found[:4])
    changes = (
        "UPDATE metric SET value = 0.2 WHERE round = 2 AND name = 'b' AND client = 1",
        "DELETE FROM metric WHERE round = 2 AND name = 'a' AND client = 1",
        "DELETE FROM metric WHERE round = 1",
        "INSERT INTO metric VALUES (3, 0, 'personal', 'test', 'a', 0.5)",
        "INSERT INTO metric VALUES (4, 0, 'personal', 'test', 'a', 0.5)",
    )
    for i, change in enumerate(changes):
        copy = tmp_path / f"copy{i}.sqlite"
        copy.write_bytes(path.read_bytes())
        with closing(sqlite3.connect(copy)) as db:
            db.execute(change)
            db.commit()
        with pytest.raises(StoreError, match="evaluation of round . is damaged|table metric has"):
            RunStore(copy, "run")


def test_protocols_have_metrics():
    """Means over clients, and pooled ones that are weighted by the examples; NaN is left out."""
    rows = [
        Score(1, 0, "personal", "test", 10, 0.5, 0.8, {"f": 0.5}),
        Score(1, 1, "personal", "test", 30, 0.5, 0.4, {"f": 0.3}),
        Score(1, 2, "personal", "test", 0, math.nan, math.nan, {"f": math.nan}),
    ]
    found = results(rows)
    assert find(found, EV_ALL._replace(when="last")).metrics == {"f": pytest.approx(0.4)}
    assert find(found, EV_ALL._replace(mean="examples", when="last")).metrics == {"f": pytest.approx(0.35)}
    assert curve(rows, EV_ALL, "f") == {1: pytest.approx(0.4)}
    assert curve(rows, EV_ALL, "g") == {}


@pytest.mark.parametrize(
    ("monitor", "mode", "scores", "stops_after"),
    [
        ("loss", None, [0.5, 0.4, 0.6, 0.7], 4),  # smaller is better
        ("loss", None, [0.9, 0.8, 0.7, 0.6], None),
        ("macro_f1", None, [0.5, 0.6, 0.4, 0.3], 4),
        ("ece", None, [0.1, 0.2, 0.3], 3),
        ("ece", "max", [0.1, 0.2, 0.3], None),
    ],
)
def test_early_stopping_looks_at_any_metric(monitor, mode, scores, stops_after):
    stopping = EarlyStopping(2, monitor, mode)
    measured = [metrics.METRICS[name] for name in ("macro_f1", "ece")]
    training = SimpleNamespace(stop_reason=None, model_name="personal", store=RunStore(), metrics=measured)
    stopping.start(training, 10)
    stopped = None
    for t, score in enumerate(scores, 1):
        stopping.round(training, {"round": t, f"personal validation {monitor}": score})
        stopped = t if training.stop_reason and stopped is None else stopped
    assert stopped == stops_after
    if stopped:
        better = "risen above" if monitor == "macro_f1" else "fallen below"
        assert f"validation {monitor} has not {better}" in training.stop_reason


def test_early_stopping_refuses_what_is_not_measured():
    training = SimpleNamespace(stop_reason=None, model_name="personal", store=RunStore(), metrics=[])
    with pytest.raises(InvalidArgument, match="looks at ece, which this training does not measure.*accuracy, loss"):
        EarlyStopping(2, "ece").start(training, 3)
    with pytest.raises(InvalidArgument, match="mode must be one of max, min"):
        EarlyStopping(2, "ece", "low")


def test_configurations_take_names_and_functions():
    smallest = Metric("smallest", lambda labels, logits: logits.min(), "logit", "min")
    config = RunConfig(metrics=["loss", hits, "ece", "ece", smallest], patience=3, monitor="macro_f1")
    assert config.metrics == ("hits", "ece", "smallest", "macro_f1")
    assert metrics.METRICS["smallest"] is smallest and metrics.shown("smallest", -1.5) == "-1.5 logit"
    assert metrics.METRICS["hits"].function is hits
    for bad, said in {
        ("a b",): "begins with a letter.*found 'a b'",
        (lambda labels, logits: 1,): "found '<lambda>'. Write Metric",
        (7,): "a name, a function or a Metric; found 7",
    }.items():
        with pytest.raises(InvalidArgument, match=said):
            RunConfig(metrics=bad)
    with pytest.raises(InvalidArgument, match="monitor='ece' says what patience looks at, but patience"):
        RunConfig(monitor="ece")
    with pytest.raises(InvalidArgument, match="macro_f1 is the name of a metric of tfpfl"):
        register_metric(Metric("macro_f1", hits))


def test_a_metric_that_writes_into_its_arguments_changes_no_other():
    def sorts(labels, logits):
        labels.sort()
        logits.sort()
        return labels.mean()

    rng = np.random.default_rng(0)
    y, z = rng.integers(0, 3, 40), rng.normal(size=(40, 3)).astype(np.float32)
    z.flags.writeable = False  # as an engine gives them
    federation = SimpleNamespace(raw=lambda *_: (None, y))
    scores = {"test_examples": 40, "test_logits": z, "test_outputs": 3}
    both = measurer([Metric("sorts", sorts), METRICS["macro_f1"]], federation, "local")(0, "test", scores)
    assert both == {"sorts": y.mean(), "macro_f1": METRICS["macro_f1"](y, z)}


def test_a_metric_of_ones_own_must_give_one_number(six_clients, tmp_path):
    labels, logits = np.array([0, 1]), np.eye(2)
    with pytest.raises(InvalidArgument, match="metric wide must give one number.*shape .2,."):
        Metric("wide", lambda labels, logits: logits[:, 0])(labels, logits)
    with pytest.raises(InvalidArgument, match="metric word must give one number"):
        Metric("word", lambda labels, logits: "high")(labels, logits)
    with pytest.raises(
        InvalidArgument, match=r"broken raised ZeroDivisionError in <lambda> .*test_metrics.py, line \d+.: div"
    ):
        Metric("broken", lambda labels, logits: 1 / 0)(labels, logits)
    with (
        pytest.raises(InvalidArgument, match="unknown metric 'f1'"),
        Run.create(runs.config(metrics=["f1"]), tmp_path / "run", six_clients),
    ):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_line_takes_metrics(tmp_path, elsewhere):
    words = "run --clients 5 --rounds 2 --participation 1 --metric macro_f1 --metric ece --patience 9 --monitor loss"
    done = CliRunner().invoke(main, [*words.split(), "--out", "run"])
    assert done.exit_code == 0, done.output
    assert "macro_f1, %" in done.output and "ece, %" in done.output
    assert json.loads((tmp_path / "run" / "config.json").read_text())["metrics"] == ["macro_f1", "ece"]
    done = CliRunner().invoke(main, ["run", "--metric", "f1", "--out", "other"])
    assert done.exit_code == 1 and "unknown metric 'f1'; there are accuracy, loss, macro_f1" in " ".join(
        done.output.split()
    )
    assert not (tmp_path / "other").exists()


def test_a_client_for_which_a_metric_is_not_defined_is_left_out_of_every_mean():
    """As r2 is not for one test example: its examples do not count in the pooled mean either."""
    one, two = np.array([[1.0]]), np.array([[1.0], [3.0]])
    undefined = METRICS["r2"](one, one)
    assert math.isnan(undefined) and METRICS["r2"](two, two) == 1
    values, examples = (0.8, 0.6, undefined, undefined), (10, 30, 1, 0)
    rows = [
        Score(1, i, "personal", "test", n, 0.5 if n else math.nan, 0.5 if n else math.nan, {"r2": value})
        for i, (value, n) in enumerate(zip(values, examples, strict=True))
    ]
    found = results(rows)
    assert find(found, PROTOCOLS["final"]).metrics == {"r2": pytest.approx(0.7)}
    pooled = find(found, PROTOCOLS["pfllib"])
    assert pooled.metrics == {"r2": pytest.approx((10 * 0.8 + 30 * 0.6) / 40)} and pooled.score == 0.5
    assert math.isnan(find(results(rows[2:]), PROTOCOLS["pfllib"]).metrics["r2"])


def test_a_round_in_which_a_metric_is_defined_for_no_client_is_left_out():
    """Its NaN had been the mean of ten rounds."""
    rows = [
        Score(t, i, "local copy", "test", 5, 0.5, 0.5, {"f1": value, "g": math.nan})
        for t, values in enumerate([(0.2, 0.4), (math.nan, math.nan), (math.nan, 0.6)], 1)
        for i, value in enumerate(values)
    ]
    found = find(results(rows), EV_LOCAL)
    assert found.rounds == [1, 2, 3] and found.metrics["f1"] == pytest.approx((0.3 + 0.6) / 2)
    assert math.isnan(found.metrics["g"])


def test_a_metric_is_not_called_as_a_column_of_tables_is():
    """Each of these would have replaced that column."""
    one_word = [column for column in ("algorithm", "pairs", "score", *comparison.COLUMNS) if column.isidentifier()]
    assert sorted(metrics.OF_TABLES) == sorted(set(one_word) - {"accuracy"})
    for name in metrics.OF_TABLES:
        with pytest.raises(InvalidArgument, match=f"{name} is the name of a column of tfpfl's tables"):
            metrics.register_metric(Metric(name, metrics.macro_f1))
        assert name not in METRICS


def test_tables_show_a_metric_whose_function_is_not_known(monkeypatch):
    """What a run folder says of it is enough: its unit, and that less is better."""
    monkeypatch.setattr(metrics, "_described", {})
    metrics.describe_metric("delay", "s", "min")
    table = [
        {"algorithm": name, "seeds": 1, "accuracy": 50.0, "delay": value, "delay ±": half}
        for name, value, half in (("one", 0.00123, 0.00012), ("other", 0.0123, 0.00034))
    ]
    assert [comparison.shown("delay", row["delay"]) for row in table] == ["0.00123", "0.0123"]
    assert [comparison.shown("delay ±", row["delay ±"]) for row in table] == ["0.00012", "0.00034"]
    cells = [cell for (cell,) in paper_table({"": table}, ["delay"]).cells]
    assert [(c.mean, c.half, c.best) for c in cells] == [("0.00123", "0.00012", True), ("0.0123", "0.00034", False)]
    console = Console(width=200, file=io.StringIO())
    console.print(tables.metrics_of_algorithms(table, ["delay"]))
    assert "0.00123 ± 0.00012 s" in console.file.getvalue()


def test_of_a_coverage_neither_more_nor_less_is_better():
    """A coverage of Q is best: 99.9 % is no better than 90.1 % for quantile:0.9."""
    table = [
        {"algorithm": a, "seeds": 1, "pinball": p, "coverage": c} for a, p, c in (("one", 1, 99.9), ("two", 2, 90.1))
    ]
    cells = paper_table({"": table}, ["score", "coverage"]).cells
    assert [[cell.best for cell in line] for line in cells] == [[True, False], [False, False]]
    score = KINDS["quantile"].score
    training = SimpleNamespace(stop_reason=None, model_name="personal", store=RunStore(), score=score,
                               metrics=[METRICS["coverage"], METRICS["r2"]])  # fmt: skip
    with pytest.raises(InvalidArgument, match="cannot look at coverage, of which neither.*look at pinball or loss"):
        EarlyStopping(2, "coverage").start(training, 3)
    EarlyStopping(2, "coverage", "max").start(training, 3)
    EarlyStopping(2, "r2").start(training, 3)
    given = {"kind": own_metrics.REGISTERED, "name": "in_range", "unit": "fraction", "direction": "neither"}
    own_metrics.check_entry("in_range", {key: given.get(key, "") for key in own_metrics.ENTRY})  # of a run folder
    with pytest.raises(InvalidArgument, match="direction must be one of max, min, neither"):
        Metric("in_range", hits, direction="none")
