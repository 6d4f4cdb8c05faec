"""The client in C computes what the Python client computes, refuses the same in the same words, and is as careful."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from helpers import arm64_system, kotlin, litert
from helpers.marks import slow_but
from helpers.native import CORE, NativeClient, NativeError, build
from helpers.native_bytes import unlike_on_aarch64, unlike_on_the_jvm, unlike_python
from helpers.networks import OWN
from helpers.truth import random_head, relative, true_gradient, true_steps
from tflite_export import BundleError, DeviceClient, export
from tflite_export.convert.program import unflatten
from tflite_export.device.head_file import HeadError, SavedHead, head_bytes, load_head, save_head, theta_sha256
from tflite_export.device.payload import decode
from tflite_export.device.runtime import Bundle
from tfpfl.models import SplitModel, build_network
from tfpfl.models.weights import Head

ROOT = Path(__file__).resolve().parents[2]
CLASSES = 4


def model_of(name):
    return SplitModel(build_network("mlp200", (8, 8, 1)) if name == "mlp200" else OWN[name]())


def make_bundle(name, folder, **options):
    model = model_of(name)
    training = {"tau": 20, "beta": 0.05, "rho": 0.01, "head_rate": 0.03, "safeguard": True}
    rng = np.random.default_rng(0)  # the same weights in every run, and small: where one example is fitted to a
    # probability of almost 1, its gradient is a difference of almost equal numbers, and no two runtimes agree
    theta = tuple((rng.standard_normal(w.shape) / 16).astype(np.float32) for w in model.initial_theta)
    source = (model, theta, random_head(model, CLASSES))
    return export(source, out=folder / "bundle", inference=False, training=training, **options)


@pytest.fixture(scope="module", params=slow_but(["mlp200", "strided convolutions"], "mlp200"))
def bundle(request, tmp_path_factory, native, litert_library):
    return make_bundle(request.param, tmp_path_factory.mktemp("bundles"))


def data(bundle, n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.random((n, *bundle.example_shape), np.float32)
    return x, rng.integers(0, CLASSES, n).astype(np.int32), bundle.theta() * np.float32(0.9)


@pytest.fixture
def pair(bundle, native, litert_library, tmp_path):
    """The client in C and the one in Python."""
    ours = NativeClient(native, bundle.folder, tmp_path / "c.bin", litert_library)
    yield ours, DeviceClient(bundle, tmp_path / "python.bin", interpreter=tf.lite.Interpreter, static=True)
    ours.close()


COUNTS = [1, 9, 32, 75]  # filled up, filled up, exactly one chunk, three chunks


@pytest.mark.slow
@pytest.mark.parametrize("n", COUNTS)
def test_features_and_predictions(pair, bundle, n):
    (ours, theirs), (x, y, theta) = pair, data(bundle, n)
    assert relative(ours.features(x), theirs.features(x)) < 1e-5
    for client in pair:
        client.receive(theta)
    assert relative(ours.features(x), theirs.features(x)) < 1e-5
    assert relative(ours.predict(x), theirs.predict(x)) < 1e-5
    assert np.allclose(ours.score(x, y)[:2], theirs.score(x, y)[:2], rtol=1e-5)
    assert ours.head_is_stale and theirs.head_is_stale and np.array_equal(ours.theta, theta)


@pytest.mark.parametrize("n", COUNTS)
def test_a_round(pair, bundle, n, tmp_path):
    (ours, theirs), (x, y, theta) = pair, data(bundle, n)
    start = ours.saved_head
    found, expected = ours.round(theta, x, y), theirs.round(theta, x, y)
    assert found.num_examples == expected.num_examples == n
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert relative(decode(found.payload), decode(expected.payload)) < 1e-5
    assert relative(found.head.kernel, expected.head.kernel) < 1e-5 and np.abs(found.head.bias).max() > 0
    assert found.head.theta_sha256 == expected.head.theta_sha256 == theta_sha256(theta)
    assert np.array_equal(ours.head[0], start.kernel), "a server that never gets the update has not counted the visit"
    assert not (tmp_path / "c.bin").exists()
    small = ours.round(theta, x, y, payload="int8")
    assert relative(decode(small.payload), decode(found.payload)) < 1 / 127 and len(small.payload) < len(found.payload)
    ours.commit(found)
    assert np.array_equal(ours.head[0], found.head.kernel) and not ours.head_is_stale
    kept = load_head(tmp_path / "c.bin", *start.kernel.shape)
    assert np.array_equal(kept.kernel, found.head.kernel) and kept.theta_sha256 == found.head.theta_sha256


@pytest.mark.parametrize("n", [9, 75])
def test_a_round_is_the_gradient_of_the_whole_objective(bundle, native, litert_library, n):
    model = model_of("mlp200" if bundle.example_shape == (8, 8, 1) else "strided convolutions")
    client, (x, y, flat) = NativeClient(native, bundle.folder, litert=litert_library), data(bundle, n)
    settings, start, theta = bundle.manifest["training"], Head(*client.head), unflatten(flat, model)
    update = client.round(flat, x, y)
    fitted = true_steps(model.features(theta, x).numpy(), y, start, settings["tau"] - 1, settings["beta"])
    loss, dtheta, dkernel, dbias = true_gradient(model, theta, fitted, x, y)
    assert update.loss == pytest.approx(loss, rel=1e-5)
    assert relative(decode(update.payload), dtheta) < 1e-5
    assert np.abs(update.head.kernel - (fitted.kernel - settings["head_rate"] * dkernel)).max() < 1e-5
    assert np.abs(update.head.bias - (fitted.bias - settings["head_rate"] * dbias)).max() < 1e-5


WAYS = [
    {},
    {"held_out": None},
    {"held_out": 0.5, "steps": 40},
    {"held_out": 0.9},
    {"steps": 0},
    {"beta": 5.0, "held_out": None},
    "other",
]


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("n", [20, 75])
def test_personalization(pair, bundle, n, how, tmp_path):
    (ours, theirs), (x, y, _) = pair, data(bundle, n)
    how = {"held_out": data(bundle, 11, 1)[:2]} if how == "other" else how
    found, expected = ours.personalize(x, y, **how), theirs.personalize(x, y, **how)
    assert found.kept == expected.kept
    for a, b in zip(found[1:3], expected[1:3], strict=True):
        assert np.allclose(a[:2], b[:2], rtol=1e-5)
    assert np.allclose(found[3:], expected[3:], rtol=1e-5)
    assert relative(ours.head[0], theirs.head[0]) < 1e-5 and relative(ours.head[1], theirs.head[1]) < 1e-5
    assert (tmp_path / "c.bin").exists() == (tmp_path / "python.bin").exists() == found.kept
    if found.kept:
        assert ours.saved_head.theta_sha256 == load_head(tmp_path / "c.bin", *ours.head[0].shape).theta_sha256


def test_a_worse_head_is_never_kept_and_a_better_one_is(pair, bundle):
    ours, x = pair[0], data(bundle, 20)[0]
    unlikely = ours.predict(x).argmin(1)
    assert not ours.personalize(x, unlikely, steps=0).kept
    better = ours.personalize(x, unlikely, held_out=None)
    assert better.kept and better.before.accuracy == 0 and better.after.loss < better.before.loss
    kept, probabilities = ours.head[0], ours.predict(x)
    worse = ours.personalize(x, probabilities.argmin(1), held_out=(x, probabilities.argmax(1)))
    assert not worse.kept and worse.before.accuracy == 1 and worse.after.loss > worse.before.loss
    assert np.array_equal(ours.head[0], kept)


def refused_alike(pair, call):
    """Both clients refuse, in the same words; the head does not change."""
    before = pair[0].head[0]
    with pytest.raises((BundleError, HeadError)) as expected:
        call(pair[1])
    with pytest.raises(NativeError) as found:
        call(pair[0])
    assert (found.value.kind, str(found.value)) == (type(expected.value).__name__, str(expected.value))
    assert np.array_equal(pair[0].head[0], before)


def test_what_is_wrong_is_refused_in_the_same_words(pair, bundle):
    x, y, theta = data(bundle, 9)
    bad_x, bad_y, bad_theta = x.copy(), y.copy(), theta.copy()
    bad_x[5, 1], bad_y[3], bad_theta[7] = np.inf, CLASSES, np.nan
    head = pair[1]._head
    for call in (
        lambda c: c.features(x[:0]),
        lambda c: c.predict(bad_x),
        lambda c: c.personalize(bad_x, y),
        lambda c: c.personalize(x, bad_y),
        lambda c: c.score(x, -bad_y),
        lambda c: c.personalize(x[:3], y[:3]),
        lambda c: c.personalize(x, y, held_out=1.5),
        lambda c: c.personalize(x, y, held_out=0.1),
        lambda c: c.personalize(x, y, held_out=(bad_x, y)),
        lambda c: c.personalize(x, y, held_out=(x, bad_y)),
        lambda c: c.personalize(x, y, steps=-1),
        lambda c: c.personalize(x, y, steps=3, beta=-0.5),
        lambda c: c.personalize(x, y, beta=np.inf),
        lambda c: c.round(theta, x, bad_y),
        lambda c: c.round(bad_theta, x, y),
        lambda c: c.round(theta[1:], x, y),
        lambda c: c.round(theta, x, y, payload="int4"),
        lambda c: c.receive(theta[:5]),
        lambda c: c.start_from(SavedHead(head.kernel[1:], head.bias, head.theta_sha256)),
        lambda c: c.start_from(head._replace(kernel=head.kernel * np.float32(np.nan))),
    ):
        refused_alike(pair, call)
    # The kernels of some runtimes and processors make 0 of NaN in a ReLU: then a gradient can be finite.
    huge = theta * np.float32(1e38), x * np.float32(1e30), y
    try:
        expected = pair[1].round(*huge)
    except BundleError:
        refused_alike(pair, lambda c: c.round(*huge))
    else:
        assert np.isfinite(decode(expected.payload)).all()
    with pytest.raises(NativeError, match=r"examples must be float32 \['N', .*\], found \d+ numbers for 9 examples"):
        pair[0].features(x[:, 1:])


def test_a_saved_head_is_taken_up_again_and_another_one_refused(pair, bundle, native, litert_library, tmp_path):
    x, y, theta = data(bundle, 20)
    pair[0].commit(pair[0].round(theta, x, y))
    again = NativeClient(native, bundle.folder, tmp_path / "c.bin", litert_library)
    assert np.array_equal(again.head[0], pair[0].head[0]) and again.head_is_stale
    (tmp_path / "c.bin").write_bytes(b"TFPFLH01")
    with pytest.raises(NativeError, match="c.bin is not a head that tfpfl saved"):
        NativeClient(native, bundle.folder, tmp_path / "c.bin", litert_library)
    with pytest.raises(NativeError, match="LiteRT cannot be loaded: .*nowhere.so"):
        NativeClient(native, bundle.folder, litert=tmp_path / "nowhere.so")


def test_a_folder_of_the_state_that_is_not_there_is_told_at_the_start(bundle, native, litert_library, tmp_path):
    path = tmp_path / "nowhere" / "head.bin"
    for state in (path, tmp_path):  # the second one is a folder itself
        with pytest.raises(HeadError) as expected:
            DeviceClient(bundle, state, interpreter=tf.lite.Interpreter, static=True)
        with pytest.raises(NativeError) as found:
            NativeClient(native, bundle.folder, state, litert_library)
        assert (found.value.kind, str(found.value)) == ("HeadError", str(expected.value))
    path.parent.write_text("a file")
    with pytest.raises(NativeError, match="there is no folder .*nowhere. Make it first, or give another state"):
        NativeClient(native, bundle.folder, path, litert_library)


@pytest.mark.parametrize("first", ["C", "Python"])
def test_of_two_clients_with_one_file_the_head_saved_first_stays(bundle, native, litert_library, first, tmp_path):
    """Such as an app's own client, which stays open, and that of a worker, which takes part in rounds at night."""
    path, rng = tmp_path / "head.bin", np.random.default_rng(0)
    kernel, bias = rng.random((bundle.num_features, CLASSES), np.float32), rng.random(CLASSES, np.float32)
    head = SavedHead(kernel, bias, theta_sha256(bundle.theta()))

    def opened(language):
        if language == "C":
            return NativeClient(native, bundle.folder, path, litert_library)
        return DeviceClient(bundle, path, interpreter=tf.lite.Interpreter, static=True)

    worker, *others = [opened(language) for language in ([first, "C", "Python"])]
    said = set()
    for kernel in (head.kernel, -head.kernel):  # the file is there for the first time, and is replaced
        worker.start_from(head._replace(kernel=kernel))
        worker.start_from(head._replace(kernel=2 * kernel))  # what it has saved itself
        saved = path.read_bytes()
        for other in others:
            before = other.head[0].copy()
            with pytest.raises((HeadError, NativeError), match="head.bin was changed by another client") as found:
                other.start_from(head)
            said.add(str(found.value))
            assert getattr(found.value, "kind", "HeadError") == "HeadError"
            assert np.array_equal(other.head[0], before) and path.read_bytes() == saved
        others = [opened("C"), opened("Python")]  # as the message says
        assert all(np.array_equal(other.head[0], 2 * kernel) for other in others)
    others[0].start_from(head)
    assert len(said) == 1 and np.array_equal(opened("Python").head[0], head.kernel)
    path.unlink()  # no head is lost where there is none
    others[1].start_from(head._replace(kernel=3 * head.kernel))
    assert np.array_equal(opened("C").head[0], 3 * head.kernel)


