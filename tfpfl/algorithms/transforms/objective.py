"""Objectives that care for the clients with large losses: q-fair federated learning and the conditional value at risk.

    mean    sum_i alpha_i l_i
    fair:q  sum_i alpha_i l_i^(q + 1) / (q + 1)                 q-FFL (Li, Sanjabi, Beirami, Smith, ICLR 2020)
    cvar:p  min over t of  t + (1 / p) sum_i alpha_i max(l_i - t, 0)    (Rockafellar, Uryasev, 2000): the mean loss
            of the worst clients that have together the share p of the weight

The gradient of both is a weighted sum of the clients' gradients, with alpha_i f(l_i) in place of alpha_i: f(l) = l^q,
or 1 / p if l > t and 0 otherwise. All weights of a method stay: alpha_i, I / r, the probabilities to arrive.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput, as_made, check_one_exchange, kinds
from tfpfl.algorithms.parts.objectives import parsed_objective, weighing
from tfpfl.algorithms.transforms.along import AlongWith, as_message, in_own, of_own
from tfpfl.algorithms.transforms.normalization import check_not_shared
from tfpfl.checks import InvalidArgument
from tfpfl.models import passes, tree
from tfpfl.models.losses import client_loss

SMALLEST = 1e-30  # a loss counts as at least this, because 0^q has no derivative
SENDS = ("gradient", "update")


class WithTail(NamedTuple):
    """The server's state, or a message, together with the threshold of the conditional value at risk."""

    own: Any  # the algorithm's server state, or its message
    t: Any  # float []: clients with larger losses count
    known: Any  # bool []: t is of a cohort; before the first one all clients count as in the mean


class Loss(NamedTuple):
    """What a client reports for the threshold."""

    loss: Any  # float []: l_i
    weight: Any  # float []: of the client, such as alpha_i over the probability to arrive


def with_objective(algorithm: Algorithm, objective: str, *, sends: str = "update") -> Algorithm:
    """The algorithm that minimizes another objective than the mean of the clients' losses.

    Args:
        algorithm: one whose server adds up what the clients send.
        objective: 'mean', 'fair:q' with q >= 0, or 'cvar:p' with 0 < p <= 1.
        sends: what an update is. 'gradient': the gradient of the client's loss, which is in the metric 'loss'. It is
            multiplied by f(l_i), so the server's step is exactly one on the objective. 'update': the change of the
            weights by local steps. l_i is then the loss of the model with which the client starts, for which the
            examples go forward once more. With 'fair' the weights of the mean are multiplied by l_i^q, and the mean
            stays a mean: the direction is that of q-FFL, and the length of the step is the method's own, not that of
            q-FedAvg, which estimates it. With 'cvar' the updates are multiplied by f(l_i).

    Returns:
        The algorithm. With 'mean', 'fair:0' and 'cvar:1' it is the algorithm itself. With 'cvar' its server state and
        its messages are `WithTail`. After every round t is the smallest loss of the cohort above which at most the
        share p of the cohort's weight lies; every client reports its loss.

    Raises:
        InvalidArgument: the objective is none of these, or 'fair' with a head of counts; or the server gets the updates
            of single clients, keeps a sum of what its clients keep, or averages moving statistics.

    Source:
        Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning, ICLR 2020, arXiv 1905.10497.
        Rockafellar, Uryasev: Optimization of Conditional Value-at-Risk, Journal of Risk 2, 2000.
    """
    name, number = parsed_objective(objective)
    if name == "mean":
        return algorithm
    check_takes_objective(algorithm, sends)
    if name == "fair" and algorithm.model.kind.label.name == "poisson":
        raise InvalidArgument(
            f"objective {objective} needs losses that are not negative; the Poisson loss of a count can be negative. "
            "Use cvar:p"
        )
    weighted = _Weighted(algorithm, sends)
    return weighted.fair(number) if name == "fair" else weighted.tail(number)


def check_takes_objective(algorithm: Algorithm, sends: str) -> None:
    """Checks that an algorithm can have another objective than the mean.

    Raises:
        InvalidArgument: it cannot. The message says why.
    """
    if sends not in SENDS:
        raise InvalidArgument(f"sends must be one of {', '.join(SENDS)}, found {sends!r}")
    check_one_exchange(algorithm, "an objective other than the mean")
    check_not_shared(algorithm, "an objective other than the mean")
    if "rows" in kinds(algorithm):
        why = "its server gets the updates of single clients, not their sum"
    elif algorithm.balance is not None:
        why = "its server keeps a sum of what its clients keep, which other weights would break"
    elif not isinstance(algorithm.aggregate, str):
        why = "its server gets several sums"
    else:
        return
    raise InvalidArgument(
        f"objective needs a method whose server adds up what the clients send; here {why}. Leave it out, or take "
        "another method, such as pflego or fedavg"
    )


