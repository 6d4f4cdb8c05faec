"""Methods of the user's own are found by name; what cannot be one is refused with the reason and the place."""

import inspect
import json
import sys

import pytest
import tensorflow as tf

from tfpfl import ALGORITHMS
from tfpfl.algorithms import beside, method_named, own
from tfpfl.checks import InvalidArgument
from tfpfl.models.modules_beside import hash_of, modules_beside

GOOD = '''
"""A file with two methods."""
from __future__ import annotations
from typing import Optional
from tfpfl import Method
from tfpfl.algorithms import fedavg

calls = []

def mine(model, population, *, eta=0.1, steps: Optional[int] = 3, many: bool = False, cap: float = None):
    """Mine (Somebody, 2026): it is FedAvg.

    Args:
        eta: learning rate, as in `fedavg`.
    """
    calls.append(eta)
    return fedavg(model, population, eta=eta, steps=steps)

LISTED = Method(
    "listed", "Listed", mine, "shared", "broadcast", "nothing", "d", "d", "here", presets={"x": {"eta": 1.0}}
)
'''


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    """As in a new process; what a test loads is forgotten."""
    monkeypatch.setattr(own, "_loaded", {})
    before, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.path[:] = path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_builder_and_a_method_of_a_file(tmp_path):
    file = write(tmp_path / "a.py", GOOD)
    plain, listed = method_named(f"{file}:mine"), method_named(f"{file}:LISTED")
    assert (plain.name, plain.title, plain.head) == ("mine", "Mine", "shared")
    assert plain.reference == "Mine (Somebody, 2026): it is FedAvg."
    found = {name: (p.annotation, p.default) for name, p in plain.hyperparameters.items()}
    expected = {"eta": (float, 0.1), "steps": (int | None, 3), "many": (bool, False), "cap": (float | None, None)}
    assert {name: what for name, what in found.items() if not name.startswith("server_")} == expected
    assert (listed.name, listed.title, listed.presets) == ("listed", "Listed", {"x": {"eta": 1.0}})
    assert method_named("pflego") is ALGORITHMS["pflego"]


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("FedX: what it does.", "FedX"),
        ("FedX (A and B, 2020) does it.", "FedX"),
        ("FedX. It does.", "FedX"),
        ("Every client does something of its own: this.", "build"),
        ("", "build"),
    ],
)
def test_the_title_is_the_beginning_of_the_docstring(tmp_path, text, title):
    file = write(tmp_path / "a.py", f'def build(model, population):\n    """{text}"""\n')
    assert method_named(f"{file}:build").title == title


def test_a_file_is_imported_once_for_each_content_and_hides_no_module(tmp_path):
    file = write(tmp_path / "json.py", GOOD)
    first = method_named(f"{file}:mine")
    copy = write(tmp_path / "b.py", GOOD)
    assert method_named(f"{copy}:mine").builder is first.builder
    elsewhere = write(tmp_path / "other" / "json.py", GOOD)  # which may read other files beside it
    assert method_named(f"{elsewhere}:mine").builder is not first.builder
    assert sys.modules["json"] is json
    write(file, GOOD + "# changed\n")
    assert method_named(f"{file}:mine").builder is not first.builder


def test_the_lines_of_a_file_are_known_where_no_file_has_its_name(tmp_path):
    """A run's copy is named after the original's folder: there AutoGraph found no source, and left `if` to Python."""
    code = "def positive(x):\n    if x > 0:\n        return x\n    return -x\n"
    module = beside.run_file("tfpfl_own_method_of_no_file", code.encode(), tmp_path / "gone.py", {})
    assert inspect.getsource(module.positive) == code
    assert float(tf.function(module.positive)(tf.constant(-2.0))) == 2.0


def test_modules_beside_the_file_can_be_imported(tmp_path):
    write(tmp_path / "beside_me_57.py", "ETA = 0.25\n")
    code = "from beside_me_57 import ETA\ndef mine(model, population, *, eta: float = ETA): ...\n"
    file = write(tmp_path / "a.py", code)
    assert method_named(f"{file}:mine").hyperparameters["eta"].default == 0.25


