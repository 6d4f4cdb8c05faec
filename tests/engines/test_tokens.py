"""Tokens for an Embedding: they reach it as the integers they are, in both engines, or an error says what to do."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpfl
from helpers.marks import slow_but
from tfpfl.algorithms.contract import ClientData
from tfpfl.checks import InvalidArgument
from tfpfl.data.randomness import client_key
from tfpfl.engines.inputs import check_inputs
from tfpfl.engines.visit import evaluate

WORDS, LENGTH = 40, 6


def backbone(words=WORDS, **given):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((LENGTH,), **given),
            keras.layers.Embedding(words, 5),
            keras.layers.Flatten(),
            keras.layers.Dense(4, activation="tanh"),
        ]
    )


def clients(dtype=np.int64, sizes=(20, 16, 24)):
    rng = np.random.default_rng(0)
    found = {}
    for i, n in enumerate(sizes):
        y = rng.integers(0, 2, n)
        found[f"c{i}"] = ((rng.integers(0, WORDS // 2, (n, LENGTH)) + (WORDS // 2) * y[:, None]).astype(dtype), y)
    return found


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return tfpfl.Federation.from_clients(clients(), out=tmp_path_factory.mktemp("tokens") / "f")


@pytest.mark.parametrize(
    "dtype, scale, stored",
    [
        (np.int64, None, "int32"),
        (np.uint16, None, "int32"),
        (np.uint8, 1.0, "uint8"),
        (np.float32, None, "float32"),
        (np.uint32, None, "int32"),
    ],
)
def test_tokens_are_stored_and_read_as_they_are(tmp_path, dtype, scale, stored):
    given = clients(dtype)
    made = tfpfl.Federation.from_clients(given, scale=scale, test_fraction=0, validation=0, out=tmp_path / "f")
    assert made.manifest["dtype"] == stored and made.manifest["format"] == (2 if stored == "int32" else 1)
    for i, (x, y) in enumerate(given.values()):
        read, labels = made.reader("train")(tf.constant(i))
        np.testing.assert_array_equal(read, x)
        np.testing.assert_array_equal(made.raw(i)[0], x)
        np.testing.assert_array_equal(labels, y)


def test_integers_beyond_int32_become_floats_as_before(tmp_path):
    x, y = np.array([[2**40], [1], [3], [4]]), np.array([0, 1, 0, 1])
    made = tfpfl.Federation.from_clients([(x, y)], test_fraction=0, validation=0, out=tmp_path / "f")
    assert made.manifest["dtype"] == "float32" and made.manifest["format"] == 1


@pytest.mark.parametrize("given", [{}, {"dtype": "int32"}], ids=["input of floats", "input of integers"])
def test_the_features_are_those_of_keras(given):
    network = backbone(**given)
    model = tfpfl.SplitModel(network)
    assert (model.reads, model.vocabulary) == ("whole", WORDS)
    x = clients()["c0"][0]
    wanted = network(x.astype(np.int32)).numpy()
    assert np.ptp(wanted, 0).min() > 1e-3
    for tokens in (x, x.astype(np.float32), x.astype(np.uint8)):
        np.testing.assert_allclose(model.features(model.theta(), tokens), wanted, rtol=1e-6, atol=1e-7)


def by_keras(federation, network, eta, steps):
    """What Keras makes of one client by SGD on all examples: loss and correct ones on test, and the loss on train."""
    x, y = federation.raw(0, "train")
    model = tfpfl.SplitModel(network)
    head = model.head(federation.population().info(0), "zeros")
    whole = keras.Sequential([network, keras.layers.Dense(2)])
    whole.build((None, LENGTH))
    whole.layers[-1].set_weights([np.asarray(head.kernel), np.asarray(head.bias)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    whole.compile(keras.optimizers.SGD(eta), loss)
    for _ in range(steps):
        whole.train_on_batch(x, y)
    tx, ty = federation.raw(0, "test")
    logits = np.asarray(whole(tx))
    return float(loss(ty, logits)), int((logits.argmax(1) == ty).sum()), float(loss(y, whole(x)))


@pytest.mark.slow
@pytest.mark.parametrize("engine", slow_but(["local", "tff"], "local"))
def test_training_is_that_of_keras_in_both_engines(federation, engine, request):
    if engine == "tff":
        request.getfixturevalue("tff")
    population = federation.population(tfpfl.Sampling("fixed", rate=1.0))
    model = tfpfl.SplitModel(backbone(), head_init="zeros")
    algorithm = tfpfl.build_algorithm("local", model, population, eta=0.5, steps=4)
    training = tfpfl.Training(algorithm, federation, seed=0, engine=engine)
    training.run(rounds=2)
    found = {e.split: e for e in training.store.evaluations(2) if e.client_id == 0 and e.model == "personal"}
    loss, correct, learned = by_keras(federation, backbone(), 0.5, 8)
    assert found["test"].loss == pytest.approx(loss, rel=1e-4)
    assert found["test"].accuracy == correct / found["test"].num_examples
    assert learned < 0.6  # below log 2: it has learned, so the tokens differ for it


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["pflego", "fedavg", "ditto", "per_fedavg"])
def test_the_ways_to_compute_a_round_agree_on_an_embedding(federation, algorithm):
    population = federation.population(tfpfl.Sampling("fixed", rate=1.0))
    ends = []
    for grouping in ("auto", "one_by_one"):
        built = tfpfl.build_algorithm(algorithm, tfpfl.SplitModel(backbone()), population)
        training = tfpfl.Training(built, federation, seed=0, grouping=grouping)
        training.run(rounds=2)
        ends.append([e.loss for e in training.store.evaluations(2) if e.split == "test"])
    assert len(ends[0]) >= 3 and np.isfinite(ends).all()
    np.testing.assert_allclose(*ends, rtol=1e-5)


def built(federation, network):
    return tfpfl.build_algorithm("fedavg", tfpfl.SplitModel(network), federation.population(labels="global"))


ENGINES = {
    "Training": tfpfl.Training,
    "Simulation": tfpfl.Simulation,
    "Scorer": tfpfl.Scorer,
}


@pytest.mark.parametrize("engine", ENGINES)
def test_scaled_tokens_are_refused_with_what_to_do(tmp_path, engine):
    scaled = tfpfl.Federation.from_clients(clients(np.uint8), out=tmp_path / "f")  # 1/255, as for pixels
    with pytest.raises(InvalidArgument, match=r"scaled: x = raw \* 0.00392157 \+ 0, .* Make the federation again with"):
        ENGINES[engine](built(scaled, backbone()), scaled)


def test_scaled_tokens_are_refused_by_tff(tmp_path, tff):
    scaled = tfpfl.Federation.from_clients(clients(np.uint8), out=tmp_path / "f")
    with pytest.raises(InvalidArgument, match="the federation's examples are scaled"):
        tfpfl.federate(built(scaled, backbone()), scaled)
    spec = tf.TensorSpec([None, LENGTH], tf.float32), tf.TensorSpec([None], tf.int32)
    with pytest.raises(InvalidArgument, match="type is float32: give x as a tf.TensorSpec of integers"):
        tfpfl.federate(built(scaled, backbone()), spec)


@pytest.mark.parametrize(
    "change, words, message",
    [
        (lambda x: x + 0.5, WORDS, r"not whole \(they lie between 0.5 and 39.5\): give the tokens as integers"),
        (
            lambda x: x,
            WORDS - 1,
            r"go from 0 to 39, but the backbone's Embedding has rows 0 to 38: give it input_dim=40",
        ),
        (lambda x: x - 1, WORDS, "go from -1 to 38, but the backbone's Embedding has rows 0 to 39"),
        (lambda x: x + 2**24, WORDS, "whole numbers are exact in float32 only up to 16,777,216"),
    ],
)
def test_other_numbers_are_refused_before_any_round(tmp_path, change, words, message):
    made = tfpfl.Federation.from_clients({k: (change(x), y) for k, (x, y) in clients().items()}, out=tmp_path / "f")
    with pytest.raises(InvalidArgument, match=message):
        tfpfl.Training(built(made, backbone(words)), made, seed=0)


def test_examples_that_are_given_without_a_federation_are_checked_too(federation):
    algorithm = built(federation, backbone())
    engine = tfpfl.Simulation(algorithm)
    info = algorithm.population.info(0)
    x, y = federation.arrays(0, "train", "global")
    for wrong, message in ((x + 0.25, "examples of client 0 are not whole"), (x + 30, "Embedding has rows 0 to 39")):
        with pytest.raises(InvalidArgument, match=message):
            engine.next(
                engine.initialize(), [algorithm.init_client(info)], [ClientData(wrong, y, info, client_key(0, 1, 0))]
            )


class Places(keras.Model):
    """Adds what it has learned of each place, as a vision transformer does: no token comes from the examples."""

    def __init__(self):
        super().__init__()
        self.dense, self.place = keras.layers.Dense(3), keras.layers.Embedding(LENGTH, 3)

    def call(self, x):
        return self.dense(x) + tf.reduce_sum(self.place(tf.range(LENGTH)), 0)


def in_part():
    """Looks up the first two numbers of an example, and computes with the others."""
    inputs = keras.Input((LENGTH,))
    tokens = keras.layers.Flatten()(keras.layers.Embedding(WORDS, 3)(inputs[:, :2]))
    return keras.Model(inputs, keras.layers.Concatenate()([tokens, keras.layers.Dense(3)(inputs[:, 2:])]))


def test_how_a_backbone_reads_its_input():
    assert tfpfl.SplitModel(Places(), input_shape=(LENGTH,)).reads == "numbers"
    assert tfpfl.SplitModel(in_part()).reads == "mixed"


class OneHot(keras.layers.Layer):
    """Its only Embedding is of places; of the tokens it makes rows with a one."""

    def __init__(self):
        super().__init__()
        self.place = keras.layers.Embedding(LENGTH, WORDS)

    def call(self, x):
        return tf.reduce_sum(tf.one_hot(tf.cast(x, tf.int32), WORDS) * self.place(tf.range(LENGTH)), 1)


def hashed():
    inputs = keras.Input((LENGTH,), dtype="int32")
    return keras.Model(inputs, keras.layers.Flatten()(keras.layers.Embedding(7, 3)(keras.layers.Hashing(7)(inputs))))


@pytest.mark.parametrize("make", [lambda: keras.Sequential([keras.Input((LENGTH,)), OneHot()]), hashed])
def test_tokens_that_are_not_looked_up_as_they_are_may_be_larger_than_the_table(make, federation):
    """They were refused for the rows of an Embedding that never sees them."""
    model = tfpfl.SplitModel(make())
    assert (model.reads, model.vocabulary) == ("whole", None)
    assert max(federation.arrays(i)[0].max() for i in range(federation.num_clients)) >= max(7, LENGTH)
    check_inputs(model, federation)


class WordsAndPlaces(keras.layers.Layer):
    """A layer with two Embeddings, of which only the one of the words, or both, are of the input."""

    def __init__(self, both):
        super().__init__()
        self.words, self.others = keras.layers.Embedding(WORDS, 3), keras.layers.Embedding(7, 3)
        self.both = both

    def call(self, x):
        x = tf.cast(x, tf.int32)
        return tf.reduce_sum(self.words(x), 1) + tf.reduce_sum(self.others(x if self.both else tf.range(7)), -2)


def by_columns():
    """Each column of the input has an Embedding of its own."""
    inputs = keras.Input((LENGTH,))
    found = [keras.layers.Embedding(7 + i, 3)(inputs[:, i]) for i in range(LENGTH)]
    return keras.Model(inputs, keras.layers.Concatenate()(found))


def test_of_several_embeddings_those_count_that_read_the_input(federation):
    one, both = (
        tfpfl.SplitModel(keras.Sequential([keras.Input((LENGTH,)), WordsAndPlaces(both)])) for both in (False, True)
    )
    assert (one.reads, one.vocabulary, both.vocabulary) == ("whole", WORDS, 7)
    check_inputs(one, federation)
    with pytest.raises(InvalidArgument, match="from 0 to 39, but the backbone's Embedding has rows 0 to 6: give it"):
        check_inputs(both, federation)


class Rare(keras.layers.Layer):
    """Rare words, those from 7 on, are one word."""

    def call(self, x):
        x = tf.cast(x, tf.int32)
        return tf.where(x >= 7, tf.zeros_like(x), x)


def test_an_embedding_of_other_numbers_than_the_tokens_is_no_limit(federation):
    inputs, layers = keras.Input((LENGTH,)), keras.layers
    rare = layers.Embedding(7, 3)(Rare()(inputs))
    both = keras.Model(inputs, layers.Flatten()(layers.Concatenate()([layers.Embedding(WORDS, 3)(inputs), rare])))
    for network, limit in ((keras.Model(inputs, layers.Flatten()(rare)), None), (both, WORDS)):
        model = tfpfl.SplitModel(network)
        assert (model.reads, model.vocabulary) == ("whole", limit)
        check_inputs(model, federation)


def test_parts_of_the_input_that_one_embedding_looks_up_have_its_limit():
    inputs, words = keras.Input((LENGTH,)), keras.layers.Embedding(WORDS, 3)
    by_column = [words(inputs[:, i]) for i in range(LENGTH)]
    for found in (keras.layers.Flatten()(words(inputs[:, :-1])), keras.layers.Concatenate()(by_column)):
        assert tfpfl.SplitModel(keras.Model(inputs, found)).vocabulary == WORDS


def test_columns_with_embeddings_of_their_own_have_no_common_limit():
    model = tfpfl.SplitModel(by_columns())
    assert (model.reads, model.vocabulary) == ("whole", None)


def test_a_part_that_is_looked_up_must_not_be_scaled_either(tmp_path, federation):
    network = in_part()
    scaled = tfpfl.Federation.from_clients(clients(np.uint8), out=tmp_path / "f")
    with pytest.raises(InvalidArgument, match="scaled"):
        tfpfl.Training(built(scaled, network), scaled, seed=0)
    x = federation.arrays(0)[0]
    model = tfpfl.SplitModel(network)
    np.testing.assert_allclose(model.features(model.theta(), x), network(x), rtol=1e-6, atol=1e-7)
    tfpfl.Training(built(federation, network), federation, seed=0)


def test_scores_are_those_of_keras(federation):
    network = backbone()
    model = tfpfl.SplitModel(network)
    head = model.shared_head(2)
    x, y = federation.arrays(1, "train", "global")
    scored = evaluate(model, tfpfl.Weights(model.theta(), head), x, y)
    logits = network(x.astype(np.int32)) @ head.kernel + head.bias
    wanted = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, logits)
    assert float(scored["loss"]) == pytest.approx(float(wanted), rel=1e-5)
