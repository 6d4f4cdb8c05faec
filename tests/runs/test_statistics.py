"""Statistics over clients against closed forms."""

import math

import numpy as np
import pytest
import scipy.stats

from tfpfl.runs import statistics

NAN, INF = math.nan, math.inf


def test_clients_without_examples_are_left_out_and_counted():
    values = [0.5, NAN, 1.0, NAN]
    assert statistics.num_tested(values) == 2
    assert statistics.mean_over_clients(values) == 0.75
    assert statistics.worst(values, 0.5) == 0.5
    assert statistics.ci95(values) == statistics.ci95([0.5, 1.0])


def test_pooled_is_the_mean_over_examples():
    rng = np.random.default_rng(0)
    counts = np.array([3, 1, 0, 7])
    examples = [rng.integers(0, 2, n) for n in counts]
    values = [e.mean() if len(e) else NAN for e in examples]
    pooled = statistics.pooled(values, counts)
    assert pooled == pytest.approx(np.concatenate(examples).mean(), rel=1e-14)
    assert pooled != pytest.approx(statistics.mean_over_clients(values))


def test_pooled_of_equal_clients_is_the_mean_over_clients():
    values = [0.25, 0.5, 1.0]
    assert statistics.pooled(values, [4, 4, 4]) == pytest.approx(statistics.mean_over_clients(values), rel=1e-15)


def pooled_ci95(values, num_examples):
    """Half the interval of one round."""
    return statistics.rounds_ci95([(np.arange(len(values)), values, num_examples)])


def test_the_interval_of_a_pooled_mean_has_the_true_mean_in_it():
    """Clients are drawn anew 2,000 times, large ones with worse models: the truth is E[n x] / E[n]."""
    rng, inside, other = np.random.default_rng(0), [], []
    for _ in range(2000):
        large = rng.random(60) < 0.3
        counts = np.where(large, rng.integers(80, 120, 60), rng.integers(5, 15, 60))
        values = np.where(large, rng.normal(0.6, 0.1, 60), rng.normal(0.9, 0.05, 60))
        truth = (0.3 * 99.5 * 0.6 + 0.7 * 9.5 * 0.9) / (0.3 * 99.5 + 0.7 * 9.5)
        away = abs(statistics.pooled(values, counts) - truth)
        inside.append(away <= pooled_ci95(values, counts))
        other.append(away <= statistics.ci95(values))
    assert 0.92 < np.mean(inside) < 0.97
    assert np.mean(other) < 0.92, "that of the unweighted mean has it as often"


@pytest.mark.parametrize(("clients", "spread", "least"), [(100, 0.3, 0.94), (10, 1.0, 0.9), (20, 1.5, 0.87)])
def test_the_interval_of_a_pooled_mean_where_clients_are_unequal(clients, spread, least):
    """Sizes exp(spread z). With few effective clients the interval of the residuals had 66 to 87 of 100 truths."""
    rng, inside = np.random.default_rng(2), []
    for _ in range(1500):
        counts, values = np.exp(spread * rng.normal(size=clients)), rng.normal(size=clients)
        inside.append(abs(statistics.pooled(values, counts)) <= pooled_ci95(values, counts))
    assert least < np.mean(inside) < 0.97


def test_the_interval_of_a_pooled_mean_of_equal_clients_is_that_of_the_mean_over_clients():
    values = np.random.default_rng(1).random(7)
    assert pooled_ci95([*values, NAN], [4] * 7 + [0]) == pytest.approx(statistics.ci95(values), rel=1e-14)
    assert math.isnan(pooled_ci95([0.5], [3])) and math.isnan(pooled_ci95([], []))
    assert math.isnan(pooled_ci95([0.5, NAN], [3, 2])) and pooled_ci95([1.0, INF], [3, 1]) == INF


def test_pooled_shows_a_nan_of_a_client_with_examples():
    assert math.isnan(statistics.pooled([0.5, NAN], [3, 2]))
    assert statistics.pooled([0.5, NAN], [3, 0]) == 0.5


