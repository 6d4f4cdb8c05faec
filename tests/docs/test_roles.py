"""For each of seven readers there is a script or a notebook that runs from nothing to the result."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "roles.md").read_text(encoding="utf-8")


def run(command, folder, **variables) -> str:
    """What it prints; with this Python's tfpfl, on no other data than what comes with scikit-learn."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TFPFL_CACHE": str(folder / "cache"), **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_reader_has_a_file_that_a_test_runs():
    """Notebooks are run by test_notebooks.py, the scripts below; a new script must be named on the page."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    named = re.findall(r"`([\w/]+\.(?:ipynb|py|sh))`", "".join(rows))
    assert len(rows) == 7 and all(re.search(r"`[\w/]+\.\w+`", row) for row in rows)
    files = {name if "/" in name else f"notebooks/{name}" for name in named}
    there = {path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("notebooks/*.ipynb"), *EXAMPLES.iterdir())}
    assert files == there
    assert {path.name for path in EXAMPLES.iterdir()} == {"data_scientist.py", "benchmarker.sh"}  # run below


def test_the_data_scientist_gives_the_table_as_it_is():
    """`Federation.from_table` reads it; the script has no code that does."""
    script = (EXAMPLES / "data_scientist.py").read_text(encoding="utf-8")
    assert "tfpfl.Federation.from_table(" in script and "from_clients" not in script and "DictReader" not in script


@pytest.mark.docs
def test_the_data_scientist(tmp_path):
    """A table becomes a federation; fine-tuned FedAvg is ahead of Local for most hospitals."""
    said = run([sys.executable, EXAMPLES / "data_scientist.py", "here"], tmp_path)
    scores = dict(re.findall(r"^(\S+) +([\d.]+) % of the test patients", said, re.MULTILINE))
    assert set(scores) == {"PFLEGO", "FedAvg", "FedAvg-FT", "Local"}
    assert float(scores["FedAvg-FT"]) > float(scores["Local"]) + 1
    assert len(re.findall(r"^hospital \d+ gains \d", said, re.MULTILINE)) == 3
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"patients.csv", "federation", "runs", "gains.png"}


@pytest.mark.docs
def test_the_benchmarker(tmp_path):
    """All of its steps, with one round and one seed."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "tfpfl"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tfpfl "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    run(["bash", EXAMPLES / "benchmarker.sh", "here"], tmp_path, ROUNDS="1", SEEDS="0", PATH=path)
    here = tmp_path / "here"
    for table in ("few.md", "many.md"):
        assert all(f"| {name} " in (here / table).read_text() for name in ("PFLEGO", "FedAvg", "FedAvg-FT", "Local"))
    assert len(list((here / "few-runs").iterdir())) == len(list((here / "many-runs").iterdir())) == 4
    assert len(list((here / "search").rglob("config.json"))) == 12
    assert "PFLEGO" in (here / "report.html").read_text(encoding="utf-8")
