"""Draws the learning curves of an experiment: for each column of its table, loss above and accuracy below.

The loss is what a client reports in its visit: before its last local step, on the examples of this step.
"""

import textwrap
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from tfpfl.checks import InvalidArgument
from tfpfl.runs import statistics
from tfpfl.runs.protocols import protocol
from tfpfl.studies.papers.experiment import Experiment
from tfpfl.studies.papers.ledger import finished, method_title
from tfpfl.studies.plots import style
from tfpfl.studies.plots.style import LINES, PALETTE, in_style
from tfpfl.studies.records import Record
from tfpfl.studies.run_groups import RunGroup, sides

WIDTH = 2.6  # inches a panel
CHARACTERS = 15  # of the title in an inch
_LABELS = {
    "rounds": "round",
    "seconds": "seconds of the rounds' work",
    "flops": "FLOPs of all clients",
    "bytes": "bytes sent and received",
}


@in_style
def draw(
    experiment: Experiment, records: dict[tuple[str, str, str], list[Record]], over: Sequence[str] = ("rounds",)
) -> Figure:
    """Draws the learning curves of an experiment's runs: for each column, one pair of panels over each of `over`.

    A seed with fewer rounds than another of its cell is not drawn, since a mean of the rounds that all have would cut
    the others short. The title names it.

    Args:
        experiment: gives the columns and the protocol.
        records: {(column, method, label): the records of the seeds}, from `records_of`.
        over: 'rounds', or what all clients have spent so far: 'seconds', 'flops' or 'bytes', on logarithmic axes.

    Raises:
        InvalidArgument: there are no records, or a run has no such numbers.
    """
    columns = [c for c in dict.fromkeys(cell.column for cell in experiment.cells) if any(k[0] == c for k in records)]
    if not columns:
        raise InvalidArgument(f"there is nothing to draw: nothing of {experiment.title} was run")
    panels = list(product(columns, over))
    labels = list(dict.fromkeys(key[2] for key in records))
    figure = Figure(figsize=(WIDTH * len(panels) + 0.6, 5.2), layout="constrained")
    axes = figure.subplots(2, len(panels), sharex="col", sharey="row", squeeze=False)
    lines, shorter = {}, []
    for (column, method, label), runs in records.items():
        most = max(record.rounds for record in runs)
        seeds = [record for record in runs if record.rounds == most]
        shorter += [(column, method_title(method, label), r) for r in runs if r.rounds < most]
        look = style(method)
        color, line = look.color, look.linestyle
        if label:  # one method in several settings: a colour for each
            color, line = PALETTE[labels.index(label) % len(PALETTE)], LINES[labels.index(label) // len(PALETTE)]
        name = method_title(method, label)
        how = {"color": color, "linestyle": line, "label": name}
        losses = [{r["round"]: r["loss"] for r in seed.history if "loss" in r} for seed in seeds]
        scores = [seed.curve(protocol(experiment.protocol)) for seed in seeds]
        for what in over:
            above, below = axes[:, panels.index((column, what))]
            spent = _spent(seeds, what)
            _line(above, losses, 1, spent, how)
            lines[name] = _line(below, scores, 100, spent, how)
    for place, (column, what) in enumerate(panels):
        axes[0, place].set(title=column, yscale="log")
        axes[1, place].set(xlabel=_LABELS[what], xscale="linear" if what == "rounds" else "log")
    axes[0, 0].set(ylabel="loss of the last local step (nats)")
    axes[1, 0].set(ylabel="test accuracy (%)")
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=max(1, min(len(lines), 2 * len(panels))))
    words = str(protocol(experiment.protocol)).split("; ")
    title = f"{experiment.title} ({experiment.source})\naccuracy: {words[0]}; {words[2]}"
    everyone = RunGroup("", [record for seeds in records.values() for record in seeds])
    if told := ", ".join(s.words for s in sides(everyone, protocol(experiment.protocol)._replace(when="last"))):
        title += f"\nclients in the last round: {told}"
    if shorter:
        named = (f"{name} in {column}, seed {r.config.seed} ({r.rounds} rounds)" for column, name, r in shorter)
        title += f"\nnot drawn: {', '.join(named)}"
    width = int(CHARACTERS * figure.get_figwidth())
    figure.suptitle("\n".join(textwrap.fill(line, width) for line in title.split("\n")), fontsize=9)
    return figure


def _spent(seeds: list[Record], what: str) -> dict[int, float]:
    """{round: what a run has spent by then}, the mean over the seeds that have the round."""
    by_round: dict[int, list[float]] = {}
    for record in seeds:
        for row, spent in zip(record.history, record.spent(what), strict=True):
            by_round.setdefault(row["round"], []).append(float(spent))
    return {t: float(np.mean(found)) for t, found in by_round.items()}


def _line(axes, seeds: list[dict], times: float, spent: dict[int, float], how: dict):
    """Draws the mean over seeds in the rounds that all seeds have, with a 95 % band if there are several seeds.

    A method that spends nothing, as Local over bytes, is a level line at its last value: a logarithmic axis has no 0.
    """
    rounds = sorted(set.intersection(*(set(found) for found in seeds)))
    mean, half = np.array([statistics.over_seeds([found[t] for found in seeds]) for t in rounds]).reshape(-1, 2).T
    xs = [spent[t] for t in rounds]
    if xs and not any(xs):
        return axes.axhline(times * mean[-1], **how)
    (line,) = axes.plot(xs, times * mean, **how)
    if len(seeds) > 1:
        axes.fill_between(xs, times * (mean - half), times * (mean + half), color=how["color"], alpha=0.15, lw=0)
    return line


def records_of(experiment: Experiment, folder_of, seeds: Iterable[int]) -> dict[tuple[str, str, str], list[Record]]:
    """{(column, method, label): records of the seeds} of all finished runs of an experiment.

    Args:
        experiment: gives the cells.
        folder_of: function (cell, seed) -> its run folder.
        seeds: the seeds to look for.
    """
    found = {}
    for cell in experiment.cells:
        there = [finished(Path(folder_of(cell, seed))) for seed in seeds]
        if there := [record for record in there if record is not None]:
            found[cell.column, cell.method, cell.label] = there
    return found
