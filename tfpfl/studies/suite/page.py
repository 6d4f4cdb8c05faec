"""The suite's page: where personalization helps, makes no difference or hurts; and the same as tables in Markdown."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfpfl.data.kinds import ACCURACY, ScoreName
from tfpfl.runs import files, statistics
from tfpfl.runs.metrics import in_unit, times
from tfpfl.runs.protocols import rounds_to
from tfpfl.studies.few_shots import SHOTS
from tfpfl.studies.plots.forest import forest
from tfpfl.studies.records import Record
from tfpfl.studies.report.blocks import Pictures, Section, Table
from tfpfl.studies.report.page import html
from tfpfl.studies.suite.measures import ALPHA, EPOCHS, over_seeds
from tfpfl.studies.suite.verdicts import BASELINES, BOUND, Gain, chosen, gain, matrix, validated
from tfpfl.studies.tables import bytes_text

TARGET = 0.95  # of what Local reaches: the score whose cost is told
_BETWEEN = "±: half the 95 % interval over seeds and people, both taken as samples."
_OVER = {"fedavg": "one model for all (FedAvg)", "local": "training alone (Local)"}


class DataResult:
    """What the suite has found on one data set: for every method of the study the records and measures of all seeds.

    Args:
        title: of the data set.
        records: {name of a method in the study: its records, one for each seed}.
        measures: {the same name: what `tfpfl.studies.suite.measures` has measured of these runs}.
        titles: {the same name: what tables call the method}.
    """

    def __init__(
        self,
        title: str,
        records: Mapping[str, list[Record]],
        measures: Mapping[str, list[dict]],
        titles: Mapping[str, str],
    ):
        self.title, self.records, self.measures, self.titles = title, dict(records), measures, titles
        self.named = next(iter(self.records.values()))[0].score
        self.algorithms = {name: found[0].config.algorithm for name, found in self.records.items()}
        # A study may have one algorithm under several names, with other settings: the first one is the baseline.
        self.baselines = {a: name for name, a in reversed(self.algorithms.items()) if a in BASELINES}
        others = [name for name, algorithm in self.algorithms.items() if algorithm not in BASELINES]
        self.personal = [name for name in others if self.records[name][0].predicts != "global"]

    def gain(self, method: str, baseline: str) -> Gain | None:
        """The gain of a method over a baseline, one of `BASELINES`; None if that was not run, or is the method."""
        name = self.baselines.get(baseline, method)
        return None if name == method else gain(self.records[method], self.records[name])

    def bound(self, baseline: str) -> float:
        """Gains within it are no difference: `BOUND` points, or `BOUND` % of the baseline's score if it is no fraction.

        Raises:
            KeyError: the baseline was not run.
        """
        if self.named.is_fraction:
            return BOUND
        return BOUND / 100 * abs(float(np.nanmean(matrix(self.records[self.baselines[baseline]]))))

    @property
    def best(self) -> str | None:
        """The personal method with the best validation score; None if there is no method or no such score."""
        scores = {name: validated(self.records[name]) for name in self.personal}
        known = {name: score for name, score in scores.items() if not math.isnan(score)}
        return chosen(known, self.named.larger_is_better) if known else None

    def sentences(self) -> list[str]:
        """The verdicts in words: the best personal method over each baseline."""
        if self.best is None:
            why = "there are no validation examples to choose one by" if self.personal else "none was run"
            return [f"{self.title}: no personal method is chosen, because {why}."]
        told, best = [], self.titles[self.best]
        for baseline, words in _OVER.items():
            found = self.gain(self.best, baseline)
            if found is not None:
                number = _number(self.named, *found, sign=True)
                verdict = _WORDS[found.verdict(self.bound(baseline))]
                told.append(f"over {words} it {verdict} ({number} {_unit(self.named)})")
        return (
            [f"{self.title}: the personal method that validation chooses is {best}; {', '.join(told)}."] if told else []
        )


_WORDS = {
    "helps": "helps",
    "hurts": "hurts",
    "no difference": "makes no difference",
    "unclear": "is neither better nor worse beyond doubt",
}


def tables(result: DataResult) -> list[Table]:
    """The tables of one data set: scores and verdicts; new people by shots; other people and trust; cost."""
    return [_scores(result), _shots(result), _trust(result), _cost(result)]


def _scores(result: DataResult) -> Table:
    named = result.named
    baselines = [result.titles[result.baselines[b]] if b in result.baselines else b for b in BASELINES]
    head = ["method", "score ±", "worst tenth", *(f"gain over {title} ±" for title in baselines), "verdicts"]
    lines = []
    for name, records in result.records.items():
        mean, half = statistics.crossed(matrix(records))
        worst = float(np.mean([record.worst(0.1) for record in records])) * times(named)
        found = [result.gain(name, b) for b in BASELINES]
        verdicts = [f"{_ABOUT[b]}: {g.verdict(result.bound(b))}" for b, g in zip(BASELINES, found, strict=True) if g]
        own = [_number(named, abs(mean), half), _number(named, worst)]
        gains = ["" if g is None else _number(named, *g, sign=True) for g in found]
        lines.append([result.titles[name], *own, *gains, "; ".join(verdicts)])
    caption = (
        f"Test {in_unit(named)} of the people who trained, each with the model that it predicts with (EV-all). "
        f"{_BETWEEN} 'no difference': the interval lies within {_bound(named)}; 'unclear': it crosses that bound and 0."
    )
    return Table(caption, head, lines)


_ABOUT = {"fedavg": "one for all", "local": "alone"}


def _shots(result: DataResult) -> Table:
    lines = []
    for name, found in result.measures.items():
        if why := _why(found, "shots"):
            lines.append([result.titles[name], why, *([""] * len(SHOTS))])
            continue
        each = [statistics.crossed(times(result.named) * over_seeds(found, "shots", str(k))) for k in (0, *SHOTS)]
        lines.append([result.titles[name], *(_number(result.named, *pair) for pair in each)])
    caption = (
        f"People who never trained: test {in_unit(result.named)} before they adapt, and after {EPOCHS} epochs on k of "
        f"their examples of each class, as each method adapts. Methods that predict with a person's examples, such as "
        f"kNN-Per, have those of k = {SHOTS[0]} before they adapt, too. {_BETWEEN}"
    )
    return Table(caption, ["method", "before", *(f"k = {k}" for k in SHOTS)], lines)


def _trust(result: DataResult) -> Table:
    head = ["method", "own data", "other people's", "ECE %", "NLL", "coverage %", "least covered", "classes in a set"]
    lines = [
        [result.titles[name], *_people(result.named, found), *_trusted(found)]
        for name, found in result.measures.items()
    ]
    caption = (
        "The models of the people who trained, on their own and on the other people's test examples; calibration "
        "error and negative log-likelihood (nats) on their own; conformal sets that are to cover "
        f"{100 * (1 - ALPHA):.0f} %, with one threshold for all from validation examples, and the person whom they "
        f"cover least. {_BETWEEN}"
    )
    return Table(caption, head, lines)


def _people(named: ScoreName, found: Sequence[dict]) -> list[str]:
    if why := _why(found, "people"):
        return [why, ""]
    return [
        _number(named, *statistics.crossed(times(named) * over_seeds(found, "people", n))) for n in ("own", "others")
    ]


def _trusted(found: Sequence[dict]) -> list[str]:
    if why := _why(found, "trust"):
        return [why, *[""] * 4]
    ece, nll, coverage, size = (over_seeds(found, "trust", n) for n in ("ece", "nll", "coverage", "set_size"))
    return [
        f"{100 * np.nanmean(ece):.1f}",
        f"{np.nanmean(nll):.2f}",
        _number(ACCURACY, *statistics.crossed(100 * coverage)),
        f"{100 * np.nanmin(np.nanmean(coverage, 0)):.1f}",
        f"{np.nanmean(size):.2f}",
    ]


def _why(found: Sequence[dict], part: str) -> str | None:
    """Why there is none of a part of the measures; None if there is."""
    return next((f"none: {run[part]['why']}" for run in found if "why" in run[part]), None)


def _cost(result: DataResult) -> Table:
    head = ["method", "rounds", "seconds", "bytes", "passes", "GFLOP"]
    local = result.baselines.get("local")
    if local is None:
        return Table("The cost of a score is told against Local, which was not run.", ["method"], [])
    last = float(np.mean([found.score for record in result.records[local] if (found := record.result())]))
    target = TARGET * last if result.named.larger_is_better else last / TARGET
    lines = []
    for name, records in result.records.items():
        first = [rounds_to(record.evaluations, target, named=record.score) for record in records]
        reached = [r for r in first if r is not None]
        if len(reached) < len(records):
            lines.append([result.titles[name], "not reached", "", "", "", ""])
            continue
        work = _spent(records, reached, "flops") / 1e9 if records[0].summary.get("flops") else math.nan
        lines.append(
            [
                result.titles[name],
                f"{np.mean(reached):.0f}",
                f"{_spent(records, reached, 'seconds'):.1f}",
                bytes_text(_spent(records, reached, "bytes")),
                f"{_spent(records, reached, 'passes'):,.0f}",
                "-" if math.isnan(work) else f"{work:,.1f}",  # this TensorFlow cannot count operations
            ]
        )
    caption = (
        f"What it cost until the test score was as good as {100 * TARGET:.0f} % of Local's last one"
        f"{'' if result.named.larger_is_better else f' (at most 1 / {TARGET:g} of it)'}, means over the seeds: rounds "
        f"(the first one that was evaluated; {_evaluated(result.records[local][0])}), seconds of the rounds, bytes of "
        "all clients, their passes through the backbone, and floating point operations, which stand for energy."
    )
    return Table(caption, head, lines)


def _evaluated(record: Record) -> str:
    every = record.config.evaluate_every
    return f"every {every} rounds, and the last ten" if every else "the last ten"


def _spent(records: Sequence[Record], rounds: Sequence[int], what: str) -> float:
    """What the runs had spent by these rounds, the mean over the runs."""
    of_run = [[row["round"] for row in record.history].index(r) for record, r in zip(records, rounds, strict=True)]
    return float(np.mean([record.spent(what)[i] for record, i in zip(records, of_run, strict=True)]))


def _number(named: ScoreName, mean: float, half: float = math.inf, sign: bool = False) -> str:
    if math.isnan(mean):
        return ""
    digits = ".1f" if named.is_fraction else ".3g"
    text = f"{mean:{'+' if sign else ''}{digits}}"
    if named.is_fraction and 50 < half < math.inf:  # as wide as the scale: a few people, who differ
        return f"{text} ± > 50"
    return f"{text} ± {half:{digits}}" if math.isfinite(half) else text


def _unit(named: ScoreName) -> str:
    """Of gains."""
    return "points" if named.is_fraction else f"less {in_unit(named)}"


def _bound(named: ScoreName) -> str:
    return f"{BOUND:g} point" if named.is_fraction else f"{BOUND:g} % of the baseline's score"


def page(title: str, results: Sequence[DataResult], about: Mapping[str, str]) -> str:
    """The page as HTML: the verdicts first, then a section for each data set."""
    pictures = Pictures()
    parts = [Section("verdicts", "Where personalization helps", _verdicts(pictures, results))]
    parts += [Section(f"data{n}", r.title, list(tables(r))) for n, r in enumerate(results)]
    return html(title, about, [], parts)


def _verdicts(pictures: Pictures, results: Sequence[DataResult]) -> list[Any]:
    head = ["data", "chosen on validation", *(f"over {words}" for words in _OVER.values())]
    caption = "The personal method that validation chooses, and its gain in test score, EV-all."
    blocks: list[Any] = [Table(f"{caption} {_BETWEEN}", head, [_verdict(result) for result in results])]
    named = results[0].named  # all data sets of a study have one
    for baseline, words in _OVER.items():
        panels = {}
        for result in results:
            found = [(name, result.gain(name, baseline)) for name in result.records]
            panels[result.title] = [(result.titles[n], result.algorithms[n], *g) for n, g in found if g is not None]
        title = f"Gain over {words}"
        if named.is_fraction:
            caption = f"Points of test score, EV-all. {_BETWEEN} Grey: less than {_bound(named)}."
        else:
            caption = f"How much less {in_unit(named)} on test examples, EV-all. {_BETWEEN}"
        blocks.append(pictures.draw(title, caption, forest, panels, _unit(named), BOUND if named.is_fraction else None))
    return blocks


def _verdict(result: DataResult) -> list[str]:
    """A line of the table of verdicts: the data, the method that validation chooses, its gain over each baseline."""
    if result.best is None:
        return [result.title, "none", *[""] * len(_OVER)]
    cells = []
    for baseline in _OVER:
        found = result.gain(result.best, baseline)
        cells.append(
            f"{found.verdict(result.bound(baseline))} ({_number(result.named, *found, sign=True)})" if found else ""
        )
    return [result.title, result.titles[result.best], *cells]


def markdown(title: str, results: Sequence[DataResult], about: Mapping[str, str], made_by: str) -> str:
    """The same in Markdown, without pictures."""
    shown = files.markdown
    lines = [f"# {shown(title)}", "", made_by, ""]
    lines += [f"* {shown(text)}" for result in results for text in result.sentences()]
    lines += ["", *(f"* {name}: {shown(text)}" for name, text in about.items())]
    for result in results:
        lines += ["", f"## {shown(result.title)}"]
        for table in tables(result):
            cells = [table.head, ["---"] * len(table.head), *table.rows]
            lines += ["", shown(table.caption), "", *("| " + " | ".join(map(shown, row)) + " |" for row in cells)]
    return "\n".join(lines) + "\n"
