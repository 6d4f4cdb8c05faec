"""Computes several clients in one graph: their states are packed into flat vectors, their examples into one batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData
from tfpfl.checks import InvalidArgument, traced_by_design
from tfpfl.engines import aggregation
from tfpfl.engines.graphs import any_number
from tfpfl.engines.visit import (
    Readers,
    check_output,
    checked,
    client_result,
    client_state_spec,
    client_work,
    info_spec,
    metric_contribution,
    room_of,
    scores,
)
from tfpfl.models import tree
from tfpfl.models.loops import for_a_loop

PARALLEL = 10  # clients of one graph that TensorFlow may compute at the same time
GROUP_BYTES = 2**28  # memory for the activations of the clients that go through the backbone in one batch


class Batch(NamedTuple):
    """The features and labels of G clients' examples, one client after the other."""

    phi: Any  # [sum N_i, M], features
    y: Any  # int32 [sum N_i], labels; or numbers [sum N_i, K]
    starts: Any  # int32 [G + 1]: client g has the rows starts[g]..starts[g + 1]-1

    def of(self, place):
        """(phi [N_i, M], y [N_i]) of the client at this place, 0..G-1."""
        rows = slice(self.starts[place], self.starts[place + 1])
        return self.phi[rows], self.y[rows]


