"""Comparisons: every number of a row against the runs it is made of."""

import csv
import io
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from helpers import small_runs as runs
from helpers.made_records import made
from tfpfl.checks import InvalidArgument, TfpflWarning
from tfpfl.data import Federation
from tfpfl.runs import statistics
from tfpfl.runs.config import RunConfig, RunError
from tfpfl.runs.cost import Passes, Work, visit_flops
from tfpfl.runs.protocols import EV_ALL, EV_LOCAL, PROTOCOLS, protocol
from tfpfl.runs.run import Run
from tfpfl.studies import comparison, tables
from tfpfl.studies.records import Record
from tfpfl.studies.run_groups import by_data, check_comparable
from tfpfl.studies.told import told_unscored


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Two seeds each of three algorithms on six small clients."""
    folder = tmp_path_factory.mktemp("compare")
    federation = runs.federation(folder / "federation")
    common = {"federation": str(federation.path), "participation": 0.5, "rounds": 4, "labels": "local"}
    configs = [
        RunConfig(algorithm=name, seed=seed, hyperparameters=hyper, **common)
        for seed in (0, 1)
        for name, hyper in (("pflego", {"tau": 4}), ("local", {"steps": 2}), ("fedavg_ft", {"steps": 2}))
    ]
    folders = comparison.compare_runs(configs, folder / "out")
    assert comparison.compare_runs(configs, folder / "out") == folders  # nothing is left to run
    with pytest.warns(
        TfpflWarning, match="pflego-s0 is a run of 4 rounds, and 2 were asked for: it keeps them, and is"
    ):
        assert comparison.compare_runs([replace(configs[0], rounds=2)], folder / "out") == folders[:1]
    return [Record.read(f) for f in folders]


@pytest.mark.slow
def test_a_row_is_what_its_runs_say(records):
    table = comparison.rows(records)
    assert [row["algorithm"] for row in table] == ["PFLEGO", "Local", "FedAvg-FT"]
    mine, local = (
        [list(r.per_client().values()) for r in records if r.config.algorithm == name] for name in ("pflego", "local")
    )
    row = table[0]
    scores = [100 * np.mean(values) for values in mine]
    assert row["accuracy"] == pytest.approx(np.mean(scores))
    assert row["accuracy ±"] == pytest.approx(statistics.over_seeds(scores)[1])
    own = [r for r in records if r.config.algorithm == "pflego"]
    assert row["worst 25 %"] == pytest.approx(np.mean([100 * r.worst(0.25) for r in own]))
    for r in own:
        for t in (1, 4):  # two of six clients, in each round
            values = [e.accuracy for e in r.evaluations if (e.round_num, e.model, e.split) == (t, "personal", "test")]
            only = Record(r.folder, r.config, r.history, [e for e in r.evaluations if e.round_num == t], r.summary)
            assert only.worst(0.25) == pytest.approx(np.sort(values)[:2].mean())
    assert row["Gini"] == pytest.approx(np.mean([statistics.gini(v) for v in mine]))
    took_part = [[r.per_client(clients="seen") for r in records if r.config.algorithm == name]
                 for name in ("pflego", "local")]  # fmt: skip
    ids = sorted(set().union(*took_part[0]) & set().union(*took_part[1]))  # one federation: a client is one pair
    both = [np.array([np.mean([s[i] for s in side if i in s]) for i in ids]) for side in took_part]
    assert row["pairs"] == len(ids)
    assert row["gain over Local"] == pytest.approx(100 * np.mean(both[0] - both[1]))
    assert row["worse than Local %"] == pytest.approx(100 * np.mean(both[0] < both[1]))
    assert row["p (Local)"] == pytest.approx(statistics.wilcoxon(*both).p_value, nan_ok=True)
    assert table[1]["gain over Local"] == 0 and math.isnan(table[1]["p (Local)"])
    assert (row["seeds"], row["rounds"], row["passes"]) == (2, 4, 2.0)
    with Run.open(records[0].folder) as run:
        clients = run.population.num_examples.mean(), run.population.num_classes.mean()
        joint, local = (visit_flops(Work(Passes(n, n), h), run.model, *clients) for n, h in ((1, 3), (2, 0)))
    assert row["GFLOP a visit"] == pytest.approx(joint / 1e9)  # tau = 4: three steps on the head, and the joint one
    assert table[1]["GFLOP a visit"] == pytest.approx(local / 1e9)  # two steps on all examples: 2 + 2 passes
    sent = [(h["bytes_down"] + h["bytes_up"]) / h["clients"] for r in records[:1] for h in r.history]
    assert row["bytes a visit"] == pytest.approx(sent[0]) and table[1]["bytes a visit"] == 0


@pytest.mark.slow
def test_one_seed_has_the_interval_over_clients_and_any_protocol_can_be_asked_for(records):
    (row,) = comparison.rows(records[:1], EV_LOCAL)
    found = records[0].result(EV_LOCAL)
    assert (row["accuracy"], row["accuracy ±"]) == (100 * found.accuracy, 100 * found.accuracy_ci95)
    assert "gain over Local" not in row
    assert math.isnan(comparison.rows(records[:1], protocol("global"))[0]["accuracy"])  # PFLEGO has no global model


@pytest.mark.slow
def test_a_protocol_may_be_given_by_its_name_and_a_run_once(records):
    assert comparison.rows(records, "EV-local") == comparison.rows(records, EV_LOCAL) != comparison.rows(records)
    assert records[0].result("EV-local") == records[0].result(EV_LOCAL)
    with pytest.raises(InvalidArgument, match="are the same run"):
        comparison.rows([*records, records[0]])


@pytest.mark.slow
def test_tables_in_every_format(records):
    table = comparison.rows(records)
    parsed = list(csv.DictReader(io.StringIO(comparison.text(table, "csv"))))
    assert [float(row["accuracy"]) for row in parsed] == [row["accuracy"] for row in table]
    markdown = comparison.text(table, "md")
    assert f"| {table[0]['accuracy']:.2f} " in markdown
    assert "mean over clients; mean of the last 10 evaluated rounds" in markdown
    assert len({line.count("|") for line in markdown.splitlines() if line.startswith("|")}) == 1
    with pytest.raises(ValueError, match="written as csv, md; found 'html'"):
        comparison.text(table, "html")


def test_rounds_are_those_of_the_shortest_seed_and_bytes_those_of_all_visits():
    found = [made(seed=seed).until(rounds) for seed, rounds in enumerate((12, 9, 11))]
    (row,) = comparison.rows(found)
    assert (row["seeds"], row["rounds"]) == (3, 9)
    lines = [line for record in found for line in record.history]
    sent = sum(line["bytes_down"] + line["bytes_up"] for line in lines)
    assert row["bytes a visit"] == pytest.approx(sent / sum(line["clients"] for line in lines)) and sent > 0
    medians = [np.median([line["seconds"] for line in record.history]) for record in found]
    assert row["s a round"] == pytest.approx(np.mean(medians))


def test_passes_and_operations_are_means_over_the_seeds():
    found = [made(seed=seed) for seed in range(3)]
    work = [({"forward": 1.0, "backward": 1.0}, 2e9), ({"forward": 3.0, "backward": 2.0}, 5e9)]
    for record, (passes, flops) in zip(found, work, strict=False):
        record.summary.update(passes=passes, flops=flops)
    for records in (found, found[::-1]):
        records[2 if records is found else 0].summary.clear()  # this one has not ended
        (row,) = comparison.rows(records)
        assert (row["passes"], row["GFLOP a visit"]) == (3.5, 3.5)
    (row,) = comparison.rows(found[2:])
    assert math.isnan(row["passes"]) and math.isnan(row["GFLOP a visit"])


def test_names_of_columns_are_known_before_the_runs():
    first = {0: 1, 1: 1}
    found = [made(name, took_part=first, metrics=("ece",)) for name in ("pflego", "local", "fedavg_ft")]
    configs = [record.config for record in found]
    names = [name for name in comparison.rows(found)[0] if name != "algorithm" and not name.endswith(" ±")]
    assert set(comparison.COLUMNS) <= set(names)
    comparison.check_columns([*names, "ece", "gain over Local (rounds=3)"], configs)
    for name in ("gain over FedAvg-FT", "gain over Local", "pairs", "worse than Local %", "brier"):
        with pytest.raises(ValueError, match=f"unknown column '{name}'"):
            comparison.check_columns([name], configs[:1])


def test_a_table_without_any_score_says_why():
    def read(*counts, split="test"):
        return SimpleNamespace(results=[SimpleNamespace(split=split, num_clients=n) for n in counts])

    assert told_unscored([read(0, 0), read(0)], EV_ALL) == "No client has test examples."
    assert told_unscored([read(3, split="validation")], EV_ALL) == "Nothing was scored on test examples."
    assert told_unscored([read(0, 0), read(0, 2)], EV_ALL) == ""


def test_methods_without_the_model_of_a_protocol_are_told():
    records = [made("pflego"), made("pflego", 1), made("fedavg"), made("local")]
    values = [row["accuracy"] for row in comparison.rows(records, protocol("global"))]
    assert [math.isnan(value) for value in values] == [True, False, True]
    assert comparison.notes(records, protocol("global"))[0] == (
        "By this protocol, PFLEGO and Local have no score: they have no global model."
    )
    assert not any("global model" in sentence for sentence in comparison.notes(records))


def test_a_round_that_no_validation_examples_can_choose_is_told():
    records = [made(), made("local")]
    assert comparison.notes(records, protocol("validated"), gains=False)[0].startswith("All clients had taken part")
    without = [
        replace(r, evaluations=[e._replace(num_examples=0, score=math.nan) if e.split == "validation" else e
                                for e in r.evaluations])
        for r in records
    ]  # fmt: skip
    assert math.isnan(comparison.rows(without, protocol("validated"))[0]["accuracy"])
    told = comparison.notes(without, protocol("validated"))
    assert told[0] == "No client has validation examples, by which this protocol chooses its round."
    assert not any("validation" in sentence for sentence in comparison.notes(without))


@pytest.mark.slow
def test_a_comparison_without_any_score_says_why(records):
    empty = [
        replace(record, evaluations=[e._replace(score=math.nan, num_examples=0) for e in record.evaluations])
        for record in records
    ]
    assert "No client has test examples." in comparison.notes(empty)
    assert not any("examples." in note for note in comparison.notes(records))


def test_conditions_that_differ_between_methods_are_told():
    pflego, local = made("pflego", participation=0.2), made("local", participation=1.0, dropout=0.3)
    (told,) = [note for note in comparison.notes([pflego, local]) if "conditions" in note]
    assert told == (
        "The methods were run under different conditions: participation 0.2 (PFLEGO), 1.0 (Local); dropout 0.0 "
        "(PFLEGO), 0.3 (Local)."
    )
    # What differs within a method is in its label, and all methods have both values here.
    every = [made(name, participation=p, folder=f"{name}{p}") for name in ("pflego", "local") for p in (0.2, 1.0)]
    assert not any("conditions" in note for note in comparison.notes([made("pflego"), made("local")]))
    assert not any("conditions" in note for note in comparison.notes(every))


@pytest.mark.parametrize(
    ("name", "value"),
    [("adapters", "lora:1"), ("head_init", "zeros"), ("init", "stax"), ("evaluate_every", 1)],
)
def test_every_entry_of_the_configuration_is_a_condition(name, value):
    first, second = made("fedavg"), made("fedprox", **{name: value})
    (told,) = [note for note in comparison.notes([first, second]) if "conditions" in note]
    assert f"{name} {getattr(first.config, name)} (FedAvg), {value} (FedProx)" in told


def test_the_noise_of_secure_sums_is_a_condition():
    found = [made(m, secure=True, secure_clip=1.0, secure_noise=z) for m, z in (("fedavg", 4.0), ("fedprox", 0.001))]
    (told,) = [note for note in comparison.notes(found) if "conditions" in note]
    assert told.endswith("conditions: secure_noise 4.0 (FedAvg), 0.001 (FedProx).")


def test_networks_of_two_files_are_two_conditions():
    files = [made(m, network="network.keras", network_hash=64 * h) for m, h in (("fedavg", "a"), ("fedprox", "b"))]
    (told,) = [note for note in comparison.notes(files) if "conditions" in note]
    assert f"network network.keras {8 * 'a'} (FedAvg), network.keras {8 * 'b'} (FedProx)" in told


def test_conditions_of_a_changed_copy_are_told_although_it_has_the_title_of_its_original():
    original, copy = made("pflego", participation=0.2), made("pflego", participation=1.0, folder="copy")
    copy.config.algorithm = "my_pflego.py:PFLEGO"
    copy.config.own_method = {"title": original.title, "sha256": 64 * "a", "function": "PFLEGO"}
    (told,) = [note for note in comparison.notes([original, copy]) if "conditions" in note]
    assert told == (
        "The methods were run under different conditions: participation 0.2 (PFLEGO), 1.0 (PFLEGO, "
        "my_pflego.py:PFLEGO)."
    )


def test_who_chooses_among_fewer_classes_is_told(tmp_path):
    """Clients have two of three classes: a head for the own ones has the easier task. With all classes, none has."""

    def clients(classes):
        return [
            (np.ones((12, 2), "float32"), np.array(classes[i % len(classes)] * (12 // len(classes[0])))) for i in (0, 1)
        ]

    def told(federation, **entries):
        data = {"federation": str(federation.path), "federation_hash": federation.hash, "clients": 2}
        found = [made(name, labels=labels, **data, **entries) for name, labels in LABELS.items()]
        return [note for note in comparison.notes(found) if "Labels" in note]

    few = Federation.from_clients(clients([[0, 1], [1, 2]]), out=tmp_path / "few")
    every = Federation.from_clients(clients([[0, 1, 2]]), out=tmp_path / "every")
    assert few.num_classes.tolist() == [2, 2] and every.num_classes.tolist() == [3, 3]
    (sentence,) = told(few)
    assert sentence.startswith(
        "Labels are local for PFLEGO and Local, whose heads choose among the client's own classes, and global for "
        "FedAvg, whose heads choose among all. The second is harder"
    )
    assert told(every) == [] and told(few, kind="regression") == []
    assert not any(
        "Labels" in note for note in comparison.notes([made("pflego", labels="local"), made("local", labels="local")])
    )


def test_a_shared_head_of_mixed_labels_is_told():
    (sentence,) = [
        n for n in comparison.notes([made(m, labels="local") for m in ("pflego", "fedavg")]) if "Labels" in n
    ]
    assert sentence == (
        "Labels are local for FedAvg, which share one head: each of its outputs stands for another class with each "
        "client."
    )


LABELS = {"pflego": "local", "local": "local", "fedavg": "global"}


def test_means_over_seeds_that_do_not_compare_are_told():
    """A run that was killed counts in its mean like a finished one; and a baseline may have fewer seeds."""
    whole = [made("fedper", seed) for seed in (0, 1)]
    assert not any("seeds" in note and "different" in note for note in comparison.notes(whole))
    evaluations = [score for score in whole[1].evaluations if score.round_num <= 4]
    killed = replace(whole[1], history=whole[1].history[:4], evaluations=evaluations)
    (note,) = [n for n in comparison.notes([whole[0], killed]) if "different" in n]
    assert note == (
        "The mean of FedPer is over seeds with different rounds: "
        f"{whole[0].rounds} of seed 0; 4 of seed 1. Curves end where the first does."
    )
    (note,) = [n for n in comparison.notes([*whole, made("local", 0)]) if "Gains and p" in n]
    assert note == "Gains and p of FedPer are over seed 0, which Local has too."
    (note,) = [n for n in comparison.notes([*whole, made("local", 2)]) if "Gains and p" in n]
    assert note == "Gains and p compare means over different seeds: Local 2; FedPer 0, 1."
    assert not any("Gains" in n for n in comparison.notes([*whole, made("local", 0)], gains=False))
    (note,) = [n for n in comparison.notes([*whole, made("fedavg", 1)]) if "different" in n]
    assert note == "Means are over different seeds: FedPer 0, 1; FedAvg 1."


def test_a_table_says_what_stands_behind_its_numbers():
    records = [made("fedper", seed) for seed in (0, 1)]
    table = comparison.rows(records, EV_ALL)
    assert "accuracy ±" in table[0] and comparison.INTERVALS in comparison.text(table, "md")
    assert comparison.INTERVALS in " ".join(str(tables.comparison_over_clients(table, EV_ALL).caption).split())


def test_a_column_that_is_unknown_is_told_beside_the_others_once():
    with pytest.raises(InvalidArgument, match="unknown column 'nonsense'") as refused:
        comparison.check_columns(["accuracy", "nonsense"], [RunConfig(dataset="digits")])
    assert str(refused.value).count("accuracy,") == 1


def test_runs_that_ended_early_are_told():
    """Why, and of which rounds their means are; those that diverged stood in a table like the others."""
    run = made("fedper", 0)
    stopped = replace(run, summary=run.summary | {"stopped": "round 13 diverged: ..."})
    scores = [score._replace(round_num=10 * score.round_num) for score in run.evaluations]
    short = replace(made("fedper", 1, rounds=12), evaluations=scores)
    short = replace(short, config=replace(short.config, rounds=99))
    told = comparison.notes([stopped, short])
    assert "FedPer, seed 0, stopped after round 12: round 13 diverged: ...." in told
    assert "FedPer, seed 1, has 12 of its 99 rounds. Its mean is of rounds 30 to 120." in told
    assert not any("rounds" in note for note in comparison.notes([run]))
    fewer = replace(short, config=replace(short.config, rounds=12))  # `tfpfl resume --rounds 12` of a run of 99
    assert comparison.notes([fewer])[-1] == (
        "FedPer, seed 1, has 12 rounds, and not all of the last ones were evaluated. Its mean is of rounds 30 to 120."
    )


def test_data_that_the_same_seed_has_split_in_two_ways_are_different_data():
    """Two files of one name, for example: they had been averaged as two seeds."""
    first, other = made("fedper", 0), made("fedper", 1, federation_hash="e" * 64)
    with pytest.raises(ValueError, match="were split by the same data seed, 0. So the data themselves were others"):
        check_comparable([first, other])
    check_comparable([first, made("fedper", 1, federation_hash="e" * 64, data_seed=1)])
    own = ((0, "e"), (1, "f"))  # splits that the user made
    check_comparable([made("fedper", seed, federation_hash=64 * h, partition="from_clients") for seed, h in own])
    assert len(by_data([first, other])) == 2 and len(by_data([first, made("fedper", 1)])) == 1


def test_who_had_taken_part_is_told_of_the_round_that_is_shown():
    runs = [made("fedper", 0, took_part={i: 1 + 2 * i for i in range(6)})]
    assert any(note.startswith("In the last round ") for note in comparison.notes(runs))
    best = comparison.notes(runs, PROTOCOLS["validated"])
    assert any(note.startswith("In the round that is shown ") for note in best)


def test_runs_on_other_data_are_refused_before_any_training(six_clients, tmp_path):
    """Also a folder that is not empty, and a configuration that does not fit, of whatever run comes last."""
    first = RunConfig(algorithm="fedavg", federation=str(six_clients.path), rounds=1)
    other = runs.federation(tmp_path / "federation", validation=0.4)
    (tmp_path / "out").mkdir()
    last = replace(first, algorithm="local")
    with pytest.raises(ValueError, match="cannot be compared: validation is 0.2 and 0.4"):
        comparison.compare_runs([first, replace(last, federation=str(other.path))], tmp_path / "out")
    with pytest.raises(ValueError, match="eta must be"):
        comparison.compare_runs([first, replace(last, hyperparameters={"eta": -1.0})], tmp_path / "out")
    (tmp_path / "full" / "local-s0").mkdir(parents=True)
    (tmp_path / "full" / "local-s0" / "mine.txt").touch()
    with pytest.raises(RunError, match="exists and is not empty"):
        comparison.compare_runs([first, last], tmp_path / "full")
    assert not any((tmp_path / "out").iterdir()) and len(list((tmp_path / "full").iterdir())) == 1


def test_new_runs_have_the_split_of_the_run_beside_them(tmp_path):
    """Another split had been trained, and then refused, as no client could be compared with itself."""
    common = {"clients": 6, "participation": 0.5, "rounds": 1}
    beside, out = tmp_path / "beside", tmp_path / "out"
    Run.create(RunConfig(algorithm="fedavg", seed=3, **common), beside).close()
    configs = [RunConfig(algorithm="local", seed=seed, **common) for seed in (0, 1)]
    comparison._choose_splits(configs, out, [beside])
    assert [config.data_seed for config in configs] == [3, 3]
    asked = RunConfig(algorithm="local", data_seed=0, **common)
    with pytest.raises(InvalidArgument, match="FedAvg and Local cannot be compared client by client.*--data-seed"):
        comparison.compare_runs([asked], out, beside=[beside])
    assert not out.exists()


def test_a_seed_in_which_a_client_diverged_is_not_left_out_of_an_index():
    """Jain's index and the Gini coefficient were those of the other seed, beside a mean that is infinite."""
    both = [made("fedper", seed) for seed in (0, 1)]
    diverged = [e._replace(score=math.inf) if e.client_id == 2 else e for e in both[1].evaluations]
    both[1] = replace(both[1], evaluations=diverged)
    both[1].__dict__["took_part"] = both[0].took_part
    (row,) = comparison.rows(both)
    assert row["accuracy"] == row["std"] == math.inf and math.isnan(row["Jain"]) and math.isnan(row["Gini"])


