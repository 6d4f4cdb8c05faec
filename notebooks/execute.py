"""Runs notebooks top to bottom in fresh kernels and saves them with their outputs: `make notebooks`.

    python notebooks/execute.py [NOTEBOOK.ipynb ...]

A cell with the tag 'varies' prints what changes from run to run; one with the tag 'tff' what it prints only where
TensorFlow Federated is installed.
"""

import base64
import io
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def executed(path: Path):
    """The notebook after a run in a fresh kernel of this Python, in a folder of its own.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed, or hung: it took more than an hour.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))  # this checkout's tfpfl
        env = {**os.environ, "PYTHONPATH": paths, "TFPFL_CACHE": folder, "TMPDIR": folder}
        env.pop("PYTEST_CURRENT_TEST", None)  # with it, the kernel would not show what libraries in C++ write
        client = NotebookClient(notebook, timeout=3600, kernel_name="python3", record_timing=False)
        client.execute(cwd=folder, env=env)
    return normalised(notebook, path.stem[:2])


def normalised(notebook, prefix: str):
    """Without what depends on the machine: cells named by place, no versions of the kernel."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook.nbformat_minor = 5
    for i, cell in enumerate(notebook.cells, 1):
        cell.id = f"{prefix}-{i:02}"
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
        for output in cell.get("outputs", ()):
            if output.output_type in ("display_data", "execute_result"):
                output["metadata"] = {}
                if "image/png" in output.data:
                    output.data["image/png"] = smaller(output.data["image/png"])
    return notebook


def smaller(picture: str) -> str:
    """A PNG in base64 with 64 colours, a quarter of the bytes: it is in the repository for ever.

    Colours are kept one after the other, first the one whose pixels would be changed most without it: pixels times
    distance to the nearest colour kept so far. So lines, bars and legends stay as they are, and the rest becomes the
    nearest of the kept colours.
    """
    import numpy as np
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB"))
    numbers, place, count = np.unique(pixels @ [65536, 256, 1], return_inverse=True, return_counts=True)
    colors = np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255], axis=1)
    kept, nearest, distance = [], np.zeros(len(colors), np.uint8), np.full(len(colors), np.inf)
    while len(kept) < 64 and distance.any():
        color = int((count * distance).argmax()) if kept else int(count.argmax())
        away = np.abs(colors - colors[color]).sum(axis=1)
        nearest[away < distance] = len(kept)
        distance = np.minimum(distance, away)
        kept.append(color)
    reduced = Image.fromarray(nearest[place].reshape(pixels.shape[:2]))
    reduced.putpalette(colors[kept].astype(np.uint8).tobytes())
    out = io.BytesIO()
    reduced.save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode() + "\n"


def main(arguments) -> None:
    """Each in place."""
    import nbformat

    for path in map(Path, arguments or sorted(HERE.glob("*.ipynb"))):
        print(path.name, flush=True)
        notebook = executed(path)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
