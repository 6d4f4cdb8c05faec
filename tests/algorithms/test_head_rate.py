"""The rate of the head's last step in PFLEGO, and the smoothness constant that bounds it."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.toys import backbone, client_loss, distance, initial_states, toy_of
from tfpfl.algorithms import pflego
from tfpfl.algorithms.parts import linear_head as heads
from tfpfl.algorithms.pflego import LAST, head_steps
from tfpfl.checks import InvalidArgument
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import SplitModel, tree
from tfpfl.models.heads import head_kind
from tfpfl.models.weights import Head

BOUNDED = ["classification", "multilabel", "regression", "huber:0.5"]  # kinds whose curvature has a bound


def one_round(data, **hyperparameters):
    """(theta before, heads before, heads after, metrics) of a round with everyone."""
    algorithm = pflego(data.model, data.population, **hyperparameters)
    server, before = algorithm.init_server(), initial_states(algorithm, data.population)
    found = Simulation(algorithm).next(server, [before[i] for i in data.ids], [data.visit(i, 1) for i in data.ids])
    after = dict(zip(data.ids, found.client_states, strict=True))
    return server.theta, before, after, found.client_metrics


def smoothness_of(data, theta, client) -> float:
    phi = np.asarray(data.model.features(theta, data.data[client][0]))
    a = np.column_stack([phi, np.ones(len(phi))])
    return data.model.kind.largest_curvature * np.linalg.norm(a, 2) ** 2 / len(a)


@pytest.mark.parametrize("kind", BOUNDED)
def test_smoothness_is_that_of_the_largest_singular_value(kind):
    rng = np.random.default_rng(0)
    phi = np.maximum(rng.standard_normal((30, 12)), 0)
    a = np.column_stack([phi, np.ones(30)])
    c = {"classification": 0.5, "multilabel": 0.25}.get(kind, 1.0)
    exact = c * np.linalg.norm(a, 2) ** 2 / 30
    found = float(heads.smoothness(tf.constant(phi), head_kind(kind)))
    assert 0.999 * exact < found <= exact * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(BOUNDED, "classification"))
def test_no_hessian_is_larger(kind):
    """Of random heads; for squared error, two outputs have the Hessian twice, so that the bound is met."""
    rng = np.random.default_rng(1)
    phi, kind = tf.constant(rng.standard_normal((8, 3))), head_kind(kind)
    y = rng.integers(0, 2, 8) if kind.label.is_classes else rng.integers(0, 2, (8, 2)).astype(float)
    targets = kind.targets(tf.constant(y), 2, phi.dtype)
    a = np.column_stack([phi, np.ones(8)])
    bound, largest = kind.largest_curvature * np.linalg.norm(a, 2) ** 2 / 8, 0.0
    for scale in (0.0, 0.3, 3.0):
        w = tf.constant(scale * rng.standard_normal((4, 2)))
        with tf.GradientTape() as outer:
            outer.watch(w)
            with tf.GradientTape() as inner:
                inner.watch(w)
                loss = heads.loss(Head(w[:-1], w[-1]), phi, targets, kind)
            slope = inner.gradient(loss, w)
        hessian = np.reshape(outer.jacobian(slope, w), (8, 8))
        largest = max(largest, np.linalg.eigvalsh(hessian)[-1])
    assert largest <= bound * (1 + 1e-9)
    if kind.label.name in ("classification", "multilabel", "regression"):
        assert largest > 0.99 * bound  # with heads of 0 the bound is met


def test_the_metric_says_whose_loss_was_raised(data):
    theta, before, after, metrics = one_round(data, tau=1, rho=10.0)
    truth = [client_loss(data, i, theta, after[i]) > client_loss(data, i, theta, before[i]) for i in data.ids]
    assert [bool(m["raised"]) for m in metrics] == [bool(t) for t in truth]
    assert any(truth) and not all(truth)  # a rate that is too large for some


@pytest.mark.parametrize("rho", [10.0, 100.0])
def test_safe_steps_lower_every_loss(data, rho):
    theta, before, after, metrics = one_round(data, tau=1, rho=rho, head_rate="safe")
    for i in data.ids:
        assert client_loss(data, i, theta, after[i]) < client_loss(data, i, theta, before[i])
    assert not any(m["raised"] for m in metrics)


def test_safe_is_one_over_the_smoothness(data):
    _, before, after, _ = one_round(data, tau=1, rho=100.0, head_rate="safe")
    _, _, by_rho, _ = one_round(data, tau=1, rho=1.0)
    theta = pflego(data.model, data.population).init_server().theta
    for i in data.ids:  # rule eq3 and everyone: the rate of 'rho' is rho
        step, safe = (tree.add_scaled(new[i], -1.0, before[i]) for new in (by_rho, after))
        rate = float(tree.dot(safe, step) / tree.dot(step, step))
        assert distance(safe, tree.scale(rate, step)) < 1e-12
        assert 1 - 1e-9 < rate * smoothness_of(data, theta, i) < 1.2  # the power method finds no more than L


@pytest.mark.slow
def test_safe_changes_nothing_where_the_rate_is_small(data):
    assert distance(*(one_round(data, tau=3, rho=0.01, head_rate=r)[2] for r in ("rho", "safe"))) == 0


@pytest.mark.slow
def test_beta_is_one_more_inner_step(data):
    """The head after tau - 1 inner steps and one of rate beta is that after tau inner steps."""
    found = one_round(data, tau=4, beta=0.2, rho=0.05, head_rate="beta", safeguard=False)[2]
    expected = one_round(data, tau=5, beta=0.2, rho=0.0, safeguard=False)[2]
    assert distance(found, expected) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("head_rate", ["beta", "safe"])
def test_theta_takes_the_same_step(data, head_rate):
    ends = []
    for each in ("rho", head_rate):
        algorithm = pflego(data.model, data.population, tau=3, rho=2.0, head_rate=each)
        states = initial_states(algorithm, data.population)
        visits = [data.visit(i, 1) for i in data.ids]
        ends.append(Simulation(algorithm).next(algorithm.init_server(), [states[i] for i in data.ids], visits).server)
    assert distance(*ends) == 0


@pytest.mark.parametrize("kind", ["poisson", "quantile:0.3"])
def test_kinds_whose_curvature_has_no_bound(kind):
    data = toy_of(kind)
    with pytest.raises(InvalidArgument, match="head_rate='safe' needs a loss whose second derivative has a bound"):
        pflego(data.model, data.population, head_rate="safe")


def test_an_unknown_head_rate(data):
    with pytest.raises(InvalidArgument, match="head_rate"):
        pflego(data.model, data.population, head_rate="fast")


def test_the_warning_is_about_the_last_rounds():
    calm, wild = [{"raised": 0.1}] * LAST, [{"raised": 0.4}] * LAST
    for quiet in (wild + calm, wild[1:], [{}] * LAST):
        assert head_steps(quiet, {}) is None
    assert "the last step of a head raised the client's loss for 40% of the examples" in head_steps(calm + wild, {})
    taken_back = head_steps([{"restored": 0.9, "raised": 0.1}] * LAST, {})
    assert "for 90% of the examples, and were taken back (safeguard): such steps are too long" in taken_back
    assert "last step" not in taken_back
    assert head_steps([{"restored": 0.9, "raised": 0.4}] * LAST, {}).count("in the last 20 rounds") == 2


def test_the_warning_names_the_rate_of_the_last_step():
    wild = [{"raised": 0.4}] * LAST
    for rate, its in (
        ("rho", "its rate, rho I / r, is"),
        ("beta", "its rate, beta, is"),
        ("safe", "'safe' bounds its"),
    ):
        assert its in head_steps(wild, {"head_rate": rate})


def test_rounding_at_a_minimum_raises_no_loss():
    """The inner steps end at the minimum, in float32: a short last step changes the last digits of the loss."""
    data, model = toy_of("regression", examples=(60, 50, 40)), SplitModel(backbone("float32"), kind="regression")
    data = data._replace(model=model, data=[(x.astype("float32"), y.astype("float32")) for x, y in data.data])
    algorithm = pflego(model, data.population, tau=300, beta=0.3, rho=1e-4, server_opt="sgd")
    engine = Simulation(algorithm)
    server, states = algorithm.init_server(), [initial_states(algorithm, data.population)[i] for i in data.ids]
    for t in range(1, 11):
        found = engine.next(server, states, [data.visit(i, t) for i in data.ids])
        server, states = found.server, found.client_states
        assert not any(m["raised"] for m in found.client_metrics)


def features_of_mean_0():
    """Features that a vector of ones does not see: each column has the mean 0."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((40, 1)) @ rng.standard_normal((1, 30)) + 0.3 * rng.standard_normal((40, 30))
    return (z - z.mean(0)) / z.std(0)


@pytest.mark.parametrize("make", [features_of_mean_0, lambda: np.repeat([[1.0], [-1.0]], 4, 0) * np.ones((1, 30))])
def test_smoothness_of_features_whose_columns_have_the_mean_0(make):
    """A step of 1 / L, as of head_rate='safe', may be twice as long before it can raise a loss."""
    phi = make()
    exact = 0.5 * np.linalg.norm(np.column_stack([phi, np.ones(len(phi))]), 2) ** 2 / len(phi)
    assert 0.9 * exact < float(heads.smoothness(tf.constant(phi))) <= exact * (1 + 1e-12)
