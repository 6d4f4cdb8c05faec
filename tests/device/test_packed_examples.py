"""Examples of several arrays on a device: packed into one, which the program cuts; tokens stand among the numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from helpers.truth import random_head, relative, varied
from tflite_export import Bundle, BundleError, DeviceClient, ExampleStore, ExportError, export, simulate_round, verify
from tflite_export.convert.check import fit, gradient
from tflite_export.convert.program import flatten
from tflite_export.device.bench import measure
from tflite_export.device.manifest import check_manifest
from tflite_export.device.payload import decode
from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation
from tfpfl.models import SplitModel
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run

TRAINING = {"tau": 4, "beta": 0.1, "rho": 0.1, "head_rate": 0.1}
LITE = tf.lite.Interpreter
NETWORK = """
import keras
from keras import layers

def build():
    words, sound = keras.Input((4,), dtype="int32", name="words"), keras.Input((3, 2), name="sound")
    x = layers.Concatenate()([layers.Flatten()(layers.Embedding(9, 3)(words)), layers.Flatten()(sound)])
    return keras.Model({"words": words, "sound": sound}, layers.Dense(4, activation="tanh")(x))
"""


def backbone():
    made: dict = {}
    exec(NETWORK, made)
    return made["build"]()


def drawn(count, seed=0):
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 9, (count, 4)).astype(np.int32)
    return {"words": words, "sound": rng.random((count, 3, 2), np.float32)}, np.arange(count, dtype=np.int32) % 3


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    keras.utils.set_random_seed(0)
    model = SplitModel(backbone())
    theta, head = varied(model), random_head(model, 3)
    out = tmp_path_factory.mktemp("several") / "b"
    return model, theta, head, export((model, theta, head), out=out, inference=False, training=TRAINING)


@pytest.mark.slow
def test_the_manifest_names_the_arrays(exported):
    bundle = exported[-1]
    assert verify(bundle, interpreter=LITE).ok and bundle.example_shape == (10,)
    sound = {"name": "sound", "shape": [3, 2], "dtype": "float32", "offset": 0}
    words = {"name": "words", "shape": [4], "dtype": "int32", "offset": 6, "num_tokens": 9}
    assert bundle.manifest["model"]["inputs"] == {"kind": "dict", "arrays": [sound, words]}


@pytest.mark.parametrize("options", [{}, {"chunk": 4}, {"static": True}])
def test_a_round_is_gradient_tapes(exported, options):
    model, theta, head, bundle = exported
    x, y = drawn(10)
    targets = tf.one_hot(y, 3)
    head, theta_ = (tf.nest.map_structure(tf.constant, w) for w in (head, theta))
    fitted = fit(head, model.features(theta_, x), targets, 3, 0.1, safeguard=True)
    _, dtheta, dhead = gradient(model, theta_, fitted, x, targets)
    update = DeviceClient(bundle, interpreter=LITE, **options).round(flatten(theta), x, y)
    assert relative(decode(update.payload), dtheta) < 1e-5
    assert relative(update.head.kernel, fitted.kernel - 0.1 * dhead.kernel) < 1e-5


def test_packed_examples_do_as_well_and_can_be_stored(exported, tmp_path):
    model, theta, _, bundle = exported
    client, (x, y) = DeviceClient(bundle, interpreter=LITE), drawn(6)
    packed = client.examples(x)
    np.testing.assert_array_equal(packed[:, :6].reshape(6, 3, 2), x["sound"])
    np.testing.assert_array_equal(packed[:, 6:], x["words"])
    np.testing.assert_array_equal(client.features(packed), client.features(x))
    assert relative(client.features(x), model.features(theta, x)) < 1e-5
    with ExampleStore(tmp_path / "examples.sqlite", bundle.example_shape) as store:
        store.add(packed, [client.labels[k] for k in y])
        np.testing.assert_array_equal(np.sort(store.arrays(client.labels)[0], 0), np.sort(packed, 0))
    assert measure(bundle, "round", 5, 1, 1, 32, LITE)["milliseconds"] > 0


def test_other_arrays_are_refused(exported):
    client, (x, _) = DeviceClient(exported[-1], interpreter=LITE), drawn(2)
    for bad, said in (
        ({"words": x["words"]}, "must be a dict of 'sound' float32"),
        ((x["sound"], x["words"]), "found a tuple of 2 arrays"),
        (x | {"sound": x["sound"].astype(np.float64)}, "'sound' must be float32"),
        (x | {"sound": x["sound"][:1]}, "as many of each array, found 1 of 'sound', 2 of 'words'"),
        (x | {"sound": x["sound"][0]}, r"'sound' must be .* found float32 \[3, 2\]"),
        (x | {"words": np.int32(3)}, r"'words' must be int32 \['N', 4\], found int32 \[\]"),
        (x | {"words": (x["words"] + 0.5).astype(np.float32)}, "'words' of an example holds what is no whole number"),
        (x | {"words": x["words"] * 0 + 9}, r"'words' of an example holds 9, and this model knows 0..8"),
        (x | {"words": x["words"] + 2**25}, "'words' goes beyond 16,777,216"),
        (x | {"sound": x["sound"] * np.nan}, "example 0 holds NaN"),
        (x | {"words": [[1, 2, 3, 4], [1]]}, "'words' must be one array, found lists or arrays of different shapes"),
        (client.examples(x)[:, :9], r"must be float32 \['N', 10\]"),
    ):
        with pytest.raises(BundleError, match=said):
            client.predict(bad)


def test_a_manifest_whose_arrays_do_not_fit(exported):
    manifest = exported[-1].manifest
    for i, change, said in (
        (1, {"offset": 5}, "arrays before take 6 numbers"),
        (0, {"shape": [3, 1]}, "arrays before take 3 numbers"),
        (1, {"shape": [5]}, "model.inputs has 11 numbers"),
        (1, {"name": "a"}, "in the order of their names"),
        (1, {"dtype": "int8"}, "must be float32 or int32"),
    ):
        arrays = [dict(a) for a in manifest["model"]["inputs"]["arrays"]]
        arrays[i] |= change
        model = manifest["model"] | {"inputs": {"kind": "dict", "arrays": arrays}}
        with pytest.raises(ValueError, match=said):
            check_manifest(manifest | {"model": model})


def test_a_part_of_an_array_as_tokens_is_refused(tmp_path):
    a, b = keras.Input((4,)), keras.Input((3,))
    tokens = layers.Flatten()(layers.Embedding(9, 3)(a[:, :2]))
    model = SplitModel(keras.Model([a, b], layers.Concatenate()([tokens, layers.Dense(2)(a), b])))
    with pytest.raises(InvalidArgument, match="a part of '0' as whole numbers"):
        export((model, model.initial_theta, random_head(model, 3)), out=tmp_path / "b")


@pytest.mark.slow
def test_a_tuple_with_files_for_prediction(tmp_path):
    a, b = keras.Input((4,)), keras.Input((3,))
    model = SplitModel(keras.Model([a, b], layers.Dense(5, activation="relu")(layers.Concatenate()([a, b]))))
    rng = np.random.default_rng(0)
    x, y = (rng.random((9, 4), np.float32), rng.random((9, 3), np.float32)), np.arange(9, dtype=np.int32) % 3
    bundle = export((model, varied(model), random_head(model, 3)), out=tmp_path / "b", train=(x, y), test=(x, y))
    assert verify(bundle, interpreter=LITE).ok and "backbone_int8.tflite" in bundle.manifest["files"]
    client = DeviceClient(bundle, interpreter=LITE)
    assert relative(client.features(x), model.features(varied(model), x)) < 1e-5
    with pytest.raises(BundleError, match="must be a tuple of '0' float32"):
        client.features({"0": x[0], "1": x[1]})
    with pytest.raises(ExportError, match="takes several arrays: leave browser out"):
        export((model, varied(model), random_head(model, 3)), out=tmp_path / "c", browser=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    clients = {f"c{i}": {"train": drawn(9 + i, i), "test": drawn(6, 10 + i)} for i in range(4)}
    federation = Federation.from_clients(clients, out=folder / "f", validation=0.0)
    (folder / "network.py").write_text(NETWORK)
    config = RunConfig(
        hyperparameters={"rho": 0.1, "beta": 0.05, "tau": 5},
        federation=str(federation.path),
        network=f"{folder / 'network.py'}:build",
        participation=0.5,
        rounds=2,
        evaluate_every=0,
    )
    with Run.create(config, folder / "run", federation) as run:
        run.train()
        yield run


@pytest.mark.slow
def test_rounds_on_devices_are_those_of_the_engine(run):
    rows = simulate_round(run, 3, accuracy_every=3, interpreter=LITE)
    assert max(max(r.theta, r.heads) for r in rows) < 1e-5
    assert rows[-1].device_score == rows[-1].engine_score


@pytest.mark.slow
def test_a_run_is_exported(run, tmp_path):
    bundle = export(run, 2, tmp_path / "b", inference=True)
    assert verify(Bundle(tmp_path / "b"), interpreter=LITE).ok and bundle.manifest["training"]["rounds"]
    assert set(bundle.manifest["preprocessing"]["arrays"]) == {"sound", "words"}
    assert "backbone_int8.tflite" not in bundle.manifest["files"]  # tokens would be rounded
    card = (bundle.folder / "MODEL_CARD.md").read_text()
    assert "words (4, whole numbers) from 6 on" in card and "this client has 11 training examples" in card
    assert bundle.manifest["num_examples"] == 11
    x, y = run.federation.arrays(2, "test")
    rows = run.training().evaluate(run.training().server_state(), splits=("test",))
    (found,) = [row for row in rows if row.client_id == 2]
    score = DeviceClient(bundle, interpreter=LITE).score(x, y)
    assert (score.accuracy, score.loss) == (pytest.approx(found.accuracy), pytest.approx(found.loss, rel=1e-5))
