"""Epsilon of discrete Gaussian noise in sums: against brute force, closed forms and another accountant."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from scipy import special, stats

from helpers import small_runs
from helpers.toys import backbone
from tfpfl.algorithms import build_algorithm
from tfpfl.algorithms.transforms.discrete_gaussian import discrete_gaussian
from tfpfl.algorithms.transforms.secure import codec_of, quorum
from tfpfl.data.population import Population, Sampling
from tfpfl.models import SplitModel
from tfpfl.runs.accounting import (
    ORDERS,
    Noise,
    chance_of_deciding,
    gap_of,
    of_member,
    of_rounds,
    privacy_of,
    released,
    tells_who_came,
)
from tfpfl.runs.privacy import privacy
from tfpfl.runs.run import Run
from tfpfl.runs.store import RunStore

dp_accounting = pytest.importorskip("dp_accounting")


def masses(sigma, reach):
    x = np.arange(-reach, reach + 1)
    p = np.exp(-(x**2) / (2 * sigma**2))
    return p / p.sum()


def divergence(p, q, order):
    """The Renyi divergence of two distributions on the same integers, by brute force."""
    seen = (p > 1e-300) & (q > 1e-300)
    return special.logsumexp(order * np.log(p[seen]) + (1 - order) * np.log(q[seen])) / (order - 1)


@pytest.mark.parametrize("sigma", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("shares", [2, 3, 6])
def test_tau_bounds_how_far_a_sum_of_shares_is_from_one_discrete_gaussian(sigma, shares):
    """The sum's probabilities by convolution, and the largest ratio of their logarithms: theorem 9."""
    one = masses(sigma, 40)
    total = one
    for _ in range(shares - 1):
        total = np.convolve(total, one)
    whole = masses(math.sqrt(shares) * sigma, len(total) // 2)
    seen = total > 1e-25  # beyond, float64 has too few digits of the sum
    largest = np.abs(np.log(total[seen] / whole[seen])).max()
    assert largest <= gap_of(sigma, shares) + 1e-9
    assert sigma > 0.8 or largest > 1e-4  # there is something to bound


def test_the_divergence_of_a_sum_is_within_the_bound():
    """D_a(sum + 1 | sum) by brute force, for noise of which tau is not negligible."""
    for sigma, shares in ((0.5, 4), (0.8, 3), (2.0, 10)):
        total = one = masses(sigma, 60)
        for _ in range(shares - 1):
            total = np.convolve(total, one)
        multiplier = Noise(sigma, 1.0, 1).multiplier(shares)
        p, q = np.append(0.0, total), np.append(total, 0.0)
        for order in (2, 5, 9):
            found = divergence(p, q, order)
            assert found <= order / (2 * multiplier**2) + 1e-9
            assert sigma < 1 or found == pytest.approx(order / (2 * multiplier**2), rel=1e-6)


def test_integer_moments_of_the_sampled_discrete_gaussian_are_those_of_the_gaussian():
    """The formula behind `released`, by brute force over the integers, in both directions."""
    sigma, shift, rate = 3.0, 2, 0.2
    x = np.arange(-400, 401)
    q = np.exp(-(x**2) / (2 * sigma**2))
    p = np.exp(-((x - shift) ** 2) / (2 * sigma**2))
    p, q = p / p.sum(), q / q.sum()
    mixed = (1 - rate) * q + rate * p
    accountant = dp_accounting.rdp.RdpAccountant([2, 3, 8, 16])
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma / shift)))
    for order, expected in zip(accountant.orders, accountant.rdp, strict=True):
        assert divergence(mixed, q, order) == pytest.approx(expected, rel=1e-6)
        assert divergence(q, mixed, order) <= expected


def test_epsilon_of_a_client_is_the_closed_form_of_its_rounds():
    """rho = sum 1 / (2 z^2) of concentrated privacy: epsilon is at most rho + 2 sqrt(rho log(1 / delta))."""
    noise = Noise(sigma=1000.0, sensitivity=20_000.0, size=500)
    shares, delta = [400, 400, 100], 1e-5
    rho = sum(1 / (2 * (math.sqrt(n) * 1000 / 20_000) ** 2) for n in shares)
    simple = rho + 2 * math.sqrt(rho * math.log(1 / delta))
    assert 0.8 * simple < of_member(noise, shares, delta) <= simple


