"""Files of text are UTF-8 on every machine, whatever its locale."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfpfl.checks import InvalidArgument
from tfpfl.runs.files import check_place, write_keras, write_whole

ROOT = Path(__file__).parents[2]
FILES = [f for package in ("tfpfl", "tflite_export") for f in sorted((ROOT / package).rglob("*.py"))]
OF_LINUX = {"server_rows.py", "isolated.py", "bench.py"}  # read or write /proc and /sys, which is ASCII


def names_no_encoding(call: ast.Call) -> bool:
    """Whether a call opens, reads or writes a file of text in the encoding of the locale."""
    named = {k.arg for k in call.keywords}
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("read_text", "write_text"):
        return "encoding" not in named
    if not (isinstance(call.func, ast.Name) and call.func.id == "open"):
        return False
    modes = [a.value for a in call.args[1:2] if isinstance(a, ast.Constant)]
    return "encoding" not in named and not any("b" in mode for mode in modes)


def test_every_file_of_text_has_an_encoding():
    found = {
        f.name
        for f in FILES
        for node in ast.walk(ast.parse(f.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and names_no_encoding(node)
    }
    assert found == OF_LINUX


def test_a_table_is_written_in_a_locale_without_letters_for_it(tmp_path):
    """Python then takes ASCII for files that name no encoding."""
    code = (
        "import locale, pathlib, sys; from tfpfl.runs.files import write_csv;"
        "assert locale.getpreferredencoding(False) != 'UTF-8';"
        "write_csv(pathlib.Path(sys.argv[1]), ['accuracy \\u00b1'], [{'accuracy \\u00b1': '\\u05e9\\u05dc'}])"
    )
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.csv")], env=env, check=True, timeout=1800)
    assert (tmp_path / "a.csv").read_bytes() == "accuracy ±\r\nשל\r\n".encode()


class Saved:
    """As a model of Keras is written, and interrupted if it says so."""

    def __init__(self, content, interrupted=False):
        self._content, self._interrupted = content, interrupted

    def save(self, path):
        assert path.suffix == ".keras"
        path.write_text(self._content, encoding="utf-8")
        if self._interrupted:
            raise KeyboardInterrupt


def test_a_model_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.keras"
    for before in ([], ["a.keras"]):
        with pytest.raises(KeyboardInterrupt):
            write_keras(path, Saved("half", interrupted=True))
        assert [file.name for file in tmp_path.iterdir()] == before
        if before:
            assert path.read_text(encoding="utf-8") == "whole"
        write_keras(path, Saved("whole"))


def test_a_file_is_on_disk_before_it_takes_the_place_of_the_old_one(tmp_path, monkeypatch):
    """Else a power cut could leave the new name with nothing in it."""
    path, calls, renamed = tmp_path / "a.txt", [], os.replace
    path.write_text("old", encoding="utf-8")

    def fsync(number):
        calls.append(("fsync", os.fstat(number).st_ino, os.fstat(number).st_size))

    def replace(source, target):
        calls.append(("replace", os.stat(source).st_ino, os.stat(source).st_size))
        assert path.read_text(encoding="utf-8") == "old"
        renamed(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_whole(path, "the new one")
    file = path.stat().st_ino, len("the new one")
    assert calls == [("fsync", *file), ("replace", *file)] and path.read_text(encoding="utf-8") == "the new one"


def test_a_result_takes_the_place_of_its_like_only(tmp_path):
    """A table or a page had overwritten the user's own data, and files of a run."""
    own, ours = tmp_path / "data.csv", tmp_path / "table.csv"
    own.write_text("hospital,age,diagnosis\nA,30,ill\n")
    ours.write_text("algorithm,seeds\nPFLEGO,1\n")
    (tmp_path / "empty.csv").touch()
    for place in (ours, tmp_path / "empty.csv", tmp_path / "new.csv"):
        check_place(place, ("algorithm,",))
    with pytest.raises(InvalidArgument, match="data.csv exists, and begins in another way"):
        check_place(own, ("algorithm,",))
    run = tmp_path / "run"
    run.mkdir()
    for name in ("state.sqlite", "config.json", "history.csv", "network.keras", "table.csv", "curves.png"):
        (run / name).touch()
    (run / "x.raw").touch()  # matplotlib writes pictures of this ending, too
    for name in ("state.sqlite", "config.json", "history.csv", "network.keras", "x.raw"):
        with pytest.raises(InvalidArgument, match="is a file of the run or federation in this folder"):
            check_place(run / name)
    for name in ("table.xlsx", "table.PARQUET"):
        with pytest.raises(InvalidArgument, match="is text, and no"):
            check_place(tmp_path / name, ("algorithm,",))
    for name in ("table.csv", "curves.png", "new.csv"):
        check_place(run / name, ("algorithm,",))
