"""The papers' experiments: what is run, what the ledger says of it, and when it says that something holds."""

import io
import json
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from helpers.made_records import EVERYBODY, ROUNDS, made
from helpers.small_runs import Interrupt
from tfpfl.runs.config import RunConfig
from tfpfl.runs.protocols import LOCAL_COPY
from tfpfl.runs.run import Run
from tfpfl.studies import papers
from tfpfl.studies.papers import EXPERIMENTS, Size, equal_cost, figures, ledger_tables, run_folder
from tfpfl.studies.papers import ledger as ledgers
from tfpfl.studies.papers.experiment import Cell, Experiment, Ordering
from tfpfl.studies.papers.orderings import Pair, descending, highest, lowest, none_better
from tfpfl.studies.papers.published import PFLEGO_TABLE1, PGFED_TABLE1, PGFED_TABLES3_4, Published, read
from tfpfl.studies.papers.verdicts import verdicts
from tfpfl.studies.records import Record

DIGITS = {"dataset": "digits", "clients": 5, "participation": 0.4, "evaluate_every": 2}


def cell(column, method, published=None, label="", **hyper):
    return Cell(column, method, DIGITS | {"algorithm": method, "hyperparameters": hyper}, published, label)


TOY = Experiment(
    title="a toy",
    source="nowhere",
    measures="accuracy",
    protocol="EV-all",
    cells=(
        cell("digits", "pflego", Published(90.0, 1.0), tau=5),
        cell("digits", "fedavg", Published(50.0, None), steps=3),
        Cell("more", "local", {"algorithm": "local", "dataset": "mnist", "clients": 5}, None),
    ),
    sizes={"smoke": Size(2, 1), "laptop": Size(4, 2), "full": Size(6, 2)},
    orderings=(Ordering("PFLEGO > FedAvg", ("digits", "more"), descending(("pflego",), ("fedavg",))),),
)


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """The toy is the only experiment, and no data set is prepared."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nothing"))
    monkeypatch.setattr(papers, "EXPERIMENTS", {"toy": TOY})
    monkeypatch.setattr(ledgers, "EXPERIMENTS", {"toy": TOY})
    monkeypatch.setattr(ledger_tables, "EXPERIMENTS", {"toy": TOY})
    return tmp_path / "out"


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_last_evaluation_is_ended(tmp_path, monkeypatch):
    """Its summary is of fewer rounds than are saved."""
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    small = cell("digits", "local", steps=1, eta=0.1)
    summary = run_folder(tmp_path, small, 0) / "summary.json"
    papers._run(tmp_path, small, 0, 2, [], False)
    found = json.loads(summary.read_text())
    summary.write_text(json.dumps(found | {"rounds": 1, "results": []}))
    papers._run(tmp_path, small, 0, 2, [], False)
    assert json.loads(summary.read_text()) == found


def test_tables_are_read_as_printed():
    assert read("m|A|B\nx|1±.5|\ny|-2.5|3") == {
        ("x", "A"): Published(1.0, 0.5),
        ("y", "A"): Published(-2.5, None),
        ("y", "B"): Published(3.0, None),
    }
    assert PFLEGO_TABLE1["pflego", "MNIST, 2"] == Published(98.70, 0.21)
    assert PFLEGO_TABLE1["pflego", "CIFAR-10, 5"] == Published(74.83, 0.66)
    assert PFLEGO_TABLE1["fedprox", "EMNIST, 31"] == Published(54.28, 0.58)
    assert PGFED_TABLE1["fedrod", "CIFAR-100, 50"] == Published(33.87, 2.42)
    assert PGFED_TABLES3_4["fedavg", "CIFAR-10, 25"] == Published(-8.99, 10.36)
    assert len(PFLEGO_TABLE1) == 7 * 12 and len(PGFED_TABLE1) == 14 * 6


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_cell_is_a_valid_configuration_of_its_own(name):
    experiment = EXPERIMENTS[name]
    keys = [ledgers.key(cell) for cell in experiment.cells]
    assert len(set(keys)) == len(keys)
    for one in experiment.cells:
        assert RunConfig(**one.config).algorithm == one.method
    columns = {one.column for one in experiment.cells}
    assert all(column in columns for ordering in experiment.orderings for column in ordering.columns)
    assert set(experiment.sizes) == set(papers.SCALES) and ledgers.protocol(experiment.protocol)
    rounds = [experiment.sizes[scale].rounds for scale in papers.SCALES]
    assert rounds == sorted(rounds)  # a larger scale goes on where a smaller one ended


def test_tables_that_a_paper_fills_from_the_same_runs_share_them():
    folders = {
        name: {run_folder(Path("out"), one, 0) for one in EXPERIMENTS[name].cells}
        for name in ("pgfed-table1", "pgfed-table2", "pgfed-tables3-4", "pflego-table1")
    }
    assert folders["pgfed-table2"] < folders["pgfed-table1"] > folders["pgfed-tables3-4"]
    assert not folders["pgfed-table1"] & folders["pflego-table1"]


def test_orderings():
    names = ["a", "b", "c"]
    assert none_better("b")(names) == [Pair("b", "a", 1.0), Pair("b", "c", 1.0)]
    assert lowest("b")(names) == [Pair("a", "b"), Pair("c", "b")]
    assert highest("b")(names) == [Pair("b", "a"), Pair("b", "c")]
    assert descending(("a",), ("b", "c"), ("d",))(names) == [Pair(*pair) for pair in ("ab", "ac", "bd", "cd")]


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if EXPERIMENTS[name].orderings])
def test_an_order_that_must_hold_holds_in_the_paper(name):
    """So that a verdict on it says whether our runs and the paper's agree."""
    for ordering in EXPERIMENTS[name].orderings:
        for column in ordering.columns:
            printed = {
                one.label or one.method: one.published.value
                for one in EXPERIMENTS[name].cells
                if one.column == column and one.published and (not ordering.methods or one.method in ordering.methods)
            }
            pairs = ordering.pairs(list(printed))
            assert pairs, (ordering.text, column)
            for first, second, margin in pairs:
                assert printed[first] - printed[second] > -margin, (ordering.text, column, first, second)


def seeds(*pairs):
    rounds = TOY.sizes["full"].rounds
    return {"seeds": {str(i): {"rounds": rounds, "accuracy": {"EV-all": list(pair)}} for i, pair in enumerate(pairs)}}


