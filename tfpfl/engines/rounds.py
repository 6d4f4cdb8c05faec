"""The local engine: the algorithm's functions in process. Needs no TFF.

It has the `initialize` and `next` of a `tff.templates.IterativeProcess`, so whatever drives one drives the other.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData
from tfpfl.checks import InvalidArgument, check_choice
from tfpfl.engines import aggregation
from tfpfl.engines.local.grouping import (
    EvaluationOneByOne,
    Fused,
    FusedEvaluation,
    OneByOne,
    Part,
    Stacked,
    any_number,
    default_threads,
    relaxed,
    shared_theta,
    total,
)
from tfpfl.engines.packed import one_pass_of
from tfpfl.engines.visit import Readers, RoundOutput, finish_metrics, server_step

COHORTS = ("auto", "plain", "fused", "stacked")


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
        check_cohort(client_states, visits)
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


class Simulation(Rounds):
    """Runs an algorithm in process.

    Args:
        algorithm: what to run.
        federation: where clients' examples are read by id; None if the visits are `ClientData` that carry them.
        held_out: splits ('validation', 'test') on which every client of the cohort scores the model that it holds right
            after its local work.
        cohort: 'plain', one client by itself; 'fused', where the algorithm allows it; 'stacked', equal clients as one
            vectorized computation; 'auto', fused if the algorithm allows it, else plain. All give the same result up to
            rounding; see `tfpfl.engines.local.grouping`.
        threads: clients at a time; default: as many as there are cores. It changes no bit of the result.

    Raises:
        ValueError: 'fused' or 'stacked' cannot be.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        federation=None,
        *,
        held_out: Sequence[str] = (),
        cohort: str = "auto",
        threads: int | None = None,
    ):
        super().__init__(algorithm, clients_of(algorithm, federation, held_out, cohort, threads))


def clients_of(
    algorithm: Algorithm, federation, held_out: Sequence[str] = (), cohort: str = "auto", threads: int | None = None
) -> Callable:
    """How clients are taken through a round in this process; arguments and errors as those of `Simulation`."""
    check_choice(cohort=(cohort, COHORTS))
    threads = check_threads(threads)
    fits = federation is not None and one_pass_of(algorithm) is not None
    if cohort == "fused" and not fits:
        raise InvalidArgument(
            "cohort='fused' is for clients that are read by id from a federation, and for algorithms whose client "
            "takes the backbone forward and backward once, at the message's weights, without recompute or chunk"
        )
    if cohort == "stacked" and federation is None:
        raise InvalidArgument("cohort='stacked' is for clients that are read by id from a federation")
    readers = ARRAYS if federation is None else federation_readers(algorithm, federation, held_out)
    if cohort == "fused" or (cohort == "auto" and fits):
        return Fused(algorithm, federation, held_out)
    alone = OneByOne(algorithm, readers, threads)
    return Stacked(algorithm, federation, alone) if cohort == "stacked" and not held_out else alone


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


class Evaluation:
    """Scores clients' personal models on held-out splits: `personal_model` with the newest message.

    It scores the global model too, where the method has one. Models with the same backbone (`Algorithm.shares`; and the
    global model, which is the same for all) are evaluated in one forward pass for many clients.

    Args:
        algorithm, federation, threads: as in `Simulation`.
        splits: which parts of every client's data.
        cohort: 'plain' or 'auto'.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        federation,
        splits: Sequence[str] = ("validation", "test"),
        *,
        cohort: str = "auto",
        threads: int | None = None,
    ):
        self._readers = federation_readers(algorithm, federation, splits)
        self._arguments = algorithm, federation, cohort, check_threads(threads)
        self._messages, self._parts = Messages(algorithm), None

    def __call__(self, server, client_states: list, visits: list) -> list:
        """Every client's scores, in the order given: a dict '{split}_{loss|correct|examples}' -> scalar.

        With a global model also 'global_{split}_{...}'; `tfpfl.engines.visit.of_global` tells them apart.
        """
        check_cohort(client_states, visits)
        message_for = self._messages(server, visits)
        if self._parts is None:
            self._parts = self._make()
        scores = [part(message_for, client_states, visits) for part in self._parts]
        return [{k: v for some in all_of for k, v in some.items()} for all_of in zip(*scores, strict=True)]

    def _make(self) -> list:
        algorithm, federation, cohort, threads = self._arguments
        if cohort == "plain":
            return [EvaluationOneByOne(algorithm, self._readers, threads)]

        def fused(theta_of, **models):
            return FusedEvaluation(algorithm, federation, self._readers, theta_of, **models)

        # One pass takes one message: where every client has its own, only the global model is the same in all of them.
        theta_of = None if algorithm.message_per_client else shared_theta(algorithm)
        if theta_of is not None:
            return [fused(theta_of, globally=algorithm.global_model is not None)]
        alone = algorithm._replace(global_model=None)
        parts = [EvaluationOneByOne(alone, self._readers, threads)]
        if algorithm.global_model is not None:
            parts.append(fused(lambda message: algorithm.global_model(message).theta, personal=False, globally=True))
        return parts


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


def check_threads(threads: int | None) -> int:
    """How many clients run at a time.

    Raises:
        ValueError: fewer than one.
    """
    if threads is not None and threads < 1:
        raise InvalidArgument(f"threads must be at least 1, found {threads}")
    return threads or default_threads()


def check_cohort(client_states: list, visits: list) -> None:
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
