"""Types of options that are checked before anything is run: lists such as `--methods pflego,fedavg`, files to write."""

from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from tfpfl.checks import InvalidArgument, unknown
from tfpfl.runs.files import check_place


class Listed(click.ParamType):
    """Names with commas between them; another name than the known ones is refused.

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


class Several(click.ParamType):
    """Values with commas between them, such as `--seeds 0,1,2`; one that cannot be read is refused.

    Args:
        read: (text) -> the value, such as int; its ValueError is the reason of the refusal.
    """

    name = "list"

    def __init__(self, read: Callable[[str], Any]):
        self._read = read

    def convert(self, value, param, ctx) -> list:
        """The values as a list."""
        if not isinstance(value, str):
            return value
        try:
            return [self._read(text) for text in value.split(",")]
        except ValueError as error:  # InvalidArgument is one
            self.fail(str(error), param, ctx)


class Written(click.Path):
    """A file that is written when all is done; one that cannot be written is refused before."""

    def __init__(self):
        super().__init__(path_type=Path)

    def convert(self, value, param, ctx) -> Path:
        """The path."""
        path = super().convert(value, param, ctx)
        try:
            check_place(path)
        except InvalidArgument as error:
            self.fail(str(error), param, ctx)
        return path


def check_device_options(parser: ArgumentParser, wanted: list[str], known: Iterable[str], file: Path | None) -> None:
    """Checks `--networks` and `--json` of the benchmarks of devices, which use argparse."""
    if strange := [w for w in wanted if not any(name.startswith(w) for name in known)]:
        parser.error(f"no network begins with {strange[0]!r}; there are {'; '.join(known)}")
    try:
        if file:
            check_place(file)
    except InvalidArgument as error:
        parser.error(str(error))
