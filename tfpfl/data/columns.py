"""The columns of a table: a CSV or Parquet file, a DataFrame of pandas or polars, or a dict of columns."""

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from tfpfl.checks import InvalidArgument, Unavailable, extra
from tfpfl.data.arrays import as_array, cut, is_missing

BLOCK = 50_000  # rows of a CSV file that are text in memory at the same time
DELIMITERS = ",;\t"


def table_columns(table: Any, as_text: Sequence[str]) -> dict[str, np.ndarray]:
    """The columns of a table: {name: array [N]}. Those in `as_text` stay text if the table is a CSV file."""
    if isinstance(table, str | os.PathLike):
        path = Path(table)
        kind = path.suffix.lower()
        if kind not in (".csv", ".parquet"):
            raise InvalidArgument(
                f"a table is read from FILE.csv or FILE.parquet, found {path}: convert it, or read it with pandas and "
                "give the DataFrame"
            )
        return csv_columns(path, as_text) if kind == ".csv" else parquet_columns(path)
    if hasattr(table, "collect"):
        raise InvalidArgument(
            f"a table is read whole, and a {type(table).__name__} has no rows yet: give table.collect()"
        )
    listed = "column_names" if _is_arrow(table) else "columns"  # `columns` of pyarrow are the columns themselves
    names = list(table) if isinstance(table, Mapping) else list(getattr(table, listed, []))
    if not names:
        raise InvalidArgument(
            f"a table is a DataFrame, a dict of columns, or the path of a file, found {type(table).__name__}"
        )
    _check_names([str(name) for name in names], "the table")
    columns = {str(name): _as_numpy(str(name), table[name]) for name in names}
    sizes = {len(values) for values in columns.values()}
    if len(sizes) > 1:
        raise InvalidArgument(f"the columns of a table have one length, found {sorted(sizes)}")
    return columns


def _as_numpy(name: str, column: Any) -> np.ndarray:
    if _is_arrow(column):
        values = _of_arrow(column)
    else:
        values = column.to_numpy() if hasattr(column, "to_numpy") else as_array(column, f"column {name!r}")
    if values.ndim != 1:
        raise InvalidArgument(
            f"column {name!r} must have one value in each row, found an array of shape {values.shape}: give every "
            "column of this array a name of its own"
        )
    if values.dtype == object and len(values) and all(isinstance(v, int | float | np.number) for v in values):
        return np.array(values.tolist())  # pandas' own numbers, such as Int64
    return values


