"""Clients that never trained, against loops written out; and that a run only lends its server's state."""

import csv
import hashlib
import io
import json
import math
import re
from dataclasses import replace
from functools import wraps

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner
from rich.console import Console

from helpers import small_runs as runs
from helpers.made_records import made
from helpers.marks import slow_but
from helpers.rounds import after_rounds
from helpers.toys import backbone, distance, initial_states, on_disk, visits_by_id
from tfpfl import Sampling, Simulation, SplitModel, build_algorithm
from tfpfl.algorithms import ALGORITHMS
from tfpfl.algorithms.contract import ClientData
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.optimizers import sgd
from tfpfl.algorithms.transforms import scheduled
from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.data import Federation
from tfpfl.data.randomness import client_key
from tfpfl.data.synthetic import synthetic_targets
from tfpfl.engines.scoring import Scorer
from tfpfl.models.losses import client_loss
from tfpfl.runs.run import Run
from tfpfl.studies import new_clients, plots, tables
from tfpfl.studies.new_clients import CannotAdapt, adapt_clients, adapt_new_clients, fine_tuning

EXAMPLES, CLASSES = (9, 14, 6, 12, 8, 11, 10, 13), (2, 3, 2, 4, 3, 4, 2, 3)
OLD, NEW = [0, 2, 3, 6, 7], [1, 4, 5]
EPOCHS = 4


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("data") / "federation", EXAMPLES, CLASSES)


def make(name, federation, client_ids=OLD, labels="local", slots=True, **hyperparameters):
    population = federation.population(Sampling("fixed", 0.6), labels, slots, client_ids)
    return build_algorithm(name, SplitModel(backbone("float32")), population, **hyperparameters)


def trained(algorithm, federation, rounds=3):
    """The server's state after some rounds of everyone in the population."""
    everyone = algorithm.population.client_ids.tolist()
    return after_rounds(Simulation(algorithm, federation), algorithm, [everyone] * rounds)[0]


def written_out(algorithm, federation, server, client, adapt, seed=5, round_num=7):
    """(accuracy, loss) after 0, ..., EPOCHS epochs of one client, eagerly; heads of K_i outputs for local labels."""
    everyone = federation.population(labels=algorithm.population.labels, shared_slots=True)
    x, y = (tf.constant(a) for a in federation.arrays(client, "train", labels=everyone.labels))
    key = tf.constant(client_key(seed, round_num, [client])[0])
    info = everyone.info(client)._replace(alpha=np.float32(0))
    data = ClientData(x, y, info, key)
    given = [tf.constant(client)] if algorithm.message_per_client else []
    carry = adapt.start(algorithm.message(server, *given), algorithm.init_client(info), data)
    test_x, test_y = federation.arrays(client, "test", labels=everyone.labels)
    scores = []
    for n in range(EPOCHS + 1):
        weights = adapt.model(carry)
        right = np.argmax(algorithm.model.logits(weights, test_x), 1) == test_y
        scores.append((right.mean(), float(client_loss(algorithm.model)(weights, test_x, test_y))))
        if n < EPOCHS:
            carry = adapt.epoch(carry, data, n)
    return np.array(scores).T


