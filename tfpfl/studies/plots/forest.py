"""A plot of means with their intervals, one row each: what methods gain over a baseline, by data set."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from tfpfl.algorithms import ALGORITHMS
from tfpfl.checks import InvalidArgument
from tfpfl.studies.plots.style import TICKS, Drawing, in_style, put_rows, put_title, style


@in_style
def forest(
    panels: Mapping[str, Sequence[tuple[str, str, float, float]]], xlabel: str, bound: float | None = None
) -> Figure:
    """Draws means as dots with their intervals, beside a line at zero; a panel for each entry.

    Args:
        panels: {title: rows}, each row (label, algorithm, mean, half of the interval); infinite for no interval.
        xlabel: what the numbers are.
        bound: a grey band from -bound to bound, within which a difference does not matter.

    Raises:
        InvalidArgument: there is nothing to draw.
    """
    panels = {title: list(rows) for title, rows in panels.items() if rows}
    if not panels:
        raise InvalidArgument("there is no gain to draw: no method has runs beside those of the baseline")
    most = max(len(rows) for rows in panels.values())
    figure = Drawing(figsize=(4.8, (0.75 + 0.26 * most) * len(panels)), layout="constrained")
    every = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    shown = [(m, h if np.isfinite(h) else 0.0) for rows in panels.values() for _, _, m, h in rows if np.isfinite(m)]
    ends = [(m - h, m + h) for m, h in shown] or [(-1.0, 1.0)]
    low, high = min(e[0] for e in ends), max(e[1] for e in ends)
    margin = 0.05 * max(high - low, 1e-9)
    for axes, (title, rows) in zip(every, panels.items(), strict=True):
        axes.tick_params(labelsize=TICKS)
        axes.axvline(0, color="#555555", linewidth=1)
        if bound:
            axes.axvspan(-bound, bound, color="#dddddd", alpha=0.6, linewidth=0)
        for i, (_, algorithm, mean, half) in enumerate(rows):
            look = style(algorithm, own=algorithm not in ALGORITHMS)
            bar = half if np.isfinite(half) else None
            axes.errorbar(mean, i, xerr=bar, fmt=look.marker, color=look.color, capsize=2.5, linewidth=1.4)
        put_rows(axes, [label for label, *_ in rows])
        put_title(axes, title, "")
    every[0].set_xlim(min(low, 0) - margin, max(high, 0) + margin)
    every[-1].set_xlabel(xlabel)
    return figure
