"""Marks parametrized cases as slow, so that `make test` leaves them out."""

import pytest


def slow_but(values, *fast) -> list:
    """Parameters for a test, all marked slow except those in `fast`; a tuple has the values of several arguments."""

    def slow(value):
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

    return [value if value in fast else slow(value) for value in values]


def table_but(values, *fast, slow=()) -> list:
    """The same, but the parameters that are neither in `fast` nor in `slow` are also left out by .ci/run (`table`)."""
    more = [pytest.mark.slow, pytest.mark.table]

    def marked(value):
        own = [pytest.mark.slow] if value in slow else more
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=own)

    return [value if value in fast else marked(value) for value in values]
