"""The README says what the code has."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

from tfpfl.evaluation import PROTOCOLS, Protocol

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_algorithms_table_is_current():
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    assert tables["with_section"](README, "algorithms", tables["algorithms"]()) == README, "run: python docs/tables.py"


def test_python_example_runs(tmp_path, tff):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    ast.parse(example)
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "'round': 20" in done.stdout and "@CLIENTS" in done.stdout


def test_options_of_the_examples_exist():
    from tfpfl.cli import main

    for command in re.findall(r"^tfpfl (run|partition) (.*?)(?=^tfpfl|^```)", README, re.MULTILINE | re.DOTALL):
        words = command[1].replace("\\\n", " ").split("#")[0].split()
        main.commands[command[0]].make_context(command[0], words)  # parses; raises a usage error


def test_docs_protocols_lists_the_presets():
    text = (ROOT / "docs" / "protocols.md").read_text()
    listed = text[text.index("<!-- protocols -->") : text.index("<!-- /protocols -->")]
    found = {}
    for line in listed.splitlines()[3:]:
        name, *parts = [cell.strip() for cell in line.strip("| ").split("|")]
        found[name.strip("`")] = Protocol(*parts[:4])
    assert found == PROTOCOLS
