"""Makes TFF federated computations of an algorithm; the clients' states are an argument and a result of each round.

    initialize: ( -> server@SERVER)
    next: (server@SERVER, state@CLIENTS, visit@CLIENTS)
          -> (server@SERVER, state@CLIENTS, metrics@SERVER, metrics@CLIENTS)

A visit is the client's id, its scalars and a random key; the worker reads the examples from the federation's files. As
in TFF's tutorials, a visit may also carry the examples, as arrays or as a `tf.data.Dataset`.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData, check_is_algorithm, check_one_exchange, kinds
from tfpfl.algorithms.exchanges import first_of, second_of
from tfpfl.checks import InvalidArgument, check_listed
from tfpfl.engines import aggregation
from tfpfl.engines.exchanges import TwoExchanges
from tfpfl.engines.packed import Packed, fused_work, looped_work, one_each, one_pass_of, side_by_side
from tfpfl.engines.rounds import RoundCheck
from tfpfl.engines.tff.aggregators import Aggregated, factory_of, make_adder
from tfpfl.engines.tff.computations import (
    as_graph,
    checked,
    client_computation,
    collector,
    messenger,
    tff_type,
    visit_type_and_readers,
    work_of_one,
)
from tfpfl.engines.tff.exchanges import federate_both
from tfpfl.engines.tff.worker import on_local_worker, require_tff, use_local_worker
from tfpfl.engines.visit import (
    ClientResult,
    RoundOutput,
    Visit,
    client_state_spec,
    finish_metrics,
    server_state_spec,
    server_step,
    structure_of,
    visit_spec,
)


def federate(algorithm: Algorithm, data, *, held_out: Sequence[str] = (), pack: int = 1, aggregator=None):
    """Makes a `tff.templates.IterativeProcess` that trains an algorithm.

    Args:
        algorithm: the algorithm to run.
        data: where the examples come from, one of three. A `Federation`: the worker reads them by client id, and visits
            are `Visit`. A pair of `tf.TensorSpec`, (x [None, ...], y [None]): every visit carries arrays of this type,
            `ClientData(x, y, info, key)`. A `tf.data.DatasetSpec` of (x, y) or {'x', 'y'}, single examples or batches:
            every visit carries such a dataset, `ClientData(dataset, (), info, key)`.
        held_out: see `Simulation`; needs a Federation.
        pack: number of clients that are put into one TFF client, default 1. More save TFF's work per client, and let
            clients share passes as in `Simulation`. Use it for simulation only: a worker then returns sums over a pack.
            It needs a Federation, one message for all clients, and no rows.
        aggregator: a factory of `tff.aggregators` whose result is a mean, weighted or not, or a function () -> such a
            factory; see `tfpfl.runs.aggregators`. The server's state is then an `Aggregated`. Default: plain sums.

    Returns:
        The process. `next(server, client states, visits)` returns a `RoundOutput`, whose client states are in the order
        of the visits. Arrays that a visit carries are checked as in `Simulation`; a dataset is not read for that, so
        the caller must know that its labels are 0..K_i-1 and its examples finite. With `pack` > 1 it is a
        `PackedProcess` with the same two methods.

    Raises:
        Unavailable: TFF is not installed.
        InvalidArgument: `data` is of another kind; `held_out` or `pack` is used without a Federation; `pack` is less
            than 1, does not work for this algorithm, or is combined with an aggregator; or there is an aggregator, and
            the algorithm has a `balance` or a `first`, or the aggregator's result is a sum.
    """
    check_is_algorithm(algorithm)
    check_listed("held_out", held_out, "['test']")
    if not isinstance(pack, Integral) or pack < 1:
        raise InvalidArgument(f"pack must be at least 1 client, found {pack!r}: a whole number")
    tff = require_tff()
    use_local_worker()
    aggregator = factory_of(aggregator)
    if algorithm.first is not None:
        return _of_two_exchanges(algorithm, data, held_out, pack, aggregator)
    visit_type, readers = visit_type_and_readers(algorithm, data, held_out)
    visits_are = (Visit,) if hasattr(data, "reader") else (ClientData,)
    server_type, state_type = tff_type(server_state_spec(algorithm)), tff_type(client_state_spec(algorithm))
    if pack > 1:
        packed_work = _work_of_a_pack(algorithm, data, readers, held_out, pack)
        visit_type, state_type = _several(visit_spec(algorithm.model.dtype)), _packed_type(algorithm)
    if aggregator is not None and pack > 1:
        raise InvalidArgument(
            f"an aggregator needs the updates of single clients, but pack={pack} adds several before it: use pack=1"
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
    def next_round(server, client_states, visits):
        server, adding = (server, None) if aggregator is None else (server.own, server.aggregator)
        results = tff.federated_map(run_client, (to_clients(server, visits), client_states, visits))
        contribution = results.contribution
        adding, sums = add(adding, contribution)
        new_server = tff.federated_map(finish, (server, sums, collect(visits.info.client_id, contribution.rows)))
        if aggregator is not None:
            new_server = tff.federated_zip(Aggregated(new_server, adding))
        metrics = tff.federated_map(finish_sums, tff.federated_sum(results.metric_sums))
        return RoundOutput(new_server, results.state, metrics, results.metrics)

    if pack > 1:
        process = tff.templates.IterativeProcess(on_local_worker(initialize), on_local_worker(next_round))
        return PackedProcess(process, algorithm, pack)
    computation = checked(next_round, RoundCheck(algorithm, visits_are))
    return tff.templates.IterativeProcess(on_local_worker(initialize), computation)


def _of_two_exchanges(algorithm, data, held_out, pack, aggregator):
    """`federate` for an algorithm that has a `first`."""
    if aggregator is not None:
        check_one_exchange(algorithm, "an aggregator of TFF")
    first = federate(first_of(algorithm), data, pack=pack)
    second = federate(second_of(algorithm), data, held_out=held_out, pack=pack)
    if pack > 1:
        return TwoExchanges(algorithm, first.next, second.next, second.initialize)
    process = federate_both(algorithm, first.next, second.next)
    kinds = (Visit,) if hasattr(data, "reader") else (ClientData,)
    return require_tff().templates.IterativeProcess(second.initialize, checked(process, RoundCheck(algorithm, kinds)))


class ShardResult(NamedTuple):
    """What one of several TFF workers returns for its shard of a round's clients."""

    client_states: list  # the new state of every client of the shard
    client_metrics: list  # a dict of scalars for every client
    rows: list  # `Contribution.rows` of every client
    sums: tuple  # the sum of the clients' `Contribution.sums`
    weight: Any  # the sum of the clients' `Contribution.weight`
    metric_sums: dict  # the sum of what the clients add to the round's metrics


