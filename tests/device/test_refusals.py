"""Models that a device cannot have are refused in one line that names what, and what to do."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from helpers.marks import slow_but
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


@pytest.mark.slow
@pytest.mark.parametrize("layer", slow_but([layers.GRU, layers.LSTM], layers.LSTM))
def test_a_recurrent_layer_even_without_rounds(layer, tmp_path):
    backbone = keras.Sequential([keras.Input((6, 3)), layer(4)])
    said = refused(backbone, tmp_path, rounds=False)
    assert "not built in: tf.TensorList" in said and "unroll=True" in said
    assert len(said) < 500


@pytest.mark.slow
def test_a_network_that_is_refused_for_rounds_is_exported_without_them(tmp_path):
    stack = [layers.Dense(4), layers.Lambda(tf.sin, name="waves"), layers.LayerNormalization(), layers.Flatten()]
    backbone = keras.Sequential([keras.Input((6, 3)), *stack])
    said = refused(backbone, tmp_path, rounds=True)
    assert "'waves' (Lambda)" in said and "Sin has no gradient" in said and "rounds=False" in said
    model = SplitModel(backbone)
    source = (model, model.initial_theta, random_head(model, 3))
    bundle = export(source, out=tmp_path / "b", rounds=False, inference=False)
    card = (bundle.folder / "MODEL_CARD.md").read_text()  # neither of rounds nor of files that are not there
    assert "without rounds" in card and "leaves the device" not in card and "| file |" not in card
    x = np.random.default_rng(0).random((5, 6, 3), np.float32)
    found = DeviceClient(bundle, interpreter=tf.lite.Interpreter).features(x)
    np.testing.assert_allclose(found, model.features(model.theta(), x), atol=1e-6)


@pytest.mark.parametrize(
    "mixes",
    [
        lambda x: x - tf.reduce_mean(x, 0),
        lambda x: x / tf.reduce_sum(tf.abs(x), 0, keepdims=True),
        lambda x: x / tf.reduce_max(tf.abs(x)),  # a slip: of all numbers, and not of each example's
    ],
    ids=["mean", "sum", "maximum"],
)
def test_features_that_depend_on_other_examples(mixes, tmp_path):
    inputs = keras.Input((4,))
    backbone = keras.Model(inputs, layers.Lambda(mixes, output_shape=(3,))(layers.Dense(3)(inputs)))
    assert "must not depend on others" in refused(backbone, tmp_path)


def test_normalization_that_stays_with_the_client_is_called_by_the_name_that_it_was_given(tmp_path):
    backbone = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.BatchNormalization()])
    model = SplitModel(backbone, batch_norm="local")
    with pytest.raises(ExportError, match="has batch_norm='local': .* Train with batch_norm='frozen', or take `tfpfl"):
        export((model, model.initial_theta, random_head(model, 3)), out=tmp_path / "b")


def test_a_page_in_a_browser_for_tokens(tmp_path):
    backbone = keras.Sequential([keras.Input((4,)), layers.Embedding(9, 3), layers.Flatten()])
    assert "takes whole numbers: leave browser out" in refused(backbone, tmp_path, browser=True)


def test_an_input_of_which_a_part_is_tokens(tmp_path):
    inputs = keras.Input((4,))
    tokens = layers.Flatten()(layers.Embedding(9, 3)(inputs[:, :2]))
    backbone = keras.Model(inputs, layers.Concatenate()([tokens, layers.Dense(2)(inputs)]))
    assert "one array of one kind" in refused(backbone, tmp_path)


def without_biases(activation):
    """Products without anything that is added, which TensorFlow's converter takes for something else."""
    first = layers.Dense(6, use_bias=False, activation=activation)
    return keras.Sequential([keras.Input((4,)), first, layers.Dense(5, activation=activation)])


@pytest.mark.slow
@pytest.mark.parametrize("activation", slow_but(["relu", "relu6"], "relu"))
def test_no_activation_is_lost_behind_a_layer_without_bias(activation, tmp_path):
    model = SplitModel(without_biases(activation))
    bundle = export((model, model.initial_theta, random_head(model, 3)), out=tmp_path / "b", inference=False)
    assert verify(bundle, interpreter=tf.lite.Interpreter).ok


@pytest.mark.slow
def test_nothing_is_written_if_the_converter_lost_something(tmp_path, monkeypatch):
    monkeypatch.setattr("tflite_export.convert.gradients.forward._keep_activation", lambda *_: None)
    assert "is not what TensorFlow" in refused(without_biases("relu"), tmp_path, inference=False)
