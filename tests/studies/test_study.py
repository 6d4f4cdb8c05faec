"""Studies: what is run, in which order, that nothing is lost, and that the results are those of plain runs."""

import csv
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers import small_runs as runs
from helpers.made_records import made, stored
from helpers.processes import alive, children_of
from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.runs.config import RunConfig, entries
from tfpfl.runs.protocols import EV_ALL
from tfpfl.runs.store import StoreError
from tfpfl.studies import comparison
from tfpfl.studies.search import at_the_edge
from tfpfl.studies.study import worker
from tfpfl.studies.study.file import Study
from tfpfl.studies.study.plan import Cell, Failure, Outcome, Tried, number_of_runs, plan
from tfpfl.studies.study.pool import Ledger, work
from tfpfl.studies.study.results import StudyResults, _write_parquet
from tfpfl.studies.study.run import run_study

pytestmark = pytest.mark.usefixtures("elsewhere")
ETAS = [0.001, 0.01, 0.1, 1.0]

# Does a run without TensorFlow: eta=1 diverges, eta=0.01 with `steps` 7 fails.
FAKE = """
import json, pathlib, sys, time
asked = json.load(sys.stdin)
hyper, folder = asked["config"]["hyperparameters"], pathlib.Path(asked["folder"])
if hyper.get("steps") == 7 and hyper.get("eta") == 0.01:
    sys.exit("out of luck")
folder.mkdir(parents=True, exist_ok=True)
with open(folder / "starts.txt", "a") as file:
    file.write("x")
(folder / "config.json").write_text("{}")
time.sleep(hyper.get("eta", 0) if hyper.get("steps") == 9 else 0)
sys.exit(3 if hyper.get("eta") == 1 else 0)
"""


@dataclass
class NoData:
    """Takes the place of a federation; run folders need its hash only."""

    hash: str = "f" * 64


@pytest.fixture(autouse=True)
def no_data_needed(monkeypatch, request):
    """A configuration is resolved without data, except in tests that train."""
    if not request.node.name.startswith("test_real"):
        monkeypatch.setattr(RunConfig, "resolved", lambda self, federation: self)


def study(search=None, methods=None, **more) -> Study:
    methods = methods or {"local": {"search": {"eta": ETAS}}}
    return Study.of({"data": {"d": {"clients": 5}}, "methods": methods, "search": search or {}, "seeds": [0, 1]} | more)


def score(job) -> float:
    """Best at eta = 0.1; with more rounds a little better."""
    return 1 - abs(math.log10(job.config.hyperparameters["eta"]) + 1) / 10 + job.config.rounds / 1e6


def plans(of: Study, out=Path("out")) -> list:
    return [plan(of, data, method, NoData(), out, score) for data in of.data for method in of.methods]


def drive(one, state=lambda job: "done"):
    """Runs a plan without processes: its cell, and its lists of jobs."""
    asked, outcomes = [], None
    while True:
        try:
            jobs = one.send(outcomes)
        except StopIteration as end:
            return end.value, asked
        asked.append(jobs)
        outcomes = [Outcome(state(job)) for job in jobs]


def fake(of: Study, out: Path, **how) -> list:
    out.mkdir(exist_ok=True)
    return work(plans(of, out), Ledger(out / "ledger.jsonl"), out / "logs", worker=[sys.executable, "-c", FAKE], **how)


def test_the_winner_of_a_grid_is_trained_with_all_seeds():
    of = study({"rounds": 7, "seeds": [5, 6]}, run={"rounds": 30, "evaluate_every": 5})
    cell, (tried, final) = drive(plans(of)[0])
    assert [(j.config.hyperparameters["eta"], j.config.seed) for j in tried] == [(e, s) for e in ETAS for s in (5, 6)]
    assert {(j.config.rounds, j.config.evaluate_every, j.config.data_seed) for j in tried} == {(7, 0, 0)}
    assert [(j.config.hyperparameters, j.config.seed, j.config.rounds) for j in final] == [
        ({"eta": 0.1}, seed, 30) for seed in (0, 1)
    ]
    assert cell.winner == {"eta": 0.1} and cell.best.score == pytest.approx(1.000007)
    assert len({j.folder for j in tried + final}) == 10 == number_of_runs(of, of.methods[0], 7)
    assert at_the_edge(cell.winner, [t.setting for t in cell.tried]) == {}


def test_a_run_folder_that_was_deleted_is_trained_again_in_all_stages(tmp_path):
    """The stages of a search share it: the later ones counted as done when the first had made it anew."""
    of = study({"rounds": 8, "halving": 2})
    _, asked = drive(plans(of, tmp_path)[0])
    early, late = next((a, b) for a in asked[0] for b in asked[1] if a.folder == b.folder)
    assert early.config.rounds < late.config.rounds
    early.folder.mkdir(parents=True)
    (early.folder / "config.json").touch()
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    for job in (early, late):
        ledger.add(job, Outcome("done", 1.0))
    assert Ledger(path).outcome(early).state == Ledger(path).outcome(late).state == "done"
    (early.folder / "config.json").unlink()
    assert ledger.outcome(early) is None
    (early.folder / "config.json").touch()  # the first stage is trained again
    ledger.add(early, Outcome("done", 1.0))
    for found in (ledger, Ledger(path)):  # also after a kill at this place
        assert found.outcome(early).state == "done" and found.outcome(late) is None


