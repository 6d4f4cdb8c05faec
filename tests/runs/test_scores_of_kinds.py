"""Scores of every kind of labels: which is better, how they are pooled, and what names them in files and tables."""

import csv
import io
import json
import math
import re

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console
from sklearn import metrics as known

from helpers import small_runs as runs
from helpers.made_records import made
from helpers.marks import slow_but
from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.data import Federation
from tfpfl.data.kinds import ACCURACY, CLASSIFICATION, KINDS
from tfpfl.data.synthetic import synthetic_targets
from tfpfl.runs import metrics, statistics
from tfpfl.runs.config import RunConfig, entries, read_config
from tfpfl.runs.metrics import as_metric, known_metrics, measurer, names_for, shown_score, told_score
from tfpfl.runs.needs import check_labels, check_needs
from tfpfl.runs.protocols import EV_ALL, PROTOCOLS, Score, curve, evaluation_rows, find, results, rounds_to, worst
from tfpfl.runs.run import Run
from tfpfl.runs.store import RunStore
from tfpfl.studies import comparison, tables
from tfpfl.studies.paper_tables import latex, paper_table
from tfpfl.studies.records import Record
from tfpfl.studies.run_groups import group_runs

RMSE = KINDS["regression"].score
SORTS = {"multilabel": "binary", "regression": "real", "poisson": "count", "quantile:0.9": "real", "huber:2": "real"}


def scored(of_rounds, split, examples=(10, 30)):
    """The scores of clients, one list for each round."""
    return [
        Score(t, i, "personal", split, n, value**2 / 2, value)
        for t, values in enumerate(of_rounds, 1)
        for i, (value, n) in enumerate(zip(values, examples, strict=True))
    ]


def test_a_smaller_rmse_is_better():
    rounds = [[3.0, 1.0], [0.5, 1.5], [2.0, 2.0]]
    scores = scored(rounds, "validation") + scored([[r[1], r[0]] for r in rounds], "test")
    best = find(results(scores, named=RMSE), EV_ALL._replace(when="best_validation"))
    assert best.rounds == [2] and best.score == 1.0 and best.named == RMSE
    assert find(results(scores), EV_ALL._replace(when="best_validation")).rounds == [1]  # the largest accuracy
    assert find(results(scores, named=RMSE), PROTOCOLS["pgfed"]).rounds == [2]
    assert worst(scores, 0.5, EV_ALL._replace(when="last"), named=RMSE) == 2.0
    assert best.worst_decile == 1.5
    assert rounds_to(scores, 1.5, named=RMSE) == 2 and rounds_to(scores, 1.5) == 1
    assert rounds_to(scores, 0.9, named=RMSE) is None
    assert (
        curve(scores, EV_ALL, "rmse", named=RMSE) == curve(scores)
        and curve(scores, EV_ALL, "accuracy", named=RMSE) == {}
    )


def test_the_rmse_of_all_examples_is_pooled_by_its_squares():
    rng = np.random.default_rng(0)
    errors = [rng.normal(size=n) for n in (7, 20, 4)]
    each = [float(np.sqrt(np.mean(e**2))) for e in errors]
    scores = scored([each], "test", [len(e) for e in errors])
    pooled = find(results(scores, named=RMSE), EV_ALL._replace(when="last", mean="examples"))
    assert pooled.score == pytest.approx(np.sqrt(np.mean(np.concatenate(errors) ** 2)), rel=1e-12)
    linear = find(results(scores, named=KINDS["huber"].score), EV_ALL._replace(when="last", mean="examples"))
    assert linear.score == pytest.approx(np.average(each, weights=[7, 20, 4]), rel=1e-12)


def test_the_result_is_written_under_the_name_of_its_score():
    wrote = find(results(scored([[0.5, 0.25]], "test"), named=RMSE), EV_ALL).entries()
    assert wrote["rmse"] == 0.375 and "rmse_ci95" in wrote and "score" not in wrote and "named" not in wrote
    assert list(find(results(scored([[0.5, 0.25]], "test")), EV_ALL).entries())[5:7] == ["accuracy", "accuracy_ci95"]


