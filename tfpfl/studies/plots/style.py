"""What all plots have in common: sizes and fonts, the colour of each algorithm, titles and legends."""

import textwrap
from functools import wraps
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from tfpfl.algorithms import ALGORITHMS, get_method
from tfpfl.checks import one_line
from tfpfl.runs.protocols import Protocol

# matplotlib's settings for all plots. They are as wide as a column of text, so that a phone shows them unreduced.
STYLE: dict[str, Any] = {
    "figure.figsize": (4.8, 3.2),  # inches
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}
DPI = 200  # pixels an inch of a PNG file: twice matplotlib's default
TICKS = 8.5  # font size of the numbers on an axis, in points


# These colours were searched by computer. They are far apart for usual sight and for colour-blind readers (no red, no
# green), and have a contrast of at least 3 to white, for thin lines. With 6 kinds of line there are 48 looks.
PALETTE = ("#000000", "#f76617", "#2a60ff", "#3fa66c", "#000095", "#910008", "#7d55b2", "#7398a9")


# Each further eight algorithms start at another colour of the palette. So eight algorithms that are often compared have
# eight colours: PFLEGO, FedAvg, Local, FedAvg-FT, FedPer, FedRep, Ditto and FedAMP.
TURNS = (0, 4, 7, 3, 5, 2)
LINES = ("solid", "dashed", "dotted", "dashdot", (0, (8, 1.5)), (0, (4, 1.5, 1, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")


class Style(NamedTuple):
    """How an algorithm is drawn: colour, kind of line and marker, as matplotlib names them."""

    color: str
    linestyle: str | tuple
    marker: str


def style(algorithm: str, variant: int = 0, *, own: bool = False) -> Style:
    """The colour, line and marker of an algorithm: the same in all plots, given by its place in `ALGORITHMS`.

    Args:
        algorithm: a name in `ALGORITHMS`.
        variant: number of the setting, from 0; settings of one algorithm have different markers.
        own: whether the algorithm is a method of the user's own. Then `variant` alone gives colour, line and marker,
            and they are those of no method in `ALGORITHMS` while there are some left.

    Raises:
        InvalidArgument: an unknown algorithm.
    """
    if own:
        index = (len(ALGORITHMS) + variant) % (len(PALETTE) * len(LINES))
    else:
        get_method(algorithm)
        index = list(ALGORITHMS).index(algorithm)
    block, place = divmod(index, len(PALETTE))
    color = PALETTE[(place + TURNS[block]) % len(PALETTE)]
    return Style(color, LINES[block], MARKERS[(block + variant) % len(MARKERS)])


class Drawing(Figure):
    """A figure whose PNG files have twice matplotlib's default resolution, unless `savefig` is given a `dpi`."""

    def savefig(self, fname: Any, **how: Any) -> None:
        """Writes the figure to a file; see matplotlib's `Figure.savefig`."""
        super().savefig(fname, **{"dpi": DPI, **how})


def in_style(function):
    """A decorator: draws with the settings in `STYLE`. The user's settings hold for everything else."""

    @wraps(function)
    def draw(*arguments, **named):
        with matplotlib.rc_context(STYLE):
            return function(*arguments, **named)

    return draw


def words(protocol: Protocol, rounds: str = "") -> str:
    """A protocol in words. `rounds` replaces the protocol's rounds, for plots that show all rounds."""
    parts = str(protocol).split("; ")
    if rounds:
        parts[Protocol._fields.index("when")] = rounds
    return "; ".join(parts)


GLYPHS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "*": "★", "<": "◀", ">": "▶"}


def make_figure(height: float):
    """(figure, axes): a figure with one panel, `height` inches high."""
    figure = Drawing(figsize=(STYLE["figure.figsize"][0], height), layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=TICKS)
    return figure, axes


def put_title(axes, title: str, caption: str) -> None:
    """Writes the title of a panel, and the caption in small letters below it."""
    small = fill(caption) if caption else ""
    if small:
        axes.annotate(
            small,
            (0, 1),
            (0, 4),
            xycoords="axes fraction",
            textcoords="offset points",
            va="bottom",
            fontsize=7.5,
            color="#555555",
        )
    axes.set_title(literal(title), pad=6 + (9.5 * (small.count("\n") + 1) if small else 0))


def caption_height(caption: str) -> float:
    """Inches that a caption needs beyond the first two of its lines, for which figures have room."""
    return 0.13 * max(fill(caption).count("\n") - 1, 0)


def put_rows(axes, labels) -> None:
    """Labels the y axis with one row for each label, the first on top."""
    axes.set_yticks(range(len(labels)), [_row(label) for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _row(label: str) -> str:
    return textwrap.fill(short(label, 64), 30)


def row_lines(labels) -> int:
    """The number of lines of the longest of these labels; `put_rows` breaks long ones."""
    return max(_row(label).count("\n") + 1 for label in labels)


def put_legend(figure, axes) -> None:
    """Puts the legend of a panel below the figure, in as many columns as fit; a long one makes the figure higher."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [short(label, 64) for label in labels]
    columns = max(1, min(len(labels), 60 // (max(map(len, labels)) + 7)))
    figure.set_figheight(figure.get_figheight() + 0.17 * max(-(-len(labels) // columns) - 3, 0))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.8)


def with_diverged(label: str, values: np.ndarray, of: str = "") -> str:
    """A label that says how many of the values are infinite, because a client diverged: they cannot be drawn."""
    broken = int(np.isinf(values).sum())
    many = f"{of}s " if of and broken > 1 else f"{of} " if of else ""
    return f"{label}, {broken} {many}diverged" if broken else label


def drawable(values: np.ndarray) -> np.ndarray:
    """The values with NaN, which leaves a gap, in the place of infinity."""
    return np.where(np.isinf(values), np.nan, values)


def bar(value: float, half: float, highest: float) -> list[list[float]] | None:
    """An interval as matplotlib's `xerr`, cut to the possible values from 0 to `highest`.

    None, for no bar, if it is NaN or infinite.
    """
    if not np.isfinite(half):
        return None
    return [[min(half, max(value, 0.0))], [min(half, max(highest - value, 0.0))]]


def byte_unit(largest: float) -> tuple[str, float]:
    """(unit, its number of bytes) for numbers up to `largest`, such as ('MB', 1e6)."""
    place = min(int(np.log10(max(largest, 1)) // 3), 4)
    return ("B", "kB", "MB", "GB", "TB")[place], 1000.0**place


def fill(text: str) -> str:
    """A caption in lines of at most 64 characters."""
    return textwrap.fill(literal(text), 64)


def literal(text: str) -> str:
    """Text that matplotlib writes as it is; see `one_line`. It would read text between two dollar signs as a formula.

    Line breaks stay, because a title may have them.
    """
    return one_line(text, keep="\n").replace("$", r"\$")


def short(label: str, most: int) -> str:
    """A label as `literal` text in one line of at most `most` characters: a long one leaves no room for the drawing."""
    return literal(one_line(label, most))
