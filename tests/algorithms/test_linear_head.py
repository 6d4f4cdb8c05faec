"""The head's closed forms against GradientTape, and its optimizers against the minimum."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.toys import distance, gradient, identical
from tfpfl.algorithms.parts import linear_head as heads
from tfpfl.algorithms.parts.optimizers import sgd
from tfpfl.models import tree
from tfpfl.models.heads import head_kind
from tfpfl.models.weights import Head


def problem(n=7, m=3, k=4, seed=0):
    """(head, phi, one-hot targets) of float64 noise."""
    rng = np.random.default_rng(seed)
    head = Head(tf.constant(rng.standard_normal((m, k))), tf.constant(rng.standard_normal(k)))
    return head, tf.constant(rng.standard_normal((n, m))), tf.one_hot(rng.integers(k, size=n), k, dtype=tf.float64)


@pytest.mark.parametrize("shape", [(7, 3, 4), (1, 3, 2), (5, 1, 1), (40, 6, 10)])
def test_gradients_are_those_of_the_mean_cross_entropy(shape):
    head, phi, targets = problem(*shape)

    def loss(head, phi):
        """By the definition: -mean log softmax, at the target."""
        p = tf.exp(phi @ head.kernel + head.bias)
        return -tf.reduce_mean(tf.math.log(tf.reduce_sum(targets * p, 1) / tf.reduce_sum(p, 1)))

    head_slope, phi_slope = gradient(loss, head, phi)
    value, errors = heads.loss_and_errors(head, phi, targets)
    assert abs(value - loss(head, phi)) < 1e-12
    assert distance(heads.gradient(phi, errors), head_slope) < 1e-12
    assert distance(heads.feature_gradient(head, errors), phi_slope) < 1e-12


def test_large_logits_do_not_overflow():
    head, phi, targets = problem()
    head = tree.scale(1e4, head)
    assert np.isfinite(heads.loss(head, phi, targets))
    assert bool(tree.all_finite(heads.loss_and_errors(head, phi, targets)[1]))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fit_is_the_keras_optimizer_on_the_same_loss(momentum):
    head, phi, targets = problem()
    variables = [tf.Variable(head.kernel), tf.Variable(head.bias)]
    optimizer = keras.optimizers.SGD(0.25, momentum=momentum)  # 0.25: Keras holds the rate in float32
    for _ in range(6):
        (slope,) = gradient(lambda w: heads.loss(w, phi, targets), Head(*[tf.convert_to_tensor(v) for v in variables]))
        optimizer.apply_gradients(zip(slope, variables, strict=True))
    fitted = heads.fit(head, phi, targets, 6, sgd(0.25, momentum))
    assert distance(fitted, variables) < (1e-12 if momentum == 0 else 1e-6)  # so is the momentum
    assert distance(heads.fit(head, phi, targets, 0, sgd(0.25, momentum)), head) == 0


def slope_norm(head, phi, targets) -> float:
    slope = heads.gradient(phi, heads.loss_and_errors(head, phi, targets)[1])
    return float(tf.sqrt(tree.dot(slope, slope)))


@pytest.mark.slow
def test_newton_reaches_the_minimum_that_gradient_descent_approaches():
    head, phi, targets = problem(n=40)
    newton = heads.fit_newton(head, phi, targets, 30)
    descended = heads.fit(head, phi, targets, 5000, sgd(0.5))
    assert slope_norm(newton, phi, targets) < 1e-7
    assert slope_norm(heads.fit(head, phi, targets, 30, sgd(0.5)), phi, targets) > 1e-3
    assert abs(heads.loss(newton, phi, targets) - heads.loss(descended, phi, targets)) < 1e-7


@pytest.mark.parametrize("seed", slow_but(range(3), ci=(0,)))
def test_no_newton_step_raises_the_loss(seed):
    """Started far away, where the softmax is flat and a full Newton step overshoots."""
    head, phi, targets = problem(seed=seed)
    head = tree.scale(20.0, head)
    losses = [float(heads.loss(heads.fit_newton(head, phi, targets, steps), phi, targets)) for steps in range(8)]
    assert (np.diff(losses) <= 1e-3 * losses[0]).all() and losses[-1] < losses[0]


def test_the_hessian_times_a_vector_is_that_of_two_tapes():
    """The solution of (H + damping) d = g, put back into H from autodiff, gives g."""
    head, phi, targets = problem(n=40, m=2, k=3)
    with tf.GradientTape() as outer:
        outer.watch(head)
        with tf.GradientTape() as inner:
            inner.watch(head)
            loss = heads.loss(head, phi, targets)
        slope = inner.gradient(loss, head)
        flat = tf.concat([tf.reshape(s, [-1]) for s in slope], 0)
    rows = outer.jacobian(flat, head)
    hessian = np.concatenate([np.reshape(r, (len(flat), -1)) for r in rows], 1)
    solution = heads._conjugate_gradient(head, phi, slope)
    d = np.concatenate([np.ravel(s) for s in solution])
    np.testing.assert_allclose(hessian @ d + heads.DAMPING * d, flat, atol=1e-9)


@pytest.mark.parametrize("m, k", [(64, 5), (200, 2)])
def test_ten_steps_of_conjugate_gradients_are_the_same_in_float32(m, k):
    """Features that are not negative and much alike, as a backbone's; more unknowns than steps.

    Without making residuals orthogonal again the directions differ by 10 to 20 % of the largest number.
    """
    rng = np.random.default_rng(0)
    phi = 3 * np.maximum(np.maximum(rng.normal(size=(100, m)), 0) @ rng.normal(size=(m, m)) / np.sqrt(m), 0)
    targets, numbers = np.eye(k)[rng.integers(0, k, 100)], 0.3 * rng.normal(size=(m + 1, k))
    found = []
    for dtype in (tf.float64, tf.float32):
        head = Head(tf.constant(numbers[:m], dtype), tf.constant(numbers[m], dtype))
        given = tf.constant(phi, dtype), tf.constant(targets, dtype)
        slope = heads.gradient(given[0], heads.loss_and_errors(head, *given)[1])
        found.append(np.concatenate([np.ravel(d) for d in heads._conjugate_gradient(head, given[0], slope)]))
    assert np.abs(found[0] - found[1]).max() < 1e-4 * np.abs(found[0]).max()


@pytest.mark.slow
@pytest.mark.parametrize("mean", [2e4, 1e5])
def test_newton_with_large_counts_does_not_raise_the_loss(mean):
    """The first whole step goes from exp(0) to exp(mean), which is infinite."""
    rng, kind = np.random.default_rng(0), head_kind("poisson")
    phi, y = tf.constant(rng.random((40, 5)), tf.float32), tf.constant(rng.poisson(mean, (40, 1)), tf.float32)
    head = Head(tf.zeros([5, 1]), tf.zeros([1]))
    losses = [float(heads.loss(heads.fit_newton(head, phi, y, steps, kind), phi, y, kind)) for steps in (0, 1, 2, 20)]
    assert losses[0] > losses[1] >= losses[2] > losses[3] and losses[3] < 0.1 * losses[0]


def test_newton_keeps_a_head_whose_loss_no_step_lowers():
    head, phi, targets = problem()
    bad = tf.concat([phi[:1] * np.nan, phi[1:]], 0)
    assert identical(heads.fit_newton(head, bad, targets, 3), head)
