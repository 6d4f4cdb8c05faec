"""Any Keras model as a function of its weights: its values and gradients are Keras's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from helpers.marks import slow_but
from helpers.toys import identical
from tfpfl.checks import InvalidArgument
from tfpfl.models import SplitModel
from tfpfl.models.functional import functional

IMAGE = (6, 6, 2)


def dense():
    return keras.Sequential([keras.Input((5,)), layers.Dense(4, activation="tanh"), layers.Dense(3)])


def convolutions():
    norm = layers.GroupNormalization(2) if hasattr(layers, "GroupNormalization") else layers.LayerNormalization()
    stack = [layers.Conv2D(4, 3, activation="relu"), norm, layers.DepthwiseConv2D(2), layers.Flatten(), layers.Dense(3)]
    return keras.Sequential([keras.Input(IMAGE), *stack])


def normalized():
    return keras.Sequential([keras.Input((5,)), layers.Dense(4), layers.LayerNormalization(), layers.PReLU()])


def nested():
    """A model within a model, and one layer used twice."""
    inner = keras.Sequential([keras.Input((5,)), layers.Dense(5, activation="tanh")])
    x = keras.Input((5,))
    return keras.Model(x, layers.Dense(3)(layers.add([inner(inner(x)), x])))


class Residual(keras.Model):
    """Subclassed; it knows no input shape before it is called."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = layers.Dense(5, activation="tanh"), [layers.Dense(5), layers.Dense(3)]

    def call(self, x):
        return self.rest[1](x + self.rest[0](self.first(x)))


def recurrent():
    """A layer with a cell inside."""
    return keras.Sequential([keras.Input((4, 3)), layers.LSTM(5)])


def half_frozen():
    model = dense()
    model.layers[0].trainable = False
    return model


def frozen_batch_norm():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(3)])
    model.layers[1].trainable = False
    rng = np.random.default_rng(1)
    model.layers[1].set_weights([rng.uniform(0.5, 2, 4) for _ in range(4)])
    return model


MODELS = [dense, convolutions, normalized, nested, Residual, recurrent, half_frozen, frozen_batch_norm]


SHAPES = {convolutions: IMAGE, recurrent: (4, 3)}


@pytest.mark.parametrize("make", slow_but(MODELS, *list(MODELS)[:3]))
def test_values_and_gradients_are_those_of_the_model(make):
    """At the model's own weights, and at others that it is then given."""
    model = make()
    x = np.random.default_rng(0).standard_normal((7, *SHAPES.get(make, (5,)))).astype("float32")
    model(x)
    weights, apply = functional(model)
    assert len(weights) == len(model.trainable_weights) > 0
    rng = np.random.default_rng(2)
    other = [w + 0.3 * rng.standard_normal(w.shape).astype("float32") for w in weights]
    for values in (weights, other):
        given = [tf.constant(w) for w in values]
        with tf.GradientTape() as tape:
            tape.watch(given)
            out = tf.function(apply)(given, x)
            loss = tf.reduce_sum(out**2)
        slopes = tape.gradient(loss, given)
        for variable, value in zip(model.trainable_weights, values, strict=True):
            variable.assign(value)
        with tf.GradientTape() as tape:
            expected = model(x, training=False)
            loss = tf.reduce_sum(expected**2)
        expected_slopes = tape.gradient(loss, trainable(model))
        np.testing.assert_allclose(out, expected, atol=1e-5)
        for slope, expected_slope in zip(slopes, expected_slopes, strict=True):
            np.testing.assert_allclose(slope, expected_slope, atol=2e-4)


def trainable(model) -> list:
    """The tf.Variables: Keras 3 has them inside its own."""
    return [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_weights]


def test_the_model_keeps_its_own_weights():
    model = dense()
    before = [w.copy() for w in model.get_weights()]
    weights, apply = functional(model)
    apply([tf.zeros_like(w) for w in weights], np.ones((2, 5), "float32"))
    with pytest.raises(Exception):  # noqa: B017
        apply([tf.zeros([1, 1]) for _ in weights], np.ones((2, 5), "float32"))
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert all(hasattr(v, "assign") for v in model.layers[0].weights)


def test_no_variable_enters_the_graph():
    """TFF would refuse it, and clients would share it."""
    model = frozen_batch_norm()
    weights, apply = functional(model)
    specs = [tf.TensorSpec(w.shape, w.dtype) for w in weights]
    graph = tf.function(apply).get_concrete_function(specs, tf.TensorSpec([None, 5])).graph
    assert not [op.name for op in graph.get_operations() if "ReadVariable" in op.type or "VarHandle" in op.type]


class OwnDropout(layers.Dropout):
    """Of the user's own: what it draws is not known."""


