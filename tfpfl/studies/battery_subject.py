"""What the checks of battery.py train and compare with: a small federation, a small backbone and some rounds."""

from functools import cached_property

import keras
import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData
from tfpfl.algorithms.exchanges import before_work, first_of, message_for
from tfpfl.data import Federation
from tfpfl.data.cohorts import cohort
from tfpfl.data.kinds import CLASSIFICATION, label_kind
from tfpfl.data.population import Population, Sampling
from tfpfl.data.randomness import client_key
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.scoring import Scorer
from tfpfl.engines.visit import Visit
from tfpfl.runs.store import RunStore

EXAMPLES = (9, 14, 6, 12, 8, 11, 10)
CLASSES = (2, 3, 2, 4, 3, 8, 2)  # 8 is no width of the backbone: a tensor with an axis of 8 is a head
EVERYONE = list(range(len(EXAMPLES)))
WIDEST = CLASSES.index(max(CLASSES))
ROUNDS = 10
SCORED = ("train", "test")


class Broken(AssertionError):
    """The algorithm breaks a promise of the contract. The message says which, and what was found."""


def backbone(dtype="float64", shape=(4,), width=5, seed=0, batch_norm=False):
    """A smooth network with one hidden layer, drawn from a seed; `batch_norm`: with BatchNormalization after it."""
    hidden = keras.layers.Dense(6, activation="tanh", dtype=dtype)
    last = keras.layers.Dense(width, activation="tanh", dtype=dtype)
    between = [keras.layers.BatchNormalization(momentum=0.6, dtype=dtype)] if batch_norm else []
    model = keras.Sequential([keras.Input(shape, dtype=dtype), hidden, *between, last])
    rng = np.random.default_rng(seed)
    for variable in (*hidden.weights, *last.weights):
        variable.assign(0.7 * rng.standard_normal(variable.shape))
    return model


def clouds(examples, classes, shape=(4,), dtype="float64", seed=1) -> list:
    """[(x, y)], one pair for each client: a Gaussian cloud for each class, and examples of every class."""
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((max(classes), *shape))
    data = []
    for n, k in zip(examples, classes, strict=True):
        y = rng.permutation(np.arange(n) % k).astype(np.int32)
        data.append(((means[y] + 0.5 * rng.standard_normal((n, *shape))).astype(dtype), y))
    return data


def cloud_targets(examples, outputs: int, kind: str, dtype="float64", seed=1) -> list:
    """[(x, y)], one pair for each client: Gaussian examples, and targets [n, outputs] of a kind of heads.

    The targets of a client depend on x through a hidden layer that all clients share and a linear head of its own.
    """
    rng = np.random.default_rng(seed)
    hidden, common = rng.standard_normal((4, 5)), rng.standard_normal((5, outputs))
    data = []
    for n in examples:
        x = rng.standard_normal((n, 4))
        z = np.tanh(0.5 * x @ hidden) @ (common + 0.5 * rng.standard_normal(common.shape))
        noise = rng.random(z.shape)
        name = label_kind(kind).name
        if name == "multilabel":
            y = (z > 0.2 * (noise - 0.5)).astype(dtype)
        elif name == "poisson":
            y = np.floor(2 * np.exp(0.4 * z) * noise + 0.5)
        else:
            y = z + 0.4 * (noise - 0.5)
        data.append((x.astype(dtype), y.astype(dtype)))
    return data


def small_federation(folder, examples=EXAMPLES, classes=CLASSES, seed=1, kind="classification") -> Federation:
    """Writes `clouds` in float32 as a federation into `folder`, with two test examples for each class of a client.

    For heads of another kind, it writes `cloud_targets` with `max(classes)` outputs for every client.
    """
    if (label := label_kind(kind)) != CLASSIFICATION:
        sets = [
            cloud_targets(n, max(classes), kind, dtype="float32", seed=seed)
            for n in (examples, [2 * k for k in classes])
        ]
        parts = [{"train": a, "test": b} for a, b in zip(*sets, strict=True)]
        return Federation.from_clients(parts, out=folder, validation=0.0, targets=label.sorts[0])
    train = clouds(examples, classes, dtype="float32", seed=seed)
    test = clouds([2 * k for k in classes], classes, dtype="float32", seed=seed)
    parts = [{"train": a, "test": b} for a, b in zip(train, test, strict=True)]
    return Federation.from_clients(parts, out=folder, validation=0.0)


def small_population(federation: Federation) -> Population:
    """The population of all clients, half of them a round. A shared head has as many outputs as the widest client."""
    return federation.population(Sampling("fixed", 0.5), shared_slots=True)


def visits_by_id(population: Population, ids, round_num: int, seed: int = 0, dtype="float32") -> list:
    """The visits of the clients `ids` in a round; the engine reads the examples by client id. `dtype`: the model's."""
    keys = client_key(seed, round_num, ids)
    return [Visit(population.info(i, dtype), key) for i, key in zip(ids, keys, strict=True)]


def initial_states(algorithm: Algorithm, population: Population) -> dict:
    """Every client's state before its first visit, by client id."""
    return {int(i): algorithm.init_client(population.info(i, algorithm.model.dtype)) for i in population.client_ids}


