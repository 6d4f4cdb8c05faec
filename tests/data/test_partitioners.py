"""The partitioners: specified counts, class sets and proportions, and what they refuse."""

import inspect

import numpy as np
import pytest

from tfpfl.checks import InvalidArgument
from tfpfl.data.dealing import rounded
from tfpfl.data.partitioners import GROUP_PRESETS, PARTITIONERS, Group, Labels, Partition, pathological, round_robin
from tfpfl.data.source import Source


def labels(num_train=2_000, num_test=500, num_classes=10, seed=3):
    rng = np.random.default_rng(seed)
    return Labels(rng.integers(0, num_classes, num_train), rng.integers(0, num_classes, num_test))


def keyed(num_keys=6):
    data = labels()
    return data._replace(train_key=data.train * 0 + np.arange(2_000) % num_keys, test_key=np.arange(500) % num_keys)


def disjoint_union(parts, size):
    """Every index of range(size) exactly once."""
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(size))


def class_sets(parts, y):
    return [set(y[p].tolist()) for p in parts]


CASES = {
    "round_robin": (labels(), 20, {"K": 3}),
    "dirichlet": (labels(), 10, {}),
    "iid": (labels(), 7, {}),
    "pathological": (labels(), 20, {}),
    "natural": (keyed(), None, {}),
    "quantity_skew": (labels(), 20, {}),
    "grouped_dominant": (
        labels(),
        None,
        {"groups": [Group(3, [0, 1], 60), Group(2, [4], 40)], "num_test": 20},
    ),
}


@pytest.mark.parametrize("name", PARTITIONERS)
def test_same_seed_same_partition_other_seed_other(name):
    data, clients, args = CASES[name]
    first, again, other = (PARTITIONERS[name](data, clients, seed, **args) for seed in (5, 5, 6))
    assert isinstance(first, Partition) and len(first.train) == len(first.test) > 1
    for a, b in zip(first.train + first.test, again.train + again.test, strict=True):
        np.testing.assert_array_equal(a, b)
    if name != "natural":  # who owns what is not drawn there
        assert any(not np.array_equal(a, b) for a, b in zip(first.train, other.train, strict=True))


@pytest.mark.parametrize("name", [n for n in PARTITIONERS if n != "grouped_dominant"])
def test_all_data_are_used_once(name):
    data, clients, args = CASES[name]
    part = PARTITIONERS[name](data, clients, 1, **args)
    if part.pooled:
        assert disjoint_union(part.train + part.test, 2_500)
    else:
        assert disjoint_union(part.train, 2_000) and disjoint_union(part.test, 500)


@pytest.mark.parametrize("name", PARTITIONERS)
def test_options_are_keyword_only_with_defaults(name):
    parameters = list(inspect.signature(PARTITIONERS[name]).parameters.values())
    assert [p.name for p in parameters[:3]] == ["labels", "num_clients", "seed"]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters[3:])


@pytest.mark.parametrize("clients,K", [(5, 2), (20, 2), (20, 5), (13, 10), (100, 1)])
def test_round_robin_deals_classes_evenly_to_clients_of_exactly_K(clients, K):
    data = labels()
    part = round_robin(data, clients, 0, K=K)
    sets = class_sets(part.train, data.train)
    assert {len(s) for s in sets} == {K}
    for parts, y in ((part.train, data.train), (part.test, data.test)):
        for c in range(10):
            counts = [np.sum(y[p] == c) for p, s in zip(parts, sets, strict=True) if c in s]
            assert counts and max(counts) - min(counts) <= 1 and sum(counts) == np.sum(y == c)


def test_round_robin_deals_seven_images_over_three_clients_as_3_2_2():
    part = round_robin(Labels(np.zeros(7, int), np.zeros(2, int)), 3, 0, K=1)
    assert [len(p) for p in part.train] == [3, 2, 2]
    assert [len(p) for p in part.test] == [1, 1, 0]


@pytest.mark.parametrize("seed", range(5))
def test_round_robin_repair_covers_many_classes_and_keeps_K(seed):
    # 62 classes, 100 clients of 2: a draw misses about 62 * (60/62)^100 = 2.3 classes.
    data = labels(20_000, 1_000, 62)
    part = round_robin(data, 100, seed, K=2)
    sets = class_sets(part.train, data.train)
    assert {len(s) for s in sets} == {2} and set().union(*sets) == set(range(62))