def test_a_cell_over_clients_and_over_seeds():
    assert ledgers.value(TOY, seeds((88.0, 2.0))) == (88.0, 2.0)
    mean, half = ledgers.value(TOY, seeds((88.0, 2.0), (90.0, 2.0)))
    assert mean == 89.0 and half == pytest.approx(12.706204736432095 * math.sqrt(2) / math.sqrt(2))
    assert ledgers.value(TOY, None) is None and ledgers.value(TOY, {"seeds": {}}) is None
    assert ledgers.value(TOY, seeds((88.0, 2.0)), "pgfed") is None


def three(mean, half):
    """Three seeds whose Student's 95 % interval is mean ± half: t = 4.303 with two degrees of freedom."""
    away = half * math.sqrt(3) / 4.302652729911275
    return seeds(*((accuracy, 9.0) for accuracy in (mean - away, mean, mean + away)))


@pytest.mark.parametrize(
    "mean, half, expected",  # the paper: 90 ± 1
    [
        (90.0, 0.9, "agrees"),
        (90.5, 0.4, "agrees"),
        (89.4, 0.5, "unclear"),
        (90.0, 1.1, "unclear"),  # in the middle, but seeds differ too much to tell
        (92.0, 0.9, "above"),
        (92.0, 1.1, "unclear"),
        (87.9, 1.0, "below"),
    ],
)
def test_a_value_agrees_if_the_interval_over_seeds_lies_within_the_bound(mean, half, expected):
    found = three(mean, half)
    assert ledgers.value(TOY, found) == pytest.approx((mean, half))
    assert ledgers.agreement(TOY, TOY.cells[0], found) == expected


@pytest.mark.parametrize("own", [0.0, 0.5, 5.0])
def test_one_seed_never_agrees(own):
    """Not even with the paper's own number: an interval over clients says nothing on other seeds."""
    assert ledgers.agreement(TOY, TOY.cells[0], seeds((90.0, own))) == "one seed"
    assert ledgers.agreement(TOY, TOY.cells[0], seeds((50.0, own))) == "one seed"


def test_fewer_or_more_rounds_than_the_papers_never_agree():
    """Unless a callback ended the run: then it came to its own end."""
    found = three(90.0, 0.5)
    short, long = (TOY._replace(sizes=TOY.sizes | {"full": Size(rounds, 3)}) for rounds in (7, 5))
    assert ledgers.agreement(TOY, TOY.cells[0], found) == "agrees"
    assert ledgers.agreement(short, TOY.cells[0], found) == "other rounds" == (
        ledgers.agreement(long, TOY.cells[0], found)
    )
    for entry in found["seeds"].values():
        entry["stopped"] = True
    assert ledgers.agreement(short, TOY.cells[0], found) == "agrees"


def test_the_recorded_cell_of_fashion_mnist_does_not_agree():
    """97.90 against 96.34 ± 0.43: within 2.04, the sum of the half intervals, and 1.56 points away."""
    table = EXPERIMENTS["pflego-table1"]
    (one,) = [cell for cell in table.cells if (cell.column, cell.method) == ("Fashion-MNIST, 2", "pflego")]
    accuracies = [
        {"seeds": {str(s): {"rounds": 200, "accuracy": {"pflego": [97.9 + s / 10, 1.61]}} for s in range(n)}}
        for n in (1, 3)
    ]
    assert one.published == Published(96.34, 0.43)
    assert [ledgers.agreement(table, one, found) for found in accuracies] == ["one seed", "above"]


def test_agreement_without_an_interval_or_a_value():
    assert ledgers.agreement(TOY, TOY.cells[1], three(50.4, 0.5)) == "agrees"  # the paper gives no interval: one point
    assert ledgers.agreement(TOY, TOY.cells[1], three(51.6, 0.5)) == "above"
    assert ledgers.agreement(TOY, TOY.cells[2], three(51.6, 0.5)) == "-"
    assert ledgers.agreement(TOY, TOY.cells[0], None) == "not run"
    narrow = TOY.cells[0]._replace(published=Published(90.0, 0.03))  # a smaller ± than a point is not asked for
    assert ledgers.agreement(TOY, narrow, three(90.4, 0.5)) == "agrees"


def test_a_gain_is_not_compared_with_its_spread_over_clients():
    table = EXPERIMENTS["pgfed-tables3-4"]
    (one,) = [c for c in table.cells if (c.column, c.method) == ("CIFAR-10, 25", "fedavg")]
    assert one.published == Published(-8.99, 10.36)
    near, far = (
        {"seeds": {str(s): {"rounds": 300, "gain over Local": [mean, 10.0]} for s in range(3)}} for mean in (-8.5, -3.0)
    )
    assert ledgers.agreement(table, one, near) == "agrees" and ledgers.agreement(table, one, far) == "above"


def test_nothing_that_was_recorded_agrees_with_one_seed():
    docs = Path(__file__).parents[2] / "docs"
    ledger = ledgers.load(docs / "reproduction.json")
    found = [
        ledgers.agreement(experiment, one, ledger[part][ledgers.key(one)])
        for name, experiment in EXPERIMENTS.items()
        for part in ledgers.parts(name)
        for one in experiment.cells
        if len(ledger.get(part, {}).get(ledgers.key(one), {}).get("seeds", {})) == 1
    ]
    assert len(found) > 50 and set(found) <= {"one seed", "other rounds", "-", "not reached"}
    lines = (docs / "reproduction.md").read_text(encoding="utf-8").splitlines()
    seeds_of = [line.split(" | ")[7] for line in lines if line.endswith("| agrees |")]
    assert seeds_of and "1" not in seeds_of


@pytest.mark.parametrize("ended, saved", [(2, 2), (2, 5), (None, 5)])
def test_a_run_that_goes_on_has_not_ended(ended, saved, tmp_path, monkeypatch):
    """Its summary is that of the earlier end: at which cost it is compared, nobody knows yet."""
    run = SimpleNamespace(rounds=saved, summary={} if ended is None else {"rounds": ended})
    monkeypatch.setattr(Record, "read", classmethod(lambda cls, folder: run))
    assert ledgers.finished(tmp_path) is None
    (tmp_path / "summary.json").touch()
    assert ledgers.finished(tmp_path) is (run if ended == saved else None)


