"""The Flower app of a run: what the command writes and refuses, what nodes are asked, and rounds on two real nodes."""

import ast
import importlib.util
import json
import os
import random
import signal
import sys
import time
import tomllib
from contextlib import closing
from unittest.mock import MagicMock

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from helpers.flower import DEVICE, NoEnvironment, flower, node_python, server_python
from helpers.live import EXACT, examples_of, live_theta, new_run, same_scores, simulated
from tflite_export.device import payload
from tflite_export.device.errors import InvalidInput
from tflite_export.device.head_file import load_head
from tflite_export.device.live import wire
from tflite_export.device.live.asked import ABOUT, BODY, JOIN, THETA, AskedDevice
from tflite_export.device.live.state import State
from tflite_export.device.live.work import about_device, keep_bundle
from tfpfl.cli import main
from tfpfl.data import Federation
from tfpfl.live import asking as module
from tfpfl.live.asking import Asking
from tfpfl.live.book import Book
from tfpfl.live.flower import _TEMPLATES as TEMPLATES
from tfpfl.live.flower import FILES, toml_of
from tfpfl.live.rules import Rules
from tfpfl.runs.config import RunConfig
from tfpfl.runs.folders import LIVE
from tfpfl.runs.run import Run
from tfpfl.runs.training import DivergedError

ROUNDS = 7
NODE_ROUNDS = 2
CLIENTS = 3


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Three clients with two classes of eight features each."""
    rng, clients = np.random.default_rng(0), {}
    for i in range(CLIENTS):
        x, y = rng.random((12 + 6 * i, 8), np.float32), np.arange(12 + 6 * i) % 2
        clients[f"node {i}"] = {"train": (x + y[:, None] * i, y), "test": (x[:6] + 0.1, y[:6])}
    return Federation.from_clients(clients, out=tmp_path_factory.mktemp("three") / "three", name="3", validation=0.0)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("bundles") / "bundles"


@pytest.fixture
def run(federation, kept, tmp_path):
    with new_run(federation, tmp_path / "run", kept, participation=2 / 3, rounds=ROUNDS) as run:
        yield run


@pytest.fixture
def bare_run(federation, tmp_path, monkeypatch):
    """A run whose bundles are not made, which takes seconds: no device opens them."""
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "program").write_bytes(b"a program")
    monkeypatch.setattr(module, "bundles_of", lambda run: {2: tmp_path / "bundle"})
    monkeypatch.setattr(module, "programs_of", lambda bundles: {2: "ab" * 32})
    settings = {"hyperparameters": EXACT, "network": "mlp200", "participation": 2 / 3, "rounds": ROUNDS}
    with Run.create(RunConfig(federation=str(federation.path), **settings), tmp_path / "run", federation) as run:
        yield run


class Nodes:
    """Devices that a test asks, each a folder; `connected` is {node: client}."""

    def __init__(self, run, folder, tokens):
        self.run, self.folder, self.tokens = run, folder, tokens
        self.connected = {100 + client: client for client in tokens}

    def answer(self, question):
        """The answer of the question's node, from a device that is opened for it, as Flower does."""
        client = self.connected[question.node]
        folder, examples = self.folder / f"device{client}", examples_of(self.run, client)
        with closing(AskedDevice(folder, examples, self.tokens[client], interpreter=tf.lite.Interpreter)) as device:
            return device.answer(question.record)

    def head(self, client, shape):
        return load_head(self.folder / f"device{client}" / "head.bin", *shape)


def check_end(run, nodes, theta, heads, scores):
    assert run.store.round_num == ROUNDS
    assert np.abs(live_theta(run) - theta).max() < 1e-5
    for client, head in heads.items():
        found = nodes.head(client, np.shape(head.kernel))
        assert np.abs(found.kernel - np.asarray(head.kernel)).max() < 1e-5
        assert np.abs(found.bias - np.asarray(head.bias)).max() < 1e-5
    same_scores(run.store.evaluations(), scores)


