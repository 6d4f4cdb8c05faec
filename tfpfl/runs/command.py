"""Writes the command line that repeats a run, from the table of options in `tfpfl.runs.options`."""

import hashlib
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import get_args

from tfpfl.checks import InvalidArgument
from tfpfl.data import PARTITIONERS
from tfpfl.models.modules_beside import hash_of, modules_beside
from tfpfl.runs.config import METHOD, METRIC, NETWORK_CODE, RunConfig
from tfpfl.runs.consent import folders_of
from tfpfl.runs.options import DATA_NAMES, OPTIONS


def command(config: RunConfig, folder: str | Path, out: str | Path | None = None) -> str:
    """Writes `tfpfl run` with the options of a run that differ from their defaults.

    A federation, network or method that the user made is given as its folder or file; of such a method, all
    hyperparameters are given, because its defaults may have changed. A file of Python is the copy in the run folder. If
    it imports modules that lie beside the original file, it is the original, as long as all of them are unchanged.

    Args:
        config: the configuration of a run folder, which has every default filled in.
        folder: the run folder.
        out: the folder for --out; default: the run folder.

    Returns:
        One line for a shell.
    """
    own_data = not _made_by_the_command(config)
    words, given = ["tfpfl", "run"], vars(config) | config.source
    if config.network_function and config.network_hash is not None:
        network = {"sha256": config.network_hash, "place": config.network_place, "beside": config.network_beside}
        given["network"] = f"{_file(network, Path(folder) / NETWORK_CODE)}:{config.network_function}"
    elif config.network_hash is not None:
        given["network"] = str(Path(folder) / config.network)
    if config.monitor == config.score.name:
        given["monitor"] = OPTIONS["monitor"].default
    own = config.own_method
    if own is not None and own["kind"] == "file":
        given["algorithm"] = f"{_file(own, Path(folder) / METHOD)}:{own['function']}"
    of_metrics = {name: entry["name"] for name, entry in config.own_metrics.items()}
    for name, entry in config.own_metrics.items():
        if entry["kind"] == "file":
            of_metrics[name] = f"{_file(entry, Path(folder) / METRIC.format(name=name))}:{entry['function']}"
    given["metrics"] = tuple(of_metrics.get(name, name) for name in config.metrics)
    for name, option in OPTIONS.items():
        value = given.get(name)
        if name == "federation" or (own_data and name in DATA_NAMES):
            continue
        if name == "data_seed" and value == config.seed:
            continue
        if name == "participation" and config.sampling == "range":
            continue  # the range says how many take part
        if name == "preset" and own is not None:
            continue  # it is in the hyperparameters
        if name == "init" and value is None and own is None and config.preset in config.method.preset_init:
            value = "keras"  # the preset's would be another
        if value is None or (value == option.default and name not in ("algorithm", "dataset", "clients")):
            continue
        if option.type is bool:
            words.append(option.flag)
            continue
        if option.multiple:
            words += [word for each in value for word in (option.flag, str(each))]
            continue
        words += [option.flag, *map(str, value if isinstance(value, tuple) else (value,))]
    defaults: dict = {}
    if own is None:
        row = config.method
        defaults = {name: p.default for name, p in row.hyperparameters.items()} | row.presets.get(config.preset, {})
    words += _flags({k: v for k, v in config.hyperparameters.items() if own or v != defaults[k]})
    words += [word for name in _without(config, defaults) for word in ("--" + name.replace("_", "-"), "none")]
    if own_data:
        words += ["--federation", str(config.federation)]
    else:
        arguments = {"classes_per_client" if k == "K" else f"partition_{k}": v for k, v in _asked(config).items()}
        words += _flags(arguments)
    return shlex.join([*words, "--out", str(out or folder)])


def _file(own: dict, copy: Path) -> Path:
    """The run folder's copy of a user's file; the original, if it imports modules beside it and all are unchanged.

    Whoever runs the command allows the file. So the original must be one that this user has named or allowed before.
    """
    original = Path(own["place"] or copy)
    if original.parent not in folders_of(own["sha256"]):
        return copy
    try:
        content = original.read_bytes()
    except (OSError, ValueError):  # ValueError: no path
        return copy
    found = hash_of(modules_beside(content, original.parent))
    same = hashlib.sha256(content).hexdigest() == own["sha256"] and own.get("beside") in (None, found)
    return original if found and same else copy


def _made_by_the_command(config) -> bool:
    """Whether the federation is from the cache, whose folders are named DATASET-HASH with 16 digits of a hash."""
    name = f"{re.escape(config.dataset.replace('/', '-'))}-[0-9a-f]{{16}}"
    plain = all(isinstance(v, bool | int | float | str) for v in _asked(config).values())
    plain = plain and set(config.source) <= {"pixels", "augment", "only_classes"}
    return plain and config.partition in PARTITIONERS and bool(re.fullmatch(name, Path(config.federation).name))


def _asked(config) -> dict:
    defaults = PARTITIONERS[config.partition].__kwdefaults__ or {} if config.partition in PARTITIONERS else {}
    return {k: v for k, v in config.partition_args.items() if v != defaults.get(k)}


def _without(config, defaults) -> list[str]:
    """The hyperparameters that are None in place of another default. Those of a method that is not loaded: unknown."""
    if config.own_method is not None:
        with suppress(InvalidArgument):
            known = config.method.hyperparameters.items()
            defaults = {name: p.default for name, p in known if bool not in (p.annotation, *get_args(p.annotation))}
    return [name for name, v in config.hyperparameters.items() if v is None and defaults.get(name) is not None]


def _flags(values: dict) -> list[str]:
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        elif value is not None:
            words += ["--" + flag, str(value)]
    return words
