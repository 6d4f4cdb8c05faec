"""Searches hyperparameters on validation examples: a grid or random draws, with successive halving if wanted.

Every candidate has its own run folder. So an interrupted search continues where it stopped, and halving only adds
rounds to the candidates that are left. Where a longer run did not evaluate the rounds that a shorter search compares,
the candidate has a second folder. Test examples are not used.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import loguniform
from sklearn.model_selection import ParameterGrid, ParameterSampler

from tfpfl.algorithms import check_names
from tfpfl.algorithms.parts.schedules import with_end
from tfpfl.checks import InvalidArgument, check_listed, check_numbers, check_type, check_whole_number
from tfpfl.data.kinds import ACCURACY, ScoreName
from tfpfl.runs import protocols
from tfpfl.runs.config import RunConfig, RunError, read_config
from tfpfl.runs.federations import open_federation
from tfpfl.runs.folders import STATE
from tfpfl.runs.metrics import kind_of
from tfpfl.runs.needs import check_needs, check_validation
from tfpfl.runs.protocols import SIDES, Protocol
from tfpfl.runs.run import Run
from tfpfl.runs.store import RunStore, StoreError
from tfpfl.runs.training import DivergedError
from tfpfl.studies.records import Record

VALIDATION = Protocol(split="validation")  # EV-all, mean over clients, mean of the last ten evaluated rounds


class Candidate(NamedTuple):
    """One setting of the hyperparameters, and its score on validation examples."""

    hyperparameters: dict
    rounds: int  # number of rounds it was trained
    score: float  # on validation examples, such as the accuracy in [0, 1]; NaN if training diverged
    folder: Path
    seen: float = math.nan  # `score`, of the clients that had taken part; NaN if there are none
    never_seen: float = math.nan  # of those that had not
    counts: tuple[int, int] | None = None  # the numbers of these clients; None if unknown
    named: ScoreName = ACCURACY  # what the score is called

    @property
    def accuracy(self) -> float:
        """The score, which is the accuracy of classes."""
        return self.score


def grid(values: Mapping[str, Sequence]) -> list[dict]:
    """Every combination of the values: {hyperparameter: its values} -> a list of settings.

    Raises:
        InvalidArgument: the values of a hyperparameter are no list, or an empty one.
    """
    check_type("the values", values, Mapping, "a dict, such as {'rho': [0.003, 0.01]}")
    return list(ParameterGrid({name: _listed(name, given) for name, given in values.items()}))


def draws(ranges: Mapping[str, object], n: int, seed: int) -> list[dict]:
    """Draws n random settings of the hyperparameters.

    Args:
        ranges: {hyperparameter: (low, high) or a list}. From a pair of positive floats, values are drawn uniformly on
            the logarithmic scale; from a list, uniformly.
        n: number of settings; fewer if all are lists that have fewer combinations.
        seed: the seed of the draws.

    Raises:
        InvalidArgument: a pair is not 0 < low < high, or not finite; a list is empty; `n` is less than 1.
    """
    check_type("the ranges", ranges, Mapping, "a dict, such as {'rho': (0.001, 0.1), 'tau': [5, 20]}")
    check_whole_number(1, n=n)
    check_whole_number(0, seed=seed)
    spaces: dict[str, Any] = {}
    for name, given in ranges.items():
        if isinstance(given, tuple):
            if len(given) != 2:
                raise InvalidArgument(f"{name}: a range is a pair (low, high), found {given}; values are a list [...]")
            low, high = given
            for bound in given:
                check_numbers(**{f"{name}: a bound of its range": bound})
            if not 0 < low < high < math.inf:
                raise InvalidArgument(f"{name}: a range needs 0 < low < high, found {low} and {high}; both are finite")
            spaces[name] = loguniform(low, high)
        else:
            spaces[name] = _listed(name, given)
    return [
        {k: v.item() if isinstance(v, np.generic) else v for k, v in setting.items()}
        for setting in ParameterSampler(spaces, n, random_state=seed)
    ]


def _listed(name: str, values: Any) -> list:
    check_listed(f"the values of {name}", values, "[0.003, 0.01]")
    if not (found := list(values)):
        raise InvalidArgument(f"{name}: there is no value to try; give a list, such as [0.003, 0.01]")
    return found


def rungs(candidates: int, rounds: int, factor: int) -> list[tuple[int, int]]:
    """The stages of successive halving: [(number of candidates, rounds that each has been trained)].

    After each stage the best 1 / `factor` of the candidates continue, to `factor` times the rounds. The last stage has
    `rounds` rounds. With `factor` 1 it is the only one.

    Raises:
        InvalidArgument: a number is less than 1, or no whole number.
    """
    check_whole_number(1, candidates=candidates, rounds=rounds)
    check_whole_number(1, factor=factor)
    if factor == 1:
        return [(candidates, rounds)]
    steps = max(math.ceil(math.log(candidates, factor) - 1e-9), 0)
    found = []
    for i in range(steps + 1):
        found.append((math.ceil(candidates / factor**i), max(math.ceil(rounds / factor ** (steps - i)), 1)))
    return found


def at_the_edge(best: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """The values of the best setting that are the smallest or the largest of those tried.

    Args:
        best: the best setting.
        tried: all settings, with the best one.

    Returns:
        {hyperparameter: (smallest, largest value that was tried)}; only numbers of which there were several.

    Examples:
        >>> at_the_edge({"eta": 0.3, "tau": 5}, [{"eta": eta, "tau": 5} for eta in (0.03, 0.1, 0.3)])
        {'eta': (0.03, 0.3)}
    """
    found = {}
    for name, value in best.items():
        values = [setting[name] for setting in tried]
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        if numbers and min(values) < max(values) and value in (min(values), max(values)):
            found[name] = (min(values), max(values))
    return found


def about_the_edge(best: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each value of `at_the_edge`: a better one may lie beyond."""
    said = []
    for name, (low, high) in at_the_edge(best, tried).items():
        side, beyond = ("smallest", "smaller") if best[name] == low else ("largest", "larger")
        said.append(
            f"{name}={best[name]:g} is the {side} value that was tried ({low:g} to {high:g}): a {beyond} one may be "
            "better"
        )
    return said


