"""Seeds that are run on several machines, and their ledgers put together."""

import json

import pytest
from click.testing import CliRunner

from tfpfl.cli import main
from tfpfl.studies import papers
from tfpfl.studies.papers import equal_cost
from tfpfl.studies.papers import ledger as ledgers
from tfpfl.studies.papers.experiment import Cell, Experiment, Size

DIGITS = {"dataset": "digits", "clients": 5, "participation": 0.4, "evaluate_every": 2}
TOY = Experiment(
    title="a toy",
    source="nowhere",
    measures="accuracy",
    protocol="EV-all",
    cells=(Cell("digits", "local", DIGITS | {"algorithm": "local", "hyperparameters": {"steps": 1}}, None),),
    sizes={scale: Size(2, 1) for scale in papers.SCALES},
    orderings=(),
)
NAME = "digits | local"


def call(*args, code=0):
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def result(rounds, accuracy=50.0):
    return {"rounds": rounds, "accuracy": {"EV-all": [accuracy, 1.0]}}


def written(path, content):
    ledgers.save(path, content)
    return path


@pytest.mark.slow
def test_seeds_of_two_machines_are_those_of_one(tmp_path, monkeypatch):
    """`--seeds 1 --first-seed 1` runs seed 1 alone, with the numbers that it has among two seeds."""
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    for module in (papers, ledgers):
        monkeypatch.setattr(module, "EXPERIMENTS", {"toy": TOY})

    def ran(out, **how):
        papers.reproduce("toy", out=tmp_path / out, scale="smoke", **how)
        return tmp_path / out / "ledger.json"

    both, first, second = ran("both", size=Size(2, 2)), ran("first"), ran("second", first_seed=1)
    assert list(ledgers.load(second)["toy"][NAME]["seeds"]) == ["1"]
    assert ledgers.add(first, second) == 1 and ledgers.add(first, second) == 0
    added, whole = (ledgers.load(path)["toy"][NAME]["seeds"] for path in (first, both))
    assert {seed: one["accuracy"] for seed, one in added.items()} == {s: one["accuracy"] for s, one in whole.items()}
    assert added["0"]["accuracy"] != added["1"]["accuracy"]


def test_of_two_results_that_with_more_rounds_stays(tmp_path):
    mine = written(tmp_path / "a.json", {"toy": {NAME: {"seeds": {"0": result(10), "1": result(30, 1.0)}}}})
    other = {"toy": {NAME: {"seeds": {"0": result(20), "1": result(30, 2.0), "2": result(5)}}}}
    assert ledgers.add(mine, written(tmp_path / "b.json", other)) == 2
    found = ledgers.load(mine)["toy"][NAME]["seeds"]
    assert {seed: (one["rounds"], one["accuracy"]["EV-all"][0]) for seed, one in found.items()} == {
        "0": (20, 50.0),
        "1": (30, 1.0),
        "2": (5, 50.0),
    }


def test_of_two_results_that_with_what_it_has_at_equal_cost_stays(tmp_path):
    """Its run was there before the one whose cost it is, so that only the later ledger has the entry."""
    later = result(4) | {ledgers.AT_EQUAL_COST: {"flops": [4, 50.0, 1.0, [4]], equal_cost.REFERENCE: ["pflego", 200]}}
    mine = written(tmp_path / "a.json", {"toy": {NAME: {"seeds": {"0": result(4)}}}})
    other = written(tmp_path / "b.json", {"toy": {NAME: {"seeds": {"0": later}}}})
    assert ledgers.add(mine, other) == 1 and ledgers.add(other, mine) == 0
    assert ledgers.load(mine)["toy"][NAME]["seeds"]["0"] == later