NAMES = ("red", "gr\u00fcn", "new", "left")


def test_a_head_with_classes_of_its_own_keeps_them(bundle, native, litert_library, tmp_path):
    """As many as the bundle's: one was added, another left out."""
    first = load_head(bundle.path("head.bin"), bundle.num_features, CLASSES)
    for name in ("c.bin", "python.bin"):
        save_head(tmp_path / name, first._replace(labels=NAMES))
    ours = NativeClient(native, bundle.folder, tmp_path / "c.bin", litert_library)
    theirs = DeviceClient(bundle, tmp_path / "python.bin", interpreter=tf.lite.Interpreter, static=True)
    assert ours.saved_head.labels == theirs.labels == NAMES
    x, y, theta = data(bundle, 20)
    assert ours.personalize(x, y, held_out=None).kept
    kept = load_head(tmp_path / "c.bin", bundle.num_features, CLASSES)
    assert kept.labels == NAMES and np.array_equal(kept.kernel, ours.head[0])
    updates = {id(client): client.round(theta, x, y) for client in (ours, theirs)}
    assert updates[id(ours)].head.labels == NAMES
    ours.commit(updates[id(ours)])
    assert load_head(tmp_path / "c.bin", bundle.num_features, CLASSES).labels == NAMES
    for client in (ours, theirs):
        client.start_from(first._replace(labels=("red", "green", "new", "left")))
    refused_alike((ours, theirs), lambda c: c.commit(updates[id(c)]))
    m = bundle.num_features
    more = SavedHead(np.zeros((m, 5), np.float32), np.zeros(5, np.float32), "ab" * 32, tuple("abcde"))
    refused_alike((ours, theirs), lambda c: c.start_from(more))
    refused_alike((ours, theirs), lambda c: c.start_from(first._replace(labels=("a", "b"))))
    ours.start_from(first)  # the bundle's classes again
    assert ours.saved_head.labels is None and (tmp_path / "c.bin").read_bytes() == head_bytes(first, bundle.labels)


