"""Models that a device cannot have are refused in one line that names what, and what to do."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from helpers.truth import random_head
from tflite_export import DeviceClient, ExportError, export, verify
from tflite_export.convert.gradients import UnsupportedLayerError
from tfpfl.models import SplitModel


def refused(backbone, folder, **how):
    """The message with which the export of a backbone is refused; nothing half-made is left."""
    model = SplitModel(backbone)
    with pytest.raises((ExportError, UnsupportedLayerError)) as caught:
        export((model, model.initial_theta, random_head(model, 3)), out=folder / "b", **how)
    assert not list(folder.iterdir()) and "\n" not in str(caught.value)
    return str(caught.value)


def frozen():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="relu")])
    model.trainable = False
    return model


def test_a_backbone_that_does_not_train(tmp_path):
    for rounds in (True, False):
        assert "no weight of the backbone trains" in refused(frozen(), tmp_path, rounds=rounds)


@pytest.mark.parametrize("layer", [layers.GRU, layers.LSTM])
def test_a_recurrent_layer_even_without_rounds(layer, tmp_path):
    backbone = keras.Sequential([keras.Input((6, 3)), layer(4)])
    said = refused(backbone, tmp_path, rounds=False)
    assert "not built in: tf.TensorList" in said and "unroll=True" in said
    assert len(said) < 500


def test_a_recurrent_layer_of_fixed_length_is_exported_without_rounds(tmp_path):
    model = SplitModel(keras.Sequential([keras.Input((6, 3)), layers.GRU(4, unroll=True)]))
    bundle = export((model, model.initial_theta, random_head(model, 3)), out=tmp_path / "b", rounds=False)
    x = np.random.default_rng(0).random((5, 6, 3), np.float32)
    found = DeviceClient(bundle, interpreter=tf.lite.Interpreter).features(x)
    np.testing.assert_allclose(found, model.features(model.theta(), x), atol=1e-6)


def test_a_layer_normalization_is_not_called_a_batch_normalization(tmp_path):
    stack = [layers.Dense(4), layers.LayerNormalization(name="norm"), layers.Flatten()]
    backbone = keras.Sequential([keras.Input((6, 3)), *stack])
    said = refused(backbone, tmp_path, rounds=True)
    assert "norm" in said and "BatchNormalization with moving" not in said and "rounds=False" in said


def without_biases(activation):
    """Products without anything that is added, which TensorFlow's converter takes for something else."""
    first = layers.Dense(6, use_bias=False, activation=activation)
    return keras.Sequential([keras.Input((4,)), first, layers.Dense(5, activation=activation)])


@pytest.mark.parametrize("activation", ["relu", "relu6"])
def test_no_activation_is_lost_behind_a_layer_without_bias(activation, tmp_path):
    model = SplitModel(without_biases(activation))
    bundle = export((model, model.initial_theta, random_head(model, 3)), out=tmp_path / "b", inference=False)
    assert verify(bundle, interpreter=tf.lite.Interpreter).ok


def test_nothing_is_written_if_the_converter_lost_something(tmp_path, monkeypatch):
    monkeypatch.setattr("tflite_export.convert.gradients.forward._keep_activation", lambda *_: None)
    assert "is not what TensorFlow" in refused(without_biases("relu"), tmp_path, inference=False)