def test_a_seed_that_ended_earlier_cuts_no_curve():
    records = {("digits", "pflego", ""): [made(seed=0), made(seed=1)], ("digits", "fedavg", ""): [made("fedavg")]}
    whole = figures.draw(TOY, records)
    records["digits", "pflego", ""][1] = made(seed=1, rounds=2)
    cut = figures.draw(TOY, records)
    assert "not drawn: PFLEGO in digits, seed 1 (2 rounds)" in " ".join(cut.get_suptitle().split())
    assert "not drawn" not in whole.get_suptitle()
    lengths = {len(line.get_xdata()) for axes in cut.axes for line in axes.get_lines()}
    assert lengths == {len(line.get_xdata()) for axes in whole.axes for line in axes.get_lines()}


def verdict(pflego, fedavg, table=TOY, rounds=(6, 6)):
    """The verdict on the first order of a table from the accuracies of each seed, and the rounds of both methods."""
    cells = {}
    for method, its, number in zip(("pflego", "fedavg"), (pflego, fedavg), rounds, strict=True):
        cells[f"digits | {method}"] = seeds(*[(accuracy, 9.0) for accuracy in its])
        for entry in cells[f"digits | {method}"]["seeds"].values():
            entry["rounds"] = number
    return verdicts(table, cells)[0]


def test_verdicts():
    """By the differences in each seed: what a seed does to both methods is not in their interval."""
    for pflego, fedavg, held in (
        ((90.0, 70.0, 80.0), (89.0, 69.2, 78.9), "holds"),
        ((89.0, 69.2, 78.9), (90.0, 70.0, 80.0), "fails"),
        ((90.0, 70.0, 80.0), (91.0, 69.0, 79.5), "open"),
        ((90.0, 70.0), (89.0, 69.0), "holds"),  # by 1 point in both
        ((90.0, 70.0), (89.0, 68.0), "open"),  # 1.5 +- 6.4
        ((90.0,), (10.0,), "open"),  # one seed
        ((90.0, 70.0), (90.0, 70.0), "open"),
        ((90.0, 70.0), (), "open"),
    ):
        assert verdict(pflego, fedavg).held == held, (pflego, fedavg)
    found = verdict((90.0, 70.0, 50.0), (80.0, 61.0))  # by the seeds that both have
    assert found.differences == (("PFLEGO", "FedAvg", 9.5, pytest.approx(12.7062 * 0.5, rel=1e-4), 2, True),)
    cells = {"digits | pflego": seeds((90.0, 1.0), (91.0, 1.0)), "digits | fedavg": seeds((80.0, 1.0))}
    line = "digits: PFLEGO > FedAvg: **open**. PFLEGO over FedAvg +10.00 (one seed)"
    assert ledger_tables.order_lines(TOY, cells) == [line]


def test_nobody_is_better_than_a_method_that_may_be_a_point_behind_by_chance():
    near = TOY._replace(orderings=(Ordering("none is better", ("digits",), none_better("pflego")),))
    for differences, held in (
        ((0.3, -0.2, 0.1), "holds"),  # 0.07 +- 0.63: at most a point behind
        ((2.0, 3.0, 2.5), "holds"),
        ((0.9, -0.8, 0.1), "open"),  # 0.07 +- 2.1
        ((-0.8, -0.9, -0.7), "fails"),  # by less than a point, but beyond doubt
        ((-4.0, 3.0, -2.0), "open"),
        ((-0.5,), "open"),
        ((0.5,), "open"),
    ):
        found = verdict([80 + d for d in differences], [80.0] * len(differences), near)
        assert found.held == held, (differences, found)


def test_an_order_fails_if_one_pair_does_and_holds_if_all_do():
    chain = TOY._replace(
        cells=tuple(cell("digits", method) for method in ("pflego", "fedavg", "local")),
        orderings=(Ordering("a chain", ("digits",), descending(("pflego",), ("fedavg",), ("local",))),),
    )

    def of(*accuracies):
        cells = {
            f"digits | {method}": seeds((value, 1.0), (value, 1.0))
            for method, value in zip(("pflego", "fedavg", "local"), accuracies, strict=True)
            if value is not None
        }
        return verdicts(chain, cells)[0]

    assert of(90.0, 80.0, 70.0).held == "holds"
    assert of(90.0, 80.0, None).held == "open" and of(90.0, 80.0, None).missing == ("Local",)
    assert of(80.0, 90.0, None).held == "fails" and of(90.0, 60.0, 70.0).held == "fails"
    assert of(90.0, None, 70.0).held == "open" and of(None, None, None).held == "open"


def test_an_order_is_told_of_equally_many_rounds_only():
    """A rival with a fifth of the rounds is behind whatever the method: such a verdict could hardly fail."""
    assert verdict((90.0, 90.0), (80.0, 80.0), rounds=(200, 200)).held == "holds"
    found = verdict((90.0, 90.0), (80.0, 80.0), rounds=(200, 40))
    assert (found.held, found.differences, found.shorter) == ("open", (), ("FedAvg (40 rounds, PFLEGO 200)",))
    cells = {"digits | pflego": seeds((90.0, 1.0), (90.0, 1.0)), "digits | fedavg": seeds((80.0, 1.0), (80.0, 1.0))}
    for entry in cells["digits | fedavg"]["seeds"].values():
        entry |= {"rounds": 40, "stopped": "by early stopping"}
    assert verdicts(TOY, cells)[0].held == "holds"
    cells["digits | fedavg"]["seeds"]["1"] |= {"stopped": None, "rounds": 8}  # this seed was not run to its end
    (line,) = ledger_tables.order_lines(TOY, cells)
    assert line == "digits: PFLEGO > FedAvg: **open**. PFLEGO over FedAvg +10.00 (one seed)"
    cells["digits | fedavg"]["seeds"]["0"] |= {"stopped": None, "rounds": 8}
    (line,) = ledger_tables.order_lines(TOY, cells)
    assert line == "digits: PFLEGO > FedAvg: **open**. not compared: PFLEGO (6 rounds, FedAvg 8)"
    seconds = TOY._replace(measures="seconds")  # of a round
    for found, entries in cells.items():
        for entry in entries["seeds"].values():
            entry |= {"seconds a round": 2.0 if "pflego" in found else 1.0, "stopped": None, "rounds": 7}
    cells["digits | pflego"]["seeds"]["0"]["rounds"] = cells["digits | pflego"]["seeds"]["1"]["rounds"] = 3
    assert verdicts(seconds, cells)[0].held == "holds"