@pytest.mark.parametrize("multiplier", [1.0, 4.0])
def test_epsilon_is_above_the_one_of_privacy_loss_distributions_and_near_it(multiplier):
    """dp-accounting's other accountant, which convolves the discrete Gaussian's losses: tight, for one number."""
    from dp_accounting.pld import privacy_loss_distribution

    sigma, rounds, delta = 10.0 * multiplier, 8, 1e-5
    loss = privacy_loss_distribution.from_discrete_gaussian_mechanism(sigma, 10, value_discretization_interval=1e-3)
    tight = loss.self_compose(rounds).get_epsilon_for_delta(delta)
    found = of_member(Noise(sigma / math.sqrt(25), 10.0, 1), [25] * rounds, delta)
    assert tight <= found <= 1.2 * tight
    sampled = privacy_loss_distribution.from_discrete_gaussian_mechanism(
        sigma, 10, value_discretization_interval=1e-3, sampling_prob=0.1
    )
    tight = sampled.self_compose(rounds).get_epsilon_for_delta(delta)
    found = released(Noise(sigma / math.sqrt(25), 10.0, 1), 0.1, [25] * rounds, delta)
    assert tight <= found <= 1.6 * tight


def test_what_the_sampled_sums_are_from_discrete_gaussians_is_added_for_every_round():
    """Little noise, of which tau is not negligible: 3 P tau for each round with a sum, beside that of Gaussians."""
    noise, shares = Noise(0.9, 1.0, 20), [3, 5, 0, 3, 3]
    accountant = dp_accounting.rdp.RdpAccountant(ORDERS)
    for n in filter(None, shares):
        z = 1 / (1 / (math.sqrt(n) * 0.9) + gap_of(0.9, n) * math.sqrt(20))
        accountant.compose(dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(z)))
    more = sum(3 * 20 * gap_of(0.9, n) for n in shares if n)
    found = released(noise, 0.2, shares, 1e-4)
    assert found == pytest.approx(accountant.get_epsilon(1e-4) + more, rel=1e-9)
    assert more > 1e-3 * found


def test_the_client_that_spent_most_is_reported_and_empty_rounds_cost_nothing():
    noise = Noise(1000.0, 20_000.0, 10)
    visits = {3: [0, 4], 5: [2], 9: [0, 2]}  # round 2 had fewer shares, so client 9 spent most
    found = of_rounds(noise, [100, 0, 50, 0, 100], visits, Sampling("fixed", 0.5), 1e-4)
    assert found.epsilon == of_member(noise, [100, 50], 1e-4) and found.released is None
    assert "2 rounds" in found.text
    unknown = of_rounds(noise, [100, 0, 50], None, Sampling("binomial", 0.1), 1e-4)
    assert unknown.epsilon == of_member(noise, [100, 50], 1e-4)
    assert unknown.released == released(noise, 0.1, [100, 50], 1e-4) < unknown.epsilon


def test_rounds_in_which_one_client_decides_whether_there_is_a_sum_are_a_part_of_delta():
    """By counting all cohorts of a client's five others, and all ways in which their members arrive."""
    rate, arrival, threshold = 0.4, 0.7, 0.6
    chance = 0.0
    for members in itertools.product((0, 1), repeat=5):
        drawn = math.prod(rate if one else 1 - rate for one in members)
        for came in itertools.product((0, 1), repeat=sum(members)):
            arrives = math.prod(arrival if one else 1 - arrival for one in came)
            chance += drawn * arrives * (sum(came) < quorum(sum(members) + 1, threshold))
    six = Population(np.full(6, 9), np.full(6, 2), sampling=Sampling("binomial", rate), arrival=[arrival] * 6)
    assert chance_of_deciding(six, [6], threshold) == pytest.approx(chance, rel=1e-12)
    assert chance_of_deciding(six, [6, 0, 6], threshold) == pytest.approx(min(1, 2 * chance), rel=1e-12)
    seldom = replace(six, arrival=[0.9] * 5 + [arrival])
    assert chance_of_deciding(seldom, [6], threshold) == chance_of_deciding(six, [6], threshold)
    all_of_them = Population(np.full(6, 9), np.full(6, 2), sampling=Sampling("binomial", 1.0))
    assert chance_of_deciding(all_of_them, [6] * 100, 0.5) == 0


