"""A heat map of how much clients take from each other."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from tfpfl.checks import InvalidArgument
from tfpfl.studies.plots.federation import NAMED
from tfpfl.studies.plots.style import TICKS, in_style, literal, make_figure, put_title, short


@in_style
def heatmap(
    matrix,
    *,
    title: str = "",
    label: str = "weight of j's model for i",
    own: bool = False,
    edges: Sequence[int] = (),
    caption: str = "",
    names: Sequence[str] = (),
) -> Figure:
    """Draws how much each client takes from each other: FedAMP's attention, PGFed's A, FedFomo's P.

    Args:
        matrix: float [I, I], such as one of `Record.matrices`; row i is what client i takes from each client.
        title: the title.
        label: what an entry of the matrix is; it stands beside the scale.
        own: whether to show the diagonal. Its weights are often so large that all others look the same.
        edges: positions at which a line separates groups of clients, such as 5 for a line before client 5.
        caption: small text under the title.
        names: the names of the I clients, which stand beside their numbers if there are at most 40. Default: numbers.

    Raises:
        InvalidArgument: the matrix is not square, or empty, or there is not one name for each client.
    """
    matrix = np.asarray(matrix, np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise InvalidArgument(f"who listens to whom is a square matrix [I, I], found shape {matrix.shape}")
    if len(names) not in (0, len(matrix)):
        raise InvalidArgument(f"there must be one name for each of the {len(matrix)} clients, found {len(names)}")
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
    if 0 < len(names) <= NAMED:
        told = [short(f"{i}: {name}", 24) for i, name in enumerate(names)]
        axes.set_xticks(range(len(told)), told, rotation=90, fontsize=TICKS)
        axes.set_yticks(range(len(told)), told, fontsize=TICKS)
    axes.grid(False)
    axes.set(xlabel="client j", ylabel="client i")
    figure.colorbar(image, label=literal(label), shrink=0.85).ax.tick_params(labelsize=TICKS)
    put_title(axes, title, caption)
    return figure
