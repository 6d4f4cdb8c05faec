"""The suite: does personalization help people, and whom? Eight methods, four data sets of people, three seeds.

suite.toml   what is run, a study as in docs/studies.md; networks.py has its backbones
measures.py  what is measured of every run beyond its scores
verdicts.py  gains with intervals over seeds and people, and what follows from them
page.py      the HTML page and the tables
"""

from collections.abc import Callable
from pathlib import Path

from tfpfl.checks import InvalidArgument
from tfpfl.runs.files import write_whole
from tfpfl.studies.run_groups import span
from tfpfl.studies.study.file import DataSet, Study
from tfpfl.studies.study.run import run_study
from tfpfl.studies.suite.measures import measured
from tfpfl.studies.suite.page import DataResult, markdown, page

SUITE = Path(__file__).with_name("suite.toml")


def run_suite(
    out: Path, *, study: Path = SUITE, processes: int = 1, tell: Callable[[str], None] = print
) -> tuple[list[DataResult], Path]:
    """Runs the suite, or what is missing of it, and writes its page.

    Args:
        out: the folder of the study, with suite.html and suite.md when all is done.
        study: the study; a changed copy of suite.toml can take its place.
        processes: the number of runs at the same time.
        tell: called with a line for each run that ends.

    Returns:
        (what was found on each data set, the page).

    Raises:
        InvalidArgument: the study is wrong, or runs of it failed; the same call tries these again.
        Unavailable: the files of a data set are not on this machine; the message says how to get them.
    """
    out = Path(out)
    results = run_study(study, out, processes=processes, tell=tell)
    if results.failures:
        raise InvalidArgument(
            f"{len(results.failures)} runs of the suite failed, the first because of: {results.failures[0].why}. "
            f"{out / 'study.log'} names them all; the same command tries them again"
        )
    whole = [cell for cell in results.cells if results.is_whole(cell)]
    measures = measured([f for cell in whole for f in cell.folders.values()], processes=processes, tell=tell)
    found = []
    for data in results.study.data:
        cells = {cell.method.name: cell for cell in whole if cell.data.name == data.name}
        records = {name: [results.records[f] for f in cell.folders.values()] for name, cell in cells.items()}
        of_runs = {name: [measures[f] for f in cell.folders.values()] for name, cell in cells.items()}
        if records:
            found.append(DataResult(data.title, records, of_runs, {name: c.method.title for name, c in cells.items()}))
    if not found:
        raise InvalidArgument("every method of the suite diverged: take smaller learning rates")
    about = _about(results.study)
    if left_out := [f"{cell.data.title}, {cell.method.title}" for cell in results.cells if cell not in whole]:
        about["left out"] = f"{'; '.join(left_out)}: diverged with at least one seed (see search.csv and results.csv)"
    write_whole(out / "suite.html", page(results.study.title, found, about))
    changed = "" if study == SUITE else f" --study {study}"
    command = f"`tfpfl suite --out {out}{changed} --processes {processes}`, seeds {about['seeds']}."
    write_whole(out / "suite.md", markdown(results.study.title, found, about, command))
    return found, out / "suite.html"


def _rounds(study: Study, data: DataSet) -> str:
    """Rounds and participation with these data; where a method has its own, each with its methods."""
    found: dict[str, list[str]] = {}
    for method in study.methods:
        config = study.config(data, method, {}, study.seeds[0])
        share = f"{config.rounds} rounds with {config.participation:.0%} of the people in each"
        found.setdefault(share, []).append(method.title)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{share} ({', '.join(titles)})" for share, titles in found.items())


def _about(study: Study) -> dict[str, str]:
    of_data = []
    for data in study.data:
        config = study.config(data, study.methods[0], {}, study.seeds[0])
        of_data.append(f"{data.title}: {_rounds(study, data)}, {config.new_clients} people kept out")
    return {
        "methods": ", ".join(method.title for method in study.methods),
        "data": "; ".join(of_data),
        "seeds": ", ".join(map(str, study.seeds)),
        "search": _searched(study),
    }


def _searched(study: Study) -> str:
    """The budget of the search: how many settings it tries, which is fewer than asked for where a list has no more."""
    search, searched = study.search, [method for method in study.methods if method.space]
    if not searched:
        return "none"
    optuna = search.kind == "optuna"
    counts = [search.settings or 0 if optuna else len(study.settings(method)) for method in searched]
    whose = "of every method" if len(searched) == len(study.methods) else "of " + ", ".join(m.title for m in searched)
    same = " the same" if len(counts) > 1 and len({*counts}) == 1 else ""
    return f"{whose}{same}: {span(counts)} settings, {search.rounds or 'all'} rounds, validation examples"
