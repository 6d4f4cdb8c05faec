"""The configuration of a run: its entries, their defaults and checks, and how config.json is read."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from tfpfl.algorithms import ALGORITHMS, Method, check_names, get_method
from tfpfl.algorithms.own import check_entry, is_loaded, own_method
from tfpfl.algorithms.parts.schedules import check_schedule, with_end
from tfpfl.algorithms.transforms.screening import ON_BROKEN, check_norms
from tfpfl.checks import DEEPEST, InvalidArgument, check_choice, levels, one_line, unknown
from tfpfl.data import Federation
from tfpfl.data.kinds import CLASSIFICATION, ScoreName, label_kind
from tfpfl.data.population import Sampling
from tfpfl.data.randomness import Stream, generator
from tfpfl.engines.engine import check_grouping
from tfpfl.models.adapters import check_adapters
from tfpfl.models.modules_beside import hash_of, modules_beside, sha256_of
from tfpfl.models.networks import INITS, default_network
from tfpfl.models.normalization import check_batch_norm
from tfpfl.runs.aggregators import check_aggregator, written
from tfpfl.runs.availability import Availability, changes
from tfpfl.runs.checked import file_hash as file_hash
from tfpfl.runs.checked import plain_entry
from tfpfl.runs.checked import typed as typed
from tfpfl.runs.metrics import check_kind, kind_of
from tfpfl.runs.own_metrics import REGISTERED
from tfpfl.runs.own_metrics import resolved as resolved_metrics
from tfpfl.runs.secure import THRESHOLD, check_secure
from tfpfl.runs.versions import package_versions as package_versions

# Older files are read: entries that a later format added have their defaults. Format 1 added up a cohort in another
# order and is refused. Before format 5 `grouping` was called `cohort`, its value 'one_by_one' was called 'plain', and
# the sizes of 'range' cohorts shared a stream of random numbers with the data; older runs go on with that stream.
# Where a method does something else by default since a format (`Method.older`), older runs go on as they were trained.
# Before format 7 methods had no hyperparameters of a server's and a client's optimizer; their defaults change nothing.
FORMAT = 7
NETWORK = "network.keras"  # the user's own backbone, in the run folder
NETWORK_CODE = "network.py"  # the file of the user's own function that makes it
METHOD = "method.py"  # the file of the user's own method, in the run folder
METRIC = "metric_{name}.py"  # the file of a metric of the user's own, in the run folder
_ADDED = {  # format -> entries that it added
    3: ("new_clients",),
    4: (
        *("dropout", "dropout_spread", "client_seconds", "client_seconds_spread", "jitter", "round_deadline"),
        *("joins", "leaves", "on_broken", "max_norm", "clip_norm"),
        *("aggregator", "aggregator_args"),
    ),
    7: ("own_method", "metrics", "monitor"),
}
# Entries that came without a new format. With these values `run_id` is as it was, and config.json leaves them out.
_NEWER: dict[str, Any] = {"objective": "mean", "schedule": None, "schedule_of": (), "kind": None}
_NEWER |= {"network_place": None, "network_beside": None, "network_weights": None}
_NEWER |= {"train_from": None, "adapters": None, "personal": None, "batch_norm": None}
_NEWER |= {"init": None, "secure": False, "secure_clip": None, "secure_noise": None, "secure_threshold": THRESHOLD}
NOT_IDENTITY = ("rounds", "versions", "federation", "network_place", "network_weights")  # they may differ later


class RunError(InvalidArgument):
    """A run folder cannot be used in the wanted way. The message says what was found; the folder was not changed."""


@dataclass
class RunConfig:
    """The configuration of a run; the entries are those of config.json and of the options of `tfpfl run`.

    `tfpfl.runs.options` describes every entry. None stands for a default that depends on other entries; `resolved`
    fills it in. An `algorithm` that is written FILE.py:function or package.module:function is loaded, which runs its
    code; `algorithm` is then its short name, such as 'fedala.py:fedala', and `own_method` says where it is from. So it
    is with `metrics` that are written in this way, and `own_metrics`.

    Raises:
        InvalidArgument: an entry has a wrong type, is out of range, is an unknown name, or contradicts another entry.
            What can only be checked with the data is checked by `Run.create`.
    """

    algorithm: str = "pflego"
    preset: str | None = None
    hyperparameters: dict = field(default_factory=dict)
    dataset: str = "digits"
    source: dict = field(default_factory=dict)  # keyword arguments of `load_source`
    partition: str = "round_robin"
    partition_args: dict = field(default_factory=dict)
    clients: int | None = None
    validation: float = 0.1
    data_seed: int | None = None
    federation: str | None = None  # the folder of a federation
    federation_hash: str | None = None  # filled in when the run is created
    network: str | None = None  # a name in NETWORKS, a file FILE.keras, or a function FILE.py:function
    init: str | None = None  # of such a name, see `build_network`; None: that of the preset, in a run folder 'keras'
    network_hash: str | None = None  # sha256 of that file
    network_place: str | None = None  # filled in for a function: where its file was
    network_beside: str | None = None  # filled in for a function: the `hash_of` the modules beside its file; '' of none
    network_weights: str | None = None  # filled in for a function: sha256 of the weights that it gives
    train_from: str | None = None  # the first layer of the backbone that trains, see `SplitModel`
    adapters: str | None = None  # such as 'lora:4', see `tfpfl.models.adapters`
    personal: str | None = None  # the part of the adapters that stays with the client, such as 'B'
    batch_norm: str | None = None  # what BatchNormalization layers do, see `tfpfl.models.normalization`
    head_init: str = "glorot"
    kind: str | None = None  # of labels, see `tfpfl.data.kinds`; None: the usual one; in a run folder: classification
    labels: str | None = None
    participation: float = 0.2
    sampling: str = "fixed"
    sampling_range: tuple | None = None
    rounds: int = 200
    seed: int = 0
    engine: str = "local"
    grouping: str = "auto"  # see `Simulation`; saved, so that a resumed run adds its numbers in the same order
    evaluate_every: int = 10
    metrics: tuple = ()  # metrics besides score and loss, by name; see `runs.metrics` and `runs.own_metrics`
    patience: int | None = None
    monitor: str = "accuracy"  # what `patience` looks at, in the means on validation examples; the score of any kind
    objective: str = "mean"  # see `algorithms.transforms.objective`
    schedule: str | None = None  # of the learning rates, see `algorithms.parts.schedules`
    schedule_of: tuple = ()  # names of the rates that follow it
    new_clients: int = 0  # number of clients that never train; the data seed draws them
    dropout: float = 0.0  # for this and the next seven entries see `Availability`
    dropout_spread: float = 0.0
    client_seconds: float = 0.0
    client_seconds_spread: float = 0.0
    jitter: float = 0.0
    round_deadline: float | None = None
    joins: tuple = ()  # texts 'ROUND:ID,ID,...'
    leaves: tuple = ()  # texts 'ROUND:ID,ID,...'
    on_broken: str = "stop"  # or 'reject': see `tfpfl.algorithms.transforms.screening`
    max_norm: float | None = None
    clip_norm: float | None = None
    aggregator: str | None = None  # see `tfpfl.runs.aggregators`
    aggregator_args: tuple = ()  # texts 'NAME=NUMBER'
    secure: bool = False  # see `tfpfl.algorithms.transforms.secure`; for the next three also `tfpfl.runs.secure`
    secure_clip: float | None = None
    secure_noise: float | None = None
    secure_threshold: float = 0.5
    own_method: dict | None = None  # filled in if `algorithm` is the user's own: where it is from, and its sha256
    own_metrics: dict = field(default_factory=dict)  # filled in: {name: where a metric of the user's own is from}
    versions: dict = field(default_factory=dict)  # {package: version} with which the run was created
    format: int = FORMAT

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = plain_entry(entry.name, getattr(self, entry.name))
            setattr(self, entry.name, typed(entry.name, value, entry.type))
        if self.own_method is not None and self.own_method.get("name") != self.algorithm:
            self.own_method = None  # of another configuration, whose algorithm was replaced
        if self.own_method is None and self.algorithm not in ALGORITHMS:
            own = own_method(self.algorithm)
            self.algorithm, self.own_method = own.code.name, own.entry
        if self.own_method is not None:
            check_entry(self.own_method)
        if self.own_method is None or self._loaded():  # if it is not loaded, `own_methods.load` does this later
            check_names(self.method, self.preset, self.hyperparameters)
            known = self.method.hyperparameters
            self.hyperparameters = {k: typed(k, v, known[k].annotation) for k, v in self.hyperparameters.items()}
            self.method.check_objective(self.objective)
            check_schedule(self.schedule, self.schedule_of, self.rounds, known)
        self.metrics, self.monitor, self.own_metrics = resolved_metrics(self.metrics, self.monitor, self.own_metrics)
        if self.kind is not None:
            self.kind = label_kind(self.kind).text
            self.monitor = self.score.name if self.monitor == "accuracy" else self.monitor
            check_kind(self.metrics, self.kind, self.own_metrics)
            self.metrics = tuple(name for name in self.metrics if name != self.score.name)
        at_least = {"clients": 0, "rounds": 1, "evaluate_every": 0, "patience": 1, "new_clients": 0}
        at_least |= {"seed": 0, "data_seed": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and not least <= value < 2**31:
                raise InvalidArgument(f"{name} must lie in {least}..2^31-1, found {value}")
        if self.monitor != self.score.name and self.patience is None:
            raise InvalidArgument(
                f"monitor={self.monitor!r} says what patience looks at, but patience is not given: give it a number of "
                "evaluated rounds, or leave monitor out"
            )
        sizes = self.sampling_range
        if sizes is not None and not (len(sizes) == 2 and all(type(size) is int for size in sizes)):
            raise InvalidArgument(
                f"sampling_range must be two integers, the smallest and the largest cohort; found {sizes}"
            )
        if sizes is not None and self.sampling != "range":
            raise InvalidArgument(f"sampling_range needs sampling='range', found sampling={self.sampling!r}")
        if sizes is None and self.sampling == "range":
            raise InvalidArgument("sampling='range' needs sampling_range, the smallest and the largest cohort")
        self.sampling_plan()
        self.availability()
        check_choice(on_broken=(self.on_broken, ON_BROKEN), init=(self.init or "keras", INITS))
        given = {name: getattr(self, name) for name in ("aggregator", "max_norm", "clip_norm")}
        check_batch_norm(self.batch_norm, **given)
        check_norms(self.max_norm, self.clip_norm)
        check_aggregator(self.aggregator, self.aggregator_arguments(), self.engine)
        check_secure(self)
        if self.on_broken == "stop" and (self.max_norm or self.clip_norm) is not None:
            raise InvalidArgument("max_norm and clip_norm need on_broken 'reject' (--on-broken reject), found 'stop'")
        check_grouping(self.grouping, self.engine)
        check_adapters(self.adapters, self.personal)

    def resolved(self, federation: Federation) -> "RunConfig":
        """Returns a copy with every default filled in, so that new defaults of a later version do not change the run.

        Args:
            federation: the data of the run; the entries about the data are taken from its manifest.

        Raises:
            InvalidArgument: the file of the network cannot be read; the kind does not fit the labels of the federation,
                or a metric the kind.
        """
        row, manifest = self.method, federation.manifest
        preset = row.presets.get(self.preset, {})
        if "head_init" in preset and self.head_init != RunConfig.head_init:
            preset = preset | {"head_init": self.head_init}
        defaults = {name: p.default for name, p in row.hyperparameters.items()}
        resolved = asdict(self) | {
            "hyperparameters": defaults | preset | self.hyperparameters,
            # The manifest says what the data are, because the federation may be one that the user made.
            "dataset": manifest["source"]["name"],
            "partition": manifest["partitioner"]["name"],
            "partition_args": manifest["partitioner"]["arguments"],
            "clients": federation.num_clients,
            "validation": manifest["validation"],
            "data_seed": manifest["seed"],
            "federation": str(federation.path),
            "federation_hash": federation.hash,
            "network": self.network or default_network(federation.example_shape),
            "schedule": with_end(self.schedule, self.rounds),
            "labels": self.labels or ("local" if row.head == "personal" else "global"),
            "versions": package_versions(),
        }
        if (kind := kind_of(federation, self.kind)).is_classes:
            check_kind(self.metrics, kind, self.own_metrics)
            resolved["metrics"] = tuple(name for name in self.metrics if name != kind.score.name)
        resolved["kind"] = None if kind.is_classes else kind.text
        init = self.init or row.preset_init.get(self.preset)
        resolved["init"] = None if init == "keras" else init  # as runs have it that are older than this entry
        if self.network_file:
            if self.init is not None:
                raise InvalidArgument(
                    f"init={self.init!r} draws the weights of a network that has a name, and {self.network} brings its "
                    "own: leave init out"
                )
            resolved["init"] = None
            name = f"{NETWORK_CODE}:{self.network_function}" if self.network_function else NETWORK
            resolved |= {"network": name, "network_hash": file_hash(self.network_file)}
            if self.network_function:
                place = self.network_file.expanduser().resolve()
                beside = hash_of(modules_beside(place.read_bytes(), place.parent))
                resolved |= {"network_place": str(place), "network_beside": beside}
        return RunConfig(**resolved)

    @property
    def method(self) -> Method:
        """The `Method` of `algorithm`.

        Raises:
            InvalidArgument: it is the user's own, and not loaded.
        """
        if self.own_method is None:
            return get_method(self.algorithm)
        if found := self._loaded():
            return found
        place, function = self.own_method["place"], self.own_method["function"]
        raise InvalidArgument(f"the method {self.algorithm} is not loaded: name it again, as {place}:{function}")

    @property
    def score(self) -> ScoreName:
        """The score of a run: its name, unit and direction. Before `resolved`, that of the kind that was asked for."""
        return label_kind(self.kind or CLASSIFICATION).score

    @property
    def title(self) -> str:
        """The method's name as papers write it, such as FedAvg. It is known without loading the method."""
        return get_method(self.algorithm).title if self.own_method is None else self.own_method["title"]

    @property
    def short_name(self) -> str:
        """The algorithm's name for the name of a folder: of the user's own method, the name of its function."""
        return self.algorithm.rpartition(":")[2]

    def _loaded(self) -> Method | None:
        own: dict = self.own_method or {}
        found = is_loaded(own)
        return found.method if found else None

    @property
    def network_file(self) -> Path | None:
        """The file of the user's own backbone; None if `network` is the name of a network."""
        if self.network_function:
            return Path(str(self.network).rpartition(":")[0])
        return Path(self.network) if self.network and self.network.endswith(".keras") else None

    @property
    def network_function(self) -> str | None:
        """The name of the user's own function that makes the backbone; None if `network` is anything else."""
        file, _, function = str(self.network).rpartition(":")
        return function if file.endswith(".py") else None

    @property
    def run_id(self) -> str:
        """A sha256 of all entries that decide the run's numbers. It stays the same when a run gets more rounds."""
        identity = {k: v for k, v in entries(self).items() if k not in NOT_IDENTITY}
        if self.own_method is None:
            del identity["own_method"]
        else:  # what is in the file counts, not where it is
            identity |= {"algorithm": self.own_method["function"], "own_method": sha256_of(self.own_method)}
        of_metrics = {n: e["function"] + sha256_of(e) for n, e in self.own_metrics.items() if e["kind"] != REGISTERED}
        identity |= {"own_metrics": of_metrics}
        if not of_metrics:
            del identity["own_metrics"]
        if not self.network_beside:
            identity.pop("network_beside", None)
        for name in _added_after(self.format) + [name for name, value in _NEWER.items() if identity.get(name) == value]:
            identity.pop(name, None)
        older = _older_choices(self.algorithm, self.format)
        newer = _newer_choices(self.algorithm)
        same = {k for k, v in newer.items() if self.hyperparameters.get(k) == v}
        identity["hyperparameters"] = {k: v for k, v in self.hyperparameters.items() if k not in {*older, *same}}
        if self.format < 5:
            grouping = identity.pop("grouping")
            identity["cohort"] = "plain" if grouping == "one_by_one" else grouping
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def sampling_plan(self) -> Sampling:
        """The `Sampling` of this configuration: how the clients of a round are drawn."""
        low, high = self.sampling_range or (0, 0)
        rate = 1.0 if self.sampling == "range" else self.participation
        return Sampling(self.sampling, rate, low, high, old_sizes=self.format < 5, old_shares=self.format < 6)

    def availability(self) -> Availability:
        """The `Availability` of this configuration: dropouts, slow clients, a deadline, clients that join and leave."""
        return Availability(
            dropout=self.dropout,
            dropout_spread=self.dropout_spread,
            seconds=self.client_seconds,
            seconds_spread=self.client_seconds_spread,
            jitter=self.jitter,
            deadline=self.round_deadline,
            joins=changes("joins", self.joins),
            leaves=changes("leaves", self.leaves),
        )

    def aggregator_arguments(self) -> dict:
        """The keyword arguments of the aggregator, from `aggregator_args`: {name: number}; errors as `written`."""
        return written(self.aggregator_args)

    def training_clients(self, federation: Federation) -> np.ndarray | None:
        """The ids of the clients that train, ascending, int [I]; None if all clients of the federation train.

        Raises:
            InvalidArgument: `new_clients` is at least the number of clients, so that no client is left to train.
        """
        return self.training_ids(federation.num_clients, federation.manifest["seed"]) if self.new_clients else None

    def training_ids(self, people: int, data_seed: int) -> np.ndarray:
        """The ids of the clients that train, of a federation of `people` clients with this seed: ascending, int [I].

        Raises:
            InvalidArgument: as `training_clients`.
        """
        new = self.new_clients
        if new >= people > 0:
            raise InvalidArgument(
                f"new_clients={new} leaves no client to train: the federation has {people} clients. Take fewer"
            )
        if not new:
            return np.arange(people)
        drawn = generator(data_seed, Stream.NEW_CLIENTS, people).permutation(people)
        return np.sort(drawn[new:])


