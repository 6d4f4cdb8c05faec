"""The gradients of the independent versions, written by hand, against finite differences; and what they import."""

import ast
from pathlib import Path

import numpy as np
import pytest

from independent import adapters, fedcp, feddbe, fedpac, gpfl, pfedhn
from independent.network import combine, cross_entropy, features, gradient, logits

N, D, M, K = 7, 4, 5, 3


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def leaves(weights):
    return [weights] if isinstance(weights, np.ndarray) else [a for w in weights for a in leaves(w)]


def check(function, weights, rng, small=1e-5):
    """function: weights -> (value, gradient). In ten directions, and central differences."""
    slope = function(weights)[1]

    def draw(w):
        return rng.standard_normal(w.shape) if isinstance(w, np.ndarray) else tuple(draw(p) for p in w)

    for _ in range(10):
        way = draw(weights)
        ahead, behind = (function(combine((1, weights), (sign * small, way)))[0] for sign in (1, -1))
        found = sum(np.sum(a * b) for a, b in zip(leaves(slope), leaves(way), strict=True))
        assert found == pytest.approx((ahead - behind) / (2 * small), rel=1e-6, abs=1e-8)
        assert abs(found) > 1e-6


def model(rng):
    theta = rng.standard_normal((D, M)), 0.5 + rng.standard_normal(M)
    return theta, (rng.standard_normal((M, K)), rng.standard_normal(K))


def examples(rng):
    return rng.standard_normal((N, D)), rng.integers(0, K, N)


def test_the_network(rng):
    x, y = examples(rng)
    check(lambda w: gradient(w, x, y), model(rng), rng)


def test_mmd(rng):
    a, b = 2 * rng.standard_normal((N, M)), 2 * rng.standard_normal((N, M))
    check(lambda a: fedcp.mmd(a, b), a, rng)


def test_fedcp(rng):
    (theta, head), (x, y), top = model(rng), examples(rng), model(rng)[1]
    policy = rng.standard_normal((M, 2 * M)), *rng.standard_normal((3, 2 * M))
    v, old = fedcp.context(head), features(model(rng)[0], x)
    check(lambda w: fedcp.loss_and_gradient(*w, x, y, top, v, old, 3.0), (theta, head, policy), rng)


@pytest.mark.parametrize("magnitude", ["batch", "examples"])
def test_gpfl(rng, magnitude):
    (theta, head), (x, y) = model(rng), examples(rng)
    valve = tuple((rng.standard_normal((M, M)), *rng.standard_normal((3, M))) for _ in range(2))
    given = x, y, rng.standard_normal(M), rng.standard_normal(M), rng.standard_normal((K, M)), 0.7, magnitude
    check(lambda w: gpfl.loss_and_gradient(*w, *given), (theta, head, rng.standard_normal((K, M)), valve), rng)


def test_pfedhn(rng):
    layers = tuple((rng.standard_normal(shape), rng.standard_normal(shape[1])) for shape in [(3, 6), (6, 6), (6, 9)])
    way = rng.standard_normal(9)

    def function(w):
        out, back = pfedhn.forward(w[0], w[1])
        return way @ out, back(way)

    check(function, (rng.standard_normal(3), layers), rng)


def taken(start, end, eta):
    """The gradient of which a step was taken."""
    return combine((1 / eta, start), (-1 / eta, end))


def test_steps_of_feddbe(rng):
    (theta, head), (x, y), z = model(rng), examples(rng), rng.standard_normal(M)
    eta, kappa, mu = 0.1, 2.0, 0.7

    def function(w):
        theta, head, z_i = w
        phi = features(theta, x)
        loss = cross_entropy(logits(head, phi + z_i), y)[0] + kappa * 0.5 * np.mean((mu * phi.mean(0) - z) ** 2)
        end, z_end, _ = feddbe.visit((theta, head), z_i, x, y, z, eta=eta, steps=1, kappa=kappa, mu=mu)
        return loss, taken(w, (*end, z_end), eta)

    check(function, (theta, head, rng.standard_normal(M)), rng)


def test_steps_of_adapters(rng):
    (frozen, head), (x, y) = model(rng), examples(rng)

    def function(w):
        a, b, head = w
        loss = cross_entropy(logits(head, features(adapters.whole(frozen, a, b, 0.5), x)), y)[0]
        (end,) = adapters.adapters([(x, y)], frozen, a, b, head, [[0]], eta=0.1, steps=1, scale=0.5)
        return loss, taken(w, end.models[0], 0.1)

    check(function, (rng.standard_normal((D, 2)), rng.standard_normal((2, M)), head), rng)


def test_the_smallest_point_of_the_simplex(rng):
    """No point nearby is better; and one case by hand: weights as 1 / v where the matrix is diagonal."""
    np.testing.assert_allclose(fedpac.smallest_on_simplex(np.diag([1.0, 2, 4])), np.array([4, 2, 1]) / 7)
    for _ in range(20):
        a = rng.standard_normal((4, 4)) + 1
        matrix = a @ a.T + 0.1 * np.eye(4)
        best = fedpac.smallest_on_simplex(matrix)
        slope = matrix @ best
        assert slope.min() > slope[best > 0].max() - 1e-9  # the conditions of Karush, Kuhn and Tucker


def test_nothing_of_tfpfl_is_imported():
    allowed = {"ast", "independent", "itertools", "numpy", "pathlib", "pytest", "typing"}
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert {name.split(".")[0] for name in names} <= allowed, path.name
