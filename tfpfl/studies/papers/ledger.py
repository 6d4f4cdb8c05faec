"""The ledger of reproduced experiments: our results beside the papers', with the commands and runs behind them.

It is a JSON file to which each `tfpfl reproduce` adds its results. `ledger_tables` shows it. It also says which cells
were not run, stopped early, or disagree with the paper. If the runs of a scale are smaller than the paper's, such as
with fewer clients, its results have a part of their own: they are no seeds of the paper's cells.
"""

import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tfpfl.algorithms import get_method
from tfpfl.checks import InvalidArgument
from tfpfl.data.writing import alone
from tfpfl.runs import statistics
from tfpfl.runs.files import write_whole
from tfpfl.runs.protocols import PROTOCOLS, find, protocol, rounds_to
from tfpfl.studies.papers.experiment import BOUND, Cell, Experiment
from tfpfl.studies.papers.experiments import EXPERIMENTS
from tfpfl.studies.papers.pictures import FIGURES
from tfpfl.studies.records import Record
from tfpfl.studies.run_groups import paired

FORMAT = 2  # 1 had the results of all scales in one part
GAIN = "gain over Local"  # what a table measures, and the entry of a seed
COMPARED = "gain over Local, of which run"  # the entry of a seed
AT_EQUAL_COST = "at equal cost"  # the entry of a seed: its accuracy at the cost of the reference, see equal_cost.py
SETTINGS = "settings"  # the entry of a seed: the hash of what was run, without seed and rounds
EVERYTHING = "everything"  # what a paragraph of the notes is about that is on the whole ledger
DECIMALS = {"accuracy": 2, "seconds": 3, "rounds to 70 %": 0, GAIN: 2}


class LedgerError(InvalidArgument):
    """A file that is not a ledger or not notes on one, or that a newer version wrote."""


def load(path: str | os.PathLike) -> dict:
    """Reads a ledger: {part: {cell: entry}}; {} if there is no file. A figure has one entry and no cells.

    Raises:
        LedgerError: the file is not a ledger, or has another format than `FORMAT` or 1.
    """
    path = Path(path)
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LedgerError(f"{path} cannot be read as a ledger: {error}") from error
    if not isinstance(found, dict) or found.get("format") not in (1, FORMAT):
        raise LedgerError(f"{path} is not a ledger of format {FORMAT}")
    return found["experiments"] if found["format"] == FORMAT else _in_parts(found["experiments"])


def save(path: str | os.PathLike, ledger: dict) -> None:
    """Writes the ledger. If the process ends meanwhile, the old file stays whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"format": FORMAT, "experiments": ledger}, indent=1, sort_keys=True) + "\n")


@contextmanager
def changed(path: str | os.PathLike) -> Iterator[dict]:
    """The ledger, to be changed in the block and written after it; another process waits until then."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path):
        ledger = load(path)
        yield ledger
        save(path, ledger)


def add(path: str | os.PathLike, other: str | os.PathLike) -> int:
    """Adds the results of another ledger, such as that of another machine. Returns how many results are new.

    A result is that of one seed of a cell or figure. Where both ledgers have it, that with more rounds stays; with as
    many, the one that was there, unless only the other says its settings, or what it has at equal cost. Results of
    other settings than the table's own ones are left out of both, such as those of rates from before a search. So are
    gains over another run of Local than the one that stays.

    Args:
        path: the ledger that is changed.
        other: the file of the other one.

    Raises:
        LedgerError: one of the two is not a ledger, or the other one does not exist.
    """
    if not Path(other).is_file():
        raise LedgerError(f"there is no ledger {other}")
    number, now = 0, _settings_now()
    with changed(path) as ledger:
        for place, entry in _entries(ledger):
            _forget_others(entry, now.get(place))
        for place, entry in _entries(load(other)):
            _forget_others(entry, now.get(place))
            mine = ledger
            for name in place:
                mine = mine.setdefault(name, {})
            seeds = mine.setdefault("seeds", {})
            for seed, result in entry["seeds"].items():
                if seed not in seeds or _worth(result) > _worth(seeds[seed]):
                    seeds[seed], number = result, number + 1
            if "not run" in entry and not seeds:
                mine["not run"] = entry["not run"]
            elif seeds:
                mine.pop("not run", None)
        for cells in ledger.values():
            _forget_gains(cells)
    return number


