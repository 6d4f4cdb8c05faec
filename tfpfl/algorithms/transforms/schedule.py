"""`scheduled(algorithm, ...)` is the algorithm whose learning rates follow a schedule over the rounds."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData, Exchange, OnePass
from tfpfl.algorithms.exchanges import aggregate_of_one, before_work, first_of
from tfpfl.algorithms.parts.schedules import Now, factor_of, factored
from tfpfl.algorithms.transforms.along import as_message, in_own, of_own
from tfpfl.checks import InvalidArgument, traced_by_design, unknown
from tfpfl.models import tree


class Scheduled(NamedTuple):
    """The server's state, or a message, together with the number of the round that is computed next."""

    own: Any  # the algorithm's server state, or its message
    round_num: Any  # int32 []: 1, 2, ...


def scheduled(
    algorithm: Algorithm, schedule: str | Callable, *, of: Sequence[str] = (), rounds: int | None = None
) -> Algorithm:
    """The algorithm whose learning rates are multiplied by a factor that depends on the round.

    This holds for the work of clients and for the server's step. Fine-tuning before a prediction and the adaptation of
    new clients are not part of a round, and have the full rates.

    The server's state has the number of the round. It grows by 1 with every step of the server. After a round in which
    no update arrived, `at_round` sets it, which `Training` does before every round. A client computes the factor from
    the number of the round, which every protocol sends anyway; so 'bytes_down' does not count it.

    Args:
        algorithm: an `Algorithm` whose rates are written with `tfpfl.algorithms.parts.rate` or `paced`, as those of
            tfpfl are.
        schedule: a text such as 'cosine:0:200', or a function (t) -> factor; see
            `tfpfl.algorithms.parts.schedules.factor_of`.
        of: the names of the rates that follow it, such as ['beta']; (): all but those that multiply what scheduled
            steps have made.
        rounds: the last round of 'cosine', if the text has none.

    Returns:
        The algorithm, whose server state and messages are `Scheduled`.

    Raises:
        InvalidArgument: the schedule's text is wrong.
    """
    at = factor_of(schedule, rounds)
    dtype, names = algorithm.model.dtype, tuple(of)
    asked: dict[str, bool] = {}

    def in_round(round_num: Any) -> Any:
        return factored(Now(tree.as_dtype(at(tf.cast(round_num, tf.float64)), dtype), names, asked))

    def client_update(message: Scheduled, state: Any, data: Any) -> Any:
        with in_round(message.round_num):
            return algorithm.client_update(message.own, state, data)

    def server_update(server: Scheduled, aggregate: Any, total_weight: Any) -> Scheduled:
        with in_round(server.round_num):
            own = algorithm.step(server.own, aggregate, total_weight)
        return Scheduled(own, server.round_num + 1)

    def message(server: Scheduled, *client_id: Any) -> Scheduled:
        with in_round(server.round_num):
            return Scheduled(algorithm.message(server.own, *client_id), server.round_num)

    def one_pass() -> OnePass | None:
        if algorithm.one_pass is None:
            return None
        theta, on_features, join = algorithm.one_pass

        def scheduled_on_features(message: Scheduled, state: Any, phi: Any, data: Any) -> Any:
            with in_round(message.round_num):
                return on_features(message.own, state, phi, data)

        return OnePass(of_own(theta), scheduled_on_features, join)

    def first() -> Exchange | None:
        if algorithm.first is None:
            return None
        own, step = algorithm.first, first_of(algorithm).step

        def to_client(server: Scheduled, *client_id: Any) -> Scheduled:
            with in_round(server.round_num):
                return Scheduled(own.message(server.own, *client_id), server.round_num)

        def work(message: Scheduled, state: Any, data: Any) -> Any:
            with in_round(message.round_num):
                return own.client_update(message.own, state, data)

        def finish(server: Scheduled, aggregate: Any, total_weight: Any) -> Scheduled:
            with in_round(server.round_num):  # the round goes on: its number stays
                return server._replace(own=step(server.own, aggregate, total_weight))

        message = as_message(first_of(algorithm), to_client)
        return own._replace(message=message, client_update=work, server_update=finish)

    adapt = algorithm.adapt
    return algorithm._replace(
        init_server=lambda: Scheduled(algorithm.init_server(), tf.constant(1)),
        message=as_message(algorithm, message),
        client_update=client_update,
        server_update=server_update,
        personal_model=of_own(algorithm.personal_model),
        predictor=of_own(algorithm.predictor),
        local_model=of_own(algorithm.local_model),
        global_model=of_own(algorithm.global_model),
        begins=of_own(algorithm.begins),
        matrices=of_own(algorithm.matrices),
        adapt=adapt and adapt._replace(start=of_own(adapt.start), message=in_own(adapt.message)),
        one_pass=one_pass(),
        first=first(),
    )


def counted_part(message: Any) -> Any:
    """The part of a message whose bytes are counted: all but the number of the round."""
    return message.own if isinstance(message, Scheduled) else message


def at_round(server: Any, round_num: int) -> Any:
    """The server's state with this number of the round, if its rates follow a schedule; otherwise as it is.

    For a loop of your own in which a round may have no client: call it before `next`.

    Args:
        server: the state; `scheduled` may be within other transforms and aggregators that keep it as `own`.
        round_num: the number of the round that comes, >= 1.
    """
    if isinstance(server, Scheduled):
        return server._replace(round_num=tf.constant(round_num))
    if hasattr(server, "_replace") and "own" in server._fields:
        return server._replace(own=at_round(server.own, round_num))
    return server


def check_follows(algorithm: Algorithm, of: Sequence[str] = ()) -> None:
    """Checks that rates of an algorithm follow a schedule. Its work is traced for this, and nothing is computed.

    Args:
        algorithm: before `scheduled`.
        of: the names of the rates that shall follow it; (): those that do by default.

    Raises:
        InvalidArgument: there is no such rate. The message says which there are.
    """
    asked: dict[str, bool] = {}
    dtype, population, model = algorithm.model.dtype, algorithm.population, algorithm.model

    def one_round() -> Any:
        with factored(Now(tf.ones([], dtype), (), asked)):
            info = population.info(int(population.client_ids[0]), dtype)
            server = algorithm.init_server()
            x, y = model.blank_examples(int(info.num_examples), info.num_classes)
            data = ClientData(x, y, info, tf.zeros([2], tf.int32))
            output = algorithm.client_update(*before_work(algorithm, server, algorithm.init_client(info), data), data)
            return algorithm.step(server, aggregate_of_one(algorithm, output, info), tf.ones([], dtype))

    traced_by_design(tf.function(one_round, autograph=False)).get_concrete_function()
    by_default = [name for name, is_default in asked.items() if is_default]
    if not asked or not (of or by_default):
        raise InvalidArgument(
            "no learning rate of this method follows a schedule: nothing in its work of clients and in its server's "
            'step asks for the rate of the round. In a method of your own, write rate("eta", eta) of '
            "tfpfl.algorithms.parts instead of eta, or use its local_solver"
        )
    for name in of:
        if name not in asked:
            raise InvalidArgument(unknown("learning rate of this method that follows a schedule", name, sorted(asked)))
