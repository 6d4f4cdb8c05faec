"""`normalized`: an algorithm carries the moving statistics of a model with batch_norm='local' or 'shared'.

Statistics have no gradient. They are never a part of what a method trains, so no optimizer, rate, penalty or momentum
ever sees them: a visit starts from some, every forward pass of training moves them, and what is left is kept by the
client (local, FedBN) or averaged by the server (shared).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Adaptation, Algorithm, ClientData, check_one_exchange
from tfpfl.algorithms.transforms.along import AlongWith, as_message, in_own, of_own
from tfpfl.algorithms.transforms.own_part import own_part
from tfpfl.checks import InvalidArgument
from tfpfl.models import passes, tree
from tfpfl.models.weights import Weights


class OwnStatistics(NamedTuple):
    """What a client keeps with batch_norm='local'."""

    statistics: tuple  # mean and variance of one layer after the other
    started: Any  # bool []: the client had a visit; before the first one, `statistics` are the model's initial ones
    state: Any  # the method's client state


class SharedStatistics(NamedTuple):
    """The server's state and the message with batch_norm='shared'."""

    own: Any  # those of the method
    statistics: tuple


class Fit(NamedTuple):
    """What an adaptation carries from epoch to epoch."""

    own: Any
    statistics: tuple


def normalized(algorithm: Algorithm, *, before: Algorithm | None = None, name: str = "this method") -> Algorithm:
    """The algorithm for its model's `batch_norm`, and for a part of adapters that stays with the client (`personal`).

    With neither, or with 'frozen' only, it is the algorithm itself. `personal` is `own_part` alone.

    With 'local', scale and offset stay with the client, too (`own_part`). A client that never trained predicts with the
    statistics of its own training examples, as it has no others. With 'shared', the server adds the mean of the
    changes of the statistics, weighted as the updates are, whatever it does with the updates.

    Args:
        algorithm: an algorithm that trains one model on a client.
        before, name: as in `own_part`.

    Raises:
        InvalidArgument: with 'local' or `personal`, the method cannot leave a part of theta with the client; with
            `personal`, it sends no part of theta anyway.
    """
    if not algorithm.model.batch_statistics:
        made = own_part(algorithm, before=before, name=name) if any(algorithm.model.own) else algorithm
        if made is algorithm and any(algorithm.model.own):
            raise InvalidArgument(
                f"{name} sends no weights of the backbone, so all of the adapters stay with the client anyway, and "
                "personal would change nothing. Leave personal out, or use a method that shares the rest, such as "
                "fedavg"
            )
        return made
    if algorithm.model.batch_norm == "local":
        return _local(own_part(algorithm, before=before, name=name))
    return _shared(algorithm)


def check_not_shared(algorithm: Algorithm, what: str) -> None:
    """Checks that updates may be changed as if they were gradients.

    Args:
        algorithm: the algorithm whose updates are changed.
        what: what changes them, for the message.

    Raises:
        InvalidArgument: the updates have moving statistics beside them (batch_norm='shared').
    """
    if algorithm.model.batch_norm == "shared":
        raise InvalidArgument(
            f"{what} cannot be used with batch_norm='shared': the updates have the moving statistics of "
            "BatchNormalization beside them, means and variances, which must not be weighed by losses, clipped, left "
            "out one by one, or made noisy. Use batch_norm='local' or 'frozen'"
        )


def with_fixed_statistics(model: Any, start: Callable, adaptation: Callable) -> Adaptation:
    """An adaptation from weights in which moving statistics may follow theta: they normalize, and are not trained.

    Args:
        model: the `SplitModel`.
        start: (message, client state, ClientData) -> the weights from which a client starts.
        adaptation: (such a function) -> the `Adaptation` of a model without statistics.
    """
    if not model.batch_statistics:
        return adaptation(start)
    tuning = adaptation(lambda message, state, data: _apart(model, start(message, state, data))[0])

    def begin(message, state, data):
        _, statistics = _apart(model, start(message, state, data))
        with _normalizing(statistics):
            return Fit(tuning.start(message, state, data), statistics)

    def epoch(fit, data, n):
        with _normalizing(fit.statistics):
            return fit._replace(own=tuning.epoch(fit.own, data, n))

    return Adaptation(begin, epoch, lambda fit: _with(tuning.model(fit.own), fit.statistics))


def trained_beside_statistics(model: Any, weights: Weights, train: Callable) -> Weights:
    """`train(weights)` for weights in which moving statistics may follow theta: they normalize, and are not trained."""
    if not model.batch_statistics:
        return train(weights)
    bare, statistics = _apart(model, weights)
    with _normalizing(statistics):
        return _with(train(bare), statistics)


def _apart(model: Any, weights: Weights) -> tuple[Weights, tuple]:
    """(the weights without moving statistics, the statistics; () if none follow theta)."""
    number = len(model.initial_theta)
    return weights._replace(theta=tuple(weights.theta[:number])), tuple(weights.theta[number:])


def _normalizing(statistics: tuple) -> AbstractContextManager:
    """Traces passes that these statistics normalize; with (), those that are set already: before `normalized`."""
    return passes.evaluating(statistics) if statistics else nullcontext()


def _with(weights: Weights, statistics: tuple) -> Weights:
    return weights._replace(theta=(*weights.theta, *statistics))


