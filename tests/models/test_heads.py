"""Kinds of heads against other libraries, automatic differentiation, and what their losses are minimized by."""

import numpy as np
import pytest
import tensorflow as tf
from sklearn import metrics

from helpers.toys import KINDS, cloud_targets
from tfpfl.algorithms.parts import linear_head
from tfpfl.algorithms.parts.optimizers import sgd
from tfpfl.checks import InvalidArgument
from tfpfl.data.kinds import kind_for, label_kind
from tfpfl.models import Head
from tfpfl.models.heads import head_kind


def outputs_and_targets(kind, n=40, seed=3):
    [(_, y)] = cloud_targets([n], 3, kind)
    return tf.constant(np.random.default_rng(seed).standard_normal(y.shape)), y


def nll(kind, z, y):
    """The loss of every output, in NumPy and by the definition."""
    name, parameter = kind.label.name, kind.label.parameter
    if name == "multilabel":
        p = 1 / (1 + np.exp(-z))
        return -(y * np.log(p) + (1 - y) * np.log(1 - p))
    if name == "regression":
        return (z - y) ** 2 / 2
    if name == "poisson":
        return np.exp(z) - y * z
    if name == "quantile":
        return np.where(y > z, parameter * (y - z), (1 - parameter) * (z - y))
    return np.where(np.abs(z - y) < parameter, (z - y) ** 2 / 2, parameter * (np.abs(z - y) - parameter / 2))


@pytest.mark.parametrize("text", KINDS)
def test_loss_and_derivatives(text):
    kind, (z, y) = head_kind(text), outputs_and_targets(text)
    np.testing.assert_allclose(kind.losses(z, y), nll(kind, z.numpy(), y), rtol=1e-12, atol=1e-14)
    assert float(kind.loss(z, y)) == pytest.approx(nll(kind, z.numpy(), y).sum(1).mean(), rel=1e-12)
    with tf.GradientTape() as outer:
        outer.watch(z)
        with tf.GradientTape() as tape:
            tape.watch(z)
            total = tf.reduce_sum(kind.losses(z, y))
        slope = tape.gradient(total, z)
    np.testing.assert_allclose(kind.error(z, y), slope, rtol=1e-9, atol=1e-12)
    if kind.has_curvature:
        curved = outer.gradient(slope, z)
        np.testing.assert_allclose(kind.curvature(z), tf.ones_like(z) if curved is None else curved, rtol=1e-9)


REFERENCES = {
    "multilabel": lambda y, z: metrics.accuracy_score(y, z > 0),
    "regression": lambda y, z: metrics.mean_squared_error(y, z) ** 0.5,
    "poisson": lambda y, z: metrics.mean_poisson_deviance(y.ravel(), np.exp(z).ravel()),
    "quantile:0.3": lambda y, z: metrics.mean_pinball_loss(y, z, alpha=0.3),
    "huber:0.2": metrics.mean_absolute_error,
}


def test_the_deviance_of_large_counts_in_float32():
    """It was 13 % too large at 100,000, and -9.5 in place of 1.2 at ten million."""
    rng = np.random.default_rng(0)
    for mean in (10, 1e5, 1e7):
        y = rng.poisson(mean, size=(50, 1)).astype(np.float32)
        z = np.full_like(y, np.log(mean))
        found = float(head_kind("poisson").score(tf.constant(z), tf.constant(y)))
        assert found == pytest.approx(REFERENCES["poisson"](y.astype(float), z.astype(float)), rel=2e-3)


@pytest.mark.parametrize("text", KINDS)
def test_scores_are_those_of_scikit_learn(text):
    kind, (z, y) = head_kind(text), outputs_and_targets(text)
    z = tf.where(tf.range(len(y))[:, None] < 10, 3 * (y - 0.5), z)  # some predictions are right
    found = tf.reduce_mean(tf.cast(kind.correct(z, y), tf.float64)) if kind.counts else kind.score(z, y)
    assert float(found) == pytest.approx(REFERENCES[text](y, z.numpy()), rel=1e-12)
    assert kind.label.score.is_fraction == kind.counts


@pytest.mark.parametrize(
    ("text", "statistic"),
    [
        ("multilabel", lambda y: y.mean(0)),
        ("regression", lambda y: y.mean(0)),
        ("poisson", lambda y: y.mean(0)),
        ("quantile:0.3", lambda y: np.quantile(y, 0.3, axis=0, method="inverted_cdf")),
    ],
)
def test_a_bias_alone_learns_the_statistic_of_the_kind(text, statistic):
    """Its features are 0, so the mean prediction is the mean of the targets, or their quantile."""
    kind, (_, y) = head_kind(text), outputs_and_targets(text, n=101)
    phi, head = tf.zeros([101, 2], tf.float64), Head(tf.zeros([2, 3], tf.float64), tf.zeros([3], tf.float64))
    rate, tolerance = (0.02, 0.02) if kind.label.name == "quantile" else (0.5, 1e-6)
    fitted = tf.function(lambda head: linear_head.fit(head, phi, y, 2000, sgd(rate), kind))(head)
    np.testing.assert_allclose(kind.mean(fitted.bias), statistic(y), atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["multilabel", "regression", "poisson"])
def test_newtons_method_ends_where_the_gradient_is_zero(text):
    kind, (_, y) = head_kind(text), outputs_and_targets(text)
    phi = tf.constant(np.random.default_rng(0).standard_normal((40, 4)))
    start = Head(tf.zeros([4, 3], tf.float64), tf.zeros([3], tf.float64))
    head = tf.function(lambda: linear_head.fit_newton(start, phi, y, 30, kind))()
    slope = linear_head.gradient(phi, linear_head.loss_and_errors(head, phi, y, kind)[1])
    assert max(float(tf.reduce_max(tf.abs(part))) for part in slope) < 1e-6


@pytest.mark.parametrize("text", ["quantile", "huber:2"])
def test_a_kind_without_second_derivatives_has_no_newton_step(text):
    phi, head = tf.zeros([3, 2]), Head(tf.zeros([2, 1]), tf.zeros([1]))
    with pytest.raises(InvalidArgument, match="second derivatives.*inner_opt='gd'"):
        linear_head.fit_newton(head, phi, tf.zeros([3, 1]), 1, head_kind(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("regresion", "regression"),
        ("quantile:1", "between 0 and 1"),
        ("quantile:much", "between 0 and 1"),
        ("huber:0", "above 0"),
        ("huber:inf", "above 0"),
        ("poisson:3", "has no parameter"),
    ],
)
def test_a_text_that_is_no_kind(text, says):
    with pytest.raises(InvalidArgument, match=says):
        label_kind(text)


@pytest.mark.parametrize("text", ["quantile:0.9999999", "quantile:1e-09", "huber:2", "huber:1234567.25", "poisson"])
def test_the_text_of_a_kind_is_the_same_kind(text):
    """It is what a run and an export write down: rounded to six digits, quantile:0.9999999 would be none."""
    assert label_kind(text).text == text and label_kind(label_kind(text).text) == label_kind(text)


def test_the_kind_of_a_federation_is_the_usual_one_unless_another_fits():
    assert [kind_for(sort).text for sort in ("class", "binary", "real", "count")] == [
        "classification",
        "multilabel",
        "regression",
        "poisson",
    ]
    assert kind_for("count", "huber:2").parameter == 2
    with pytest.raises(InvalidArgument, match=r"numbers >= 0, but .* finite numbers. Kinds for them: regression"):
        kind_for("real", "poisson")
