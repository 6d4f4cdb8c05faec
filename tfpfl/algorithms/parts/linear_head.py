"""A linear softmax head on features that do not change: everything in closed form.

With Phi the features [N, M], Y one-hot labels [N, K] and P = softmax(Phi W), the gradient of the mean cross-entropy is
Phi^T (P - Y) / N for the kernel, and (P - Y) W^T / N for the features (specification, section 1).

All of it in the transposed layout, [K, M] by [M, N], with the softmax written out: on a CPU, products with K-wide
matrices take four times as long the other way round, and the head's steps are nearly all that a client of PFLEGO does
between its two passes.
"""

import tensorflow as tf

from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.models import tree
from tfpfl.models.weights import Head

CONJUGATE_GRADIENT_STEPS = 10
DAMPING = 1e-3  # the softmax Hessian is singular: adding a constant to every class changes nothing


def loss(head: Head, phi, targets):
    """Mean cross-entropy l_i: float []."""
    return loss_and_errors(head, phi, targets)[0]


def errors(head: Head, phi, targets):
    """((P - Y) / N)^T, the gradient with respect to the logits, a column an example: [K, N]."""
    return loss_and_errors(head, phi, targets)[1]


def loss_and_errors(head: Head, phi, targets):
    """(`loss`, `errors`), from one softmax."""
    examples, targets = tf.cast(tf.shape(phi)[0], phi.dtype), tf.transpose(targets)
    logits = _logits(tf.transpose(head.kernel), head.bias[:, None], phi)
    powers = tf.exp(logits)
    sums = tf.reduce_sum(powers, 0)
    losses = tf.math.log(sums) - tf.reduce_sum(targets * logits, 0)
    return tf.reduce_sum(losses) / examples, (powers / sums - targets) / examples


def gradient(phi, errors) -> Head:
    """The gradient with respect to the head, from `errors`."""
    return Head(tf.transpose(tf.matmul(errors, phi)), tf.reduce_sum(errors, 1))


def feature_gradient(head: Head, errors):
    """The gradient with respect to the features: [N, M]."""
    return tf.matmul(errors, head.kernel, transpose_a=True, transpose_b=True)


def fit(head: Head, phi, targets, steps, optimizer: Optimizer) -> Head:
    """`steps` full-batch steps of an optimizer on the head, with fresh slots."""
    examples = tf.cast(tf.shape(phi)[0], phi.dtype)
    targets = tf.transpose(targets) / examples

    def body(step, head, slots):
        powers = tf.exp(_logits(head.kernel, head.bias, phi))
        errors = powers / (examples * tf.reduce_sum(powers, 0)) - targets
        its_gradient = Head(tf.matmul(errors, phi), tf.reduce_sum(errors, 1, keepdims=True))
        slots, head = optimizer.step(slots, head, its_gradient)
        return step + 1, head, slots

    start = Head(tf.transpose(head.kernel), head.bias[:, None])
    _, fitted, _ = tf.while_loop(
        lambda step, *_: step < steps, body, (0, start, optimizer.init(start)), parallel_iterations=1
    )
    return Head(tf.transpose(fitted.kernel), fitted.bias[:, 0])


def _logits(kernel_t, bias, phi):
    """[K, N], the largest of every example moved to 0: the softmax is the same, and its powers do not overflow."""
    logits = tf.matmul(kernel_t, phi, transpose_b=True) + bias
    return logits - tf.stop_gradient(tf.reduce_max(logits, 0))


def fit_newton(head: Head, phi, targets, steps) -> Head:
    """`steps` damped Newton steps, each solved by a few conjugate gradients; a step that raises the loss is halved."""

    def body(step, head):
        current, error = loss_and_errors(head, phi, targets)
        direction = _conjugate_gradient(head, phi, targets, gradient(phi, error))

        def worse(length):
            return (loss(tree.add_scaled(head, -length, direction), phi, targets) > current) & (length > 1e-3)

        (length,) = tf.while_loop(worse, lambda length: (length / 2,), (tf.ones([], phi.dtype),))
        return step + 1, tree.add_scaled(head, -length, direction)

    return tf.while_loop(lambda step, _: step < steps, body, (0, head), parallel_iterations=1)[1]


def _conjugate_gradient(head, phi, targets, right_side):
    """Solves (H + damping) d = right_side with H the Hessian of the loss at `head`."""
    probabilities = tf.nn.softmax(tf.matmul(phi, head.kernel) + head.bias)
    examples = tf.cast(tf.shape(phi)[0], phi.dtype)

    def hessian_times(v: Head):
        u = tf.matmul(phi, v.kernel) + v.bias
        pu = probabilities * u
        curved = (pu - probabilities * tf.reduce_sum(pu, 1, keepdims=True)) / examples
        return tree.add_scaled(gradient(phi, tf.transpose(curved)), DAMPING, v)

    def body(step, solution, residual, direction, squared):
        curved = hessian_times(direction)
        length = tf.math.divide_no_nan(squared, tree.dot(direction, curved))
        solution = tree.add_scaled(solution, length, direction)
        residual = tree.add_scaled(residual, -length, curved)
        new_squared = tree.dot(residual, residual)
        direction = tree.add_scaled(residual, tf.math.divide_no_nan(new_squared, squared), direction)
        return step + 1, solution, residual, direction, new_squared

    start = (0, tree.zeros_like(right_side), right_side, right_side, tree.dot(right_side, right_side))
    return tf.while_loop(lambda step, *_: step < CONJUGATE_GRADIENT_STEPS, body, start)[1]
