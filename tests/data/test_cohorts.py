"""Cohorts and keys against the distributions that they claim."""

import subprocess
import sys
import time
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from tfpfl.checks import InvalidArgument
from tfpfl.data.cohorts import cohort
from tfpfl.data.population import Population, Sampling
from tfpfl.data.randomness import client_key


def population(num_clients, ids=None, **sampling):
    ones = np.ones(num_clients, int)
    return Population(ones, ones, sampling=Sampling(**sampling), client_ids=ids)


def taken(people, rounds, seed=0):
    """Who was in which round: bool [rounds, I]."""
    return np.stack([np.isin(people.client_ids, cohort(seed, t, people)) for t in range(1, rounds + 1)])


@pytest.mark.parametrize(
    ("num_clients", "rate", "size"), [(100, 0.2, 20), (7, 0.5, 3), (5, 0.01, 1), (10, 0.3, 3), (4, 1.0, 4)]
)
def test_fixed_has_exactly_r_different_ascending_clients(num_clients, rate, size):
    people = population(num_clients, kind="fixed", rate=rate)
    for t in range(1, 50):
        ids = cohort(3, t, people)
        assert len(ids) == size == people.clients_per_round
        assert (np.diff(ids) > 0).all() and np.isin(ids, people.client_ids).all()


