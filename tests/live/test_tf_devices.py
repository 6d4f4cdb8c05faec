"""Devices that compute with TensorFlow: methods that have no exported program, over HTTP, as in the simulation."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from helpers.live import examples_of, in_threads, serving
from helpers.marks import slow_but
from helpers.toys import toy
from tflite_export.device import payload
from tflite_export.device.errors import InvalidInput
from tflite_export.device.live import wire
from tfpfl.algorithms import build_algorithm
from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation, load_source
from tfpfl.live.plan import Plan, Vectors, plan_of
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused, Rules
from tfpfl.live.tf_device import STATE, UPDATE, Pending, TfDevice, TfState
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run
from tfpfl.runs.store_content import pack
from tfpfl.runs.training import Training

WORK = {"eta": 0.05, "steps": 2}
METHODS = {  # a head, a whole model, nothing, a control variate and rates that follow a schedule
    "fedrep": {"hyperparameters": {"eta_h": 0.05, "eta_b": 0.05, "tau_h": 2, "tau_b": 2}},
    "ditto": {"hyperparameters": WORK | {"eta_p": 0.03, "steps_p": 2}},
    "fedavg": {"hyperparameters": WORK | {"batch_size": 8}},
    "fedprox": {"hyperparameters": WORK, "schedule": "inverse_sqrt:2"},
    "scaffold": {"hyperparameters": WORK},
    "fedper": {"hyperparameters": WORK},
    "fedbn": {"network": "conv_bn", "hyperparameters": WORK},
    "adapters": {"adapters": "lora:2", "hyperparameters": WORK},
    "fedas": {"hyperparameters": WORK | {"weighting": "examples"}},
}
OTHERS = (
    *("fedsgd", "feddyn", "fedavg_ft", "fedprox_ft", "fedbabu", "fedrecon", "lg_fedavg", "fedrod", "pfedme", "apfl"),
    *("per_fedavg", "layerwise", "knn_per", "fed3r", "fedala", "feddbe", "fedcp", "gpfl", "fedproto"),
)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three clients with 3, 2 and 4 classes of digits and 15 to 20 training examples each."""
    source, rng, clients = load_source("digits"), np.random.default_rng(0), {}
    for i, k in enumerate((3, 2, 4)):
        rows = rng.permutation(np.flatnonzero(source.y_train < k))[: 20 + 3 * i]
        clients[f"client {i}"] = source.x_train[rows], source.y_train[rows]
    out = tmp_path_factory.mktemp("three") / "digits"
    return Federation.from_clients(clients, out=out, name="digits", scale=1 / 16, validation=0.0)


def new_run(federation, folder, algorithm="fedper", **settings):
    given = {"participation": 0.67, "rounds": 3, "evaluate_every": 2, "network": "mlp200"}
    given |= METHODS.get(algorithm, {}) | settings
    config = RunConfig(algorithm=algorithm, federation=str(federation.path), **given)
    return Run.create(config, folder, federation)


def check(run, tmp_path, rounds):
    """The rounds of a run on devices are the simulated ones: theta, what clients keep, and all scores."""
    how = {"seed": run.config.seed, "evaluate_every": 2, "model_name": run.recipe.model_name}
    training, devices, clients = Training(run.algorithm, run.examples, **how), {}, run.population.client_ids.tolist()
    training.run(rounds)
    with serving(run, Rules(wait_for=len(clients))) as (address, _, tokens):

        def work(client):
            folder, examples = tmp_path / f"device{client}", examples_of(run, client)
            devices[client] = TfDevice(address, folder, examples, tokens[client])
            if devices[client].run(1):
                devices[client].close()  # it is stopped, and goes on with what it has kept
                devices[client] = TfDevice(address, folder, examples)
                devices[client].run()

        in_threads([lambda i=i: work(i) for i in clients])
    assert run.store.round_num == rounds
    assert away(run.training().server_state(), training.server_state()) < 1e-6
    for client, state in zip(clients, training.client_states(clients), strict=True):
        assert away(devices[client].current, state) < 1e-6
    expected = {(e.round_num, e.client_id, e.model, e.split): e for e in training.store.evaluations() if e.num_examples}
    found = {(e.round_num, e.client_id, e.model, e.split): e for e in run.store.evaluations()}
    assert found.keys() == expected.keys() and found
    for key, score in expected.items():
        assert found[key].num_examples == score.num_examples
        assert abs(found[key].score - score.score) < 1e-6 and abs(found[key].loss - score.loss) < 1e-5