def test_statistics_know_the_direction():
    values, than = np.arange(20.0), np.arange(20.0) + 0.5
    assert statistics.worst(values, 0.1, "min") == 18.5 and statistics.worst(values, 0.1) == 0.5
    assert statistics.share_worse(values, than, "min") == 0 and statistics.share_worse(values, than) == 1
    less = statistics.wilcoxon(values, than, "min")
    assert less == statistics.wilcoxon(than, values) and less.p_value < 1e-4


def test_metrics_are_those_of_scikit_learn():
    rng = np.random.default_rng(1)
    y, z = rng.normal(size=(30, 3)), rng.normal(size=(30, 3))
    of = {name: as_metric(name, "quantile:0.3") for name in ("rmse", "mae", "r2", "coverage")}
    assert of["rmse"](y, z) == pytest.approx(math.sqrt(known.mean_squared_error(y, z)))
    assert of["mae"](y, z) == pytest.approx(known.mean_absolute_error(y, z))
    assert of["r2"](y, z) == pytest.approx(known.r2_score(y, z))
    assert math.isnan(of["r2"](np.ones((5, 1)), z[:5, :1]))
    low = np.quantile(y, 0.3, axis=0, keepdims=True).repeat(30, 0)
    assert of["coverage"](y, low) == pytest.approx(0.3, abs=0.02)
    counts = rng.poisson(2.0, (30, 3)).astype(float)
    for name, expected in (("rmse", known.mean_squared_error), ("mae", known.mean_absolute_error)):
        found = as_metric(name, "poisson")(counts, z) ** (2 if name == "rmse" else 1)
        assert found == pytest.approx(expected(counts, np.exp(z)))
    assert as_metric("deviance")(counts, z) == pytest.approx(
        known.mean_poisson_deviance(counts.ravel(), np.exp(z).ravel())
    )
    several = (rng.random((30, 3)) < 0.4).astype(float)
    guess = z > 0
    assert as_metric("exact_match")(several, z) == pytest.approx(known.accuracy_score(several, guess))
    assert as_metric("f1")(several, z) == pytest.approx(known.f1_score(several, guess, average="macro"))
    assert as_metric("hamming")(several, z) == pytest.approx(known.hamming_loss(several, guess))
    labels, p = rng.integers(0, 3, 30), np.exp(z) / np.exp(z).sum(1, keepdims=True)
    assert as_metric("nll")(labels, z) == pytest.approx(known.log_loss(labels, p, labels=[0, 1, 2]))


def test_a_metric_of_another_kind_is_refused_by_name():
    assert names_for("regression") == ["mae", "r2"] and names_for("quantile") == ["rmse", "mae", "r2", "coverage"]
    with pytest.raises(InvalidArgument, match="unknown metric 'ece'; there are rmse, loss, mae, r2 for regression"):
        RunConfig(kind="regression", metrics=("r2", "ece"))
    with pytest.raises(InvalidArgument, match="'rmse'; there are exact_match, loss, f1, hamming for multilabel"):
        as_metric("rmse", "multilabel")
    config = RunConfig(kind="quantile:0.90", metrics=("coverage", "mae"), patience=3)
    assert (config.kind, config.metrics, config.monitor) == ("quantile:0.9", ("coverage", "mae"), "pinball")
    assert RunConfig(kind="huber", metrics=("mae", "r2")).metrics == ("r2",)  # the score is not listed twice


def test_the_accuracy_is_refused_as_a_metric_of_labels_that_are_no_classes(tmp_path):
    said = "unknown metric 'accuracy'; there are rmse, loss, mae, r2 for regression; accuracy is for classification"
    with pytest.raises(InvalidArgument, match=said):
        RunConfig(kind="regression", metrics=("accuracy", "mae"))
    data = federation("real", tmp_path / "f")
    asked = RunConfig(metrics=("accuracy", "mae"))  # what the labels are is known with the data
    with pytest.raises(InvalidArgument, match=said):
        Run.create(asked, tmp_path / "run", data)
    assert not (tmp_path / "run").exists() and asked.patience is None
    assert RunConfig().resolved(data).monitor == "rmse"  # its default, 'accuracy', stands for the score
    classes = runs.federation(tmp_path / "classes")
    listed, without = (RunConfig(metrics=m).resolved(classes) for m in (("accuracy", "nll", "accuracy"), ("nll",)))
    assert listed.metrics == ("nll",) and listed.run_id == without.run_id
    check_needs(RunConfig(metrics=("accuracy",)))
    assert RunConfig(kind="classification", metrics=("accuracy",)).metrics == ()


