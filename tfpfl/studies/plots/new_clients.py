"""A plot of new clients' accuracy while they adapt."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from tfpfl.runs import statistics
from tfpfl.studies.new_clients import Adapted
from tfpfl.studies.plots.style import Drawing, put_legend


def new_clients(results: Sequence[Adapted]) -> Figure:
    """Draws the mean accuracy of new clients over epochs, with its 95 % interval over clients: one line for each run.

    Args:
        results: one for each run, from `adapt_new_clients` or `adapt_clients`.
    """
    figure = Drawing(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for r in results:
        epochs, mean, half = np.arange(len(r.means)), 100 * r.means, 100 * r.intervals
        (line,) = axes.plot(epochs, mean, marker="o", markersize=3, label=r.name)
        low, high = np.clip([mean - half, mean + half], 0, 100)
        axes.fill_between(epochs, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    people = statistics.num_tested(results[0].accuracy[:, 0])
    axes.set(xlabel="epochs of adapting", ylabel=f"{results[0].split} accuracy in %, {people} new clients")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    put_legend(figure, axes)
    return figure
