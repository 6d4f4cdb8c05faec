"""What the tests of algorithms share."""

import pytest

from helpers.toys import toy
from tfpfl.studies import battery


@pytest.fixture(scope="module")
def data():
    """Five clients of different N_i and K_i in memory, of which all take part in a round."""
    return toy()


@pytest.fixture(scope="session")
def federation(tmp_path_factory):
    """The clients of `battery` on disk, for tests that do not change them."""
    return battery.small_federation(tmp_path_factory.mktemp("battery") / "federation")
