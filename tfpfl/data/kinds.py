"""Kinds of labels: what a label may be, and by which score a prediction of it is judged.

This file needs no TensorFlow: tables and reports read it. What a head of a kind computes is in `tfpfl.models.heads`.
"""

import math
from typing import NamedTuple

from tfpfl.checks import InvalidArgument, unknown

SORTS = {
    "class": "class ids or names of classes",
    "binary": "0 or 1 for every output",
    "real": "finite numbers",
    "count": "numbers >= 0",
}


class ScoreName(NamedTuple):
    """The score of a kind: what one number says about a client's predictions."""

    name: str  # 'accuracy', 'rmse', ...: names columns, such as 'personal test rmse'
    title: str  # the same in words, at the beginning of a sentence
    unit: str  # 'fraction' for a number in [0, 1], which tables show in %; '' for the unit of the targets
    direction: str  # 'max' if a larger number is better, 'min' if a smaller one is

    @property
    def larger_is_better(self) -> bool:
        """Whether a larger number is better."""
        return self.direction == "max"

    @property
    def is_fraction(self) -> bool:
        """Whether tables show it in %."""
        return self.unit == "fraction"


class LabelKind(NamedTuple):
    """A kind of labels, as its text names it: 'classification', 'quantile:0.9', ..."""

    name: str
    sorts: tuple[str, ...]  # the sorts of targets that it learns from; keys of `SORTS`, first the one with all others
    score: ScoreName
    parameter: float | None = None  # of 'quantile' and 'huber'

    @property
    def text(self) -> str:
        """The text that `label_kind` reads: the name, with the parameter if there is one."""
        return self.name if self.parameter is None else f"{self.name}:{repr(self.parameter).removesuffix('.0')}"

    @property
    def is_classes(self) -> bool:
        """Whether a label is one class of several."""
        return self.name == "classification"


ACCURACY = ScoreName("accuracy", "Accuracy", "fraction", "max")
CLASSIFICATION = LabelKind("classification", ("class",), ACCURACY)
KINDS = {
    kind.name: kind
    for kind in (
        CLASSIFICATION,
        LabelKind("multilabel", ("binary",), ScoreName("exact_match", "Exact match", "fraction", "max")),
        LabelKind("regression", ("real", "count", "binary"), ScoreName("rmse", "RMSE", "", "min")),
        LabelKind("poisson", ("count",), ScoreName("deviance", "Mean deviance", "", "min")),
        LabelKind("quantile", ("real", "count"), ScoreName("pinball", "Pinball loss", "", "min"), 0.5),
        LabelKind("huber", ("real", "count"), ScoreName("mae", "MAE", "", "min"), 1.0),
    )
}
OF_SORT = {"class": "classification", "binary": "multilabel", "real": "regression", "count": "poisson"}


def label_kind(text: "str | LabelKind") -> LabelKind:
    """The kind that a text names.

    Args:
        text: 'classification', 'multilabel', 'regression', 'poisson', 'quantile:Q' with Q in (0, 1), default 0.5, or
            'huber:DELTA' with DELTA > 0 in the unit of the targets, default 1.

    Raises:
        InvalidArgument: there is no such kind, or its parameter is no number or out of range.

    Examples:
        >>> label_kind("quantile:0.9").score.name, label_kind("huber").text
        ('pinball', 'huber:1')
    """
    if isinstance(text, LabelKind):
        return text
    name, colon, number = str(text).partition(":")
    if name not in KINDS:
        raise InvalidArgument(unknown("kind", name, KINDS))
    kind = KINDS[name]
    if not colon:
        return kind
    if kind.parameter is None:
        raise InvalidArgument(f"the kind {name} has no parameter, found {text!r}: write {name}")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (0 < value < 1 if name == "quantile" else 0 < value < math.inf):
        needed = (
            "a number between 0 and 1, as in quantile:0.9" if name == "quantile" else "a number above 0, as in huber:1"
        )
        raise InvalidArgument(f"the parameter of {name} must be {needed}; found {text!r}")
    return kind._replace(parameter=value)


def kind_for(sort: str, wanted: "str | LabelKind | None" = None) -> LabelKind:
    """The kind for a federation's targets: the wanted one, or the usual one for their sort.

    Args:
        sort: 'class', 'binary', 'real' or 'count'.
        wanted: a kind or its text; None for the usual one.

    Raises:
        InvalidArgument: the wanted kind is unknown, or does not learn from targets of this sort.
    """
    kind = label_kind(OF_SORT[sort] if wanted is None else wanted)
    if sort not in kind.sorts:
        fitting = ", ".join(k.name for k in KINDS.values() if sort in k.sorts)
        raise InvalidArgument(
            f"the kind {kind.text} learns from {' or '.join(SORTS[s] for s in kind.sorts)}, but the labels of this "
            f"federation are {SORTS[sort]}. Kinds for them: {fitting}"
        )
    return kind