def test_a_metric_of_ones_own_must_not_have_the_name_of_one_for_the_kind(monkeypatch):
    monkeypatch.setattr(metrics, "METRICS", dict(metrics.METRICS))
    metrics.register_metric(metrics.Metric("r2", lambda y, z: 0.0))
    assert as_metric("r2", "classification")(np.zeros(1, int), np.zeros((1, 2))) == 0
    with pytest.raises(InvalidArgument, match="r2 is the name of a metric of tfpfl for regression"):
        RunConfig(kind="regression", metrics=("r2",))


def test_runs_of_classes_have_the_ids_and_entries_of_before():
    """The ids are those of the version before there were kinds."""
    assert RunConfig().run_id == "a1f84e82be83ec19c67de60613dc86bfe2ca92bc4bf03368b4744a49f6f1d506"
    other = RunConfig(metrics=("ece",), patience=3, monitor="loss")
    assert other.run_id == "f0537021432758311ccc40116dfc3bf888850c37e9fabbfbe171686b98e66842"
    assert "kind" not in entries(other) and entries(RunConfig(kind="huber"))["kind"] == "huber:1"
    assert RunConfig(kind="huber").run_id != RunConfig(kind="huber:2").run_id != RunConfig().run_id
    assert RunConfig().score == ACCURACY and RunConfig(kind="poisson").score.name == "deviance"


def test_tables_rank_by_the_direction():
    """The same numbers as accuracies and as RMSE: what was best is worst, and p-values are of the other side."""
    of_kind = {
        kind: [made("pflego", good=0.2, kind=kind), made("local", good=0.6, kind=kind)] for kind in (None, "regression")
    }
    classes, numbers = (comparison.rows(of_kind[kind]) for kind in (None, "regression"))
    assert [row["accuracy"] for row in classes] == pytest.approx([100 * row["rmse"] for row in numbers])
    for a, b in zip(classes, numbers, strict=True):
        assert a["gain over Local"] == pytest.approx(-100 * b["gain over Local"], abs=1e-12)
        assert a["worst 10 %"] <= a["accuracy"] and b["worst 10 %"] >= b["rmse"]
    assert (classes[0]["p (Local)"], classes[0]["worse than Local %"]) == (1.0, 100)
    assert numbers[0]["p (Local)"] < 0.01 and numbers[0]["worse than Local %"] == 0
    best = [[cell.best for cell, *_ in paper_table({"": rows}).cells] for rows in (classes, numbers)]
    assert best == [[False, True], [True, False]]
    assert paper_table({"": numbers}, ["score", "EV-local"]).columns == ["rmse", "EV-local"]
    assert r"\caption{RMSE: the model" in latex(paper_table({"": numbers}))
    told = comparison.text(numbers, "md")
    assert "\n\nrmse: " in told and f"{numbers[0]['rmse']:.4g}" in told
    with pytest.raises(InvalidArgument, match="of different kinds"):
        paper_table({"a": classes, "b": numbers})


def test_runs_of_different_kinds_are_not_compared():
    runs = [made("pflego"), made("local", kind="regression")]
    for function in (comparison.rows, group_runs):
        with pytest.raises(
            InvalidArgument, match="their kinds are classification and regression, whose scores are acc"
        ):
            function(runs)
    assert told_score(RMSE, 0.12345) == "RMSE 0.1235" and told_score(ACCURACY, 0.12345) == "12.35 %"


def federation(sort, folder):
    return Federation.from_clients(synthetic_targets(sort, 4, 20).clients, targets=sort, out=folder, validation=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(SORTS, "regression"))
