"""Builds a run's model, population and algorithm from its configuration and a federation."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tfpfl.algorithms import Method, build_algorithm
from tfpfl.algorithms.contract import Algorithm
from tfpfl.algorithms.transforms.objective import with_objective
from tfpfl.algorithms.transforms.schedule import scheduled
from tfpfl.algorithms.transforms.screening import screened
from tfpfl.algorithms.transforms.secure import CLIP, secured, weights_of
from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation
from tfpfl.data.kinds import LabelKind
from tfpfl.data.population import Population
from tfpfl.models import SplitModel, build_network
from tfpfl.models.network_file import load_network
from tfpfl.runs.aggregators import with_aggregator
from tfpfl.runs.config import RunConfig
from tfpfl.runs.metrics import kind_of
from tfpfl.runs.own_methods import Code, again
from tfpfl.runs.own_networks import build as build_own


@dataclass(frozen=True, eq=False)
class Recipe:
    """A function (federation) -> the run's algorithm that can be sent to another process; an algorithm cannot.

    Of a federation of a trunk's features, the model is the part above the trunk.

    Args:
        config: a configuration with all defaults filled in; see `RunConfig.resolved`.
        network: the path and the content of the backbone's file, if it is the user's own; default: None.
        run_code: whether this file may run code of its own; see `tfpfl.runs.consent`.
        code: the code of the user's own method, already allowed; None: the method is one of tfpfl's.
        arrival: float [I], the probability that a sampled client's work reaches the server. None: 1 for all clients.
    """

    config: RunConfig
    network: tuple[Path, bytes] | None = None
    run_code: bool = False
    code: Code | None = None
    arrival: np.ndarray | None = None

    def __call__(self, federation: Federation) -> Algorithm:
        return self.algorithm(*self.model_and_population(federation))

    @property
    def row(self) -> Method:
        """The run's `Method`. In another process, the user's own is loaded from the code that was sent."""
        return self.config.method if self.code is None else again(self.code).method

    @property
    def model_name(self) -> str:
        """What the method predicts with: 'personal', 'global' or 'fine-tuned'."""
        name = self.row.evaluated(self.config.hyperparameters)
        own = self.config.batch_norm == "local" or self.config.personal is not None
        return "personal" if name == "global" and own else name

    def model_and_population(self, federation: Federation) -> tuple[SplitModel, Population]:
        """Builds the model and the population of training clients for which the algorithm is built.

        Raises:
            InvalidArgument: the network's file is not a Keras model, or might run code that was not allowed; or no
                client is left to train.
        """
        config = self.config
        slots = self.row.head == "shared"  # one head for clients with different local labels
        clients = config.training_clients(federation)
        population = federation.population(config.sampling_plan(), config.labels, slots, clients)
        if self.arrival is not None:
            population = replace(population, arrival=self.arrival)
        # With this entry, the examples are the features of the run's trunk.
        of_trunk = federation.manifest.get("trunk") if config.train_from else None
        shape = tuple(of_trunk["example_shape"]) if of_trunk else federation.example_shape
        model = self.model(shape, kind_of(federation, config.kind))
        return (model.above or model) if of_trunk else model, population

    def model(self, shape: Any, kind: str | LabelKind) -> SplitModel:
        """Builds the model, for examples of this shape and labels of this kind.

        Raises:
            InvalidArgument: as `model_and_population`.
        """
        config = self.config
        if self.network is None and str(config.network).endswith(".py"):
            raise InvalidArgument(f"--network {config.network} names no function: write {config.network}:FUNCTION")
        if self.network is None:
            backbone = build_network(config.network, shape, seed=config.seed, init=config.init or "keras")
        elif config.network_function:
            backbone = build_own(config, *self.network, shape, run_code=self.run_code)
        else:
            backbone = load_network(*self.network, run_code=self.run_code)
        given: dict[str, Any] = {"seed": config.seed, "head_init": config.head_init, "batch_norm": config.batch_norm}
        given |= {"train_from": config.train_from, "adapters": config.adapters, "personal": config.personal}
        model = SplitModel(backbone, kind=kind, **given)
        if self.row.batch_norm and model.batch_norm and config.batch_norm is None:
            model = model.with_batch_norm(self.row.batch_norm)
        return model if self.row.model is None else self.row.model(model)

    def method(self, model: SplitModel, population: Population, **other: Any) -> Algorithm:
        """Builds the method without the wrappers of `algorithm`; `other` hyperparameters replace those of the run."""
        return build_algorithm(self.row, model, population, **(self.config.hyperparameters | other))

    def algorithm(self, model: SplitModel, population: Population) -> Algorithm:
        """Builds the algorithm, and wraps it as the configuration says.

        Wrappers are the objective, the schedule of the learning rates, the aggregators that work without TFF (see
        `with_aggregator`), the rejection of broken updates, and secure aggregation.

        Raises:
            InvalidArgument: the method cannot be used under secure aggregation, see `secured`.
        """
        config = self.config
        made = with_objective(self.method(model, population), config.objective, sends=self.row.sends)
        if config.schedule is not None:
            made = scheduled(made, config.schedule, of=config.schedule_of)
        made = with_aggregator(config.aggregator, config.aggregator_arguments(), made)
        sends = made
        if config.on_broken == "reject":
            made = screened(made, max_norm=config.max_norm, clip_norm=config.clip_norm)
        if config.secure:
            weights = None if sends is made else weights_of(sends)  # with less work than from the screened ones
            made = secured(made, clip=config.secure_clip or CLIP, noise=config.secure_noise, weights=weights)
        return made