@pytest.mark.parametrize(
    ("shape", "layer", "instead"),
    [
        ((4, 5), lambda: layers.LSTM(4, dropout=0.2, name="bad"), "recurrent_dropout to 0.*before or after"),
        ((4, 5), lambda: layers.GRU(4, recurrent_dropout=0.2, name="bad"), "recurrent_dropout to 0.*before or after"),
        ((6, 6, 2), lambda: layers.RandomFlip(name="bad"), "Change the images when the federation is made"),
        ((5,), lambda: OwnDropout(0.5, name="bad"), "Set its rate to 0, or use Dropout"),
    ],
    ids=["LSTM", "GRU", "RandomFlip", "OwnDropout"],
)
def test_layers_that_draw_in_a_way_of_their_own_are_refused(shape, layer, instead):
    inner = keras.Sequential([keras.Input(shape), layer(), layers.Flatten(), layers.Dense(3)])
    outer = keras.Sequential([keras.Input(shape), inner])
    for model in (inner, outer):  # also where it hides in a model within the model
        with pytest.raises(ValueError, match="layer '(bad|lstm_cell|gru_cell)'.*draws random numbers.*" + instead):
            functional(model)


def test_a_rate_of_0_draws_nothing():
    model = keras.Sequential([keras.Input((5,)), layers.Dropout(0.0), layers.GaussianNoise(0.0), layers.Dense(3)])
    assert len(functional(model)[0]) == 2


class Listed(layers.Layer):
    """Its weights are attributes, but `call` reads them from a list."""

    def build(self, shape):
        self.a = self.add_weight(name="a", shape=(shape[-1], 4))
        self.b = self.add_weight(name="b", shape=(shape[-1], 4))
        self.kernels = [self.a, self.b]

    def call(self, x):
        return tf.concat([tf.matmul(x, kernel) for kernel in self.kernels], 1)


class Compiled(layers.Layer):
    """Its `call` keeps the graph of its first call, which reads the variable."""

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], 4))

    @tf.function
    def call(self, x):
        return tf.matmul(x, self.kernel)


@pytest.mark.skipif(not keras.__version__.startswith("2."), reason="Keras 3 replaces weights wherever they are read")
@pytest.mark.parametrize("layer", [Listed, Compiled])
def test_a_weight_that_is_read_past_its_attribute_is_refused(layer):
    """It would keep its first value, and have no gradient."""
    model = keras.Sequential([keras.Input((5,)), layer(), layers.Dense(3, name="top")])
    message = "weights .*(a:0|kernel:0).* are not read from the attributes.*no list.*no tf.function"
    for train_from in (None, "top"):
        with pytest.raises(InvalidArgument, match=message):
            SplitModel(model, train_from=train_from)


class Noisy(layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


class NoisyInside(layers.Layer):
    """The numbers are drawn in a function, a branch or a loop of the graph."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def call(self, x):
        def noisy(part=x):
            return part + tf.random.normal(tf.shape(part))

        return {
            "function": lambda: tf.function(noisy)(),
            "branch": lambda: tf.cond(tf.reduce_sum(x) > 1e9, lambda: x, noisy),
            "loop": lambda: tf.ensure_shape(tf.map_fn(noisy, x), x.shape),
        }[self.how]()


@pytest.mark.parametrize("how", ["function", "branch", "loop"])
def test_random_numbers_that_are_drawn_inside_are_refused_too(how):
    with pytest.raises(InvalidArgument, match="draws random numbers in its own code .*RandomStandardNormal in .* of "):
        SplitModel(keras.Sequential([keras.Input((5,)), NoisyInside(how), layers.Dense(3)]))


class Seeded(layers.Layer):
    """Its numbers are a function of a seed, so that all passes have the same."""

    def call(self, x):
        noise = [tf.random.stateless_normal([5], [1, 2]), tf.random.stateless_truncated_normal([5], [1, 2])]
        return x + tf.map_fn(lambda n: n * tf.random.stateless_uniform([], [3, 4]), tf.stack(noise))[0]


def test_random_numbers_of_a_fixed_seed_are_no_draws():
    model = SplitModel(keras.Sequential([keras.Input((5,)), Seeded(), layers.Dense(3)]))
    x = np.ones((2, 5), np.float32)
    assert identical(model.features(model.theta(), x), model.features(model.theta(), x))


def test_a_layer_whose_code_draws_random_numbers_is_refused():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3), Noisy(name="noisy"), layers.Dense(3, name="top")])
    for train_from in (None, "top"):
        with pytest.raises(InvalidArgument, match="draws random numbers in its own code.*RandomStandardNormal.*noisy"):
            SplitModel(model, train_from=train_from)
