"""Accuracy at equal cost: what each method has reached when it has spent what the table's reference spent in all.

A round of one method may cost 60 times that of another, so that equal numbers of rounds are no fair comparison. The
reference is the method of the paper, such as PFLEGO. Costs are `Record.spent`'s: floating point operations of all
visits, seconds of the rounds' work on one machine, bytes sent and received.
"""

from functools import cache
from pathlib import Path

from tfpfl.algorithms import get_method
from tfpfl.checks import InvalidArgument
from tfpfl.runs import protocols
from tfpfl.runs.config import RunConfig
from tfpfl.runs.protocols import LAST_ROUNDS, Protocol, Result
from tfpfl.studies.fitted_table import FittedTable
from tfpfl.studies.papers import ledger as ledgers
from tfpfl.studies.papers.experiment import Cell, Experiment
from tfpfl.studies.records import Record

COSTS = {"flops": "FLOPs", "seconds": "seconds", "bytes": "bytes"}
REFERENCE = "of which run"  # in the entry AT_EQUAL_COST of a seed in the ledger: the run whose cost it is
ENOUGH = 0.95  # a run that ended before it had spent this part of the reference's cost is not compared


def reference_of(experiment: Experiment, cell: Cell) -> Cell | None:
    """The cell whose cost this one is compared at; None if its column has none or several."""
    found = [c for c in experiment.cells if c.column == cell.column and c.method == experiment.reference]
    return found[0] if len(found) == 1 else None


def at_cost(record: Record, reference: Record, name: str) -> dict[str, list]:
    """{cost: [round, accuracy in %, half its interval, evaluated rounds]} of a run at the reference's cost.

    The round is the last one by whose end the run had spent no more than the reference by its own end. A cost is left
    out if the run ended before, if one of the two has no such numbers, or if nothing is sent. The accuracy is that of
    the evaluated rounds among the `LAST_ROUNDS` up to that one; without any, it and the half interval are None.

    Args:
        record: the run.
        reference: the run of the reference with the same seed.
        name: the name of the protocol.
    """
    found: dict[str, list] = {}
    for what in COSTS:
        try:
            amount, in_all = float(reference.spent(what)[-1]), float(record.spent(what)[-1])
        except InvalidArgument:  # a TensorFlow that cannot count operations
            continue
        if amount > 0 and in_all >= ENOUGH * amount:
            round_num = record.rounds_for(what, amount)
            result = _result_by(record, round_num, protocols.protocol(name))
            found[what] = [round_num, None, None, []]
            if result is not None:
                accuracy, half = (round(100 * x, 3) for x in (result.score, result.score_ci95))
                found[what] = [round_num, accuracy, half, result.rounds]
    return found


def _result_by(record: Record, round_num: int, measured: Protocol) -> Result | None:
    """The result of a protocol as if the run had ended after a round.

    A run evaluates each of its own last rounds. Before, the last ten *evaluated* rounds may be the last hundred: their
    mean would be that of a much earlier model.
    """
    first = round_num - LAST_ROUNDS + 1 if measured.when == "last10" else 0
    near = [score for score in record.evaluations if first <= score.round_num <= round_num]
    return protocols.result(near, measured, record.took_part, record.score)


def note(ledger: dict, experiment: Experiment, column: str, seed: int, folder_of) -> None:
    """Writes into an experiment's part of the ledger what the runs of a column have at their reference's cost.

    Args:
        ledger: {cell: entry}; it is changed.
        experiment: gives the cells, the reference and the protocols.
        column: the column.
        seed: the seed.
        folder_of: function (cell, seed) -> its run folder.
    """

    record_of = cache(ledgers.finished)  # all cells of a column have one reference
    for cell in experiment.cells:
        entry = ledger.get(ledgers.key(cell), {}).get("seeds", {}).get(str(seed))
        reference = reference_of(experiment, cell)
        if cell.column == column and entry is not None and reference is not None:
            its, record = (record_of(Path(folder_of(c, seed))) for c in (reference, cell))
            if its is not None and record is not None:
                found = at_cost(record, its, cell.protocol or experiment.protocol)
                entry[ledgers.AT_EQUAL_COST] = found and found | {REFERENCE: ledgers.identity(its)}