def _is_arrow(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "pyarrow"


def _of_arrow(column: Any) -> np.ndarray:
    """A column of pyarrow. One that has each text once, as those of categories are, is written out first.

    `to_numpy` would put the last of these texts where a value is missing.
    """
    if hasattr(column.type, "index_type"):
        column = column.cast(column.type.value_type)
    return column.to_numpy(zero_copy_only=False)


def _check_names(names: Sequence[str], what: str) -> None:
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise InvalidArgument(f"{what} has two columns {twice[0]!r}: rename one of them")


def parquet_columns(path: Path) -> dict[str, np.ndarray]:
    """The columns of a Parquet file: {name: array [N]}."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise Unavailable(
            f"reading {path} needs pyarrow, which is not installed: {extra('tables')}, or save the table as CSV"
        ) from error
    if not path.exists():
        raise InvalidArgument(f"there is no file {path}")
    try:
        read = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise InvalidArgument(f"{path} cannot be read as Parquet: {error}") from error
    _check_names(read.column_names, str(path))
    return {name: _as_numpy(name, read.column(name)) for name in read.column_names}


def csv_columns(
    path: Path, as_text: Sequence[str], is_heading: Callable[[list[str]], bool] | None = None
) -> dict[str, np.ndarray]:
    """The columns of a CSV file. If `is_heading` says no to the first row, they are called '1', '2', ..."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # without the mark that spreadsheets write first
            delimiter = _delimiter(file)
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = next((row for row in reader if row), [])
            if not header:
                raise InvalidArgument(f"{path} is empty: the first line must have the names of the columns")
            rest: Iterator[list[str]] = reader
            if is_heading is not None and not is_heading(header):
                header, rest = numbered(len(header)), chain([header], reader)
            _check_names(header, str(path))
            blocks: dict[str, list[np.ndarray]] = {name: [] for name in header}
            for rows in _blocks(rest, len(header), path):
                for name, texts in zip(header, zip(*rows, strict=True), strict=True):
                    blocks[name].append(np.array(texts, object) if name in as_text else _parsed(texts))
    except FileNotFoundError:
        raise InvalidArgument(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgument(f"{path} cannot be read as CSV in UTF-8: {error}") from error
    return {name: _joined(parts) for name, parts in blocks.items()}


def _delimiter(file: IO[str]) -> str:
    """What stands between the cells: what gives the first two rows equally many cells, and the most of them.

    The name of a column may have commas in it, so the first line alone does not tell. If nothing gives equally many,
    it is what the first line has most of.
    """
    widths = {}
    for mark in DELIMITERS:
        file.seek(0)
        try:
            first = list(islice((row for row in csv.reader(file, delimiter=mark, strict=True) if row), 2))
        except csv.Error:  # with another one, quotes may stand in the middle of a cell
            continue
        if len({len(row) for row in first}) == 1:
            widths[mark] = len(first[0])
    if max(widths.values(), default=1) > 1:
        return max(widths, key=widths.__getitem__)
    file.seek(0)
    line = next((line for line in file if line.strip()), "")
    return max(DELIMITERS, key=line.count)


def _blocks(reader: Iterator[list[str]], width: int, path: Path) -> Iterator[list[list[str]]]:
    rows = (row for row in reader if row)  # an empty line has no row
    done = 0
    while block := list(islice(rows, BLOCK)):
        bad = next((i for i, row in enumerate(block) if len(row) != width), None)
        if bad is not None:
            raise InvalidArgument(
                f"{path}: row {done + bad + 1} has {len(block[bad])} cells, the first line has {width}"
            )
        done += len(block)
        yield block


def _parsed(texts: Sequence[str]) -> np.ndarray:
    """The cells of a column as integers if all are, else as floats with NaN for an empty cell, else as text."""
    for kind in (np.int64, np.float64) if is_plain("".join(texts)) else ():
        try:
            # objects, because in an array of texts every cell takes as much memory as the longest one
            return np.array([cell if cell or kind is np.int64 else "nan" for cell in texts], object).astype(kind)
        except (ValueError, OverflowError):
            continue
    return np.array(texts, object)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    if not parts:
        return np.zeros(0)
    return np.concatenate([part.astype(object) for part in parts] if any(p.dtype == object for p in parts) else parts)


def present(name: str, values: np.ndarray) -> np.ndarray:
    """The values of a column, after the check that none is missing."""
    if values.dtype.kind == "f":
        empty = np.isnan(values)
    elif values.dtype.kind in "OUSmM":
        check_single(name, values)
        empty = np.array([is_missing(value) for value in values], bool)
    else:
        return values
    if empty.any():
        raise InvalidArgument(
            f"column {name!r} has {empty.sum()} missing values, the first in row {int(empty.argmax()) + 1} (the first "
            "row of data is 1): fill them in, or leave these rows out"
        )
    return values


def check_single(name: str, values: np.ndarray) -> None:
    """Checks that no row of a column has a list or an array in it."""
    row = next((i for i, value in enumerate(values) if isinstance(value, np.ndarray | list | tuple)), None)
    if row is not None:
        raise InvalidArgument(
            f"column {name!r} must have one value in each row, found {cut(values[row])} in row {row + 1}: give each of "
            "these values a column of its own"
        )


def is_number(value: Any) -> bool:
    """Whether a cell is a number, or a text that is written as one."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str) or (value.strip() != "" and is_plain(value))


def is_plain(text: str) -> bool:
    """Whether a text has nothing that only Python reads as a part of a number, such as 1_1."""
    return text.isascii() and "_" not in text


def numbered(number: int) -> list[str]:
    """The names of columns that have none."""
    return [str(i) for i in range(1, number + 1)]
