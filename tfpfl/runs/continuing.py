"""The configuration of a run that goes on: what is kept in its folder, against what a caller asks for."""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tfpfl.algorithms.parts import schedules
from tfpfl.checks import InvalidArgument, one_line, warn_user
from tfpfl.data import Federation
from tfpfl.data.kinds import CLASSIFICATION
from tfpfl.data.manifest import plain_values
from tfpfl.models.modules_beside import sha256_of
from tfpfl.runs.checked import file_hash
from tfpfl.runs.config import NOT_IDENTITY, RunConfig, RunError, read_config
from tfpfl.runs.own_metrics import REGISTERED

# What `RunConfig.resolved` replaces, adds or writes in another way. The number of rounds may be another one.
_OF_DATA = ("source", "partition_args", "federation", "federation_hash", "kind")
_OF_NETWORK = ("network", "network_hash", "network_place", "network_beside", "network_weights", "init")
_OF_METHOD = ("own_method", "hyperparameters", "schedule", "own_metrics", "metrics", "monitor")
_RESOLVED = (*_OF_DATA, *_OF_NETWORK, *_OF_METHOD, "rounds", "versions", "format")


def kept_config(folder: str | os.PathLike, asked: RunConfig, federation: Federation | None) -> RunConfig:
    """The configuration of a run that is continued; a warning says what of it is not as asked for.

    An entry that has its default counts as not asked for, but for the algorithm, the seed and the participation.

    Args:
        folder: the run folder.
        asked: the configuration that a caller gives.
        federation: the data that a caller gives, or None.
    """
    kept = read_config(folder)
    pairs = [*_plain(kept, asked), *_written(kept, asked), *_files(kept, asked), *_data(kept, asked, federation)]
    if told := _told(pairs):
        warn_user(
            f"the run that is continued keeps its own configuration: {told}. For a run as asked take another folder"
        )
    return kept


Pairs = Iterable[tuple[str, Any, Any]]  # (what it is, what the run has, what is asked for)


def _told(pairs: Pairs) -> str:
    """The pairs that differ, in one line; '' if none does."""
    return one_line(", ".join(f"{name} is {own} and not {given}" for name, own, given in pairs if own != given))


def _plain(kept: RunConfig, asked: RunConfig) -> Pairs:
    """The entries that stand in a folder as they are given."""
    always = ("algorithm", "seed", "participation")
    for name in (*always, *(f.name for f in fields(RunConfig) if f.name not in (*always, *_RESOLVED))):
        if (given := getattr(asked, name)) != getattr(RunConfig, name) or name in always:
            yield name, getattr(kept, name), given
    for its, some in ((kept.hyperparameters, asked.hyperparameters), (kept.partition_args, asked.partition_args)):
        yield from ((name, its.get(name), plain_values(value)) for name, value in some.items())
    yield from ((f"source {name}", kept.source.get(name), plain_values(v)) for name, v in asked.source.items())


def _written(kept: RunConfig, asked: RunConfig) -> Pairs:
    """The entries that `RunConfig.resolved` writes in another way."""
    if asked.init not in (None, "keras"):
        yield "init", kept.init, asked.init
    if asked.kind is not None:
        yield "kind", kept.kind or CLASSIFICATION.text, asked.kind
    metrics = tuple(name for name in asked.metrics if name != kept.score.name)  # the score is none of them
    if metrics:
        yield "metrics", tuple(kept.metrics), metrics
    if asked.monitor not in (RunConfig.monitor, kept.score.name):
        yield "monitor", kept.monitor, asked.monitor
    if asked.schedule is not None:
        own = schedules.parsed(kept.schedule or "constant", 1)
        last = own[2] if own[0] == "cosine" else asked.rounds
        if own != schedules.parsed(asked.schedule, last):
            yield "schedule", kept.schedule, asked.schedule


def _files(kept: RunConfig, asked: RunConfig) -> Pairs:
    """What is a user's own: a network, a method and metrics. Their content counts, not where they are."""
    if (file := asked.network_file) is None:
        if asked.network is not None:
            yield "network", kept.network, asked.network
    elif file.exists():
        yield "network", _hash(kept.network_hash), _hash(file_hash(file))
        yield "the network's function", kept.network_function, asked.network_function
    if kept.own_method is not None and asked.own_method is not None:
        yield "method", _hash(sha256_of(kept.own_method)), _hash(sha256_of(asked.own_method))
    for name, given in asked.own_metrics.items():
        if given["kind"] != REGISTERED and (own := kept.own_metrics.get(name)) is not None:
            yield f"metric {name}", _hash(sha256_of(own)), _hash(sha256_of(given))


def _data(kept: RunConfig, asked: RunConfig, federation: Federation | None) -> Pairs:
    """The federation, if one is given or named."""
    if federation is None and asked.federation is not None and Path(asked.federation).exists():
        with suppress(InvalidArgument, OSError):  # opening the run says what is wrong, if this is its own
            federation = Federation.load(asked.federation, verify=False)
    if federation is not None:
        yield "federation", _hash(kept.federation_hash), _hash(federation.hash)


def _hash(value: str | None) -> str:
    return f"of hash {str(value)[:8]}"


def config_to_continue(asked: RunConfig, folder: str | os.PathLike, federation: Federation) -> RunConfig:
    """The configuration of the run in `folder`, with as many rounds as it has or as `asked` has, whichever are more.

    Args:
        asked: the configuration that a caller wants.
        folder: the run folder.
        federation: the data of `asked`.

    Raises:
        RunError: the run has another configuration than `asked`, so that it would give other numbers.
    """
    kept = read_config(folder)
    kept.rounds = max(asked.rounds, kept.rounds)
    ends = schedules.with_end(asked.schedule, asked.rounds)  # that of a run which `resume` has given more rounds
    schedule = ends if ends == kept.schedule else asked.schedule
    wanted = replace(asked, rounds=kept.rounds, schedule=schedule).resolved(federation)
    wanted.versions, wanted.format = kept.versions, kept.format
    if wanted.run_id != kept.run_id:
        told = _told(_all(kept, wanted))
        raise RunError(f"{folder} is a run with another configuration{told and f': {told}'}. Take another --out")
    return kept


def _all(kept: RunConfig, wanted: RunConfig) -> Pairs:
    """The entries of two configurations that are resolved, but for those that decide no number."""
    for name in (f.name for f in fields(RunConfig) if f.name not in NOT_IDENTITY):
        own, given = getattr(kept, name), getattr(wanted, name)
        if name != "own_method" and isinstance(own, dict) and isinstance(given, dict):
            yield from ((key, _of_file(own.get(key)), _of_file(given.get(key))) for key in {**own, **given})
        else:
            yield name, _of_file(own, name), _of_file(given, name)


def _of_file(value: Any, name: str = "") -> Any:
    """A value as it is; of a file of the user's, or of an entry that is a hash, its hash."""
    if isinstance(value, dict) and "sha256" in value:
        return _hash(sha256_of(value))
    return _hash(value) if name.endswith("_hash") else value
