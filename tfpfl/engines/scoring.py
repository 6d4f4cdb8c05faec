"""Scores the clients' models on held-out examples; `Scorer` chooses the fastest way that the algorithm allows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData
from tfpfl.checks import InvalidArgument, check_choice, check_listed
from tfpfl.engines.graphs import any_number, check_threads, in_order, relaxed
from tfpfl.engines.packed import (
    Packed,
    any_examples,
    any_state_spec,
    features_of_splits,
    for_each,
    groups,
    one_each,
    scores_of_parts,
    side_by_side,
    stacked,
)
from tfpfl.engines.rounds import Messages, RoundCheck
from tfpfl.engines.visit import (
    GLOBAL,
    Readers,
    by_split,
    client_state_spec,
    evaluation_work,
    federation_readers,
    outputs_of,
)


class Scorer:
    """Scores every client's personal model on held-out splits and, if the method has one, the global model as well.

    Models that share a backbone (see `Algorithm.shares`) are evaluated in one forward pass for many clients.

    Args:
        algorithm, federation, threads: as in `Simulation`.
        splits: the parts of every client's data to score, at least one: 'train', 'validation', 'test'.
        grouping: 'auto' (default): many clients in one pass if possible; 'one_by_one': each by itself.

    Raises:
        InvalidArgument: the algorithm was built for another federation; there are no splits, or one is unknown; or
            `grouping` has no such value.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        federation,
        splits: Sequence[str] = ("validation", "test"),
        *,
        grouping: str = "auto",
        threads: int | None = None,
    ):
        check_choice(grouping=(grouping, ("auto", "one_by_one")))
        check_listed("splits", splits, "['validation', 'test']")
        if not splits:
            raise InvalidArgument("at least one split is needed to score models, found none: give splits=['test']")
        self._readers = federation_readers(algorithm, federation, splits)
        self._arguments = algorithm, federation, grouping, check_threads(threads)
        self._messages, self._check = Messages(algorithm), RoundCheck(algorithm)
        self._parts: list | None = None

    def __call__(self, server, client_states: list, visits: list) -> list:
        """Scores the models that the clients have after the last server step.

        Args:
            server: the server's state.
            client_states: the state of every client.
            visits: one `Visit` for every client, in the same order.

        Returns:
            A dict for every client, in the order of the visits: '{split}_{loss|correct|examples}' -> scalar. If the
            method has a global model, also 'global_{split}_{...}'; `tfpfl.engines.visit.of_global` selects those.

        Raises:
            InvalidArgument: there are no visits, more or fewer states than visits, or a state that is not one of its
                client.
        """
        self._check.server(server)
        self._check(client_states, visits)
        message_for = self._messages(server, visits)
        if self._parts is None:
            self._parts = self._make()
        scores = [part(message_for, client_states, visits) for part in self._parts]
        return [{k: v for some in all_of for k, v in some.items()} for all_of in zip(*scores, strict=True)]

    def _make(self) -> list:
        algorithm, federation, grouping, threads = self._arguments
        if grouping == "one_by_one":
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


class FusedEvaluation:
    """Scores models that share one backbone: the held-out examples of many clients go through it in one pass.

    Args:
        algorithm, federation: as in `Scorer`.
        readers: the examples of the scored splits.
        theta_of: (message) -> the weights of the shared backbone.
        personal: whether to score the personal models.
        globally: whether to score the global model.
    """

    def __init__(
        self, algorithm: Algorithm, federation, readers: Readers, theta_of: Callable, *, personal=True, globally=False
    ):
        self._spec, self._bytes = client_state_spec(algorithm), algorithm.model.activation_bytes
        self._sizes = sum(federation.num_examples(split) for split in readers.held_out)
        self._personal = personal
        features_of = features_of_splits(algorithm.model, federation, readers.held_out, algorithm.population.labels)

        def heads(i, message, packed, visits) -> dict:
            found = {}
            if personal:
                state, visit = packed.of(i, self._spec), tf.nest.map_structure(lambda leaf: leaf[i], visits)
                x, y = readers.train(visit)
                data = ClientData(x, y, visit.info, visit.key)
                head = algorithm.personal_model(message, state, data).head
                found[""] = head, outputs_of(algorithm, message, state, data)
            if globally:
                found[f"{GLOBAL}_"] = algorithm.global_model(message).head, None
            return found

        def score(message, packed, visits):
            def one(i, message, packed, visits, held_out):
                found: dict[str, Any] = {}
                for prefix, (head, outputs) in heads(i, message, packed, visits).items():
                    scored = scores_of_parts(algorithm.model.kind, head, held_out, i, readers.room, outputs)
                    found |= by_split(scored, prefix)
                return found

            held_out = features_of(theta_of(message), visits.info.client_id)
            arrays = for_each(one, tf.size(visits.info.client_id), message, packed, visits, held_out)
            return stacked(arrays)

        self._score = relaxed(score, None, Packed.type_of, any_number)

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields a dict of scores for every client, in the order of the visits."""
        message = message_for(0)  # the global model is the same in every client's message
        for group in groups([int(self._sizes[int(v.info.client_id)]) for v in visits], self._bytes):
            packed = Packed.made([states[i] if self._personal else () for i in group])
            yield from one_each(self._score(message, packed, side_by_side([visits[i] for i in group])), group)


class EvaluationOneByOne:
    """Scores models of any kind, each client by itself, `threads` clients at the same time."""

    def __init__(self, algorithm: Algorithm, readers: Readers, threads: int):
        self._work = relaxed(evaluation_work(algorithm, readers), None, any_state_spec(algorithm), any_examples)
        self._threads = threads

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields a dict of scores for every client, in the order of the visits."""
        return in_order(lambda i: self._work(message_for(i), states[i], visits[i]), range(len(visits)), self._threads)


def shared_theta(algorithm: Algorithm) -> Callable | None:
    """Makes (message) -> theta, the backbone of all personal models; None if the clients do not share the backbone.

    A shared backbone depends on the message only. So theta is taken from `personal_model` of the first client, in its
    initial state and with one example of zeros. The graph computes nothing of that model but theta.
    """
    if not algorithm.shares_backbone:
        return None
    model, population = algorithm.model, algorithm.population
    info = population.info(population.client_ids[0], model.dtype)._replace(num_examples=np.int32(1))

    def theta_of(message):
        data = ClientData(*model.blank_examples(1, info.num_classes), info, tf.zeros([2], tf.int32))
        return algorithm.personal_model(message, algorithm.init_client(info), data).theta

    return theta_of
