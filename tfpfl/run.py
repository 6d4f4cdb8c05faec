"""A run is a folder: what was asked for, the state after every round, and what came out.

config.json     everything needed to run it again: algorithm and hyperparameters, data and split, seeds, versions
state.sqlite    server state, client states, history, evaluations; one transaction a round
history.csv     a row a round
clients.csv     a row a client: N_i, K_i, loss and accuracy of its personal model on train, validation and test
summary.json    results by protocol, bytes, seconds
tensorboard/    the history as events
"""

import csv
import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from tfpfl import evaluation
from tfpfl.algorithm import Sampling
from tfpfl.algorithms import algorithm_row, build_algorithm
from tfpfl.callbacks import Callback, EarlyStopping, TensorBoard
from tfpfl.client_store import ClientStore
from tfpfl.data import Federation, load_source
from tfpfl.models import SplitModel, build
from tfpfl.models.networks import default_network
from tfpfl.training import Training

FORMAT = 1
PACKAGES = ("tfpfl", "tensorflow", "keras", "tensorflow-federated", "numpy")
_NOT_IDENTITY = ("rounds", "versions", "federation")  # may differ between a run and its continuation


class RunError(ValueError):
    """A run folder that cannot be used as asked. The message says what was found; nothing in it was changed."""


@dataclass
class RunConfig:
    """What a run is, as config.json has it. `None` means: the default that depends on the rest; see `resolved`."""

    algorithm: str = "pflego"
    preset: str | None = None
    hyperparameters: dict = field(default_factory=dict)
    dataset: str = "digits"
    source: dict = field(default_factory=dict)  # options of `load_source`
    partition: str = "round_robin"
    partition_args: dict = field(default_factory=dict)
    clients: int | None = None
    validation: float = 0.1
    data_seed: int | None = None
    federation: str | None = None  # the folder
    federation_hash: str | None = None
    network: str | None = None
    head_init: str = "glorot"
    labels: str | None = None
    participation: float = 0.2
    sampling: str = "fixed"
    sampling_range: tuple | None = None
    rounds: int = 200
    seed: int = 0
    engine: str = "local"
    evaluate_every: int = 10
    patience: int | None = None
    versions: dict = field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self):
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, found {self.rounds}")
        if self.seed < 0 or (self.data_seed or 0) < 0:
            raise ValueError(f"seeds must not be negative, found seed={self.seed}, data_seed={self.data_seed}")
        if self.sampling_range is not None:
            self.sampling_range = tuple(self.sampling_range)

    def resolved(self, federation: Federation) -> "RunConfig":
        """With every default filled in, so that a later version's defaults do not change what this run is."""
        row = algorithm_row(self.algorithm)
        preset = row.presets.get(self.preset, {}) if self.preset else {}
        defaults = {name: p.default for name, p in row.hyperparameters.items()}
        resolved = asdict(self) | {
            "hyperparameters": defaults | preset | self.hyperparameters,
            "data_seed": self.seed if self.data_seed is None else self.data_seed,
            "federation": str(federation.path),
            "federation_hash": federation.hash,
            "network": self.network or default_network(federation.example_shape),
            "labels": self.labels or ("local" if row.head == "personal" else "global"),
            "versions": _versions(),
        }
        return RunConfig(**resolved)

    @property
    def run_id(self) -> str:
        """A hash of what decides every number of the run. More rounds continue the same run."""
        identity = {k: v for k, v in asdict(self).items() if k not in _NOT_IDENTITY}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def sampling_plan(self) -> Sampling:
        """Who takes part in a round."""
        low, high = self.sampling_range or (0, 0)
        return Sampling(self.sampling, 1.0 if self.sampling == "range" else self.participation, low, high)


