"""Tables of the terminal: no name is broken inside a word, no line is wider than the terminal, no number is lost."""

import io
import re
from functools import cache

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from helpers.made_records import CLIENTS, PASSES, made
from helpers.marks import slow_but
from tfpfl.algorithms import ALGORITHMS
from tfpfl.cli import main
from tfpfl.runs.config import RunConfig
from tfpfl.runs.protocols import results as protocol_results
from tfpfl.runs.results import totals
from tfpfl.runs.statistics import over_seeds
from tfpfl.studies import comparison, tables
from tfpfl.studies.fitted_table import FittedTable
from tfpfl.studies.new_clients import Adapted
from tfpfl.studies.papers import FIGURES, ledger_tables
from tfpfl.studies.papers import ledger as ledgers
from tfpfl.studies.search import Candidate

FIRST = {i: 1 for i in range(5)}
LONG = {"hyperparameters": {"tau": 50, "beta": 0.0123456}, "sampling": "binomial", "participation": 0.375}


def test_bytes_have_a_number_below_1000():
    given = {0: "0 B", 999: "999 B", 999.6: "1 kB", 999_499: "999 kB", 999_999: "1 MB", 1_234_567: "1.23 MB"}
    given |= {5e12: "5 TB"}
    assert {amount: tables.bytes_text(amount) for amount in given} == given


def shown(table, width) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def words(text) -> set:
    return set(text.split())


def methods():
    return [made(name, rounds=3, took_part=FIRST) for name in ALGORITHMS]


def summary(record) -> dict:
    seen, never = record.seen_counts()
    told = {"algorithm": record.config.algorithm, "clients_seen": seen, "clients_never_seen": never, "passes": PASSES}
    return totals(record.history) | told


@cache
def all_methods_compared():
    rows = comparison.rows([*methods(), made("pflego", rounds=3, took_part=FIRST, **LONG)])
    return tables.comparison_over_clients(rows, "EV-all"), [row["algorithm"] for row in rows]


@cache
def all_methods_as_in_the_demo():
    table = tables.comparison([(summary(r), r.results) for r in methods()], "a title")
    return table, [row.title for row in ALGORITHMS.values()]


@cache
def one_run():
    record = made(took_part=FIRST)
    return tables.protocols(record.results, "runs/pflego", record.seen_counts()), ["local copy", "never seen"]


@cache
def a_search():
    values = {"eta": 0.00012345, "optimizer": "a_long_word_of_ones_own", "steps": 12345, "batch_size": 100, "mu": 0.1}
    found = [[Candidate(values, 1000, 0.5, None), Candidate(values | {"eta": 1}, 10, float("nan"), None)]]
    return tables.rungs(found, RunConfig()), ["optimizer", "a_long_word_of_ones_own", "batch_size", "0.00012345"]


@cache
def new_clients():
    ones = np.linspace(0, 1, 21)[None].repeat(3, 0)
    names = ["runs/fedavg_ft-fashion_mnist-s0", "b"]
    return tables.new_clients(
        [Adapted(n, "own", "test", np.arange(3), np.full(3, 9), ones, ones) for n in names]
    ), names


@cache
def a_paper():
    name, experiment = next((n, e) for n, e in ledgers.EXPERIMENTS.items() if e.measures == "accuracy")
    entry = ledgers.entry(made("local", took_part=FIRST), "laptop", 9, "c")
    cells = {ledgers.key(cell): {"seeds": {"0": entry}} for cell in experiment.cells[:12]}
    return ledger_tables.table(name, cells), [
        row["method"] for row in ledger_tables._rows(experiment, cells) if row["seeds"]
    ]


@cache
def a_figure():
    name = next(iter(FIGURES))
    numbers = {f"an accuracy of {word}": {"value": 0.123456, "half": 0.1} for word in ("FedAvg-FT", "HeurFedAMP")}
    return ledger_tables.picture_table(name, {"seeds": {"0": {"numbers": numbers}}}), list(numbers)


MADE = (all_methods_compared, all_methods_as_in_the_demo, one_run, a_search, new_clients, a_paper, a_figure)


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("make", MADE, ids=lambda f: f.__name__)
def test_names_stay_whole_and_nothing_is_cut(make, width):
    table, names = make()
    told, unlimited = shown(table, width), shown(table, 1_000)
    assert max(map(len, told.splitlines())) <= width
    assert not {word for name in names for word in name.split()} - words(told)
    numbers = re.compile(r"\d+\.\d+|\d+ \w?B\b")
    assert set(numbers.findall(unlimited)) <= set(numbers.findall(" ".join(told.split())))
    assert "…" not in told


