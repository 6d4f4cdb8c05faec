"""How examples are dealt to clients: in turn, at cumulative proportions, or in proportion to other examples."""

import numpy as np
from numpy.random import Generator

from tfpfl.checks import InvalidArgument


def by_owner(owner: np.ndarray, num_clients: int) -> list[np.ndarray]:
    """The indices of every client's examples. `owner` is the client of every example; -1: not assigned to a client."""
    order = np.argsort(owner, kind="stable")
    order = order[np.searchsorted(owner[order], 0) :]
    return np.split(order, np.cumsum(np.bincount(owner[order], minlength=num_clients))[:-1])


def deal(labels: np.ndarray, holding: dict[int, np.ndarray], rng: Generator, what: str, need_each: bool) -> np.ndarray:
    """The client of every example: each class is shuffled, then dealt one by one to its holders, in turn."""
    owner = np.full(len(labels), -1)
    for c in np.unique(labels):
        examples = rng.permutation(np.flatnonzero(labels == c))
        held_by = holding.get(int(c), ())
        if not len(held_by):
            raise InvalidArgument(f"class {c} has {len(examples)} {what} examples but no client holds it")
        if need_each and len(examples) < len(held_by):
            raise InvalidArgument(
                f"class {c} is for {len(held_by)} clients but has only {len(examples)} {what} examples: "
                "take fewer clients or fewer classes per client"
            )
        owner[examples] = held_by[np.arange(len(examples)) % len(held_by)]
    return owner


def holders(client_of: np.ndarray, class_of: np.ndarray) -> dict[int, np.ndarray]:
    """For every class, the ascending ids of the clients that hold it."""
    order = np.lexsort((client_of, class_of))
    classes, first = np.unique(class_of[order], return_index=True)
    return dict(zip(classes.tolist(), np.split(client_of[order], first[1:]), strict=True))


def cut_by(p: np.ndarray, n: int) -> np.ndarray:
    """The client of each of n examples in a row, which is cut at the cumulative proportions p.

    floor(cumsum(p) n) rounds every cut down, as in the usual reference code. So the last client gets at least one
    example of every class, unless its p is 0, and where classes are small it has more classes than the others: with 20
    clients and alpha = 0.1 on the 1,797 digits, the first client has 3.1 classes and the last one 7.7 (means over 60
    seeds). This is kept, because results and hashes depend on it.
    """
    cuts = np.floor(np.cumsum(p)[:-1] * n + 1e-9).astype(np.int64)
    return np.searchsorted(cuts, np.arange(n), side="right")


def in_proportion(train_labels: np.ndarray, test_labels: np.ndarray, train: list, rng: Generator) -> list[np.ndarray]:
    """Divides the test examples of every class among the clients in proportion to their training examples of it.

    Every client gets its exact share, rounded down or up: what is left over goes to the clients with the largest
    remainders, and among equal ones at random.

    Args:
        train_labels, test_labels: the class of every example, int [N_train] and [N_test].
        train: the indices of every client's training examples.
        rng: shuffles the examples of each class, and decides between equal remainders.

    Returns:
        The indices of every client's test examples.

    Raises:
        InvalidArgument: no client has training examples of a class that the test set has.
    """
    classes, codes = np.unique(train_labels, return_inverse=True)
    counts = np.stack([np.bincount(codes[own], minlength=len(classes)) for own in train])  # [I, C]
    test: list[list[np.ndarray]] = [[] for _ in train]
    for c in np.unique(test_labels):
        examples = rng.permutation(np.flatnonzero(test_labels == c))
        shares = counts[:, classes == c].sum(1)
        if not shares.any():
            raise InvalidArgument(f"class {c} has {len(examples)} test examples but no client holds it")
        ends = np.cumsum(rounded(shares, len(examples), rng))
        for own, part in zip(test, np.split(examples, ends[:-1]), strict=True):
            own.append(part)
    return [np.concatenate(own) if own else np.zeros(0, np.int64) for own in test]


def rounded(shares: np.ndarray, total: int, rng: Generator) -> np.ndarray:
    """`total` divided in proportion to `shares` by the method of the largest remainder: int [I], which add up to it."""
    counts, remainders = np.divmod(total * shares.astype(np.int64), shares.sum())
    mixed = rng.permutation(len(shares))
    first = mixed[np.argsort(-remainders[mixed], kind="stable")]
    counts[first[: total - counts.sum()]] += 1
    return counts
