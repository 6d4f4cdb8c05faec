"""Metrics of a client's predictions besides score and loss: those that have a name here, and the user's own.

A metric is a function of the labels [N] and the logits [N, K] of one client and one split; of kinds other than
classification, of the targets [N, K] and the outputs [N, K]. It is computed where the scores are collected, in this
process, for every engine. Those of tfpfl are in `tfpfl.runs.metric_functions`.
"""

import math
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tfpfl.checks import InvalidArgument, check_choice, check_type, one_line, unknown
from tfpfl.data.kinds import ACCURACY, CLASSIFICATION, KINDS, LabelKind, ScoreName, kind_for, label_kind
from tfpfl.runs.metric_functions import (
    balanced_accuracy,
    brier,
    coverage,
    deviance,
    ece,
    exact_match,
    f1,
    hamming,
    macro_f1,
    mae,
    nll,
    of_rates,
    r2,
    rmse,
    top2_accuracy,
)

ALWAYS = {"accuracy": "max", "loss": "min"}  # what every evaluation of classes has: its direction
DIRECTIONS = ("max", "min")
NEITHER = "neither"  # the direction of a metric of which a certain number is best, such as a coverage of Q
_TAKEN = (*ALWAYS, "examples", "correct", "logits", "outputs", "finite", "rejected", "clients", "round", "seconds")
OF_TABLES = ("algorithm", "score", "seeds", "rounds", "seen", "pairs", "std", "Jain", "Gini", "passes")  # columns


@dataclass(frozen=True)
class Metric:
    """A number that is computed from a client's labels and logits on one split.

    Args:
        name: letters, digits and _; it names columns, such as 'personal test macro_f1'.
        function: (labels int [N], logits float [N, K]) -> number; of other kinds than classification, (targets float
            [N, K], outputs float [N, K]) -> number. N is at least 1. NaN stands for "not defined for
            these examples": the client is then left out of means, as one without examples is.
        unit: 'fraction' for a number in [0, 1], which tables show in %; otherwise the unit's name, '' for none.
        direction: 'max' if a larger number is better, 'min' if a smaller one is; 'neither' if neither is: tables then
            show no best one, and early stopping does not look at it.
        kinds: the names of the kinds of labels that it is for, see `tfpfl.data.kinds`; () for all.

    Raises:
        InvalidArgument: the name is not such a text or is taken, or the direction is another word.
    """

    name: str
    function: Callable[[np.ndarray, np.ndarray], float]
    unit: str = ""
    direction: str = "max"
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_type("the name of a metric", self.name, str, "a text: write Metric('name', function)")
        if not re.fullmatch(r"[A-Za-z]\w*", self.name, re.ASCII) or self.name in _TAKEN:
            raise InvalidArgument(
                "the name of a metric has letters, digits and _, begins with a letter, and is not one of "
                f"{', '.join(_TAKEN)}; found {self.name!r}. Write Metric('name', function)"
            )
        check_choice(direction=(self.direction, (*DIRECTIONS, NEITHER)))

    def __call__(self, labels: np.ndarray, logits: np.ndarray) -> float:
        """The metric as a Python float.

        Raises:
            InvalidArgument: the function raised an error, or its result is no number.
        """
        try:
            value = np.asarray(self.function(labels, logits))
        except InvalidArgument:  # this process does not know the metric
            raise
        except Exception as error:  # of the user's function
            from tfpfl.algorithms.own import user_place  # only now, because it imports TensorFlow

            place = user_place(error) or _place(error)
            raise InvalidArgument(
                f"the metric {self.name} raised {type(error).__name__} in {place}: {one_line(error)}"
            ) from error
        if value.shape != () or value.dtype.kind not in "biuf":
            raise InvalidArgument(
                f"the metric {self.name} must give one number for labels [N] and logits [N, K]; found {value.dtype} of "
                f"shape {value.shape}"
            )
        return float(value)


def _place(error: Exception) -> str:
    """Where a function that was called here raised an error: its own last line, not one of a library."""
    trace = traceback.extract_tb(error.__traceback__)[1:]
    last = [frame for frame in trace if trace[0].filename == frame.filename][-1:]
    return f"{last[0].name} ({last[0].filename}, line {last[0].lineno})" if last else "its function"


