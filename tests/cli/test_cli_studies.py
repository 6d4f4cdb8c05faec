"""compare, sweep and reproduce from the command line."""

import csv
import json
import math
import re
import shlex

import pytest
from click.testing import CliRunner

from helpers.made_records import made
from tfpfl.cli import main
from tfpfl.runs.protocols import EV_LOCAL
from tfpfl.studies import plots
from tfpfl.studies.papers import EXPERIMENTS
from tfpfl.studies.records import Record
from tfpfl.studies.search import VALIDATION, Candidate

pytestmark = pytest.mark.usefixtures("elsewhere")
OF_GAINS = ["--columns", "gain over Local", "--write", "table.tex"]
SMALL = ["--dataset", "digits", "--clients", "5", "--participation", "0.4", "--rounds", "3"]


def call(*args, code=0):
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.slow
def test_compare_trains_then_compares_then_writes(tmp_path):
    out = tmp_path / "out"
    args = ["--algorithms", "pflego,local", "--seeds", "0,1", "--set", "pflego.tau=5", "--set", "local.steps=2"]
    args += ["--labels", "global", "--schedule", "cosine", "--dropout", "0.1"]  # what `tfpfl run` takes too
    files = [tmp_path / f"table.{kind}" for kind in ("csv", "md", "tex")]
    writes = [a for file in files for a in ("--write", file)]
    said = call("compare", *args, *SMALL, "--out", out, *writes, "--plot", tmp_path / "curves.png")
    assert (
        "PFLEGO" in said
        and "gain: individual over Local" in " ".join(said.split())
        and "all clients; mean over clients" in " ".join(said.split())
    )
    rows = list(csv.DictReader(files[0].open()))
    assert [(row["algorithm"], row["seeds"]) for row in rows] == [("PFLEGO", "2"), ("Local", "2")]
    assert files[1].read_text().startswith("| algorithm") and "\\begin{tabular}{lcccc}" in files[2].read_text()
    assert (tmp_path / "curves.png").stat().st_size > 5000
    records = [Record.read(out / name) for name in ("pflego-s0", "local-s1")]
    assert records[0].config.hyperparameters["tau"] == 5 and records[1].config.hyperparameters["steps"] == 2
    assert all((r.config.labels, r.config.dropout) == ("global", 0.1) for r in records)
    assert [r.config.schedule for r in records] == ["cosine:0.0:3", "cosine:0.0:3"]

    pair, drawn = (out / "pflego-s0", out / "local-s0"), (tmp_path / "drawn.png", tmp_path / "expected.png")
    again = call("compare", *pair, "--protocol", "EV-local", "--plot", drawn[0])
    assert "right after its local work" in " ".join(again.split())
    call("compare", *pair, *writes)  # its own tables are written anew, and no others
    for own, begins in (("my.tex", "\\begin{tabular}{lcc}"), ("my.csv", "algorithm,accuracy,notes")):
        (tmp_path / own).write_text(begins)
        assert "may be your own data" in call("compare", *pair, "--write", tmp_path / own, code=1)
    plots.write_picture(plots.curves([Record.read(run) for run in pair], protocol=EV_LOCAL), drawn[1])
    assert drawn[0].read_bytes() == drawn[1].read_bytes()


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "nothing to compare: give run folders, or --algorithms"),
        (["--algorithms", "pflegs"], "unknown algorithm 'pflegs'; did you mean 'pflego'"),
        (["--algorithms", "local", "--set", "pflego.tau=5"], "write ALGORITHM.NAME=VALUE, such as"),
        (["--algorithms", "pflego", "--set", "pflego.taus=5"], "did you mean 'tau'"),
        (["--algorithms", "pflego", "--set", "pflego.tau=5", "--set", "pflego.tau=6"], "pflego.tau is there twice"),
        (["--algorithms", "pflego", "--seeds", "a"], "--seeds takes numbers with commas between, found 'a'"),
        (["--algorithms", "pflego", "--plot", "curves.docx"], "curves.docx cannot be drawn: a picture is written as ."),
        (["--algorithms", "pflego", "--write", "table.html"], "a table is written as .csv, .md, .tex"),
        (["--algorithms", "pflego", "--write", "no/table.md"], "no/table.md cannot be written: there is no folder no"),
        (["--algorithms", "pflego", "--plot", "no/curves.png"], "no/curves.png cannot be written: there is no folder"),
        (["--algorithms", "pflego", "--columns", "accurracy"], "unknown column 'accurracy'; did you mean 'accuracy'"),
        (["--algorithms", "pflego", "--columns", "gain over Local"], "unknown column 'gain over Local'"),
        (["--algorithms", "pflego,local", "--set", "local.eta=-1", *OF_GAINS], "eta must be"),
        (["--algorithms", "fedavg,fedavg"], "FedAvg, seed 0, is there twice: name every method and every seed once"),
        (["--algorithms", "fedavg", "--seeds", "1,0,1"], "FedAvg, seed 1, is there twice"),
        (
            ["--algorithms", "pflego", "--columns", "std"],
            "--columns says what FILE.tex has: give --write FILE.tex",
        ),
        (["nowhere"], "--rounds: for the methods of --algorithms, which is not given: leave it out"),
        (
            ["nowhere", "--set", "pflego.tau=5"],
            "--set, --dataset, --clients, --participation, --rounds: for the methods",
        ),
        (
            ["--algorithms", "pflego,local", "--protocol", "EV-local", "--pairs", "all"],
            "--protocol EV-local is over sampled ones, which are the pairs: leave --pairs out",
        ),
        (["--algorithms", "pflego,fedavg", "--pairs", "all"], "--pairs is for gains over local or fedavg_ft, and none"),
        (["--algorithms", "pflego", "--protocol", "EV-al"], "unknown protocol 'EV-al'; did you mean 'EV-all'"),
    ],
)
def test_compare_refuses_before_it_trains(tmp_path, args, message):
    result = CliRunner().invoke(main, ["compare", *args, *SMALL])
    assert result.exit_code != 0 and message in " ".join(result.output.split()), result.output
    assert not (tmp_path / "runs").exists()


