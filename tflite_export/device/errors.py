"""The errors of the modules that run on a device. They import NumPy and an interpreter only, and nothing of tfpfl."""

from typing import Any


class InvalidInput(ValueError):
    """An argument or a file cannot be used. The command line shows the message in one line."""


class BundleError(InvalidInput):
    """A bundle, or an input for it, cannot be used. The message says what was found."""


def shown(value: Any) -> str:
    """A value of a file as messages show it: in 80 characters."""
    found = "a longer number" if isinstance(value, int) and abs(value) > 10**20 else repr(value)
    return found if len(found) <= 80 else found[:80] + "..."
