"""The ledger as tables for the terminal and as docs/reproduction.md."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from rich.markup import escape

from tfpfl.algorithms import get_method
from tfpfl.runs import statistics
from tfpfl.runs.protocols import protocol
from tfpfl.studies import run_groups
from tfpfl.studies.fitted_table import FittedTable
from tfpfl.studies.papers import equal_cost
from tfpfl.studies.papers import ledger as ledgers
from tfpfl.studies.papers.experiment import Experiment
from tfpfl.studies.papers.experiments import EXPERIMENTS
from tfpfl.studies.papers.ledger import (
    DECIMALS,
    EVERYTHING,
    agreement,
    comparable,
    dashed,
    key,
    left_out,
    measured,
    method_title,
    text,
    value,
)
from tfpfl.studies.papers.pictures import FIGURES, Picture
from tfpfl.studies.papers.verdicts import Difference, verdicts

LEVEL = 0.05  # of a test of one seed's number
# The verdicts of `agreement` on a cell.
_AGREEMENTS = ("agrees", "above", "below", "unclear", "one seed", "other rounds")


def table(
    name: str, cells: dict, scale: str = "", title: str = "", experiment: Experiment | None = None
) -> FittedTable:
    """A table of one experiment for the terminal, with the cells that were run.

    Where some clients had never taken part, EV-all of those that had and of the others follows in two more rows.

    Args:
        name: the experiment.
        cells: its part of the ledger.
        scale: the scale of the part. If its runs are smaller than the paper's, they are not compared with the paper.
        title: of the table; default: the part's name and the experiment's title.
        experiment: replaces the one that has this name.
    """
    part = ledgers.part(name, scale) if scale else name
    experiment = experiment or EXPERIMENTS[name]
    out = FittedTable(title=title or f"{part}: {experiment.title}")
    out.add_columns("method")
    out.add_columns("published", "ours", "gap", "EV-all", "rounds", justify="right")
    out.add_columns("")
    column: str | None = None
    for row in _rows(experiment, cells, compared=part == name):
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
    out.caption = escape(_left_out(experiment, cells)) or None
    return out


def picture_rows(picture: Picture, found: dict) -> list[tuple[str, str, str, str]]:
    """[(name, published, ours, verdict)] of all numbers of a figure, each the mean over its seeds.

    For one seed, the interval is over clients and p is shown. For several, the interval is over seeds. The
    verdict on a claim is 'holds' or 'fails'; 'unclear' if it holds at one end of the interval only, or if p is more
    than 5 %; '-' without a claim.
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
        by_chance = len(there) == 1 and there[0].get("p", 0.0) > LEVEL
        ends = [number] if np.isnan(half) else [number - half, number + half]
        held = "-" if claim is None else _held({claim.holds(end) for end in ends}, by_chance)
        rows.append((what, claim.text if claim else "-", ours, held))
    return rows


def _held(answers: set[bool], by_chance: bool) -> str:
    """The verdict on a claim, from whether it holds at both ends of an interval."""
    if len(answers) > 1 or by_chance:
        return "unclear"
    return "holds" if answers == {True} else "fails"


def picture_table(name: str, found: dict) -> FittedTable:
    """A table of the numbers of one figure for the terminal."""
    picture = FIGURES[name]
    out = FittedTable(title=f"{name}: {picture.title}")
    out.add_columns("")
    out.add_columns("published", "ours", justify="right")
    out.add_columns("")
    for row in picture_rows(picture, found):
        out.add_row(*row)
    return out


def markdown(ledger: dict, notes: dict | None = None) -> str:
    """All experiments of a ledger as Markdown: the content of docs/reproduction.md.

    Args:
        ledger: from `load`.
        notes: from `notes`: {experiment: {cell: why it may disagree}}, and {'about': {experiment: paragraphs}}, where
            `EVERYTHING` in place of an experiment is on the whole ledger.
    """
    notes = notes or {}
    about = notes.get("about", {}).get(EVERYTHING, "").strip()
    parts = [_HEAD, *([about] if about else []), *_overview(ledger)]
    for name, experiment in EXPERIMENTS.items():
        for part, scale in ledgers.parts(name).items():
            if part in ledger or not scale:
                parts += _part(part, scale, experiment, ledger, notes)
    for name, picture in FIGURES.items():
        if name in ledger:
            parts += _picture(name, picture, ledger[name], notes.get("about", {}).get(name))
    return "\n\n".join(parts) + "\n"


