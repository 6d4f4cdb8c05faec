"""The report: its numbers are those of the records, and the file needs nothing but a browser."""

import re
import resource
import shlex
from contextlib import contextmanager
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from helpers.made_records import CLIENTS, ROUNDS, made, stored
from tfpfl.cli import main
from tfpfl.runs import files, statistics
from tfpfl.runs.command import command
from tfpfl.runs.config import RunConfig
from tfpfl.runs.protocols import EV_ALL, EV_LOCAL, PROTOCOLS
from tfpfl.runs.run import Run
from tfpfl.studies import plots
from tfpfl.studies.report import ReportError, render, write_report
from tfpfl.studies.report.sections import costs
from tfpfl.studies.run_groups import clients, group_runs, paired

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """What stands where: elements with their attributes, tables as rows of texts, and that tags are closed."""

    def __init__(self, html: str):
        super().__init__()
        self.elements, self.stack, self.tables, self.texts = [], [], [], []
        self.feed(html)
        self.close()
        assert not self.stack, f"not closed: {self.stack}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.stack[-1] if self.stack else "", data))
        if {"td", "th"} & set(self.stack):
            self.tables[-1][-1][-1] += data

    def table(self, *head) -> dict:
        """{first cell: {heading: cell}} of the table with these headings."""
        found = [rows for rows in self.tables if set(head) <= set(rows[0])]
        assert len(found) == 1, (head, [rows[0] for rows in self.tables])
        return {row[0]: dict(zip(found[0][0], row, strict=True)) for row in found[0][1:]}

    def text(self, tag) -> str:
        return " ".join(data for where, data in self.texts if where == tag)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """PFLEGO of two seeds, FedAvg, FedAMP with its attention, Local."""
    folder = tmp_path_factory.mktemp("runs")
    attention = {"attention": np.arange(CLIENTS**2, dtype=float).reshape(CLIENTS, CLIENTS)}
    found = [made("pflego", 0, good=0.6), made("pflego", 1, good=0.6), made("fedavg", 0, good=0.3)]
    found += [made("fedamp", 0), made("local", 0, silent=True)]
    return [stored(r, folder / f"run{i}", attention if i == 3 else None) for i, r in enumerate(found)]


@pytest.fixture(scope="module")
def html(records):
    return render(records)


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


@pytest.mark.slow
def test_results_are_those_of_the_records(records, page):
    table = page.table("EV-all", "EV-local", "worst 10 %")
    assert list(table) == ["PFLEGO", "FedAvg", "FedAMP", "Local"]
    seeds = [r.result(EV_ALL).accuracy for r in records[:2]]
    mean, half = statistics.over_seeds(seeds)
    assert table["PFLEGO"]["EV-all"] == f"{100 * mean:.2f} ± {100 * half:.2f}" and table["PFLEGO"]["seeds"] == "2"
    for record in records[2:]:
        row = table[record.title]
        for name, protocol in (("EV-all", EV_ALL), ("EV-local", EV_LOCAL)):
            result = record.result(protocol)
            assert row[name] == f"{100 * result.accuracy:.2f} ± {100 * result.accuracy_ci95:.2f}"
        assert row["worst 10 %"] == f"{100 * record.result(EV_ALL).worst_decile:.2f}"
        assert row["predicts with"] == record.predicts


def test_other_protocols(records, page):
    table = page.table("pfllib *")
    assert set(PROTOCOLS) == {name.removesuffix(" *") for name in table["Local"]} - {"algorithm"}
    result = records[-1].result(PROTOCOLS["pfllib"])
    assert table["Local"]["pfllib *"] == f"{100 * result.accuracy:.2f} ± {100 * result.accuracy_ci95:.2f}"


def test_fairness_and_tests_against_local(records, page):
    table = page.table("Jain", "Gini")
    values, local = clients(records[2]), records[-1]
    assert table["FedAvg"]["Jain"] == f"{statistics.jain(values):.4f}"
    assert table["FedAvg"]["Gini"] == f"{statistics.gini(values):.4f}"
    assert table["FedAvg"]["worst 25 %"] == f"{100 * records[2].worst(0.25):.2f}"
    pair = paired([records[2]], [local])
    assert table["FedAvg"]["worse than Local"] == f"{100 * statistics.share_worse(*pair):.1f} %"
    assert table["Local"]["worse than Local"] == "-"
    deciles = page.table("10 %", "90 %")["FedAvg"]
    assert deciles["50 %"] == f"{100 * np.median(values):.2f}"
    test, row = statistics.wilcoxon(*pair), page.table("W+", "p")["FedAvg"]
    assert (row["pairs"], row["equal"], row["p"]) == (str(test.pairs), str(test.zeros), f"{test.p_value:.2g}")
    assert row["mean gain"] == f"{100 * np.mean(pair[0] - pair[1]):+.2f}"


