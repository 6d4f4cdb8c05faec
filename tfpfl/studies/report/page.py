"""Writes the report: what is compared, warnings that a reader needs before the numbers, and the sections."""

import datetime
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tfpfl.checks import InvalidArgument, check_listed, check_type, one_line
from tfpfl.runs.files import beginning, write_whole
from tfpfl.studies.comparison import BASELINES
from tfpfl.studies.records import Record
from tfpfl.studies.report import sections
from tfpfl.studies.report.blocks import Pictures, Section
from tfpfl.studies.run_groups import RunGroup, check_comparable, group_runs, span
from tfpfl.studies.told import told_classes, told_conditions, told_ends, told_lengths, told_seen, told_splits


class ReportError(InvalidArgument):
    """The runs cannot be in one report, or the file cannot be written. The message says why."""


def write_report(records: Sequence[Record], out: str | os.PathLike, **options) -> Path:
    """Writes the report to the HTML file `out`; an older one stays if that fails. The options are those of `render`.

    Raises:
        ReportError: as `render`; `out` has another ending, is a folder, or an existing file that is no page of HTML.
    """
    out = Path(out)
    if out.is_dir():
        raise ReportError(f"{out} is a folder; name the file, for example {out / 'report.html'}")
    if out.is_file() and (found := beginning(out)) and not found.lstrip().lower().startswith("<!doctype html"):
        raise ReportError(f"{out} exists and is no page of HTML: it may be your own data. Name another file")
    if out.suffix.lower() not in ("", ".html", ".htm"):
        raise ReportError(f"{out}: a report is a page of HTML, found the ending {out.suffix}. Name it .html")
    page = render(records, **options)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page)
    return out


def render(
    records: Sequence[Record],
    *,
    title: str | None = None,
    baselines: Sequence[str] = BASELINES,
    allow_different_data: bool = False,
) -> str:
    """The report as HTML.

    Args:
        records: the runs to compare, from `Record.read`. Runs that differ only in their seed are one row.
        title: the heading; default: the names of the algorithms and of the data set.
        baselines: names of algorithms. The others are compared with them client by client, if they are among the runs.
        allow_different_data: compare runs on different federations, with a warning at the top.

    Raises:
        ReportError: no runs, one of them twice, or runs on different data without `allow_different_data`.
    """
    check_listed("records", records, "[Record.read('runs/pflego'), Record.read('runs/fedper')]")
    for record in records:
        check_type("a record", record, Record, "a tfpfl.Record: tfpfl.Record.read(folder) reads one")
    check_listed("baselines", baselines, "['local']")
    rows, warnings = _comparable(records, allow_different_data)
    against = [s for s in rows if s.algorithm in baselines]
    pictures = Pictures()
    parts = [
        Section("results", "Results", sections.results(rows)),
        Section("curves", "Over rounds and cost", sections.curves(pictures, rows, records)),
        Section("clients", "Client by client", sections.single_clients(pictures, rows, records, against)),
        Section("costs", "What it cost", sections.costs(rows)),
        Section("matrices", "Who listens to whom", sections.matrices(pictures, rows)),
        Section("runs", "Configurations and commands", sections.runs(rows)),
    ]
    return html(title or _title(records), _facts(records, rows), warnings + _warnings(records), parts)


def html(title: str, facts: Mapping[str, str], warnings: Sequence[str], parts: Sequence[Section]) -> str:
    """A complete page as HTML: heading, facts, warnings, and the sections that have blocks."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=title,
        facts=facts,
        warnings=warnings,
        sections=[part for part in parts if part.blocks],
        made=f"tfpfl {version('tfpfl')}, {datetime.date.today().isoformat()}",
    )


def _shown(value: object) -> object:
    """A text as the page shows it, before it is escaped: without control characters and marks that turn letters."""
    return one_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _comparable(records, allow_different_data) -> tuple[list[RunGroup], list[str]]:
    """(the rows, warnings): there is a warning if the data of the runs differ."""
    try:
        rows = group_runs(records)
    except InvalidArgument as error:
        raise ReportError(str(error)) from error
    try:
        check_comparable(records)
    except InvalidArgument as error:
        if not allow_different_data:
            raise ReportError(f"{error}. --allow-different-data puts them side by side anyway") from error
        return rows, [f"These runs are not on the same data, so their numbers do not compare: {error}."]
    return rows, []


def _title(records) -> str:
    titles = list(dict.fromkeys(r.title for r in records))
    who = ", ".join(titles) if len(titles) <= 3 else f"{len(titles)} algorithms"
    return f"{who} on {', '.join(dict.fromkeys(r.config.dataset for r in records))}"


def _facts(records, rows) -> dict:
    """{name: text}: what is compared, such as data, rounds and network."""
    c = records[0].config
    arguments = ", ".join(f"{name} {value}" for name, value in c.partition_args.items())
    facts = {
        "data": f"{c.dataset}; {c.partition}{f' ({arguments})' if arguments else ''}; {c.clients} clients",
        "a round": f"{c.sampling} cohorts, participation {c.participation:g}",
        "rounds": span([r.rounds for r in records]),
        "network": c.network,
        "compared": f"{len(rows)} settings in {len(records)} runs, "
        f"seeds {', '.join(str(seed) for seed in sorted({r.config.seed for r in records}))}",
        "federation": ", ".join(dict.fromkeys(r.config.federation_hash[:16] for r in records)),
    }
    if seen := told_seen(records):
        facts["who took part"] = seen
    if splits := told_splits(records):
        facts["splits"] = splits
    if c.new_clients:
        facts["new clients"] = f"{c.new_clients} clients never train"
    return facts


def _warnings(records) -> list[str]:
    """Sentences about runs that stopped early or differ in more than their method."""
    told = told_ends(records)
    told.extend(filter(None, (told_lengths(records), told_conditions(records), told_classes(records))))
    by_engine: dict[str, list[str]] = {}
    for r in records:
        by_engine.setdefault(r.config.engine, []).append(r.title)
    if len(by_engine) > 1:
        found = "; ".join(f"{v} ({', '.join(dict.fromkeys(titles))})" for v, titles in by_engine.items())
        told.append(f"The runs differ in engine: {found}.")
    return told