def _overview(ledger: dict) -> list[str]:
    """A table of all experiments that were run: how much of each there is, and how many cells agree with the paper."""
    lines = []
    for name, experiment in EXPERIMENTS.items():
        for part, scale in ledgers.parts(name).items():
            cells = ledger.get(part, {})
            rows = _rows(experiment, cells, compared=not scale)
            done = [row for row in rows if row["seeds"]]
            if not done:
                continue
            counts = Counter(row["agreement"] for row in done)
            compared = any(counts[word] for word in _AGREEMENTS)
            told = [str(counts[word]) if compared else "-" for word in _AGREEMENTS]
            told_orders = [] if scale else [v for v in verdicts(experiment, cells) if v.differences]
            orders = Counter(verdict.held for verdict in told_orders)
            decided = orders["holds"] + orders["fails"]
            open_ = f", {orders['open']} open" if orders["open"] else ""
            seen = [comparable(cell) for cell in cells.values()]
            rounds = [entry["rounds"] for seeds in seen for entry in seeds.values()]
            amounts = [f"{len(done)} of {len(rows)}", dashed(rounds), dashed([len(seeds) for seeds in seen if seeds])]
            held = f"{orders['holds']} of {decided}{open_}" if decided or open_ else "-"
            lines.append(f"| {' | '.join([part, *amounts, *told, held])} |")
    if not lines:
        return []
    names = ["table", "cells run", "rounds", "seeds", *_AGREEMENTS, "orders that hold"]
    head = f"| {' | '.join(names)} |\n|---|{'---:|' * (len(names) - 1)}"
    return [
        "All tables at a glance. A part called laptop is smaller than the paper's, and is not compared with it.",
        "\n".join([head, *lines]),
    ]


def _part(part: str, scale: str, experiment: Experiment, ledger: dict, notes: dict) -> list[str]:
    """The paragraphs on an experiment at one size; `scale` is '' at the paper's."""
    cells = ledger.get(part, {})
    parts = [f"## {part}: {experiment.title}\n{experiment.source}. {experiment.note}".rstrip()]
    if scale:
        said = experiment.sizes[scale].said
        parts.append(f"Smaller than the paper's: {said}. So nothing here agrees or disagrees with the paper.")
    parts.append(f"Measured as the paper does: {protocol(experiment.protocol)}.{_exceptions(experiment)}")
    if part in notes.get("about", {}):
        parts.append(notes["about"][part].strip())
    rows = _rows(experiment, cells, compared=not scale)
    done = [row for row in rows if row["seeds"]]
    if done:
        names = ("column", "method", "published", "ours", "gap", "EV-all", "rounds", "seeds", "seconds", "agreement")
        lines = ["| " + " | ".join(names) + " |", "|---|---|" + "---:|" * 7 + "---|"]
        for row in done:
            lines.append("| " + " | ".join(row[n] for n in names) + " |")
            for side, after in row["sides"]:
                extra = {"column": row["column"], "method": f"{row['method']}, {side}", "EV-all": after}
                lines.append("| " + " | ".join(extra.get(n, "") for n in names) + " |")
        parts.append("\n".join(lines))
        if left := _left_out(experiment, cells):
            parts.append(left)
    if not scale and (lines := order_lines(experiment, cells)):
        parts.append("Orders, with the differences, paired by seed, and half of Student's interval over seeds:")
        parts.append("\n".join(f"* {line}" for line in lines))
    parts += equal_cost.markdown(experiment, cells)
    why = [f"* {cell}: {note}" for cell, note in notes.get(part, {}).items()]
    if why:
        parts.append("Suspected causes, and what was tried:\n\n" + "\n".join(why))
    if not done and not scale and any(other.startswith(f"{part}, ") for other in ledger):
        parts.append("Not run at the paper's size. A smaller setting follows.")
    elif len(done) < len(rows):
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
    return parts


def order_lines(experiment: Experiment, cells: dict, strong: str = "**") -> list[str]:
    """The verdicts on the orders of methods, a line each; `strong` stands around the verdict.

    One that is open has a line if two of its methods were run with a common seed.
    """
    decimals, lines = DECIMALS[experiment.measures], []
    for verdict in verdicts(experiment, cells):
        by_seeds: dict[int, list[Difference]] = {}
        for difference in sorted(verdict.differences, key=lambda one: -one.seeds):
            by_seeds.setdefault(difference.seeds, []).append(difference)
        told = [
            f"{_differences(some, decimals)} ({f'{number} seeds' if number > 1 else 'one seed'})"
            for number, some in by_seeds.items()
        ]
        told += [f"not compared: {_listed(verdict.shorter)}"] if verdict.shorter else []
        told += [f"without {_listed(verdict.missing)}"] if verdict.missing else []
        if verdict.differences or verdict.shorter:
            lines.append(f"{verdict.column}: {verdict.text}: {strong}{verdict.held}{strong}. {'; '.join(told)}")
    return lines


def _differences(found: Sequence[Difference], decimals: int) -> str:
    """'PFLEGO over FedRep +0.52 ± 0.22, FedAvg +0.77 ± 0.05; FedRep over FedAvg +0.25 ± 0.3'."""
    by_first: dict[str, list[str]] = {}
    for first, second, mean, half, *_ in found:
        interval = "" if np.isnan(half) else f" ± {half:.{decimals}f}"
        by_first.setdefault(first, []).append(f"{second} {mean:+.{decimals}f}{interval}")
    return "; ".join(f"{first} over {', '.join(others)}" for first, others in by_first.items())


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


