"""The documentation says what the code does: its examples run, its commands exist, its links lead somewhere."""

import ast
import contextlib
import doctest
import html
import importlib
import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest

from tfpfl.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
NOT_RUN = "not run: "  # a block of Python with this in its title says why
PYTHON = re.compile(r"^```python(?P<info>.*)\n(?P<code>(?:.*\n)*?)^```$", re.MULTILINE)
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("tfpfl", "tflite_export")
    for path in (ROOT / package).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


ROOMS = next(  # what the API reference describes
    ast.literal_eval(node.value)
    for node in ast.parse((ROOT / "docs" / "generated.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.Assign) and node.targets[0].id == "ROOMS"
)
MODULES_TO_IMPORT = {  # whole modules that users may import besides the names of a room
    "tfpfl.live.demo",
    "tfpfl.live.watch_table",
    "tfpfl.live.watching",
    "tfpfl.models.tree",
    "tfpfl.studies.battery",
    "tfpfl.studies.cite",
    "tfpfl.studies.new_clients",
    "tfpfl.studies.plots",
}


def source_of(room: str) -> ast.Module:
    """The source of a room, which is a package or a module."""
    path = ROOT.joinpath(*room.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))


def handed_on(room: str) -> list:
    """The names in `__all__`, read without importing: a list, or the keys of `_HOME`."""
    values = {
        node.targets[0].id: node.value
        for node in source_of(room).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return list(ast.literal_eval(values.get("_HOME", values["__all__"])))


def from_imports(tree):
    """(module, name) of every `from module import name` of ours, and (module, '') of every `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        yield from (pair for pair in found if pair[0].split(".")[0] in ("tfpfl", "tflite_export"))


def programs():
    """(name of a page or a notebook, its Python)."""
    for name, text in {"README.md": (ROOT / "README.md").read_text(encoding="utf-8"), **PAGES}.items():
        yield from ((name, found["code"]) for found in PYTHON.finditer(text))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                yield path.name, re.sub(r"^( *)[%!].*", r"\1pass", "".join(cell["source"]), flags=re.MULTILINE)


def is_public(module: str, name: str, inside: bool) -> bool:
    """Whether the module is a room that hands on the name; with `inside`, whether it is a file of such a room."""
    if not name or module in MODULES_TO_IMPORT or f"{module}.{name}" in MODULES_TO_IMPORT:
        return module in {"tfpfl", *ROOMS, *MODULES_TO_IMPORT}
    rooms = [room for room in ("tfpfl", *ROOMS) if module == room or (inside and f"{module}.".startswith(f"{room}."))]
    return bool(rooms) and name in handed_on(max(rooms, key=len))


def test_pages_import_public_names_only():
    """From the room itself. Notebooks may name a file of the room, but not a name that the room does not hand on."""
    found = [(page, *pair) for page, code in programs() for pair in from_imports(ast.parse(code))]
    assert {page for page, *_ in found} >= {"README.md", "index.md", "extending.md", "04_to_the_phone.ipynb"}
    bad = [f"{page}: {m}, {name}" for page, m, name in found if not is_public(m, name, page.endswith(".ipynb"))]
    assert bad == []


@pytest.mark.parametrize("room", ["tfpfl", *ROOMS])
def test_a_room_has_what_it_hands_on(room):
    """Every name in `__all__` is imported or defined there; what the root hands on, its room hands on too."""
    tree = source_of(room)
    names = {name: module for module, name in from_imports(tree)}
    names |= {node.name: room for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    listed = handed_on(room)
    assert len(listed) == len(set(listed)) and set(listed) <= set(names)
    if room == "tfpfl":
        assert [name for name in listed if name not in handed_on(names[name])] == []
    home = [n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "_HOME"]
    for name, module in ast.literal_eval(home[0]).items() if home else ():
        assert names[name] == f"{room}.{module}", name


@pytest.mark.docs
@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if PYTHON.search(text)])
def test_examples_of_a_page_run(page, tmp_path):
    """In the order of the page, as one program in an empty folder."""
    code = "\n".join(found["code"] for found in PYTHON.finditer(PAGES[page]) if NOT_RUN not in found["info"])
    write_files(page, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TFPFL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]


def write_files(page, folder):
    """Writes the blocks of Python that are files: those whose title is the name of one."""
    for found in PYTHON.finditer(PAGES[page]):
        if title := re.search(r'title="(\w+\.py)"', found["info"]):
            (folder / title[1]).write_text(found["code"], encoding="utf-8")


def test_every_example_of_python_is_run():
    """None is left out by its title, or by a spelling that the test above does not find."""
    blocks = sum(text.count("```python") + text.count("```py\n") for text in PAGES.values())
    found = [match for text in PAGES.values() for match in PYTHON.finditer(text)]
    assert [match["code"] for match in found if NOT_RUN in match["info"]] == []
    assert len(found) == blocks > 10


def commands():
    """(page, program, words) of every call of our command lines in a block of code."""
    call = re.compile(r"^(?:\S+[$] +)?(?:tfpfl|python -m (?:tfpfl|tflite_export)) (.*)$")
    for name, text in PAGES.items():
        blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        blocks += re.findall(r"^    (.*)$", text, re.MULTILINE)
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            if match := call.match(line.strip()):
                program = "tflite_export" if "tflite_export" in line.split(match[1])[0] else "tfpfl"
                yield pytest.param(name, program, shlex.split(match[1], comments=True), id=f"{name}: {match[1][:60]}")


@pytest.mark.parametrize(("page", "program", "words"), commands())
def test_commands_exist(page, program, words, tmp_path, monkeypatch):
    """They parse; a usage error is raised where an option or a type is wrong. Nothing is run."""
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module(f"{program}.cli").main
    name, *rest = words
    with contextlib.suppress(click.exceptions.Exit):  # --help
        main.commands[name].make_context(name, rest)


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_docstrings(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.attempted and not result.failed


def test_docstrings_have_examples():
    assert len(MODULES) >= 5


def sections(builder) -> dict:
    """{heading: its text} of a docstring, for the headings that stand alone in a line and end with a colon."""
    parts = re.split(r"^([A-Z][\w ]*):\n", inspect.getdoc(builder), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def update_rule(builder) -> list:
    """The lines of pseudo-code under 'Update rule:'."""
    return [line for line in sections(builder)["Update rule"].splitlines() if line.startswith("    ")]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_help_of_a_builder_shows_the_update_rule_and_names_its_source(name):
    """And says what every argument is, what is refused and what is returned."""
    builder, row = ALGORITHMS[name].builder, ALGORITHMS[name]
    found = sections(builder)
    assert any("<-" in line for line in update_rule(builder))
    assert re.search(r"\b(19|20)\d\d\b|arXiv \d{4}\.\d{5}|thesis", found["Source"])
    if row.reference.split(",")[0].isalpha() and name not in ("fedavg_ft", "fedprox_ft"):
        assert row.reference.split(",")[0] in found["Source"]  # the first author
    described = re.findall(r"^    (\w[\w, ]*): ", found["Args"], re.MULTILINE)
    assert sorted(", ".join(described).split(", ")) == sorted(inspect.signature(builder).parameters)
    assert "The `Algorithm`" in found["Returns"]
    refused = " ".join(found["Raises"].split())
    assert refused.startswith("InvalidArgument: ") and "says what it may be" not in refused
    inside = " ".join(inspect.getmodule(builder).__doc__.split())
    assert [line for line in update_rule(builder) if "<-" in line and " ".join(line.split()) in inside] == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_has_its_page(name):
    """Title, reference, rule, every hyperparameter with its default and a text, command and BibTeX."""
    pages = runpy.run_path(str(ROOT / "docs" / "generated.py"))
    text, row = pages["algorithm_page"](name), ALGORITHMS[name]
    committed = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text(encoding="utf-8")
    assert committed == text, "run: python docs/tables.py"
    assert text.startswith(f"# {row.title}\n") and row.reference in text
    assert [line for line in update_rule(row.builder) if line.strip() not in text] == []
    first = inspect.getmodule(row.builder).__doc__.splitlines()[0]
    assert html.escape(first, quote=False) in text
    for option, parameter in row.hyperparameters.items():
        (line,) = [x for x in text.splitlines() if f">--{option.replace('_', '-')}</code> |" in x]
        *_, default, told = line.strip("| ").split(" | ")
        assert default == f"`{parameter.default}`" and len(told) > 5
    for preset in row.presets:
        assert f"--preset {preset}" in text
    (command,) = re.findall(r"^tfpfl run (.*)$", text, re.MULTILINE)
    importlib.import_module("tfpfl.cli").main.commands["run"].make_context("run", command.split())
    assert re.search(r"^@\w+\{", text, re.MULTILINE)


class Page(HTMLParser):
    """What a page has: ids to be linked to, links, and what a browser fetches for it."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids, self.links, self.fetched = set(), [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[key] for key in ("id", "name") if given.get(key)}
        if given.get("src"):
            self.fetched.append(given["src"])
        if given.get("href"):
            rel = given.get("rel") or ""
            fetched = tag == "link" and rel not in ("canonical", "prev", "next")
            (self.fetched if fetched else self.links).append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with warnings as errors."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: the site cannot be built")
    folder = tmp_path_factory.mktemp("site") / "site"
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def build(config, folder):
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )


@pytest.mark.docs
def test_links_of_the_site_resolve(site):
    """Every one within the site: the file is there, and the place in it; and nothing is fetched from elsewhere."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > len(PAGES) + len(ALGORITHMS)
    bad = []
    for path, page in pages.items():
        bad += [(path.name, link) for link in page.fetched if urlsplit(link).scheme not in ("", "data")]
        for link in page.links + page.fetched:
            url = urlsplit(link)
            if url.scheme or (path.name == "404.html" and not url.fragment):  # that page may stand in for any other
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                bad.append((path.name, link))
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].ids:
                bad.append((path.name, link))
    assert bad == []


@pytest.mark.docs
def test_the_site_asks_nobody(site):
    """No style sheet imports or fetches from another host."""
    sheets = list(site.rglob("*.css"))
    assert sheets
    for path in sheets:
        found = re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^\"')]+", path.read_text(encoding="utf-8"))
        assert found == [], path.name


@pytest.mark.docs
def test_public_names_are_in_the_reference(site):
    """Every name that a room hands on, once."""
    ids = re.findall(r'\bid="((?:tfpfl|tflite_export)\.[^"]+)"', (site / "api.html").read_text(encoding="utf-8"))
    public = [f"{room}.{name}" for room in ROOMS for name in handed_on(room)]
    assert [name for name in public if ids.count(name) != 1] == []
