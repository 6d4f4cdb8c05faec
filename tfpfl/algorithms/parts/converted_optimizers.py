"""`as_optimizer` accepts an optimizer of tfpfl, Keras or TFF where a method takes one, and makes an `Optimizer` of it.

An optimizer of Keras owns variables, which the pure functions of an `Algorithm` cannot use. So its configuration is
read, and the same steps are taken without variables. An optimizer of `tff.learning.optimizers` has pure functions
already.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpfl.algorithms.parts.optimizers import (
    OPTIMIZERS,
    Optimizer,
    OptimizerChoice,
    adagrad,
    adam,
    decayed,
    sgd,
)
from tfpfl.checks import InvalidArgument, check_rates, unknown


def as_optimizer(given: Any, rate: float, *, momentum: float = 0.0, what: str = "client_opt") -> Optimizer:
    """Makes an `Optimizer` from what a method was given as its optimizer.

    Args:
        given: a name in `OPTIMIZERS`; an `OptimizerChoice`; an `Optimizer`; an optimizer of Keras (SGD, Adam, AdamW,
            Adagrad); an optimizer of `tff.learning.optimizers`; or a function (rate) -> one of these, such as `adam` or
            `keras.optimizers.Adam`.
        rate: the method's learning rate. An optimizer has its own rate, and then this one is not used.
        momentum: the method's momentum, for 'sgd' only.
        what: the name of the argument, for errors.

    Raises:
        InvalidArgument: `given` is none of these, has a setting that has no pure form here (such as a schedule of
            learning rates, clipping or amsgrad), or is another optimizer than 'sgd' although there is a momentum.
    """
    check_rates(rate=rate, momentum=momentum)
    choice = OptimizerChoice(given) if isinstance(given, str) else given
    if isinstance(choice, OptimizerChoice):
        if choice.name not in OPTIMIZERS:
            raise InvalidArgument(unknown(what, choice.name, OPTIMIZERS))
        _check_momentum(choice.name, momentum, what)
        return choice.checked().at(rate, momentum)
    _check_momentum(type(given).__name__, momentum, what)
    if isinstance(given, Optimizer):
        return given
    if _is_of_keras(given):
        return of_keras(given, what)
    if _is_of_tff(given):
        return of_tff(given, what)
    if callable(given):
        return _made(given, rate, what)
    raise InvalidArgument(_not_one(given, what))


def has_own_rate(given: Any) -> bool:
    """Whether `as_optimizer` does not use its `rate` for this optimizer."""
    return isinstance(given, Optimizer) or _is_of_keras(given) or _is_of_tff(given)


def at_second_rate(given: Any, default: float | None = None, **rate: float | None) -> Any:
    """What takes the steps at a second rate of a method: the method's `client_opt`, or one that stands still.

    An optimizer that has a rate of its own would take these steps at it, whatever the second rate is.

    Args:
        given: the method's `client_opt`.
        default: the default of the second rate.
        rate: the name of the second rate, and its value.

    Returns:
        `given`; or, if the rate is 0 and `given` has a rate of its own, an optimizer that changes nothing.

    Raises:
        InvalidArgument: the rate is another one than its default, and would have no effect.
    """
    ((name, value),) = rate.items()
    if value == default or not has_own_rate(given):
        return given
    if value == 0:
        return Optimizer(lambda weights: (), lambda slots, weights, gradient: (slots, weights))
    raise InvalidArgument(
        f"{name}={value} would have no effect, because client_opt is an optimizer that has a rate already. Leave "
        f"{name} out, or give client_opt as a name or a class, which gets the rates"
    )


def _made(make: Callable, rate: float, what: str) -> Optimizer:
    try:
        made = make(rate)
    except TypeError as error:
        raise InvalidArgument(f"{_not_one(make, what)}. Calling it with the learning rate failed: {error}") from error
    if not has_own_rate(made):
        raise InvalidArgument(f"{_not_one(make, what)}. Called with the learning rate it returned {made!r}")
    return as_optimizer(made, rate, what=what)


def _check_momentum(name: str, momentum: float, what: str) -> None:
    if momentum and name != "sgd":
        raise InvalidArgument(
            f"momentum={momentum} belongs to {what}='sgd', and {what} is {name}: set momentum to 0, and give the "
            "optimizer its own"
        )


def _not_one(given: Any, what: str) -> str:
    return (
        f"{what} must be one of {', '.join(OPTIMIZERS)}, an Optimizer of tfpfl.algorithms.parts, an optimizer of Keras "
        f"or of tff.learning.optimizers, or a function (learning rate) -> one of these; found {given!r}"
    )


def _is_of_keras(given: Any) -> bool:
    return not isinstance(given, type) and hasattr(given, "get_config") and hasattr(given, "apply_gradients")


def _is_of_tff(given: Any) -> bool:
    return not isinstance(given, type) and hasattr(given, "initialize") and hasattr(given, "next")


# What Keras writes into a configuration and what does not change a step; the last two matter only with use_ema.
_NO_EFFECT = {"name", "jit_compile", "is_legacy_optimizer", "ema_momentum", "ema_overwrite_frequency"}
_READ = {  # class -> the entries that are read, besides learning_rate and weight_decay
    "SGD": {"momentum", "nesterov"},
    "Adam": {"beta_1", "beta_2", "epsilon"},
    "AdamW": {"beta_1", "beta_2", "epsilon"},
    "Adagrad": {"initial_accumulator_value", "epsilon"},
}


def of_keras(given: Any, what: str = "client_opt") -> Optimizer:
    """The steps of a Keras optimizer, without its variables. What the optimizer has learned so far is not taken over.

    Args:
        given: SGD, Adam, AdamW or Adagrad of Keras 2.11 or newer, or of Keras 3.
        what: the name of the argument, for errors.

    Raises:
        InvalidArgument: the optimizer is another one, is one of `tf.keras.optimizers.legacy`, or has a setting that is
            not computed here. The message names it.
    """
    kind, module = type(given).__name__, type(given).__module__
    if "legacy" in module:
        raise InvalidArgument(
            f"{what}={kind} of tf.keras.optimizers.legacy is not supported: take keras.optimizers.{kind}"
        )
    if kind not in _READ or "keras" not in module.split(".")[0]:
        raise InvalidArgument(
            f"{what}={kind} of {module} is not supported: of Keras's optimizers there are {', '.join(_READ)}. Another "
            "one can be written as an Optimizer, two pure functions (tfpfl.algorithms.parts.Optimizer)"
        )
    config = given.get_config()
    rate = config["learning_rate"]
    if isinstance(rate, dict):
        raise InvalidArgument(
            f"{what}={kind} has a schedule of learning rates ({rate.get('class_name')}), which is not supported: give "
            "one number"
        )
    known = _READ[kind] | _NO_EFFECT | {"learning_rate", "weight_decay"}
    for name, value in config.items():
        if name not in known and value not in (None, False, 0):
            raise InvalidArgument(f"{what}={kind} has {name}={value!r}, which is not supported: leave it out")
    excluded = "_exclude_from_weight_decay"  # not in the configuration; Keras 2 and 3 have the names in other places
    if any(getattr(given, excluded + end, None) for end in ("", "_names", "_pattern")):
        raise InvalidArgument(
            f"{what}={kind} excludes variables from weight decay, which is not supported: weights have no names here"
        )
    options = {name: float(config[name]) for name in _READ[kind] if name != "nesterov"}
    rate, decay = float(rate), float(config.get("weight_decay") or 0.0)
    if kind == "SGD":
        made = sgd(rate, options["momentum"], nesterov=bool(config["nesterov"]))
    elif kind == "Adagrad":
        made = adagrad(rate, options["epsilon"], initial=options["initial_accumulator_value"])
    else:
        made = adam(rate, **options, epsilon_hat=True)
    return decayed(made, rate, decay) if decay else made


class _Spec:
    """The shape and the dtype of a tensor. The shape may be a tensor, because a head's width K_i may be open."""

    def __init__(self, tensor: Any):
        self.shape = tensor.shape if tensor.shape.is_fully_defined() else tf.shape(tensor)
        self.dtype = tensor.dtype


