"""Backbones that people bring: MobileNetV2, a GRU, a transformer and a DS-CNN train in both engines."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from tfpfl.algorithms import build_algorithm
from tfpfl.data import Federation
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.scoring import Scorer
from tfpfl.models import SplitModel
from tfpfl.studies.battery_subject import Trained, distance, visits_by_id

layers = keras.layers
CLIENTS, TOKENS, LENGTH = 3, 12, 6


def gru():
    """Token 0 is padding, which the mask leaves out."""
    x = keras.Input((LENGTH,), dtype="int32")
    h = layers.Embedding(TOKENS, 8, mask_zero=True)(x)
    return keras.Model(x, layers.GRU(8)(h))


def transformer():
    """Two layers of self-attention with two heads each; positions are learned."""
    x = keras.Input((LENGTH,), dtype="int32")
    h = layers.Embedding(TOKENS, 8)(x)
    for _ in range(2):
        h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4)(h, h))
        h = layers.LayerNormalization()(h + layers.Dense(8)(layers.Dense(16, activation="relu")(h)))
    return keras.Model(x, layers.GlobalAveragePooling1D()(h))


def ds_cnn():
    """A depthwise separable network as for keywords, with BatchNormalization."""
    x = keras.Input((12, 8, 1))
    h = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, strides=2, use_bias=False)(x)))
    h = layers.ReLU()(layers.BatchNormalization()(layers.DepthwiseConv2D(3, padding="same", use_bias=False)(h)))
    h = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(12, 1, use_bias=False)(h)))
    return keras.Model(x, layers.GlobalAveragePooling2D()(h))


def mobilenet():
    """As keras.applications has it: 52 trainable BatchNormalizations, depthwise convolutions, ReLU6.

    Its statistics are those of some pictures, as in a network that was trained before: with means 0 and variances 1
    nothing would be left of a picture after so many layers.
    """
    network = keras.applications.MobileNetV2(
        input_shape=(96, 96, 3), alpha=0.35, include_top=False, weights=None, pooling="avg"
    )
    normalizations = [layer for layer in network.layers if isinstance(layer, keras.layers.BatchNormalization)]
    for layer in normalizations:
        layer.momentum, layer.was = 0.0, layer.momentum
    network(pictures((96, 96, 3))(np.random.default_rng(9), np.arange(16) % 2), training=True)
    for layer in normalizations:
        layer.momentum = layer.was
    return network


def sentences(rng, y):
    """A class has its own half of the tokens; a third of the places is padding."""
    tokens = 1 + 5 * y[:, None] + rng.integers(5, size=(len(y), LENGTH))
    return np.where(np.arange(LENGTH) < rng.integers(4, LENGTH + 1, size=(len(y), 1)), tokens, 0).astype(np.int32)


def pictures(shape):
    def draw(rng, y):
        wave = np.sin(np.arange(shape[0]) * 0.6)[:, None, None]
        return (
            np.where(y[:, None, None, None] == 1, wave, wave[::-1]) + 0.3 * rng.standard_normal((len(y), *shape))
        ).astype(np.float32)

    return draw


def clients_with(draw, folder, examples=12):
    rng, clients = np.random.default_rng(0), {}
    for i in range(CLIENTS):
        y = np.arange(examples) % 2
        clients[f"c{i}"] = {"train": (draw(rng, y), y), "test": (draw(rng, y), y)}
    return Federation.from_clients(clients, out=folder, validation=0.0)


RATES = {"pflego": {"tau": 10, "beta": 0.1, "rho": 0.02}, "fedavg": {"steps": 4, "eta": 0.1}}


def trained(engine_of, make, federation, name="pflego", rounds=6, hyper=None, **model_args):
    """(the training losses before and after, the server's state) of some rounds with everyone."""
    keras.utils.set_random_seed(1)
    model = SplitModel(make(), **model_args)
    algorithm = build_algorithm(name, model, federation.population(), **RATES[name] | (hyper or {}))
    run, ids = Trained(algorithm, engine_of(algorithm, federation)), list(range(CLIENTS))

    def loss():
        scores = Scorer(algorithm, federation, ("train",))(
            run.server, run.states(ids), visits_by_id(run.population, ids, 9)
        )
        return np.mean([s["train_loss"] for s in scores])

    before = loss()
    run.rounds(rounds)
    return before, loss(), run.server


def with_tff(algorithm, federation):
    from tfpfl.engines.tff.process import federate

    return federate(algorithm, federation)


SMALL = {"gru": (gru, sentences), "transformer": (transformer, sentences), "ds_cnn": (ds_cnn, pictures((12, 8, 1)))}


def test_the_gru_does_not_see_what_is_padded():
    keras.utils.set_random_seed(1)
    model = SplitModel(gru())
    theta = model.theta()
    x = sentences(np.random.default_rng(0), np.array([0, 1]))
    x[:, 4:] = 0  # the other four are words in every sentence
    embedding, recurrent = model.backbone.layers[1], model.backbone.layers[-1]
    alone = recurrent(embedding(x[:, :4]))  # the same sentences without the padded places
    np.testing.assert_allclose(model.features(theta, x), alone, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("which", SMALL)
def test_it_learns(which, tmp_path):
    make, draw = SMALL[which]
    before, after, _ = trained(Simulation, make, clients_with(draw, tmp_path / "f"), rounds=12)
    assert after < 0.6 * before, f"the training loss was {before:.3f} and is {after:.3f}"


@pytest.mark.slow
@pytest.mark.parametrize("which", SMALL)
def test_both_engines_agree(which, tmp_path, tff):
    make, draw = SMALL[which]
    federation = clients_with(draw, tmp_path / "f")
    sgd = {"server_opt": "sgd"}  # Adam would blow up rounding: the gradient of an attention's key bias is 0
    ours, theirs = (trained(e, make, federation, rounds=2, hyper=sgd)[2] for e in (Simulation, with_tff))
    assert distance(ours, theirs) < 1e-4


MOBILENETS = [(name, mode) for name in ("pflego", "fedavg") for mode in ("frozen", "local", "shared")]
MOBILE = {"pflego": {"beta": 0.02, "rho": 3e-4}, "fedavg": {"eta": 3e-4, "client_opt": "adam"}}


@pytest.mark.parametrize(("name", "batch_norm"), slow_but(MOBILENETS, ci=[("fedavg", "shared")]))
def test_mobilenet_learns_with_batch_normalization_in_all_three_ways(batch_norm, name, tmp_path):
    federation = clients_with(pictures((96, 96, 3)), tmp_path / "f", examples=8)
    # Where statistics move with four clients' eight pictures, larger steps go either way, as rounding decides.
    hyper = MOBILE[name] | ({"eta": 1e-4} if name == "fedavg" and batch_norm != "frozen" else {})
    before, after, _ = trained(Simulation, mobilenet, federation, name, rounds=4, hyper=hyper, batch_norm=batch_norm)
    assert after < 0.9 * before, f"the training loss was {before:.3f} and is {after:.3f}"


@pytest.mark.slow
@pytest.mark.parametrize("batch_norm", ["frozen", "local", "shared"])
def test_both_engines_agree_about_batch_normalization(batch_norm, tmp_path, tff):
    federation = clients_with(pictures((12, 8, 1)), tmp_path / "f")
    made = [
        trained(e, ds_cnn, federation, "fedavg", rounds=2, batch_norm=batch_norm)[2] for e in (Simulation, with_tff)
    ]
    assert distance(*made) < 1e-4


@pytest.mark.table
@pytest.mark.slow
@pytest.mark.parametrize("batch_norm", ["frozen", "local", "shared"])
def test_both_engines_agree_about_mobilenet(batch_norm, tmp_path, tff):
    federation = clients_with(pictures((96, 96, 3)), tmp_path / "f", examples=4)
    how = {"hyper": {"rho": 0.05, "server_opt": "sgd"}, "batch_norm": batch_norm}
    ours, theirs = (trained(e, mobilenet, federation, rounds=1, **how)[2] for e in (Simulation, with_tff))
    start = trained(Simulation, mobilenet, federation, rounds=0, **how)[2]
    moved, away = distance(ours, start), distance(ours, theirs)
    assert moved > 1e-2 and away < 0.01 * moved, f"moved {moved:.1e}, engines differ by {away:.1e}"
    assert len(tf.nest.flatten(ours)) > 100