def test_a_seed_with_fewer_rounds_than_another_counts_in_no_mean(toy):
    """Half-trained models would pull the mean down, and widen its interval."""
    cells = {"digits | pflego": seeds((90.0, 1.0), (70.0, 1.0), (80.0, 2.0)), "digits | fedavg": seeds((85.0, 1.0))}
    shorter = cells["digits | pflego"]["seeds"]["1"]
    shorter |= {"rounds": 3, "stopped": None}
    mean, half = ledgers.value(TOY, cells["digits | pflego"])
    assert (mean, half) == (85.0, pytest.approx(12.706204736432095 * 5))  # Student's t for the other two seeds
    assert verdicts(TOY, cells)[0].differences[0][2:3] == (5.0,)  # of seed 0
    said = "Left out of the means: digits | pflego: seed 1 (3 rounds, others have more)."
    for entry in [entry for found in cells.values() for entry in found["seeds"].values()]:
        entry |= {"seconds": 1.0, "run": "a", "command": "c", "clients": None} | {"stopped": entry.get("stopped")}
    console = Console(width=200, file=io.StringIO())
    console.print(ledger_tables.table("toy", cells, title="A toy", experiment=TOY))
    shown = " ".join(console.file.getvalue().split())
    assert said in shown and "6 x 2" in shown
    shorter |= {"stopped": "round 51 diverged: ...", "diverged": True}
    assert ledgers.value(TOY, cells["digits | pflego"])[0] == 85.0
    assert "seed 1 (3 rounds, diverged)." in ledger_tables._left_out(TOY, cells)
    shorter |= {"stopped": "early stopping", "diverged": False}  # it came to its own end
    assert ledgers.value(TOY, cells["digits | pflego"])[0] == 80.0
    assert not ledgers.left_out(cells["digits | pflego"])


def test_seeds_that_diverged_say_nothing_however_long_they_lasted():
    """Three that diverged after 3 of 1,000 rounds, at the paper's number, agreed with the paper."""
    cell = seeds((90.0, 0.1), (90.1, 0.1), (89.9, 0.1))
    for entry in cell["seeds"].values():
        entry |= {"rounds": 3, "stopped": "round 4 diverged: ...", "diverged": True, "seconds": 1.0}
    assert ledgers.comparable(cell) == {} and ledgers.measured(TOY, TOY.cells[0], cell) is None
    assert ledgers.agreement(TOY, TOY.cells[0], cell) == "diverged"
    told = {"digits | pflego": cell, "digits | fedavg": seeds((50.0, 1.0))}
    assert verdicts(TOY, told)[0].held == "open"
    for found in told.values():
        for entry in found["seeds"].values():
            entry |= {"seconds": 1.0, "run": "a", "command": "c", "clients": None} | {"stopped": entry.get("stopped")}
    assert "digits (PFLEGO): diverged in round 4" in "; ".join(ledger_tables._missing(ledger_tables._rows(TOY, told)))
    cell["seeds"]["3"] = seeds((80.0, 1.0))["seeds"]["0"] | {"rounds": 2}  # a shorter one that did not
    assert list(ledgers.comparable(cell)) == ["3"]


def test_a_diverged_seed_keeps_its_mark_when_fewer_rounds_are_asked_for(toy, monkeypatch):
    """It had become a seed that a callback stopped, and its accuracy counted."""
    found = {
        "scale": "full",
        "asked": 8,
        "command": "c",
        "run": "a" * 12,
        "rounds": 4,
        "stopped": "round 5 diverged: ...",
        "accuracy": {},
    }
    monkeypatch.setattr(papers.Record, "read", lambda folder: SimpleNamespace(rounds=4))
    monkeypatch.setattr(ledgers, "entry", lambda *_: found | ({"diverged": True} if _[-1] else {}))
    monkeypatch.setattr(papers.equal_cost, "note", lambda *_: None)
    for rounds, diverged in ((8, True), (3, False)):
        size = Size(rounds, 1)
        papers._note(toy / "l.json", "toy", TOY, TOY.cells[1], 0, toy, "full", size, "c", None, diverged)
    assert ledgers.load(toy / "l.json")["toy"]["digits | fedavg"]["seeds"]["0"]["diverged"]


def test_a_verdict_names_the_methods_that_it_was_told_without():
    """A method that diverged or was not run may have been the best."""
    table = TOY._replace(
        cells=(*TOY.cells[:2], cell("digits", "fedper"), cell("digits", "local")),
        orderings=(Ordering("PFLEGO is best", ("digits",), highest("pflego")),),
    )
    cells = {"digits | pflego": seeds((90.0, 1.0), (91.0, 1.0)), "digits | fedavg": seeds((80.0, 1.0), (80.8, 1.0))}
    told = "digits: PFLEGO is best: **open**. PFLEGO over FedAvg +10.10 ± 1.27 (2 seeds); without FedPer, Local"
    assert ledger_tables.order_lines(table, cells) == [told]
    cells["digits | local"] = seeds((95.0, 1.0), (96.1, 1.0))
    assert "PFLEGO is best: **fails**. PFLEGO over FedAvg +10.10 ± 1.27, Local -5.05 ± 0.64 (2" in (
        ledger_tables.order_lines(table, cells)[0]
    )


def test_a_number_that_one_of_several_seeds_has_is_without_an_interval():
    """Such as the accuracy of clients that were never seen: in the other seeds all were."""
    cell = seeds((88.0, 2.0), (90.0, 2.0))
    cell["seeds"]["1"]["accuracy"]["EV-unseen"] = [60.0, 3.0]
    mean, half = ledgers.value(TOY, cell, "EV-unseen")
    assert mean == 60.0 and math.isnan(half) and ledgers.text((mean, half), 2) == "60.00"