def _adaptation(adapt: Adaptation, start: Callable, epoch: Callable) -> Adaptation:
    """The adaptation `adapt` of a model with statistics, whose carry is a `Fit`."""
    predictor: Any = adapt.predictor

    def predicting(fit, data):
        with passes.evaluating(fit.statistics):
            return predictor(fit.own, data)

    model = lambda fit: _with(adapt.model(fit.own), fit.statistics)  # noqa: E731
    return Adaptation(start, epoch, model, predictor and predicting)


def _local(algorithm: Algorithm) -> Algorithm:
    model = algorithm.model
    adapt: Any = algorithm.adapt
    outputs: Any = algorithm.predictor

    def theta_of(message, state, data):
        if adapt is None:
            return algorithm.personal_model(message, state, data).theta
        return adapt.model(adapt.start(message, state, data)).theta

    def measured(message, state: OwnStatistics, data: ClientData) -> tuple:
        with passes.evaluating(model.statistics()):
            theta = theta_of(message, state.state, data)
        with passes.measuring(model.statistics()) as now:
            model.features(theta, data.x)
        return now.moved

    def statistics_of(message, state, data):
        return tf.cond(state.started, lambda: state.statistics, lambda: measured(message, state, data))

    def client_update(message, state, data):
        with passes.keeping(state.statistics, data.key) as now:
            output = algorithm.client_update(message, state.state, data)
        return output._replace(state=OwnStatistics(now.moved, tf.constant(True), output.state))

    def personal_model(message, state, data):
        statistics = statistics_of(message, state, data)
        with passes.evaluating(statistics):
            return _with(algorithm.personal_model(message, state.state, data), statistics)

    def begins(message, state, data):
        statistics = statistics_of(message, state, data)
        with passes.evaluating(statistics):
            return _with(algorithm.beginning(message, state.state, data), statistics)

    def predictor(message, state, data):
        with passes.evaluating(statistics_of(message, state, data)):
            return outputs(message, state.state, data)

    def local_model(message, output):
        inner = output._replace(state=output.state.state)
        return _with(algorithm.local_model(message, inner), output.state.statistics)

    def start(message, state, data):
        statistics = statistics_of(message, state, data)
        with passes.evaluating(statistics):
            return Fit(adapt.start(message, state.state, data), statistics)

    def epoch(fit, data, n):
        with passes.keeping(fit.statistics, data.key) as now:
            own = adapt.epoch(fit.own, data, n)
        return Fit(own, now.moved)

    return algorithm._replace(
        init_client=lambda info: OwnStatistics(model.statistics(), tf.constant(False), algorithm.init_client(info)),
        client_update=client_update,
        personal_model=personal_model,
        predictor=outputs and predictor,
        local_model=local_model,
        global_model=None,
        begins=begins,
        adapt=adapt and _adaptation(adapt, start, epoch),
        shares="head" if algorithm.shares in ("model", "head") else None,
        one_pass=None,
    )


def _shared(algorithm: Algorithm) -> Algorithm:
    check_one_exchange(algorithm, "batch_norm='shared'")
    model, balance = algorithm.model, algorithm.balance
    adapt: Any = algorithm.adapt
    outputs: Any = algorithm.predictor
    along = AlongWith(algorithm.aggregate, "statistics")
    global_model = algorithm.global_model
    begins: Any = algorithm.begins

    def client_update(sent, state, data):
        with passes.keeping(sent.statistics, data.key) as now:
            output = algorithm.client_update(sent.own, state, data)
        return output._replace(update=along.put_on(output.update, tree.subtract(now.moved, sent.statistics)))

    def server_update(server, aggregate, total):
        moved = tree.add(server.statistics, aggregate.statistics)
        return SharedStatistics(algorithm.step(server.own, along.take_off(aggregate), total), moved)

    def inner(output):
        return output._replace(update=along.take_off(output.update))

    def personal_model(sent, state, data):
        with passes.evaluating(sent.statistics):
            return _with(algorithm.personal_model(sent.own, state, data), sent.statistics)

    def predictor(sent, state, data):
        with passes.evaluating(sent.statistics):
            return outputs(sent.own, state, data)

    def local_model(sent, output):
        moved = tree.add(sent.statistics, output.update.statistics)
        return _with(algorithm.local_model(sent.own, inner(output)), moved)

    def start(sent, state, data):
        with passes.evaluating(sent.statistics):
            return Fit(adapt.start(sent.own, state, data), sent.statistics)

    def epoch(fit, data, n):
        with passes.evaluating(fit.statistics):
            return fit._replace(own=adapt.epoch(fit.own, data, n))

    return algorithm._replace(
        init_server=lambda: SharedStatistics(algorithm.init_server(), model.statistics()),
        message=as_message(algorithm, in_own(algorithm.message)),
        client_update=client_update,
        server_update=server_update,
        personal_model=personal_model,
        predictor=outputs and predictor,
        local_model=local_model,
        aggregate=along.put_on(algorithm.aggregate, "mean"),
        matrices=of_own(algorithm.matrices),
        global_model=global_model and (lambda sent: _with(global_model(sent.own), sent.statistics)),
        begins=begins and (lambda sent, state, data: _with(begins(sent.own, state, data), sent.statistics)),
        adapt=adapt and _adaptation(adapt, start, epoch)._replace(message=in_own(adapt.message)),
        one_pass=None,
        balance=balance and (lambda state, output: balance(state, inner(output))),
        own_step=None,
    )
