"""Conditions of `Ordering`: each function makes a function ({label: (value, half interval)}) -> bool, or None.

None says that a value that the condition needs is missing.
"""

from collections.abc import Callable
from itertools import product


def best_or_near(method: str) -> Callable:
    """Holds if no other method is better by more than half of this method's interval."""

    def holds(values):
        if method not in values or len(values) < 2:
            return None
        value, half = values[method]
        return all(value + half >= other for name, (other, _) in values.items() if name != method)

    return holds


def descending(*groups) -> Callable:
    """Holds if every method of a group has a larger value than every method of the next group.

    One pair in the wrong order is enough to fail, whatever is missing.
    """

    def holds(values):
        pairs = [pair for a, b in zip(groups, groups[1:], strict=False) for pair in product(a, b)]
        if not all(values[x][0] > values[y][0] for x, y in pairs if x in values and y in values):
            return False
        return True if all(name in values for group in groups for name in group) else None

    return holds


def lowest(method: str) -> Callable:
    """Holds if no other method of the column has a smaller value."""

    def holds(values):
        return (
            None if method not in values or len(values) < 2 else values[method][0] == min(v for v, _ in values.values())
        )

    return holds


def highest(method: str) -> Callable:
    """Holds if no other method of the column has a larger value."""

    def holds(values):
        return (
            None if method not in values or len(values) < 2 else values[method][0] == max(v for v, _ in values.values())
        )

    return holds


def at_least(method: str, accuracy: float) -> Callable:
    """Holds if the method's accuracy, in %, is at least this one."""

    def holds(values):
        return None if method not in values else values[method][0] >= accuracy

    return holds
