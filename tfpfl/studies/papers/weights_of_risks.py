"""How PGFed's matrix A changes during a run, and how this depends on the clients' numbers of examples.

A_ij is the weight of client j's risk for client i. The paper (arXiv 2212.01448) finds: the more examples a client has,
the more weight the others give to its risk (the mean of its column of A rises), and the less weight it gives to theirs
(the mean of its row falls).
"""

import csv
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from tfpfl.checks import InvalidArgument
from tfpfl.studies.plots.style import PALETTE, STYLE, TICKS, in_style
from tfpfl.studies.records import Record

# (axis of the mean, label, marker). Column j: the weights that clients give to client j. Row i: those that i gives.
MEANS = {"column": (0, "column mean by n_j", "o"), "row": (1, "row mean by n_i", "s")}


def measure(runs: dict, **_) -> dict:
    """Reads how A changed from the first to the last evaluated round of a run.

    Args:
        runs: {name: run folder}, one run of a method with a matrix 'A'.

    Returns:
        {"rounds": [first, last], "change": [I, I], "num_examples": [I]}.

    Raises:
        InvalidArgument: the run has no matrix A, or saved it in fewer than two rounds.
    """
    (folder,) = runs.values()
    record = Record.read(folder)
    rounds = record.matrix_rounds
    if len(rounds) < 2:
        raise InvalidArgument(f"{folder}: how A changes needs two evaluated rounds that have it, found {len(rounds)}")
    first, last = (record.matrices(t).get("A") for t in (rounds[0], rounds[-1]))
    if first is None:
        raise InvalidArgument(f"{folder}: {record.title} has no matrix A")
    with open(Path(folder) / "clients.csv", newline="", encoding="utf-8") as file:
        examples = [int(row["num_examples"]) for row in csv.DictReader(file)]
    change = np.asarray(last, np.float64) - first
    return {"rounds": [rounds[0], rounds[-1]], "change": change.tolist(), "num_examples": examples}


def regressions(data: dict) -> dict:
    """{'column' | 'row': scipy's linear regression of this mean of the change on the number of examples}.

    Raises:
        InvalidArgument: all clients have the same number of examples, so there is no slope.
    """
    examples, change = data["num_examples"], np.asarray(data["change"], np.float64)
    if len(set(examples)) < 2:
        raise InvalidArgument(
            f"all clients have {examples[0]} examples: how A depends on their number cannot be computed"
        )
    return {name: stats.linregress(examples, change.mean(axis)) for name, (axis, _, _) in MEANS.items()}


def numbers(data: dict) -> dict:
    """{name: {"value", "p"}}: change of A for 1000 more examples, and the p-value of 'the slope is 0'."""
    return {
        f"slope of the {MEANS[name][1]} (per 1000 examples)": {"value": 1000 * line.slope, "p": line.pvalue}
        for name, line in regressions(data).items()
    }


@in_style
def draw(data: dict) -> Figure:
    """Draws the change of A as a heat map; below, the means of its columns and rows by the number of examples."""
    examples, change = np.array(data["num_examples"]), np.asarray(data["change"], np.float64)
    first, last = data["rounds"]
    figure = Figure(figsize=(STYLE["figure.figsize"][0], 5.8), layout="constrained")
    axes = figure.subplot_mosaic([["map", "map"], ["column", "row"]], height_ratios=[1.7, 1])
    limit = float(np.abs(change).max()) or 1.0
    image = axes["map"].imshow(change, cmap="PuOr", vmin=-limit, vmax=limit, interpolation="none")
    axes["map"].grid(False)
    axes["map"].set(xlabel="client j", ylabel="client i", title=f"Change of A, rounds {first} to {last}")
    figure.colorbar(image, ax=axes["map"], label="change of A_ij").ax.tick_params(labelsize=TICKS)
    for name, line in regressions(data).items():
        axis, told, marker = MEANS[name]
        at = np.array([examples.min(), examples.max()])
        axes[name].scatter(examples, change.mean(axis), s=14, marker=marker, color=PALETTE[2], linewidth=0)
        axes[name].plot(at, line.intercept + line.slope * at, color=PALETTE[1])
        axes[name].set_title(f"{told}\n{1000 * line.slope:+.2g} / 1000, p = {line.pvalue:.2g}", fontsize=8.5)
        axes[name].set_xlabel("training examples")
        axes[name].locator_params(nbins=4)
    axes["column"].set_ylabel("mean change")
    for each in axes.values():
        each.tick_params(labelsize=TICKS)
    return figure
