"""Backbone and heads: a user's own model, heads drawn for each client, and what is refused."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.toys import backbone, distance, gradient, identical, run, toy
from tfpfl.algorithms import pflego
from tfpfl.checks import InvalidArgument, TfpflWarning
from tfpfl.data.population import Population
from tfpfl.models import Head, SplitModel, build_network

PEOPLE = Population([5, 5, 5], [2, 3, 2])


def test_a_backbone_in_five_lines_trains():
    """As in the README."""
    backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu")])
    data = toy(dtype="float32")._replace(model=SplitModel(backbone))
    algorithm = pflego(data.model, data.population, tau=5, beta=0.3, rho=0.02)
    before, heads = run(algorithm, data, rounds=1), run(algorithm, data, rounds=8)[1]
    assert data.model.num_features == 8 and data.model.num_backbone_weights == 40
    assert [h.kernel.shape for h in heads.values()] == [(8, 2), (8, 3), (8, 2), (8, 4), (8, 3)]
    assert distance(before[1], heads) > 1e-3


def test_a_subclassed_backbone_needs_its_input_shape():
    class Mine(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(6)

        def call(self, x):
            return tf.nn.relu(self.hidden(x))

    model = SplitModel(Mine(), input_shape=(4,))
    assert (model.num_features, model.num_backbone_weights, model.dtype) == (6, 30, np.float32)
    with pytest.raises(InvalidArgument, match="does not say what it takes: begin it with keras.Input"):
        SplitModel(Mine())


def test_a_sequential_backbone_without_an_input_is_refused_in_our_words():
    layers = [keras.layers.Dense(6)]
    with pytest.raises(InvalidArgument, match="does not say what it takes: begin it with keras.Input"):
        SplitModel(keras.Sequential(layers))
    assert SplitModel(keras.Sequential(layers), input_shape=(4,)).num_backbone_weights == 30


def test_heads_are_functions_of_seed_and_client():
    def head(client, seed=0, **args):
        return SplitModel(backbone(), seed=seed, **args).head(PEOPLE.info(client, np.float64))

    assert identical(head(0), head(0))
    assert distance(head(0).kernel, head(2).kernel) > 0.1 and distance(head(0).kernel, head(0, seed=1).kernel) > 0.1
    assert head(1).kernel.shape == (5, 3) and head(1).bias.shape == (3,)
    shared = SplitModel(backbone()).shared_head(2)
    assert distance(shared.kernel, head(0).kernel) > 0.1 and identical(shared, SplitModel(backbone()).shared_head(2))


@pytest.mark.parametrize("init", ["glorot", "uniform01", "zeros"])
def test_the_distributions_of_heads(init):
    model = SplitModel(backbone(width=200), head_init=init)
    kernel, bias = (np.asarray(w) for w in model.shared_head(50))
    if init == "zeros":
        assert not kernel.any() and not bias.any()
    elif init == "uniform01":
        for numbers in (kernel, bias):
            assert numbers.min() >= 0 and numbers.max() < 1
        assert abs(kernel.mean() - 0.5) < 5 * np.sqrt(1 / 12 / kernel.size)
    else:
        limit = np.sqrt(6 / 250)
        assert np.abs(kernel).max() <= limit and not bias.any()
        assert abs(kernel.mean()) < 5 * limit / np.sqrt(3 * kernel.size)
        assert abs(kernel.var() - limit**2 / 3) < 5 * limit**2 * np.sqrt(4 / 45 / kernel.size)


@pytest.mark.parametrize("switches", [{}, {"recompute": True}, {"chunk": 1}, {"chunk": 3}, {"chunk": 7}, {"chunk": 50}])
def test_a_recorded_pass_is_pulled_back_to_the_gradient(switches):
    model = SplitModel(backbone())
    rng = np.random.default_rng(0)
    theta, x, dphi = model.theta(), tf.constant(rng.standard_normal((7, 4))), tf.constant(rng.standard_normal((7, 5)))

    @tf.function
    def recorded(theta, x, dphi):
        phi, pull_back = model.record(theta, x, **switches)
        return phi, pull_back(dphi)

    phi, slope = recorded(theta, x, dphi)
    assert distance(phi, model.features(theta, x)) < 1e-12
    (expected,) = gradient(lambda t: tf.reduce_sum(model.features(t, x) * dphi), theta)
    assert distance(slope, expected) < 1e-12


@pytest.mark.parametrize("chunk", [1, 3, 7, 50, None])
def test_features_in_chunks_also_of_no_examples(chunk):
    model = SplitModel(backbone())
    for n in (0, 1, 7):
        x = tf.constant(np.random.default_rng(0).standard_normal((n, 4)))
        for features in (tf.function(model.features_in_chunks), model.features_in_chunks):
            found = features(model.theta(), x, chunk)
            assert found.shape == (n, model.num_features)
            assert distance(found, model.features(model.theta(), x)) < 1e-12


def test_frozen_weights_are_not_part_of_theta():
    frozen = backbone()
    frozen.layers[0].trainable = False
    model = SplitModel(frozen)
    assert len(model.theta()) == 2 and model.num_backbone_weights == 35
    x = np.ones((2, 4))
    np.testing.assert_allclose(model.features(model.theta(), x), SplitModel(backbone()).backbone(x), atol=1e-12)


def test_what_cannot_be_a_backbone():
    flat = keras.Sequential([keras.Input((4, 3)), keras.layers.Dense(2)])
    with pytest.raises(
        ValueError, match=r"map \[N, ...\] to features \[N, M\]; for 2 examples this one gives \(2, 4, 2\)"
    ):
        SplitModel(flat)
    one = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: tf.reduce_sum(x, 1))])
    with pytest.raises(ValueError, match=r"gives \(2,\)"):
        SplitModel(one)
    x = keras.Input((4,))
    two = keras.Model(x, [keras.layers.Dense(2)(x), keras.layers.Dense(3)(x)])
    with pytest.raises(ValueError, match="gives (list|tuple)"):
        SplitModel(two)
    with pytest.raises(ValueError, match="input shape.*is open"):
        SplitModel(keras.Sequential([keras.Input((None, 3)), keras.layers.LSTM(2)]))
    with pytest.raises(ValueError, match="unknown head_init 'ones': one of glorot, uniform01, zeros"):
        SplitModel(backbone(), head_init="ones")


class Counts(keras.layers.Layer):
    """Counts its calls in a weight that does not train."""

    def build(self, shape):
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x + 0 * self.calls


class Dense(keras.Model):
    """A subclassed model."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)