@pytest.mark.slow
def test_asked_rounds_are_the_simulated_ones_whatever_is_killed(run, tmp_path):
    """Answers are lost, nodes are killed and come back under another number, and so is the server."""
    theta, heads, scores = simulated(run, ROUNDS)
    draw, now, number, bodies = random.Random(0), 0.0, 1000, {}
    told = {"node": 0, "lost": 0, "server": 0, "again": 0}

    def start():
        return Asking(run, Rules(wait_for=CLIENTS, deadline=1e6, awake=1e6), patience=3.0)

    asking = start()
    nodes = Nodes(run, tmp_path, asking.tokens)
    while not asking.is_over(now) and now < 400:
        now += 1.0
        for question in asking.questions(nodes.connected, now):
            answer, chance = nodes.answer(question), draw.random()
            if question.kind == wire.VISIT:
                at = nodes.connected[question.node], question.round_num
                told["again"] += at in bodies
                assert bodies.setdefault(at, answer[BODY]) == answer[BODY]  # the same bytes, whatever was lost
            if chance < 0.15:  # the node is killed when it has computed, and starts again
                client = nodes.connected.pop(question.node)
                nodes.connected[number := number + 1] = client
                told["node"] += 1
            elif chance < 0.3:
                told["lost"] += 1
            else:
                asking.hear(question, answer, now)
            if chance > 0.85:
                asking.close()
                asking = start()
                told["server"] += 1
                break
    assert asking.is_over(now)
    with closing(asking):
        events = [(what, t, client) for _, _, what, t, client in asking.rounds.book.events() if what == "arrived"]
    assert len(events) == len(set(events)) == 2 * ROUNDS
    assert min(told.values()) > 1, told
    check_end(run, nodes, theta, heads, scores)


@pytest.mark.slow
def test_an_update_that_was_not_counted_leaves_the_head_as_it_was(run, tmp_path):
    with closing(Asking(run, Rules(wait_for=CLIENTS), patience=3.0)) as asking:
        nodes = Nodes(run, tmp_path, asking.tokens)
        for question in asking.questions(nodes.connected, 1.0):
            asking.hear(question, nodes.answer(question), 1.0)
        question = asking.questions(nodes.connected, 2.0)[0]
        client = nodes.connected[question.node]
        nodes.answer(question)
        head = (tmp_path / f"device{client}" / "head.bin").read_bytes()
        about = json.loads(question.record[ABOUT])
        later = {**about, "round": 2, "counted": [1, "another update"]}
        nodes.answer(question._replace(record={**question.record, ABOUT: json.dumps(later)}))
        assert (tmp_path / f"device{client}" / "head.bin").read_bytes() == head
        done = {"kind": wire.DONE, "counted": None}
        nodes.answer(question._replace(record={ABOUT: json.dumps(done)}))
        assert (tmp_path / f"device{client}" / "head.bin").read_bytes() == head
        assert not (tmp_path / f"device{client}" / "update.npz").exists()

        damaged = question.record[THETA][:-4] + b"\0\0\0\1"
        with pytest.raises(InvalidInput, match="does not have the hash"):
            nodes.answer(question._replace(record={**question.record, THETA: damaged}))
        with pytest.raises(InvalidInput, match="no file of a bundle"):
            with closing(State(tmp_path / "new")) as state:
                keep_bundle(state, [("../x", b"")])


