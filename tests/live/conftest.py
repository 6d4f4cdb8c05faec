"""A federation, and runs whose clients are devices."""

import shutil

import pytest

from helpers import phones
from helpers.live import EXACT


@pytest.fixture(scope="session")
def federation(tmp_path_factory):
    """Ten named clients with 2, 3 or 4 classes and 27 to 72 training examples each."""
    return phones.federation(tmp_path_factory.mktemp("federation") / "digits")


@pytest.fixture(scope="session")
def make_run(federation, tmp_path_factory):
    """make_run(folder, **settings) -> an open new run of PFLEGO, half of the clients a round; bundles are made once."""
    from tfpfl.live.serve import BUNDLES, bundles_of
    from tfpfl.runs.config import RunConfig
    from tfpfl.runs.run import Run

    kept = tmp_path_factory.mktemp("bundles") / BUNDLES

    def make(folder, hyperparameters=EXACT, **settings):
        given = {"participation": 0.5, "rounds": 4, "evaluate_every": 2} | settings
        config = RunConfig(hyperparameters=hyperparameters, federation=str(federation.path), network="mlp200", **given)
        run = Run.create(config, folder, federation)
        if kept.exists():
            shutil.copytree(kept, folder / BUNDLES)
        else:
            bundles_of(run)
            shutil.copytree(folder / BUNDLES, kept)
        return run

    return make


@pytest.fixture
def run(make_run, tmp_path):
    with make_run(tmp_path / "run") as run:
        yield run
