"""The ledger of reproduced experiments: our results beside the papers', with the commands and runs behind them.

It is a JSON file to which each `tfpfl reproduce` adds its results. Tables for the terminal and docs/reproduction.md are
made from it. It also says which cells were not run, stopped early, or disagree with the paper.
"""

import json
import os
import tomllib
from pathlib import Path

import numpy as np

from tfpfl.algorithms import get_method
from tfpfl.checks import InvalidArgument
from tfpfl.runs import statistics
from tfpfl.runs.files import write_whole
from tfpfl.runs.protocols import PROTOCOLS, find, protocol, rounds_to
from tfpfl.studies.fitted_table import FittedTable
from tfpfl.studies.papers.experiments import EXPERIMENTS, Cell, Experiment
from tfpfl.studies.papers.pictures import FIGURES, Picture
from tfpfl.studies.records import Record
from tfpfl.studies.run_groups import SIDE_WORDS, paired

FORMAT = 1
BOUND = 1.0  # points: the smallest difference from a paper's value that counts
DECIMALS = {"accuracy": 2, "seconds": 3, "rounds to 70 %": 0, "gain over Local": 2}


class LedgerError(InvalidArgument):
    """A file that is not a ledger or not notes on one, or that a newer version wrote."""


def load(path: str | os.PathLike) -> dict:
    """Reads a ledger: {experiment: {cell: entry}}; {} if there is no file. A figure has one entry and no cells.

    Raises:
        LedgerError: the file is not a ledger, or has another format than `FORMAT`.
    """
    path = Path(path)
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LedgerError(f"{path} cannot be read as a ledger: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise LedgerError(f"{path} is not a ledger of format {FORMAT}")
    return found["experiments"]


def save(path: str | os.PathLike, ledger: dict) -> None:
    """Writes the ledger. If the process ends meanwhile, the old file stays whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"format": FORMAT, "experiments": ledger}, indent=1, sort_keys=True) + "\n")


def key(cell: Cell) -> str:
    """The name of a cell in its experiment: 'column | method | label'."""
    return " | ".join(part for part in (cell.column, cell.method, cell.label) if part)


def entry(record: Record, scale: str, asked: int, command: str, local: Record | None = None) -> dict:
    """The entry of the ledger for a run: what was asked for, the numbers, and how to find the run again.

    Args:
        record: the run.
        scale: the scale that was asked for.
        asked: the number of rounds that was asked for.
        command: the command line that ran it.
        local: the run of Local on the same federation, to compute gains; None: no gains.
    """
    found = {
        "scale": scale,
        "rounds": record.rounds,
        "asked": asked,
        "stopped": record.summary.get("stopped"),
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
    if local is not None:
        gains = 100 * statistics.gains(*paired([record], [local], protocol("pgfed")))  # over all clients, as the paper
        found["gain over Local"] = [statistics.mean_over_clients(gains), statistics.std(gains)]
    return found


def of_seeds(experiment: Experiment, cell: dict | None, name: str | None = None) -> list[tuple[float, float]]:
    """[(number, half interval over clients)] of every seed that has it; NaN where there is no interval.

    For a gain, the second number is the standard deviation over clients. Arguments: see `value`.
    """
    seeds, name = list((cell or {}).get("seeds", {}).values()), name or experiment.protocol
    if experiment.measures == "accuracy":
        return [tuple(e["accuracy"][name]) for e in seeds if name in e["accuracy"]]
    if experiment.measures == "seconds":
        return [(e["seconds a round"], float("nan")) for e in seeds]
    if experiment.measures == "gain over Local":
        return [tuple(e["gain over Local"]) for e in seeds if "gain over Local" in e]
    return [(e["rounds to 70 %"], float("nan")) for e in seeds if e["rounds to 70 %"] is not None]


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
    if len(pairs) == 1 or experiment.measures == "gain over Local":
        own, after = (float(np.mean(column)) for column in zip(*pairs, strict=True))
        return own, after
    return statistics.over_seeds([a for a, _ in pairs])


def measured(experiment: Experiment, cell: Cell, found: dict | None) -> tuple[float, float] | None:
    """`value` of a cell by its own protocol, if the paper measures this method in another way than the rest."""
    return value(experiment, found, cell.protocol or None)


def agreement(experiment: Experiment, cell: Cell, found: dict | None) -> str:
    """How a cell compares with the paper's value.

    Our 95 % interval over seeds is compared with the paper's value ± a bound: the number after the paper's ±, but at
    least `BOUND` points. (For a gain, that number is a spread over clients, not an interval: the bound is `BOUND`.) An
    own interval that is wider makes it harder to agree, not easier.

    Returns:
        'agrees': the interval lies within the bound. 'above', 'below': it lies outside. 'unclear': it crosses the
        bound, so there are too few seeds to tell. 'one seed': there is no interval over seeds, so nothing is claimed.
        'not run', 'not reached' (70 % accuracy) or '-' (nothing to compare with).
    """
    ours = measured(experiment, cell, found)
    if ours is None:
        return "not run" if not (found or {}).get("seeds") else "not reached"
    if cell.published is None or experiment.measures in ("seconds", "rounds to 70 %"):
        return "-"
    mean, half = statistics.over_seeds([number for number, _ in of_seeds(experiment, found, cell.protocol or None)])
    if np.isnan(half):
        return "one seed"
    printed = 0.0 if experiment.measures == "gain over Local" else cell.published.spread or 0.0
    bound, gap = max(printed, BOUND), mean - cell.published.value
    if abs(gap) + half <= bound:
        return "agrees"
    if abs(gap) - half <= bound:
        return "unclear"
    return "above" if gap > 0 else "below"


def verdicts(experiment: Experiment, cells: dict) -> list[tuple[str, str, str]]:
    """[(ordering, column, 'holds' | 'fails' | 'open')] of all orderings of an experiment; open: a value is missing."""
    found = []
    for ordering in experiment.orderings:
        for column in ordering.columns:
            values = {}
            for cell in experiment.cells:
                if cell.column == column and (number := measured(experiment, cell, cells.get(key(cell)))) is not None:
                    values[cell.label or cell.method] = number
            held = ordering.holds(values)
            found.append((ordering.text, column, "open" if held is None else "holds" if held else "fails"))
    return found


def table(name: str, cells: dict, title: str = "", experiment: Experiment | None = None) -> FittedTable:
    """A table of one experiment for the terminal, with the cells that were run.

    Where some clients had never taken part, EV-all of those that had and of the others follows in two more rows.
    `experiment` replaces the one that has this name.
    """
    experiment = experiment or EXPERIMENTS[name]
    out = FittedTable(title=title or f"{name}: {experiment.title}")
    out.add_column("method")
    for column in ("published", "ours", "gap", "EV-all", "rounds"):
        out.add_column(column, justify="right")
    out.add_column("")
    column: str | None = None
    for row in _rows(experiment, cells):
        if row["seeds"]:
            if row["column"] != column:
                column = row["column"]
                out.add_section()
                out.add_row(f"[bold]{column}[/]")
            rounds = row["rounds"] + (f" x {row['seeds']}" if row["seeds"] != "1" else "")
            out.add_row(
                row["method"], row["published"], row["ours"], row["gap"], row["EV-all"], rounds, row["agreement"]
            )
            for side, after in row["sides"]:
                out.add_row(f"  {side}", "", "", "", after)
    return out


def picture_rows(picture: Picture, found: dict) -> list[tuple[str, str, str, str]]:
    """[(name, published, ours, 'holds' | 'fails' | '-')] of all numbers of a figure, each the mean over its seeds.

    For one seed, the interval is over clients and p is shown. For several, the interval is over seeds.
    """
    seeds, rows = [entry["numbers"] for entry in found.get("seeds", {}).values()], []
    for what in dict.fromkeys(what for numbers in seeds for what in numbers):
        there = [numbers[what] for numbers in seeds if what in numbers]
        number, half = there[0]["value"], there[0].get("half", np.nan)
        if len(there) > 1:
            number, half = statistics.over_seeds([each["value"] for each in there])
        ours = f"{number:.3g}" if "p" in there[0] else str(number) if isinstance(number, int) else f"{number:.2f}"
        ours += "" if np.isnan(half) else f" ± {half:.2g}" if "p" in there[0] else f" ± {half:.2f}"
        ours += f" (p = {there[0]['p']:.2g})" if "p" in there[0] and len(there) == 1 else ""
        claim = picture.published.get(what)
        held = "-" if claim is None else "holds" if claim.holds(number) else "fails"
        rows.append((what, claim.text if claim else "-", ours, held))
    return rows


def picture_table(name: str, found: dict) -> FittedTable:
    """A table of the numbers of one figure for the terminal."""
    picture = FIGURES[name]
    out = FittedTable(title=f"{name}: {picture.title}")
    out.add_column("")
    for column in ("published", "ours"):
        out.add_column(column, justify="right")
    out.add_column("")
    for row in picture_rows(picture, found):
        out.add_row(*row)
    return out


def markdown(ledger: dict, notes: dict | None = None) -> str:
    """All experiments of a ledger as Markdown: the content of docs/reproduction.md.

    Args:
        ledger: from `load`.
        notes: from `notes`: {experiment: {cell: why it may disagree}}, and {'about': {experiment: a paragraph}}.
    """
    notes = notes or {}
    parts = [_HEAD]
    for name, experiment in EXPERIMENTS.items():
        cells = ledger.get(name, {})
        parts.append(f"## {name}: {experiment.title}\n{experiment.source}. {experiment.note}".rstrip())
        parts.append(f"Measured as the paper does: {protocol(experiment.protocol)}.{_exceptions(experiment)}")
        if name in notes.get("about", {}):
            parts.append(notes["about"][name].strip())
        scales = {e["scale"] for c in cells.values() for e in c.get("seeds", {}).values()}
        parts += [f"At {s} scale {size.said}." for s, size in experiment.sizes.items() if s in scales and size.said]
        rows = _rows(experiment, cells)
        done = [row for row in rows if row["seeds"]]
        if done:
            names = (
                "column",
                "method",
                "published",
                "ours",
                "gap",
                "EV-all",
                "rounds",
                "seeds",
                "seconds",
                "agreement",
            )
            lines = ["| " + " | ".join(names) + " |", "|---|---|" + "---:|" * 7 + "---|"]
            for row in done:
                lines.append("| " + " | ".join(row[n] for n in names) + " |")
                for side, after in row["sides"]:
                    extra = {"column": row["column"], "method": f"{row['method']}, {side}", "EV-all": after}
                    lines.append("| " + " | ".join(extra.get(n, "") for n in names) + " |")
            parts.append("\n".join(lines))
        held = [(text, column, verdict) for text, column, verdict in verdicts(experiment, cells) if verdict != "open"]
        if held:
            lines = [f"* {column}: {text}: **{v}**{_lengths(experiment, cells, column)}" for text, column, v in held]
            if all(len(c.get("seeds", {})) < 2 for c in cells.values()):
                parts.append("Orders in one seed (another seed may give another order):")
            parts.append("\n".join(lines))
        why = [f"* {cell}: {text}" for cell, text in notes.get(name, {}).items()]
        if why:
            parts.append("Suspected causes, and what was tried:\n\n" + "\n".join(why))
        if len(done) < len(rows):
            parts.append("Not run: " + "; ".join(_missing(rows)) + ".")
        if done:
            commands = sorted({e["command"] for c in cells.values() for e in c.get("seeds", {}).values()})
            runs = sorted(
                f"{cell}: " + ", ".join(f"seed {seed} {e['run']}" for seed, e in c["seeds"].items())
                for cell, c in cells.items()
                if c.get("seeds")
            )
            listed = "\n".join(f"    {line}" for line in [*commands, "", *runs])
            parts.append(f"<details><summary>Commands, and the runs' hashes</summary>\n\n{listed}\n\n</details>")
    for name, picture in FIGURES.items():
        if name in ledger:
            parts += _picture(name, picture, ledger[name], notes.get("about", {}).get(name))
    return "\n\n".join(parts) + "\n"


def _picture(name: str, picture: Picture, found: dict, about: str | None) -> list[str]:
    """The paragraphs on a figure: its numbers, its runs, and which runs are missing."""
    parts = [f"## {name}: {picture.title}\n{picture.source}. {picture.note}".rstrip()]
    if about:
        parts.append(about.strip())
    rows = picture_rows(picture, found)
    if rows:
        lines = ["| number | published | ours | |", "|---|---:|---:|---|"]
        parts.append("\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]))
    if "not run" in found:
        parts.append(f"Not run: {found['not run']}.")
    seeds = found.get("seeds", {})
    rounds = sorted({n for entry in seeds.values() for n in entry["rounds"].values()})
    if rounds:
        parts.append(f"Rounds: {', '.join(map(str, rounds))}; seeds: {len(seeds)}.")
    without = {cell: why for entry in seeds.values() for cell, why in entry["without"].items()}
    if without:
        parts.append("Without: " + "; ".join(f"{cell}: {why.rstrip('.')}" for cell, why in without.items()) + ".")
    if seeds:
        listed = sorted({entry["command"] for entry in seeds.values()}) + [""]
        listed += [f"{cell}: seed {s} {run}" for s, entry in seeds.items() for cell, run in entry["runs"].items()]
        body = "\n".join(f"    {line}" for line in listed).rstrip()
        parts.append(f"<details><summary>Commands, and the runs' hashes</summary>\n\n{body}\n\n</details>")
    return parts


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
    for name, cells in found.items():
        if name == "about":
            known = {*EXPERIMENTS, *FIGURES}
        elif name in EXPERIMENTS:
            known = {key(cell) for cell in EXPERIMENTS[name].cells} | {c.column for c in EXPERIMENTS[name].cells}
        else:
            raise LedgerError(f"{path} is about an experiment {name!r} that there is not")
        for cell in cells:
            if cell not in known:
                raise LedgerError(f"{path} is about {cell!r}, which {name} does not have")
    return found


_HEAD = """# Reproduction: what the papers have, and what we found
Made from reproduction.json and reproduction_notes.toml by `tfpfl reproduce --write docs/reproduction.md`; not edited by
hand. *ours* is measured by the paper's own protocol, which stands above each table, *EV-all* by ours: mean over all
clients of the model that each predicts with after the server's step, mean of the last ten evaluated rounds, test
examples. ± is the 95 % interval over clients for one seed, over seeds for several. *agreement* compares our interval
over seeds with the paper's value ± a bound, which is the number after the paper's ± but at least 1 point. *agrees*: the
interval lies within the bound; *above*, *below*: it lies outside; *unclear*: it crosses the bound, so more seeds are
needed; *one seed*: there is no interval over seeds, so nothing is claimed. Fewer rounds than the paper's are in the
table as such: read orders there, not decimals. *seconds* are those of all rounds' work, on a shared machine. [All
cells](cells.md) lists what is run for every cell."""


def _exceptions(experiment: Experiment) -> str:
    """Text on the methods that are measured by a protocol of their own, otherwise ''."""
    own = {cell.method: cell.protocol for cell in experiment.cells if cell.protocol}
    return "".join(f" {get_method(method).title}: {protocol(name)}." for method, name in own.items())


def _rows(experiment: Experiment, cells: dict) -> list[dict]:
    decimals, rows = DECIMALS[experiment.measures], []
    for cell in experiment.cells:
        found = cells.get(key(cell), {})
        seeds = found.get("seeds", {})
        ours, after = measured(experiment, cell, found), None
        if experiment.measures == "accuracy":
            after = value(experiment, found, "EV-all")
        comparable = cell.published is not None and ours is not None
        rounds = sorted({e["rounds"] for e in seeds.values()})
        stopped = ", stopped" if any(e["stopped"] for e in seeds.values()) else ""
        rows.append(
            {
                "column": cell.column,
                "method": get_method(cell.method).title + (f", {cell.label}" if cell.label else ""),
                "published": _text(cell.published, decimals),
                "ours": _text(ours, decimals),
                "gap": f"{ours[0] - cell.published.value:+.{decimals}f}" if comparable else "-",
                "EV-all": _text(after, decimals),
                "sides": _sides(experiment, found) if experiment.measures == "accuracy" else [],
                "rounds": "-".join(map(str, rounds)) + stopped,
                "seeds": str(len(seeds)) if seeds else "",
                "seconds": f"{sum(e['seconds'] for e in seeds.values()):.0f}",
                "agreement": agreement(experiment, cell, found),
                "why": f": {found['not run']}" if "not run" in found else "",
            }
        )
    return rows


def _sides(experiment: Experiment, found: dict) -> list[tuple[str, str]]:
    """[('65 seen', EV-all of these clients), ('35 never seen', ...)]; [] if all had taken part, or if it is unknown."""
    counted = [e["clients"] for e in found.get("seeds", {}).values() if e.get("clients")]
    sides = [value(experiment, found, name) for name in ("EV-seen", "EV-unseen")]
    if not counted or sides[1] is None:
        return []
    numbers = [
        f"{min(side)}" if min(side) == max(side) else f"{min(side)} to {max(side)}"
        for side in zip(*counted, strict=True)
    ]
    return [
        (f"{number} {word}", _text(after, DECIMALS[experiment.measures]))
        for number, word, after in zip(numbers, SIDE_WORDS, sides, strict=True)
    ]


def _lengths(experiment: Experiment, cells: dict, column: str) -> str:
    """Text on the methods' rounds if those of a column have different numbers of rounds, otherwise ''."""
    rounds: dict[int, list[str]] = {}
    for cell in experiment.cells:
        for e in cells.get(key(cell), {}).get("seeds", {}).values() if cell.column == column else ():
            rounds.setdefault(e["rounds"], []).append(cell.label or get_method(cell.method).title)
    if len(rounds) < 2:
        return ""
    return f" (rounds: {'; '.join(f'{n} of {_listed(names)}' for n, names in sorted(rounds.items()))})"


def _listed(names: list) -> str:
    return ", ".join(dict.fromkeys(names))


def _missing(rows: list[dict]) -> list[str]:
    """What was not run: whole columns, or single methods of a column, with the reason if there is one."""
    columns: dict[str, list] = {}
    parts = []
    for row in rows:
        columns.setdefault(row["column"], []).append(row)
    for column, its_rows in columns.items():
        missing = [row for row in its_rows if not row["seeds"]]
        if missing:
            why = next((row["why"] for row in missing if row["why"]), "")
            which = "" if len(missing) == len(its_rows) else f" ({', '.join(row['method'] for row in missing)})"
            parts.append(column + which + why)
    return parts


def _text(pair, decimals: int) -> str:
    if pair is None:
        return "-"
    number, half = pair
    return f"{number:.{decimals}f}" + (f" ± {half:.{decimals}f}" if half is not None and not np.isnan(half) else "")
