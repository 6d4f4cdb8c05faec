"""How the help of a command is laid out: options under headings, and the names that an option knows."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from tfpfl.checks import unknown

PATH = click.Path(path_type=Path)  # the type of options that are files or folders


class Between(click.FloatRange):
    """A number in a range. click's own takes nan, which is neither below nor above a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; fails if it is out of the range, or nan."""
        found = super().convert(value, param, ctx)
        if found != found:
            self.fail(f"{value} is no number.", param, ctx)
        return found


POSITIVE = Between(0, 1e6, min_open=True)  # the type of options that are seconds, minutes or norms


class SectionOption(click.Option):
    """An option under a heading of its command's help."""

    def __init__(self, *args: Any, section: str, **kw: Any):
        super().__init__(*args, **kw)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help has headings for its options.

    Args:
        headings: heading -> names of the parameters under it. A `SectionOption` knows its own heading; any other option
            stands under "Options".
    """

    def __init__(self, *args: Any, headings: Mapping[str, Iterable[str]] | None = None, **kw: Any):
        super().__init__(*args, **kw)
        self._heading_of = {name: heading for heading, names in (headings or {}).items() for name in names}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options of the help, each section under its heading."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and (row := option.get_help_record(ctx)):
                own = self._heading_of.get(option.name or "", "Options")
                sections.setdefault(getattr(option, "section", own), []).append(row)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class OneOf(click.Choice):
    """A value from a fixed set. The error for any other value names the nearest one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value; fails if it is not in the set."""
        if value not in self.choices:
            self.fail(unknown("value", value, self.choices), param, ctx)
        return value


NOTHING = object()  # what `OrNone` makes of 'none': None is an option that was not given


class OrNone(click.ParamType):
    """A value of another type, or the word none."""

    def __init__(self, kind: type):
        self.of = click.types.convert_type(kind)
        self.name = self.of.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value, or `NOTHING` for none in capital or small letters; fails if it is neither."""
        return NOTHING if isinstance(value, str) and value.lower() == "none" else self.of.convert(value, param, ctx)


class Names(click.ParamType):
    """A text for which some names are known. Whoever uses the text refuses a wrong one: a file may be right, too.

    Args:
        known: the names, for the shell's completion.
        many: whether the text is a list of names with commas between.
    """

    name = "name"

    def __init__(self, known: Iterable[str], many: bool = False):
        self.known, self.many = tuple(known), many

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The known names that begin like the text; in a list, like its last name."""
        before, comma, last = incomplete.rpartition(",") if self.many else ("", "", incomplete)
        return [CompletionItem(before + comma + name) for name in self.known if name.startswith(last)]


def with_names(text: str, known: Iterable[str]) -> str:
    """A help text with the known names at its end."""
    return f"{text} Known names: {', '.join(known)}."
