"""JSON that is not the server's, as of a proxy in its place: both languages say the same, in one line."""

import pytest

from helpers.marks import slow_but
from helpers.native import NativeError
from helpers.native_live import Proxy, missing
from helpers.phone_bundles import small_bundle
from helpers.scripted import LANGUAGES, Script, begun
from tflite_export.device.errors import InvalidInput

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return small_bundle("classification", tmp_path_factory.mktemp("bundle"))


def has_no(what):
    return f"the server's answer has no {what} that a device can use"


NO_FILE = "the server names a file {}, which is no file of a bundle"
JOINED = {"client": 0, "classes": 4}
START = {  # what is wrong: (the question, the answer, what is said of it)
    "another number": ("join", {"client": -1, "classes": 2}, has_no("client and classes")),
    "no number": ("join", {"client": "0", "classes": 2}, has_no("client and classes")),
    "another run": ("join", JOINED | {"run": 5}, has_no("run")),
    "no files": ("bundle", {}, has_no("files")),
    "null": ("bundle", {"files": None}, has_no("files")),
    "an object of files": ("bundle", {"files": {"a": 1}}, has_no("files")),
    "a number as a file": ("bundle", {"files": [1]}, NO_FILE.format(1)),
    "a list as a file": ("bundle", {"files": [["a"]]}, NO_FILE.format("['a']")),
    "another folder": ("bundle", {"files": ["../head.bin"]}, NO_FILE.format("'../head.bin'")),
    "a query": ("bundle", {"files": ["a?b"]}, NO_FILE.format("'a?b'")),
    "a long name": ("bundle", {"files": ["/" * 200]}, NO_FILE.format("'" + 79 * "/" + "...")),
}
WORK = {  # what is wrong: (the kind of work, what is put into it; None: what is left out, what is said of it)
    "no kind": ("visit", {"kind": 3}, has_no("kind")),
    "no round": ("visit", {"round": None}, has_no("round and theta")),
    "round 0": ("score", {"round": 0}, has_no("round and theta")),
    "a round that is no number": ("score", {"round": True}, has_no("round and theta")),
    "a large round": ("visit", {"round": 2**31}, has_no("round and theta")),
    "no theta": ("visit", {"theta": None}, has_no("round and theta")),
    "a list as theta": ("score", {"theta": ["a"]}, has_no("round and theta")),
    "a path as theta": ("score", {"theta": "../x"}, has_no("round and theta")),
    "no settings": ("visit", {"settings": None}, has_no("settings")),
    "a list as settings": ("visit", {"settings": [1]}, has_no("settings")),
    "tau 0": ("visit", {"settings": {"tau": 0, "beta": 0.1, "head_rate": 0.1}}, has_no("settings")),
    "tau 1.5": ("visit", {"settings": {"tau": 1.5, "beta": 0.1, "head_rate": 0.1}}, has_no("settings")),
    "a text as beta": ("visit", {"settings": {"tau": 2, "beta": "0.1", "head_rate": 0.1}}, has_no("settings")),
    "a rate below 0": ("visit", {"settings": {"tau": 2, "beta": 0.1, "head_rate": -1}}, has_no("settings")),
    "no payload": ("visit", {"payload": None}, has_no("payload")),
    "a number as payload": ("visit", {"payload": 8}, has_no("payload")),
    "a long payload": ("visit", {"payload": "float32" * 9}, has_no("payload")),
    "another payload": ("visit", {"payload": "int4"}, "unknown payload 'int4': one of float32, int8"),
    "a phase without a round": ("keys", {"round": "1"}, has_no("round")),
    "a phase without theta": ("keys", {"theta": 1}, has_no("theta")),
    "a phase without settings": ("keys", {"settings": None}, has_no("settings")),
}


def said(language, script, folder, litert):
    """The error of a device that begins and works."""
    with Proxy() as proxy:
        proxy.ask = script
        with pytest.raises((NativeError, InvalidInput)) as found:
            device, _ = begun(language, script, proxy.address, folder, litert, patience=-1.0)
            try:
                device.run()
            finally:
                device.close()
    return str(found.value)


@pytest.mark.parametrize("wrong", slow_but(START, "another run", "no files", "a number as a file", ci=START))
@pytest.mark.parametrize("language", LANGUAGES)
def test_answers_to_a_device_that_begins(bundle, litert_library, tmp_path, language, wrong):
    (question, answer, why), script = START[wrong], Script(bundle)
    script.gate = lambda name, headers: (200, answer) if name == question else None
    assert said(language, script, tmp_path / "device", litert_library) == why
    assert not (tmp_path / "device" / "bundle").exists()


@pytest.mark.parametrize("wrong", slow_but(WORK, *list(WORK)[1::6], ci=WORK))
@pytest.mark.parametrize("language", LANGUAGES)
def test_work_that_cannot_be_read(bundle, litert_library, tmp_path, language, wrong):
    kind, put, why = WORK[wrong]
    script = Script(bundle, kind)
    script.work[0] |= put
    script.work[0] = {name: value for name, value in script.work[0].items() if value is not None}
    assert said(language, script, tmp_path / "device", litert_library) == why
    assert not script.sent and not list((tmp_path / "device").glob("update*"))


@pytest.mark.parametrize("splits", [None, "train", [1, ["test"], "test"]], ids=str)
@pytest.mark.parametrize("language", LANGUAGES)
def test_splits_that_a_device_does_not_have_are_left_out(bundle, litert_library, tmp_path, language, splits):
    script = Script(bundle, "score")
    script.work[0]["splits"] = splits
    with Proxy() as proxy:
        proxy.ask = script
        device, _ = begun(language, script, proxy.address, tmp_path / "device", litert_library, patience=-1.0)
        device.run()
        device.close()
    ((name, body),) = script.sent
    assert name == "score/1" and body.count(b'"split"') == (1 if isinstance(splits, list) else 0)


TIMES = ["soon", float("nan"), 1e300, 10**400, None]


@pytest.mark.parametrize("time", slow_but(TIMES, 10**400), ids=["a text", "nan", "1e300", "10**400", "null"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_time_that_no_clock_has(bundle, litert_library, tmp_path, language, time):
    """The device signs by its own clock then, and says what the server said."""
    script = Script(bundle)
    script.gate = lambda name, headers: (401, {"error": "\ud800!", "time": time}) if name == "bundle" else None
    found = said(language, script, tmp_path / "device", litert_library)
    assert found.startswith("the server refused (401): ?") and found.endswith("!")
