"""Everything that a run can be made of has a work to cite, and BibTeX can read it."""

import json
import re

import pytest
from click.testing import CliRunner

from tfpfl.algorithms import ALGORITHMS
from tfpfl.cli import main
from tfpfl.data import PARTITIONERS, list_datasets
from tfpfl.studies import cite


def test_everything_has_an_entry():
    known = cite.names()
    asked = [
        *ALGORITHMS,
        *(row["name"] for row in list_datasets()),
        *PARTITIONERS,
        "tfpfl",
        "tff",
        "tensorflow",
        "keras",
    ]
    assert [name for name in asked if name not in known] == []
    # A name is of one thing: what is found by it must not depend on who asks.
    assert len(set(asked)) == len(asked)


def test_nothing_is_cited_that_is_not_there():
    there = {*ALGORITHMS, *(row["name"] for row in list_datasets()), *PARTITIONERS}
    software = {"tfpfl", "tff", "tensorflow", "keras", "tfds"}
    options = {"lora", "scale_shift", "bottleneck", "fair", "cvar"}
    assert set(cite.names()) - there == software | options | {"emnist", "speech_embedding"}


def test_entries_are_bibtex():
    keys = [entry.key for entry in cite.entries()]
    assert len(set(keys)) == len(keys) > 30
    kind = r"@(misc|article|inproceedings|techreport)\{[\w-]+,\n.*\n\}"
    for entry in cite.entries():
        assert re.fullmatch(kind, entry.text, re.DOTALL), entry.key
        assert entry.text.count("{") == entry.text.count("}") and entry.text.isascii()
        fields = re.findall(r"^  (\w+) = \{", entry.text, re.MULTILINE)
        assert len(set(fields)) == len(fields) and "tfpfl" not in fields
        assert "title" in fields or "note" in fields
        lines = entry.text.split("\n")[1:-1]
        assert not lines[-1].endswith(",") and all(line.startswith("  ") for line in lines)
        assert "year" not in fields or re.search(r"year = \{(19|20)\d\d\}", entry.text)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_authors_are_those_of_the_list_of_algorithms(name):
    """The first author and the number of the arXiv paper, where the list has them."""
    reference, text = ALGORITHMS[name].reference, cite.bibtex([name])
    first = re.match(r"([A-Z]\w+), [A-Z]\w+[,:]", reference)
    if first:
        assert f"{first[1]}," in text or f"{first[1]}}}," in text
    for number in re.findall(r"\d{4}\.\d{5}", reference):
        assert number in text


def test_a_name_gives_all_its_works_once():
    assert [text.count("@") for text in (cite.bibtex(["dirichlet"]), cite.bibtex(["fedavg", "fedsgd"]))] == [2, 1]
    with pytest.raises(ValueError, match="unknown name to cite 'fedvag'; did you mean 'fedavg'"):
        cite.bibtex(["fedvag"])
    listing = cite.listing().splitlines()
    assert len(listing) == len(cite.names()) and listing == sorted(listing)


def test_of_a_run(a_run, tmp_path):
    """The user's own data have no entry; what the run ran on has one."""
    assert cite.names_of_run(a_run) == ["pflego", "tfpfl", "tensorflow", "keras"]
    config = a_run / "config.json"
    text = config.read_text().replace('"arrays"', '"mnist"').replace('"from_clients"', '"dirichlet"')
    config.write_text(text.replace('"engine": "local"', '"engine": "tff"'))
    expected = ["pflego", "mnist", "dirichlet", "tfpfl", "tensorflow", "keras", "tff", "tfds"]
    assert cite.names_of_run(a_run) == expected
    found = json.loads(config.read_text()) | {"adapters": "lora:2", "objective": "fair:1", "batch_norm": "local"}
    config.write_text(json.dumps(found))
    assert cite.names_of_run(a_run) == [*expected[:3], "lora", "fair", "fedbn", *expected[3:]]
    with pytest.raises(ValueError, match="is not a run folder"):
        cite.names_of_run(tmp_path)


def test_a_method_of_ones_own_is_said_to_have_no_entry(a_run, tmp_path):
    """On stderr, so that a file of BibTeX stays one."""
    assert cite.method_without_work(a_run) is None
    text = (a_run / "config.json").read_text().replace('"pflego"', '"mine.py:mine"').replace('"iid"', '"round_robin"')
    (tmp_path / "config.json").write_text(text)
    result = CliRunner().invoke(main, ["cite", "--run", str(tmp_path)])
    assert result.exit_code == 0 and result.stdout == cite.bibtex(cite.names_of_run(tmp_path)) + "\n"
    assert result.stderr == "mine.py:mine is not a method of tfpfl: cite its own source besides these works\n"


def test_the_command():
    def printed(*arguments, code=0):
        result = CliRunner().invoke(main, ["cite", *arguments])
        assert result.exit_code == code, result.output
        return result.output

    assert printed() == cite.listing() + "\n"
    assert printed("ditto", "mnist") == cite.bibtex(["ditto", "mnist"]) + "\n"
    assert "unknown name to cite 'dito'; did you mean 'ditto'?" in printed("dito", code=1)
    assert "give names or --run, not both" in printed("ditto", "--run", "runs/x", code=2)
    assert "runs/x is not a run folder" in printed("--run", "runs/x", code=1)
