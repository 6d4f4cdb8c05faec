"""Partitioners: functions that divide a data set among clients.

A partitioner takes `(labels, num_clients, seed)` and its own keyword-only arguments. It returns a `Partition`: the
indices of every client's train and test examples. It uses labels only, never examples. The same labels, arguments and
seed give the same indices on every machine. If it cannot do what is asked, it raises InvalidArgument, a ValueError.
`PARTITIONERS` lists all partitioners; their keyword-only arguments are options of the command line.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from tfpfl.checks import InvalidArgument, check_listed, check_whole_number
from tfpfl.data.arrays import as_text
from tfpfl.data.dealing import by_owner, cut_by, deal, holders, in_proportion
from tfpfl.data.keys import sorted_keys
from tfpfl.data.randomness import Stream, generator


class Labels(NamedTuple):
    """The input of a partitioner: the class of every example and, if the data set has one, its natural client."""

    train: np.ndarray  # int [N_train]
    test: np.ndarray  # int [N_test]
    train_key: np.ndarray | None = None  # [N_train]: the natural client, such as the alphabet or the writer
    test_key: np.ndarray | None = None  # [N_test]


class Partition(NamedTuple):
    """The indices of the train and of the test examples of every client, in any order.

    If `pooled` is true, both are indices into the source's train and test set, one after the other. If it is false,
    `train` has indices into the train set and `test` into the test set.
    """

    train: list[np.ndarray]
    test: list[np.ndarray]
    pooled: bool = False
    names: list[str] | None = None  # the clients' names, if the data have them


class Group(NamedTuple):
    """A group of clients of `grouped_dominant`, with the same dominant classes."""

    num_clients: int
    dominant: Sequence[int]  # the classes that make up `dominant_share` of the client's data
    num_train: int  # the number of training examples of each client of the group


LEAST_ALPHA = 1e-6  # of `dirichlet`: NumPy needs more than 1 ms for a draw then, and ten times as long with a tenth


def _rng(seed: int, stream: Stream = Stream.PARTITION, client: int = 0) -> Generator:
    check_seed(seed)
    return generator(seed, stream, client)


def check_seed(seed: int) -> None:
    """Checks a seed.

    Raises:
        InvalidArgument: the seed is negative or not an integer.
    """
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise InvalidArgument(f"the seed must be an integer >= 0, found {seed!r}")


def _check_clients(num_clients: int | None, num_examples: int) -> None:
    if not isinstance(num_clients, int | np.integer) or isinstance(num_clients, bool) or num_clients < 1:
        raise InvalidArgument(
            f"the number of clients must be an integer >= 1, found {num_clients!r}: give it, as in clients=20"
        )
    if num_clients > num_examples:
        raise InvalidArgument(
            f"there are more clients than examples: {num_clients} clients, {num_examples} training examples"
        )


def _check_fraction(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise InvalidArgument(f"{name} must lie strictly between 0 and 1, found {value}")


def _cut_test(pools: list[np.ndarray], test_fraction: float, seed: int) -> tuple[list, list]:
    """Splits every client's pool at random: round(test_fraction * size) for test, but at least one in each part."""
    train, test = [], []
    for i, pool in enumerate(pools):
        if len(pool) < 2:
            raise InvalidArgument(f"client {i} has {len(pool)} examples: too few for a train and a test part")
        mixed = _rng(seed, Stream.POOL_TEST, i).permutation(pool)
        cut = min(max(round(test_fraction * len(pool)), 1), len(pool) - 1)
        test.append(mixed[:cut])
        train.append(mixed[cut:])
    return train, test