def search_hyperparameters(
    config: RunConfig,
    settings: Iterable[dict],
    out: Path,
    *,
    factor: int = 1,
    callbacks: Callable = lambda label: (),
    allow_download: bool = False,
) -> list[list[Candidate]]:
    """Trains the settings and ranks them by their score on validation examples.

    Args:
        config: what all settings have in common; its rounds are those of the last stage. Its `patience` is not used:
            settings are compared after equal numbers of rounds.
        settings: the hyperparameters to try; they replace those of `config`.
        out: the folder with the run folders; `run_folder` says which of them a search with other rounds uses.
        factor: successive halving keeps the best 1 / `factor` after each stage; 1 trains every setting to the end.
        callbacks: function (label of a run, such as 'beta=0.05 tau=20') -> its callbacks.
        allow_download: whether TensorFlow Datasets may download a data set that is not on this machine.

    Returns:
        The candidates of each stage, the best first. One that diverged, or of which some client's model did, is last
        and is not trained further. If all of a stage diverged, it is the last one: `ranked` gives all settings in one
        order.

    Raises:
        InvalidArgument: no setting, a setting twice, one that does not fit the method or the data, or a federation
            without validation examples. This comes before anything is trained.
        RunError: a run folder is damaged or in use, or a callback stopped a run, so that its setting has no score after
            its rounds.
    """
    check_type("the configuration", config, RunConfig, "a tfpfl.RunConfig, as in RunConfig(algorithm='pflego')")
    check_listed("settings", settings, "[{'rho': 0.003}, {'rho': 0.01}]")
    settings = list(settings)
    for setting in settings:
        check_type("a setting", setting, Mapping, "a dict, such as {'rho': 0.003}")
    if not settings:
        raise InvalidArgument("nothing to search: no setting was given")
    for setting in settings:
        check_names(config.method, config.preset, setting)
    config = of_search(config, config.rounds)
    configs = [replace(config, hyperparameters=config.hyperparameters | s) for s in settings]
    settings = [{name: c.hyperparameters[name] for name in s} for s, c in zip(settings, configs, strict=True)]
    if len({_name(s) for s in settings}) < len(settings):  # as the method takes them: 1 and 1.0 are one rate
        raise InvalidArgument("a setting is there twice")
    federation = open_federation(config, allow_download=allow_download)
    check_validation("settings are chosen on", config, federation)
    named = kind_of(federation, config.kind).score
    sign = 1 if named.larger_is_better else -1
    for each in configs:  # what would be refused between the runs
        check_needs(each)
        Run.planned(each, Path(out), federation)
    found, left = [], list(zip(settings, configs, strict=True))
    for n, rounds in rungs(len(left), config.rounds, factor):
        rung = []
        for setting, its_config in left[:n]:
            name = f"{config.short_name}-{its_config.resolved(federation).run_id[:10]}"
            folder = run_folder(Path(out) / name, rounds)
            scores = _scores(folder, replace(its_config, rounds=rounds), federation, callbacks(written(setting)))
            seen, never_seen, counts = scores[1:]
            rung.append(Candidate(setting, rounds, scores[0], folder, seen, never_seen, counts, named))
        rung.sort(key=lambda c: (math.isnan(c.score), -sign * c.score))  # infinite ones before NaN
        found.append(rung)
        by_name = {_name(s): (s, c) for s, c in left}
        left = [by_name[_name(c.hyperparameters)] for c in rung if math.isfinite(c.score)]
        if not left:
            break
    return found


def of_search(config: RunConfig, rounds: int) -> RunConfig:
    """The configuration with which a search trains.

    A schedule ends with the last stage, so that all stages are parts of one run. A stage has scores after its own last
    rounds alone, which are too few for `patience`, and settings are compared after equal numbers of rounds.

    Args:
        config: of a run.
        rounds: those of the last stage.
    """
    schedule = with_end(config.schedule, rounds)
    return replace(config, schedule=schedule, evaluate_every=0, patience=None, monitor=RunConfig.monitor)