def federated_shard(algorithm: Algorithm, federation, held_out: Sequence[str] = ()):
    """Makes the clients' side of a round as a TFF computation, for one of several TFF workers.

    The coordinator makes the messages, so that a worker sees nothing of the server's state but what its clients get.

    Args:
        algorithm, federation, held_out: see `federate`.

    Returns:
        (message, state@CLIENTS, visit@CLIENTS) -> `ShardResult`, with its sums @SERVER. The message is @SERVER if all
        clients get the same, and @CLIENTS if each gets its own.

    Raises:
        Unavailable: TFF is not installed.
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
    """A process that puts `pack` clients of a round into one TFF client.

    Args:
        process: a `tff.templates.IterativeProcess` whose rounds take (server, Packed states, stacked visits).
        algorithm: the algorithm that it trains.
        pack: number of clients in one TFF client; the last TFF client may have fewer.
    """

    def __init__(self, process, algorithm: Algorithm, pack: int):
        self.process, self.pack, self._spec = process, pack, client_state_spec(algorithm)
        self._check = RoundCheck(algorithm)

    def initialize(self):
        """The server's state before round 1."""
        return self.process.initialize()

    def next(self, server, client_states: list, visits: list = None) -> RoundOutput:  # type: ignore[assignment]
        """Executes one round; arguments, result and errors are those of `Simulation.next`."""
        self._check(client_states, visits)
        packs = [slice(i, i + self.pack) for i in range(0, len(visits), self.pack)]
        states = [Packed.made(client_states[some]) for some in packs]
        output = self.process.next(server, states, [side_by_side(visits[some]) for some in packs])
        new_states = [s for packed in output.client_states for s in Packed(*packed).each(self._spec)]
        metrics = [m for some in output.client_metrics for m in one_each(some, next(iter(some.values())))]
        return RoundOutput(output.server, new_states, output.metrics, metrics)


def _work_of_a_pack(algorithm, data, readers, held_out, pack):
    """Makes (message, Packed states, stacked visits) -> ClientResult, the work of a TFF client with `pack` clients.

    Raises:
        InvalidArgument: `data` is not a Federation, or the algorithm has messages or rows for single clients.
    """
    if not hasattr(data, "reader"):
        raise InvalidArgument(
            f"pack={pack} needs a Federation, from which clients are read by id; found {type(data).__name__}"
        )
    if algorithm.message_per_client or "rows" in kinds(algorithm):
        raise InvalidArgument(
            f"pack={pack} needs an algorithm that sends all clients the same message and adds their updates; this one "
            "has messages or rows for single clients. Use pack=1"
        )
    fused = one_pass_of(algorithm) is not None
    work = fused_work(algorithm, data, held_out) if fused else looped_work(algorithm, readers)
    return lambda message, states, visits: ClientResult(*work(message, states, visits))


def _several(spec):
    """The TFF type of stacked structures: `spec` with a new, open first axis."""
    return tff_type(tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), spec))


def _packed_type(algorithm):
    """The TFF type of an algorithm's `Packed` client states."""
    leaves = tf.nest.flatten(client_state_spec(algorithm))
    values = tuple(tf.TensorSpec([None], leaf.dtype) for leaf in leaves)
    return tff_type(Packed(values, tf.TensorSpec([len(leaves), None], tf.int64)))