def test_compare_refuses_a_folder_that_is_no_run(tmp_path):
    assert "--out is for the runs of --algorithms, which is not given" in call("compare", "a", "--out", "b", code=2)
    assert "nowhere is not a run folder" in call("compare", "nowhere", code=1)


@pytest.mark.slow
def test_compare_trains_all_methods_though_one_diverges_and_names_it(tmp_path):
    args = ["--algorithms", "local,fedavg", "--set", "local.eta=1e30", "--set", "fedavg.steps=2", *SMALL]
    said = " ".join(call("compare", *args, "--out", tmp_path / "out", code=1).split())
    assert "1 of 2 runs diverged; the others are trained. Local, seed 0 (" in said
    assert Record.read(tmp_path / "out" / "fedavg-s0").rounds == 3


@pytest.mark.slow
def test_the_command_line_replaces_a_presets_initial_head(tmp_path):
    """And so does the command that a search prints."""
    small = [*SMALL, "--preset", "code", "--validation", "0.2"]
    call("run", "--algorithm", "pflego", *small, "--head-init", "zeros", "--create-only", "--out", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["hyperparameters"]["head_init"] == "zeros"
    said = call("sweep", "--algorithm", "pflego", *small, "--grid", "head_init=zeros", "--out", tmp_path / "out")
    (line,) = re.findall(r"^  tfpfl (run .*)$", said.partition("The best setting again:")[2], re.MULTILINE)
    call(*shlex.split(line))
    (again,) = (tmp_path / "runs").iterdir()
    assert Record.read(again).result(VALIDATION) == Record.read(tmp_path / "out" / again.name).result(VALIDATION)


@pytest.mark.slow
def test_sweep_halves_and_keeps_to_validation(tmp_path):
    args = [
        "--grid",
        "beta=0.001,0.05",
        "--grid",
        "rho=0.001,0.01",
        "--tau",
        "4",
        "--halving",
        "2",
        "--validation",
        "0.2",
    ]
    said = call("sweep", *args, *SMALL, "--out", tmp_path / "out")
    numbers = re.findall(r"^\s*(\d)\s+(0\.\d+)\s+(0\.\d+)\s+([\d.]+)\b.*$", said, re.MULTILINE)
    assert [int(n[0]) for n in numbers] == [3, 2, 2, 1, 1, 1, 1]
    assert len(list((tmp_path / "out").iterdir())) == 4
    config = json.loads((next((tmp_path / "out").iterdir()) / "config.json").read_text())
    assert config["hyperparameters"]["tau"] == 4


@pytest.mark.slow
def test_sweep_says_what_is_at_the_edge_and_the_command_of_the_best(tmp_path):
    """The command makes a run with the same validation accuracy."""
    small = ["--clients", "5", "--participation", "1", "--rounds", "1", "--validation", "0.3"]
    out = tmp_path / "out"
    said = call("sweep", "--algorithm", "fedavg", "--grid", "eta=1e-9,0.1", "--steps", "5", *small, "--out", out)
    assert "\neta=0.1 is the largest value that was tried (1e-09 to 0.1): a larger one may be better\n" in said
    (line,) = re.findall(r"^  tfpfl (run .*)$", said.partition("The best setting again:")[2], re.MULTILINE)
    call(*shlex.split(line))
    (again,) = (tmp_path / "runs").iterdir()
    assert Record.read(again).result(VALIDATION) == Record.read(out / again.name).result(VALIDATION)
    assert Record.read(again).config.hyperparameters["eta"] == 0.1


def test_sweep_takes_the_next_best_if_the_finalist_diverged(tmp_path, monkeypatch):
    """Of made candidates; only if every setting diverged, the command says so."""
    record = made("local")
    good, bad = (Candidate({"eta": eta}, 1, score, tmp_path / "run") for eta, score in ((0.1, 0.5), (0.3, 0.9)))
    found = [[bad, good], [bad._replace(rounds=3, score=math.nan)]]
    monkeypatch.setattr("tfpfl.studies.search.search_hyperparameters", lambda *given, **named: found)
    monkeypatch.setattr("tfpfl.studies.records.Record.read", lambda folder: record)
    args = ["sweep", "--algorithm", "local", "--grid", "eta=0.1,0.3", *SMALL, "--out", tmp_path / "out"]
    said = call(*args)
    assert "\neta=0.3 was among the best with fewer rounds, but diverged with 3\n" in said and "Every" not in said
    assert "--rounds 3" in said.partition("The best setting again:")[2]
    found[0][1] = good._replace(score=math.nan)
    assert "every setting diverged: try smaller learning rates" in call(*args, code=1)


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "give --grid or --random, one of the two"),
        (["--grid", "beta=0.1", "--random", "rho=0.1:1"], "give --grid or --random, one of the two"),
        (
            ["--grid", "beta=0.1", "--grid", "beta=0.2"],
            "beta is searched twice: write all of its values into",
        ),
        (["--grid", "beta=0.1", "--beta", "7"], "--beta is searched, so that its option is not used: leave it out"),
        (["--grid", "beta=0.1", "--draws", "3"], "--draws is for --random: --grid tries every combination"),
        (["--grid", "beta"], "write NAME=A,B,... for --grid and NAME=LOW:HIGH for --random"),
        (["--random", "beta=0.1"], "write NAME=A,B,... for --grid and NAME=LOW:HIGH for --random"),
        (["--random", "beta=a:b"], "--random takes two numbers, found 'beta=a:b'"),
        (["--random", "beta=0.1:inf"], "found 0.1 and inf; both are finite"),
        (["--random", "beta=0.1:1", "--seed", "-1"], "seed must lie in 0..2^31-1, found -1"),
        (["--random", "beta=0.1:1", "--draws", "0"], "0 is not in the range x>=1"),
        (["--grid", "beta=0.1,0.2", "--halving", "0"], "'--halving': 0 is not in the range x>=1"),
        (["--grid", "beta=0.1,-0.1"], "beta must be"),
        (["--random", "tau=5:50"], "--random draws numbers such as 7.23, which tau cannot be: use --grid tau=A,B"),
        (["--random", "beta=1:0.1"], "beta: a range needs 0 < low < high, found 1.0 and 0.1"),
        (["--grid", "bet=0.1,0.2"], "unknown hyperparameter of pflego 'bet'; did you mean 'beta'"),
    ],
)
def test_sweep_refuses_before_it_trains(tmp_path, args, message):
    result = CliRunner().invoke(main, ["sweep", *args, *SMALL, "--out", str(tmp_path / "out")])
    assert result.exit_code != 0 and message in " ".join(result.output.split()), result.output
    assert not (tmp_path / "out").exists()


