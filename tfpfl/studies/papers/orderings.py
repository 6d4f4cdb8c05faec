"""Conditions of `Ordering`: each function makes a function ({label: (value, half interval)}, missing) -> bool, or None.

None says that it cannot be told: a value that the condition needs is missing. `missing` names the methods of the column
that have no value that can be compared, so that being the best of the others says little.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product

from tfpfl.studies.papers.experiment import BOUND


def best_or_near(method: str) -> Callable:
    """Holds if no other method is better by more than half of this method's interval.

    With a half that is wider than `BOUND` nearly every method would be near the best, so that nothing is told then.
    """

    def holds(values, missing: Sequence[str] = ()):
        if method not in values or len(values) < 2:
            return None
        value, half = values[method]
        behind = max(other for name, (other, _) in values.items() if name != method) - value
        if not behind <= (BOUND if math.isnan(half) else half):
            return False
        if behind > 0 and not half <= BOUND:
            return None
        return None if missing else True

    return holds


def descending(*groups) -> Callable:
    """Holds if every method of a group has a larger value than every method of the next group.

    One pair in the wrong order is enough to fail, whatever is missing.
    """

    def holds(values, missing: Sequence[str] = ()):
        pairs = [pair for a, b in zip(groups, groups[1:], strict=False) for pair in product(a, b)]
        if not all(values[x][0] > values[y][0] for x, y in pairs if x in values and y in values):
            return False
        return True if all(name in values for group in groups for name in group) else None

    return holds


def lowest(method: str) -> Callable:
    """Holds if no other method of the column has a smaller value."""
    return _extreme(method, min)


def highest(method: str) -> Callable:
    """Holds if no other method of the column has a larger value."""
    return _extreme(method, max)


def _extreme(method: str, best: Callable) -> Callable:
    def holds(values, missing: Sequence[str] = ()):
        if method not in values or len(values) < 2:
            return None
        if values[method][0] != best(value for value, _ in values.values()):
            return False
        return None if missing else True

    return holds


def at_least(method: str, accuracy: float) -> Callable:
    """Holds if the method's accuracy, in %, is at least this one."""

    def holds(values, missing: Sequence[str] = ()):
        return None if method not in values else values[method][0] >= accuracy

    return holds