def distance(a, b) -> float:
    """The largest |a - b| over all numbers of two structures.

    Raises:
        Broken: two numbers at the same place have different shapes.
    """
    pairs = list(zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True))
    for x, y in pairs:
        require(np.shape(x) == np.shape(y), f"shapes differ: {np.shape(x)} and {np.shape(y)}")
    return max(
        [float(np.max(np.abs(np.asarray(x, float) - np.asarray(y, float)), initial=0)) for x, y in pairs] or [0.0]
    )


def identical(a, b) -> bool:
    """Whether all tensors of two structures have the same bits."""
    pairs = zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


class Trained:
    """A run of an engine that keeps all states in a store, as training does.

    Args:
        algorithm: the algorithm to train.
        engine: what computes a round, such as a `Simulation`.
        store: the `RunStore` to use, which may hold rounds already; default: a new one in memory.
    """

    def __init__(self, algorithm, engine, store=None):
        self.algorithm, self.engine = algorithm, engine
        self.population, self.store = algorithm.population, store or RunStore()
        self.initial = initial_states(algorithm, self.population)
        self.server = self.store.server_state(engine.initialize())
        self.outputs = []

    def states(self, ids):
        """The states of the clients `ids`; the initial state of a client that never took part."""
        return self.store.client_states(ids, self.initial.get)

    def rounds(self, last, cohorts=None):
        """Trains up to round `last`. `cohorts` maps a round to client ids; default: the population's sampling."""
        for t in range(self.store.round_num + 1, last + 1):
            ids = [int(i) for i in (cohorts(t) if cohorts else cohort(0, t, self.population))]
            visits = visits_by_id(self.population, ids, t, dtype=self.algorithm.model.dtype)
            output = self.engine.next(self.server, self.states(ids), visits)
            self.server = output.server
            self.store.commit_round(t, output.server, dict(zip(ids, output.client_states, strict=True)), {})
            self.outputs.append(output)
        return self


class Subject:
    """The algorithm that is checked, with the training that several checks use.

    Args:
        algorithm: built for `small_population(federation)`.
        federation: a `small_federation`.

    `rounding` is the difference that is allowed where sums are taken in another order, after `ROUNDS` rounds.
    """

    def __init__(self, algorithm: Algorithm, federation: Federation):
        self.algorithm, self.federation = algorithm, federation
        self.rounding = 1e-5 if algorithm.model.dtype == "float32" else 1e-10

    @cached_property
    def engine(self) -> Simulation:
        """The algorithm in the local engine, which also scores test examples."""
        return Simulation(self.algorithm, self.federation, held_out=["test"])

    @cached_property
    def scorer(self) -> Scorer:
        """The evaluation of personal models, and of the global one if there is one, on train and test examples."""
        return Scorer(self.algorithm, self.federation, SCORED)

    @cached_property
    def trained(self) -> Trained:
        """The algorithm trained for `ROUNDS` rounds. Checks must not change it."""
        return Trained(self.algorithm, self.engine).rounds(ROUNDS)

    def head_width(self, client: int) -> int:
        """Number of outputs of the model that a client has after its local work."""
        message, _, _, output = self.visit(client)
        return int(self.algorithm.local_model(message, output).head.bias.shape[0])

    def visits(self, ids, round_num: int) -> list:
        """The visits of the clients `ids` in a round."""
        return visits_by_id(self.algorithm.population, ids, round_num, dtype=self.algorithm.model.dtype)

    def visit(self, client: int):
        """(message, state, data, output) of one more visit of a client; of a round's second exchange if it has two."""
        algorithm, trained = self.algorithm, self.trained
        x, y = self.federation.reader("train")(client)
        [visit], [state] = self.visits([client], 11), trained.states([client])
        data = ClientData(x, y, visit.info, tf.constant(visit.key))
        server = tf.nest.map_structure(tf.convert_to_tensor, trained.server)
        message, given = before_work(algorithm, server, tf.nest.map_structure(tf.constant, state), data)
        return message, state, data, algorithm.client_update(message, given, data)

    def first_visit(self, client: int):
        """(message, state, data, output) of one more visit of a client in the first of two exchanges."""
        _, state, data, _ = self.visit(client)
        first = self.algorithm.first
        assert first is not None
        message = message_for(first_of(self.algorithm), self.trained.server, data.info)
        return message, state, data, first.client_update(message, tf.nest.map_structure(tf.constant, state), data)


def require(holds, why: str) -> None:
    """Raises `Broken` with the message `why` unless `holds` is true."""
    if not holds:
        raise Broken(why)


def kinds(structure) -> list:
    """(dtype, shape) of every leaf."""
    return [(np.asarray(x).dtype.name, np.shape(x)) for x in tf.nest.flatten(structure)]


def keep(now, before, clients) -> None:
    """Requires that the states of these clients have the bits that they had before."""
    changed = [i for i in clients if not identical(now[i], before[i])]
    require(not changed, f"clients {changed} were absent, and their states changed")