def entries(config: RunConfig) -> dict:
    """The entries of a configuration as config.json has them."""
    return {k: v for k, v in asdict(config).items() if k not in _NEWER or v != _NEWER[k]}


def read_config(folder: str | os.PathLike) -> RunConfig:
    """Reads the configuration of a run.

    Args:
        folder: the run folder.

    Raises:
        RunError: the folder has no config.json, or one that is damaged, of format 1, or from a newer version.
    """
    path = Path(folder) / "config.json"
    if not path.exists():
        runs = "; it is a study, whose runs are in its folder runs" if path.with_name("study.lock").exists() else ""
        raise RunError(f"{folder} is not a run folder: it has no config.json{runs}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, a number of thousands of digits
        raise RunError(f"{path} is damaged, it is not valid JSON: {error}") from error
    if levels(raw) > DEEPEST:
        raise RunError(f"{path} is damaged: it has more than {DEEPEST} levels")
    if not isinstance(raw, dict) or not isinstance(raw.get("format"), int):
        raise RunError(f"{path} is not the configuration of a run: it has no format number")
    if raw["format"] > FORMAT:
        raise RunError(f"{path} has format {raw['format']}, from a newer tfpfl; this one reads up to {FORMAT}")
    if raw["format"] > 1:
        defaults: dict[str, Any] = {f.name: f.default for f in fields(RunConfig)}
        raw = {"own_metrics": {}} | _NEWER | {name: defaults[name] for name in _added_after(raw["format"])} | raw
        if isinstance(raw.get("hyperparameters"), dict):
            before = _older_choices(raw.get("algorithm"), raw["format"]) | _newer_choices(raw.get("algorithm"))
            raw["hyperparameters"] = before | raw["hyperparameters"]
        if raw["format"] < 5 and "cohort" in raw:
            grouping = raw.pop("cohort")
            raw["grouping"] = "one_by_one" if grouping == "plain" else grouping
    else:
        raise RunError(
            f"{path} has format {raw['format']}, from an older tfpfl that added a cohort's updates in another order; "
            "continue it with that version, or run it again"
        )
    names = {f.name for f in fields(RunConfig)}
    _check_known(path, raw)
    for what, which in (("unknown entries", set(raw) - names), ("no entries", names - set(raw))):
        if which:
            raise RunError(f"{path} is damaged, it has {what} {', '.join(map(one_line, sorted(which)))}")
    try:
        return RunConfig(**raw)
    except InvalidArgument as error:
        raise RunError(f"{path} is damaged: {error}") from error


def _check_known(path: Path, raw: dict) -> None:
    """Checks that the configuration of a folder names a method that is known here, or says where it is from.

    Otherwise `RunConfig` would look for its code, which only the user may ask for. So it is with metrics.
    """
    algorithm, own = raw.get("algorithm"), raw.get("own_method")
    if isinstance(own, dict):
        if own.get("name") != algorithm:
            raise RunError(f"{path} is damaged: algorithm is {algorithm!r}, but own_method says {own.get('name')!r}")
    elif isinstance(algorithm, str) and algorithm not in ALGORITHMS:
        raise RunError(
            f"{path} names a method that is not known here: {unknown('algorithm', algorithm, ALGORITHMS)}. If a "
            f"program added it to ALGORITHMS, only this program can open the run. To make runs that every command can "
            "open, name the method as FILE.py:function"
        )
    for name in ("metrics", "monitor"):  # the folder has their short names, and `own_metrics`
        given = raw.get(name)
        texts = given if isinstance(given, list) else [given]
        if any(isinstance(text, str) and ":" in text for text in texts):
            raise RunError(f"{path} is damaged: {name} must be short names, found {one_line(texts, 200)}")


def _added_after(format_number: int) -> list[str]:
    return [name for n, names in _ADDED.items() if n > format_number for name in names]


def _newer_choices(algorithm: Any) -> dict:
    """The hyperparameters that config.json may lack because they came without a new format, and their values then."""
    return ALGORITHMS[algorithm].newer if isinstance(algorithm, str) and algorithm in ALGORITHMS else {}


def _older_choices(algorithm: Any, format_number: int) -> dict:
    """The hyperparameters, not in config.json, with which a run of this format was trained; {} of the newest format."""
    known = isinstance(algorithm, str) and algorithm in ALGORITHMS  # it comes from a file
    older = ALGORITHMS[algorithm].older if known else {}
    return {name: value for n, choices in older.items() if n > format_number for name, value in choices.items()}
