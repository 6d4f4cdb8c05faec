"""Screening: `screened(algorithm)` is the algorithm with the work of broken clients left out.

A client's work is broken if the client has no examples, an example that is not finite or a label outside its classes,
if its result is not finite, or if the norm of its update is too large. The round then goes on without this client: its
update has weight 0 (and no row), its state stays as it was, and its metrics say why. So the server receives finite
numbers only.

If a round has two exchanges, both updates are checked and clipped, each by itself. A client that is rejected in the
first is left out of the second, too.

Screening is a part of the client's work and of the server's step, so every engine has it. A cohort cannot be fused
then, because a broken gradient cannot be removed from the sum of all gradients.
"""

import math
from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, Between, ClientData, ClientOutput, Rows, as_made, kinds
from tfpfl.algorithms.exchanges import first_of, of_both, second_of
from tfpfl.algorithms.transforms.along import AlongWith, of_method
from tfpfl.algorithms.transforms.normalization import check_not_shared
from tfpfl.checks import InvalidArgument
from tfpfl.models import tree

# The reasons, by the number in the metric 'rejected'; 0: the client was not rejected.
REASONS = (
    "",
    "it has no examples",
    "its examples are not finite",
    "it has a label outside its classes",
    "its work is not finite",
    "its update is too large",
)
ON_BROKEN = ("stop", "reject")
METRICS = ("rejected", "update_norm")  # that it adds to those of a client


def screened(algorithm: Algorithm, *, max_norm: float | None = None, clip_norm: float | None = None) -> Algorithm:
    """The algorithm with the work of broken clients left out.

    Args:
        algorithm: any `Algorithm`.
        max_norm: updates with a larger L2 norm, over all their numbers, are rejected; None: no limit. What a transform
            sends beside an update, such as the loss for an objective or the weight for a median, is not measured.
        clip_norm: updates with a larger L2 norm are scaled down to this norm; None: never. Applied after `max_norm`. If
            the algorithm has a `balance`, such a client keeps the state that goes with the shorter update. Its model
            right after its work (`local_model`) is that of the whole update.

    Returns:
        The algorithm. Its clients have two more metrics: 'rejected', the number of the reason in `REASONS`, and
        'update_norm', the norm before clipping.

    Raises:
        InvalidArgument: a norm is not positive; clip_norm is larger than max_norm; or clip_norm is given and the server
            gets every client's own update (aggregate 'rows'), as for a median.
    """
    check_norms(max_norm, clip_norm)
    if (max_norm, clip_norm) != (None, None):
        check_not_shared(algorithm, "a limit of the updates' norm (max_norm or clip_norm)")
    if algorithm.first is None:
        return _screened(algorithm, max_norm, clip_norm)
    exchanges = first_of(algorithm), second_of(algorithm)
    first, second = (_screened(exchange, max_norm, clip_norm) for exchange in exchanges)
    keeps = algorithm.first.keeps

    def first_update(message, between: Between, data: ClientData) -> ClientOutput:
        output = first.client_update(message, between._replace(kept=between.kept.own), data)
        kept = Checked(output.state.kept, output.metrics["rejected"])
        return output._replace(state=output.state._replace(kept=kept))

    def second_update(message, between: Between, data: ClientData) -> ClientOutput:
        own, rejected = between.kept
        return second.client_update(message, between._replace(kept=own), data, rejected)

    return of_both(
        algorithm,
        first._replace(client_update=first_update),
        second._replace(client_update=second_update),
        keeps=lambda info: Checked(keeps(info), tf.zeros([], tf.int32)),
    )


class Checked(NamedTuple):
    """What a client keeps between two exchanges: one that was rejected in the first is left out of the second."""

    own: Any  # what the method keeps
    rejected: Any  # int32 [], the number in `REASONS`