def test_costs(records, page):
    row = page.table("s a round", "all bytes")["FedAvg"]
    sent = sum(range(1, ROUNDS + 1)) * 1000
    visits = 3 * ROUNDS
    assert (row["down"], row["up"]) == (f"{2 * sent / visits / 1000:.3g} kB", f"{sent / visits / 1000:.3g} kB")
    assert (row["passes"], row["all passes"], row["all bytes"]) == ("2.5 + 1.5", str(4 * visits), "234 kB")
    median = np.median([r["seconds"] for r in records[2].history])
    assert row["s a round"] == f"{median:.3g}"
    assert page.table("s a round")["Local"]["all bytes"] == "0 B"


def test_nothing_is_loaded(html, page):
    loading = {"src", "href", "xlink:href", "srcset", "data", "poster", "action", "background"}
    for tag, attributes in page.elements:
        for name in loading & set(attributes):
            assert re.match(r"#|data:", attributes[name]), (tag, name, attributes[name][:80])
        assert tag not in ("script", "iframe", "object", "embed", "base", "form")
    assert not re.search(r"url\((?!#)", html) and "@import" not in html and "@font-face" not in html
    assert "http://" not in html and "https://" not in html
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_ids_are_unique_and_all_that_is_referred_to_is_there(html, page):
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids)) > 100
    referred = set(re.findall(r"url\(#([^)]+)\)", html))
    for _, attributes in page.elements:
        referred |= set(attributes.get("aria-labelledby", "").split())
        if attributes.get("href", "").startswith("#"):
            referred.add(attributes["href"][1:])
    assert referred and referred <= set(ids), sorted(referred - set(ids))[:5]


def test_every_figure_has_a_caption_and_every_picture_a_name(html, page):
    figures = html.split("<figure")[1:]
    assert all("<figcaption" in figure.split("</figure>")[0] for figure in figures)
    captions = re.findall(r"<figcaption[^>]*>(.*?)</figcaption>", html, re.S)
    assert len(captions) == len(figures) and all(len(re.sub("<.*?>", "", c).strip()) > 20 for c in captions)
    pictures = [a for tag, a in page.elements if tag == "svg"]
    # 6 curves, the clients, fairness, gains against Local, FedAMP's attention
    assert len(pictures) == 10
    assert all(a["role"] == "img" and a["aria-labelledby"].endswith("-title") for a in pictures)
    assert "Test accuracy by rounds. accuracy (%), at the last point: PFLEGO" in page.text("title")
    assert "not drawn" not in html


def test_protocols_stand_beside_the_numbers(page):
    captions = page.text("figcaption")
    assert str(EV_ALL)[1:] in captions and str(EV_LOCAL)[1:] in captions
    assert captions.count("all clients; mean over clients") >= 10


@pytest.mark.slow
def test_attention_is_there_for_who_has_it(records, html):
    assert "FedAMP: attention" in html and f"After round {ROUNDS}, seed 0" in html
    assert "Who listens to whom" not in render([records[0], records[2]])


@pytest.mark.slow
def test_what_the_runs_are(records, html, page):
    ids = {row["run id"] for rows in page.tables if "run id" in rows[0] for row in
           [dict(zip(rows[0], r, strict=True)) for r in rows[1:]]}  # fmt: skip
    assert ids == {r.config.run_id for r in records}
    assert page.table("package", "version")["tensorflow"]["version"] == "2.14.1"
    told = re.search(r"<pre[^>]*>(.*?)</pre>", html, re.S)[1]
    commands = unescape(re.sub("<[^>]*>", "", told)).splitlines()
    assert commands == [command(r.config, r.folder) for r in records]
    assert "f" * 16 in html
    assert render(records) == html  # the same every time


@pytest.mark.slow
def test_one_run(records):
    one = Page(render(records[3:4]))
    assert list(one.table("EV-all", "worst 10 %")) == ["FedAMP"]
    assert sum(tag == "svg" for tag, _ in one.elements) == 9  # no gains: there is nobody to compare with


@pytest.mark.slow
def test_eight_algorithms_of_two_seeds():
    names = ("pflego", "fedavg", "fedavg_ft", "fedper", "fedrep", "ditto", "local", "pfedme")
    page = Page(render([made(name, seed) for name in names for seed in range(2)]))
    assert len(page.table("EV-all", "worst 10 %")) == 8
    # Two baselines, each with a picture and a table.
    assert sum(tag == "svg" for tag, _ in page.elements) == 6 + 2 + 2
    assert "8 algorithms on digits" in page.text("h1")