def test_few_clients_a_round_have_no_epsilon_against_those_who_do_not_know_who_came():
    """Ten clients at a rate of 0.1: a round with a sum has three clients or more, each of the ten with 0.3."""
    from dp_accounting.pld import privacy_loss_distribution

    noise, shares, delta = Noise(2.0 / math.sqrt(3), 1.0, 1), [3] * 28 + [0] * 372, 10**-1.1
    ten = Population(np.full(10, 9), np.full(10, 2), sampling=Sampling("binomial", 0.1))
    loss = privacy_loss_distribution.from_gaussian_mechanism(2.0, sampling_prob=0.3)
    tight = loss.self_compose(28).get_epsilon_for_delta(delta)
    assert released(noise, 0.1, shares, delta) < tight / 3, "the plain rate would claim too much"
    found = of_rounds(noise, shares, None, ten.sampling, delta, chance_of_deciding(ten, [10] * 400, 0.5))
    assert found.released is None and "nothing smaller is promised against those who do not know" in found.text
    many = Population(np.full(300, 9), np.full(300, 2), sampling=Sampling("binomial", 0.1))
    delta, deciding = 300**-1.1, chance_of_deciding(many, [300] * 30, 0.5)
    assert 0 < deciding < 1e-6 * delta
    found = of_rounds(noise, [30] * 30, None, many.sampling, delta, 0.5 * delta)
    assert found.released == released(noise, 0.1, [30] * 30, 0.5 * delta) > released(noise, 0.1, [30] * 30, delta)


def test_weights_that_tell_who_came_leave_no_epsilon_against_those_who_do_not_know_it():
    """Who sees k of T visits at random, and the sums, has Gaussian noise of the multiplier z / sqrt(k): exactly."""
    z, rate, rounds, delta = 1.0, 0.1, 30, 300**-1.1
    noise, shares, sampling = Noise(z / math.sqrt(30) * 1e4, 1e4, 1), [30] * rounds, Sampling("binomial", rate)

    def delta_of(epsilon, mu):
        return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)

    claimed = of_rounds(noise, shares, None, sampling, delta)
    chances = stats.binom.pmf(range(1, rounds + 1), rounds, rate)
    seen = sum(p * delta_of(claimed.released, math.sqrt(k) / z) for k, p in enumerate(chances, 1))
    assert seen > 10 * delta
    told = of_rounds(noise, shares, None, sampling, delta, tells=True)
    assert told.released is None and told.epsilon == claimed.epsilon and "--weighting uniform" in told.text


@pytest.mark.parametrize(
    ("sizes", "name", "given", "tells"),
    [
        ([9, 9, 30], "fedavg", {}, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ([9, 9, 30], "fedavg", {"weighting": "uniform"}, False),
                ([9, 9, 9], "fedavg", {}, False),
                ([9, 9, 30], "pflego", {}, False),  # a sum
                ([9, 9, 30], "pflego", {"weighting": "sampled"}, True),
            )
        ),
    ],
)
def test_a_mean_with_weights_that_differ_tells_who_came(sizes, name, given, tells):
    """The noise of a mean has the size of the noise on the sum, divided by the weights of those who came."""
    population = Population(sizes, [3, 3, 3], sampling=Sampling("binomial", 0.5))
    assert tells_who_came(build_algorithm(name, SplitModel(backbone("float32")), population, **given)) == tells