_CLASSES, _NUMBERS, _COUNTS = ("classification",), ("regression", "huber", "quantile"), ("poisson",)
_OF_CLASSES = (
    Metric("macro_f1", macro_f1, "fraction"),
    Metric("balanced_accuracy", balanced_accuracy, "fraction"),
    Metric("top2_accuracy", top2_accuracy, "fraction"),
    Metric("ece", ece, "fraction", "min"),
    Metric("brier", brier, "", "min"),
)
_BUILT_IN = (
    *(replace(metric, kinds=_CLASSES) for metric in _OF_CLASSES),
    Metric("nll", nll, "", "min", _CLASSES),
    Metric("rmse", rmse, "", "min", _NUMBERS),
    Metric("mae", mae, "", "min", _NUMBERS),
    Metric("r2", r2, "", "max", _NUMBERS),
    Metric("coverage", coverage, "fraction", NEITHER, ("quantile",)),
    Metric("rmse", of_rates(rmse), "", "min", _COUNTS),
    Metric("mae", of_rates(mae), "", "min", _COUNTS),
    Metric("deviance", deviance, "", "min", _COUNTS),
    Metric("exact_match", exact_match, "fraction", "max", ("multilabel",)),
    Metric("f1", f1, "fraction", "max", ("multilabel",)),
    Metric("hamming", hamming, "fraction", "min", ("multilabel",)),
)
NAMES = tuple(dict.fromkeys(metric.name for metric in _BUILT_IN))
METRICS = {name: next(m for m in _BUILT_IN if m.name == name) for name in NAMES}  # `register_metric` adds to it
_FOREVER = {metric.name for metric in _OF_CLASSES}  # a run from before there were more may have one of its own


def register_metric(metric: Metric | Callable[[np.ndarray, np.ndarray], float]) -> Metric:
    """Lets this process know a metric by its name, as the entry `metrics` of a `RunConfig` needs it.

    Args:
        metric: a `Metric`, or a function with a name of its own; a larger number of it is then better. An earlier
            metric of this name is replaced.

    Raises:
        InvalidArgument: the name is that of a metric of tfpfl or of a column of its tables, or cannot be one.
    """
    metric = metric if isinstance(metric, Metric) else _of_function(metric)
    if metric.name in OF_TABLES:
        raise InvalidArgument(
            f"{metric.name} is the name of a column of tfpfl's tables, which it would replace: take another name"
        )
    if metric.name in _FOREVER and metric != METRICS[metric.name]:
        raise InvalidArgument(f"{metric.name} is the name of a metric of tfpfl: take another name")
    METRICS[metric.name] = metric
    forget_description(metric.name)
    return metric


def names_for(kind: str | LabelKind) -> list[str]:
    """The names of tfpfl's metrics for a kind of labels, without the one that is its score."""
    kind = label_kind(kind)
    return [m.name for m in _BUILT_IN if kind.name in m.kinds and m.name != kind.score.name]


def is_own(name: str) -> bool:
    """Whether this process knows a metric of the user's own by this name."""
    return name in METRICS and METRICS[name] not in _BUILT_IN


def _of_kind(name: str, kind: str | LabelKind | None) -> Metric | None:
    """What a name stands for with a kind; with None, with the first kind that has it. None: nothing."""
    if kind is None or name not in METRICS or is_own(name):  # the user's own is for all kinds
        return METRICS.get(name)
    return next((m for m in _BUILT_IN if m.name == name and label_kind(kind).name in m.kinds), None)


def check_kind(metrics: Iterable[Any], kind: str | LabelKind, own: Collection[str] = ()) -> None:
    """Checks that metrics are for a kind of labels.

    Args:
        metrics: names, and others, which are not checked.
        kind: the kind, or its text.
        own: the names of those that are the user's own, also if this process does not know them.

    Raises:
        InvalidArgument: one of tfpfl's is for other kinds, or one of the user's own has the name of one for this kind.
    """
    kind = label_kind(kind)
    for name in metrics:
        if not isinstance(name, str) or name not in (*METRICS, ACCURACY.name):
            continue
        if is_own(name) and not kind.is_classes and name in (kind.score.name, *names_for(kind)):
            raise InvalidArgument(f"{name} is the name of a metric of tfpfl for {kind.text}: take another name")
        if name not in (*own, kind.score.name) and _of_kind(name, kind) is None:
            kinds = dict.fromkeys(k for m in _BUILT_IN if m.name == name for k in m.kinds) or (CLASSIFICATION.name,)
            raise InvalidArgument(
                f"unknown metric {name!r}; there are {kind.score.name}, loss, {', '.join(names_for(kind))} for "
                f"{kind.text}; {name} is for {' and '.join(kinds)}"
            )


