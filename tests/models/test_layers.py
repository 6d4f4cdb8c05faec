"""Random layers and BatchNormalization as functions of a key and of statistics."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from helpers.marks import slow_but
from tfpfl.checks import InvalidArgument
from tfpfl.data.randomness import Fold
from tfpfl.models import SplitModel, build_network, passes
from tfpfl.models.passes import fold

KEY = tf.constant([3, 5])
IMAGES = (6, 6, 3)


def model_of(*stack, shape=(8,), dtype="float64", **more):
    stack = [type(layer).from_config({**layer.get_config(), "dtype": dtype}) for layer in stack]
    return SplitModel(keras.Sequential([keras.Input(shape, dtype=dtype), *stack, layers.Flatten(dtype=dtype)]), **more)


def drawn(model, x, key=KEY):
    with passes.drawing(key):
        return np.asarray(model.features(model.theta(), x))


def uniform(shape, key=KEY, layer=0, call=0):
    seed = fold(fold(fold(key, Fold.MASKS), layer), call)
    return tf.random.stateless_uniform(shape, seed, alg="philox").numpy()


def test_dropout_is_a_mask_from_the_key():
    x = np.random.default_rng(0).standard_normal((50, 8))
    model = model_of(layers.Dropout(0.3))
    np.testing.assert_allclose(drawn(model, x), x * (uniform((50, 8)) >= 0.3) / 0.7, rtol=1e-12)
    assert model.draws and not SplitModel(build_network("mlp200", (2, 2))).draws


def test_a_mask_of_a_whole_channel():
    x = np.ones((4, *IMAGES))
    found = drawn(model_of(layers.SpatialDropout2D(0.5), shape=IMAGES), x).reshape(x.shape)
    np.testing.assert_allclose(found, 2 * (uniform((4, 1, 1, 3)) >= 0.5) * x)
    found = drawn(model_of(layers.Dropout(0.5, noise_shape=(None, 1, 1, 3)), shape=IMAGES), x).reshape(x.shape)
    np.testing.assert_allclose(found, 2 * (uniform((4, 1, 1, 3)) >= 0.5) * x)


@pytest.mark.parametrize(
    "layer",
    [layers.GaussianNoise(0.5), layers.GaussianDropout(0.2), layers.AlphaDropout(0.2)],
    ids=lambda layer: type(layer).__name__,
)
def test_moments_of_other_noise(layer):
    """Standard normal input. Noise adds its variance; AlphaDropout keeps mean and variance; a mean stays a mean."""
    x = np.random.default_rng(0).standard_normal((40_000, 8))
    found = drawn(model_of(layer), x)
    spread = {"GaussianNoise": 1 + 0.25, "GaussianDropout": 1 + 0.2 / 0.8, "AlphaDropout": 1.0}[type(layer).__name__]
    assert abs(found.mean()) < 0.01 and abs(found.var() - spread) < 0.02
    assert np.corrcoef(found.ravel(), x.ravel())[0, 1] > 0.7


def test_layers_calls_and_keys_have_masks_of_their_own():
    """Two layers, one of them used twice; the same key gives the same bits, also in a graph."""
    inputs, twice = keras.Input((8,), dtype="float64"), layers.Dropout(0.5, dtype="float64")
    outputs = layers.Concatenate(dtype="float64")(
        [twice(inputs), twice(inputs), layers.Dropout(0.5, dtype="float64")(inputs)]
    )
    model = SplitModel(keras.Model(inputs, outputs))
    x = np.ones((20, 8))
    parts = np.split(drawn(model, x), 3, axis=1)
    expected = [uniform((20, 8), layer=i, call=j) for i, j in ((0, 0), (0, 1), (1, 0))]
    for part, u in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(part, 2.0 * (u >= 0.5))
    np.testing.assert_array_equal(tf.function(lambda: drawn_in_graph(model, x))(), drawn(model, x))
    assert not np.array_equal(drawn(model, x), drawn(model, x, tf.constant([3, 6])))


def drawn_in_graph(model, x):
    with passes.drawing(KEY):
        return model.features(model.theta(), x)


def test_evaluation_draws_nothing():
    stack = layers.Dense(4), layers.Dropout(0.5), layers.GaussianNoise(1.0), layers.Dense(3)
    model = model_of(*stack)
    x = np.random.default_rng(1).standard_normal((9, 8))
    first = np.asarray(model.features(model.theta(), x))
    np.testing.assert_array_equal(first, model.backbone(x, training=False))
    with passes.drawing(KEY), passes.evaluating():
        np.testing.assert_array_equal(model.features(model.theta(), x), first)
    assert np.abs(drawn(model, x) - first).max() > 0.1


@pytest.mark.parametrize("how", [{"recompute": True}, {"chunk": 4}, {"chunk": 100}])
def test_both_passes_of_a_record_have_the_same_masks(how):
    """The pulled-back gradient is that of the features that were given."""
    model = model_of(layers.Dense(5, activation="tanh"), layers.Dropout(0.4), layers.Dense(3))
    x = np.random.default_rng(2).standard_normal((10, 8))
    dphi = tf.constant(np.random.default_rng(3).standard_normal((10, 3)))
    with passes.drawing(KEY):
        phi, pull_back = model.record(model.theta(), x, **how)
        whole, its_pull_back = model.record(model.theta(), x)
    found = pull_back(dphi)
    if how != {"chunk": 4}:
        np.testing.assert_allclose(phi, whole, atol=1e-12)
    else:
        assert np.abs(phi[4:] - whole[4:]).max() > 1e-3  # examples of later chunks have masks of their own
        np.testing.assert_allclose(phi[:4], drawn(model, x[:4]), atol=1e-12)
    kernel, offset = model.theta()[2:]
    hidden = tf.matmul(phi - offset, np.linalg.pinv(kernel))  # the masked hidden units that the features came from
    if how == {"chunk": 4}:
        np.testing.assert_allclose(found[3], tf.reduce_sum(dphi, 0), atol=1e-12)
        np.testing.assert_allclose(
            tf.matmul(tf.matmul(found[2], kernel, transpose_a=True), kernel, transpose_b=True),
            tf.matmul(
                tf.matmul(tf.matmul(hidden, dphi, transpose_a=True), kernel, transpose_a=True), kernel, transpose_b=True
            ),
            atol=1e-9,
        )
    else:
        for a, b in zip(found, its_pull_back(dphi), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)


def normalized_images(dtype="float64"):
    """Convolutions with BatchNormalization, one of them in a model within the model; without a scale, or an offset."""
    inner = keras.Sequential([keras.Input((6, 6, 4), dtype=dtype), layers.BatchNormalization(scale=False, dtype=dtype)])
    x = keras.Input(IMAGES, dtype=dtype)
    h = layers.Conv2D(4, 3, padding="same", dtype=dtype)(x)
    h = layers.ReLU(dtype=dtype)(inner(h))
    h = layers.BatchNormalization(center=False, momentum=0.7, epsilon=0.01, dtype=dtype)(h)
    h = layers.BatchNormalization(axis=-1, trainable=False, dtype=dtype)(h)
    return keras.Model(x, layers.Dense(3, dtype=dtype)(layers.Flatten(dtype=dtype)(h)))


def test_batch_statistics_gradients_and_moved_statistics_are_keras_own():
    network = normalized_images()
    model = SplitModel(network, batch_norm="local")
    x = np.random.default_rng(0).standard_normal((5, *IMAGES))
    assert model.own == (False, False, True, True, False, False)
    theta = model.theta()
    with tf.GradientTape() as tape, passes.keeping(model.statistics(), KEY) as now:
        tape.watch(theta)
        phi = model.features(theta, x)
        loss = tf.reduce_sum(phi**2)
    found = tape.gradient(loss, theta)
    with tf.GradientTape() as tape:
        expected = network(x, training=True)
        loss = tf.reduce_sum(expected**2)
    variables = [v if isinstance(v, tf.Variable) else v.value for v in network.trainable_weights]
    np.testing.assert_allclose(phi, expected, atol=1e-9)
    for mine, its in zip(found, tape.gradient(loss, variables), strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-8)
    assert len(now.statistics) == 4 and len(model.variables) == 6 + 4
    for mine, variable in zip(now.statistics, model.variables[6:], strict=True):
        np.testing.assert_allclose(mine, np.asarray(variable), atol=1e-6)  # Keras 2 rounds 1 - momentum to float32


def test_theta_with_statistics_is_evaluation_with_them():
    model = SplitModel(normalized_images(), batch_norm="shared")
    x = np.random.default_rng(0).standard_normal((5, *IMAGES))
    other = tuple(s + 0.5 for s in model.statistics())
    found = model.features((*model.theta(), *other), x)
    for variable, value in zip(model.variables[6:], other, strict=True):
        variable.assign(value)
    np.testing.assert_allclose(found, model.backbone(x, training=False), atol=1e-9)


def test_the_model_keeps_its_layers_and_its_state():
    network = normalized_images()
    model = SplitModel(network, batch_norm="shared")
    before = [w.copy() for w in network.get_weights()]
    with passes.keeping(model.statistics(), KEY):
        model.features(model.theta(), np.ones((2, *IMAGES)))
    for now, then in zip(network.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert not any("call" in vars(layer) for layer in network.layers)


def test_frozen_features_are_those_of_frozen_layers():
    """The same bits as with trainable=False, which was always possible."""
    network = normalized_images("float32")
    x = np.random.default_rng(0).standard_normal((5, *IMAGES)).astype("float32")
    model = SplitModel(network)
    assert model.batch_norm == "frozen" and model.own == (False,) * 6 and not model.alone
    with passes.drawing(KEY):
        found = np.asarray(model.features(model.theta(), x))
    np.testing.assert_array_equal(found, network(x, training=False))
    for layer in network.layers:
        layer.trainable = False
    still = SplitModel(network)
    assert still.batch_norm is None
    np.testing.assert_array_equal(still.features(still.theta(), x), found)


class Own(layers.BatchNormalization):
    """Of the user's own."""


