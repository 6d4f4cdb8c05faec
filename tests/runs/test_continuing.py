"""What is said where a run that is continued is not as asked for; and that nothing is said where it is."""

import json
import warnings

import numpy as np
import pytest

from helpers import small_runs as runs
from tfpfl.checks import TfpflWarning
from tfpfl.data import Federation
from tfpfl.runs.config import RunConfig, RunError, entries
from tfpfl.runs.continuing import config_to_continue, kept_config

METHOD = """
from tfpfl.algorithms import fedavg


def mine(model, population, *, eta: float = 0.1):
    \"\"\"Mine: FedAvg with {} steps.\"\"\"
    return fedavg(model, population, eta=eta, steps={})
"""
NETWORK = """
import keras


def small():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


def large():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(30)])
"""


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    return runs.federation(tmp_path_factory.mktemp("classes") / "data")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    rng = np.random.default_rng(0)
    made = lambda n: (rng.normal(size=(n, 4)).astype(np.float32), rng.normal(size=n).astype(np.float32))  # noqa: E731
    clients = [{"train": made(9), "test": made(3)} for _ in range(6)]
    return Federation.from_clients(
        clients, out=tmp_path_factory.mktemp("numbers") / "data", targets="real", validation=0.2
    )


def said(folder, kept, asked, federation, given=True):
    """What is said if a run was made as `kept`, and is asked for as `asked`; '' for nothing."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(entries(RunConfig(**kept).resolved(federation))))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept_config(folder, RunConfig(**asked), federation if given else None)
    return " ".join(str(w.message) for w in caught if issubclass(w.category, TfpflWarning))


AS_ASKED = [
    {},
    {"schedule": "cosine"},
    {"schedule": "cosine:0:10"},
    {"schedule": "cosine:1e-1"},
    {"schedule": "constant"},
    {"schedule": "step:3,5:0.5"},
    {"kind": "classification", "metrics": ("macro_f1",)},
    {"init": "keras", "network": "mlp200"},
    {"sampling": "range", "sampling_range": (2, 3)},
    {"joins": ("3:1",), "dropout": 0.2, "dropout_spread": 0.1, "client_seconds": 0.1, "round_deadline": 5.0},
    {"on_broken": "reject", "max_norm": 5, "clip_norm": 1.0},
    {"preset": "exact", "hyperparameters": {"tau": np.int64(3)}},
    {"patience": 2, "monitor": "loss"},
]


@pytest.mark.parametrize("asked", AS_ASKED, ids=lambda asked: ", ".join(asked) or "nothing")
def test_nothing_is_said_of_a_run_that_is_as_asked(classes, asked, tmp_path):
    for rounds in (7, 20):  # or has fewer rounds
        for given in (True, False):
            assert said(tmp_path / "run", asked | {"rounds": 7}, asked | {"rounds": rounds}, classes, given) == ""


@pytest.mark.parametrize(
    "asked", [{"metrics": ("rmse", "mae")}, {"patience": 2, "monitor": "rmse"}, {}, {"kind": "huber"}]
)
def test_the_score_of_a_kind_is_no_other_metric(numbers, asked, tmp_path):
    """Without `kind`, a configuration does not know that RMSE is the score of the data."""
    asked = asked | {"algorithm": "fedavg"}
    assert said(tmp_path / "run", asked, asked, numbers) == ""


@pytest.mark.parametrize(
    ("kept", "asked", "expected"),
    [
        ({"schedule": "cosine:0:10"}, {"schedule": "cosine:0.5:10"}, "schedule is cosine:0.0:10 and not cosine:0.5:10"),
        ({"schedule": "inverse:10"}, {"schedule": "inverse:1"}, "schedule is inverse:10 and not inverse:1"),
        ({"schedule": "cosine:0:100"}, {"schedule": "cosine:0:10"}, "schedule is cosine:0.0:100 and not cosine:0:10"),
        ({}, {"schedule": "cosine"}, "schedule is None and not cosine"),
        ({}, {"metrics": ("macro_f1",)}, "metrics is () and not ('macro_f1',)"),
        ({}, {"patience": 3, "monitor": "loss"}, "patience is None and not 3, monitor is accuracy and not loss"),
        ({}, {"init": "stax"}, "init is None and not stax"),
        ({}, {"engine": "tff", "evaluate_every": 1}, "engine is local and not tff, evaluate_every is 10 and not 1"),
    ],
)
def test_what_is_not_as_asked_is_named(classes, kept, asked, expected, tmp_path):
    assert f"keeps its own configuration: {expected}. For a run" in said(tmp_path / "run", kept, asked, classes)


def test_what_a_file_has_counts_and_not_where_it_is(classes, tmp_path):
    asked = {}
    for name, steps in (("here", 2), ("there", 2), ("changed", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(METHOD.format(steps, steps))
        asked[name] = {"algorithm": f"{tmp_path / name / 'mine.py'}:mine", "labels": "global"}
    assert said(tmp_path / "run", asked["here"], asked["there"], classes) == ""
    assert "configuration: method is of hash" in said(tmp_path / "run", asked["here"], asked["changed"], classes)
    nets = tmp_path / "nets.py"
    nets.write_text(NETWORK)
    kept = {"network": f"{nets}:small"}
    assert said(tmp_path / "run", kept, kept, classes) == ""
    assert "the network's function is small and not large" in said(
        tmp_path / "run", kept, {"network": f"{nets}:large"}, classes
    )


def test_a_federation_that_is_named_is_compared(classes, tmp_path):
    other = runs.federation(tmp_path / "other", validation=0.1)
    for federation, expected in ((classes, ""), (other, "federation is of hash")):
        asked = {"federation": str(federation.path)}
        assert said(tmp_path / "run", {}, asked, classes, given=False).count("federation is of hash") == bool(expected)


def test_a_cosine_run_that_was_given_more_rounds_is_the_one_that_was_asked_for(classes, tmp_path):
    """As `compare` asks again with the number of rounds of before; with 9 rounds, its cosine would be another one."""
    kept = RunConfig(schedule="cosine", rounds=7).resolved(classes)
    kept.rounds = 9  # as `tfpfl resume --rounds 9` does
    (tmp_path / "config.json").write_text(json.dumps(entries(kept)))
    for rounds in (7, 5, 9):
        asked = RunConfig(schedule="cosine", rounds=rounds)
        if rounds == 7:
            assert config_to_continue(asked, tmp_path, classes).run_id == kept.run_id
        else:
            with pytest.raises(RunError, match="schedule is cosine:0.0:7 and not cosine:0.0:9"):
                config_to_continue(asked, tmp_path, classes)