def test_modules_beside_two_files_may_have_one_name(tmp_path, monkeypatch):
    """Each file has its own, also where a function or a module beside it imports another one later."""
    code = "import helper_61.inner as inner\nfrom helper_61 import late\n"
    code += (
        "def mine(model, population, *, eta: float = inner.ETA):\n    import later_61\n    return later_61.OF, late()\n"
    )
    for folder, eta in (("a", 0.25), ("b", 0.5)):
        write(tmp_path / folder / "helper_61" / "inner.py", f"ETA = {eta}\n")
        write(
            tmp_path / folder / "helper_61" / "__init__.py",
            "def late():\n    import later_61\n    return later_61.OF\n",
        )
        write(tmp_path / folder / "later_61.py", f"OF = {folder!r}\n")
        write(tmp_path / folder / "m.py", code + f"# {folder}\n")
    monkeypatch.chdir(tmp_path / "a")
    monkeypatch.syspath_prepend(tmp_path / "a")  # a program that lies beside the first one
    first, second = (method_named(f"{tmp_path / folder / 'm.py'}:mine") for folder in "ab")
    assert [m.hyperparameters["eta"].default for m in (first, second)] == [0.25, 0.5]
    assert (first.builder(0, 0), second.builder(0, 0)) == (("a", "a"), ("b", "b"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[1:])
    write(tmp_path / "b" / "json.py", "raise AssertionError('it hides an installed module')")
    beside = "import json\nfrom later_61 import OF"
    code = GOOD.replace("from __future__ import annotations", beside).replace("eta=0.1", "eta=len(OF) + 0.5")
    write(tmp_path / "b" / "n.py", code)
    assert method_named(f"{tmp_path / 'b' / 'n.py'}:mine").hyperparameters["eta"].default == 1.5


def test_a_changed_module_beside_the_file_is_loaded_anew(tmp_path):
    """In a process that goes on, such as a notebook; also within a second, and if its length is the same."""
    code = "from helper_62 import eta\ndef mine(model, population, *, eta: float = eta()): ...\n"
    file = write(tmp_path / "a.py", code)
    found = []
    for eta in (0.25, 0.75, 0.25):
        write(tmp_path / "helper_62.py", "def eta():\n    import inner_62\n    return inner_62.ETA\n")
        write(tmp_path / "inner_62.py", f"ETA = {eta}\n")
        loaded = own.own_method(f"{file}:mine")
        assert loaded.method.hyperparameters["eta"].default == eta
        found.append((loaded.code.sha256, loaded.code.beside))
    assert found[0] == found[2] and found[0][0] == found[1][0] and found[0][1] != found[1][1]


def test_a_function_that_imports_later_gets_the_module_that_was_there(tmp_path):
    """Its sha256 stands in the run's configuration."""
    late = write(tmp_path / "late_63.py", "OF = 1\n")
    file = write(tmp_path / "a.py", "def mine(model, population):\n    import late_63\n    return late_63.OF\n")
    first = method_named(f"{file}:mine").builder
    write(late, "OF = 2\n")
    second = method_named(f"{file}:mine").builder
    late.unlink()
    assert (first(0, 0), second(0, 0)) == (1, 2)


def test_files_of_one_content_in_two_folders_have_their_own_modules(tmp_path):
    code = "from helper_64 import ETA\ndef mine(model, population, *, eta: float = ETA): ...\n"
    for folder, eta in (("a", 0.25), ("b", 0.5)):
        write(tmp_path / folder / "helper_64.py", f"ETA = {eta}\n")
        write(tmp_path / folder / "m.py", code)
    first, second = (own.own_method(f"{tmp_path / folder / 'm.py'}:mine") for folder in "ab")
    assert [m.method.hyperparameters["eta"].default for m in (first, second)] == [0.25, 0.5]
    assert first.code.sha256 == second.code.sha256 and first.code.beside != second.code.beside
    assert own.is_loaded(first.entry).method is first.method and own.is_loaded(second.entry).method is second.method
    with pytest.raises(
        InvalidArgument, match=r"m.py imports from beside it \(helper_64.py\) was changed since the run"
    ):
        own.load_file(second.code.content, "mine", tmp_path / "b" / "m.py", first.entry)
    before = {name: value for name, value in first.entry.items() if name != "beside"}  # of an older run
    assert own.is_loaded(before) is None
    again = own.load_file(first.code.content, "mine", tmp_path / "a" / "m.py", before)
    assert again.method.builder is first.method.builder
    assert own.is_loaded(before).method.builder is first.method.builder


def test_the_modules_that_a_file_imports_from_beside_it(tmp_path):
    for name, text in {
        "__init__.py": "import never_here",
        "one.py": "from . import two\nimport two as again",
        "two.py": "import m",
        "m.py": "",
        "pack/__init__.py": "from .deep import x",
        "pack/deep/__init__.py": "from ..beside import y\nfrom .... import m",
        "pack/beside.py": "",
        "pack/unused.py": "",
        "pack/asked.py": "import os.path, no_such_65",
        "plain/inner.py": "import bad",
        "bad.py": "this is no Python",
        "later.py": "",
        "unused.py": "",
        "json.py": "",
        "numpy.py": "",
        "tfpfl/__init__.py": "",
    }.items():
        write(tmp_path / name, text)
    code = "import json, numpy, one, plain.inner\nfrom tfpfl import Method\nfrom pack import asked, deep, NUMBER\n"
    code += "from . import unused\ndef f():\n    from later import *\n"
    found = modules_beside(code.encode(), tmp_path)
    assert set(found) == {
        "one.py", "two.py", "m.py", "pack/__init__.py", "pack/deep/__init__.py", "pack/beside.py", "pack/asked.py",
        "plain/inner.py", "bad.py", "later.py",
    }  # fmt: skip
    assert all(content == (tmp_path / name).read_bytes() for name, content in found.items())
    assert hash_of({}) == "" and hash_of(found) == hash_of(dict(reversed(found.items()))) and len(hash_of(found)) == 64
    moved = found | {"one.py": found["two.py"], "two.py": found["one.py"]}
    assert len({hash_of(found), hash_of(moved), hash_of({"one.py": b""})}) == 3
    assert modules_beside(b"import numpy\n\0", tmp_path) == modules_beside(code.encode(), tmp_path / "no") == {}


NEEDS = r"must take \(model, population, \*, hyperparameters\).*before the star: "


@pytest.mark.parametrize(
    ("code", "function", "message"),
    [
        ("def mine(model, population): ...", "mein", r"unknown function in .*a.py 'mein'; did you mean 'mine'"),
        ("mine = 3", "mine", "mine in .*a.py is int, neither a builder"),
        ("class mine:\n  pass", "mine", "is type, neither a builder"),
        ("def mine(model): ...", "mine", NEEDS + "model"),
        ("def mine(model, population, eta=0.1): ...", "mine", NEEDS + "model, population, eta"),
        ("def mine(model, population, *, eta): ...", "mine", "the hyperparameter eta must have a default"),
        (
            "def mine(model, population, *, eta=None): ...",
            "mine",
            "the hyperparameter eta must have a default, and a type",
        ),
        ("def mine(model, population, *, eta=(1, 2)): ...", "mine", "Write for example eta: float = 0.1"),
        ("def mine(model, population, *, eta: 'Flaot' = 1): ...", "mine", "arguments cannot be read: name 'Flaot'"),
        ("def mine(model, population, *, preset=1): ...", "mine", "has a name that tfpfl needs"),
        ("\n\ndef mine(model population): ...", "mine", r"cannot be imported: SyntaxError: .*\(line 3\)"),
        ("\n1 / 0", "mine", r"a.py cannot be imported: ZeroDivisionError: division by zero \(line 2\)"),
        ("import no_such_1", "mine", r"ModuleNotFoundError.*\(line 1\).*lie beside the original file"),
        ("raise SystemExit(2)", "mine", "cannot be imported: SystemExit: 2"),
    ],
)
def test_what_is_no_method(tmp_path, code, function, message):
    file = write(tmp_path / "a.py", code)
    with pytest.raises(InvalidArgument, match=message):
        method_named(f"{file}:{function}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}/no.py:mine", "no.py cannot be read: No such file"),
        ("{}/a.py", r"names no function: write .*a.py:FUNCTION. It has LISTED .a Method., mine"),
        (
            "no_such_2.part:mine",
            "there is no module 'no_such_2.part': install its package, or put its folder on PYTHONPATH",
        ),
        ("json.no_such_3:mine", "there is no module 'json.no_such_3'"),
        ("__main__:mine", "there is no module '__main__'"),
        ("pflegoo", r"unknown algorithm 'pflegoo'; did you mean 'pflego'.*named FILE.py:function"),
    ],
)
def test_names_that_lead_nowhere(tmp_path, name, message):
    write(tmp_path / "a.py", GOOD)
    with pytest.raises(InvalidArgument, match=message):
        method_named(name.format(tmp_path))