def test_a_run_scores_what_its_metrics_say(kind, tmp_path):
    """The engine's score, and that of the client's own Keras model, are the metric of the same name."""
    data, name = federation(SORTS[kind], tmp_path / "f"), RunConfig(kind=kind).score.name
    wanted = None if ":" not in kind else kind  # the usual kind of such targets needs no name
    config = RunConfig(algorithm="fedavg", kind=wanted, metrics=(*names_for(kind)[:1], name), rounds=2,
                       participation=1.0, patience=5, hyperparameters={"eta": 0.001, "epochs": 2})  # fmt: skip
    if name == "pinball":
        config.metrics = config.metrics[:1]
    with Run.create(config, tmp_path / "run", data) as run:
        run.train()
        assert (run.config.kind, run.config.monitor) == (kind, name) and name not in run.config.metrics
        x, y = data.arrays(2, "test", "global")
        z = run.keras_model(2, inputs="decoded", outputs="logits").predict(x, verbose=0)
        rows = list(csv.DictReader((tmp_path / "run" / "clients.csv").open()))
        if name == "pinball":
            expected = known.mean_pinball_loss(y, z, alpha=0.9)
        else:
            expected = as_metric(name, kind)(np.asarray(y), z)
        assert float(rows[2][f"test_{name}"]) == pytest.approx(expected, rel=1e-4)
        predicted = run.keras_model(2, inputs="decoded").predict(x, verbose=0)
        link = {"multilabel": lambda z: 1 / (1 + np.exp(-z)), "poisson": np.exp}.get(kind, lambda z: z)
        np.testing.assert_allclose(predicted, link(z), rtol=1e-4)
    record = Record.read(tmp_path / "run")
    assert record.score.name == name and f"global test {name}" in record.history[-1]
    assert name in json.loads((tmp_path / "run" / "summary.json").read_text())["results"][0]
    assert read_config(tmp_path / "run").run_id == record.config.run_id


@pytest.mark.slow
def test_evaluate_shows_the_score_of_the_kind(tmp_path):
    """Also which clients are the worst: those of the largest RMSE."""
    data, folder = federation("real", tmp_path / "f"), tmp_path / "run"
    with Run.create(RunConfig(algorithm="fedavg", rounds=1, participation=1.0), folder, data) as run:
        run.train()
        last = find(run.results(), EV_ALL._replace(when="last"))
        largest = max(s.score for s in run.store.evaluations() if s.split == "test" and s.model == last.model)
    done = CliRunner().invoke(main, ["evaluate", str(folder)])
    assert done.exit_code == 0, done.output
    table = " ".join(done.output.partition("while it ran")[0].split())
    assert "accuracy" not in table and "RMSE" in table
    mean, worst_of_four = shown_score(RMSE, last.score, last.score_ci95), shown_score(RMSE, largest)
    assert mean in table and f" {worst_of_four} {last.loss:.4f} 4" in table


def test_a_kind_that_does_not_fit_the_labels_is_refused(tmp_path):
    data = federation("real", tmp_path / "f")
    with pytest.raises(InvalidArgument, match="the kind poisson learns from numbers >= 0"):
        RunConfig(kind="poisson").resolved(data)
    assert RunConfig().resolved(data).kind == "regression"
    with pytest.raises(InvalidArgument, match="unknown metric 'ece'"):
        RunConfig(metrics=("ece",)).resolved(data)
    with pytest.raises(InvalidArgument, match="unknown kind 'regresion'.*regression"):
        RunConfig(kind="regresion")
    assert RunConfig(kind=CLASSIFICATION.text).score == ACCURACY


def test_labels_that_are_numbers_have_no_choice_among_classes(tmp_path):
    data = federation("real", tmp_path / "f")
    for name, labels in (("pflego", "global"), ("fedavg", "local")):
        with pytest.raises(InvalidArgument, match=f"labels='{labels}' says .* real targets, .* leave labels out"):
            Run.create(RunConfig(algorithm=name, labels=labels, participation=1.0), tmp_path / name, data)
    check_labels(RunConfig(algorithm="fedavg", labels="global"), data)  # as a run folder has it


