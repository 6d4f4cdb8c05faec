"""What the tests of algorithms share."""

import pytest

from helpers.toys import toy


@pytest.fixture(scope="module")
def data():
    """Five clients of different N_i and K_i in memory, of which all take part in a round."""
    return toy()
