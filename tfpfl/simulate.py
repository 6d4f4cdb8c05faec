"""The local engine: the algorithm's functions in process, one client after the other. Needs no TFF.

It has the `initialize` and `next` of a `tff.templates.IterativeProcess`, so whatever drives one drives the other.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfpfl import aggregate
from tfpfl.algorithm import Algorithm, ClientData
from tfpfl.visit import (
    Readers,
    RoundOutput,
    client_work,
    evaluation_work,
    finish_metrics,
    metric_contribution,
    server_step,
)


def federation_readers(algorithm: Algorithm, federation, held_out: Sequence[str] = ()) -> Readers:
    """Reads a visit's examples from the federation's files, by client id and inside the graph."""

    def read(split):
        reader = federation.reader(split, labels=algorithm.population.labels)

        def from_file(visit):
            x, y = reader(visit.info.client_id)
            return tf.cast(x, algorithm.model.dtype), y

        return from_file

    return Readers(read("train"), {split: read(split) for split in held_out})


ARRAYS = Readers(lambda data: (data.x, data.y), {})  # the visit is a ClientData, and carries its examples


class Simulation:
    """Runs an algorithm in process.

    Args:
        algorithm: what to run.
        federation: where clients' examples are read by id; None if the visits are `ClientData` that carry them.
        held_out: splits ('validation', 'test') on which every client of the cohort scores the model that it holds right
            after its local work.
    """

    def __init__(self, algorithm: Algorithm, federation=None, *, held_out: Sequence[str] = ()):
        self.algorithm = algorithm
        readers = ARRAYS if federation is None else federation_readers(algorithm, federation, held_out)
        work = client_work(algorithm, readers)
        step = server_step(algorithm)

        def visit_client(message, state, visit):
            output = work(message, state, visit)
            sums = metric_contribution(output.metrics, visit.info.num_examples)
            return output.state, output.metrics, aggregate.contribution(algorithm, output), sums

        def finish(server, total, client_ids):
            return step(server, aggregate.finish(algorithm, total, client_ids), total.weight)

        self._visit = _relaxed(visit_client)
        self._message = tf.function(algorithm.message, autograph=False)
        self._finish = _relaxed(finish)
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
        check_cohort(client_states, visits)
        for visit in visits:
            if isinstance(visit, ClientData):  # a Federation's examples were checked when it was made
                check_examples(visit)
        per_client = self.algorithm.message_per_client
        message = None if per_client else self._message(server)
        states, metrics, contributions, summed = [], [], [], []
        for state, visit in zip(client_states, visits, strict=True):
            if per_client:
                message = self._message(server, visit.info.client_id)
            state, client_metrics, contribution, metric_sums = self._visit(message, state, visit)
            states.append(state)
            metrics.append(client_metrics)
            contributions.append(contribution)
            summed.append(metric_sums)
        client_ids = tf.stack([v.info.client_id for v in visits])
        server = self._finish(server, self._total(contributions), client_ids)
        return RoundOutput(server, states, finish_metrics(_sum(summed)), metrics)

    @staticmethod
    def _total(contributions):
        return aggregate.Contribution(
            sums=_sum([c.sums for c in contributions]),
            weight=_sum([c.weight for c in contributions]),
            rows=tf.nest.map_structure(lambda *rows: tf.stack(rows), *(c.rows for c in contributions)),
        )


class Evaluation:
    """Scores clients' personal models on held-out splits: `personal_model` with the newest message.

    Args:
        algorithm, federation: as in `Simulation`.
        splits: which parts of every client's data.
    """

    def __init__(self, algorithm: Algorithm, federation, splits: Sequence[str] = ("validation", "test")):
        self.algorithm = algorithm
        self._work = _relaxed(evaluation_work(algorithm, federation_readers(algorithm, federation, splits)))
        self._message = tf.function(algorithm.message, autograph=False)

    def __call__(self, server, client_states: list, visits: list) -> list:
        """A dict '{split}_{loss|correct|examples}' -> scalar for every client, in the order given."""
        check_cohort(client_states, visits)
        per_client = self.algorithm.message_per_client
        message = None if per_client else self._message(server)
        scores = []
        for state, visit in zip(client_states, visits, strict=True):
            if per_client:
                message = self._message(server, visit.info.client_id)
            scores.append(self._work(message, state, visit))
        return scores


def check_cohort(client_states: list, visits: list) -> None:
    """A round needs as many states as visits, and at least one.

    Raises:
        ValueError: otherwise. (An empty binomial cohort is the training loop's to skip: nothing changes.)
    """
    if not visits or len(client_states) != len(visits):
        raise ValueError(
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
        raise ValueError(f"client {client} has {len(x)} examples and {len(y)} labels; at least one of each is needed")
    if y.min() < 0 or y.max() >= classes:
        raise ValueError(f"client {client} has labels {y.min()}..{y.max()}, but its classes are 0..{classes - 1}")
    if not np.isfinite(x).all():
        raise ValueError(f"client {client} has examples that are not finite")


def _sum(structures):
    """The sum of structures of tensors, in the order given."""
    return tf.nest.map_structure(lambda *leaves: tf.add_n(leaves), *structures)


def _relaxed(function):
    """A graph that is not traced again for another number of examples or classes."""
    return tf.function(function, autograph=False, reduce_retracing=True)
