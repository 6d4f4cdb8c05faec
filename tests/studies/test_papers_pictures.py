"""The papers' figures that are not curves: small runs, made numbers, what is drawn, and what the ledger says."""

import csv
import json

import numpy as np
import pytest
from click.testing import CliRunner

from tfpfl.cli import main
from tfpfl.data import partitioners
from tfpfl.data.partitioners import Group
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run
from tfpfl.studies import papers
from tfpfl.studies.new_clients import adapt_new_clients
from tfpfl.studies.papers import (
    EXPERIMENTS,
    FIGURES,
    Size,
    attention,
    ledger_tables,
    newcomers,
    run_folder,
    weights_of_risks,
)
from tfpfl.studies.papers import ledger as ledgers
from tfpfl.studies.papers.experiment import Cell
from tfpfl.studies.papers.pictures import Claim
from tfpfl.studies.records import Record

DIGITS = {
    "dataset": "digits",
    "partition": "dirichlet",
    "partition_args": {"alpha": 1.0, "min_samples": 20},
    "clients": 6,
    "labels": "global",
    "participation": 0.5,
    "validation": 0.0,
    "evaluate_every": 1,
}
SGD = {"eta": 0.02, "epochs": 1, "batch_size": 20}


def cell(method, column="digits", **more):
    return Cell(column, method, DIGITS | {"algorithm": method, "hyperparameters": SGD} | more, None)


def toy(monkeypatch, name, *cells, rounds=2):
    """The figure of this name, made of runs on digits."""
    sizes = {scale: Size(rounds, 1) for scale in papers.SCALES}
    figure = FIGURES[name]._replace(cells=cells, sizes=sizes)
    for module in (papers, ledgers):
        monkeypatch.setattr(module, "FIGURES", {name: figure})
    return figure


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_of_valid_runs(name):
    figure = FIGURES[name]
    keys = [ledgers.key(one) for one in figure.cells]
    assert len(set(keys)) == len(keys) and name not in EXPERIMENTS
    for one in figure.cells:
        assert RunConfig(**one.config).algorithm == one.method
    assert set(figure.sizes) == set(papers.SCALES)
    rounds = [figure.sizes[scale].rounds for scale in papers.SCALES]
    assert rounds == sorted(rounds)


def test_figures_share_the_runs_of_their_tables(tmp_path):
    for name, table in (
        ("pgfed-figure-fine-tuning", "pgfed-table1"),
        ("pgfed-figure-A", "pgfed-table1"),
        ("fedamp-figure", "fedamp-practical"),
    ):
        mine, theirs = ({run_folder(tmp_path, c, 0) for c in x.cells} for x in (FIGURES[name], EXPERIMENTS[table]))
        assert mine and mine < theirs
    assert all(c.config["new_clients"] == 20 for c in FIGURES["pgfed-new-clients"].cells)


def test_round_robin_deals_seven_examples_as_three_two_two(tmp_path):
    said = call("reproduce", "round-robin", "--out", tmp_path, "--plot", tmp_path / "dealt.png")
    assert said.count("holds") == 3 and "fails" not in said and (tmp_path / "dealt.png").exists()
    data = json.loads((tmp_path / "round-robin-s0.json").read_text())
    assert [len(of) for of in data["clients"]] == [3, 2, 2]
    assert sorted(sum(data["clients"], [])) == list(range(7))
    texts = {text.get_text() for text in papers.draw("round-robin", tmp_path).axes[0].texts}
    assert {"client 0: 3", "client 1: 2", "client 2: 2"} < texts


# ---- PGFed's A


def test_slopes_of_a_made_change():
    n = np.array([10, 20, 40, 80])
    change = 0.002 * n[None, :] - 0.005 * n[:, None]
    data = {"rounds": [1, 9], "change": change.tolist(), "num_examples": n.tolist()}
    column, row = weights_of_risks.numbers(data).values()
    assert column["value"] == pytest.approx(2) and row["value"] == pytest.approx(-5)
    assert column["p"] < 1e-6 and row["p"] < 1e-6
    claims = list(FIGURES["pgfed-figure-A"].published.values())
    assert [claim.holds(number["value"]) for claim, number in zip(claims, (column, row), strict=True)] == [True, True]
    assert list(FIGURES["pgfed-figure-A"].published) == list(weights_of_risks.numbers(data))
    axes = weights_of_risks.draw(data).axes
    np.testing.assert_allclose(axes[0].images[0].get_array(), change)
    np.testing.assert_allclose(axes[1].collections[0].get_offsets()[:, 1], change.mean(0))
    np.testing.assert_allclose(axes[2].lines[0].get_ydata(), [change.mean(1)[0], change.mean(1)[-1]])
    with pytest.raises(ValueError, match="all clients have 10 examples"):
        weights_of_risks.numbers(data | {"num_examples": [10] * 4})


