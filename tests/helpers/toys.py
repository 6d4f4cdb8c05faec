"""Small federations in memory or on disk, and the objective written out from its definition, to compare with."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import ClientData
from tfpfl.data import Federation
from tfpfl.data.population import Population, Sampling
from tfpfl.data.randomness import client_key
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import SplitModel
from tfpfl.models.weights import Head
from tfpfl.studies.battery_subject import (  # noqa: F401 - the tests' own names for what the battery has
    backbone,
    cloud_targets,
    clouds,
    distance,
    identical,
    initial_states,
    small_federation,
    visits_by_id,
)

EXAMPLES = (6, 9, 4, 7, 5)
CLASSES = (2, 3, 2, 4, 3)


class Toy(NamedTuple):
    """A model, a population, and its clients' examples in memory."""

    model: SplitModel
    population: Population
    data: list  # (x, y) of every client

    def visit(self, client_id: int, round_num: int = 1, seed: int = 0) -> ClientData:
        """A client's visit that carries its examples; for `Simulation(algorithm)` without a federation."""
        x, y = self.data[client_id]
        info = self.population.info(client_id, self.model.dtype)
        return ClientData(tf.constant(x), tf.constant(y), info, client_key(seed, round_num, [client_id])[0])

    @property
    def ids(self) -> list:
        """The ids of all clients."""
        return [int(i) for i in self.population.client_ids]


def clients(examples=EXAMPLES, classes=CLASSES, shape=(4,), dtype="float64", seed=1) -> list:
    """(x, y) for every client, see `clouds`."""
    return clouds(examples, classes, shape, dtype, seed)


def toy(examples=EXAMPLES, classes=CLASSES, dtype="float64", sampling=None, seed=1, **model_args) -> Toy:
    """A federation in memory; the default has five clients of different N_i and K_i."""
    population = Population(examples, classes, max(classes), sampling=sampling or Sampling())
    return Toy(
        SplitModel(backbone(dtype), **model_args), population, clients(examples, classes, dtype=dtype, seed=seed)
    )


KINDS = ("multilabel", "regression", "poisson", "quantile:0.3", "huber:0.2")  # besides classes


def toy_of(kind, outputs=2, examples=EXAMPLES, sampling=None, **model_args) -> Toy:
    """`toy` with heads of a kind, and the same number of outputs for every client; float64."""
    if kind == "classification":
        return toy(examples, kind=kind, sampling=sampling, **model_args)
    population = Population(examples, [outputs] * len(examples), sampling=sampling or Sampling())
    return Toy(SplitModel(backbone(), kind=kind, **model_args), population, cloud_targets(examples, outputs, kind))


def on_disk(folder, examples=EXAMPLES, classes=CLASSES, seed=1) -> Federation:
    """The same data, float32, as a folder; see `small_federation`."""
    return small_federation(folder, examples, classes, seed)


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


def arrays_of_states(algorithm) -> dict:
    """Every client's state before its first visit, by client id, as NumPy arrays."""
    return tf.nest.map_structure(np.asarray, initial_states(algorithm, algorithm.population))


def visits(algorithm, ids, round_num: int) -> list:
    """The visits of `visits_by_id`, in the model's dtype."""
    return visits_by_id(algorithm.population, ids, round_num, dtype=algorithm.model.dtype)


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
    """The gradient of a scalar function with respect to all of its arguments."""
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        value = function(*arguments)
    return tape.gradient(value, arguments)