class Branches(keras.Model):
    """Python's if on a tensor: Keras's own training takes it."""

    def call(self, x):
        return x if tf.reduce_sum(x) > 0 else -x


class Values(keras.Model):
    """NumPy in the middle of a model."""

    def call(self, x):
        return tf.constant(x.numpy())


def of(*layers, **how):
    return lambda: SplitModel(keras.Sequential([keras.Input(**how), *layers]))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (of(keras.layers.Flatten(), shape=(4, 4), dtype="uint8"), "are uint8, and a head computes with floating-point"),
        (
            of(keras.layers.Dense(3), keras.layers.Dense(2, dtype="float64"), shape=(4,)),
            "2 of the weights .* that train are float32, .* its features are float64: build all of its layers with one",
        ),
        (
            of(keras.layers.Dense(3, dtype="float16"), keras.layers.Dense(2, dtype="float32"), shape=(4,)),
            "2 of the weights .* that train are float16, .* small steps .*'mixed_float16'",
        ),
        (of(keras.layers.LSTM(3, stateful=True), batch_shape=(2, 5, 3)), "stateful=True: .* Build it without"),
        (
            of(keras.layers.LSTM(3, stateful=True), batch_shape=(4, 5, 3)),
            "does not take 2 examples .* any number of|stateful=True",
        ),
        (lambda: SplitModel(backbone(), input_shape=(5,)), r"does not take 2 examples of shape \(5,\).* Keras said"),
        (
            of(keras.layers.Lambda(tf.strings.length, output_shape=(4,)), shape=(4,), dtype="string"),
            "does not take 2 examples .* numbers of the shape",
        ),
        pytest.param(
            lambda: SplitModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)], name="my model")),
            "name of a model has letters .* said: 'my model/' is not a valid",
            marks=pytest.mark.skipif(keras.__version__[0] != "2", reason="Keras 3 allows other names"),
        ),
        (lambda: SplitModel(Branches(), input_shape=(4,)), r"cannot be made a graph, .* take tf.where or tf.cond"),
        (lambda: SplitModel(Values(), input_shape=(4,)), r"asks for the value of a tensor; .* in place of NumPy's"),
        (lambda: SplitModel(Dense(), input_shape=4), r"input_shape is the shape of one example, .*; found 4"),
        (lambda: SplitModel(backbone(), seed="1"), "seed must be a number, found '1'"),
        (lambda: SplitModel(backbone(), seed=1.5), "seed must lie in .* found 1.5: a whole number"),
        (lambda: SplitModel(backbone()).shared_head(2, "zero"), "init must be one of glorot, uniform01, zeros; found"),
    ],
)
def test_what_ended_in_errors_of_others_or_in_other_numbers(make, said):
    with pytest.raises(InvalidArgument, match=said):
        make()


