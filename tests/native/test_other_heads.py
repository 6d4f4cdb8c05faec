"""The client in C with heads that are not for classes, and with a frozen trunk below the backbone."""

import json
import shutil
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from helpers import arm64_system, kotlin, litert
from helpers.hand_made import described, write_manifest
from helpers.marks import slow_but
from helpers.native import NativeClient, NativeError, build
from helpers.native_bytes import unlike_on_aarch64, unlike_on_the_jvm, unlike_python
from helpers.truth import relative
from tflite_export import BundleError, DeviceClient, export
from tflite_export.convert.check import fit, gradient
from tflite_export.convert.program import unflatten
from tflite_export.device import layout
from tflite_export.device.head_file import HeadError, SavedHead, load_head, save_head
from tflite_export.device.payload import decode
from tflite_export.device.runtime import Bundle
from tfpfl.models import SplitModel
from tfpfl.models.weights import Head

KINDS = ["multilabel", "regression", "poisson", "quantile:0.9", "huber:0.5"]
OUTPUTS, RAW, SHAPE = 2, (3, 2), (3, 4)
TRAINING = {"tau": 20, "beta": 0.05, "rho": 0.01, "head_rate": 0.03, "safeguard": True}


def drawn(kind, n, seed=0):
    """Examples [n, 3, 4] and targets that depend on them; some are equal."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, *SHAPE)).astype("f")
    z = np.round(x[:, 0, :OUTPUTS] + 0.3 * rng.normal(size=(n, OUTPUTS)), 1)
    y = {"multilabel": z > 0, "poisson": rng.poisson(np.exp(np.clip(z, -3, 1)))}.get(kind.split(":")[0], z)
    return x, y.astype("f")


def raws(n, seed=0):
    """What the trunk makes examples of."""
    return np.random.default_rng(seed).random((n, *RAW), np.float32)


def model_of(kind):
    """A model whose first layer is frozen."""
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input(RAW)
    x = layers.Dense(SHAPE[1], activation="tanh", name="below")(x)
    x = layers.Flatten()(layers.Dense(2, activation="relu", name="first")(x))
    return SplitModel(keras.Model(inputs, layers.Dense(5, activation="tanh")(x)), kind=kind, train_from="first")


def make_bundle(kind, folder, inference=False):
    model, rng = model_of(kind), np.random.default_rng(4)
    head = Head(0.3 * rng.normal(size=(5, OUTPUTS)).astype("f"), 0.1 * rng.normal(size=OUTPUTS).astype("f"))
    known = (raws(40), drawn(kind, 40)[1])
    source, options = (model, model.initial_theta, head), {"train": known, "test": known, "training": TRAINING}
    return export(source, out=folder / "b", inference=inference, **options)


def two_clients(bundle, native, litert_library, folder, **options):
    """The client in C and the one in Python."""
    ours = NativeClient(native, bundle.folder, folder / "c.bin", litert_library, **options)
    theirs = DeviceClient(bundle, folder / "python.bin", interpreter=tf.lite.Interpreter, static=True, **options)
    return ours, theirs


@pytest.fixture(scope="module")
def poisson(tmp_path_factory, native, litert_library):
    return make_bundle("poisson", tmp_path_factory.mktemp("poisson"))


@pytest.fixture(scope="module", params=slow_but(KINDS, "poisson", ci=KINDS))
def bundle(request, tmp_path_factory, native, litert_library, poisson):
    return poisson if request.param == "poisson" else make_bundle(request.param, tmp_path_factory.mktemp("bundles"))


@pytest.fixture
def pair(bundle, native, litert_library, tmp_path):
    return two_clients(bundle, native, litert_library, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("n", [9, 75])
def test_a_round_is_pythons_and_that_of_the_whole_objective(pair, bundle, n):
    (ours, theirs), (x, y) = pair, drawn(bundle.kind.text, n)
    flat, model = bundle.theta() * np.float32(0.9), model_of(bundle.kind.text).above
    start, theta = Head(*map(tf.constant, theirs.head)), tuple(map(tf.constant, unflatten(flat, model)))
    found, expected = ours.round(flat, x, y), theirs.round(flat, x, y)
    assert found.num_examples == n and found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert relative(decode(found.payload), decode(expected.payload)) < 1e-5
    assert relative(found.head.kernel, expected.head.kernel) < 1e-5
    fitted = fit(start, model.features(theta, x), y, 19, 0.05, safeguard=True, kind=model.kind)
    loss, dtheta, dhead = gradient(model, theta, fitted, x, y)
    assert found.loss == pytest.approx(float(loss), rel=1e-5) and relative(decode(found.payload), dtheta) < 1e-5
    assert np.abs(found.head.kernel - (fitted.kernel - 0.03 * dhead.kernel)).max() < 1e-5
    ours.commit(found)
    assert relative(ours.head[1], expected.head.bias) < 1e-5


@pytest.mark.parametrize(
    "how", [{}, {"held_out": None}, {"held_out": 0.4, "steps": 60}, {"beta": 9.0}, "other"], ids=str
)
@pytest.mark.parametrize("n", [21, 75])
def test_personalization(pair, bundle, n, how, tmp_path):
    (ours, theirs), (x, y) = pair, drawn(bundle.kind.text, n)
    how = {"held_out": drawn(bundle.kind.text, 11, 1)} if how == "other" else how
    with np.errstate(over="ignore", invalid="ignore"):  # with the larger rate the steps diverge
        found, expected = ours.personalize(x, y, **how), theirs.personalize(x, y, **how)
    assert found.kept == expected.kept and (tmp_path / "c.bin").exists() == found.kept
    for a, b in zip(found[1:3], expected[1:3], strict=True):
        assert a.name == b.name and np.allclose(a[:2], b[:2], rtol=1e-4)
    assert np.allclose(found[3:], expected[3:], rtol=1e-5)
    assert relative(ours.head[0], theirs.head[0]) < 1e-5


def with_manifest(bundle, folder, change):
    """A copy of a bundle whose manifest was changed."""
    copy = shutil.copytree(bundle.folder, folder / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["hash"]
    change(manifest, copy)
    write_manifest(copy, manifest)
    return Bundle(copy)


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_scores_and_the_better_head(poisson, native, litert_library, kind, tmp_path):
    """What a head says and how well does not depend on the program: another name in the manifest is enough."""
    bundle = with_manifest(poisson, tmp_path, lambda manifest, _: manifest["model"].update(kind=kind))
    ours, theirs = two_clients(bundle, native, litert_library, tmp_path)
    assert ours.model.kind.decode() == kind
    rng = np.random.default_rng(0)
    for i, n in enumerate((1, 32, 75)):
        x, y = drawn(kind, n, i)
        assert relative(ours.predict(x), theirs.predict(x)) < 1e-5
        found, expected = ours.score(x, y), theirs.score(x, y)
        assert found.name == expected.name and np.allclose(found[:2], expected[:2], rtol=1e-5)
    kept = set()
    for seed in range(16):  # heads that are better in the score, in the loss only, or in neither
        head = SavedHead(*(rng.normal(size=w.shape).astype("f") for w in theirs.head), "ab" * 32)
        head.bias[:] -= 3 * (seed % 2)  # outputs that are too low rise
        x, y = drawn(kind, 8, 5)
        high = y if kind == "multilabel" else np.abs(y) + 1
        for client in (ours, theirs):
            client.start_from(head)
        how = {"steps": 3, "beta": 0.2, "held_out": drawn(kind, 1, seed)}
        found, expected = (client.personalize(x, high, **how) for client in (ours, theirs))
        assert found.kept == expected.kept and np.allclose(found.after[:2], expected.after[:2], rtol=1e-4)
        kept.add(found.kept)
    assert kept == {True, False}
    ours.start_from(head._replace(bias=np.float32([90, 0]), kernel=head.kernel * 0))
    theirs.start_from(head._replace(bias=np.float32([90, 0]), kernel=head.kernel * 0))
    with np.errstate(over="ignore"):
        assert np.allclose(ours.predict(x), theirs.predict(x), rtol=1e-5)


def refused_alike(pair, call):
    """Both clients refuse, in the same words; the head does not change."""
    before = pair[0].saved_head
    with pytest.raises((BundleError, HeadError)) as expected:
        call(pair[1])
    with pytest.raises(NativeError) as found:
        call(pair[0])
    assert (found.value.kind, str(found.value)) == (type(expected.value).__name__, str(expected.value))
    assert np.array_equal(pair[0].head[0], before.kernel) and pair[0].saved_head.labels == before.labels


@pytest.mark.parametrize("kind", ["regression", "multilabel", "poisson", "quantile:5e-05"])
def test_targets_that_are_wrong_are_refused_in_the_same_words(poisson, native, litert_library, kind, tmp_path):
    bundle = with_manifest(poisson, tmp_path, lambda manifest, _: manifest["model"].update(kind=kind))
    pair, (x, y) = two_clients(bundle, native, litert_library, tmp_path), drawn(kind, 9)
    values = [np.nan, np.inf, -np.inf] + {"multilabel": [0.5, -1, 123456.7, 1e-7, 1e20], "poisson": [-1, -1e-30]}.get(
        kind, []
    )
    for value in values:
        bad = y.copy()
        bad[3, 1] = bad[7, 0] = value
        refused_alike(pair, lambda c: c.score(x, bad))  # noqa: B023
        refused_alike(pair, lambda c: c.personalize(x, bad))  # noqa: B023
        refused_alike(pair, lambda c: c.personalize(x, y, held_out=(x, bad)))  # noqa: B023
        refused_alike(pair, lambda c: c.round(c.theta, x, bad))  # noqa: B023
    refused_alike(pair, lambda c: c.personalize(x[:3], y[:3]))
    refused_alike(pair, lambda c: c.personalize(x, y, held_out=0.0))
    with pytest.raises(NativeError, match=r"targets must be numbers \[9, 2\], found none"):
        pair[0].score(x, np.zeros(9, np.int32))


# ---- a frozen trunk


SMALLER = [layout.TRUNK_FLOAT16, layout.TRUNK_INT8]


@pytest.fixture(scope="module")
def smaller(tmp_path_factory, native, litert_library):
    """A bundle with all files of its trunk."""
    return make_bundle("poisson", tmp_path_factory.mktemp("smaller"), inference=True)


@pytest.mark.parametrize("trunk", slow_but([None, *SMALLER], None, ci=SMALLER))
def test_examples_are_the_trunks_output(request, native, litert_library, trunk, tmp_path):
    bundle = request.getfixturevalue("smaller" if trunk else "poisson")
    ours, theirs = two_clients(bundle, native, litert_library, tmp_path, trunk=trunk)
    assert ours.model.trunk and ours.model.raw_numbers == 6 and ours.model.example_numbers == 12
    for n in (5, 32, 1, 75):  # the files in C, and the smaller ones in Python, take 32 examples
        raw = raws(n, n)
        found, expected = ours.examples(raw), theirs.examples(raw)
        assert found.shape == expected.shape == (n, *SHAPE)
        # Where a number lies between two steps of int8, runtimes differ by one step.
        assert relative(found, expected) < (0.02 if trunk == layout.TRUNK_INT8 else 1e-5)
    x, y = theirs.examples(raws(20)), drawn("poisson", 20)[1]
    found, expected = ours.round(bundle.theta(), x, y), theirs.round(bundle.theta(), x, y)
    assert relative(decode(found.payload), decode(expected.payload)) < 1e-5


def test_raw_examples_that_are_wrong_are_refused_in_the_same_words(poisson, native, litert_library, tmp_path):
    pair, raw = two_clients(poisson, native, litert_library, tmp_path), raws(9)
    bad = raw.copy()
    bad[5, 2] = np.nan
    refused_alike(pair, lambda c: c.examples(bad))
    refused_alike(pair, lambda c: c.examples(raw[:0]))
    with pytest.raises(NativeError, match=r"float32 \['N', 3, 2\], found 45 numbers for 9 examples"):
        pair[0].examples(raw[:, :, 0].repeat(5, 1)[:, :5])
    with pytest.raises(NativeError, match=r"examples must be float32 \['N', 3, 4\], found 54 numbers for 9 examples"):
        pair[0].predict(raw)
    with pytest.raises(BundleError) as expected:
        DeviceClient(poisson, interpreter=tf.lite.Interpreter, static=True, trunk="trunk_int4.tflite")
    with pytest.raises(NativeError) as found:
        NativeClient(native, poisson.folder, litert=litert_library, trunk="trunk_int4.tflite")
    assert str(found.value) == str(expected.value) and "has no trunk_int4.tflite; it has" in str(found.value)


def test_without_a_trunk_examples_are_what_is_given(poisson, native, litert_library, tmp_path):
    bundle = with_manifest(poisson, tmp_path, lambda manifest, _: manifest.pop("trunk"))
    pair, x = two_clients(bundle, native, litert_library, tmp_path), drawn("poisson", 5)[0]
    assert not pair[0].model.trunk and all(np.array_equal(client.examples(x), x) for client in pair)
    refused_alike(pair, lambda c: c.examples(x * np.float32(np.inf)))


def test_a_trunk_that_is_none_or_another_is_refused(poisson, native, litert_library, tmp_path):
    """The hashes are right: whoever sends a bundle can compute them."""
    files = {"none": b"no program", "other": poisson.path(layout.PROGRAM).read_bytes()}
    files["open"] = poisson.path(layout.TRUNK).read_bytes()  # for any number of examples
    start = f"signature 'trunk' of {layout.TRUNK_STATIC}: "
    said = {
        "none": "LiteRT cannot open trunk_static.tflite; it may be too old for it",
        "other": "trunk_static.tflite has no signature 'trunk'; it has features, ",
        "open": start + r"raw must be float32 \[-1, 3, 2\]; found float32 \[32, 3, 2\]",
        "raw_shape": start + r"raw must be float32 \[32, 3, 2\]; found float32 \[32, 3, 5\]",
        "example_shape": start + r"x must be float32 \[32, 3, 4\]; found float32 \[32, 12\]",
    }
    for name, message in said.items():

        def change(manifest, copy):
            if name in files:  # noqa: B023
                (copy / layout.TRUNK_STATIC).write_bytes(files[name])  # noqa: B023
                manifest["files"][layout.TRUNK_STATIC] = described(copy / layout.TRUNK_STATIC)
            elif name == "raw_shape":  # noqa: B023
                manifest["trunk"]["raw_shape"] = [3, 5]
            else:
                manifest["model"]["example_shape"] = [12]

        (tmp_path / name).mkdir()
        client = NativeClient(native, with_manifest(poisson, tmp_path / name, change).folder, litert=litert_library)
        raw = np.zeros((4, 3, 5 if name == "raw_shape" else 2), np.float32)
        for _ in range(2):  # the second time as the first
            with pytest.raises(NativeError, match=message):
                client.examples(raw)


# ---- bytes, and sanitizers


@pytest.mark.litert
@pytest.mark.parametrize("version", litert.with_library())
@pytest.mark.parametrize("n", [9, 75])
def test_the_same_bytes_as_in_python_on_every_version(bundle, programs, version, n, tmp_path):
    data = raws(n), drawn(bundle.kind.text, n)[1], bundle.theta() * np.float32(0.9)
    assert unlike_python(programs, bundle, version, data, tmp_path) == []


@pytest.mark.slow
@pytest.mark.litert
@pytest.mark.parametrize("version", litert.with_library())
@pytest.mark.parametrize("trunk", SMALLER)
def test_the_same_bytes_of_smaller_trunks(smaller, programs, version, trunk, tmp_path):
    data = raws(75), drawn("poisson", 75)[1], smaller.theta() * np.float32(0.9)
    assert unlike_python(programs, smaller, version, data, tmp_path, trunk) == []


@pytest.mark.slow
@pytest.mark.litert
@pytest.mark.parametrize("version", litert.with_library(last=True))
@pytest.mark.parametrize("language", ["C", "JVM"])
def test_the_same_numbers_on_aarch64(poisson, programs, version, language, tmp_path):
    if arm64_system.missing(language):
        pytest.skip(arm64_system.missing(language))
    data = raws(75), drawn("poisson", 75)[1], poisson.theta() * np.float32(0.9)
    assert unlike_on_aarch64(programs, poisson, version, data, tmp_path, language) == ({}, [])


@pytest.mark.slow
@pytest.mark.litert
@pytest.mark.parametrize("version", litert.with_library(last=True))
def test_kotlin_on_the_jvm_gives_the_same_bytes(poisson, programs, version, tmp_path):
    if kotlin.missing():
        pytest.skip(kotlin.missing())
    data = raws(75), drawn("poisson", 75)[1], poisson.theta() * np.float32(0.9)
    wrong = "1 target nan of example 0 must be finite and not below 0: this client's kind is poisson"
    assert unlike_on_the_jvm(programs, poisson, version, data, tmp_path, wrong) == []


@pytest.mark.slow
def test_a_thousand_rounds_without_a_finding_of_the_sanitizers(bundle, litert_library, tmp_path):
    """With targets, a frozen trunk, and a head that has names of its own."""
    path = tmp_path / "head.bin"
    save_head(path, load_head(bundle.path(layout.HEAD), 5, OUTPUTS)._replace(labels=("left", "right")))
    command = [build("-sanitized", target="sanitized") / "rounds", bundle.folder, litert_library, path, "1000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0 and done.stdout == "1000 rounds\n", done.stderr[-3000:]
    assert "ERROR" not in done.stderr and "runtime error" not in done.stderr
    assert load_head(path, 5, OUTPUTS).labels == ("left", "right")


@pytest.mark.slow
def test_examples_of_several_arrays_come_packed(native, litert_library, tmp_path):
    """Tokens stand among the numbers of a row; the program makes integers of them."""
    words, sound = keras.Input((4,), dtype="int32", name="words"), keras.Input((3, 2), name="sound")
    x = layers.Concatenate()([layers.Flatten()(layers.Embedding(9, 3)(words)), layers.Flatten()(sound)])
    model = SplitModel(keras.Model({"words": words, "sound": sound}, layers.Dense(4, activation="tanh")(x)))
    rng = np.random.default_rng(0)
    head = Head(rng.normal(size=(4, 3)).astype("f"), np.zeros(3, "f"))
    bundle = export((model, model.initial_theta, head), out=tmp_path / "b", inference=False, training=TRAINING)
    ours, theirs = two_clients(bundle, native, litert_library, tmp_path)
    arrays = {"words": rng.integers(0, 9, (40, 4)).astype(np.int32), "sound": rng.random((40, 3, 2), np.float32)}
    x, y = theirs.examples(arrays), np.arange(40, dtype=np.int32) % 3
    assert relative(ours.predict(x), theirs.predict(arrays)) < 1e-5
    found, expected = (client.round(theirs.theta, x, y) for client in (ours, theirs))
    assert relative(decode(found.payload), decode(expected.payload)) < 1e-5
    assert relative(found.head.kernel, expected.head.kernel) < 1e-5
