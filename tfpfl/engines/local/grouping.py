"""How the local engine takes a cohort through a round: one client after the other, fused, or stacked.

All three run the algorithm's own functions and give the same result up to rounding. `OneByOne` is the reference.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData
from tfpfl.engines import aggregation
from tfpfl.engines.packed import (
    Packed,
    features_of_splits,
    for_each,
    fused_work,
    one_each,
    side_by_side,
    stacked,
    tree_sum,
)
from tfpfl.engines.visit import (
    GLOBAL,
    Readers,
    by_split,
    checked,
    client_result,
    client_state_spec,
    client_work,
    evaluation_work,
    scores,
)

GROUP_BYTES = 2**28  # the activations of a group of clients that go through the backbone together
STACK = 64  # clients that are vectorized together, at most


class Part(NamedTuple):
    """What some clients of a cohort ended with."""

    positions: list  # of these clients in the cohort
    states: list
    metrics: list
    contribution: aggregation.Contribution  # their sums; rows [g, ...] in the order of `positions`
    metric_sums: dict


class OneByOne:
    """Every client by itself, several at a time on threads; which thread runs a client changes nothing."""

    def __init__(self, algorithm: Algorithm, readers: Readers, threads: int):
        work = client_work(algorithm, readers)

        def visit_client(message, state, visit):
            result = client_result(algorithm, work(message, state, visit), visit)
            rows = tf.nest.map_structure(lambda row: row[None], result.contribution.rows)
            return result._replace(contribution=result.contribution._replace(rows=rows))

        self._visit, self._threads = relaxed(visit_client, None, _state_type(algorithm), None), threads

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields a `Part` for every client, in order."""

        def visit(i):
            state, metrics, contribution, sums = self._visit(message_for(i), states[i], visits[i])
            return Part([i], [state], [metrics], contribution, sums)

        return in_order(visit, range(len(visits)), self._threads)


class Fused:
    """For algorithms with a `one_pass`: many clients in one forward and one backward pass of the backbone.

    A group's examples are one batch, as many clients as `GROUP_BYTES` of activations have room for. Between the two
    passes every client works on its own features. All of a group is one graph, which is traced once for any number of
    clients; its clients run side by side there, faster than on Python's threads.
    """

    def __init__(self, algorithm: Algorithm, federation, held_out: Sequence[str]):
        self._bytes, self._spec = algorithm.model.activation_bytes, client_state_spec(algorithm)
        self._work = relaxed(fused_work(algorithm, federation, held_out), None, Packed.type_of, any_number)

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields a `Part` for every group, in order."""
        message, sizes = message_for(0), [int(v.info.num_examples) for v in visits]
        for group in groups(sizes, self._bytes):
            packed = Packed.made([states[i] for i in group])
            some = side_by_side([visits[i] for i in group])
            new_states, metrics, contribution, sums = self._work(message, packed, some)
            yield Part(group, new_states.each(self._spec), one_each(metrics, group), contribution, sums)


class Stacked:
    """Clients of the same N_i and K_i as one vectorized computation, whatever the algorithm does.

    It pays where a client's steps are small: mini-batches of a dense network. Convolutions whose weights differ from
    client to client are slower so. Clients that no other equals run one by one, as do rounds with held-out splits.
    """

    def __init__(self, algorithm: Algorithm, federation, alone: OneByOne):
        read = federation.cohort_reader("train", algorithm.population.labels, algorithm.model.dtype)
        self._alone, self._per_client = alone, algorithm.message_per_client

        def work(messages, states, visits):
            x, y, _ = read(visits.info.client_id)
            clients = tf.shape(visits.info.client_id)[0]
            x, y = (tf.reshape(t, tf.concat([[clients, -1], tf.shape(t)[1:]], 0)) for t in (x, y))
            x = tf.ensure_shape(x, [None, None, *algorithm.model.input_shape])

            def one(arguments):
                own, state, visit, x, y = arguments
                message = own if self._per_client else messages
                output = algorithm.client_update(message, state, ClientData(x, y, visit.info, visit.key))
                return client_result(algorithm, checked(algorithm, message, output, {}), visit)

            own = messages if self._per_client else ()
            states, metrics, parts, sums = tf.vectorized_map(one, (own, states, visits, x, y))
            added = aggregation.Contribution(tree_sum(parts.sums), tree_sum(parts.weight), parts.rows)
            return states, metrics, added, tree_sum(sums)

        spec = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), client_state_spec(algorithm))
        self._work = relaxed(work, any_number if self._per_client else None, lambda states: spec, any_number)

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields a `Part` for every stack, then one for every other client."""
        alike, rest = {}, []
        for i, visit in enumerate(visits):
            alike.setdefault((int(visit.info.num_examples), int(visit.info.num_classes)), []).append(i)
        for members in alike.values():
            for start in range(0, len(members), STACK):
                stack = members[start : start + STACK]
                if len(stack) == 1:
                    rest += stack
                    continue
                messages = side_by_side([message_for(i) for i in stack]) if self._per_client else message_for(0)
                own = side_by_side([states[i] for i in stack]), side_by_side([visits[i] for i in stack])
                new_states, metrics, contribution, sums = self._work(messages, *own)
                yield Part(stack, one_each(new_states, stack), one_each(metrics, stack), contribution, sums)
        rest.sort()
        parts = self._alone(lambda i: message_for(rest[i]), [states[i] for i in rest], [visits[i] for i in rest])
        yield from (part._replace(positions=[rest[i] for i in part.positions]) for part in parts)


