"""Checks that a model fits the examples: whole numbers such as tokens come as they are, labels are of its kind."""

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data.federation import Federation
from tfpfl.data.kinds import kind_for
from tfpfl.data.reading import value_range
from tfpfl.models.split import SplitModel


def check_targets(model: SplitModel, federation: Federation) -> None:
    """Checks that the model's kind of head learns from the federation's labels.

    Raises:
        InvalidArgument: it does not; the message names the kinds that do.
    """
    targets = federation.targets
    kind_for("class" if targets is None else targets.sort, model.kind.label)


def check_inputs(model: SplitModel, federation: Federation) -> None:
    """Checks a federation's examples for a backbone that casts its input, or a part of it, to integers.

    A cast to integers tells nothing: scaled tokens all become 0, and other numbers lose what is after the point.

    Raises:
        InvalidArgument: the examples are scaled or shifted; or, if the backbone takes whole numbers only, they are not
            whole, too large to be exact in the model's dtype, or outside of the Embedding's rows.
    """
    if model.reads == "numbers":
        return
    preprocessing = federation.manifest["preprocessing"]
    scale, shift = preprocessing["scale"], preprocessing["shift"]
    what = "takes whole numbers (such as tokens for an Embedding)"
    if (scale, shift) != (1, 0):
        raise InvalidArgument(
            f"the backbone {what}, but the federation's examples are scaled: x = raw * {scale:.6g} + {shift:g}, which "
            "would be cut down to whole numbers. Make the federation again with scale=1: then tokens stay as they are"
        )
    if model.reads == "mixed":
        return
    low, high, whole = value_range(federation)
    if not whole:
        raise InvalidArgument(
            f"the backbone {what}, but examples of the federation are not whole (they lie between {low:g} and "
            f"{high:g}): give the tokens as integers, or take a backbone for numbers"
        )
    _check_range(model, low, high)


def check_whole(model: SplitModel, x: np.ndarray, client: int) -> None:
    """The same check for the examples x [n, ...] that one client was given without a federation.

    Raises:
        InvalidArgument: as `check_inputs`; the message names the client.
    """
    if model.reads != "whole":
        return
    if x.dtype.kind == "f" and not (x == np.floor(x)).all():
        raise InvalidArgument(
            f"the backbone takes whole numbers (such as tokens for an Embedding), but examples of client {client} are "
            "not whole: give integers"
        )
    _check_range(model, float(x.min()), float(x.max()))


def _check_range(model: SplitModel, low: float, high: float) -> None:
    exact = 2 ** (np.finfo(model.dtype).nmant + 1)
    if max(abs(low), abs(high)) > exact:
        raise InvalidArgument(
            f"examples go up to {max(abs(low), abs(high)):,.0f}, but whole numbers are exact in {model.dtype} only up "
            f"to {exact:,}: number the tokens from 0 on"
        )
    if model.vocabulary is not None and (low < 0 or high >= model.vocabulary):
        raise InvalidArgument(
            f"examples go from {low:.0f} to {high:.0f}, but the backbone's Embedding has rows 0 to "
            f"{model.vocabulary - 1}: give it input_dim={max(high, 0) + 1:.0f} or more, and tokens from 0 on"
        )