def away(a, b):
    """The largest difference of two structures."""
    pairs = zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)
    return max((np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max() for x, y in pairs), default=0.0)


@pytest.mark.parametrize("algorithm", slow_but((*METHODS, *OTHERS), ci=("fedrep", "ditto", "fedavg")))
def test_a_live_run_with_tensorflow_is_the_simulated_one(three, tmp_path, algorithm):
    with new_run(three, tmp_path / "run", algorithm) as run:
        check(run, tmp_path, 3)


@pytest.mark.slow
def test_a_straggler_that_fedprox_drops_has_the_weight_0_on_its_device_and_in_the_server(three, tmp_path):
    """Its key of the round says that it is one. The server had refused it, in each round again."""
    drop = {"straggler": 0.5, "straggler_policy": "drop"}
    with new_run(three, tmp_path / "run", "fedprox", participation=1.0, hyperparameters=WORK | drop) as run:
        vectors = Vectors(run.algorithm, run.config.seed)
        weights = {vectors.weight(i, t) > 0 for i in range(3) for t in (1, 2, 3)}
        assert weights == {True, False}
        check(run, tmp_path, 3)


def test_a_plan_that_a_device_cannot_follow_is_refused_and_no_code_is_loaded_for_it(three, tmp_path):
    with new_run(three, tmp_path / "run") as run:
        about = json.loads(plan_of(run))
    assert Plan(json.dumps(about).encode(), 0, 20, 3).info.num_classes == 3
    config = about["config"]
    damaged = [about | {"config": config | wrong} for wrong in (
        {"algorithm": "os.py:system"},
        {"network": "net.py:make"},
        {"network": ["mlp200"]},
        {"own_method": {"name": "x"}},
        {"seed": -1},
    )]  # fmt: skip
    damaged += [about | {"example_shape": "wide"}, about | {"outputs": 0}, about | {"format": 2}, []]
    for wrong in (b"", *(json.dumps(each).encode() for each in damaged)):
        with pytest.raises(InvalidArgument):
            Plan(wrong, 0, 20, 3)


def test_an_update_that_cannot_be_read_was_never_sent_and_a_damaged_state_is_told_of(tmp_path):
    folder, state = tmp_path / "state", pack((np.ones(2, np.float32),))
    kept = TfState(folder)
    assert kept.sent() is None and kept.current("as at first") == "as at first"
    kept.keep_sent(Pending(3, b"body", state))
    assert kept.sent() == Pending(3, b"body", state)
    (folder / UPDATE).write_bytes((folder / UPDATE).read_bytes()[:-5])
    assert kept.sent() is None and not (folder / UPDATE).exists()
    (folder / STATE).write_bytes(state)
    assert kept.current((np.zeros(2, np.float32),))[0].tolist() == [1.0, 1.0]
    (folder / STATE).write_bytes(state[:-5])
    with pytest.raises(InvalidInput, match="the device begins anew"):
        kept.current((np.zeros(2, np.float32),))
    kept.close()


@pytest.mark.parametrize("labels", ["with a fraction", "one-hot"])
def test_labels_of_a_device_that_are_no_classes_are_refused(labels):
    """Fractions were cut off, and trained on without a word."""
    data = toy(dtype="float32")
    algorithm, info = build_algorithm("fedper", data.model, data.population), data.population.info(1)
    device = SimpleNamespace(algorithm=algorithm, info=info, client_id=1)
    x, y = data.data[1]
    np.testing.assert_array_equal(TfDevice._data(device, x, y.astype(np.int64)).y, y)
    wrong = {"with a fraction": y + 0.5, "one-hot": np.eye(3, dtype=int)[y]}[labels]
    with pytest.raises(InvalidArgument, match="client 1 has labels of shape .* they must be integers"):
        TfDevice._data(device, x, wrong)


