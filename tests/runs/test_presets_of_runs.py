"""What a run of PFLEGO has from its preset, and what it says of the last steps of heads."""

import json
import shlex

import numpy as np
import pytest

from helpers import small_runs as runs
from tfpfl.checks import InvalidArgument, TfpflWarning
from tfpfl.models import build_network
from tfpfl.runs.command import command
from tfpfl.runs.config import RunConfig, read_config
from tfpfl.runs.run import Run


def theta_of(config, folder, federation):
    with Run.create(config, folder, federation) as run:
        return run.config, [np.asarray(w) for w in run.model.theta()], command(run.config, run.folder)


@pytest.mark.parametrize(
    ("given", "init", "word"),
    [
        ({"preset": "code"}, "stax", "--network-init stax"),
        ({"preset": "code", "init": "keras"}, "keras", "--network-init keras"),
        ({"init": "stax"}, "stax", "--network-init stax"),
        ({"init": "keras"}, "keras", None),
        ({}, "keras", None),
    ],
)
def test_first_weights(given, init, word, federation, tmp_path):
    config, theta, words = theta_of(runs.config(**given), tmp_path / "run", federation)
    expected = build_network("mlp200", (4,), seed=config.seed, init=init).get_weights()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(theta, expected, strict=True))
    assert (word or "--init") in words if word else "--init" not in words
    assert read_config(tmp_path / "run").run_id == config.run_id
    again = shlex.split(words)  # the command draws the same
    assert ("--network-init" in again) == (init == "stax" or "preset" in given)


def test_the_first_head_of_a_preset_and_of_a_configuration(federation, tmp_path):
    """What a user asks for comes before the preset's own, as at the command line."""
    for given, expected in (({}, "uniform01"), ({"head_init": "zeros"}, "zeros")):
        config, _, words = theta_of(runs.config(preset="code", **given), tmp_path / expected, federation)
        assert config.hyperparameters["head_init"] == expected
        assert (f"--head-init {expected}" in words) == bool(given)


def test_a_method_with_a_first_head_of_its_own_says_that_it_does_not_use_another(federation, tmp_path):
    with pytest.warns(UserWarning, match="FedBABU does not use head_init=zeros: its fixed head has orthogonal rows"):
        theta_of(RunConfig(algorithm="fedbabu", head_init="zeros"), tmp_path / "run", federation)


def test_run_ids_of_what_there_was_do_not_change(federation, tmp_path):
    plain = theta_of(runs.config(), tmp_path / "plain", federation)[0]
    assert theta_of(runs.config(init="keras"), tmp_path / "keras", federation)[0].run_id == plain.run_id
    assert theta_of(runs.config(init="stax"), tmp_path / "stax", federation)[0].run_id != plain.run_id
    file = tmp_path / "plain" / "config.json"
    before = json.loads(file.read_text())
    assert "init" not in before and before["hyperparameters"].pop("head_rate") == "rho"
    file.write_text(json.dumps(before))  # as it was before there was a head_rate
    assert read_config(file.parent) == plain and read_config(file.parent).run_id == plain.run_id
    safe = RunConfig(**{**vars(plain), "hyperparameters": {**plain.hyperparameters, "head_rate": "safe"}})
    assert safe.run_id != plain.run_id


def test_a_network_of_the_users_own_brings_its_weights(federation, tmp_path):
    file = tmp_path / "net.py"
    file.write_text(
        "import keras\n\n\ndef net(shape):\n    return keras.Sequential([keras.Input(shape), keras.layers.Dense(3)])\n"
    )
    config = runs.config(network=f"{file}:net", init="stax")
    with pytest.raises(InvalidArgument, match="brings its own: leave init out"):
        Run.create(config, tmp_path / "run", federation)


@pytest.mark.slow
def test_a_run_says_that_last_steps_raise_losses(federation, tmp_path):
    many = {"rounds": 20, "evaluate_every": 0, "participation": 0.5}
    with pytest.warns(TfpflWarning, match="the last step of a head raised the client's loss for"):
        runs.train(tmp_path / "wild", federation, hyperparameters={"tau": 2, "rho": 20.0, "server_opt": "sgd"}, **many)


@pytest.mark.slow
def test_a_run_says_that_inner_steps_are_taken_back(federation, tmp_path):
    many = {"rounds": 20, "evaluate_every": 0, "participation": 0.5}
    with pytest.warns(TfpflWarning, match=r"and were taken back \(safeguard\): such steps are too long"):
        runs.train(tmp_path / "wild", federation, hyperparameters={"tau": 5, "beta": 1e4}, **many)


@pytest.mark.slow
def test_a_run_whose_last_steps_lower_losses_says_nothing(federation, tmp_path, recwarn):
    many = {"rounds": 20, "evaluate_every": 0, "participation": 0.5}
    hyper = {"tau": 2, "rho": 20.0, "server_opt": "sgd", "head_rate": "safe"}
    runs.train(tmp_path / "safe", federation, hyperparameters=hyper, **many)
    assert [w for w in recwarn if issubclass(w.category, TfpflWarning)] == []