WORK = {
    "pflego": {"tau": 4, "beta": 0.3},
    "fedavg": {"eta": 0.2, "epochs": 1, "batch_size": 4, "momentum": 0.5},
    "ditto": {"eta": 0.2, "epochs": 1, "batch_size": 4, "momentum": 0.5},
    "local": {"eta": 0.2, "epochs": 1, "batch_size": 4, "momentum": 0.5},
    "fedfomo": {"eta": 0.2, "epochs": 1, "batch_size": 4, "candidates": 2},
    "pgfed": {"eta": 0.2, "epochs": 1, "batch_size": 4},
    "fedbabu": {"eta": 0.2, "epochs": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("labels", slow_but(["local", "global"], "local"))
@pytest.mark.parametrize("name", slow_but(WORK, "pflego", ci=("fedavg", "fedfomo")))
def test_every_client_and_epoch_is_as_written_out(federation, name, labels):
    """Three clients of other N_i and K_i, from files, in a graph."""
    algorithm = make(name, federation, labels=labels, **WORK[name])
    server = trained(algorithm, federation)
    found = adapt_clients(algorithm, federation, server, epochs=EPOCHS, seed=5, round_num=7)
    assert found.client_ids.tolist() == NEW and found.num_examples.tolist() == [6, 6, 8]
    assert found.accuracy.shape == found.loss.shape == (3, EPOCHS + 1)
    for i, client in enumerate(NEW):
        accuracy, loss = written_out(algorithm, federation, server, client, algorithm.adapt)
        np.testing.assert_allclose(found.loss[i], loss, atol=1e-4)
        np.testing.assert_allclose(found.accuracy[i], accuracy, atol=1e-6)
    assert found.loss[:, -1].mean() < found.loss[:, 0].mean()
    some = adapt_clients(algorithm, federation, server, [5, 1], epochs=EPOCHS, seed=5, round_num=7, threads=1)
    assert some.client_ids.tolist() == [5, 1] and distance(some.loss, found.loss[[2, 0]]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["pflego", "ditto", "fedavg"], "pflego"))
def test_before_the_first_epoch_it_is_the_personal_model_of_who_never_came(federation, name):
    """As the evaluation scores it, in a population that has everyone."""
    algorithm, everyone = make(name, federation, **WORK[name]), make(name, federation, None, **WORK[name])
    server = trained(algorithm, federation)
    found = adapt_clients(algorithm, federation, server, epochs=0)
    states = initial_states(everyone, everyone.population)
    visits = visits_by_id(everyone.population, NEW, 1)
    scores = Scorer(everyone, federation, ["test"])(server, [states[i] for i in NEW], visits)
    np.testing.assert_allclose(found.loss[:, 0], [s["test_loss"] for s in scores], atol=1e-5)
    np.testing.assert_allclose(found.accuracy[:, 0] * found.num_examples, [s["test_correct"] for s in scores])


@pytest.mark.slow
def test_no_graph_for_every_client(federation, monkeypatch):
    graphs = []

    def recorded(function):
        graphs.append(tf.function(function, autograph=False, reduce_retracing=True))
        return graphs[-1]

    algorithm = make("pflego", federation, client_ids=[0, 3], **WORK["pflego"])
    server = trained(algorithm, federation, rounds=1)
    monkeypatch.setattr(new_clients, "relaxed", recorded)
    found = adapt_clients(algorithm, federation, server, epochs=2, threads=1)
    assert len(found.client_ids) == 6 and len(set(CLASSES[i] for i in found.client_ids)) == 3
    assert graphs[-1].experimental_get_tracing_count() == 1


@pytest.mark.slow
def test_the_protocol_of_pgfed_is_the_same_for_all(federation):
    """SGD with momentum 0.9 on the whole global model; Ditto's is FedAvg's; Local starts from w^0."""
    work = {"eta": 0.1, "epochs": 1, "batch_size": 4}
    curves = {}
    for name in ("fedavg", "ditto", "fedavg_ft", "pflego", "local"):
        algorithm = make(name, federation, **(WORK["pflego"] if name == "pflego" else work))
        server = trained(algorithm, federation)
        adapt = fine_tuning(algorithm, eta=0.05, batch_size=4)
        curves[name] = adapt_clients(algorithm, federation, server, epochs=EPOCHS, adapt=adapt).loss
        by_hand = [written_out(algorithm, federation, server, i, adapt, 0, 0)[1] for i in NEW]
        np.testing.assert_allclose(curves[name], by_hand, atol=1e-4)
        if name in ("fedavg", "local"):
            same = make(name, federation, **(work | {"eta": 0.05, "momentum": 0.9}))
            own = adapt_clients(same, federation, server, epochs=EPOCHS)
            np.testing.assert_allclose(curves[name][:, :2], own.loss[:, :2], atol=1e-5)
            assert np.abs(curves[name][:, 2:] - own.loss[:, 2:]).max() > 1e-3  # own: the momentum goes on
    np.testing.assert_allclose(curves["ditto"], curves["fedavg"], atol=1e-5)
    np.testing.assert_allclose(curves["fedavg_ft"], curves["fedavg"], atol=1e-5)
    pflego = make("pflego", federation, **WORK["pflego"])
    server = trained(pflego, federation)
    head_only = adapt_clients(pflego, federation, server, epochs=EPOCHS)
    np.testing.assert_allclose(curves["pflego"][:, 0], head_only.loss[:, 0], atol=1e-5)
    weights = fine_tuning(pflego, eta=0.05)
    visit = visits_by_id(federation.population(), [1], 1)[0]
    data = ClientData(*(tf.constant(a) for a in federation.arrays(1)), visit.info, tf.constant(visit.key))
    carry = weights.start(server.theta, pflego.init_client(visit.info), data)
    moved = weights.model(weights.epoch(carry, data, 0))
    assert distance(moved.theta, server.theta) > 1e-4


@pytest.mark.slow
def test_clients_that_train_alone_start_from_the_first_model_also_where_rates_follow_a_schedule(federation):
    """The number of the round is all that is sent then."""
    plain = make("local", federation, eta=0.1, epochs=1, batch_size=4)
    found = []
    for algorithm in (plain, scheduled(plain, "inverse:1")):
        adapt = fine_tuning(algorithm, eta=0.05, batch_size=4)
        found.append(adapt_clients(algorithm, federation, algorithm.init_server(), epochs=2, adapt=adapt).loss)
    np.testing.assert_allclose(*found, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 1000])
