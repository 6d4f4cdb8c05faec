"""What stands in one row of a table: runs that differ in nothing but their seeds."""

import json
from dataclasses import asdict, fields

import pytest

from helpers.made_records import made
from tfpfl.runs.config import RunConfig, read_config
from tfpfl.studies import comparison
from tfpfl.studies.run_groups import group_runs

OTHERWISE = {  # entry -> another value than `made` has, and what the label says of it
    "hyperparameters": ({"eta": 0.5}, "eta=0.5"),
    "network": ("cifar_2conv", "network=cifar_2conv"),
    "network_hash": ("ab" * 32, "network=mlp200 abababab"),
    "network_beside": ("cd" * 32, "network=mlp200 ad4788d0"),
    "train_from": ("dense", "train_from=dense"),
    "adapters": ("lora:2", "adapters=lora:2"),
    "personal": ("B", "personal=B"),
    "init": ("stax", "init=stax"),
    "batch_norm": ("local", "batch_norm=local"),
    "objective": ("fair:1", "objective=fair:1"),
    "schedule": ("cosine", "schedule=cosine"),
    "schedule_of": (("eta",), "schedule_of=eta"),
    "head_init": ("zeros", "head_init=zeros"),
    "labels": ("local", "labels=local"),
    "participation": (0.5, "participation=0.5"),
    "sampling": ("binomial", "sampling=binomial"),
    "rounds": (11, "rounds=11"),
    "evaluate_every": (3, "evaluate_every=3"),
    "metrics": (("macro_f1", "ece"), "metrics=macro_f1 ece"),
    "patience": (5, "patience=5"),
    "dropout": (0.6, "dropout=0.6"),
    "dropout_spread": (0.1, "dropout_spread=0.1"),
    "client_seconds": (0.25, "client_seconds=0.25"),
    "client_seconds_spread": (0.5, "client_seconds_spread=0.5"),
    "jitter": (0.5, "jitter=0.5"),
    "round_deadline": (9.0, "round_deadline=9"),
    "joins": (("2:1", "3:2"), "joins=2:1 3:2"),
    "leaves": (("4:1",), "leaves=4:1"),
    "on_broken": ("reject", "on_broken=reject"),
    "max_norm": (2.0, "max_norm=2"),
    "clip_norm": (0.001, "clip_norm=0.001"),
    "aggregator": ("median", "aggregator=median"),
    "aggregator_args": (("trim=0.1",), "aggregator_args=trim=0.1"),
    "secure": (True, "secure=True"),
    "secure_clip": (2.0, "secure_clip=2"),
    "secure_noise": (0.5, "secure_noise=0.5"),
    "secure_threshold": (0.75, "secure_threshold=0.75"),
}
WITH = {  # what some entries need
    "network_beside": {"network_hash": "ab" * 32},
    "personal": {"adapters": "lora:2"},
    "schedule_of": {"schedule": "cosine"},
    "sampling_range": {"sampling": "range"},
    "monitor": {"patience": 5},
    "dropout_spread": {"dropout": 0.3},
    "client_seconds_spread": {"client_seconds": 1.0},
    "jitter": {"client_seconds": 1.0},
    "round_deadline": {"client_seconds": 1.0},
    "max_norm": {"on_broken": "reject"},
    "clip_norm": {"on_broken": "reject"},
    "aggregator_args": {"aggregator": "trimmed_mean", "aggregator_args": ("trim=0.2",)},
    "secure_clip": {"secure": True},
    "secure_noise": {"secure": True, "secure_clip": 1.0},
    "secure_threshold": {"secure": True},
}
OTHERWISE |= {"sampling_range": ((1, 3), "sampling_range=1 3"), "monitor": ("loss", "monitor=loss")}
WITH["sampling_range"] |= {"sampling_range": (1, 2)}
APART_ONLY_BESIDE_THE_SAME_SEED = {"engine": "tff", "grouping": "fused", "preset": None, "format": 6}
NAMES_SEEDS_OR_DATA = {"algorithm", "seed", "data_seed", "federation", "federation_hash", "versions", "own_method"}
NAMES_SEEDS_OR_DATA |= {
    "own_metrics",
    "kind",
    "network_place",
    "network_weights",
    "dataset",
    "source",
    "partition",
    "partition_args",
    "clients",
    "validation",
    "new_clients",
}


