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

    def more(found, i):
        u = tf.random.stateless_uniform(
            [3, draw], tf.random.experimental.stateless_fold_in(seed, i), dtype=tf.float64, alg="philox"
        )
        size = tf.floor(-t * tf.math.log1p(-u[0]))  # P[size >= k] = exp(-k / t)
        negative = u[1] < 0.5
        good = u[2] < tf.exp(-tf.square(size - centre) / scale)
        good &= ~(negative & tf.equal(size, 0))  # 0 would count twice
        y = tf.cast(tf.where(negative, -size, size), tf.int64)
        return tf.concat([found, tf.boolean_mask(y, good)], 0), i + 1

    found, _ = tf.while_loop(
        lambda found, i: tf.size(found) < number,
        more,
        (tf.zeros([0], tf.int64), tf.constant(0)),
        shape_invariants=(tf.TensorShape([None]), tf.TensorShape([])),
    )
    return tf.ensure_shape(found[:number], [number])
