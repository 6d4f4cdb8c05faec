"""Orders of methods, each as the pairs that must be in order: functions from the names of a column to `Pair`s."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

from tfpfl.studies.papers.experiment import BOUND


class Pair(NamedTuple):
    """The first method must have more than the second; with a margin, the second must not have more than the first.

    With a margin the first may be behind by as much, as long as that may be chance.
    """

    first: str  # its label, or its name if it has none
    second: str
    margin: float = 0.0


def none_better(method: str) -> Callable[[Sequence[str]], list[Pair]]:
    """No other method of the column is better than this one."""
    return lambda names: [Pair(method, other, BOUND) for other in names if other != method]


def descending(*groups: Sequence[str]) -> Callable[[Sequence[str]], list[Pair]]:
    """Every method of a group has a larger value than every method of the next group."""
    return lambda _: [Pair(*pair) for a, b in zip(groups, groups[1:], strict=False) for pair in product(a, b)]


def lowest(method: str) -> Callable[[Sequence[str]], list[Pair]]:
    """Every other method of the column has a larger value."""
    return lambda names: [Pair(other, method) for other in names if other != method]


def highest(method: str) -> Callable[[Sequence[str]], list[Pair]]:
    """Every other method of the column has a smaller value."""
    return lambda names: [Pair(method, other) for other in names if other != method]
