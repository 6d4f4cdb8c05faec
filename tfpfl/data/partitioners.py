"""Who holds which examples: pure functions from labels and a seed to the train and test indices of every client.

A partitioner takes `(labels, num_clients, seed)` and keyword-only arguments of its own, and returns a `Partition`. It
sees labels only, never examples. The same labels, arguments and seed give the same indices on every machine. Requests
that cannot be met raise InvalidArgument, a ValueError. `PARTITIONERS` lists them all; the command line makes a flag of
each keyword-only argument.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data.randomness import Stream, generator


class Labels(NamedTuple):
    """What a partitioner sees: the class of every example and, where the data set has one, its natural owner."""

    train: np.ndarray  # int [N_train]
    test: np.ndarray  # int [N_test]
    train_key: np.ndarray | None = None  # [N_train]: such as the alphabet or the writer
    test_key: np.ndarray | None = None  # [N_test]


class Partition(NamedTuple):
    """Per client, the indices of its train and of its test examples, not necessarily sorted.

    With `pooled`, both index the concatenation of the source's train and test set; without, each its own set.
    """

    train: list[np.ndarray]
    test: list[np.ndarray]
    pooled: bool = False
    names: list[str] | None = None  # what the clients are called, where the data say so


class Group(NamedTuple):
    """Clients of `grouped_dominant` that prefer the same classes."""

    num_clients: int
    dominant: Sequence[int]  # the classes that make up `dominant_share` of the client's data
    num_train: int  # training examples of each of its clients


def _rng(seed: int, stream: Stream = Stream.PARTITION, client: int = 0) -> np.random.Generator:
    check_seed(seed)
    return generator(seed, stream, client)


def check_seed(seed: int) -> None:
    """Whether numbers can be drawn from it.

    Raises:
        InvalidArgument: it is negative, or no integer.
    """
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise InvalidArgument(f"the seed must be an integer >= 0, found {seed!r}")


def _check_clients(num_clients: int | None, num_examples: int) -> None:
    if not isinstance(num_clients, int | np.integer) or num_clients < 1:
        raise InvalidArgument(f"the number of clients must be an integer >= 1, found {num_clients!r}")
    if num_clients > num_examples:
        raise InvalidArgument(
            f"there are more clients than examples: {num_clients} clients, {num_examples} training examples"
        )


def _check_fraction(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise InvalidArgument(f"{name} must lie strictly between 0 and 1, found {value}")


def _by_owner(owner: np.ndarray, num_clients: int) -> list[np.ndarray]:
    """The indices of every client, given the owner of every example; -1: not assigned to a client."""
    order = np.argsort(owner, kind="stable")
    order = order[np.searchsorted(owner[order], 0) :]
    return np.split(order, np.cumsum(np.bincount(owner[order], minlength=num_clients))[:-1])


def _deal(labels: np.ndarray, holders: dict[int, np.ndarray], rng, what: str, need_each: bool) -> np.ndarray:
    """The owner of every example: each class shuffled, then dealt one by one, in a cycle, to its holders in order."""
    owner = np.full(len(labels), -1)
    for c in np.unique(labels):
        examples = rng.permutation(np.flatnonzero(labels == c))
        held_by = holders.get(int(c), ())
        if not len(held_by):
            raise InvalidArgument(f"class {c} has {len(examples)} {what} examples but no client holds it")
        if need_each and len(examples) < len(held_by):
            raise InvalidArgument(
                f"class {c} is held by {len(held_by)} clients but has only {len(examples)} {what} examples: "
                "take fewer clients or fewer classes per client"
            )
        owner[examples] = held_by[np.arange(len(examples)) % len(held_by)]
    return owner


def _holders(client_of: np.ndarray, class_of: np.ndarray) -> dict[int, np.ndarray]:
    """For every class, the ascending ids of the clients that hold it."""
    order = np.lexsort((client_of, class_of))
    classes, first = np.unique(class_of[order], return_index=True)
    return dict(zip(classes.tolist(), np.split(client_of[order], first[1:]), strict=True))


def _cut_test(pools: list[np.ndarray], test_fraction: float, seed: int) -> tuple[list, list]:
    """Every client's pool, shuffled and cut: round(test_fraction * size) test examples, at least one in each part."""
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
    """K classes per client, and every class dealt evenly among the clients that hold it (PFLEGO, arXiv 2202.09848).

    Every client draws K of the C classes uniformly. Each class is then shuffled and dealt one example at a time,
    cyclically, to its holders in client order: 7 examples over 3 clients become 3, 2, 2. The test examples are dealt
    over the same class sets. All data are used, each example once. High-Pers is K=2, Medium-Pers K=C//2, No-Pers K=C.

    Args:
        K: number of classes that each client has.
        coverage: what to do about classes that nobody drew. 'repair': a random client gives up one of its classes that
            another also holds, so that K is kept. 'reference', as in the authors' code: if any class is missing,
            clients 0, 1, 2, ... get consecutive pairs of a random permutation of all classes (a triple first if C is
            odd), whatever K is.
    """
    _check_clients(num_clients, len(labels.train))
    classes = np.unique(labels.train)
    C = len(classes)
    if not 1 <= K <= C:
        raise InvalidArgument(f"classes per client K must lie in 1..{C}, the classes of the data; found K={K}")
    if num_clients * K < C:
        raise InvalidArgument(
            f"{num_clients} clients x {K} classes cannot hold all {C} classes: I*K >= C is needed, "
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
                    f"coverage='reference' hands out {len(pairs)} pairs to only {num_clients} clients"
                )
            drawn[: len(pairs)] = pairs
    else:
        raise InvalidArgument(f"unknown coverage {coverage!r}: one of repair, reference")
    client_of = np.repeat(np.arange(num_clients), [len(d) for d in drawn])
    holders = _holders(client_of, classes[np.concatenate(drawn)])
    train = _deal(labels.train, holders, rng, "training", need_each=True)
    test = _deal(labels.test, holders, rng, "test", need_each=False)
    return Partition(_by_owner(train, num_clients), _by_owner(test, num_clients))


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
    """Class proportions over clients drawn from Dir(alpha), clients kept near N/I examples (PGFed, arXiv 2212.01448).

    Train and test are pooled. Class by class: shuffle; p ~ Dir(alpha * 1_I); p_i = 0 where client i already holds N/I
    or more; renormalise; cut at the cumulative proportions. All is redrawn until every client has `min_samples`. Each
    client's pool is then cut at random, so that its train and test parts share a distribution.

    Args:
        alpha: concentration of the Dirichlet distribution; the smaller it is, the more the clients differ.
        min_samples: number of examples that every client has at least (the authors: 40 = batch 10 / (1 - 0.75)).
        test_fraction: fraction of each client's examples that is set aside for test.
        pooled: whether the train and the test set are joined before they are divided. False: the test set stays apart,
            and is divided by the proportions that were drawn for train.
    """
    pool = np.concatenate([labels.train, labels.test]) if pooled else labels.train
    _check_clients(num_clients, len(pool))
    _check_fraction("test_fraction", test_fraction)
    if not (np.isfinite(alpha) and alpha > 0):
        raise InvalidArgument(f"alpha must be a finite number > 0, found {alpha}")
    if num_clients * min_samples > len(pool):
        raise InvalidArgument(
            f"{num_clients} clients cannot have {min_samples} examples each: there are {len(pool)} to share"
        )
    rng = _rng(seed)
    members = {c: np.flatnonzero(pool == c) for c in np.unique(pool)}
    best = 0
    for _ in range(1_000):
        owner, sizes, proportions = np.full(len(pool), -1), np.zeros(num_clients, np.int64), {}
        for c, examples in members.items():
            p = rng.dirichlet(np.full(num_clients, alpha)) * (sizes < len(pool) / num_clients)
            if not p.sum() > 0:  # for a tiny alpha, all the mass may have gone to clients that are full: draw again
                sizes[:] = 0
                break
            proportions[c] = p / p.sum()
            mixed = rng.permutation(examples)
            owner[mixed] = _cut_by(proportions[c], len(mixed))
            sizes += np.bincount(owner[mixed], minlength=num_clients)
        best = max(best, int(sizes.min()))
        if sizes.min() >= max(min_samples, 1):
            break
    else:
        raise InvalidArgument(
            f"no draw of 1000 gave each of {num_clients} clients {min_samples} examples with alpha={alpha}; the best "
            f"left a client with {best}: take a larger alpha, fewer clients or a smaller min_samples"
        )
    parts = _by_owner(owner, num_clients)
    if pooled:
        train, test = _cut_test(parts, test_fraction, seed)
        return Partition(train, test, pooled=True)
    test_owner = np.full(len(labels.test), -1)
    for c in np.unique(labels.test):
        if c not in proportions:
            raise InvalidArgument(f"class {c} is in the test set but not in the training set, so no client holds it")
        mixed = rng.permutation(np.flatnonzero(labels.test == c))
        test_owner[mixed] = _cut_by(proportions[c], len(mixed))
        # A client whose share of the class rounded to no training example is not tested on it either.
        strangers = ~np.isin(test_owner[mixed], np.unique(owner[members[c]]))
        test_owner[mixed[strangers]] = np.argmax(np.bincount(owner[members[c]]))
    return Partition(parts, _by_owner(test_owner, num_clients))


