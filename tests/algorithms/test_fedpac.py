"""FedPAC: its rule in NumPy and by GradientTape, the quadratic program, and its limits."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import COHORTS, play
from helpers.toys import distance, gradient, toy, toy_of
from tfpfl.algorithms import fedpac, fedrep
from tfpfl.algorithms.fedpac import class_means, head_weights
from tfpfl.algorithms.parts.simplex import simplex_minimum
from tfpfl.algorithms.transforms.schedule import check_follows
from tfpfl.checks import InvalidArgument
from tfpfl.data.population import Population
from tfpfl.models import tree

K, M = 4, 5
ETA_G, ETA_F, LAM = 0.3, 0.2, 0.7
WORK = {"eta_g": ETA_G, "eta_f": ETA_F, "tau_g": 2, "tau_f": 3, "unit": "steps", "momentum": 0.0, "lam": LAM}


def features(theta, x):
    w_1, b_1, w_2, b_2 = theta
    return tf.tanh(tf.tanh(x @ w_1 + b_1) @ w_2 + b_2)


def cross_entropy(head, phi, y):
    logits = tf.matmul(phi, head.kernel) + head.bias
    return -tf.reduce_mean(tf.gather(tf.nn.log_softmax(logits), y, batch_dims=1))


def by_enumeration(P):
    """The minimum of a' P a on the simplex, from all 2^r - 1 supports."""
    found = []
    for size in range(1, len(P) + 1):
        for support in map(list, itertools.combinations(range(len(P)), size)):
            z = np.linalg.solve(P[np.ix_(support, support)], np.ones(size))
            if (z / z.sum() >= 0).all():
                a = np.zeros(len(P))
                a[support] = z / z.sum()
                found.append((a @ P @ a, support, a))
    return min(found)[2]


def rounds_by_hand(data, theta, heads, cohorts, combine=True, least=0.001, lam=LAM):
    """FedPAC from the paper, with full batches: (theta, heads, a) after every round."""
    heads, centroids, path = dict(heads), {}, []
    for t, cohort in enumerate(cohorts):
        sent = {}
        for i in cohort:
            x, y = data.data[i]
            phi, head, theta_i = features(theta, x).numpy(), heads[i], theta
            mu = {k: phi[y == k].mean(0) for k in set(y.tolist())}
            h = np.array([np.mean(y == k) * mu[k] if k in mu else np.zeros(M) for k in range(K)])
            variance = sum(np.mean(y == k) * np.mean((phi[y == k] ** 2).sum(1)) for k in mu) - (h**2).sum()
            for _ in range(2):
                step = gradient(lambda w, phi=phi, y=y: cross_entropy(w, phi, y), head)[0]
                head = tree.add_scaled(head, -ETA_G, step)
            target = np.array([centroids.get(k, mu[k]) for k in y.tolist()])

            def loss(theta, x=x, y=y, target=target, head=head, pull=lam if t else 0.0):
                phi = features(theta, x)
                return cross_entropy(head, phi, y) + pull * tf.reduce_mean((phi - target) ** 2)

            for _ in range(3):
                theta_i = tree.add_scaled(theta_i, -ETA_F, gradient(loss, theta_i)[0])
            sent[i] = theta_i, head, variance / len(y), h, features(theta_i, x).numpy(), y
        n = {i: len(sent[i][5]) for i in cohort}
        theta = tf.nest.map_structure(
            lambda *leaves: sum(n[i] * leaf for i, leaf in zip(cohort, leaves, strict=True)) / sum(n.values()),  # noqa: B023
            *[sent[i][0] for i in cohort],
        )
        phi, y = (np.concatenate([sent[i][place] for i in cohort]) for place in (4, 5))
        centroids = {k: phi[y == k].mean(0) for k in set(y.tolist())}
        weights = {}
        for i in cohort if combine else ():
            away = {j: sent[i][3] - sent[j][3] for j in cohort}
            P = np.array([[np.sum(away[j] * away[m]) for m in cohort] for j in cohort])
            a = by_enumeration(P + np.diag([sent[j][2] for j in cohort]))
            a = np.where(a > least, a, 0)
            weights[i] = a / a.sum()
        for i in cohort:
            parts = [sent[j][1] for j in cohort]
            a = weights.get(i)
            heads[i] = (
                sent[i][1]
                if a is None
                else tf.nest.map_structure(lambda *w, a=a: tf.tensordot(a, tf.stack(w), 1), *parts)
            )
        path.append((theta, dict(heads), weights))
    return path