def round_robin(labels: Labels, num_clients: int, seed: int, *, K: int = 2, coverage: str = "repair") -> Partition:
    """K classes per client; every class is divided evenly among the clients that have it (PFLEGO, arXiv 2202.09848).

    Every client draws K of the C classes uniformly. The examples of each class are shuffled and dealt one by one to the
    clients that have the class, in turn: 7 examples for 3 clients become 3, 2, 2. Test examples are dealt in the same
    way. Every example is used once. PFLEGO's High-Pers is K=2, Medium-Pers K=C//2, No-Pers K=C.

    Args:
        K: number of classes of each client, in 1..C.
        coverage: what to do with classes that no client drew. 'repair': a random client exchanges one of its classes
            that another client also has; K stays the same. 'reference', as in the authors' code: if a class is missing,
            clients 0, 1, 2, ... get consecutive pairs of a random permutation of all classes, whatever K is (if C is
            odd, the first gets three).
    """
    _check_clients(num_clients, len(labels.train))
    classes = np.unique(labels.train)
    C = len(classes)
    if not 1 <= K <= C:
        raise InvalidArgument(f"classes per client K must lie in 1..{C}, the classes of the data; found K={K}")
    if num_clients * K < C:
        raise InvalidArgument(
            f"{num_clients} clients x {K} classes cannot hold all {C} classes: take a larger K, or "
            f"at least {-(-C // K)} clients"
        )
    rng = _rng(seed)
    drawn = [rng.choice(C, K, replace=False) for _ in range(num_clients)]
    counts = np.bincount(np.concatenate(drawn), minlength=C)
    missing = np.flatnonzero(counts == 0)
    if coverage == "repair":
        for c in missing:
            able = [i for i in range(num_clients) if (counts[drawn[i]] >= 2).any()]
            given_up = drawn[rng.choice(able)]
            place = rng.choice(np.flatnonzero(counts[given_up] >= 2))
            counts[given_up[place]] -= 1
            given_up[place] = c
            counts[c] += 1
    elif coverage == "reference":
        if len(missing):
            pairs = np.split(rng.permutation(C), np.arange(2 + C % 2, C, 2)) if C > 1 else [np.zeros(1, int)]
            if len(pairs) > num_clients:
                raise InvalidArgument(
                    f"coverage='reference' needs a client for each of {len(pairs)} pairs of classes, found "
                    f"{num_clients} clients: take more clients, or coverage='repair'"
                )
            drawn[: len(pairs)] = pairs
    else:
        raise InvalidArgument(f"unknown coverage {coverage!r}: one of repair, reference")
    client_of = np.repeat(np.arange(num_clients), [len(d) for d in drawn])
    held = holders(client_of, classes[np.concatenate(drawn)])
    train = deal(labels.train, held, rng, "training", need_each=True)
    test = deal(labels.test, held, rng, "test", need_each=False)
    return Partition(by_owner(train, num_clients), by_owner(test, num_clients))


def dirichlet(
    labels: Labels,
    num_clients: int,
    seed: int,
    *,
    alpha: float = 0.3,
    min_samples: int = 40,
    test_fraction: float = 0.25,
    pooled: bool = True,
) -> Partition:
    """Class proportions are drawn from Dir(alpha); clients stay near N/I examples (PGFed, arXiv 2212.01448).

    The train and the test set are joined. For each class: shuffle its examples; draw p ~ Dir(alpha * 1_I); set p_i = 0
    if client i already has N/I examples or more; normalize p; cut the examples at the cumulative proportions. All is
    drawn again until every client has `min_samples` examples. Then each client's examples are split into train and test
    at random, so that both have the same distribution. The cuts are rounded down, so that the last client has more
    classes than the others where classes are small (see `cut_by`).

    Args:
        alpha: concentration of the Dirichlet distribution, at least 1e-6; with a smaller alpha clients differ more.
        min_samples: smallest number of examples of a client (the authors: 40 = batch 10 / (1 - 0.75)); with `pooled`
            at least 2, so that each has a train and a test part.
        test_fraction: with `pooled`, the fraction of each client's examples that is set aside for test, in (0, 1).
        pooled: whether to join the train and the test set first. False: they stay separate, and the test set is divided
            with the proportions drawn for the train set.
    """
    pool = np.concatenate([labels.train, labels.test]) if pooled else labels.train
    _check_clients(num_clients, len(pool))
    _check_fraction("test_fraction", test_fraction)
    if not (np.isfinite(alpha) and alpha > 0):
        raise InvalidArgument(f"alpha must be a finite number > 0, found {alpha}")
    if alpha < LEAST_ALPHA:
        raise InvalidArgument(
            f"alpha must be at least {LEAST_ALPHA:g}, because the time of a draw grows with 1 / alpha; found {alpha:g}"
            ". Already with 0.001 nearly every class goes to one client"
        )
    needed = max(min_samples, 2 if pooled else 1)  # a pool of one example has no train and test part
    if num_clients * needed > len(pool):
        raise InvalidArgument(
            f"{num_clients} clients cannot have {needed} examples each: there are {len(pool)} to share"
        )
    rng = _rng(seed)
    members = {c: np.flatnonzero(pool == c) for c in np.unique(pool)}
    best = 0
    for _ in range(1_000):
        owner, sizes, proportions = np.full(len(pool), -1), np.zeros(num_clients, np.int64), {}
        for c, examples in members.items():
            p = rng.dirichlet(np.full(num_clients, alpha)) * (sizes < len(pool) / num_clients)
            if not p.sum() > 0:  # with a tiny alpha all the mass may be on full clients: draw again
                sizes[:] = 0
                break
            proportions[c] = p / p.sum()
            mixed = rng.permutation(examples)
            owner[mixed] = cut_by(proportions[c], len(mixed))
            sizes += np.bincount(owner[mixed], minlength=num_clients)
        best = max(best, int(sizes.min()))
        if sizes.min() >= needed:
            break
    else:
        raise InvalidArgument(
            f"no draw of 1000 gave each of {num_clients} clients {needed} examples with alpha={alpha}; in the "
            f"best, the smallest client has {best}. Take a larger alpha, fewer clients or a smaller min_samples"
        )
    parts = by_owner(owner, num_clients)
    if pooled:
        train, test = _cut_test(parts, test_fraction, seed)
        return Partition(train, test, pooled=True)
    test_owner = np.full(len(labels.test), -1)
    for c in np.unique(labels.test):
        if c not in proportions:
            raise InvalidArgument(f"class {c} is in the test set but not in the training set, so no client holds it")
        mixed = rng.permutation(np.flatnonzero(labels.test == c))
        test_owner[mixed] = cut_by(proportions[c], len(mixed))
        # A client without training examples of the class gets no test examples of it either.
        strangers = ~np.isin(test_owner[mixed], np.unique(owner[members[c]]))
        test_owner[mixed[strangers]] = np.argmax(np.bincount(owner[members[c]]))
    return Partition(parts, by_owner(test_owner, num_clients))


