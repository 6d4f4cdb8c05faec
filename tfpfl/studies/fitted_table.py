"""A table for the terminal that breaks no name inside a word: columns that have no room stand in a table below it."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

_UNLIMITED = 100_000  # characters; a measure never exceeds the width that it is asked for


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

    def add_column(self, heading: str, *, justify: Literal["left", "right"] = "left") -> None:
        """Adds a column; its cells are markup of rich."""
        self._columns.append((heading, justify))

    def add_row(self, *cells: str) -> None:
        """Adds a row; the cells that are not given are empty."""
        self._rows.append((*cells, *[""] * (len(self._columns) - len(cells))))

    def add_section(self) -> None:
        """Ends a section of rows."""
        self._rows.append(None)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        parts = self._parts(console, options.max_width)
        for i, columns in enumerate(parts):
            yield self._table(columns, options.max_width, first=i == 0, last=len(parts) == 1)
        if len(parts) > 1 and self.caption:  # as wide as the terminal, because the last part may be narrow
            yield Text.from_markup(self.caption, style="table.caption")

    def _parts(self, console: Console, width: int) -> list[list[int]]:
        """The columns of each part, by number: as many as fit, and at least one beside the names."""
        names, rest = list(range(self.names)), list(range(self.names, len(self._columns)))
        parts, unlimited = [names + rest[:1]], console.options.update(width=_UNLIMITED)
        for i in rest[1:]:
            wider = [*parts[-1], i]
            if console.measure(self._table(wider, width), options=unlimited).minimum <= width:
                parts[-1] = wider
            else:
                parts.append([*names, i])
        return parts

    def _table(self, columns: Sequence[int], width: int, *, first: bool = False, last: bool = False) -> Table:
        how: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, self._padding, 0, 0), "caption_justify": "left"}
        table = Table(
            title=self.title if first else None,
            caption=self.caption if last else None,
            title_justify=self.title_justify,
            **how,
        )
        for i in columns:
            heading, justify = self._columns[i]
            texts = [Text.from_markup(heading), *(Text.from_markup(row[i]) for row in self._rows if row)]
            wraps = i < self.names or heading in self._wraps
            # Headings keep their line breaks. A name that begins with a space belongs to the row above; it stays whole.
            pieces = [
                piece
                for text in texts
                for piece in text.plain.split(None if wraps and not text.plain.startswith(" ") else "\n")
            ]
            # A single word that is longer than half a line cannot stay whole beside anything.
            least = min(max(map(cell_len, pieces), default=1), max(width // 2 - 4, 1) if wraps else width)
            table.add_column(heading, justify=justify, min_width=least, no_wrap=not wraps, overflow="fold")
        for row in self._rows:
            if row is None:
                table.add_section()
            elif first or any(row[i] for i in columns[self.names :]):
                table.add_row(*(row[i] for i in columns))
        return table
