"""Algorithm -> a TFF federated computation with client-placed state.

    initialize: ( -> server@SERVER)
    next: (server@SERVER, state@CLIENTS, visit@CLIENTS)
          -> (server@SERVER, state@CLIENTS, metrics@SERVER, metrics@CLIENTS)

A visit is the client's id, its scalars and a random key; the worker reads the examples from the federation's files. Or,
as in TFF's tutorials, the visit carries arrays or a `tf.data.Dataset`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData, kinds
from tfpfl.checks import InvalidArgument
from tfpfl.engines import aggregation
from tfpfl.engines.packed import Packed, fused_work, looped_work, one_each, one_pass_of, side_by_side
from tfpfl.engines.rounds import check_visits
from tfpfl.engines.tff.worker import require_tff, use_local_worker
from tfpfl.engines.visit import (
    ARRAYS,
    ClientResult,
    Readers,
    RoundOutput,
    client_result,
    client_state_spec,
    client_work,
    evaluation_work,
    federation_readers,
    finish_metrics,
    info_spec,
    server_state_spec,
    server_step,
    structure_of,
    visit_spec,
)
from tfpfl.models import tree
from tfpfl.runs.aggregators import Aggregated


class Rows(NamedTuple):
    """Updates side by side while they are collected."""

    client_ids: Any
    parts: tuple


def federate(algorithm: Algorithm, data, *, held_out: Sequence[str] = (), pack: int = 1, aggregator=None):
    """The algorithm as a `tff.templates.IterativeProcess`.

    Args:
        algorithm: what to run.
        data: a `Federation`, read by client id in the worker (visits are `Visit`); or a pair of `tf.TensorSpec`, the
            type of arrays (x [None, ...], y [None]) that every visit carries (`ClientData(x, y, info, key)`); or a
            `tf.data.DatasetSpec` of (x, y) or {'x', 'y'}, single examples or batches (`ClientData(dataset, (), info,
            key)`).
        held_out: as in `Simulation`; needs a Federation.
        pack: so many clients of the cohort are one of TFF's clients, which saves TFF's own work for each, and lets them
            share passes where `Simulation` would fuse them. For simulation: their sum is what leaves a worker. Needs a
            Federation, and an algorithm with one message for all and no rows.
        aggregator: a factory of `tff.aggregators` whose result is a mean, weighted or not; see `tfpfl.runs.aggregators`. The
            server's state is then an `Aggregated`.

    Returns:
        The process. Its `next` takes and gives client states in the order of the visits, in a `RoundOutput`. With
        `pack`, a `PackedProcess`, whose `initialize` and `next` are called in the same way.

    Raises:
        RuntimeError: TFF is not installed.
        ValueError: a type of data that clients cannot be given.
    """
    tff = require_tff()
    use_local_worker()
    visit_type, readers = _visits(algorithm, data, held_out)
    server_type, state_type = _type(server_state_spec(algorithm)), _type(client_state_spec(algorithm))
    if pack > 1:
        packed_work = _work_of_a_pack(algorithm, data, readers, held_out, pack)
        visit_type, state_type = _several(visit_spec(algorithm.model.dtype)), _packed_type(algorithm)
    elif pack < 1:
        raise InvalidArgument(f"pack must be at least 1 client, found {pack}")
    if aggregator is not None and pack > 1:
        raise InvalidArgument(
            f"an aggregator works on single clients' updates; pack={pack} adds those of several before it"
        )
    step = server_step(algorithm)
    to_clients, message_type, unpack = _messenger(algorithm)
    work = packed_work if pack > 1 else _work_of_one(algorithm, readers)
    run_client = _client_computation(work, message_type, state_type, visit_type, unpack)

    @tff.tensorflow.computation
    def initialize_server():
        return _graph(algorithm.init_server)()

    result_type = run_client.type_signature.result
    collected_type, collect = _collector(result_type.contribution.rows)
    sums_type = tff.types.to_type((result_type.contribution.sums, result_type.contribution.weight))

    @tff.tensorflow.computation(server_type, sums_type, collected_type)
    def finish(server, sums, collected):
        def run(server, sums, collected):
            total = aggregation.Contribution(*sums, collected.parts)
            return step(server, aggregation.finish(algorithm, total, collected.client_ids), total.weight)

        return _graph(run)(server, sums, collected)

    @tff.tensorflow.computation(result_type.metric_sums)
    def finish_sums(summed):
        return _graph(finish_metrics)(summed)

    first, add = _adding(algorithm, aggregator, result_type.contribution)

    @tff.federated_computation
    def initialize():
        server = tff.federated_eval(initialize_server, tff.SERVER)
        return server if aggregator is None else tff.federated_zip(Aggregated(server, first()))

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(state_type, tff.CLIENTS),
        tff.FederatedType(visit_type, tff.CLIENTS),
    )
    def next_round(state, states, visits):
        server, adding = (state, None) if aggregator is None else (state.own, state.aggregator)
        results = tff.federated_map(run_client, (to_clients(server, visits), states, visits))
        contribution = results.contribution
        adding, sums = add(adding, contribution)
        new_server = tff.federated_map(finish, (server, sums, collect(visits.info.client_id, contribution.rows)))
        if aggregator is not None:
            new_server = tff.federated_zip(Aggregated(new_server, adding))
        metrics = tff.federated_map(finish_sums, tff.federated_sum(results.metric_sums))
        return RoundOutput(new_server, results.state, metrics, results.metrics)

    process = tff.templates.IterativeProcess(initialize, next_round)
    return process if pack == 1 else PackedProcess(process, algorithm, pack)


def _adding(algorithm, aggregator, contribution_type):
    """(() -> the aggregator's state, (state, contributions) -> (new state, (their sums, the sum of their weights)))."""
    tff = require_tff()
    if aggregator is None:

        def add(state, contribution):
            sums = tff.federated_sum(contribution.sums), tff.federated_sum(contribution.weight)
            return state, tff.federated_zip(sums)

        return None, add

    weighted = isinstance(aggregator, tff.aggregators.WeightedAggregationFactory)
    averaged = [kind == "mean" for kind in kinds(algorithm) if kind != "rows"]
    expected = algorithm.population.clients_per_round

    @tff.tensorflow.computation(contribution_type.sums, contribution_type.weight)
    def value(sums, weight):
        def update(part):
            return tf.nest.map_structure(lambda x: tf.math.divide_no_nan(x, tf.cast(weight, x.dtype)), part)

        return tuple(update(part) if weighted or mean else part for part, mean in zip(sums, averaged, strict=True))

    @tff.tensorflow.computation(value.type_signature.result, contribution_type.weight)
    def as_sums(mean, weight):
        weight = weight if weighted else tf.constant(expected, weight.dtype)
        return tree.scale(weight, mean), weight

    as_float = tff.tensorflow.computation(lambda weight: tf.cast(weight, tf.float32), contribution_type.weight)
    more = (as_float.type_signature.result,) if weighted else ()
    process = aggregator.create(value.type_signature.result, *more)

    def add(state, contribution):
        values = tff.federated_map(value, (contribution.sums, contribution.weight))
        more = (tff.federated_map(as_float, contribution.weight),) if weighted else ()
        output = process.next(state, values, *more)
        return output.state, tff.federated_map(as_sums, (output.result, tff.federated_sum(contribution.weight)))

    return process.initialize, add


class Part(NamedTuple):
    """What one of several machines gives of a round, for some clients of the cohort."""

    client_states: list
    client_metrics: list
    rows: list  # a client's `Contribution.rows`
    sums: tuple  # of the clients' `Contribution.sums`
    weight: Any  # of the clients' `Contribution.weight`
    metric_sums: dict


def federated_part(algorithm: Algorithm, federation, held_out: Sequence[str] = ()):
    """The clients' side of a round: (message, state@CLIENTS, visit@CLIENTS) -> `Part`, its sums @SERVER.

    The message is @SERVER where all clients get the same, @CLIENTS where each gets its own. The coordinator makes it,
    so that of the server's state no machine sees more than what its clients are sent.

    Args:
        algorithm, federation, held_out: as in `federate`.

    Raises:
        RuntimeError: TFF is not installed.
    """
    tff = require_tff()
    visit_type, readers = _visits(algorithm, federation, held_out)
    own = algorithm.message_per_client
    client_id = (tf.TensorSpec([], tf.int32),) if own else ()
    message_type = _type(structure_of(algorithm.message, server_state_spec(algorithm), *client_id))
    state_type = _type(client_state_spec(algorithm))
    run_client = _client_computation(_work_of_one(algorithm, readers), message_type, state_type, visit_type)

    @tff.federated_computation(
        tff.FederatedType(message_type, tff.CLIENTS if own else tff.SERVER),
        tff.FederatedType(state_type, tff.CLIENTS),
        tff.FederatedType(visit_type, tff.CLIENTS),
    )
    def part(message, states, visits):
        messages = message if own else tff.federated_broadcast(message)
        results = tff.federated_map(run_client, (messages, states, visits))
        contribution = results.contribution
        sums = map(tff.federated_sum, (contribution.sums, contribution.weight, results.metric_sums))
        return Part(results.state, results.metrics, contribution.rows, *sums)

    return part


def _work_of_one(algorithm, readers):
    """(message, client state, visit) -> ClientResult"""
    work = client_work(algorithm, readers)
    return lambda message, state, visit: client_result(algorithm, work(message, state, visit), visit)


def _client_computation(work, message_type, state_type, visit_type, unpack=lambda message: message):
    """What one of TFF's clients runs, as a computation."""
    tff = require_tff()

    @tff.tensorflow.computation(message_type, state_type, visit_type)
    def run_client(message, state, visit):
        return _graph(lambda message, state, visit: work(unpack(message), state, visit))(message, state, visit)

    return run_client


class PackedProcess:
    """A process whose clients in TFF are `pack` clients of the cohort each.

    Args:
        process: the `tff.templates.IterativeProcess` from (server, Packed states, visits side by side).
    """

    def __init__(self, process, algorithm: Algorithm, pack: int):
        self.process, self.pack, self._spec = process, pack, client_state_spec(algorithm)

    def initialize(self):
        """The server's state before round 1."""
        return self.process.initialize()

    def next(self, server, client_states: list, visits: list) -> RoundOutput:
        """One round, as that of `Simulation`."""
        check_visits(client_states, visits)
        packs = [slice(i, i + self.pack) for i in range(0, len(visits), self.pack)]
        states = [Packed.made(client_states[some]) for some in packs]
        output = self.process.next(server, states, [side_by_side(visits[some]) for some in packs])
        new_states = [s for packed in output.client_states for s in Packed(*packed).each(self._spec)]
        metrics = [m for some in output.client_metrics for m in one_each(some, next(iter(some.values())))]
        return RoundOutput(output.server, new_states, output.metrics, metrics)


def _work_of_a_pack(algorithm, data, readers, held_out, pack):
    """(message, Packed states, visits side by side) -> ClientResult: what TFF runs for `pack` clients.

    Raises:
        ValueError: they cannot be run together.
    """
    if not hasattr(data, "reader"):
        raise InvalidArgument(f"pack={pack} needs a Federation: the clients of a pack are read by id")
    if algorithm.message_per_client or "rows" in kinds(algorithm):
        raise InvalidArgument(
            f"pack={pack} is for algorithms whose clients get the same message and whose updates are added; this one "
            "has messages or rows for single clients"
        )
    fused = one_pass_of(algorithm) is not None
    work = fused_work(algorithm, data, held_out) if fused else looped_work(algorithm, readers)
    return lambda message, states, visits: ClientResult(*work(message, states, visits))


def _several(spec):
    """The type of structures side by side."""
    return _type(tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), spec))


