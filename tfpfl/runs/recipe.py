"""Builds a run's model, population and algorithm from its configuration and a federation."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tfpfl.algorithms import build_algorithm, get_method
from tfpfl.algorithms.contract import Algorithm
from tfpfl.algorithms.transforms.screening import screened
from tfpfl.data import Federation
from tfpfl.data.population import Population
from tfpfl.models import SplitModel, build_network
from tfpfl.models.network_file import load_network
from tfpfl.runs.aggregators import with_aggregator
from tfpfl.runs.config import RunConfig, RunError


@dataclass(frozen=True, eq=False)
class Recipe:
    """A function (federation) -> the run's algorithm that can be sent to another process; an algorithm cannot.

    Args:
        config: a configuration with all defaults filled in; see `RunConfig.resolved`.
        network: the path and the content of network.keras, if the backbone is the user's own; default: None.
        run_code: whether this file may run code of its own; see `tfpfl.runs.consent`.
        arrival: float [I], the probability that a sampled client's work reaches the server. None: 1 for all clients.
    """

    config: RunConfig
    network: tuple[Path, bytes] | None = None
    run_code: bool = False
    arrival: np.ndarray | None = None

    def __call__(self, federation: Federation) -> Algorithm:
        return self.algorithm(*self.model_and_population(federation))

    def model_and_population(self, federation: Federation) -> tuple[SplitModel, Population]:
        """Builds the model and the population of training clients for which the algorithm is built.

        Raises:
            InvalidArgument: the network's file is not a Keras model, or might run code that was not allowed; or no
                client is left to train.
        """
        config = self.config
        slots = get_method(config.algorithm).head == "shared"  # one head for clients with different local labels
        clients = config.training_clients(federation)
        population = federation.population(config.sampling_plan(), config.labels, slots, clients)
        if self.arrival is not None:
            population = replace(population, arrival=self.arrival)
        if self.network is None:
            backbone = build_network(config.network, federation.example_shape, seed=config.seed)
        else:
            backbone = load_network(*self.network, run_code=self.run_code)
        return SplitModel(backbone, seed=config.seed, head_init=config.head_init), population

    def method(self, model: SplitModel, population: Population) -> Algorithm:
        """Builds the algorithm as its method has it, without the wrappers of `algorithm`."""
        return build_algorithm(self.config.algorithm, model, population, **self.config.hyperparameters)

    def algorithm(self, model: SplitModel, population: Population) -> Algorithm:
        """Builds the algorithm, and wraps it as the configuration says.

        Wrappers are the aggregators that work without TFF (see `with_aggregator`), and the rejection of broken updates.
        """
        config = self.config
        made = with_aggregator(config.aggregator, config.aggregator_arguments(), self.method(model, population))
        if config.on_broken == "reject":
            return screened(made, max_norm=config.max_norm, clip_norm=config.clip_norm)
        return made


def read_network(path: Path, expected: str) -> bytes:
    """Reads the bytes of network.keras in a run folder.

    Args:
        path: the file.
        expected: its sha256 in config.json.

    Raises:
        RunError: the file is missing, or its sha256 differs.
    """
    if not path.exists():
        raise RunError(f"{path} is missing: without it the run's backbone is unknown. Put the file back")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != expected:
        raise RunError(f"{path} was changed: its sha256 is not the one in config.json. Put the original file back")
    return content
