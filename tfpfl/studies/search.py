"""Searching hyperparameters on validation examples: a grid, random draws, and successive halving of either.

Every candidate is a run folder of its own, so a search that was interrupted goes on, and halving only adds rounds to
the candidates that are left. Test examples are never looked at.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import loguniform
from sklearn.model_selection import ParameterGrid, ParameterSampler

from tfpfl.algorithms import check_names
from tfpfl.checks import InvalidArgument
from tfpfl.runs.config import RunConfig
from tfpfl.runs.federations import open_federation
from tfpfl.runs.protocols import Protocol
from tfpfl.runs.run import Run
from tfpfl.runs.training import DivergedError
from tfpfl.studies.records import Record

VALIDATION = Protocol(split="validation")  # EV-all, mean over clients, mean of the last ten evaluated rounds


class Candidate(NamedTuple):
    """One setting and how it did."""

    hyperparameters: dict
    rounds: int  # that it was given
    accuracy: float  # on validation, in [0, 1]; NaN where it diverged
    folder: Path


def grid(values: Mapping[str, Sequence]) -> list[dict]:
    """Every combination."""
    return list(ParameterGrid(dict(values)))


def draws(ranges: Mapping[str, object], n: int, seed: int) -> list[dict]:
    """n random settings.

    Args:
        ranges: a pair (low, high) of positive floats is drawn from log-uniformly; a list, uniformly.
        n: how many; fewer where lists have fewer combinations.
        seed: of the draws.

    Raises:
        ValueError: a range that is none.
    """
    spaces = {}
    for name, given in ranges.items():
        if isinstance(given, tuple):
            low, high = given
            if not 0 < low < high < math.inf:
                raise InvalidArgument(f"{name}: a range needs 0 < low < high, found {low} and {high}; both are finite")
            given = loguniform(low, high)
        spaces[name] = given
    return [
        {k: v.item() if isinstance(v, np.generic) else v for k, v in setting.items()}
        for setting in ParameterSampler(spaces, n, random_state=seed)
    ]


def rungs(candidates: int, rounds: int, factor: int) -> list[tuple[int, int]]:
    """[(candidates left, rounds that they are given)]: of each rung a `factor`th goes on, to `factor` times the rounds.

    The last rung has the full rounds; with factor 1 there is only that.

    Raises:
        ValueError: factor < 1.
    """
    if factor < 1:
        raise InvalidArgument(f"halving needs a factor of at least 1, found {factor}")
    if factor == 1:
        return [(candidates, rounds)]
    steps = max(math.ceil(math.log(candidates, factor) - 1e-9), 0)
    found = []
    for i in range(steps + 1):
        found.append((math.ceil(candidates / factor**i), max(math.ceil(rounds / factor ** (steps - i)), 1)))
    return found


def search_hyperparameters(
    config: RunConfig,
    settings: Iterable[dict],
    out: Path,
    *,
    factor: int = 1,
    callbacks: Callable = lambda label: (),
    allow_download: bool = False,
) -> list[list[Candidate]]:
    """Runs the settings and ranks them.

    Args:
        config: of all; its rounds are those of the last rung.
        settings: hyperparameters, over those of `config`.
        out: where the run folders are.
        factor: of successive halving; 1 gives every setting all rounds.
        callbacks: (label) -> callbacks of its run.
        allow_download: of the data set.

    Returns:
        The candidates of every rung, best first; one that diverged is last and goes no further.

    Raises:
        ValueError: no setting, one twice, an unknown hyperparameter, or a federation without validation examples.
    """
    settings = list(settings)
    if not settings:
        raise InvalidArgument("nothing to search: no setting was given")
    if len({_name(s) for s in settings}) < len(settings):
        raise InvalidArgument("a setting is there twice")
    for setting in settings:
        check_names(config.algorithm, config.preset, setting)
    configs = [replace(config, hyperparameters=config.hyperparameters | s, evaluate_every=0) for s in settings]
    federation = open_federation(config, allow_download=allow_download)
    if not federation.num_examples("validation").any():
        raise InvalidArgument(
            "settings are chosen on validation examples, but the federation has none: raise --validation"
        )
    found, left = [], list(zip(settings, configs, strict=True))
    for n, rounds in rungs(len(left), config.rounds, factor):
        rung = []
        for setting, its_config in left[:n]:
            folder = Path(out) / f"{config.algorithm}-{_name(asdict(its_config) | {'rounds': 0})}"
            accuracy = _accuracy(folder, replace(its_config, rounds=rounds), federation, callbacks)
            rung.append(Candidate(setting, rounds, accuracy, folder))
        rung.sort(key=lambda c: (math.isnan(c.accuracy), -c.accuracy))
        found.append(rung)
        by_name = {_name(s): (s, c) for s, c in left}
        left = [by_name[_name(c.hyperparameters)] for c in rung if not math.isnan(c.accuracy)]
        if not left:
            break
    return found


def _accuracy(folder: Path, config: RunConfig, federation, callbacks) -> float:
    with Run.create_or_resume(config, folder, federation) as run:
        if run.store.round_num < config.rounds:
            try:
                run.train(callbacks(", ".join(f"{k}={v:g}" for k, v in config.hyperparameters.items())))
            except DivergedError:
                return math.nan
    return Record.read(folder).result(VALIDATION).accuracy


def _name(setting: dict) -> str:
    return sha256(json.dumps(setting, sort_keys=True, default=str).encode()).hexdigest()[:10]
