"""Whether an order of methods that a paper has holds in the ledger: every pair of it, by its differences per seed.

Two methods that were run with one seed have the same clients, cohorts and initial weights. What these do to both is not
in the difference, so that its interval over seeds is narrower than that of either accuracy.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tfpfl.runs import statistics
from tfpfl.studies.papers.experiment import Cell, Experiment, Ordering
from tfpfl.studies.papers.ledger import GAIN, comparable, key, method_title, of_seeds
from tfpfl.studies.papers.orderings import Pair


class Difference(NamedTuple):
    """The first method's number minus the second's, over the seeds that both have, and what it says of their order."""

    first: str
    second: str
    mean: float
    half: float  # of Student's 95 % interval over seeds; NaN for one seed
    seeds: int
    holds: bool | None  # None: it cannot be told


class Verdict(NamedTuple):
    """Whether an order of methods holds in a column."""

    text: str  # the order in words
    column: str
    held: str  # 'holds', 'fails', or 'open': it cannot be told
    differences: tuple[Difference, ...] = ()  # of its pairs that have a common seed
    missing: tuple[str, ...] = ()  # the methods without a value
    shorter: tuple[str, ...] = ()  # 'FedRep (38 rounds, PFLEGO 200)': not compared for that


def verdicts(experiment: Experiment, cells: dict) -> list[Verdict]:
    """The verdicts on all orderings of an experiment.

    A pair is in order if the interval of its difference lies above 0, and in the wrong order if it lies below. With a
    margin it is in order if the interval does not reach below the margin. Else, and with one seed, it cannot be told.
    An order fails if one of its pairs does, whatever is missing. It holds if all do. Accuracies are compared after
    equally many rounds, unless a callback stopped one of the two.
    """
    return [_verdict(experiment, cells, order, column) for order in experiment.orderings for column in order.columns]


def _verdict(experiment: Experiment, cells: dict, order: Ordering, column: str) -> Verdict:
    there: dict[str, tuple[Cell, dict]] = {}
    for cell in experiment.cells:
        if cell.column == column and (not order.methods or cell.method in order.methods):
            there[cell.label or cell.method] = cell, _numbers(experiment, cell, cells.get(key(cell), {}))
    titles = {name: method_title(cell.method, cell.label) for name, (cell, _) in there.items()}
    pairs, found, shorter = order.pairs(list(there)), [], []
    for pair in pairs:
        if pair.first not in there or pair.second not in there:
            continue
        first, second = there[pair.first][1], there[pair.second][1]
        common = sorted(set(first) & set(second))
        equal = [seed for seed in common if _as_long(experiment, first[seed][1], second[seed][1])]
        if equal:
            found.append(_difference(pair, [first[seed][0] - second[seed][0] for seed in equal], titles))
        elif common:
            rounds = {name: there[name][1][common[0]][1]["rounds"] for name in (pair.first, pair.second)}
            less, more = sorted(rounds, key=lambda name: rounds[name])
            shorter.append(f"{titles[less]} ({rounds[less]} rounds, {titles[more]} {rounds[more]})")
    missing = tuple(titles[name] for name, (_, numbers) in there.items() if not numbers)
    told = [difference.holds for difference in found]
    whole = len(found) == len(pairs) > 0
    held = "fails" if False in told else "holds" if whole and None not in told else "open"
    return Verdict(order.text, column, held, tuple(found), missing, tuple(dict.fromkeys(shorter)))


def _numbers(experiment: Experiment, cell: Cell, entry: dict) -> dict[str, tuple[float, dict]]:
    """{seed: (the cell's number, the seed's entry)} of its `comparable` seeds that have one."""
    found = {}
    for seed, its in comparable(entry).items():
        if numbers := of_seeds(experiment, {"seeds": {seed: its}}, cell.protocol or None):
            found[seed] = numbers[0][0], its
    return found


def _as_long(experiment: Experiment, first: dict, second: dict) -> bool:
    """Whether two seeds' numbers can be compared: after equally many rounds, or one came to an end of its own."""
    if experiment.measures not in ("accuracy", GAIN):  # seconds of a round do not depend on how many there are
        return True
    return first["rounds"] == second["rounds"] or bool(first.get("stopped") or second.get("stopped"))


def _difference(pair: Pair, differences: Sequence[float], titles: dict[str, str]) -> Difference:
    mean, half = statistics.over_seeds(differences)
    holds = None
    if mean + half < 0:
        holds = False
    elif mean - half > 0 or (pair.margin and mean - half >= -pair.margin):
        holds = True
    return Difference(titles[pair.first], titles[pair.second], mean, half, len(differences), holds)