def test_ci95_is_students_interval():
    """That of scipy; of n coins of which a share p shows heads, t sqrt(p (1 - p) / (n - 1))."""
    assert math.isnan(statistics.ci95([1.0])) and math.isnan(statistics.ci95([0.5, NAN]))
    for n in (2, 3, 5, 10, 100, 5000):
        values = np.random.default_rng(n).normal(size=n)
        low, high = scipy.stats.t.interval(0.95, n - 1, values.mean(), scipy.stats.sem(values))
        assert statistics.ci95(values) == pytest.approx((high - low) / 2, rel=1e-12)
    assert statistics.ci95([0.5, 1.0]) == pytest.approx(math.tan(math.pi * 0.475) * 0.25, rel=1e-9)  # t(1) is Cauchy
    for ones, n in ((3, 10), (50, 100), (0, 7), (1, 2)):
        p = ones / n
        values = np.r_[np.ones(ones), np.zeros(n - ones)]
        half = scipy.stats.t.ppf(0.975, n - 1) * math.sqrt(p * (1 - p) / (n - 1))
        assert statistics.ci95(values) == pytest.approx(half, rel=1e-12, abs=1e-15)


def test_the_interval_of_five_clients_has_the_mean_in_it_in_95_of_100_cases():
    """With 1.96 std / sqrt(n), as tfpfl once had it, it was in 85 of 100."""
    draws, n = 4000, 5
    clients = np.random.default_rng(0).normal(0.8, 0.1, size=(draws, n))
    halves = np.array([statistics.ci95(row) for row in clients])
    covered = (abs(clients.mean(1) - 0.8) <= halves).mean()
    assert abs(covered - 0.95) < 3.5 * math.sqrt(0.95 * 0.05 / draws)


def test_worst_decile_of_an_arithmetic_series():
    for n in (10, 30, 100, 1000):
        values = np.random.default_rng(n).permutation(n) / n
        k = n // 10
        assert statistics.worst(values) == pytest.approx((k - 1) / 2 / n, abs=1e-15)


def test_worst_rounds_up_to_whole_clients():
    assert statistics.worst([3.0, 1.0, 2.0]) == 1.0  # a tenth of three clients is one client
    assert statistics.worst([3.0, 1.0, 2.0, 4.0], 0.26) == 1.5
    assert statistics.worst([3.0, 1.0, 2.0], 1.0) == statistics.mean_over_clients([3.0, 1.0, 2.0])


def test_nothing_left_is_nan_without_a_warning(recwarn):
    for values in ([], [NAN, NAN]):
        assert statistics.num_tested(values) == 0
        for number in (statistics.mean_over_clients, statistics.ci95, statistics.worst):
            assert math.isnan(number(values)), number
    assert math.isnan(statistics.pooled([NAN, NAN], [0, 0]))
    assert not recwarn.list


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: statistics.worst([1.0], 0), "0"),
        (lambda: statistics.worst([1.0], 1.5), "1.5"),
        (lambda: statistics.mean_over_clients([[1.0]]), r"\(1, 1\)"),
        (lambda: statistics.pooled([1.0, 2.0], [1]), r"\(2,\) and \(1,\)"),
    ],
)
def test_bad_arguments_say_what_was_found(call, found):
    with pytest.raises(ValueError, match=found):
        call()


def test_jain_and_gini_at_their_ends_and_on_a_series():
    assert statistics.jain([0.7] * 9) == pytest.approx(1.0, rel=1e-15)
    assert statistics.gini([0.7] * 9) == pytest.approx(0.0, abs=1e-15)
    one_has_all = [0.0] * 9 + [0.5]
    assert statistics.jain(one_has_all) == pytest.approx(1 / 10)
    assert statistics.gini(one_has_all) == pytest.approx(9 / 10)
    for n in (2, 7, 100):  # 1, 2, .. n: sums of powers, and the known Gini (n^2 - 1) / (3 n (n + 1))
        series = np.random.default_rng(n).permutation(n) + 1.0
        assert statistics.jain(series) == pytest.approx(3 * (n + 1) / (2 * (2 * n + 1)))
        assert statistics.gini(series) == pytest.approx((n - 1) / (3 * n))
    assert (statistics.jain([0.0, 0.0]), statistics.gini([0.0, 0.0])) == (1.0, 0.0)  # all are equal
    assert math.isnan(statistics.jain([])) and math.isnan(statistics.gini([NAN]))
    with pytest.raises(ValueError, match="at least 0, found -1"):
        statistics.gini([1.0, -1.0])


def test_gini_is_the_mean_absolute_difference():
    values = np.random.default_rng(3).random(23)
    expected = np.abs(values[:, None] - values).mean() / (2 * values.mean())
    assert statistics.gini([*values, NAN]) == pytest.approx(expected)