def rows(experiment: Experiment, cells: dict) -> list[dict[str, str]]:
    """The table as rows: column, method, and for each cost the accuracy with its interval and the rounds.

    Accuracies are means over the seeds that have one; the interval is over clients for one seed, else over seeds. Where
    the reference has more seeds, such as one whose cost this method did not reach, the text says so. Seeds of which the
    reference has fewer rounds than of others are left out: they are compared at another cost. So are those that were
    compared with another run of the reference than the ledger has, such as one of another machine with fewer rounds.
    Where a method has other seeds than the reference, the text has the reference's accuracy over the same ones.
    """
    found = []
    for cell in experiment.cells:
        reference = reference_of(experiment, cell)
        whole = ledgers.comparable(cells.get(ledgers.key(reference))) if reference is not None else {}
        seeds = {
            seed: its
            for seed, its in _noted(cells, cell).items()
            if seed in whole and ledgers.is_with(its.get(REFERENCE), whole[seed])
        }
        row = {"column": cell.column, "method": ledgers.method_title(cell.method, cell.label)}
        theirs = {seed: its for seed, its in _noted(cells, reference).items() if seed in whole} if reference else {}
        for what in COSTS:
            there = {seed: _with_rounds(each[what], cell, cells, seed) for seed, each in seeds.items() if what in each}
            its = {seed: each[what] for seed, each in theirs.items() if what in each}
            row[what] = _text(there, its, experiment) if there else "-"
        if seeds:
            found.append(row)
    return found


def _noted(cells: dict, cell: Cell) -> dict[str, dict[str, list]]:
    """{seed: its `at_cost`} of a cell, in the ledger's part of its experiment."""
    seeds = cells.get(ledgers.key(cell), {}).get("seeds", {})
    return {seed: entry[ledgers.AT_EQUAL_COST] for seed, entry in seeds.items() if entry.get(ledgers.AT_EQUAL_COST)}


def _with_rounds(found: list, cell: Cell, cells: dict, seed: str) -> list:
    """[round, accuracy, half interval, evaluated rounds]; entries of older versions do not have the last."""
    if len(found) > 3:
        return found
    every = cell.config.get("evaluate_every", RunConfig.evaluate_every)
    in_all = cells[ledgers.key(cell)]["seeds"][seed]["rounds"]
    near = range(max(1, found[0] - LAST_ROUNDS + 1), found[0] + 1)
    return [*found, [t for t in near if t > in_all - LAST_ROUNDS or (every and t % every == 0)]]


def _text(there: dict[str, list], theirs: dict[str, list], experiment: Experiment) -> str:
    """'74.38 ± 5.60 (37, evaluated in 30)' of {seed: `_with_rounds`}; `theirs`: of the reference."""
    evaluated = {seed: each for seed, each in there.items() if each[1] is not None} or there
    after = [ledgers.dashed([each[0] for each in evaluated.values()])]
    means = [each for each in evaluated.values() if each[1] is not None]
    of_ten = protocols.protocol(experiment.protocol).when == "last10"
    rounds = [t for each in means for t in each[3]]
    if rounds and of_ten and any(len(each[3]) < LAST_ROUNDS for each in means):
        after.append(f"evaluated in {ledgers.dashed(rounds)}")
    if not set(theirs) <= set(evaluated):
        after.append(f"{len(evaluated)} of {len(set(theirs) | set(there))} seeds")
        if own := [each[1] for seed, each in theirs.items() if seed in evaluated and each[1] is not None]:
            after[-1] += f", in which {get_method(experiment.reference).title} has {sum(own) / len(own):.2f}"
    told = f"({', '.join(after)})"
    if not means:
        return f"not evaluated {told}"
    return f"{ledgers.text(ledgers.over_seeds([(each[1], each[2]) for each in means]), 2)} {told}"


def _heading(experiment: Experiment) -> str:
    title = get_method(experiment.reference).title
    ten = "the mean of those of the ten rounds up to there that were evaluated: all ten at the end of a run, in its "
    which = {
        "last10": ten + "middle fewer, which are named",
        "last": "that of the last evaluated round up to there",
        "best_test": "that of the best round up to there, chosen by the same test examples",
        "best_validation": "that of the best round up to there, chosen by validation examples",
    }[protocols.protocol(experiment.protocol).when]
    return (
        f"At equal cost: accuracy, and in brackets the rounds, of each method when it has spent as many FLOPs, seconds "
        f"or bytes as {title} in all its rounds. The accuracy is {which}. Seconds also depend on what else the machine "
        "did, and FLOPs do not."
    )


def markdown(experiment: Experiment, cells: dict) -> list[str]:
    """The paragraphs of docs/reproduction.md; [] if nothing was compared."""
    if not (found := rows(experiment, cells)):
        return []
    lines = ["| " + " | ".join(("column", "method", *COSTS.values())) + " |", "|---|---|" + "---:|" * len(COSTS)]
    lines += ["| " + " | ".join(row.values()) + " |" for row in found]
    return [_heading(experiment), "\n".join(lines)]


def table(experiment: Experiment, cells: dict) -> FittedTable | None:
    """The same for the terminal; None if nothing was compared."""
    if not (found := rows(experiment, cells)):
        return None
    out = FittedTable(title=_heading(experiment))
    out.add_columns("column", "method")
    out.add_columns(*COSTS.values(), justify="right")
    for row in found:
        out.add_row(*row.values())
    return out