def test_gains_are_computed_when_local_comes_last_and_anew_when_it_changes(monkeypatch, tmp_path):
    """They had been missing, and told as "not reached"; or were over a shorter run of Local."""
    column = "CIFAR-10, 25"
    table = EXPERIMENTS["pgfed-tables3-4"]
    cells = {each.method: each for each in table.cells if each.column == column}
    runs = {"fedper": made("fedper", good=0.6)}

    def folder_of(cell, seed):
        folder = tmp_path / cell.method
        if cell.method in runs:
            folder.mkdir(exist_ok=True)
            (folder / "summary.json").touch()
        return folder

    monkeypatch.setattr(Record, "read", classmethod(lambda cls, folder: runs[folder.name]))
    name_of = {method: ledgers.key(cells[method]) for method in ("fedper", "local")}
    ledger = {name: {"seeds": {"0": {"rounds": ROUNDS, "run": ""}}} for name in name_of.values()}
    entry = ledger[ledgers.key(cells["fedper"])]["seeds"]["0"]
    ledgers.note_gains(ledger, table, column, 0, folder_of)
    assert ledgers.agreement(table, cells["fedper"], ledger[ledgers.key(cells["fedper"])]) == "no Local"
    for good in (0.5, 0.3):
        runs["local"] = made("local", good=good)
        ledgers.note_gains(ledger, table, column, 0, folder_of)
        its, of_local = (runs[name].per_client(when="best_test") for name in ("fedper", "local"))
        gains = [100 * (its[i] - of_local[i]) for i in its]
        assert entry["gain over Local"] == pytest.approx([statistics.mean(gains), statistics.pstdev(gains)])
    del runs["fedper"]  # on another machine, while Local goes on here
    shutil.rmtree(tmp_path / "fedper")
    ledger[name_of["local"]]["seeds"]["0"]["rounds"] += 1
    ledgers.note_gains(ledger, table, column, 0, folder_of)
    assert "gain over Local" not in entry


def test_rounds_to_an_accuracy_that_a_seed_does_not_reach_have_no_mean():
    table = TOY._replace(measures="rounds to 70 %")
    of = lambda *rounds: {"seeds": {str(i): {"rounds": 60, "rounds to 70 %": n} for i, n in enumerate(rounds)}}  # noqa: E731
    assert ledgers.value(table, of(30, 40))[0] == 35 and ledgers.value(table, of(30, None)) is None
    assert ledgers.agreement(table, TOY.cells[0], of(30, None)) == "not reached"


@pytest.mark.slow
def test_run_again_in_pieces(toy):
    cells = papers.reproduce("toy", scale="smoke", out=toy, command="the command")
    assert cells["more | local"]["not run"] == "the data set mnist is not here"
    entry = cells["digits | pflego"]["seeds"]["0"]
    record = Record.read(run_folder(toy, TOY.cells[0], 0))
    assert (entry["rounds"], entry["asked"], entry["command"]) == (2, 2, "the command")
    found = record.result()
    assert entry["accuracy"]["EV-all"] == pytest.approx([100 * found.accuracy, 100 * found.accuracy_ci95], abs=1e-3)
    assert record.config.run_id.startswith(entry["run"]) and entry["run"]

    before = (run_folder(toy, TOY.cells[0], 0) / "state.sqlite").stat().st_mtime_ns
    papers.reproduce("toy", scale="smoke", out=toy)  # nothing to do
    assert (run_folder(toy, TOY.cells[0], 0) / "state.sqlite").stat().st_mtime_ns == before

    cells = papers.reproduce("toy", scale="laptop", out=toy, only=["pflego"], command="a longer one")
    assert {s: e["rounds"] for s, e in cells["digits | pflego"]["seeds"].items()} == {"0": 4, "1": 4}
    assert {s: e["rounds"] for s, e in cells["digits | fedavg"]["seeds"].items()} == {"0": 2}
    assert ledgers.load(toy / "ledger.json")["toy"] == cells
    # Asked for fewer rounds than are there, the ledger keeps the command that made them all.
    assert papers.reproduce("toy", scale="smoke", out=toy, only=["pflego"], command="a shorter one") == cells


@pytest.mark.slow
def test_a_scale_can_make_every_run_smaller_and_the_ledger_says_so(toy, monkeypatch):
    few = Size(2, 1, {"participation": 0.5}, "half of the clients a round")
    small = TOY._replace(cells=TOY.cells[:2], sizes=TOY.sizes | {"smoke": few})
    monkeypatch.setattr(papers, "EXPERIMENTS", {"toy": small})
    monkeypatch.setattr(ledgers, "EXPERIMENTS", {"toy": small})
    monkeypatch.setattr(ledger_tables, "EXPERIMENTS", {"toy": small})
    cells = papers.reproduce("toy", scale="smoke", out=toy)
    folder = run_folder(toy, small.at(few).cells[0], 0)
    assert Record.read(folder).config.participation == 0.5 and Record.read(folder).config.run_id.startswith(
        cells["digits | pflego"]["seeds"]["0"]["run"]
    )
    assert not run_folder(toy, small.cells[0], 0).exists()
    assert list(ledgers.load(toy / "ledger.json")) == ["toy, smoke"]
    written = ledger_tables.markdown(ledgers.load(toy / "ledger.json"))
    assert "Smaller than the paper's: half of the clients a round." in written and "toy, smoke" in written
    assert "Not run at the paper's size. A smaller setting follows." in written and "Not run: " not in written
    (row,) = [line.split(" | ") for line in written.splitlines() if line.startswith("| digits | PFLEGO |")]
    assert (row[2], row[4], row[9]) == ("90.00 ± 1.00", "-", "- |")  # the paper's number, and no gap to it
    assert "toy, smoke" not in ledger_tables.markdown({})
    assert papers.draw("toy", toy, "smoke").axes
    with pytest.raises(ValueError, match="nothing of a toy was run"):
        papers.draw("toy", toy, "laptop")
    # At the paper's size the same cells have entries of their own.
    papers.reproduce("toy", scale="laptop", out=toy, only=["pflego"], size=Size(2, 1))
    both = ledgers.load(toy / "ledger.json")
    entries = [both[part]["digits | pflego"]["seeds"]["0"] for part in ("toy", "toy, smoke")]
    assert entries[0]["run"] != entries[1]["run"] and entries[1] == cells["digits | pflego"]["seeds"]["0"]


