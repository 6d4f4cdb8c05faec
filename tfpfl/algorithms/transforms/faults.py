"""Injected faults, to test how a run handles broken clients: `broken_work` and `broken_data`.

Whether a client is broken in a round depends only on the key of its visit, and so on (seed, round, client). If a round
has two exchanges, each has a draw of its own.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData
from tfpfl.algorithms.exchanges import on_both
from tfpfl.checks import InvalidArgument
from tfpfl.data.randomness import Fold

# The kinds of faults by number; 0 is no fault. 1 and 2 are faults of a client's work, the others of its data.
KINDS = ("", "not finite", "huge", "no examples", "examples not finite", "label outside")
HUGE = 1e6


def drawn(**probabilities: float) -> Callable:
    """A function (ClientData) -> number of a fault in `KINDS`, drawn from the key of the visit: int32 [].

    Args:
        probabilities: the probability of each kind, with underscores in the name: not_finite=0.1, huge=0.1, ...

    Raises:
        InvalidArgument: a kind is unknown; a probability is negative; or they add up to more than 1.
    """
    names = [kind.replace(" ", "_") for kind in KINDS]
    for name in probabilities:
        if name not in names[1:]:
            raise InvalidArgument(f"unknown fault {name!r}: one of {', '.join(names[1:])}")
    chances = np.array([probabilities.get(name, 0.0) for name in names[1:]])
    if (chances < 0).any() or chances.sum() > 1 + 1e-12:
        raise InvalidArgument(
            f"probabilities of faults must not be negative and must add up to at most 1, found {probabilities}"
        )
    ends = np.cumsum(chances)  # NumPy, because TFF's graphs cannot use eager tensors

    def which(data: ClientData):
        seed = tf.random.experimental.stateless_fold_in(data.key, Fold.FAULT)
        draw = tf.random.stateless_uniform([], seed, dtype=tf.float64, alg="philox")
        kind = tf.reduce_sum(tf.cast(draw >= ends, tf.int32)) + 1
        return tf.where(kind < len(KINDS), kind, 0)

    return which


def broken_work(algorithm: Algorithm, which: Callable) -> Algorithm:
    """The algorithm with broken updates: with fault 1 update and state are NaN, with fault 2 the update is `HUGE` times
    it.

    Args:
        algorithm: any `Algorithm`.
        which: from `drawn`.
    """

    if algorithm.first is not None:
        return on_both(algorithm, lambda exchange: broken_work(exchange, which))

    def client_update(message, state, data):
        output, kind = algorithm.client_update(message, state, data), which(data)

        def spoil(part, *kinds_and_factors):
            for number, factor in kinds_and_factors:
                times = tf.where(tf.equal(kind, number), tf.constant(factor, tf.float64), 1.0)
                part = tf.nest.map_structure(
                    lambda x: x * tf.cast(times, x.dtype) if x.dtype.is_floating else x,  # noqa: B023
                    part,
                )
            return part

        update = spoil(output.update, (1, np.nan), (2, HUGE))
        return output._replace(update=update, state=spoil(output.state, (1, np.nan)))

    return algorithm._replace(client_update=client_update, one_pass=None)


def broken_data(algorithm: Algorithm, which: Callable) -> Algorithm:
    """The algorithm with broken data: with fault 3 no examples, with 4 a NaN example, with 5 a label outside the
    classes, or a target that is NaN.

    Args:
        algorithm: any `Algorithm`.
        which: from `drawn`.
    """

    if algorithm.first is not None:
        return on_both(algorithm, lambda exchange: broken_data(exchange, which))

    def client_update(message, state, data: ClientData):
        kind = which(data)
        found = tf.where(tf.equal(kind, 3), 0, tf.shape(data.y)[0])
        y = data.y[:found]
        first = tf.equal(tf.range(found), 0)

        def spoilt(array):
            shape = array.shape
            x = tf.ensure_shape(array[:found], [None, *shape[1:]])
            if not x.dtype.is_floating:  # of several arrays, tokens cannot be NaN
                return x
            nan = tf.reshape(first & tf.equal(kind, 4), tf.concat([[found], tf.ones([len(shape) - 1], tf.int32)], 0))
            return tf.where(nan, tf.constant(np.nan, x.dtype), x)

        x = tf.nest.map_structure(spoilt, data.x)
        broken = first & tf.equal(kind, 5)
        if y.dtype.is_floating:
            y = tf.where(tf.reshape(broken, tf.concat([[found], tf.ones([len(y.shape) - 1], tf.int32)], 0)), np.nan, y)
        else:
            y = tf.where(broken, data.info.num_classes, y)
        return algorithm.client_update(message, state, data._replace(x=x, y=y))

    return algorithm._replace(client_update=client_update, one_pass=None)


__all__ = ["HUGE", "KINDS", "broken_data", "broken_work", "drawn"]
