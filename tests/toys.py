"""Small federations whose results are known, and the whole objective to compare with."""

from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpfl.algorithm import ClientData, Head, Population, Sampling
from tfpfl.data import Federation
from tfpfl.models import SplitModel
from tfpfl.sampling import client_key
from tfpfl.simulate import Simulation
from tfpfl.visit import Visit

EXAMPLES = (6, 9, 4, 7, 5)
CLASSES = (2, 3, 2, 4, 3)


class Toy(NamedTuple):
    """A model, a population, and its clients' examples in memory."""

    model: SplitModel
    population: Population
    data: list  # (x, y) of every client

    def visit(self, client_id: int, round_num: int = 1, seed: int = 0) -> ClientData:
        """One that carries the examples; for `Simulation(algorithm)`."""
        x, y = self.data[client_id]
        info = self.population.info(client_id, self.model.dtype)
        return ClientData(tf.constant(x), tf.constant(y), info, client_key(seed, round_num, [client_id])[0])

    @property
    def ids(self) -> list:
        return [int(i) for i in self.population.client_ids]


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


def clients(examples=EXAMPLES, classes=CLASSES, shape=(4,), dtype="float64", seed=1) -> list:
    """(x, y) for every client: Gaussian clouds, and every class of a client present."""
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((max(classes), *shape))
    data = []
    for n, k in zip(examples, classes, strict=True):
        y = rng.permutation(np.arange(n) % k).astype(np.int32)
        data.append(((means[y] + 0.5 * rng.standard_normal((n, *shape))).astype(dtype), y))
    return data


def toy(examples=EXAMPLES, classes=CLASSES, dtype="float64", sampling=None, seed=1, **model_args) -> Toy:
    """A federation in memory; the default has five clients of different N_i and K_i."""
    population = Population(examples, classes, max(classes), sampling=sampling or Sampling())
    return Toy(
        SplitModel(backbone(dtype), **model_args), population, clients(examples, classes, dtype=dtype, seed=seed)
    )


def on_disk(folder, examples=EXAMPLES, classes=CLASSES, seed=1) -> Federation:
    """The same data, float32, as a folder that both engines read by id; with two test examples a class."""
    train = clients(examples, classes, dtype="float32", seed=seed)
    test = clients([2 * k for k in classes], classes, dtype="float32", seed=seed)
    parts = [{"train": a, "test": b} for a, b in zip(train, test, strict=True)]
    return Federation.from_clients(parts, out=folder, validation=0.0)


def visits_by_id(population: Population, ids, round_num: int, seed: int = 0) -> list:
    """Visits whose examples the worker reads."""
    keys = client_key(seed, round_num, ids)
    return [Visit(population.info(i), key) for i, key in zip(ids, keys, strict=True)]


def run(engine, data: Toy, rounds: int = 1, cohort=None, server=None, states=None, seed: int = 0):
    """(server, states by client id) after some rounds in which `cohort`, default everyone, takes part.

    `engine` is an algorithm, or a `Simulation` of one, whose graphs are then used again.
    """
    engine = engine if isinstance(engine, Simulation) else Simulation(engine)
    server = engine.initialize() if server is None else server
    states = dict(states or initial_states(engine.algorithm, data.population))
    cohort = data.ids if cohort is None else list(cohort)
    for t in range(1, rounds + 1):
        output = engine.next(server, [states[i] for i in cohort], [data.visit(i, t, seed) for i in cohort])
        server, states = output.server, states | dict(zip(cohort, output.client_states, strict=True))
    return server, states


def initial_states(algorithm, population: Population) -> dict:
    return {int(i): algorithm.init_client(population.info(i, algorithm.model.dtype)) for i in population.client_ids}


def client_loss(data: Toy, client_id: int, theta, head: Head):
    """l_i, written out by the definition and for `backbone`."""
    x, y = data.data[client_id]
    w_1, b_1, w_2, b_2 = theta
    phi = tf.tanh(tf.tanh(x @ w_1 + b_1) @ w_2 + b_2)
    logits = tf.matmul(phi, head.kernel) + head.bias
    log_p = logits - tf.reduce_logsumexp(logits, 1, keepdims=True)
    return -tf.reduce_mean(tf.gather(log_p, y, batch_dims=1))


def objective(data: Toy, theta, heads: dict):
    """Equation (1): sum_i alpha_i l_i(W_i, theta)."""
    alpha = data.population.num_examples / data.population.num_examples.sum()
    return tf.add_n([alpha[i] * client_loss(data, i, theta, heads[i]) for i in data.ids])


def gradient(function, *arguments):
    """Of a scalar, with respect to all of its arguments."""
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        value = function(*arguments)
    return tape.gradient(value, arguments)


def distance(a, b) -> float:
    """The largest |a - b| over all numbers of two structures."""
    pairs = list(zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True))
    assert all(np.shape(x) == np.shape(y) for x, y in pairs)
    return max(
        [float(np.max(np.abs(np.asarray(x, float) - np.asarray(y, float)), initial=0)) for x, y in pairs] or [0.0]
    )


def identical(a, b) -> bool:
    """Bit for bit."""
    pairs = zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
