"""Bundles and data that a server makes for its devices: a device computes the features of the run from them."""

import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from helpers.truth import relative
from tflite_export import DeviceClient
from tflite_export.device.__main__ import read_examples, take_part
from tflite_export.device.errors import InvalidInput
from tflite_export.device.live.client import LiveDevice
from tflite_export.device.live.work import Work, check_examples
from tfpfl.data import Federation
from tfpfl.live.serve import bundles_of, write_data
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run

RNG = np.random.default_rng(0)


def numbers(n):
    return RNG.normal(size=(n, 4)).astype(np.float32)


def pixels_and_age(n):
    return {"pixels": RNG.integers(0, 255, (n, 3, 2), np.uint8), "age": numbers(n)}


def deep():
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh", name="a"), layers.Dense(3, "tanh", name="b")])


def of_two():
    age, pixels = keras.Input((4,), name="age"), keras.Input((3, 2), name="pixels")
    x = layers.Concatenate()([age, layers.Flatten()(pixels)])
    return keras.Model({"age": age, "pixels": pixels}, layers.Dense(3, "tanh")(x))


@pytest.mark.slow
@pytest.mark.parametrize("drawn, network, train_from", [(numbers, deep, "b"), (pixels_and_age, of_two, None)])
def test_a_device_computes_the_features_of_the_run(drawn, network, train_from, tmp_path):
    """Those of a frozen trunk, which comes with the bundle, and of examples of several arrays."""
    network().save(tmp_path / "n.keras")
    clients = [(drawn(12), np.arange(12) % 2) for _ in range(2)]
    federation = Federation.from_clients(clients, out=tmp_path / "f", validation=0.0)
    config = RunConfig(network=str(tmp_path / "n.keras"), train_from=train_from, participation=1.0)
    with Run.create(config, tmp_path / "run", federation) as run:
        (folder,) = bundles_of(run).values()
        write_data(run.federation, run.population, 1, tmp_path / "data")
        client = DeviceClient(folder, interpreter=tf.lite.Interpreter)
        x, y = read_examples(tmp_path / "data")["train"]
        expected, labels = run.examples.arrays(1, "train")
        np.testing.assert_array_equal(y, labels)
        found = client.features(client.examples(x))
        assert relative(found, run.model.features(run.model.theta(), expected)) < 1e-5
        assert ("trunk" in client.bundle.manifest) == (train_from is not None)


def test_a_device_refuses_pixels_that_are_not_preprocessed(tmp_path):
    clients = [(RNG.integers(0, 255, (12, 6), np.uint8), np.arange(12) % 2) for _ in range(2)]
    federation = Federation.from_clients(clients, out=tmp_path / "f", validation=0.0)
    with Run.create(RunConfig(network="mlp200", participation=1.0), tmp_path / "run", federation) as run:
        (folder,) = bundles_of(run).values()
        x, y = run.examples.arrays(1, "train")
    state = SimpleNamespace(bundle=folder, head=tmp_path / "head", theta=tmp_path / "theta")
    with pytest.raises(InvalidInput, match=r"x of train are pixels as they are stored \(uint8\).*0.00392157 x \+ 0"):
        Work(state, {"train": clients[1]}, tf.lite.Interpreter)
    found, _ = Work(state, {"train": (x, y)}, tf.lite.Interpreter).examples["train"]
    np.testing.assert_array_equal(found, x)
    # What a visit would refuse is refused before the device joins: its update would be lost at the end of the visit.
    with pytest.raises(InvalidInput, match=r"the examples of test: label 2 is out of range"):
        Work(state, {"train": (x, y), "test": (x[:2], [0, 2])}, tf.lite.Interpreter)
    with pytest.raises(InvalidInput, match=r"the examples of train: labels must be"):
        Work(state, {"train": (x, y.astype(np.float32))}, tf.lite.Interpreter)


@pytest.mark.parametrize(
    ("y", "said"),
    [
        ([0, np.nan], "y of train hold nan: leave such examples out"),
        ([-1, -1], "y of train hold -1, and classes are numbered from 0"),
        ([0, 1.5], "y of train hold 1.5, and classes are numbered from 0"),
    ],
    ids=str,
)
def test_labels_that_show_no_number_of_classes_are_refused_before_anything_else(y, said, tmp_path):
    np.savez(tmp_path / "train.npz", x=np.ones((2, 3), np.float32), y=np.array(y))
    examples = read_examples(tmp_path)
    with pytest.raises(InvalidInput, match=said):
        check_examples(examples)
    if np.isfinite(y).all():  # numbers to predict
        check_examples(examples | {"classes": 1})


@pytest.mark.parametrize("single", ["x", "y"])
def test_a_single_number_is_no_array_of_examples(single, tmp_path):
    arrays = {"x": np.ones((2, 3), np.float32), "y": np.array([0, 1])} | {single: np.float32(1)}
    np.savez(tmp_path / "train.npz", **arrays)
    with pytest.raises(InvalidInput, match="train.npz must have arrays of examples, and x or y is a single number"):
        read_examples(tmp_path)


@pytest.mark.parametrize("told", ['{"classes": 3.7}', '{"classes": Infinity}', '{"classes": 0}', "[3]", "{}", "{"])
def test_a_number_of_classes_that_is_none(told, tmp_path):
    np.savez(tmp_path / "train.npz", x=np.ones((2, 3), np.float32), y=np.array([0, 1]))
    (tmp_path / "about.json").write_text(told)
    with pytest.raises(InvalidInput, match='about.json must be JSON such as {"classes": 3}'):
        read_examples(tmp_path)


def test_a_compressed_file_that_is_damaged(tmp_path):
    path = tmp_path / "train.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).random((50, 3)), y=np.arange(50) % 2)
    content = bytearray(path.read_bytes())
    content[200:260] = b"\xff" * 60
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match="train.npz must be a file of NumPy with the arrays x and y"):
        read_examples(tmp_path)


def test_a_patience_that_is_no_time(tmp_path):
    """A device would wait for ever for a server that is away."""
    with pytest.raises(InvalidInput, match="patience must be a number of seconds, found nan"):
        LiveDevice("http://127.0.0.1:9", tmp_path, {"train": (np.ones((2, 3)), np.array([0, 1]))}, patience=math.nan)


@pytest.mark.parametrize("most", [0, -1])
def test_a_number_of_updates_that_no_device_could_stop_after(most, tmp_path):
    """The device joined, ended at once, and said that all was well."""
    with pytest.raises(InvalidInput, match=f"--most must be at least 1, found {most}: leave it out"):
        take_part("http://127.0.0.1:1", tmp_path, tmp_path / "state", "token", most=most)
    assert not (tmp_path / "state").exists()
