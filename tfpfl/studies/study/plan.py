"""What has to be run for one method on one data set: first the search, then its winner with all seeds of the study.

A plan is a generator. It gives lists of `Job`s that can run at the same time, and gets their `Outcome`s. So what it
does next depends on its own results alone, never on how many processes work or on other plans.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tfpfl.checks import TfpflError, Unavailable, extra
from tfpfl.data import Federation
from tfpfl.data.kinds import ACCURACY, ScoreName
from tfpfl.runs.config import RunConfig
from tfpfl.runs.metrics import kind_of
from tfpfl.studies.search import of_search, run_folder, rungs, written
from tfpfl.studies.study.file import DataSet, MethodEntry, Study

Plan = Generator[list["Job"], list["Outcome"], "Cell"]
Score = Callable[["Job"], float]


class Job(NamedTuple):
    """One run of a study."""

    label: str  # for people
    config: RunConfig
    folder: Path
    final: bool  # whether it is a run of the winner; otherwise it is one of the search


class Outcome(NamedTuple):
    """How a run of a study ended, how long it took, and why it failed if it did."""

    state: str  # 'done', 'diverged' or 'failed'
    seconds: float = 0.0
    why: str = ""  # why it failed


class Failure(NamedTuple):
    """A run that failed: its label, and why."""

    label: str
    why: str


class Tried(NamedTuple):
    """A setting of the hyperparameters that the search has tried."""

    setting: dict
    rounds: int
    scores: tuple[float, ...]  # on validation examples, with each seed of the search; NaN if training diverged

    @property
    def score(self) -> float:
        """The mean of the scores; NaN if one of them is."""
        return float(np.mean(self.scores))


@dataclass
class Cell:
    """What a study has found for one method on one data set."""

    data: DataSet
    method: MethodEntry
    tried: list[Tried] = field(default_factory=list)  # in the order in which they were tried
    winner: dict | None = None  # the best setting; {} without a search space; None if nothing could be chosen
    passed_over: list[dict] = field(default_factory=list)  # better ones, which diverged when all rounds were run
    folders: dict[int, Path] = field(default_factory=dict)  # {seed: run folder of the winner}
    diverged: list[int] = field(default_factory=list)  # seeds with which the winner diverged
    failures: list[Failure] = field(default_factory=list)
    score: ScoreName = ACCURACY  # what the search looks at

    @property
    def best(self) -> Tried | None:
        """The winner's last score in the search; None without a search."""
        found = [t for t in self.tried if t.setting == self.winner]
        return max(found, key=lambda t: t.rounds, default=None)


def plan(study: Study, data: DataSet, method: MethodEntry, federation: Federation, out: Path, score: Score) -> Plan:
    """The plan of a method on a data set.

    Args:
        study: the study.
        data, method: of the study.
        federation: the data; it identifies the run folders.
        out: the folder of the study.
        score: function (job of the search) -> its validation score, such as the accuracy in [0, 1], or NaN.
    """
    kind = kind_of(federation, study.config(data, method, {}, study.seeds[0]).kind)
    cell = Cell(data, method, score=kind.score)
    made = _Jobs(study, data, method, federation, out)
    if not method.space:
        ranked: list[dict] = [{}]
    elif study.search.kind == "optuna":
        ranked = yield from _optuna(cell, made, score)
    else:
        ranked = yield from _halving(cell, made, score)
    trained = []
    for setting in ranked:  # a search has fewer rounds, so that its winner may still diverge
        jobs = [made.final(setting, seed) for seed in study.seeds]
        outcomes = yield jobs
        trained.append((setting, jobs, outcomes))
        states = {outcome.state for outcome in outcomes}
        if "diverged" not in states or "failed" in states:
            break
    else:
        trained = trained[:1]  # all diverged: it is said of the best
    if trained:
        _note_final(cell, *trained[-1], study.seeds)
        cell.passed_over = [setting for setting, *_ in trained[:-1]]
    return cell


