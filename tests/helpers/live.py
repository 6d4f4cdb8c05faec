"""A server of live rounds in a thread of this process, and devices that are threads or processes."""

import asyncio
import hashlib
import http.client
import json
import shutil
import threading
import time
from contextlib import closing, contextmanager, suppress
from urllib.parse import urlsplit

import numpy as np
import tensorflow as tf

from tflite_export.convert.program import flatten
from tflite_export.device import payload
from tflite_export.device.live import wire
from tflite_export.device.live.client import LiveDevice
from tfpfl.live import serve
from tfpfl.live.rules import Rules
from tfpfl.live.server import LiveServer
from tfpfl.live.watch import Watch
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run
from tfpfl.runs.training import Training

EXACT = {"rho": 0.01, "beta": 0.05, "rule": "exact", "server_opt": "sgd"}


def new_run(federation, folder, kept, hyperparameters=EXACT, **settings):
    """An open new run of PFLEGO, half of the clients a round. `kept` is where its bundles are kept for the next one."""
    given = {"network": "mlp200", "participation": 0.5, "rounds": 4, "evaluate_every": 2} | settings
    config = RunConfig(hyperparameters=hyperparameters, federation=str(federation.path), **given)
    run = Run.create(config, folder, federation)
    if kept.exists():
        shutil.copytree(kept, folder / serve.BUNDLES)
    else:
        serve.bundles_of(run)
        shutil.copytree(folder / serve.BUNDLES, kept)
    return run


def simulated(run, rounds):
    """(theta, {client: head}, scores) of the same run in the local engine."""
    training = Training(run.algorithm, run.examples, seed=run.config.seed, evaluate_every=2)
    training.run(rounds)
    ids = run.population.client_ids.tolist()
    heads = dict(zip(ids, training.client_states(ids), strict=True))
    return flatten(run.algorithm.message(training.server_state())), heads, training.store.evaluations()


def live_theta(run):
    """The theta of a run after its rounds, flat."""
    return flatten(run.algorithm.message(run.training().server_state()))


def same_models(run, devices, theta, heads, bound=1e-5):
    """Compares the theta of a run and the heads that its devices have, {client: device}, with those of `simulated`."""
    assert np.abs(live_theta(run) - theta).max() < bound
    for client, head in heads.items():
        for found, expected in zip(devices[client].client.head, head, strict=True):
            assert np.abs(found - np.asarray(expected)).max() < bound


def same_scores(found, expected):
    """Compares evaluations; those of clients without examples are left out of a live run."""
    found = {(e.round_num, e.client_id, e.model, e.split): e for e in found}
    expected = {(e.round_num, e.client_id, e.model, e.split): e for e in expected if e.num_examples}
    assert found.keys() == expected.keys() and len(found) > 30
    for key, score in expected.items():
        assert found[key].num_examples == score.num_examples
        assert abs(found[key].score - score.score) <= 1e-6
        assert abs(found[key].loss - score.loss) <= 1e-4 * abs(score.loss)


@contextmanager
def serving(run, rules=None, clock=time.time, page=None, watch=None):
    """(address, LiveRounds, {client: token}) of a server on the loopback; it is stopped at the end.

    Of a server with a page, `page` is {number of classes: bundle} -> the page. `watch` is the operator's token.
    """
    bundles = serve.bundles_of(run)
    rounds = serve.rounds_of(run, rules or Rules(), clock())
    tokens = serve.write_tokens(run, rounds.book)
    rounds.refresh()
    rounds.programs = serve.programs_of(bundles)
    rounds.on_enrolled = serve.maker_of_bundles(run, rounds, bundles)
    started, addresses = threading.Event(), []

    async def main():
        server = LiveServer(rounds, bundles, clock, page and page(bundles), watch and Watch(rounds, watch))
        task = asyncio.create_task(server.run("127.0.0.1", 0, None, lambda a: (addresses.append(a), started.set())))
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            await task
        except asyncio.CancelledError:
            pass

    stop: list = []
    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield addresses[0], rounds, tokens
    finally:
        with suppress(RuntimeError):  # the last round is over, and so is the loop
            stop[0]()
        thread.join(30)
        rounds.close()


