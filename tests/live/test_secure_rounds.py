"""Secure rounds over HTTP are the rounds of a simulation, and the server holds no update."""

import shutil
import time

import numpy as np
import pytest

from helpers.live import (
    Cut,
    Talker,
    device,
    in_spite_of_cuts,
    in_threads,
    same_models,
    same_scores,
    serving,
    simulated,
)
from tflite_export.device.errors import InvalidInput
from tflite_export.device.live import wire
from tflite_export.device.live.client import LiveDevice
from tflite_export.device.live.secure.state import SecureState
from tfpfl.live.rules import Rules

ROUNDS = 4


@pytest.mark.slow
def test_a_secure_run_is_the_simulated_one(run, tmp_path):
    theta, heads, scores = simulated(run, ROUNDS)
    ids, devices = run.population.client_ids.tolist(), {}
    with serving(run, Rules(wait_for=len(ids), secure=True)) as (address, rounds, tokens):

        def work(client):
            devices[client] = device(run, address, tmp_path, client, tokens[client])
            devices[client].run()

        in_threads([lambda i=i: work(i) for i in ids])
        events = [event[2] for event in rounds.book.events()]
    assert run.store.round_num == ROUNDS
    same_models(run, devices, theta, heads)
    wanted = {(e.round_num, e.client_id, e.model, e.split) for e in run.store.evaluations()}
    same_scores(run.store.evaluations(), [e for e in scores if (e.round_num, e.client_id, e.model, e.split) in wanted])
    assert sum(event.startswith("failed") for event in events) == 0


@pytest.mark.slow
def test_devices_that_are_killed_at_every_message_lose_nothing(run, tmp_path, monkeypatch):
    """Every device dies before and after each of its four messages, and before it keeps each of them."""
    theta, heads, _ = simulated(run, ROUNDS)
    ids, devices = run.population.client_ids.tolist(), {}
    moments = [(phase, when) for phase in wire.PHASES for when in ("before", "after", "keeping")]
    left, sent, keep = {i: list(moments) for i in ids}, LiveDevice._once, SecureState.keep_message

    def cut(self, method, target, body, client):
        phase = target.rpartition("/")[2]
        for when in ("before", "after"):
            if method == "PUT" and client in left and (phase, when) in left[client]:
                left[client].remove((phase, when))
                if when == "after":
                    sent(self, method, target, body, client)
                raise Cut
        return sent(self, method, target, body, client)

    def cut_before_keeping(self, phase, body):
        client = int(self.folder.parent.name.removeprefix("device"))
        if (phase, "keeping") in left[client]:
            left[client].remove((phase, "keeping"))
            raise Cut
        keep(self, phase, body)

    monkeypatch.setattr(LiveDevice, "_once", cut)
    monkeypatch.setattr(SecureState, "keep_message", cut_before_keeping)
    rules = Rules(wait_for=len(ids), secure=True, phase=300, deadline=300)
    with serving(run, rules) as (address, rounds, tokens):

        def work(client):
            in_spite_of_cuts(devices, client, lambda: device(run, address, tmp_path, client, tokens[client]))

        in_threads([lambda i=i: work(i) for i in ids])
        events = rounds.book.events()
    arrived = [(number, client) for _, _, what, number, client in events if what == "arrived"]
    assert len(arrived) == 5 * ROUNDS == len(set(arrived)) and not [e for e in events if e[2].startswith("failed")]
    took_part = {client for _, client in arrived}
    assert all(len([m for m in left[i] if m[0] != wire.UNMASK]) == 0 for i in took_part)
    assert sum((wire.UNMASK, "keeping") not in left[i] for i in took_part) > 3
    same_models(run, devices, theta, heads)
    for client in heads:
        assert not list((tmp_path / f"device{client}" / "secure").glob("*"))  # nothing of the masks is left


