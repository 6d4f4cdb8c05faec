"""A notebook without TFF goes on in another Python. Here that is this one again, in a process of its own."""

import os
import sys
from pathlib import Path

import pytest

from tfpfl.engines.tff import notebook_kernel

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

HAND_OVER = f"""
import os, sys
from pathlib import Path
from tfpfl.engines.tff import notebook_kernel
notebook_kernel.find_spec = lambda name: None
notebook_kernel.checkout = lambda: Path()
notebook_kernel.python_with_tff = lambda folder: Path({sys.executable!r})
here = os.getpid()
print(here)
notebook_kernel.continue_with_tff()
"""


def executed(*cells):
    """The outputs of every cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    nbclient.NotebookClient(notebook, timeout=1800, allow_errors=True).execute(env={**os.environ, "PYTHONPATH": paths})
    return [cell.outputs for cell in notebook.cells]


@pytest.mark.slow
def test_cells_run_in_the_other_kernel():
    first, second, third, fourth = executed(
        HAND_OVER,
        "import os\nx = 6 * 7\nprint(os.getpid(), 'here' in globals())",
        "from matplotlib import pyplot\npyplot.plot([0, x])\nx",
        "raise ValueError('mine')",
    )
    here, said = "".join(output.text for output in first).split("\n", 1)
    assert said.startswith("From here on, cells run in a kernel of Python 3.")
    there, knows_ours = "".join(output.text for output in second).split()
    assert there != here and knows_ours == "False"
    assert any("image/png" in output.get("data", {}) for output in third)
    assert any(output.get("data", {}).get("text/plain") == "42" for output in third)
    assert any("mine" in output.get("text", "") for output in fourth)
    assert any(output.output_type == "error" and "ValueError" in output.evalue for output in fourth)


def test_nothing_happens_where_tff_is(tff):
    notebook_kernel.continue_with_tff()


def test_outside_of_a_notebook(monkeypatch):
    monkeypatch.setattr(notebook_kernel, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="works only in a notebook"):
        notebook_kernel.continue_with_tff()


def test_a_source_without_a_lock_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TFPFL_SOURCE", str(tmp_path))
    with pytest.raises(RuntimeError, match="requirements.lock"):
        notebook_kernel.checkout()


def test_an_address_is_cloned(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setenv("TFPFL_SOURCE", "git+https://example.org/tfpfl")
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path))

    def clone(command):
        calls.append(command)
        Path(command[-1]).mkdir()
        (Path(command[-1]) / "requirements.lock").touch()

    monkeypatch.setattr(notebook_kernel, "_run", clone)
    assert notebook_kernel.checkout() == tmp_path / "checkout"
    assert notebook_kernel.checkout() == tmp_path / "checkout"  # it is there
    assert len(calls) == 1 and calls[0][-2] == "https://example.org/tfpfl"
