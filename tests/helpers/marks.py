"""Cases that `make test` leaves out."""

import pytest


def slow_but(values, *fast) -> list:
    """Parameters of which all are marked slow but these; a tuple has the values of several arguments."""

    def slow(value):
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

    return [value if value in fast else slow(value) for value in values]