def refused_head(bundle, native, path, litert_library):
    """What both clients say, in the same words, of a saved head that they do not take."""
    with pytest.raises(HeadError) as expected:
        DeviceClient(bundle, path, interpreter=tf.lite.Interpreter, static=True)
    with pytest.raises(NativeError) as found:
        NativeClient(native, bundle.folder, path, litert_library)
    assert (found.value.kind, str(found.value)) == ("HeadError", str(expected.value))
    return str(found.value)


OTHERS = [("b", "a", "c", "d"), ("a", "b", "c", "D"), ("a", "b", "c", "d" * 200), ("a", "\U0001f600\n'", "c", "d")]


@pytest.fixture(scope="module")
def named(bundle, tmp_path_factory):
    """A function from names to the bundle with these names of its classes."""
    from helpers.hand_made import renamed

    return lambda names: Bundle(renamed(bundle, tmp_path_factory.mktemp("named") / "bundle", names))


@pytest.mark.parametrize("others", OTHERS, ids=["order", "letter", "long", "strange"])
def test_a_saved_head_is_not_taken_for_a_bundle_with_other_names(named, native, litert_library, others, tmp_path):
    """Of an app's update, for example: its columns would have the names of the new bundle, without a word."""
    path, first, second = tmp_path / "head.bin", named("abcd"), named(others)
    for saved, opened in ((first, second), (second, first)):
        path.unlink(missing_ok=True)
        client = NativeClient(native, saved.folder, path, litert_library)
        head, written = client.saved_head, []
        client.start_from(head)
        written.append(path.read_bytes())
        DeviceClient(saved, path, interpreter=tf.lite.Interpreter, static=True).start_from(head)
        written.append(path.read_bytes())
        assert written[0] == written[1] == head_bytes(head, saved.labels) and written[0][:8] == b"TFPFLH03"
        said = refused_head(opened, native, path, litert_library)
        assert f"{path} is the head of a bundle whose output " in said
        assert "delete it to begin with this one's" in said and path.read_bytes() == written[0]
        again = NativeClient(native, saved.folder, path, litert_library)
        assert again.saved_head.labels is None and np.array_equal(again.head[0], head.kernel)


