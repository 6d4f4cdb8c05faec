"""Cases that `make test` leaves out."""

import pytest


def slow_but(values, *fast) -> list:
    """Parameters of which all are marked slow but these."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
