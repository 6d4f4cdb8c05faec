"""Writes files atomically: after a crash the old file or the new one is there, never a part of one.

Texts of strangers, such as the name of a data set, are written so that they stay text: see `csv_cell` and `markdown`.
"""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tfpfl.checks import InvalidArgument, one_line


def write_whole(path: Path, text: str) -> None:
    """Writes text to a file as UTF-8; if that fails or is interrupted, the old file stays as it was."""
    with replaced(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        file.write(text)


def write_keras(path: Path, model: Any) -> None:
    """Writes a model of Keras to a file, whole as `write_whole` writes text."""
    with replaced(path) as temporary:
        named = temporary.with_name(temporary.name + ".keras")  # Keras refuses other names
        try:
            model.save(named)
            named.replace(temporary)
        finally:
            named.unlink(missing_ok=True)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Gives the name of a new file to write, which then takes the place of `path`; it is removed after an error.

    A device such as /dev/stdout has nothing to keep, and is written itself.
    """
    path = Path(os.path.realpath(path)) if path.is_file() else path  # a link goes on to lead to the file
    if path.exists() and not path.is_file():
        yield path
        return
    temporary = path.with_name(path.name + ".new")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())  # before the name, so that a power cut leaves no empty file either
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


_OF_A_FOLDER = ("config.json", "manifest.json", "summary.json", "history.csv", "clients.csv", "live.sqlite")
_ENDINGS = (".raw", ".npy", ".npz", ".keras", ".py", ".bin", ".tflite", ".safetensors")
_NO_TEXT = (".xlsx", ".xls", ".ods", ".parquet", ".json", ".npy", ".npz")


def check_place(path: Path, begins: Sequence[str] = ()) -> None:
    """Checks, before the work whose result it will hold, that a file can be written and holds nothing else.

    Args:
        path: the file.
        begins: how what is written begins, in one of these ways. A file that is there and begins in another way was
            not written by the same command; (): it may have any content.

    Raises:
        InvalidArgument: it is a folder, its folder does not exist, or this user must not write there; it is a file of a
            run or a federation; it begins in another way; or it is text, and the name ends as that of no text.
    """
    if begins:
        check_is_text(path)
    if path.is_dir():
        raise InvalidArgument(f"{path} cannot be written: it is a folder. Name a file")
    if not path.parent.is_dir():
        raise InvalidArgument(
            f"{path} cannot be written: there is no folder {path.parent}. Make it first, or take another path"
        )
    if not os.access(path if path.exists() and not path.is_file() else path.parent, os.W_OK):
        raise InvalidArgument(f"{path} cannot be written: this user must not write into {path.parent}")
    if not path.is_file():
        return
    if any((path.parent / name).is_file() for name in ("state.sqlite", "manifest.json")) and (
        path.name in _OF_A_FOLDER or path.name.startswith("state.sqlite") or path.suffix in _ENDINGS
    ):
        raise InvalidArgument(f"{path} is a file of the run or federation in this folder: name another file")
    if begins and (found := beginning(path)) and not found.startswith(tuple(begins)):
        raise InvalidArgument(
            f"{path} exists, and begins in another way than what is to be written, so it may be your own data: name "
            "another file, or remove this one first"
        )


def check_is_text(path: Path) -> None:
    """Checks that the name of a file for text does not end as that of a workbook or of arrays.

    Raises:
        InvalidArgument: it does.
    """
    if path.suffix.lower() in _NO_TEXT:
        raise InvalidArgument(f"{path}: what is written is text, and no {path.suffix} file. Give another ending")


def beginning(path: Path) -> str:
    """The first 200 bytes of a file as text."""
    with open(path, "rb") as file:
        return file.read(200).decode(errors="replace")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a table as CSV, as `write_whole` does.

    Args:
        path: the file.
        columns: the names of the columns, in their order.
        rows: dicts {column: value}; a missing value is left empty.
    """
    write_whole(path, csv_text(columns, rows))


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table as CSV; the arguments are those of `write_csv`. Every text in it went through `csv_cell`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writerow({name: csv_cell(name) for name in columns})
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def csv_cell(value: Any) -> Any:
    """A value for a CSV file. A text that a spreadsheet would take for a formula gets an apostrophe in front.

    Excel, LibreOffice and Google Sheets compute a cell that begins with = + - or @, and such a formula can send the
    sheet to a stranger. Numbers stay numbers, negative ones too. Control characters are written as their codes, so that
    a row is one line.

    Examples:
        >>> csv_cell("=1+1"), csv_cell(-1.5), csv_cell("PFLEGO (rho=0.1)")
        ("'=1+1", -1.5, 'PFLEGO (rho=0.1)')
    """
    if not isinstance(value, str):
        return value
    shown = one_line(value)
    return f"'{shown}" if shown.lstrip()[:1] in tuple("=+-@＝＋－＠") else shown


_MARKDOWN = str.maketrans({c: f"\\{c}" for c in "\\`*[]|"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def markdown(text: object) -> str:
    """A text as Markdown shows it: no HTML, no links, no emphasis, and no new cell or line of a table.

    Examples:
        >>> markdown("<b>a|b</b> [c](d)")
        '&lt;b&gt;a\\\\|b&lt;/b&gt; \\\\[c\\\\](d)'
    """
    return one_line(text).translate(_MARKDOWN)
