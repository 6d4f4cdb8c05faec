"""What PFLlib's code has computed, as numbers (tests/pfllib), and our rounds on the same examples and weights."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from helpers.toys import Toy
from tfpfl.algorithms.contract import Algorithm
from tfpfl.data.population import Population
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import SplitModel
from tfpfl.models.weights import Head, Weights

FOLDER = Path(__file__).resolve().parents[1] / "pfllib"
ROUNDING = 1e-10  # what is allowed; tests/pfllib/README.md has the largest differences seen
CASES = {"full": {}, "batches": {"batch_size": 4}}  # how a client goes through its examples


class Recorded:
    """One run of PFLlib: `case` is 'full', 'batches' or another one that the file of this method has."""

    def __init__(self, method: str, case: str) -> None:
        with np.load(FOLDER / f"{method}.npz") as file:
            self.arrays = {key.removeprefix(f"{case}/"): file[key] for key in file if key.startswith(f"{case}/")}

    def __getitem__(self, key: str) -> np.ndarray:
        return self.arrays[key]

    def layer(self, name: str, at=()) -> tuple:
        """The kernel [in, out] and the bias [out] of a layer, at a round and a client where the array has these."""
        return tuple(tf.constant(self[f"{name}.{part}"][at]) for part in ("weight", "bias"))

    def theta(self, where: str, at=()) -> tuple:
        """The backbone's weights in 'server/', 'client/' or 'trained/'."""
        return self.layer(f"{where}base.0", at)

    def head(self, where: str, at=()) -> Head:
        return Head(*self.layer(f"{where}head", at))

    def model(self, where: str, at=()) -> Weights:
        return Weights(self.theta(where, at), self.head(where, at))


class Examples(NamedTuple):
    """The federation of all recorded runs."""

    toy: Toy
    test: list  # (x, y) of every client
    cohorts: list  # a tuple of client ids for each round
    start: Weights  # the model that the server and all clients start from

    def features(self, weights: Weights, client_id: int) -> np.ndarray:
        """The features of a client's test examples: [N, M]."""
        kernel, bias = weights.theta
        return np.maximum(self.test[client_id][0] @ kernel + bias, 0)

    def logits(self, weights: Weights, client_id: int) -> np.ndarray:
        """What the weights say about a client's test examples: [N, C]."""
        return self.features(weights, client_id) @ weights.head.kernel + weights.head.bias


def examples() -> Examples:
    """Five clients with examples of 2 to 4 of the 5 classes; class c is output c everywhere; a hidden ReLU layer."""
    with np.load(FOLDER / "data.npz") as file:
        train, test = ([(file[f"x{t}{i}"], file[f"y{t}{i}"].astype(np.int32)) for i in range(5)] for t in ("", "t"))
        cohorts = [tuple(int(i) for i in row if i >= 0) for row in file["cohorts"]]
        theta, head = ([file[f"{name}.{part}"] for part in ("weight", "bias")] for name in ("base.0", "head"))
    hidden = keras.layers.Dense(6, activation="relu", dtype="float64")
    network = keras.Sequential([keras.Input((4,), dtype="float64"), hidden])
    hidden.set_weights(theta)
    start = Weights(tuple(map(tf.constant, theta)), Head(*map(tf.constant, head)))
    population = Population([len(y) for _, y in train], [5] * 5, num_labels=5, labels="global")
    return Examples(Toy(SplitModel(network), population, train), test, cohorts, start)


class Round(NamedTuple):
    """A round of ours, numbered from 0 as PFLlib's."""

    number: int
    cohort: tuple
    message: Any  # what the clients of this round get; a function of the client id if each gets its own
    before: dict  # client id -> state before the round
    server: Any  # the server's state after the round
    after: dict  # client id -> state after the round


def rounds(algorithm: Algorithm, data: Examples, server, states: dict) -> Iterator[Round]:
    """Plays the recorded cohorts; round t has the mini-batches of our round t + 1."""
    engine = Simulation(algorithm)
    for t, cohort in enumerate(data.cohorts):
        before = dict(states)
        message = partial(algorithm.message, server) if algorithm.message_per_client else algorithm.message(server)
        visits = [data.toy.visit(i, t + 1) for i in cohort]
        output = engine.next(server, [states[i] for i in cohort], visits)
        server, states = output.server, states | dict(zip(cohort, output.client_states, strict=True))
        yield Round(t, cohort, message, before, server, states)
