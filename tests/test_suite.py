"""The tests themselves: `make test` runs something of every file, and helpers are where tests look for them."""

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import parts

HERE = Path(__file__).parent
FILES = sorted(HERE.rglob("*.py"))
GIVEN = ("TFDS_DATA_DIR", "TFPFL_PEOPLE", "TFPFL_TRUTH")  # folders, see conftest.py


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


def collected(**variables) -> subprocess.CompletedProcess:
    """`pytest --collect-only` of this file, with these variables and no other folder that is given to the tests."""
    env = {k: v for k, v in os.environ.items() if k not in GIVEN and not k.startswith("PYTEST")} | variables
    how = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-k", "unique", __file__]
    return subprocess.run([sys.executable, *how], cwd=HERE.parent, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("name", GIVEN)
def test_a_folder_that_is_given_to_the_tests_and_is_not_there_is_an_error(name, tmp_path):
    """Else all tests that need it are skipped, and the result is green."""
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "nothing", tmp_path / "file"):
        refused = collected(**{name: str(wrong)})
        assert refused.returncode == pytest.ExitCode.USAGE_ERROR
        assert f"ERROR: {name} must name the folder with " in refused.stderr
        assert f"but {str(wrong)!r} is no folder" in refused.stderr and f"or unset {name}" in refused.stderr
        assert "Traceback" not in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["not set", "empty", "a folder"])
def test_a_folder_that_is_not_given_or_is_there_is_no_error(how, tmp_path):
    value = {"not set": {}, "empty": dict.fromkeys(GIVEN, ""), "a folder": dict.fromkeys(GIVEN, str(tmp_path))}[how]
    assert collected(**value).returncode == 0


@given(st.dictionaries(st.text(), st.floats(0, 1e3)), st.integers(1, 9))
def test_parts_take_nearly_equally_long(seconds, number):
    """No part has more than its share and the longest key; and every key has a part."""
    found = parts.by_seconds(seconds, number)
    assert set(found) == set(seconds) and set(found.values()) <= set(range(number))
    sums = Counter({found[key]: 0.0 for key in seconds})
    for key in seconds:
        sums[found[key]] += seconds[key]
    share = sum(seconds.values()) / number
    assert max(sums.values(), default=0.0) <= (share + max(seconds.values(), default=0.0)) * (1 + 1e-9)


def ids(*more) -> set:
    """Of the tests that pytest collects with these options in files that have fast, slow, further and docs' tests."""
    files = [HERE / "test_packaging.py", HERE / "docs" / "test_roles.py", HERE / "runs" / "test_availability.py"]
    how = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *more, *map(str, files)]
    done = subprocess.run([sys.executable, *how], cwd=HERE.parent, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    return {line for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.slow
@pytest.mark.parametrize(
    "option, cut",
    [
        ("--part", "slow and not table"),
        ("--fast-part", "not slow and not docs"),
        ("--docs-part", "docs"),
        ("--table-part", "table"),
    ],
)
def test_every_test_of_a_kind_is_of_one_part_and_all_others_are_of_each(option, cut):
    first, second = (ids(option, f"{part}/2") for part in range(2))
    assert first and second and first ^ second == ids("-m", cut)
    assert first & second == ids("-m", f"not ({cut})")


@pytest.mark.parametrize("wrong", ["2/2", "-1/2", "1", "a/b", "0/0"])
def test_a_part_without_a_test_is_refused(wrong):
    with pytest.raises(ValueError):
        parts.asked(wrong)