def test_deciles_and_std():
    values = np.r_[np.random.default_rng(0).permutation(11) / 10, NAN]
    np.testing.assert_allclose(statistics.deciles(values), np.arange(1, 10) / 10, atol=1e-15)
    assert statistics.std([0.0, 1.0, NAN]) == 0.5
    assert np.isnan(statistics.deciles([NAN])).all() and math.isnan(statistics.std([]))


def test_gains_are_paired_and_equal_is_not_worse():
    np.testing.assert_allclose(statistics.gains([0.5, 0.7, NAN], [0.75, 0.5, 0.1]), [-0.25, 0.2, NAN])
    assert statistics.share_worse([0.5, 0.7, NAN, 0.2], [0.6, 0.5, 0.9, 0.2]) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match=r"found \(2,\) and \(3,\)"):
        statistics.gains([0.5, 0.7], [0.5, 0.7, 0.9])


def test_what_rounding_alone_makes_different_is_equal():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 30, (100, 10)) / 29
    mixed = rng.permuted(scores, axis=1).mean(1)
    assert (scores.mean(1) != mixed).any()
    assert not statistics.gains(scores.mean(1), mixed).any() and statistics.share_worse(scores.mean(1), mixed) == 0
    assert statistics.wilcoxon(scores.mean(1), mixed).zeros == 100
    assert statistics.gains([1e-9, np.nan, 1.0], [2e-9, 0.5, 0.75]).tolist()[::2] == [-1e-9, 0.25]
    assert statistics.gains([3e300], [1e300])[0] == pytest.approx(2e300) and statistics.gains([0.0], [0.0])[0] == 0


@pytest.mark.parametrize("outlier", [1.0, 1e10, 1e13, 1e300, INF])
def test_a_client_whose_error_explodes_changes_no_other_clients_gain(outlier):
    than = np.r_[np.linspace(0.4, 0.9, 20), outlier]
    values = np.r_[than[:20] + 0.05, 0.5]
    np.testing.assert_allclose(statistics.gains(values, than)[:20], 0.05, rtol=1e-9)
    assert len(set(statistics.gains(values, than)[:20].tolist())) == 1, "equal gains are no ties"
    assert statistics.share_worse(values, than, "min") == 20 / 21
    assert statistics.wilcoxon(values, than, "min")[2:] == (21, 0)


def test_gains_do_not_depend_on_the_unit():
    rng = np.random.default_rng(1)
    values, than = rng.random((2, 30))
    for unit in (1e-12, 1e12):
        np.testing.assert_allclose(statistics.gains(unit * values, unit * than), unit * (values - than), rtol=1e-8)
        assert statistics.wilcoxon(unit * values, unit * than) == statistics.wilcoxon(values, than)


def test_wilcoxon_by_enumeration_of_all_signs():
    """Without ties the p-value is the share of the 2^n sign patterns whose W+ is at least the one found."""
    differences = np.array([0.05, -0.01, 0.07, 0.02, 0.11, -0.03, 0.08])
    ranks = np.argsort(np.argsort(np.abs(differences))) + 1
    w = ranks[differences > 0].sum()
    patterns = (np.arange(2**7)[:, None] >> np.arange(7)) & 1
    expected = np.mean(patterns @ ranks >= w)
    than = np.full(9, 0.5)
    found = statistics.wilcoxon(np.r_[than[:7] + differences, 0.5, NAN], than)
    assert (found.statistic, found.pairs, found.zeros) == (w, 7, 1)
    assert found.p_value == pytest.approx(expected)
    other_way = statistics.wilcoxon(than[:7], than[:7] + differences)
    assert other_way.p_value == pytest.approx(np.mean(patterns @ ranks <= w))


@pytest.mark.parametrize("alternative", ["greater", "two-sided"])
def test_the_signed_rank_test_is_exact_with_ties(alternative):
    """Clients with ten test examples have many equal gains."""
    rng = np.random.default_rng(3)
    for n in range(1, 13):
        differences = rng.integers(1, 5, n) * rng.choice([-1, 1, 1], n)
        ranks = scipy.stats.rankdata(np.abs(differences))
        sums = ((np.arange(2**n)[:, None] >> np.arange(n)) & 1) @ ranks
        w = ranks[differences > 0].sum()
        above, below = np.mean(sums >= w), np.mean(sums <= w)
        expected = above if alternative == "greater" else min(1, 2 * min(above, below))
        assert statistics.signed_rank_p(differences, alternative) == pytest.approx(expected, rel=1e-12)
    for n, method in ((statistics.EXACT_PAIRS, "exact"), (statistics.EXACT_PAIRS + 1, "auto")):
        differences = rng.normal(0.3, size=n)
        expected = scipy.stats.wilcoxon(differences, alternative=alternative, method=method).pvalue
        assert statistics.signed_rank_p(differences, alternative) == pytest.approx(expected, rel=1e-9)
    assert math.isnan(statistics.signed_rank_p([], alternative))


