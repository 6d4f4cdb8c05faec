"""Plots of single clients' scores, such as accuracies: their distribution, how even they are, gains over a baseline."""

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from tfpfl.checks import InvalidArgument, unknown
from tfpfl.runs import statistics
from tfpfl.runs.metrics import axis, times, word
from tfpfl.runs.protocols import EV_ALL, Protocol, as_protocol
from tfpfl.studies.plots.style import (
    GLYPHS,
    MARKERS,
    STYLE,
    TICKS,
    Drawing,
    bar,
    caption_height,
    drawable,
    fill,
    in_style,
    literal,
    make_figure,
    put_legend,
    put_rows,
    put_title,
    row_lines,
    style,
    with_diverged,
    words,
)
from tfpfl.studies.records import Record
from tfpfl.studies.run_groups import Side, check_records, clients, group_runs, measured, paired, sides
from tfpfl.studies.told import told_seen


@in_style
def distribution(
    records: Sequence[Record], protocol: Protocol | str = EV_ALL, kind: str = "box", *, caption: bool = True
) -> Figure:
    """Draws the scores of single clients.

    Where some clients had never taken part, those that had and the others are two rows of an algorithm.

    Args:
        records: from `Record.read`.
        protocol: how the scores are measured, or its name.
        kind: 'box': a row for each algorithm, with a dot for each client and seed, a box over the middle half and a
            line at the median. 'ecdf', for many clients: the share of the clients whose score is at most x.
        caption: whether to write the protocol under the title.

    Raises:
        InvalidArgument: `kind` is another word, or no client was evaluated by the protocol.
    """
    if kind not in ("box", "ecdf"):
        raise InvalidArgument(unknown("kind of picture", kind, ("box", "ecdf")))
    protocol = as_protocol(protocol)
    shown = [side for s in group_runs(records) for side in sides(s, protocol)]
    named = records[0].score
    rows = [
        (side, times(named) * np.concatenate([clients(r, side.protocol) for r in side.group.records])) for side in shown
    ]
    _check_scored(rows, protocol)
    said = _said(records, protocol) if caption else ""
    labels = [with_diverged(s.label, values) for s, values in rows]
    height = 1.5 + max(0.36, 0.17 * row_lines(labels)) * len(rows) if kind == "box" else STYLE["figure.figsize"][1]
    figure, axes = make_figure(height + caption_height(said))
    axes.use_sticky_edges = False  # otherwise a box that begins at the worst client has no margin, and cuts its dot
    for i, (s, values) in enumerate(rows):
        everyone, values = values, values[np.isfinite(values)]
        if not len(values):
            continue
        look = style(s.group.algorithm, s.group.variant, own=s.group.is_own)
        if kind == "ecdf":
            axes.ecdf(everyone, label=labels[i], color=look.color, linestyle=look.linestyle, alpha=_alpha(s))
            continue
        low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
        # Multiples of the golden ratio spread the dots evenly, and the same way each time.
        spread = (np.arange(len(values)) * 0.618034) % 1 - 0.5
        alpha = float(np.clip(30 / len(values), 0.15, 0.6))
        axes.scatter(values, i + 0.62 * spread, s=9, color=look.color, alpha=alpha, linewidth=0, zorder=2)
        axes.barh(i, high - low, left=low, height=0.62, facecolor="none", edgecolor=look.color, linewidth=1.1)
        axes.vlines(median, i - 0.31, i + 0.31, color=look.color, linewidth=2.4, zorder=3)
    if kind == "ecdf":
        axes.set(
            xlabel=axis(named).replace(word(named), f"{word(named)} of a client", 1),
            ylabel="share of the clients with at most so much",
        )
        put_legend(figure, axes)
    else:
        put_rows(axes, labels)
        several = any(len(side.group.records) > 1 for side in shown)
        axes.set(xlabel=f"{axis(named)}: a dot for every client" + (" and seed" if several else ""))
    put_title(axes, f"{named.title} of single clients", said)
    return figure


WORST = {"5 %": (0.05, "^"), "10 %": (0.1, "o"), "25 %": (0.25, "s")}


