"""A frozen trunk: where a model can be cut, and features that are computed once and never again."""

import hashlib
import json
import shutil
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.toys import backbone, distance, on_disk
from tfpfl.algorithms import fedavg, pflego
from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation
from tfpfl.data.manifest import FederationError, manifest_hash
from tfpfl.data.population import Sampling
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.visit import visits
from tfpfl.models import SplitModel, trunk_features, trunk_federation
from tfpfl.models.trunk_features import features_folder

layers = keras.layers


def network(dtype="float64", seed=0, dropout=0.5, width=7):
    """Two dense layers with BatchNormalization and Dropout between, a skip connection, and two layers above."""
    x = keras.Input((4,), dtype=dtype)
    a = layers.Dense(width, activation="tanh", name="low", dtype=dtype)(x)
    b = layers.BatchNormalization(name="norm", dtype=dtype)(a)
    c = layers.Dropout(dropout, name="drop", dtype=dtype)(b)
    d = layers.Dense(width, activation="tanh", name="block_1_dense", dtype=dtype)(c)
    e = layers.Add(name="block_1_add", dtype=dtype)([c, d])
    y = layers.Dense(5, activation="tanh", name="top", dtype=dtype)(e)
    model = keras.Model(x, y)
    rng = np.random.default_rng(seed)
    model.set_weights([0.3 + 0.5 * rng.random(w.shape) for w in model.get_weights()])
    return model


def images(**args):
    """A convolutional Sequential, cut below its dense layer."""
    stack = [layers.Conv2D(3, 3, activation="relu", name="conv"), layers.Flatten(name="flat")]
    return keras.Sequential([keras.Input((6, 6, 1)), *stack, layers.Dense(4, name="dense")], **args)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("trunk") / "federation")


@pytest.mark.parametrize(
    ("name", "weights", "shape"),
    [("top", 2, (7,)), ("block_1_dense", 4, (7,)), ("block_1", 4, (7,))],
)
def test_the_part_above_a_cut_trains(name, weights, shape):
    """`block_1` means block_1_dense: block_1_add reads the same tensor, which lies on the cut."""
    whole = network()
    model = SplitModel(whole, train_from=name)
    x = np.random.default_rng(1).standard_normal((9, 4))
    assert len(model.initial_theta) == weights and model.above.input_shape == shape and model.input_shape == (4,)
    assert distance(model.features(model.theta(), x), whole(x, training=False)) < 1e-12
    assert distance(model.above.features(model.theta(), model.trunk(x)), whole(x, training=False)) < 1e-12
    for variable in whole.weights[:6]:  # the trunk has its own copy of what it was made with
        variable.assign(0 * variable)
    assert np.abs(model.trunk(x)).max() > 0.1


def test_a_sequential_model_is_cut():
    model = SplitModel(images(), train_from="dense")
    assert model.trunk.shape == (48,) and model.num_backbone_weights == 49 * 4


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(layers.LSTM(3), id="LSTM", marks=pytest.mark.slow),
        pytest.param(layers.GRU(3), id="GRU", marks=pytest.mark.slow),
        pytest.param(layers.Bidirectional(layers.SimpleRNN(2)), id="both ways"),
    ],
)
def test_a_trunk_may_have_recurrent_layers(layer):
    """In Keras 2 they ask their weights for their rank, which arrays do not have."""
    first = layers.Embedding(9, 4, mask_zero=True)
    whole = keras.Sequential([keras.Input((5,)), first, layer, layers.Dense(2, name="top")])
    model, x = SplitModel(whole, train_from="top"), np.array([[1, 2, 0, 0, 0], [3, 4, 5, 6, 8]])
    assert distance(model.features(model.theta(), x), whole(x)) < 1e-6
    assert distance(SplitModel(whole).features(SplitModel(whole).initial_theta, x), whole(x)) < 1e-6


def nested():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="inside")], name="inner")
    return keras.Sequential([keras.Input((4,)), layers.Dense(4, name="first"), inner, layers.Dense(2, name="last")])


def shared():
    x, same = keras.Input((4,)), layers.Dense(4, name="same")
    return keras.Model(x, layers.Dense(3, name="last")(same(layers.Dense(4, name="between")(same(x)))))