class FusedEvaluation:
    """Scores models of one backbone: many clients' held-out examples in one pass.

    Args:
        theta_of: (message) -> that backbone's weights.
        personal, globally: which models have it: the personal ones, the global one, or both.
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
                found[""] = algorithm.personal_model(message, state, data).head
            if globally:
                found[f"{GLOBAL}_"] = algorithm.global_model(message).head
            return found

        def score(message, packed, visits):
            def one(i, message, packed, visits, held_out):
                found = {}
                for prefix, head in heads(i, message, packed, visits).items():
                    found |= by_split({split: scores(head, *part.of(i)) for split, part in held_out.items()}, prefix)
                return found

            held_out = features_of(theta_of(message), visits.info.client_id)
            arrays = for_each(one, tf.size(visits.info.client_id), message, packed, visits, held_out)
            return stacked(arrays)

        self._score = relaxed(score, None, Packed.type_of, any_number)

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields every client's scores, in order."""
        message = message_for(0)  # the global model is the same in everybody's
        for group in groups([int(self._sizes[int(v.info.client_id)]) for v in visits], self._bytes):
            packed = Packed.made([states[i] if self._personal else () for i in group])
            yield from one_each(self._score(message, packed, side_by_side([visits[i] for i in group])), group)


class EvaluationOneByOne:
    """Scores any models, one client after the other on threads."""

    def __init__(self, algorithm: Algorithm, readers: Readers, threads: int):
        self._work = relaxed(evaluation_work(algorithm, readers), None, _state_type(algorithm), None)
        self._threads = threads

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields every client's scores, in order."""
        return in_order(lambda i: self._work(message_for(i), states[i], visits[i]), range(len(visits)), self._threads)


def shared_theta(algorithm: Algorithm) -> Callable | None:
    """(message) -> theta, the backbone of all personal models; None where `algorithm.shares` has no backbone.

    It is the theta of `personal_model` for a client of the population with its initial state and one example of zeros:
    what is shared depends on the message only. A graph computes no more of that model than its theta needs.
    """
    if not algorithm.shares_backbone:
        return None
    model, population = algorithm.model, algorithm.population
    info = population.info(population.client_ids[0], model.dtype)._replace(num_examples=np.int32(1))

    def theta_of(message):
        data = ClientData(
            tf.zeros([1, *model.input_shape], model.dtype), tf.zeros([1], tf.int32), info, tf.zeros([2], tf.int32)
        )
        return algorithm.personal_model(message, algorithm.init_client(info), data).theta

    return theta_of


def groups(sizes: Sequence[int], bytes_an_example: int) -> list[list[int]]:
    """Neighbours together, as long as their examples' activations fit into `GROUP_BYTES`; at least one a group."""
    found, room = [], 0
    for i, size in enumerate(sizes):
        room -= size * bytes_an_example
        if room < 0 or not found:
            found.append([])
            room = GROUP_BYTES - size * bytes_an_example
        found[-1].append(i)
    return found


def in_order(function: Callable, items, threads: int):
    """function(item) of every item, computed on threads, given in order."""
    return map(function, items) if threads == 1 else _pool(threads).map(function, items)


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="tfpfl-client")


def default_threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def relaxed(function, *types):
    """A graph that is not traced again for another number of examples, classes or clients.

    Args:
        types: for every argument, a function of its value in the first call that gives its type for all calls, a
            structure of TensorSpec; or None, if later values have the shapes of the first. Without types, the first
            trace is for the first call's shapes, and a second one for all others.
    """
    graph = tf.function(function, autograph=False, reduce_retracing=True)
    if not any(types):
        return graph

    def run(*arguments):
        # Not an input signature: values of another structure are traced again, where a signature would refuse them.
        if not graph.experimental_get_tracing_count():
            given = zip(arguments, types, strict=True)
            graph.get_concrete_function(*(value if of is None else of(value) for value, of in given))
        return graph(*arguments)

    run.experimental_get_tracing_count = graph.experimental_get_tracing_count
    return run


def any_number(structure):
    """For `relaxed`: the type of arrays [n, ...] for every n."""

    def of(leaf):
        return tf.TensorSpec([None, *np.shape(leaf)[1:]], tf.convert_to_tensor(leaf).dtype)

    return tf.nest.map_structure(of, structure)


def _state_type(algorithm: Algorithm) -> Callable | None:
    """For `relaxed`: a client's state for every K_i; None where all clients have the same K_i."""
    classes, spec = algorithm.population.num_classes, client_state_spec(algorithm)
    return None if classes.min() == classes.max() else lambda state: spec


def total(structures: list):
    """The sum of structures of tensors, in the order given."""
    return tf.nest.map_structure(lambda *leaves: tf.add_n(leaves), *structures)
