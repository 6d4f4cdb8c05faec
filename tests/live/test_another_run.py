"""A device's folder is of one run: its head and its bundle are not used in another one without a word."""

import json
from contextlib import closing

import pytest
import tensorflow as tf

from helpers.live import examples_of, serving
from tflite_export.device.errors import InvalidInput
from tflite_export.device.live import wire
from tflite_export.device.live.asked import ABOUT, JOIN, AskedDevice
from tflite_export.device.live.client import LiveDevice, ServerError
from tflite_export.device.live.state import State
from tflite_export.device.live.work import about_device
from tfpfl.live import asking as module
from tfpfl.live.asking import Asking
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused, Rules


def device(run, address, folder, token):
    return LiveDevice(address, folder, examples_of(run, 0), token, interpreter=tf.lite.Interpreter)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"seed": 1}])
def test_a_folder_of_another_run_is_refused(make_run, tmp_path, settings):
    """Also of a run that was made again and so has the same id: its head begins anew, and the folder's has moved."""
    state, rules = tmp_path / "device", Rules(wait_for=10)
    with make_run(tmp_path / "one") as run, serving(run, rules) as (address, rounds, tokens):
        with closing(device(run, address, state, tokens[0])):
            pass
        id_of_one = rounds.book.live_id
        assert (state / "run.id").read_text() == id_of_one
    head = (state / "head.bin").read_bytes()
    with make_run(tmp_path / "two", **settings) as run, serving(run, rules) as (address, rounds, tokens):
        with closing(device(run, address, state, tokens[0])) as found:  # it has joined already
            with pytest.raises(ServerError, match=r"\(409\): the device has the head of another run.*another --state"):
                found.step(0)
        assert rounds.book.members()[0].key is None and (state / "head.bin").read_bytes() == head
        (state / "run.id").unlink()  # as before: it is not known of which run the folder is
        with closing(device(run, address, state, tokens[0])) as found:
            assert found.step(0)
        assert (state / "run.id").read_text() == rounds.book.live_id != id_of_one


def test_a_device_of_the_run_joins_again_and_one_that_names_no_run_too(run):
    rounds = LiveRounds(run, Rules(wait_for=10), 0.0)
    rounds.book.set_tokens({0: "token 0"})
    info = run.population.info(0)
    about = {"protocol": 1, "examples": int(info.num_examples), "classes": int(info.num_classes)}
    about["key"] = wire.Signer().public
    told = rounds.join("token 0", about, 0.0)["run"]
    assert rounds.join("token 0", about | {"run": told}, 1.0)["run"] == told
    with pytest.raises(Refused, match="another --state") as refused:
        rounds.join("token 0", about | {"run": "0" * 16}, 2.0)
    assert refused.value.status == 409
    with pytest.raises(wire.WireError, match="run must be str"):
        rounds.join("token 0", about | {"run": 1}, 2.0)
    rounds.close()
    again = LiveRounds(run, Rules(wait_for=10), 3.0)
    assert again.book.live_id == told
    again.close()


def test_a_node_of_flower_refuses_another_run_and_is_refused(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "programs_of", lambda bundles: {})  # any program is taken
    ids = []
    for name in ("one", "two"):
        with make_run(tmp_path / name) as run, closing(Asking(run, Rules(wait_for=1))) as asking:
            examples = examples_of(run, 0)
            (question,) = asking.questions([7], 1.0)
            about = {**about_device(examples, wire.Signer()), "token": asking.tokens[0]}
            if ids:
                heard = []
                asking.log = heard.append
                asking.hear(question, {ABOUT: json.dumps(about | {"run": ids[0]})}, 1.0)
                assert "another run" in heard[-1]
                (question,) = asking.questions([7], 20.0)
            asking.hear(question, {ABOUT: json.dumps(about)}, 20.0)
            for now in range(21, 60):
                if found := asking.questions([7], float(now)):
                    break
            work = json.loads(found[0].record[ABOUT])
            ids.append(work["run"])
            with closing(AskedDevice(tmp_path / "node", examples, asking.tokens[0])) as node:
                if len(ids) == 2:
                    with pytest.raises(InvalidInput, match="another --state"):
                        node.answer(found[0].record)
                    continue
                node._interpreter = tf.lite.Interpreter
                node.answer(found[0].record)
                said = json.loads(node.answer({ABOUT: json.dumps({"kind": JOIN})})[ABOUT])
                assert said["run"] == ids[0]


def test_what_a_folder_says_of_its_run(tmp_path):
    with closing(State(tmp_path / "device")) as state:
        assert state.run() is None
        state.keep_run("a")
        state.keep_run("a")
        with pytest.raises(InvalidInput, match="another --state"):
            state.keep_run("b")
        assert state.run() == "a"
