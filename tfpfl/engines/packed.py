"""Several clients in one graph: their states as flat vectors, their examples side by side."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData
from tfpfl.checks import InvalidArgument
from tfpfl.engines import aggregation
from tfpfl.engines.visit import (
    EVALUATION_CHUNK,
    Readers,
    checked,
    client_result,
    client_state_spec,
    client_work,
    info_spec,
    metric_contribution,
    scores,
)
from tfpfl.models import tree

PARALLEL = 10  # clients of a graph that are worked on at a time


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

    def type_of(self) -> "Packed":
        """The type of such states for every number of clients and every K_i."""
        values = tuple(tf.TensorSpec([None], v.dtype) for v in self.values)
        return Packed(values, tf.TensorSpec([len(values), None], tf.int32))

    def of(self, i, spec):
        """A client's state.

        Raises:
            ValueError: a leaf has more than one dimension that is open in `spec` (K_i is one).
        """
        shapes = [[-1 if size is None else size for size in leaf.shape] for leaf in tf.nest.flatten(spec)]
        if any(shape.count(-1) > 1 for shape in shapes):
            raise InvalidArgument(f"a leaf of a client's state may have one open dimension, as K_i is; found {spec}")
        parts = [v[self.ends[n, i] : self.ends[n, i + 1]] for n, v in enumerate(self.values)]
        reshape = np.reshape if isinstance(self.ends, np.ndarray) else tf.reshape
        leaves = [reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
        return tf.nest.pack_sequence_as(spec, leaves)

    def with_values(self, arrays: Sequence) -> "Packed":
        """Other states of the same sizes, from a `tf.TensorArray` of vectors for every leaf."""
        return self._replace(values=tuple(array.concat() for array in arrays))

    def each(self, spec) -> list:
        """All states, as arrays."""
        held = Packed(tuple(np.asarray(v) for v in self.values), np.asarray(self.ends))
        return [held.of(i, spec) for i in range(held.ends.shape[1] - 1)]


def initial_states(algorithm: Algorithm) -> Callable:
    """(ClientInfo side by side) -> Packed: the states of clients that never took part, in one graph for any number."""
    spec = tf.nest.map_structure(lambda s: tf.TensorSpec([None], s.dtype), info_spec(algorithm.model.dtype))

    def one(i, infos):
        leaves = _vectors(algorithm.init_client(tf.nest.map_structure(lambda leaf: leaf[i], infos)))
        return leaves, [tf.size(leaf) for leaf in leaves]

    def states(infos):
        number = tf.size(infos.client_id)
        vectors, sizes = for_each(one, number, infos)
        ends = [tf.concat([[0], tf.cumsum(array.stack())], 0) for array in sizes]
        values = tuple(array.concat() for array in vectors)
        return Packed(values, tf.stack(ends) if ends else tf.zeros([0, number + 1], tf.int32))

    return tf.function(states, autograph=False, input_signature=[spec])


def fused_work(algorithm: Algorithm, federation, held_out: Sequence[str] = ()) -> Callable:
    """(message, Packed states, visits side by side) -> (Packed, metrics [G] by name, Contribution, metric sums).

    For algorithms with a `one_pass_of`.
    """
    labels, one_pass, spec = algorithm.population.labels, one_pass_of(algorithm), client_state_spec(algorithm)
    read = federation.cohort_reader("train", labels, algorithm.model.dtype)
    features_of = features_of_splits(algorithm.model, federation, held_out, labels)

    def one(i, message, packed, visits, batch, held_out):
        state, visit = packed.of(i, spec), tf.nest.map_structure(lambda leaf: leaf[i], visits)
        phi, y = batch.of(i)
        output, dphi = one_pass.on_features(message, state, phi, ClientData((), y, visit.info, visit.key))
        found = {}
        if held_out:
            head = algorithm.local_model(message, output).head
            found = {split: scores(head, *part.of(i)) for split, part in held_out.items()}
        whole = one_pass.join(one_pass.theta(message), output.update)
        output = checked(algorithm, message, output, found, update=whole)
        sums = metric_contribution(output.metrics, visit.info.num_examples)
        rest, dphi = tree.scale(output.weight, (output.update, dphi))
        return _vectors(output.state), output.metrics, dphi, (rest, output.weight, sums)

    def work(message, packed, visits):
        theta, ids = one_pass.theta(message), visits.info.client_id
        x, y, sizes = read(ids)
        phi, pull_back = algorithm.model.record(theta, x)
        batch, held_out = Batch(phi, y, _starts(sizes)), features_of(theta, ids)
        arrays = for_each(one, tf.size(ids), message, packed, visits, batch, held_out)
        states, metrics, dphi, added = arrays
        rest, weight, sums = _stacked_sum(added)
        contribution = aggregation.Contribution((one_pass.join(pull_back(dphi.concat()), rest),), weight, ())
        return packed.with_values(states), stacked(metrics), contribution, sums

    return work


def looped_work(algorithm: Algorithm, readers: Readers) -> Callable:
    """As `fused_work`, one client after the other: for algorithms with the same message for all, and without rows."""
    work, spec = client_work(algorithm, readers), client_state_spec(algorithm)

    def one(i, message, packed, visits):
        visit = tf.nest.map_structure(lambda leaf: leaf[i], visits)
        result = client_result(algorithm, work(message, packed.of(i, spec), visit), visit)
        return result._replace(state=_vectors(result.state))

    def all_of(message, packed, visits):
        arrays = for_each(one, tf.size(visits.info.client_id), message, packed, visits, at_a_time=1)
        states, metrics, contribution, sums = arrays
        return packed.with_values(states), stacked(metrics), _stacked_sum(contribution), _stacked_sum(sums)

    return all_of


def one_pass_of(algorithm: Algorithm):
    """The `OnePass` that a cohort can share, or None."""
    if algorithm.message_per_client or algorithm.aggregate not in ("mean", "sum"):
        return None
    return algorithm.one_pass


def for_each(function: Callable, number, *arguments, at_a_time: int = PARALLEL):
    """function(i, *arguments) for i = 0, ..., number - 1 in a graph: a `tf.TensorArray` for every leaf.

    The function is traced once, into a graph of its own: what it returns must be known before the loop is built.
    """
    graph = tf.function(function, autograph=False).get_concrete_function(tf.constant(0), *arguments)
    arrays = tf.nest.map_structure(
        lambda t: tf.TensorArray(t.dtype, number, infer_shape=False, element_shape=t.shape), graph.structured_outputs
    )

    def body(i, arrays):
        return i + 1, tf.nest.map_structure(lambda array, t: array.write(i, t), arrays, graph(i, *arguments))

    return tf.while_loop(lambda i, _: i < number, body, (0, arrays), parallel_iterations=at_a_time)[1]


def tree_sum(stacked):
    """The sum over the first axis of every leaf."""
    return tf.nest.map_structure(lambda leaf: tf.reduce_sum(leaf, 0), stacked)


def side_by_side(structures: list):
    """Equal structures as one of arrays, with a new first axis."""
    return tf.nest.map_structure(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *structures)


def one_each(stacked, of: list) -> list:
    """The inverse of `side_by_side`: views."""
    leaves = tree.arrays(stacked)
    return [tf.nest.map_structure(lambda leaf: leaf[i], leaves) for i in range(len(of))]  # noqa: B023


def _vectors(structure) -> list:
    return [tf.reshape(leaf, [-1]) for leaf in tf.nest.flatten(structure)]


def stacked(arrays):
    """What `for_each` gave for scalars, or for tensors of one shape: a first axis for the clients."""
    return tf.nest.map_structure(lambda array: array.stack(), arrays)


def _stacked_sum(arrays):
    return tree_sum(stacked(arrays))


def _starts(sizes):
    return tf.concat([[0], tf.cumsum(sizes)], 0)


def features_of_splits(model, federation, splits: Sequence[str], labels: str):
    """(theta, client_ids) -> {split: Batch}; in chunks, so that a large group needs no more memory than a small one."""
    read = {split: federation.cohort_reader(split, labels, model.dtype) for split in splits}

    def features(theta, client_ids):
        found = {}
        for split, reader in read.items():
            x, y, sizes = reader(client_ids)
            found[split] = Batch(model.features_in_chunks(theta, x, EVALUATION_CHUNK), y, _starts(sizes))
        return found

    return features


GROUP_BYTES = 2**28  # the activations of a group of clients that go through the backbone together


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


def any_state_spec(algorithm: Algorithm) -> Callable | None:
    """For `relaxed`: a client's state for every K_i; None where all clients have the same K_i."""
    classes, spec = algorithm.population.num_classes, client_state_spec(algorithm)
    return None if classes.min() == classes.max() else lambda state: spec