_HEAD = """# Reproduction: what the papers have, and what we found
Made from reproduction.json and reproduction_notes.toml by `tfpfl reproduce --write docs/reproduction.md`; not edited by
hand. *ours* is measured by the paper's own protocol, which stands above each table, *EV-all* by ours: mean over all
clients of the model that each predicts with after the server's step, mean of the last ten evaluated rounds, test
examples. ± is half of Student's 95 % interval, over clients for one seed, over seeds for several. *agreement* compares
our interval over seeds with the paper's value ± a bound, which is the number after the paper's ± but at least 1 point.
*agrees*: the interval lies within the bound; *above*, *below*: it lies outside; *unclear*: it crosses the bound, so
more seeds are needed; *one seed*: there is no interval over seeds, so nothing is claimed; *other rounds*: nor where
runs have fewer or more rounds than the paper's. An order of two methods *holds* or *fails* if the interval of their
difference, paired by seed and after equally many rounds, lies above or below 0. That no method is better than another
also holds where the intervals say that it is at most 1 point behind, and may be ahead. An order of more methods fails
if one of its pairs does, and holds if all do. Else it is *open*: more seeds are needed, or a method has too few
rounds or is missing. *seconds* are those of all rounds' work, on a shared machine. [All cells](cells.md) lists what
is run for every cell."""


def _exceptions(experiment: Experiment) -> str:
    """Text on the methods that are measured by a protocol of their own, otherwise ''."""
    own = {cell.method: cell.protocol for cell in experiment.cells if cell.protocol}
    return "".join(f" {get_method(method).title}: {protocol(name)}." for method, name in own.items())


def _rows(experiment: Experiment, cells: dict, compared: bool = True) -> list[dict]:
    """The rows of a table; `compared`: whether they have the gap to the paper, and whether they agree with it."""
    decimals, rows = DECIMALS[experiment.measures], []
    for cell in experiment.cells:
        found = cells.get(key(cell), {})
        seeds = comparable(found)
        ours, after = measured(experiment, cell, found), None
        if experiment.measures == "accuracy":
            after = value(experiment, found, "EV-all")
        gap = "-"
        if compared and ours is not None and cell.published:
            gap = f"{ours[0] - cell.published.value:+.{decimals}f}"
        rounds = sorted({e["rounds"] for e in seeds.values()})
        stopped = ", stopped" if any(e["stopped"] for e in seeds.values()) else ""
        rows.append(
            {
                "column": cell.column,
                "method": method_title(cell.method, cell.label),
                "published": text(cell.published, decimals),
                "ours": text(ours, decimals),
                "gap": gap,
                "EV-all": text(after, decimals),
                "sides": _sides(experiment, found) if experiment.measures == "accuracy" else [],
                "rounds": "-".join(map(str, rounds)) + stopped,
                "seeds": str(len(seeds)) if seeds else "",
                "seconds": f"{sum(e['seconds'] for e in seeds.values()):.0f}",
                "agreement": agreement(experiment, cell, found) if compared else "-",
                "why": f": {found['not run']}" if "not run" in found else _all_diverged(found),
            }
        )
    return rows


def _all_diverged(found: dict) -> str:
    rounds = [entry["rounds"] for entry in found.get("seeds", {}).values()]
    return "" if not rounds or comparable(found) else f": diverged in round {dashed([t + 1 for t in rounds])}"


def _left_out(experiment: Experiment, cells: dict) -> str:
    """A sentence on the seeds that no mean counts: they diverged, or have fewer rounds than others of their cell."""
    found = [
        f"{name}: seed {seed} ({entry['rounds']} rounds, {'diverged' if entry.get('diverged') else 'others have more'})"
        for name in map(key, experiment.cells)
        for seed, entry in left_out(cells.get(name)).items()
    ]
    return f"Left out of the means: {'; '.join(found)}." if found else ""


def _sides(experiment: Experiment, found: dict) -> list[tuple[str, str]]:
    """[('65 seen', EV-all of these clients), ('35 never seen', ...)]; [] if all had taken part, or if it is unknown."""
    counted = [e["clients"] for e in comparable(found).values() if e.get("clients")]
    sides = [value(experiment, found, name) for name in ("EV-seen", "EV-unseen")]
    if not counted or sides[1] is None:
        return []
    return [
        (f"{run_groups.span(numbers)} {word}", text(after, DECIMALS[experiment.measures]))
        for numbers, word, after in zip(zip(*counted, strict=True), run_groups.SIDE_WORDS, sides, strict=True)
    ]


def _listed(names: Sequence[str]) -> str:
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
