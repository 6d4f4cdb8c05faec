"""Marks parametrized cases as slow, so that `make test` leaves them out."""

import pytest


def slow_but(values, *fast, ci=()) -> list:
    """Parameters for a test, of which `make test` runs those in `fast`.

    The others are marked `slow` and, except those in `ci`, also `table`, of which .ci/run runs fewer for one commit.
    `make test-all` and `make test-newest` run all. A tuple has the values of several arguments.
    """

    def marked(value):
        marks = [pytest.mark.slow] if value in ci else [pytest.mark.slow, pytest.mark.table]
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)

    return [value if value in fast else marked(value) for value in values]
