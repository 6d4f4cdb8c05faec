"""Every entry of a run's configuration: devices compute what the engine computes with it, or refuse, or it is no matter
of a visit. A new entry belongs into one of the three lists."""

from dataclasses import fields

import pytest
import tensorflow as tf

from helpers.marks import slow_but
from tflite_export import DeviceClient, ExportError, export, simulate_round
from tflite_export.convert.personal import TRAINING, personal_model
from tfpfl.algorithms import ALGORITHMS, build_algorithm
from tfpfl.checks import InvalidArgument, TfpflWarning
from tfpfl.live.clients import Clients
from tfpfl.live.rules import Rules
from tfpfl.models import SplitModel, build_network
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run

SGD = {"server_opt": "sgd", "rho": 0.05, "tau": 4, "beta": 0.05}  # Adam divides rounding by gradients of nearly 0

SAME = {  # entry: what is changed; two rounds of devices are the engine's
    "hyperparameters": {},
    "preset": {"preset": "exact", "hyperparameters": {"tau": 4, "rho": 0.05}},
    "seed": {"seed": 3},
    "network": {"network": "conv_bn"},
    "init": {"init": "stax"},
    "head_init": {"head_init": "zeros"},
    "labels": {"labels": "global"},
    "participation": {"participation": 0.7},
    "sampling": {"sampling": "binomial"},
    "sampling_range": {"sampling": "range", "sampling_range": (2, 5)},
    "new_clients": {"new_clients": 3},
    "dropout": {"dropout": 0.3},
    "dropout_spread": {"dropout": 0.3, "dropout_spread": 0.2},
    "on_broken": {"on_broken": "reject"},
    "train_from": {"network": "conv_bn", "train_from": "dense"},
    "adapters": {"adapters": "lora:2"},
}
REFUSED = {  # entry: (what is changed, the reason)
    "algorithm": ({"algorithm": "fedavg", "hyperparameters": {}}, "fedavg has no program"),
    "objective": ({"objective": "fair:1"}, "its objective is fair:1"),
    "schedule": ({"schedule": "cosine"}, "its rates follow the schedule cosine"),
    "schedule_of": ({"schedule": "cosine", "schedule_of": ("rho",)}, "its rates follow the schedule"),
    "clip_norm": ({"on_broken": "reject", "clip_norm": 0.05}, "is clipped"),
    "max_norm": ({"on_broken": "reject", "max_norm": 5.0}, "longer than max_norm"),
    "aggregator": ({"aggregator": "median"}, "its server's aggregator is median"),
    "aggregator_args": ({"aggregator": "trimmed_mean", "aggregator_args": ("trim=0.2",)}, "aggregator is trimmed_mean"),
    "batch_norm": ({"network": "conv_bn", "batch_norm": "local"}, "its batch_norm is 'local'"),
    "secure": ({"secure": True}, "its clients send the integers"),
    "secure_clip": ({"secure": True, "secure_clip": 1.0}, "its clients send the integers"),
    "secure_noise": ({"secure": True, "secure_clip": 1.0, "secure_noise": 1.0}, "its clients send the integers"),
    "secure_threshold": ({"secure": True, "secure_threshold": 0.75}, "its clients send the integers"),
    "personal": ({"adapters": "lora:2", "personal": "B"}, "the part B of its adapters stays with the client"),
}
ELSEWHERE = {
    # the data, which a test of a device gets as they are; other kinds of labels: test_bundle.py
    *("dataset", "source", "partition", "partition_args", "clients", "validation", "data_seed", "federation", "kind"),
    # what is filled in, or says where something is from
    *("federation_hash", "network_hash", "network_weights", "own_method", "own_metrics", "versions", "format"),
    *("network_place", "network_beside"),
    # when rounds are, who comes, and what is measured
    *("rounds", "engine", "grouping", "evaluate_every", "metrics", "patience", "monitor", "joins", "leaves"),
    # these enter the probability to arrive, as dropout does
    *("client_seconds", "client_seconds_spread", "jitter", "round_deadline"),
}
DROPOUT = """
import keras
from keras import layers

def net():
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dropout(0.3), layers.Dense(6, "tanh")])
"""
HYPERPARAMETERS = {  # name: (value, None or the reason why devices refuse it)
    "tau": (1, None),
    "beta": (0.1, None),
    "rho": (0.1, None),
    "rule": ("exact", None),
    "weighting": ("sampled", None),
    "server_opt": ("momentum", None),
    "safeguard": (False, None),
    "head_init": ("uniform01", None),
    "head_rate": ("beta", None),
    "recompute": (True, None),
    "chunk": (7, None),
    "inner_opt": ("adam", "its inner_opt is 'adam'"),
}


