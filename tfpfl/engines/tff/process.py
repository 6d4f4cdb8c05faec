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

from tfpfl.algorithms.contract import Algorithm, kinds
from tfpfl.checks import InvalidArgument
from tfpfl.engines import aggregation
from tfpfl.engines.packed import Packed, fused_work, looped_work, one_each, one_pass_of, side_by_side
from tfpfl.engines.rounds import check_visits
from tfpfl.engines.tff.aggregators import Aggregated, make_adder
from tfpfl.engines.tff.computations import (
    as_graph,
    client_computation,
    collector,
    messenger,
    tff_type,
    visit_type_and_readers,
    work_of_one,
)
from tfpfl.engines.tff.worker import require_tff, use_local_worker
from tfpfl.engines.visit import (
    ClientResult,
    RoundOutput,
    client_state_spec,
    finish_metrics,
    server_state_spec,
    server_step,
    structure_of,
    visit_spec,
)


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
        aggregator: a factory of `tff.aggregators` whose result is a mean, weighted or not; see
            `tfpfl.runs.aggregators`. The server's state is then an `Aggregated`.

    Returns:
        The process. Its `next` takes and gives client states in the order of the visits, in a `RoundOutput`. With
        `pack`, a `PackedProcess`, whose `initialize` and `next` are called in the same way.

    Raises:
        RuntimeError: TFF is not installed.
        ValueError: a type of data that clients cannot be given.
    """
    tff = require_tff()
    use_local_worker()
    visit_type, readers = visit_type_and_readers(algorithm, data, held_out)
    server_type, state_type = tff_type(server_state_spec(algorithm)), tff_type(client_state_spec(algorithm))
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
    to_clients, message_type, unpack = messenger(algorithm)
    work = packed_work if pack > 1 else work_of_one(algorithm, readers)
    run_client = client_computation(work, message_type, state_type, visit_type, unpack)

    @tff.tensorflow.computation
    def initialize_server():
        return as_graph(algorithm.init_server)()

    result_type = run_client.type_signature.result
    collected_type, collect = collector(result_type.contribution.rows)
    sums_type = tff.types.to_type((result_type.contribution.sums, result_type.contribution.weight))

    @tff.tensorflow.computation(server_type, sums_type, collected_type)
    def finish(server, sums, collected):
        def run(server, sums, collected):
            total = aggregation.Contribution(*sums, collected.parts)
            return step(server, aggregation.finish(algorithm, total, collected.client_ids), total.weight)

        return as_graph(run)(server, sums, collected)

    @tff.tensorflow.computation(result_type.metric_sums)
    def finish_sums(summed):
        return as_graph(finish_metrics)(summed)

    first, add = make_adder(algorithm, aggregator, result_type.contribution)

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


class ShardResult(NamedTuple):
    """What one of several machines gives of a round, for some clients of the cohort."""

    client_states: list
    client_metrics: list
    rows: list  # a client's `Contribution.rows`
    sums: tuple  # of the clients' `Contribution.sums`
    weight: Any  # of the clients' `Contribution.weight`
    metric_sums: dict


def federated_shard(algorithm: Algorithm, federation, held_out: Sequence[str] = ()):
    """The clients' side of a round: (message, state@CLIENTS, visit@CLIENTS) -> `ShardResult`, its sums @SERVER.

    The message is @SERVER where all clients get the same, @CLIENTS where each gets its own. The coordinator makes it,
    so that of the server's state no machine sees more than what its clients are sent.

    Args:
        algorithm, federation, held_out: as in `federate`.

    Raises:
        RuntimeError: TFF is not installed.
    """
    tff = require_tff()
    visit_type, readers = visit_type_and_readers(algorithm, federation, held_out)
    own = algorithm.message_per_client
    client_id = (tf.TensorSpec([], tf.int32),) if own else ()
    message_type = tff_type(structure_of(algorithm.message, server_state_spec(algorithm), *client_id))
    state_type = tff_type(client_state_spec(algorithm))
    run_client = client_computation(work_of_one(algorithm, readers), message_type, state_type, visit_type)

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
        return ShardResult(results.state, results.metrics, contribution.rows, *sums)

    return part


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
    return tff_type(tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), spec))


def _packed_type(algorithm):
    """The type of `Packed` client states."""
    leaves = tf.nest.flatten(client_state_spec(algorithm))
    values = tuple(tf.TensorSpec([None], leaf.dtype) for leaf in leaves)
    return tff_type(Packed(values, tf.TensorSpec([len(leaves), None], tf.int32)))
