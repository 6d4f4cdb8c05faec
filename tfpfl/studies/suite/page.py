"""The suite's page: where personalization helps, makes no difference or hurts; and the same as tables in Markdown."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfpfl.algorithms import get_method
from tfpfl.runs import statistics
from tfpfl.runs.metrics import in_unit, times
from tfpfl.studies.few_shots import SHOTS
from tfpfl.studies.plots.forest import forest
from tfpfl.studies.records import Record
from tfpfl.studies.report.blocks import Note, Pictures, Section, Table
from tfpfl.studies.report.page import html
from tfpfl.studies.suite.measures import ALPHA, EPOCHS, over_seeds
from tfpfl.studies.suite.verdicts import BASELINES, BOUND, Gain, chosen, gain, matrix, validated
from tfpfl.studies.tables import bytes_text

TARGET = 0.95  # of what Local reaches: the score whose cost is told
_BETWEEN = "±: half the 95 % interval over seeds and people, both taken as samples."
_OVER = {"fedavg": "one model for all (FedAvg)", "local": "training alone (Local)"}


class DataResult:
    """What the suite has found on one data set: for every method the records and the measures of all seeds."""

    def __init__(self, title: str, records: Mapping[str, list[Record]], measures: Mapping[str, list[dict]]):
        self.title, self.records, self.measures = title, dict(records), measures
        self.named = next(iter(self.records.values()))[0].score
        self.personal = [name for name in self.records if name not in BASELINES and _is_personal(self.records[name])]

    def gain(self, method: str, baseline: str) -> Gain | None:
        """The gain of a method over a baseline; None if the baseline is not among the methods."""
        return gain(self.records[method], self.records[baseline]) if baseline in self.records else None

    @property
    def best(self) -> str | None:
        """The personal method with the best validation score; None if there is no personal method."""
        if not self.personal:
            return None
        return chosen({name: validated(self.records[name]) for name in self.personal}, self.named.larger_is_better)

    def sentences(self) -> list[str]:
        """The verdicts in words: the best personal method over each baseline."""
        if self.best is None:
            return [f"{self.title}: no personal method was run."]
        told, best = [], get_method(self.best).title
        for baseline, words in _OVER.items():
            found = self.gain(self.best, baseline)
            if found is not None:
                points = f"{found.mean:+.1f} ± {found.half:.1f}" if math.isfinite(found.half) else f"{found.mean:+.1f}"
                told.append(f"over {words} it {_WORDS[found.verdict()]} ({points} points)")
        return (
            [f"{self.title}: the personal method that validation chooses is {best}; {', '.join(told)}."] if told else []
        )


_WORDS = {
    "helps": "helps",
    "hurts": "hurts",
    "no difference": "makes no difference",
    "unclear": "is neither better nor worse beyond doubt",
}


def _is_personal(records: Sequence[Record]) -> bool:
    return records[0].predicts != "global"


def tables(result: DataResult) -> list[Table]:
    """The tables of one data set: scores and verdicts; new people by shots; other people and trust; cost."""
    return [_scores(result), _shots(result), _trust(result), _cost(result)]


def _scores(result: DataResult) -> Table:
    head = ["method", "score ±", "worst tenth", *(f"gain over {get_method(b).title} ±" for b in BASELINES), "verdicts"]
    lines = []
    for name, records in result.records.items():
        mean, half = statistics.crossed(matrix(records))
        worst = np.mean([record.worst(0.1) for record in records]) * times(result.named)
        found = [result.gain(name, b) if name != b else None for b in BASELINES]
        verdicts = [f"{_ABOUT[b]}: {g.verdict()}" for b, g in zip(BASELINES, found, strict=True) if g]
        own = [_number(abs(mean), half), f"{worst:.1f}"]
        gains = ["" if g is None else _number(g.mean, g.half, sign=True) for g in found]
        lines.append([get_method(name).title, *own, *gains, "; ".join(verdicts)])
    caption = (
        f"Test {in_unit(result.named)} of the people who trained, each with the model that it predicts with (EV-all). "
        f"{_BETWEEN} 'no difference': the interval lies within {BOUND:g} point; 'unclear': it crosses that bound and 0."
    )
    return Table(caption, head, lines)


_ABOUT = {"fedavg": "one for all", "local": "alone"}


def _shots(result: DataResult) -> Table:
    lines = []
    for name, found in result.measures.items():
        if why := found[0]["shots"].get("why"):
            lines.append([get_method(name).title, f"none: {why}", *([""] * len(SHOTS))])
            continue
        each = [statistics.crossed(times(result.named) * over_seeds(found, "shots", str(k))) for k in (0, *SHOTS)]
        lines.append([get_method(name).title, *(_number(*pair) for pair in each)])
    caption = (
        f"People who never trained: test {in_unit(result.named)} before they adapt, and after {EPOCHS} epochs on k of "
        f"their examples of each class, as each method adapts. {_BETWEEN}"
    )
    return Table(caption, ["method", "k = 0", *(f"k = {k}" for k in SHOTS)], lines)


def _trust(result: DataResult) -> Table:
    head = ["method", "own data", "other people's", "ECE %", "NLL", "coverage %", "least covered", "classes in a set"]
    lines = []
    for name, found in result.measures.items():
        people = [statistics.crossed(times(result.named) * over_seeds(found, "people", n)) for n in ("own", "others")]
        why = found[0]["trust"].get("why") or found[0]["people"].get("why")
        values = {n: over_seeds(found, "trust", n) for n in ("ece", "nll", "coverage", "set_size")}
        if why or not values["ece"].size:
            lines.append([get_method(name).title, f"none: {why}", *([""] * (len(head) - 2))])
            continue
        least = 100 * np.nanmin(np.nanmean(values["coverage"], 0))
        cells = [
            *(_number(*pair) for pair in people),
            f"{100 * np.nanmean(values['ece']):.1f}",
            f"{np.nanmean(values['nll']):.2f}",
            _number(*statistics.crossed(100 * values["coverage"])),
            f"{least:.1f}",
            f"{np.nanmean(values['set_size']):.2f}",
        ]
        lines.append([get_method(name).title, *cells])
    caption = (
        "The models of the people who trained, on their own and on the other people's test examples; calibration "
        "error and negative log-likelihood (nats) on their own; conformal sets that are to cover "
        f"{100 * (1 - ALPHA):.0f} %, with one threshold for all from validation examples, and the person whom they "
        f"cover least. {_BETWEEN}"
    )
    return Table(caption, head, lines)


def _cost(result: DataResult) -> Table:
    head = ["method", "rounds", "seconds", "bytes", "passes", "GFLOP"]
    reference = result.records.get("local")
    if reference is None:
        return Table("The cost of a score is told against Local, which was not run.", ["method"], [])
    target = TARGET * float(np.mean([found.score for record in reference if (found := record.result())]))
    lines = []
    for name, records in result.records.items():
        reached = [r for record in records if (r := _first_round(record, target)) is not None]
        if len(reached) < len(records):
            lines.append([get_method(name).title, "not reached", "", "", "", ""])
            continue
        work = _spent(records, reached, "flops") / 1e9 if records[0].summary.get("flops") else math.nan
        lines.append(
            [
                get_method(name).title,
                f"{np.mean(reached):.0f}",
                f"{_spent(records, reached, 'seconds'):.1f}",
                bytes_text(_spent(records, reached, "bytes")),
                f"{_spent(records, reached, 'passes'):,.0f}",
                f"{work:,.1f}",
            ]
        )
    caption = (
        f"What it cost until the test score was {100 * TARGET:.0f} % of Local's last one, means over the seeds: rounds "
        f"(the first one that was evaluated; {_evaluated(reference[0])}), seconds of the rounds, bytes of all clients, "
        "their passes through the backbone, and floating point operations, which stand for energy."
    )
    return Table(caption, head, lines)


def _evaluated(record: Record) -> str:
    every = record.config.evaluate_every
    return f"every {every} rounds, and the last ten" if every else "the last ten"


def _first_round(record: Record, target: float) -> int | None:
    better = 1 if record.score.larger_is_better else -1
    return next((r for r, value in sorted(record.curve().items()) if better * (value - target) >= 0), None)


def _spent(records: Sequence[Record], rounds: Sequence[int], what: str) -> float:
    """What the runs had spent by these rounds, the mean over the runs."""
    of_run = [[row["round"] for row in record.history].index(r) for record, r in zip(records, rounds, strict=True)]
    return float(np.mean([record.spent(what)[i] for record, i in zip(records, of_run, strict=True)]))


def _number(mean: float, half: float, sign: bool = False) -> str:
    if math.isnan(mean):
        return ""
    text = f"{mean:+.1f}" if sign else f"{mean:.1f}"
    return f"{text} ± {half:.1f}" if math.isfinite(half) else text


def page(title: str, results: Sequence[DataResult], about: Mapping[str, str]) -> str:
    """The page as HTML: the verdicts first, then a section for each data set."""
    pictures = Pictures()
    parts = [Section("verdicts", "Where personalization helps", _verdicts(pictures, results))]
    parts += [Section(f"data{n}", r.title, list(tables(r))) for n, r in enumerate(results)]
    return html(title, about, [], parts)


def _verdicts(pictures: Pictures, results: Sequence[DataResult]) -> list[Any]:
    blocks: list[Any] = [Note(sentence) for result in results for sentence in result.sentences()]
    for baseline, words in _OVER.items():
        panels = {}
        for result in results:
            names = [name for name in result.records if name != baseline]
            found = [(name, result.gain(name, baseline)) for name in names]
            panels[result.title] = [(get_method(n).title, n, g.mean, g.half) for n, g in found if g is not None]
        title = f"Gain over {words}"
        caption = f"Points of test score, EV-all. {_BETWEEN} Grey: less than {BOUND:g} point."
        blocks.append(pictures.draw(title, caption, forest, panels, "points", BOUND))
    return blocks


def markdown(title: str, results: Sequence[DataResult], about: Mapping[str, str], made_by: str) -> str:
    """The same in Markdown, without pictures."""
    lines = [f"# {title}", "", made_by, ""]
    lines += [sentence for result in results for sentence in (f"* {text}" for text in result.sentences())]
    lines += ["", *(f"* {name}: {text}" for name, text in about.items())]
    for result in results:
        lines += ["", f"## {result.title}"]
        for table in tables(result):
            cells = [table.head, ["---"] * len(table.head), *table.rows]
            lines += ["", table.caption, "", *("| " + " | ".join(map(str, row)) + " |" for row in cells)]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Writes a page whole, or not at all."""
    from tfpfl.runs.files import write_whole

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
