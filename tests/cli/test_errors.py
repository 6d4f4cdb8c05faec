"""Errors of ours are told from bugs by their class, never by their text."""

import ast
from pathlib import Path

import pytest

import tflite_export
import tfpfl
from tfpfl.checks import InvalidArgument, TfpflError, Unavailable

ROOT = Path(tfpfl.__file__).parents[1]
FILES = sorted(p for package in (tfpfl, tflite_export) for p in Path(package.__file__).parent.rglob("*.py"))
BUILTIN = {"ValueError", "RuntimeError", "TypeError", "KeyError", "IndexError", "Exception"}

# (file, what is raised) that the command line never meets: what calls them has checked, or it is a notebook.
OTHERS = {
    ("tfpfl/engines/tff/notebook_kernel.py", "RuntimeError"),
    ("tfpfl/runs/store_content.py", "TypeError"),
}


def name_of(file):
    return file.relative_to(ROOT).as_posix()


def test_no_builtin_error_is_raised_for_the_user():
    found = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                if node.exc.func.id in BUILTIN:
                    found.add((name_of(file), node.exc.func.id))
    assert found == OTHERS


def texts(handler):
    """The expressions of an `except` block that hold the error's text: str(error), and names that it is assigned to."""
    found = {f"str({handler.name})"}
    for node in ast.walk(handler):
        if isinstance(node, ast.Assign) and any(text in ast.unparse(node.value) for text in tuple(found)):
            found |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return found


def decides(node):
    """What an expression is decided by: a comparison's sides, what is searched in; else nothing."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("startswith", "endswith", "find", "index", "count"):
            return [node.func.value]
        if node.func.attr in ("search", "match", "fullmatch", "findall"):
            return node.args
    return []


def decided_by_text(source):
    found = []
    for handler in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ExceptHandler) and n.name):
        words = texts(handler)
        for node in ast.walk(handler):
            if any(word in ast.unparse(part) for part in decides(node) for word in words):
                found.append(ast.unparse(node))
    return found


def test_nothing_is_decided_by_the_text_of_an_error():
    found = {name_of(file): decided_by_text(file.read_text()) for file in FILES}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    [
        "if 'belongs to' not in str(error): raise",
        "said = str(error).lower()\n    if 'op' in said: raise",
        "if str(error).startswith('isolate'): raise",
        "if re.search('op', str(error)): raise",
    ],
)
def test_such_decisions_would_be_found(line):
    assert decided_by_text(f"try:\n    work()\nexcept ValueError as error:\n    {line}\n")


@pytest.mark.parametrize(("ours", "builtin"), [(InvalidArgument, ValueError), (Unavailable, RuntimeError)])
def test_who_catches_pythons_own_class_catches_ours(ours, builtin):
    with pytest.raises(builtin, match="wrong"):
        raise ours("wrong")
    assert issubclass(ours, TfpflError)