def kind_of(federation: Any, wanted: str | LabelKind | None = None) -> LabelKind:
    """The kind for a federation's labels: the wanted one, or the usual one.

    Raises:
        InvalidArgument: the wanted kind is unknown, or does not learn from such labels.
    """
    targets = getattr(federation, "targets", None)
    return kind_for("class" if targets is None else targets[0], wanted)


def as_metric(
    metric: str | Metric | Callable[[np.ndarray, np.ndarray], float], kind: str | LabelKind | None = None
) -> Metric:
    """The metric of a name or of a function; a `Metric` is returned as it is.

    Args:
        metric: the name, the function or the metric.
        kind: the kind of labels, because some names stand for other functions with another kind; None: the first.

    Raises:
        InvalidArgument: this process knows no metric of this name for the kind, or the function has no name that a
            metric can have.
    """
    if isinstance(metric, str):
        if kind is not None:
            check_kind([metric], kind)
        found = _of_kind(metric, kind)
        if found is None:
            known = METRICS if kind is None else [n for n in METRICS if _of_kind(n, kind)]
            raise InvalidArgument(
                f"{unknown('metric', metric, (*ALWAYS, *known))}. A metric of your own is written FILE.py:FUNCTION; "
                "or, in Python, it is made known in this process before: tfpfl.runs.register_metric(function)"
            )
        return found
    return metric if isinstance(metric, Metric) else _of_function(metric)


def _of_function(function: Callable[[np.ndarray, np.ndarray], float]) -> Metric:
    if not callable(function):
        raise InvalidArgument(f"a metric is a name, a function or a Metric; found {function!r}")
    return Metric(getattr(function, "__name__", type(function).__name__), function)


def metric_names(metrics: Iterable[Any]) -> tuple[str, ...]:
    """The names of metrics, each once; functions are registered. 'accuracy' and 'loss' are left out, as always there.

    Raises:
        InvalidArgument: something else than names, functions and metrics, or a name that no metric can have.
    """
    names: list[str] = []
    for metric in metrics:
        name = metric if isinstance(metric, str) else register_metric(metric).name
        if name in ALWAYS or name in names:
            continue
        Metric(name, macro_f1)  # checks the name
        names.append(name)
    return tuple(names)


def known_metrics(names: Iterable[str], kind: str | LabelKind | None = None) -> list[Metric]:
    """The metrics of these names. One that this process does not know raises the error of `as_metric` when it is used.

    So a run with somebody's own metric can be read and exported where the metric is not known.
    """

    def missing(name: str) -> Callable[[np.ndarray, np.ndarray], float]:
        return lambda labels, logits: as_metric(name, kind)(labels, logits)

    return [_of_kind(name, kind) or Metric(name, missing(name), *_described.get(name, ())) for name in names]


def describe_metric(name: str, unit: str, direction: str) -> None:
    """Lets tables of this process know the unit and the direction of a metric, whose function it need not know."""
    _described[name] = (unit, direction)


def forget_description(name: str) -> None:
    """Lets tables of this process show the metric that it knows by this name, after a run with another one."""
    _described.pop(name, None)


_described: dict[str, tuple[str, str]] = {}  # name -> unit and direction, which count more than those of `METRICS`


def is_fraction(name: str) -> bool:
    """Whether tables show a metric in %; not if this process does not know its unit."""
    return unit_of(name) == "fraction"


def unit_of(name: str) -> str:
    """The unit of a metric: 'fraction', or what tables write behind a number; '' if this process does not know it."""
    return _description(name)[0]


def direction_of(name: str) -> str:
    """'max' if a larger number of this metric is better, 'min' if a smaller one is, or 'neither'; '' if not known."""
    return _description(name)[1]


