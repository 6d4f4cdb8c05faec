"""The same numbers on LiteRT as in TensorFlow: conversion proves nothing, runtimes have computed wrong silently.

    TFPFL_LITERT="1.4.0 2.3.0" python -m pytest -m litert

Each version gets an environment of its own, see tests/helpers/litert.py. 'newest' takes what the index has.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.networks import OWN, PAPERS
from helpers.truth import random_head, varied
from tflite_export import DeviceClient, export, verify
from tflite_export.device.layout import INEXACT
from tflite_export.device.payload import decode
from tfpfl.models import SplitModel, build_network

VERSIONS = os.environ.get("TFPFL_LITERT", "").split()
NONE = "no LiteRT runtime is asked for (set TFPFL_LITERT)"
ROOT = str(Path(__file__).resolve().parents[2])
PHONES = ["separable", "sequence", "activations", "own statistics", "recurrent", "attention", "masked"]
NETWORKS = [*PAPERS, "strided convolutions", "average pools", "max pools", "residual", *PHONES]


@pytest.fixture(scope="module", params=slow_but(NETWORKS, "mlp200", ci=("omniglot_4conv", "max pools", "attention")))
def bundle(request, tmp_path_factory):
    """A bundle with weights that are not the initial ones."""
    own = OWN.get(request.param)
    model = SplitModel(own() if own else build_network(request.param, PAPERS[request.param]))
    source = (model, varied(model), random_head(model, 4))
    return export(source, out=tmp_path_factory.mktemp("bundles") / "b", inference=request.param in PAPERS)


@pytest.fixture(scope="module", params=VERSIONS or [pytest.param("none", marks=pytest.mark.skip(NONE))])
def litert(request):
    """The Python of an environment with this version of ai-edge-litert and NumPy, and nothing else."""
    from helpers.litert import environment

    return request.param, environment(request.param)


def run(python, *arguments):
    environment = {**os.environ, "PYTHONPATH": ROOT}
    return subprocess.run(
        [str(python), *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=1800
    )


def assert_exact(worst: dict, overlapping: bool):
    """The bounds that the project promises, whatever the manifest says."""
    for name, (largest, l2) in worst.items():
        if name.endswith(".dtheta") and overlapping:
            assert l2 < 1e-3, name
        elif name in INEXACT:
            assert l2 < 0.3, name
        else:
            assert largest < 1e-5, name


@pytest.mark.slow
def test_the_pinned_runtime(bundle):
    found = verify(bundle, interpreter=tf.lite.Interpreter)
    assert found.ok
    assert_exact(found.worst(), bundle.manifest["check"]["max_relative"] is None)


@pytest.mark.litert
def test_every_signature(bundle, litert):
    version, python = litert
    done = run(python, "-m", "tflite_export.device.verification", bundle.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert version in ("newest", found["runtime"].split()[1])
    named = {name.split(".")[0] for name in found["worst"]}
    less_exact = {f.removesuffix(".tflite") for f in bundle.manifest["check"].get("files", ()) if f != "predict.tflite"}
    assert named == {*bundle.manifest["signatures"], *less_exact}
    assert_exact(found["worst"], bundle.manifest["check"]["max_relative"] is None)


ROUND = """
import importlib.util, sys
import numpy as np
from tflite_export.device.client import DeviceClient
assert importlib.util.find_spec("tensorflow") is None
bundle, folder = sys.argv[1:]
with np.load(folder + "/examples.npz") as file:
    x, y, theta = file["x"], file["y"], file["theta"]
for name, options in (("whole", {"chunk": 1000}), ("chunks", {"chunk": 7}), ("static", {"static": True})):
    client = DeviceClient(bundle, folder + "/" + name + ".head", **options)
    update = client.round(theta, x, y)
    client.commit(update)
    open(folder + "/" + name, "wb").write(update.payload)
np.savez(folder + "/found.npz", features=DeviceClient(bundle).features(x))
"""


@pytest.mark.litert
def test_a_round_of_the_device_client(bundle, litert, tmp_path):
    rng, shape = np.random.default_rng(0), (40, *bundle.example_shape)
    tokens = bundle.num_tokens
    x = rng.random(shape, np.float32) if tokens is None else rng.integers(0, tokens, shape).astype(np.int32)
    y, theta = rng.integers(0, 4, 40).astype(np.int32), bundle.theta() * np.float32(0.9)
    np.savez(tmp_path / "examples.npz", x=x, y=y, theta=theta)
    done = run(litert[1], "-c", ROUND, bundle.folder, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    client = DeviceClient(bundle, interpreter=tf.lite.Interpreter, chunk=1000)
    with np.load(tmp_path / "found.npz") as file:
        features = client.features(x)
        assert np.abs(file["features"] - features).max() < 1e-5 * np.abs(features).max()
    update = client.round(theta, x, y)
    client.commit(update)
    expected = decode(update.payload)
    for name in ("whole", "chunks", "static"):
        found = decode((tmp_path / name).read_bytes())
        assert np.linalg.norm(found - expected) < 1e-3 * np.linalg.norm(expected), name
        again = DeviceClient(bundle, tmp_path / f"{name}.head", interpreter=tf.lite.Interpreter)
        assert np.abs(again.head[0] - client.head[0]).max() < 1e-5


@pytest.mark.litert
def test_inference_files(bundle, litert):
    """The precisions of the backbone run on LiteRT as well, and give the features that the manifest promises."""
    quality = bundle.manifest["quality"]
    if not quality:
        pytest.skip("this bundle was exported without them")
    code = (
        "import sys, numpy as np; from pathlib import Path; from tflite_export.device.runtime import Runtime;"
        "x = np.random.default_rng(0).random((8, *map(int, sys.argv[2].split(','))), np.float32);"
        "phi = [Runtime(Path(sys.argv[1]) / n)('features', x=x)['phi'] for n in sys.argv[3:]];"
        "print(*[np.linalg.norm(p - phi[0]) / np.linalg.norm(phi[0]) for p in phi])"
    )
    shape = ",".join(map(str, bundle.example_shape))
    done = run(litert[1], "-c", code, bundle.folder, shape, *quality)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(float(error) < 0.1 for error in done.stdout.split())
