"""How the local engine takes a cohort through a round: one client after the other, fused, or stacked.

All three run the algorithm's own functions and give the same result up to rounding. `OneByOne` is the reference.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl import aggregate, tree
from tfpfl.algorithm import Algorithm, ClientData
from tfpfl.visit import (
    EVALUATION_CHUNK,
    Readers,
    by_split,
    checked,
    client_state_spec,
    client_work,
    evaluation_work,
    metric_contribution,
    scores,
)

GROUP_BYTES = 2**28  # the activations of a group of clients that go through the backbone together
STACK = 64  # clients that are vectorized together, at most
PARALLEL = 10  # clients of a graph that are worked on at a time


class Part(NamedTuple):
    """What some clients of a cohort ended with."""

    positions: list  # of these clients in the cohort
    states: list
    metrics: list
    contribution: aggregate.Contribution  # their sums; rows [g, ...] in the order of `positions`
    metric_sums: dict


class OneByOne:
    """Every client by itself, several at a time on threads; which thread runs a client changes nothing."""

    def __init__(self, algorithm: Algorithm, readers: Readers, threads: int):
        work = client_work(algorithm, readers)

        def visit_client(message, state, visit):
            output = work(message, state, visit)
            contribution = aggregate.contribution(algorithm, output)
            rows = tf.nest.map_structure(lambda row: row[None], contribution.rows)
            sums = metric_contribution(output.metrics, visit.info.num_examples)
            return output.state, output.metrics, contribution._replace(rows=rows), sums

        self._visit, self._threads = relaxed(visit_client), threads

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields a `Part` for every client, in order."""

        def visit(i):
            state, metrics, contribution, sums = self._visit(message_for(i), states[i], visits[i])
            return Part([i], [state], [metrics], contribution, sums)

        return in_order(visit, range(len(visits)), self._threads)


class Fused:
    """For algorithms that are a `OnePass`: many clients in one forward and one backward pass of the backbone.

    A group's examples are one batch, as many clients as `GROUP_BYTES` of activations have room for. Between the two
    passes every client works on its own features. All of a group is one graph, which is traced once for any number of
    clients; its clients run side by side there, faster than on Python's threads.
    """

    def __init__(self, algorithm: Algorithm, federation, held_out: Sequence[str]):
        self._one_pass, self._bytes = one_pass_of(algorithm), algorithm.model.activation_bytes
        self._spec = client_state_spec(algorithm)
        labels, dtype, one_pass = algorithm.population.labels, algorithm.model.dtype, self._one_pass
        read = federation.cohort_reader("train", labels, dtype)
        features_of = _features_of_splits(algorithm.model, federation, held_out, labels)

        def work_of_one(message, state, visit, phi, y, held_out):
            output, dphi = one_pass.on_features(message, state, phi, ClientData((), y, visit.info, visit.key))
            found = {}
            if held_out:
                head = algorithm.local_model(message, output).head
                found = {split: scores(head, *examples) for split, examples in held_out.items()}
            whole = one_pass.join(one_pass.theta(message), output.update)
            output = checked(algorithm, message, output, found, update=whole)
            sums = metric_contribution(output.metrics, visit.info.num_examples)
            rest, dphi = tree.scale(output.weight, (output.update, dphi))
            state = [tf.reshape(leaf, [-1]) for leaf in tf.nest.flatten(output.state)]
            return state, output.metrics, dphi, (rest, output.weight, sums)

        def work(message, packed, visits):
            theta = one_pass.theta(message)
            x, y, sizes = read(visits.info.client_id)
            phi, pull_back = algorithm.model.record(theta, x)
            batch, held_out = Batch(phi, y, _starts(sizes)), features_of(theta, visits.info.client_id)

            def one(i, message, packed, visits, batch, held_out):
                state, visit = packed.of(i, self._spec), tf.nest.map_structure(lambda leaf: leaf[i], visits)
                examples = {split: part.of(i) for split, part in held_out.items()}
                return work_of_one(message, state, visit, *batch.of(i), examples)

            arrays = for_each(one, tf.size(visits.info.client_id), message, packed, visits, batch, held_out)
            states, metrics, dphi, added = arrays
            rest, weight, sums = tf.nest.map_structure(lambda array: tf.reduce_sum(array.stack(), 0), added)
            update = one_pass.join(pull_back(dphi.concat()), rest)
            metrics = tf.nest.map_structure(lambda array: array.stack(), metrics)
            return [array.concat() for array in states], metrics, aggregate.Contribution((update,), weight, ()), sums

        self._work = relaxed(work)

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields a `Part` for every group, in order."""
        message, sizes = message_for(0), [int(v.info.num_examples) for v in visits]
        for group in groups(sizes, self._bytes):
            packed = Packed.made([states[i] for i in group])
            some = side_by_side([visits[i] for i in group])
            values, metrics, contribution, sums = self._work(message, packed, some)
            new_states = packed._replace(values=tuple(v.numpy() for v in values)).each(self._spec)
            yield Part(list(group), new_states, one_each(metrics, group), contribution, sums)


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
                output = checked(algorithm, message, output, {})
                sums = metric_contribution(output.metrics, visit.info.num_examples)
                return output.state, output.metrics, aggregate.contribution(algorithm, output), sums

            own = messages if self._per_client else clients * tf.ones([clients], tf.int32)
            states, metrics, parts, sums = tf.vectorized_map(one, (own, states, visits, x, y))
            add = tree_sum
            return states, metrics, aggregate.Contribution(add(parts.sums), add(parts.weight), parts.rows), add(sums)

        self._work = relaxed(work)

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


class Batch(NamedTuple):
    """The features of several clients' examples, one client after the other."""

    phi: Any  # [sum N_i, M]
    y: Any  # int32 [sum N_i]
    starts: Any  # int32 [G + 1]

    def of(self, place):
        """(phi, y) of one of the clients."""
        rows = slice(self.starts[place], self.starts[place + 1])
        return self.phi[rows], self.y[rows]


