"""The blocks that a page consists of: tables, pictures, sentences and commands, in sections. page.html writes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup

from tfpfl.checks import InvalidArgument
from tfpfl.studies.report.inline_svg import inline_svg


@dataclass
class Table:
    """A table: a caption, headings and rows. The first cell of a row is its name."""

    kind: ClassVar[str] = "table"
    caption: str
    head: list
    rows: list


@dataclass
class Folded:
    """Tables that are hidden until the reader clicks on these words."""

    kind: ClassVar[str] = "folded"
    words: str
    tables: list


@dataclass
class Picture:
    """A picture in SVG with its title and caption."""

    kind: ClassVar[str] = "picture"
    svg: Markup
    title: str
    caption: str


@dataclass
class Note:
    """A paragraph of plain text."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass
class Commands:
    """Lines to type on the command line."""

    kind: ClassVar[str] = "commands"
    lines: list


@dataclass
class Section:
    """A part of the page: an anchor, a heading and blocks."""

    name: str
    title: str
    blocks: list


class Pictures:
    """Draws the pictures of a page, and numbers them, so that their HTML ids differ."""

    def __init__(self):
        self._count = 0

    def draw(self, title: str, caption: str, function: Callable, /, *arguments, **named) -> Picture | Note:
        """Calls a function of `tfpfl.studies.plots` and returns its picture, or a `Note` that says why there is none.

        Args:
            title: what the picture shows; a screen reader also reads the last values of its lines.
            caption: how the numbers were measured.
            function, arguments, named: the function, and what it is called with.
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
