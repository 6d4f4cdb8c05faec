"""Metrics of a client's predictions besides accuracy and loss: those that have a name here, and the user's own.

A metric is a function of the labels [N] and the logits [N, K] of one client and one split. It is computed where the
scores are collected, in this process, for every engine.
"""

import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfpfl.checks import InvalidArgument, check_choice, one_line, unknown

ALWAYS = {"accuracy": "max", "loss": "min"}  # what every evaluation has: its direction
DIRECTIONS = ("max", "min")
_TAKEN = (*ALWAYS, "examples", "correct", "logits", "outputs", "finite", "rejected", "clients", "round", "seconds")


@dataclass(frozen=True)
class Metric:
    """A number that is computed from a client's labels and logits on one split.

    Args:
        name: letters, digits and _; it names columns, such as 'personal test macro_f1'.
        function: (labels int [N], logits float [N, K]) -> number. N is at least 1. NaN stands for "not defined for
            these examples": the client is then left out of means, as one without examples is.
        unit: 'fraction' for a number in [0, 1], which tables show in %; otherwise the unit's name, '' for none.
        direction: 'max' if a larger number is better, 'min' if a smaller one is.

    Raises:
        InvalidArgument: the name is not such a text or is taken, or the direction is another word.
    """

    name: str
    function: Callable[[np.ndarray, np.ndarray], float]
    unit: str = ""
    direction: str = "max"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z]\w*", self.name, re.ASCII) or self.name in _TAKEN:
            raise InvalidArgument(
                "the name of a metric has letters, digits and _, begins with a letter, and is not one of "
                f"{', '.join(_TAKEN)}; found {self.name!r}. Write Metric('name', function)"
            )
        check_choice(direction=(self.direction, DIRECTIONS))

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


def macro_f1(labels: np.ndarray, logits: np.ndarray) -> float:
    """The mean of the classes' F1, over the classes that are among the labels or the predictions."""
    right, labelled, predicted = _counts(labels, logits)
    total = labelled + predicted
    return float(np.mean(2 * right[total > 0] / total[total > 0]))


def balanced_accuracy(labels: np.ndarray, logits: np.ndarray) -> float:
    """The mean of the classes' recall, over the classes that are among the labels."""
    right, labelled, _ = _counts(labels, logits)
    return float(np.mean(right[labelled > 0] / labelled[labelled > 0]))


def top2_accuracy(labels: np.ndarray, logits: np.ndarray) -> float:
    """The fraction of the examples whose class has one of the two largest logits; of equal logits the first count."""
    best = np.argsort(-logits, axis=1, kind="stable")[:, :2]
    return float((best == labels[:, None]).any(1).mean())


def ece(labels: np.ndarray, logits: np.ndarray) -> float:
    """The expected calibration error, with 15 bins of equal width (Guo et al., ICML 2017).

    The examples are sorted into bins by the probability of the predicted class. The error is the mean over examples of
    |accuracy of the bin - mean probability in the bin|.
    """
    p = _softmax(logits)
    top, right = p.max(1), p.argmax(1) == labels
    bins = np.minimum((top * 15).astype(np.int64), 14)
    gaps = np.bincount(bins, right, 15) - np.bincount(bins, top, 15)
    return float(np.abs(gaps).sum() / len(labels))


def brier(labels: np.ndarray, logits: np.ndarray) -> float:
    """The Brier score: the mean of the squared distances between probabilities and one-hot labels, in [0, 2]."""
    return float(((_softmax(logits) - np.eye(logits.shape[1])[labels]) ** 2).sum(1).mean())