def test_a_layer_that_changes_its_weights_is_refused():
    """Keras 2 has no variable to change there, and Keras 3 would lose the change without a word."""
    of_keras_2 = "uses its weights as variables.* assign.*has no attribute 'assign_add'"
    with pytest.raises(InvalidArgument, match=f"{of_keras_2}|changes its weights .*calls when it is called"):
        of(Counts(), keras.layers.Dense(3), shape=(4,))()


@pytest.mark.parametrize(
    "last, said",
    [
        (lambda: keras.layers.Dense(5, activation="softmax"), "softmax"),
        (lambda: keras.layers.Softmax(), "softmax"),
        (lambda: keras.layers.Dense(5, activation="sigmoid"), "sigmoid"),
        (lambda: keras.layers.Dense(5, activation="relu"), None),
        (lambda: keras.layers.Dense(5, activation="tanh"), None),
    ],
)
def test_a_backbone_that_ends_in_probabilities_is_warned_of(last, said):
    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5), last()])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        SplitModel(network)
    messages = [str(w.message) for w in found if issubclass(w.category, TfpflWarning)]
    assert messages == [] if said is None else f"the backbone ends in a {said}: its 5 features are then" in messages[0]


def test_a_name_is_no_backbone():
    with pytest.raises(
        InvalidArgument, match=r"is a Keras model, found 'mlp200'. A network of tfpfl is made by .*build"
    ):
        SplitModel("mlp200", train_from="dense")


def ending_in(*last):
    return SplitModel(keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, "relu"), *last]))


def test_whether_a_backbone_ends_in_a_layer_without_activation():
    dense = keras.layers.Dense
    assert ending_in(dense(4)).ends_linear and ending_in(dense(4, use_bias=False)).ends_linear
    assert ending_in(keras.layers.Reshape((5, 1)), keras.layers.Flatten(), dense(4)).ends_linear
    inputs = keras.Input((4,))
    skip = keras.layers.Add()([dense(4, use_bias=False)(inputs), inputs])
    assert not SplitModel(keras.Model(inputs, skip)).ends_linear
    for other in ((), (dense(4, "tanh"),), (dense(4), keras.layers.ReLU())):
        assert not ending_in(*other).ends_linear


def test_the_first_head_that_is_given_reaches_the_model_above_a_cut():
    network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(5, name="top")])
    given = Head(np.full((5, 2), 7.0, "float32"), np.ones(2, "float32"))
    model = SplitModel(network, train_from="top").with_initial_head(given)
    assert identical(model.shared_head(2), given) and identical(model.above.shared_head(2), given)
    assert SplitModel(network, train_from="top").above.initial_head is None


def hashed():
    """Ids go through a hash, so that any whole number is a word."""
    stack = [keras.layers.Hashing(50), keras.layers.Embedding(50, 4), keras.layers.Flatten(name="flat")]
    return keras.Sequential([keras.Input((2,), dtype="int32"), *stack, keras.layers.Dense(3, name="top")])


@pytest.mark.parametrize("train_from", [None, "top"])
def test_ids_that_float32_does_not_hold_reach_an_embedding_as_they_are(train_from):
    network = hashed()
    model = SplitModel(network, train_from=train_from)
    x = np.array([[2**24 + 1, 2**24 + 3], [2**25 + 5, 7]], np.int32)
    assert model.reads == "whole" and distance(model.features(model.theta(), x), network(x)) < 1e-6


@pytest.mark.parametrize("seed", [-1, 2**31, 2**32])
def test_seeds_that_would_be_those_of_another_number_are_refused(seed):
    for make in (lambda: SplitModel(backbone(), seed=seed), lambda: build_network("mlp200", (4,), seed=seed)):
        with pytest.raises(InvalidArgument, match=f"seed must lie in 0..2147483647, found {seed}"):
            make()


class SparseFeatures(keras.layers.Layer):
    """A layer that adds a penalty to Keras's loss when it is called."""

    def call(self, x):
        self.add_loss(0.1 * tf.reduce_mean(tf.abs(x)))
        return x


