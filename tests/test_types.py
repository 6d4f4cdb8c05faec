"""Types: what a checker says of the packages, of a user's program, and which names the entrances have.

The modules that pyproject.toml lists under `ignore_errors` have type errors that nobody has mended yet. The list may
only shrink: a module without errors must leave it, and its length has a limit here, which is lowered with it.
"""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_WITH_ERRORS = 31
ENTRANCES = ("tfpfl/__init__.py", "tfpfl/runs/__init__.py", "tfpfl/studies/__init__.py", "tflite_export/__init__.py")

needs_mypy = pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed: see the extra 'lint'")


def settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]


def with_errors() -> list[str]:
    """The modules on the list."""
    return [name for part in settings()["overrides"] if part.get("ignore_errors") for name in part["module"]]


def mypy(*arguments) -> str:
    """What mypy says; its cache is that of `make lint`, so that what did not change is not read again."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode in (0, 1) and not done.stderr, done.stderr or done.stdout
    return done.stdout


def module_of(path: str) -> str:
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@needs_mypy
@pytest.mark.slow  # `make lint` says the same of all but modules that could leave the list
def test_only_modules_on_the_list_have_errors(tmp_path):
    """And all of them have, or they leave it."""
    text, listed = (ROOT / "pyproject.toml").read_text(encoding="utf-8"), with_errors()
    strict = tmp_path / "pyproject.toml"
    strict.write_text(re.sub(r"^ignore_errors = true$", "ignore_errors = false", text, flags=re.M), encoding="utf-8")
    said = mypy("--config-file", strict, "--cache-dir", ROOT / ".mypy_cache" / "whole")
    found = {module_of(line.split(":")[0]) for line in said.splitlines() if ": error: " in line}
    assert sorted(found - set(listed)) == [], said
    assert sorted(set(listed) - found) == [], "these have no errors any more: take them off the list, lower the limit"


def test_the_list_only_shrinks():
    listed = with_errors()
    assert listed == sorted(set(listed)) and not [name for name in listed if "*" in name]
    assert len(listed) <= MOST_WITH_ERRORS


@needs_mypy
@pytest.mark.slow
@pytest.mark.parametrize(
    "program, said",
    [
        ('tfpfl.RunConfig(algorithm="pflego", rounds=20, sampling_range=(2, 5))', None),
        ("tfpfl.Fedration", 'Module has no attribute "Fedration"'),
        ('tfpfl.RunConfig(rounds="twenty")', 'Argument "rounds" to "RunConfig" has incompatible type "str"'),
        ("tfpfl.RunConfig(round=20)", 'Unexpected keyword argument "round" for "RunConfig"'),
        ("tfpfl.Population([30] * 10, [2] * 10).client_ids.tolist()", None),
        ("tfpfl.Population([30] * 10, [2] * 10).clients", '"Population" has no attribute "clients"'),
        ('tfpfl.studies.compare_run(["runs/a"])', 'Module has no attribute "compare_run"'),
        ("tflite_export.Bundel", 'Module has no attribute "Bundel"'),
    ],
)
def test_a_users_program_is_judged(checked, program, said):
    """No public name is `Any`: a typo and a wrong argument are found, and what is right passes."""
    messages = checked[program]
    assert messages == [] if said is None else len(messages) == 1 and said in messages[0]


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> dict[str, list[str]]:
    """{program: what mypy says of it}, of all programs above in one file, which saves mypy's start."""
    mark = next(mark for mark in test_a_users_program_is_judged.pytestmark if mark.name == "parametrize")
    programs = [program for program, _ in mark.args[1]]
    path = tmp_path_factory.mktemp("user") / "program.py"
    path.write_text("\n".join(["import tflite_export, tfpfl, tfpfl.studies", *programs, ""]), encoding="utf-8")
    # Of the packages themselves only what the program needs, and errors in the program alone.
    lines = [line for line in mypy("--follow-imports", "silent", path).splitlines() if "program.py" in line]
    found = {program: [] for program in programs}
    for line in lines:
        place, message = line.split(": error: ")
        found[programs[int(place.rsplit(":")[-1]) - 2]].append(message)
    return found


@pytest.mark.parametrize("path", ENTRANCES)
def test_an_entrance_has_the_names_that_a_checker_sees(path):
    """What is imported when it is first used is what is imported for type checkers, from the same modules."""
    tree, package = ast.parse((ROOT / path).read_text(encoding="utf-8")), module_of(path)
    (typed,) = (n for n in tree.body if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING")
    seen = {alias.asname: node.module for node in typed.body for alias in node.names}
    assert all(alias.asname == alias.name for node in typed.body for alias in node.names)
    (home,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "_HOME")
    assert {name: f"{package}.{module}" for name, module in ast.literal_eval(home).items()} == seen
    for name, module in seen.items():
        assert name in names_of(module), f"{package}.{name} would fail: {module} has no {name}"


def names_of(module: str) -> set[str]:
    """What a module binds, of itself or by an import."""
    place = ROOT.joinpath(*module.split("."))
    tree = ast.parse((place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text("utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = {target.id for target in targets if isinstance(target, ast.Name)}
            found |= set(ast.literal_eval(node.value)) if named == {"_HOME"} else named
    return found
