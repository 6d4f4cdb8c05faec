"""The type of an option that is a list of names, such as `--methods pflego,fedavg`."""

from collections.abc import Iterable

import click

from tfpfl.checks import unknown


class Listed(click.ParamType):
    """Names with commas between them; another name than the known ones is refused before anything is run.

    Args:
        what: what has these names.
        known: the names.
    """

    name = "list"

    def __init__(self, what: str, known: Iterable[str]):
        self._what, self._known = what, list(known)

    def convert(self, value, param, ctx) -> list[str]:
        """The names as a list."""
        names = value.split(",") if isinstance(value, str) else value
        for name in names:
            if name not in self._known:
                self.fail(unknown(self._what, name, self._known), param, ctx)
        return names