def of_tff(given: Any, what: str = "client_opt") -> Optimizer:
    """An optimizer of `tff.learning.optimizers` as an `Optimizer`.

    Args:
        given: the optimizer.
        what: the name of the argument, for errors.

    Raises:
        InvalidArgument: it wraps an optimizer of Keras.
    """
    if type(given).__name__ == "KerasOptimizer":
        raise InvalidArgument(f"{what} is TFF's wrapper of an optimizer of Keras: give the optimizer of Keras itself")

    def init(weights: Any) -> Any:
        leaves = tf.nest.flatten(weights)
        state = given.initialize(tuple(map(_Spec, leaves)))
        return tf.nest.map_structure(lambda x: _number(x, leaves[0].dtype), state)

    def step(slots: Any, weights: Any, gradient: Any) -> tuple[Any, Any]:
        slots, moved = given.next(slots, tuple(tf.nest.flatten(weights)), tuple(tf.nest.flatten(gradient)))
        return slots, tf.nest.pack_sequence_as(weights, tf.nest.flatten(moved))

    return Optimizer(init, step, proportional=type(given).__name__ == "_SGD")


def _number(value: Any, dtype: Any) -> Any:
    """A number of the optimizer's state as a tensor; TFF has rates and counts of steps as numbers of Python."""
    if tf.is_tensor(value):
        return value
    return tf.constant(value, dtype) if isinstance(value, float) else tf.constant(value)