class OwnWeight(keras.layers.Layer):
    """A layer whose weight has a constraint or a regularizer, which no attribute of the layer names."""

    def __init__(self, what, **more):
        super().__init__(**more)
        self.what = what

    def build(self, shape):
        value = {"constraint": keras.constraints.NonNeg(), "regularizer": keras.regularizers.L2()}[self.what]
        self.w = self.add_weight(name="w", shape=(shape[-1], 4), **{self.what: value})

    def call(self, x):
        return tf.matmul(x, self.w)


def test_penalties_and_constraints_of_layers_are_warned_of_once():
    def said(*more, **args):
        network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="one", **args), *more])
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            SplitModel(network)
        return [str(w.message) for w in found if issubclass(w.category, TfpflWarning)]

    assert said() == []
    for args in ({"kernel_regularizer": "l2"}, {"kernel_constraint": "non_neg"}, {"activity_regularizer": "l1"}):
        (message,) = said(**args)
        assert f"layer 'one' has {next(iter(args))}=" in message and "no part of the objective" in message
        assert said(trainable=False, **args) == []
    (message,) = said(SparseFeatures(name="two"))
    assert "layer 'two' calls add_loss" in message and "no part of the objective" in message
    for what in ("constraint", "regularizer"):  # as a layer's own `add_weight` was told
        (message,) = said(OwnWeight(what, name="three"))
        assert "layer 'three' " in message and "no part of the objective" in message


def test_penalties_on_what_a_layer_computes_are_warned_of_with_adapters_too():
    """Those on its weights are not: they rest."""

    def said(*more, **args):
        network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="one", **args), *more])
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            SplitModel(network, adapters="lora:2")
        return [str(w.message) for w in found if issubclass(w.category, TfpflWarning)]

    for args in ({}, {"kernel_regularizer": "l2"}, {"kernel_constraint": "non_neg"}):
        assert said(**args) == []
    (message,) = said(activity_regularizer="l1")
    assert "layer 'one' has activity_regularizer=" in message
    (message,) = said(SparseFeatures(name="two"))
    assert "layer 'two' calls add_loss" in message


def test_a_layer_that_moves_its_kernel_by_itself_is_refused():
    network = keras.Sequential([keras.Input((3,)), keras.layers.SpectralNormalization(keras.layers.Dense(4))])
    with pytest.raises(InvalidArgument, match=r"\(SpectralNormalization\).*changes the kernel.*leave it out"):
        SplitModel(network)


@pytest.mark.parametrize(
    ("layers", "options", "divided"),
    [
        ([keras.layers.Conv2D(4, 3), keras.layers.Flatten()], {}, True),
        ([keras.layers.DepthwiseConv2D(3), keras.layers.Flatten()], {}, True),
        ([keras.layers.Reshape((64, 1)), keras.layers.Conv1D(4, 3), keras.layers.Flatten()], {}, True),
        ([keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(), keras.layers.Flatten()], {}, True),
        (
            [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(), keras.layers.Flatten()],
            {"batch_norm": "shared"},
            False,
        ),
        ([keras.layers.Conv2D(4, 3), keras.layers.Flatten(), keras.layers.Dropout(0.5)], {}, False),
        ([keras.layers.Flatten(), keras.layers.Dense(5)], {}, False),
        ([keras.layers.Reshape((8, 8)), keras.layers.LSTM(4)], {}, False),
        ([keras.layers.Reshape((8, 8)), keras.layers.Conv1D(4, 3), keras.layers.LSTM(4)], {}, False),
    ],
)
def test_passes_of_convolutions_whose_examples_are_apart_may_be_divided(layers, options, divided):
    """A loop over the words of a text is slow with few examples; masks and batch statistics need all examples."""
    layers = [type(layer).from_config(layer.get_config()) for layer in layers]
    model = SplitModel(keras.Sequential([keras.layers.Input((8, 8, 1)), *layers]), **options)
    assert (model.block is not None) == divided


def test_a_block_fits_into_the_cache():
    """Its activations are at most 16 MiB and four times theta, unless they are 8 examples."""
    model = SplitModel(build_network("omniglot_4conv", (28, 28, 1)))
    assert model.block == (2**24 + 4 * 4 * 111_424) // model.activation_bytes == 21
    assert SplitModel(build_network("omniglot_4conv", (84, 84, 3))).block == 8
