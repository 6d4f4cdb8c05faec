"""A federation, and runs whose clients are devices."""

import pytest

from helpers import phones
from helpers.live import EXACT, new_run


@pytest.fixture(scope="session")
def federation(tmp_path_factory):
    """Ten named clients with 2, 3 or 4 classes and 27 to 72 training examples each."""
    return phones.federation(tmp_path_factory.mktemp("federation") / "digits")


@pytest.fixture(scope="session")
def make_run(federation, tmp_path_factory):
    """make_run(folder, **settings) -> an open new run of PFLEGO, half of the clients a round; bundles are made once."""
    kept = tmp_path_factory.mktemp("bundles") / "bundles"

    def make(folder, hyperparameters=EXACT, **settings):
        return new_run(federation, folder, kept, hyperparameters, **settings)

    return make


@pytest.fixture
def run(make_run, tmp_path):
    with make_run(tmp_path / "run") as run:
        yield run
