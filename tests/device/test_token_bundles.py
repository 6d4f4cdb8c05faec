"""A backbone of whole numbers on a device: the examples are int32, and every token is one that the Embedding has."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from helpers.truth import examples, random_head, relative, true_gradient, true_steps, varied
from tflite_export import BundleError, DeviceClient, export, simulate_round, verify
from tflite_export.convert.program import flatten
from tflite_export.demo import demonstrate
from tflite_export.device.errors import InvalidInput
from tflite_export.device.live.work import Work
from tflite_export.device.payload import decode
from tfpfl.algorithms import build_algorithm
from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation
from tfpfl.models import SplitModel
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run

TRAINING = {"tau": 4, "beta": 0.1, "rho": 0.1, "head_rate": 0.1}
LITE = tf.lite.Interpreter


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    stack = [layers.Embedding(9, 3), layers.Flatten(), layers.Dense(4, activation="tanh")]
    model = SplitModel(keras.Sequential([keras.Input((4,)), *stack]))
    theta, head = varied(model), random_head(model, 3)
    out = tmp_path_factory.mktemp("tokens") / "b"
    return model, theta, head, export((model, theta, head), out=out, inference=False, training=TRAINING)


@pytest.mark.slow
def test_every_signature(exported):
    found = verify(exported[-1], interpreter=LITE)
    assert found.ok and {c.signature for c in found.comparisons} >= {"round", "joint_gradient", "features"}
    assert found.worst().keys() >= {"personalize.loss_before", "head_step.loss_before", "personalize.loss"}


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 40])
def test_a_mean_over_the_tokens_that_are_not_masked(tmp_path, n):
    """Of an example of zeros, such as one that only fills up a chunk, this network makes NaN."""
    mean = layers.GlobalAveragePooling1D()
    stack = [layers.Embedding(9, 3, mask_zero=True), mean, layers.Dense(4, activation="tanh")]
    model = SplitModel(keras.Sequential([keras.Input((4,)), *stack]))
    theta, head = varied(model), random_head(model, 3)
    bundle = export((model, theta, head), out=tmp_path / "b", inference=False, training=TRAINING)
    assert verify(bundle, interpreter=LITE).ok
    x, y = examples(model, n, 3)
    x[:, 0] = np.maximum(x[:, 0], 1)
    client = DeviceClient(bundle, interpreter=LITE, static=True)
    update = client.round(flatten(theta), x, y)
    fitted = true_steps(model.features(theta, x).numpy(), y, head, 3, 0.1)
    _, dtheta, dkernel, _ = true_gradient(model, theta, fitted, x, y)
    assert relative(decode(update.payload), dtheta) < 1e-5
    assert relative(update.head.kernel, fitted.kernel - 0.1 * dkernel) < 1e-5


@pytest.mark.parametrize("options", [{}, {"chunk": 4}, {"static": True}])
def test_a_round_of_the_device_client(exported, options):
    model, theta, head, bundle = exported
    x, y = examples(model, 10, 3)
    client = DeviceClient(bundle, interpreter=LITE, **options)
    update = client.round(flatten(theta), x, y)
    fitted = true_steps(model.features(theta, x).numpy(), y, head, 3, 0.1)
    _, dtheta, dkernel, _ = true_gradient(model, theta, fitted, x, y)
    table = dtheta[:27].reshape(9, 3)
    assert relative(decode(update.payload), dtheta) < 1e-5 and np.abs(table[np.unique(x)]).min() > 0
    assert relative(update.head.kernel, fitted.kernel - 0.1 * dkernel) < 1e-5


@pytest.mark.slow
def test_rounds_on_devices_are_those_of_the_engine(exported, tmp_path):
    model, rng = exported[0], np.random.default_rng(0)

    def draw(count):
        return rng.integers(0, 9, (count, 4)).astype(np.int32), np.arange(count) % 3

    clients = {f"c{i}": {"train": draw(9 + i), "test": draw(6)} for i in range(4)}
    federation = Federation.from_clients(clients, out=tmp_path / "f", validation=0.0)
    hyper = {"rho": 0.1, "beta": 0.05, "server_opt": "sgd", "tau": 5}
    config = RunConfig(algorithm="pflego", hyperparameters=hyper, network="mlp200", participation=0.5)
    config = config.resolved(federation)
    population = federation.population(config.sampling_plan(), labels=config.labels)
    algorithm = build_algorithm("pflego", model, population, **config.hyperparameters)
    rows = simulate_round((algorithm, config, federation), 3, accuracy_every=3)
    assert max(max(r.theta, r.heads) for r in rows) < 2e-6
    assert rows[-1].device_score == rows[-1].engine_score


NETWORK = """
import keras
from keras import layers

def net():
    return keras.Sequential([keras.Input((4,)), layers.Embedding(9, 3), layers.Flatten(), layers.Dense(5, "relu")])
"""


@pytest.mark.slow
def test_the_demonstration_of_tokens_and_of_clients_with_too_few_examples(tmp_path):
    (tmp_path / "network.py").write_text(NETWORK)
    rng = np.random.default_rng(0)
    sizes = {"a": (9, 6), "b": (9, 0), "c": (3, 6)}
    clients = {
        name: {
            split: (rng.integers(0, 9, (n, 4)).astype(np.int32), np.arange(n) % 3)
            for split, n in zip(("train", "test"), each, strict=True)
        }
        for name, each in sizes.items()
    }
    federation = Federation.from_clients(clients, out=tmp_path / "f", validation=0.0)
    config = RunConfig(
        hyperparameters={"tau": 3}, network=f"{tmp_path / 'network.py'}:net", participation=1.0, rounds=1
    )
    with Run.create(config, tmp_path / "run", federation) as run:
        run.train()
        for client, said in (("b", r"client 1 \(b\) has 0 test"), ("c", r"client 2 \(c\) has 3 training")):
            with pytest.raises(InvalidArgument, match=f"{said} examples, and the demonstration needs"):
                demonstrate(run, client, tmp_path / "b")
        assert not (tmp_path / "b").exists()
        assert demonstrate(run, "a", tmp_path / "b").verification.ok


def test_what_is_no_token_is_refused(exported):
    bundle = exported[-1]
    client, x = DeviceClient(bundle, interpreter=LITE), np.zeros((2, 4), np.int32)
    assert client.predict(x).shape == (2, 3)
    with pytest.raises(BundleError, match=r"must be int32 \['N', 4\], found float32"):
        client.predict(x.astype(np.float32))
    for bad in (-1, 9):
        with pytest.raises(BundleError, match=f"an example holds {bad}, and this model knows 0..8"):
            client.predict(np.where(np.eye(2, 4, dtype=bool), bad, x).astype(np.int32))


@pytest.mark.parametrize("token", [1.5, 2**32 + 1, np.nan])
def test_a_device_in_live_rounds_makes_no_other_token_of_a_number(exported, token, tmp_path):
    """A fraction was cut off, and what int32 does not have became another token."""
    bundle = exported[3]
    state = SimpleNamespace(bundle=bundle.folder, head=tmp_path / "head.bin", theta=tmp_path / "theta.bin")
    x, y = np.ones((3, *bundle.example_shape)), np.zeros(3, np.int32)
    taken = Work(state, {"train": (x, y)}, tf.lite.Interpreter).examples["train"][0]
    assert taken.dtype == np.int32 and np.array_equal(taken, x)
    x[1, 2] = token
    with pytest.raises(InvalidInput, match=f"whole numbers of 32 bits.* found float64, of which one is {token:.1f}"):
        Work(state, {"train": (x, y)}, tf.lite.Interpreter)
