"""The errors of this package. What else is raised is a bug, or comes from the system or the user's own code."""

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
