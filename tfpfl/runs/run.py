"""A run is a folder: what was asked for, the state after every round, and what came out.

config.json     everything needed to run it again: algorithm and hyperparameters, data and split, seeds, versions
network.keras   the backbone, where it is the user's own file
state.sqlite    server state, client states, history, evaluations, matrices; one transaction a round
history.csv     a row a round
clients.csv     a row a client: N_i, K_i, loss and accuracy of its personal model on train, validation and test
summary.json    results by protocol, bytes, seconds
tensorboard/    the history as events

The tables and the summary are made from state.sqlite: `evaluate` writes them again.
"""

import csv
import hashlib
import io
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from tfpfl.algorithms import algorithm_row, build_algorithm, check_names
from tfpfl.algorithms.contract import Algorithm, ClientData
from tfpfl.algorithms.transforms.screening import ON_BROKEN, check_norms, screened
from tfpfl.checks import InvalidArgument, Unavailable, check_choice
from tfpfl.data import Federation, load_source
from tfpfl.data.federation import FederationError
from tfpfl.data.population import Population, Sampling
from tfpfl.data.randomness import Stream, client_key, generator
from tfpfl.engines.machines import Machines
from tfpfl.models import SplitModel, build
from tfpfl.models.networks import default_network
from tfpfl.runs import protocols
from tfpfl.runs.aggregators import (
    OF_TFF,
    PRIVATE,
    Privacy,
    check_aggregator,
    factory,
    privacy,
    require_accounting,
    with_aggregator,
)
from tfpfl.runs.availability import Availability
from tfpfl.runs.callbacks import Callback, EarlyStopping, TensorBoard
from tfpfl.runs.cost import Passes, count_passes, visit_flops
from tfpfl.runs.store import ClientStore, OtherRun, StoreError
from tfpfl.runs.training import DivergedError, Training, check_cohort, check_engine, check_fits

# 1 had no `cohort`; what later formats added has the default in an older file. Since 5 the sizes of 'range' cohorts are
# drawn from a stream of their own; older runs go on with theirs.
FORMAT = 5
NETWORK = "network.keras"
PACKAGES = ("tfpfl", "tensorflow", "keras", "tensorflow-federated", "numpy")
_ADDED = {  # format -> entries that it brought
    3: ("new_clients",),
    4: (
        *("dropout", "dropout_spread", "client_seconds", "client_seconds_spread", "jitter", "round_deadline"),
        *("joins", "leaves", "on_broken", "max_norm", "clip_norm"),
        *("aggregator", "aggregator_args"),
    ),
}
_NOT_IDENTITY = ("rounds", "versions", "federation")  # may differ between a run and its continuation


class RunError(InvalidArgument):
    """A run folder that cannot be used as asked. The message says what was found; nothing in it was changed."""