def test_the_best_at_the_edge_is_noticed():
    cell, _ = drive(plans(study(methods={"local": {"search": {"eta": [0.1, 0.5, 1.0], "steps": [3]}}}))[0])
    assert at_the_edge(cell.winner, [t.setting for t in cell.tried]) == {"eta": (0.1, 1.0)}


def test_settings_that_diverge_are_never_chosen_and_of_equal_ones_the_first_is():
    cell, (_, final) = drive(
        plans(study())[0], lambda job: "diverged" if job.config.hyperparameters["eta"] > 0.05 else "done"
    )
    assert cell.winner == {"eta": 0.01} and math.isnan(cell.tried[2].score) and len(final) == 2
    cell, asked = drive(plans(study())[0], lambda job: "diverged")
    assert cell.winner is None and len(asked) == 1 and cell.failures == []
    equal = [plan(study(), s.data[0], s.methods[0], NoData(), Path("out"), lambda job: 0.5) for s in [study()]]
    assert drive(equal[0])[0].winner == {"eta": ETAS[0]}


def test_halving_continues_the_runs_of_the_better_half():
    of = study({"halving": 2, "rounds": 8})
    cell, asked = drive(plans(of)[0])
    assert [(len(jobs), jobs[0].config.rounds) for jobs in asked[:-1]] == [(4, 2), (2, 4), (1, 8)]
    assert asked[2][0].folder in {j.folder for j in asked[1]} <= {j.folder for j in asked[0]}
    assert cell.winner == {"eta": 0.1} and number_of_runs(of, of.methods[0], 8) == 9
    assert [t.rounds for t in cell.tried] == [2] * 4 + [4] * 2 + [8] and cell.best.rounds == 8


def test_all_stages_of_halving_have_the_schedule_of_the_last_one():
    """With a cosine of its own, a stage would be another run, and end with rates of 0."""
    of = study({"halving": 2, "rounds": 8}, run={"schedule": "cosine", "patience": 3, "monitor": "loss"})
    _, asked = drive(plans(of)[0])
    assert {job.config.schedule for jobs in asked[:-1] for job in jobs} == {"cosine:0.0:8"}
    assert asked[2][0].folder in {j.folder for j in asked[1]} <= {j.folder for j in asked[0]}
    assert {job.config.patience for jobs in asked[:-1] for job in jobs} == {None}  # nor a monitor without patience
    assert [(job.config.patience, job.config.monitor) for job in asked[-1]] == [(3, "loss")] * 2


def test_if_the_finalist_of_halving_diverges_the_next_best_takes_its_place():
    """eta = 0.1 and 0.01 reach the second stage, and 0.1 the last one."""
    of = study({"halving": 2, "rounds": 8}, run={"rounds": 30})

    def outcome(diverged, final=()):
        def state(job):
            eta = job.config.hyperparameters["eta"]
            bad = eta in final if job.final else (eta, job.config.rounds) in diverged
            return "diverged" if bad else "done"

        return state

    cell, (*_, seeds) = drive(plans(of)[0], outcome({(0.1, 8)}))
    assert cell.winner == {"eta": 0.01} and cell.best.rounds == 4
    assert [(j.config.hyperparameters["eta"], j.config.rounds) for j in seeds] == [(0.01, 30)] * 2
    said = StudyResults(of, Path("out"), [cell]).said(cell)
    assert said[0].startswith("d, Local: eta=0.01 is the best of 4 settings on validation examples, ")
    assert said[1] == "d, Local: eta=0.1 was among the best with fewer rounds, but diverged with 8"
    cell, _ = drive(plans(of)[0], outcome({(0.1, 8), (0.01, 4)}))
    assert cell.winner == {"eta": 1.0}  # as far from 0.1 as 0.01, which was tried before
    cell, _ = drive(plans(of)[0], outcome({(0.1, 4), (0.01, 4)}))  # nothing is left for the last stage
    assert cell.winner == {"eta": 1.0} and max(t.rounds for t in cell.tried) == 4
    cell, _ = drive(plans(of)[0], outcome({}, final={0.1, 0.01}))
    assert cell.winner == {"eta": 1.0} and cell.passed_over == [{"eta": 0.1}, {"eta": 0.01}]
    cell, asked = drive(plans(of)[0], outcome({(eta, 2) for eta in ETAS}))
    assert cell.winner is None and len(asked) == 1
    said = StudyResults(of, Path("out"), [cell]).said(cell)
    assert said == ["d, Local: every setting diverged. Try smaller learning rates"]