class Packed(NamedTuple):
    """Client states of one structure as flat vectors, so that any number of clients, with any K_i, is one type."""

    values: tuple  # of every leaf, the numbers of all clients one after the other: [sum of sizes]
    ends: Any  # int32 [leaves, G + 1]: where a client's numbers end; the first is 0

    @classmethod
    def made(cls, states: list) -> "Packed":
        """From states, which are arrays or eager tensors."""
        leaves = [[np.ravel(leaf) for leaf in of_all] for of_all in zip(*map(tf.nest.flatten, states), strict=True)]
        ends = [np.cumsum([0, *(leaf.size for leaf in of_all)]) for of_all in leaves]
        return cls(tuple(map(np.concatenate, leaves)), np.array(ends, np.int32).reshape(len(leaves), len(states) + 1))

    def of(self, i, spec):
        """A client's state; a leaf may have one dimension that is open in `spec`."""
        shapes = [[-1 if size is None else size for size in leaf.shape] for leaf in tf.nest.flatten(spec)]
        parts = [v[self.ends[n, i] : self.ends[n, i + 1]] for n, v in enumerate(self.values)]
        reshape = np.reshape if isinstance(self.ends, np.ndarray) else tf.reshape
        leaves = [reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
        return tf.nest.pack_sequence_as(spec, leaves)

    def each(self, spec) -> list:
        """All states, of arrays."""
        return [self.of(i, spec) for i in range(self.ends.shape[1] - 1)]


class FusedEvaluation:
    """Scores personal models that have the message's own backbone: many clients' held-out examples in one pass."""

    def __init__(self, algorithm: Algorithm, federation, readers: Readers, theta_of: Callable):
        self._spec, self._bytes = client_state_spec(algorithm), algorithm.model.activation_bytes
        self._sizes = sum(federation.num_examples(split) for split in readers.held_out)
        features_of = _features_of_splits(algorithm.model, federation, readers.held_out, algorithm.population.labels)

        def score(message, packed, visits):
            def one(i, message, packed, visits, held_out):
                state, visit = packed.of(i, self._spec), tf.nest.map_structure(lambda leaf: leaf[i], visits)
                x, y = readers.train(visit)
                head = algorithm.personal_model(message, state, ClientData(x, y, visit.info, visit.key)).head
                return by_split({split: scores(head, *part.of(i)) for split, part in held_out.items()})

            held_out = features_of(theta_of(message), visits.info.client_id)
            arrays = for_each(one, tf.size(visits.info.client_id), message, packed, visits, held_out)
            return tf.nest.map_structure(lambda array: array.stack(), arrays)

        self._score = relaxed(score)

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields every client's scores, in order."""
        message = message_for(0)
        for group in groups([int(self._sizes[int(v.info.client_id)]) for v in visits], self._bytes):
            packed = Packed.made([states[i] for i in group])
            yield from one_each(self._score(message, packed, side_by_side([visits[i] for i in group])), group)


class EvaluationOneByOne:
    """Scores any personal models, one client after the other on threads."""

    def __init__(self, algorithm: Algorithm, readers: Readers, threads: int):
        self._work, self._threads = relaxed(evaluation_work(algorithm, readers)), threads

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields every client's scores, in order."""
        return in_order(lambda i: self._work(message_for(i), states[i], visits[i]), range(len(visits)), self._threads)


def one_pass_of(algorithm: Algorithm):
    """The `OnePass` that a cohort can share, or None."""
    if algorithm.message_per_client or algorithm.aggregate not in ("mean", "sum"):
        return None
    return getattr(algorithm.client_update, "one_pass", None)


def shared_theta(algorithm: Algorithm, message, state, visit) -> Callable | None:
    """(message) -> theta, where the personal models have the message's own backbone; None where they have others.

    Seen in the graph of `personal_model`, and not declared: what is declared can be wrong.
    """
    if algorithm.message_per_client:
        return None
    found = []

    def look(message, state, visit):
        x = tf.zeros([1, *algorithm.model.input_shape], algorithm.model.dtype)
        data = ClientData(x, tf.zeros([1], tf.int32), visit.info, visit.key)
        leaves = {id(leaf): i for i, leaf in enumerate(tf.nest.flatten(message))}
        found.extend(leaves.get(id(w)) for w in algorithm.personal_model(message, state, data).theta)

    tf.function(look, autograph=False).get_concrete_function(message, state, visit)
    if None in found:
        return None
    return lambda message: tuple(tf.nest.flatten(message)[i] for i in found)


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


def relaxed(function):
    """A graph that is not traced again for another number of examples or classes."""
    return tf.function(function, autograph=False, reduce_retracing=True)


def total(structures: list):
    """The sum of structures of tensors, in the order given."""
    return tf.nest.map_structure(lambda *leaves: tf.add_n(leaves), *structures)


def tree_sum(stacked):
    """The sum over the first axis of every leaf."""
    return tf.nest.map_structure(lambda leaf: tf.reduce_sum(leaf, 0), stacked)


def side_by_side(structures: list):
    """Equal structures as one of arrays, with a new first axis."""
    return tf.nest.map_structure(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *structures)


def one_each(stacked, of: list) -> list:
    """The inverse of `side_by_side`: views."""
    leaves = tf.nest.map_structure(np.asarray, stacked)
    return [tf.nest.map_structure(lambda leaf: leaf[i], leaves) for i in range(len(of))]  # noqa: B023


def for_each(function: Callable, number, *arguments):
    """function(i, *arguments) for i = 0, ..., number - 1 in a graph, several at a time: every result leaf an array."""
    graph = tf.function(function, autograph=False).get_concrete_function(tf.constant(0), *arguments)
    arrays = tf.nest.map_structure(
        lambda t: tf.TensorArray(t.dtype, number, infer_shape=False, element_shape=t.shape), graph.structured_outputs
    )

    def body(i, arrays):
        return i + 1, tf.nest.map_structure(lambda array, t: array.write(i, t), arrays, function(i, *arguments))

    return tf.while_loop(lambda i, _: i < number, body, (0, arrays), parallel_iterations=PARALLEL)[1]


def _starts(sizes):
    return tf.concat([[0], tf.cumsum(sizes)], 0)


def _features_of_splits(model, federation, splits: Sequence[str], labels: str):
    """(theta, client_ids) -> {split: Batch}; in chunks, so that a large group needs no more memory than a small one."""
    read = {split: federation.cohort_reader(split, labels, model.dtype) for split in splits}

    def features(theta, client_ids):
        found = {}
        for split, reader in read.items():
            x, y, sizes = reader(client_ids)
            found[split] = Batch(model.features_in_chunks(theta, x, EVALUATION_CHUNK), y, _starts(sizes))
        return found

    return features
