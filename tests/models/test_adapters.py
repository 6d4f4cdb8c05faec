"""Adapters: at the start the model is the backbone, and gradients are those through the changed weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.toys import backbone, distance, on_disk
from tfpfl.algorithms import pflego
from tfpfl.checks import InvalidArgument
from tfpfl.data.population import Sampling
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.visit import visits
from tfpfl.models import SplitModel
from tfpfl.models.adapters import parse

layers = keras.layers
X = np.random.default_rng(5).standard_normal((11, 4))
KINDS = ["lora:2", "lora:2:6", "scale_shift", "bottleneck:3"]


def convolutions(bias=True, dtype="float64"):
    """1x1 convolutions, of which one has groups, beside layers that take no adapters."""
    stack = [
        layers.Conv2D(6, 1, activation="tanh", use_bias=bias, name="first"),
        layers.Conv2D(6, 3, activation="tanh", name="wide"),
        layers.Conv2D(6, 1, groups=2, name="groups"),
        layers.DepthwiseConv2D(1, name="depthwise"),
        layers.Conv2D(4, 1, strides=2, use_bias=bias, name="second"),
        layers.Flatten(),
    ]
    stack = [type(layer).from_config({**layer.get_config(), "dtype": dtype}) for layer in stack]
    model = keras.Sequential([keras.Input((5, 5, 2), dtype=dtype), *stack])
    rng = np.random.default_rng(3)
    model.set_weights([0.5 * rng.standard_normal(w.shape) for w in model.get_weights()])
    return model


def without_bias():
    """The same, where a shift must be added by the activation."""
    return convolutions(bias=False)


def moved(model, seed=0):
    """Other weights of the adapters, none of which is 0."""
    rng = np.random.default_rng(seed)
    return tuple(tf.constant(w + 0.3 * rng.standard_normal(w.shape)) for w in model.initial_theta)


@pytest.mark.parametrize("adapters", slow_but(KINDS, "scale_shift", "bottleneck:3"))
@pytest.mark.parametrize("make", slow_but([backbone, convolutions, without_bias], backbone, without_bias))
def test_at_the_start_the_model_is_the_backbone(make, adapters):
    whole = make()
    x = np.random.default_rng(2).standard_normal((7, *whole.input_shape[1:]))
    model = SplitModel(whole, adapters=adapters)
    assert np.array_equal(model.features(model.theta(), x), SplitModel(whole).features(SplitModel(whole).theta(), x))
    assert distance(model.features(moved(model), x), whole(x)) > 1e-3
    assert model.num_backbone_weights == sum(w.size for w in model.initial_theta) < 200
    assert np.array_equal(whole(x), make()(x))  # its weights and activations are as they were


def test_which_layers_have_adapters():
    model = SplitModel(convolutions(), adapters="lora:2")
    assert model.adapters.names == ("first/A", "first/B", "second/A", "second/B")
    assert [w.shape for w in model.initial_theta] == [(2, 2), (2, 6), (6, 2), (2, 4)]
    assert not model.initial_theta[1].any() and 0.1 < np.abs(model.initial_theta[0]).max() <= 2**-0.5
    frozen = backbone()
    frozen.layers[0].trainable = False
    assert [w.shape for w in SplitModel(frozen, adapters="bottleneck:2").initial_theta] == [(5, 2), (2,), (2, 5), (5,)]


def by_hand(adapters, weights, theta, x):
    """The two dense layers of `backbone`, with their adapters written out."""
    per_layer = len(theta) // 2
    for i in range(2):
        kernel, bias = weights[2 * i : 2 * i + 2]
        own = theta[per_layer * i : per_layer * (i + 1)]
        if adapters.startswith("lora"):
            factor = 3.0 if adapters == "lora:2:6" else 1.0
            x = tf.tanh(x @ (kernel + factor * own[0] @ own[1]) + bias)
        elif adapters == "scale_shift":
            x = tf.tanh((x @ kernel + bias) * (1 + own[0]) + own[1])
        else:
            x = tf.tanh(x @ kernel + bias)
            x = x + tf.nn.relu(x @ own[0] + own[1]) @ own[2] + own[3]
    return x


@pytest.mark.parametrize("adapters", KINDS)
def test_features_and_gradients_are_those_of_the_definition(adapters):
    """In float64, against GradientTape through the definition with the backbone's weights as constants."""
    whole = backbone()
    model = SplitModel(whole, adapters=adapters)
    theta, weights = moved(model), whole.get_weights()
    with tf.GradientTape() as tape:
        tape.watch(theta)
        phi = by_hand(adapters, weights, theta, X)
    dphi = tf.constant(np.random.default_rng(4).standard_normal(phi.shape))
    expected = tape.gradient(phi, theta, output_gradients=dphi)
    for how in ({}, {"recompute": True}, {"chunk": 4}):
        found, pull_back = model.record(theta, tf.constant(X), **how)
        assert distance(found, phi) < 1e-12 and distance(pull_back(dphi), expected) < 1e-12