def _description(name: str) -> tuple[str, str]:
    metric = METRICS.get(name)
    return _described.get(name) or (("", "") if metric is None else (metric.unit, metric.direction))


def shown_score(named: ScoreName, value: float, half: float | None = None) -> str:
    """A score as text for a table, with half its interval if that is given; '-' for NaN.

    Fractions are in %, such as '96.34 ± 0.43' for 0.9634 and 0.0043; other scores have four significant digits. A half
    that is NaN or infinite says nothing and is left out.
    """
    if value != value:
        return "-"
    if half is not None and not math.isfinite(half):
        half = None
    if named.is_fraction:
        return f"{100 * value:.2f}" + (f" ± {100 * half:.2f}" if half is not None else "")
    return f"{value:.4g}" + (f" ± {half:.2g}" if half is not None else "")


def told_score(named: ScoreName, value: float) -> str:
    """A score in a sentence, such as '96.34 %' or 'RMSE 0.5217'."""
    return f"{shown_score(named, value)} %" if named.is_fraction else f"{named.title} {shown_score(named, value)}"


def word(named: ScoreName) -> str:
    """What a sentence calls a score, such as 'accuracy' or 'RMSE'."""
    return named.title if named.title.split()[0].isupper() else named.title[0].lower() + named.title[1:]


def in_unit(named: ScoreName, title: bool = False) -> str:
    """What a table's head calls a score: 'accuracy in %' or 'RMSE'; with `title` as a sentence begins."""
    return (named.title if title else word(named)) + (" in %" if named.is_fraction else "")


def axis(named: ScoreName) -> str:
    """The label of a plot's axis, such as 'accuracy (%)' or 'RMSE'."""
    unit = "%" if named.is_fraction else named.unit
    return word(named) + (f" ({unit})" if unit else "")


def times(named: ScoreName) -> int:
    """With what tables and plots multiply a score: 100 for a fraction, which they show in %; otherwise 1."""
    return 100 if named.is_fraction else 1


SCORES = {kind.score.name: kind.score for kind in KINDS.values()}


def score_of(row: Iterable[str]) -> ScoreName:
    """The score of a row of a table: the first of its columns that is a score; the accuracy if none is."""
    return next((SCORES[name] for name in row if name in SCORES), ACCURACY)


def shown(name: str, value: float) -> str:
    """The text of a metric's value for a table: fractions in %, other numbers with their unit; '-' for NaN."""
    if value != value:
        return "-"
    if is_fraction(name):
        return f"{100 * value:.2f}"
    return f"{value:.4g} {unit_of(name)}".rstrip()


def measurer(
    metrics: Iterable[Metric], federation: Any, labels: str
) -> Callable[[int, str, Mapping], dict[str, float]]:
    """Makes (client id, split, scores) -> {name: value}, for scores that have '{split}_logits'; NaN without examples.

    Where a model diverged, a metric that is NaN has its worst value: NaN would leave the client out of the means.

    Args:
        metrics: what is computed.
        federation: has the labels.
        labels: 'local' or 'global', as the heads have them.
    """
    metrics = list(metrics)

    def measure(client_id: int, split: str, scores: Mapping) -> dict[str, float]:
        examples = int(scores[f"{split}_examples"])
        if not examples:
            return {metric.name: np.nan for metric in metrics}
        y = np.array(federation.raw(client_id, split, labels)[1])
        z = np.asarray(scores[f"{split}_logits"])[:examples, : int(scores[f"{split}_outputs"])]
        found = {metric.name: metric(y.copy(), z.copy()) for metric in metrics}
        if not np.isfinite(z).all():
            other = np.zeros_like(z)  # a metric that is NaN for these outputs, too, is not defined for the labels
            lost = [m for m in metrics if np.isnan(found[m.name]) and not np.isnan(m(y.copy(), other.copy()))]
            found |= {metric.name: _worst(metric) for metric in lost}
        return found

    return measure


def _worst(metric: Metric) -> float:
    """The worst value of a metric; NaN if its direction is 'neither'."""
    least = 0.0 if metric.unit == "fraction" else -np.inf
    return {"min": np.inf, "max": least}.get(metric.direction, np.nan)
