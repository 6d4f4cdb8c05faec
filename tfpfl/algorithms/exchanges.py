"""The two exchanges of a round, each as an algorithm with one exchange; see `Exchange` in contract.py.

Engines run a round with two exchanges as a round of `first_of` and then one of `second_of`, and transforms change one
exchange after the other and put them together again with `of_both`. Both algorithms have a `Between` as client state.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, Between, ClientData, ClientOutput, Exchange, Rows, Tree
from tfpfl.data.population import ClientInfo, Tensor
from tfpfl.data.randomness import Fold
from tfpfl.models import passes, tree


def first_of(algorithm: Algorithm) -> Algorithm:
    """The first exchange of an algorithm that has two, as an algorithm with one."""
    first = algorithm.first
    assert first is not None

    def client_update(message: Tree, between: Between, data: ClientData) -> ClientOutput:
        output = first.client_update(message, between.state, data)
        return output._replace(state=Between(between.state, output.state))

    return _alone(algorithm, client_update)._replace(
        message=first.message, server_update=first.server_update, aggregate=first.aggregate
    )


def second_of(algorithm: Algorithm) -> Algorithm:
    """The second exchange of an algorithm that has two, as an algorithm with one."""

    def client_update(message: Tree, between: Between, data: ClientData) -> ClientOutput:
        output = algorithm.client_update(message, between, data)
        return output._replace(state=Between(output.state, between.kept))

    return _alone(algorithm, client_update)


def _alone(algorithm: Algorithm, client_update: Callable) -> Algorithm:
    assert algorithm.first is not None
    keeps, init_client, local_model = algorithm.first.keeps, algorithm.init_client, algorithm.local_model
    return algorithm._replace(
        init_client=lambda info: Between(init_client(info), keeps(info)),
        client_update=client_update,
        local_model=lambda message, output: local_model(message, output._replace(state=output.state.state)),
        first=None,
        one_pass=None,
    )


def of_both(algorithm: Algorithm, first: Algorithm, second: Algorithm, keeps: Callable | None = None) -> Algorithm:
    """Puts changed exchanges together again.

    Args:
        algorithm: the algorithm that had them.
        first, second: `first_of` and `second_of` of it, with other messages, clients' work, aggregates or server steps.
        keeps: the new `Exchange.keeps`; None: the clients keep what they kept.
    """
    assert algorithm.first is not None
    held: Callable = keeps or algorithm.first.keeps

    def first_update(message: Tree, state: Tree, data: ClientData) -> ClientOutput:
        output = first.client_update(message, Between(state, held(data.info)), data)
        return output._replace(state=output.state.kept)

    def second_update(message: Tree, between: Between, data: ClientData) -> ClientOutput:
        output = second.client_update(message, between, data)
        return output._replace(state=output.state.state)

    def local_model(message: Tree, output: ClientOutput) -> Tree:
        return second.local_model(message, output._replace(state=Between(output.state, ())))

    return algorithm._replace(
        message=second.message,
        client_update=second_update,
        server_update=second.server_update,
        aggregate=second.aggregate,
        local_model=local_model,
        one_pass=None,
        first=Exchange(first.message, first_update, first.server_update, held, first.aggregate),
    )


def on_both(algorithm: Algorithm, transform: Callable) -> Algorithm:
    """A transform of algorithms with one exchange, applied to each exchange of an algorithm that has two.

    Args:
        algorithm: an `Algorithm` with a `first`.
        transform: (Algorithm) -> Algorithm with the same server state and client states.
    """
    return of_both(algorithm, transform(first_of(algorithm)), transform(second_of(algorithm)))


def first_key(key: Tensor) -> Tensor:
    """The key of a visit's first exchange: int32 [2], a function of the visit's key."""
    return passes.fold(key, Fold.FIRST_EXCHANGE)


def merged_metrics(first: dict, second: dict) -> dict:
    """A client's metrics of both exchanges: bytes are sums, 'finite' holds for both, else the second counts."""
    metrics = {**first, **second}
    for name in metrics:
        if name.startswith("bytes_"):
            metrics[name] = first[name] + second[name]
    metrics["finite"] = first["finite"] * second["finite"]
    return metrics


def before_work(algorithm: Algorithm, server: Tree, state: Tree, data: ClientData) -> tuple[Tree, Tree]:
    """The message and the client state with which `client_update` is called, for a client that is the whole cohort.

    With two exchanges, its first one is computed here.
    """
    if algorithm.first is not None:
        first, info = first_of(algorithm), data.info
        between = Between(state, algorithm.first.keeps(info))
        output = first.client_update(message_for(first, server, info), between, data._replace(key=first_key(data.key)))
        server = first.step(server, aggregate_of_one(first, output, info), output.weight)
        state = output.state
    return message_for(algorithm, server, data.info), state


def message_for(algorithm: Algorithm, server: Tree, info: ClientInfo) -> Tree:
    """The message to a client, in both forms of `Algorithm.message`."""
    return algorithm.message(server, *([info.client_id] if algorithm.message_per_client else []))


def aggregate_of_one(algorithm: Algorithm, output: ClientOutput, info: ClientInfo) -> Any:
    """The aggregate of a cohort of one client, whose weight is not 0."""

    def of(kind: str, part: Tree) -> Any:
        if kind == "rows":
            rows = tf.nest.map_structure(lambda leaf: tf.convert_to_tensor(leaf)[None], part)
            return Rows(tf.convert_to_tensor(info.client_id)[None], rows)
        return tree.scale(output.weight, part) if kind == "sum" else part

    if isinstance(algorithm.aggregate, str):
        return of(algorithm.aggregate, output.update)
    return type(algorithm.aggregate)(*map(of, algorithm.aggregate, output.update))
