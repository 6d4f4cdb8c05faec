"""The tests themselves: `make test` runs something of every file, and helpers are where tests look for them."""

import ast
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(HERE.rglob("*.py"))


def test_make_test_runs_something_of_every_file(left_out):
    """Whatever is checked at night alone breaks by day."""
    assert left_out and [path for path, whole in left_out.items() if whole] == []


def test_names_of_files_are_unique():
    """pytest takes two files of one name in two folders for one module, and does not run the second."""
    names = Counter(path.name for path in FILES if path.name.startswith("test_"))
    assert [name for name, number in names.items() if number > 1] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(HERE).as_posix())
def test_helpers_are_in_their_folder(path):
    """Beside tests stand only tests and conftest.py; and no test imports from another, so that files can be moved.

    tests/independent has what tests compare with: methods written by somebody who had not read tfpfl's files.
    """
    independent = path.parent == HERE / "independent" and not path.name.startswith("test_")
    helps = HERE / "helpers" in path.parents or independent
    assert helps != (path.name == "conftest.py" or path.name.startswith("test_")), "a helper belongs into tests/helpers"
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    imported = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert [name for name in imported if name.split(".")[-1].startswith("test_") or name == "conftest"] == []