def test_results_of_other_settings_are_no_seeds_of_a_cell(tmp_path, monkeypatch):
    """Rates that a search had replaced stayed in the ledger, and a seed with others counted in one mean with them."""
    monkeypatch.setattr(ledgers, "EXPERIMENTS", {"toy": TOY})
    now = {ledgers.SETTINGS: ledgers.settings(TOY.cells[0].config)}
    old = {ledgers.SETTINGS: ledgers.settings(TOY.cells[0].config | {"rounds": 3})}
    assert old != now
    mine = {"toy": {NAME: {"seeds": {"0": result(200) | old, "1": result(200, 1.0), "2": result(200, 9.0)}}}}
    other = {"toy": {NAME: {"seeds": {"0": result(200, 2.0) | now, "1": result(200, 3.0) | now, "3": result(9) | old}}}}
    path = written(tmp_path / "a.json", mine)
    assert ledgers.add(path, written(tmp_path / "b.json", other)) == 2
    found = ledgers.load(path)["toy"][NAME]["seeds"]
    # Seed 1 says its settings now. Seed 2 does not, and stays.
    assert {seed: one["accuracy"]["EV-all"][0] for seed, one in found.items()} == {"0": 2.0, "1": 3.0, "2": 9.0}
    ledgers.put({"seeds": found}, 4, result(200), old[ledgers.SETTINGS])  # a run after a change of the table
    assert set(found) == {"2", "4"}


def test_what_was_compared_with_another_run_is_not_shown_beside_the_one_that_stays(tmp_path):
    """FedRep at the cost of PFLEGO's 50 rounds says nothing of its 200, and so does a gain over Local's 50."""
    table = TOY._replace(
        cells=tuple(Cell("digits", method, {}, None) for method in ("pflego", "fedrep", "local")), reference="pflego"
    )

    def of(rounds, method, compared=None):
        entry = result(rounds) | {"run": method, "stopped": None}
        if compared is not None:
            cost = {"flops": [9, 60.0, 1.0], equal_cost.REFERENCE: ["pflego", compared]}
            entry |= {ledgers.AT_EQUAL_COST: cost, ledgers.GAIN: [1.0, 2.0], ledgers.COMPARED: ["local", compared]}
        return {"seeds": {"0": entry}}

    def shown(rounds):
        mine = {
            f"digits | {name}": of(rounds, name, rounds if name == "pflego" else None) for name in ("pflego", "local")
        }
        path, other = tmp_path / f"{rounds}.json", {"toy": {"digits | fedrep": of(50, "fedrep", 50)}}
        ledgers.add(written(path, {"toy": mine}), written(tmp_path / "b.json", other))
        cells = ledgers.load(path)["toy"]
        gains = ledgers.value(table._replace(measures=ledgers.GAIN), cells["digits | fedrep"])
        return [row["method"] for row in equal_cost.rows(table, cells)], gains

    assert shown(50) == (["PFLEGO", "FedRep"], (1.0, 2.0))
    assert shown(200) == (["PFLEGO"], None)


def test_figures_and_what_was_not_run(tmp_path):
    figure = {"seeds": {"0": {"rounds": {"a": 5, "b": 3}}}}
    mine = written(
        tmp_path / "a.json", {"toy": {NAME: {"seeds": {}, "not run": "no data"}, "x": {"seeds": {"0": result(9)}}}}
    )
    other = {"picture": figure, "toy": {NAME: {"seeds": {"0": result(2)}}, "x": {"seeds": {}, "not run": "no data"}}}
    assert ledgers.add(mine, written(tmp_path / "b.json", other)) == 2
    assert ledgers.load(mine) == {
        "picture": figure,
        "toy": {NAME: {"seeds": {"0": result(2)}}, "x": {"seeds": {"0": result(9)}}},
    }
    assert ledgers.add(tmp_path / "new" / "c.json", mine) == 3  # a ledger that is not there yet
    assert ledgers.load(tmp_path / "new" / "c.json") == ledgers.load(mine)


def test_the_command_adds_ledgers_and_refuses_what_is_none(tmp_path):
    mine, other = tmp_path / "a.json", written(tmp_path / "b.json", {"pflego-table2": {}})
    cell = ledgers.key(papers.EXPERIMENTS["pflego-table2"].cells[0])
    call("reproduce", "pflego-tabel2", "--ledger", mine, "--add", other, "--no-run", code=1)
    assert not mine.exists()  # nothing is added by a command that is refused
    ledgers.save(other, {"pflego-table2": {cell: {"seeds": {"1": result(7) | {"seconds a round": 1.0}}}}})
    assert f"1 results of {other} are new" in call("reproduce", "--ledger", mine, "--add", other, "--no-run")
    assert list(json.loads(mine.read_text())["experiments"]["pflego-table2"][cell]["seeds"]) == ["1"]
    assert "there is no ledger" in call("reproduce", "--ledger", mine, "--add", tmp_path / "none.json", code=1)
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ledgers.LedgerError, match="is not a ledger"):
        ledgers.add(mine, tmp_path / "x.json")