@pytest.mark.parametrize("combine", slow_but([True, False], True, ci=(False,)))
def test_rounds_are_the_papers(data, combine):
    """Over rounds with absent clients, with and without the combination of heads."""
    algorithm = fedpac(data.model, data.population, combine=combine, **WORK)
    server, cohorts = algorithm.init_server(), [*COHORTS, (1, 3, 4)]
    heads = {i: tf.nest.map_structure(lambda w, i=i: w[i], server.heads) for i in data.ids}
    path, states = play(algorithm, data, cohorts)
    expected = rounds_by_hand(data, server.theta, heads, cohorts, combine)
    for found, (theta, heads, _) in zip(path, expected, strict=True):
        assert distance(found.theta, theta) < 1e-11
        for i in data.ids:
            assert distance(tf.nest.map_structure(lambda w, i=i: w[i], found.heads), heads[i]) < 1e-10
    rows = path[-1].combination.numpy()
    for i, a in expected[-1][2].items():
        assert np.abs(rows[i][list(cohorts[-1])] - a).max() < 1e-9
        assert abs(rows[i].sum() - 1) < 1e-12
    assert set(states.values()) == {()} and (not combine or np.count_nonzero(rows) > len(rows))


@pytest.mark.slow
def test_without_alignment_and_combination_it_is_fedrep(data):
    equal = Population([6, 9, 4, 7, 5], [K] * 5)
    model = data.model
    pac, _ = play(fedpac(model, data.population, **(WORK | {"lam": 0.0}), combine=False), data)
    same = fedrep(model, equal, tau_h=2, tau_b=3, eta_h=ETA_G, eta_b=ETA_F)
    rows = fedpac(model, data.population).init_server().heads
    states = {i: tf.nest.map_structure(lambda w, i=i: w[i], rows) for i in data.ids}
    rep, states = play(same, toy()._replace(population=equal, model=model), states=states)
    assert distance(pac[-1].theta, rep[-1]) < 1e-13
    for i in data.ids:
        assert distance(tf.nest.map_structure(lambda w, i=i: w[i], pac[-1].heads), states[i]) < 1e-13


@pytest.mark.slow
def test_a_client_alone_keeps_its_head(data):
    """a = 1 of one client; and a client with one example, whose V is 0, wants its own head alone."""
    path, _ = play(fedpac(data.model, data.population, **WORK), data, [(2,)])
    alone, _ = play(fedpac(data.model, data.population, combine=False, **WORK), data, [(2,)])
    assert distance(path[-1], alone[-1]) < 1e-15
    rng = np.random.default_rng(0)
    a = head_weights(tf.constant([0.0, 0.1, 0.2]), tf.constant(rng.standard_normal((3, K, M))), 0.0).numpy()
    assert np.abs(a[0] - [1, 0, 0]).max() < 1e-12


@pytest.mark.slow
def test_equal_clients_are_combined_by_their_variances():
    """With equal means, a' P a = sum_j a_j^2 V_j, whose minimum has a_j in proportion to 1 / V_j."""
    variances, means = np.array([0.5, 1.0, 2.0, 4.0]), np.tile(np.arange(K * M).reshape(1, K, M), (4, 1, 1)) * 1.0
    a = head_weights(tf.constant(variances), tf.constant(means), 0.0).numpy()
    assert np.abs(a - (1 / variances) / (1 / variances).sum()).max() < 1e-12
    cut = head_weights(tf.constant(variances), tf.constant(means), 0.07).numpy()
    kept = np.array([2.0, 1.0, 0.5, 0.0])
    assert np.abs(cut - kept / kept.sum()).max() < 1e-12
    # If all are below the least weight, the largest stays, and equal ones with it.
    cut = head_weights(tf.constant(variances), tf.constant(means), 0.9).numpy()
    assert (cut == [1, 0, 0, 0]).all()
    equal = head_weights(tf.ones(12, tf.float64), tf.zeros([12, K, M], tf.float64), 0.1).numpy()
    assert np.abs(equal - 1 / 12).max() < 1e-12