@dataclass
class RunConfig:
    """What a run is, as config.json has it. `None` means: the default that depends on the rest; see `resolved`.

    Raises:
        ValueError: an entry that can be seen to be wrong before any data are read.
    """

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
    network: str | None = None  # a name in NETWORKS, or a Keras file
    network_hash: str | None = None  # of the file
    head_init: str = "glorot"
    labels: str | None = None
    participation: float = 0.2
    sampling: str = "fixed"
    sampling_range: tuple | None = None
    rounds: int = 200
    seed: int = 0
    engine: str = "local"
    cohort: str = "auto"  # see `Simulation`; kept, so that a resumed run adds up its numbers in the same order
    evaluate_every: int = 10
    patience: int | None = None
    new_clients: int = 0  # so many of the federation's clients, drawn by the data's seed, never train
    dropout: float = 0.0  # this and the next seven: see `Availability`
    dropout_spread: float = 0.0
    client_seconds: float = 0.0
    client_seconds_spread: float = 0.0
    jitter: float = 0.0
    round_deadline: float | None = None
    joins: tuple = ()  # 'ROUND:ID,ID,...'
    leaves: tuple = ()
    on_broken: str = "stop"  # or 'reject': see `tfpfl.algorithms.transforms.screening`
    max_norm: float | None = None
    clip_norm: float | None = None
    aggregator: str | None = None  # see `tfpfl.runs.aggregators`
    aggregator_args: tuple = ()  # 'NAME=NUMBER'
    versions: dict = field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self):
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, np.generic):
                value = value.item()
            elif isinstance(value, os.PathLike):
                value = os.fspath(value)
            elif isinstance(value, list):
                value = tuple(value)
            setattr(self, entry.name, _typed(entry.name, value, entry.type))
        check_names(self.algorithm, self.preset, self.hyperparameters)
        known = algorithm_row(self.algorithm).hyperparameters
        self.hyperparameters = {k: _typed(k, v, known[k].annotation) for k, v in self.hyperparameters.items()}
        at_least = {"rounds": 1, "seed": 0, "data_seed": 0, "evaluate_every": 0, "patience": 1, "new_clients": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and not least <= value < 2**31:
                raise InvalidArgument(f"{name} must lie in {least}..2^31-1, found {value}")
        sizes = self.sampling_range
        if sizes is not None and not (len(sizes) == 2 and all(type(size) is int for size in sizes)):
            raise InvalidArgument(f"sampling_range is the smallest and the largest cohort, found {sizes}")
        if sizes is not None and self.sampling != "range":
            raise InvalidArgument(f"sampling_range goes with sampling 'range', found {self.sampling!r}")
        self.sampling_plan()
        self.availability()
        check_choice(on_broken=(self.on_broken, ON_BROKEN))
        check_norms(self.max_norm, self.clip_norm)
        check_aggregator(self.aggregator, self.aggregator_arguments(), self.engine)
        if self.on_broken == "stop" and (self.max_norm or self.clip_norm) is not None:
            raise InvalidArgument("max_norm and clip_norm are limits of on_broken='reject', found on_broken='stop'")
        check_cohort(self.cohort, self.engine)

    def resolved(self, federation: Federation) -> "RunConfig":
        """With every default filled in, so that a later version's defaults do not change what this run is."""
        row = algorithm_row(self.algorithm)
        preset = row.presets.get(self.preset, {})
        defaults = {name: p.default for name, p in row.hyperparameters.items()}
        manifest = federation.manifest
        resolved = asdict(self) | {
            "hyperparameters": defaults | preset | self.hyperparameters,
            # What the data are is said by the federation, which may be the user's own.
            "dataset": manifest["source"]["name"],
            "partition": manifest["partitioner"]["name"],
            "partition_args": manifest["partitioner"]["arguments"],
            "clients": federation.num_clients,
            "validation": manifest["validation"],
            "data_seed": manifest["seed"],
            "federation": str(federation.path),
            "federation_hash": federation.hash,
            "network": self.network or default_network(federation.example_shape),
            "labels": self.labels or ("local" if row.head == "personal" else "global"),
            "versions": _versions(),
        }
        if self.network_file:
            resolved |= {"network": NETWORK, "network_hash": _file_hash(self.network_file)}
        return RunConfig(**resolved)

    @property
    def network_file(self) -> Path | None:
        """The user's own backbone."""
        return Path(self.network) if self.network and self.network.endswith(".keras") else None

    @property
    def run_id(self) -> str:
        """A hash of what decides every number of the run. More rounds continue the same run."""
        identity = {k: v for k, v in asdict(self).items() if k not in _NOT_IDENTITY}
        for name in _added_after(self.format):
            del identity[name]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def sampling_plan(self) -> Sampling:
        """Who takes part in a round."""
        low, high = self.sampling_range or (0, 0)
        rate = 1.0 if self.sampling == "range" else self.participation
        return Sampling(self.sampling, rate, low, high, old_sizes=self.format < 5)

    def availability(self) -> Availability:
        """Who comes back from a round, and when."""
        return Availability(
            dropout=self.dropout,
            dropout_spread=self.dropout_spread,
            seconds=self.client_seconds,
            seconds_spread=self.client_seconds_spread,
            jitter=self.jitter,
            deadline=self.round_deadline,
            joins=_changes("joins", self.joins),
            leaves=_changes("leaves", self.leaves),
        )

    def aggregator_arguments(self) -> dict:
        """Of the aggregator's function.

        Raises:
            ValueError: something that is not written NAME=NUMBER.
        """
        found = {}
        for text in self.aggregator_args:
            match = re.fullmatch(r"(\w+)=(\S+)", str(text))
            try:
                value = float(match[2])
            except (TypeError, ValueError) as error:
                raise InvalidArgument(f"aggregator_args are written NAME=NUMBER, found {text!r}") from error
            found[match[1]] = int(value) if value.is_integer() and match[1] in ("bits", "threshold") else value
        return found

    def training_clients(self, federation: Federation) -> np.ndarray | None:
        """int [I], the ids of the clients that train; None for all of the federation.

        Raises:
            ValueError: fewer than one would be left.
        """
        people, new = federation.num_clients, self.new_clients
        if not new:
            return None
        if new >= people:
            raise InvalidArgument(f"new_clients={new} leaves nobody to train: the federation has {people} clients")
        drawn = generator(federation.manifest["seed"], Stream.NEW_CLIENTS, people).permutation(people)
        return np.sort(drawn[new:])


def open_federation(config: RunConfig, *, allow_download: bool = False) -> Federation:
    """The federation of a configuration: the folder it names, or else one in the cache, made if it is not there.

    The cache is `TFPFL_CACHE`, by default ~/.cache/tfpfl; a federation in it is a function of its arguments.

    Raises:
        ValueError, FederationError: it cannot be made, or it is not the one that the run was started with.
    """
    started = config.federation_hash is not None  # a run's configuration says how to make its federation again
    if config.federation is not None and (not started or Path(config.federation).exists()):
        federation = Federation.load(config.federation)
    else:
        try:
            federation = _cached_federation(config, allow_download)
        except (InvalidArgument, TypeError, FileNotFoundError) as error:  # TypeError: arguments of another version
            if not started:
                raise
            raise RunError(
                f"the run's federation {config.federation} is gone, and it could not be made again: {error}"
            ) from error
    if started and federation.hash != config.federation_hash:
        raise RunError(
            f"the run was started on federation {config.federation_hash[:12]}, but {federation.path} is "
            f"{federation.hash[:12]}: the numbers would not belong together"
        )
    return federation


def _cached_federation(config: RunConfig, allow_download: bool) -> Federation:
    seed = config.seed if config.data_seed is None else config.data_seed
    asked = [config.dataset, config.source, config.partition, config.partition_args, config.clients]
    name = hashlib.sha256(json.dumps([*asked, config.validation, seed], sort_keys=True).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("TFPFL_CACHE") or Path.home() / ".cache" / "tfpfl") / "federations"
    folder = cache / f"{config.dataset.replace('/', '-')}-{name}"
    if not folder.exists():
        source = load_source(config.dataset, allow_download=allow_download, **({"seed": seed} | config.source))
        try:
            return Federation.build(
                source,
                config.partition,
                clients=config.clients,
                seed=seed,
                validation=config.validation,
                out=folder,
                **config.partition_args,
            )
        except FederationError:
            if not folder.exists():  # otherwise another process has just made it
                raise
    try:
        return Federation.load(folder)
    except FederationError as error:
        raise FederationError(f"{error}. It is in the cache: remove that folder, and it is made again") from error


@dataclass(frozen=True, eq=False)
class Recipe:
    """(federation) -> the run's algorithm. It can be sent to another process, which an algorithm cannot.

    Args:
        config: resolved.
        network: the path and the content of network.keras, where the backbone is the user's own.
        arrival: float [I], the probability that a sampled client's work reaches the server; None: 1.
    """

    config: RunConfig
    network: tuple[Path, bytes] | None = None
    arrival: np.ndarray | None = None

    def __call__(self, federation: Federation) -> Algorithm:
        return self.algorithm(*self.model_and_population(federation))

    def model_and_population(self, federation: Federation) -> tuple[SplitModel, Population]:
        """What the algorithm is built for."""
        config = self.config
        slots = algorithm_row(config.algorithm).head == "shared"  # with local labels only where they were asked for
        clients = config.training_clients(federation)
        population = federation.population(config.sampling_plan(), config.labels, slots, clients)
        if self.arrival is not None:
            population = replace(population, arrival=self.arrival)
        if self.network is None:
            backbone = build(config.network, federation.example_shape, seed=config.seed)
        else:
            backbone = _load_network(*self.network)
        return SplitModel(backbone, seed=config.seed, head_init=config.head_init), population

    def algorithm(self, model: SplitModel, population: Population) -> Algorithm:
        """The algorithm, with the run's aggregator as far as it is ours, and screened where the run is."""
        config = self.config
        made = build_algorithm(config.algorithm, model, population, **config.hyperparameters)
        made = with_aggregator(config.aggregator, config.aggregator_arguments(), made)
        if config.on_broken == "reject":
            return screened(made, max_norm=config.max_norm, clip_norm=config.clip_norm)
        return made


class Run:
    """A run folder that is open: made by `Run.create`, or opened by `Run.open`; close it, or use it in a `with`."""

    def __init__(self, folder: Path, config: RunConfig, federation: Federation, network_file: Path | None, engine: str):
        self.folder, self.config, self.federation, self.engine = folder, config, federation, engine
        network = network_file and (network_file, _read_network(network_file, config.network_hash))
        self.recipe = Recipe(config, network)
        self.model, self.population = self.recipe.model_and_population(federation)
        self.availability = config.availability()
        if not self.availability.is_perfect:
            self.recipe = replace(self.recipe, arrival=self._arrival())
            self.population = replace(self.population, arrival=self.recipe.arrival)
        self.algorithm = self.recipe.algorithm(self.model, self.population)
        check_fits(self.algorithm, federation)
        self.machines = Machines()  # where the rounds' work is done; may be set before `train`
        self.store = None
        self.stop_reason = None

    def _aggregator(self):
        name, arguments = self.config.aggregator, self.config.aggregator_arguments()
        return partial(factory, name, arguments, self.algorithm) if name in OF_TFF else None

    @property
    def privacy(self) -> Privacy | None:
        """(epsilon, delta) of what the server has released so far; None without a private aggregator."""
        if self.config.aggregator not in PRIVATE or not self.store.round_num:
            return None
        noise, adaptive = self.config.aggregator_arguments()["noise"], self.config.aggregator == "dp_adaptive"
        return privacy(noise, self.population, self.store.round_num, adaptive=adaptive)

    def _arrival(self) -> np.ndarray:
        """float [I], the probability that a sampled client's work reaches the server."""
        availability, seed = self.availability, self.config.seed
        joined = [i for _, some in (*availability.joins, *availability.leaves) for i in some]
        unknown_ids = sorted(set(joined) - set(self.population.client_ids.tolist()))
        if unknown_ids:
            raise InvalidArgument(f"clients join or leave that the population does not have: {unknown_ids}")
        work = self.population.num_examples * (sum(self.passes) if availability.seconds else 1.0)
        arrival = availability.arrival(seed, self.population.client_ids, work)
        if not arrival.any():
            fastest = availability.median_seconds(seed, self.population.client_ids, work).min()
            raise InvalidArgument(
                f"round_deadline={availability.deadline} is too short for every client: the fastest takes "
                f"{fastest:.3g} s"
            )
        return arrival

    @classmethod
    def create(
        cls,
        config: RunConfig,
        folder: str | os.PathLike,
        federation: Federation | None = None,
        *,
        allow_download: bool = False,
    ) -> "Run":
        """Makes the folder and writes config.json.

        Args:
            config: what to run.
            folder: absent or empty.
            federation: default: `open_federation(config)`.
            allow_download: whether that may download the data set.

        Raises:
            RunError: the folder holds something already.
            ValueError: the configuration is impossible; then nothing is written.
            RuntimeError: the TFF engine is asked for where TFF is not installed, or the Ray engine without Ray.
        """
        folder = Path(folder)
        _check_free(folder)
        check_engine(config.engine)
        if config.aggregator in PRIVATE:
            require_accounting()  # which the summary needs, hours later
        federation = federation or open_federation(config, allow_download=allow_download)
        network_file, config = config.network_file, config.resolved(federation)
        run = cls(folder, config, federation, network_file, config.engine)  # refuses what is impossible
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if network_file is not None:
                shutil.copyfile(network_file, folder / NETWORK)
            write_whole(folder / "config.json", json.dumps(asdict(config), indent=2) + "\n")
            run.store = ClientStore(folder / "state.sqlite", config.run_id)
        except (OSError, StoreError):
            if made:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return run

    @classmethod
    def open(cls, folder: str | os.PathLike, *, rounds: int | None = None, engine: str | None = None) -> "Run":
        """Opens a run, to continue or to evaluate it.

        Args:
            rounds: go on up to this many, instead of those of the configuration; see `Training.run`.
            engine: 'local', 'tff' or 'ray' instead of the configuration's: for evaluating, not for continuing.

        Raises:
            RunError: not a run folder, or from a newer version.
            StoreError: its state is damaged, of another run, or being written.
        """
        folder = Path(folder)
        config = read_config(folder)
        state = folder / "state.sqlite"
        if not state.exists() and (folder / "history.csv").exists():
            raise RunError(f"{state} is missing: the run has a history, but its state is lost")
        if rounds is not None and rounds < 1:
            raise RunError(f"rounds must be at least 1, found {rounds}")
        check_engine(engine or config.engine)
        network_file = folder / NETWORK if config.network_hash else None
        run = cls(folder, config, open_federation(config), network_file, engine or config.engine)
        try:
            run.store = ClientStore(state, config.run_id)
        except OtherRun as error:
            raise RunError(
                f"config.json and state.sqlite in {folder} are not of one run: one of them was changed or replaced. "
                "To run with other settings, start a run in a new folder"
            ) from error
        if rounds is not None and rounds != config.rounds:
            done = run.store.round_num
            if rounds < done:
                run.close()
                raise RunError(f"{folder} has {done} rounds already, which is more than {rounds}")
            config.rounds = rounds
            write_whole(folder / "config.json", json.dumps(asdict(config), indent=2) + "\n")
        return run

    @classmethod
    def begun(
        cls,
        config: RunConfig,
        folder: str | os.PathLike,
        federation: Federation | None = None,
        *,
        allow_download: bool = False,
    ) -> "Run":
        """The run that is in the folder, to go on up to `config.rounds` or to its own, if more; else a new one.

        Whether the run in the folder is that of `config` is not asked. Arguments and errors: see `create` and `open`.
        """
        if (Path(folder) / "config.json").exists():
            return cls.open(folder, rounds=max(config.rounds, read_config(folder).rounds))
        return cls.create(config, folder, federation, allow_download=allow_download)

    @property
    def changed_versions(self) -> dict:
        """Packages whose version is not that of the beginning: {name: (then, now)}. Then rounds may differ in bits."""
        then, now = self.config.versions, _versions()
        return {name: (then[name], now[name]) for name in now if name in then and then[name] != now[name]}

    def train(self, callbacks: Sequence[Callback] = ()) -> "Run":
        """Runs what is left of the configured rounds, then writes the tables and the summary.

        Raises:
            DivergedError: names round and clients; the rounds before are saved, and the tables tell of them.
            MachinesError: the machines that did a round's work are gone; the rounds before are saved.
            StoreError: a round could not be saved; those before are.
        """
        callbacks = [*callbacks, TensorBoard(self.folder / "tensorboard")]
        if self.config.patience is not None:
            callbacks.append(EarlyStopping(self.config.patience))
        training = self.training(callbacks)
        try:
            training.run(self.config.rounds)
        except DivergedError as error:
            self.stop_reason = str(error)
            self._evaluate(training)
            raise
        except BaseException:
            with suppress(OSError):  # of a full disk: what is being raised says more
                self.write_history()
            raise
        self.stop_reason = training.stop_reason
        self._evaluate(training)  # whose graphs are traced already
        return self

    def training(self, callbacks: Sequence[Callback] = ()) -> Training:
        """The round loop of this run."""
        return Training(
            algorithm=self.algorithm,
            federation=self.federation,
            seed=self.config.seed,
            store=self.store,
            engine=self.engine,
            cohort=self.config.cohort,
            machines=self.machines,
            availability=self.availability,
            passes=sum(self.passes) if self.availability.seconds else 1.0,
            aggregator=self._aggregator(),
            recipe=self.recipe,
            model_name=algorithm_row(self.config.algorithm).evaluated(self.config.hyperparameters),
            evaluate_every=self.config.evaluate_every,
            callbacks=callbacks,
        )

    def evaluate(self) -> list[protocols.Evaluation]:
        """Scores every client's personal model as it is now on all its data; writes the tables and the summary."""
        return self._evaluate(self.training())

    def _evaluate(self, training: Training) -> list[protocols.Evaluation]:
        scores = training.evaluate(training.server_state(), splits=("train", "validation", "test"))
        self.write_history()
        self.write_clients(scores)
        self.write_summary()
        return scores

    def write_history(self) -> None:
        """history.csv, from the store."""
        rows = self.store.history()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        _write_csv(self.folder / "history.csv", columns, rows)

    def write_clients(self, scores: Sequence[protocols.Evaluation]) -> None:
        """clients.csv: every client's data, and the scores of the model that it predicts with."""
        own = protocols.predicts(scores)
        rows = {
            int(i): {"client": int(i), "num_examples": int(n), "num_classes": len(self.federation.classes(int(i)))}
            for i, n in zip(self.population.client_ids, self.population.num_examples, strict=True)
        }
        for e in scores:
            if e.model != own:
                continue
            row = rows[e.client_id]
            row |= {f"{e.split}_examples": e.num_examples, f"{e.split}_loss": e.loss, f"{e.split}_accuracy": e.accuracy}
        _write_csv(self.folder / "clients.csv", list(next(iter(rows.values()))), rows.values())

    def results(self) -> list[protocols.Result]:
        """Every number of the run with its protocol."""
        return protocols.results(self.store.evaluations())

    def matrices(self, round_num: int | None = None) -> dict[str, np.ndarray]:
        """Who listens to whom, of algorithms that know: FedAMP's attention, PGFed's A, FedFomo's P.

        Args:
            round_num: an evaluated round; None for the last of them. `run.store.matrix_rounds()` has all.

        Returns:
            name -> [I, I], rows and columns in the order of `run.population.client_ids`. {} where the algorithm has
            none, or no round is evaluated yet.

        Raises:
            ValueError: the run has matrices, but not of that round.
        """
        rounds = self.store.matrix_rounds()
        if round_num is not None and rounds and round_num not in rounds:
            raise InvalidArgument(
                f"matrices are saved in evaluated rounds: {', '.join(map(str, rounds))}; not {round_num}"
            )
        return self.store.matrices(rounds[-1] if round_num is None else round_num) if rounds else {}

    @cached_property
    def passes(self) -> Passes:
        """Passes of a client's examples through the backbone in one visit, counted in a first visit of one client."""
        client_id = int(self.population.client_ids[np.argmin(self.population.num_examples)])
        x, y = self.federation.arrays(client_id, "train", labels=self.population.labels)
        info, key = self.population.info(client_id), client_key(self.config.seed, 1, [client_id])[0]

        def build(model):
            return build_algorithm(self.config.algorithm, model, self.population, **self.config.hyperparameters)

        return count_passes(build, self.model, ClientData(x, y, info, key))

    @cached_property
    def flops(self) -> float | None:
        """Floating point operations of the passes of a mean client's visit; None where TensorFlow cannot count them."""
        examples, classes = (float(np.mean(n)) for n in (self.population.num_examples, self.population.num_classes))
        try:
            return visit_flops(self.passes, self.model, examples, classes)
        except Unavailable:
            return None

    def write_summary(self) -> dict:
        """summary.json. Why the run stopped stays there until there are more rounds."""
        path, done, private = self.folder / "summary.json", self.store.round_num, self.privacy
        with suppress(OSError, ValueError, AttributeError):
            before = json.loads(path.read_text())
            if before.get("rounds") == done:
                self.stop_reason = self.stop_reason or before.get("stopped")
        history = self.store.history()
        seconds = [row["seconds"] for row in history if row["clients"]]
        summary = {
            "algorithm": self.config.algorithm,
            "dataset": self.config.dataset,
            "engine": self.config.engine,
            "rounds": done,
            "seconds_per_round_median": float(np.median(seconds)) if seconds else None,
            "bytes_down": sum(row.get("bytes_down", 0) for row in history),
            "bytes_up": sum(row.get("bytes_up", 0) for row in history),
            "client_visits": sum(row["clients"] for row in history),
            "passes": self.passes._asdict(),
            "flops": self.flops,
            "stopped": self.stop_reason,
            "privacy": private and private._asdict(),
            "federation_hash": self.federation.hash,
            "run_id": self.config.run_id,
            "results": [_plain(r._asdict()) for r in self.results()],
        }
        write_whole(path, json.dumps(summary, indent=2) + "\n")
        return summary

    def close(self) -> None:
        """Lets others open the run."""
        self.store.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _check_free(folder: Path) -> None:
    """Nothing is there that a new run would overwrite; what a kill while making one left behind does not count."""
    leftovers = {NETWORK, f"{NETWORK}.new", "config.json.new"}
    if not folder.exists() or (folder.is_dir() and {p.name for p in folder.iterdir()} <= leftovers):
        return
    hint = f"; continue it with `tfpfl resume {folder}`" if (folder / "config.json").exists() else ""
    raise RunError(f"{folder} exists and is not empty{hint}. Take another --out")


def read_config(folder: str | os.PathLike) -> RunConfig:
    """The configuration of a run.

    Raises:
        RunError: the folder has none, or one that is damaged or of another version.
    """
    path = Path(folder) / "config.json"
    if not path.exists():
        raise RunError(f"{folder} is not a run folder: it has no config.json")
    try:
        raw = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{path} is damaged, it is not valid JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("format"), int):
        raise RunError(f"{path} is not the configuration of a run: it has no format number")
    if raw["format"] > FORMAT:
        raise RunError(f"{path} has format {raw['format']}, from a newer tfpfl; this one reads up to {FORMAT}")
    if raw["format"] > 1:
        defaults = {f.name: f.default for f in fields(RunConfig)}
        raw = {name: defaults[name] for name in _added_after(raw["format"])} | raw
    else:
        raise RunError(
            f"{path} has format {raw['format']}, from an older tfpfl that added up a cohort in another order; continue "
            "it with that version, or run it again"
        )
    names = {f.name for f in fields(RunConfig)}
    for what, which in (("unknown entries", set(raw) - names), ("no entries", names - set(raw))):
        if which:
            raise RunError(f"{path} is damaged, it has {what} {', '.join(sorted(which))}")
    try:
        return RunConfig(**raw)
    except InvalidArgument as error:
        raise RunError(f"{path} is damaged: {error}") from error


