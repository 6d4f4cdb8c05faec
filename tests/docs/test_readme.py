"""The README says what the code has."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tfpfl.cli.runs import DEMO_DATA, DEMO_SETTINGS
from tfpfl.runs.protocols import PROTOCOLS, Protocol

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_algorithms_table_is_current():
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    assert tables["with_section"](README, "algorithms", tables["algorithms"]()) == README, "run: python docs/tables.py"


def cells(text) -> list:
    """The rows of a table in Markdown that have an interval, without bold."""
    rows = [[cell.strip("* ") for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [row for row in rows if len(row) > 1 and "±" in row[1]]


def test_the_first_table_is_the_measured_one():
    """Four methods in both cases, the same numbers as in docs/measured.md; the demo has these data and settings."""
    measured = (ROOT / "docs" / "measured.md").read_text().partition("## When sharing pays")[2].partition("\n## ")[0]
    shown = README.partition("<!-- demo -->")[2].partition("<!-- /demo -->")[0]
    found = {method: (few, many) for method, few, _, many, *_ in cells(shown)}
    assert found == {method: (few, many) for method, few, _, _, many, *_ in cells(measured)}
    assert set(found) == {"PFLEGO", "FedAvg", "FedAvg-FT", "Local"}
    script = (ROOT / "docs" / "examples" / "benchmarker.sh").read_text()
    for data, (_, entries) in DEMO_DATA.items():
        (words,) = re.findall(rf"^{data}=\((.*)\)$", script, re.MULTILINE)
        for option, value in (
            ("clients", entries["clients"]),
            ("classes-per-client", entries["partition_args"]["K"]),
            ("participation", entries["participation"]),
        ):
            assert f"--{option} {value} " in words
    for method, settings in DEMO_SETTINGS.items():
        assert all(re.search(rf"--set {method}\.{name}={value}\b(?!\.)", script) for name, value in settings.items())


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