def test_the_program_is_solved_exactly():
    """Against all supports; and by the conditions of Karush, Kuhn and Tucker, which prove a minimum of any size."""
    rng = np.random.default_rng(1)
    solve = tf.function(simplex_minimum, autograph=False, input_signature=[tf.TensorSpec([None, None], tf.float64)])
    for _ in range(60):
        r, scale = rng.integers(1, 8), 10 ** rng.uniform(-6, 6)
        away = rng.standard_normal((r, rng.integers(1, 12))) + 2 * rng.standard_normal()
        P = scale * (np.diag(10 ** rng.uniform(-3, 1, r)) + away @ away.T)
        assert np.abs(solve(P).numpy() - by_enumeration(P)).max() < 1e-10
    for r in (20, 60, 150):
        away = rng.standard_normal((r, 30))
        P = np.diag(rng.random(r)) + (away - away[0]) @ (away - away[0]).T
        a = solve(P).numpy()
        gradient_, value = P @ a, a @ P @ a
        assert (a >= 0).all() and abs(a.sum() - 1) < 1e-12 and 2 < np.count_nonzero(a) < r
        assert (gradient_ - value).min() > -1e-10 * np.diag(P).max()
        assert np.abs((gradient_ - value)[a > 0]).max() < 1e-10 * np.diag(P).max()


def test_the_program_agrees_with_another_solver():
    """SciPy's nonnegative least squares: |L' a|^2 + c^2 (sum a - 1)^2, scaled to the simplex afterwards."""
    nnls = pytest.importorskip("scipy.optimize").nnls
    rng = np.random.default_rng(2)
    for r in (3, 8, 25):
        away = rng.standard_normal((r, 10))
        P = np.diag(rng.random(r) + 0.01) + (away - away[0]) @ (away - away[0]).T
        rows = np.vstack([np.linalg.cholesky(P).T, np.ones(r)])
        z = nnls(rows, np.append(np.zeros(r), 1.0))[0]  # its direction is that of the minimum on the simplex
        assert np.abs(simplex_minimum(P).numpy() - z / z.sum()).max() < 1e-11


@pytest.mark.slow
def test_singular_programs_have_a_minimum():
    rng = np.random.default_rng(3)
    for t in range(60):
        away = rng.standard_normal((rng.integers(2, 7), rng.integers(1, 4)))
        away[-1] = away[0]
        P = away @ away.T if t % 2 else (away - away[0]) @ (away - away[0]).T
        a = simplex_minimum(P).numpy()
        assert (a >= 0).all() and abs(a.sum() - 1) < 1e-12
        assert (P @ a - a @ P @ a).min() >= -1e-9 * np.diag(P).max()
    assert simplex_minimum(np.zeros([3, 3])).numpy().sum() == 1


def test_a_round_of_which_all_are_rejected_has_no_weights():
    """TensorFlow's error ended such a run."""
    types = [tf.TensorSpec([None]), tf.TensorSpec([None, 3, 4])]
    weights = tf.function(lambda v, h: head_weights(v, h, 0.001), input_signature=types)
    assert weights(np.zeros(0, np.float32), np.zeros([0, 3, 4], np.float32)).shape == (0, 0)
    assert weights(np.ones(2, np.float32), np.ones([2, 3, 4], np.float32)).shape == (2, 2)


def test_statistics_of_classes(data):
    x, y = data.data[3]
    phi = features(data.model.theta(), x).numpy()
    p, h = class_means(tf.constant(phi), tf.constant(y), K)
    assert np.abs(p.numpy() - np.bincount(y, minlength=K) / len(y)).max() < 1e-15
    assert distance(h.numpy(), np.array([phi[y == k].sum(0) / len(y) for k in range(K)])) < 1e-15


def test_what_is_refused(data):
    for wrong in ({"lam": -1.0}, {"unit": "visits"}, {"least_weight": 2.0}, {"tau_f": 0}):
        with pytest.raises(InvalidArgument):
            fedpac(data.model, data.population, **wrong)
    other = toy_of("regression")
    with pytest.raises(InvalidArgument, match="FedPAC is for classification only"):
        fedpac(other.model, other.population)


@pytest.mark.slow
def test_a_cohort_of_one_that_is_known_when_the_round_is_traced_can_be_combined(data):
    """So `check_follows` asks; FedPAC could never be created with a schedule."""
    check_follows(fedpac(data.model, data.population, **WORK))
    one = tf.function(simplex_minimum).get_concrete_function(tf.TensorSpec([1, 1], tf.float64))
    assert one(tf.constant([[3.0]], tf.float64)).numpy() == [1.0]
