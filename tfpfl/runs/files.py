"""Files that are written whole or not at all."""

import csv
import io
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """The old file or the new one, never half of one."""
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


def write_csv(path: Path, columns, rows) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())
