"""A table for the terminal that breaks no name inside a word: columns that have no room stand in a table below it."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tfpfl.checks import one_line

_UNLIMITED = 100_000  # characters; a measure never exceeds the width that it is asked for


def text(value: object, most: int | None = None) -> str:
    """A text for a table of the terminal: one line, and rich reads no [colours] or [links] in it; see `one_line`."""
    return escape(one_line(value, most))


class FittedTable:
    """A table of rich that fits the width of the terminal.

    rich makes columns narrower until the table fits, and then breaks words, or cuts numbers off. Here a text wraps
    between words only. If the columns do not fit side by side, those that are left over follow in further tables, each
    with the columns of names.

    Args:
        title, caption: the texts above and below; the caption is one paragraph. Both are markup of rich.
        names: number of columns, from the left, that every part of the table begins with.
        title_justify: where the title stands.
        padding: number of spaces between columns.
        wraps: the headings of further columns whose texts may wrap between words; columns of names always may.
    """

    def __init__(
        self,
        *,
        title: str | None = None,
        caption: str | None = None,
        names: int = 1,
        title_justify: Literal["left", "center"] = "center",
        padding: int = 1,
        wraps: Sequence[str] = (),
    ):
        self.title, self.caption, self.names, self.title_justify = title, caption, names, title_justify
        self._padding, self._wraps = padding, wraps
        self._columns: list[tuple[str, Literal["left", "right"]]] = []
        self._rows: list[tuple[str, ...] | None] = []  # None: a line between two sections

    @property
    def headings(self) -> list[str]:
        """The headings of the columns."""
        return [heading for heading, _ in self._columns]

    def cells(self, heading: str) -> list[str]:
        """The cells of the first column with this heading, from the top."""
        i = self.headings.index(heading)
        return [row[i] for row in self._rows if row]

    def add_columns(self, *headings: str, justify: Literal["left", "right"] = "left") -> None:
        """Adds columns; their cells are markup of rich."""
        self._columns += [(heading, justify) for heading in headings]

    def add_row(self, *cells: str) -> None:
        """Adds a row; the cells that are not given are empty."""
        self._rows.append((*cells, *[""] * (len(self._columns) - len(cells))))

    def add_section(self) -> None:
        """Ends a section of rows."""
        self._rows.append(None)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        parts = self._parts(console, options)
        for i, columns in enumerate(parts):
            widths = self._widths(columns, console, options)
            yield self._table(columns, widths, first=i == 0, last=len(parts) == 1)
        if len(parts) > 1 and self.caption:  # as wide as the terminal, because the last part may be narrow
            yield Text.from_markup(self.caption, style="table.caption")

    def _parts(self, console: Console, options: ConsoleOptions) -> list[list[int]]:
        """The columns of each part, by number: as many as fit, and at least one beside the names."""
        names, rest = list(range(self.names)), list(range(self.names, len(self._columns)))
        parts = [names + rest[:1]]
        for i in rest[1:]:
            wider = [*parts[-1], i]
            if self._room(wider, console, options) >= 0:
                parts[-1] = wider
            else:
                parts.append([*names, i])
        return parts

    def _room(self, columns: Sequence[int], console: Console, options: ConsoleOptions) -> int:
        """The characters of a line that are left where each of the columns has its least width."""
        widths = [self._least(i, options.max_width) for i in columns]
        empty = self._table(columns, widths, empty=True)
        return options.max_width - console.measure(empty, options=options.update(width=_UNLIMITED)).minimum

    def _widths(self, columns: Sequence[int], console: Console, options: ConsoleOptions) -> list[int]:
        """The width of each column: at least that of its longest word, and more where there is room.

        rich would find widths by itself, but makes columns narrower than their longest word.
        """
        widths, room = [self._least(i, options.max_width) for i in columns], self._room(columns, console, options)
        wanted = [max(self._longest(i) - width, 0) for i, width in zip(columns, widths, strict=True)]
        for left, place in enumerate(
            sorted(range(len(columns)), key=wanted.__getitem__)
        ):  # who wants least comes first
            more = max(min(wanted[place], room // (len(columns) - left)), 0)
            widths[place] += more
            room -= more
        return widths

    def _texts(self, column: int) -> list[str]:
        heading, _ = self._columns[column]
        return [Text.from_markup(text).plain for text in (heading, *(row[column] for row in self._rows if row))]

    def _longest(self, column: int) -> int:
        return max(cell_len(line) for text in self._texts(column) for line in text.split("\n"))

    def _least(self, column: int, width: int) -> int:
        """The width of the longest word of a column that wraps, or of the longest line of one that does not."""
        if not self._wrapped(column):
            return min(self._longest(column), width)
        # A name that begins with a space belongs to the row above; it stays whole.
        pieces = [piece for text in self._texts(column) for piece in ([text] if text.startswith(" ") else text.split())]
        most = max(width // 2 - 4, 1)
        if column < self.names == 1:  # a longer word can stay whole beside one column at a time
            beside = [self._least(i, width) for i in range(self.names, len(self._columns))]
            most = max(most, width - max(beside, default=0) - 2 * self._padding - 3)
        return min(max(map(cell_len, pieces), default=1), most)

    def _wrapped(self, column: int) -> bool:
        return column < self.names or self._columns[column][0] in self._wraps

    def _table(
        self,
        columns: Sequence[int],
        widths: Sequence[int],
        *,
        first: bool = False,
        last: bool = False,
        empty: bool = False,
    ) -> Table:
        how: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, self._padding, 0, 0), "caption_justify": "left"}
        table = Table(
            title=self.title if first else None,
            caption=self.caption if last else None,
            title_justify=self.title_justify,
            **how,
        )
        for i, width in zip(columns, widths, strict=True):
            heading, justify = self._columns[i]
            table.add_column(heading, justify=justify, width=width, no_wrap=not self._wrapped(i), overflow="fold")
        for row in () if empty else self._rows:
            if row is None:
                table.add_section()
            elif first or any(row[i] for i in columns[self.names :]):
                table.add_row(*(row[i] for i in columns))
        return table
