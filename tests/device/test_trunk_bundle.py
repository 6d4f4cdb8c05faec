"""Bundles with a frozen trunk, and with adapters: features of the trunk are computed once, and the rest is trained."""

import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from helpers.marks import slow_but
from helpers.truth import random_head, relative
from tflite_export import Bundle, BundleError, DeviceClient, ExportError, Runtime, export, verify
from tflite_export.device import layout
from tflite_export.device.runtime import manifest_hash
from tfpfl.models import SplitModel
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run

INTERPRETER = tf.lite.Interpreter
TRUNKS = (layout.TRUNK, layout.TRUNK_FLOAT16, layout.TRUNK_INT8)


@pytest.fixture(scope="module")
def folder(federation, tmp_path_factory):
    """A run whose convolutions are frozen."""
    config = RunConfig(
        hyperparameters={"rho": 0.01, "beta": 0.05},
        federation=str(federation.path),
        network="conv_bn",
        train_from="dense",
        participation=0.5,
        rounds=2,
        evaluate_every=0,
    )
    folder = tmp_path_factory.mktemp("runs") / "trunk"
    with Run.create(config, folder, federation) as run:
        run.train()
    return folder


@pytest.fixture(scope="module")
def bundle(folder, tmp_path_factory):
    return export(folder, 4, tmp_path_factory.mktemp("bundles") / "client4")


@pytest.fixture(scope="module")
def device(bundle):
    return DeviceClient(bundle, interpreter=INTERPRETER)


@pytest.mark.slow
def test_examples_are_the_trunks_features(device, folder, federation):
    raw, _ = federation.arrays(4, "train")
    with Run.open(folder, engine="local") as run:
        expected, _ = run.examples.arrays(4, "train")
    assert relative(device.examples(raw), expected) < 1e-6
    small = DeviceClient(device.bundle, interpreter=INTERPRETER, chunk=5)
    assert relative(small.examples(raw), expected) < 1e-6


def test_the_device_predicts_what_the_run_does(device, folder, federation):
    raw, y = federation.arrays(4, "test")
    with Run.open(folder, engine="local") as run:
        training = run.training()
        rows = training.evaluate(training.server_state(), splits=("test",))
    (found,) = [row for row in rows if row.client_id == 4]
    score = device.score(device.examples(raw), y)
    assert (score.accuracy, score.loss) == (pytest.approx(found.accuracy), pytest.approx(found.loss, rel=1e-5))
    whole = Runtime(device.bundle.path(layout.PREDICT), INTERPRETER)("predict", x=raw)["probabilities"]
    assert relative(device.predict(device.examples(raw)), whole) < 1e-5


def test_all_signatures_are_exact_and_the_trunk_is_named_by_its_hash(bundle, folder):
    found = verify(bundle, interpreter=INTERPRETER)
    assert found.ok and {"trunk.x", "round.dtheta", "personalize.kernel"} <= set(found.worst())
    trunks = {c.file for c in found.comparisons if c.signature == "trunk"}
    assert trunks == {layout.TRUNK, layout.TRUNK_STATIC, layout.TRUNK_FLOAT16, layout.TRUNK_INT8}
    fixed = Runtime(bundle.path(layout.TRUNK_STATIC), INTERPRETER)
    with pytest.raises(BundleError, match=r"raw must be float32 \[32, "):
        fixed("trunk", raw=np.zeros((5, *bundle.manifest["trunk"]["raw_shape"]), np.float32))
    with Run.open(folder, engine="local") as run:
        about = {"file": layout.TRUNK, "raw_shape": list(run.federation.example_shape), "sha256": run.whole.trunk.hash}
        assert bundle.manifest["trunk"] == about
        assert bundle.manifest["model"]["num_backbone_weights"] == run.model.num_backbone_weights
    assert {*TRUNKS, layout.TRUNK_STATIC} <= set(bundle.manifest["files"])