@pytest.mark.slow
def test_change_of_a_of_a_run(tmp_path, monkeypatch):
    toy(monkeypatch, "pgfed-figure-A", cell("pgfed", hyperparameters=SGD | {"mu": 0.1, "eta2": 0.01}), rounds=3)
    folder = run_folder(tmp_path, papers.FIGURES["pgfed-figure-A"].cells[0], 0)
    with pytest.raises(ValueError, match="two evaluated rounds"):
        papers.reproduce("pgfed-figure-A", out=tmp_path, size=Size(1, 1))
    said = call("reproduce", "pgfed-figure-A", "--out", tmp_path, "--plot", tmp_path / "a.svg")
    assert "slope of the column mean" in said and "p = " in said and (tmp_path / "a.svg").exists()
    record, data = Record.read(folder), json.loads((tmp_path / "pgfed-figure-A-s0.json").read_text())
    # Before round 2 nobody knew of anybody: A was 1 / r for all.
    np.testing.assert_allclose(data["change"], record.matrices(3)["A"] - np.float32(1 / 3), atol=1e-7)
    with open(folder / "clients.csv", newline="") as file:
        assert data["num_examples"] == [int(row["num_examples"]) for row in csv.DictReader(file)]


# ---- new clients


@pytest.mark.slow
def test_new_clients_of_several_methods(tmp_path, monkeypatch):
    monkeypatch.setattr(newcomers, "ETA", 0.05)
    cells = [cell("fedavg", new_clients=2), cell("fedfomo", new_clients=2, hyperparameters=SGD | {"candidates": 2})]
    cells.append(cell("fedamp", new_clients=2))  # which has no way for new clients
    toy(monkeypatch, "pgfed-new-clients", *cells)
    told = []
    found = papers.reproduce("pgfed-new-clients", scale="smoke", out=tmp_path, tell=told.append, command="the command")
    data = json.loads((tmp_path / "pgfed-new-clients-s0.json").read_text())
    assert [row["protocol"] for row in data.values()] == ["global", "own", None]
    with Run.open(run_folder(tmp_path, cells[0], 0)) as run:
        by_hand = adapt_new_clients(run, epochs=2, protocol="global", eta=0.05, batch_size=10)
    np.testing.assert_allclose(data["digits | fedavg"]["accuracy"], by_hand.accuracy)
    numbers = found["seeds"]["0"]["numbers"]
    assert numbers["FedAvg, after 2 epochs (%)"]["value"] == pytest.approx(100 * by_hand.means[-1])
    assert set(numbers) == {"FedAvg, after 2 epochs (%)", "FedFomo, own way, after 2 epochs (%)"}
    bars, lines = papers.draw("pgfed-new-clients", tmp_path).axes
    widths = sorted(bar.get_width() for bar in bars.patches)
    assert widths == pytest.approx(sorted(number["value"] for number in numbers.values()))
    assert {len(line.get_xdata()) for line in lines.lines} == {3}

    before = len(told)
    papers.reproduce("pgfed-new-clients", scale="smoke", out=tmp_path, tell=told.append)
    assert len(told) == before  # nothing to do
    written = ledger_tables.markdown({"pgfed-new-clients": found})
    assert (
        f"| FedAvg, after 2 epochs (%) | - | {100 * by_hand.means[-1]:.2f} ± " in written and "the command" in written
    )
    assert "Rounds: 2; seeds: 1." in written


# ---- FedAMP's groups


@pytest.fixture
def groups(monkeypatch):
    two = [Group(2, range(5), 60), Group(3, range(5, 10), 50)]
    for module in (partitioners, attention):
        monkeypatch.setitem(module.GROUP_PRESETS, "mnist", two)
    return two


@pytest.mark.slow
def test_clients_and_attention_by_group(tmp_path, monkeypatch, groups):
    split = {"partition": "grouped_dominant", "partition_args": {"groups": "mnist"}, "clients": None}
    split |= {"participation": 1.0}
    absent = cell("fedamp", "elsewhere", dataset="emnist/byclass")
    toy(monkeypatch, "fedamp-figure", cell("fedamp", **split), cell("fedavg", **split), absent)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nothing"))
    found = papers.reproduce("fedamp-figure", out=tmp_path, command="the command")["seeds"]["0"]
    assert found["without"] == {"elsewhere | fedamp": "the data set emnist/byclass is not here"}
    record = Record.read(run_folder(tmp_path, cell("fedamp", **split), 0))
    best = 100 * record.result(attention.PROTOCOL).accuracy
    assert found["numbers"]["digits: FedAMP (%)"]["value"] == pytest.approx(best)
    equal = (2 * 1 + 3 * 2) / (5 * 4)
    assert found["numbers"]["digits: weight in the group, equal weights (%)"]["value"] == pytest.approx(100 * equal)
    boxes, heat = papers.draw("fedamp-figure", tmp_path).axes[:2]
    assert [label.get_text() for label in boxes.get_yticklabels()] == ["FedAMP", "FedAvg"]
    shown, (matrix,) = heat.images[0].get_array(), record.matrices().values()
    off = ~np.eye(5, dtype=bool)
    np.testing.assert_allclose(np.asarray(shown)[off], matrix[off], atol=1e-7)
    assert {line.get_ydata()[0] for line in heat.lines if line.get_ydata()[0] == line.get_ydata()[-1]} == {1.5}


