"""`run_study`: checks a study, does all of its runs, and writes its tables."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from tfpfl.checks import InvalidArgument, TfpflError, Unavailable
from tfpfl.data import Federation
from tfpfl.runs.federations import open_federation
from tfpfl.runs.locks import InUse, Lock
from tfpfl.runs.metrics import kind_of, told_score
from tfpfl.runs.needs import check_needs, check_protocol, check_validation
from tfpfl.runs.run import Run
from tfpfl.studies.comparison import check_columns
from tfpfl.studies.paper_tables import SCORE
from tfpfl.studies.records import Record
from tfpfl.studies.search import score_after
from tfpfl.studies.study.file import Study
from tfpfl.studies.study.plan import Cell, Failure, Job, Outcome, damaged, number_of_runs, plan, require_optuna
from tfpfl.studies.study.pool import Ledger, work
from tfpfl.studies.study.results import StudyResults


def run_study(
    study: str | os.PathLike | Mapping[str, Any],
    out: str | os.PathLike,
    *,
    processes: int = 1,
    columns: Sequence[str] = SCORE,
    tell: Callable[[str], None] = print,
    allow_download: bool = False,
) -> StudyResults:
    """Runs a study: methods x data sets x seeds, with a search for hyperparameters; see docs/studies.md.

    Every entry is checked, and every federation built, before the first run. Each run is a process of its own. A run
    that fails does not stop the others; `StudyResults.failures` has it, and the next call tries it again. So it is
    with a finished run whose folder was damaged since. After an interruption, also kill -9, the same call continues.
    Results do not depend on the number of processes.

    Args:
        study: a file .toml, .yaml or .yml, or its content as dicts and lists.
        out: the folder of the study. Runs that are in it already are not run again, also if the study was changed.
        processes: the number of runs at the same time.
        columns: the columns of table.md and table.tex, names from `tfpfl.studies.comparison.rows`.
        tell: called with a line for each run that ends; the lines are also in study.log in `out`.
        allow_download: whether TensorFlow Datasets may download a data set that is not on this machine.

    Raises:
        InvalidArgument: the file or an entry is wrong; the message names it. Or there is no such column, or another
            process runs a study in `out`.
        Unavailable: a package is not installed that the study needs.
    """
    if processes < 1:
        raise InvalidArgument(f"processes must be at least 1, found {processes}")
    checked = Study.of(study) if isinstance(study, Mapping) else Study.read(study)
    if checked.search.kind == "optuna" and any(method.space for method in checked.methods):
        try:
            require_optuna()
        except Unavailable as error:
            raise Unavailable(f"{checked.where}: {error}") from error
    federations = _check(checked, allow_download)
    pairs = [(data, method) for data in checked.data for method in checked.methods]
    check_columns(columns, [checked.config(d, m, checked.extremes(m)[0], checked.seeds[0]) for d, m in pairs])
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = Lock(out / "study")
    except InUse as error:
        raise InvalidArgument(f"another study is running in {out} {error}: wait until it ends, or end it") from error
    try:
        total = _number_of_runs(checked)
        log = _Log(out / "study.log", total, tell)
        plans = [
            plan(checked, data, method, federations[data.name], out, score)
            for data in checked.data
            for method in checked.methods
        ]
        ledger = Ledger(out / "ledger.jsonl")
        cells = work(plans, ledger, out / "logs", processes=processes, ended=log.ended, known=log.known)
        for cell in cells:
            _leave_out_damaged(cell)
        results = StudyResults(checked, out, cells)
        results.write(tuple(columns))
    finally:
        lock.release()
    return results


def score(job: Job) -> float:
    """The validation score of a run of the search after its rounds, such as the accuracy in [0, 1].

    A run that later stages of the search have continued is scored as it was after the rounds of this job.

    Raises:
        RunError: the run did not evaluate these rounds, or its folder cannot be read.
    """
    return score_after(job.folder, job.config.rounds)


def _leave_out_damaged(cell: Cell) -> None:
    """Takes runs out of a cell that cannot be read any more, though they are finished; its failures then say why."""
    for seed, folder in list(cell.folders.items()):
        if seed in cell.diverged:  # it may have no rounds
            continue
        try:
            Record.read(folder)
        except TfpflError as error:
            del cell.folders[seed]
            cell.failures.append(
                Failure(f"{cell.data.title}, {cell.method.title}, seed {seed}", damaged(folder, error))
            )


class _Log:
    """Tells of every run that has ended, in a line of its own."""

    def __init__(self, path: Path, total: int, tell: Callable[[str], None]):
        self._path, self._total, self._tell, self._count = path, total, tell, 0

    def known(self, job: Job) -> None:
        self._count += 1

    def ended(self, job: Job, outcome: Outcome) -> None:
        self._count += 1
        result = outcome.state
        if outcome.state == "done" and not job.final:
            with suppress(TfpflError):  # its folder is damaged; the plan says so
                result = f"validation {told_score(Record.read(job.folder).score, score(job))}"
        line = f"{job.label}: {result}, {outcome.seconds:.1f} s"
        if outcome.why:
            line += f": {outcome.why}"
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}"
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._tell(f"{line} (run {self._count} of {self._total})")


def _number_of_runs(study: Study) -> int:
    return sum(
        number_of_runs(study, method, study.search.rounds or study.config(data, method, {}, study.seeds[0]).rounds)
        for data in study.data
        for method in study.methods
    )


def _check(study: Study, allow_download: bool) -> dict[str, Federation]:
    """Checks all runs of the study, and builds what is missing of its federations: {name of the data: federation}."""
    found = {}
    for data in study.data:
        for method in study.methods:  # before anything is built
            _each(study, data, method, lambda config: None)
        first = study.methods[0]
        try:
            config = study.config(data, first, {}, study.seeds[0])
            federation = found[data.name] = open_federation(config, allow_download=allow_download)
        except (TfpflError, OSError, TypeError) as error:
            raise InvalidArgument(study.blame(data, None, {}, str(error))) from error
        try:
            if any(method.space for method in study.methods):
                check_validation("settings are chosen on", config, federation)
            check_protocol(study.protocol, config, federation)
        except InvalidArgument as error:
            raise InvalidArgument(f"{study.where}: data.{data.name}: {error}") from error
    kinds = {
        kind_of(found[data.name], study.config(data, method, {}, study.seeds[0]).kind).text
        for data in study.data
        for method in study.methods
    }
    if len(kinds) > 1:
        raise InvalidArgument(
            f"{study.where}: the labels are of the kinds {', '.join(sorted(kinds))}, whose scores cannot stand in one "
            "table: make a study for each kind"
        )
    for data in study.data:
        for method in study.methods:
            _each(study, data, method, lambda config, f=found[data.name]: _check_run(config, f))
    return found


def _each(study: Study, data: Any, method: Any, check: Callable) -> None:
    settings = study.extremes(method) if study.search.kind == "optuna" and method.space else study.settings(method)
    for setting in settings:
        try:
            check(study.config(data, method, setting, study.seeds[0]))
        except TfpflError as error:
            kind = Unavailable if isinstance(error, Unavailable) else InvalidArgument
            raise kind(study.blame(data, method, setting, str(error))) from error


def _check_run(config: Any, federation: Federation) -> None:
    """Refuses a run that `Run.create` would refuse: this builds its model and its algorithm."""
    check_needs(config)
    Run.planned(config, Path("unused"), federation)