def iid(labels: Labels, num_clients: int, seed: int) -> Partition:
    """Independent and identically distributed clients: train and test set are each shuffled and cut into equal parts.

    The sizes of the parts differ by at most one.
    """
    _check_clients(num_clients, len(labels.train))
    rng = _rng(seed)
    train, test = (np.array_split(rng.permutation(len(y)), num_clients) for y in (labels.train, labels.test))
    return Partition(train, test)


def pathological(labels: Labels, num_clients: int, seed: int, *, shards: int = 2) -> Partition:
    """Examples sorted by label are cut into shards * I equal shards; each client gets `shards` (McMahan et al. 2017).

    Clients whose shards all have one class draw again, together with as many other random clients, until there is no
    such client (at most 1,000 times). The test examples of a class are divided in proportion to the clients' training
    examples of it, so that a client is tested on what it trains on.

    Args:
        shards: number of shards of each client, >= 1.
    """
    if not isinstance(shards, int | np.integer) or shards < 1:
        raise InvalidArgument(f"shards per client must be an integer >= 1, found {shards!r}")
    _check_clients(num_clients, len(labels.train))
    if shards * num_clients > len(labels.train):
        raise InvalidArgument(f"{shards * num_clients} shards cannot be cut from {len(labels.train)} training examples")
    rng = _rng(seed)
    mixed = rng.permutation(len(labels.train))
    pieces = np.array_split(mixed[np.argsort(labels.train[mixed], kind="stable")], shards * num_clients)
    low = np.array([labels.train[p[0]] for p in pieces])  # pieces are sorted: first and last tell the classes apart
    high = np.array([labels.train[p[-1]] for p in pieces])
    hand = rng.permutation(shards * num_clients).reshape(num_clients, shards)
    for _ in range(1_000 if shards > 1 else 0):
        single = np.flatnonzero(low[hand].min(1) == high[hand].max(1))
        if not len(single):
            break
        others = np.setdiff1d(np.arange(num_clients), single)
        again = np.concatenate([single, rng.permutation(others)[: len(single)]])
        hand[again] = rng.permutation(hand[again].ravel()).reshape(-1, shards)
    train = [np.concatenate([pieces[s] for s in shards_of]) for shards_of in hand]
    return Partition(train, in_proportion(labels.train, labels.test, train, rng))


def _blocks(num_groups: int, num_clients: int, width: int, sizes: Sequence[int]) -> list[Group]:
    return [Group(num_clients, range(g * width, (g + 1) * width), sizes[g]) for g in range(num_groups)]