def pair(seeds, name, value):
    """Two records of FedAvg that differ in one entry."""
    base = WITH.get(name, {})
    return [made("fedavg", seeds[0], **base), made("fedavg", seeds[1], **base | {name: value})]


@pytest.mark.parametrize("name", OTHERWISE)
def test_runs_that_differ_in_anything_are_not_seeds_of_each_other(name):
    value, words = OTHERWISE[name]
    groups = group_runs(pair((0, 1), name, value))
    assert [len(group.records) for group in groups] == [1, 1]
    assert groups[1].label == f"FedAvg ({words})"
    assert groups[0].label != groups[1].label


def test_every_entry_of_a_configuration_is_looked_at():
    """Who adds an entry says here whether it makes another setting."""
    known = {*OTHERWISE, *APART_ONLY_BESIDE_THE_SAME_SEED, *NAMES_SEEDS_OR_DATA}
    assert known == {entry.name for entry in fields(RunConfig)}


def test_what_is_off_is_not_named():
    plain = made("fedavg")
    median = made("fedavg", aggregator="median")
    half = made("fedavg", dropout=0.5)
    small = made("fedavg", on_broken="reject", clip_norm=0.001)
    labels = [group.label for group in group_runs([plain, median, half, small])]
    assert labels[0] == "FedAvg"
    assert labels[1:] == ["FedAvg (aggregator=median)", "FedAvg (dropout=0.5)",
                          "FedAvg (on_broken=reject, clip_norm=0.001)"]  # fmt: skip
    assert [row["seeds"] for row in comparison.rows([plain, median, half, small])] == [1, 1, 1, 1]


@pytest.mark.parametrize("name", [n for n, v in APART_ONLY_BESIDE_THE_SAME_SEED.items() if v is not None])
def test_another_engine_is_another_row_only_beside_the_same_seed(name):
    value = APART_ONLY_BESIDE_THE_SAME_SEED[name]
    assert [len(group.records) for group in group_runs(pair((0, 1), name, value))] == [2]
    again = [*pair((0, 0), name, value), made("fedavg", 1)]
    groups = group_runs(again)
    assert [[r.config.seed for r in group.records] for group in groups] == [[0, 1], [0]]
    assert f"{name}={value}" in groups[1].label and groups[0].label.startswith(f"FedAvg ({name}=")


def test_a_preset_is_the_setting_that_it_stands_for():
    named, written = made("pflego", 0, preset="paper"), made("pflego", 1)
    written.config.hyperparameters = dict(named.config.hyperparameters)
    assert [len(group.records) for group in group_runs([named, written])] == [2]


def test_values_that_look_alike_are_written_with_all_digits():
    close = [made("fedavg", hyperparameters={"eta": eta}) for eta in (0.12345678, 0.12345679)]
    labels = [group.label for group in group_runs(close)]
    assert labels == ["FedAvg (eta=0.12345678)", "FedAvg (eta=0.12345679)"]


def test_a_run_of_an_older_format_is_a_seed_of_newer_ones(tmp_path):
    """It lacks entries and hyperparameters that came later, whose defaults change nothing."""
    new, old = made("fedavg", 0), made("fedavg", 1)
    content = json.loads(json.dumps(asdict(old.config))) | {"format": 6}
    for name in ("own_method", "metrics", "monitor"):
        del content[name]
    later = [name for name in content["hyperparameters"] if name.startswith(("server_", "client_opt"))]
    for name in later:
        del content["hyperparameters"][name]
    assert later
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = read_config(tmp_path)
    assert config.format == 6
    object.__setattr__(old, "config", config)
    assert [len(group.records) for group in group_runs([new, old])] == [2]


def test_metrics_of_one_name_with_other_code_are_other_metrics():
    def with_code(seed, letter):
        record = made("fedavg", seed, metrics=("brier",))
        record.config.metrics = ("recall",)
        record.config.own_metrics = {"recall": {"kind": "file", "function": "recall", "sha256": 64 * letter}}
        return record

    assert len(group_runs([with_code(0, "a"), with_code(1, "a")])) == 1
    labels = [group.label for group in group_runs([with_code(0, "a"), with_code(1, "b")])]
    assert labels == ["FedAvg (metrics=recall@aaaaaaaa)", "FedAvg (metrics=recall@bbbbbbbb)"]