class _Weighted:
    """Weighs the updates of an algorithm, and makes its two forms."""

    def __init__(self, algorithm: Algorithm, sends: str):
        self.algorithm, self.is_gradient = algorithm, sends == "gradient"
        self.loss = client_loss(algorithm.model)

    def work(self, message: Any, state: Any, data: Any, weight_of: Any, normed: bool) -> tuple[Any, Any]:
        """(the client's output, weighed; its loss): `weight_of(loss)` is the client's weight."""
        if self.is_gradient:
            with weighing(weight_of):
                output = self.algorithm.client_update(message, state, data)
            loss = output.metrics["loss"]
            return _scaled(output, weight_of(loss)), loss
        with passes.without_masks():  # a mask of Dropout would make l_i a noisy one
            loss = self.loss(self.algorithm.beginning(message, state, data), data.x, data.y)
        output, times = self.algorithm.client_update(message, state, data), weight_of(loss)
        if normed:
            return output._replace(weight=times * tree.as_dtype(output.weight, times.dtype)), loss
        return _scaled(output, times), loss

    def fair(self, q: float) -> Algorithm:
        """The algorithm with the objective 'fair:q'."""
        one_pass = self.algorithm.one_pass if self.is_gradient else None

        def weight_of(loss: Any) -> Any:
            return tf.maximum(loss, tree.as_dtype(SMALLEST, loss.dtype)) ** tree.as_dtype(q, loss.dtype)

        def client_update(message: Any, state: Any, data: Any) -> Any:
            return self.work(message, state, data, weight_of, True)[0]

        def on_features(message: Any, state: Any, phi: Any, data: Any) -> tuple[Any, Any]:
            assert one_pass is not None
            with weighing(weight_of):
                output, dphi = one_pass.on_features(message, state, phi, data)
            times = weight_of(output.metrics["loss"])
            return output._replace(update=tree.scale(times, output.update)), tree.scale(times, dphi)

        def local_model(message: Any, output: Any) -> Any:
            return self.algorithm.local_model(message, as_made(output))

        weighed = None if one_pass is None else one_pass._replace(on_features=on_features)
        return self.algorithm._replace(client_update=client_update, one_pass=weighed, local_model=local_model)

    def tail(self, p: float) -> Algorithm:
        """The algorithm with the objective 'cvar:p'."""
        algorithm, dtype = self.algorithm, self.algorithm.model.dtype
        reported = AlongWith(algorithm.aggregate, "reported")

        def client_update(message: WithTail, state: Any, data: Any) -> Any:
            def weight_of(loss: Any) -> Any:
                counts = tf.cast(loss > tf.cast(message.t, loss.dtype), loss.dtype) / tree.as_dtype(p, loss.dtype)
                return tf.where(message.known, counts, tf.ones_like(counts))

            output, loss = self.work(message.own, state, data, weight_of, False)
            report = Loss(tf.cast(loss, dtype), tree.as_dtype(output.weight, dtype))
            return output._replace(update=reported.put_on(output.update, report))

        def server_update(server: WithTail, aggregate: Any, total_weight: Any) -> WithTail:
            own = algorithm.step(server.own, reported.take_off(aggregate), total_weight)
            losses, weights = aggregate.reported.values
            return WithTail(own, quantile(losses, weights, 1 - p), tf.constant(True))

        def local_model(message: WithTail, output: Any) -> Any:
            own = output._replace(update=reported.take_off(output.update))
            return algorithm.local_model(message.own, as_made(own))

        adapt = algorithm.adapt
        return algorithm._replace(
            init_server=lambda: WithTail(algorithm.init_server(), tf.zeros([], dtype), tf.constant(False)),
            message=as_message(algorithm, in_own(algorithm.message)),
            client_update=client_update,
            server_update=server_update,
            personal_model=of_own(algorithm.personal_model),
            predictor=of_own(algorithm.predictor),
            global_model=of_own(algorithm.global_model),
            begins=of_own(algorithm.begins),
            local_model=local_model,
            matrices=of_own(algorithm.matrices),
            adapt=adapt and adapt._replace(start=of_own(adapt.start), message=in_own(adapt.message)),
            aggregate=reported.put_on(algorithm.aggregate, "rows"),
            one_pass=None,
        )


def _scaled(output: ClientOutput, times: Any) -> ClientOutput:
    """The output with a multiple of the update; the client's own model is still that of its whole update."""
    return output._replace(update=tree.scale(times, output.update), made=output.update)


def quantile(values: Any, weights: Any, share: float) -> Any:
    """The smallest of the values that has at least this share of the weight at or below it: float [].

    Args:
        values, weights: float [r]; the weights are not negative, and not all 0. Without values, the result has no
            meaning: the server's step of a round in which nothing arrived is not used.
        share: in [0, 1].
    """
    order = tf.argsort(values)
    below = tf.cumsum(tf.gather(weights, order))
    # `below` ends with the sum of the weights, which is rounded, and has no end if all clients were rejected
    enough = below >= tree.as_dtype(share - 1e-6, below.dtype) * tf.reduce_max(below)
    return tf.reduce_min(tf.where(enough, tf.gather(values, order), values.dtype.max))
