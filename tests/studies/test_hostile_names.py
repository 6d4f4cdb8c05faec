"""Names that a stranger chose, of clients, classes, data sets and folders, stay text wherever they are shown."""

import csv
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from helpers.made_records import made, stored
from helpers.marks import slow_but
from tfpfl.checks import InvalidArgument, one_line
from tfpfl.cli import main
from tfpfl.data import Federation
from tfpfl.runs.files import csv_cell, csv_text, markdown, write_csv
from tfpfl.studies import comparison, paper_tables, plots, tables
from tfpfl.studies.new_clients import Adapted
from tfpfl.studies.new_clients import write_csv as write_new_clients
from tfpfl.studies.report import render

NAMES = {
    "script": "<script>alert(1)</script>",
    "attribute": "\" onload='alert(1)' x=\"",
    "closing": "</svg></title></td>--><b>",
    "template": "{{ 7 * 7 }}{% raw %}",
    "formula": "=HYPERLINK(\"http://x\",\"y\")",
    "at": "@SUM(1)",
    "minus": "-2+3",
    "right to left": "abc\u202ecba\u2066x\u200f",
    "hebrew and arabic": "שלום سلام",
    "newlines": "one\ntwo\r\nthree\u2028four",
    "nul": "a\0b",
    "escape": "\x1b[31mred\x1b]0;title\x07\x9b2J",
    "markup": "[red]x[/nothing] [link=http://x]y[/link] \\",
    "mathtext": "$\\frac{$ $x$",
    "markdown": "[a](javascript:alert(1)) |c| `d` **e**",
    "latex": "\\input{x} $x$ % & _ # ~ ^",
    "half a pair": "\ud800",
    "not in xml": "\ufffe\x01",
    "long": "x" * 5_000,
    "empty": "",
}  # fmt: skip
named = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
TURNING = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def is_plain(text: str, lines="") -> bool:
    """Whether nothing in a text steers a terminal or turns letters, and UTF-8 can write it."""
    text.encode("utf-8")
    return not any(c in TURNING or (ord(c) < 32 or 127 <= ord(c) < 160) and c not in lines for c in text)


def records(name: str, folder):
    """Two settings of PFLEGO on a data set of this name, whose networks differ, so that a label shows the name."""
    networks = {"mlp200": 0.5, f"{name}.keras": 0.3}
    found = [made("pflego", dataset=name, network=network, good=good) for network, good in networks.items()]
    return [stored(record, folder / str(i)) for i, record in enumerate(found)]


def federation(name: str, folder) -> Federation:
    """Two clients of two classes; data set, classes and clients have this name."""
    rng = np.random.default_rng(0)
    clients = {c: (rng.random((8, 3), np.float32), np.arange(8) % 2) for c in (name, f"{name}2")}
    return Federation.from_clients(clients, out=folder, name=name, class_names=[name, f"{name}2"])


# ---- the functions that all of this stands on


def test_one_line_keeps_letters_and_shows_the_rest_as_codes():
    assert one_line("T-shirt/top 7 é 漢字 שלום 👩‍🔬 \xa0|") == "T-shirt/top 7 é 漢字 שלום 👩‍🔬 \xa0|"
    assert one_line("a\nb\0\x1b[31m\x9b") == "a\\nb\\x00\\x1b[31m\\x9b"
    assert one_line("\u202eabc\ud800\u2028\ufeff") == "\\u202eabc\\ud800\\u2028\\ufeff"
    assert one_line("a\nb\tc", keep="\n") == "a\nb\\tc"
    assert one_line(3.5) == "3.5" and one_line("x" * 100, 10) == "x" * 9 + "…" and one_line("x" * 10, 10) == "x" * 10
    assert all(is_plain(one_line(name)) for name in NAMES.values())


def test_a_cell_of_a_csv_file_is_no_formula_and_numbers_stay():
    for formula in ("=1+1", "+1", "-1+1|cmd", "@A1", "  =1", "＝1"):
        assert csv_cell(formula) == f"'{formula}"
    for text in ("PFLEGO (rho=0.1)", "a-b", "", "'=1", "1e-3"):
        assert csv_cell(text) == text
    for number in (-1, -1.5, float("-inf"), None, True, np.float64(-2)):
        assert csv_cell(number) is number