def test_a_protocol_that_needs_validation_examples_is_refused_before_training_without_any(tmp_path):
    """It had trained all runs, and then had shown '-' for every score."""
    config = RunConfig(algorithm="local", clients=6, participation=0.5, rounds=1, validation=0.0)
    with pytest.raises(InvalidArgument, match="chooses the round on validation examples.*none: raise --validation"):
        comparison.compare_runs([config], tmp_path / "out", protocol="validated")
    with pytest.raises(InvalidArgument, match="the protocol scores validation examples"):
        comparison.compare_runs([config], tmp_path / "out", protocol=EV_ALL._replace(split="validation"))
    assert not (tmp_path / "out").exists()


def test_small_p_values_and_nothing():
    assert comparison.shown("p (Local)", 3e-5) == "3.0e-05" and comparison.shown("p (Local)", 0.25) == "0.250"
    assert comparison.shown("accuracy", math.nan) == "-" and comparison.shown("Jain", 0.98765) == "0.9877"


@pytest.mark.slow
def test_a_folder_with_another_run_is_not_touched(records):
    out = records[0].folder.parent
    changed = RunConfig(
        algorithm="pflego",
        federation=records[0].config.federation,
        participation=0.5,
        rounds=4,
        labels="local",
        hyperparameters={"tau": 5},
    )
    before = runs.saved(records[0].folder)
    with pytest.raises(RunError, match="another configuration: .*tau is 4 and not 5.*. Take another --out"):
        comparison.compare_runs([changed], out)
    assert runs.saved(records[0].folder) == before