def test_answers_that_cannot_be_used_are_left_aside(bare_run, tmp_path):
    run, heard = bare_run, []
    with closing(Asking(run, Rules(wait_for=CLIENTS), patience=3.0, log=heard.append)) as asking:
        first, second, third = asking.questions([7, 8, 9], 1.0)
        assert not asking.questions([7, 8, 9], 1.5)  # they are asked once
        asking.hear(first, {ABOUT: json.dumps({"token": "x", "protocol": 1})}, 1.0)
        assert "this token is unknown" in heard[-1]
        asking.hear(second, {ABOUT: 3}, 1.0)
        assert "about must be str" in heard[-1]
        asking.failed(third, "no such folder", 1.0)
        assert "no such folder" in heard[-1]
        assert not asking.questions([7, 8, 9], 5.0)  # they rest
        for question, (client, token) in zip(asking.questions([7, 8, 9], 20.0), asking.tokens.items(), strict=True):
            assert question.kind == JOIN
            about = {**about_device(examples_of(run, client), wire.Signer()), "token": token}
            asking.hear(question, {ABOUT: json.dumps(about)}, 20.0)
        asking.hear(first, {ABOUT: "{}"}, 20.0)  # an answer to what was asked anew
        visit, other = asking.questions([7, 8, 9], 21.0)
        assert {visit.kind, other.kind} == {wire.VISIT} and visit.record["bundle/program"] == b"a program"
        asking.hear(visit, {ABOUT: "{}"}, 21.0)
        assert "has no update" in heard[-1]
        work, client = json.loads(other.record[ABOUT]), other.node - 7
        about = {"theta": work["theta"], "examples": len(examples_of(run, client)["train"][1]), "loss": 0.5}
        zeros = payload.encode(np.zeros(run.model.num_backbone_weights, np.float32))
        body = wire.pack({**about, "scores": []}, zeros)
        asking.hear(other, {ABOUT: "{}", BODY: body[:-4]}, 21.0)
        assert "cut off" in heard[-1] and asking.rounds.book.last_counted(client) is None
        here = [i for i in (7, 8, 9) if i != visit.node]
        assert not asking.questions(here, 22.0)  # the other node went away, and comes back under another number
        (question,) = asking.questions([*here, 10], 23.0)
        assert (question.node, question.kind) == (10, JOIN)
        (question,) = (q for q in asking.questions([*here, 10], 32.0) if q.node == other.node)
        asking.hear(question, {ABOUT: "{}", BODY: body}, 32.0)
        assert heard[-1] == f"round 1: client {client} is counted"
        assert not asking.is_over(32.0) and asking.rounds.book.last_counted(client)[0] == 1


def test_an_answer_of_a_node_whose_client_has_come_back_as_another_is_left_aside(bare_run):
    """It ended the app with a KeyError, for all clients; the device sends the same bytes by its new node."""
    run, heard = bare_run, []
    with closing(Asking(run, Rules(wait_for=CLIENTS), log=heard.append)) as asking:

        def join(client):
            about = about_device(examples_of(run, client), wire.Signer())
            return {ABOUT: json.dumps({**about, "token": asking.tokens[client], "program": "ab" * 32})}

        for question in asking.questions([7, 8, 9], 1.0):
            asking.hear(question, join(question.node - 7), 1.0)
        old, _ = asking.questions([7, 8, 9], 2.0)
        client = old.node - 7
        (again,) = (q for q in asking.questions([7, 8, 9, 20], 3.0) if q.node == 20)
        asking.hear(again, join(client), 3.0)
        told = len(heard)
        asking.hear(old, {ABOUT: "{}", BODY: b"its update"}, 3.0)
        asking.failed(old, "it was killed", 3.0)
        assert len(heard) == told and asking.rounds.book.last_counted(client) is None
        assert [q.kind for q in asking.questions([7, 8, 9, 20], 4.0) if q.node == 20] == [wire.VISIT]


def said(*arguments):
    """(exit code, output) of a command."""
    found = CliRunner().invoke(main, list(map(str, arguments)))
    return found.exit_code, found.output


def run_on_digits(folder, **settings):
    """A new run of two clients, closed."""
    config = {"hyperparameters": EXACT, "dataset": "digits", "partition_args": {"K": 5}, "clients": 2}
    config |= {"network": "mlp200", "participation": 1.0, "rounds": NODE_ROUNDS, "evaluate_every": 0}
    with Run.create(RunConfig(**config | settings), folder):
        return folder