@named
def test_a_csv_file_has_one_line_a_row_whatever_the_names(name, tmp_path):
    write_csv(tmp_path / "a.csv", ["n", name], [{"n": -1.5, name: name}, {"n": 2}])
    text = (tmp_path / "a.csv").read_text(encoding="utf-8")
    found = list(csv.reader(io.StringIO(text)))
    assert len(text.splitlines()) == len(found) == 3 and [len(row) for row in found] == [2, 2, 2]
    assert found[1][0] == "-1.5" and found[1][1].lstrip()[:1] not in ("=", "+", "-", "@")
    assert found[1][1] in (one_line(name), f"'{one_line(name)}")


def test_a_csv_file_still_refuses_a_value_without_a_column():
    with pytest.raises(ValueError, match="fields not in fieldnames"):
        csv_text(["a"], [{"b": 1}])


# ---- files that are read


class Tags(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.words = set(), set(), []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {key for key, _ in attrs}

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def harmless(tmp_path_factory):
    """The tags and attributes of a report with harmless names."""
    found = Tags(render(records("digits", tmp_path_factory.mktemp("harmless"))))
    return found.tags, found.attributes


@pytest.mark.parametrize("name", slow_but(NAMES.values(), ci=(NAMES["script"],)), ids=NAMES)
def test_the_report_has_no_tag_or_attribute_more(name, tmp_path, harmless):
    page = render(records(name, tmp_path / "runs"), title=name or None)
    page.encode("utf-8")
    found = Tags(page)
    assert found.tags <= harmless[0] and found.attributes <= harmless[1]
    assert is_plain(page, lines="\n")
    assert one_line(name) in "".join(found.words)


@named
def test_tables_for_papers_keep_their_columns(name, tmp_path):
    rows = comparison.rows(records(name, tmp_path / "runs"))
    table = list(csv.DictReader(io.StringIO(comparison.text(rows, "csv"))))
    assert len(table) == 2 and all(one_line(name) in row["algorithm"] for row in table[1:])
    lines = comparison.text(rows, "md").splitlines()[:4]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert not any("<script" in line or "](javascript" in re.sub(r"\\.", "", line) for line in lines)
    written = paper_tables.latex(paper_tables.paper_table({name: rows}))
    assert is_plain(written, lines="\n")
    assert "\\input{" not in written


@named
def test_the_terminal_shows_the_name_and_obeys_nothing_in_it(name, tmp_path):
    new = Adapted(name, "own", "test", np.arange(2), np.full(2, 9), np.zeros((2, 3)), np.zeros((2, 3)))
    rows = comparison.rows(records(name, tmp_path / "runs"))
    compared = tables.comparison_over_clients(rows, "EV-all")
    for table in (tables.protocols([], name), compared, tables.new_clients([new])):
        out = io.StringIO()
        Console(file=out, force_terminal=True, color_system="truecolor", width=12_000).print(table)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # the colours that the table itself has
        assert is_plain(shown, lines="\n") and "".join(one_line(name).split()) in "".join(shown.split())
        assert "\x1b[31m" not in out.getvalue() and "\x1b]8" not in out.getvalue()  # red, and a link
    write_new_clients([new], tmp_path / "new.csv")
    with open(tmp_path / "new.csv", newline="", encoding="utf-8") as file:
        assert {row["run"] for row in csv.DictReader(file)} == {csv_cell(name)}


# ---- a federation, and what is made of it


@named
def test_a_federation_of_hostile_names(name, tmp_path):
    """It is written, read and drawn; what is shown is plain, and the manifest keeps what was given."""
    made_now = federation(name, tmp_path / "f")
    found = Federation.load(tmp_path / "f")
    assert found.hash == made_now.hash and found.manifest["class_names"] == [name, f"{name}2"]
    assert found.class_names == [one_line(name), one_line(f"{name}2")] and len(found.client_names) == 2
    assert all(map(is_plain, [*found.class_names, *found.client_names, *map(str, found.describe().values())]))
    drawn = io.BytesIO()
    plots.classes(found).savefig(drawn, format="png", dpi=40)
    assert drawn.getvalue()[1:4] == b"PNG"
    width, height = (int.from_bytes(drawn.getvalue()[i : i + 4]) for i in (16, 20))
    assert width < 600 and height < 600


def test_a_hostile_client_in_an_error_of_the_command_line(tmp_path, monkeypatch):
    """A message is one line without colours, whatever it quotes."""

    def broken(*_, **__):
        raise InvalidArgument("client \x1b[31mann\nbob\u202e has 1 training example")

    monkeypatch.setattr("tfpfl.data.Federation.build", broken)
    done = CliRunner().invoke(main, ["partition", str(tmp_path / "f"), "--clients", "4"])
    assert done.exit_code == 1 and is_plain(done.output, lines="\n")
    assert done.output == "Error: client \\x1b[31mann bob\\u202e has 1 training example\n"


@pytest.mark.parametrize("name", [NAMES["markup"], NAMES["escape"]], ids=["markup", "escape"])
def test_partition_prints_a_hostile_data_set(name, tmp_path, monkeypatch):
    monkeypatch.setattr("tfpfl.data.Federation.build", lambda *_, out, **__: federation(name, out))
    done = CliRunner().invoke(main, ["partition", str(tmp_path / "f"), "--clients", "2"])
    assert not done.exception and one_line(name) in done.output and is_plain(done.output, lines="\n")


@pytest.mark.parametrize("folder", ["[red]here[/nothing]", "a[/]b"])
def test_the_folder_of_data_sets_is_no_markup(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / folder))
    done = CliRunner().invoke(main, ["datasets"])
    assert not done.exception and f"{tmp_path / folder} (TFDS_DATA_DIR)." in done.output