def test_a_ledger_of_the_first_format_is_read_in_parts(toy, monkeypatch, tmp_path):
    few = Size(2, 1, {"participation": 0.5}, "half of the clients a round")
    monkeypatch.setattr(ledgers, "EXPERIMENTS", {"toy": TOY._replace(sizes=TOY.sizes | {"laptop": few})})
    entry = {"seeds": {"0": {"scale": "full", "n": 1}, "1": {"scale": "laptop", "n": 2}}}
    absent = {"seeds": {}, "not run": "why"}
    old = {"toy": {"digits | pflego": entry, "more | local": absent}, "a figure": {"seeds": {}}}
    (tmp_path / "old.json").write_text(json.dumps({"format": 1, "experiments": old}))
    assert ledgers.load(tmp_path / "old.json") == {
        "toy": {
            "digits | pflego": {"seeds": {"0": entry["seeds"]["0"]}},
            "more | local": absent,
        },
        "toy, laptop": {"digits | pflego": {"seeds": {"1": entry["seeds"]["1"]}}},
        "a figure": {"seeds": {}},
    }
    notes = tmp_path / "notes.toml"
    notes.write_text('["toy, laptop"]\n"digits | pflego" = "?"\n[about]\n"toy, laptop" = "!"\n')
    assert ledgers.notes(notes)["about"] == {"toy, laptop": "!"}
    notes.write_text('["toy, full"]\n"digits | pflego" = "?"\n')
    with pytest.raises(ledgers.LedgerError, match="an experiment 'toy, full' that there is not"):
        ledgers.notes(notes)


@pytest.mark.slow
def test_a_run_that_was_begun_for_more_rounds_ends_after_those_that_are_asked_for(toy):
    """Its last rounds are evaluated, as those of a run that never was to have more."""
    cell_ = TOY.cells[0]
    with Run.create(RunConfig(**cell_.config, rounds=6, seed=0), run_folder(toy, cell_, 0)):
        pass  # it was ended before its first round
    cells = papers.reproduce("toy", scale="smoke", out=toy, only=["pflego"])
    assert cells["digits | pflego"]["seeds"]["0"]["rounds"] == 2
    record = Record.read(run_folder(toy, cell_, 0))
    assert record.rounds == 2 and {score.round_num for score in record.evaluations} == {1, 2}


@pytest.mark.slow
def test_a_run_that_was_interrupted_near_its_new_end_evaluates_its_last_rounds(toy, short_end):
    """The ledger had the mean of rounds 2 and 4 for that of the last two of four."""
    cell_ = TOY.cells[0]
    with Run.create(RunConfig(**cell_.config, rounds=20, seed=0), run_folder(toy, cell_, 0)) as run:
        with pytest.raises(KeyboardInterrupt):
            run.train([Interrupt(3)])
    cells = papers.reproduce("toy", size=Size(4, 1), out=toy, only=["pflego"])
    assert cells["digits | pflego"]["seeds"]["0"]["rounds"] == 5
    assert Record.read(run_folder(toy, cell_, 0)).result().rounds == [4, 5]


@pytest.mark.parametrize(
    "rounds, saved, evaluated, expected",
    [
        (50, 0, (), 50),
        (50, 40, (10, 20, 30, 40), 50),
        (50, 41, (10, 20, 30, 40), 51),
        (50, 57, (10, 20, 30, 40, 50), 67),
        (50, 57, range(48, 58), 57),
        (60, 50, range(41, 51), 60),
        (5, 3, (1, 2, 3), 5),
        (5, 3, (2,), 13),
    ],
)
def test_the_last_ten_rounds_are_all_evaluated(rounds, saved, evaluated, expected):
    assert papers._end(rounds, saved, {*evaluated}) == expected


def test_no_cell_is_begun_after_the_time(toy):
    assert papers.reproduce("toy", scale="smoke", out=toy, minutes=0) == {}


@pytest.mark.slow
def test_the_ledger_in_words(toy):
    cells = papers.reproduce("toy", scale="smoke", out=toy, command="tfpfl reproduce toy")
    written = ledger_tables.markdown(
        {"toy": cells}, {"toy": {"digits | fedavg": "too few rounds"}, "about": {"toy": "About."}}
    )
    ours = ledgers.value(TOY, cells["digits | pflego"])
    assert f"| digits | PFLEGO | 90.00 ± 1.00 | {ours[0]:.2f} ± {ours[1]:.2f} | {ours[0] - 90:+.2f} |" in written
    assert "Not run: more: the data set mnist is not here." in written
    assert "* digits | fedavg: too few rounds" in written and "About." in written
    assert "* digits: PFLEGO > FedAvg: **" in written and "tfpfl reproduce toy" in written
    assert "digits | pflego: seed 0 " + cells["digits | pflego"]["seeds"]["0"]["run"] in written


def test_all_tables_at_a_glance(toy, monkeypatch):
    few = Size(2, 1, {"participation": 0.5}, "half of the clients a round")
    monkeypatch.setattr(ledger_tables, "EXPERIMENTS", {"toy": TOY._replace(sizes=TOY.sizes | {"smoke": few})})
    monkeypatch.setattr(ledgers, "EXPERIMENTS", {"toy": TOY._replace(sizes=TOY.sizes | {"smoke": few})})
    cells = {
        "digits | pflego": seeds((90.0, 1.0), (90.1, 1.0), (90.2, 1.0)),
        "digits | fedavg": seeds((80.0, 1.0)),
    }
    for cell_, rounds in zip(cells.values(), (6, 4), strict=True):
        for entry in cell_["seeds"].values():
            entry |= {"rounds": rounds, "stopped": False, "seconds": 1.0, "command": "", "run": ""}
    *_, whole, small = ledger_tables._overview({"toy": cells, "toy, smoke": cells})[-1].splitlines()
    # PFLEGO agrees (the interval of 90, 90.1, 90.2 lies within a point of 90). FedAvg has fewer rounds: no order.
    assert whole == "| toy | 2 of 3 | 4-6 | 1-3 | 1 | 0 | 0 | 0 | 0 | 1 | - |"
    assert small == "| toy, smoke | 2 of 3 | 4-6 | 1-3 | - | - | - | - | - | - | - |"
    assert ledger_tables._overview({}) == []
    cells["digits | fedavg"]["seeds"]["0"]["rounds"] = 6
    assert ledger_tables._overview({"toy": cells})[-1].endswith("| 0 of 0, 1 open |")
    cells["digits | fedavg"]["seeds"]["1"] = cells["digits | fedavg"]["seeds"]["0"]
    assert ledger_tables._overview({"toy": cells})[-1].endswith("| 1 of 1 |")


def test_words_for_what_is_missing():
    row = {"column": "a", "method": "x", "seeds": "", "why": ""}
    rows = [row, row | {"method": "y", "seeds": "1"}, row | {"column": "b", "why": ": no data"}, row | {"column": "b"}]
    assert ledger_tables._missing(rows) == ["a (x)", "b: no data"]