def _forget_gains(cells: dict) -> None:
    """Removes gains over another run of Local than this part of the ledger has, such as one with fewer rounds."""
    for name, cell in cells.items():
        local = cells.get(f"{name.partition(' | ')[0]} | local", {}).get("seeds", {})
        for seed, entry in cell["seeds"].items() if isinstance(cell, dict) and "seeds" in cell else ():
            if not is_with(entry.get(COMPARED), local.get(seed)):
                del entry[GAIN], entry[COMPARED]


def _entries(ledger: dict) -> Iterator[tuple[tuple[str, ...], dict]]:
    """((part,) or (part, cell), entry) of everything in a ledger."""
    for name, found in ledger.items():
        if "seeds" in found:
            yield (name,), found
        else:
            yield from (((name, cell), entry) for cell, entry in found.items())


def _worth(result: dict) -> tuple[int, bool, bool]:
    rounds = result["rounds"]  # of a figure: those of each of its runs
    least = min(rounds.values(), default=0) if isinstance(rounds, dict) else rounds
    return least, SETTINGS in result, bool(result.get(AT_EQUAL_COST))


def settings(config: dict) -> str:
    """A hash of a cell's configuration, by which its runs and its results in the ledger are told from others'."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:10]


def _settings_now() -> dict[tuple[str, ...], str]:
    """{(part, cell): its settings} of all tables of papers."""
    return {
        (name, key(cell)): settings(cell.config)
        for title, experiment in EXPERIMENTS.items()
        for name, scale in parts(title).items()
        for cell in (experiment.at(experiment.sizes[scale]) if scale else experiment).cells
    }


def _forget_others(cell: dict, now: str | None) -> None:
    """Removes the seeds of a cell that were run with other settings than `now`; those that do not say theirs stay."""
    for seed, entry in list(cell["seeds"].items()):
        if now is not None and entry.get(SETTINGS, now) != now:
            del cell["seeds"][seed]


def put(cell: dict, seed: int, entry: dict, its: str) -> None:
    """Puts a seed's entry, run with `its` settings, into a cell; seeds that were run with others are removed."""
    cell["seeds"][str(seed)] = entry | {SETTINGS: its}
    _forget_others(cell, its)


def part(name: str, scale: str) -> str:
    """The name in the ledger of what an experiment has at a scale: 'pflego-table2', or 'pflego-table2, laptop'.

    The latter if every run is smaller than the paper's at this scale.
    """
    smaller = name in EXPERIMENTS and EXPERIMENTS[name].sizes[scale].config
    return f"{name}, {scale}" if smaller else name


def parts(name: str) -> dict[str, str]:
    """{part: its smaller scale, or ''} of an experiment; first the one at the paper's size."""
    return {name: ""} | {part(name, scale): scale for scale, size in EXPERIMENTS[name].sizes.items() if size.config}


def _in_parts(ledger: dict) -> dict:
    """A ledger of format 1 with a part for each smaller scale."""
    found: dict = {}
    for name, cells in ledger.items():
        if name not in EXPERIMENTS:
            found[name] = cells
            continue
        for cell, entry in cells.items():
            for seed, result in entry.get("seeds", {}).items():
                its = found.setdefault(part(name, result["scale"]), {}).setdefault(cell, {"seeds": {}})
                its["seeds"][seed] = result
            if "not run" in entry:
                found.setdefault(name, {}).setdefault(cell, {"seeds": {}})["not run"] = entry["not run"]
    return found


def key(cell: Cell) -> str:
    """The name of a cell in its experiment: 'column | method | label'."""
    return " | ".join(part for part in (cell.column, cell.method, cell.label) if part)


def method_title(method: str, label: str = "") -> str:
    """A method as papers write it, with the label of its cell."""
    return get_method(method).title + (f", {label}" if label else "")


def entry(record: Record, scale: str, asked: int, command: str, diverged: bool = False) -> dict:
    """The entry of the ledger for a run: what was asked for, the numbers, and how to find the run again.

    Args:
        record: the run.
        scale: the scale that was asked for.
        asked: the number of rounds that was asked for.
        command: the command line that ran it.
        diverged: whether it ended since it diverged.
    """
    found = {
        "scale": scale,
        "rounds": record.rounds,
        "asked": asked,
        "stopped": record.summary.get("stopped"),
        **({"diverged": True} if diverged else {}),
        "seconds": round(float(sum(row["seconds"] for row in record.history)), 1),
        "seconds a round": record.seconds_per_round,
        "clients": record.seen_counts(),  # that had taken part by the last round, and that had not; null: unknown
        "accuracy": {},
        "rounds to 70 %": rounds_to(record.evaluations, 0.7),
        "run": record.summary.get("run_id", "")[:12],
        "federation": record.config.federation_hash[:12],
        "versions": {name: record.config.versions.get(name) for name in ("tfpfl", "tensorflow")},
        "command": command,
    }
    for name in PROTOCOLS:
        result = find(record.results, protocol(name))
        if result is not None:
            found["accuracy"][name] = [round(100 * result.accuracy, 3), round(100 * result.accuracy_ci95, 3)]
    return found