COMMANDS = ["algorithms", "datasets", "reproduce", *(f"algorithms {name}" for name in ALGORITHMS)]


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("command", slow_but(COMMANDS, *COMMANDS[:4]))
def test_lists_of_the_command_line_break_no_word(command, width, monkeypatch):
    def run(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        done = CliRunner().invoke(main, command.split())
        assert done.exit_code == 0, done.output
        return done.output

    broken = words(run(10_000)) - words(run(width))
    assert not {word for word in broken if re.search(r"\w", word)}, broken


def test_columns_without_room_follow_below_with_the_names():
    table = FittedTable(title="a title", caption="a caption")
    table.add_columns("name")
    table.add_columns(*(f"column{i}" for i in range(9)), justify="right")
    table.add_row("a name of five words", *(f"{i}.123456" for i in range(9)))
    table.add_row("  empty below", "1")
    told = shown(table, 60).splitlines()
    heads = [line.split() for line in told if "column" in line]
    assert len(heads) > 1 and [c for h in heads for c in h[1:]] == [f"column{i}" for i in range(9)]
    assert all(head[0] == "name" for head in heads)
    assert sum("empty below" in line for line in told) == 1  # a row without a number there is left out
    assert sum("a title" in line for line in told) == sum("a caption" in line for line in told) == 1
    assert len([line for line in shown(table, 200).splitlines() if "column" in line]) == 1


def test_columns_that_fit_exactly_stand_side_by_side():
    """The narrowest terminal with one table is as wide as the table."""
    table = FittedTable()
    table.add_columns("method", "score", "loss", "bytes")
    table.add_row("PFLEGO", "91.25", "0.3", "1048576")
    whole = max(map(len, shown(table, 200).splitlines()))
    assert [shown(table, width).count("PFLEGO") for width in (whole + 1, whole, whole - 1)] == [1, 1, 2]


def test_a_row_of_a_comparison_has_its_gain_where_its_clients_are():
    """The mixture of seen and never seen clients has no gain and no p."""
    rows = comparison.rows([made("pflego", good=0.3, took_part=FIRST), made("local", took_part=FIRST)])
    lines = [line.split() for line in shown(tables.comparison_over_clients(rows, "EV-all"), 200).splitlines()]
    mixed, seen = (next(line for line in lines if line[:1] == [word]) for word in ("PFLEGO", "5"))
    gain = f"{rows[0]['gain over Local']:.2f}"
    assert gain in seen and gain not in mixed and seen[:2] == ["5", "seen"]
    assert f"{rows[0]['seen']:.2f}" in seen and f"{rows[0]['accuracy']:.2f}" in mixed
    assert CLIENTS - 5 == rows[0]["clients never seen"]
    lines = shown(tables.comparison_over_clients(rows, "EV-all", pairs="all"), 200).splitlines()
    assert gain in next(line for line in lines if "PFLEGO" in line)


def test_one_name_for_the_worst_tenth():
    for make in (all_methods_compared, all_methods_as_in_the_demo, one_run):
        told = shown(make()[0], 300)
        assert "worst" in told and "decile" not in told and re.search(r"worst\s+10 %", " ".join(told.split()))


def test_one_name_for_one_thing_in_both_tables_of_a_run():
    record = made(took_part=FIRST)
    scores = [e._replace(metrics={"ece": 0.5}) for e in record.evaluations]
    results = protocol_results(scores, FIRST)
    above, below = tables.protocols(results, "", (5, 3)), tables.metrics(results, "")
    for heading in ("model", "clients", "when", "split"):
        assert above.cells(heading) == below.cells(heading)
    assert {"never seen", "best val.", "best test *"} <= {*below.cells("clients"), *below.cells("when")}


def test_metrics_of_a_comparison_have_intervals_over_seeds():
    def measured(seed, value):
        record = made("fedavg", seed)
        record.evaluations[:] = [e._replace(metrics={"brier": value, "ece": value}) for e in record.evaluations]
        return record

    (row,) = comparison.rows([measured(0, 0.25), measured(1, 0.75)])
    mean, half = over_seeds([0.25, 0.75])
    assert (row["brier"], row["brier ±"]) == pytest.approx((mean, half))
    assert (row["ece"], row["ece ±"]) == pytest.approx((100 * mean, 100 * half))
    table = tables.metrics_of_algorithms([row], ["brier", "ece"])
    assert table.cells("brier") == [f"0.5 ± {half:.4g}"] and table.cells("ece, %") == [f"50.00 ± {100 * half:.2f}"]
