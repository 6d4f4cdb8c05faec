"""How much a client counts in an objective that is not the mean: the derivative of the objective by its loss.

`tfpfl.algorithms.transforms.with_objective` weighs what clients send. A method whose client also takes a step of the
same objective on its own weights, such as PFLEGO's joint step on the head, multiplies it by `emphasis(loss)`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tfpfl.checks import InvalidArgument, unknown

OBJECTIVES = ("mean", "fair", "cvar")
_EMPHASIS: ContextVar[Callable | None] = ContextVar("the weight of a client with this loss", default=None)


@contextmanager
def weighing(weight_of: Callable) -> Iterator[None]:
    """Within this context, `emphasis(loss)` is `weight_of(loss)`."""
    before = _EMPHASIS.set(weight_of)
    try:
        yield
    finally:
        _EMPHASIS.reset(before)


def emphasis(loss: Any) -> Any:
    """The weight of a client whose loss is l_i, float []; None if the objective is the mean, where it is 1.

    Args:
        loss: float [], l_i where the gradient is taken.
    """
    weight_of = _EMPHASIS.get()
    return None if weight_of is None else weight_of(loss)


def parsed_objective(text: str) -> tuple[str, float]:
    """The name and the number of an objective.

    Args:
        text: 'mean'; 'fair:q' with q >= 0; or 'cvar:p' with p in (0, 1].

    Returns:
        ('mean', 0.0), ('fair', q) or ('cvar', p). 'fair:0' and 'cvar:1' are the mean.

    Raises:
        InvalidArgument: the text is none of these.
    """
    name, *numbers = text.split(":")
    if name not in OBJECTIVES:
        raise InvalidArgument(unknown("objective", name, OBJECTIVES))
    if name == "mean" and not numbers:
        return "mean", 0.0
    try:
        (number,) = map(float, numbers)
    except ValueError:
        number = math.nan
    if name == "fair" and 0 <= number < math.inf:
        return ("fair", number) if number else ("mean", 0.0)
    if name == "cvar" and 0 < number <= 1:
        return ("cvar", number) if number < 1 else ("mean", 0.0)
    forms = {
        "mean": "mean, without a number",
        "fair": "fair:q with a number q >= 0, such as fair:1",
        "cvar": "cvar:p with a share p of the clients, 0 < p <= 1, such as cvar:0.1",
    }
    raise InvalidArgument(f"the objective {name} is written {forms[name]}; found {text!r}")