@pytest.mark.slow
def test_runs_whose_visits_no_device_computes_say_why(three, tmp_path):
    cases = {
        "fedamp": ({"labels": "global"}, "sends each client a message of its own"),
        "feddane": ({"labels": "global"}, "a round of feddane has two exchanges"),
        "fedas": ({"hyperparameters": WORK}, "a client's weight in the sum depends on its examples"),
        "local": ({}, "what the server sends is empty"),
        "fedavg": ({"objective": "fair:1"}, "its objective is 'fair:1'"),
        "fedper": ({"aggregator": "median"}, "its aggregator is 'median'"),  # which sees single updates
        "pflego": ({"schedule": "cosine"}, "its rates follow the schedule"),
    }
    for algorithm, (settings, why) in cases.items():
        with new_run(three, tmp_path / algorithm, algorithm, **settings) as run:
            with pytest.raises(InvalidArgument, match=why):
                LiveRounds(run, Rules(), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fed3r", "fedproto"])
def test_int8_is_refused_where_clients_send_sums(three, tmp_path, algorithm):
    """In int8, a count of 1 beside a feature of 100 is read as 0.79, and one beside 300 as 0."""
    counted = payload.decode(payload.encode(np.array([100.0, 1.0], np.float32), "int8"))[1]
    assert abs(counted - 1) > 0.2
    with new_run(three, tmp_path / "run", algorithm, labels="global") as run:
        with pytest.raises(InvalidArgument, match="send sums that the server"):
            LiveRounds(run, Rules(payload="int8"), 0.0)
        LiveRounds(run, Rules(), 0.0)


@pytest.mark.slow
def test_a_wrong_weight_a_wrong_device_and_int8_where_clients_remember(three, tmp_path):
    with new_run(three, tmp_path / "run", "scaffold") as run:
        with pytest.raises(InvalidArgument, match="int8 would change it"):
            LiveRounds(run, Rules(payload="int8"), 0.0)
    with new_run(three, tmp_path / "other", participation=1.0) as run:
        rounds = LiveRounds(run, Rules(), 0.0)
        rounds.book.set_tokens({0: "token 0"})
        rounds.refresh()
        n = int(run.population.info(0).num_examples)
        about = {"protocol": 1, "examples": n, "classes": int(run.population.info(0).num_classes)}
        about["key"] = wire.Signer().public
        with pytest.raises(Refused, match="start it with --runtime tf") as refused:
            rounds.join("token 0", about, 0.0)
        assert refused.value.status == 409
        rounds.join("token 0", about | {"runtime": "tf"}, 0.0)
        told = {"theta": rounds.view.theta, "examples": n, "loss": 0.5, "scores": [], "weight": float(n)}
        zeros = payload.encode(np.zeros(rounds.update_size, np.float32))
        of_global = {"split": "test", "examples": 5, "loss": 0.5, "score": 0.5, "model": "global"}
        for wrong in ({"weight": 1e9}, {"weight": n + 1}, {"weight": None}, {"scores": [of_global]}):
            with pytest.raises((Refused, wire.WireError)):
                rounds.update(0, 1, wire.pack(told | wrong, zeros), 1.0)
        with pytest.raises(Refused, match="3 numbers came"):
            rounds.update(0, 1, wire.pack(told, payload.encode(np.zeros(3, np.float32))), 1.0)
        before, ones = rounds.algorithm.message(rounds._server), payload.encode(np.ones(rounds.update_size, np.float32))
        assert rounds.update(0, 1, wire.pack(told, ones), 1.0)["counted"]
        after = rounds.algorithm.message(rounds._stepped[1])  # the mean of the one update that came
        assert all(np.allclose(b - a, 1.0) for a, b in zip(before, after, strict=True))
        rounds.close()
