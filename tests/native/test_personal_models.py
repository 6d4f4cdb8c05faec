"""The personal model of a live device, theta and head, is there after a restart, and for other apps."""

import shutil
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from helpers.hand_made import renamed
from helpers.native import NativeClient, NativeError
from helpers.native_live import Proxy, missing
from helpers.phone_bundles import drawn, small_bundle
from helpers.scripted import LANGUAGES, Script, begun, told_by
from tflite_export.device.client import DeviceClient
from tflite_export.device.errors import InvalidInput
from tflite_export.device.head_file import HeadError
from tflite_export.device.live.client import ServerError
from tflite_export.device.live.kept_theta import keep_theta, kept_theta, open_state

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return small_bundle("classification", tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def models(native, litert_library):
    """Opens the personal model of a folder in both languages; both must say the same."""

    def opened(folder):
        x, y = drawn("classification", 7, 5)
        python = open_state(folder, interpreter=tf.lite.Interpreter)
        c = NativeClient(native, folder, None, litert_library, of_state=True)
        assert python.head_is_stale == c.head_is_stale and np.array_equal(python.theta, c.theta)
        for mine, other in zip(python.head, c.head, strict=True):
            assert np.array_equal(mine, other)
        assert np.abs(python.predict(x) - c.predict(x)).max() < 1e-5
        before = (folder / "head.bin").read_bytes()
        for client in (python, c):
            client.personalize(x, y, held_out=None, steps=2)
        assert (folder / "head.bin").read_bytes() == before  # it is the device's
        return open_state(folder, interpreter=tf.lite.Interpreter)

    return opened


def after_a_round(language, bundle, folder, litert):
    """The file of the head of a device whose first update has counted."""
    told_by(language, Script(bundle, "visit"), folder, litert)
    return (folder / "head.bin").read_bytes()


def is_stale(device):
    return device.client.head_is_stale if hasattr(device, "client") else device.head_is_stale


def restarted_is_stale(language, folder, litert):
    with Proxy() as proxy:
        proxy.ask = lambda *_: (404, [], b"nothing is asked")
        device, _ = begun(language, SimpleNamespace(), proxy.address, folder, litert, patience=-1.0)
        with closing(device):
            return is_stale(device)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_device_that_is_started_again_has_the_theta_of_its_head(bundle, litert_library, models, tmp_path, language):
    """It had that of the bundle, with which its head was far worse than what it had reported."""
    script, folder = Script(bundle, "visit"), tmp_path / "device"
    script.move(0.5)
    assert told_by(language, script, folder, litert_library) == ["joined as client 0", "round 1: counted"]
    model = models(folder)
    assert not model.head_is_stale and np.array_equal(model.theta, np.frombuffer(script.numbers, "<f4"))
    for each in LANGUAGES:  # each goes on where the other was
        assert not restarted_is_stale(each, folder, litert_library)


@pytest.mark.parametrize("language", LANGUAGES)
def test_after_scores_of_a_newer_theta_it_is_this_one(bundle, litert_library, models, tmp_path, language):
    """The model whose scores the device has sent; its head was trained on an older theta, which is said."""
    folder = tmp_path / "device"
    head, script = after_a_round(language, bundle, folder, litert_library), Script(bundle, "score")
    script.move(0.75)
    told_by(language, script, folder, litert_library)
    model = models(folder)
    assert model.head_is_stale and np.array_equal(model.theta, np.frombuffer(script.numbers, "<f4"))
    assert (folder / "head.bin").read_bytes() == head and restarted_is_stale(language, folder, litert_library)


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_device_that_is_killed_between_theta_and_head(bundle, litert_library, models, tmp_path, language):
    """Its update is on its way, and perhaps counted: until it knows, the old head is there, and says it is stale."""
    folder = tmp_path / "device"
    head, script = after_a_round(language, bundle, folder, litert_library), Script(bundle, "visit")
    script.move(0.5)
    script.gate = lambda name, headers: (500, {"error": "lost"}) if name.startswith("update/") else None
    with Proxy() as proxy:
        proxy.ask = script
        device, _ = begun(language, script, proxy.address, folder, litert_library, patience=-1.0)
        with closing(device), pytest.raises((NativeError, ServerError)):
            device.run()
    assert (folder / "head.bin").read_bytes() == head
    model = models(folder)
    assert model.head_is_stale and np.array_equal(model.theta, np.frombuffer(script.numbers, "<f4"))
    script.gate = lambda name, headers: None
    assert told_by(language, script, folder, litert_library) == ["round 1: counted"]
    assert (folder / "head.bin").read_bytes() != head and not models(folder).head_is_stale


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_theta_that_is_missing_or_damaged_is_the_bundles(bundle, litert_library, models, tmp_path, language):
    """As in a folder of an earlier version: the head says that it is stale."""
    script, folder = Script(bundle, "visit"), tmp_path / "device"
    script.move(0.5)
    told_by(language, script, folder, litert_library)
    path = folder / "theta.bin"
    good = path.read_bytes()
    other = bytearray(good)
    other[-1] ^= 1
    for content in (None, b"", good[:-4], good + bytes(4), bytes(other), b"TFPFLT02" + good[8:]):
        path.unlink() if content is None else path.write_bytes(content)
        model = models(folder)
        assert model.head_is_stale and np.array_equal(model.theta, bundle.theta())
    assert restarted_is_stale(language, folder, litert_library)
    again = Script(bundle, "score")
    again.move(0.5)
    told_by(language, again, folder, litert_library)
    assert path.read_bytes() == good and not models(folder).head_is_stale


def test_a_theta_is_read_as_it_was_written_and_the_same_one_is_not_written_again(tmp_path):
    path, theta = tmp_path / "theta.bin", np.arange(5, dtype=np.float32)
    assert kept_theta(path, 5) is None
    keep_theta(path, theta)
    first = path.stat().st_ino
    keep_theta(path, theta.copy())
    assert path.stat().st_ino == first and np.array_equal(kept_theta(path, 5), theta)
    keep_theta(path, -theta)
    assert np.array_equal(kept_theta(path, 5), -theta) and kept_theta(path, 4) is None


def test_a_head_of_a_bundle_whose_classes_have_other_names_is_not_opened(bundle, native, litert_library, tmp_path):
    """Its predictions would have the names of other classes."""
    names = bundle.labels
    renamed(bundle, tmp_path / "bundle", names[::-1])
    with_names = DeviceClient(bundle, tmp_path / "head.bin", interpreter=tf.lite.Interpreter)
    with_names.start_from(with_names._head)
    with pytest.raises(HeadError) as python:
        open_state(tmp_path, interpreter=tf.lite.Interpreter)
    with pytest.raises(NativeError) as c:
        NativeClient(native, tmp_path, None, litert_library, of_state=True)
    assert str(python.value) == str(c.value)
    assert f"is the head of a bundle whose output 0 is {names[0]!r}; in this one it is {names[-1]!r}" in str(c.value)


def test_a_folder_without_a_head_is_told(bundle, native, litert_library, tmp_path):
    shutil.copytree(bundle.folder, tmp_path / "bundle")
    with pytest.raises(InvalidInput) as python:
        open_state(tmp_path, interpreter=tf.lite.Interpreter)
    with pytest.raises(NativeError) as c:
        NativeClient(native, tmp_path, None, litert_library, of_state=True)
    said = f"{tmp_path} has no head yet: a live device gets it from its server when it starts"
    assert str(python.value) == str(c.value) == said
    shutil.rmtree(tmp_path / "bundle")
    with pytest.raises(InvalidInput, match="bundle is not a bundle: it has no manifest.json"):
        open_state(tmp_path)
    with pytest.raises(NativeError, match="bundle is not a bundle: it has no manifest.json"):
        NativeClient(native, tmp_path, None, litert_library, of_state=True)