def test_the_protocol_of_pgfed_starts_its_momentum_anew_in_every_epoch(federation, batch_size):
    """One batch an epoch: then a momentum of 0.9 is none. Without mini-batches, an epoch is a step: it goes on."""
    algorithm = make("fedavg", federation, eta=0.1)
    server = trained(algorithm, federation, rounds=1)
    found, plain = (
        adapt_clients(
            algorithm, federation, server, [1], epochs=4, adapt=fine_tuning(algorithm, eta=0.05, momentum=m, **options)
        ).loss
        for m, options in ((0.9, {"batch_size": batch_size}), (0.0, {}))
    )
    np.testing.assert_allclose(found[:, :2], plain[:, :2], atol=1e-5)
    same = np.abs(found - plain).max() < 1e-5
    assert same == (batch_size is not None)


@pytest.mark.parametrize("name", ["fedamp", "heurfedamp", "lg_fedavg", "fedfomo"])
def test_who_cannot(federation, name):
    algorithm = make(name, federation, steps=1)
    server = algorithm.init_server()
    adapt = fine_tuning(algorithm, eta=0.1, name=name)
    why = f"{name} cannot be fine-tuned with --protocol global: .* neither a common model nor a common backbone[.]"
    with pytest.raises(CannotAdapt, match=why + ("$" if algorithm.adapt is None else " Use --protocol own[.]$")):
        adapt_clients(algorithm, federation, server, epochs=1, adapt=adapt)
    if algorithm.adapt is None:
        with pytest.raises(CannotAdapt, match="only by taking part in rounds"):
            adapt_clients(algorithm, federation, server)


@pytest.mark.slow
def test_clients_without_examples_of_the_split(federation, tmp_path):
    algorithm = make("pflego", federation, **WORK["pflego"])
    found = adapt_clients(algorithm, federation, trained(algorithm, federation, 1), epochs=2, split="validation")
    assert np.isnan(found.accuracy).all() and np.isnan(found.loss).all() and np.isnan(found.means).all()
    found = found._replace(client_names=["=1", *found.client_names[1:]])
    new_clients.write_csv([found], tmp_path / "all.csv")
    with open(tmp_path / "all.csv", newline="") as file:
        named = dict.fromkeys((row["client"], row["name"]) for row in csv.DictReader(file))
    assert list(named) == [(str(i), "'=1" if n == 0 else str(i)) for n, i in enumerate(found.client_ids)]
    tables.new_clients([found])