def test_an_old_head_without_names_is_taken_and_saved_with_them(named, native, litert_library, tmp_path):
    opened = named(("\ud800", 'a"', "c", "d"))  # a name that no text in UTF-8 can hold
    old = load_head(opened.path("head.bin"), opened.num_features, CLASSES)
    for way in ("c", "python"):
        path = tmp_path / way
        save_head(path, old)
        assert path.read_bytes()[:8] == b"TFPFLH01"
        client = (
            NativeClient(native, opened.folder, path, litert_library)
            if way == "c"
            else DeviceClient(opened, path, interpreter=tf.lite.Interpreter, static=True)
        )
        client.start_from(old)
        assert path.read_bytes() == head_bytes(old, opened.labels)
        assert np.array_equal(NativeClient(native, opened.folder, path, litert_library).head[0], old.kernel)


@pytest.mark.parametrize("classes", [CLASSES - 1, CLASSES + 1])
def test_a_head_with_another_number_of_classes_is_never_overwritten(bundle, native, litert_library, classes, tmp_path):
    path = tmp_path / "head.bin"
    client = DeviceClient(bundle, path, interpreter=tf.lite.Interpreter)
    if classes > CLASSES:
        client.add_class("new")
    else:
        client.remove_class(client.labels[0])
    before = path.read_bytes()
    said = refused_head(bundle, native, path, litert_library)
    assert f"has {classes} classes, and program_static.tflite is for a fixed number" in said
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_program_that_is_none_or_another_is_refused(bundle, native, litert_library, tmp_path):
    """The hashes are right: whoever sends a bundle can compute them. What comes out is never taken on trust."""
    from helpers.hand_made import described, write_manifest

    folder = shutil.copytree(bundle.folder, tmp_path / "copy")
    program, manifest = folder / "program_static.tflite", json.loads((folder / "manifest.json").read_text())
    del manifest["hash"]

    def open_with(content):
        if content is not None:
            program.write_bytes(content)
            manifest["files"][program.name] = described(program)
        write_manifest(folder, manifest)
        return NativeClient(native, folder, litert=litert_library)

    with pytest.raises(NativeError, match="LiteRT cannot open program_static.tflite; it may be too old for it"):
        open_with(b"no program")
    x = data(bundle, 3)[0]
    open_dims = open_with((bundle.folder / "program.tflite").read_bytes())
    with pytest.raises(NativeError, match="program_static.tflite: x must be float32"):
        open_dims.features(x)
    manifest["model"]["static_batch"] = 31
    other = open_with((bundle.folder / "program_static.tflite").read_bytes())
    with pytest.raises(NativeError, match=r"signature 'features' of program_static.tflite: \w+ must be float32 \[32"):
        other.features(x)
    del manifest["files"][program.name]
    with pytest.raises(NativeError, match="has no program_static.tflite; it has .*, theta.bin"):
        open_with(None)