@named
def test_the_model_card_of_a_bundle(name):
    """It has no HTML and no links."""
    from tflite_export.convert.texts import model_card

    class Personal:
        labels = [one_line(name), "b"]  # as a federation gives them
        about = {"client": 3, "algorithm": "pflego", "took_part": True, "first_round": 1, "dataset": name,
                 "client_name": name, "federation_hash": "f" * 64, "round": 2, "num_examples": 9}  # fmt: skip

    manifest = {
        "client": 3,
        "model": {"example_shape": [3], "num_backbone_weights": 6, "num_features": 2, "num_classes": 2,
                  "static_batch": 32},
        "training": {"tau": 5, "beta": 0.1, "rho": 0.1, "head_rate": 0.1, "rounds": True},
        "preprocessing": {}, "quality": {}, "runtimes": {"tested": ["a"]},
    }  # fmt: skip
    card = model_card(manifest, Personal)
    unescaped = re.sub(r"\\.", "", card)
    assert is_plain(card, lines="\n") and "<" not in card and "](" not in unescaped
    assert markdown(name) in card and json.dumps(card)
    assert len(card.splitlines()) == 10


def test_labels_of_a_model_by_hand_are_lines():
    from tflite_export.convert.personal import personal_model
    from tfpfl.models import SplitModel, build_network
    from tfpfl.models.weights import Head

    model = SplitModel(build_network("mlp200", (2, 2, 1)))
    head = Head(np.zeros((model.num_features, 2), np.float32), np.zeros(2, np.float32))
    found = personal_model((model, model.initial_theta, head), None, labels=["a\nb\x1b", "<c>"])
    assert found.labels == ["a\\nb\\x1b", "<c>"]


def test_the_browser_page_writes_texts_only():
    """No statement of the page parses HTML or runs text, so that names from a bundle cannot become either."""
    from pathlib import Path

    sources = sorted((Path(__file__).parents[2] / "web" / "src").glob("*.ts"))
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|\beval\(|srcdoc"
    assert len(sources) > 15
    assert not [f.name for f in sources if re.search(sinks, f.read_text()) or "new Function" in f.read_text()]
