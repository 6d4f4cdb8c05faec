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
from tfpfl.runs.protocols import LAST_ROUNDS, Protocol, Result
from tfpfl.studies.fitted_table import FittedTable
from tfpfl.studies.papers import ledger as ledgers
from tfpfl.studies.papers.experiment import Cell, Experiment
from tfpfl.studies.records import Record

COSTS = {"flops": "FLOPs", "seconds": "seconds", "bytes": "bytes"}
NAME = "at equal cost"  # the entry of a seed in the ledger
REFERENCE = "of which run"  # in it: the run whose cost it is
ENOUGH = 0.95  # a run that ended before it had spent this part of the reference's cost is not compared


def reference_of(experiment: Experiment, cell: Cell) -> Cell | None:
    """The cell whose cost this one is compared at; None if its column has none or several."""
    found = [c for c in experiment.cells if c.column == cell.column and c.method == experiment.reference]
    return found[0] if len(found) == 1 else None


def at_cost(record: Record, reference: Record, name: str) -> dict[str, list]:
    """{cost: [round, accuracy in %, half its interval over clients]} of a run at the reference's cost.

    The round is the last one by whose end the run had spent no more than the reference by its own end. A cost is left
    out if the run ended before, if one of the two has no such numbers, or if nothing is sent. Accuracy and half
    interval are None if the run was not evaluated in the `LAST_ROUNDS` rounds up to that one.

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
            accuracy = (
                [None, None] if result is None else [round(100 * x, 3) for x in (result.score, result.score_ci95)]
            )
            found[what] = [round_num, *accuracy]
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
                entry[NAME] = found and found | {REFERENCE: ledgers.identity(its)}


def rows(experiment: Experiment, cells: dict) -> list[dict[str, str]]:
    """The table as rows: column, method, and for each cost the accuracy with its interval and the rounds.

    Accuracies are means over the seeds that have one; the interval is over clients for one seed, else over seeds. Where
    the reference has more seeds, such as one whose cost this method did not reach, the text says so. Seeds of which the
    reference has fewer rounds than of others are left out: they are compared at another cost. So are those that were
    compared with another run of the reference than the ledger has, such as one of another machine with fewer rounds.
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
        theirs = set(_noted(cells, reference)) & set(whole) if reference is not None else set()
        for what in COSTS:
            there = {seed: each[what] for seed, each in seeds.items() if what in each}
            row[what] = _text(list(there.values()), len(theirs | set(there))) if there else "-"
        if seeds:
            found.append(row)
    return found


def _noted(cells: dict, cell: Cell) -> dict[str, dict[str, list]]:
    """{seed: its `at_cost`} of a cell, in the ledger's part of its experiment."""
    seeds = cells.get(ledgers.key(cell), {}).get("seeds", {})
    return {seed: entry[NAME] for seed, entry in seeds.items() if entry.get(NAME)}


def _text(there: list[list], seeds: int) -> str:
    evaluated = [each for each in there if each[1] is not None]
    rounds = sorted({t for t, *_ in evaluated or there})
    after = f"({'-'.join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))})"
    if len(evaluated or there) < seeds:
        after += f", {len(evaluated or there)} of {seeds} seeds"
    if not evaluated:
        return f"not evaluated {after}"
    return f"{ledgers.text(ledgers.over_seeds([(accuracy, half) for _, accuracy, half in evaluated]), 2)} {after}"


def _heading(experiment: Experiment) -> str:
    title = get_method(experiment.reference).title
    ten = "the mean of those of the ten rounds up to there that were evaluated: all ten at the end of a run, and often "
    which = {
        "last10": ten + "one in its middle",
        "last": "that of the last evaluated round up to there",
        "best_test": "that of the best round up to there, chosen by the same test examples",
        "best_validation": "that of the best round up to there, chosen by validation examples",
    }[protocols.protocol(experiment.protocol).when]
    return (
        f"At equal cost: accuracy, and in brackets the rounds, of each method when it has spent as many FLOPs, seconds "
        f"or bytes as {title} in all its rounds. The accuracy is {which}."
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
    for name in ("column", "method"):
        out.add_column(name)
    for name in COSTS.values():
        out.add_column(name, justify="right")
    for row in found:
        out.add_row(*row.values())
    return out