def test_a_game_on_noisy_sums_is_won_as_often_as_the_noise_says():
    """Was client 0's update in the sum, or zeros? The best guess looks along its direction.

    Of one sum with the multiplier z it is right with probability Phi(1 / (2 z)), and never more often than epsilon and
    delta allow: Pr[yes | in] <= e^epsilon Pr[yes | out] + delta.
    """
    games, shares, size, sigma = 20_000, 5, 4, 30
    update = np.array([60, -20, 30, 10])
    z = math.sqrt(shares) * sigma / np.linalg.norm(update)
    drawn = discrete_gaussian(sigma, games * shares * size, tf.constant([27, 3])).numpy()
    noise = drawn.reshape(games, shares, size).sum(1)
    inside = np.arange(games) % 2 == 0
    along = (noise + inside[:, None] * update) @ update / (update @ update)
    yes = along > 0.5
    assert np.mean(yes == inside) == pytest.approx(stats.norm.cdf(1 / (2 * z)), abs=4 * 0.5 / math.sqrt(games))
    delta = 1e-3
    epsilon = of_member(Noise(sigma, float(np.linalg.norm(update)), size), [shares], delta)
    for limit in (0.0, 0.5, 1.0, 2.0, 3.0):
        caught, wrong = np.mean(along[inside] > limit), np.mean(along[~inside] > limit)
        assert caught <= math.exp(epsilon) * wrong + delta + 4 / math.sqrt(games)


# ---- of a run


def with_history(config, federation, folder, rows):
    """A run that was not trained, whose store has these rows of the history."""
    run = Run.planned(config, folder, federation)
    run.store = RunStore()
    for row in rows:
        run.store.commit_round(row["round"], run.algorithm.init_server(), {}, row)
    return run


def test_a_rejected_client_adds_no_noise_to_its_round(six_clients, tmp_path):
    """Its words are left out of the sum with their noise, so six clients of which one is rejected are five shares."""
    config = small_runs.config(
        algorithm="fedavg",
        hyperparameters={"weighting": "uniform"},
        labels="global",
        sampling="binomial",
        participation=1.0,
        on_broken="reject",
        secure=True,
        secure_clip=0.5,
        secure_noise=1.5,
    )
    rows = [{"round": t, "clients": 6, "rejected": 0} for t in (1, 2, 3, 4)]
    for row in rows[1::2]:
        row |= {"rejected": 1, "rejected_clients": "3: its update is too large"}
    run = with_history(config, six_clients, tmp_path / "run", rows)
    codec, drawn = codec_of(run.recipe.method(run.model, run.population), 0.5, 1.5)
    noise, delta = Noise(drawn.sigma, codec.sensitivity, codec.size), 6**-1.1
    found = privacy_of(run)
    assert found.epsilon == pytest.approx(of_member(noise, [6, 5, 6, 5], delta), rel=1e-12)
    assert found.released == pytest.approx(released(noise, 1.0, [6, 5, 6, 5], delta), rel=1e-12)
    assert found.epsilon > 1.01 * of_member(noise, [6, 6, 6, 6], delta)


@pytest.mark.slow
def test_epsilon_of_a_run_counts_the_clients_that_were_there(six_clients, tmp_path):
    """One of three clients is a larger part than one of six, and each round has the clients of its own number."""
    config = small_runs.config(
        algorithm="fedavg",
        participation=0.2,
        hyperparameters={"weighting": "uniform"},
        labels="global",
        engine="tff",
        aggregator="dp",
        aggregator_args=("noise=1.5", "clip=1"),
        joins=("3:1,2", "5:4"),
        leaves=("6:0",),
    )
    rows = [{"round": t, "clients": 1} for t in range(1, 7)]
    run = with_history(config, six_clients, tmp_path / "run", rows)
    found = privacy_of(run)
    assert found == privacy(1.5, run.population, 6, present=[3, 3, 5, 5, 6, 5])
    assert 1.01 * found.epsilon < privacy(1.5, run.population, 6, present=[3, 3, 3, 5, 5, 6]).epsilon
    assert found.epsilon > 1.01 * privacy(1.5, run.population, 6).epsilon


def test_a_method_that_sends_nothing_has_no_epsilon(six_clients, tmp_path):
    config = small_runs.config(
        algorithm="local", labels="global", engine="tff", aggregator="dp", aggregator_args=("noise=1.5", "clip=1")
    )
    assert privacy_of(with_history(config, six_clients, tmp_path / "run", [{"round": 1, "clients": 3}])) is None
