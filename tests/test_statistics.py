"""Statistics over clients against closed forms."""

import math

import numpy as np
import pytest

from tfpfl import statistics

NAN = math.nan


def test_clients_without_examples_are_left_out_and_counted():
    values = [0.5, NAN, 1.0, NAN]
    assert statistics.num_tested(values) == 2
    assert statistics.mean_over_clients(values) == 0.75
    assert statistics.worst(values, 0.5) == 0.5
    assert statistics.ci95(values) == pytest.approx(1.96 * 0.25 / math.sqrt(2), rel=1e-15)


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


def test_pooled_shows_a_nan_of_a_client_with_examples():
    assert math.isnan(statistics.pooled([0.5, NAN], [3, 2]))
    assert statistics.pooled([0.5, NAN], [3, 0]) == 0.5


def test_ci95_of_coins_is_the_binomial_formula():
    for ones, n in ((3, 10), (50, 100), (0, 7), (1, 1)):
        p = ones / n
        values = np.r_[np.ones(ones), np.zeros(n - ones)]
        assert statistics.ci95(values) == pytest.approx(1.96 * math.sqrt(p * (1 - p) / n), abs=1e-15)


def test_worst_decile_of_an_arithmetic_series():
    for n in (10, 30, 100, 1000):
        values = np.random.default_rng(n).permutation(n) / n
        k = n // 10
        assert statistics.worst(values) == pytest.approx((k - 1) / 2 / n, abs=1e-15)


def test_worst_rounds_up_to_whole_clients():
    assert statistics.worst([3.0, 1.0, 2.0]) == 1.0  # a tenth of three clients is one client
    assert statistics.worst([3.0, 1.0, 2.0, 4.0], 0.26) == 1.5
    assert statistics.worst([3.0, 1.0, 2.0], 1.0) == statistics.mean_over_clients([3.0, 1.0, 2.0])


def test_last_ten_rounds():
    assert statistics.last(np.arange(200.0)) == 194.5
    assert statistics.last([1.0, 3.0]) == 2.0
    assert statistics.last([9.0, 1.0, NAN, 3.0], n=2) == 2.0  # a round that was not evaluated is not one of the two


def test_nothing_left_is_nan_without_a_warning(recwarn):
    for values in ([], [NAN, NAN]):
        assert statistics.num_tested(values) == 0
        for number in (statistics.mean_over_clients, statistics.ci95, statistics.worst, statistics.last):
            assert math.isnan(number(values)), number
    assert math.isnan(statistics.pooled([NAN, NAN], [0, 0]))
    assert not recwarn.list


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: statistics.worst([1.0], 0), "0"),
        (lambda: statistics.worst([1.0], 1.5), "1.5"),
        (lambda: statistics.last([1.0], 0), "0"),
        (lambda: statistics.mean_over_clients([[1.0]]), r"\(1, 1\)"),
        (lambda: statistics.pooled([1.0, 2.0], [1]), r"\(1,\) for \(2,\)"),
    ],
)
def test_bad_arguments_say_what_was_found(call, found):
    with pytest.raises(ValueError, match=found):
        call()
