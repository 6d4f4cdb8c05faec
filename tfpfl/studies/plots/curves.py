"""Learning curves: score or loss by rounds, bytes, passes or seconds."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from tfpfl.checks import InvalidArgument, unknown
from tfpfl.runs import statistics
from tfpfl.runs.metrics import axis, times, word
from tfpfl.runs.protocols import EV_ALL, Protocol, as_protocol
from tfpfl.studies.plots.style import (
    STYLE,
    TICKS,
    Drawing,
    byte_unit,
    caption_height,
    drawable,
    in_style,
    make_figure,
    put_legend,
    put_title,
    style,
    with_diverged,
    words,
)
from tfpfl.studies.records import SPENT, Record
from tfpfl.studies.run_groups import RunGroup, Side, group_runs, is_mixed, sides
from tfpfl.studies.told import told_seen


@in_style
def curves(
    records: Sequence[Record],
    x: str = "rounds",
    y: str = "score",
    protocol: Protocol | str = EV_ALL,
    *,
    caption: bool = True,
) -> Figure:
    """Draws learning curves, with a band for the 95 % interval if there are several seeds.

    A round in which a client diverged has no finite mean: the line has a gap, and its label says so.

    If some clients had never taken part by the last evaluated round, two smaller panels show those that had and the
    others, each round with its own.

    Args:
        records: from `Record.read`.
        x: 'rounds', or what all clients together have spent so far: 'bytes' (sent and received), 'passes' (of their
            examples through the backbone, forward and backward), 'flops' (floating point operations), 'seconds' (of the
            rounds' work, without the building of graphs; see `Record.spent`) or 'virtual seconds' (of the clients'
            clock). A run that sends nothing is a level line over 'bytes'.
        y: 'score' or its name, such as 'accuracy' (in %), or 'loss' (in nats) by the protocol in each evaluated round,
            or 'training loss': the mean over the round's clients, in each round.
        protocol: which model, clients, mean and split, or its name; its `when` is ignored.
        caption: whether to write the protocol under the title.

    Raises:
        InvalidArgument: an unknown axis; an x axis that a run has no numbers for, such as 'passes' of a run that is not
            finished; or no round with a value.
    """
    if x not in SPENT:
        raise InvalidArgument(unknown("x axis", x, SPENT))
    protocol = as_protocol(protocol)
    groups = group_runs(records)
    named = groups[0].score
    if y not in ("score", named.name, *_LOSSES):
        raise InvalidArgument(unknown("y axis", y, (named.name, *_LOSSES)))
    is_score, y = y in ("score", named.name), word(named) if y in ("score", named.name) else y
    nats = named.name == "accuracy"  # the loss is a cross-entropy
    y_label, factor = (axis(named), times(named)) if is_score else ("loss (nats)" if nats else "loss", 1)
    what = None if is_score else y
    lines = [(s, *_points(s.records, x, what, protocol)) for s in groups]
    lines = [line for line in lines if len(line[1])]
    if not lines:
        raise InvalidArgument(f"there is nothing to draw: no round of these runs has {y} by this protocol: {protocol}")
    unit, divisor = byte_unit(max(xs.max() for _, xs, _, _ in lines)) if x == "bytes" else ("", 1)
    panels = _panels(records, protocol, y)
    rounds = "every round" if y == "training loss" else "every evaluated round"
    said = (
        "before the step, on its examples; mean over the round's clients"
        if y == "training loss"
        else words(protocol, rounds)
    )
    several = any(len(s.records) > 1 for s, *_ in lines)
    band = "; bands: 95 % interval over seeds" if several else ""
    seen = "" if y == "training loss" else told_seen(records, protocol._replace(when="last"))
    under = f"{said}{band}. {seen}".rstrip(". ") if caption else ""
    figure, all_axes = _figure_of(len(panels), caption_height(under))
    shown = [[(s, *_points(s.records, x, what, side.protocol)) for s, *_ in lines] for side in panels]
    shown = [[line for line in each if len(line[1])] for each in shown]
    means = np.concatenate([mean[np.isfinite(mean)] for each in shown for *_, mean, _ in each])
    fraction = is_score and named.is_fraction
    logarithmic = not fraction and bool(len(means) and means.max() > 20 * means.min() > 0)
    # A band of two seeds reaches 12.7 standard errors to each side: it ends where no accuracy or loss can be. (Some
    # losses, such as that of counts, can be below 0.) On a logarithmic axis 0 is infinitely far away; a band that
    # reaches it ends at half the least mean.
    least = 0.0 if fraction or means.min(initial=0.0) == 0 else -np.inf
    possible = (means.min() / 2 if logarithmic else least, 1.0 if fraction else np.inf)
    for panel, side, its_lines in zip(all_axes, panels, shown, strict=True):
        _draw(its_lines, panel, x, divisor, factor, possible)
        panel.set_title(side.words, fontsize=8.5)
        if logarithmic:
            panel.set_yscale("log")
        if x == "rounds":
            panel.xaxis.get_major_locator().set_params(integer=True)
    axes = all_axes[0]
    axes.set(xlabel=_LABELS[x] + (f" ({unit})" if unit else ""), ylabel=y_label)
    kind = "Loss of the last local step" if y == "training loss" else f"{protocol.split.capitalize()} {y}"
    put_title(axes, f"{kind} by {x}", under)
    put_legend(figure, axes)
    return figure


def _panels(records: Sequence[Record], protocol: Protocol, y: str) -> list[Side]:
    """What each panel shows: all; and both sides, where some clients had never taken part in the last evaluated round.

    Panels below the first one have the protocols of the sides.
    """
    everyone, last = RunGroup("", list(records)), protocol._replace(when="last")
    if y == "training loss" or not any(is_mixed(r, last) for r in records):
        return [Side(everyone, protocol, "")]
    return [Side(everyone, protocol, ""), *sides(everyone, last)]


def _figure_of(panels: int, more: float):
    """(figure, [axes]): one panel, or a panel for all clients and below it one for each side, with the same y axis.

    It is `more` inches higher than usual.
    """
    width, height = STYLE["figure.figsize"]
    if panels == 1:
        figure, axes = make_figure(height + more)
        return figure, [axes]
    figure = Drawing(figsize=(width, height + more + 1.9), layout="constrained")
    axes = figure.subplot_mosaic([["all", "all"], ["seen", "unseen"]], height_ratios=[2.2, 1])
    for name, panel in axes.items():
        panel.tick_params(labelsize=TICKS)
        if name != "all":
            panel.sharey(axes["all"])
    axes["unseen"].tick_params(labelleft=False)
    return figure, list(axes.values())


def _draw(lines, axes, x: str, divisor: float, factor: float, possible: tuple[float, float]) -> None:
    """Draws lines with their bands, which end at the possible values; the limits of the axes cut nothing off."""
    faint = 0.15 if len(lines) <= 4 else 0.08  # many bands lie over each other
    for s, xs, mean, half in lines:
        label, mean, half = with_diverged(s.label, mean, "round"), drawable(mean), drawable(half)
        low, high = (factor * np.clip(end, *possible) for end in (mean - half, mean + half))
        xs, mean = xs / divisor, factor * mean
        look = style(s.algorithm, s.variant, own=s.is_own)
        line = {"color": look.color, "linestyle": look.linestyle}
        if x != "rounds" and not xs.any():  # at x = 0 a line would be vertical: draw its last level
            axes.axhline(mean[-1], linewidth=1, alpha=0.7, label="_level", **line)
            xs, mean, low, high = xs[-1:], mean[-1:], low[-1:], high[-1:]
        every = max(1, len(xs) // 12)  # a marker about every twelfth of the line, and at its end
        axes.plot(xs, mean, label=label, marker=look.marker, markevery=((len(xs) - 1) % every, every), **line)
        if not np.isnan(half).all():
            axes.fill_between(xs, low, high, color=look.color, alpha=faint, linewidth=0)
    if lines and x in _LOGARITHMIC and all((xs > 0).all() for _, xs, _, _ in lines):
        axes.set_xscale("log")
        thousands = StrMethodFormatter("{x:,.10g}")  # such as 1,000,000
        axes.xaxis.set_major_formatter(thousands)
        few = max(xs.max() for _, xs, _, _ in lines) < 10 * min(xs.min() for _, xs, _, _ in lines)
        axes.xaxis.set_minor_formatter(thousands if few else NullFormatter())


def _points(records, x: str, y: str | None, protocol: Protocol) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three float [n]: x, the mean of y and half its interval, in the rounds for which all seeds have a value."""
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
    "flops": "floating point operations of all clients so far",
    "seconds": "seconds so far: rounds x median of a round",
    "virtual seconds": "virtual seconds so far: the clients' clock",
}
_LOGARITHMIC = ("passes", "flops", "seconds")  # methods differ by large factors in these
_LOSSES = ("loss", "training loss")
