"""A round with two exchanges as one TFF computation: the rounds of both exchanges, one after the other."""

from typing import Any

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, Between
from tfpfl.engines.exchanges import begin, end
from tfpfl.engines.tff.computations import as_graph, tff_type
from tfpfl.engines.tff.worker import require_tff
from tfpfl.engines.visit import RoundOutput, Visit, client_state_spec, finish_metrics, visit_spec


def federate_both(algorithm: Algorithm, first: Any, second: Any) -> Any:
    """Makes the computation of a round with two exchanges.

    Args:
        algorithm: one with a `first`.
        first, second: the computations of a round of `first_of` and of `second_of` it:
            (server@SERVER, `Between`@CLIENTS, visit@CLIENTS) -> RoundOutput.

    Returns:
        (server@SERVER, state@CLIENTS, visit@CLIENTS) -> RoundOutput.
    """
    tff = require_tff()
    server_type, _, visits_type = first.type_signature.parameter
    state_type, scalars_type = tff_type(client_state_spec(algorithm)), tff_type(visit_spec(algorithm.model.dtype))

    @tff.tensorflow.computation(state_type, scalars_type)
    def begin_one(state, scalars):
        return as_graph(begin(algorithm))(state, scalars)

    visit_is = visits_type.member.python_container

    @tff.federated_computation(state_type, visits_type.member)
    def begin_round(state, visit):  # a visit may carry a dataset, which TensorFlow code cannot hand on
        between, scalars = begin_one(state, Visit(visit.info, visit.key))
        carried = {name: getattr(visit, name) for name in visit_is._fields}
        return Between(between.state, between.kept), visit_is(**(carried | {"key": scalars.key}))

    metrics_types = (exchange.type_signature.result.client_metrics.member for exchange in (first, second))

    @tff.tensorflow.computation(*metrics_types, scalars_type)
    def end_one(first, second, scalars):
        return as_graph(end)(first, second, scalars)

    @tff.federated_computation(visits_type.member)
    def scalars_of(visit):
        return Visit(visit.info, visit.key)

    @tff.tensorflow.computation(end_one.type_signature.result[1])
    def finish_sums(summed):
        return as_graph(finish_metrics)(summed)

    @tff.tensorflow.computation(second.type_signature.result.client_states.member)
    def state_of(between):
        return tf.nest.map_structure(tf.identity, between.state)

    @tff.federated_computation(server_type, tff.FederatedType(state_type, tff.CLIENTS), visits_type)
    def next_round(server, client_states, visits):
        started = tff.federated_map(begin_round, (client_states, visits))
        begun = first(server, started[0], started[1])
        ended = second(begun.server, begun.client_states, visits)
        scalars = tff.federated_map(scalars_of, visits)
        ends = tff.federated_map(end_one, (begun.client_metrics, ended.client_metrics, scalars))
        metrics = tff.federated_map(finish_sums, tff.federated_sum(ends[1]))
        return RoundOutput(ended.server, tff.federated_map(state_of, ended.client_states), metrics, ends[0])

    return next_round