@pytest.mark.parametrize("etas, rounds", [([0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2], 2), (ETAS, 1)])
def test_every_setting_is_counted_once(etas, rounds):
    """Halving has several stages of one round here."""
    cell, _ = drive(plans(study({"halving": 2, "rounds": rounds}, {"local": {"search": {"eta": etas}}}))[0])
    assert sum(tried.rounds == 1 for tried in cell.tried) > len(etas)
    results = StudyResults(study(), Path("out"), [cell])
    assert f"is the best of {len(etas)} settings on" in results.said(cell)[0]
    cell.tried.append(cell.tried[0])  # as Optuna may
    assert f"is the best of {len(etas)} settings on" in results.said(cell)[0]


def test_a_failed_run_of_the_search_leaves_the_choice_open():
    cell, asked = drive(plans(study())[0], lambda job: "failed" if job.config.hyperparameters["eta"] == 1 else "done")
    assert cell.winner is None and len(asked) == 1 and len(cell.failures) == 1 and len(cell.tried) == 3


def test_a_damaged_run_of_the_search_leaves_the_choice_open():
    def unreadable(job):
        if job.config.hyperparameters["eta"] == 0.1:
            raise StoreError("state.sqlite is damaged")
        return score(job)

    of = study()
    cell, asked = drive(plan(of, of.data[0], of.methods[0], NoData(), Path("out"), unreadable))
    (failure,) = cell.failures
    assert cell.winner is None and len(asked) == 1 and [t.setting["eta"] for t in cell.tried] == [0.001, 0.01, 1.0]
    assert failure.why.startswith("state.sqlite is damaged. To train this run again, delete ")


def test_names_of_folders_follow_what_decides_the_numbers():
    def folders(**changes):
        return [job.folder for jobs in drive(plans(study(**changes))[0])[1] for job in jobs]

    assert folders() == folders()
    assert not set(folders()) & set(folders(run={"participation": 0.7}))
    longer = folders(run={"rounds": 9})
    assert longer[:4] == folders()[:4] and not set(longer[4:]) & set(folders()[4:])  # as halving continues runs


def test_a_shorter_search_leaves_runs_alone_that_lack_the_rounds_that_it_compares(tmp_path):
    def first_folders(rounds):
        return [job.folder for job in next(plan_of(rounds))]

    def plan_of(rounds):
        return plans(study({"rounds": rounds}), tmp_path)[0]

    longer, other, *_ = first_folders(12)
    stored(record := made("local", rounds=12), longer)  # all rounds but the first are evaluated
    (longer / "config.json").write_text(json.dumps(entries(record.config)))
    assert first_folders(12)[0] == first_folders(15)[0] == first_folders(11)[0] == longer
    assert first_folders(10)[:2] == [longer.with_name(f"{longer.name}-r10"), other]


METHODS = {
    "local": {"search": {"eta": ETAS}},
    "bad": {"algorithm": "local", "hyperparameters": {"steps": 7}, "search": {"eta": ETAS}},
    "fixed": {"algorithm": "local", "hyperparameters": {"eta": 0.01, "steps": 3}},
}


def test_a_failing_run_does_not_lose_the_others_and_is_tried_again(tmp_path):
    ended = []
    cells = fake(study(methods=METHODS), tmp_path / "out", processes=3, ended=lambda job, o: ended.append(o.state))
    good, bad, fixed = cells
    assert sorted(ended) == ["diverged"] * 2 + ["done"] * 9 + ["failed"]
    assert good.winner == {"eta": 0.1} and sorted(good.folders) == sorted(fixed.folders) == [0, 1]
    assert bad.winner is None and len(bad.tried) == 3
    (failure,) = bad.failures
    log = re.fullmatch(r"out of luck \(exit code 1; all that it printed is in (.*)\)", failure.why)[1]
    assert Path(log).read_text() == "out of luck\n" and os.listdir(Path(log).parent) == [Path(log).name]

    ended.clear()
    again = fake(study(methods=METHODS), tmp_path / "out", ended=lambda job, o: ended.append(o.state))
    assert ended == ["failed"] and again[0] == good and again[2] == fixed
    assert {path.read_text() for path in (tmp_path / "out").rglob("starts.txt")} == {"x"}


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_processes(tmp_path):
    """The first setting is the slowest here, so that runs end in another order than they start."""
    methods = {"local": {"hyperparameters": {"steps": 9}, "search": {"eta": [0.3, 0.1, 0.01]}}}
    one, three = (fake(study(methods=methods), tmp_path / f"out{n}", processes=n) for n in (1, 3))
    assert (
        [t.setting for t in one[0].tried]
        == [t.setting for t in three[0].tried]
        == [{"eta": e} for e in (0.3, 0.1, 0.01)]
    )
    assert [t.scores for t in one[0].tried] == [t.scores for t in three[0].tried]
    assert one[0].winner == three[0].winner == {"eta": 0.1}