def test_theta_with_nan_is_refused_in_the_same_words(bundle, native, litert_library, tmp_path):
    from helpers.hand_made import described, write_manifest

    folder = shutil.copytree(bundle.folder, tmp_path / "copy")
    theta, manifest = folder / "theta.bin", json.loads((folder / "manifest.json").read_text())
    del manifest["hash"]
    theta.write_bytes(theta.read_bytes()[:-4] + np.float32(np.nan).tobytes())
    manifest["files"][theta.name] = described(theta)
    write_manifest(folder, manifest)
    with pytest.raises(BundleError) as expected:
        DeviceClient(folder, interpreter=tf.lite.Interpreter)
    with pytest.raises(NativeError) as found:
        NativeClient(native, folder, litert=litert_library)
    assert str(found.value) == str(expected.value) == "theta holds NaN or infinity: nothing was changed"


@pytest.mark.slow
def test_a_bundle_without_rounds(tmp_path, native, litert_library):
    bundle = make_bundle("mlp200", tmp_path, rounds=False)
    client, (x, y, theta) = NativeClient(native, bundle.folder, litert=litert_library), data(bundle, 20)
    assert client.personalize(x, y, held_out=None).kept
    with pytest.raises(NativeError, match="exported for inference and personalization: it takes part in no rounds"):
        client.round(theta, x, y)