def installed(folder, version="1.2", value="methods_of_58.inner:mine"):
    """Puts a package with an entry point into a folder of the path."""
    write(folder / "methods_of_58" / "__init__.py", "")
    write(folder / "methods_of_58" / "inner.py", GOOD)
    info = folder / "methods_58.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: methods-58\nVersion: {version}\n")
    write(info / "RECORD", "methods_of_58/__init__.py,,\nmethods_of_58/inner.py,,\n")
    write(info / "entry_points.txt", f"[tfpfl.algorithms]\nmine_58 = {value}\n")


def test_a_module_and_an_entry_point(tmp_path, monkeypatch):
    installed(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert own.offered()["mine_58"] == "methods-58 1.2"
    module, point = own.own_method("methods_of_58.inner:mine"), own.own_method("mine_58")
    assert module.method.builder is point.method.builder and point.method.title == "Mine"
    for found, kind, name in ((module, "module", "methods_of_58.inner:mine"), (point, "entry point", "mine_58")):
        code = found.code
        assert (code.kind, code.name, code.place, code.package) == (kind, name, "methods_of_58.inner", "methods-58 1.2")
        own.check_entry(json.loads(json.dumps(found.entry)))


def test_the_source_of_a_module_is_found_without_running_anything(tmp_path, monkeypatch):
    write(tmp_path / "loud_59" / "__init__.py", "raise AssertionError('imported')")
    write(tmp_path / "loud_59" / "inner.py", GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    assert own.source_of("loud_59.inner") == tmp_path / "loud_59" / "inner.py"
    with pytest.raises(InvalidArgument, match="inner.py was changed since the run was created: its sha256"):
        own.load_installed("module", "loud_59.inner:mine", "0" * 64)  # compared before it is imported
    with pytest.raises(InvalidArgument, match="loud_59.inner cannot be imported: AssertionError: imported"):
        own.load_installed("module", "loud_59.inner:mine")


def test_two_packages_that_offer_one_name(tmp_path, monkeypatch):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.dist-info" / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        write(tmp_path / f"{name}.dist-info" / "entry_points.txt", f"[tfpfl.algorithms]\ntwice = {name}:mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidArgument, match="several packages offer a method 'twice': [ab] 1, [ab] 1"):
        method_named("twice")


ENTRY = {
    "kind": "file", "name": "a.py:mine", "place": "/x/a.py", "function": "mine", "package": None, "sha256": "0",
    "title": "Mine",
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "entry point"},  # which needs no consent: its name must not be that of a file
        {"kind": "entry point", "name": "pkg:mine"},
        {"kind": "module"},
        {"kind": "module", "place": "/x/a.py", "name": "/x/a.py:mine"},
        {"kind": "other"},
        {"name": "b.py:mine"},
        {"function": "other"},
        {"title": 3},
        {"more": "x"},
    ],
)
def test_an_entry_of_a_stranger_must_agree_with_itself(change):
    own.check_entry(ENTRY)
    with pytest.raises(InvalidArgument, match="own_method"):
        own.check_entry(ENTRY | change)


def test_all_listed_methods_could_be_named():
    """What is asked of a method of the user's own holds for tfpfl's."""
    for name, method in ALGORITHMS.items():
        own._check_arguments(method, name)
