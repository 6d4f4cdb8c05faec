"""What a page is made of: tables, pictures, sentences, commands, in sections. The template knows these kinds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup

from tfpfl.checks import InvalidArgument
from tfpfl.studies.report.inline_svg import inline_svg


@dataclass
class Table:
    """Rows under headings; the first cell of a row is its name."""

    kind: ClassVar[str] = "table"
    caption: str
    head: list
    rows: list


@dataclass
class Folded:
    """Tables that are shown when a reader asks for them by these words."""

    kind: ClassVar[str] = "folded"
    words: str
    tables: list


@dataclass
class Picture:
    """An SVG and what it shows."""

    kind: ClassVar[str] = "picture"
    svg: Markup
    title: str
    caption: str


@dataclass
class Note:
    """A sentence."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass
class Commands:
    """What to type."""

    kind: ClassVar[str] = "commands"
    lines: list


@dataclass
class Section:
    """A part of the page, with a heading."""

    name: str
    title: str
    blocks: list


class Pictures:
    """Draws the pictures of a page. It numbers them, so that their ids differ; what cannot be drawn is said instead."""

    def __init__(self):
        self._count = 0

    def draw(self, title: str, caption: str, function: Callable, /, *arguments, **named) -> Picture | Note:
        """The picture that a function of `tfpfl.studies.plots` makes of these arguments.

        Args:
            title: what it shows; a screen reader also gets the last points of its lines.
            caption: how it was measured.
        """
        try:
            figure = function(*arguments, **named)
        except InvalidArgument as error:
            return Note(f"{title}: not drawn. {error}.")
        self._count += 1
        axes = figure.axes[0]
        lines = [line for line in axes.lines if len(line.get_ydata()) and not line.get_label().startswith("_")]
        ends = [f"{line.get_label()} {line.get_ydata()[-1]:.4g}" for line in lines]
        told = f"{title}. {axes.get_ylabel()}, at the last point: {'; '.join(ends)}." if ends else title
        return Picture(Markup(inline_svg(figure, f"picture{self._count}", told)), title, caption)