def _packed_type(algorithm):
    """The type of `Packed` client states."""
    leaves = tf.nest.flatten(client_state_spec(algorithm))
    values = tuple(tf.TensorSpec([None], leaf.dtype) for leaf in leaves)
    return _type(Packed(values, tf.TensorSpec([len(leaves), None], tf.int32)))


def federated_evaluation(algorithm: Algorithm, federation, splits: Sequence[str] = ("validation", "test")):
    """(server@SERVER, state@CLIENTS, visit@CLIENTS) -> scores@CLIENTS: `Evaluation` as a federated computation."""
    tff = require_tff()
    use_local_worker()
    visit_type, readers = _visits(algorithm, federation, splits)
    server_type, state_type = _type(server_state_spec(algorithm)), _type(client_state_spec(algorithm))
    to_clients, message_type, unpack = _messenger(algorithm)
    work = evaluation_work(algorithm, readers)
    run_client = _client_computation(work, message_type, state_type, visit_type, unpack)

    @tff.federated_computation(
        tff.FederatedType(server_type, tff.SERVER),
        tff.FederatedType(state_type, tff.CLIENTS),
        tff.FederatedType(visit_type, tff.CLIENTS),
    )
    def evaluate(server, states, visits):
        return tff.federated_map(run_client, (to_clients(server, visits), states, visits))

    return evaluate


