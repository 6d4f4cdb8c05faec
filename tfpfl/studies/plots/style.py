"""How every plot looks: one look for one algorithm, colours for every sight, and words in the margins."""

import textwrap
from functools import wraps
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from tfpfl.algorithms import ALGORITHMS, get_method
from tfpfl.runs.protocols import Protocol

# The defaults of all pictures. As wide as a column of text, so that a telephone shows them without making text small.
STYLE: dict[str, Any] = {
    "figure.figsize": (4.8, 3.2),  # inches
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 200,
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
TICKS = 8.5  # points


# Searched for: far apart for usual sight and for those who see no red or no green, and with a contrast of 3 to white at
# least, for thin lines. 8 colours x 4 kinds of line are 32.
PALETTE = ("#000000", "#f76617", "#2a60ff", "#3fa66c", "#000095", "#910008", "#7d55b2", "#7398a9")


# Where every further eight algorithms begin in it, so that eight that are often compared have eight colours: PFLEGO,
# FedAvg, Local, FedAvg-FT, FedPer, FedRep, Ditto and FedAMP.
TURNS = (0, 4, 7, 3)
LINES = ("solid", "dashed", "dotted", "dashdot")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")


class Style(NamedTuple):
    """What an algorithm looks like."""

    color: str
    linestyle: str
    marker: str


def style(algorithm: str, variant: int = 0) -> Style:
    """Colour, line and marker of an algorithm: by its place in `ALGORITHMS`, whatever else is drawn.

    Args:
        algorithm: a name in `ALGORITHMS`.
        variant: of several configurations of one algorithm, which differ in their markers.

    Raises:
        ValueError: an unknown algorithm.
    """
    get_method(algorithm)
    block, place = divmod(list(ALGORITHMS).index(algorithm), len(PALETTE))
    color = PALETTE[(place + TURNS[block]) % len(PALETTE)]
    return Style(color, LINES[block], MARKERS[(block + variant) % len(MARKERS)])


def in_style(function):
    """With our defaults, and the user's own for what they leave open."""

    @wraps(function)
    def draw(*arguments, **named):
        with matplotlib.rc_context(STYLE):
            return function(*arguments, **named)

    return draw


def words(protocol: Protocol, rounds: str = "") -> str:
    """A protocol in words, with other rounds than its own where a picture shows all of them."""
    parts = str(protocol).split("; ")
    if rounds:
        parts[Protocol._fields.index("when")] = rounds
    return "; ".join(parts)


GLYPHS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "*": "★", "<": "◀", ">": "▶"}


def make_figure(height: float | None = None):
    width, usual = STYLE["figure.figsize"]
    figure = Figure(figsize=(width, height or usual), layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=TICKS)
    return figure, axes


def put_title(axes, title: str, caption: str) -> None:
    """The title, and how it was measured in small letters below it."""
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


def put_rows(axes, labels) -> None:
    """A row for every label, the first on top."""
    axes.set_yticks(range(len(labels)), [literal(label) for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def put_legend(figure, axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    labels = [literal(label) for label in labels]
    columns = max(1, min(len(labels), 60 // (max(map(len, labels)) + 7)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.8)


def bar(half: float) -> float | None:
    return None if np.isnan(half) else half


def thousands(value: float, _place=None) -> str:
    """1000000.0 -> '1,000,000'."""
    return f"{value:,.10g}"


def byte_unit(largest: float) -> tuple[str, float]:
    """(bytes' unit, what to divide by), in powers of 1000."""
    place = min(int(np.log10(max(largest, 1)) // 3), 4)
    return ("B", "kB", "MB", "GB", "TB")[place], 1000.0**place


def fill(text: str) -> str:
    return textwrap.fill(literal(text), 64)


def literal(text: str) -> str:
    """As it is: matplotlib would read what stands between two dollars as a formula, and fail on a bad one."""
    return str(text).replace("$", r"\$")