@pytest.mark.slow
def test_a_cell_that_diverges_is_in_the_ledger_as_such(toy, monkeypatch):
    wild = TOY._replace(cells=(cell("digits", "fedavg", None, steps=5, eta=1e30),), orderings=())
    monkeypatch.setattr(papers, "EXPERIMENTS", {"toy": wild})
    monkeypatch.setattr(ledgers, "EXPERIMENTS", {"toy": wild})
    monkeypatch.setattr(ledger_tables, "EXPERIMENTS", {"toy": wild})
    cells = papers.reproduce("toy", scale="smoke", out=toy)
    assert "round 1 diverged" in cells["digits | fedavg"]["not run"]


@pytest.mark.slow
def test_a_picture_has_the_runs_numbers(toy):
    with pytest.raises(ValueError, match="nothing of a toy was run"):
        papers.draw("toy", toy)
    papers.reproduce("toy", scale="laptop", out=toy, only=["digits"], size=Size(3, 1))
    figure = papers.draw("toy", toy)
    loss, accuracy = figure.axes
    assert loss.get_title("left") == "digits"
    assert loss.get_ylabel() == "loss of the last local step (nats)"
    record = Record.read(run_folder(toy, TOY.cells[0], 0))
    drawn = {line.get_label(): line for line in accuracy.lines}
    assert set(drawn) == {"PFLEGO", "FedAvg"}
    assert dict(zip(*drawn["PFLEGO"].get_data(), strict=True)) == pytest.approx(
        {t: 100 * value for t, value in record.curve().items()}
    )
    assert loss.lines[0].get_ydata().tolist() == pytest.approx([row["loss"] for row in record.history])


@pytest.fixture(scope="module")
def at_cost(tmp_path_factory):
    """A table with a reference, run: FedAvg's visits cost more, and it has more rounds than PFLEGO's cost allows."""
    with pytest.MonkeyPatch.context() as patch:
        out, reference = tmp_path_factory.mktemp("cost"), TOY._replace(reference="pflego")
        for module in (papers, ledgers, ledger_tables):
            patch.setattr(module, "EXPERIMENTS", {"toy": reference})
        for only, rounds in (("pflego", 14), ("fedavg", 8)):
            papers.reproduce("toy", scale="smoke", out=out, only=["digits", only], size=Size(rounds, 1))
    return out, reference, ledgers.load(out / "ledger.json")["toy"]


@pytest.mark.slow
def test_accuracy_at_the_references_cost(at_cost, monkeypatch):
    """Against a count by hand: the last round that fits, and the mean of the evaluated rounds up to it."""
    out, experiment, cells = at_cost
    pflego, fedavg = (Record.read(run_folder(out, cell, 0)) for cell in experiment.cells[:2])
    found = cells["digits | fedavg"]["seeds"]["0"]["at equal cost"]
    budget = 2 * 14 * pflego.summary["flops"]  # two clients a round
    fitting = max(t for t in range(9) if 2 * t * fedavg.summary["flops"] <= budget)
    assert 2 <= fitting < 8, "otherwise nothing is tested"
    assert found["flops"][0] == fitting
    evaluated = [value for t, value in fedavg.curve().items() if t <= fitting]
    assert found["flops"][1] == pytest.approx(100 * sum(evaluated) / len(evaluated), abs=1e-3)
    own = cells["digits | pflego"]["seeds"]["0"]["at equal cost"]
    assert [own[what][0] for what in ("flops", "seconds", "bytes")] == [14, 14, 14]
    assert own["bytes"][1] == cells["digits | pflego"]["seeds"]["0"]["accuracy"]["EV-all"][0]
    assert "bytes" not in found, "FedAvg ended before it had sent as much"
    lines = equal_cost.markdown(experiment, cells)
    for module in (ledgers, ledger_tables):
        monkeypatch.setattr(module, "EXPERIMENTS", {"toy": experiment})
    assert "\n\n".join(lines) in ledger_tables.markdown({"toy": cells})
    assert f"| digits | FedAvg | {found['flops'][1]:.2f} " in lines[1]
    assert f"({fitting}, evaluated in 1-{fitting}) |" in lines[1]
    assert (
        equal_cost.table(experiment, cells).cells("method") == ["PFLEGO", "FedAvg"]
        and equal_cost.table(experiment, {}) is None
    )


def record_of(rounds, flops, of, seed=0):
    """A made run that evaluates every tenth round and its last ten: all clients have the accuracy `of(round)`."""
    record = made("pflego", seed, rounds=rounds)
    scores = [e._replace(score=of(e.round_num)) for e in record.evaluations if e.model != LOCAL_COPY]
    scores = [e for e in scores if e.round_num % 10 == 0 or e.round_num > rounds - 10]
    record = replace(record, evaluations=scores, summary=record.summary | {"flops": flops})
    record.__dict__["took_part"] = EVERYBODY
    return record


@pytest.mark.parametrize(
    "flops, cut, evaluated", [(5, 40, [40]), (4, 50, [50]), (1.02, 196, [190, 191, 192, 193, 194, 195, 196])]
)
def test_at_a_cut_the_ten_rounds_up_to_there_count(flops, cut, evaluated):
    """In the middle every tenth round is evaluated: the last ten of these would be a mean over a hundred rounds."""

    def rises(t):
        return 1 - math.exp(-t / 40) / 2

    found = equal_cost.at_cost(record_of(200, flops, rises), record_of(200, 1, rises), "EV-all")
    assert found["flops"][0] == cut
    assert found["flops"][1] == pytest.approx(100 * sum(map(rises, evaluated)) / len(evaluated), abs=1e-3)


def test_what_an_accuracy_at_equal_cost_is():
    """Two papers select the best round on test: the same at equal cost, which was called a mean."""
    of_ten, best = (equal_cost._heading(EXPERIMENTS[name]) for name in ("pflego-table1", "fedamp-practical"))
    assert "is the mean of those of the ten rounds" in of_ten and "mean of" not in best
    assert "is that of the best round up to there, chosen by the same test examples." in best