def _note_final(cell: Cell, setting: dict, jobs: list[Job], outcomes: list[Outcome], seeds: Sequence[int]) -> None:
    cell.winner = setting
    for seed, job, outcome in zip(seeds, jobs, outcomes, strict=True):
        if outcome.state == "failed":
            cell.failures.append(Failure(job.label, outcome.why))
        else:
            cell.folders[seed] = job.folder
            if outcome.state == "diverged":
                cell.diverged.append(seed)


@dataclass
class _Jobs:
    """Makes the jobs of a cell. The name of a run folder has a hash of all that decides the run's numbers."""

    study: Study
    data: DataSet
    method: MethodEntry
    federation: Federation
    out: Path

    def of_search(self, setting: dict, rounds: int) -> list[Job]:
        return [self._of_search(setting, rounds, seed) for seed in self.study.search.seeds]

    def _of_search(self, setting: dict, rounds: int, seed: int) -> Job:
        config = of_search(self.study.config(self.data, self.method, setting, seed, rounds), self.rounds)
        base = self.out / "search" / self.data.name / self.method.name / f"{self._hash(config)}-s{seed}"
        folder = run_folder(base, rounds)  # an earlier, longer search may not have evaluated these rounds
        return Job(f"{self._name}, {written(setting)}, seed {seed}, {rounds} rounds", config, folder, False)

    def final(self, setting: dict, seed: int) -> Job:
        config = self.study.config(self.data, self.method, setting, seed)
        hashed = sha256(f"{self._hash(config)} {config.rounds}".encode()).hexdigest()[:10]
        folder = self.out / "runs" / self.data.name / f"{self.method.name}-s{seed}-{hashed}"
        words = [self._name, *([written(setting)] if setting else []), f"seed {seed}", f"{config.rounds} rounds"]
        return Job(", ".join(words), config, folder, True)

    @property
    def rounds(self) -> int:
        search = self.study.search
        return search.rounds or self.study.config(self.data, self.method, {}, self.study.seeds[0]).rounds

    @property
    def identity(self) -> str:
        """A hash of all that decides what this cell's search finds."""
        search = asdict(self.study.search) | {"settings": None, "same_budget": None, "rounds": self.rounds}
        config = self.study.config(self.data, self.method, {}, self.study.search.seeds[0])
        text = f"{self._hash(config)} {search} {self.method.space}"
        return sha256(text.encode()).hexdigest()[:10]

    @property
    def _name(self) -> str:
        return f"{self.data.title}, {self.method.title}"

    def _hash(self, config: RunConfig) -> str:
        return config.resolved(self.federation).run_id[:10]


def number_of_runs(study: Study, method: MethodEntry, rounds: int) -> int:
    """The number of runs of a method on one data set, if no setting diverges."""
    if not method.space:
        return len(study.seeds)
    count = study.search.settings if study.search.kind == "optuna" else len(study.settings(method))
    assert count is not None
    stages = rungs(count, rounds, study.search.halving)
    return sum(n for n, _ in stages) * len(study.search.seeds) + len(study.seeds)


def _halving(cell: Cell, made: _Jobs, score: Score) -> Generator[list[Job], list[Outcome], list[dict]]:
    """Tries all settings, with halving in several stages; returns them, the best of the last stage first."""
    left = made.study.settings(cell.method)
    for n, rounds in rungs(len(left), made.rounds, made.study.search.halving):
        of_setting = [made.of_search(setting, rounds) for setting in left[:n]]
        outcomes = iter((yield [job for jobs in of_setting for job in jobs]))
        stage = [_tried(cell, s, rounds, jobs, outcomes, score) for s, jobs in zip(left[:n], of_setting, strict=True)]
        cell.tried += [t for t in stage if t is not None]
        if None in stage:
            return []
        left = _ranked([t for t in stage if t is not None], cell.score)
        if not left:
            break
    return _ranked(cell.tried, cell.score)


