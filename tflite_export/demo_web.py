"""The run behind `make demo-web`: PFLEGO on what this machine has, so that a page with members can be made of it."""

from pathlib import Path
from typing import Any, NamedTuple

from tfpfl.data import list_datasets
from tfpfl.runs.callbacks import Callback
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run


class Recipe(NamedTuple):
    """A run, and what `write_site` shows of it."""

    config: RunConfig
    site: dict[str, Any]  # arguments of `write_site`


def recipe(dataset: str | None = None, rounds: int | None = None) -> Recipe:
    """The recipe for a data set; the default is omniglot if it is prepared on this machine, otherwise digits.

    omniglot: alphabets are the clients, the network is convolutional, and the members start with the trained backbone,
    with which a new head learns five letters from a few drawings. digits: each client has three digits, the network is
    small, and the members start with an untrained backbone, since ten rounds are enough to train it.

    Args:
        dataset: 'omniglot' or 'digits'.
        rounds: the number of rounds; None: 250 for omniglot and 100 for digits.
    """
    if dataset is None:
        present = {row["name"] for row in list_datasets() if row["present"]}
        dataset = "omniglot" if "omniglot" in present else "digits"
    if dataset == "omniglot":
        config = RunConfig(
            dataset="omniglot",
            source={"augment": "none"},
            partition="natural",
            network="omniglot_4conv",
            hyperparameters={"beta": 0.01, "rho": 0.003},
            rounds=rounds or 250,
            evaluate_every=0,
        )
        # client 21 has the Greek alphabet
        return Recipe(config, {"client": 21, "members": 8, "member_classes": 5, "start": "trained"})
    config = RunConfig(
        dataset="digits",
        partition_args={"K": 3},
        clients=20,
        participation=0.4,
        network="mlp200",
        rounds=rounds or 100,
        evaluate_every=0,
    )
    return Recipe(config, {"members": 8, "start": "initial"})


def trained(config: RunConfig, folder: Path, callbacks: list[Callback]) -> Path:
    """The folder of the run of a recipe: trained now, gone on with, or finished before.

    Args:
        config: of the recipe.
        folder: the run is the folder `DATASET` in it.
        callbacks: see `Run.train`.
    """
    run_folder = folder / config.dataset
    with Run.create_or_resume(config, run_folder) as run:
        if not run.is_complete:
            run.train(callbacks)
    return run_folder
