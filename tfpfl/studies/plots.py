"""Pictures of runs: accuracy by rounds, bytes, passes or seconds; clients; fairness; gains; who listens to whom.

Every function takes `Record`s, or a matrix, and gives a matplotlib Figure, made without pyplot: nothing stays open.
`figure.savefig("curves.svg")` writes PNG, SVG or PDF, by the ending. Runs that differ in their seed alone are one line
or one row: the mean over the seeds, with the 95 % interval of `statistics.over_seeds`. How the numbers were measured is
said by a `Protocol`, which is written under the title. An algorithm looks the same wherever it is drawn.
"""

import textwrap
from collections.abc import Sequence
from functools import wraps
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from tfpfl.algorithms import ALGORITHMS, algorithm_row
from tfpfl.checks import InvalidArgument, unknown
from tfpfl.runs import statistics
from tfpfl.runs.protocols import EV_ALL, Protocol
from tfpfl.studies.records import SPENT, Record
from tfpfl.studies.run_groups import clients, measured, paired, series

# The defaults of all pictures. As wide as a column of text, so that a telephone shows them without making text small.
STYLE = {
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
    algorithm_row(algorithm)
    block, place = divmod(list(ALGORITHMS).index(algorithm), len(PALETTE))
    color = PALETTE[(place + TURNS[block]) % len(PALETTE)]
    return Style(color, LINES[block], MARKERS[(block + variant) % len(MARKERS)])


def _drawn(function):
    """With our defaults, and the user's own for what they leave open."""

    @wraps(function)
    def draw(*arguments, **named):
        with matplotlib.rc_context(STYLE):
            return function(*arguments, **named)

    return draw


@_drawn
def curves(
    records: Sequence[Record],
    x: str = "rounds",
    y: str = "accuracy",
    protocol: Protocol = EV_ALL,
    *,
    caption: bool = True,
) -> Figure:
    """How runs come along, with a band of the 95 % interval where there are several seeds.

    Args:
        records: of `Record.read`.
        x: 'rounds'; or, added up over all rounds so far and all clients: 'bytes' (down and up), 'passes' (of clients'
            examples through the backbone, forward and backward), 'seconds' (of the rounds' work). A run without
            bytes is a level line.
        y: 'accuracy' or 'loss' by the protocol in every evaluated round, or 'training loss', the mean over the round's
            clients in every round.
        protocol: which model, clients, mean and split; `when` is not looked at.
        caption: write the protocol under the title.

    Raises:
        ValueError: an unknown axis, one that a run has nothing of, or no points at all.
    """
    if x not in SPENT:
        raise InvalidArgument(unknown("x axis", x, SPENT))
    if y not in _VALUES:
        raise InvalidArgument(unknown("y axis", y, _VALUES))
    y_label, factor = _VALUES[y]
    protocol.check()
    lines = [(s, *_points(s.records, x, y, protocol)) for s in series(records)]
    lines = [line for line in lines if len(line[1])]
    if not lines:
        raise InvalidArgument(f"there is nothing to draw: no round of these runs has {y} by this protocol: {protocol}")
    unit, divisor = _unit(max(xs.max() for _, xs, _, _ in lines)) if x == "bytes" else ("", 1)
    figure, axes = _figure()
    faint = 0.15 if len(lines) <= 4 else 0.08  # bands over bands
    for s, xs, mean, half in lines:
        xs, mean, half = xs / divisor, factor * mean, factor * half
        look = style(s.algorithm, s.variant)
        line = {"color": look.color, "linestyle": look.linestyle}
        if x != "rounds" and not xs.any():  # it costs nothing: at 0 it would be a wall, so its level is drawn
            axes.axhline(mean[-1], linewidth=1, alpha=0.7, label="_level", **line)
            xs, mean, half = xs[-1:], mean[-1:], half[-1:]
        every = max(1, len(xs) // 12)  # and the last
        axes.plot(xs, mean, label=s.label, marker=look.marker, markevery=((len(xs) - 1) % every, every), **line)
        if not np.isnan(half).any():
            axes.fill_between(xs, mean - half, mean + half, color=look.color, alpha=faint, linewidth=0)
    if x in _LOGARITHMIC and all((xs > 0).all() for _, xs, _, _ in lines):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
        few = max(xs.max() for _, xs, _, _ in lines) < 10 * min(xs.min() for _, xs, _, _ in lines)
        axes.xaxis.set_minor_formatter(FuncFormatter(_plain) if few else NullFormatter())
    # A band of two seeds is 12.7 standard errors wide to each side: it must not push the lines together.
    means = np.concatenate([mean for _, _, mean, _ in lines])
    bottom, top = axes.get_ylim()
    if y == "accuracy":  # the first rounds may leave the picture: what comes after them is what is compared
        least = min(np.nanquantile(factor * mean, 0.25) for _, _, mean, _ in lines)
        axes.set_ylim(max(bottom, -2, least - 5), min(top, 102))
    elif means.min() > 0 and means.max() > 20 * means.min():
        axes.set(yscale="log", ylim=(means.min() / 2, 2 * means.max()))
    elif np.isfinite(means).all():
        axes.set_ylim(max(bottom, -0.02 * means.max()), min(top, 1.5 * means.max()))
    axes.set(xlabel=_LABELS[x] + (f" ({unit})" if unit else ""), ylabel=y_label)
    rounds = "every round" if y == "training loss" else "every evaluated round"
    said = "mean over the round's clients, as they train" if y == "training loss" else words(protocol, rounds)
    seeds = max(len(s.records) for s, *_ in lines)
    band = "; bands: 95 % interval over seeds" if seeds > 1 else ""
    kind = "Training loss" if y == "training loss" else f"{protocol.split.capitalize()} {y}"
    _title(axes, f"{kind} by {x}", said + band if caption else "")
    _legend(figure, axes)
    return figure


@_drawn
def distribution(
    records: Sequence[Record], protocol: Protocol = EV_ALL, kind: str = "box", *, caption: bool = True
) -> Figure:
    """The accuracies of the single clients.

    Args:
        records: of `Record.read`.
        protocol: how they were measured.
        kind: 'box': a row for every algorithm, a dot for every client and seed, a box over the middle half, a line at
            the median; 'ecdf': the share of the clients that have at most so much, for many clients.
        caption: write the protocol under the title.

    Raises:
        ValueError: an unknown kind, or no client was scored.
    """
    if kind not in ("box", "ecdf"):
        raise InvalidArgument(unknown("kind of picture", kind, ("box", "ecdf")))
    rows = [(s, 100 * np.concatenate([clients(r, protocol) for r in s.records])) for s in series(records)]
    _check_scored(rows, protocol)
    figure, axes = _figure(height=1.5 + 0.36 * len(rows) if kind == "box" else None)
    for i, (s, values) in enumerate(rows):
        if not len(values):
            continue
        look = style(s.algorithm, s.variant)
        if kind == "ecdf":
            axes.ecdf(values, label=s.label, color=look.color, linestyle=look.linestyle)
            continue
        low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
        # A fixed spread of the dots: the multiples of the golden ratio are as even as points can be.
        spread = (np.arange(len(values)) * 0.618034) % 1 - 0.5
        alpha = float(np.clip(30 / len(values), 0.15, 0.6))
        axes.scatter(values, i + 0.62 * spread, s=9, color=look.color, alpha=alpha, linewidth=0, zorder=2)
        axes.barh(i, high - low, left=low, height=0.62, facecolor="none", edgecolor=look.color, linewidth=1.1)
        axes.vlines(median, i - 0.31, i + 0.31, color=look.color, linewidth=2.4, zorder=3)
    if kind == "ecdf":
        axes.set(xlabel="accuracy of a client (%)", ylabel="share of the clients with at most so much")
        _legend(figure, axes)
    else:
        _rows(axes, [s.label for s, _ in rows])
        axes.set(xlabel="accuracy (%): a dot for every client" + (" and seed" if len(records) > len(rows) else ""))
    _title(axes, "Accuracy of single clients", words(protocol) if caption else "")
    return figure


WORST = {"5 %": (0.05, "^"), "10 %": (0.1, "o"), "25 %": (0.25, "s")}


@_drawn
def fairness(
    records: Sequence[Record], baselines: Sequence[Record] = (), protocol: Protocol = EV_ALL, *, caption: bool = True
) -> Figure:
    """How evenly accuracy is spread over the clients.

    Panels: the deciles; the mean of the worst 5, 10 and 25 % of the clients; Jain's index and the Gini coefficient
    (see `statistics`); and, where baselines are given, the share of the clients that have less than with each of them.

    Args:
        records: of `Record.read`.
        baselines: runs among or beside them on the same federation, such as Local's.
        protocol: how accuracies were measured.
        caption: write the protocol under the title.

    Raises:
        ValueError: no client was scored, or a baseline is on another federation.
    """
    rows = series(records)
    _check_scored([(s, np.concatenate([clients(r, protocol) for r in s.records])) for s in rows], protocol)
    against = series(baselines) if baselines else []
    lower = 0.55 + 0.2 * len(rows)
    figure = Figure(figsize=(STYLE["figure.figsize"][0], 2.9 + 2 * lower), layout="constrained")
    layout = [["deciles", "deciles"], ["worst", "worse" if against else "."], ["jain", "gini"]]
    axes = figure.subplot_mosaic(layout, height_ratios=[2.1, lower, lower])
    for each in axes.values():
        each.tick_params(labelsize=TICKS)

    tenths = np.arange(10, 100, 10)
    for i, s in enumerate(rows):
        look = style(s.algorithm, s.variant)
        color = look.color
        deciles = [statistics.deciles(clients(r, protocol)) for r in s.records]
        mean = 100 * np.array([statistics.over_seeds(column)[0] for column in np.transpose(deciles)])
        axes["deciles"].plot(tenths, mean, label=s.label, **look._asdict())
        for fraction, marker in WORST.values():
            value, half = measured(s.records, lambda v, f=fraction: statistics.worst(v, f), protocol)
            axes["worst"].errorbar(100 * value, i, xerr=_bar(100 * half), fmt=marker, color=color, elinewidth=0.8)
        for of in (statistics.jain, statistics.gini):
            value, half = measured(s.records, of, protocol)
            axes[of.__name__].errorbar(value, i, xerr=_bar(half), fmt="o", color=color, elinewidth=0.8)
        for marker, other in zip(MARKERS, against, strict=False):
            if not s.shares(other):
                share = statistics.share_worse(*paired(s.records, other.records, protocol))
                axes["worse"].plot(100 * share, i, marker=marker, color=color)
    axes["deciles"].set(xlabel="clients, from the worst (%)", ylabel="accuracy (%)", xticks=tenths)
    low, high = axes["worst"].get_xlim()
    axes["worst"].set_xlim(max(low, -2), min(high, 102))
    axes["worst"].set_xlabel("accuracy (%) of the worst\n5 % ▲, 10 % ●, 25 % ■", fontsize=8)
    for name, told in (("jain", "Jain's index"), ("gini", "Gini coefficient")):
        low, high = axes[name].get_xlim()
        axes[name].set_xlim(max(low, -0.02), min(high, 1.02))
        axes[name].locator_params(axis="x", nbins=4)
        axes[name].set_xlabel(told, fontsize=8)
    if against:
        shown = ", ".join(f"{s.label} {_GLYPHS[m]}" for m, s in zip(MARKERS, against, strict=False))
        axes["worse"].set_xlabel(textwrap.fill(_literal(f"% of clients worse than with {shown}"), 30), fontsize=8)
        axes["worse"].set_xlim(-4, 104)
    for name in axes.keys() - {"deciles"}:
        _rows(axes[name], [s.label if name in ("worst", "jain") else "" for s in rows])
    _title(axes["deciles"], "How evenly clients do", words(protocol) if caption else "")
    _legend(figure, axes["deciles"])
    return figure


@_drawn
def gains(records: Sequence[Record], baseline, protocol: Protocol = EV_ALL, *, caption: bool = True) -> Figure:
    """What single clients win and lose against a baseline: a histogram for every algorithm.

    A client's gain is the difference of its accuracies, each the mean over the seeds. Bars have one width, and the one
    at zero is centred on it.

    Args:
        records: of `Record.read`; those of the baseline itself are left out.
        baseline: a record, or those of several seeds.
        protocol: how accuracies were measured.
        caption: write the protocol under the title.

    Raises:
        ValueError: the runs are not on one federation, the baseline is of several algorithms or configurations, or
            there is nothing to compare.
    """
    other = series(baseline if isinstance(baseline, Sequence) else [baseline])
    if len(other) > 1:
        raise InvalidArgument("the baseline must be one algorithm; found " + ", ".join(s.label for s in other))
    own = {r.config.run_id for r in other[0].records}
    rest = [r for r in records if r.config.run_id not in own]
    if not rest:
        raise InvalidArgument(f"there is nothing to compare {other[0].label} with: no other run was given")
    rows = [(s, paired(s.records, other[0].records, protocol)) for s in series(rest)]
    found = [(s, 100 * statistics.gains(*pair)) for s, pair in rows]
    found = [(s, np.round(values[~np.isnan(values)], 9)) for s, values in found]  # 0.9 - 0.8 is not 0.1
    _check_scored(found, protocol)
    everything = np.concatenate([values for _, values in found])
    width = next(w for w in (0.5, 1, 2, 5, 10) if np.ptp(everything) <= 25 * w or w == 10)
    ends = (min(everything.min(), -2 * width) / width, max(everything.max(), 2 * width) / width)
    edges = width * (np.arange(np.floor(ends[0] + 0.5), np.floor(ends[1] + 0.5) + 2) - 0.5)
    columns = min(2, len(found))
    lines = -(-len(found) // columns)
    size = (STYLE["figure.figsize"][0], 1.1 + 1.15 * lines)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (s, values) in zip(grid.flat, found, strict=False):
        axes.hist(values, edges, color=style(s.algorithm).color, alpha=0.75)
        axes.axvline(0, color="black", linewidth=0.8)
        worse = 100 * statistics.mean_over_clients(values < 0)
        axes.set_title(_literal(f"{s.label}: {worse:.0f} % worse"), fontsize=8.5)
        axes.tick_params(labelsize=TICKS)
        axes.yaxis.get_major_locator().set_params(integer=True)
    for i, axes in enumerate(grid.flat):
        axes.tick_params(labelbottom=i + columns >= len(found))  # the lowest of its column
        if i >= len(found):
            axes.set_axis_off()
    figure.supxlabel(_literal(f"accuracy gained against {other[0].label} (points)"), fontsize=9)
    figure.supylabel("clients", fontsize=9)
    if caption:
        figure.suptitle(_fill(words(protocol)), fontsize=7.5, x=0.01, ha="left", color="#555555")
    return figure


@_drawn
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
    figure, axes = _figure(height=4.0)
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
    figure.colorbar(image, label=_literal(label), shrink=0.85).ax.tick_params(labelsize=TICKS)
    _title(axes, title, caption)
    return figure


def words(protocol: Protocol, rounds: str = "") -> str:
    """A protocol in words, with other rounds than its own where a picture shows all of them."""
    parts = str(protocol).split("; ")
    if rounds:
        parts[Protocol._fields.index("when")] = rounds
    return "; ".join(parts)


def _points(records, x: str, y: str, protocol: Protocol) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, mean y and half the interval, at the rounds for which every seed has a value."""
    values, positions = [], []
    for record in records:
        if y == "training loss":
            values.append({row["round"]: row["loss"] for row in record.history if row["clients"] and "loss" in row})
        else:
            values.append(record.curve(protocol, y))
        positions.append({row["round"]: spent for row, spent in zip(record.history, record.spent(x), strict=True)})
    rounds = sorted(set.intersection(*(set(found) for found in values)))
    xs = [np.mean([found[t] for found in positions]) for t in rounds]
    ys = [statistics.over_seeds([found[t] for found in values]) for t in rounds]
    mean, half = np.array(ys, np.float64).reshape(-1, 2).T
    return np.array(xs, np.float64), mean, half


_LABELS = {
    "rounds": "round",
    "bytes": "sent and received by all clients so far",
    "passes": "clients' passes so far, forward + backward",
    "seconds": "seconds of the rounds so far",
    "virtual seconds": "virtual seconds so far: the clients' clock",
}
_LOGARITHMIC = ("passes", "seconds")  # methods differ by factors in them
_VALUES = {"accuracy": ("accuracy (%)", 100), "loss": ("loss (nats)", 1), "training loss": ("loss (nats)", 1)}
_GLYPHS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "*": "★", "<": "◀", ">": "▶"}


def _figure(height: float | None = None):
    width, usual = STYLE["figure.figsize"]
    figure = Figure(figsize=(width, height or usual), layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=TICKS)
    return figure, axes


def _title(axes, title: str, caption: str) -> None:
    """The title, and how it was measured in small letters below it."""
    small = _fill(caption) if caption else ""
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
    axes.set_title(_literal(title), pad=6 + (9.5 * (small.count("\n") + 1) if small else 0))


def _rows(axes, labels) -> None:
    """A row for every label, the first on top."""
    axes.set_yticks(range(len(labels)), [_literal(label) for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _legend(figure, axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    labels = [_literal(label) for label in labels]
    columns = max(1, min(len(labels), 60 // (max(map(len, labels)) + 7)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.8)


def _check_scored(rows, protocol) -> None:
    if not any(len(values) for _, values in rows):
        raise InvalidArgument(f"there is nothing to draw: no client was scored by this protocol: {protocol}")


def _bar(half: float) -> float | None:
    return None if np.isnan(half) else half


def _plain(value: float, _place=None) -> str:
    """1000000.0 -> '1,000,000'."""
    return f"{value:,.10g}"


def _unit(largest: float) -> tuple[str, float]:
    """(bytes' unit, what to divide by), in powers of 1000."""
    place = min(int(np.log10(max(largest, 1)) // 3), 4)
    return ("B", "kB", "MB", "GB", "TB")[place], 1000.0**place


def _fill(text: str) -> str:
    return textwrap.fill(_literal(text), 64)


def _literal(text: str) -> str:
    """As it is: matplotlib would read what stands between two dollars as a formula, and fail on a bad one."""
    return str(text).replace("$", r"\$")
