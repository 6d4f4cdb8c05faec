"""Devices in C and in Python take part in the same secure rounds, and the result is that of the simulation."""

import subprocess
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from helpers import phones
from helpers.live import examples_of, in_threads, live_theta, new_run, serving, simulated
from helpers.marks import slow_but
from helpers.native import NativeError
from helpers.native_live import Lost, NativeLive, Proxy, live_programs, missing, write_raw
from tflite_export.convert.program import flatten
from tflite_export.device.head_file import load_head
from tflite_export.device.live import wire
from tflite_export.device.live.client import LiveDevice
from tfpfl.live.rules import Rules
from tfpfl.runs.training import Training

ROUNDS = 4
pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def make_run(tmp_path_factory):
    federation = phones.federation(tmp_path_factory.mktemp("federation") / "digits")
    kept = tmp_path_factory.mktemp("bundles") / "bundles"
    return lambda folder, **settings: new_run(federation, folder, kept, **settings)


@pytest.fixture(scope="module")
def live(litert_library):
    """The folder with the library and the example."""
    return live_programs()


@pytest.fixture(scope="module", params=slow_but(["usual", "sanitized"], "usual"))
def any_live(request, litert_library):
    """The same; also with sanitizers of addresses, leaks and undefined behaviour."""
    return live_programs(sanitized=request.param == "sanitized")


class Fleet:
    """The clients of a run: those with odd numbers are processes in C, the others devices in Python.

    Args:
        run: an open run.
        live, litert: the programs, and LiteRT.
        folder: where the devices keep what they know.
    """

    def __init__(self, run, live, litert, folder):
        self.run, self.live, self.litert, self.folder = run, live, litert, folder
        self.processes, self.said, self.heads = {}, {}, {}

    def in_c(self, address, client, token):
        """Runs the process until the run is over; one that is killed is started again."""
        write_raw(self.folder / f"data{client}", examples_of(self.run, client))
        state = self.folder / f"device{client}"
        command = [self.live / "live", address, self.folder / f"data{client}", state, self.litert, token]
        self.said[client] = ""
        while True:
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                self.processes[client] = process
                said, error = process.communicate()
            self.said[client] += said
            if process.returncode != -9:
                break
        assert process.returncode == 0, error
        classes = int(self.run.population.info(client).num_classes)
        self.heads[client] = load_head(state / "head.bin", 200, classes)[:2]

    def in_python(self, address, client, token):
        given = examples_of(self.run, client), token
        device = LiveDevice(address, self.folder / f"device{client}", *given, interpreter=tf.lite.Interpreter)
        device.run()
        self.heads[client] = device.client.head

    def work(self, address, tokens):
        """All of them, until the run is over."""
        ids = self.run.population.client_ids.tolist()
        in_threads([lambda i=i: (self.in_c if i % 2 else self.in_python)(address, i, tokens[i]) for i in ids])


def same_as(expected, run, heads):
    """Theta and all heads are those of the simulation."""
    theta, wanted, _ = expected
    assert np.abs(live_theta(run) - theta).max() < 1e-5
    assert heads.keys() == wanted.keys()
    for client, head in heads.items():
        for found, part in zip(head, wanted[client], strict=True):
            assert np.abs(found - np.asarray(part)).max() < 1e-5


def arrived(rounds):
    return [(number, client) for _, _, what, number, client in rounds.book.events() if what == "arrived"]


@pytest.mark.slow
def test_devices_in_c_and_in_python_are_the_simulation(make_run, any_live, litert_library, tmp_path):
    with make_run(tmp_path / "run") as run:
        expected, fleet = simulated(run, ROUNDS), Fleet(run, any_live, litert_library, tmp_path)
        with serving(run, Rules(wait_for=10, secure=True, phase=300, deadline=300)) as (address, rounds, tokens):
            fleet.work(address, tokens)
            events, came = rounds.book.events(), arrived(rounds)
        assert run.store.round_num == ROUNDS and len(set(came)) == len(came) == 5 * ROUNDS
        assert not [event for event in events if event[2].startswith("failed")]
        same_as(expected, run, fleet.heads)
        for client, said in fleet.said.items():
            assert said.startswith(f"joined as client {client}\n") and "takes no part" not in said
            assert said.count(": counted\n") == sum(i == client for _, i in came)
            assert not list((tmp_path / f"device{client}" / "secure").glob("*"))  # nothing of the masks is left