def test_the_app_that_the_command_writes(bare_run, tmp_path):
    bare_run.close()
    run, app = bare_run.folder, tmp_path / "app"
    code, output = said("flower", run, "--out", app, "--max-norm", "7", "--data-for-devices", tmp_path / "data")
    assert code == 0 and "FLWR_TELEMETRY_ENABLED=0" in output, output
    assert sorted(path.name for path in app.iterdir()) == sorted(FILES)
    written = tomllib.loads((app / "pyproject.toml").read_text())
    assert written["tool"]["flwr"]["app"]["config"] == {
        "run": str(run.resolve()),
        "wait-for": 3,
        "deadline": 600.0,
        "quorum": 0.6,
        "payload": "float32",
        "max-norm": 7.0,
        "patience": 120.0,
    }
    assert sorted(written["project"]["dependencies"]) == sorted(DEVICE)  # with which the nodes of the test are
    for component in written["tool"]["flwr"]["app"]["components"].values():
        module, _, name = component.partition(":")
        tree = ast.parse((app / f"{module}.py").read_text())
        assert any(isinstance(node, ast.Assign) and node.targets[0].id == name for node in tree.body)
    read = {node.slice.value for node in ast.walk(ast.parse((app / "server_app.py").read_text())) if is_entry(node)}
    assert read == set(written["tool"]["flwr"]["app"]["config"])  # the server reads what is written, and nothing else

    tokens = json.loads((run / "tokens.json").read_text())
    assert sorted(tokens) == ["0", "1", "2"] and (run / "tokens.json").stat().st_mode & 0o77 == 0
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["0", "1", "2"]
    with Run.open(run) as again, closing(Book(run / LIVE, again.config.run_id)) as book:
        assert {i: book.member_with(token).client for i, token in tokens.items()} == {"0": 0, "1": 1, "2": 2}

    code, output = said("flower", run, "--out", app)
    assert code == 1 and "is there already" in output
    code, output = said("flower", run, "--out", tmp_path / "other", "--wait-for", "4")
    assert code == 1 and "wait_for is 4, but the run has 3 clients" in output
    assert not (tmp_path / "other").exists()


def is_entry(node):
    """Whether it is config["..."]."""
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "config"