def test_the_listing_in_the_documentation_is_the_example(bundle, programs, litert_library, tmp_path):
    listing = (CORE / "examples" / "personalize.c").read_text()
    page = (ROOT / "docs" / "native.md").read_text()
    shown = re.findall(r"```c\n(.*?)```", page, re.S)
    assert shown and all(part in listing for part in shown) and "tfpfl_personalize" in shown[0]
    x, y, _ = data(bundle, 40)
    x.tofile(tmp_path / "x.bin")
    y.tofile(tmp_path / "y.bin")
    files = [tmp_path / name for name in ("x.bin", "y.bin", "head.bin")]
    done = subprocess.run(
        [programs / "personalize", bundle.folder, litert_library, *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    client = DeviceClient(bundle, interpreter=tf.lite.Interpreter, static=True)
    found = client.personalize(x, y)
    kept = "new" if found.kept else "old"
    expected = f"accuracy {found.before.accuracy:.3f} -> {found.after.accuracy:.3f}: the {kept} head is kept\n"
    assert done.stdout == expected
    assert (tmp_path / "head.bin").exists() == found.kept
    done = subprocess.run([programs / "personalize", tmp_path, litert_library, *files], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == f"{tmp_path} is not a bundle: it has no manifest.json\n"


# ---- every version of LiteRT; sanitizers


@pytest.mark.litert
@pytest.mark.parametrize("version", litert.with_library())
@pytest.mark.parametrize("n", [9, 75])
def test_the_same_bytes_as_in_python_on_every_version(bundle, programs, version, n, tmp_path):
    """Where both run one version of LiteRT, not only the formats are the same, but every bit of every number."""
    assert unlike_python(programs, bundle, version, data(bundle, n), tmp_path) == []


@pytest.mark.slow
def test_a_thousand_rounds_without_a_finding_of_the_sanitizers(bundle, litert_library, tmp_path):
    """Sanitizers of addresses, leaks and undefined behaviour; examples that fill one chunk, part of it or three, and
    every tenth time what is wrong. LiteRT itself is not compiled with them, but its leaks are found, too."""
    folder = build("-sanitized", target="sanitized")
    command = [folder / "rounds", bundle.folder, litert_library, tmp_path / "head.bin", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0 and done.stdout == "1000 rounds\n", done.stderr[-3000:]
    assert "ERROR" not in done.stderr and "runtime error" not in done.stderr


@pytest.mark.slow
@pytest.mark.litert
@pytest.mark.parametrize("version", litert.with_library(last=True))
@pytest.mark.parametrize("language", ["C", "JVM"])
def test_the_same_numbers_on_aarch64(bundle, programs, version, language, tmp_path):
    """The same sources compiled for another processor, and LiteRT for it: other kernels, so not the same bytes."""
    if arm64_system.missing(language):
        pytest.skip(arm64_system.missing(language))
    assert unlike_on_aarch64(programs, bundle, version, data(bundle, 75), tmp_path, language) == ({}, [])


@pytest.mark.slow
@pytest.mark.litert
@pytest.mark.parametrize("version", litert.with_library(last=True))
def test_kotlin_on_the_jvm_gives_the_same_bytes(bundle, programs, version, tmp_path):
    """The class for apps, compiled by Kotlin's own compiler, with the JVM's checks of what goes through JNI."""
    if kotlin.missing():
        pytest.skip(kotlin.missing())
    wrong = "1 label 99 is out of range: this client's are 0..3; the head is untouched"
    assert unlike_on_the_jvm(programs, bundle, version, data(bundle, 75), tmp_path, wrong) == []
