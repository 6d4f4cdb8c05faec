"""Runs on places: the server has no client's sizes; devices say them when they join, also while the run goes on."""

import json
import warnings

import numpy as np
import pytest
from click.testing import CliRunner

from helpers.live import EXACT, device, in_threads, same_models, serving, simulated
from tflite_export.convert.program import flatten
from tflite_export.device import payload
from tflite_export.device.live import wire
from tflite_export.device.live.client import Answer, LiveDevice, ServerError
from tflite_export.device.live.rests import Rests
from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.data.manifest import FederationError
from tfpfl.data.places import make_places
from tfpfl.engines import Simulation, visits
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused, Rules
from tfpfl.live.secure_rounds import SecureRounds
from tfpfl.live.watch import Watch
from tfpfl.runs.config import RunConfig, RunError
from tfpfl.runs.run import Run


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Twelve places for clients with digits."""
    out = tmp_path_factory.mktemp("places") / "digits"
    return make_places(out, clients=12, example_shape=(8, 8, 1), class_names=10, scale=1 / 16)


def new_run(places, folder, **settings):
    given = {"hyperparameters": EXACT, "participation": 1.0, "rounds": 3, "evaluate_every": 0} | settings
    return Run.create(RunConfig(federation=str(places.path), network="mlp200", **given), folder, places)


def opened(run, now=0.0, **rules):
    rounds = LiveRounds(run, Rules(**{"awake": 1e6, "deadline": 10, "wait_for": 2} | rules), now)
    rounds.book.set_tokens({i: f"token {i}" for i in run.population.client_ids.tolist()})
    rounds.refresh()
    return rounds


def join(rounds, client, examples, classes=2, **other):
    about = {"protocol": 1, "examples": examples, "classes": classes, "key": wire.Signer().public}
    return rounds.join(f"token {client}", about | other, 0.0)


def send(rounds, client, examples, value):
    gradient = np.full(rounds.model.num_backbone_weights, value, np.float32)
    about = {"theta": rounds.view.theta, "examples": examples, "loss": 0.5, "scores": []}
    return rounds.update(client, rounds.view.round_num, wire.pack(about, payload.encode(gradient)), 1.0)


def moved(run):
    return flatten(run.algorithm.message(run.training().server_state())) - flatten(run.model.initial_theta)


def test_who_joins_counts_from_the_next_round_and_the_weights_are_those_of_who_counts(places, tmp_path):
    with new_run(places, tmp_path / "run") as run:
        rounds = opened(run)
        assert join(rounds, 3, 30)["client"] == 3
        assert rounds.view.kind == wire.NOTHING  # two shall join first
        join(rounds, 7, 10, classes=4)
        assert rounds.view.kind == wire.VISIT and rounds.view.waiting == {3, 7}
        join(rounds, 5, 60)  # while round 1 is open
        send(rounds, 3, 30, 1e-3)
        rounds.close()
        rounds = opened(run, 2.0)  # as after kill -9
        assert rounds.view.waiting == {7} and rounds.ids == [3, 7]
        with pytest.raises(Refused, match="has 10 examples"):
            send(rounds, 7, 11, 3e-3)
        with pytest.raises(Refused, match="not invited"):
            send(rounds, 5, 60, 3e-3)
        send(rounds, 7, 10, 3e-3)
        assert rounds.view.kind == wire.SCORE and rounds.view.waiting <= {3, 7}
        first = moved_of(rounds)
        assert np.allclose(first, -0.01 * (0.75 * 1e-3 + 0.25 * 3e-3), rtol=1e-3)  # I = r: rho sum alpha_i g_i
        rounds.tick(100.0)
        assert rounds.view.round_num == 2 and rounds.view.waiting == {3, 5, 7}
        for client, examples in ((3, 30), (5, 60), (7, 10)):
            send(rounds, client, examples, 1e-3 * client)
        rounds.tick(200.0)
        step = -0.01 * (0.3 * 3e-3 + 0.6 * 5e-3 + 0.1 * 7e-3)
        assert np.allclose(moved(run) - first, step, rtol=1e-3)
        kept = json.loads((run.folder / "enrolled.json").read_text())
        assert kept == {
            "3": {"examples": 30, "classes": 2, "since": 1},
            "5": {"examples": 60, "classes": 2, "since": 2},
            "7": {"examples": 10, "classes": 4, "since": 1},
        }
        rounds.close()
        summary = run.write_summary()
        assert summary["clients_seen"] == 3 and summary["client_visits"] == 5
        assert summary["flops"] is None  # nobody knows the examples of a visit; the places' 2 are none


def moved_of(rounds):
    """What theta has moved by after the step, before the round is saved."""
    return flatten(rounds.algorithm.message(rounds._stepped[1])) - flatten(rounds.model.initial_theta)


def test_what_a_device_says_of_itself_is_checked(places, tmp_path):
    with new_run(places, tmp_path / "run") as run:
        rounds = opened(run, most_examples=500, wait_for=12)
        for examples, classes, why in (
            (0, 2, "must have 1 to 500 training examples, and this one has 0"),
            (501, 2, "this one has 501"),
            (30, 0, "1 to 10 classes"),
            (30, 11, "1 to 10 classes"),
        ):
            with pytest.raises(Refused, match=why) as refused:
                join(rounds, 2, examples, classes)
            assert refused.value.status == 409
        with pytest.raises(wire.WireError):
            join(rounds, 2, "many")
        join(rounds, 2, 30)
        join(rounds, 2, 30)  # with another key
        with pytest.raises(Refused, match="--runtime tf"):
            join(rounds, 4, 30, runtime="tf")
        assert not (run.folder / "enrolled.json").read_text().count('"4"')
        rounds.close()
        (run.folder / "enrolled.json").write_text('{"2": {"examples": 30}}')
        with pytest.raises(InvalidArgument, match="damaged"):
            opened(run)


def test_sizes_may_change_until_the_client_counts(places, tmp_path):
    """A device may be told only after it has joined that its data cannot be used: its place was lost with its sizes."""
    with new_run(places, tmp_path / "run") as run:
        rounds, made = opened(run), []
        rounds.on_enrolled = lambda info: made.append((int(info.num_examples), float(info.alpha)))
        join(rounds, 2, 30)
        join(rounds, 2, 29, classes=3)
        kept = json.loads((run.folder / "enrolled.json").read_text())
        assert kept["2"] == {"examples": 29, "classes": 3, "since": None}
        assert made == [(30, 1), (29, 1)]
        join(rounds, 5, 10)  # the second device: round 1 opens
        assert int(rounds.info(2).num_examples) == 29 and rounds.view.kind == wire.VISIT
        kept = (run.folder / "enrolled.json").read_bytes()
        with pytest.raises(Refused, match="these stay what they were, since it counts from round 1 on"):
            join(rounds, 2, 30, classes=3)
        join(rounds, 2, 29, classes=3)
        assert (run.folder / "enrolled.json").read_bytes() == kept
        rounds.close()


def test_sizes_may_change_while_a_secure_round_waits_for_more_devices(places, tmp_path):
    """A device that corrected its data was told that it counts from round 1 on, which had not begun."""
    with new_run(places, tmp_path / "run") as run:
        rounds = SecureRounds(run, Rules(secure=True, awake=1e6), 0.0)
        rounds.book.set_tokens({i: f"token {i}" for i in range(12)})
        rounds.refresh()
        join(rounds, 2, 30, secure=1)
        join(rounds, 4, 20, secure=1)
        assert rounds.view.kind == wire.NOTHING  # a sum has three clients
        join(rounds, 2, 10, secure=1)
        join(rounds, 7, 10, secure=1)
        assert rounds.view.kind == wire.KEYS
        weights = {i: rounds.view.settings[i]["weight"] for i in (2, 4, 7)}
        assert weights == pytest.approx({2: 0.25, 4: 0.5, 7: 0.25})
        with pytest.raises(Refused, match="since it counts from round 1 on"):
            join(rounds, 2, 30, secure=1)
        rounds.close()


def test_runs_that_cannot_be_on_places(places, tmp_path):
    with new_run(places, tmp_path / "run") as run:
        with pytest.raises(RunError, match="tfpfl serve"):
            run.train()
        with pytest.raises(InvalidArgument, match="the run has 12 clients"):
            opened(run, wait_for=13)
    shared = {"labels": "local", "algorithm": "fedavg", "hyperparameters": {}}
    with new_run(places, tmp_path / "shared", **shared) as run, pytest.raises(InvalidArgument, match="--labels global"):
        opened(run)
    with new_run(places, tmp_path / "range", sampling="range", sampling_range=(2, 4)) as run:
        rounds = opened(run, wait_for=1)
        for client in range(3):
            join(rounds, client, 30)
            assert rounds.view.kind == wire.NOTHING  # a cohort may have four
        join(rounds, 3, 30)
        assert rounds.view.kind == wire.VISIT
        rounds.close()
    for given, why in (
        ({"dtype": "text"}, "dtype must be"),
        ({"scale": np.nan}, "finite"),
    ):
        how = {"clients": 2, "example_shape": (8, 8, 1), "class_names": 10} | given
        with pytest.raises(InvalidArgument, match=why):
            make_places(tmp_path / "new", **how)
    with pytest.raises(FederationError, match="exists already"):
        make_places(places.path, clients=2, example_shape=(8, 8, 1), class_names=10)


@pytest.mark.parametrize(
    "given, why",
    [
        ({"clients": 0}, "clients must be at least 1"),
        ({"clients": 2.5}, "clients must be a whole number"),
        ({"example_shape": 28}, "example_shape must be a list"),
        ({"example_shape": (2.5,)}, "example_shape must be whole numbers"),
        ({"class_names": 1}, "2 to 1,000,000 classes; found 2 clients, shape \\(8,\\) and 1 classes"),
        ({"class_names": 10**9}, "and 1000000000 classes"),
        ({"class_names": "ab"}, "class_names must be a list"),
        ({"class_names": {"a", "b"}}, "class_names must be a list"),
        ({"class_names": ["a", "b", ""]}, "class 2 has an empty name"),
        ({"class_names": ["a", None]}, "None as number 1, which is no name"),
        ({"shift": None}, "shift must be a number"),
    ],
)
def test_what_places_cannot_be_is_refused_before_a_run_is_made_on_them(tmp_path, given, why):
    """An empty name was refused when a device wanted its bundle; "ab" was two classes, and 10**9 took all memory."""
    with pytest.raises(InvalidArgument, match=why):
        make_places(tmp_path / "new", **{"clients": 2, "example_shape": (8,), "class_names": 10} | given)
    made = make_places(tmp_path / "new", clients=2, example_shape=(8,), class_names=np.int64(3))
    assert made.class_names == ["0", "1", "2"]


def test_secure_rounds_on_places_count_with_the_most_examples_that_a_device_may_say(places, tmp_path):
    """Otherwise one device could say a number with which no sum fits in 32 bits, and the run could never go on."""
    with new_run(places, tmp_path / "run") as run:
        with pytest.raises(InvalidArgument, match="a smaller --most-examples helps"):
            SecureRounds(run, Rules(secure=True, most_examples=2**31 // 12 + 1), 0.0)
        rounds = SecureRounds(run, Rules(secure=True, most_examples=10**8, wait_for=3, awake=1e6), 0.0)
        rounds.book.set_tokens({i: f"token {i}" for i in range(12)})
        rounds.refresh()
        for client in range(12):
            join(rounds, client, 10**8, secure=1)
        assert rounds.view.kind == wire.KEYS
        rounds.close()


def test_the_command_that_makes_places(tmp_path):
    out = tmp_path / "places"
    given = ["places", str(out), "--clients", "5", "--shape", "28x28x1"]
    found = CliRunner().invoke(main, [*given, "--classes", "cat,dog"])
    assert found.exit_code == 0 and "5 places for devices with examples 28x28x1 of 2 classes" in found.output
    for wrong in (["--classes", "1"], ["--classes", "2", "--shape", "28 x 28"]):
        found = CliRunner().invoke(main, ["places", str(tmp_path / "other"), *given[2:], *wrong])
        assert found.exit_code in (1, 2) and "Traceback" not in found.output
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("dtype", "scale"), [("uint8", 1 / 255), ("int32", 1), ("float32", 1)])
def test_the_default_scale_of_places_warns_of_nothing(dtype, scale, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = make_places(tmp_path / "places", clients=3, example_shape=(4, 4, 1), class_names=10, dtype=dtype)
    assert made.manifest["preprocessing"] == {"scale": scale, "shift": 0}


@pytest.mark.slow
def test_devices_that_nobody_knew_train_as_in_a_simulation_of_their_data(make_run, places, tmp_path):
    """Seven devices are there from the start, three join while round 1 is scored: the rounds are those of an engine in
    which seven clients, and then ten, are the population."""
    with make_run(tmp_path / "known", participation=1.0) as known, new_run(places, tmp_path / "run", rounds=4) as run:
        ids, devices, first = known.population.client_ids.tolist(), {}, list(range(7))

        with serving(run, Rules(wait_for=7, awake=1e6)) as (address, rounds, tokens):

            def work(client, most):
                if client not in devices:
                    devices[client] = device(known, address, tmp_path, client, tokens[client])
                devices[client].run(most)

            in_threads([lambda i=i: work(i, 1) for i in first])
            late = [i for i in ids if i not in first]
            for client in late:  # they join while the end of round 1 waits for the others' scores
                devices[client] = device(known, address, tmp_path, client, tokens[client])
            assert rounds.view.round_num == 1 and rounds.view.kind == wire.SCORE
            in_threads([lambda i=i: work(i, None) for i in ids])
        since = {int(i): about["since"] for i, about in json.loads((run.folder / "enrolled.json").read_text()).items()}
        assert since == {i: 1 if i in first else 2 for i in ids}
        theta, heads = in_phases(known, [(1, first), (3, ids)])
        same_models(run, devices, theta, heads)


def in_phases(run, phases):
    """(theta, {client: head}) of rounds of an engine, in each phase with other clients of a federation."""
    server, states, number = None, {}, 0
    for rounds, ids in phases:
        population = run.federation.population(run.population.sampling, "local", False, ids)
        algorithm = run.recipe.algorithm(run.model, population)
        engine = Simulation(algorithm, run.examples)
        server = engine.initialize() if server is None else server
        for _ in range(rounds):
            number += 1
            known = [states[i] if i in states else algorithm.init_client(population.info(i)) for i in ids]
            out = engine.next(server, known, visits(algorithm, number, ids, seed=run.config.seed))
            server = out.server
            states |= dict(zip(ids, out.client_states, strict=True))
    return flatten(algorithm.message(server)), states


@pytest.mark.slow
def test_ten_devices_that_nobody_knew_are_the_simulated_run(make_run, places, tmp_path):
    with make_run(tmp_path / "known") as known:
        theta, heads, scores = simulated(known, 4)
        with new_run(places, tmp_path / "run", rounds=4, participation=0.5, evaluate_every=2) as run:
            ids, devices = known.population.client_ids.tolist(), {}
            with serving(run, Rules(wait_for=len(ids))) as (address, _, tokens):

                def work(client):
                    devices[client] = device(known, address, tmp_path, client, tokens[client])
                    devices[client].run()

                in_threads([lambda i=i: work(i) for i in ids])
            same_models(run, devices, theta, heads)
            found = {(e.round_num, e.client_id, e.model, e.split): e for e in run.store.evaluations()}
            expected = {(e.round_num, e.client_id, e.model, e.split): e for e in scores if e.num_examples}
            assert found.keys() == expected.keys()
            assert all(found[key].num_examples == e.num_examples for key, e in expected.items())
            assert run.write_summary()["rounds"] == 4


def test_the_operator_sees_of_how_many_places_clients_are_here_also_after_a_restart(places, tmp_path):
    with new_run(places, tmp_path / "run") as run:
        rounds = opened(run)
        for client in range(3):
            join(rounds, client, 30)
        for number in range(2):
            about = Watch(rounds, "a token of the operator").state(0, 1.0)
            assert about["run"]["clients"] == 12 and about["counts"]["not joined"] == 9
            rounds.close()
            if not number:
                rounds = LiveRounds(run, rounds.rules, 1.0)


def test_only_training_examples_have_a_limit(places, tmp_path):
    """`most_examples` bounds what a client counts for; its test examples count for nobody else."""
    with new_run(places, tmp_path / "run", rounds=1, evaluate_every=1) as run:
        rounds = opened(run, most_examples=100)
        for client in (0, 1):
            join(rounds, client, 60)
        row = {"split": "test", "examples": 150, "loss": 0.5, "score": 0.5}
        for client in (0, 1):
            send(rounds, client, 60, 1e-3)

        def scored(client, **other):
            rounds.score(client, 1, {"theta": rounds.view.theta, "scores": [row | other]}, 2.0)

        for other, told in (
            ({"examples": 0}, "of no test examples"),
            ({"examples": -1}, "has 1 to"),
            ({"examples": 10**10}, "has 1 to"),
        ):
            with pytest.raises(Refused, match=told) as refused:
                scored(0, **other)
            assert refused.value.status == 422
        with pytest.raises(Refused, match="has 60 train examples in this run, and its score 61"):
            rounds._check_scores({"scores": [row | {"split": "train", "examples": 61}]}, 0, ("train", "test"))
        scored(0)
        scored(1)
        assert [(e.client_id, e.num_examples) for e in run.store.evaluations()] == [(0, 150), (1, 150)]
        rounds.close()


def test_a_device_whose_scores_are_not_taken_goes_on():
    device, said = LiveDevice.__new__(LiveDevice), []
    device.log, device._rests = said.append, Rests(lambda text: None)
    device._ask = lambda *_: Answer(422, b'{"error": "client 3 has 9 test examples"}')
    device._send_scores({"theta": "0", "round": 7}, [])
    assert said == ["round 7: its scores were not taken: client 3 has 9 test examples"]
    device._ask = lambda *_: Answer(403, b'{"error": "revoked"}')
    with pytest.raises(ServerError, match="revoked"):
        device._send_scores({"theta": "0", "round": 7}, [])


def test_a_client_that_could_not_be_written_has_not_joined(places, tmp_path, monkeypatch):
    """Its second try had been taken from memory: after a restart, it had a key and no number of examples."""
    with new_run(places, tmp_path / "run") as run:
        rounds = opened(run)

        def full(*_):
            raise OSError("no space left")

        with monkeypatch.context() as patched:
            patched.setattr("tfpfl.live.enrolled.write_whole", full)
            for _ in range(2):
                with pytest.raises(OSError, match="no space left"):
                    join(rounds, 4, 30)
        assert rounds.enrolled.ids == [] and not (run.folder / "enrolled.json").exists()
        join(rounds, 4, 30)
        assert rounds.enrolled.ids == [4] == list(map(int, json.loads((run.folder / "enrolled.json").read_text())))
        rounds.close()
