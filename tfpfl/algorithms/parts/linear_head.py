"""Training of a linear softmax head on fixed features, with gradients in closed form.

Let Phi be the features [N, M], Y the one-hot labels [N, K] and P = softmax(Phi W). The gradient of the mean
cross-entropy is Phi^T (P - Y) / N for the kernel and (P - Y) W^T / N for the features (specification, section 1).

The code uses transposed matrices, [K, M] by [M, N], and its own softmax. On a CPU, products with matrices of K columns
take four times as long, and between its two passes a client of PFLEGO does little but steps on its head.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import tensorflow as tf

from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.models import tree
from tfpfl.models.weights import Head

CONJUGATE_GRADIENT_STEPS = 10
_ADD: ContextVar[Callable | None] = ContextVar("what counts the steps of heads", default=None)
DAMPING = 1e-3  # added to the Hessian, which is singular: the same constant for all classes does not change the loss


def loss(head: Head, phi, targets):
    """The mean cross-entropy l_i of a head on features phi [N, M] with one-hot targets [N, K]: float []."""
    return loss_and_errors(head, phi, targets)[0]


def errors(head: Head, phi, targets):
    """The gradient ((P - Y) / N)^T of the loss with respect to the logits, one column per example: [K, N]."""
    return loss_and_errors(head, phi, targets)[1]


def loss_and_errors(head: Head, phi, targets):
    """The pair (`loss`, `errors`), computed with one softmax."""
    examples, targets = tf.cast(tf.shape(phi)[0], phi.dtype), tf.transpose(targets)
    logits = _logits(tf.transpose(head.kernel), head.bias[:, None], phi)
    powers = tf.exp(logits)
    sums = tf.reduce_sum(powers, 0)
    losses = tf.math.log(sums) - tf.reduce_sum(targets * logits, 0)
    return tf.reduce_sum(losses) / examples, (powers / sums - targets) / examples


def gradient(phi, errors) -> Head:
    """The gradient of the loss with respect to the head, from the features [N, M] and `errors` [K, N]."""
    return Head(tf.transpose(tf.matmul(errors, phi)), tf.reduce_sum(errors, 1))


def feature_gradient(head: Head, errors):
    """The gradient of the loss with respect to the features, from `errors` [K, N]: [N, M]."""
    return tf.matmul(errors, head.kernel, transpose_a=True, transpose_b=True)


@contextmanager
def counting(add: Callable) -> Iterator[None]:
    """Counts the steps of heads on features that are computed already, in all graphs that are traced meanwhile.

    Args:
        add: called while such a graph runs, as add(number of examples, number of steps); see `counted`.
    """
    before = _ADD.set(add)
    try:
        yield
    finally:
        _ADD.reset(before)


def counted(phi, steps: float = 1.0):
    """The features phi [n, M], which report `steps` steps on n examples when they are used; see `counting`.

    A step is two products of matrices: the logits, and the gradient of the kernel. One of them alone is half a step.
    """
    add = _ADD.get()
    if add is None:
        return phi

    def report(examples):
        add(int(examples), steps)
        return examples

    with tf.control_dependencies([tf.numpy_function(report, [tf.shape(phi)[0]], tf.int32)]):
        return tf.identity(phi)


def fit(head: Head, phi, targets, steps, optimizer: Optimizer) -> Head:
    """Trains the head with `steps` full-batch steps of an optimizer, which starts from its initial state.

    Args:
        head: the initial head.
        phi: the features [N, M].
        targets: one-hot labels [N, K].
        steps: the number of steps, >= 0.
        optimizer: the `Optimizer`.

    Returns:
        The trained head.
    """
    examples = tf.cast(tf.shape(phi)[0], phi.dtype)
    targets = tf.transpose(targets) / examples

    def body(step, head, slots):
        its_phi = counted(phi)
        powers = tf.exp(_logits(head.kernel, head.bias, its_phi))
        errors = powers / (examples * tf.reduce_sum(powers, 0)) - targets
        its_gradient = Head(tf.matmul(errors, its_phi), tf.reduce_sum(errors, 1, keepdims=True))
        slots, head = optimizer.step(slots, head, its_gradient)
        return step + 1, head, slots

    start = Head(tf.transpose(head.kernel), head.bias[:, None])
    _, fitted, _ = tf.while_loop(
        lambda step, *_: step < steps, body, (0, start, optimizer.init(start)), parallel_iterations=1
    )
    return Head(tf.transpose(fitted.kernel), fitted.bias[:, 0])


def _logits(kernel_t, bias, phi):
    """The logits [K, N], shifted so that every example's largest is 0.

    Then exp cannot overflow; softmax is the same.
    """
    logits = tf.matmul(kernel_t, phi, transpose_b=True) + bias
    return logits - tf.stop_gradient(tf.reduce_max(logits, 0))


def fit_newton(head: Head, phi, targets, steps) -> Head:
    """Trains the head with `steps` damped Newton steps; the other arguments are those of `fit`.

    Conjugate gradients compute the direction. A step that would raise the loss is halved until it does not.
    """

    def body(step, head):
        current, error = loss_and_errors(head, counted(phi), targets)
        direction = _conjugate_gradient(head, phi, targets, gradient(phi, error))

        def worse(length):
            shorter = loss(tree.add_scaled(head, -length, direction), counted(phi, 0.5), targets)
            return (shorter > current) & (length > 1e-3)

        (length,) = tf.while_loop(worse, lambda length: (length / 2,), (tf.ones([], phi.dtype),))
        return step + 1, tree.add_scaled(head, -length, direction)

    return tf.while_loop(lambda step, _: step < steps, body, (0, head), parallel_iterations=1)[1]


def _conjugate_gradient(head, phi, targets, right_side):
    """Solves (H + DAMPING) d = right_side approximately for d; H is the Hessian of the loss at `head`."""
    probabilities = tf.nn.softmax(tf.matmul(counted(phi, 0.5), head.kernel) + head.bias)
    examples = tf.cast(tf.shape(phi)[0], phi.dtype)

    def hessian_times(v: Head):
        u = tf.matmul(counted(phi), v.kernel) + v.bias
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