def test_a_device_that_drops_out_keeps_its_head_and_others_are_refused(make_run, tmp_path, monkeypatch):
    with make_run(tmp_path / "run", participation=1.0, rounds=1, evaluate_every=0) as run:
        ids, devices, said = run.population.client_ids.tolist(), {}, []
        sent = LiveDevice._once

        def cut(self, method, target, body, client):
            if client == 0 and target.endswith("/masked"):
                raise Cut
            return sent(self, method, target, body, client)

        monkeypatch.setattr(LiveDevice, "_once", cut)
        with serving(run, Rules(wait_for=10, secure=True, phase=300, deadline=300)) as (address, rounds, tokens):
            talker = Talker(address)
            status, found = talker.join(run, 1, tokens[1])
            assert status == 409 and "this client cannot: update it" in found["error"]
            assert talker.join(run, 1, tokens[1], secure=1)[0] == 200
            status, found = talker.send("GET", "/v1/work?wait=0")
            assert status == 409 and "this client cannot" in found["error"]
            assert talker.send("GET", "/v1/work?wait=0&secure=1") == (200, {"kind": "none"})
            assert talker.send("GET", "/v1/secure/1") == (200, {"round": 1, "state": "over"})
            for target, status in (("1/keys", 400), ("9/masked", 400), ("1/other", 404), ("x/keys", 404)):
                assert talker.send("PUT", f"/v1/secure/{target}", b"{}")[0] == status

            def work(client):
                devices[client] = device(run, address, tmp_path, client, tokens[client], log=said.append)
                try:
                    devices[client].run()
                except Cut:
                    first = [part.copy() for part in devices[client].client.head]
                    devices.pop(client).close()
                    while rounds.view.waiting != {0}:
                        time.sleep(0.05)
                    rounds.view = rounds.view._replace(deadline=0.0)  # nobody else has anything to send
                    while rounds.view.kind == wire.MASKED:
                        time.sleep(0.05)
                    devices[client] = device(run, address, tmp_path, client, tokens[client], log=said.append)
                    devices[client].run()
                    for old, new in zip(first, devices[client].client.head, strict=True):
                        assert np.array_equal(old, new)

            in_threads([lambda i=i: work(i) for i in ids])
        (row,) = run.store.history()
        assert row["came"] == " ".join(map(str, ids[1:])) and row["dropped"] == 1
        assert "round 1: not counted: it ended without this device" in said
        assert row["bytes_up"] > 9 * 4 * run.model.num_backbone_weights


def test_a_device_that_is_now_for_secure_rounds_learns_whether_its_update_counted(make_run, tmp_path, monkeypatch):
    """The answer to a plain update is lost. The server says what became of it, also if its rounds are now secure."""
    sent = LiveDevice._once

    def lost(self, method, target, body, client):
        answer = sent(self, method, target, body, client)
        if target == "/v1/update/1" and client == 0:
            raise ConnectionError("the answer is lost")
        return answer

    monkeypatch.setattr(LiveDevice, "_once", lost)
    with make_run(tmp_path / "run", participation=1.0, rounds=12, evaluate_every=0) as run:
        with serving(run, Rules(wait_for=3)) as (address, rounds, tokens):
            devices = [device(run, address, tmp_path, i, tokens[i], patience=0.0) for i in range(3)]
            before = [part.copy() for part in devices[0].client.head]
            for one in devices[1:]:
                assert one.step()
            with pytest.raises(InvalidInput, match="the answer is lost"):
                devices[0].step()
            for one in devices:
                one.close()
            assert run.store.round_num == 1 and rounds.view.kind == wire.VISIT
            shutil.copytree(tmp_path / "device0", tmp_path / "copy" / "device0")
            check_that_it_counted(run, address, tmp_path / "copy", before)
        with serving(run, Rules(wait_for=3, secure=True)) as (address, _, _):
            check_that_it_counted(run, address, tmp_path, before)


def check_that_it_counted(run, address, folder, before):
    said = []
    found = device(run, address, folder, 0, None, secure=True, log=said.append)
    assert said == ["round 1: counted"] and found.rounds == 1
    assert not any(np.array_equal(old, new) for old, new in zip(before, found.client.head, strict=True))
    assert [found._state_of(number) for number in (1, 2, 9)] == ["counted", "open", "over"]
    found.close()


def test_a_device_for_secure_rounds_sends_nothing_else(run, tmp_path):
    with serving(run, Rules()) as (address, rounds, tokens):
        for folder, how in (("asked", {"secure": True}), ("member", {})):
            found = device(run, address, tmp_path / folder, 0, tokens[0], **how)
            if not how:  # what a server with secure rounds has said in join
                found._only_secure = True
            with pytest.raises(InvalidInput, match="not masked"):
                while True:
                    found.step()
            found.close()
        assert "arrived" not in [event[2] for event in rounds.book.events()]
