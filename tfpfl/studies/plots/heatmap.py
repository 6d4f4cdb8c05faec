"""A matrix of who listens to whom."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from tfpfl.checks import InvalidArgument
from tfpfl.studies.plots.style import TICKS, in_style, literal, make_figure, put_title


@in_style
def heatmap(
    matrix,
    *,
    title: str = "",
    label: str = "weight of j's model for i",
    own: bool = False,
    edges: Sequence[int] = (),
    caption: str = "",
) -> Figure:
    """Who listens to whom: FedAMP's attention, PGFed's A, FedFomo's P.

    Args:
        matrix: [I, I], of `Record.matrices`: row i is what client i takes from others.
        title: above it.
        label: what an entry is.
        own: show the diagonal too, whose weights are often so large that the others look all the same.
        edges: positions between groups of clients, where lines are drawn.
        caption: under the title.

    Raises:
        ValueError: not a square matrix.
    """
    matrix = np.asarray(matrix, np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise InvalidArgument(f"who listens to whom is a square matrix [I, I], found shape {matrix.shape}")
    shown = matrix if own else np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)
    figure, axes = make_figure(height=4.0)
    signed = np.nanmin(shown, initial=0) < 0
    colors = matplotlib.colormaps["PuOr" if signed else "cividis"].with_extremes(bad="#e4e4e4")
    limit = np.nanmax(np.abs(shown), initial=0) if signed else None
    image = axes.imshow(shown, cmap=colors, vmin=-limit if signed else None, vmax=limit, interpolation="none")
    for edge in edges:
        axes.axhline(edge - 0.5, color="white", linewidth=0.8)
        axes.axvline(edge - 0.5, color="white", linewidth=0.8)
    for each in (axes.xaxis, axes.yaxis):
        each.get_major_locator().set_params(integer=True)
    axes.grid(False)
    axes.set(xlabel="client j", ylabel="client i")
    figure.colorbar(image, label=literal(label), shrink=0.85).ax.tick_params(labelsize=TICKS)
    put_title(axes, title, caption)
    return figure