def ranked(stages: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """All settings, each with its last stage: those of the last stage first, the best of a stage first.

    Args:
        stages: from `search_hyperparameters`.

    Returns:
        The candidates that did not diverge in their last stage; [] if every setting diverged.
    """
    found: dict[str, Candidate] = {}
    for stage in reversed(stages):
        for candidate in stage:
            found.setdefault(_name(candidate.hyperparameters), candidate)
    return [candidate for candidate in found.values() if math.isfinite(candidate.score)]


def about_the_diverged(tried: Iterable[tuple[Mapping[str, Any], int, float]]) -> list[str]:
    """A sentence for each setting that was kept by halving, and then diverged.

    Args:
        tried: (setting, rounds, score) of all stages.
    """
    tried = list(tried)
    first = min((rounds for _, rounds, _ in tried), default=0)
    return [
        f"{written(setting)} was among the best with fewer rounds, but diverged with {rounds}"
        for setting, rounds, score in tried
        if not math.isfinite(score) and rounds > first
    ]


def written(setting: Mapping[str, Any]) -> str:
    """A setting in one line, such as 'beta=0.05 tau=20'."""
    return " ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in setting.items())


def run_folder(base: Path, rounds: int) -> Path:
    """The folder of the run that gives a setting's score after `rounds` rounds.

    Settings are only compared over the same rounds: the last ten until `rounds`. A run evaluates its own last ten, so
    one that was begun for more rounds may lack them.

    Args:
        base: the folder of the setting. Its name has no number of rounds, so that a run can be continued.
        rounds: the number of rounds after which the setting is scored.

    Returns:
        `base` if the run in it has evaluated those rounds, or will when it is trained to `rounds`, or if there is none.
        Otherwise BASE-rROUNDS beside it, for a run of its own; or BASE-rROUNDS-2, and so on, if that lacks them, too.
    """
    more = chain([""], (f"-{i}" for i in count(2)))
    own = (base.with_name(f"{base.name}-r{rounds}{word}") for word in more)
    return next(folder for folder in chain([base], own) if _evaluates(folder, rounds))


def score_after(folder: Path, rounds: int) -> float:
    """The score of a run on validation examples after its first `rounds` rounds, such as the accuracy in [0, 1].

    A run that was continued is scored as it was then.

    Raises:
        RunError: the run did not evaluate the rounds of which the score is the mean, or its folder cannot be read.
    """
    record = Record.read(folder).until(rounds)
    found = record.result(VALIDATION)
    if found is None or found.rounds != _rounds_of_score(rounds):
        evaluated = ", ".join(map(str, found.rounds)) if found else "none"
        raise RunError(
            f"{folder} has no score after {rounds} rounds: settings are compared over the last "
            f"{protocols.LAST_ROUNDS} rounds until then, and of these it evaluated {evaluated}, because it was stopped "
            "earlier or continued by another command. Leave out callbacks that stop runs, or search in a new folder"
        )
    # Outputs that are not finite have an accuracy, too: that of always saying one class.
    return found.score if math.isfinite(found.loss) else math.nan


def _rounds_of_score(rounds: int) -> list[int]:
    """The rounds over which the score after `rounds` rounds is the mean."""
    return list(range(max(1, rounds - protocols.LAST_ROUNDS + 1), rounds + 1))


def _evaluates(folder: Path, rounds: int) -> bool:
    """Whether the run in this folder has evaluated the rounds of the score, or will when it is trained to `rounds`."""
    try:
        config = read_config(folder)
        planned = max(config.rounds, rounds)  # a run that was begun for more rounds is trained to its end
    except RunError:
        return True  # there is no run, or what is there cannot be opened, which is said when it is
    try:
        with RunStore(folder / STATE, read_only=True, named=config.score) as store:
            done, evaluated = store.round_num, {e.round_num for e in store.evaluations()}
    except StoreError:
        done, evaluated = 0, set()  # it was killed before its first round; of a damaged file, opening the run tells
    first = max(done, planned - protocols.LAST_ROUNDS) + 1  # of the rounds that are still to be evaluated
    return all(t in evaluated or t >= first for t in _rounds_of_score(rounds))


def _scores(folder: Path, config: RunConfig, federation, callbacks) -> tuple:
    """What a `Candidate` has: its score, those of the clients that had taken part and of the others, their numbers.

    Trains the run if it does not have its rounds yet. A run that later stages have continued is scored as it was.
    """
    with Run.create_or_resume(config, folder, federation) as run:
        if run.store.round_num < config.rounds:
            try:
                run.train(callbacks)
            except DivergedError:
                return math.nan, math.nan, math.nan, None
    score, record = score_after(folder, config.rounds), Record.read(folder).until(config.rounds)
    sides = [record.result(VALIDATION._replace(clients=clients)) for clients in SIDES]
    return score, *(result.score if result else math.nan for result in sides), record.seen_counts(VALIDATION)


def _name(setting: dict) -> str:
    return sha256(json.dumps(setting, sort_keys=True, default=str).encode()).hexdigest()[:10]
