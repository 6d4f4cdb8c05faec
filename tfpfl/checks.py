"""The errors of this package. What else is raised is a bug, or comes from the system or the user's own code."""

import warnings
from collections.abc import Iterable
from difflib import get_close_matches


class TfpflError(Exception):
    """An error of ours. Its message is for the user: the command line shows it in one line, without a stack trace."""


class InvalidArgument(TfpflError, ValueError):
    """An argument, an option or a file that cannot be used. The message says what was found and what to do."""


class Unavailable(TfpflError, RuntimeError):
    """Something that was asked for is not here, or did not start: TFF, Ray, a worker, an optional package."""


def unknown(what: str, name, known: Iterable[str]) -> str:
    """The message.

    Examples:
        >>> unknown("network", "mlp20", ["mlp200", "cifar_2conv"])
        "unknown network 'mlp20'; did you mean 'mlp200'? there are mlp200, cifar_2conv"
    """
    known = list(known)
    near = get_close_matches(str(name), known, n=1)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r};{hint} there are {', '.join(known) or 'none'}"


def check_choice(**choices) -> None:
    """name=(value, allowed): the value must be among the allowed ones.

    Raises:
        ValueError: names the argument, and what it may be.
    """
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise InvalidArgument(f"{name} must be one of {', '.join(allowed)}; found {value!r}")


def check_fractions(**fractions) -> None:
    """Probabilities and fractions must lie in [0, 1].

    Raises:
        ValueError: names the fraction.
    """
    for name, value in fractions.items():
        if not 0 <= value <= 1:
            raise InvalidArgument(f"{name} must lie in [0, 1], found {value}")


def check_penalty(eta, implicit_prox=False, **coefficients) -> None:
    """A coefficient must not be negative, and explicit steps on (c / 2) |w - anchor|^2 shrink it only if eta c < 2.

    Raises:
        ValueError: names the coefficient. One that is too stiff only gets a warning: the loss may hold it for a while.
    """
    check_rates(**coefficients)
    for name, value in coefficients.items():
        if eta * value >= 2 and not implicit_prox:
            warnings.warn(
                f"{name}={value} with a rate of {eta} is stiff: explicit steps on the penalty diverge where rate * "
                f"{name} >= 2, here {eta * value:g}; take implicit_prox=True, or a smaller rate",
                stacklevel=3,
            )


def check_rates(**rates) -> None:
    """Rates, momenta and coefficients must be finite and not negative.

    Raises:
        ValueError: names the rate.
    """
    for name, value in rates.items():
        if not 0 <= value < float("inf"):
            raise InvalidArgument(f"{name} must be a finite number >= 0, found {value}")
