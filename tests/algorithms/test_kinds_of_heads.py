"""PFLEGO and its peers with heads of every kind, against GradientTape on the whole objective, in float64."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.toys import KINDS, distance, gradient, run, toy_of
from tfpfl.algorithms import ALGORITHMS, build_algorithm
from tfpfl.algorithms.parts import linear_head
from tfpfl.algorithms.parts.optimizers import sgd
from tfpfl.algorithms.pflego import pflego, pflego_exact
from tfpfl.checks import InvalidArgument
from tfpfl.models import Head, Weights, client_loss, tree
from tfpfl.models.heads import head_kind

ALL = ("classification", *KINDS)


def whole_objective(data, theta, heads):
    """Equation (1): sum_i alpha_i l_i(W_i, theta), without cached features and without closed forms."""
    alpha = data.population.num_examples / data.population.num_examples.sum()
    loss = client_loss(data.model)
    return tf.add_n([alpha[i] * loss(Weights(theta, heads[i]), *data.data[i]) for i in data.ids])


def initial_heads(data):
    return {i: data.model.head(data.population.info(i, "float64")) for i in data.ids}


@pytest.mark.parametrize("kind", slow_but(ALL, "classification", "regression", ci=ALL))
def test_tau_1_is_centralized_gradient_descent(kind):
    data = toy_of(kind)
    server, states = run(pflego_exact(data.model, data.population, tau=1, rho=0.2), data, rounds=3)
    theta, heads = data.model.theta(), initial_heads(data)
    for _ in range(3):
        slopes = gradient(lambda theta, heads: whole_objective(data, theta, heads), theta, heads)
        theta, heads = (tree.add_scaled(a, -0.2, b) for a, b in zip((theta, heads), slopes, strict=True))
    assert distance(server.theta, theta) < 1e-12
    assert distance([states[i] for i in data.ids], [heads[i] for i in data.ids]) < 1e-12


@pytest.mark.parametrize("kind", slow_but(ALL, "classification", "regression", ci=ALL))
def test_cached_features_give_the_gradient_of_the_whole_objective(kind):
    """tau - 1 steps on the head by GradientTape through the whole model, then one joint step."""
    data = toy_of(kind)
    algorithm = pflego_exact(data.model, data.population, tau=6, beta=0.05, rho=0.1, safeguard=False)
    server, states = run(algorithm, data)
    theta, heads, loss = data.model.theta(), initial_heads(data), client_loss(data.model)
    for i in data.ids:
        for _ in range(5):
            slope = gradient(lambda head: loss(Weights(theta, head), *data.data[i]), heads[i])[0]  # noqa: B023
            heads[i] = tree.add_scaled(heads[i], -0.05, slope)
    slopes = gradient(lambda theta, heads: whole_objective(data, theta, heads), theta, heads)
    theta, heads = (tree.add_scaled(a, -0.1, b) for a, b in zip((theta, heads), slopes, strict=True))
    assert distance(server.theta, theta) < 1e-9
    assert distance([states[i] for i in data.ids], [heads[i] for i in data.ids]) < 1e-9


def projected(data, theta, i):
    """min_W l_i(W, theta) for half the squared error, as a function of theta: by least squares, not by Cholesky."""
    x, y = data.data[i]
    a = tf.concat([data.model.features(theta, x), tf.ones([len(x), 1], tf.float64)], 1)
    fitted = tf.matmul(a, tf.linalg.pinv(a) @ y)
    return tf.reduce_sum(tf.square(fitted - y)) / (2 * len(x))


def test_the_exact_inner_solve_gives_the_projected_gradient():
    """At the best heads, the gradient of the objective by theta is that of its minimum over the heads."""
    data = toy_of("regression", examples=(16, 19, 14, 17, 15))
    algorithm = pflego_exact(data.model, data.population, rho=0.3, inner_opt="exact")
    server, _ = run(algorithm, data)
    alpha = data.population.num_examples / data.population.num_examples.sum()
    theta = data.model.theta()
    (slope,) = gradient(lambda theta: tf.add_n([alpha[i] * projected(data, theta, i) for i in data.ids]), theta)
    assert distance(server.theta, tree.add_scaled(theta, -0.3, slope)) < 1e-9
    assert distance(server.theta, theta) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("examples", [4, 30], ids=["fewer examples than features", "more"])
def test_the_exact_head_is_where_gradient_descent_ends(examples):
    rng, kind = np.random.default_rng(0), head_kind("regression")
    phi, y = tf.constant(rng.standard_normal((examples, 6))), tf.constant(rng.standard_normal((examples, 2)))
    start = Head(tf.constant(rng.standard_normal((6, 2))), tf.constant(rng.standard_normal(2)))
    exact = linear_head.fit_exact(start, phi, y, kind)
    descended = tf.function(lambda: linear_head.fit(start, phi, y, 20_000, sgd(0.3), kind))()
    assert distance(descended, exact) < 1e-9
    a = np.column_stack([phi, np.ones(examples)])
    old = np.vstack([start.kernel, start.bias])
    closed = old + np.linalg.pinv(a) @ (y - a @ old)
    assert distance(exact, Head(closed[:-1], closed[-1])) < 1e-9


def test_the_exact_head_exists_where_features_are_constant():
    """Dead units and equal examples: the factorization must not fail, and the loss must not rise; also in float32."""
    phi = tf.constant(np.zeros((5, 3)) + [0, 2, 2], tf.float32)
    head = linear_head.fit_exact(Head(tf.ones([3, 1]), tf.ones([1])), phi, tf.ones([5, 1]), head_kind("regression"))
    assert bool(tree.all_finite(head))
    np.testing.assert_allclose(phi @ head.kernel + head.bias, np.ones((5, 1)), atol=1e-5)
    assert float(head.kernel[0, 0]) == 1  # nothing is known of a dead unit: its weight stays


def test_what_a_kind_cannot_have_is_refused():
    data = toy_of("poisson")
    with pytest.raises(InvalidArgument, match="exact.*regression.*poisson.*newton"):
        pflego(data.model, data.population, inner_opt="exact")
    with pytest.raises(InvalidArgument, match="FedRoD is for classification only, found the kind poisson"):
        build_algorithm("fedrod", data.model, data.population)
    quantile = toy_of("quantile:0.3")
    with pytest.raises(InvalidArgument, match="second derivatives"):
        pflego(quantile.model, quantile.population, inner_opt="newton")


def test_what_needs_classes():
    assert {name for name, method in ALGORITHMS.items() if method.only_classes} == {
        *("fedrod", "fedpac", "knn_per", "fed3r", "fedproto", "fedas", "gpfl")
    }