def test_smaller_trunks_and_what_they_cost(bundle, federation):
    raw, y = federation.arrays(4, "test")
    x = {name: DeviceClient(bundle, interpreter=INTERPRETER, trunk=name).examples(raw) for name in TRUNKS}
    away = [relative(x[name], x[layout.TRUNK]) for name in TRUNKS[1:]]
    assert 0 < away[0] < 1e-2 and 0 < away[1] < 0.2
    for name in TRUNKS[1:]:  # for 32 examples: fewer are filled up, and what an example becomes is its own affair
        assert Runtime(bundle.path(name), INTERPRETER).has_fixed_rows("trunk", "raw")
        client = DeviceClient(bundle, interpreter=INTERPRETER, trunk=name, chunk=7)
        many = np.resize(raw, (35, *raw.shape[1:]))
        assert relative(client.examples(many)[3:], client.examples(many[3:])) < 1e-6
    quality = bundle.manifest["quality"]
    assert quality[layout.TRUNK]["centred_cosine"] > 0.999999
    assert all(quality[name]["centred_cosine"] > 0.99 for name in TRUNKS)
    with pytest.raises(BundleError, match="has no trunk_int4.tflite"):
        DeviceClient(bundle, interpreter=INTERPRETER, trunk="trunk_int4.tflite")
    with pytest.raises(BundleError, match="is not the file of a frozen trunk"):
        DeviceClient(bundle, interpreter=INTERPRETER, trunk=layout.PROGRAM)


def test_raw_examples_in_place_of_features_are_refused(device, federation):
    raw, y = federation.arrays(4, "train")
    with pytest.raises(BundleError, match="examples must be float32"):
        device.predict(raw)
    with pytest.raises(BundleError, match="example 3 holds NaN"):
        device.examples(np.where(np.arange(len(raw)).reshape(-1, 1, 1, 1) == 3, np.nan, raw).astype(np.float32))


def test_a_manifest_that_names_another_trunk(bundle, tmp_path):
    copy = shutil.copytree(bundle.folder, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    for changed, said in (
        ({"file": "other.tflite"}, "trunk.file is other.tflite"),
        ({"raw_shape": [0]}, "trunk.raw_shape"),
        ({"sha256": "0"}, "trunk.sha256 must be 64 hexadecimal digits"),
    ):
        new = {**manifest, "trunk": manifest["trunk"] | changed}
        (copy / "manifest.json").write_text(json.dumps({**new, "hash": manifest_hash(new)}))
        with pytest.raises(BundleError, match=said):
            Bundle(copy)


def images():
    return np.random.default_rng(0).random((9, 6, 6, 2), np.float32)


def small_network():
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3, activation="relu", name="below")(x)
    x = layers.Flatten(name="flat")(x)
    x = layers.Dense(7, activation="tanh", name="first")(x)
    return keras.Model(inputs, layers.Dense(5, activation="relu", name="second")(x))


WAYS = {
    "trunk": {"train_from": "first"},
    "lora": {"adapters": "lora:2"},
    "trunk and scale_shift": {"train_from": "first", "adapters": "scale_shift"},
    "bottleneck": {"adapters": "bottleneck:2"},
}


@pytest.mark.parametrize("name", slow_but(WAYS, ci=("trunk and scale_shift",)))
def test_every_signature_of_a_model_that_is_given(name, tmp_path):
    model = SplitModel(small_network(), **WAYS[name])
    rng = np.random.default_rng(2)
    theta = tuple(w + rng.normal(0, 0.1, w.shape).astype(np.float32) for w in model.initial_theta)
    head, y = random_head(model, 3), np.arange(9, dtype=np.int32) % 3
    bundle = export((model, theta, head), out=tmp_path / "b", train=(images(), y), test=(images(), y))
    assert verify(bundle, interpreter=INTERPRETER).ok
    device = DeviceClient(bundle, interpreter=INTERPRETER)
    expected = tf.nn.softmax(model.features(theta, images()) @ head.kernel + head.bias)
    assert relative(device.predict(device.examples(images())), expected) < 1e-5
    rows = bundle.manifest["model"]["theta"]
    assert [tuple(row["shape"]) for row in rows] == [w.shape for w in theta] and len({r["name"] for r in rows}) > 1


def test_what_a_device_cannot_keep_is_refused(tmp_path):
    model = SplitModel(small_network(), adapters="lora:2", personal="B")
    with pytest.raises(ExportError, match="stay with the client"):
        export((model, model.initial_theta, random_head(model, 3)), out=tmp_path / "b")
    model = SplitModel(small_network(), train_from="first")
    with pytest.raises(ExportError, match="no program for a frozen trunk"):
        export((model, model.initial_theta, random_head(model, 3)), out=tmp_path / "b", browser=True)
    assert not list(tmp_path.iterdir())