def examples_of(run, client):
    """What `LiveDevice` takes, of one client of a run's federation."""
    found = {s: run.examples.arrays(client, s, run.population.labels) for s in ("train", "validation", "test")}
    return {s: (np.asarray(x), y) for s, (x, y) in found.items()} | {
        "classes": int(run.population.info(client).num_classes)
    }


def device(run, address, folder, client, token, **how):
    """The `LiveDevice` of one client of a run; `folder` has a folder for each."""
    how = {"interpreter": tf.lite.Interpreter} | how
    return LiveDevice(address, folder / f"device{client}", examples_of(run, client), token, **how)


class Cut(BaseException):
    """The power is gone, of a device or of the server."""


def in_spite_of_cuts(devices, client, made):
    """Runs a client's device, which `made` makes, to the end of the run; after each `Cut` it is made again."""
    while True:
        try:
            if client in devices:  # a process that is killed lets its lock go
                devices.pop(client).close()
            devices[client] = made()
            return devices[client].run()
        except Cut:
            continue


def in_threads(functions, seconds=300):
    """Calls functions at the same time; raises the first error of one."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.1))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a device did not end"


class Talker:
    """Speaks to a server as one client, and may lie."""

    def __init__(self, address, clock=time.time):
        self.place, self.clock, self.client = urlsplit(address).netloc, clock, None
        self.signer = wire.Signer()

    def send(self, method, target, body=b"", headers=None):
        """(status, JSON or bytes) of one request; signed unless headers are given."""
        if headers is None:
            headers = self.stamp(method, target, body).headers() | {wire.BODY: hashlib.sha256(body).hexdigest()}
        with closing(http.client.HTTPConnection(self.place, timeout=30)) as connection:
            connection.request(method, target, body or None, headers)
            answer = connection.getresponse()
            content = answer.read()
            is_json = answer.getheader("Content-Type", "").startswith("application/json")
            return answer.status, json.loads(content) if is_json else content

    def stamp(self, method, target, body=b"", **other):
        return self.signer.stamp(self.client, method, target, body, self.clock())._replace(**other)

    def join(self, run, client, given, **other):
        info = run.population.info(client)
        about = {"protocol": 1, "token": given, "examples": int(info.num_examples), "classes": int(info.num_classes)}
        body = json.dumps(about | {"key": self.signer.public} | other).encode()
        status, found = self.send("POST", "/v1/join", body, {})
        if status == 200:
            self.client = found["client"]
        return status, found


def join(rounds, clients=range(10), now=0.0):
    """Rounds without a network, with tokens for all clients and devices for these."""
    rounds.book.set_tokens({i: f"token {i}" for i in rounds.ids})
    rounds.refresh()
    for i in clients:
        info = rounds.population.info(i)
        about = {"protocol": 1, "examples": int(info.num_examples), "classes": int(info.num_classes)}
        rounds.join(f"token {i}", about | {"key": wire.Signer().public}, now)
    return rounds


def send(rounds, client, now, loss=0.5):
    """An update of the round that is open."""
    gradient = np.full(rounds.model.num_backbone_weights, 1e-3, np.float32)
    n = int(rounds.population.info(client).num_examples)
    about = {"theta": rounds.view.theta, "examples": n, "loss": loss, "scores": []}
    rounds.update(client, rounds.view.round_num, wire.pack(about, payload.encode(gradient)), now)


def score(rounds, client, now, value):
    """Scores of the round that is open."""
    examples = int(rounds.run.federation.num_examples("test")[client])
    rows = [{"split": "test", "examples": examples, "loss": 0.25, "score": value}]
    rounds.score(client, rounds.view.round_num, {"theta": rounds.view.theta, "scores": rows}, now)