def test_round_robin_reference_coverage_hands_pairs_to_the_first_clients():
    data = labels(400, 100, 7)
    for seed in range(50):
        sets = class_sets(round_robin(data, 4, seed, K=2, coverage="reference").train, data.train)
        assert set().union(*sets) == set(range(7))
        if len(sets[0]) == 3:  # repaired: a triple, then pairs, with no class twice
            assert [len(s) for s in sets[:3]] == [3, 2, 2] and len(set().union(*sets[:3])) == 7
            break
    else:
        pytest.fail("no seed of 50 needed the repair")


def test_dirichlet_gives_everyone_enough_and_cuts_each_pool_at_a_quarter():
    data = labels(6_000, 1_000)
    part = PARTITIONERS["dirichlet"](data, 25, 0)
    sizes = np.array([len(a) + len(b) for a, b in zip(part.train, part.test, strict=True)])
    assert part.pooled and sizes.min() >= 40 and sizes.sum() == 7_000
    np.testing.assert_array_equal([len(p) for p in part.test], [round(s / 4) for s in sizes])


def test_a_pool_is_cut_at_random_and_not_in_the_order_of_the_source():
    """A seventh of the pool is of the source's test set: of the parts for training and for test, too."""
    data = labels(6_000, 1_000)
    by_key = keyed(6)
    for part, num_train, num_test in (
        (PARTITIONERS["dirichlet"](data, 25, 0), 6_000, 1_000),
        (PARTITIONERS["natural"](by_key, None, 0, pooled=True), len(by_key.train), len(by_key.test)),
    ):
        share = num_test / (num_train + num_test)
        for parts in map(np.concatenate, (part.train, part.test)):
            assert np.mean(parts >= num_train) == pytest.approx(share, abs=4 * np.sqrt(share / len(parts)))


@pytest.mark.parametrize("seed", range(4))
def test_dirichlet_gives_no_more_to_clients_that_have_their_share(seed):
    """N / I examples and those of one class are the most that a client can have, however unequal the draws are."""
    data = labels(7_000, 500, 50)
    part = PARTITIONERS["dirichlet"](data, 5, seed, alpha=0.02, pooled=False)
    assert max(map(len, part.train)) < 7_000 / 5 + np.bincount(data.train).max()


def test_dirichlet_alpha_sets_the_skew():
    def top_share(alpha):
        data = labels(6_000, 1_000)
        y = np.concatenate([data.train, data.test])
        part = PARTITIONERS["dirichlet"](data, 10, 0, alpha=alpha)
        return np.mean([np.bincount(y[p]).max() / len(p) for p in part.train])

    assert top_share(0.1) > top_share(1.0) > top_share(1e6)
    assert top_share(1e6) < 0.15  # uniform over 10 classes, up to sampling


@pytest.mark.parametrize(("num_train", "num_test"), [(2_000, 500), (600, 6_000)])
def test_dirichlet_with_the_test_set_apart_tests_on_trained_classes_only(num_train, num_test):
    """Of the larger test set, a small proportion is some examples where it is none of the training set."""
    data = labels(num_train, num_test)
    part = PARTITIONERS["dirichlet"](data, 10, 0, alpha=0.1, min_samples=10, pooled=False)
    assert not part.pooled and disjoint_union(part.test, num_test)
    for train, test in zip(part.train, part.test, strict=True):
        assert set(data.test[test]) <= set(data.train[train])


def test_iid_sizes_differ_by_at_most_one():
    part = PARTITIONERS["iid"](labels(), 7, 0)
    for parts in (part.train, part.test):
        assert np.ptp([len(p) for p in parts]) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_pathological_gives_two_shards_of_different_classes(seed):
    data = Labels(np.repeat(np.arange(10), 200), np.repeat(np.arange(10), 50))  # shards do not straddle classes
    part = pathological(data, 50, seed)
    assert {len(p) for p in part.train} == {40}
    assert {len(s) for s in class_sets(part.train, data.train)} == {2}
    for s, test in zip(class_sets(part.train, data.train), part.test, strict=True):
        assert set(data.test[test]) == s