def open_federation(config: RunConfig, *, allow_download: bool = False) -> Federation:
    """The federation of a configuration: the folder it names, or else one in the cache, made if it is not there.

    The cache is `TFPFL_CACHE`, by default ~/.cache/tfpfl; a federation in it is a function of its arguments.

    Raises:
        ValueError, FederationError: it cannot be made, or it is not the one that the run was started with.
    """
    seed = config.seed if config.data_seed is None else config.data_seed
    if config.federation is not None and (Path(config.federation) / "manifest.json").exists():
        federation = Federation.load(config.federation)
    elif config.federation is not None and config.federation_hash is None:
        federation = Federation.load(config.federation)  # says what is wrong with it
    else:
        asked = [config.dataset, config.source, config.partition, config.partition_args, config.clients]
        name = hashlib.sha256(json.dumps([*asked, config.validation, seed], sort_keys=True).encode()).hexdigest()[:16]
        cache = Path(os.environ.get("TFPFL_CACHE") or Path.home() / ".cache" / "tfpfl") / "federations"
        folder = cache / f"{config.dataset.replace('/', '-')}-{name}"
        if not folder.exists():
            cache.mkdir(parents=True, exist_ok=True)
            source = load_source(config.dataset, allow_download=allow_download, **({"seed": seed} | config.source))
            Federation.build(
                source,
                config.partition,
                clients=config.clients,
                seed=seed,
                validation=config.validation,
                out=folder,
                **config.partition_args,
            )
        federation = Federation.load(folder)
    if config.federation_hash is not None and federation.hash != config.federation_hash:
        raise RunError(
            f"the run was started on federation {config.federation_hash[:12]}, but {federation.path} is now "
            f"{federation.hash[:12]}: the numbers would not belong together"
        )
    return federation