class Packed(NamedTuple):
    """The states of G clients as flat vectors. The type is the same for every number of clients and every K_i."""

    values: tuple  # one vector for every leaf of a state: the numbers of all clients, one client after the other
    ends: Any  # int64 [leaves, G + 1]: client g has the numbers ends[leaf, g]..ends[leaf, g + 1]-1 of a leaf

    @classmethod
    def made(cls, states: list) -> "Packed":
        """Packs a list of G states of one structure, whose leaves are arrays or eager tensors."""
        leaves = [[np.ravel(leaf) for leaf in of_all] for of_all in zip(*map(tf.nest.flatten, states), strict=True)]
        ends = [np.cumsum([0, *(leaf.size for leaf in of_all)]) for of_all in leaves]
        return cls(tuple(map(np.concatenate, leaves)), np.array(ends, np.int64).reshape(len(leaves), len(states) + 1))

    def type_of(self) -> "Packed":
        """The shapes and dtypes of these packed states for every number of clients and every K_i."""
        values = tuple(tf.TensorSpec([None], v.dtype) for v in self.values)
        return Packed(values, tf.TensorSpec([len(values), None], tf.int64))

    def of(self, i, spec):
        """Unpacks the state of client i, 0..G-1.

        Args:
            i: the client's place.
            spec: the structure of TensorSpec of a state; K_i is an open dimension.

        Raises:
            InvalidArgument: a leaf of `spec` has more than one open dimension.
        """
        shapes = [[-1 if size is None else size for size in leaf.shape] for leaf in tf.nest.flatten(spec)]
        if any(shape.count(-1) > 1 for shape in shapes):
            raise InvalidArgument(
                f"an array of a client's state may have only one open dimension, such as K_i; found {spec}"
            )
        parts = [v[self.ends[n, i] : self.ends[n, i + 1]] for n, v in enumerate(self.values)]
        reshape = np.reshape if isinstance(self.ends, np.ndarray) else tf.reshape
        leaves = [reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
        return tf.nest.pack_sequence_as(spec, leaves)

    def with_values(self, arrays: Sequence) -> "Packed":
        """Replaces the numbers by those of one `tf.TensorArray` of G vectors for every leaf; the sizes stay."""
        return self._replace(values=tuple(array.concat() for array in arrays))

    def each(self, spec) -> list:
        """Unpacks all G states, as NumPy arrays in the structure of `spec`."""
        held = Packed(tuple(np.asarray(v) for v in self.values), np.asarray(self.ends))
        return [held.of(i, spec) for i in range(held.ends.shape[1] - 1)]


def initial_states(algorithm: Algorithm) -> Callable:
    """Makes (stacked ClientInfo) -> Packed: the states of clients before their first visit, in one graph."""

    def one(i, infos):
        leaves = _vectors(algorithm.init_client(tf.nest.map_structure(lambda leaf: leaf[i], infos)))
        return leaves, [tf.size(leaf, tf.int64) for leaf in leaves]

    def states(infos):
        number = tf.size(infos.client_id)
        vectors, sizes = for_each(one, number, infos)
        ends = [tf.concat([[0], tf.cumsum(array.stack())], 0) for array in sizes]
        values = tuple(array.concat() for array in vectors)
        return Packed(values, tf.stack(ends) if ends else tf.zeros([0, number + 1], tf.int64))

    return _of_infos(algorithm, states)


def open_shapes(algorithm: Algorithm) -> Callable | None:
    """Makes (stacked ClientInfo) -> the shapes of those leaves of G clients' states that have an open size.

    They are int32 [G, rank], one array for every such leaf, such as [G, 2] for kernels [M, K_i]. None if there is none.
    """
    is_open = [not leaf.shape.is_fully_defined() for leaf in tf.nest.flatten(client_state_spec(algorithm))]
    if not any(is_open):
        return None

    def one(i, infos):
        state = algorithm.init_client(tf.nest.map_structure(lambda leaf: leaf[i], infos))
        return [tf.shape(leaf) for leaf, its in zip(tf.nest.flatten(state), is_open, strict=True) if its]

    return _of_infos(algorithm, lambda infos: stacked(for_each(one, tf.size(infos.client_id), infos)))


def _of_infos(algorithm: Algorithm, function: Callable) -> Callable:
    """The graph of a function (stacked ClientInfo) for any number of clients."""
    spec = tf.nest.map_structure(lambda s: tf.TensorSpec([None], s.dtype), info_spec(algorithm.model.dtype))
    return traced_by_design(tf.function(function, autograph=False, input_signature=[spec]))


def fused_work(algorithm: Algorithm, federation, held_out: Sequence[str] = ()) -> Callable:
    """Makes the work of G clients that share one forward and one backward pass of the backbone.

    Args:
        algorithm: one for which `one_pass_of` is not None.
        federation: the clients' examples.
        held_out: splits on which every client's model is scored after its local work.

    Returns:
        (message, Packed states, stacked visits) -> (Packed new states, {name: metrics [G]}, the sum of the
        `Contribution`s, the sum of the metric contributions).
    """
    labels, one_pass, spec = algorithm.population.labels, one_pass_of(algorithm), client_state_spec(algorithm)
    room = room_of(algorithm, federation, held_out)
    read = federation.cohort_reader("train", labels, algorithm.model.dtype)
    features_of = features_of_splits(algorithm.model, federation, held_out, labels)

    def one(i, message, packed, visits, batch, held_out):
        state, visit = packed.of(i, spec), tf.nest.map_structure(lambda leaf: leaf[i], visits)
        phi, y = batch.of(i)
        output, dphi = one_pass.on_features(message, state, phi, ClientData((), y, visit.info, visit.key))
        output = check_output(algorithm, output)
        found = {}
        if held_out:
            head = algorithm.local_model(message, output).head
            found = scores_of_parts(algorithm.model.kind, head, held_out, i, room)
        whole = one_pass.join(one_pass.theta(message), output.update)
        output = checked(algorithm, message, output, found, update=whole)
        sums = metric_contribution(output.metrics, visit.info.num_examples)
        rest, dphi = aggregation.weighted(output.weight, (output.update, dphi))
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
    """Makes the same function as `fused_work`, but the clients are computed one after the other.

    For algorithms that send all clients the same message and aggregate no rows.
    """
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
    """The algorithm's `OnePass` if several clients can share it, otherwise None.

    They can if all get the same message, the aggregate is a single mean or sum, no layer of the backbone draws masks,
    which depend on the client, and no `sent` changes a client's own update, which a shared pass never has.
    """
    alone = algorithm.message_per_client or algorithm.model.alone or algorithm.sent is not None
    if alone or algorithm.aggregate not in ("mean", "sum"):
        return None
    return algorithm.one_pass


def for_each(function: Callable, number, *arguments, at_a_time: int = PARALLEL):
    """Computes function(i, *arguments) for i = 0..number-1 in a loop of the graph; `at_a_time` steps may overlap.

    The function is traced before the loop, into its own graph, because the loop needs to know what it returns.

    Returns:
        The structure that the function returns, with a `tf.TensorArray` of `number` values for every leaf.
    """
    graph = for_a_loop(function, tf.constant(0), *arguments)
    arrays = tf.nest.map_structure(
        lambda t: tf.TensorArray(t.dtype, number, infer_shape=False, element_shape=t.shape), graph.structured_outputs
    )

    def body(i, arrays):
        return i + 1, tf.nest.map_structure(lambda array, t: array.write(i, t), arrays, graph(i, *arguments))

    return tf.while_loop(lambda i, _: i < number, body, (0, arrays), parallel_iterations=at_a_time)[1]


def tree_sum(stacked):
    """Sums every leaf of a structure over its first axis."""
    return tf.nest.map_structure(lambda leaf: tf.reduce_sum(leaf, 0), stacked)


def side_by_side(structures: list):
    """Stacks G structures of equal shapes into one structure of arrays [G, ...]."""
    return tf.nest.map_structure(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *structures)


def one_each(stacked, of: list) -> list:
    """The inverse of `side_by_side`: one structure for every element of `of`; the arrays are views, not copies."""
    leaves = tree.arrays(stacked)
    return [tf.nest.map_structure(lambda leaf: leaf[i], leaves) for i in range(len(of))]  # noqa: B023


def _vectors(structure) -> list:
    return [tf.reshape(leaf, [-1]) for leaf in tf.nest.flatten(structure)]


def stacked(arrays):
    """Stacks the result of `for_each` into tensors [number, ...]; the values must have equal shapes."""
    return tf.nest.map_structure(lambda array: array.stack(), arrays)


def _stacked_sum(arrays):
    return tree_sum(stacked(arrays))


def _starts(sizes):
    return tf.concat([[0], tf.cumsum(sizes)], 0)


def features_of_splits(model, federation, splits: Sequence[str], labels: str):
    """Makes (theta, client_ids int32 [G]) -> {split: `Batch` of features}.

    The features are computed in chunks of `models.split.CHUNK` examples, which bounds the memory.
    """
    read = {split: federation.cohort_reader(split, labels, model.dtype) for split in splits}

    def features(theta, client_ids):
        found = {}
        for split, reader in read.items():
            x, y, sizes = reader(client_ids)
            found[split] = Batch(model.features_in_chunks(theta, x), y, _starts(sizes))
        return found

    return features


def scores_of_parts(kind, head, held_out: dict, i, room: dict, predict: Callable | None = None) -> dict:
    """{split: scores} of client i's head of a kind, or of `predict`, on its features in {split: `Batch`}.

    `room` is that of `Readers`.
    """
    found = {}
    for split, part in held_out.items():
        phi, y = part.of(i)
        found[split] = scores(kind, head, phi, y, room.get(split), predict)
    return found


def groups(sizes: Sequence[int], bytes_an_example: int) -> list[list[int]]:
    """Divides clients into groups of neighbours whose activations fit into `GROUP_BYTES`; at least one client a group.

    Args:
        sizes: the number of examples of every client.
        bytes_an_example: memory that the activations of one example need, in bytes.

    Returns:
        The groups: lists of places 0..len(sizes)-1.
    """
    found: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        room -= size * bytes_an_example
        if room < 0 or not found:
            found.append([])
            room = GROUP_BYTES - size * bytes_an_example
        found[-1].append(i)
    return found


def any_state_spec(algorithm: Algorithm) -> Callable | None:
    """Makes the argument of `relaxed` for client states whose K_i differ; None if all clients have the same K_i."""
    classes, spec = algorithm.population.num_classes, client_state_spec(algorithm)
    return None if classes.min() == classes.max() else lambda state: spec


def any_examples(visit):
    """The argument of `relaxed` for visits whose N_i differ. Only a `ClientData` carries its examples."""
    return visit._replace(x=any_number(visit.x), y=any_number(visit.y)) if isinstance(visit, ClientData) else visit
