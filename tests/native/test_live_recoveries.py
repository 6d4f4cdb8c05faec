"""What a device in live rounds gets over: refusals, a wrong clock, a server that does not know it any more."""

import json
import time

import numpy as np
import pytest

from helpers.marks import slow_but
from helpers.native import NativeError
from helpers.native_live import Proxy, missing
from helpers.phone_bundles import CLASSES, small_bundle
from helpers.scripted import LANGUAGES, Script, begun, told_by
from tflite_export.device.errors import InvalidInput
from tflite_export.device.head_file import SavedHead, head_bytes
from tflite_export.device.live import wire
from tflite_export.device.live.client import ServerError

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return small_bundle("classification", tmp_path_factory.mktemp("bundle"))


def scores_in(body):
    return wire.unpack(body)[0]["scores"]


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_loss_that_is_too_large_to_be_sent_is_left_out(bundle, litert_library, tmp_path, language):
    script = Script(bundle, "score")
    kernel, bias = np.zeros((200, CLASSES), np.float32), np.zeros(CLASSES, np.float32)
    bias[0] = 1e35  # the loss of all examples of another class
    script.head = head_bytes(SavedHead(kernel, bias, script.theta))
    assert told_by(language, script, tmp_path / "device", litert_library) == ["joined as client 0"]
    ((name, body),) = script.sent
    assert name == "score/1" and json.loads(body)["scores"] == []