def _counts(labels: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every class: how many examples are predicted right, have this label, and are predicted to have it."""
    found, k = logits.argmax(1), logits.shape[1]
    return tuple(np.bincount(of, minlength=k) for of in (labels[found == labels], labels, found))  # type: ignore[return-value]


def _softmax(logits: np.ndarray) -> np.ndarray:
    z = np.asarray(logits, np.float64)
    z = np.exp(z - z.max(1, keepdims=True))
    return z / z.sum(1, keepdims=True)


_BUILT_IN = (
    Metric("macro_f1", macro_f1, "fraction"),
    Metric("balanced_accuracy", balanced_accuracy, "fraction"),
    Metric("top2_accuracy", top2_accuracy, "fraction"),
    Metric("ece", ece, "fraction", "min"),
    Metric("brier", brier, "", "min"),
)
NAMES = tuple(metric.name for metric in _BUILT_IN)
METRICS = {metric.name: metric for metric in _BUILT_IN}  # `register_metric` adds to it


def register_metric(metric: Metric | Callable[[np.ndarray, np.ndarray], float]) -> Metric:
    """Lets this process know a metric by its name, as the entry `metrics` of a `RunConfig` needs it.

    Args:
        metric: a `Metric`, or a function with a name of its own; a larger number of it is then better. An earlier
            metric of this name is replaced.

    Raises:
        InvalidArgument: the name is that of a metric of tfpfl, or cannot be one.
    """
    metric = metric if isinstance(metric, Metric) else _of_function(metric)
    if metric.name in NAMES and metric != METRICS[metric.name]:
        raise InvalidArgument(f"{metric.name} is the name of a metric of tfpfl: take another name")
    METRICS[metric.name] = metric
    return metric


def as_metric(metric: str | Metric | Callable[[np.ndarray, np.ndarray], float]) -> Metric:
    """The metric of a name or of a function; a `Metric` is returned as it is.

    Raises:
        InvalidArgument: this process knows no metric of this name, or the function has no name that a metric can have.
    """
    if isinstance(metric, str):
        if metric not in METRICS:
            raise InvalidArgument(
                f"{unknown('metric', metric, (*ALWAYS, *METRICS))}. A metric of your own is written FILE.py:FUNCTION; "
                "or, in Python, it is made known in this process before: tfpfl.runs.register_metric(function)"
            )
        return METRICS[metric]
    return metric if isinstance(metric, Metric) else _of_function(metric)


def _of_function(function: Callable[[np.ndarray, np.ndarray], float]) -> Metric:
    return Metric(getattr(function, "__name__", type(function).__name__), function)


def metric_names(metrics: Iterable[Any]) -> tuple[str, ...]:
    """The names of metrics, each once; functions are registered. 'accuracy' and 'loss' are left out, as always there.

    Raises:
        InvalidArgument: something else than names, functions and metrics, or a name that no metric can have.
    """
    names: list[str] = []
    for metric in metrics:
        if not isinstance(metric, str | Metric) and not callable(metric):
            raise InvalidArgument(f"a metric is a name, a function or a Metric; found {metric!r}")
        name = metric if isinstance(metric, str) else register_metric(metric).name
        if name in ALWAYS or name in names:
            continue
        Metric(name, macro_f1)  # checks the name
        names.append(name)
    return tuple(names)


def known_metrics(names: Iterable[str]) -> list[Metric]:
    """The metrics of these names. One that this process does not know raises the error of `as_metric` when it is used.

    So a run with somebody's own metric can be read and exported where the metric is not known.
    """

    def missing(name: str) -> Callable[[np.ndarray, np.ndarray], float]:
        return lambda labels, logits: as_metric(name)(labels, logits)

    return [METRICS.get(name) or Metric(name, missing(name), *_described.get(name, ())) for name in names]


def describe_metric(name: str, unit: str, direction: str) -> None:
    """Lets tables of this process know the unit and the direction of a metric, whose function it need not know."""
    _described[name] = (unit, direction)


_described: dict[str, tuple[str, str]] = {}  # name -> unit and direction


def is_fraction(name: str) -> bool:
    """Whether tables show a metric in %; not if this process does not know its unit."""
    return _unit(name) == "fraction"


def _unit(name: str) -> str:
    return METRICS[name].unit if name in METRICS else _described.get(name, ("",))[0]


def shown(name: str, value: float) -> str:
    """The text of a metric's value for a table: fractions in %, other numbers with their unit; '-' for NaN."""
    if value != value:
        return "-"
    if is_fraction(name):
        return f"{100 * value:.2f}"
    return f"{value:.4g} {_unit(name)}".rstrip()


def measurer(
    metrics: Iterable[Metric], federation: Any, labels: str
) -> Callable[[int, str, Mapping], dict[str, float]]:
    """Makes (client id, split, scores) -> {name: value}, for scores that have '{split}_logits'; NaN without examples.

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
        return {metric.name: metric(y, z) for metric in metrics}

    return measure
