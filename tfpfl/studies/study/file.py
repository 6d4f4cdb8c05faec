"""Reads the file of a study, in TOML or YAML, and checks its entries. Every error names the entry of the file."""

import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from tfpfl.algorithms import ALGORITHMS, Method, get_method
from tfpfl.algorithms.own import own_method
from tfpfl.checks import InvalidArgument, Unavailable, extra, unknown
from tfpfl.runs.config import RunConfig, typed
from tfpfl.runs.options import usual_clients
from tfpfl.runs.own_metrics import resolved as resolved_metrics
from tfpfl.runs.protocols import EV_ALL, Protocol, protocol
from tfpfl.studies.run_groups import DATA_ENTRIES
from tfpfl.studies.search import draws, grid

KINDS = ("grid", "random", "optuna")
_OF_THE_METHOD = {"algorithm", "preset", "hyperparameters"}
_OF_THE_DATA = {*DATA_ENTRIES, "data_seed", "federation"}
_NOT_TO_CHOOSE = {"seed", "federation_hash", "network_hash", "network_weights", "own_method", "own_metrics"}
_NOT_TO_CHOOSE |= {"network_place", "network_beside", "versions", "format"}
_ENTRIES = {entry.name for entry in fields(RunConfig)} - _NOT_TO_CHOOSE
_FOR_RUN = _ENTRIES - _OF_THE_METHOD
_FOR_METHODS = _ENTRIES - _OF_THE_DATA - {"rounds"}  # all methods have the same data and as many rounds
_NOT_SEARCHED = {"patience", "monitor", "evaluate_every"}  # `of_search` sets them: all settings would be one run


@dataclass(frozen=True)
class Search:
    """How hyperparameters are searched; every method that has a search space gets the same budget."""

    kind: str = "grid"
    settings: int | None = None  # settings that are tried for each method; None: as many as the grid has
    rounds: int | None = None  # rounds of a run of the search; None: as many as other runs have
    seeds: tuple[int, ...] = ()
    halving: int = 1  # see `tfpfl.studies.search.rungs`
    seed: int = 0  # of random draws and of Optuna
    same_budget: bool = True  # False: grids may differ in size


@dataclass(frozen=True)
class DataSet:
    """A data set of a study, divided among clients: its name, its title in tables, and its entries of `RunConfig`."""

    name: str
    title: str
    entries: dict


@dataclass(frozen=True)
class MethodEntry:
    """A method of a study: its name, its title in tables, its entries of `RunConfig`, and its search space.

    A method of the user's own is loaded once, and so are metrics: all runs have the same, also if the file is changed.
    """

    name: str
    title: str
    entries: dict
    method: Method
    space: dict = field(default_factory=dict)  # {hyperparameter: list of values, or (low, high)}