@pytest.mark.slow
def test_many_clients_are_drawn_as_shares(records, monkeypatch):
    monkeypatch.setattr("tfpfl.studies.report.sections._DOTS", 5)
    assert "The share of the clients that have at most so much" in render(records)


@pytest.mark.slow
def test_everything_is_escaped(tmp_path):
    evil = '"><script>alert(1)</script><img src=https://evil.example/x onerror=alert(2)>&amp;$\\frac$'
    record = made(dataset=evil, partition_args={evil: evil}, folder=f"runs/{evil}", versions={evil: evil},
                  federation_hash=evil, network=evil)  # fmt: skip
    record.summary["stopped"] = evil
    html = render([record, made("local", 0, dataset=evil, partition_args={evil: evil}, federation_hash=evil)])
    page = Page(html)
    assert not {"script", "img"} & {tag for tag, _ in page.elements}
    assert not any("evil" in str(a) for _, a in page.elements if "href" in a or "src" in a)
    assert all(not name.startswith("on") for _, a in page.elements for name in a)
    assert page.text("h1").endswith(evil)  # and is still all there
    title = render([record], title=evil)
    assert evil not in title and Page(title).text("h1") == evil


@pytest.mark.slow
def test_different_data_are_refused_unless_asked_for(tmp_path):
    runs = [made("pflego"), made("local", 0, federation_hash="e" * 64)]
    with pytest.raises(ReportError, match="(?s)federations are ffffffffffff and eeeeeeeeeeee.*--allow-different-data"):
        write_report(runs, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
    html = render(runs, allow_different_data=True)
    first = html[: html.index("<main>")]
    assert "not on the same data" in first and "ffffffffffff and eeeeeeeeeeee" in first
    assert "Gains against Local" in html and "cannot be compared client by client" in html  # and is not drawn
    with pytest.raises(ReportError, match="dataset is 'digits' and 'mnist'"):
        render([made(), made("local", 0, dataset="mnist")])


@pytest.mark.slow
def test_runs_that_stopped_or_differ_are_named():
    stopped, short = made("pflego"), made("fedavg", rounds=9)
    stopped.summary["stopped"] = "round 13 diverged"
    unfinished = made("fedavg", 3, participation=0.5)
    unfinished.config.rounds = 99
    text = Page(render([stopped, short, unfinished])).text("p")
    assert "PFLEGO, seed 0, stopped after round 12: round 13 diverged." in text
    assert "FedAvg, seed 3, has 12 of its 99 rounds." in text
    assert "; participation 0.2 (PFLEGO and FedAvg), 0.5 (FedAvg)." in text


def test_a_run_without_a_summary_or_evaluations():
    """While it runs."""
    running = made()
    running.summary.clear()
    running.evaluations.clear()
    html = render([running])
    assert "not drawn" in html and Page(html).table("EV-all", "worst 10 %")["PFLEGO"]["EV-all"] == "-"


def test_mistakes(records, tmp_path):
    with pytest.raises(ReportError, match="no runs"):
        render([])
    with pytest.raises(ReportError, match="are the same run"):
        render([records[0], made("pflego", 0, good=0.6)])
    with pytest.raises(ReportError, match="is a folder; name the file"):
        write_report(records, tmp_path)
    with pytest.raises(ReportError, match="found the ending .pdf. Name it .html"):
        write_report(records, tmp_path / "report.pdf")
    assert not [*tmp_path.iterdir()]
    own = tmp_path / "data.csv"
    own.write_text("hospital,age,diagnosis\n")
    with pytest.raises(ReportError, match="data.csv exists and is no page of HTML"):
        write_report(records, own)
    assert own.read_text() == "hospital,age,diagnosis\n"


@contextmanager
def no_file_larger_than(size):
    """The kernel refuses to let a file grow, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_report_as_it_was(records, tmp_path):
    out = tmp_path / "report.html"
    out.write_text("<!doctype html>the old one")
    render(records[:1])  # reads what SQLite cannot read under the limit
    with no_file_larger_than(10_000), pytest.raises(OSError, match="File too large"):
        write_report(records[:1], out)
    assert out.read_text() == "<!doctype html>the old one" and [p.name for p in tmp_path.iterdir()] == ["report.html"]
    link = tmp_path / "link.html"
    link.symlink_to(out)
    write_report(records[:1], link)
    assert link.is_symlink() and out.read_text(encoding="utf-8").startswith("<!")


def test_a_full_disk_leaves_the_old_picture_and_table_as_they_were(records, tmp_path):
    for name, write in {
        "curves.png": lambda path: plots.write_picture(plots.curves(records), path),
        "curves.svg": lambda path: plots.write_picture(plots.curves(records), path),
        "table.md": lambda path: files.write_whole(path, "± 1\n" * 5000),
    }.items():
        path = tmp_path / name
        path.write_text("the old one")
        with no_file_larger_than(5_000), pytest.raises(OSError, match="File too large"):
            write(path)
        assert path.read_text() == "the old one" and len(list(tmp_path.iterdir())) == 1
        write(path)
        assert path.stat().st_size > 5_000
        path.unlink()


@pytest.mark.slow
def test_a_report_may_go_to_a_device(records):
    assert write_report(records[:1], "/dev/null") == Path("/dev/null") and not Path("/dev/null").is_file()


@pytest.mark.slow
def test_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run with spaces"
    config = RunConfig(algorithm="local", partition_args={"K": 2}, clients=5, rounds=2, hyperparameters={"steps": 2})
    with Run.create(config, folder) as run:
        run.train()
    out = tmp_path / "new" / "report.html"
    runner = CliRunner()
    done = runner.invoke(main, ["report", str(folder), "--out", str(out), "--title", "Mine & yours"])
    assert done.exit_code == 0, done.output
    page = Page(out.read_text(encoding="utf-8"))
    assert page.text("h1") == "Mine & yours" and list(page.table("EV-all", "worst 10 %"))[0] == "Local"
    for wrong, message in (
        ([str(tmp_path / "nothing")], "not a run folder"),
        ([str(folder), "--baseline", "locl"], "unknown algorithm 'locl'"),
        ([str(folder), "--baseline", "ditto"], "--baseline ditto: none of the runs is of this method"),
        ([str(folder), str(folder)], "the same run"),
        ([], "Missing argument 'RUN...'"),
    ):
        done = runner.invoke(main, ["report", *wrong, "--out", str(tmp_path / "no.html")])
        assert done.exit_code and message in " ".join(done.output.split()), done.output
    assert not (tmp_path / "no.html").exists()


@pytest.mark.parametrize(
    "asked",
    [
        ["--algorithm", "pflego", "--classes-per-client", 3, "--rounds", 5, "--tau", 7, "--beta", 0.05, "--seed", 3],
        ["--algorithm", "pflego", "--preset", "exact", "--participation", 0.5, "--data-seed", 9, "--validation", 0.2],
        ["--algorithm", "fedrecon", "--reset-head", "--clients", 6, "--pixels", "signed", "--grouping", "one_by_one"],
        ["--algorithm", "local", "--partition", "dirichlet", "--partition-alpha", 0.7, "--sampling", "binomial"],
        ["--algorithm", "fedavg", "--sampling", "range", "--sampling-range", 2, 5, "--labels", "global"],
        ["--algorithm", "fedavg", "--federation", "OWN", "--evaluate-every", 3, "--patience", 2],
        ["--algorithm", "pfedhn", "--clip", "none", "--batch-size", "None"],
        ["--dropout", 0.2, "--joins", "3:1,2", "--joins", "5:4", "--on-broken", "reject", "--max-norm", 9.5],
    ],
    ids=lambda asked: f"{asked[1]}{asked[2]}",
)
def test_the_command_makes_the_same_run(asked, tmp_path, monkeypatch):
    """What it says, read by the command line itself, is a configuration with the same run id."""
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    own = tmp_path / "my federation"
    if "OWN" in asked:
        CliRunner().invoke(main, ["partition", str(own), "--clients", "5"], catch_exceptions=False)
    made_by = []

    class Made(Exception):
        """Instead of training."""

    def create(config, folder, *_, **__):
        from tfpfl.runs.federations import open_federation

        made_by.append((config.resolved(open_federation(config)), folder))
        raise Made

    monkeypatch.setattr(Run, "create", create)

    def configured(arguments):
        context = main.make_context("tfpfl", ["run", *arguments], resilient_parsing=False)
        with pytest.raises(Made), context:
            main.invoke(context)
        return made_by.pop()

    arguments = [str(own) if a == "OWN" else str(a) for a in asked]
    first, _ = configured([*arguments, "--out", "runs/a b"])
    words = shlex.split(command(first, "runs/a b"))
    assert words[:2] == ["tfpfl", "run"]
    again, folder = configured(words[2:])
    assert str(folder) == "runs/a b"
    assert again == first and again.run_id == first.run_id


def test_rounds_and_seconds_are_of_the_same_runs():
    """Two seeds that ended after 20 and 60 rounds, each of one second, took 40 seconds for 40 rounds, in the mean."""
    found = [made("fedavg", seed, rounds=rounds) for seed, rounds in ((0, 20), (1, 60))]
    found[0].config.rounds = 60  # it was stopped before
    for row in (row for record in found for row in record.history):
        row["seconds"] = 1.0
    (table,) = costs(group_runs(found))
    cells = dict(zip(table.head, table.rows[0], strict=True))
    assert (cells["s a round"], cells["rounds"], cells["all seconds"]) == ("1", "40", "40")