def _type(spec):
    """A TFF type from a structure of TensorSpec and DatasetSpec."""
    tff = require_tff()

    def leaf(s):
        if isinstance(s, tf.data.DatasetSpec):
            return tff.SequenceType(_type(s.element_spec))
        return tff.TensorType(s.dtype.as_numpy_dtype, s.shape.as_list())

    return tff.types.to_type(tf.nest.map_structure(leaf, spec))


def _graph(function):
    """TFF does not convert Python control flow and neither do we; a tf.function gives its graph a scope of its own."""
    return tf.function(function, autograph=False)


def _messenger(algorithm):
    """(how the server's state becomes messages at the clients, the type that arrives, how to unpack it)."""
    tff = require_tff()
    server_spec = server_state_spec(algorithm)
    server_type = _type(server_spec)
    if not algorithm.message_per_client:
        make = tff.tensorflow.computation(lambda server: _graph(algorithm.message)(server), server_type)

        def broadcast(server, visits):
            return tff.federated_broadcast(tff.federated_map(make, server))

        return broadcast, make.type_signature.result, lambda message: message

    spec = structure_of(algorithm.message, server_spec, tf.TensorSpec([], tf.int32))
    largest = int(algorithm.population.client_ids[-1]) + 1

    @tff.tensorflow.computation(server_type, tff.TensorType(tf.int32.as_numpy_dtype))
    def choose(server, client_id):
        return tuple(tf.nest.flatten(_graph(algorithm.message)(server, client_id)))

    as_key = tff.tensorflow.computation(lambda i: tf.reshape(i, [1]), tff.TensorType(tf.int32.as_numpy_dtype))

    def select(server, visits):
        keys = tff.federated_map(as_key, visits.info.client_id)
        return tff.federated_select(keys, tff.federated_value(largest, tff.SERVER), server, choose)

    def unpack(messages):
        return tf.nest.pack_sequence_as(spec, tf.nest.flatten(messages.get_single_element()))

    return select, tff.SequenceType(choose.type_signature.result), unpack


