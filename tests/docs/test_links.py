"""The pages as they are read in the repository: every link leads to a file that is there, and to a heading in it.

The anchors are those that web views of a repository make (`anchors`); those of the site are checked when it is built.
"""

import itertools
import re
import runpy
import unicodedata
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

from tfpfl.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "packaging/device/README.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
RUN = "run: python docs/tables.py"
MARKDOWN = MarkdownIt("commonmark").enable("table")


class Html(HTMLParser):
    """The targets and the ids in a piece of HTML."""

    def __init__(self, text: str):
        super().__init__()
        self.targets, self.ids = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("href", "src"):
                self.targets.append(value)
            elif name in ("id", "name"):
                self.ids.add(value)


def tokens(text):
    for token in MARKDOWN.parse(text):
        yield token
        yield from token.children or ()


def targets(text) -> list:
    """Where the links and pictures of a page lead, in Markdown or in HTML."""
    found = []
    for token in tokens(text):
        found += [token.attrs[name] for name in ("href", "src") if name in token.attrs]
        if token.type in ("html_block", "html_inline"):
            found += Html(token.content).targets
    return found


def anchors(text) -> set:
    """The headings' anchors: small letters, no punctuation, a hyphen for each space; a second one gets -1."""
    found, seen = set(), Counter()
    stream = MARKDOWN.parse(text)
    for before, token in zip(stream, stream[1:], strict=False):
        if before.type == "heading_open":
            said = "".join(t.content for t in token.children if t.type in ("text", "code_inline"))
            kept = (c for c in said.lower() if c in "-_ " or unicodedata.category(c)[0] in "LN")
            slug = "".join(kept).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
        if before.type in ("html_block", "html_inline"):
            found |= Html(before.content).ids
    return found


def wrong(page: Path, text: str) -> list:
    """The targets on a page that lead nowhere."""
    bad = []
    for target in targets(text):
        url = urlsplit(target)
        if url.scheme:
            if url.scheme != "https" or not re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", url.netloc) or " " in target:
                bad.append(target)
            continue
        path = (page.parent / unquote(url.path)).resolve() if url.path else page
        if url.netloc or target.startswith("/") or not path.is_relative_to(ROOT) or not path.exists():
            bad.append(target)
        elif url.fragment and (path.suffix != ".md" or url.fragment not in anchors(path.read_text(encoding="utf-8"))):
            bad.append(target)
    return bad


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert wrong(page, page.read_text(encoding="utf-8")) == []


def test_dead_links_are_found():
    page = ROOT / "docs" / "index.md"
    good = "[a](speed.md) [b](index.md#glossary) [c](../README.md) ![d](round.svg) [e](https://arxiv.org/abs/1)"
    assert wrong(page, good + ' <img src="round.svg"> `[no](link)`\n\n```\n[no](link)\n```\n') == []
    bad = ["nowhere.md", "index.md#nowhere", "#nowhere", "/docs/speed.md", "../../elsewhere", "http://arxiv.org/abs/1"]
    assert wrong(page, " ".join(f"[a]({target})" for target in bad) + ' <img src="nowhere.svg">') == [
        *bad,
        "nowhere.svg",
    ]
    assert anchors("# A `b`, c_d!\n## A b, c_d\n") == {"a-b-c_d", "a-b-c_d-1"}


def test_the_page_of_every_algorithm_and_cells_are_in_the_repository():
    """So that they can be read without building the site. tests/docs/test_docs.py compares the algorithms' pages."""
    generated = runpy.run_path(str(ROOT / "docs" / "generated.py"))
    assert (ROOT / "docs" / "cells.md").read_text(encoding="utf-8") == generated["cells_page"](), RUN
    assert {path.stem for path in (ROOT / "docs" / "algorithms").iterdir()} == set(ALGORITHMS)
    choosing = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert {f"algorithms/{name}.md" for name in ALGORITHMS} <= set(targets(choosing))


def test_every_algorithm_is_in_one_group():
    choosing = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    rows = choosing.partition("## Groups")[2].partition("## What decides")[0].strip().splitlines()[2:]
    grouped = [title.strip() for row in rows for title in row.split("|")[-2].split(",")]
    assert sorted(grouped) == sorted(method.title for method in ALGORITHMS.values())


