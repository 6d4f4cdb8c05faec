"""Runs with --batch-norm: configuration, command, resume, and the model of a client."""

import json

import keras
import numpy as np
import pytest

from helpers import small_runs as runs
from tfpfl.data import Federation
from tfpfl.runs import Run, RunConfig
from tfpfl.runs.command import command
from tfpfl.runs.config import read_config


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Four clients with small pictures of two classes, each on a scale of its own."""
    rng, clients = np.random.default_rng(0), {}
    for i in range(4):
        y = np.arange(18) % 2
        x = ((1 + i) * (y[:, None, None, None] + rng.standard_normal((18, 4, 4, 1)))).astype(np.float32)
        clients[f"c{i}"] = {"train": (x[:12], y[:12]), "test": (x[12:], y[12:])}
    return Federation.from_clients(clients, out=tmp_path_factory.mktemp("pictures") / "data")


@pytest.mark.slow
def test_a_run_of_fedbn_is_resumed_and_gives_its_models(pictures, tmp_path, monkeypatch):
    """A run of two rounds is one of one round, resumed for another; the client's Keras model has its own statistics."""
    monkeypatch.setattr("tfpfl.runs.protocols.LAST_ROUNDS", 1)
    given = {
        "algorithm": "fedbn",
        "network": "conv_bn",
        "hyperparameters": {"steps": 2, "eta": 0.05},
        "labels": "global",
    }
    whole = runs.train(tmp_path / "whole", pictures, rounds=2, **given)
    runs.train(tmp_path / "half", pictures, rounds=1, **given)
    with Run.open(tmp_path / "half", rounds=2) as run:
        run.train()
        assert run.model.batch_norm == "local" and run.recipe.model_name == "personal"
        again = run.training().client_states([1])[0]
        made = run.keras_model("c1", inputs="decoded", outputs="logits")
        x = pictures.arrays(1, "test")[0]
        layer = next(each for each in made._flatten_layers() if isinstance(each, keras.layers.BatchNormalization))
        np.testing.assert_array_equal(np.asarray(layer.moving_mean), again.statistics[0])
        assert made(x).shape == (6, 2)
    with Run.open(whole.folder) as run:
        first = run.training().client_states([1])[0]
    for a, b in zip(first.statistics, again.statistics, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_option_is_in_the_configuration_and_the_command(pictures, tmp_path):
    config = runs.config(algorithm="fedavg", network="conv_bn", batch_norm="shared", labels="global")
    with Run.create(config, tmp_path / "run", pictures) as run:
        assert run.model.batch_norm == "shared"
        assert "--batch-norm shared" in command(run.config, run.folder)
    assert read_config(tmp_path / "run").batch_norm == "shared"


def test_the_default_changes_no_id_and_no_file(pictures, tmp_path):
    config = runs.config()
    before = config.run_id
    assert RunConfig(**{**vars(config), "batch_norm": "frozen"}).run_id != before
    with Run.create(config, tmp_path / "run", pictures) as run:
        known = run.config.run_id
    path = tmp_path / "run" / "config.json"
    assert "batch_norm" not in json.loads(path.read_text())
    assert read_config(tmp_path / "run").run_id == known


def test_what_does_not_fit_is_refused_early(pictures, tmp_path):
    with pytest.raises(ValueError, match="batch_norm"):
        RunConfig(batch_norm="own")
    with pytest.raises(ValueError, match="clip_norm=1.0 cannot be used with batch_norm='shared'"):
        RunConfig(batch_norm="shared", on_broken="reject", clip_norm=1.0)
    with pytest.raises(ValueError, match="no trainable BatchNormalization.*conv_bn"):
        Run.create(runs.config(network="mlp200", batch_norm="local"), tmp_path / "a", pictures)
    with pytest.raises(ValueError, match="FedBN keeps.*conv_bn"):
        Run.create(runs.config(algorithm="fedbn", network="mlp200", labels="global"), tmp_path / "b", pictures)
    assert not list(tmp_path.iterdir())