def test_another_class_of_normalization_is_frozen_only():
    def build(mode):
        return SplitModel(keras.Sequential([keras.Input((3,)), Own(name="mine"), layers.Dense(2)]), batch_norm=mode)

    assert build(None).batch_norm == "frozen"
    with pytest.raises(ValueError, match=r"layer 'mine' \(Own\) is not Keras's plain.*batch_norm='frozen'"):
        build("local")


@pytest.mark.parametrize("mode", slow_but(["local", "shared"], "local"))
def test_batch_statistics_of_padded_sequences_are_refused_when_the_model_is_made(mode):
    """It was said in the first round, in the middle of Keras's words about the call."""
    said = "^layer 'norm': batch statistics of padded sequences are not supported. Use batch_norm='frozen', or Layer"
    stack = [layers.Masking(), layers.BatchNormalization(name="norm"), layers.LSTM(2, name="lstm")]
    network = keras.Sequential([keras.Input((4, 3)), *stack, layers.BatchNormalization(name="top"), layers.Dense(2)])
    with pytest.raises(InvalidArgument, match=said):
        SplitModel(network, batch_norm=mode)
    with pytest.raises(InvalidArgument, match=said):
        SplitModel(network).with_batch_norm(mode)
    assert SplitModel(network, train_from="top").with_batch_norm(mode).batch_norm == mode