class Mine(keras.Model):
    """A model whose layers are called by Python code."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(6, name="hidden")

    def call(self, x):
        return self.hidden(x)


def bypassed():
    """A skip connection from the input to the end: every layer between is bypassed."""
    x = keras.Input((4,))
    y = layers.Dense(4, name="b")(layers.Dense(4, name="a")(x))
    return keras.Model(x, layers.Dense(2, name="end")(layers.Concatenate(name="join")([x, y])))


def attending():
    """An attention layer that gets values from below the cut, by a keyword."""
    x = keras.Input((3, 4))
    a = layers.Dense(4, name="a")(x)
    c = layers.Dense(4, name="c")(layers.Dense(4, name="b")(a))
    y = layers.MultiHeadAttention(1, 2, name="attention")(c, value=a)
    return keras.Model(x, layers.Flatten(name="flat")(y))


def of_one(kind):
    x = keras.Input((4,), name="x")
    y = layers.Dense(2, name="top")(layers.Dense(3)(x))
    return keras.Model({"dict": {"x": x}, "tuple": (x,)}[kind], y)


def padded():
    """Words with a mask, which reaches through Dropout to the recurrent layer and ends there."""
    words = [layers.Embedding(9, 3, mask_zero=True, name="words"), layers.Dropout(0.1, name="drop")]
    stack = [*words, layers.GRU(4, name="gru"), layers.Dense(2, name="last")]
    return keras.Sequential([keras.Input((5,), dtype="int32"), *stack])


def masked():
    stack = [layers.Masking(name="masking"), layers.GRU(4, name="gru"), layers.Dense(2, name="last")]
    return keras.Sequential([keras.Input((5, 3)), *stack])


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (padded, "gru", r"padded sequences with a mask.*features do not keep.*can be cut: 'last' above it"),
        (padded, "drop", r"padded sequences with a mask"),
        (masked, "gru", r"padded sequences with a mask.*can be cut: 'last' above it"),
        (network, "tip", r"unknown layer 'tip'; did you mean 'top'\? there are low, norm"),
        (network, "low", r"it reads the examples.*leave train_from out.*cut: 'norm' above it"),
        (network, "block_1_add", r"it reads 2 tensors.*cut: 'block_1_dense' below it and 'top' above it"),
        (bypassed, "b", r"layer 'join' above it also reads .*below it.*cut: 'end' above it"),
        (attending, "c", r"'attention' above it also reads 'a' below it.*cut: 'b' below it and 'flat' above it"),
        (nested, "inside", "inside of the model 'inner', which is one layer here"),
        (shared, "last", None),
        (shared, "same", "the model applies it more than once"),
        (shared, "between", "layer 'same' is used both below and above it"),
        (lambda: of_one("dict"), "top", "takes an array, and this one takes a dict of one array: build it with keras"),
        (lambda: of_one("tuple"), "top", "takes an array, and this one takes a tuple of one array: build it with"),
        (Mine, "hidden", "functional or a Sequential Keras model.*Mine computes in Python code"),
    ],
)
def test_bad_cuts_are_refused_by_name(make, name, message):
    if message is None:
        assert SplitModel(make(), train_from=name).num_backbone_weights == 15
        return
    with pytest.raises(InvalidArgument, match=message):
        SplitModel(make(), train_from=name)


def test_a_cut_above_which_nothing_trains_is_refused():
    model = images()
    model.get_layer("dense").trainable = False
    with pytest.raises(InvalidArgument, match="no layer from there on has weights that train"):
        SplitModel(model, train_from="dense")


PFLEGO = (pflego, {"tau": 4})


def trained(model, federation, build, rounds=3, **args):
    """The server and all client states after some rounds, as the local engine computes them."""
    algorithm = build(model, federation.population(Sampling("fixed", 0.6), shared_slots=True), **args)
    engine, ids = Simulation(algorithm, federation), [0, 2, 3]
    server, states = engine.initialize(), [algorithm.init_client(v.info) for v in visits(algorithm, 0, ids)]
    for t in range(1, rounds + 1):
        output = engine.next(server, states, visits(algorithm, t, ids))
        server, states = output.server, output.client_states
    return server, states


@pytest.mark.slow
@pytest.mark.parametrize(("build", "args"), slow_but([PFLEGO, (fedavg, {"eta": 0.1})], PFLEGO))
def test_training_on_features_is_training_with_the_trunk(build, args, federation, tmp_path):
    """In float64: the same rounds with the trunk run again for every visit give the same numbers."""
    model = SplitModel(network(), train_from="block_1")
    features, above = trunk_federation(model, federation, tmp_path)
    again, once = trained(model, federation, build, **args), trained(above, features, build, **args)
    assert distance(again, once) < 1e-9
    assert distance(once[0], trained(above, features, build, rounds=1, **args)[0]) > 1e-4


@pytest.fixture
def computed(monkeypatch):
    """The numbers of examples that went through the trunk, one for each call."""
    found, forward = [], trunk_features._forward

    def counted(*args):
        inner = forward(*args)

        def features(raw):
            found.append(len(raw))
            return inner(raw)

        return features

    monkeypatch.setattr(trunk_features, "_forward", counted)
    return found


def test_features_are_computed_once(federation, tmp_path, computed):
    features, _ = trunk_federation(SplitModel(network(), train_from="top"), federation, tmp_path)
    total = federation.manifest["num_examples"]
    assert computed == [total, 8]  # all, and the probes
    keras.backend.clear_session()
    again, _ = trunk_federation(SplitModel(network(), train_from="top"), federation, tmp_path)
    assert computed == [total, 8, 8] and again.path == features.path and again.hash == features.hash
    assert features.manifest["trunk"]["federation_hash"] == federation.hash
    assert [p.name for p in tmp_path.iterdir() if p.name[0] != "."] == [features.path.name]
    for split in ("train", "validation", "test"):
        for i in range(federation.num_clients):
            assert features.raw(i, split)[1].tobytes() == federation.raw(i, split)[1].tobytes()


def test_the_features_are_those_of_inference_in_the_models_dtype(federation):
    """BatchNormalization uses its statistics, Dropout does nothing; beside the federation by default."""
    whole = network()
    features, _ = trunk_federation(SplitModel(whole, train_from="top"), federation)
    x, phi = federation.reader("train", dtype=np.float64)(tf.constant(1))[0], features.raw(1)[0]
    w = whole.get_weights()
    a = np.tanh(x @ w[0] + w[1])
    c = (a - w[4]) / np.sqrt(w[5] + 1e-3) * w[2] + w[3]
    assert distance(phi, c + np.tanh(c @ w[6] + w[7])) < 1e-12
    assert features.path.parent == federation.path.with_name("federation.trunks")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), slow_but([("float16", 2e-3), ("float32", 3e-7)], ("float16", 2e-3)))
def test_features_can_be_stored_in_fewer_bits(dtype, most, federation, tmp_path):
    model = SplitModel(network(), train_from="top")
    full, _ = trunk_federation(model, federation, tmp_path)
    features, above = trunk_federation(model, federation, tmp_path, dtype=dtype)
    kept, exact = (np.asarray(f.raw(0)[0], float) for f in (features, full))
    assert features.path != full.path and features.manifest["dtype"] == dtype
    assert 0 < np.abs(kept - exact).max() < most * np.abs(exact).max()
    assert trained(above, features, pflego, tau=2)[0]


class Scaled(layers.Layer):
    """A layer of the user's own."""

    def __init__(self, factor=2.0, **args):
        super().__init__(**args)
        self.factor = factor

    def call(self, x):
        """Twice the input."""
        return x * self.factor

    def get_config(self):
        """As Keras wants it."""
        return super().get_config() | {"factor": self.factor}


