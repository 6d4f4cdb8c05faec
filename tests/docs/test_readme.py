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


def test_the_first_commands_are_of_the_case_in_which_sharing_pays():
    """Those of the README and of "Getting started": the clients of the demo's first table, and its rates."""
    _, entries = DEMO_DATA["few"]
    data = f"--clients {entries['clients']} --classes-per-client {entries['partition_args']['K']} --participation 0.2 "
    assert entries["participation"] == 0.2
    (block,) = re.findall(r"one after the other.*?\n```\n(.*?)```", README, re.DOTALL)
    index = (ROOT / "docs" / "index.md").read_text()
    (first,) = re.findall(r"## First run, on the command line\n(.*?)\n## ", index, re.DOTALL)
    lines = f"{block}\n{first}".replace("\\\n   ", "").splitlines()
    found = [f"{line} " for line in lines if re.match(r"tfpfl (run|compare|sweep) ", line) and "ditto" not in line]
    assert len(found) == 5 and [line for line in found if data not in line] == []
    for line in found:
        for method, settings in DEMO_SETTINGS.items() if "compare" in line else ():
            assert all(f"--set {method}.{name}={value} " in line for name, value in settings.items())
    python = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0] for text in (README, index))
    assert python.count("clients=80, K=5") == python.count("beta=0.1, rho=0.01") == 2


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