def test_a_ledger_that_was_torn_loses_its_last_line_alone(tmp_path):
    out = tmp_path / "out"
    fake(study(), out)
    lines = (out / "ledger.jsonl").read_text().splitlines()
    assert len(lines) == 6 and json.loads(lines[0])["state"] == "done"
    (out / "ledger.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    ended = []
    fake(study(), out, ended=lambda job, outcome: ended.append(job.config.seed))
    assert ended == [1]
    ended.clear()
    known = []
    fake(study(), out, ended=lambda job, outcome: ended.append(job.config.seed), known=known.append)
    assert ended == [] and len(known) == 6


def test_an_interrupted_study_ends_its_runs(tmp_path):
    def interrupt(job, outcome):
        raise KeyboardInterrupt

    methods = {"local": {"hyperparameters": {"steps": 9}, "search": {"eta": [0.001, 30.0]}}}
    with pytest.raises(KeyboardInterrupt):
        fake(study(methods=methods), tmp_path / "out", processes=2, ended=interrupt)
    assert not [pid for pid in children_of(os.getpid()) if alive(pid) and FAKE in _command(pid)]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.slow  # seven seconds, five of them to import Optuna
def test_optuna_proposes_the_same_after_an_interruption(tmp_path):
    pytest.importorskip("optuna")
    space = {"eta": {"low": 1e-3, "high": 10.0}, "steps": [1, 2, 3]}
    of = study({"kind": "optuna", "settings": 8}, methods={"local": {"search": space}})
    (tmp_path / "whole").mkdir()
    whole, asked = drive(plans(of, tmp_path / "whole")[0])
    assert len(whole.tried) == 8 and len(asked) == 9
    assert whole.winner == max(whole.tried, key=lambda t: t.score).setting
    (tmp_path / "part").mkdir()
    broken = plans(of, tmp_path / "part")[0]
    jobs = broken.send(None)
    for _ in range(4):
        jobs = broken.send([Outcome("done") for _ in jobs])
    broken.close()  # the fifth setting was proposed, and has no result
    resumed, _ = drive(plans(of, tmp_path / "part")[0])
    assert [t.setting for t in resumed.tried] == [t.setting for t in whole.tried]
    assert drive(plans(of, tmp_path / "part")[0])[0].tried == whole.tried


def test_a_missing_optuna_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("tfpfl.studies.study.plan.find_spec", lambda name: None)
    content = {"data": {"d": {}}, "methods": {"local": {"search": {"eta": ETAS}}}}
    told = "^the study: search.kind = 'optuna' needs Optuna, which is not installed: pip install '..optuna.'"
    with pytest.raises(RuntimeError, match=told):
        run_study(content | {"search": {"kind": "optuna", "settings": 3}}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_error_about_one_name_of_a_list_names_the_entry_of_the_list(tmp_path):
    content = {"data": {"d": {}}, "methods": {"local": {}}, "run": {"metrics": ["ece", "my_metric"]}}
    with pytest.raises(InvalidArgument, match="^the study: run.metrics: unknown metric 'my_metric'"):
        run_study(content, tmp_path / "out")


def test_a_worker_whose_study_is_gone_does_nothing(monkeypatch, tmp_path):
    """The kernel is asked to end it with its parent, which may have ended before."""
    asked = {"config": {}, "folder": str(tmp_path / "run"), "parent": 1 << 22}
    done = subprocess.run([sys.executable, "-m", worker.__name__], input=json.dumps(asked), text=True, check=False)
    assert done.returncode == 1 and not (tmp_path / "run").exists()


def test_the_tables_are_those_of_the_runs(tmp_path):
    """Of made runs: a method that is searched, one without all of its seeds, and one that diverged."""
    spaces = {"pflego": {"search": {"beta": [0.007, 0.1]}}, "local": {}, "fedavg": {}, "ditto": {}}
    of = study({}, {"fedper": {}} | spaces)
    cells, records = [], {}
    for method in of.methods:
        cell = Cell(of.data[0], method, winner={})
        for seed in of.seeds[: 1 if method.name == "fedavg" else 2]:
            cell.folders[seed] = tmp_path / "runs" / f"{method.name}-s{seed}"
            records[cell.folders[seed]] = made(method.name, seed, folder=cell.folders[seed])
        cells.append(cell)
    _, searched, local, fedavg, ditto = cells
    searched.tried = [Tried({"beta": 0.007}, 30, (0.5,)), Tried({"beta": 0.1}, 30, (0.75,))]
    searched.winner = {"beta": 0.1}
    fedavg.failures.append(Failure("d, FedAvg, seed 1", "out of luck"))
    ditto.diverged.append(1)
    results = StudyResults(of, tmp_path, cells)
    results.__dict__["records"] = records
    table = results.table()
    assert table.methods == ["FedPer", "PFLEGO", "Local"]  # the others lack a seed
    mine = [records[folder] for folder in searched.folders.values()]
    accuracies = [100 * record.result().accuracy for record in mine]
    assert results.by_data["d"][1]["accuracy"] == pytest.approx(sum(accuracies) / 2)
    gain = comparison.rows([*mine, *(records[folder] for folder in local.folders.values())])[0]["gain over Local"]
    assert results.by_data["d"][1]["gain over Local"] == pytest.approx(gain)
    assert "2 settings of every method that is searched, seed 0" in table.caption
    assert "Not searched: FedPer, Local, FedAvg, Ditto." in table.caption

    results.write()
    assert {path.name for path in results.files} >= {
        "search.csv",
        "results.csv",
        "commands.sh",
        "table.md",
        "table.tex",
    }
    written = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert len(written) == 9 and float(written[2]["accuracy"]) == mine[0].result().accuracy
    assert [row["chosen"] for row in csv.DictReader((tmp_path / "search.csv").open())] == ["False", "True"]
    said = results.said(searched)
    assert said[0] == "d, PFLEGO: beta=0.1 is the best of 2 settings on validation examples, 75.00 %"
    assert "beta=0.1 is the largest value that was tried (0.007 to 0.1): a larger one may be better" in said[1]
    assert results.said(fedavg) == ["d, FedAvg: failed: d, FedAvg, seed 1: out of luck"]
    assert results.said(ditto) == ["d, Ditto: diverged with seed 1, so it is not in the table"]
    first, second = results.commands(searched)
    assert first.endswith("--out runs/d-pflego-s0") and "--seed 1" in second and "--data-seed 0" in second
    with pytest.raises(InvalidArgument, match="unknown column 'acuracy'"):
        results.write(("acuracy",))
    # A later call whose runs all failed: a paper that includes the table must not go on showing its numbers.
    old = (tmp_path / "table.tex").read_text()
    empty = StudyResults(of, tmp_path, [])
    empty.__dict__["records"] = {}
    empty.write()
    assert not (tmp_path / "table.tex").exists() and (tmp_path / "table.tex.old").read_text() == old
    assert "table.tex of an earlier call is table.tex.old now: nothing takes its place" in empty.notes


def results_of(records: dict, tmp_path) -> StudyResults:
    """The results of a study whose methods have these records, one for each seed."""
    methods = {name: {"algorithm": found[0].config.algorithm} for name, found in records.items()}
    of = study({}, methods, seeds=[r.config.seed for r in next(iter(records.values()))])
    cells, by_folder = [], {}
    for method in of.methods:
        cell = Cell(of.data[0], method, winner={})
        for record in records[method.name]:
            cell.folders[record.config.seed] = folder = tmp_path / "runs" / f"{method.name}-s{record.config.seed}"
            by_folder[folder] = record
        cells.append(cell)
    results = StudyResults(of, tmp_path, cells)
    results.__dict__["records"] = by_folder
    return results


def test_baselines_with_other_entries_have_their_own_rows(tmp_path):
    others = {"lost": made("fedavg_ft", good=0.3, dropout=0.6), "tff": made("fedavg_ft", good=0.2, engine="tff")}
    results = results_of({"ft": [made("fedavg_ft")]} | {name: [r] for name, r in others.items()}, tmp_path)
    rows = results.by_data["d"]
    assert [row["seeds"] for row in rows] == [1, 1, 1]
    assert [row["accuracy"] for row in rows] == [100 * r.result().accuracy for r in results.records.values()]
    assert len({row["accuracy"] for row in rows}) == 3


def test_the_caption_says_if_methods_ran_under_different_conditions(tmp_path):
    """Two entries of one method, which differ on one data set or on both."""

    def caption(*shares):
        of = study({}, {name: {"algorithm": "pflego"} for name in ("all", "few")}, seeds=[0],
                   data={name: {"clients": 5} for name in ("d", "e")})  # fmt: skip
        cells, records = [], {}
        for data, share in zip(of.data, shares, strict=True):
            for method, participation in zip(of.methods, (1.0, share), strict=True):
                folder = tmp_path / data.name / method.name
                records[folder] = made("pflego", participation=participation)
                cells.append(Cell(data, method, winner={}, folders={0: folder}))
        results = StudyResults(of, tmp_path, cells)
        results.__dict__["records"] = records
        return results.table().caption

    told = "The methods were run under different conditions: participation 1.0 (all), 0.2 (few)."
    assert f" e: {told}" in caption(1.0, 0.2) and caption(1.0, 0.2).count("conditions") == 1
    assert told in caption(0.2, 0.2) and ": The methods" not in caption(0.2, 0.2)
    assert "different conditions" not in caption(1.0, 1.0)


def test_runs_that_ended_early_are_told(tmp_path):
    """Their means are of other rounds, which `tfpfl compare` tells, too."""
    runs = {name: [made(name, seed) for seed in (0, 1)] for name in ("pflego", "local")}
    assert "early" not in results_of(runs, tmp_path).table().caption
    runs["pflego"] = [replace(r, summary=r.summary | {"stopped": "validation ..."}) for r in runs["pflego"]]
    for record in runs["pflego"]:
        record.__dict__["took_part"] = runs["local"][0].took_part
    results = results_of(runs, tmp_path)
    assert "evaluated by then: PFLEGO after 12 rounds." in results.table().caption
    assert results.ends(results.cells[0])[1] == "d, PFLEGO, seed 1, stopped after round 12: validation ...."
    assert not results.ends(results.cells[1])


def test_the_caption_names_methods_as_the_rows_do(tmp_path):
    of = study({}, {name: {"algorithm": "pflego", "title": name.upper()} for name in ("own", "every")}, seeds=[0])
    cells, records = [], {}
    for method, labels in zip(of.methods, ("local", "global"), strict=True):
        records[folder := tmp_path / method.name] = made("pflego", labels=labels)
        cells.append(Cell(of.data[0], method, winner={}, folders={0: folder}))
    results = StudyResults(of, tmp_path, cells)
    results.__dict__["records"] = records
    assert "Labels are local for OWN, whose heads choose among the client's own classes" in results.table().caption
    assert "and global for EVERY, whose heads" in results.table().caption


def test_all_methods_have_a_score_of_those_that_were_seen(tmp_path):
    """Where one method had seen all clients and another had not, the best of both must be bold."""
    results = results_of(
        {
            "local": [made("local", good=0.9)],
            "fedavg": [made("fedavg", good=0.2, took_part=dict.fromkeys(range(5), 1))],
        },
        tmp_path,
    )
    local, fedavg = results.by_data["d"]
    assert local["seen"] == local["accuracy"] > fedavg["seen"] and math.isnan(local["never seen"])
    seen = results.table().columns.index("seen")
    assert [cells[seen].best for cells in results.table().cells] == [True, False]


def test_gains_are_over_one_baseline_in_all_rows(tmp_path):
    """Two settings of Local: the first of the file is it for both, and for the others."""
    lost = made("local", good=0.3, dropout=0.6)
    results = results_of({"local": [made("local", good=0.5)], "b": [lost], "pflego": [made("pflego")]}, tmp_path)
    rows = results.by_data["d"]
    gains = [[name for name in row if name.startswith("gain over")] for row in rows]
    assert gains[0] == gains[1] == gains[2] and len(gains[0]) == 1
    assert rows[0][gains[0][0]] == 0 and rows[1][gains[0][0]] != 0


def test_tables_show_those_that_were_seen_and_the_others(tmp_path):
    first = dict.fromkeys(range(5), 1)
    results = results_of(
        {name: [made(name, s, took_part=first) for s in (0, 1)] for name in ("pflego", "local")}, tmp_path
    )
    table = results.table()
    assert table.columns == ["accuracy", "seen", "never seen"]
    row = results.by_data["d"][0]
    assert [cell.mean for cell in table.cells[0]] == [f"{row[name]:.2f}" for name in table.columns]
    assert "In the last round 5 clients had taken part, and 3 never. Seen: " in table.caption
    assert results.table(("never seen", "accuracy", "std")).columns == ["accuracy", "seen", "never seen", "std"]
    assert results.table(("std",)).columns == ["std"]
    results.write()
    assert "never seen" in (tmp_path / "table.md").read_text() and "never seen" in (tmp_path / "table.tex").read_text()
    for line, record in zip(csv.DictReader((tmp_path / "results.csv").open()), results.records.values(), strict=True):
        assert (line["clients_seen"], line["clients_never_seen"]) == ("5", "3")
        for which in ("seen", "never_seen"):
            wanted = EV_ALL._replace(clients=which.replace("never_", "un"))
            assert float(line[f"accuracy_{which}"]) == record.result(wanted).accuracy
    everybody = results_of({"local": [made("local")]}, tmp_path)
    assert everybody.table().columns == ["accuracy"]
    assert "All clients had taken part by round 1." in everybody.table().caption
    assert everybody.run_rows[0]["clients_never_seen"] == 0 and math.isnan(everybody.run_rows[0]["accuracy_never_seen"])


def test_parquet_has_what_the_csv_has(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = [
        {"data": "a", "accuracy": 0.5, "seed": 0, "diverged": False},
        {"data": "b", "accuracy": math.nan, "seed": 1},
    ]
    _write_parquet(tmp_path / "a.parquet", table)
    found = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert found[0] == table[0] and found[1]["data"] == "b" and math.isnan(found[1]["accuracy"])
    assert os.listdir(tmp_path) == ["a.parquet"]


# ---- with training


def content(folder, **changes) -> dict:
    """Two methods on six small clients: one is searched."""
    return {
        "seeds": [0, 1],
        "run": {"rounds": 4, "participation": 0.5, "labels": "local"},
        "search": {"rounds": 2},
        "data": {"six": {"federation": str(folder)}},
        "methods": {
            "pflego": {"hyperparameters": {"tau": 4}, "search": {"beta": [1e-6, 0.05]}},
            "local": {"hyperparameters": {"steps": 2}},
        },
    } | changes


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"run": {"rounds": 0}}, "run.rounds: rounds must lie in 1..2^31-1, found 0"),
        ({"run": {"engine": "jax"}}, "run.engine: "),
        ({"data": {"x": {"dataset": "digit"}}}, "data.x.dataset: "),
        ({"data": {"x": {"federation": "nowhere"}}}, "data.x.federation: "),
        ({"methods": {"local": {"search": {"eta": [0.1, -1.0]}}}}, "methods.local.search.eta: eta must be a finite"),
        ({"methods": {"local": {"network": "mlp20"}}}, "methods.local.network: unknown network 'mlp20'"),
        ({"methods": {"local": {"sampling": "range"}}}, "methods.local.sampling: "),
    ],
)
def test_real_checks_come_before_the_first_run(six_clients, tmp_path, changes, message):
    with pytest.raises(InvalidArgument, match=f"^the study: {re.escape(message)}"):
        run_study(content(six_clients.path, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_real_names_of_columns_are_checked_before_the_first_run(six_clients, tmp_path):
    with pytest.raises(InvalidArgument, match="unknown column 'acuracy'; did you mean 'accuracy'"):
        run_study(content(six_clients.path), tmp_path / "out", columns=("acuracy",))
    assert not (tmp_path / "out").exists()


def test_a_protocol_that_chooses_by_validation_examples_needs_some(tmp_path):
    without = runs.federation(tmp_path / "without", validation=0.0)
    asked = {"protocol": "validated", "data": {"six": {"federation": str(without.path)}}, "methods": {"local": {}}}
    said = "data.six: the protocol chooses the round on validation examples, but the federation has none: "
    with pytest.raises(InvalidArgument, match=said):
        run_study(asked, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_real_settings_need_validation_examples(tmp_path):
    without = runs.federation(tmp_path / "without", validation=0.0)
    with pytest.raises(
        InvalidArgument, match="data.six: settings are chosen on validation examples, but the federation has none"
    ):
        run_study(content(without.path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_real_study_in_one_process(six_clients, tmp_path, monkeypatch):
    """One run, of the real worker; its number is that of the same run without a study."""
    only = content(six_clients.path, methods={"local": {"hyperparameters": {"steps": 2}}}, seeds=[0])
    told = []
    results = run_study(only, tmp_path / "out", tell=told.append)
    (row,) = csv.DictReader((tmp_path / "out" / "results.csv").open())
    runs.train(tmp_path / "plain", six_clients, algorithm="local", hyperparameters={"steps": 2}, rounds=4,
               labels="local", evaluate_every=10, federation=str(six_clients.path))  # fmt: skip
    assert runs.saved(tmp_path / "plain") == runs.saved(tmp_path / "out" / row["folder"])
    assert len(told) == 1 and "six, Local, seed 0, 4 rounds: done" in told[0]
    assert "over the clients of one seed" in (tmp_path / "out" / "table.tex").read_text()
    assert float(row["accuracy"]) == results.records[tmp_path / "out" / row["folder"]].result().accuracy
    run_study(only, tmp_path / "out", tell=told.append)
    assert len(told) == 1  # nothing was left to run
    state = tmp_path / "out" / row["folder"] / "state.sqlite"
    state.write_bytes(state.read_bytes()[: 2 * 4096])  # what a full disk leaves
    damaged = run_study(only, tmp_path / "out", tell=told.append)
    (failure,) = damaged.failures
    assert f"delete {state.parent} and give the same command" in failure.why and not damaged.by_data["six"]
    shutil.rmtree(state.parent)
    assert run_study(only, tmp_path / "out", tell=told.append).run_rows == results.run_rows and len(told) == 2


@pytest.mark.slow
def test_real_study_of_methods_of_the_users_own(six_clients, tmp_path, monkeypatch):
    """A file with a module beside it and a metric; one that raises says where."""
    (tmp_path / "helper_83.py").write_text("STEPS = 2\n")
    code = "from helper_83 import STEPS\nfrom tfpfl.algorithms import fedavg\n"
    code += "def mine(model, population, *, fails: bool = False):\n    made = fedavg(model, population, steps=STEPS)\n"
    code += "    def client_update(*given):\n        return {}[7] if fails else made.client_update(*given)\n"
    code += "    return made._replace(client_update=client_update)\n"
    code += "def hits(labels, logits):\n    return (logits.argmax(1) == labels).mean()\n"
    (tmp_path / "m.py").write_text(code)
    named = f"{tmp_path / 'm.py'}:mine"
    methods = {"good": {"algorithm": named}, "bad": {"algorithm": named, "hyperparameters": {"fails": True}}}
    asked = content(six_clients.path, methods=methods, seeds=[0])
    asked["run"]["metrics"] = [f"{tmp_path / 'm.py'}:hits"]
    results = run_study(asked, tmp_path / "out")
    (row,) = results.run_rows
    (failure,) = results.failures
    assert row["method"] == "good" and (tmp_path / "out" / row["folder"] / "method.py").read_text() == code
    assert f"your method raised an error in mine.client_update ({tmp_path / 'm.py'}, line 6): KeyError" in failure.why
    (made,) = results.by_data["six"]
    assert made["hits"] == pytest.approx(row["accuracy"])


@pytest.mark.slow
def test_real_study_that_is_killed_ends_like_one_that_is_not(six_clients, tmp_path):
    """Killed with kill -9 in the middle; its runs end with it; the printed commands repeat its runs bit for bit."""
    file = tmp_path / "small.json"
    file.write_text(json.dumps(content(six_clients.path)))
    program = "import json, sys; from tfpfl.studies import run_study; "
    program += "run_study(json.load(open(sys.argv[1])), sys.argv[2], processes=2)"
    process = subprocess.Popen([sys.executable, "-c", program, str(file), str(tmp_path / "killed")])
    while not (tmp_path / "killed" / "ledger.jsonl").exists() and process.poll() is None:
        time.sleep(0.05)
    workers = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 60  # the kernel kills them at once
    while any(map(alive, workers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, workers))

    killed, whole = (run_study(content(six_clients.path), tmp_path / name, processes=2) for name in ("killed", "whole"))
    assert killed.run_rows == whole.run_rows and killed.search_rows == whole.search_rows
    for name in ("results.csv", "search.csv", "table.tex", "table.md"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert [cell.winner for cell in whole.cells] == [{"beta": 0.05}, {}]
    assert len(whole.run_rows) == 4 and [row["chosen"] for row in whole.search_rows] == [False, True]
    assert any("beta=0.05 is the largest value that was tried" in line for line in whole.said(whole.cells[0]))
    for cell in whole.cells:
        for line, folder in zip(whole.commands(cell), cell.folders.values(), strict=True):
            _, *words = shlex.split(line)
            result = CliRunner().invoke(main, words)
            assert result.exit_code == 0, result.output
            assert runs.saved(folder) == runs.saved(words[words.index("--out") + 1])


def test_a_winner_that_diverges_with_all_rounds_makes_room_for_the_next_best():
    of = study({"rounds": 7}, run={"rounds": 30})

    def late(etas):
        def outcome(job):
            last = job.final and job.config.seed == 1
            return "diverged" if last and job.config.hyperparameters["eta"] in etas else "done"

        return outcome

    cell, (_, first, second) = drive(plans(of)[0], late([0.1]))
    assert [j.config.hyperparameters["eta"] for j in first + second] == [0.1, 0.1, 0.01, 0.01]
    assert cell.winner == {"eta": 0.01} and cell.passed_over == [{"eta": 0.1}] and cell.diverged == []
    assert list(cell.folders.values()) == [job.folder for job in second]
    said = StudyResults(of, Path("out"), [cell]).said(cell)
    assert "d, Local: eta=0.1 was better in the search, but diverged with all rounds" in said
    # If all of them diverge, the study says so of the best, and names no other.
    cell, asked = drive(plans(of)[0], late(ETAS))
    assert len(asked) == 1 + len(ETAS) and cell.winner == {"eta": 0.1} and cell.passed_over == []
    assert cell.diverged == [1]
    # A run that failed may diverge or not: nothing is passed over before it is tried again.
    failing = lambda job: "failed" if job.final and job.config.seed == 0 else late([0.1])(job)  # noqa: E731
    cell, asked = drive(plans(of)[0], failing)
    assert len(asked) == 2 and cell.winner == {"eta": 0.1} and len(cell.failures) == 1
    # Nor is a failure forgotten where all that were trained before had diverged.
    states = {(0.1, 1): "diverged", (0.01, 0): "failed", (0.01, 1): "diverged"}

    def by_setting(job):
        return states.get((job.config.hyperparameters["eta"], job.config.seed), "done") if job.final else "done"

    cell, asked = drive(plans(of)[0], by_setting)
    assert len(asked) == 3 and cell.winner == {"eta": 0.01} and len(cell.failures) == 1


@pytest.mark.slow
def test_real_study_from_the_command_line(six_clients, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        f"""
        seeds = [0]
        run = {{rounds = 2}}
        [data.six]
        federation = {json.dumps(str(six_clients.path))}
        [methods.local]
        hyperparameters = {{steps = 2}}
        [methods.burst]
        algorithm = "local"
        hyperparameters = {{eta = 1e30}}
        """
    )
    said = CliRunner().invoke(main, ["study", str(file), "--columns", "accuracy,std"])
    assert said.exit_code == 0, said.output
    text = " ".join(said.output.split())
    assert "six, burst: diverged with seed 0, so it is not in the table" in text
    assert "tfpfl run --algorithm local" in text and "Written to runs/study-mine: results.csv" in text
    table = Path("runs/study-mine/table.tex").read_text()
    assert r"\begin{tabular}{lcccc}" in table and "burst" not in table
    wrong = CliRunner().invoke(main, ["study", str(file), "--columns", "acuracy"])
    assert wrong.exit_code == 1 and "unknown column 'acuracy'; did you mean 'accuracy'" in wrong.output