def test_every_entry_has_its_place():
    names = {field.name for field in fields(RunConfig)}
    assert names == {*SAME, *REFUSED, *ELSEWHERE}
    assert len(names) == len(SAME) + len(REFUSED) + len(ELSEWHERE)
    assert set(HYPERPARAMETERS) == set(ALGORITHMS["pflego"].hyperparameters)


def opened(federation, folder, **changes):
    part = {} if "sampling_range" in changes else {"participation": 0.5}
    given = {"hyperparameters": SGD, "network": "mlp200"} | part | changes
    return Run.create(RunConfig(**given), folder, federation)


def check_same(federation, folder, **changes):
    with opened(federation, folder, **changes) as run:
        rows = simulate_round(run, 2, accuracy_every=0)
    assert sum(row.clients for row in rows) > 0
    assert max(max(row.theta, row.heads) for row in rows) < 1e-5


@pytest.mark.parametrize("name", slow_but(SAME, ci=("network", "dropout")))
def test_devices_compute_what_the_engine_computes(name, federation, tmp_path):
    check_same(federation, tmp_path / "run", **SAME[name])


@pytest.mark.parametrize("name", REFUSED)
def test_devices_refuse_what_they_cannot_do(name, federation, tmp_path):
    changes, reason = REFUSED[name]
    with opened(federation, tmp_path / "run", **changes) as run, pytest.raises(ExportError, match=reason):
        simulate_round(run, 1)


@pytest.fixture(scope="module")
def asked(federation):
    """asked(**hyperparameters) -> (algorithm, config, federation), all with one model, which is converted once."""
    model = SplitModel(build_network("mlp200", federation.example_shape))

    def make(**changed):
        config = RunConfig(hyperparameters=SGD | changed, network="mlp200", participation=0.5).resolved(federation)
        population = federation.population(config.sampling_plan(), labels=config.labels)
        return build_algorithm("pflego", model, population, **config.hyperparameters), config, federation

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_hyperparameters(name, asked):
    value, reason = HYPERPARAMETERS[name]
    if reason is None:
        rows = simulate_round(asked(**{name: value}), 2, accuracy_every=0)
        assert max(max(row.theta, row.heads) for row in rows) < 1e-5
    else:
        with pytest.raises(ExportError, match=reason):
            simulate_round(asked(**{name: value}), 1)


@pytest.mark.slow
def test_a_network_that_draws_takes_part_in_no_rounds_and_is_exported_without(federation, tmp_path):
    (tmp_path / "network.py").write_text(DROPOUT)
    with opened(federation, tmp_path / "run", network=f"{tmp_path / 'network.py'}:net", rounds=1) as run:
        with pytest.raises(ExportError, match="devices cannot take part: its network has layers that draw random num"):
            simulate_round(run, 1)
        with pytest.raises(InvalidArgument, match="devices cannot take part: its network has layers that draw"):
            Clients(run, Rules())
        run.train()
        with pytest.raises(ExportError, match="cannot go on with rounds on a device: its network has layers that draw"):
            export(run, 1, tmp_path / "b", rounds=True)
        with pytest.warns(TfpflWarning, match="exported without rounds on a device: its network has layers that draw"):
            bundle = export(run, 1, tmp_path / "b", inference=False)
        x, y = run.federation.arrays(1, "train")
    assert bundle.manifest["training"]["rounds"] is False
    client = DeviceClient(bundle, interpreter=tf.lite.Interpreter)
    assert client.personalize(x, y, held_out=None).loss > 0


@pytest.mark.slow
def test_a_run_without_rounds_on_devices_keeps_its_own_settings(federation, tmp_path):
    mine = {"tau": 4, "beta": 0.05, "rho": 0.02, "safeguard": False}
    hyper = {**SGD, **mine}
    changed = {"on_broken": "reject", "clip_norm": 0.5, "hyperparameters": hyper, "rounds": 1}
    with opened(federation, tmp_path / "run", **changed) as run:
        run.train()
        with pytest.warns(TfpflWarning, match="exported without rounds on a device: what its clients send is clipped"):
            personal = personal_model(run, 1)
    assert personal.training == {**mine, "head_rate": None} and personal.rounds is False


@pytest.mark.slow
def test_the_rate_of_another_inner_optimizer_is_none_of_gradient_steps(federation, tmp_path):
    hyper = {**SGD, "tau": 4, "beta": 0.0003, "inner_opt": "adam"}
    with opened(federation, tmp_path / "run", hyperparameters=hyper, rounds=1) as run:
        run.train()
        with pytest.warns(TfpflWarning, match="exported without rounds on a device"):
            personal = personal_model(run, 1)
    assert (personal.training["tau"], personal.training["beta"]) == (4, TRAINING["beta"])


def test_a_rate_that_features_decide_is_refused(federation, tmp_path):
    with opened(federation, tmp_path / "run", hyperparameters=SGD | {"head_rate": "safe"}) as run:
        with pytest.raises(ExportError, match="head_rate is 'safe'"):
            simulate_round(run, 1)
