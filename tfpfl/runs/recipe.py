"""From a configuration and a federation to the run's algorithm."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tfpfl.algorithms import build_algorithm, get_method
from tfpfl.algorithms.contract import Algorithm
from tfpfl.algorithms.transforms.screening import screened
from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation
from tfpfl.data.population import Population
from tfpfl.models import SplitModel, build_network
from tfpfl.runs.aggregators import with_aggregator
from tfpfl.runs.config import NETWORK, RunConfig, RunError, file_hash


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
        slots = get_method(config.algorithm).head == "shared"  # with local labels only where they were asked for
        clients = config.training_clients(federation)
        population = federation.population(config.sampling_plan(), config.labels, slots, clients)
        if self.arrival is not None:
            population = replace(population, arrival=self.arrival)
        if self.network is None:
            backbone = build_network(config.network, federation.example_shape, seed=config.seed)
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


def read_network(path: Path, expected: str) -> bytes:
    """The user's backbone, as its file has it."""
    if not path.exists():
        raise RunError(f"{path} is missing: the run's backbone is lost")
    if file_hash(path) != expected:
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
