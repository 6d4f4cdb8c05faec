"""The local engine: the algorithm's functions in process. Needs no TFF.

It has the `initialize` and `next` of a `tff.templates.IterativeProcess`, so whatever drives one drives the other.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData
from tfpfl.checks import InvalidArgument
from tfpfl.engines import aggregation
from tfpfl.engines.graphs import any_number, relaxed, total
from tfpfl.engines.visit import RoundOutput, finish_metrics, server_step


class Part(NamedTuple):
    """What some clients of a cohort ended with."""

    positions: list  # of these clients in the cohort
    states: list
    metrics: list
    contribution: aggregation.Contribution  # their sums; rows [g, ...] in the order of `positions`
    metric_sums: dict


class Rounds:
    """Rounds of an algorithm, given how its clients are taken through one.

    Args:
        algorithm: what to run.
        clients: (position in the cohort -> message, client states, visits) -> the `Part` of some clients after the
            other; as those of `tfpfl.engines.local.grouping`.
    """

    def __init__(self, algorithm: Algorithm, clients: Callable):
        self.algorithm, self._clients = algorithm, clients
        step = server_step(algorithm)

        def finish(server, total, client_ids):
            return step(server, aggregation.finish(algorithm, total, client_ids), total.weight)

        self._messages = Messages(algorithm)
        sampling, arrival = algorithm.population.sampling, algorithm.population.arrival
        some = sampling.kind != "fixed" or arrival is not None  # cohorts of several sizes
        types = (None, lambda total: total._replace(rows=any_number(total.rows)), any_number) if some else ()
        self._finish = relaxed(finish, *types)
        self._initialize = tf.function(algorithm.init_server, autograph=False)

    def initialize(self):
        """The server's state before round 1."""
        return self._initialize()

    def next(self, server, client_states: list, visits: list) -> RoundOutput:
        """One round.

        Args:
            server: the server's state.
            client_states: the cohort's states, one a client.
            visits: the cohort's `Visit` (or `ClientData`), in the same order.

        Raises:
            ValueError: an empty cohort, lists of different length, or a `ClientData` whose examples are not finite or
                whose labels lie outside 0..K_i-1.
        """
        check_visits(client_states, visits)
        for visit in visits:
            if isinstance(visit, ClientData):  # a Federation's examples were checked when it was made
                check_examples(visit)
        done = joined(self._clients(self._messages(server, visits), client_states, visits))
        states, metrics = [None] * len(visits), [None] * len(visits)
        for i, state, its_metrics in zip(done.positions, done.states, done.metrics, strict=True):
            states[i], metrics[i] = state, its_metrics
        order = tf.stack([visits[i].info.client_id for i in done.positions])
        server = self._finish(server, done.contribution, order)
        return RoundOutput(server, states, finish_metrics(done.metric_sums), metrics)


def joined(parts: Iterable[Part]) -> Part:
    """Several parts of a cohort as one, added in the order given."""
    positions, states, metrics, rows = [], [], [], []
    sums, metric_sums = Sum(), Sum()
    for part in parts:
        positions += part.positions
        states += part.states
        metrics += part.metrics
        sums.add((part.contribution.sums, part.contribution.weight))
        rows.append(part.contribution.rows)
        metric_sums.add(part.metric_sums)
    rows = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *rows)
    return Part(positions, states, metrics, aggregation.Contribution(*sums.total(), rows), metric_sums.total())


class Messages:
    """What the server sends: one for all, made once a round, or one for each client."""

    def __init__(self, algorithm: Algorithm):
        self._message = tf.function(algorithm.message, autograph=False)
        self._per_client = algorithm.message_per_client

    def __call__(self, server, visits: list):
        """(position in the cohort) -> the client's message."""
        if self._per_client:
            return lambda i: self._message(server, visits[i].info.client_id)
        message = self._message(server)
        return lambda i: message


class Sum:
    """A sum of structures of tensors in a fixed order, that holds few of them at a time."""

    HELD = 16

    def __init__(self):
        self._held = []

    def add(self, structure) -> None:
        """One more."""
        self._held.append(structure)
        if len(self._held) == self.HELD:
            self._held = [total(self._held)]

    def total(self):
        """The sum."""
        return total(self._held)


def check_visits(client_states: list, visits: list) -> None:
    """A round needs as many states as visits, and at least one.

    Raises:
        ValueError: otherwise. (An empty binomial cohort is the training loop's to skip: nothing changes.)
    """
    if not visits or len(client_states) != len(visits):
        raise InvalidArgument(
            f"a round needs one state and one visit for each of at least one client, found {len(client_states)} states "
            f"and {len(visits)} visits"
        )


def check_examples(data: ClientData) -> None:
    """Whether a client can learn from what it was given.

    Raises:
        ValueError: names the client and what was found.
    """
    client, classes = int(data.info.client_id), int(data.info.num_classes)
    x, y = np.asarray(data.x), np.asarray(data.y)
    if not len(y) or len(x) != len(y):
        raise InvalidArgument(
            f"client {client} has {len(x)} examples and {len(y)} labels; at least one of each is needed"
        )
    if y.min() < 0 or y.max() >= classes:
        raise InvalidArgument(f"client {client} has labels {y.min()}..{y.max()}, but its classes are 0..{classes - 1}")
    if not np.isfinite(x).all():
        raise InvalidArgument(f"client {client} has examples that are not finite")


def check_fits(algorithm: Algorithm, federation) -> None:
    """Whether the algorithm was built for these data: the examples' shape, the clients, N_i and K_i.

    Raises:
        ValueError: says what differs.
    """
    population, shape = algorithm.population, tuple(algorithm.model.input_shape)
    if shape != tuple(federation.example_shape):
        raise InvalidArgument(
            f"the model takes examples of shape {shape}, the federation's are {federation.example_shape}"
        )
    ids = population.client_ids
    if ids[-1] >= federation.num_clients:
        raise InvalidArgument(
            f"the population has a client {ids[-1]}, but the federation has clients 0..{federation.num_clients - 1}"
        )
    examples = federation.num_examples("train")[ids]
    local = population.labels == "local"
    needed = federation.num_classes[ids] if local else np.full(len(ids), federation.num_labels)
    for what, found, bad in (
        ("training examples", examples, population.num_examples != examples),
        ("classes", needed, population.num_classes < needed),
    ):
        if bad.any():
            i = int(np.argmax(bad))
            given = (population.num_examples if what != "classes" else population.num_classes)[i]
            raise InvalidArgument(
                f"client {ids[i]} has {found[i]} {what} in the federation ({population.labels} labels), but {given} in "
                "the population: take `federation.population(...)`"
            )