@in_style
def fairness(
    records: Sequence[Record],
    baselines: Sequence[Record] = (),
    protocol: Protocol | str = EV_ALL,
    *,
    caption: bool = True,
) -> Figure:
    """Draws how evenly the score is spread over the clients.

    The panels show the deciles; the mean of the worst 5, 10 and 25 % of the clients; Jain's index and the Gini
    coefficient (see `statistics`); and, if baselines are given, the share of the clients that are worse than with each.
    Where some clients had never taken part, those that had and the others are two rows of an algorithm.

    Args:
        records: from `Record.read`.
        baselines: runs on the same federation to compare with, such as Local's; they may be among `records`.
        protocol: how the scores are measured, or its name.
        caption: whether to write the protocol under the title.

    Raises:
        InvalidArgument: no client was evaluated by the protocol, or a baseline is on another federation.
    """
    protocol = as_protocol(protocol)
    rows = [side for s in group_runs(records) for side in sides(s, protocol)]
    named = records[0].score
    factor, most = times(named), 100 if named.is_fraction else np.inf
    everyone = [(side, [clients(r, side.protocol) for r in side.group.records]) for side in rows]
    _check_scored([(side, np.concatenate(values)) for side, values in everyone], protocol)
    against = group_runs(baselines) if baselines else []
    labels = [with_diverged(side.label, np.concatenate(values)) for side, values in everyone]
    lower = 0.55 + 0.2 * len(rows) * row_lines(labels)
    said = _said(records, protocol) if caption else ""
    figure = Drawing(figsize=(STYLE["figure.figsize"][0], 2.9 + 2 * lower + caption_height(said)), layout="constrained")
    layout = [["deciles", "deciles"], ["worst", "worse" if against else "."], ["jain", "gini"]]
    axes = figure.subplot_mosaic(layout, height_ratios=[2.1, lower, lower])
    for each in axes.values():
        each.tick_params(labelsize=TICKS)

    tenths = np.arange(10, 100, 10)
    for i, (side, by_seed) in enumerate(everyone):
        s, own = side.group, side.protocol
        look = style(s.algorithm, s.variant, own=s.is_own)
        color = look.color
        deciles = np.transpose([statistics.deciles(values) for values in by_seed])
        mean = factor * np.array([statistics.over_seeds(column)[0] for column in deciles])
        axes["deciles"].plot(tenths, drawable(mean), label=labels[i], alpha=_alpha(side), **look._asdict())
        for fraction, marker in WORST.values():
            value, half = statistics.over_seeds([r.worst(fraction, own) for r in s.records])
            axes["worst"].errorbar(
                drawable(factor * value),
                i,
                xerr=bar(factor * value, factor * half, most),
                fmt=marker,
                color=color,
                elinewidth=0.8,
            )
        for of in (statistics.jain, statistics.gini):
            value, half = measured(s.records, of, own)
            axes[of.__name__].errorbar(value, i, xerr=bar(value, half, 1), fmt="o", color=color, elinewidth=0.8)
        for marker, other in zip(MARKERS, against, strict=False):
            if not s.shares(other):
                share = statistics.share_worse(*paired(s.records, other.records, own), named.direction)
                axes["worse"].plot(100 * share, i, marker=marker, color=color)
    first = "worst" if named.larger_is_better else "best"
    axes["deciles"].set(xlabel=f"clients, from the {first} (%)", ylabel=axis(named), xticks=tenths)
    axes["worst"].set_xlabel(f"{axis(named)} of the worst\n5 % ▲, 10 % ●, 25 % ■", fontsize=8)
    for name, told in (("jain", "Jain's index"), ("gini", "Gini coefficient")):
        axes[name].locator_params(axis="x", nbins=4)
        axes[name].set_xlabel(told, fontsize=8)
    if against:
        shown = ", ".join(f"{s.label} {GLYPHS[m]}" for m, s in zip(MARKERS, against, strict=False))
        axes["worse"].set_xlabel(textwrap.fill(literal(f"% of clients worse than with {shown}"), 30), fontsize=8)
        axes["worse"].set_xlim(-4, 104)
    for name in axes.keys() - {"deciles"}:
        put_rows(axes[name], labels if name in ("worst", "jain") else [""] * len(rows))
    put_title(axes["deciles"], "How evenly clients do", said)
    put_legend(figure, axes["deciles"])
    return figure