def finished(folder: Path) -> Record | None:
    """The record of a run that came to an end; None if there is none in this folder.

    The summary of a run that goes on to more rounds is that of its earlier end, until it comes to the next one.
    """
    if not (folder / "summary.json").exists():
        return None
    record = Record.read(folder)
    return record if record.summary.get("rounds") == record.rounds else None


def note_gains(ledger: dict, experiment: Experiment, column: str, seed: int, folder_of: Callable) -> None:
    """Writes into an experiment's part of the ledger what the clients of a column's runs gain over Local, in points.

    The numbers are the mean and the standard deviation over all clients, as in PGFed's paper. All methods' are computed
    anew, since Local may have been run after them, or for more rounds than before.

    Args:
        ledger: {cell: entry}; it is changed.
        experiment: gives the cells.
        column: the column.
        seed: the seed.
        folder_of: function (cell, seed) -> its run folder.
    """
    cells = [cell for cell in experiment.cells if cell.column == column]
    (baseline,) = [cell for cell in cells if cell.method == "local"]
    if (local := finished(Path(folder_of(baseline, seed)))) is None:
        return
    for cell in cells:
        its = ledger.get(key(cell), {}).get("seeds", {}).get(str(seed))
        if its is not None and (record := finished(Path(folder_of(cell, seed)))) is not None:
            gains = 100 * statistics.gains(*paired([record], [local], protocol("pgfed")))
            its[GAIN] = [statistics.mean_over_clients(gains), statistics.std(gains)]
            its[COMPARED] = identity(local)
    _forget_gains(ledger)


def identity(record: Record) -> list:
    """[the beginning of its hash, its rounds] of a run: what an entry of the ledger was compared with."""
    return [record.summary.get("run_id", "")[:12], record.rounds]


def is_with(compared: list | None, entry: dict | None) -> bool:
    """Whether a seed was compared with the run that now has this entry; entries of older versions do not say."""
    return compared is None or (entry is not None and compared == [entry.get("run"), entry["rounds"]])


def comparable(cell: dict | None) -> dict[str, dict]:
    """{seed: entry} of the seeds of a cell that a mean may be taken over: those with the most rounds.

    A seed that a callback stopped counts, too: it came to its own end. One that diverged, or that nobody has run to the
    end yet, does not, since a mean over different rounds is the accuracy of no model.
    """
    seeds = {seed: entry for seed, entry in (cell or {}).get("seeds", {}).items() if not entry.get("diverged")}
    most = max((entry["rounds"] for entry in seeds.values()), default=0)
    return {seed: entry for seed, entry in seeds.items() if entry["rounds"] == most or entry.get("stopped")}


def left_out(cell: dict | None) -> dict[str, dict]:
    """{seed: entry} of the seeds of a cell that are not `comparable`."""
    counted = comparable(cell)
    return {seed: entry for seed, entry in (cell or {}).get("seeds", {}).items() if seed not in counted}


def of_seeds(experiment: Experiment, cell: dict | None, name: str | None = None) -> list[tuple[float, float]]:
    """[(number, half interval over clients)] of every `comparable` seed that has it; NaN where there is no interval.

    For a gain, the second number is the standard deviation over clients. Rounds to an accuracy that one of the seeds
    does not reach have no mean: then it is []. Arguments: see `value`.
    """
    seeds, name = list(comparable(cell).values()), name or experiment.protocol
    if experiment.measures == "accuracy":
        return [tuple(e["accuracy"][name]) for e in seeds if name in e["accuracy"]]
    if experiment.measures == "seconds":
        return [(e["seconds a round"], float("nan")) for e in seeds]
    if experiment.measures == GAIN:
        return [tuple(e[GAIN]) for e in seeds if GAIN in e]
    rounds = [e["rounds to 70 %"] for e in seeds]
    return [] if None in rounds else [(number, float("nan")) for number in rounds]