def test_wilcoxon_of_equals_says_nothing():
    found = statistics.wilcoxon([0.5, 0.6], [0.5, 0.6])
    assert math.isnan(found.p_value) and (found.pairs, found.zeros) == (0, 2)


def test_the_interval_over_seeds_is_students():
    mean, half = statistics.over_seeds([0.90, 0.92, 0.97])
    assert mean == pytest.approx(0.93)
    assert half == pytest.approx(4.302652729911275 * math.sqrt(0.0013) / math.sqrt(3))  # t of 0.975, 2 degrees
    assert statistics.over_seeds([0.5])[0] == 0.5 and math.isnan(statistics.over_seeds([0.5])[1])


def test_crossed_intervals_count_seeds_and_clients():
    """The variance of the mean is what the effects of seeds, of clients and the rest add to it."""
    rng, seeds, clients = np.random.default_rng(0), 6, 9
    means, inside = [], []
    for _ in range(800):
        values = 0.3 * rng.normal(size=(seeds, 1)) + 0.5 * rng.normal(size=clients) + rng.normal(size=(seeds, clients))
        mean, width = statistics.crossed(values)
        means.append(mean)
        inside.append(abs(mean) < width)
    variance = 0.09 / seeds + 0.25 / clients + 1 / (seeds * clients)
    assert abs(np.var(means) / variance - 1) < 0.25 and 0.93 < np.mean(inside) < 0.99
    # Nothing but the seed matters: Student's interval of the seeds' means. Nothing but the client: of the clients'.
    one = np.repeat([[1.0], [2.0], [4.0]], 5, 1)
    for values, n in ((one, 3), (one.T, 3)):
        mean, width = statistics.crossed(values)
        of_three = np.array([1, 2, 4.0])
        np.testing.assert_allclose(width, scipy.stats.t.ppf(0.975, n - 1) * of_three.std(ddof=1) / np.sqrt(n))
        assert abs(mean - of_three.mean()) < 1e-12
    assert statistics.crossed([[1, 2, np.nan], [1, 2, 3]])[0] == 1.5
    assert statistics.crossed([[1.0, 2.0]]) == (1.5, np.inf) and statistics.crossed(np.ones((2, 3))) == (1.0, 0.0)
    assert np.isnan(statistics.crossed([[np.nan]])).all()
    with pytest.raises(ValueError, match="a matrix with a row for each seed, found shape .3,."):
        statistics.crossed([1, 2, 3])


def test_an_infinite_value_is_not_left_out(recwarn):
    """It is that of a client that diverged. NaN, of one without examples, is left out."""
    values = [1.0, INF, NAN, 2.0, INF]
    assert statistics.num_tested(values) == 4
    for number in (statistics.mean_over_clients, statistics.std, statistics.ci95):
        assert number(values) == INF, number
    assert statistics.worst(values, 0.5, "min") == INF and statistics.worst([1.0, 2.0, INF], 0.5, "max") == 1.5
    assert statistics.over_seeds([1.0, INF]) == statistics.crossed([[1.0, 2.0], [3.0, INF]]) == (INF, INF)
    assert math.isnan(statistics.jain(values)) and math.isnan(statistics.gini(values))
    assert statistics.deciles([*range(9), INF, INF]).tolist() == [*range(1, 9), INF]
    assert statistics.pooled([1.0, INF], [3, 1]) == INF
    assert not recwarn.list


def test_who_diverged_with_both_has_gained_nothing_and_infinite_gains_rank_highest(recwarn):
    than, values = [INF, 1.0, INF, 3.0, 4.0, NAN], [INF, INF, 2.0, 2.5, 3.0, INF]
    np.testing.assert_array_equal(statistics.gains(values, than), [0, INF, -INF, -0.5, -1, NAN])
    assert math.isnan(statistics.mean_over_clients(statistics.gains(values, than)))
    assert statistics.share_worse(values, than, "min") == 1 / 5
    # Ranks 3.5, 3.5, 1 and 2: 6.5 for those that gain; 6 of the 16 patterns of signs have that or more.
    assert statistics.wilcoxon(values, than, "min") == (6.5, 6 / 16, 4, 1)
    assert not recwarn.list