@pytest.mark.parametrize("status", [400, 413])
@pytest.mark.parametrize("language", LANGUAGES)
def test_an_update_that_cannot_be_read_is_not_sent_again(bundle, litert_library, tmp_path, language, status):
    script = Script(bundle, "visit", "visit")
    script.update = status, {"error": "loss must be a number"}
    told = told_by(language, script, tmp_path / "device", litert_library)
    why, rests = "round 1: not counted: loss must be a number", "rests for {} s before it asks for work again"
    assert told == ["joined as client 0", why, rests.format(5), why, rests.format(10)]
    assert [name for name, _ in script.sent] == ["update/1", "update/1"]
    assert [row["split"] for row in scores_in(script.sent[0][1])] == ["train", "test"]
    assert not [path for path in (tmp_path / "device").iterdir() if path.name.startswith("update")]


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_answer_that_is_not_the_servers_does_not_count(bundle, litert_library, tmp_path, language):
    """A proxy may answer in the server's place, with status 200: the head stays, and the same update is sent again."""
    script, pages, heads = Script(bundle, "visit"), ["back soon", {}, {"counted": 1}], []

    def gate(name, headers):
        if name.startswith("update/"):
            heads.append((tmp_path / "device" / "head.bin").read_bytes())
        if name.startswith("update/") and pages:
            return 200, pages.pop(0)

    script.gate = gate
    told = told_by(language, script, tmp_path / "device", litert_library, errors=3)
    assert told == ["joined as client 0", "round 1: counted"] and len(script.sent) == 1
    assert len(heads) == 4 and set(heads) == {script.head} != {(tmp_path / "device" / "head.bin").read_bytes()}


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_app_that_goes_on_after_an_error(bundle, litert_library, tmp_path, language):
    """The answer to an update is lost, and the app asks the device to work on: it sends the update again before it
    computes another one. If the server has counted it, its head would be lost otherwise."""
    script, lost = Script(bundle, "visit", "visit"), []
    script.work[1]["round"] = 2

    def gate(name, headers):
        if name == "update/1" and not lost:
            lost.append(name)
            return 500, {"error": "the answer is lost"}

    script.gate = gate
    told = told_by(language, script, tmp_path / "device", litert_library, patience=-1.0, errors=1)
    assert lost and [name for name, _ in script.sent] == ["update/1", "update/2"]
    assert told == ["joined as client 0", "round 1: counted", "round 2: counted"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_work_that_a_device_does_not_know(bundle, litert_library, tmp_path, language):
    """As a browser does, it asks again later: a newer server would answer at once, again and again."""
    script = Script(bundle, "dance", "dance", "score")
    assert told_by(language, script, tmp_path / "device", litert_library) == ["joined as client 0"]
    assert np.diff(script.times).tolist() == [15, 15, 0]


@pytest.mark.parametrize("language", LANGUAGES)
def test_scores_that_are_refused(bundle, litert_library, tmp_path, language):
    script = Script(bundle, "score", "visit")
    script.score = 422, {"error": "client 0 has 9 test examples"}
    told = told_by(language, script, tmp_path / "device", litert_library)
    why = "round 1: its scores were not taken: client 0 has 9 test examples"
    assert told == ["joined as client 0", why, "rests for 5 s before it asks for work again", "round 1: counted"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_clock_that_is_wrong(bundle, litert_library, tmp_path, language):
    """The server says its time; the device signs with it from then on."""
    script, wrong = Script(bundle, "visit"), []

    def gate(name, headers):
        here = time.time() + 5000
        if "Tfpfl-Time" in headers and abs(float(headers["Tfpfl-Time"]) - here) > 300:
            wrong.append(name)
            return 401, {"error": "the clock is 5000 seconds off", "time": here}

    script.gate = gate
    told = told_by(language, script, tmp_path / "device", litert_library)
    assert told == ["joined as client 0", "round 1: counted"] and len(wrong) == 1


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_server_that_does_not_know_the_device_any_more(bundle, litert_library, tmp_path, language):
    script, refused = Script(bundle, "visit"), []

    def gate(name, headers):
        if name == "work" and not refused:
            refused.append(name)
            return 401, {"error": "client 0 has not joined: join with its token first", "time": time.time()}

    script.gate = gate
    told = told_by(language, script, tmp_path / "device", litert_library)
    assert told == [*2 * ["joined as client 0"], "round 1: counted"] and len(script.joined) == 2


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_folder_is_of_one_run(bundle, litert_library, tmp_path, language):
    """A device that joins again says of which run it is. The head stays as it is if the server is of another run."""
    script, state, unknown = Script(bundle, "visit", "visit"), tmp_path / "device", []
    script.runs = ['of one "run" é', 'of one "run" é', "of another", 5, ""]

    def gate(name, headers):
        if name == "work" and unknown:
            return 401, {"error": unknown.pop(), "time": time.time()}

    script.gate = gate
    assert told_by(language, script, state, litert_library)[-1] == "round 1: counted"
    kept = {name: (state / name).read_bytes() for name in ("head.bin", "run.id")}
    assert kept["run.id"].decode() == 'of one "run" é' and "run" not in script.joined[0]
    unknown.append("client 0 has not joined: join with its token first")
    assert told_by(language, script, state, litert_library) == ["joined as client 0"]
    for why in ("the head of another run: start the device with another", "run", "run"):
        unknown.append("client 0 has not joined: join with its token first")
        with pytest.raises((NativeError, InvalidInput, wire.WireError, ServerError), match=why):
            told_by(language, script, state, litert_library)
    assert [about["run"] for about in script.joined[1:]] == 4 * ['of one "run" é']
    assert kept == {name: (state / name).read_bytes() for name in kept}


@pytest.mark.parametrize("said", [[True, False], [False, True]])
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_device_of_secure_rounds_stays_one(bundle, litert_library, tmp_path, language, said):
    """It joins twice, and one of the answers says that the rounds are secure: it never sends an update that is not
    masked, also not after another start, at which it does not join."""
    script, unknown = Script(bundle, "visit", "visit"), []
    script.secure = list(said)

    def gate(name, headers):
        if name == "work" and not unknown:
            unknown.append(name)
            return 401, {"error": "client 0 has not joined: join with its token first", "time": time.time()}

    script.gate = gate
    for _ in range(2):
        with pytest.raises((NativeError, ServerError), match="is not masked, and this device sends none"):
            told_by(language, script, tmp_path / "device", litert_library)
    assert len(script.joined) == 2 and not script.sent


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_a_killed_process_was_writing_is_deleted(bundle, litert_library, tmp_path, language):
    """Secrets of an attempt are among it: they must not stay when the round is over."""
    names = "head.bin.7.new", "secure/attempt.bin.new", "secure/keys.7.new"
    half_written = [tmp_path / "device" / name for name in names]
    for path in half_written:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(b"secret")
    assert told_by(language, Script(bundle), tmp_path / "device", litert_library) == ["joined as client 0"]
    assert not [path for path in half_written if path.exists()]


@pytest.mark.parametrize("status", [408, 429])
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_server_that_is_asked_too_often(bundle, litert_library, tmp_path, language, status):
    script, refused = Script(bundle, "visit"), []

    def gate(name, headers):
        if name.startswith("update/") and len(refused) < 2:
            refused.append(name)
            return status, {"error": "too often"}

    script.gate = gate
    told = told_by(language, script, tmp_path / "device", litert_library)
    assert told == ["joined as client 0", "round 1: counted"] and len(refused) == 2


RESTS = {  # name: [(what the server asks for, its round, the seconds that it names, its answer, the rest after that)]
    "an update, again and again": [("visit", 1, 60, 422, rest) for rest in (5, 10, 20, 40, 80, 160, 180, 180)],
    "one that cannot be read, or is too large": [("visit", 1, 60, 400, 5), ("visit", 2, 60, 413, 10)],
    "scores, again and again": [("score", 1, 60, 422, rest) for rest in (5, 10, 20)],
    "no longer than the round, at first": [("visit", 1, 2.5, 422, 2.5), ("visit", 2, 2.5, 422, 10)],
    "the server names no seconds, or none that it can have": [
        ("visit", 1, None, 422, 5),
        ("visit", 2, 60, 200, 0),
        ("visit", 3, -1, 422, 5),
    ],
    "a success ends the row": [
        ("visit", 1, 60, 422, 5),
        ("visit", 1, 60, 422, 10),
        ("visit", 2, 60, 200, 0),
        ("visit", 3, 60, 422, 5),
    ],
    "updates and scores have each a row of their own": [
        ("visit", 1, 60, 422, 5),
        ("score", 1, 60, 422, 5),
        ("score", 2, 60, 200, 0),
        ("visit", 2, 60, 422, 10),
        ("score", 3, 60, 422, 5),
    ],
    "too late is no refusal": [("visit", 1, 60, 410, 0), ("score", 1, 60, 410, 0), ("visit", 1, 60, 410, 0)],
    "nor is another theta, unless the server asks for the same again": [
        ("visit", 1, 60, 409, 0),
        ("visit", 2, 60, 409, 0),
        ("visit", 2, 60, 409, 5),
        ("visit", 2, 60, 409, 10),
        ("score", 1, 60, 409, 0),
        ("score", 2, 60, 409, 0),
        ("score", 2, 60, 409, 5),
    ],
}


@pytest.mark.parametrize("name", slow_but(RESTS, *list(RESTS)[::4], ci=RESTS))
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_device_rests_after_a_refusal(bundle, litert_library, tmp_path, language, name):
    """Otherwise it would compute and send the same again at once, as often as it can."""
    script, answers = Script(bundle, *(kind for kind, *_ in RESTS[name])), []
    for work, (_, number, seconds, status, _) in zip(script.work, RESTS[name], strict=True):
        work |= {"round": number} | ({} if seconds is None else {"seconds": seconds})
        answers.append((status, {"counted": True} if status == 200 else {"error": "no"}))

    def gate(name, headers):
        return answers.pop(0) if name.startswith(("update/", "score/")) else None

    script.gate = gate
    told = told_by(language, script, tmp_path / "device", litert_library)
    expected = [float(rest) for *_, rest in RESTS[name]]
    assert np.allclose(np.diff(script.times), expected) and not answers
    said = [line for line in told if line.startswith("rests")]
    assert said == [f"rests for {rest:g} s before it asks for work again" for rest in expected if rest]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_device_that_rests_can_be_stopped(bundle, litert_library, tmp_path, language):
    """A step rests for no longer than the app lets it wait, so that the app can stop in between."""
    script = Script(bundle, "visit")
    script.update = 422, {"error": "no"}
    with Proxy() as proxy:
        proxy.ask = script
        device, _ = begun(language, script, proxy.address, tmp_path / "device", litert_library)
        asked, started = [], script.clock()
        for wait in (2.0, 0.0, 2.0, 2.0):
            assert device.step(wait)
            asked.append((len(script.times), script.clock() - started))
        assert asked == [(1, 0.0), (1, 0.0), (1, 2.0), (1, 4.0)]
        assert not device.step(2.0)  # the rest is over, and so is the run
        assert len(script.times) == 2 and script.clock() - started == 5.0
        device.close()


STATES = {"counted": True, "open": False, "over": False}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_device_that_is_now_for_secure_rounds_asks_what_became_of_its_update(
    bundle, litert_library, tmp_path, language, state
):
    """The answer to an update was lost, and the device is started again so that it sends no update that is not masked:
    the head is current exactly if the server has counted it. Until the server says so, the update stays."""
    script, state_now, lost = Script(bundle, "visit"), [None], []

    def gate(name, headers):
        if name == "update/1":
            lost.append(name)
            return 500, {"error": "the answer is lost"}
        if name == "secure/1":
            found = state_now[0]
            return (500, {"error": "away"}) if found is None else (200, {"round": 1, "state": found})

    script.gate = gate
    folder = tmp_path / "device"
    on_its_way = folder / ("update.bin" if language == "C" else "update.npz")
    with Proxy() as proxy:
        proxy.ask = script
        given = language, script, proxy.address, folder, litert_library
        device, _ = begun(*given, patience=-1.0)
        with pytest.raises((NativeError, ServerError)):
            device.run()
        device.close()
        kept, old_head = on_its_way.read_bytes(), (folder / "head.bin").read_bytes()
        for unknown, why in ((None, "away"), ("?", "the server's answer has no state that a device can use")):
            state_now[0] = unknown
            with pytest.raises((NativeError, ServerError), match=why):
                begun(*given, patience=-1.0, secure=True)
            assert on_its_way.read_bytes() == kept and (folder / "head.bin").read_bytes() == old_head
        state_now[0] = state
        device, told = begun(*given, patience=-1.0, secure=True)
        device.close()
    not_counted = "not counted: this device sends no update that is not masked"
    assert told == [f"round 1: {'counted' if STATES[state] else not_counted}"]
    assert ((folder / "head.bin").read_bytes() != old_head) == STATES[state]
    assert lost == ["update/1"] and not script.sent and not on_its_way.exists()


ADDRESSES = {
    "http://example.org:8443": "example.org",
    "http://10.0.2.2:8443/": "10.0.2.2",
    "http://[2001:DB8::1]:8443": "2001:db8::1",
    "http://127.0.0.1.Example.org": "127.0.0.1.example.org",
    "http://localhost@example.org": "example.org",
    "http://0.0.0.0:8443": "0.0.0.0",
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_token_is_not_sent_by_http_to_another_machine(bundle, litert_library, tmp_path, language):
    """Whoever is on the way could read it. Both languages say the same, before there is a folder or a request."""
    script = Script(bundle)
    for address, host in ADDRESSES.items():
        with pytest.raises(InvalidInput) as found:
            begun(language, script, address, tmp_path / "device", litert_library, patience=-1.0)
        assert str(found.value) == (
            "http is for a server on this machine alone (127.0.0.1, ::1, localhost): others could read the enrolment "
            f"token on its way to {host}, or answer in its place. Give the server --tls, and the device its address "
            f"with https://, found '{address}'"
        )
    for address in ("http://", "http://[::1", "https://"):
        with pytest.raises(InvalidInput) as found:
            begun(language, script, address, tmp_path / "device", litert_library, patience=-1.0)
        assert str(found.value) == f"a server's address is such as https://example.org:8443, found '{address}'"
    assert not (tmp_path / "device").exists()
    for address in ("http://LOCALHOST:9", "http://[::1]:9", "http://127.0.0.1:9", "https://127.0.0.1:9"):
        with pytest.raises((NativeError, ServerError), match="does not answer"):
            begun(language, script, address, tmp_path / "device", litert_library, patience=-1.0)