def _collector(parts_type):
    """(the type of the cohort's rows side by side, how to get there); with no rows, nothing is collected."""
    tff = require_tff()
    if not len(parts_type):
        empty = tff.types.to_type(Rows((), ()))
        none = tff.tensorflow.computation(lambda: Rows((), ()))
        return empty, lambda client_ids, parts: tff.federated_eval(none, tff.SERVER)

    value_type = tff.types.to_type(Rows(tff.TensorType(tf.int32.as_numpy_dtype), parts_type))
    value_spec = tff.types.type_to_tf_tensor_specs(value_type)
    stacked_spec = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), value_spec)
    stacked_type = _type(stacked_spec)

    @tff.tensorflow.computation
    def zero():
        return tf.nest.map_structure(
            lambda s: tf.compat.v1.placeholder_with_default(tf.zeros([0, *s.shape], s.dtype), [None, *s.shape]),
            value_spec,
        )

    def stack(a, b):
        return tf.nest.map_structure(lambda x, y: tf.concat([x, y], 0), a, b)

    accumulate = tff.tensorflow.computation(
        lambda rows, value: stack(rows, tf.nest.map_structure(lambda x: x[None], value)), (stacked_type, value_type)
    )
    merge = tff.tensorflow.computation(stack, (stacked_type, stacked_type))
    report = tff.tensorflow.computation(lambda rows: rows, stacked_type)

    def collect(client_ids, parts):
        value = tff.federated_zip(Rows(client_ids, parts))
        return tff.federated_aggregate(value, zero(), accumulate, merge, report)

    return stacked_type, collect


def _visits(algorithm, data, held_out):
    """(the type of a visit, how its examples are read)."""
    dtype = algorithm.model.dtype
    if hasattr(data, "reader"):
        return _type(visit_spec(dtype)), federation_readers(algorithm, data, held_out)
    if held_out:
        raise InvalidArgument(
            "held-out splits are read from a Federation; this process was built for the type of examples"
        )
    key = tf.TensorSpec([2], tf.int32)
    if isinstance(data, tf.data.DatasetSpec):
        return _type(ClientData(data, (), info_spec(dtype), key)), Readers(_read_dataset(algorithm.model), {})
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(s, tf.TensorSpec) for s in data):
        return _type(ClientData(*data, info_spec(dtype), key)), ARRAYS
    raise InvalidArgument(
        "data must be a Federation, a pair of tf.TensorSpec for (x, y), or a tf.data.DatasetSpec; "
        f"found {type(data).__name__}"
    )


def _read_dataset(model):
    def read(visit):
        dataset = visit.x
        spec = dataset.element_spec
        if isinstance(spec, dict):
            if set(spec) != {"x", "y"}:
                raise InvalidArgument(
                    f"a client's dataset must have elements (x, y) or {{'x', 'y'}}; found the keys {sorted(spec)}"
                )
            dataset, spec = dataset.map(lambda e: (e["x"], e["y"])), (spec["x"], spec["y"])
        if spec[0].shape.rank == len(model.input_shape) + 1:
            dataset = dataset.unbatch()
        x, y = dataset.batch(2**30).get_single_element()
        return tf.cast(x, model.dtype), tf.cast(tf.reshape(y, [-1]), tf.int32)

    return read
