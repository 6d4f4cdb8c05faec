"""A convex quadratic program on the simplex, solved exactly by an active set method, as a function of tensors.

    minimize a' P a   over a >= 0, sum(a) = 1,   P [r, r] symmetric and positive semidefinite

As in Lawson and Hanson's least squares with nonnegative coefficients (Solving Least Squares Problems, 1974, chapter
23): on a support S the minimum without the bounds is a_S = P_SS^-1 1 / (1' P_SS^-1 1). The support grows by the
coordinate whose gradient is smallest, and shrinks where a bound is met. Every support is better than the one before,
so the method ends at the minimum, after about r systems of r equations.
"""

from typing import Any

import tensorflow as tf

RIDGE = 1e-15  # of the largest P_ii: so that the systems of singular matrices can be solved, too
_STEPS = 20  # at most so many supports for each coordinate; rounding could otherwise repeat some


def simplex_minimum(matrix: Any) -> Any:
    """The a that minimizes a' P a on the simplex: float64 [r]. If there are several, one of them.

    Args:
        matrix: P, float [r, r], symmetric and positive semidefinite; r >= 1.
    """
    matrix = tf.cast(matrix, tf.float64)
    size = tf.shape(matrix)[0]
    largest = tf.reduce_max(tf.linalg.diag_part(matrix))
    eye = tf.eye(size, dtype=tf.float64)
    scaled = tf.where(largest > 0, tf.math.divide_no_nan(matrix, largest), tf.zeros_like(matrix)) + RIDGE * eye

    def only(place: Any) -> Any:
        return tf.equal(tf.range(size), place)

    def on_support(support: Any) -> Any:
        inside = tf.cast(support, tf.float64)
        system = scaled * inside[:, None] * inside[None] + tf.linalg.diag(1 - inside)
        z = tf.linalg.solve(system, inside[:, None])[:, 0] * inside
        return z / tf.reduce_sum(z)

    def one(step: Any, a: Any, support: Any, _: Any) -> tuple:
        target = on_support(support)
        blocked = support & (target <= 0)

        def shorten() -> tuple:
            ratios = tf.where(
                blocked,
                a / tf.where(blocked, a - target, tf.ones_like(a)),
                tf.fill([size], tf.constant(2.0, tf.float64)),
            )
            moved = a + tf.reduce_min(ratios) * (target - a)
            stay = support & (moved > 0) & ~only(tf.argmin(ratios, output_type=tf.int32))
            return tf.where(stay, moved, tf.zeros_like(moved)), stay, tf.constant(False)

        def grow() -> tuple:
            gradient = tf.linalg.matvec(scaled, target)
            value = tf.reduce_sum(target * gradient)
            outside = tf.where(support, tf.fill([size], value), gradient)
            best = tf.argmin(outside, output_type=tf.int32)
            done = outside[best] >= value * (1 - 1e-12)
            return target, support | (only(best) & ~done), done

        a, support, done = tf.cond(tf.reduce_any(blocked), shorten, grow)
        return step + 1, tf.ensure_shape(a, start.shape), tf.ensure_shape(support, start.shape), done

    start = only(tf.argmin(tf.linalg.diag_part(scaled), output_type=tf.int32))
    first = tf.constant(0), tf.cast(start, tf.float64), start, tf.constant(False)
    _, a, *_ = tf.while_loop(lambda step, a, support, done: ~done & (step < _STEPS * size), one, first)
    return a / tf.reduce_sum(a)
