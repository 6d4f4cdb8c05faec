"""A run folder: creates, opens, trains and evaluates it. It holds these files:

config.json     all that is needed to repeat the run: algorithm and hyperparameters, data and split, seeds, versions
network.keras   the backbone, if it is the user's own file; or network.py, if a function in it makes the backbone
method.py       the method, if it is the user's own file
metric_NAME.py  a metric, if it is the user's own file
state.sqlite    server state, client states, history, evaluations, matrices; one transaction a round
history.csv     one row per round
clients.csv     one row per client: N_i, K_i, the first round in which the server used its work, loss and score (such as
                the accuracy) of its personal model on train, validation and test
summary.json    results by protocol, bytes, floating point operations, seconds
tensorboard/    the history as TensorBoard events

`Run.evaluate` writes the tables and the summary again, from state.sqlite.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import keras
import numpy as np

from tfpfl.algorithms.parts.schedules import say_if_at_0
from tfpfl.algorithms.transforms.schedule import check_follows
from tfpfl.algorithms.transforms.secure import quorum
from tfpfl.checks import Unavailable, check_type, warn_user
from tfpfl.data import Federation
from tfpfl.data.places import is_places
from tfpfl.engines.engine import check_engine
from tfpfl.engines.inputs import check_fits
from tfpfl.engines.local.simulation import check_fused
from tfpfl.engines.machines import Machines
from tfpfl.engines.tff.aggregators import OF_TFF
from tfpfl.runs import own_methods, own_networks, participation, protocols
from tfpfl.runs.accounting import privacy_of
from tfpfl.runs.aggregators import check_method, check_objective, factory
from tfpfl.runs.callbacks import Callback, EarlyStopping, TensorBoard
from tfpfl.runs.client_model import ClientModel, ClientModels
from tfpfl.runs.config import RunConfig, RunError, entries, package_versions, read_config
from tfpfl.runs.continuing import kept_config
from tfpfl.runs.cost import Passes, Work, first_visit, visit_flops
from tfpfl.runs.federations import open_federation, read_by
from tfpfl.runs.files import write_whole
from tfpfl.runs.folders import STATE, check_heads_are_here, check_state_is_here, locked_folder, new_folder
from tfpfl.runs.metrics import known_metrics
from tfpfl.runs.needs import agreeing, check_needs, check_patience, warn_of_model, warn_of_small_rounds
from tfpfl.runs.privacy import Privacy
from tfpfl.runs.recipe import Recipe
from tfpfl.runs.results import (
    json_row,
    matrices_after,
    summary_after,
    totals,
    warnings_of,
    write_clients,
    write_history,
)
from tfpfl.runs.store import OtherRun, RunStore, StoreError
from tfpfl.runs.store_content import check_of_run
from tfpfl.runs.training import DivergedError, Training
from tfpfl.runs.training_arguments import BY_RUN, as_list, check_callbacks


class Run:
    """An open run folder. Make one with `Run.create`, `Run.open` or `Run.create_or_resume`.

    Close it with `close`, or use it in a `with` statement; until then no other process can write to the folder.
    """

    def __init__(self, folder: Path, config: RunConfig, federation: Federation, network_file: Path | None, engine: str):
        self.folder, self.config, self.federation, self.engine = folder, config, federation, engine
        network, allowed = own_networks.kept(config, network_file)
        self.recipe = Recipe(config, network, allowed, own_methods.code_of(config))
        self.whole, self.population = self.recipe.model_and_population(federation)
        self.model = self.whole.above or self.whole  # with `train_from`, the part above the trunk
        self.availability = config.availability()
        if not self.availability.is_perfect:
            arrival = self.availability.arrival_in(self.population, config.seed, self.passes)
            self.recipe = replace(self.recipe, arrival=arrival)
            self.population = replace(self.population, arrival=arrival)
        self.algorithm = self.recipe.algorithm(self.model, self.population)
        check_fits(self.algorithm._replace(model=self.whole), federation)
        self.machines = Machines()  # TFF workers or a Ray cluster for the rounds; may be changed before `train`
        self.store = cast(RunStore, None)  # `create` and `open` set it
        self.stop_reason: str | None = None

    @cached_property
    def examples(self) -> Federation:
        """What the model takes: the federation, or with `train_from` the features of the trunk, computed if missing."""
        return read_by(self.whole, self.federation)

    def _check_store(self) -> None:
        """Checks that what is stored can be of this run and its clients; closes the store if not."""
        state, ids = str(self.folder / STATE), set(self.population.client_ids.tolist())
        try:
            stored = self.store.history(), self.store.evaluations(), self.store.client_ids()
            check_of_run(state, *stored, ids, self.config.score)
        except StoreError:
            self.store.close()
            raise

    def _aggregator(self) -> Callable | None:
        name, arguments = self.config.aggregator, self.config.aggregator_arguments()
        return partial(factory, name, arguments, self.algorithm) if name in OF_TFF else None

    @property
    def privacy(self) -> Privacy | None:
        """The (epsilon, delta) of the rounds so far; None before round 1 and without a private aggregator or noise."""
        return privacy_of(self)

    @classmethod
    def create(
        cls,
        config: RunConfig,
        folder: str | os.PathLike,
        federation: Federation | None = None,
        *,
        allow_download: bool = False,
    ) -> "Run":
        """Creates a run folder and writes config.json; `train` then runs the rounds.

        Args:
            config: the configuration of the run.
            folder: the run folder; it must not exist, or be empty.
            federation: the data; default: `open_federation(config)`.
            allow_download: whether the data set may be downloaded. Default: no.

        Raises:
            RunError: the folder is not empty, or another process creates or trains a run in it.
            InvalidArgument: the configuration does not fit the data or the method, or the network's file might run code
                that `tfpfl.runs.allow_code` did not allow; then nothing is written.
            Unavailable: the engine, or a private aggregator, needs a package that is not installed.
        """
        folder = Path(folder)
        with new_folder(folder) as lock:
            check_needs(config)
            federation = open_federation(config, allow_download=allow_download) if federation is None else federation
            run = cls.planned(config, folder, federation)
            warn_of_small_rounds(config, run.population)
            warn_of_model(run.config, run.whole, federation, run.population)
            if run.recipe.network is not None and run.config.network_file is not None:
                (folder / run.config.network_file).write_bytes(run.recipe.network[1])  # what was checked
            own_methods.keep(run.config, folder)
            write_whole(folder / "config.json", json.dumps(entries(run.config), indent=2) + "\n")
            run.store = RunStore(folder / STATE, run.config.run_id, lock=lock, named=run.config.score)
        return run

    @classmethod
    def planned(cls, config: RunConfig, folder: Path, federation: Federation) -> "Run":
        """Builds all of a new run but its folder, so that what `create` would refuse is refused; nothing is written.

        Args:
            config: the configuration, after `check_needs`.
            folder: where the run folder would be.
            federation: the data.

        Raises:
            InvalidArgument: it does not fit the data or the method, or its network's file might run forbidden code.
        """
        check_patience(config, federation)
        network_file, config = config.network_file, config.resolved(agreeing(config, federation))
        config = own_networks.described(config, network_file, federation)
        check_objective(config)
        run = cls(folder, config, federation, network_file, config.engine)
        check_fused(run.algorithm, federation, config.grouping)
        if config.schedule is not None:
            check_follows(run.recipe.method(run.model, run.population), config.schedule_of)
        if config.aggregator is not None:
            check_method(config.aggregator, run.recipe.method(run.model, run.population))
        return run

    @classmethod
    def open(cls, folder: str | os.PathLike, *, rounds: int | None = None, engine: str | None = None) -> "Run":
        """Opens an existing run, to continue it with `train` or to evaluate it with `evaluate`.

        Args:
            folder: the run folder.
            rounds: a new total number of rounds, saved in config.json; see `Training.run`. Default: no change.
            engine: 'local', 'tff' or 'ray' instead of that of the configuration, for evaluating and not for continuing.

        Raises:
            RunError: this is not a run folder, a file of it is missing or was changed, it is from a newer version,
                another process is writing it, or it has more than `rounds` rounds already.
            InvalidArgument: a run cannot have so many rounds; or network.keras might run code that
                `tfpfl.runs.allow_code` did not allow. (For the user's own method this is a RunError.)
            StoreError: state.sqlite is damaged.
            Unavailable: the engine needs a package that is not installed.
        """
        check_type("the run folder", folder, (str, os.PathLike), "a path")
        folder = Path(folder)
        read_config(folder)  # before the lock, because a folder that holds no run gets no lock file
        with locked_folder(folder) as lock:
            config = read_config(folder)
            state = folder / STATE
            check_state_is_here(folder)
            check_engine(engine or config.engine)
            network_file = folder / config.network_file.name if config.network_hash and config.network_file else None
            config = own_methods.load(config, folder)
            rounds = config.rounds if rounds is None else replace(config, rounds=rounds).rounds  # checked
            run = cls(folder, config, open_federation(config), network_file, engine or config.engine)
            try:
                run.store = RunStore(state, config.run_id, lock=lock, named=config.score)
                run._check_store()
            except OtherRun as error:
                raise RunError(
                    f"config.json and {STATE} in {folder} are not of one run: one of them was changed or replaced. "
                    "To run with other settings, start a run in a new folder"
                ) from error
            if rounds != config.rounds:
                if rounds < (done := run.store.round_num):
                    run.close()
                    raise RunError(f"{folder} has {done} rounds already, which is more than {rounds}")
                say_if_at_0(config.schedule, rounds)
                config.rounds = rounds
                write_whole(folder / "config.json", json.dumps(entries(config), indent=2) + "\n")
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
        """Opens the run in `folder` if there is one, otherwise creates it.

        An existing run keeps its configuration, except for its number of rounds, which is raised to `config.rounds` if
        larger. A warning names what is asked for and not so. See also `create` and `open`.
        """
        if (Path(folder) / "config.json").exists():
            return cls.open(folder, rounds=max(config.rounds, kept_config(folder, config, federation).rounds))
        return cls.create(config, folder, federation, allow_download=allow_download)

    @property
    def changed_versions(self) -> dict:
        """Packages whose version has changed since the run was created: {name: (then, now)}.

        If there are any, further rounds may differ in the last bits from those of an uninterrupted run.
        """
        then, now = self.config.versions, package_versions()
        return {name: (then[name], now[name]) for name in now if name in then and then[name] != now[name]}

    def train(self, callbacks: Sequence[Callback] = ()) -> "Run":
        """Trains until all rounds are done, then evaluates and writes tables and summary. Returns this run.

        Args:
            callbacks: see `tfpfl.runs.callbacks`. TensorBoard events are always written.

        Raises:
            DivergedError: a client's work or the server's state is not finite. All earlier rounds are saved, and the
                tables and the summary are written.
            MachinesError: the TFF workers or the Ray cluster are lost. All earlier rounds are saved.
            StoreError: a round could not be saved. All earlier rounds are saved.
            InvalidArgument: a callback is none.
        """
        callbacks = as_list(callbacks)
        check_callbacks(callbacks, BY_RUN)
        check_heads_are_here(self.folder, self.federation)
        own_methods.load_metrics(self.config, self.folder)
        callbacks = [*callbacks, TensorBoard(self.folder / "tensorboard")]
        if self.config.patience is not None and self.federation.num_examples("validation").any():  # not of old runs
            callbacks.append(EarlyStopping(self.config.patience, self.config.monitor))
        with ExitStack() as begun:
            for callback in callbacks:
                callback.begin(self)
                begun.callback(callback.finish, self)
            return self._train(self.training(callbacks))

    def _train(self, training: Training) -> "Run":
        try:
            training.run(self.config.rounds)
        except DivergedError as error:
            self.stop_reason = str(error)
            self._evaluate(training)
            raise
        except BaseException:
            with suppress(OSError):  # a full disk: the error that is being raised says more
                write_history(self.folder / "history.csv", self.store.history(), self.federation)
            raise
        self.stop_reason = training.stop_reason
        self._evaluate(training)  # with this training, because its graphs are traced already
        for message in warnings_of(self.config, self.store.history(), self.took_part):
            warn_user(message)
        return self

    def training(self, callbacks: Sequence[Callback] = ()) -> Training:
        """Makes the round loop of this run, with its engine, store and availability, and callbacks as for `train`."""
        return Training(
            algorithm=self.algorithm,
            federation=self.examples,
            seed=self.config.seed,
            store=self.store,
            engine=self.engine,
            grouping=self.config.grouping,
            machines=self.machines,
            availability=self.availability,
            passes=sum(self.passes) if self.availability.seconds else 1.0,
            quorum=partial(quorum, threshold=self.config.secure_threshold) if self.config.secure else None,
            aggregator=self._aggregator(),
            recipe=self.recipe,
            model_name=self.recipe.model_name,
            evaluate_every=self.config.evaluate_every,
            callbacks=callbacks,
            metrics=known_metrics(self.config.metrics, self.model.kind.label),
        )

    def evaluate(self) -> list[protocols.Score]:
        """Scores every client's current personal model on train, validation and test; writes tables and summary.

        Returns:
            One `Score` for every client, model and split.
        """
        check_heads_are_here(self.folder, self.federation)
        own_methods.load_metrics(self.config, self.folder)
        return self._evaluate(self.training())

    def _evaluate(self, training: Training) -> list[protocols.Score]:
        scores = training.evaluate(training.server_state(), splits=("train", "validation", "test"))
        write_history(self.folder / "history.csv", self.store.history(), self.federation)
        named = self.config.score
        write_clients(self.folder / "clients.csv", self.federation, self.population, scores, self.took_part, named)
        self.write_summary()
        return scores

    def results(self) -> list[protocols.Result]:
        """All results of the run, each with its protocol: which model, clients, mean, rounds and split."""
        return protocols.results(self.store.evaluations(), self.took_part, self.config.score)

    @property
    def took_part(self) -> dict[int, int] | None:
        """{client id: the first round in which the server used its work}; None if it cannot be known."""
        saved = self.store.history(), self.store.evaluations()
        return participation.took_part(self.config, *saved, self.work_of_clients)

    @property
    def work_of_clients(self) -> np.ndarray | None:
        """Every training client's examples times passes, float [I], for the virtual clock; None without it."""
        return self.population.num_examples * sum(self.passes) if self.availability.seconds else None

    @property
    def seen_counts(self) -> tuple[int, int] | None:
        """(number of clients that had taken part by the last round, number of the others); None if unknown."""
        return participation.counts(self.took_part, self.population.num_clients, self.store.round_num)

    def matrices(self, round_num: int | None = None) -> dict[str, np.ndarray]:
        """The matrices that say which client uses which: FedAMP's attention, PGFed's A, FedFomo's P.

        Args:
            round_num: an evaluated round; None: the last one. `run.store.matrix_rounds()` lists all.

        Returns:
            {name: [I, I]}, rows and columns in the order of `run.population.client_ids`; {} if the algorithm has no
            matrices, or no round has been evaluated yet.

        Raises:
            InvalidArgument: the run has matrices, but not of this round.
        """
        return matrices_after(self.store, self.store.matrix_rounds(), round_num)

    def client_model(self, client: int | str, *, inputs: str = "raw", outputs: str = "probabilities") -> ClientModel:
        """One client's model as `keras_model` makes it, with the client's class names and what else a user must know.

        Returns:
            A `ClientModel`: `model`, and `about`, a dict of JSON's types. Its method `save` writes both.
        """
        return ClientModels(self).keras_model(client, inputs=inputs, outputs=outputs)

    def keras_model(self, client: int | str, *, inputs: str = "raw", outputs: str = "probabilities") -> keras.Model:
        """The model with which a client predicts after the last round, as a Keras model that needs nothing of tfpfl.

        It gives what `evaluate` scores: the same logits up to rounding. A client that no round has drawn yet gets the
        model that the method gives to such a client; a client outside of the population (`new_clients` of the
        configuration) the one with which it would begin to adapt. `client_model` gives the names of the classes too.

        Args:
            client: the client's id, an integer from 0, or its name.
            inputs: 'raw': the model takes examples as the federation stores them, such as pixels from 0 to 255, and
                begins with a layer Rescaling that decodes them; 'decoded': it takes what `Federation.arrays` gives.
            outputs: 'probabilities' (after softmax; of other kinds the predictions) or 'logits'.

        Returns:
            A new `keras.Model` from [N, ...] to [N, K]. Changing its weights does not change the run.

        Raises:
            InvalidArgument: the run has no rounds yet; there is no such client, or two that could be meant; it is
                outside of the population and the method has models only for clients that took part; `inputs` or
                `outputs` is another word.
        """
        return self.client_model(client, inputs=inputs, outputs=outputs).model

    @property
    def passes(self) -> Passes:
        """How often an example goes through the backbone in a visit, counted in the smallest client's first visit."""
        return self.work.passes

    @cached_property
    def work(self) -> Work:
        """The passes and the steps on the head alone of a visit, counted in the smallest client's first visit."""
        return first_visit(self, int(np.argmin(self.population.num_examples)))

    @cached_property
    def flops(self) -> float | None:
        """Operations of a visit, for mean N_i and K_i; None if they cannot be counted, or only devices know N_i."""
        examples, classes = (float(np.mean(n)) for n in (self.population.num_examples, self.population.num_classes))
        given, work = self.config.hyperparameters, self.work
        if given.get("batch_size") and not given.get("epochs"):  # the steps do not follow N_i: those of a usual client
            place = int(np.argmin(np.abs(self.population.num_examples - examples)))
            examples, work = float(self.population.num_examples[place]), first_visit(self, place)
        with suppress(Unavailable):
            return None if is_places(self.federation) else visit_flops(work, self.model, examples, classes)
        return None

    def write_summary(self) -> dict:
        """Writes summary.json and returns its content. `stopped` keeps the reason why these rounds stopped earlier."""
        done, private = self.store.round_num, self.privacy
        self.stop_reason = self.stop_reason or summary_after(self.folder, done).get("stopped")
        history, evaluations, first = self.store.history(), self.store.evaluations(), self.took_part
        seen, never_seen = participation.counts(first, self.population.num_clients, done) or (None, None)
        summary = {
            "algorithm": self.config.algorithm,
            "dataset": self.config.dataset,
            "engine": self.config.engine,
            "rounds": done,
            **totals(history),
            "clients_seen": seen,
            "clients_never_seen": never_seen,
            "passes": self.passes._asdict(),
            "head_steps": self.work.head_steps,
            "flops": self.flops,
            "stopped": self.stop_reason,
            "privacy": private and json_row(private._asdict()),
            "federation_hash": self.federation.hash,
            "run_id": self.config.run_id,
            "results": [json_row(r.entries()) for r in protocols.results(evaluations, first, self.config.score)],
        }
        write_whole(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary

    @property
    def is_complete(self) -> bool:
        """Whether all rounds are done and the run was evaluated after them, so that `train` has nothing to do."""
        return self.store.round_num >= self.config.rounds and bool(summary_after(self.folder, self.store.round_num))

    def close(self) -> None:
        """Closes state.sqlite, so that other processes can open the run."""
        self.store.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