def _cut_by(p: np.ndarray, n: int) -> np.ndarray:
    """The owner of each of n examples in a row, cut at the cumulative proportions p."""
    cuts = np.floor(np.cumsum(p)[:-1] * n + 1e-9).astype(np.int64)
    return np.searchsorted(cuts, np.arange(n), side="right")


def iid(labels: Labels, num_clients: int, seed: int) -> Partition:
    """Shuffled and cut into contiguous parts whose sizes differ by at most one, train and test separately."""
    _check_clients(num_clients, len(labels.train))
    rng = _rng(seed)
    return Partition(*(np.array_split(rng.permutation(len(y)), num_clients) for y in (labels.train, labels.test)))


def pathological(labels: Labels, num_clients: int, seed: int, *, shards: int = 2) -> Partition:
    """Sorted by label and cut into shards * I equal shards, `shards` random ones per client (McMahan et al. 2017).

    A client whose shards turn out to be all of one class draws again, together with other random clients, until none is
    left or no exchange helps. The test set is dealt over the classes that a client's training shards hold.

    Args:
        shards: number of shards that each client gets.
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
    client_of = np.repeat(np.arange(num_clients), [len(t) for t in train])
    pairs = np.unique(np.stack([client_of, labels.train[np.concatenate(train)]]), axis=1)
    test = _deal(labels.test, _holders(*pairs), rng, "test", need_each=False)
    return Partition(train, _by_owner(test, num_clients))


def _blocks(num_groups: int, num_clients: int, width: int, sizes: Sequence[int]) -> list[Group]:
    return [Group(num_clients, range(g * width, (g + 1) * width), sizes[g]) for g in range(num_groups)]


GROUP_PRESETS = {
    # As published (FedAMP, arXiv 2007.03797): digits, upper case, lower case.
    "emnist": [Group(10, range(10), 1000), Group(26, range(10, 36), 700), Group(26, range(36, 62), 400)],
    # The paper's appendix with these is lost; sizes chosen to be feasible.
    "mnist": _blocks(5, 20, 2, (600, 500, 400, 300, 200)),
    "fashion_mnist": _blocks(5, 20, 2, (600, 500, 400, 300, 200)),
    "cifar100": _blocks(5, 10, 20, (900, 800, 700, 600, 500)),
}


def _spread(total: int, classes: np.ndarray, rng) -> dict[int, int]:
    """`total` as evenly as possible over the classes; who gets one more is random."""
    counts = np.full(len(classes), total // len(classes))
    counts[rng.permutation(len(classes))[: total % len(classes)]] += 1
    return dict(zip(classes.tolist(), counts.tolist(), strict=True))


def grouped_dominant(
    labels: Labels,
    num_clients: int | None,
    seed: int,
    *,
    groups: str | Sequence[Group] = "mnist",
    dominant_share: float = 0.8,
    num_test: int = 100,
) -> Partition:
    """Groups of clients that prefer the same classes (the practical setting of FedAMP, arXiv 2007.03797).

    `dominant_share` of a client's train and test data lies uniformly over the dominant classes of its group, the rest
    uniformly over all other classes. Training examples are drawn without replacement across clients, so nobody shares
    one; test examples without replacement within a client only.

    Args:
        num_clients: None, or the number of clients in all groups.
        groups: a preset (emnist, mnist, fashion_mnist, cifar100), or (num_clients, dominant classes, num_train) of each
            group.
        dominant_share: fraction of a client's examples that comes from its group's dominant classes.
        num_test: number of test examples of each client.
    """
    if isinstance(groups, str):
        if groups not in GROUP_PRESETS:
            raise InvalidArgument(f"unknown preset of groups {groups!r}: one of {', '.join(GROUP_PRESETS)}")
        groups = GROUP_PRESETS[groups]
    groups = [Group(*g) for g in groups]
    total = sum(g.num_clients for g in groups)
    if total < 1 or (num_clients is not None and num_clients != total):
        raise InvalidArgument(f"the groups have {total} clients in all, but {num_clients} were asked for")
    if not 0 <= dominant_share <= 1:
        raise InvalidArgument(f"dominant_share must lie in [0, 1], found {dominant_share}")
    rng = _rng(seed)
    classes = np.unique(labels.train)
    left = {int(c): list(rng.permutation(np.flatnonzero(labels.train == c))) for c in classes}
    tests = {int(c): np.flatnonzero(labels.test == c) for c in classes}
    train, test = [], []
    for group in groups:
        dominant = np.unique(list(group.dominant))
        rest = np.setdiff1d(classes, dominant)
        if not len(dominant) or not np.isin(dominant, classes).all():
            absent = np.setdiff1d(dominant, classes).tolist()
            raise InvalidArgument(f"dominant classes {absent} are not in the data, which has {len(classes)} classes")
        if not len(rest) and dominant_share < 1:
            raise InvalidArgument(f"all {len(classes)} classes are dominant: nothing is left for the other share")
        for _ in range(group.num_clients):
            i = len(train)
            parts = []
            for size, what in ((group.num_train, "training"), (num_test, "test")):
                inside = round(dominant_share * size)
                want = _spread(inside, dominant, rng) | (_spread(size - inside, rest, rng) if len(rest) else {})
                part = []
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
    """One client per value of the source's natural key, in sorted order: Omniglot's alphabets, a writer, a hospital.

    Args:
        num_clients: None for every key; fewer than there are keys draws that many of them.
        pooled: whether the train and the test set are joined, and `test_fraction` is cut off each client's pool. For
            data sets whose own split lies between the clients; `load_source` gives Omniglot pooled and split already.
        test_fraction: fraction of each client's examples that is set aside for test, with `pooled`.
    """
    if labels.train_key is None or labels.test_key is None:
        raise InvalidArgument(
            "these data have no natural key, so they have no natural clients; choose another partitioner"
        )
    _check_fraction("test_fraction", test_fraction)
    keys, key_of = np.unique(np.concatenate([labels.train_key, labels.test_key]), return_inverse=True)
    if num_clients is None:
        num_clients = len(keys)
    if not 1 <= num_clients <= len(keys):
        raise InvalidArgument(f"the data have {len(keys)} natural clients, but {num_clients} were asked for")
    chosen = np.sort(_rng(seed).permutation(len(keys))[:num_clients])
    client_of = np.full(len(keys), -1)
    client_of[chosen] = np.arange(num_clients)
    owner = client_of[key_of]
    names = [str(keys[k]) for k in chosen]
    if pooled:
        train, test = _cut_test(_by_owner(owner, num_clients), test_fraction, seed)
        return Partition(train, test, True, names)
    n = len(labels.train)
    return Partition(_by_owner(owner[:n], num_clients), _by_owner(owner[n:], num_clients), False, names)


def quantity_skew(
    labels: Labels, num_clients: int, seed: int, *, sigma: float = 1.0, min_samples: int = 10
) -> Partition:
    """Clients of very different size and of one label distribution: sizes lognormal, examples at random.

    Args:
        sigma: standard deviation of the logarithm of the size; 0 gives equal sizes.
        min_samples: number of training examples that every client has at least. The test set is cut in proportion to
            train.
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
    share = np.cumsum(rng.lognormal(0.0, sigma, num_clients))
    cuts = np.round(spare * share / share[-1]).astype(np.int64) + min_samples * np.arange(1, num_clients + 1)
    test_cuts = np.round(len(labels.test) * cuts / len(labels.train)).astype(np.int64)
    return Partition(
        np.split(rng.permutation(len(labels.train)), cuts[:-1]),
        np.split(rng.permutation(len(labels.test)), test_cuts[:-1]),
    )


PARTITIONERS = {
    "round_robin": round_robin,
    "dirichlet": dirichlet,
    "iid": iid,
    "pathological": pathological,
    "grouped_dominant": grouped_dominant,
    "natural": natural,
    "quantity_skew": quantity_skew,
}