def test_lora_of_a_convolution_is_that_of_its_pixels():
    """A 1x1 convolution is a dense layer of every pixel, and the gradient is that through the merged kernel."""
    model = SplitModel(convolutions(), adapters="lora:2")
    theta, x = moved(model), tf.constant(np.random.default_rng(1).standard_normal((3, 5, 5, 2)))
    merged = model.backbone_weights(theta)
    whole = SplitModel(convolutions())
    phi, pull_back = model.record(theta, x)
    plain, plain_back = whole.record(merged, x)
    assert distance(phi, plain) < 1e-12
    dphi = tf.constant(np.random.default_rng(6).standard_normal(phi.shape))
    of_kernel, found = plain_back(dphi)[0][0, 0], pull_back(dphi)
    assert distance(found[0], of_kernel @ tf.transpose(theta[1])) < 1e-12
    assert distance(found[1], tf.transpose(theta[0]) @ of_kernel) < 1e-12


@pytest.mark.parametrize("bias", [True, False])
def test_scale_shift_of_a_convolution(bias):
    """Also where the layer has no bias: then its activation gets the shift."""
    whole = convolutions(bias)
    model = SplitModel(whole, adapters="scale_shift")
    theta, x = moved(model), np.random.default_rng(1).standard_normal((3, 5, 5, 2))
    first, second = whole.get_layer("first"), whole.get_layer("second")
    y = x @ first.get_weights()[0][0, 0] + (first.get_weights()[1] if bias else 0)
    y = np.tanh(y * (1 + theta[0]) + theta[1])
    for layer in whole.layers[1:4]:
        y = layer(y)
    z = np.asarray(y)[:, ::2, ::2] @ second.get_weights()[0][0, 0] + (second.get_weights()[1] if bias else 0)
    z = z * (1 + theta[2]) + theta[3]
    assert distance(model.features(theta, x), z.numpy().reshape(3, -1)) < 1e-12
    if bias:
        assert distance(SplitModel(whole).features(model.backbone_weights(theta), x), z.numpy().reshape(3, -1)) < 1e-12
    else:
        with pytest.raises(InvalidArgument, match="scale_shift adapters of layers 'first', 'second' cannot be written"):
            model.backbone_weights(theta)


@pytest.mark.slow
def test_pflego_trains_adapters_above_a_cut(tmp_path):
    """The update is that of the adapters alone, and the backbone's own weights stay."""
    federation, whole = on_disk(tmp_path / "f"), backbone(dtype="float64")
    model = SplitModel(whole, train_from=whole.layers[1].name, adapters="lora:1")
    algorithm = pflego(model, federation.population(Sampling("fixed", 1.0)), tau=3, rho=0.1)
    assert [w.shape for w in algorithm.init_server().theta] == [(6, 1), (1, 5)]
    engine = Simulation(algorithm, federation)
    server, now = engine.initialize(), visits(algorithm, 1, [0, 1, 2, 3, 4])
    states = [algorithm.init_client(v.info) for v in now]
    output = engine.next(server, states, now)
    assert output.metrics["bytes_up"] == 5 * 8 * (6 + 5)
    assert distance(output.server.theta[1], server.theta[1]) > 1e-4


@pytest.mark.parametrize(
    "text", ["lora", "lora:0", "lora:-1", "lora:2:0", "bottleneck:2:1", "scale_shift:2", "prefix:4"]
)
def test_unknown_adapters_are_refused(text):
    with pytest.raises(InvalidArgument, match="adapters must be written lora:R.* found"):
        parse(text)


def test_a_backbone_without_such_layers_is_refused():
    model = keras.Sequential([keras.Input((5, 5, 1)), layers.Conv2D(2, 3), layers.Flatten()])
    with pytest.raises(InvalidArgument, match="no trainable Dense layer or 1x1 convolution"):
        SplitModel(model, adapters="lora:2")


@pytest.mark.parametrize(
    ("adapters", "part", "own"),
    [
        ("lora:2", "B", "01"),
        ("scale_shift", "shift", "01"),
        ("bottleneck:2", "up", "0011"),
        ("bottleneck:2", "down", "1100"),
    ],
)
def test_the_parts_of_adapters(adapters, part, own):
    assert SplitModel(backbone(), adapters=adapters, personal=part).own == tuple(c == "1" for c in own * 2)
    assert not any(SplitModel(backbone(), adapters=adapters).own)


@pytest.mark.parametrize("adapters", ["lora:2", "scale_shift", "bottleneck:2"])
def test_adapters_in_mixed_precision(adapters):
    """Layers without a bias, whose shift is added by the activation in half precision."""
    policy = keras.mixed_precision.Policy("mixed_bfloat16")
    stack = [layers.Dense(6, activation="tanh", use_bias=False, dtype=policy) for _ in range(2)]
    whole = keras.Sequential([keras.Input((4,)), *stack])
    model = SplitModel(whole, adapters=adapters)
    theta = tuple(w + 0.1 for w in model.theta())
    phi, pull_back = model.record(theta, tf.constant(X, tf.float32))
    assert phi.dtype == tf.float32 and np.abs(phi - model.features(model.theta(), X)).max() > 0.01
    assert all(np.abs(slope).max() > 0 for slope in pull_back(tf.ones_like(phi)))
