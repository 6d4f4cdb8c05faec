"""Writes files atomically: after a crash the old file or the new one is there, never a part of one."""

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Writes text to a file; if that fails or is interrupted, the old file stays as it was."""
    temporary = path.with_name(path.name + ".new")
    try:
        with open(temporary, "w", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a table as CSV, as `write_whole` does.

    Args:
        path: the file.
        columns: the names of the columns, in their order.
        rows: dicts {column: value}; a missing value is left empty.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())