MNIST = (  # examples of each class
    [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("clients, shards", [(100, 2), (62, 3), (20, 1)])
def test_pathological_tests_a_client_on_what_it_trains_on(clients, shards, seed):
    data = Labels(*(np.repeat(np.arange(10), counts) for counts in MNIST))  # shards straddle classes
    part = pathological(data, clients, seed, shards=shards)
    train, test = (
        np.stack([np.bincount(y[own], minlength=10) for own in parts])
        for y, parts in ((data.train, part.train), (data.test, part.test))
    )
    exact = train * np.array(MNIST[1]) / np.array(MNIST[0])  # client i's share of the class's test examples
    assert np.abs(test - exact).max() < 1 and (test.sum(0) == MNIST[1]).all()
    distance = 0.5 * np.abs(train / train.sum(1, keepdims=True) - test / test.sum(1, keepdims=True)).sum(1)
    assert distance.max() < 0.03  # one example of about 100, and unequal shares of the classes in MNIST's two sets


def test_the_largest_remainders_get_what_is_left_over():
    rng = np.random.default_rng(0)
    assert rounded(np.array([5, 3, 2]), 7, rng).tolist() == [4, 2, 1]  # 3.5, 2.1 and 1.4
    assert rounded(np.array([0, 3, 3]), 5, rng).tolist() in ([0, 3, 2], [0, 2, 3])
    once = [tuple(rounded(np.ones(4, int), 1, rng)) for _ in range(40)]
    assert len(set(once)) == 4  # equal remainders: not always the first client


def test_pathological_with_one_class_keeps_its_shards():
    part = pathological(Labels(np.zeros(40, int), np.zeros(8, int)), 4, 0)
    assert disjoint_union(part.train, 40) and {len(p) for p in part.train} == {10}


def test_grouped_dominant_presets_keep_shares_and_share_no_training_example():
    emnist = [(g.num_clients, len(g.dominant), g.num_train) for g in GROUP_PRESETS["emnist"]]
    assert emnist == [(10, 10, 1000), (26, 26, 700), (26, 26, 400)]
    rng = np.random.default_rng(0)
    # MNIST's training counts, of which the scarcest class, 5, has 5,421
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    data = Labels(rng.permutation(np.repeat(np.arange(10), counts)), rng.permutation(np.repeat(np.arange(10), 890)))
    part = PARTITIONERS["grouped_dominant"](data, 100, 0, groups="mnist")
    trained = np.concatenate(part.train)
    assert len(np.unique(trained)) == len(trained) == 20 * (600 + 500 + 400 + 300 + 200)
    for i, (train, test) in enumerate(zip(part.train, part.test, strict=True)):
        group = GROUP_PRESETS["mnist"][i // 20]
        assert len(train) == group.num_train and len(test) == len(np.unique(test)) == 100
        for y in (data.train[train], data.test[test]):
            counts = np.bincount(y, minlength=10)
            dominant = np.isin(np.arange(10), group.dominant)
            assert counts[dominant].sum() == round(0.8 * len(y))
            assert np.ptp(counts[dominant]) <= 1 and np.ptp(counts[~dominant]) <= 1


def test_the_dominant_share_is_rounded_to_the_nearest_number():
    """0.29 * 100 is 28.999999999999996."""
    data = labels(2_000, 1_000)
    part = PARTITIONERS["grouped_dominant"](data, None, 0, groups=[(3, [0, 1], 100)], dominant_share=0.29)
    for train, test in zip(part.train, part.test, strict=True):
        assert np.isin(data.train[train], [0, 1]).sum() == np.isin(data.test[test], [0, 1]).sum() == 29


def test_natural_clients_are_the_keys_and_may_be_fewer():
    data = keyed(6)
    part = PARTITIONERS["natural"](data, None, 0)
    assert part.names == list("012345")
    for key, train, test in zip(part.names, part.train, part.test, strict=True):
        assert set(data.train_key[train]) == set(data.test_key[test]) == {int(key)}
    as_bytes = data._replace(train_key=data.train_key.astype("S"), test_key=data.test_key.astype("S"))
    assert PARTITIONERS["natural"](as_bytes, None, 0).names == part.names
    pooled = PARTITIONERS["natural"](data, 4, 0, pooled=True)
    assert pooled.pooled and len(pooled.train) == 4
    keys = np.concatenate([data.train_key, data.test_key])
    for key, train, test in zip(pooled.names, pooled.train, pooled.test, strict=True):
        mine = np.concatenate([train, test])
        assert np.array_equal(np.sort(mine), np.flatnonzero(keys == int(key)))
        assert len(test) == round(0.25 * len(mine))


def test_quantity_skew_changes_sizes_and_not_labels():
    data = labels(200_000, 50_000)
    part = PARTITIONERS["quantity_skew"](data, 200, 0, sigma=1.0, min_samples=30)
    sizes = np.array([len(p) for p in part.train])
    assert sizes.min() >= 30
    assert np.std(np.log(sizes - 30 + 0.5)) == pytest.approx(1.0, abs=0.15)  # the standard error is 0.05
    largest = part.train[sizes.argmax()]
    assert np.abs(np.bincount(data.train[largest]) / len(largest) - 0.1).max() < 0.02
    np.testing.assert_allclose([len(p) for p in part.test], sizes / 4, atol=1)
    even = PARTITIONERS["quantity_skew"](data, 20, 0, sigma=0.0)
    assert np.ptp([len(p) for p in even.train]) <= 1


@pytest.mark.parametrize(
    "name,clients,args,message",
    [
        ("round_robin", 4, {"K": 2}, "4 clients x 2 classes cannot hold all 10"),
        ("round_robin", 20, {"K": 11}, "must lie in 1..10"),
        ("round_robin", 20, {"coverage": "none"}, "unknown coverage"),
        ("round_robin", 1_500, {"K": 10}, "has only .* training examples"),
        ("round_robin", 0, {}, "integer >= 1, found 0"),
        ("round_robin", None, {}, "integer >= 1, found None"),
        ("dirichlet", True, {}, "integer >= 1, found True"),
        ("iid", 2_001, {}, "more clients than examples"),
        ("dirichlet", 100, {}, "cannot have 40 examples each: there are 2500"),
        ("dirichlet", 60, {"alpha": 0.01}, "no draw of 1000"),
        ("dirichlet", 10, {"alpha": 0.0}, "alpha must be"),
        ("dirichlet", 10, {"alpha": float("nan")}, "alpha must be"),
        ("dirichlet", 10, {"test_fraction": 1.0}, "strictly between"),
        ("pathological", 1_500, {}, "3000 shards cannot be cut from 2000"),
        ("grouped_dominant", 7, {"groups": "mnist"}, "100 clients in all, but 7"),
        ("grouped_dominant", 100, {"groups": "mnist"}, "training examples of class"),
        ("grouped_dominant", None, {"groups": "cifar100"}, "not in the data"),
        ("grouped_dominant", None, {"groups": "mnits"}, "unknown preset"),
        ("grouped_dominant", 1, {"groups": [(-2, [0, 1], 20), (3, [0, 1], 20)]}, "num_clients must be"),
        ("grouped_dominant", None, {"groups": [(2, [0, 1], 20.5)]}, "num_train must be"),
        ("grouped_dominant", None, {"groups": [(2, [0, 1])]}, r"a group is \(num_clients, .*found \(2, \[0, 1\]\)"),
        ("grouped_dominant", None, {"groups": 5}, "groups must be a list"),
        ("grouped_dominant", None, {"groups": [(2, 3, 20)]}, "dominant classes of a group must be a list"),
        ("natural", None, {}, "no natural key"),
        ("quantity_skew", 300, {}, "cannot have 10 examples each"),
    ],
)  # fmt: skip
def test_impossible_requests_say_why(name, clients, args, message):
    with pytest.raises(ValueError, match=message):
        PARTITIONERS[name](labels(), clients, 0, **args)


def test_a_test_class_that_nobody_trains_on_is_refused():
    with pytest.raises(ValueError, match="class 9 has 5 test examples but no client holds it"):
        round_robin(Labels(np.arange(100) % 4, np.full(5, 9)), 10, 0)


@pytest.mark.parametrize("name", [n for n in PARTITIONERS if n != "grouped_dominant"])
def test_seeds_are_integers_not_below_zero(name):
    data, clients, args = CASES[name]
    for seed in (-1, 0.5, "0"):
        with pytest.raises(ValueError, match="seed must be an integer >= 0"):
            PARTITIONERS[name](data, clients, seed, **args)


def by_key(key, key_test, **given):
    """The names and the training keys of the clients of `natural`."""
    x, y = np.zeros((len(key), 1)), np.arange(len(key)) % 2
    source = Source.from_arrays(x, y, x[: len(key_test)], y[: len(key_test)], key=key, key_test=key_test)
    part = PARTITIONERS["natural"](Labels(y, source.y_test, source.key_train, source.key_test), None, 0, **given)
    return part.names, [np.unique(np.asarray(key, object)[own]).tolist() for own in part.train]


LARGE = [2**63 + 5, 2**60 + 1, 2**60 + 2]


@pytest.mark.parametrize(
    "as_given", [list, lambda keys: np.array(keys, np.uint64), lambda keys: np.array(keys, object)]
)
def test_large_natural_keys_are_not_merged(as_given):
    names, held = by_key(as_given(LARGE * 10), LARGE[1:] * 3)
    assert names == [str(key) for key in sorted(LARGE)] and held == [[key] for key in sorted(LARGE)]


@pytest.mark.parametrize(
    "key, key_test, message",
    [
        ([0.5, float("nan")] * 6, [0.5] * 3, "key: 6 examples have no key, the first is number 1"),
        (["a", float("nan")] * 6, ["a"] * 3, "key: 6 examples have no key"),
        (["a", "b"] * 6, ["a", None, "b"], "key_test: 1 examples have no key, the first is number 1"),
        (np.array(["2020-01-01", "NaT"] * 6, "M8[D]"), np.array(["2020-01-01"], "M8[D]"), "key: 6 exam"),
        ([1, "1"] * 6, ["1"] * 3, "must be all texts or all numbers, found 1 .number. and '1' .text."),
        (["1", "2"] * 6, np.array([1, 2]), "must be all texts or all numbers, found '2' .text. and 2 .number."),
        (np.array([1.0, 2.0] * 6), ["1", "2"], "must be all texts or all numbers, found 2.0 .number. and '2' .text."),
        ([2.0**53 + 2, 1.0] * 6, [1.0], "the natural key 9007199254740994.0 is a float that is too large"),
        ([2**60, 0.5] * 6, [0.5], "is a float that is too large"),
        (np.array([2.0**60, 5] * 6, object), [5], "is a float that is too large"),
        (np.array([{}, {}] * 6, object), np.array([{}], object), "natural keys that cannot be sorted, such as {}"),
    ],
)  # fmt: skip
def test_natural_keys_that_could_merge_two_clients_are_refused(key, key_test, message):
    with pytest.raises(InvalidArgument, match=message):
        by_key(key, key_test)


def test_natural_keys_of_different_types_that_are_safe_are_as_before():
    for key, key_test, names in (
        (np.array([3, 1], np.int64), np.array([1], np.uint64), ["1.0", "3.0"]),
        (np.array([3, 1], np.int32), np.array([10], np.int64), ["1", "3", "10"]),
        (["ann", "bob"], ["bartholomew"], ["ann", "bartholomew", "bob"]),
        ([0.5, 2], [2.0], ["0.5", "2.0"]),
        (["", "x"], ["x"], ["", "x"]),
    ):
        assert by_key(np.repeat(key, 6), key_test)[0] == names


@pytest.mark.parametrize("min_samples", [0, 1])
def test_dirichlet_draws_again_until_each_client_has_a_train_and_a_test_part(min_samples):
    rng = np.random.default_rng(3)
    data = Labels(rng.integers(0, 10, 20), rng.integers(0, 10, 8))
    for seed in range(20):
        part = PARTITIONERS["dirichlet"](data, 6, seed, alpha=0.3, min_samples=min_samples)
        assert (
            min(map(len, part.train)) >= 1 and min(map(len, part.test)) >= 1 and disjoint_union(part[0] + part[1], 28)
        )
    with pytest.raises(InvalidArgument, match="15 clients cannot have 2 examples each: there are 28"):
        PARTITIONERS["dirichlet"](data, 15, 0, min_samples=min_samples)


def test_sizes_and_proportions_that_no_computer_can_draw_are_refused():
    for alpha in (1e-20, 9e-7):  # NumPy's draw would not return for the first
        with pytest.raises(InvalidArgument, match="alpha must be at least 1e-06, because the time of a draw grows"):
            PARTITIONERS["dirichlet"](labels(), 4, 0, alpha=alpha)
    with pytest.raises(InvalidArgument, match="with sigma=1000 the sizes are beyond the numbers"):
        PARTITIONERS["quantity_skew"](labels(), 20, 0, sigma=1000.0)
    part = PARTITIONERS["quantity_skew"](labels(), 20, 0, sigma=50.0)
    assert min(map(len, part.train)) >= 10 and disjoint_union(part.train, 2_000)