@pytest.fixture
def server_app(monkeypatch):
    """(the module of the ServerApp without Flower, its `Asking`, a function that runs it)."""
    for name in ("flwr", "flwr.app", "flwr.serverapp"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    sys.modules["flwr.serverapp"].ServerApp().main.return_value = lambda function: function
    spec = importlib.util.spec_from_file_location("server_app", TEMPLATES / "server_app.py")
    app = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(app)
    asking, app.time, app.Run = MagicMock(), MagicMock(), MagicMock()
    app.Asking = lambda *_, **__: asking
    config = {"deadline": 9.0, "quorum": 0.6, "wait-for": 1, "payload": "float32", "max-norm": 0.0, "patience": 9.0}
    return app, asking, lambda: app.main(MagicMock(), MagicMock(run_config=config | {"run": "run"}))


def test_the_server_app_goes_on_though_the_clock_was_set_back(server_app):
    """The deadline, and nodes that had not answered, waited until the old time was there again."""
    app, asking, run = server_app
    app.time.time.side_effect = [1000.0, 1001.0, 5.0, 6.0, 7.0, 8.0]
    asking.questions.return_value = []
    asking.is_over.side_effect = [False, False, True]
    run()
    assert [call.args[1] for call in asking.questions.call_args_list] == [1000.0, 1001.0, 1003.0]


@pytest.mark.parametrize("end", [DivergedError("round 3 diverged"), KeyboardInterrupt()])
def test_the_server_app_leaves_history_and_summary_if_the_run_diverges_or_is_stopped(server_app, end):
    app, asking, run = server_app
    app.time.time.return_value, asking.questions.side_effect = 1.0, end
    with pytest.raises(type(end)):
        run()
    opened = app.Run.open.return_value.__enter__.return_value
    asking.rounds.write_history.assert_called_once_with()
    opened.write_summary.assert_called_once_with()
    assert opened.stop_reason == ("round 3 diverged" if isinstance(end, DivergedError) else None)


def test_settings_are_toml_whatever_the_folder_is_called():
    """TOML has no surrogate pairs, and no DEL that stands for itself."""
    for value in ("/home/Zoë/runs 😀/fl", 'C:\\runs\\"a"', "a\tb\nc\x7f", 0.5, 3):
        assert tomllib.loads(f"run = {toml_of(value)}") == {"run": value}


def test_a_run_that_devices_cannot_compute_is_refused(tmp_path):
    run = run_on_digits(tmp_path / "run", algorithm="fedavg", hyperparameters={})
    code, output = said("flower", run, "--out", tmp_path / "app")
    assert code == 1 and "fedavg has no program for the device" in output
    assert not (tmp_path / "app").exists() and not (run / LIVE).exists() and not (run / "tokens.json").exists()


@pytest.mark.slow
@pytest.mark.table  # it waits for Flower's nodes, and makes an environment for them
def test_two_nodes_of_flower_compute_what_a_simulation_does(tmp_path, capsys):
    """One node is killed when its update is on its way, and starts again on the same files."""
    try:
        node_python(), server_python()
    except NoEnvironment as error:
        pytest.skip(f"no environment with Flower: {error}")
    run, app, data, state = run_on_digits(tmp_path / "run"), tmp_path / "app", tmp_path / "data", tmp_path / "state"
    code, output = said("flower", run, "--out", app, "--data-for-devices", data)
    assert code == 0, output
    tokens = json.loads((run / "tokens.json").read_text())
    with flower(tmp_path / "flower") as link:
        for i in (0, 1):
            link.start_node(i, data / str(i), state / str(i), tokens[str(i)])
        link.flwr("run", app, "here")
        until = time.monotonic() + 500
        killed, update = False, state / "1" / "update.npz"
        while not (run / "summary.json").exists():
            if not killed and update.exists():
                os.kill(link.nodes[1].pid, signal.SIGKILL)
                link.nodes[1].wait()
                link.start_node(1, data / "1", state / "1", tokens["1"])
                killed = True
            assert time.monotonic() < until, "\n".join(link.log(n)[-3000:] for n in ("superlink", "node0", "node1"))
            time.sleep(0.05)
        opened = None
        while opened is None:  # until the ServerApp has closed it
            try:
                opened = Run.open(run)
            except Exception:
                assert time.monotonic() < until
                time.sleep(0.2)
    with opened:
        theta, heads, _ = simulated(opened, NODE_ROUNDS)
        assert killed and opened.store.round_num == NODE_ROUNDS
        assert np.abs(live_theta(opened) - theta).max() < 1e-5
        away = [float(np.abs(live_theta(opened) - theta).max()), 0.0]
        for client, head in heads.items():
            found = load_head(state / str(client) / "head.bin", *np.shape(head.kernel))
            away[1] = max(away[1], *(np.abs(a - np.asarray(b)).max() for a, b in zip(found[:2], head, strict=True)))
        assert max(away) < 1e-5
        with closing(Book(run / LIVE, opened.config.run_id)) as book:
            arrived = [(t, i) for _, _, what, t, i in book.events() if what == "arrived"]
        assert sorted(arrived) == [(t, i) for t in range(1, NODE_ROUNDS + 1) for i in (0, 1)]
        seconds = [row["seconds"] for row in opened.store.history()]
    with capsys.disabled():
        print(f"\nFlower: rounds of {', '.join(f'{s:.1f}' for s in seconds)} s; theta, heads away {away}")
