"""The README says what the code has."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tfpfl.runs.protocols import PROTOCOLS, Protocol

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_algorithms_table_is_current():
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    assert tables["with_section"](README, "algorithms", tables["algorithms"]()) == README, "run: python docs/tables.py"


def run(command, folder):
    """What it prints; with this Python's tfpfl, on no other data than what comes with scikit-learn."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "TFPFL_CACHE": str(folder / "cache")}
    done = subprocess.run(
        command, cwd=folder, env=environment | {"TFDS_DATA_DIR": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.mark.docs
def test_python_example_runs(tmp_path):
    example, _ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) <= 15
    assert "'round': 20" in run([sys.executable, "-c", example], tmp_path)


@pytest.mark.docs
def test_python_example_goes_on_with_tff(tmp_path, tff):
    example, process = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert "@CLIENTS" in run([sys.executable, "-c", example + process], tmp_path)


@pytest.mark.docs
def test_commands_run_as_they_stand(tmp_path):
    """All of the block, in one shell that stops at the first that fails."""
    (block,) = re.findall(r"one after the other.*?\n```\n(.*?)```", README, re.DOTALL)
    programs = f'tfpfl() {{ "{sys.executable}" -m tfpfl "$@"; }}\npython() {{ "{sys.executable}" "$@"; }}\n'
    said = run(["bash", "-e", "-c", programs + block], tmp_path)
    assert block.count("tfpfl ") > 12 and "@" in said
    assert {"runs", "federations", "bundle", "table.md", "curves.png", "report.html"} <= set(os.listdir(tmp_path))


def test_docs_protocols_lists_the_presets():
    text = (ROOT / "docs" / "protocols.md").read_text()
    listed = text[text.index("<!-- protocols -->") : text.index("<!-- /protocols -->")]
    found = {}
    for line in listed.splitlines()[3:]:
        name, *parts = [cell.strip() for cell in line.strip("| ").split("|")]
        found[name.strip("`")] = Protocol(*parts[:4])
    assert found == PROTOCOLS