def value(experiment: Experiment, cell: dict | None, name: str | None = None) -> tuple[float, float] | None:
    """(mean of a cell's number over its seeds, half its interval); None if the cell was not run.

    The interval of an accuracy is over clients for one seed, and over seeds for several. For a gain, the second number
    is the standard deviation over clients, as PGFed prints it.

    Args:
        experiment: says what is measured.
        cell: the cell in the ledger; None if it is not there.
        name: name of a protocol; default: the experiment's.
    """
    pairs = of_seeds(experiment, cell, name)
    if not pairs:
        return None
    if experiment.measures == GAIN:
        own, after = (float(np.mean(column)) for column in zip(*pairs, strict=True))
        return own, after
    if len(pairs) == 1 < len(comparable(cell)):  # one of several seeds has such clients: its interval is not theirs
        return pairs[0][0], float("nan")
    return over_seeds(pairs)


def over_seeds(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """(mean, half its interval) of [(number, half interval)]: the number's own for one seed, else over seeds."""
    return pairs[0] if len(pairs) == 1 else statistics.over_seeds([number for number, _ in pairs])


def measured(experiment: Experiment, cell: Cell, found: dict | None) -> tuple[float, float] | None:
    """`value` of a cell by its own protocol, if the paper measures this method in another way than the rest."""
    return value(experiment, found, cell.protocol or None)


def text(pair: tuple[float, float] | None, decimals: int) -> str:
    """'98.35 ± 0.73', without the interval if it is NaN or None; '-' for None."""
    if pair is None:
        return "-"
    number, half = pair
    return f"{number:.{decimals}f}" + (f" ± {half:.{decimals}f}" if half is not None and not np.isnan(half) else "")


def dashed(numbers: Sequence[int]) -> str:
    """The smallest and the largest number: '4' or '5-200'."""
    return "-".join(map(str, sorted({min(numbers), max(numbers)})))


def agreement(experiment: Experiment, cell: Cell, found: dict | None) -> str:
    """How a cell compares with the paper's value.

    Our 95 % interval over seeds is compared with the paper's value ± a bound: the number after the paper's ±, but at
    least `BOUND` points. (For a gain, that number is a spread over clients, not an interval: the bound is `BOUND`.) An
    own interval that is wider makes it harder to agree, not easier.

    Returns:
        'agrees': the interval lies within the bound. 'above', 'below': it lies outside. 'unclear': it crosses the
        bound, so there are too few seeds to tell. 'one seed': there is no interval over seeds, so nothing is claimed.
        'other rounds': nor is it of runs with fewer or more rounds than the paper's, if no callback stopped them.
        'not run', 'diverged' (all seeds), 'not reached' (70 % accuracy), 'no Local' (no run to compute gains with) or
        '-' (nothing to compare with).
    """
    ours = measured(experiment, cell, found)
    if ours is None:
        if not (found or {}).get("seeds"):
            return "not run"
        lacks = "no Local" if experiment.measures == GAIN else "not reached"
        return lacks if comparable(found) else "diverged"
    if cell.published is None or experiment.measures in ("seconds", "rounds to 70 %"):
        return "-"
    rounds = [entry["rounds"] for entry in comparable(found).values() if not entry.get("stopped")]
    if set(rounds) - {experiment.sizes["full"].rounds}:
        return "other rounds"
    mean, half = statistics.over_seeds([number for number, _ in of_seeds(experiment, found, cell.protocol or None)])
    if np.isnan(half):
        return "one seed"
    printed = 0.0 if experiment.measures == GAIN else cell.published.spread or 0.0
    bound, gap = max(printed, BOUND), mean - cell.published.value
    if abs(gap) + half <= bound:
        return "agrees"
    if abs(gap) - half <= bound:
        return "unclear"
    return "above" if gap > 0 else "below"


def notes(path: str | os.PathLike) -> dict:
    """Reads the notes on a ledger that were written by hand, a TOML file; {} if there is no file.

    Raises:
        LedgerError: the file is not TOML, or names an experiment or a cell that does not exist.
    """
    path = Path(path)
    if not path.exists():
        return {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LedgerError(f"{path} cannot be read: {error}") from error
    experiments = {each: name for name in EXPERIMENTS for each in parts(name)}
    for name, cells in found.items():
        if name == "about":
            known = {EVERYTHING, *experiments, *FIGURES}
        elif name in experiments:
            its_cells = EXPERIMENTS[experiments[name]].cells
            known = {key(cell) for cell in its_cells} | {cell.column for cell in its_cells}
        else:
            raise LedgerError(f"{path} is about an experiment {name!r} that there is not")
        for cell in cells:
            if cell not in known:
                raise LedgerError(f"{path} is about {cell!r}, which {name} does not have")
    return found