class NotWrittenDown(Scaled):
    """A layer that Keras cannot write down."""

    def get_config(self):
        """Not there."""
        raise NotImplementedError("no get_config")


def with_layer(layer, bias=0.0):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layer, layers.Dense(2, name="top")])
    model.set_weights([np.full(w.shape, 0.1 + bias, "float32") for w in model.get_weights()])
    return model


def hash_of(model):
    return SplitModel(model, train_from="top").trunk.hash


@pytest.mark.slow
def test_the_hash_is_of_weights_architecture_and_code(monkeypatch):
    """It is not of names, nor of what lies above."""
    same = hash_of(with_layer(Scaled()))
    above = with_layer(Scaled())
    above.get_layer("top").set_weights([np.ones((3, 2)), np.ones(2)])
    assert hash_of(with_layer(Scaled())) == hash_of(above) == same
    assert len({same, hash_of(with_layer(Scaled(), bias=1e-6)), hash_of(with_layer(Scaled(3.0)))}) == 3
    assert hash_of(with_layer(layers.ReLU())) != hash_of(with_layer(layers.Softmax()))
    monkeypatch.setattr(Scaled, "call", lambda self, x: x * self.factor * 2.0)
    assert hash_of(with_layer(Scaled())) != same
    with pytest.raises(InvalidArgument, match="Give every layer of your own a get_config"):
        hash_of(with_layer(NotWrittenDown()))