def test_reproduce_lists_shows_and_writes(tmp_path):
    said = call("reproduce")
    assert all(name in said for name in EXPERIMENTS)
    ledger = tmp_path / "ledger.json"
    accuracy = {"pflego": [98.4, 0.5], "EV-all": [98.1, 0.4]}
    entry = {"rounds": 200, "asked": 200, "scale": "laptop", "stopped": None, "seconds": 4.0, "seconds a round": 0.1}
    entry |= {
        "accuracy": accuracy,
        "rounds to 70 %": 1,
        "run": "abc",
        "federation": "def",
        "command": "tfpfl reproduce",
    }
    cells = {"MNIST, 2 | pflego": {"seeds": {"0": entry}}}
    cells["MNIST, 2 | ditto"] = {"seeds": {"0": entry | {"accuracy": {"pflego": [97.9, 0.5]}}}}
    ledger.write_text(json.dumps({"format": 1, "experiments": {"pflego-table1": cells}}))
    said = call("reproduce", "pflego-table1", "--no-run", "--ledger", ledger, "--write", tmp_path / "out.md")
    assert "98.40 ± 0.50" in said and "-0.30" in said and "one seed" in said
    assert "MNIST, 2: no method is better than PFLEGO: open. PFLEGO over Ditto +0.50 (one seed); without" in said
    assert (
        "| MNIST, 2 | PFLEGO | 98.70 ± 0.21 | 98.40 ± 0.50 | -0.30 | 98.10 ± 0.40 | 200 | 1 |"
        in (tmp_path / "out.md").read_text()
    )
    assert "did you mean 'pflego-table1'" in call("reproduce", "pflego-tabel1", "--no-run", "--ledger", ledger, code=1)


@pytest.mark.parametrize("minutes", ["nan", "0", "-1"])
def test_reproduce_refuses_minutes_that_are_no_limit(tmp_path, minutes):
    said = call("reproduce", "pflego-table1", "--minutes", minutes, "--out", tmp_path / "out", code=2)
    assert "Invalid value for '--minutes'" in said and not (tmp_path / "out").exists()


def test_reproduce_without_runs_refuses_what_is_for_runs(tmp_path):
    said = call("reproduce", "pflego-table1", "--no-run", "--minutes", "5", "--out", tmp_path / "out", code=2)
    assert "--minutes: for runs, and --no-run runs nothing: leave it out" in said
    said = call("reproduce", "pflego-table1", "--no-run", "--rounds", "5", "--out", tmp_path / "out", code=2)
    assert "--rounds: for runs, and --no-run runs nothing: leave it out" in said
