"""The client in C with examples of whole numbers, such as the tokens of an Embedding."""

import json
import shutil
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from helpers import arm64_system, kotlin, litert
from helpers.hand_made import write_manifest
from helpers.native import NativeClient, NativeError, build
from helpers.native_bytes import unlike_on_aarch64, unlike_on_the_jvm, unlike_python
from helpers.truth import random_head, relative, true_gradient, true_steps, varied
from tflite_export import BundleError, DeviceClient, export
from tflite_export.convert.program import flatten
from tflite_export.device.head_file import HeadError
from tflite_export.device.payload import decode
from tflite_export.device.runtime import Bundle
from tfpfl.models import SplitModel

TOKENS, LENGTH, CLASSES = 9, 4, 3
TRAINING = {"tau": 20, "beta": 0.05, "rho": 0.01, "head_rate": 0.03, "safeguard": True}


@pytest.fixture(scope="module")
def exported(tmp_path_factory, native, litert_library):
    keras.utils.set_random_seed(5)
    stack = [layers.Embedding(TOKENS, 3), layers.Flatten(), layers.Dense(5, activation="tanh")]
    model = SplitModel(keras.Sequential([keras.Input((LENGTH,)), *stack]))
    theta, head = varied(model), random_head(model, CLASSES)
    out = tmp_path_factory.mktemp("tokens") / "b"
    return model, theta, head, export((model, theta, head), out=out, inference=False, training=TRAINING)


@pytest.fixture
def pair(exported, native, litert_library, tmp_path):
    ours = NativeClient(native, exported[-1].folder, tmp_path / "c.bin", litert_library)
    return ours, DeviceClient(exported[-1], tmp_path / "python.bin", interpreter=tf.lite.Interpreter, static=True)


def data(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, TOKENS, (n, LENGTH)).astype(np.int32)
    return x, (x[:, 0] % CLASSES).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 9, 32, 75])
def test_a_round_is_pythons_and_that_of_the_whole_objective(exported, pair, n):
    (model, theta, head, _), (ours, theirs), (x, y) = exported, pair, data(n)
    assert ours.model.whole_numbers and ours.model.num_tokens == TOKENS
    assert relative(ours.features(x), theirs.features(x)) < 1e-5
    assert relative(ours.predict(x), theirs.predict(x)) < 1e-5
    found, expected = (client.round(flatten(theta), x, y) for client in pair)
    assert relative(decode(found.payload), decode(expected.payload)) < 1e-5
    fitted = true_steps(model.features(theta, x).numpy(), y, head, TRAINING["tau"] - 1, TRAINING["beta"])
    loss, dtheta, dkernel, _ = true_gradient(model, theta, fitted, x, y)
    assert found.loss == pytest.approx(loss, rel=1e-5) and relative(decode(found.payload), dtheta) < 1e-5
    assert np.abs(found.head.kernel - (fitted.kernel - TRAINING["head_rate"] * dkernel)).max() < 1e-5
    for client, update in zip(pair, (found, expected), strict=True):
        client.commit(update)
    assert relative(ours.head[1], theirs.head[1]) < 1e-5


@pytest.fixture(scope="module")
def masked(tmp_path_factory, native, litert_library):
    """A network that makes NaN of an example of zeros."""
    stack = [layers.Embedding(TOKENS, 3, mask_zero=True), layers.GlobalAveragePooling1D(), layers.Dense(5, "tanh")]
    model = SplitModel(keras.Sequential([keras.Input((LENGTH,)), *stack]))
    theta, head = varied(model), random_head(model, CLASSES)
    out = tmp_path_factory.mktemp("masked") / "b"
    return model, theta, head, export((model, theta, head), out=out, inference=False, training=TRAINING)


@pytest.mark.slow
@pytest.mark.parametrize("n", [9, 75])
def test_a_mean_over_the_tokens_that_are_not_masked(masked, native, litert_library, n):
    (model, theta, head, bundle), (x, y) = masked, data(n)
    x[:, 1] = np.maximum(x[:, 1], 1)
    update = NativeClient(native, bundle.folder, litert=litert_library).round(flatten(theta), x, y)
    fitted = true_steps(model.features(theta, x).numpy(), y, head, TRAINING["tau"] - 1, TRAINING["beta"])
    _, dtheta, dkernel, _ = true_gradient(model, theta, fitted, x, y)
    assert relative(decode(update.payload), dtheta) < 1e-5
    assert np.abs(update.head.kernel - (fitted.kernel - TRAINING["head_rate"] * dkernel)).max() < 1e-5


@pytest.mark.parametrize("how", [{}, {"held_out": None}, {"held_out": data(11, 1)}], ids=["a part", "none", "others"])
def test_personalization(pair, how):
    (ours, theirs), (x, y) = pair, data(75)
    found, expected = ours.personalize(x, y, **how), theirs.personalize(x, y, **how)
    assert found.kept == expected.kept and np.allclose(found[3:], expected[3:], rtol=1e-5)
    assert np.allclose(found.after[:2], expected.after[:2], rtol=1e-5)
    assert relative(ours.head[0], theirs.head[0]) < 1e-5