def test_the_hash_is_also_of_what_a_layers_file_imports_from_its_folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside_a_layer.py").write_text("FACTOR = 2.0\n")
    scales = "class Scales(Layer):\n    def call(self, x):\n        return x * beside_a_layer.FACTOR\n"
    (tmp_path / "file_of_a_layer.py").write_text(f"import beside_a_layer\nfrom keras.layers import Layer\n{scales}")
    import file_of_a_layer

    before = hash_of(with_layer(file_of_a_layer.Scales()))
    assert hash_of(with_layer(file_of_a_layer.Scales())) == before
    (tmp_path / "beside_a_layer.py").write_text("FACTOR = 3.0\n")
    assert hash_of(with_layer(file_of_a_layer.Scales())) != before


@pytest.mark.parametrize("value", [1.5, "word", [1, None], {"a": 2}])
def test_the_hash_is_also_of_the_attributes_of_a_layers_class(value, monkeypatch):
    monkeypatch.setattr(Scaled, "__module__", "of_a_notebook")  # it has no file
    before = hash_of(with_layer(Scaled()))
    monkeypatch.setattr(Scaled, "of_all", object(), raising=False)  # whose text is another one in each process
    assert hash_of(with_layer(Scaled())) == before
    monkeypatch.setattr(Scaled, "of_all", value)
    assert hash_of(with_layer(Scaled())) != before


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_small_features_are_compared_by_their_own_size(dtype, federation, tmp_path):
    """float16 stores numbers of this size in steps of 6e-8, which are more than a hundredth of them."""
    whole = network()
    scale, offset, *statistics = whole.get_layer("norm").get_weights()
    whole.get_layer("norm").set_weights([1e-6 * scale, 1e-6 * offset, *statistics])
    model = SplitModel(whole, train_from="block_1")
    features, _ = trunk_federation(model, federation, tmp_path, dtype=dtype)
    assert 0 < np.abs(features._x).max() < 1e-5
    assert trunk_federation(model, federation, tmp_path, dtype=dtype)[0].hash == features.hash
    rewritten(features.path, 1.5 * np.asarray(features._x))
    with pytest.raises(FederationError, match="does not have this trunk's features: 8 examples were computed again"):
        trunk_federation(model, federation, tmp_path, dtype=dtype)


def test_other_weights_other_data_and_other_cuts_have_other_folders(federation, tmp_path):
    model = SplitModel(network(), train_from="top")
    other = on_disk(tmp_path / "other", seed=2)
    folders = [
        features_folder(model.trunk, federation),
        features_folder(model.trunk, other),
        features_folder(SplitModel(network(seed=1), train_from="top").trunk, federation),
        features_folder(SplitModel(network(), train_from="block_1").trunk, federation),
        features_folder(model.trunk, federation, dtype="float16"),
    ]
    assert len({f.name for f in folders}) == 5


class Killed(BaseException):
    """Stands for a process that ends."""


