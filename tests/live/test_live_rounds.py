"""Rounds over HTTP, with devices that run the exported program, are the rounds of a simulation."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.live import (
    EXACT,
    Cut,
    device,
    in_spite_of_cuts,
    in_threads,
    live_theta,
    same_models,
    same_scores,
    serving,
    simulated,
)
from helpers.marks import slow_but
from tflite_export.device.client import DeviceClient
from tflite_export.device.head_file import SavedHead
from tflite_export.device.live import client as module
from tflite_export.device.live import wire
from tfpfl.live import serve
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused, Rules

ROUNDS = 4


SETTINGS = {  # name: (hyperparameters, bound); Adam at the server divides rounding by gradients of nearly 0
    "exact": (EXACT, 1e-5),
    "paper": ({"rho": 0.001, "beta": 0.05}, 1e-4),
}


@pytest.mark.parametrize("name", slow_but(SETTINGS, "exact", ci=("paper",)))
def test_a_live_run_is_the_simulated_one(make_run, tmp_path, name):
    hyper, bound = SETTINGS[name]
    with make_run(tmp_path / "run", hyper) as run:
        check_live_against_simulated(run, tmp_path, bound)


def check_live_against_simulated(run, tmp_path, bound):
    theta, heads, scores = simulated(run, ROUNDS)
    ids, devices = run.population.client_ids.tolist(), {}
    with serving(run, Rules(wait_for=len(ids))) as (address, rounds, tokens):

        def work(client):
            devices[client] = device(run, address, tmp_path, client, tokens[client])
            devices[client].run()

        in_threads([lambda i=i: work(i) for i in ids])
    assert run.store.round_num == ROUNDS
    same_models(run, devices, theta, heads, bound)
    same_scores(run.store.evaluations(), scores)


def test_a_device_whose_updates_are_too_long_rests_between_them(make_run, tmp_path):
    """The server asks for the update again at once, and would refuse it as often as the device can compute."""
    with make_run(tmp_path / "run", participation=1.0) as run:
        with serving(run, Rules(deadline=1000, max_norm=1e-12)) as (address, rounds, tokens):
            said, now, updates = [], [0.0], []
            found = device(run, address, tmp_path, 0, tokens[0], log=said.append)
            found._rests.clock = lambda: now[0]
            found._rests.sleep = lambda seconds: now.append(now.pop() + seconds)
            send = found._send
            found._send = lambda method, *given: (method == "PUT" and updates.append(now[0])) or send(method, *given)
            while len(updates) < 4:
                assert found.step()
            found.close()
            assert rounds.book.counted(1, 0) is None
    assert np.diff(updates).tolist() == [5.0, 10.0, 20.0]
    refused = [line for line in said if "norm is" in line and line.startswith("round 1: not counted: ")]
    assert len(refused) == 4 and said[2::2] == [
        f"rests for {seconds} s before it asks for work again" for seconds in (5, 10, 20, 40)
    ]


@pytest.mark.slow
def test_devices_that_are_killed_come_back_and_nothing_is_lost_or_counted_twice(run, tmp_path, monkeypatch):
    """Every device dies once before it sends, once when the server has counted, and once before it drops the update."""
    theta, heads, _ = simulated(run, ROUNDS)
    ids, devices = run.population.client_ids.tolist(), {}
    sent, left = module.LiveDevice._once, {i: ["before", "after"] for i in ids}
    drop, dropping = module.State.drop, set()

    def cut(self, method, target, body, client):
        if target.startswith("/v1/update") and left[client]:
            when = left[client].pop()
            if when == "after":
                sent(self, method, target, body, client)
            raise Cut
        return sent(self, method, target, body, client)

    def cut_before_dropping(self):
        if self.folder not in dropping:
            dropping.add(self.folder)
            raise Cut
        drop(self)

    monkeypatch.setattr(module.LiveDevice, "_once", cut)
    monkeypatch.setattr(module.State, "drop", cut_before_dropping)
    with serving(run, Rules(wait_for=len(ids))) as (address, rounds, tokens):

        def work(client):
            in_spite_of_cuts(devices, client, lambda: device(run, address, tmp_path, client, tokens[client]))

        in_threads([lambda i=i: work(i) for i in ids])
        counted = [event for event in rounds.book.events() if event[2] == "arrived"]
    assert not any(left[i] for i in {client for *_, client in counted}) and dropping
    assert len(counted) == 5 * ROUNDS == len({(number, client) for *_, number, client in counted})
    same_models(run, devices, theta, heads)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["put", "open_round", "end_round", "commit"])
def test_a_server_that_is_killed_goes_on_where_it_was(run, tmp_path, step):
    """It dies after every third call of a function that writes; a new one is started on the same folder."""
    theta, _, _ = simulated(run, ROUNDS)
    ids = run.population.client_ids.tolist()
    clock = iter(range(10**6))
    rules = Rules(wait_for=len(ids), awake=1e6)
    book = None
    devices, calls = {}, [0]

    def start():
        nonlocal book
        if book is not None:
            book.close()
        rounds = LiveRounds(run, rules, next(clock))
        book = rounds.book
        where, name = (run.store, "commit_round") if step == "commit" else (rounds.book, step)
        real = getattr(type(where), name)

        def killed(*arguments, **named):
            result = real(where, *arguments, **named)
            calls[0] += 1
            if calls[0] % 3 == 0:
                raise Cut
            return result

        setattr(where, name, killed)
        rounds.refresh()
        return rounds

    def alive(call):
        """Calls a function of the server, which is started again if it dies."""
        nonlocal rounds
        for _ in range(20):
            try:
                return call(rounds)
            except Cut:
                rounds = restarted()
        raise AssertionError("it never comes to an end")

    def restarted():
        while True:
            try:
                return start()
            except Cut:
                continue

    rounds = restarted()
    tokens = {i: f"the token of {i}" for i in ids}
    rounds.book.set_tokens(tokens)
    rounds.refresh()
    bundles = serve.bundles_of(run)
    for i in ids:
        about = {"protocol": 1, "examples": int(run.population.info(i).num_examples), "key": wire.Signer().public}
        about["classes"] = int(run.population.info(i).num_classes)
        alive(lambda r, i=i, about=about: r.join(tokens[i], about, next(clock)))
        devices[i] = DeviceClient(bundles[about["classes"]], interpreter=tf.lite.Interpreter)
        devices[i].start_from(SavedHead(*rounds.head(i), "00" * 32))
    for _ in range(10 * ROUNDS * len(ids)):
        if rounds.view.kind == wire.DONE:
            break
        alive(lambda r: r.tick(next(clock)))
        for i in ids:
            work = alive(lambda r, i=i: r.work(i, next(clock)))
            if work is None or work["kind"] == wire.DONE:
                continue
            theta_now = np.frombuffer(rounds.thetas[work["theta"]], "<f4")
            if work["kind"] == wire.SCORE:
                examples = int(run.federation.num_examples("test")[i])
                scores = [{"split": "test", "examples": examples, "loss": 0.5, "score": 1.0}]
                about = {"theta": work["theta"], "scores": scores}
                try:
                    alive(lambda r, i=i, w=work, a=about: r.score(i, w["round"], a, next(clock)))
                except Refused as error:  # the scores were the last ones: the round is over
                    assert error.status == 410
                continue
            devices[i].settings = {**devices[i].settings, **work["settings"], "rounds": True}
            update = devices[i].round(theta_now, *run.examples.arrays(i, "train"))
            about = {"theta": work["theta"], "examples": update.num_examples, "loss": update.loss, "scores": []}
            body = wire.pack(about, update.payload)
            answer = alive(lambda r, i=i, w=work, b=body: r.update(i, w["round"], b, next(clock)))
            assert answer == {"counted": True, "round": work["round"]}
            devices[i].commit(update)
    assert rounds.view.kind == wire.DONE and run.store.round_num == ROUNDS and calls[0] >= 3
    rounds.close()
    assert np.abs(live_theta(run) - theta).max() < 1e-5
    assert all(row["clients"] == 5 for row in run.store.history())
