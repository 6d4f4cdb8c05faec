"""The discrete Gaussian N_Z(0, sigma^2): integers x with a probability in proportion to exp(-x^2 / (2 sigma^2)).

Source:
    Canonne, Kamath, Steinke: The Discrete Gaussian for Differential Privacy, NeurIPS 2020, algorithms 2 and 3.
"""

from typing import Any

import tensorflow as tf

_SPARE = 1.6  # numbers that are drawn for one that is needed: at least 0.7 of them are accepted if sigma >= 1
_LEAST = 32


def discrete_gaussian(sigma: float, number: int, seed: Any) -> Any:
    """Draws numbers of N_Z(0, sigma^2).

    A discrete Laplace number Y with the scale t = floor(sigma) + 1 is accepted with the probability exp(-(|Y| -
    sigma^2 / t)^2 / (2 sigma^2)). The paper compares exact integers; here Y is found by inversion and the probability
    is computed, both in float64 with uniform numbers of 52 bits. This is right for a simulation, whose noise follows
    from its seed anyway. A device whose noise has to keep a secret needs the exact one.

    Args:
        sigma: the parameter, >= 1; also the standard deviation, to 1e-7.
        number: how many.
        seed: int32 [2], a stateless seed.

    Returns:
        int64 [number].
    """
    t, draw = float(int(sigma) + 1), max(int(_SPARE * number), number + _LEAST)
    scale, centre = tf.constant(2.0 * sigma**2, tf.float64), tf.constant(sigma**2 / t, tf.float64)

    def more(found, accepted, i):
        u = tf.random.stateless_uniform(
            [3, draw], tf.random.experimental.stateless_fold_in(seed, i), dtype=tf.float64, alg="philox"
        )
        size = tf.floor(-t * tf.math.log1p(-u[0]))  # P[size >= k] = exp(-k / t)
        negative = u[1] < 0.5
        good = u[2] < tf.exp(-tf.square(size - centre) / scale)
        good &= ~(negative & tf.equal(size, 0))  # 0 would count twice
        y = tf.cast(tf.where(negative, -size, size), tf.int64)
        place = accepted + tf.cumsum(tf.cast(good, tf.int32)) - 1
        place = tf.where(good & (place < number), place, number)  # the last place is for those that are not needed
        found = tf.tensor_scatter_nd_update(found, place[:, None], y)
        return found, accepted + tf.reduce_sum(tf.cast(good, tf.int32)), i + 1

    # Shapes are fixed, so that the clients of a stack can be computed as one (`engines.local.grouping.Stacked`).
    first = tf.zeros([number + 1], tf.int64), tf.constant(0), tf.constant(0)
    return tf.while_loop(lambda found, accepted, i: accepted < number, more, first)[0][:number]