GROUP_PRESETS = {
    # As published (FedAMP, arXiv 2007.03797): digits, upper case, lower case.
    "emnist": [Group(10, range(10), 1000), Group(26, range(10, 36), 700), Group(26, range(36, 62), 400)],
    # The appendix of the paper with these sizes is not available; these sizes are chosen so that they are possible.
    "mnist": _blocks(5, 20, 2, (600, 500, 400, 300, 200)),
    "fashion_mnist": _blocks(5, 20, 2, (600, 500, 400, 300, 200)),
    "cifar100": _blocks(5, 10, 20, (900, 800, 700, 600, 500)),
}


def _spread(total: int, classes: np.ndarray, rng: Generator) -> dict[int, int]:
    """Divides `total` evenly among the classes; random classes get one more: {class: number}."""
    counts = np.full(len(classes), total // len(classes))
    counts[rng.permutation(len(classes))[: total % len(classes)]] += 1
    return dict(zip(classes.tolist(), counts.tolist(), strict=True))


def _group(given: Any) -> Group:
    """A group of `grouped_dominant`, checked."""
    try:
        group = Group(*given)
    except TypeError:
        raise InvalidArgument(
            f"a group is (num_clients, dominant classes, num_train), as in (20, [0, 1], 600); found {given!r}"
        ) from None
    check_whole_number(1, num_clients=group.num_clients)
    check_whole_number(2, num_train=group.num_train)
    check_listed("the dominant classes of a group", group.dominant, "[0, 1]")
    return group._replace(num_clients=int(group.num_clients), num_train=int(group.num_train))


def grouped_dominant(
    labels: Labels,
    num_clients: int | None,
    seed: int,
    *,
    groups: str | Sequence[Group] = "mnist",
    dominant_share: float = 0.8,
    num_test: int = 100,
) -> Partition:
    """Groups of clients with the same dominant classes (the practical setting of FedAMP, arXiv 2007.03797).

    The fraction `dominant_share` of a client's train and test data is spread evenly over the dominant classes of its
    group, and the rest evenly over all other classes. No two clients have the same training example. They may have the
    same test example.

    Args:
        num_clients: the number of clients in all groups together, or None.
        groups: a preset (emnist, mnist, fashion_mnist, cifar100), or (num_clients, dominant classes, num_train) of each
            group.
        dominant_share: fraction of a client's examples that is of its group's dominant classes, in [0, 1].
        num_test: number of test examples of each client.
    """
    if isinstance(groups, str):
        if groups not in GROUP_PRESETS:
            raise InvalidArgument(f"unknown preset of groups {groups!r}: one of {', '.join(GROUP_PRESETS)}")
        groups = GROUP_PRESETS[groups]
    check_listed("groups", groups, "[(20, [0, 1], 600)]")
    groups = [_group(group) for group in groups]
    check_whole_number(0, num_test=num_test)
    total = sum(g.num_clients for g in groups)
    if total < 1 or (num_clients is not None and num_clients != total):
        raise InvalidArgument(f"the groups have {total} clients in all, but {num_clients} were asked for")
    if not 0 <= dominant_share <= 1:
        raise InvalidArgument(f"dominant_share must lie in [0, 1], found {dominant_share}")
    rng = _rng(seed)
    classes = np.unique(labels.train)
    left = {int(c): list(rng.permutation(np.flatnonzero(labels.train == c))) for c in classes}
    tests = {int(c): np.flatnonzero(labels.test == c) for c in classes}
    train, test = list[np.ndarray](), list[np.ndarray]()
    for group in groups:
        dominant = np.unique(list(group.dominant))
        rest = np.setdiff1d(classes, dominant)
        if not len(dominant) or not np.isin(dominant, classes).all():
            absent = np.setdiff1d(dominant, classes).tolist()
            raise InvalidArgument(f"dominant classes {absent} are not in the data, which has {len(classes)} classes")
        if not len(rest) and dominant_share < 1:
            raise InvalidArgument(
                f"all {len(classes)} classes are dominant: dominant_share must be 1, found {dominant_share}"
            )
        for _ in range(group.num_clients):
            i = len(train)
            parts = []
            for size, what in ((group.num_train, "training"), (num_test, "test")):
                inside = round(dominant_share * size)
                want = _spread(inside, dominant, rng) | (_spread(size - inside, rest, rng) if len(rest) else {})
                part: list[int] = []
                for c, n in want.items():
                    have = left[c] if what == "training" else tests[c]
                    if len(have) < n:
                        raise InvalidArgument(
                            f"client {i} needs {n} {what} examples of class {c}, but {len(have)} are left"
                        )
                    if what == "training":
                        part.extend(left[c].pop() for _ in range(n))
                    else:
                        part.extend(rng.choice(have, n, replace=False))
                parts.append(np.asarray(part, np.int64))
            train.append(parts[0])
            test.append(parts[1])
    return Partition(train, test)


def natural(
    labels: Labels, num_clients: int | None, seed: int, *, pooled: bool = False, test_fraction: float = 0.25
) -> Partition:
    """One client per value of the source's natural key, in sorted order: an alphabet of Omniglot, a writer, a hospital.

    Args:
        num_clients: the number of clients; if it is less than the number of keys, a random choice. None for all.
        pooled: whether to join the train and the test set first, and then to split each client's examples. For data
            sets whose train and test set have different clients; `load_source` has done this for Omniglot already.
        test_fraction: with `pooled`, the fraction of each client's examples that is set aside for test, in (0, 1).
    """
    if labels.train_key is None or labels.test_key is None:
        raise InvalidArgument(
            "these data have no natural key, so they have no natural clients. Choose another partitioner"
        )
    _check_fraction("test_fraction", test_fraction)
    keys, key_of = sorted_keys(labels.train_key, labels.test_key)
    if num_clients is None:
        num_clients = len(keys)
    check_whole_number(1, clients=num_clients)
    if not 1 <= num_clients <= len(keys):
        raise InvalidArgument(f"the data have {len(keys)} natural clients, but {num_clients} were asked for")
    chosen = np.sort(_rng(seed).permutation(len(keys))[:num_clients])
    client_of = np.full(len(keys), -1)
    client_of[chosen] = np.arange(num_clients)
    owner = client_of[key_of]
    names = [as_text(keys[k], "a natural key") for k in chosen]
    if pooled:
        train, test = _cut_test(by_owner(owner, num_clients), test_fraction, seed)
        return Partition(train, test, True, names)
    n = len(labels.train)
    return Partition(by_owner(owner[:n], num_clients), by_owner(owner[n:], num_clients), False, names)


def quantity_skew(
    labels: Labels, num_clients: int, seed: int, *, sigma: float = 1.0, min_samples: int = 10
) -> Partition:
    """Clients of different size with the same label distribution: lognormal sizes, random examples.

    The test set is divided in the same proportions as the train set.

    Args:
        sigma: standard deviation of log(size), >= 0; 0 gives equal sizes.
        min_samples: smallest number of training examples of a client, >= 1.
    """
    _check_clients(num_clients, len(labels.train))
    if not (np.isfinite(sigma) and sigma >= 0) or min_samples < 1:
        raise InvalidArgument(f"sigma must be finite and >= 0 and min_samples >= 1, found {sigma} and {min_samples}")
    spare = len(labels.train) - num_clients * min_samples
    if spare < 0:
        raise InvalidArgument(
            f"{num_clients} clients cannot have {min_samples} examples each: there are {len(labels.train)} to share"
        )
    rng = _rng(seed)
    with np.errstate(over="ignore"):  # the next lines say it
        share = np.cumsum(rng.lognormal(0.0, sigma, num_clients))
    if not 0 < share[-1] < np.inf:
        raise InvalidArgument(
            f"with sigma={sigma:g} the sizes are beyond the numbers that a computer has. Already with sigma=10 nearly "
            "all examples go to one client: take a smaller sigma"
        )
    cuts = np.round(spare * share / share[-1]).astype(np.int64) + min_samples * np.arange(1, num_clients + 1)
    test_cuts = np.round(len(labels.test) * cuts / len(labels.train)).astype(np.int64)
    return Partition(
        np.split(rng.permutation(len(labels.train)), cuts[:-1]),
        np.split(rng.permutation(len(labels.test)), test_cuts[:-1]),
    )


PARTITIONERS: dict[str, Callable[..., Partition]] = {
    "round_robin": round_robin,
    "dirichlet": dirichlet,
    "iid": iid,
    "pathological": pathological,
    "grouped_dominant": grouped_dominant,
    "natural": natural,
    "quantity_skew": quantity_skew,
}
