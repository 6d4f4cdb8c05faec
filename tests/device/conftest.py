"""A small federation of digits with heads of different widths, a run on it, and a bundle of one of its clients."""

import pytest

from helpers import phones


@pytest.fixture(scope="session")
def federation(tmp_path_factory):
    """Ten named clients with 2, 3 or 4 classes and 27 to 72 training examples each."""
    return phones.federation(tmp_path_factory.mktemp("federation") / "digits")


@pytest.fixture(scope="session")
def make_run(federation, tmp_path_factory):
    """make_run(algorithm, rounds, **hyperparameters) -> the folder of a finished run, half of the clients a round."""

    def make(algorithm="pflego", rounds=3, network="mlp200", **hyper):
        from tfpfl.runs.config import RunConfig
        from tfpfl.runs.run import Run

        config = RunConfig(
            algorithm=algorithm,
            hyperparameters=hyper,
            federation=str(federation.path),
            network=network,
            participation=0.5,
            rounds=rounds,
            evaluate_every=0,
        )
        folder = tmp_path_factory.mktemp("runs") / algorithm
        with Run.create(config, folder, federation) as run:
            run.train()
        return folder

    return make


@pytest.fixture(scope="session")
def run_folder(make_run):
    return make_run(rho=0.01, beta=0.05)


@pytest.fixture(scope="session")
def bundle(run_folder, tmp_path_factory):
    """Client 4 of the run: three classes."""
    from tflite_export import export

    return export(run_folder, 4, tmp_path_factory.mktemp("bundles") / "client4")
