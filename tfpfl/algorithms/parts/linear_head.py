"""Training of a linear head on fixed features, with gradients in closed form.

Let Phi be the features [N, M], Y the targets [N, K] (one-hot labels of classes), Z = Phi W and E = dl/dZ. The gradient
of the mean loss is Phi^T E / N for the kernel and E W^T / N for the features (specification, section 1). For softmax
cross-entropy, squared error, logistic and Poisson loss E is P - Y, with the mean P of Y at Z: `tfpfl.models.heads`.

The code uses transposed matrices, [K, M] by [M, N], and its own softmax. On a CPU, products with matrices of K columns
take four times as long, and between its two passes a client of PFLEGO does little but steps on its head.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import tensorflow as tf

from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import InvalidArgument
from tfpfl.models import tree
from tfpfl.models.heads import CLASSIFICATION, HeadKind, check_curvature
from tfpfl.models.weights import Head

CONJUGATE_GRADIENT_STEPS = 10
_ADD: ContextVar[Callable | None] = ContextVar("what counts the steps of heads", default=None)
POWER_STEPS = 5  # of the power method, for the smoothness constant
_CLEARLY = 1.01  # by how much its second start must find more to count
FLOOR = 1e-12  # of the largest diagonal entry: added to the diagonal of an exact solve, in float64
SHORTEST = 1e-6  # the part of a Newton step below which it is not halved
DAMPING = 1e-3  # added to the Hessian, which is singular: the same constant for all classes does not change the loss


def loss(head: Head, phi, targets, kind: HeadKind = CLASSIFICATION):
    """The mean loss l_i of a head of a kind on features phi [N, M] with `HeadKind.targets` [N, K]: float []."""
    return loss_and_errors(head, phi, targets, kind)[0]


def loss_and_errors(head: Head, phi, targets, kind: HeadKind = CLASSIFICATION):
    """The `loss`, and its gradient (E / N)^T with respect to the outputs, one column per example: [K, N]."""
    examples, targets = tf.cast(tf.shape(phi)[0], phi.dtype), tf.transpose(targets)
    if not kind.label.is_classes:
        z = _outputs(tf.transpose(head.kernel), head.bias[:, None], phi)
        losses = tf.reduce_sum(kind.losses(z, targets), 0)
        return tf.reduce_sum(losses) / examples, kind.error(z, targets) / examples
    logits = _logits(tf.transpose(head.kernel), head.bias[:, None], phi)
    powers = tf.exp(logits)
    sums = tf.reduce_sum(powers, 0)
    losses = tf.math.log(sums) - tf.reduce_sum(targets * logits, 0)
    return tf.reduce_sum(losses) / examples, (powers / sums - targets) / examples


def gradient(phi, errors) -> Head:
    """The gradient of the loss with respect to the head, from the features [N, M] and the errors [K, N]."""
    return Head(tf.transpose(tf.matmul(errors, phi)), tf.reduce_sum(errors, 1))


def feature_gradient(head: Head, errors):
    """The gradient of the loss with respect to the features, from the errors [K, N]: [N, M]."""
    return tf.matmul(errors, head.kernel, transpose_a=True, transpose_b=True)


@contextmanager
def counting(add: Callable) -> Iterator[None]:
    """Counts what heads compute from features that are there already, in all graphs that are traced meanwhile.

    Args:
        add: called while such a graph runs, as add(number of examples, steps, vectors, solutions); see `counted`.
    """
    before = _ADD.set(add)
    try:
        yield
    finally:
        _ADD.reset(before)


def counted(phi, steps: float = 1.0, *, vectors: int = 0, solutions: int = 0):
    """The features phi [n, M], which report what is computed from them when they are used; see `counting`.

    Args:
        phi: the features.
        steps: a step is two products of matrices: the logits, and the gradient of the kernel. One of them alone is half
            a step.
        vectors: products of [phi, 1] with a vector, whatever the number of classes is.
        solutions: what `fit_exact` computes beside one step.
    """
    add = _ADD.get()
    if add is None:
        return phi

    def report(examples):
        add(int(examples), steps, vectors, solutions)
        return examples

    with tf.control_dependencies([tf.numpy_function(report, [tf.shape(phi)[0]], tf.int32)]):
        return tf.identity(phi)


def fit(head: Head, phi, targets, steps, optimizer: Optimizer, kind: HeadKind = CLASSIFICATION) -> Head:
    """Trains the head with `steps` full-batch steps of an optimizer, which starts from its initial state.

    Args:
        head: the initial head.
        phi: the features [N, M].
        targets: what `HeadKind.targets` gives, [N, K].
        steps: the number of steps, >= 0.
        optimizer: the `Optimizer`.
        kind: the kind of the head.

    Returns:
        The trained head.
    """
    examples = tf.cast(tf.shape(phi)[0], phi.dtype)
    wanted, targets = tf.transpose(targets), tf.transpose(targets) / examples

    def errors_of(head, its_phi):
        if not kind.label.is_classes:
            return kind.error(_outputs(head.kernel, head.bias, its_phi), wanted) / examples
        powers = tf.exp(_logits(head.kernel, head.bias, its_phi))
        return powers / (examples * tf.reduce_sum(powers, 0)) - targets

    def body(step, head, slots):
        its_phi = counted(phi)
        errors = errors_of(head, its_phi)
        its_gradient = Head(tf.matmul(errors, its_phi), tf.reduce_sum(errors, 1, keepdims=True))
        slots, head = optimizer.step(slots, head, its_gradient)
        return step + 1, head, slots

    start = Head(tf.transpose(head.kernel), head.bias[:, None])
    _, fitted, _ = tf.while_loop(
        lambda step, *_: step < steps, body, (0, start, optimizer.init(start)), parallel_iterations=1
    )
    return Head(tf.transpose(fitted.kernel), fitted.bias[:, 0])


def _outputs(kernel_t, bias, phi):
    """The outputs z [K, N]."""
    return tf.matmul(kernel_t, phi, transpose_b=True) + bias


def _logits(kernel_t, bias, phi):
    """The logits [K, N], shifted so that every example's largest is 0.

    Then exp cannot overflow; softmax is the same.
    """
    logits = _outputs(kernel_t, bias, phi)
    return logits - tf.stop_gradient(tf.reduce_max(logits, 0))


def fit_newton(head: Head, phi, targets, steps, kind: HeadKind = CLASSIFICATION) -> Head:
    """Trains the head with `steps` damped Newton steps; the other arguments are those of `fit`.

    Conjugate gradients compute the direction. A step that would raise the loss, or make it infinite or NaN, is halved
    until it does not; if it still does below the length `SHORTEST`, the head stays.

    Raises:
        InvalidArgument: the loss of this kind has no second derivative.
    """
    check_curvature(kind, "Newton's method")

    def body(step, head):
        current, error = loss_and_errors(head, counted(phi), targets, kind)
        direction = _conjugate_gradient(head, phi, gradient(phi, error), kind)

        def after(length):
            return loss(tree.add_scaled(head, -length, direction), counted(phi, 0.5), targets, kind)

        whole = tf.ones([], phi.dtype)
        length, reached = tf.while_loop(
            lambda length, reached: ~(reached <= current) & (length > SHORTEST),
            lambda length, reached: (length / 2, after(length / 2)),
            (whole, after(whole)),
        )
        moved = tree.add_scaled(head, -length, direction)
        return step + 1, tree.where(reached <= current, moved, head)

    return tf.while_loop(lambda step, _: step < steps, body, (0, head), parallel_iterations=1)[1]


def _conjugate_gradient(head, phi, right_side, kind: HeadKind = CLASSIFICATION):
    """Solves (H + DAMPING) d = right_side approximately for d; H is the Hessian of the loss at `head`.

    The residuals of exact conjugate gradients are orthogonal. Rounding takes that away within a few steps, and in
    float32 the direction after ten steps would be a matter of rounding. So each residual is made orthogonal to all
    earlier ones, twice: the second time removes what the first one left.
    """
    z = tf.matmul(counted(phi, 0.5), head.kernel) + head.bias
    variances = kind.mean(z) if kind.label.is_classes else kind.curvature(z)  # of classes: the probabilities
    examples = tf.cast(tf.shape(phi)[0], phi.dtype)

    def vector(v: Head):
        return tf.concat([tf.reshape(v.kernel, [-1]), v.bias], 0)

    def as_head(v) -> Head:
        size = tf.size(head.kernel)
        return Head(tf.reshape(v[:size], tf.shape(head.kernel)), v[size:])

    def hessian_times(direction):
        v = as_head(direction)
        u = tf.matmul(counted(phi), v.kernel) + v.bias
        curved = variances * u
        if kind.label.is_classes:  # their outputs depend on each other
            curved -= variances * tf.reduce_sum(curved, 1, keepdims=True)
        curved /= examples
        return vector(gradient(phi, tf.transpose(curved))) + DAMPING * direction

    def row(step, residual, squared):
        """A matrix with the residual, of length 1, in this row: [steps, P]."""
        here = tf.one_hot(step, CONJUGATE_GRADIENT_STEPS, dtype=phi.dtype)
        return here[:, None] * tf.math.divide_no_nan(residual, tf.sqrt(squared))

    def body(step, solution, residual, direction, squared, earlier):
        curved = hessian_times(direction)
        length = tf.math.divide_no_nan(squared, tf.tensordot(direction, curved, 1))
        solution += length * direction
        residual -= length * curved
        for _ in range(2):
            residual -= tf.linalg.matvec(earlier, tf.linalg.matvec(earlier, residual), transpose_a=True)
        new_squared = tf.tensordot(residual, residual, 1)
        direction = residual + tf.math.divide_no_nan(new_squared, squared) * direction
        return step + 1, solution, residual, direction, new_squared, earlier + row(step + 1, residual, new_squared)

    first = vector(right_side)
    squared = tf.tensordot(first, first, 1)
    start = (0, tf.zeros_like(first), first, first, squared, row(0, first, squared))
    return as_head(tf.while_loop(lambda step, *_: step < CONJUGATE_GRADIENT_STEPS, body, start)[1])


def smoothness(phi, kind: HeadKind = CLASSIFICATION):
    """The smoothness constant L of a client's loss as a function of its head: float [].

    A gradient step of a rate up to 2 / L does not raise the loss. L = c s^2 / N bounds the Hessian everywhere, with the
    largest singular value s of A = [Phi, 1] and the kind's largest curvature c. `POWER_STEPS` steps of the power method
    find s, from the vector of ones, which is near the solution where features are not negative. Where columns of Phi
    have the mean 0, ones do not see them; so a second start, a fixed vector without a pattern, counts where it finds
    clearly more. Each step takes two products of A with a vector. What they find is never more than s.

    Args:
        phi: the features [N, M].
        kind: the kind of the head.

    Raises:
        InvalidArgument: the curvature of this kind has no bound; see `check_smooth`.
    """
    check_smooth(kind, "the smoothness constant")
    phi = counted(phi, 0, vectors=2 * (2 * POWER_STEPS - 1))  # of two starts; the last u of each is not used
    examples = tf.cast(tf.shape(phi)[0], phi.dtype)
    ones = tf.ones_like(phi[:, :1])
    places = tf.range(tf.shape(phi)[0])[:, None] % 1021
    other = tf.cast(389 * places * places % 1021, phi.dtype) / 1021 - 0.5
    usual, found = (_largest_squared(phi, u) for u in (ones / tf.sqrt(examples), other / tf.norm(other)))
    squared = tf.where(found > _CLEARLY * usual, found, usual)
    return tf.constant(kind.largest_curvature, phi.dtype) * squared / examples


def _largest_squared(phi, u):
    """The squared largest singular value of [Phi, 1] as the power method finds it from u [N, 1], |u| = 1: float []."""
    squared = tf.zeros([], phi.dtype)
    for _ in range(POWER_STEPS):
        kernel, bias = tf.matmul(phi, u, transpose_a=True), tf.reduce_sum(u)
        squared = tf.reduce_sum(tf.square(kernel)) + tf.square(bias)  # |A^T u|^2 with |u| = 1
        u = tf.matmul(phi, kernel) + bias
        u = tf.math.divide_no_nan(u, tf.norm(u))
    return squared


def check_smooth(kind: HeadKind, what: str) -> None:
    """Checks that the curvature of a kind has a bound.

    Raises:
        InvalidArgument: it has none.
    """
    if kind.largest_curvature is None:
        raise InvalidArgument(
            f"{what} needs a loss whose second derivative has a bound, and that of the kind {kind.text} has none. "
            "Kinds that have one: classification, multilabel, regression, huber"
        )


def fit_exact(head: Head, phi, targets, kind: HeadKind) -> Head:
    """The head of least squared error that gradient descent reaches from `head` after infinitely many steps.

    Where several heads fit equally well, it is the one nearest to `head`: W + A^+ (Y - A W), with A = [Phi, 1] and its
    pseudoinverse A^+. It is computed in float64 by a Cholesky factorization of the smaller of A^T A and A A^T, with
    `FLOOR` times its largest diagonal entry on the diagonal, so that it exists also where the features depend on each
    other. So features that are over 1e5 times smaller than the largest ones (the bias is one of size 1) count as if
    they depended on others, and their weights come out too small: scale features of such different sizes before.

    Args:
        head, phi, targets: as in `fit`.
        kind: 'regression'.

    Raises:
        InvalidArgument: another kind has no solution in closed form.
    """
    check_exact(kind)
    a = tf.cast(tf.concat([counted(phi, solutions=1), tf.ones_like(phi[:, :1])], 1), tf.float64)
    old = tf.cast(tf.concat([head.kernel, head.bias[None]], 0), tf.float64)
    rest = tf.cast(targets, tf.float64) - tf.matmul(a, old)

    def solved(gram, right_side):
        size = tf.shape(gram)[0]
        floor = FLOOR * tf.reduce_max(tf.linalg.diag_part(gram))
        lower = tf.linalg.cholesky(gram + tf.eye(size, dtype=tf.float64) * floor)
        first = tf.linalg.cholesky_solve(lower, right_side)
        # once more on what is left: the floor then counts only by its square
        return first + tf.linalg.cholesky_solve(lower, right_side - tf.matmul(gram, first))

    def wide():  # fewer examples than features
        return tf.matmul(a, solved(tf.matmul(a, a, transpose_b=True), rest), transpose_a=True)

    def tall():
        return solved(tf.matmul(a, a, transpose_a=True), tf.matmul(a, rest, transpose_a=True))

    new = tf.cast(old + tf.cond(tf.shape(a)[0] < tf.shape(a)[1], wide, tall), phi.dtype)
    return Head(tf.ensure_shape(new[:-1], head.kernel.shape), tf.ensure_shape(new[-1], head.bias.shape))


def check_exact(kind: HeadKind) -> None:
    """Checks that the inner problem has a solution in closed form.

    Raises:
        InvalidArgument: the kind is not 'regression'.
    """
    if kind.label.name != "regression":
        raise InvalidArgument(
            f"inner_opt='exact' solves for the head of least squared error: it is for the kind regression, and this "
            f"model has the kind {kind.text}. Use inner_opt='gd'"
            + (", or 'newton', which comes near the minimum in a few steps" if kind.has_curvature else "")
        )
