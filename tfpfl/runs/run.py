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

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from tfpfl.algorithms import build_algorithm, get_method
from tfpfl.algorithms.contract import ClientData
from tfpfl.checks import InvalidArgument, Unavailable
from tfpfl.data import Federation
from tfpfl.data.randomness import client_key
from tfpfl.engines.engine import check_engine
from tfpfl.engines.machines import Machines
from tfpfl.engines.rounds import check_fits
from tfpfl.engines.tff.aggregators import OF_TFF
from tfpfl.runs import protocols
from tfpfl.runs.aggregators import PRIVATE, factory
from tfpfl.runs.callbacks import Callback, EarlyStopping, TensorBoard
from tfpfl.runs.config import NETWORK, RunConfig, RunError, package_versions, read_config
from tfpfl.runs.cost import Passes, count_passes, visit_flops
from tfpfl.runs.federations import open_federation
from tfpfl.runs.files import write_csv, write_whole
from tfpfl.runs.privacy import Privacy, privacy, require_accounting
from tfpfl.runs.recipe import Recipe, read_network
from tfpfl.runs.store import OtherRun, RunStore, StoreError
from tfpfl.runs.training import DivergedError, Training


class Run:
    """A run folder that is open: made by `Run.create`, or opened by `Run.open`; close it, or use it in a `with`."""

    def __init__(self, folder: Path, config: RunConfig, federation: Federation, network_file: Path | None, engine: str):
        self.folder, self.config, self.federation, self.engine = folder, config, federation, engine
        network = network_file and (network_file, read_network(network_file, config.network_hash))
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
            run.store = RunStore(folder / "state.sqlite", config.run_id)
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
            run.store = RunStore(state, config.run_id)
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
    def create_or_resume(
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
        then, now = self.config.versions, package_versions()
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
            grouping=self.config.grouping,
            machines=self.machines,
            availability=self.availability,
            passes=sum(self.passes) if self.availability.seconds else 1.0,
            aggregator=self._aggregator(),
            recipe=self.recipe,
            model_name=get_method(self.config.algorithm).evaluated(self.config.hyperparameters),
            evaluate_every=self.config.evaluate_every,
            callbacks=callbacks,
        )

    def evaluate(self) -> list[protocols.Score]:
        """Scores every client's personal model as it is now on all its data; writes the tables and the summary."""
        return self._evaluate(self.training())

    def _evaluate(self, training: Training) -> list[protocols.Score]:
        scores = training.evaluate(training.server_state(), splits=("train", "validation", "test"))
        self.write_history()
        self.write_clients(scores)
        self.write_summary()
        return scores

    def write_history(self) -> None:
        """history.csv, from the store."""
        rows = self.store.history()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        write_csv(self.folder / "history.csv", columns, rows)

    def write_clients(self, scores: Sequence[protocols.Score]) -> None:
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
        write_csv(self.folder / "clients.csv", list(next(iter(rows.values()))), rows.values())

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


def _plain(row: dict) -> dict:
    """JSON has no NaN: a number over nothing is null."""
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in row.items()}
