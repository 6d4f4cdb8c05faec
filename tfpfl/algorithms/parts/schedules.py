"""Schedules of learning rates: what a method's rates are multiplied by in round t.

A builder takes its rates as numbers. Where a rate enters a step it says `rate("eta", eta)`, or gives its optimizer to
`paced`. Without a schedule these change nothing. With one, `tfpfl.algorithms.transforms.scheduled` says what the factor
of the round is while the functions of the algorithm are traced; the factor is a tensor, so no graph is made anew.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import InvalidArgument, unknown, warn_user
from tfpfl.models import tree

SMALLEST = 1e-12  # a coefficient that is divided by a rate is divided by at least this part of it


class Now(NamedTuple):
    """The factor of the round that is being computed."""

    factor: Any  # float [], of the model's dtype
    of: tuple  # names of the rates that have it; () for those that have it by default
    asked: dict  # {name: whether it has the factor by default} of all rates that were asked for


_NOW: ContextVar[Now | None] = ContextVar("the factor of the learning rates in this round", default=None)


@contextmanager
def factored(now: Now | None) -> Iterator[None]:
    """Within this context, rates have the factor `now`; None for no factor."""
    before = _NOW.set(now)
    try:
        yield
    finally:
        _NOW.reset(before)


def factor(name: str, *, by_default: bool = True) -> Any:
    """The factor of a rate in this round, float []; None if it follows no schedule.

    Args:
        name: the rate's hyperparameter, such as 'eta'.
        by_default: whether the rate follows a schedule that names no rates. False for a rate that multiplies what
            scheduled steps have made, which would otherwise have the factor twice.
    """
    now = _NOW.get()
    if now is None:
        return None
    now.asked[name] = by_default
    return now.factor if (name in now.of if now.of else by_default) else None


def rate(name: str, value: Any, *, by_default: bool = True) -> Any:
    """A learning rate in this round: `value` times the factor of the schedule; `value` itself without a schedule.

    Args:
        name, by_default: as in `factor`.
        value: the rate, a number.

    Examples:
        >>> rate("eta", 0.1)
        0.1
    """
    its_factor = factor(name, by_default=by_default)
    return value if its_factor is None else tree.as_dtype(value, its_factor.dtype) * its_factor


def divided(name: str, value: Any, *, by_default: bool = True) -> Any:
    """A coefficient that is divided by a rate, such as lambda / alpha: `value` divided by the factor of the schedule.

    The factor counts as at least `SMALLEST`, so that a rate of 0 gives a number.
    """
    its_factor = factor(name, by_default=by_default)
    if its_factor is None:
        return value
    return tree.as_dtype(value, its_factor.dtype) / tf.maximum(its_factor, tree.as_dtype(SMALLEST, its_factor.dtype))


def paced(optimizer: Optimizer, name: str, *, by_default: bool = True) -> Optimizer:
    """An optimizer whose steps have the factor of a rate: w + factor (step(w) - w). Its state is what it was.

    So momentum and moments are those of the gradients, as in other libraries when a rate changes.

    Args:
        optimizer: any `Optimizer` whose steps are proportional to its rate, as all of tfpfl, Keras and TFF are.
        name, by_default: as in `factor`.
    """

    def step(slots: Any, weights: Any, gradient: Any) -> tuple[Any, Any]:
        slots, moved = optimizer.step(slots, weights, gradient)
        its_factor = factor(name, by_default=by_default)
        if its_factor is not None:
            moved = tree.add_scaled(weights, its_factor, tree.subtract(moved, weights))
        return slots, moved

    return optimizer._replace(step=step)


def factor_of(schedule: str | Callable, rounds: int | None = None) -> Callable:
    """Makes the function (t, float64 []) -> factor of the rates in round t = 1, 2, ..., float64 [].

    Args:
        schedule: a text. F is the factor in the end, and T0 a number of rounds:

            constant             1
            cosine:F:T           F + (1 - F) (1 + cos(pi (t - 1) / (T - 1))) / 2, and F after round T; default: F = 0,
                                 T = `rounds`
            step:R1,R2,...:F     F after round R1, F^2 after round R2, ...
            inverse_sqrt:T0      1 / sqrt(1 + (t - 1) / T0); default: T0 = 1
            inverse:T0           1 / (1 + (t - 1) / T0); default: T0 = 1

            Or a function (t) -> factor of your own, of TensorFlow's operations.
        rounds: the number of rounds of the run, for 'cosine' without T.

    Raises:
        InvalidArgument: the text is none of these, a number is out of range, or 'cosine' has no last round.
    """
    if callable(schedule):
        return schedule
    name, *given = parsed(schedule, rounds)
    if name == "cosine":
        end, last = given
        return lambda t: end + (1 - end) * (1 + tf.cos(math.pi * tf.minimum((t - 1) / max(last - 1, 1), 1))) / 2
    if name == "step":
        after, times = given
        factors = [times**n for n in range(len(after) + 1)]

        def steps(t: Any) -> Any:
            passed = tf.reduce_sum(tf.cast(t > tf.constant(after, tf.float64), tf.int32))
            return tf.gather(tf.constant(factors, tf.float64), passed)

        return steps
    if name == "inverse_sqrt":
        return lambda t: 1 / tf.sqrt(1 + (t - 1) / given[0])
    if name == "inverse":
        return lambda t: 1 / (1 + (t - 1) / given[0])
    return tf.ones_like


SCHEDULES = ("constant", "cosine", "step", "inverse_sqrt", "inverse")
_FORMS = {
    "constant": "constant",
    "cosine": "cosine, cosine:F or cosine:F:T, with the last factor F >= 0 and the last round T >= 1",
    "step": "step:R1,R2,...:F, with rounds R1 < R2 < ... >= 1 and a factor F >= 0, such as step:30,60:0.1",
    "inverse_sqrt": "inverse_sqrt or inverse_sqrt:T0, with T0 > 0",
    "inverse": "inverse or inverse:T0, with T0 > 0",
}


def parsed(text: str, rounds: int | None = None) -> tuple:
    """The parts of a schedule's text: its name and its numbers.

    Args:
        text: see `factor_of`.
        rounds: the last round of 'cosine', if the text has none.

    Returns:
        ('constant',), ('cosine', F, T), ('step', (R1, R2, ...), F), ('inverse_sqrt', T0) or ('inverse', T0).

    Raises:
        InvalidArgument: as in `factor_of`.
    """
    name, *parts = text.split(":")
    if name not in SCHEDULES:
        raise InvalidArgument(unknown("schedule", name, SCHEDULES))
    found: tuple | None = None
    with suppress(ValueError):
        if name == "constant" and not parts:
            found = (name,)
        elif name == "cosine" and len(parts) <= 2:
            found = (name, _number(parts[0]) if parts else 0.0, _whole(parts[1]) if len(parts) == 2 else rounds)
        elif name == "step" and len(parts) == 2:
            after = tuple(map(_whole, parts[0].split(",")))
            found = (name, after, _number(parts[1])) if list(after) == sorted(set(after)) else None
        elif name.startswith("inverse") and len(parts) <= 1:
            found = (name, _number(parts[0], positive=True) if parts else 1.0)
    if found is None:
        raise InvalidArgument(f"the schedule {name} is written {_FORMS[name]}; found {text!r}")
    if found[-1] is None:
        raise InvalidArgument(
            f"the schedule {text!r} needs its last round here: write cosine:F:T, such as cosine:0:200"
        )
    return found


def _number(text: str, positive: bool = False) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ValueError
    return value


def _whole(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise ValueError
    return int(text)


def with_end(text: str | None, rounds: int) -> str | None:
    """The text with the last round of 'cosine' in it, so that a run that gets more rounds keeps its schedule.

    Args:
        text: see `factor_of`. None, and 'constant', are no schedule: None.
        rounds: the number of rounds of the run.
    """
    if text is None or (found := parsed(text, rounds))[0] == "constant":
        return None
    return f"cosine:{found[1]!r}:{found[2]}" if found[0] == "cosine" else text


def say_if_at_0(text: str | None, rounds: int) -> None:
    """Warns if a run gets more rounds than its cosine has, which has fallen to 0: its rates stay there.

    Args:
        text: a schedule with its numbers, as `with_end` writes it; None: no schedule.
        rounds: the new number of rounds of the run.
    """
    name, *given = parsed(text, rounds) if text is not None else ("constant",)
    if name == "cosine" and given[0] == 0 and given[1] < rounds:
        warn_user(
            f"the rates of schedule {text!r} are 0 from round {given[1]} on: rounds up to {rounds} train little or "
            f"nothing. To train longer, start a new run with --rounds {rounds}, or one whose end is above 0, such as "
            "cosine:0.1"
        )


def check_schedule(text: str | None, of: Sequence[str], rounds: int, known: Iterable[str]) -> None:
    """Checks a schedule's text and the names of the rates that follow it, as far as that is possible without a model.

    Args:
        text: see `factor_of`; None: no schedule.
        of: the names of the rates that follow it.
        rounds: the number of rounds of the run.
        known: the names of the method's hyperparameters.

    Raises:
        InvalidArgument: the text is wrong, there are names without a schedule, or a name is no hyperparameter.
    """
    if text is not None:
        parsed(text, rounds)
    elif of:
        raise InvalidArgument(
            f"schedule_of says what a schedule is for, but there is none: found {', '.join(map(str, of))}"
        )
    for name in of:
        if name not in (names := list(known)):
            raise InvalidArgument(unknown("learning rate in schedule_of", name, names))
