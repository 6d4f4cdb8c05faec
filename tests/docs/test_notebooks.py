"""Every notebook runs, and what it was committed with is what a run gives.

Outputs are compared as text: words must be the same, numbers within 2 % or 0.02: processors round differently,
and an example more or less is then right. Cells with the tag 'varies' are left out (see notebooks/execute.py).
"""

import base64
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NEED_TFF = ("05",)
HAS_TFF = find_spec("tensorflow_federated") is not None
MOST_LINES, MOST_BYTES = 100, 300_000
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


@pytest.fixture(scope="module")
def executed(path) -> dict:
    """The notebook after a run, as JSON."""
    for package in ("nbclient", "ipykernel"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if path.name.startswith(NEED_TFF) and not HAS_TFF:
        pytest.skip("TensorFlow Federated is not installed (requirements.lock has it)")
    return json.loads(json.dumps(runpy.run_path(str(FOLDER / "execute.py"))["executed"](path)))


def code_cells(notebook) -> list:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell) -> str:
    return "".join(cell["source"])


def texts(cell) -> list:
    """What a cell wrote and what it returned, as text; several writes in a row are one.

    Except the line about TFF's worker on a system that does not let it be isolated.
    """
    found = []
    for output in cell["outputs"]:
        if output["output_type"] == "stream" and "TFF's worker listens on port" in "".join(output["text"]):
            continue
        if output["output_type"] == "stream" and found and found[-1][0] == output["name"]:
            found[-1] = (output["name"], found[-1][1] + "".join(output["text"]))
        elif output["output_type"] == "stream":
            found.append((output["name"], "".join(output["text"])))
        else:
            found += [(kind, "".join(t)) for kind, t in sorted(output["data"].items()) if kind.startswith("text/")]
    return found


def figure_of(cell) -> bytes | None:
    """The PNG picture that the cell ends with."""
    pictures = [o["data"]["image/png"] for o in cell["outputs"] if "image/png" in o.get("data", {})]
    return base64.b64decode("".join(pictures[-1])) if pictures else None


def check_clean(notebook):
    """Run from top to bottom, no warnings, no error, no path of a machine; a picture at the end."""
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        kinds = {output["output_type"] for output in cell["outputs"]}
        assert "error" not in kinds, source(cell)
        for name, text in texts(cell):
            assert name != "stderr", f"{source(cell)}\nwrote on stderr:\n{text}"
            assert not re.search(r"Warning\b", text), text
            assert not re.search(r"(?<![\w.])/(?:tmp|home|root|usr|work|content|var|Users|opt)\b", text), text
    assert figure_of(cells[-1])[: len(PNG)] == PNG


def words(text) -> list:
    """Without numbers and the rules of tables, which are as wide as these."""
    return NUMBER.sub("0", re.sub("-{3,}", "-", text)).split()


def numbers(text) -> list:
    return [float(found.replace(",", "")) for found in NUMBER.findall(text)]


def test_there_are_six():
    assert [path.stem for path in NOTEBOOKS] == [
        "01_pflego_in_ten_minutes",
        "02_compare_methods",
        "03_write_your_own_algorithm",
        "04_to_the_phone",
        "05_tff_federated_computations",
        "06_live_federation",
    ]


def test_the_first_cell_is_the_same_in_all():
    assert len({source(code_cells(json.loads(path.read_text()))[0]) for path in NOTEBOOKS}) == 1