def test_every_subset_is_equally_likely_in_fixed():
    people = population(6, kind="fixed", rate=0.5)
    subsets = list(combinations(range(6), 3))
    counts = dict.fromkeys(subsets, 0)
    for t in range(1, 4001):
        counts[tuple(cohort(11, t, people))] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_binomial_is_an_independent_coin_of_each_client():
    rate, num_clients, rounds = 0.3, 12, 4000
    member = taken(population(num_clients, kind="binomial", rate=rate), rounds)
    for count in member.sum(axis=0):
        assert stats.binomtest(int(count), rounds, rate).pvalue > 1e-4
    sizes = np.bincount(member.sum(axis=1), minlength=num_clients + 1)
    expected = rounds * stats.binom.pmf(np.arange(num_clients + 1), num_clients, rate)
    common = expected > 5
    observed = np.r_[sizes[common], sizes[~common].sum()]
    assert stats.chisquare(observed, np.r_[expected[common], expected[~common].sum()]).pvalue > 1e-3
    correlation = np.corrcoef(member.T)[np.triu_indices(num_clients, 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(rounds)


def test_binomial_may_take_nobody_and_at_rate_one_takes_everyone():
    few = taken(population(3, kind="binomial", rate=0.2), 1000).sum(axis=1)
    assert stats.binomtest(int((few == 0).sum()), 1000, 0.8**3).pvalue > 1e-4
    assert taken(population(50, kind="binomial", rate=1.0), 100).all()


def test_range_draws_its_size_uniformly_and_its_clients_too():
    rounds = 3000
    member = taken(population(9, kind="range", low=2, high=6), rounds)
    sizes = np.bincount(member.sum(axis=1), minlength=10)
    assert sizes[2:7].sum() == rounds
    assert stats.chisquare(sizes[2:7]).pvalue > 1e-3
    for count in member.sum(axis=0):
        assert stats.binomtest(int(count), rounds, 4 / 9).pvalue > 1e-4


@pytest.mark.parametrize("present", [[7], [0, 3, 8], [1, 2, 4, 5, 6, 7, 9]], ids=len)
@pytest.mark.parametrize(
    "sampling",
    [
        {"kind": "fixed", "rate": 0.35},
        {"kind": "binomial", "rate": 0.3},
        {"kind": "range", "low": 2, "high": 5},
    ],
    ids=str,
)
def test_whoever_is_away_the_others_are_drawn_as_often_as_with_all(sampling, present):
    """P(i in S) I / E[r] = 1 of everybody who is present, which makes a sum that is scaled by I / E[r] unbiased."""
    people, rounds = population(10, **sampling), 3000
    share = people.clients_per_round / 10
    cohorts = [cohort(2, t, people, np.array(present)) for t in range(1, rounds + 1)]
    counts = np.bincount(np.concatenate(cohorts), minlength=10)
    assert counts.sum() == counts[present].sum()
    for count in counts[present]:
        assert stats.binomtest(int(count), rounds, share).pvalue > 1e-4
    if sampling["kind"] == "fixed":  # the two whole numbers beside n r / I
        assert {len(c) for c in cohorts} == {len(present) * 3 // 10, len(present) * 3 // 10 + 1}
    everyone = [cohort(2, t, people, people.client_ids).tolist() for t in range(1, 50)]
    assert everyone == [cohort(2, t, people).tolist() for t in range(1, 50)]


def test_runs_of_older_formats_keep_the_sizes_that_they_began_with():
    """Taken from the version before the sizes got a stream of their own."""
    old = population(9, kind="range", low=2, high=6, old_sizes=True)
    assert [len(cohort(5, t, old)) for t in range(1, 13)] == [5, 3, 2, 4, 5, 6, 4, 6, 5, 6, 4, 2]
    assert [cohort(5, t, old).tolist() for t in (1, 2, 3)] == [[0, 2, 5, 7, 8], [3, 5, 6], [1, 4]]
    new = population(9, kind="range", low=2, high=6)
    assert [len(cohort(5, t, new)) for t in range(1, 13)] != [len(cohort(5, t, old)) for t in range(1, 13)]


def test_runs_of_older_formats_keep_their_cohorts_while_clients_are_away():
    """Up to format 5: with 'range' r of those that are there, with 'fixed' the floor of their share, but one."""
    some = np.array([0, 2, 5])
    fixed = population(9, kind="fixed", rate=0.5, old_shares=True)
    ranges = population(9, kind="range", low=2, high=6, old_shares=True)
    for t in range(1, 60):
        assert len(cohort(0, t, fixed, some)) == 1  # floor(0.5 * 3)
        assert len(cohort(0, t, fixed, some[:1])) == 1  # max(floor(0.5), 1)
        assert len(cohort(0, t, ranges, some)) == min(len(cohort(0, t, ranges)), 3)
    new = population(9, kind="range", low=2, high=6)
    assert any(len(cohort(0, t, new, some)) < 2 for t in range(1, 60))


def test_rounds_and_seeds_are_independent():
    """Who was in round t says nothing about round t + 1, nor one seed about the next."""
    people = population(20, kind="fixed", rate=0.5)
    first, second = taken(people, 2000, seed=0), taken(people, 2000, seed=1)
    for a, b in ((first[:-1], first[1:]), (first, second)):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)


def test_a_cohort_does_not_depend_on_what_was_asked_before():
    people = population(30, kind="range", low=1, high=30)
    forward = [cohort(5, t, people) for t in range(1, 40)]
    np.random.seed(123)
    backward = [cohort(5, t, people) for t in range(39, 0, -1)][::-1]
    assert len({len(ids) for ids in forward}) > 5
    for a, b in zip(forward, backward, strict=True):
        np.testing.assert_array_equal(a, b)


def test_another_process_draws_the_same():
    people = population(1000, kind="fixed", rate=0.01)
    program = (
        "import numpy as np; from tfpfl import Population, Sampling; from tfpfl.data.cohorts import cohort;"
        "from tfpfl.data.randomness import client_key;"
        "o = np.ones(1000, int); print(*cohort(4, 17, Population(o, o, sampling=Sampling(rate=0.01))),"
        "*client_key(4, 17, [3, 999]).ravel())"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    expected = [*cohort(4, 17, people), *client_key(4, 17, [3, 999]).ravel()]
    assert [int(word) for word in answer.split()] == [int(v) for v in expected]


def test_ids_of_the_population_are_what_comes_back():
    ids = np.array([2, 3, 40, 41, 1000])
    people = population(5, ids=ids, kind="fixed", rate=0.4)
    assert set(np.concatenate([cohort(0, t, people) for t in range(1, 60)])) == set(ids.tolist())


def test_bits_are_those_of_splitmix64():
    """The published generator, one step after another, from the state that the seed gives."""
    state = int(np.random.SeedSequence(9, spawn_key=(3, 2)).generate_state(1, np.uint64)[0])
    mask, outputs = 2**64 - 1, []
    for _ in range(5):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    keys = client_key(9, 2, np.arange(5))
    assert keys.dtype == np.int32 and keys.shape == (5, 2)
    assert [(int(np.uint32(a)) << 32) | int(np.uint32(b)) for a, b in keys] == outputs


def test_keys_differ_over_clients_rounds_and_seeds():
    keys = [client_key(s, t, np.arange(2000)) for s in (0, 1, 2**32, 2**40) for t in (0, 1, 2, 50)]
    assert len(np.unique(np.concatenate(keys), axis=0)) == 16 * 2000


def test_a_key_belongs_to_its_client_whoever_else_is_asked():
    everyone = client_key(7, 3, np.arange(100))
    some = [90, 4, 55]
    np.testing.assert_array_equal(client_key(7, 3, some), everyone[some])
    assert client_key(7, 3, []).shape == (0, 2)


def test_each_bit_of_a_key_is_a_fair_coin():
    words = np.unpackbits(client_key(0, 1, np.arange(20000)).view(np.uint8), axis=1)
    assert words.shape == (20000, 64)
    assert np.abs(words.mean(axis=0) - 0.5).max() < 5 * 0.5 / np.sqrt(20000)


def test_a_hundred_thousand_clients_cost_milliseconds():
    people = population(100_000, kind="fixed", rate=0.01)
    started = time.process_time()
    for t in range(10):
        client_key(0, t, cohort(0, t, people))
    assert (time.process_time() - started) / 10 < 0.1  # of processor time; about 3 ms


@pytest.mark.parametrize(("seed", "round_num"), [(-1, 1), (0, -1)])
def test_negative_seed_or_round_is_refused(seed, round_num):
    with pytest.raises(ValueError, match="-1"):
        cohort(seed, round_num, population(3))


def test_the_largest_cohort_is_never_exceeded():
    for kind, expected in (
        ({"kind": "fixed", "rate": 0.35}, 3),
        ({"kind": "range", "low": 2, "high": 4}, 4),
        ({"kind": "binomial", "rate": 0.3}, 10),
    ):
        people = population(10, **kind)
        assert people.sampling.most(10) == expected
        assert taken(people, 200).sum(1).max() <= expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampling(rate="0.2"), "participation must be a number, found '0.2'"),
        (lambda: Sampling("range", low="1", high=2), "low must be a number, found '1'"),
        (
            lambda: Sampling("range", low=1.5, high=3),
            "sampling range needs whole numbers 1 <= low <= high, found low=1.5",
        ),
        (lambda: Sampling(low=2, high=4), "low=2 and high=4 would not be used with kind='fixed'"),
        (lambda: Sampling("range", 0.2, 2, 4), "rate=0.2 would not be used with kind='range'"),
        (
            lambda: Population([30.5, 30], [2, 2]),
            r"num_examples must be whole numbers, found float64 such as .30.5, 30.0",
        ),
        (
            lambda: Population([30, 30], [2, 2], client_ids=[False, True]),
            "client_ids must be whole numbers, found bool",
        ),
        (lambda: Population(30, 2), r"vectors of one length >= 1, found shapes \(\), \(\), \(1,\)"),
    ],
)
def test_texts_for_numbers_and_numbers_for_vectors_are_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