def test_refusals(federation, tmp_path):
    pflego = make("pflego", federation, **WORK["pflego"])
    server = pflego.init_server()
    for ids, message in (
        ([], "no client is new: all 8"),
        ([1, 8], "client 8 is not in the federation"),
        ([1, 2], "client 2 is not new: it is one of the population"),
    ):
        with pytest.raises(ValueError, match=message):
            adapt_clients(pflego, federation, server, ids)
    everyone = make("pflego", federation, None, **WORK["pflego"])
    with pytest.raises(ValueError, match="no client is new.*Keep some out"):
        adapt_clients(everyone, federation, everyone.init_server())
    with pytest.raises(ValueError, match="epochs must be at least 0, found -1"):
        adapt_clients(pflego, federation, server, epochs=-1)
    with pytest.raises(ValueError, match="eta must be a finite number"):
        fine_tuning(pflego, eta=-1.0)
    few = on_disk(tmp_path / "few", EXAMPLES[:3], CLASSES[:3])
    wide = on_disk(tmp_path / "wide", EXAMPLES[:4], CLASSES[:4])
    algorithm = build_algorithm("fedavg", SplitModel(backbone("float32")), few.population(shared_slots=True), steps=1)
    with pytest.raises(ValueError, match="client 3 has 4 classes, but a head that clients share has 3 outputs"):
        adapt_clients(algorithm, wide, algorithm.init_server())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Runs that kept two of six clients out, and one that did not."""
    tmp_path = tmp_path_factory.mktemp("runs")
    data = runs.federation(tmp_path / "federation")
    sgd = {"eta": 0.2, "steps": 3}
    asked = {
        "pflego": {"tau": 4, "beta": 0.3},
        "ditto": sgd,
        "fedamp": sgd | {"eta": 0.1},
        "fedper": {"eta": 0.1, "epochs": 1, "batch_size": 4},
    }
    for name, hyperparameters in asked.items():
        more = {"algorithm": name, "hyperparameters": hyperparameters, "rounds": 1, "new_clients": 2}
        runs.train(tmp_path / name, data, **more)
    runs.train(tmp_path / "everyone", data, rounds=1)
    return tmp_path


def contents(folder) -> dict:
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.slow
def test_of_a_run(folders):
    with Run.open(folders / "pflego") as run:
        new = np.setdiff1d(range(6), run.population.client_ids)
        found = adapt_new_clients(run, epochs=3)
        assert found.client_ids.tolist() == new.tolist() and len(new) == 2
        assert (found.protocol, found.split, found.name) == ("own", "test", str(folders / "pflego"))
        server = run.training().server_state()
        again = adapt_clients(run.algorithm, run.federation, server, epochs=3, round_num=2)
        np.testing.assert_array_equal(found.loss, again.loss)
        with pytest.raises(ValueError, match="pflego has no hyperparameter eta: say with which rate"):
            adapt_new_clients(run, protocol="global")
        assert adapt_new_clients(run, epochs=1, protocol="global", eta=0.1).protocol == "global"
        with pytest.raises(ValueError, match="unknown protocol 'globl'; did you mean 'global'"):
            adapt_new_clients(run, protocol="globl")
        with pytest.raises(ValueError, match="eta and batch_size are for the protocol 'global'"):
            adapt_new_clients(run, eta=0.1)


@pytest.mark.slow
def test_the_mini_batches_of_new_clients_are_those_of_the_round_after_the_last(folders):
    with Run.open(folders / "fedper") as run:
        server = run.training().server_state()
        found = adapt_new_clients(run, epochs=2).loss
        other, next_round = (
            adapt_clients(run.algorithm, run.examples, server, epochs=2, seed=run.config.seed, round_num=t).loss
            for t in (1, 2)
        )
        np.testing.assert_array_equal(found, next_round)
        assert np.abs(found - other)[:, 1:].min() > 1e-6


@pytest.mark.slow
def test_a_method_that_copies_its_weights_can_be_fine_tuned(folders, monkeypatch):
    """A copy of the common backbone is the common backbone."""
    row = ALGORITHMS["pflego"]

    @wraps(row.builder)
    def copying(*args, **kwargs):
        algorithm = row.builder(*args, **kwargs)

        def personal_model(message, state, data):
            return tf.nest.map_structure(tf.identity, algorithm.personal_model(message, state, data))

        adapt = adaptation(algorithm.model, personal_model, sgd(0.3), part="head")
        return algorithm._replace(personal_model=personal_model, adapt=adapt)

    with Run.open(folders / "pflego") as run:
        expected = adapt_new_clients(run, epochs=2, protocol="global", eta=0.1)
    monkeypatch.setitem(ALGORITHMS, "pflego", replace(row, builder=copying))
    with Run.open(folders / "pflego") as run:
        found = adapt_new_clients(run, epochs=2, protocol="global", eta=0.1)
    np.testing.assert_array_equal(found.loss, expected.loss)


def tfpfl(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_runs_whose_new_clients_are_others_are_told_before_any_adapts(monkeypatch):
    """Their scores stood side by side without a word; and a run without new clients ended the command at its place."""
    configs = {
        "a": made("pflego", new_clients=2),
        "b": made("ditto", new_clients=2),
        "other": made("pflego", new_clients=2, partition_args={"K": 5}),
        "none": made("pflego"),
    }
    monkeypatch.setattr(new_clients, "read_config", lambda folder: configs[folder].config)
    new_clients.check_same_clients(["a", "b"])
    with pytest.raises(
        InvalidArgument, match="a and other cannot be compared: partition_args is {'K': 2} and {'K': 5}"
    ):
        new_clients.check_same_clients(["a", "b", "other"])
    with pytest.raises(InvalidArgument, match="no client is new in none: .* Train with --new-clients N"):
        new_clients.check_same_clients(["a", "none"])


@pytest.mark.slow
def test_the_command(folders, tmp_path):
    before = contents(folders)
    names = ("pflego", "fedamp", "ditto", "fedper")
    output = tfpfl("new-clients", *(folders / name for name in names), "--epochs", 3,
                   "--csv", tmp_path / "all.csv", "--plot", tmp_path / "curves.png")  # fmt: skip
    assert contents(folders) == before  # nothing of the runs has changed
    assert "fedamp is left out: a client of this method becomes personal only by" in output
    with open(tmp_path / "all.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2 * 4 and {row["epoch"] for row in rows} == {"0", "1", "2", "3"}
    mine = [float(r["accuracy"]) for r in rows if r["run"] == str(folders / "ditto") and r["epoch"] == "3"]
    first, second = mine  # Student's interval of two clients: t(1) times half their distance
    assert f"{100 * np.mean(mine):.2f} ± {50 * math.tan(math.pi * 0.475) * abs(first - second):.2f}" in output
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    output = tfpfl("new-clients", folders / "ditto", "--protocol", "global", "--epochs", 1)
    assert "protocol 'global'" in output
    assert "no client is new" in tfpfl("new-clients", folders / "everyone", code=1)
    assert "new clients cannot adapt to any of these runs" in tfpfl("new-clients", folders / "fedamp", code=1)
    assert "has no hyperparameter eta" in tfpfl("new-clients", folders / "pflego", "--protocol", "global", code=1)
    output = tfpfl("new-clients", folders / "fedamp", "--protocol", "global", "--epochs", 1, code=1)
    assert "fedamp cannot be fine-tuned with --protocol global" in output
    assert "is not a run folder" in tfpfl("new-clients", tmp_path / "nowhere", code=1)


@pytest.mark.slow
def test_a_run_without_rounds(folders, tmp_path):
    with Run.open(folders / "pflego") as run:
        data = run.federation
    Run.create(runs.config(rounds=1, new_clients=2), tmp_path / "run", data).close()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["new_clients"] == 2
    assert "has no rounds yet" in tfpfl("new-clients", tmp_path / "run", code=1)


@pytest.mark.slow
def test_a_large_federation_of_any_data_can_be_new(tmp_path):
    """Others than those of the run: two new clients join the same five."""
    five = on_disk(tmp_path / "five", EXAMPLES[:5], CLASSES[:5])
    seven = on_disk(tmp_path / "seven", EXAMPLES[:7], CLASSES[:7])
    algorithm = build_algorithm("pflego", SplitModel(backbone("float32")), five.population(), **WORK["pflego"])
    found = adapt_clients(algorithm, seven, trained(algorithm, five), epochs=2)
    assert found.client_ids.tolist() == [5, 6]


def test_a_client_that_diverges_while_it_adapts_counts_as_the_worst(tmp_path):
    """A number that is none would look like a client without examples, which is left out of the means."""
    drawn = list(synthetic_targets("real", 6, 20).clients.values())
    drawn[4] = (1e4 * drawn[4][0], drawn[4][1])
    federation = Federation.from_clients(drawn, targets="real", out=tmp_path / "f", validation=0.0)
    linear = tf.keras.Sequential([tf.keras.Input((8,)), tf.keras.layers.Dense(4)])
    population = federation.population(Sampling("fixed", 1.0), "global", client_ids=[0, 1, 2])
    algorithm = build_algorithm("fedavg", SplitModel(linear, kind="regression"), population, eta=0.01)
    tuning = fine_tuning(algorithm, eta=0.01)
    found = adapt_clients(algorithm, federation, algorithm.init_server(), epochs=20, adapt=tuning)
    assert found.client_ids.tolist() == [3, 4, 5] and np.isfinite(found.score[[0, 2]]).all()
    assert np.isfinite(found.score[:, 0]).all() and found.score[1, -1] == found.loss[1, -1] == np.inf
    assert not np.isnan(found.score).any() and np.isfinite(found.means[0]) and found.means[-1] == np.inf
    told = io.StringIO()
    Console(file=told, width=200).print(tables.new_clients([found]))
    assert re.search(r"3 +\S+ ± \S+ .* inf *\n", told.getvalue())  # the number of clients, before, at the end
    assert "diverged" in plots.new_clients([found]).legends[0].get_texts()[0].get_text()
    new_clients.write_csv([found], tmp_path / "all.csv")
    assert float(list(csv.DictReader((tmp_path / "all.csv").open()))[41]["rmse"]) == np.inf