@pytest.mark.slow
def test_the_table_of_algorithms_is_current():
    generated = runpy.run_path(str(ROOT / "docs" / "generated.py"))
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    choosing = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    now = tables["with_section"](choosing, "table of algorithms", generated["choosing_table"]())
    assert now == choosing, RUN


def test_a_page_of_the_repository_has_no_marks_of_the_site():
    """Such as `{ .nowrap }` or `:::`, which a web view of the repository would show."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"\{ ?[.:#].*?\}|^(?::::|!!!).*", re.sub(r"`[^`\n]*`", "", text), re.MULTILINE) == [], page


def methods_named(text: str) -> set:
    """The methods that a sentence or a cell of a page lists, such as 'FedAvg, FedProx, both with fine-tuning, ...'."""
    names = re.split(r", | and ", text.replace("both with fine-tuning", "FedAvg-FT, FedProx-FT"))
    by_title = {method.title.lower(): name for name, method in ALGORITHMS.items()}
    return {by_title[name.strip().lower()] for name in names}


def test_lists_of_methods_are_those_of_the_code():
    optimizers, objectives = (
        (ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("optimizers", "objectives")
    )
    (server,) = re.findall(r"whose server adds a mean has them: (.*?)\.\n", optimizers)
    assert methods_named(server) == {name for name, m in ALGORITHMS.items() if "server_eta" in m.hyperparameters}
    ((without, steps),) = re.findall(r"^\* (.*) do not have `--client-opt`.* (\S+) takes no steps", optimizers, re.M)
    missing = {name for name, method in ALGORITHMS.items() if "client_opt" not in method.hyperparameters}
    assert methods_named(without) | methods_named(steps) == missing
    (classes,) = re.findall(r"^For classes only: (.*?)\. ", (ROOT / "docs" / "choosing.md").read_text("utf-8"), re.M)
    assert methods_named(classes) == {name for name, method in ALGORITHMS.items() if method.only_classes}
    rows = dict(re.findall(r"^\| (a gradient|the result|refused)\b[^|]*\| (.*) \|$", objectives, re.M))
    kinds = {name: "refused" if m.no_objective else m.sends for name, m in ALGORITHMS.items()}
    for row, kind in {"a gradient": "gradient", "the result": "update", "refused": "refused"}.items():
        assert methods_named(rows[row]) == {name for name, its in kinds.items() if its == kind}, row


def test_the_command_of_the_peers_trains_the_methods_of_their_table():
    measured = (ROOT / "docs" / "measured.md").read_text("utf-8").partition("## The peers\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|,]+?)(?:, fine-tuned)? \| [\d.]+ ±", measured, re.MULTILINE)
    code = (ROOT / "benchmarks" / "peers.py").read_text("utf-8")
    (peers,) = re.findall(r'^PEERS = \([^"]*"(.*)"\n\)$', code, re.MULTILINE)
    assert "`python benchmarks/peers.py --out runs/peers`" in measured and "default=PEERS" in code
    assert peers.split(",") == [{m.title: name for name, m in ALGORITHMS.items()}[row] for row in rows]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_entry_of_a_list_is_there_twice(page):
    entries = Counter(re.findall(r"^\* .{40,}$", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert [entry[:60] for entry, count in entries.items() if count > 1] == []


def lists_within_text(text) -> list:
    """The lines in which a list or a table begins right below a line of text. The site would show them as text."""
    blocks = [token for token in MARKDOWN.parse(text) if token.level == 0 and token.map and token.nesting >= 0]
    return [
        block.map[0] + 1
        for before, block in itertools.pairwise(blocks)
        if before.type == "paragraph_open"
        and block.type in ("bullet_list_open", "ordered_list_open", "table_open")
        and block.map[0] == before.map[1]
    ]


def test_lists_stand_apart_from_text():
    assert lists_within_text("text\n\n* a\n* b\n") == []
    assert lists_within_text("text\n* a\n* b\n") == [2]
    assert lists_within_text("text\n\nmore\n1. a\n") == [4]
    found = {page.name: lists_within_text(page.read_text(encoding="utf-8")) for page in PAGES if "docs" in page.parts}
    assert {name: lines for name, lines in found.items() if lines} == {}, (
        "write an empty line before each of these lines"
    )