@in_style
def gains(records: Sequence[Record], baseline, protocol: Protocol | str = EV_ALL, *, caption: bool = True) -> Figure:
    """Draws how much single clients gain or lose against a baseline: a histogram for each algorithm.

    A client's gain is the difference of two scores, each the mean over the seeds; it is more than 0 if the client does
    better, also where a smaller score is better. All bars have the same width, and
    one of them is centred on zero. Where some clients had never taken part, there is one histogram of the clients that
    had on both sides, and one of those that had not on both.

    Args:
        records: from `Record.read`; the baseline's own runs are left out.
        baseline: one record, or the records of several seeds of one setting.
        protocol: how the scores are measured, or its name.
        caption: whether to write the protocol under the title.

    Raises:
        InvalidArgument: a run has no federation in common with the baseline, the baseline has several settings, or all
            records are the baseline's.
    """
    protocol = as_protocol(protocol)
    check_records(records)
    other = group_runs(baseline if isinstance(baseline, Sequence) else [baseline])
    if len(other) > 1:
        raise InvalidArgument("the baseline must be one algorithm; found " + ", ".join(s.label for s in other))
    own = {r.config.run_id for r in other[0].records}
    rest = [r for r in records if r.config.run_id not in own]
    if not rest:
        raise InvalidArgument(f"there is nothing to compare {other[0].label} with: no other run was given")
    shown = [side for s in group_runs(rest) for side in sides(s, protocol)]
    rows = [(side, paired(side.group.records, other[0].records, side.protocol)) for side in shown]
    named = other[0].score
    factor = times(named) * (1 if named.larger_is_better else -1)
    found = [(s, factor * statistics.gains(*pair)) for s, pair in rows]
    found = [(s, values[~np.isnan(values)]) for s, values in found]
    found = [(s, values) for s, values in found if len(values)] or found
    _check_scored(found, protocol)
    everything = np.concatenate([values[np.isfinite(values)] for _, values in found])
    everything = everything if len(everything) else np.zeros(1)  # every client diverged with one of the two
    if named.is_fraction:
        width = next(w for w in (0.5, 1, 2, 5, 10) if np.ptp(everything) <= 25 * w or w == 10)
    else:
        from_zero = np.ptp([0.0, *everything])  # the axis has zero; a unit may be so large that all gains are tiny
        width = float(f"{from_zero / 20:.0e}") or 1.0
    ends = (min(everything.min(), -2 * width) / width, max(everything.max(), 2 * width) / width)
    edges = width * (np.arange(np.floor(ends[0] + 0.5), np.floor(ends[1] + 0.5) + 2) - 0.5)
    columns = min(2, len(found))
    lines = -(-len(found) // columns)
    shares = [100 * statistics.mean_over_clients(values < 0) for _, values in found]
    titles = [
        textwrap.fill(literal(with_diverged(f"{s.label}: {worse:.0f} % worse", values)), 32 if columns > 1 else 64)
        for (s, values), worse in zip(found, shares, strict=True)
    ]
    said = _said(records, protocol) if caption else ""
    each = 1.15 + 0.14 * max(title.count("\n") for title in titles)
    size = (STYLE["figure.figsize"][0], 1.1 + each * lines + caption_height(said))
    figure = Drawing(figsize=size, layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (s, values), title in zip(grid.flat, found, titles, strict=False):
        look = style(s.group.algorithm, s.group.variant, own=s.group.is_own)
        axes.hist(values[np.isfinite(values)], edges, color=look.color, alpha=0.75 * _alpha(s))
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_title(title, fontsize=8.5)
        axes.tick_params(labelsize=TICKS)
        axes.yaxis.get_major_locator().set_params(integer=True)
    for i, axes in enumerate(grid.flat):
        axes.tick_params(labelbottom=i + columns >= len(found))  # numbers only below a column
        if i >= len(found):
            axes.set_axis_off()
    figure.supxlabel(
        literal(
            f"{word(named)} gained against {other[0].label} (points)"
            if named.is_fraction
            else f"{axis(named)} less than with {other[0].label}"
        ),
        fontsize=9,
    )
    figure.supylabel("clients", fontsize=9)
    if caption:
        figure.suptitle(fill(said), fontsize=7.5, x=0.01, ha="left", color="#555555")
    return figure


def _alpha(side: Side) -> float:
    """How opaque a side is drawn: clients that had never taken part are paler."""
    return 0.45 if side.protocol.clients == "unseen" else 1.0


def _said(records: Sequence[Record], protocol: Protocol) -> str:
    """The caption: the protocol in words, and who had taken part."""
    return f"{words(protocol)}. {told_seen(records, protocol)}".rstrip(". ")


def _check_scored(rows, protocol) -> None:
    if not any(len(values) for _, values in rows):
        raise InvalidArgument(f"there is nothing to draw: no client was scored by this protocol: {protocol}")
