"""The rounds in NumPy with which `benchmarks/device_speed.py` compares: GradientTape's numbers, to 1e-4."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.truth import examples, random_head, relative_l2, true_gradient, true_steps, varied
from tflite_export.convert.program import flatten

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def benchmarks():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


NAMES = ["mlp200", "conv_bn", "fedavg_cnn", "omniglot_4conv", "cifar_2conv", "ds_cnn", "gru", "transformer"]


@pytest.mark.parametrize("name", slow_but(NAMES, "mlp200", "conv_bn", "ds_cnn"))
def test_a_round_in_numpy_is_gradient_tapes(name):
    import device_speed
    import numpy_networks

    model = device_speed.keras_model(name)
    theta, head, (x, y) = varied(model), random_head(model, 3), examples(model, 5, 3)
    network = numpy_networks.Network(name, device_speed.statistics(model))
    traced = SimpleNamespace(features=tf.function(model.features))  # Keras 2 unrolls a GRU in graphs only
    fixed = {"weights": np.full(5, 0.2, np.float32), "rate": np.float32(0.3)}
    for beta, steps in ((0.05, 4), (1e4, 1)):  # the second raises the loss: the head is taken back
        found = network.round(flatten(theta), x, y, **fixed, **head._asdict(), steps=steps, beta=np.float32(beta))
        after = true_steps(traced.features(theta, x).numpy(), y, head, steps, beta) if steps > 1 else head
        loss, dtheta, dkernel, dbias = true_gradient(traced, theta, after, x, y)
        bound = 1e-3 if name == "cifar_2conv" else 1e-4  # near-ties of overlapping windows
        assert relative_l2(found["dtheta"], dtheta) < bound
        assert relative_l2(found["kernel"], after.kernel - 0.3 * dkernel) < 1e-4
        assert relative_l2(found["bias"], after.bias - 0.3 * dbias) < 1e-4
        assert found["loss"] == pytest.approx(loss, rel=1e-4)