@pytest.mark.slow
def test_processes_that_are_killed_at_every_message_send_the_same_again(make_run, live, litert_library, tmp_path):
    """kill -9 before the server has each of the four messages, and when it has it. A message that was made is sent
    again as it is: the server refuses any other one."""
    with make_run(tmp_path / "run") as run:
        expected, fleet = simulated(run, ROUNDS), Fleet(run, live, litert_library, tmp_path)
        left = {i: [(phase, when) for phase in wire.PHASES for when in ("before", "after")] for i in range(1, 10, 2)}
        killed = []

        def hook(when, method, path, client):
            moment = path.rpartition("/")[2], when
            if path.startswith("/v1/secure/") and moment in left.get(client, ()):
                left[client].remove(moment)
                fleet.processes[client].kill()
                killed.append(moment)
                raise Lost

        rules = Rules(wait_for=10, secure=True, phase=300, deadline=300, joins=100)
        with Proxy(hook) as proxy, serving(run, rules) as (proxy.target, rounds, tokens):
            fleet.work(proxy.address, tokens)
            events, came = rounds.book.events(), arrived(rounds)
        assert len(set(came)) == len(came) == 5 * ROUNDS
        assert not [event for event in events if event[2].startswith("failed")]
        assert {moment for moment in killed if moment[0] != wire.UNMASK} == {
            (phase, when) for phase in (wire.KEYS, wire.SHARES, wire.MASKED) for when in ("before", "after")
        }
        same_as(expected, run, fleet.heads)
        assert not [said for said in fleet.said.values() if "takes no part" in said]


@pytest.mark.slow
@pytest.mark.parametrize("client", [0, 1])
def test_a_device_that_drops_out_after_its_shares(make_run, live, litert_library, tmp_path, client):
    """One of ten in Python, or in C, is gone before it sends its masked words: the round is the one over the others,
    and its head stays. Devices in both languages take its masks off."""
    with make_run(tmp_path / "run", participation=1.0, rounds=1, evaluate_every=0) as run:
        fleet, gone, over = Fleet(run, live, litert_library, tmp_path), threading.Event(), threading.Event()

        def hook(when, method, path, who):
            if who == client and path.endswith("/masked") and not over.is_set():
                gone.set()
                raise Lost

        rules = Rules(wait_for=10, secure=True, phase=300, deadline=300)
        with Proxy(hook) as proxy, serving(run, rules) as (proxy.target, rounds, tokens):

            def end_the_phase():
                assert gone.wait(300)
                while rounds.view.waiting != {client}:
                    time.sleep(0.05)
                rounds.view = rounds.view._replace(deadline=0.0)  # nobody else has anything to send
                while rounds.view.kind == wire.MASKED:
                    time.sleep(0.05)
                over.set()  # its words come too late

            ending = threading.Thread(target=end_the_phase, daemon=True)
            ending.start()
            fleet.work(proxy.address, tokens)
            ending.join(1)
            came = arrived(rounds)
        others = [i for i in run.population.client_ids.tolist() if i != client]
        assert sorted(came) == [(1, i) for i in others]
        same_as(without(run, client), run, fleet.heads)


def without(run, gone):
    """(theta, heads, None) of a simulated round of which this client does not come back."""
    training = Training(run.algorithm, run.examples, seed=run.config.seed, evaluate_every=0)
    ids = run.population.client_ids
    came = ids[ids != gone]
    training._arrived = lambda number: (came, came[:0], {"round": number, "clients": len(came), "dropped": 1})
    training.run(1)
    heads = dict(zip(ids.tolist(), training.client_states(ids.tolist()), strict=True))
    return flatten(run.algorithm.message(training.server_state())), heads, None


def test_a_device_sends_no_update_that_is_not_masked(make_run, live, litert_library, tmp_path):
    """With the option. For a device that has joined a run with secure rounds, see test_live_recoveries.py."""
    with make_run(tmp_path / "plain", participation=1.0, rounds=1) as run:
        with serving(run, Rules(wait_for=1)) as (address, rounds, tokens):
            given = examples_of(run, 0), tokens[0], litert_library
            device = NativeLive(live, address, tmp_path / "device0", *given, secure=True)
            with pytest.raises(NativeError, match="an update that is not masked, and this device sends none"):
                while device.step(1.0):
                    pass
            device.close()
            assert not arrived(rounds)
