"""A figure of FedAMP's practical split (arXiv 2007.03797): single clients' accuracies, and who takes from whom.

For each data set it shows the accuracies of single clients by method. For methods with weights between clients it also
shows these weights, with the clients ordered by group: a block on the diagonal is a group that the method has found.
"""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from tfpfl.algorithms import get_method
from tfpfl.data.partitioners import GROUP_PRESETS
from tfpfl.runs import statistics
from tfpfl.runs.protocols import protocol
from tfpfl.studies.plots import style
from tfpfl.studies.plots.style import STYLE, TICKS, in_style
from tfpfl.studies.records import Record
from tfpfl.studies.run_groups import clients

PROTOCOL = protocol("fedamp")


def measure(runs: dict, **_) -> dict:
    """Reads accuracies and weights between clients from the runs.

    Args:
        runs: {'column | method': run folder}, of runs on `grouped_dominant` splits.

    Returns:
        {column: {"sizes": numbers of clients in the groups, "accuracy": {method: [n] in [0, 1]}, "attention": {method:
        [I, I]}, "rounds": {method: number of rounds}}}.
    """
    data: dict[str, Any] = {}
    for name, folder in runs.items():
        column, record = name.split(" | ")[0], Record.read(folder)
        groups = GROUP_PRESETS[record.config.partition_args["groups"]]
        sizes = [group.num_clients for group in groups]
        found = data.setdefault(column, {"sizes": sizes, "accuracy": {}, "attention": {}, "rounds": {}})
        method = record.config.algorithm
        found["accuracy"][method] = clients(record, PROTOCOL).tolist()
        found["rounds"][method] = record.rounds
        if weights := record.matrices():
            (matrix,) = weights.values()
            found["attention"][method] = np.asarray(matrix, np.float64).round(8).tolist()
    return data


def share(matrix, sizes) -> float:
    """The part of the weight between different clients that stays within their groups, in [0, 1].

    Args:
        matrix: float [I, I]; row i is what client i takes from each client. The diagonal is ignored.
        sizes: numbers of clients in the groups, which stand in this order.
    """
    matrix, group = np.array(matrix, np.float64), np.repeat(np.arange(len(sizes)), sizes)
    np.fill_diagonal(matrix, 0)
    return float(matrix[group[:, None] == group].sum() / matrix.sum())


def numbers(data: dict) -> dict:
    """{name: {"value", "half"}}: mean accuracies, and the part of the weight within groups, in %."""
    told = {}
    for column, found in data.items():
        for method, values in found["accuracy"].items():
            mean, half = statistics.mean_over_clients(values), statistics.ci95(values)
            told[f"{column}: {get_method(method).title} (%)"] = {"value": 100 * mean, "half": 100 * half}
        for method, matrix in found["attention"].items():
            title = get_method(method).title
            told[f"{column}: weight in the group, {title} (%)"] = {"value": 100 * share(matrix, found["sizes"])}
        if found["attention"]:
            equal = share(np.ones((sum(found["sizes"]),) * 2), found["sizes"])
            told[f"{column}: weight in the group, equal weights (%)"] = {"value": 100 * equal}
    return told


@in_style
def draw(data: dict) -> Figure:
    """Draws a column of panels for each data set: boxes of the clients' accuracies, and heat maps below."""
    methods = max(len(found["accuracy"]) for found in data.values())
    maps = list(dict.fromkeys(m for found in data.values() for m in found["attention"]))
    heights = [1.3 + 0.3 * methods, *([3.4] * len(maps))]
    width = STYLE["figure.figsize"][0]
    figure = Figure(figsize=(width * len(data), sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), len(data), squeeze=False, height_ratios=heights)
    for place, (column, found) in enumerate(data.items()):
        _boxes(panels[0, place], found["accuracy"])
        panels[0, place].set_title(column)
        for axes, method in zip(panels[1:, place], maps, strict=True):
            if method not in found["attention"]:
                axes.set_axis_off()
                continue
            image = _weights(axes, found["attention"][method], found["sizes"])
            rounds = found["rounds"][method]
            axes.set_title(f"{get_method(method).title}, after {rounds} round{'s' * (rounds > 1)}")
            figure.colorbar(image, ax=axes, label="weight of j's model for i").ax.tick_params(labelsize=TICKS)
    return figure


def _boxes(axes, accuracy: dict) -> None:
    """Draws a row for each method: the middle half, the median, and lines to the worst and the best client."""
    for place, (method, values) in enumerate(accuracy.items()):
        color = style(method).color
        low, first, median, third, high = np.quantile(100 * np.asarray(values), [0, 0.25, 0.5, 0.75, 1])
        axes.hlines(place, low, high, color=color, linewidth=1)
        axes.barh(place, third - first, left=first, height=0.6, facecolor="white", edgecolor=color, linewidth=1.1)
        axes.vlines(median, place - 0.3, place + 0.3, color=color, linewidth=2.4, zorder=3)
    axes.set_yticks(range(len(accuracy)), [get_method(method).title for method in accuracy])
    axes.set_ylim(len(accuracy) - 0.5, -0.5)
    axes.tick_params(labelsize=TICKS)
    axes.grid(False, axis="y")
    axes.set_xlabel("test accuracy of single clients (%), best round on test")


def _weights(axes, matrix, sizes):
    """Draws a heat map without the clients' own weights, which are often so large that all others look the same."""
    matrix = np.asarray(matrix, np.float64)
    shown = np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)
    colors = matplotlib.colormaps["cividis"].with_extremes(bad="#e4e4e4")
    image = axes.imshow(shown, cmap=colors, interpolation="none")
    for edge in np.cumsum(sizes)[:-1]:
        axes.axhline(edge - 0.5, color="white", linewidth=0.8)
        axes.axvline(edge - 0.5, color="white", linewidth=0.8)
    axes.grid(False)
    axes.tick_params(labelsize=TICKS)
    axes.set(xlabel="client j, by group", ylabel="client i, by group")
    return image