class Run:
    """A run folder that is open: made by `Run.create`, or opened by `Run.open`; close it, or use it in a `with`."""

    def __init__(self, folder: Path, config: RunConfig, federation: Federation):
        self.folder, self.config, self.federation = folder, config, federation
        self.population = federation.population(config.sampling_plan(), labels=config.labels)
        self.model = SplitModel(
            build(config.network, federation.example_shape, seed=config.seed),
            seed=config.seed,
            head_init=config.head_init,
        )
        self.algorithm = build_algorithm(config.algorithm, self.model, self.population, **config.hyperparameters)
        self.store = None
        self.stop_reason = None

    @classmethod
    def create(cls, config: RunConfig, folder: str | os.PathLike, federation: Federation | None = None) -> "Run":
        """Makes the folder and writes config.json.

        Raises:
            RunError: the folder holds something already.
            ValueError: the configuration is impossible; then nothing is written.
        """
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            hint = f"; continue it with `tfpfl resume {folder}`" if (folder / "config.json").exists() else ""
            raise RunError(f"{folder} exists and is not empty{hint}. Take another --out")
        federation = federation or open_federation(config)
        config = config.resolved(federation)
        run = cls(folder, config, federation)  # refuses what is impossible before anything is written
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "config.json", json.dumps(asdict(config), indent=2) + "\n")
        run.store = ClientStore(folder / "state.sqlite", config.run_id)
        return run

    @classmethod
    def open(cls, folder: str | os.PathLike, *, rounds: int | None = None, engine: str | None = None) -> "Run":
        """Opens a run, to continue or to evaluate it.

        Args:
            rounds: go on up to this many, instead of those of the configuration.
            engine: 'local' or 'tff' instead of the configuration's: for evaluating, not for continuing.

        Raises:
            RunError: not a run folder, or from a newer version.
            StoreError: its state is damaged, of another run, or being written.
        """
        folder = Path(folder)
        path = folder / "config.json"
        if not path.exists():
            raise RunError(f"{folder} is not a run folder: it has no config.json")
        try:
            raw = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RunError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(raw, dict) or not isinstance(raw.get("format"), int):
            raise RunError(f"{path} is not the configuration of a run: it has no format number")
        if raw["format"] > FORMAT:
            raise RunError(f"{path} has format {raw['format']}, from a newer tfpfl; this one reads up to {FORMAT}")
        unknown = set(raw) - set(RunConfig.__dataclass_fields__)
        if unknown:
            raise RunError(f"{path} has unknown entries: {', '.join(sorted(unknown))}")
        config = RunConfig(**raw)
        run = cls(folder, config, open_federation(config))
        run.store = ClientStore(folder / "state.sqlite", config.run_id)
        if rounds is not None and rounds != config.rounds:
            if rounds < run.store.round_num:
                run.close()
                raise RunError(f"{folder} has {run.store.round_num} rounds already, which is more than {rounds}")
            config.rounds = rounds
            _write(path, json.dumps(asdict(config), indent=2) + "\n")
        if engine is not None:
            config.engine = engine
        return run

    def train(self, callbacks: Sequence[Callback] = ()) -> "Run":
        """Runs what is left of the configured rounds, then writes the tables and the summary."""
        callbacks = [*callbacks, TensorBoard(self.folder / "tensorboard")]
        if self.config.patience is not None:
            callbacks.append(EarlyStopping(self.config.patience))
        training = self.training(callbacks)
        try:
            training.run(self.config.rounds)
        finally:
            self.write_history()
        self.stop_reason = training.stop_reason
        self.write_clients(training)
        self.write_summary()
        return self

    def training(self, callbacks: Sequence[Callback] = ()) -> Training:
        """The round loop of this run."""
        return Training(
            algorithm=self.algorithm,
            federation=self.federation,
            seed=self.config.seed,
            store=self.store,
            engine=self.config.engine,
            model_name=algorithm_row(self.config.algorithm).evaluates,
            evaluate_every=self.config.evaluate_every,
            callbacks=callbacks,
        )

    def write_history(self) -> None:
        """history.csv, from the store."""
        rows = self.store.history()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        _write_csv(self.folder / "history.csv", columns, rows)

    def write_clients(self, training: Training) -> list[dict]:
        """clients.csv: every client's data and the scores of its personal model as it is now."""
        rows = {
            int(i): {"client": int(i), "num_examples": int(n), "num_classes": len(self.federation.classes(int(i)))}
            for i, n in zip(self.population.client_ids, self.population.num_examples, strict=True)
        }
        for e in training.evaluate(training.server_state(), splits=("train", "validation", "test")):
            row = rows[e.client_id]
            row |= {f"{e.split}_examples": e.num_examples, f"{e.split}_loss": e.loss, f"{e.split}_accuracy": e.accuracy}
        _write_csv(self.folder / "clients.csv", list(next(iter(rows.values()))), rows.values())
        return list(rows.values())

    def results(self) -> list[evaluation.Result]:
        """Every number of the run with its protocol."""
        return evaluation.results(self.store.evaluations())

    def write_summary(self) -> dict:
        """summary.json."""
        history = self.store.history()
        seconds = [row["seconds"] for row in history if row["clients"]]
        summary = {
            "algorithm": self.config.algorithm,
            "dataset": self.config.dataset,
            "engine": self.config.engine,
            "rounds": self.store.round_num,
            "seconds_per_round_median": float(np.median(seconds)) if seconds else None,
            "bytes_down": sum(row.get("bytes_down", 0) for row in history),
            "bytes_up": sum(row.get("bytes_up", 0) for row in history),
            "client_visits": sum(row["clients"] for row in history),
            "stopped": self.stop_reason,
            "federation_hash": self.federation.hash,
            "run_id": self.config.run_id,
            "results": [_plain(r._asdict()) for r in self.results()],
        }
        _write(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary

    def close(self) -> None:
        """Lets others open the run."""
        self.store.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _versions() -> dict:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _plain(row: dict) -> dict:
    """JSON has no NaN: a number over nothing is null."""
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in row.items()}


def _write(path: Path, text: str) -> None:
    """The old file or the new one, never half of one."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "w", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _write_csv(path: Path, columns, rows) -> None:
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)