@pytest.mark.slow
def test_the_commands_speak_of_the_score(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    federation("real", tmp_path / "f")

    def tfpfl(words):
        done = CliRunner().invoke(main, words.split())
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    data = "--federation f --rounds 3 --participation 1 --metric r2"
    told = tfpfl(f"compare --algorithms fedavg,local --seeds 0,1 {data} --write t.md --write t.tex --plot c.svg")
    assert "RMSE: the model that a client predicts with" in told and "accuracy" not in told
    assert "RMSE" in (tmp_path / "t.tex").read_text() and "accuracy" not in (tmp_path / "t.md").read_text()
    tfpfl("report runs/compare/fedavg-s0 runs/compare/local-s0 --out r.html")
    page = (tmp_path / "r.html").read_text().lower()
    assert "rmse. ev-all:" in page and "test rmse by rounds" in page and "accurac" not in page
    told = tfpfl("sweep --algorithm fedavg --federation f --rounds 2 --participation 1 --grid eta=0.01,0.000001")
    assert "validation RMSE" in told and "eta=0.01 is the largest value" in told and "--kind regression" in told
    told = tfpfl("run --algorithm fedavg --federation f --rounds 2 --new-clients 1 --kind huber:2 --out runs/h")
    assert "MAE: over clients" in told
    assert "New clients, test MAE after so many epochs" in tfpfl(
        "new-clients runs/h --epochs 1 --csv n.csv --plot n.svg"
    )
    assert "epoch,mae,loss" in (tmp_path / "n.csv").read_text().splitlines()[0]
    told = CliRunner().invoke(main, ["compare", "runs/h", "runs/compare/fedavg-s0"]).output
    assert "their kinds are huber:2 and regression" in told
    (tmp_path / "study.toml").write_text(
        '[run]\nrounds = 2\nparticipation = 1.0\n[search]\nkind = "grid"\n[data.f]\nfederation = "f"\n'
        "[methods.fedavg]\nsearch = {eta = [0.000001, 0.01]}\n[methods.local]\n"
    )
    told = tfpfl("study study.toml --out s")
    assert "eta=0.01 is the best of 2 settings on validation examples, RMSE" in told
    assert "validation_rmse" in (tmp_path / "s" / "search.csv").read_text()
    assert "ev_local_rmse" in (tmp_path / "s" / "results.csv").read_text()
    assert "RMSE: the model" in (tmp_path / "s" / "table.md").read_text()


def evaluated(of_rounds):
    """The rows of fine-tuned clients with these RMSEs on test and validation examples, one list for each round."""
    rows = []
    for t, values in enumerate(of_rounds, 1):
        names = ("score", "loss")
        found = [
            {f"{s}_{name}": np.float32(v) for s in ("test", "validation") for name in names}
            | {f"{s}_examples": n for s in ("test", "validation")}
            for v, n in values
        ]
        rows += evaluation_rows(found, range(len(values)), t, "fine-tuned")
    return rows


def test_a_client_that_diverged_is_not_left_out_of_the_mean(tmp_path):
    """NaN would mean that it has no examples, as the fifth client has none, and the mean would be better for it."""
    nan = math.nan
    rows = evaluated([[(2.0, 10)] * 4 + [(0.0, 0)], [(1.0, 10), (1.0, 10), (nan, 10), (nan, 10), (0.0, 0)]])
    assert [e.score for e in rows if e.round_num == 2 and e.split == "test"][:4] == [1, 1, math.inf, math.inf]
    assert all(math.isnan(e.score) and math.isnan(e.loss) for e in rows if e.client_id == 4)
    found = results(rows, named=RMSE)
    last, chosen = (find(found, EV_ALL._replace(when=when)) for when in ("last", "best_validation"))
    assert (last.score, last.loss, last.num_clients) == (math.inf, math.inf, 4)
    assert (chosen.score, chosen.rounds, chosen.score_ci95) == (2.0, [1], 0.0)
    told = shown_table(tables.protocols(found, "a run"))
    assert re.search(r"fine-tuned +all +last +test +inf +inf +inf +inf +4\n", told)
    assert re.search(r"fine-tuned +all +best val. +test +2 ± 0 +2 +2 +2.0000 +4\n", told)
    with RunStore(tmp_path / "state.sqlite", "a run", named=RMSE) as store:
        for t in (1, 2):
            store.commit_round(t, {}, {}, {"round": t, "rmse": math.inf}, [e for e in rows if e.round_num == t])
    with RunStore(tmp_path / "state.sqlite", "a run", named=RMSE, read_only=True) as store:
        assert str(sorted(store.evaluations(), key=str)) == str(sorted(rows, key=str))  # NaN is not equal to NaN


class OfOneClient:
    """A federation of which only the labels of one client are read."""

    def __init__(self, y):
        self.y = np.asarray(y)

    def raw(self, client_id, split, labels):
        return None, self.y


@pytest.mark.parametrize(
    ("kind", "y", "worst"),
    [
        ("classification", [0, 2, 1], {"ece": math.inf, "brier": math.inf, "nll": math.inf}),
        ("regression", [[1.0], [3.0]], {"mae": math.inf, "r2": -math.inf}),
        ("regression", [[1.0], [1.0]], {"mae": math.inf, "r2": math.nan}),
        ("poisson", [[1.0], [3.0]], {"rmse": math.inf, "mae": math.inf}),
    ],
)
def test_a_metric_of_a_client_that_diverged_is_the_worst(kind, y, worst):
    """NaN would mean that it is not defined, as r2 of equal targets, and the client would be left out of the means."""
    measure = measurer(known_metrics(worst, kind), OfOneClient(y), "global")
    nan = np.full((4, 3 if kind == "classification" else 1), np.nan, np.float32)
    scores = {"test_examples": len(y), "test_outputs": nan.shape[1], "test_logits": nan}
    assert str(measure(0, "test", scores)) == str(worst)
    right = measure(0, "test", scores | {"test_logits": np.zeros_like(nan)})
    assert {name for name, value in right.items() if not math.isfinite(value)} <= {"r2"}


def test_scores_of_a_run_of_before_that_diverged_are_read_as_the_worst(tmp_path):
    """Such a run has no number there, although the client has examples."""
    old = Score(1, 0, "fine-tuned", "test", 10, math.nan, math.nan)
    for named, score in ((RMSE, math.inf), (ACCURACY, math.nan)):
        with RunStore(tmp_path / named.name, "a run", named=named) as store:
            store.commit_round(1, {}, {}, {"round": 1}, [old, old._replace(client_id=1, num_examples=0)])
            first, second = store.evaluations()
        assert first.loss == math.inf and str(first.score) == str(score)
        assert math.isnan(second.loss) and math.isnan(second.score)


def test_a_table_of_scores_without_numbers_is_shown():
    """They came to `results` by another way than a store."""
    rows = scored([[2.0, 2.0], [1.0, math.nan]], "test") + scored([[2.0, 2.0], [1.0, math.nan]], "validation")
    assert "best val." in shown_table(tables.protocols(results(rows, named=RMSE), "a run"))


@pytest.mark.slow
def test_a_run_whose_fine_tuning_diverges_for_one_client(tmp_path):
    """Nothing checks the evaluation's fine-tuning: the run goes on, and the client counts as the worst."""
    drawn = list(synthetic_targets("real", 4, 20).clients.values())
    drawn[2] = (1e4 * drawn[2][0], drawn[2][1])
    data = Federation.from_clients(drawn, targets="real", out=tmp_path / "f", validation=0.2)
    config = RunConfig(algorithm="fedavg_ft", rounds=2, participation=1.0,
                       hyperparameters={"eta": 1e-9, "steps": 1, "eta_ft": 0.01, "steps_ft": 30})  # fmt: skip
    with Run.create(config, tmp_path / "run", data) as run:
        run.train()
    rows = list(csv.DictReader((tmp_path / "run" / "clients.csv").open()))
    tested = [float(row["test_rmse"]) for row in rows]
    assert tested[2] == math.inf and np.isfinite(tested[:2]).all() and np.isfinite(tested[3])
    record = Record.read(tmp_path / "run")
    assert record.result(EV_ALL).score == math.inf and record.result(EV_ALL).num_clients == 4
    assert math.isfinite(record.result(PROTOCOLS["global"]).score)

    def refuse(word):
        raise AssertionError(f"JSON has no {word}")

    json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=refuse)
    (row,) = comparison.rows([record])
    assert comparison.shown("rmse", row["rmse"], RMSE) == "inf" and row["worst 10 %"] == math.inf
    assert "inf" in comparison.text([row], "md") and "inf ±" not in latex(paper_table({"data": [row]}, ["score"]))


def shown_table(table) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"