def test_a_mean_at_equal_cost_counts_the_seeds_that_were_evaluated_there():
    """One of three looked like a mean of three, with an interval over clients and the rounds of all."""
    one, no, two = [10, 80.0, 1.0, [*range(1, 11)]], [12, None, None, []], [11, 90.0, 1.0, [*range(2, 12)]]
    table = TOY._replace(reference="pflego")

    def text(*found, of=(95.0, 96.0, 100.0)):
        theirs = {str(seed): [9, accuracy, 1.0, []] for seed, accuracy in enumerate(of)}
        return equal_cost._text({str(seed): each for seed, each in enumerate(found)}, theirs, table)

    said = "1 of 3 seeds, in which PFLEGO has"
    assert text(one, no, [11, None, None, []]) == f"80.00 ± 1.00 (10, {said} 95.00)"
    assert text(one, no, two).endswith(" (10-11, 2 of 3 seeds, in which PFLEGO has 97.50)")
    assert text(no, no) == "not evaluated (12, 2 of 3 seeds, in which PFLEGO has 95.50)"
    assert text(one, of=(95.0,)) == "80.00 ± 1.00 (10)"
    # The mean of fewer than ten rounds lags behind the round whose cost it is: the text says of which.
    assert text([37, 80.0, 1.0, [30]], of=(95.0,)) == "80.00 ± 1.00 (37, evaluated in 30)"
    assert text([37, 80.0, 1.0, [30]], two, of=(95.0, 96.0)).endswith(" (11-37, evaluated in 2-30)")
    every = cell("digits", "pflego")._replace(config=DIGITS | {"evaluate_every": 10})
    for in_all, evaluated in ((200, [30]), (38, [*range(29, 38)]), (37, [*range(28, 38)])):
        cells = {"digits | pflego": {"seeds": {"0": {"rounds": in_all}}}}
        assert equal_cost._with_rounds([37, 80.0, 1.0], every, cells, "0")[3] == sorted({*evaluated, 30}), in_all


def test_the_table_at_equal_cost_says_of_how_many_seeds():
    """A seed whose run ended before it had spent as much has no entry there."""
    experiment = TOY._replace(reference="pflego")
    ten = [*range(9, 19)]
    ours, theirs = ({what: [18, accuracy, 1.0, ten] for what in ("flops", "seconds")} for accuracy in (90.0, 80.0))
    late = {"flops": [17, 82.0, 1.0, [*range(8, 18)]]}
    cells = {
        "digits | pflego": {"seeds": {str(seed): {"rounds": 18, "at equal cost": ours} for seed in range(3)}},
        "digits | fedavg": {
            "seeds": {str(seed): {"rounds": 19, "at equal cost": its} for seed, its in enumerate((theirs, late))}
        },
    }
    of = {row["method"]: row for row in equal_cost.rows(experiment, cells)}
    assert of["PFLEGO"]["flops"] == "90.00 ± 0.00 (18)" and of["PFLEGO"]["bytes"] == "-"
    its = "seeds, in which PFLEGO has 90.00)"
    assert of["FedAvg"]["flops"] == f"81.00 ± 12.71 (17-18, 2 of 3 {its}"  # Student's t for 2: 12.706 sd / sqrt(2)
    assert of["FedAvg"]["seconds"] == f"80.00 ± 1.00 (18, 1 of 3 {its}"
    for seed in ("1", "2"):  # the reference has not come to its end there: its cost is another one
        cells["digits | pflego"]["seeds"][seed]["rounds"] = 4
    of = {row["method"]: row for row in equal_cost.rows(experiment, cells)}
    assert of["PFLEGO"]["flops"] == "90.00 ± 1.00 (18)" and of["FedAvg"]["flops"] == "80.00 ± 1.00 (18)"


@pytest.mark.slow
def test_curves_over_costs(at_cost):
    out, experiment, _ = at_cost
    records = figures.records_of(experiment, lambda cell, seed: run_folder(out, cell, seed), [0])
    figure = figures.draw(experiment, records, ("rounds", "flops", "bytes"))
    accuracies = figure.axes[3:]
    assert [axes.get_xscale() for axes in accuracies] == ["linear", "log", "log"]
    record = records["digits", "fedavg", ""][0]
    drawn = {line.get_label(): line.get_xdata() for line in accuracies[1].lines}
    assert drawn["FedAvg"].tolist() == pytest.approx([2 * t * record.summary["flops"] for t in record.curve()])
    for one in (figure, figures.draw(experiment, records, ("rounds", "flops"))):
        one.draw_without_rendering()
        title = one._suptitle.get_window_extent()
        assert title.x0 >= 0 and title.x1 <= one.bbox.width, "the title is cut at the edges"


def test_a_method_that_sends_nothing_is_drawn_over_bytes():
    """On the logarithmic axis it was only in the legend."""
    records = {("digits", "fedavg", ""): [made("fedavg")], ("digits", "local", ""): [made("local", silent=True)]}
    for axes in figures.draw(TOY, records, ("bytes",)).axes:
        of = {line.get_label(): line for line in axes.lines}
        assert axes.get_xscale() == "log" and all(x > 0 for x in of["FedAvg"].get_xdata())
        assert of["Local"].get_transform() == axes.get_yaxis_transform(which="grid")  # from side to side
    last = made("local", silent=True).curve()[ROUNDS]
    assert of["Local"].get_ydata()[0] == pytest.approx(100 * last)


def test_bad_input(toy, tmp_path):
    with pytest.raises(ValueError, match="unknown experiment 'to'; did you mean 'toy'"):
        papers.reproduce("to", out=toy)
    with pytest.raises(ValueError, match="unknown scale 'full1'; did you mean 'full'"):
        papers.reproduce("toy", scale="full1", out=toy)
    with pytest.raises(ValueError, match="no cell of toy has fedmap in its name"):
        papers.reproduce("toy", out=toy, only=["fedmap"])
    bad = tmp_path / "bad.json"
    for content in ("{", "[]", '{"format": 9}'):
        bad.write_text(content)
        with pytest.raises(ledgers.LedgerError, match="bad.json"):
            papers.reproduce("toy", out=toy, ledger=bad)
    assert not toy.exists()
    notes = tmp_path / "notes.toml"
    notes.write_text('[toy]\n"digits | fedamp" = "?"\n')
    with pytest.raises(ledgers.LedgerError, match="about 'digits | fedamp', which toy does not have"):
        ledgers.notes(notes)


def test_docs_are_made_from_the_ledger():
    docs = Path(__file__).parents[2] / "docs"
    ledger = ledgers.load(docs / "reproduction.json")
    assert ledger, "docs/reproduction.json is there"
    made = ledger_tables.markdown(ledger, ledgers.notes(docs / "reproduction_notes.toml"))
    assert (docs / "reproduction.md").read_text() == made, "tfpfl reproduce --write docs/reproduction.md makes it again"
    assert json.loads((docs / "reproduction.json").read_text())["format"] == ledgers.FORMAT
