"""A plot of new clients' score, such as the accuracy, while they adapt."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from tfpfl.runs import statistics
from tfpfl.runs.metrics import in_unit, times
from tfpfl.studies.new_clients import Adapted, check_one_score
from tfpfl.studies.plots.style import Drawing, drawable, put_legend, with_diverged
from tfpfl.studies.run_groups import span


def new_clients(results: Sequence[Adapted]) -> Figure:
    """Draws the mean score of new clients over epochs, with its 95 % interval over clients: one line for each run.

    Args:
        results: one for each run, from `adapt_new_clients` or `adapt_clients`.
    """
    named = check_one_score(results)
    factor, most = times(named), 100 if named.is_fraction else np.inf
    figure = Drawing(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for r in results:
        epochs, mean, half = np.arange(len(r.means)), drawable(factor * r.means), drawable(factor * r.intervals)
        label = with_diverged(r.name, r.means, "epoch")
        (line,) = axes.plot(epochs, mean, marker="o", markersize=3, label=label)
        low, high = np.clip([mean - half, mean + half], 0, most)
        axes.fill_between(epochs, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    people = span([statistics.num_tested(r.score[:, 0]) for r in results])
    axes.set(xlabel="epochs of adapting", ylabel=f"{results[0].split} {in_unit(named)}, {people} new clients")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    put_legend(figure, axes)
    return figure