def _screened(algorithm: Algorithm, max_norm: float | None, clip_norm: float | None) -> Algorithm:
    """`screened` for one exchange. Its `client_update` may be told why the client was rejected in an earlier one."""
    flag = AlongWith(algorithm.aggregate, "accepted") if "rows" in kinds(algorithm) else None
    if flag and clip_norm is not None:
        raise InvalidArgument(
            "clip_norm is for updates that are added up; here the server sees every client's own update, as with the "
            "aggregators median and trimmed_mean, or with the objective cvar its own loss. Leave clip_norm out; "
            "max_norm rejects long updates"
        )

    def client_update(message, state, data: ClientData, earlier=None) -> ClientOutput:
        data, reason = _usable(data, algorithm.model)
        if earlier is not None:
            reason = tf.where(tf.equal(earlier, 0), reason, earlier)
        output = algorithm.client_update(message, state, data)
        if own := [name for name in METRICS if name in output.metrics]:
            raise InvalidArgument(
                f"a metric of client_update cannot be called {own[0]!r}: where broken clients are rejected, this is "
                "what is told of it. Choose another name"
            )
        output = output._replace(weight=tree.as_tensor(output.weight, algorithm.model.dtype))
        finite = tree.all_finite((output.update, output.state, output.metrics, output.weight)) & (output.weight >= 0)
        own = tf.nest.flatten(of_method(output.update))  # a loss or a weight that is sent with it is not measured
        norm = tf.linalg.global_norm([tf.cast(x, tf.float64) for x in own if x.dtype.is_floating])
        reason = _first(reason, ~finite, 4)
        if max_norm is not None:
            reason = _first(reason, norm > max_norm, 5)
        accepted = tf.equal(reason, 0)
        if clip_norm is not None:
            output = _clipped(algorithm, state, output, norm, clip_norm)
        update = tree.where(accepted, output.update, tree.zeros_like(output.update))
        metrics = {  # what a rejected client has sent was sent all the same
            name: value if name.startswith("bytes_") else tf.where(accepted, value, tf.zeros_like(value))
            for name, value in output.metrics.items()
        }
        metrics |= {"rejected": reason, "update_norm": tf.where(finite, norm, tf.zeros_like(norm))}
        made = None if output.made is None else tree.where(accepted, output.made, tree.zeros_like(output.made))
        return ClientOutput(
            update=flag.put_on(update, accepted) if flag else update,
            weight=tf.where(accepted, output.weight, tf.zeros_like(output.weight)),
            state=tree.where(accepted, output.state, state),
            metrics=metrics,
            made=made,
        )

    screening = algorithm._replace(client_update=client_update, one_pass=None)
    if flag is None:
        if clip_norm is None:
            return screening
        return screening._replace(local_model=lambda message, output: algorithm.local_model(message, as_made(output)))
    return screening._replace(
        aggregate=flag.put_on(algorithm.aggregate, "rows"),
        server_update=lambda server, aggregated, weight: algorithm.step(
            server, flag.take_off(_accepted(aggregated)), weight
        ),
        local_model=lambda message, out: algorithm.local_model(message, out._replace(update=flag.take_off(out.update))),
    )


def _clipped(algorithm: Algorithm, state, output: ClientOutput, norm, clip_norm: float) -> ClientOutput:
    """The output with an update of at most `clip_norm`, and with the state that goes with it."""
    limit = tf.constant(clip_norm, norm.dtype)  # tf.cast would round it to float32 first
    factor = limit / tf.maximum(norm, limit)
    update = tf.nest.map_structure(lambda x: tf.cast(factor, x.dtype) * x if x.dtype.is_floating else x, output.update)
    sent = output._replace(update=update, made=as_made(output).update)
    if algorithm.balance is None:
        return sent
    return sent._replace(state=tree.where(norm > limit, algorithm.balance(state, sent), output.state))


def _accepted(aggregated):
    """The aggregate without the rows of rejected clients."""
    kept = tf.where(aggregated.accepted.values)[:, 0]

    def of(part):
        return tf.nest.map_structure(lambda leaf: tf.gather(leaf, kept), part) if isinstance(part, Rows) else part

    return type(aggregated)(*map(of, aggregated))


def check_norms(max_norm: float | None, clip_norm: float | None) -> None:
    """Checks the two limits of `screened`; None means no limit.

    Raises:
        InvalidArgument: a norm is not positive or not finite, or clip_norm is larger than max_norm.
    """
    for name, value in (("max_norm", max_norm), ("clip_norm", clip_norm)):
        if value is not None and not 0 < value < math.inf:
            raise InvalidArgument(f"{name} must be positive and finite, found {value}; leave it out for no limit")
    if max_norm is not None and clip_norm is not None and clip_norm > max_norm:
        raise InvalidArgument(f"clip_norm={clip_norm} clips nothing: updates above max_norm={max_norm} are rejected")


def _usable(data: ClientData, model):
    """(data on which any algorithm can run, the number of the reason if the data had to be changed, else 0)."""
    reason, numbers = tf.zeros([], tf.int32), not model.kind.label.is_classes
    y = tf.cast(data.y, model.dtype) if numbers and not data.y.dtype.is_floating else data.y  # targets may be integers
    found = tf.shape(data.y)[0]
    classes = data.info.num_classes
    outside = tf.reduce_any(~tf.math.is_finite(y) if numbers else (y < 0) | (y >= classes))
    reason = _first(reason, tf.equal(found, 0), 1)
    given = tf.nest.map_structure(tf.convert_to_tensor, data.x)
    for array in tf.nest.flatten(given):
        if array.dtype.is_floating:
            reason = _first(reason, ~tf.reduce_all(tf.math.is_finite(array)), 2)
    reason = _first(reason, outside, 3)
    missing = tf.where(tf.equal(found, 0), 1, 0)

    def usable(array):
        x = tf.where(tf.math.is_finite(array), array, tf.zeros_like(array)) if array.dtype.is_floating else array
        x = tf.concat([x, tf.zeros(tf.concat([missing[None], tf.shape(x)[1:]], 0), x.dtype)], 0)
        return tf.ensure_shape(x, [None, *array.shape[1:]])

    x = tf.nest.map_structure(usable, given)
    known = tf.where(tf.math.is_finite(y), y, tf.zeros_like(y)) if numbers else tf.clip_by_value(y, 0, classes - 1)
    more = tf.zeros(tf.concat([missing[None], tf.shape(y)[1:]], 0), y.dtype)
    return data._replace(x=x, y=tf.ensure_shape(tf.concat([known, more], 0), [None, *y.shape[1:]])), reason


def _first(reason, broken, number):
    """The earlier reason if there is one, else `number` if `broken` is true, else 0."""
    return tf.where(tf.equal(reason, 0) & broken, number, reason)
