"""Writes a figure to a file."""

from pathlib import Path
from typing import Any

from tfpfl.runs.files import replaced
from tfpfl.studies.plots.style import DPI


def write_picture(figure: Any, path: Path, **how: Any) -> None:
    """Writes a figure as PNG, SVG, PDF, ..., by the file's ending; an older file stays as it was if that fails.

    Args:
        figure: a figure of matplotlib.
        path: the file; without an ending, `.png` is added.
        how: more arguments of `Figure.savefig`. By default a PNG has 200 pixels an inch.
    """
    path = path if path.suffix else path.with_name(path.name + ".png")
    with replaced(path) as temporary, open(temporary, "wb") as file:
        figure.savefig(file, format=path.suffix[1:].lower(), **{"dpi": DPI, **how})
