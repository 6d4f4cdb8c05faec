"""What the battery checks an algorithm on: a small federation, a small backbone, and some rounds of training."""

from functools import cached_property

import keras
import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData
from tfpfl.data import Federation
from tfpfl.data.cohorts import cohort
from tfpfl.data.population import Population, Sampling
from tfpfl.data.randomness import client_key
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.visit import Visit
from tfpfl.runs.store import RunStore

EXAMPLES = (9, 14, 6, 12, 8, 11, 10)
CLASSES = (2, 3, 2, 4, 3, 8, 2)  # 8 is no width of the backbone: a tensor with an axis of 8 is a head
EVERYONE = list(range(len(EXAMPLES)))
WIDEST = CLASSES.index(max(CLASSES))
ROUNDS = 10


class Broken(AssertionError):
    """An algorithm does not keep what the contract promises; the message says what was found."""


def backbone(dtype="float64", shape=(4,), width=5, seed=0):
    """A smooth network with one hidden layer, drawn from a seed."""
    model = keras.Sequential(
        [
            keras.Input(shape, dtype=dtype),
            keras.layers.Dense(6, activation="tanh", dtype=dtype),
            keras.layers.Dense(width, activation="tanh", dtype=dtype),
        ]
    )
    rng = np.random.default_rng(seed)
    model.set_weights([0.7 * rng.standard_normal(w.shape) for w in model.get_weights()])
    return model


def clouds(examples, classes, shape=(4,), dtype="float64", seed=1) -> list:
    """(x, y) for every client: Gaussian clouds, and every class of a client present."""
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((max(classes), *shape))
    data = []
    for n, k in zip(examples, classes, strict=True):
        y = rng.permutation(np.arange(n) % k).astype(np.int32)
        data.append(((means[y] + 0.5 * rng.standard_normal((n, *shape))).astype(dtype), y))
    return data


def small_federation(folder, examples=EXAMPLES, classes=CLASSES, seed=1) -> Federation:
    """`clouds` in float32 as a folder that both engines read by id; with two test examples a class."""
    train = clouds(examples, classes, dtype="float32", seed=seed)
    test = clouds([2 * k for k in classes], classes, dtype="float32", seed=seed)
    parts = [{"train": a, "test": b} for a, b in zip(train, test, strict=True)]
    return Federation.from_clients(parts, out=folder, validation=0.0)


def small_population(federation: Federation) -> Population:
    """Everyone, three of seven a round; heads that clients share are as wide as the widest."""
    return federation.population(Sampling("fixed", 0.5), shared_slots=True)


def visits_by_id(population: Population, ids, round_num: int, seed: int = 0) -> list:
    """Visits whose examples the worker reads."""
    keys = client_key(seed, round_num, ids)
    return [Visit(population.info(i), key) for i, key in zip(ids, keys, strict=True)]


def initial_states(algorithm: Algorithm, population: Population) -> dict:
    """Every client's state before its first visit, by client id."""
    return {int(i): algorithm.init_client(population.info(i, algorithm.model.dtype)) for i in population.client_ids}


def distance(a, b) -> float:
    """The largest |a - b| over all numbers of two structures.

    Raises:
        Broken: they have other shapes.
    """
    pairs = list(zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True))
    for x, y in pairs:
        require(np.shape(x) == np.shape(y), f"shapes differ: {np.shape(x)} and {np.shape(y)}")
    return max(
        [float(np.max(np.abs(np.asarray(x, float) - np.asarray(y, float)), initial=0)) for x, y in pairs] or [0.0]
    )


def identical(a, b) -> bool:
    """Bit for bit."""
    pairs = zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


class Trained:
    """A run of some engine, kept in a store; client states live in it and nowhere else, as in training."""

    def __init__(self, algorithm, engine, store=None, seed=0):
        self.algorithm, self.engine, self.seed = algorithm, engine, seed
        self.population, self.store = algorithm.population, store or RunStore()
        self.initial = initial_states(algorithm, self.population)
        self.server = self.store.server_state(engine.initialize())
        self.outputs = []

    def states(self, ids):
        """Of these clients; the initial ones where they never took part."""
        return self.store.client_states(ids, self.initial.get)

    def rounds(self, last, cohorts=None):
        """Runs up to round `last`; `cohorts` is a function of the round, default the population's sampling."""
        for t in range(self.store.round_num + 1, last + 1):
            ids = [int(i) for i in (cohorts(t) if cohorts else cohort(self.seed, t, self.population))]
            output = self.engine.next(self.server, self.states(ids), visits_by_id(self.population, ids, t, self.seed))
            self.server = output.server
            self.store.commit_round(t, output.server, dict(zip(ids, output.client_states, strict=True)), {})
            self.outputs.append(output)
        return self


class Subject:
    """An algorithm that is checked, with what its checks share.

    Args:
        algorithm: built for `small_population(federation)`.
        federation: a `small_federation`.
    """

    def __init__(self, algorithm: Algorithm, federation: Federation):
        self.algorithm, self.federation = algorithm, federation

    @cached_property
    def engine(self) -> Simulation:
        """The local engine."""
        return Simulation(self.algorithm, self.federation, held_out=["test"])

    @cached_property
    def trained(self) -> Trained:
        """After `ROUNDS` rounds; checks leave it as it is."""
        return Trained(self.algorithm, self.engine).rounds(ROUNDS)

    def head_width(self, client: int) -> int:
        """How many outputs the model has that a client holds after its work."""
        message, _, _, output = self.visit(client)
        return int(self.algorithm.local_model(message, output).head.bias.shape[0])

    def visit(self, client: int):
        """(message, state, data, output) of one more visit of a client."""
        algorithm, trained = self.algorithm, self.trained
        x, y = self.federation.reader("train")(client)
        [visit], [state] = visits_by_id(algorithm.population, [client], 11), trained.states([client])
        message = algorithm.message(trained.server, *([tf.constant(client)] if algorithm.message_per_client else []))
        data = ClientData(x, y, visit.info, tf.constant(visit.key))
        return message, state, data, algorithm.client_update(message, tf.nest.map_structure(tf.constant, state), data)


def require(holds, why: str) -> None:
    if not holds:
        raise Broken(why)