def test_share_of_the_weight_in_the_group():
    inside = np.kron(np.eye(2), np.ones((2, 2)))
    assert attention.share(inside, [2, 2]) == 1
    assert attention.share(1 - inside, [2, 2]) == 0
    assert attention.share([[9, 3, 1], [3, 9, 1], [1, 1, 9]], [2, 1]) == pytest.approx(0.6)


# ---- the command, the ledger


def call(*args, code=0):
    result = CliRunner().invoke(main, [str(a) for a in args], terminal_width=200)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_the_list_has_figures_and_a_wrong_name_finds_them():
    said = call("reproduce")
    assert all(name in said for name in FIGURES)
    assert "did you mean 'pgfed-figure-A'" in call("reproduce", "pgfed-figure-B", code=1)


def test_absent_data_end_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    result = CliRunner().invoke(main, ["reproduce", "pgfed-figure-A", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1 and result.output.startswith("Error: data set 'cifar10' is not in")
    assert len(result.output.splitlines()) == 1
    ledger = ledgers.load(tmp_path / "out" / "ledger.json")
    assert ledger["pgfed-figure-A"]["not run"] == "the data set cifar10 is not here"
    assert "Not run: the data set cifar10 is not here." in ledger_tables.markdown(ledger)
    said = call("reproduce", "pgfed-figure-A", "--no-run", "--out", tmp_path / "out", "--plot", "x.png", code=1)
    assert "nothing to draw: nothing of pgfed-figure-A was run" in said


def test_numbers_in_words_and_over_seeds():
    figure = FIGURES["pgfed-figure-A"]._replace(published={"a": Claim("positive", lambda value: value > 0)})
    one, two = ({"numbers": {"a": {"value": v, "p": 0.03}, "b": {"value": v, "half": 0.5}}} for v in (-2.0, 4.0))
    rows = ledger_tables.picture_rows(figure, {"seeds": {"0": one}})
    assert rows == [("a", "positive", "-2 (p = 0.03)", "fails"), ("b", "-", "-2.00 ± 0.50", "-")]
    rows = ledger_tables.picture_rows(figure, {"seeds": {"0": one, "1": two}})
    assert rows[0] == ("a", "positive", "1 ± 38", "unclear")  # 12.7 standard errors of 3
    one["numbers"] |= {
        "c": {"value": 2.0, "half": 0.5},
        "d": {"value": 2.0, "half": 2.5},
        "e": {"value": 2.0, "p": 0.06},
    }
    more = figure._replace(published=dict.fromkeys("cde", figure.published["a"]))
    rows = ledger_tables.picture_rows(more, {"seeds": {"0": one}})
    assert [row[3] for row in rows] == ["-", "-", "holds", "unclear", "unclear"]
    assert ledger_tables.picture_rows(figure, {}) == []


def test_nothing_is_measured_after_the_time(tmp_path):
    assert papers.reproduce("round-robin", out=tmp_path, minutes=0) == {}
    assert papers.reproduce("round-robin", out=tmp_path, size=Size(1, 2))["seeds"].keys() == {"0", "1"}


def test_a_note_on_everything_stands_above_all_tables(tmp_path):
    notes = tmp_path / "notes.toml"
    notes.write_text('[about]\neverything = "All of it."\n')
    written = ledger_tables.markdown({}, ledgers.notes(notes))
    assert written.index("# Reproduction") < written.index("All of it.") < written.index("\n## ")


def test_notes_may_be_about_a_figure(tmp_path):
    notes = tmp_path / "notes.toml"
    notes.write_text('[about]\npgfed-figure-A = "Few rounds."\n')
    entry = {"numbers": {}, "rounds": {"x": 3}, "runs": {"x": "abc"}, "without": {}, "command": "the command"}
    written = ledger_tables.markdown({"pgfed-figure-A": {"seeds": {"0": entry}}}, ledgers.notes(notes))
    assert "Few rounds." in written and "x: seed 0 abc" in written
    assert "pgfed-figure-A" not in ledger_tables.markdown({})