def refused_alike(pair, call):
    """Both clients refuse, in the same words; the head does not change."""
    before = pair[0].head[0]
    with pytest.raises((BundleError, HeadError)) as expected:
        call(pair[1])
    with pytest.raises(NativeError) as found:
        call(pair[0])
    assert (found.value.kind, str(found.value)) == (type(expected.value).__name__, str(expected.value))
    assert np.array_equal(pair[0].head[0], before)
    return str(found.value)


def test_what_is_no_token_is_refused_in_the_same_words(pair):
    x, y = data(75)
    for bad in (-1, TOKENS, 2**31 - 1, -(2**31)):
        wrong = x.copy()
        wrong[70, 2] = bad
        for call in (
            lambda c: c.predict(wrong),  # noqa: B023
            lambda c: c.personalize(wrong, y),  # noqa: B023
            lambda c: c.personalize(x, y, held_out=(wrong, y)),  # noqa: B023
            lambda c: c.round(c.theta, wrong, y),  # noqa: B023
        ):
            assert f"an example holds {bad}, and this model knows 0..8" in refused_alike(pair, call)
    refused_alike(pair, lambda c: c.predict(x[:0]))
    refused_alike(pair, lambda c: c.score(x, y + CLASSES))
    with pytest.raises(NativeError, match=r"must be int32 \['N', 4\], found float32$"):
        pair[0].predict(x.astype(np.float32))
    with pytest.raises(NativeError, match=r"must be int32 \['N', 4\], found float32$"):
        pair[0].examples(x.astype(np.float32))
    with pytest.raises(NativeError, match=r"must be int32 \['N', 4\], found 225 numbers for 75 examples"):
        pair[0].predict(x[:, 1:])


def with_model(bundle, folder, **changed):
    """A copy of a bundle with other entries in the manifest's model; None leaves one out."""
    copy = shutil.copytree(bundle.folder, folder / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["hash"]
    model = manifest["model"] | changed
    manifest["model"] = {name: value for name, value in model.items() if value is not None}
    write_manifest(copy, manifest)
    return Bundle(copy)


def test_manifests_that_say_something_else(exported, native, litert_library, tmp_path):
    """Of tokens whose number is not known, those that there are still work. Floats are no input of this program."""
    x, bundle = data(9)[0], with_model(exported[-1], tmp_path, num_tokens=None)
    ours = NativeClient(native, bundle.folder, litert=litert_library)
    theirs = DeviceClient(bundle, interpreter=tf.lite.Interpreter, static=True)
    assert ours.model.num_tokens == 0 and relative(ours.predict(x), theirs.predict(x)) < 1e-5
    (tmp_path / "floats").mkdir()
    bundle = with_model(exported[-1], tmp_path / "floats", example_dtype=None)
    pair = (
        NativeClient(native, bundle.folder, litert=litert_library),
        DeviceClient(bundle, interpreter=tf.lite.Interpreter, static=True),
    )
    for bad in (-0.5, 9.25, -7.5, 1e30):
        wrong = x.astype(np.float32)
        wrong[3, 2] = bad
        assert f"an example holds {int(wrong[3, 2])}, and" in refused_alike(pair, lambda c: c.predict(wrong))  # noqa: B023
    with pytest.raises(NativeError, match=r"must be float32 \['N', 4\], found int32"):
        pair[0].predict(x)
    with pytest.raises(NativeError, match=r"x must be int32 \[32, 4\]; found float32 \[32, 4\]"):
        pair[0].predict(x.astype(np.float32))


@pytest.mark.litert
@pytest.mark.parametrize("version", litert.with_library())
@pytest.mark.parametrize("n", [9, 75])
def test_the_same_bytes_as_in_python_on_every_version(exported, programs, version, n, tmp_path):
    values = (*data(n), flatten(exported[1]) * np.float32(0.9))
    assert unlike_python(programs, exported[-1], version, values, tmp_path) == []


@pytest.mark.slow
@pytest.mark.litert
@pytest.mark.parametrize("version", litert.with_library(last=True))
@pytest.mark.parametrize("language", ["C", "JVM"])
def test_the_same_numbers_on_aarch64(exported, programs, version, language, tmp_path):
    if arm64_system.missing(language):
        pytest.skip(arm64_system.missing(language))
    values = (*data(75), flatten(exported[1]) * np.float32(0.9))
    assert unlike_on_aarch64(programs, exported[-1], version, values, tmp_path, language) == ({}, [])


@pytest.mark.slow
@pytest.mark.litert
@pytest.mark.parametrize("version", litert.with_library(last=True))
def test_kotlin_on_the_jvm_gives_the_same_bytes(exported, programs, version, tmp_path):
    if kotlin.missing():
        pytest.skip(kotlin.missing())
    values = (*data(75), flatten(exported[1]) * np.float32(0.9))
    wrong = "1 label 99 is out of range: this client's are 0..2; the head is untouched"
    assert unlike_on_the_jvm(programs, exported[-1], version, values, tmp_path, wrong) == []


@pytest.mark.slow
def test_a_thousand_rounds_without_a_finding_of_the_sanitizers(exported, litert_library, tmp_path):
    command = [build("-sanitized", target="sanitized") / "rounds", exported[-1].folder, litert_library]
    command += [tmp_path / "head.bin", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0 and done.stdout == "1000 rounds\n", done.stderr[-3000:]
    assert "ERROR" not in done.stderr and "runtime error" not in done.stderr
