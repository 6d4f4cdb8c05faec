"""How examples are dealt to clients so that their test data follow their training data."""

import numpy as np
from numpy.random import Generator

from tfpfl.checks import InvalidArgument


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