def in_a_kernel(folder, *cells) -> list:
    """The cells after a run in a kernel that starts in the folder and finds no tfpfl."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    new = nbformat.v4.new_code_cell
    hidden = new("import sys\nsys.modules['tfpfl'] = None  # then find_spec says that it is not installed")
    notebook = nbformat.v4.new_notebook(cells=[hidden, *map(new, cells)])
    nbclient.NotebookClient(notebook, timeout=3600, allow_errors=True).execute(cwd=str(folder))
    return json.loads(json.dumps(notebook.cells[1:]))


def test_a_folder_called_tfpfl_is_no_installed_package(tmp_path):
    """As `git clone` makes one: Python takes it for a package without files."""
    (tmp_path / "tfpfl").mkdir()
    first = source(code_cells(json.loads(NOTEBOOKS[0].read_text()))[0]).partition("with open(os.devnull")[0]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TFPFL_SOURCE")}
    for install, said in (({}, "is not in a checkout of it"), ({"TFPFL_SOURCE": "nowhere"}, "tfpfl from nowhere")):
        done = subprocess.run(
            [sys.executable, "-S", "-c", first.replace('"pip", "install"', '"no_pip"')],
            cwd=tmp_path, env=environment | install, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 1 and said in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.slow
def test_a_notebook_alone_says_what_to_do(tmp_path):
    """In one line where there is no checkout, and where pip finds none; later cells are not run then."""
    first = source(code_cells(json.loads(NOTEBOOKS[0].read_text()))[0])
    (tmp_path / "empty").mkdir()
    alone, there, wrong = in_a_kernel(tmp_path / "empty", first, "%env TFPFL_SOURCE=nowhere/tfpfl", first)
    for cell, why in ((alone, "is not in a checkout of it"), (wrong, "could not install tfpfl from nowhere/tfpfl")):
        (error,) = [output for output in cell["outputs"] if output["output_type"] == "error"]
        (line,) = error["traceback"]
        assert "\n" not in line and why in line and "%env TFPFL_SOURCE=PATH" in line
    assert {output["output_type"] for output in there["outputs"]} == {"stream"}


@pytest.mark.slow
def test_a_kernel_shows_what_libraries_in_other_languages_write(tmp_path):
    """What TensorFlow writes past Python: ipykernel leaves it out where this variable is set, and pytest sets it."""
    nbformat = pytest.importorskip("nbformat")
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package)
    cell = nbformat.v4.new_code_cell("import os\nprint('PYTEST_CURRENT_TEST' in os.environ)")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "01_seen.ipynb")
    done = runpy.run_path(str(FOLDER / "execute.py"))["executed"](tmp_path / "01_seen.ipynb")
    assert "PYTEST_CURRENT_TEST" in os.environ and texts(done.cells[0]) == [("stdout", "False\n")]


def pixels_of(png: bytes):
    """uint8 [height, width, 3]"""
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def colors_of(png: bytes) -> set:
    """Each as one number, 65536 red + 256 green + blue."""
    import numpy as np

    return set(np.unique(pixels_of(png) @ [65536, 256, 1]).tolist())


def rgb(color: str) -> int:
    """The number of a colour of matplotlib."""
    from matplotlib.colors import to_hex

    return int(to_hex(color)[1:], 16)


def test_a_stored_figure_keeps_its_colours():
    """Lines, markers and the legend of all methods at once, and beside them a picture of more shades than are kept."""
    import numpy as np
    from matplotlib.figure import Figure

    from tfpfl.algorithms import ALGORITHMS
    from tfpfl.studies.plots import style

    figure = Figure(figsize=(9, 4), dpi=100)
    left, right = figure.subplots(1, 2)
    used = {style(name).color for name in ALGORITHMS}
    for k, color in enumerate(sorted(used)):
        left.plot([0, 1, 2], [k, k + 1, k + 0.5], "o-", color=color, linewidth=1.5, label=color)
    left.legend(ncols=3)
    right.imshow(np.linspace(0, 1, 256).reshape(16, 16), "viridis")
    written = io.BytesIO()
    figure.savefig(written)
    before = written.getvalue()
    smaller = runpy.run_path(str(FOLDER / "execute.py"))["smaller"]
    after = base64.b64decode(smaller(base64.b64encode(before).decode()))
    assert {rgb(color) for color in used} <= colors_of(after) and len(used) > 5
    assert len(colors_of(before)) > 256 > 64 >= len(colors_of(after)) and len(after) < len(before) / 2
    assert np.abs(pixels_of(before).astype(int) - pixels_of(after)).mean() < 1


@pytest.mark.parametrize("number", [1, 2])
def test_committed_figures_have_the_colours_of_the_methods(number):
    from tfpfl.studies.plots import style

    notebook = json.loads(NOTEBOOKS[number - 1].read_text())
    figures = [figure for figure in map(figure_of, code_cells(notebook)) if figure is not None]
    names = ("pflego", "fedavg", "local") if number == 1 else ("pflego", "fedavg", "fedavg_ft", "local")
    assert {rgb(style(name).color) for name in names} <= colors_of(figures[-1])


def test_committed(path):
    """Short, small, clean, and nothing about the machine in it."""
    notebook = json.loads(path.read_text())
    assert path.stat().st_size <= MOST_BYTES
    lines = [line.strip() for cell in code_cells(notebook)[1:] for line in source(cell).splitlines()]
    assert len([line for line in lines if line and not line.startswith("#")]) <= MOST_LINES
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    check_clean(notebook)


@pytest.mark.docs
def test_runs_and_gives_what_was_committed(path, executed):
    check_clean(executed)
    committed = json.loads(path.read_text())
    for was, now in zip(code_cells(committed), code_cells(executed), strict=True):
        tags = was["metadata"].get("tags", [])
        assert (figure_of(was) is None) == (figure_of(now) is None)
        if "varies" in tags or ("tff" in tags and not HAS_TFF):
            continue
        assert len(texts(was)) == len(texts(now)), source(was)
        for (kind, before), (same_kind, after) in zip(texts(was), texts(now), strict=True):
            assert kind == same_kind
            assert words(before) == words(after), source(was)
            for x, y in zip(numbers(before), numbers(after), strict=True):
                assert math.isclose(x, y, rel_tol=0.02, abs_tol=0.02), f"{source(was)}\n{before}\nis now\n{after}"
