"""What the tests of tfpfl/cli share."""

import pytest


@pytest.fixture(scope="session")
def federation(six_clients):
    """The federation `six_clients`, unless a file has one of its own."""
    return six_clients