@dataclass(frozen=True)
class Study:
    """A study whose entries were checked. `Study.read` makes it from a file, `Study.of` from dicts."""

    title: str
    seeds: tuple[int, ...]
    protocol: Protocol
    run: dict
    data: tuple[DataSet, ...]
    methods: tuple[MethodEntry, ...]
    search: Search
    where: str = "the study"  # the name of the file, for messages

    @classmethod
    def read(cls, path: str | os.PathLike) -> "Study":
        """Reads a file FILE.toml, FILE.yaml or FILE.yml.

        Raises:
            InvalidArgument: the file cannot be read, or an entry is wrong; the message names file and entry.
            Unavailable: the file is YAML, and PyYAML is not installed.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"the study {path} cannot be read: {error}") from error
        if path.suffix == ".toml":
            try:
                content: Any = tomllib.loads(text)
            except tomllib.TOMLDecodeError as error:
                raise InvalidArgument(f"{path} is not valid TOML: {error}") from error
        elif path.suffix in (".yaml", ".yml"):
            content = _yaml(path, text)
        else:
            raise InvalidArgument(f"a study is a file .toml, .yaml or .yml; found {path}")
        return cls.of(content, where=path.name, folder=path.parent, title=path.stem)

    @classmethod
    def of(
        cls, content: Any, *, where: str = "the study", folder: str | os.PathLike = ".", title: str = "study"
    ) -> "Study":
        """Makes a study from the content of a file.

        Args:
            content: dicts and lists, as in the file.
            where: what messages call the file.
            folder: paths in the study are relative to it.
            title: the title of a study that says none.

        Raises:
            InvalidArgument: an entry is wrong; the message names it.
        """
        try:
            return _study(content, where, Path(folder), title)
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from error

    def config(
        self, data: DataSet, method: MethodEntry, setting: Mapping[str, Any], seed: int, rounds: int | None = None
    ) -> RunConfig:
        """The configuration of a run.

        Args:
            data, method: of this study.
            setting: values from the search space; {} for a method without one.
            seed: the seed of the run.
            rounds: number of rounds; default: that of the study.

        Raises:
            InvalidArgument: the entries do not fit together.
        """
        sections = (self.run, data.entries, method.entries)
        entries = self.run | data.entries | method.entries
        entries["own_metrics"] = {k: v for section in sections for k, v in section.get("own_metrics", {}).items()}
        hyperparameters = dict(entries.pop("hyperparameters", {}))
        known = method.method.hyperparameters
        for name, value in setting.items():
            (hyperparameters if name in known else entries)[name] = value
        if rounds is not None:
            entries["rounds"] = rounds
        if entries.get("federation") is None:
            entries.setdefault("data_seed", 0)
            if entries.get("clients") is None:
                entries["clients"] = usual_clients(entries.get("dataset", "digits"), entries.get("partition", ""))
        return RunConfig(**entries, hyperparameters=hyperparameters, seed=seed)

    def settings(self, method: MethodEntry) -> list[dict]:
        """The settings that a grid or random draws try for a method; [{}] without a search space."""
        if not method.space:
            return [{}]
        if self.search.kind == "grid":
            return grid(method.space)
        assert self.search.settings is not None
        lists = [values for values in method.space.values() if isinstance(values, list)]
        most = math.prod(map(len, lists)) if len(lists) == len(method.space) else self.search.settings
        return draws(method.space, min(self.search.settings, most), self.search.seed)

    def extremes(self, method: MethodEntry) -> list[dict]:
        """Two settings of the search space: of all smallest or first values, and of all largest or last ones."""
        return [{name: values[end] for name, values in method.space.items()} for end in (0, -1)]

    def blame(self, data: DataSet, method: MethodEntry | None, setting: Mapping[str, Any], message: str) -> str:
        """The message with the entry of the file that it is about: one whose name, or else whose value, is in it."""
        places = {
            f"data.{data.name}.partition_args": data.entries.get("partition_args", {}),
            f"data.{data.name}": data.entries,
            "run": self.run,
        }
        general = f"data.{data.name}"
        if method is not None:
            section = f"methods.{method.name}"
            entries = {name: value for name, value in method.entries.items() if name != "algorithm"}
            of_method = {f"{section}.search": setting, f"{section}.hyperparameters": entries.get("hyperparameters", {})}
            places = of_method | {section: entries} | places
            general = f"{section} on {general}"
        for by_value in (False, True):
            for key, entries in places.items():
                for name, value in entries.items():
                    given = value if isinstance(value, list | tuple) else [value]
                    words = [word for word in given if isinstance(word, str) and word] if by_value else [name]
                    if any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message) for word in words):
                        return f"{self.where}: {key}.{name}: {message}"
        return f"{self.where}: {general}: {message}"


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise Unavailable(
            f"{path} is YAML, and PyYAML is not installed: {extra('yaml')}, or write the study as TOML"
        ) from error

    class Loader(yaml.SafeLoader):
        """YAML 1.1 takes 1e-3 for a text, because it has no point; here it is a number, as in YAML 1.2."""

    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error


def _study(content: Any, where: str, folder: Path, title: str) -> Study:
    content = _section(content, "the file")
    _known(content, ("title", "seeds", "protocol", "run", "data", "methods", "search"), "")
    seeds = _seeds(content.get("seeds", [0]), "seeds")
    run = _section(content.get("run", {}), "run")
    _known(run, _FOR_RUN, "run")
    data = _named(content, "data")
    methods = _named(content, "methods")
    search = _search(_section(content.get("search", {}), "search"), seeds)
    study = Study(
        title=typed("title", content.get("title", title), str),
        seeds=seeds,
        protocol=_protocol(content.get("protocol")),
        run=_with_metrics(_absolute(run, folder), "run"),
        data=tuple(_data_set(name, entries, run, folder) for name, entries in data.items()),
        methods=tuple(_method(name, entries, search.kind, folder) for name, entries in methods.items()),
        search=search,
        where=where,
    )
    for what, found in (("data", study.data), ("methods", study.methods)):
        titles = [entry.title for entry in found]
        if len(set(titles)) < len(titles):
            raise InvalidArgument(f"{what}: two have the same title; the titles are {', '.join(titles)}")
    _check_budgets(study)
    return study


def _section(value: Any, key: str) -> dict:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise InvalidArgument(f"{key} must be a table of names and values, found {value!r}")
    return value


def _known(entries: Mapping[str, Any], known: Iterable[str], key: str) -> None:
    for name in entries:
        if name not in known:
            what = f"{key}.{name}" if key else name
            raise InvalidArgument(f"{what}: {unknown('entry', name, sorted(known))}")


def _named(content: dict, key: str) -> dict[str, dict]:
    """The sections [key.NAME]. The names also name folders."""
    found = _section(content.get(key, {}), key)
    if not found:
        raise InvalidArgument(f"{key}: a study needs at least one section [{key}.NAME]; found none")
    for name in found:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise InvalidArgument(f"{key}.{name}: a name has letters, digits, - . and _ only; write a title for tables")
    return {name: _section(entries, f"{key}.{name}") for name, entries in found.items()}


def _protocol(name: Any) -> Protocol:
    try:
        return EV_ALL if name is None else protocol(name)
    except InvalidArgument as error:
        raise InvalidArgument(f"protocol: {error}") from error


def _seeds(value: Any, key: str) -> tuple[int, ...]:
    ints = isinstance(value, list | tuple) and all(type(seed) is int and 0 <= seed < 2**31 for seed in value)
    if not ints or not value or len(set(value)) < len(value):
        raise InvalidArgument(f"{key} must be a list of different integers in 0..2^31-1, as [0, 1, 2]; found {value!r}")
    return tuple(value)


def _search(entries: dict, seeds: tuple[int, ...]) -> Search:
    _known(entries, [entry.name for entry in fields(Search)], "search")
    kind = entries.get("kind", "grid")
    if kind not in KINDS:
        raise InvalidArgument(f"search.kind must be one of {', '.join(KINDS)}; found {kind!r}")
    found = dict(entries, seeds=_seeds(entries.get("seeds", [seeds[0]]), "search.seeds"))
    for entry in fields(Search):
        if entry.name in found and entry.name != "seeds":
            found[entry.name] = typed(f"search.{entry.name}", found[entry.name], entry.type)
    for name, least in {"settings": 1, "rounds": 1, "halving": 1, "seed": 0}.items():
        if found.get(name) is not None and not least <= found[name] < 2**31:
            raise InvalidArgument(f"search.{name} must lie in {least}..2^31-1, found {found[name]}")
    if kind == "grid" and found.get("settings") is not None:
        raise InvalidArgument("search.settings: a grid tries all its settings; leave it out, or take kind = 'random'")
    if kind != "grid" and found.get("settings") is None:
        raise InvalidArgument(f"search.settings: kind = {kind!r} needs the number of settings to try for each method")
    if kind == "optuna" and found.get("halving", 1) != 1:
        raise InvalidArgument("search.halving: Optuna learns from runs of one length; leave it out")
    return Search(**found)


def _data_set(name: str, entries: dict, run: dict, folder: Path) -> DataSet:
    key = f"data.{name}"
    _known(entries, _FOR_RUN | {"title"}, key)
    entries = dict(entries)
    title = typed(f"{key}.title", entries.pop("title", name), str)
    _dicts(entries, ("source", "partition_args"), key)
    if "federation" in run | entries:
        more = sorted((run | entries).keys() & (_OF_THE_DATA - {"federation", "new_clients"}))
        if more:
            raise InvalidArgument(f"{key}.federation says what the data are: leave out {', '.join(more)}")
    return DataSet(name, title, _with_metrics(_absolute(entries, folder), key))


def _method(name: str, entries: dict, kind: str, folder: Path) -> MethodEntry:
    key = f"methods.{name}"
    entries = {"algorithm": name} | entries
    space = _section(entries.pop("search", {}), f"{key}.search")
    title = entries.pop("title", None)
    _dicts(entries, ("hyperparameters",), key)
    entries, own = _absolute(entries, folder), None
    try:
        algorithm = typed("algorithm", entries["algorithm"], str)
        own = None if algorithm in ALGORITHMS else own_method(algorithm)
        method = get_method(algorithm) if own is None else own.method
    except InvalidArgument as error:
        raise InvalidArgument(f"{key}.algorithm: {error}") from error
    hyperparameters = method.hyperparameters
    for entry in entries:
        if entry in hyperparameters and entry not in _FOR_METHODS:
            raise InvalidArgument(f"{key}.{entry} is a hyperparameter: write it into [{key}.hyperparameters]")
        if entry in _OF_THE_DATA | {"rounds"}:
            raise InvalidArgument(f"{key}.{entry}: it is the same for all methods; write it into [run] or [data.*]")
    _known(entries, _FOR_METHODS, key)
    for what, values in (("hyperparameters", entries.get("hyperparameters", {})), ("search", space)):
        for one in values:
            if what == "search" and one in _NOT_SEARCHED:
                raise InvalidArgument(f"{key}.search.{one}: a search compares settings after equal rounds, without it")
            is_entry = what == "search" and one in _FOR_METHODS - _OF_THE_METHOD
            if one not in hyperparameters and not is_entry:
                raise InvalidArgument(f"{key}.{what}.{one}: {unknown('hyperparameter', one, hyperparameters)}")
    given = entries.get("hyperparameters", {})
    if given:
        entries = entries | {
            "hyperparameters": {one: _or_none(value, hyperparameters[one].annotation) for one, value in given.items()}
        }
    its_title = method.title if entries["algorithm"] == name else name
    found = {one: _values(f"{key}.search.{one}", values, kind) for one, values in space.items()}
    for one, values in found.items():
        kinds = hyperparameters[one].annotation if one in hyperparameters else RunConfig.__annotations__[one]
        try:
            found[one] = type(values)(typed(one, _or_none(value, kinds), kinds) for value in values)
        except InvalidArgument as error:
            more = "; a range draws real numbers: give a list of values" if isinstance(values, tuple) else ""
            raise InvalidArgument(f"{key}.search.{one}: {error}{more}") from error
        if len(set(map(repr, found[one]))) < len(values):
            raise InvalidArgument(f"{key}.search.{one}: a value is there twice in {values!r}")
        if isinstance(values, tuple) and not isinstance(found[one][0], float):
            raise InvalidArgument(
                f"{key}.search.{one}: a range draws real numbers, and {one} is an integer: give a list of values"
            )
    entries = _with_metrics(entries, key)
    if own is not None:
        entries |= {"algorithm": own.code.name, "own_method": own.entry}
    return MethodEntry(name, its_title if title is None else typed(f"{key}.title", title, str), entries, method, found)


def _values(key: str, given: Any, kind: str) -> list | tuple:
    """The values of one hyperparameter of a search space: a list, or (low, high) of a range."""
    if isinstance(given, dict):
        _known(given, ("low", "high"), key)
        if kind == "grid":
            raise InvalidArgument(f"{key}: a grid needs a list of values, not a range; or take search.kind = 'random'")
        low, high = (given.get(end) for end in ("low", "high"))
        numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
        if not numbers or not 0 < low < high < math.inf:  # type: ignore[operator]
            raise InvalidArgument(f"{key}: a range needs 0 < low < high, found low={low!r} and high={high!r}")
        return float(low), float(high)  # type: ignore[arg-type]
    plain = isinstance(given, list) and all(isinstance(v, bool | int | float | str | None) for v in given)
    if not plain or not given:
        raise InvalidArgument(f"{key} must be a list of values, or {{low = ..., high = ...}}; found {given!r}")
    return given


def _or_none(value: Any, kind: Any) -> Any:
    """None for the word none, where a value may be None and is no text: TOML has no null."""
    kinds = get_args(kind)
    return None if str(value).lower() == "none" and NoneType in kinds and str not in kinds else value


def _dicts(entries: dict, names: Iterable[str], key: str) -> None:
    for name in names:
        if name in entries:
            _section(entries[name], f"{key}.{name}")


def _absolute(entries: dict, folder: Path) -> dict:
    """The entries with paths that do not depend on the working directory."""

    def absolute(name: str, value: Any) -> Any:
        is_path = name == "federation" or isinstance(value, str) and (value.endswith(".keras") or ".py:" in value)
        if is_path and isinstance(value, str | os.PathLike):
            return str(Path(os.path.abspath(folder)) / Path(value).expanduser())
        return value

    found = dict(entries)
    for name in {"federation", "network", "algorithm", "monitor"} & set(entries):
        found[name] = absolute(name, entries[name])
    if isinstance(entries.get("metrics"), list | tuple):
        found["metrics"] = [absolute("metrics", metric) for metric in entries["metrics"]]
    return found


def _with_metrics(entries: dict, key: str) -> dict:
    """The entries with the names of metrics; those of the user's own are loaded, and described in `own_metrics`."""
    listed, monitor = entries.get("metrics"), entries.get("monitor")
    texts = [*(listed if isinstance(listed, list) else ()), monitor]
    if not any(isinstance(text, str) and ":" in text for text in texts):
        return entries
    try:
        names, monitor, own = resolved_metrics(listed or (), monitor or "accuracy", {})
    except InvalidArgument as error:
        raise InvalidArgument(f"{key}.metrics: {error}") from error
    given = {"metrics": list(names), "monitor": monitor}
    return entries | {name: value for name, value in given.items() if name in entries} | {"own_metrics": own}


def _check_budgets(study: Study) -> None:
    if study.search.kind == "optuna" or not study.search.same_budget:
        return
    sizes = {method.name: len(study.settings(method)) for method in study.methods if method.space}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{name} has {n}" for name, n in sizes.items())
        raise InvalidArgument(
            f"search: every method must try as many settings, and {told}. Make the search spaces equally large, or "
            "write same_budget = false into [search]"
        )
