"""The parts of which federated computations are made: TFF types, the client's work, messages, rows, visits."""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import ClientData
from tfpfl.checks import InvalidArgument, traced_by_design
from tfpfl.engines.tff.datasets import check_dataset, dataset_reader
from tfpfl.engines.tff.worker import on_local_worker, require_tff
from tfpfl.engines.visit import (
    ARRAYS,
    Readers,
    client_result,
    client_work,
    federation_readers,
    info_spec,
    server_state_spec,
    structure_of,
    visit_spec,
)


class CollectedRows(NamedTuple):
    """The updates of r clients, stacked as rows while TFF collects them."""

    client_ids: Any  # int32 [r]
    parts: tuple  # arrays [r, ...]


def work_of_one(algorithm, readers):
    """Makes (message, client state, visit) -> ClientResult, the work of one client."""
    work = client_work(algorithm, readers)
    return lambda message, state, visit: client_result(algorithm, work(message, state, visit), visit)


def client_computation(work, message_type, state_type, visit_type, unpack=lambda message: message):
    """Makes the TFF computation of one client's work.

    Args:
        work: (message, client state, visit) -> result.
        message_type, state_type, visit_type: the TFF types of its arguments.
        unpack: (message as TFF delivers it) -> the message for `work`; see `messenger`.
    """
    tff = require_tff()

    @tff.tensorflow.computation(message_type, state_type, visit_type)
    def run_client(message, state, visit):
        return as_graph(lambda message, state, visit: work(unpack(message), state, visit))(message, state, visit)

    return run_client


def tff_type(spec):
    """Converts a structure of TensorSpec and DatasetSpec to a TFF type."""
    tff = require_tff()

    def leaf(s):
        if isinstance(s, tf.data.DatasetSpec):
            return tff.SequenceType(tff_type(s.element_spec))
        return tff.TensorType(s.dtype.as_numpy_dtype, s.shape.as_list())

    return tff.types.to_type(tf.nest.map_structure(leaf, spec))


def as_graph(function):
    """Wraps a function in a `tf.function`, which gives its graph a scope of its own. Autograph is off, as in TFF."""
    return traced_by_design(tf.function(function, autograph=False))


def messenger(algorithm):
    """Makes the way from the server's state to the clients' messages.

    Returns:
        A function (server@SERVER, visits@CLIENTS) -> messages@CLIENTS; the TFF type of a message that arrives; and a
        function that unpacks it. One message for all is broadcast; messages per client go through `federated_select`.
    """
    tff = require_tff()
    server_spec = server_state_spec(algorithm)
    server_type = tff_type(server_spec)
    if not algorithm.message_per_client:
        make = tff.tensorflow.computation(lambda server: as_graph(algorithm.message)(server), server_type)

        def broadcast(server, visits):
            return tff.federated_broadcast(tff.federated_map(make, server))

        return broadcast, make.type_signature.result, lambda message: message

    spec = structure_of(algorithm.message, server_spec, tf.TensorSpec([], tf.int32))
    largest = int(algorithm.population.client_ids[-1]) + 1

    @tff.tensorflow.computation(server_type, tff.TensorType(tf.int32.as_numpy_dtype))
    def choose(server, client_id):
        return tuple(tf.nest.flatten(as_graph(algorithm.message)(server, client_id)))

    as_key = tff.tensorflow.computation(lambda i: tf.reshape(i, [1]), tff.TensorType(tf.int32.as_numpy_dtype))

    def select(server, visits):
        keys = tff.federated_map(as_key, visits.info.client_id)
        return tff.federated_select(keys, tff.federated_value(largest, tff.SERVER), server, choose)

    def unpack(messages):
        return tf.nest.pack_sequence_as(spec, tf.nest.flatten(messages.get_single_element()))

    return select, tff.SequenceType(choose.type_signature.result), unpack


def collector(parts_type):
    """Makes the way to collect the clients' updates as rows at the server.

    Args:
        parts_type: the TFF type of the parts of an update whose kind is 'rows'; empty if there are none.

    Returns:
        The TFF type of the `CollectedRows`, and a function (client_ids@CLIENTS, parts@CLIENTS) -> rows@SERVER.
    """
    tff = require_tff()
    if not len(parts_type):
        empty = tff.types.to_type(CollectedRows((), ()))
        none = tff.tensorflow.computation(lambda: CollectedRows((), ()))
        return empty, lambda client_ids, parts: tff.federated_eval(none, tff.SERVER)

    value_type = tff.types.to_type(CollectedRows(tff.TensorType(tf.int32.as_numpy_dtype), parts_type))
    value_spec = tff.types.type_to_tf_tensor_specs(value_type)
    stacked_spec = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), value_spec)
    stacked_type = tff_type(stacked_spec)

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
        value = tff.federated_zip(CollectedRows(client_ids, parts))
        return tff.federated_aggregate(value, zero(), accumulate, merge, report)

    return stacked_type, collect


def checked(computation, check):
    """A TFF computation (server, client states, visits) -> ..., whose arguments are checked before it computes.

    Args:
        computation: the TFF computation.
        check: the `RoundCheck` of its algorithm.
    """

    def check_call(*arguments, **named):
        given = dict(zip(("server", "client_states", "visits"), arguments, strict=False)) | named
        if "client_states" in given:  # otherwise TFF says what it takes
            check(given["client_states"], given.get("visits"))

    return on_local_worker(computation, check_call)


def visit_type_and_readers(algorithm, data, held_out):
    """Gives the TFF type of a visit, and the `Readers` of its examples.

    Args:
        algorithm, data, held_out: as in `tfpfl.federate`.

    Raises:
        InvalidArgument: `data` is of none of the three kinds; held-out splits are asked for without a Federation; the
            algorithm was built for other clients or examples; the backbone takes whole numbers and the examples are
            others; or a dataset has elements that the model cannot take, see `check_dataset`.
    """
    dtype = algorithm.model.dtype
    if hasattr(data, "reader"):
        return tff_type(visit_spec(dtype)), federation_readers(algorithm, data, held_out)
    if held_out:
        raise InvalidArgument(
            f"held-out splits {', '.join(map(str, held_out))} can be read only from a Federation; this process was "
            "built for the type of examples. Give a Federation, or no held_out"
        )
    key = tf.TensorSpec([2], tf.int32)
    if isinstance(data, tf.data.DatasetSpec):
        check_dataset(algorithm, data.element_spec)
        return tff_type(ClientData(data, (), info_spec(dtype), key)), Readers(dataset_reader(algorithm), {})
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(s, tf.TensorSpec) for s in tf.nest.flatten(data)):
        if algorithm.model.reads == "whole":
            if not data[0].dtype.is_integer:
                raise InvalidArgument(
                    "the backbone takes whole numbers (such as tokens for an Embedding), but the examples' type is "
                    f"{data[0].dtype.name}: give x as a tf.TensorSpec of integers"
                )
            as_floats = Readers(lambda visit: ARRAYS.train(visit._replace(x=tf.cast(visit.x, dtype))), {})
            return tff_type(ClientData(*data, info_spec(dtype), key)), as_floats
        return tff_type(ClientData(*data, info_spec(dtype), key)), ARRAYS
    raise InvalidArgument(
        "data must be a Federation, a pair of tf.TensorSpec for (x, y), or a tf.data.DatasetSpec; "
        f"found {type(data).__name__}"
    )