def _added_after(format_number: int) -> list[str]:
    return [name for n, names in _ADDED.items() if n > format_number for name in names]


def _changes(name: str, written: tuple) -> tuple:
    """What `Availability` takes, from 'ROUND:ID,ID,...'."""
    found = []
    for text in written:
        match = re.fullmatch(r"(\d+):(\d+(?:,\d+)*)", text) if isinstance(text, str) else None
        if match is None:
            raise InvalidArgument(f"{name} is written ROUND:ID,ID,..., found {text!r}")
        found.append((int(match[1]), tuple(map(int, match[2].split(",")))))
    return tuple(found)


def _read_network(path: Path, expected: str) -> bytes:
    """The user's backbone, as its file has it."""
    if not path.exists():
        raise RunError(f"{path} is missing: the run's backbone is lost")
    if _file_hash(path) != expected:
        raise RunError(f"{path} was changed: its sha256 is not the one in config.json")
    return path.read_bytes()


def _load_network(path: Path, content: bytes):
    """The user's backbone. Its weights are theta's initial value."""
    import keras

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / NETWORK
        copy.write_bytes(content)
        try:
            return keras.models.load_model(copy, compile=False)
        except Exception as error:  # a zip file, JSON and HDF5 inside it, layers that it names: each in its own way
            raise InvalidArgument(f"{path} cannot be read as a Keras model: {error}") from error


def _file_hash(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InvalidArgument(f"the network {path} cannot be read: {error.strerror}") from error


def _typed(name: str, value, kind):
    """The value, as a float where one is wanted and an integer was given."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and not isinstance(value, bool) and kind in (float, float | None):
        try:
            value = float(value)
        except OverflowError:
            raise InvalidArgument(f"{name} is too large a number") from None
    if isinstance(value, bool) and kind in (int, int | None) or not isinstance(value, kind):
        wanted = kind.__name__ if isinstance(kind, type) else str(kind).replace(" | ", " or ")
        raise InvalidArgument(f"{name} must be {wanted}, found {value!r}")
    return value


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


def write_whole(path: Path, text: str) -> None:
    """The old file or the new one, never half of one."""
    temporary = path.with_name(path.name + ".new")
    try:
        with open(temporary, "w", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_csv(path: Path, columns, rows) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())