@pytest.mark.parametrize("kept", [20, 10, 0])
def test_a_killed_computation_goes_on_after_the_last_block_that_is_whole(
    kept, federation, tmp_path, computed, monkeypatch
):
    model = SplitModel(network(), train_from="top")
    whole, _ = trunk_federation(model, federation, tmp_path / "at_once")
    total = federation.manifest["num_examples"]
    computed.clear()
    monkeypatch.setattr(trunk_features, "BLOCK_BYTES", 10 * 7 * 8)  # ten examples

    def kill(done, _):
        if done == 20:
            raise Killed

    with pytest.raises(Killed):
        trunk_federation(model, federation, tmp_path / "killed", report=kill)
    (partial,) = (tmp_path / "killed").glob(".*.partial")
    content = bytearray((partial / "x.raw").read_bytes() + b"half a block")
    content[kept * 7 * 8 + 7] ^= 1  # in the first feature that must not be used
    (partial / "x.raw").write_bytes(content)
    with open(partial / "blocks", "a") as file:
        file.write("0123")
    told = []
    features, _ = trunk_federation(model, federation, tmp_path / "killed", report=lambda *a: told.append(a))
    assert computed == [10] * 2 + [10] * ((total - kept) // 10) + [total % 10] * (total % 10 > 0) + [8]
    assert told[0] == (kept + 10, total) and told[-1] == (total, total)
    assert distance(features._x, whole._x) < 1e-12 and not partial.exists()


def test_two_at_once_compute_once(federation, tmp_path, computed):
    """File locks hold between threads as they do between processes: each opens the file for itself."""
    models = [SplitModel(network(), train_from="top") for _ in range(2)]
    found = []
    threads = [
        threading.Thread(target=lambda m=m: found.append(trunk_federation(m, federation, tmp_path))) for m in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(computed) == [8, 8, federation.manifest["num_examples"]]
    assert found[0][0].hash == found[1][0].hash


def rewritten(folder, phi):
    """Puts other features into a folder, whose hashes then say nothing."""
    np.asarray(phi).tofile(folder / "x.raw")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["x.raw"]["sha256"] = hashlib.sha256((folder / "x.raw").read_bytes()).hexdigest()
    manifest["hash"] = manifest_hash(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.slow
def test_a_damaged_folder_is_refused(federation, tmp_path):
    model = SplitModel(network(), train_from="top")
    good = trunk_federation(model, federation, tmp_path / "good")[0].path

    def damage(change, message):
        folder = tmp_path / "bad" / good.name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        change(folder)
        with pytest.raises(FederationError, match=message):
            trunk_federation(model, federation, tmp_path / "bad")

    content = (good / "x.raw").read_bytes()
    damage(lambda f: (f / "x.raw").write_bytes(content[:-8]), "x.raw has .* bytes, expected .*Delete .* computed again")
    damage(lambda f: (f / "x.raw").write_bytes(content[:-8] + bytes(8)), "x.raw was changed")
    damage(lambda f: rewritten(f, 1.001 * np.frombuffer(content)), "examples were computed again, and differ by 0.001")
    other = trunk_federation(SplitModel(network(seed=1), train_from="top"), federation, tmp_path / "other")[0]
    damage(
        lambda f: (shutil.rmtree(f), shutil.copytree(other.path, f)), "of another trunk or federation .*differ in trunk"
    )


def test_features_that_are_not_finite_are_refused(federation, tmp_path):
    model = network()
    model.get_layer("norm").set_weights([np.full(7, 1e6), *model.get_layer("norm").get_weights()[1:]])
    model = SplitModel(model, train_from="top")
    with pytest.raises(InvalidArgument, match="not finite as float16: store them as float32"):
        trunk_federation(model, federation, tmp_path, dtype="float16")
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]
    assert trunk_federation(model, federation, tmp_path)[0].num_clients == federation.num_clients


def test_what_trunk_federation_cannot_do(federation, tmp_path):
    with pytest.raises(InvalidArgument, match="has no trunk: all of its backbone trains"):
        trunk_federation(SplitModel(backbone()), federation)
    with pytest.raises(InvalidArgument, match=r"takes examples of shape \(6, 6, 1\), the federation's are \(4,\)"):
        trunk_federation(SplitModel(images(), train_from="dense"), federation)
    with pytest.raises(InvalidArgument, match="dtype must be one of float16, float32, float64, found 'int8'"):
        trunk_federation(SplitModel(network(), train_from="top"), federation, tmp_path, dtype="int8")


@pytest.mark.slow
def test_tokens_go_through_an_embedding_in_the_trunk(tmp_path):
    x = np.random.default_rng(0).integers(0, 9, (30, 6)).astype(np.int32)
    federation = Federation.from_clients([(x, np.arange(30) % 2)] * 4, out=tmp_path / "f", scale=1.0)
    stack = [layers.Embedding(9, 3), layers.GlobalAveragePooling1D(name="pool"), layers.Dense(2, name="top")]
    model = SplitModel(keras.Sequential([keras.Input((6,)), *stack]), train_from="top")
    features, above = trunk_federation(model, federation)
    table = model.trunk.weights[0]
    assert (model.reads, model.vocabulary, above.reads) == ("whole", 9, "numbers")
    assert distance(features.raw(0)[0], table[federation.raw(0)[0]].mean(1)) < 1e-6
    assert trained(above, features, pflego, tau=2)[0]


def test_targets_come_along(tmp_path):
    """A federation of numbers instead of classes: its targets are those of the features."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 4)).astype("float32"), rng.standard_normal((30, 2)).astype("float32")
    federation = Federation.from_clients([(x, y)] * 4, out=tmp_path / "f", targets="real")
    model = SplitModel(network(dtype="float32"), train_from="top", kind="regression")
    features, above = trunk_federation(model, federation)
    assert features.raw(1)[1].tobytes() == federation.raw(1)[1].tobytes() and above.kind == model.kind
    assert features.manifest["files"]["targets.raw"] == federation.manifest["files"]["targets.raw"]


@pytest.mark.slow
def test_mobilenet_with_a_frozen_trunk():
    """`block_16` means its first layer; with LoRA on the last convolution a message is under 1/50 in bytes."""
    whole = keras.applications.MobileNetV2((96, 96, 3), alpha=0.35, include_top=False, weights=None, pooling="avg")
    for layer in whole.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.trainable = False
    x = np.random.default_rng(0).uniform(-1, 1, (2, 96, 96, 3)).astype("float32")
    everything = SplitModel(whole)
    block, last = (SplitModel(whole, train_from=n, adapters="lora:4") for n in ("block_16", "Conv_1"))
    assert block.trunk.model.output_shape[1:] == (3, 3, 56) and last.trunk.shape == (3, 3, 112)
    for model in (block, last):
        assert distance(model.features(model.theta(), x), whole(x, training=False)) < 1e-5
    assert last.adapters.names == ("Conv_1/A", "Conv_1/B")
    assert 50 * sum(w.nbytes for w in last.initial_theta) < sum(w.nbytes for w in everything.initial_theta)
    with pytest.raises(InvalidArgument, match="'block_15_add'.*'block_16_expand' above it"):
        SplitModel(whole, train_from="block_15_add")


def test_trunks_that_differ_in_a_word_that_is_also_a_layers_name_have_different_hashes():
    def made(activation, name):
        stack = [layers.Dense(4, name="low"), layers.Activation(activation, name=name), layers.Dense(2, name="top")]
        model = keras.Sequential([keras.Input((3,)), *stack])
        model.set_weights([np.ones(w.shape) for w in model.get_weights()])
        return SplitModel(model, train_from="top").trunk.hash

    assert made("relu", "relu") != made("relu6", "relu6")
    assert made("relu", "relu") == made("relu", "other")
    assert made("relu", "linear") == made("relu", "other")


def test_ids_that_float32_does_not_hold_have_features_of_their_own(tmp_path):
    x = (2**24 + np.random.default_rng(0).integers(0, 2**24, (30, 6))).astype(np.int32)
    federation = Federation.from_clients([(x, np.arange(30) % 2)] * 4, out=tmp_path / "f", scale=1.0)
    stack = [layers.Hashing(50), layers.Embedding(50, 3), layers.GlobalAveragePooling1D(name="pool")]
    whole = keras.Sequential([keras.Input((6,), dtype="int32"), *stack, layers.Dense(2, name="top")])
    model = SplitModel(whole, train_from="top")
    features, _ = trunk_federation(model, federation)
    assert distance(features.raw(0)[0], model.trunk.model(federation.raw(0)[0])) < 1e-6