@pytest.mark.parametrize("mode", ["local", "shared"])
def test_batch_statistics_of_a_sequential_model_without_an_input(mode):
    """Keras 2 builds such a model once more when it is called with another number of examples."""
    network = keras.Sequential([layers.Dense(5), layers.BatchNormalization(momentum=0.5)])
    model = SplitModel(network, input_shape=(4,), batch_norm=mode)
    x = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    with passes.keeping(model.statistics(), KEY) as now:
        model.features(model.theta(), x)
    np.testing.assert_allclose(now.moved[0], 0.5 * (x @ model.initial_theta[0]).mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_network_of_keras_applications():
    network = keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, weights=None, include_top=False, pooling="avg")
    x = np.random.default_rng(0).random((3, 32, 32, 3), "float32")
    for mode in (None, "local", "shared"):
        model = SplitModel(network, batch_norm=mode)
        assert len(model.statistics()) == 2 * 52 and sum(model.own) == (2 * 52 if mode == "local" else 0)
        with passes.keeping(model.statistics(), KEY) as now:
            phi = model.features(model.theta(), x)
        assert np.isfinite(phi).all() and phi.shape == (3, 1280)
        assert np.isfinite(np.concatenate([np.ravel(s) for s in now.statistics])).all()


@pytest.mark.skipif(not keras.__version__.startswith("2."), reason="Keras 3 normalizes over one axis alone")
def test_a_normalization_over_several_axes_is_frozen_only():
    def build(mode):
        stack = [layers.BatchNormalization(axis=[1, 2], name="both"), layers.Flatten()]
        return SplitModel(keras.Sequential([keras.Input((4, 3)), *stack]), batch_norm=mode)

    assert build(None).batch_norm == "frozen"
    with pytest.raises(ValueError, match=r"layer 'both'.*over one axis.*batch_norm='frozen'"):
        build("shared")