def _optuna(cell: Cell, made: _Jobs, score: Score) -> Generator[list[Job], list[Outcome], list[dict]]:
    """Lets Optuna choose one setting after the other; returns them, the best first.

    A diverged run counts as an accuracy of 0, or as the worst score.

    The trials are kept in optuna.sqlite. The sampler of a trial has a seed of its own, so that it proposes the same
    after an interruption.
    """
    require_optuna()
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    States, search = optuna.trial.TrialState, made.study.search
    found = optuna.create_study(
        storage=f"sqlite:///{made.out / 'optuna.sqlite'}",
        study_name=f"{cell.data.name}/{cell.method.name}/{made.identity}",
        direction="maximize" if cell.score.larger_is_better else "minimize",
        load_if_exists=True,
    )
    for unfinished in found.get_trials(states=(States.RUNNING,)):  # of a study that was killed
        found.tell(unfinished.number, state=States.FAIL)
    space = {
        name: optuna.distributions.FloatDistribution(*values, log=True)
        if isinstance(values, tuple)
        else optuna.distributions.CategoricalDistribution(values)
        for name, values in cell.method.space.items()
    }
    assert search.settings is not None
    known = found.get_trials(states=(States.COMPLETE,))[: search.settings]
    for done in range(search.settings):
        # A third of the settings are random draws. Optuna's own number of them, 10, can be the whole budget.
        first = max(search.settings // 3, 1)
        found.sampler = optuna.samplers.TPESampler(seed=search.seed + done, n_startup_trials=first)
        trial = known[done] if done < len(known) else found.ask(space)
        jobs = made.of_search(dict(trial.params), made.rounds)
        outcomes = yield jobs
        tried = _tried(cell, dict(trial.params), made.rounds, jobs, iter(outcomes), score)
        if tried is None:
            if done >= len(known):
                found.tell(trial.number, state=States.FAIL)
            return []
        cell.tried.append(tried)
        if done >= len(known):
            found.tell(trial.number, tried.score if math.isfinite(tried.score) else _of_diverged(cell))
    return _ranked(cell.tried, cell.score)


def require_optuna() -> None:
    """Checks that Optuna is installed.

    Raises:
        Unavailable: it is not.
    """
    if find_spec("optuna") is None:
        raise Unavailable(
            f"search.kind = 'optuna' needs Optuna, which is not installed: {extra('optuna')}, or take "
            "search.kind = 'random'"
        )


def _tried(
    cell: Cell, setting: dict, rounds: int, jobs: list[Job], outcomes: Iterator[Outcome], score: Score
) -> Tried | None:
    """The scores of a setting; None if a run failed, or cannot be read any more, which the cell's failures then say."""
    scores: list[float] = []
    failed = False
    for job in jobs:
        outcome = next(outcomes)
        why = outcome.why
        if outcome.state != "failed":
            try:
                scores.append(math.nan if outcome.state == "diverged" else score(job))
                continue
            except TfpflError as error:
                why = damaged(job.folder, error)
        cell.failures.append(Failure(job.label, why))
        failed = True
    return None if failed else Tried(setting, rounds, tuple(scores))


def damaged(folder: Path, error: TfpflError) -> str:
    """Why the finished run in a folder counts as failed, and what to do."""
    return f"{error}. To train this run again, delete {folder} and give the same command"


def _ranked(tried: list[Tried], named: ScoreName) -> list[dict]:
    """The settings, those with most rounds first, and of equal rounds the best; of equal ones the first that was tried.

    A setting counts with its last stage. Those that diverged in it are left out.
    """
    sign = 1 if named.larger_is_better else -1
    found: list[Tried] = []
    for one in sorted(tried, key=lambda t: (-t.rounds, not math.isfinite(t.score), -sign * t.score)):
        if all(one.setting != other.setting for other in found):
            found.append(one)
    return [t.setting for t in found if math.isfinite(t.score)]


def _of_diverged(cell: Cell) -> float:
    """What Optuna is told of a run that diverged: the worst score that there can be, or that there was."""
    if cell.score.larger_is_better:
        return 0.0
    return 2 * max((t.score for t in cell.tried if math.isfinite(t.score)), default=1e6)
