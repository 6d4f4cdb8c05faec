"""Backbones that take several arrays, sequences, pixels or half precision: against formulas, Keras and other ways."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner
from keras import layers

import tfpfl
from helpers.marks import slow_but
from helpers.normalized import adapters_of, normed
from tfpfl.algorithms import ALGORITHMS, pflego_exact
from tfpfl.algorithms.contract import ClientData
from tfpfl.algorithms.transforms.objective import with_objective
from tfpfl.algorithms.transforms.schedule import scheduled
from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.data.population import Population
from tfpfl.data.randomness import client_key
from tfpfl.engines import visits as visits_of
from tfpfl.models import SplitModel, build_network, tree
from tfpfl.models.losses import cross_entropy, logits
from tfpfl.runs.inputs import read_examples

WORDS, LENGTH, RHO = 20, 6, 0.3
SIZES, K = (7, 5, 9), 2


def two_arrays(dtype="float32", kind="dict", normed=False):
    """tanh of a Dense layer on [image, age]; `normed`: with BatchNormalization after it."""
    keras.utils.set_random_seed(1)
    image, age = (keras.Input(s, dtype=dtype, name=n) for s, n in (((3, 2), "image"), ((1,), "age")))
    both = layers.Concatenate(dtype=dtype)([age, layers.Flatten(dtype=dtype)(image)])
    inputs = {"image": image, "age": age} if kind == "dict" else [age, image]
    out = layers.Dense(4, activation="tanh", dtype=dtype)(both)
    return keras.Model(inputs, layers.BatchNormalization(dtype=dtype)(out) if normed else out)


def attention(dtype="float32"):
    """Attention among the tokens of a text; the mask says which are no padding."""
    keras.utils.set_random_seed(1)
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    mask = keras.Input((LENGTH,), dtype=dtype, name="mask")
    e = layers.Embedding(WORDS, 4, dtype=dtype)(tokens)
    seen = layers.Reshape((1, LENGTH), dtype=dtype)(mask)
    e = layers.MultiHeadAttention(2, 3, dtype=dtype)(e, e, attention_mask=seen)
    return keras.Model({"tokens": tokens, "mask": mask}, layers.Dot(1, dtype=dtype)([mask, e]))


def recurrent(dtype="float32"):
    keras.utils.set_random_seed(1)
    first = layers.Embedding(WORDS, 3, mask_zero=True, dtype=dtype)
    return keras.Sequential([keras.Input((LENGTH,)), first, layers.GRU(4, dtype=dtype)])


def texts(rng, n):
    """Tokens of the upper half of the words have class 1; 0 is padding."""
    y = (np.arange(n) % K).astype(np.int32)
    tokens = rng.integers(1, WORDS // 2, (n, LENGTH)) + (WORDS // 2) * y[:, None]
    mask = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (n, 1))
    return (tokens * mask).astype(np.int32), mask.astype(np.float32), y


def records(rng, n):
    y = (np.arange(n) % K).astype(np.int32)
    return {"image": rng.normal(size=(n, 3, 2)) + y[:, None, None], "age": rng.normal(size=(n, 1)) + y[:, None]}, y


def masked(rng, n):
    tokens, mask, y = texts(rng, n)
    return {"tokens": tokens, "mask": mask}, y


def with_tuples(rng, n):
    x, y = records(rng, n)
    return (x["age"], x["image"]), y


def clients(make, sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    return [make(rng, n) for n in sizes]


def raw(variable):
    return variable if isinstance(variable, tf.Variable) else variable.value


def by_keras(network, x, y, head):
    """The loss of a whole model and its gradient with respect to (theta, head), by one tape on Keras's variables."""
    with tf.GradientTape() as tape:
        tape.watch(head)
        loss = cross_entropy(logits(head, network(x, training=False)), tf.constant(y))
    theta = [raw(v) for v in network.trainable_variables]
    of_theta, of_head = tape.gradient(loss, (theta, head))
    return loss, [tf.convert_to_tensor(g) for g in of_theta], of_head


CASES = {
    "dict": (lambda: two_arrays("float64"), records),
    "tuple": (lambda: two_arrays("float64", "list"), with_tuples),
    "attention on tokens": (lambda: attention("float64"), masked),
    "gru on tokens": (lambda: recurrent("float64"), lambda rng, n: texts(rng, n)[::2]),
}


@pytest.mark.parametrize("case", slow_but(CASES, "dict", "attention on tokens"))
def test_pflego_is_gradient_descent_on_the_whole_objective(case):
    make, examples = CASES[case]
    network, data = make(), clients(examples)
    model, population = SplitModel(network), Population(SIZES, [K] * 3)
    assert model.dtype == np.float64
    algorithm = pflego_exact(model, population, tau=1, rho=RHO)
    engine = tfpfl.Simulation(algorithm)
    infos = [population.info(i, np.float64) for i in range(3)]
    heads = [algorithm.init_client(info) for info in infos]

    def typed(x):
        return tf.nest.map_structure(lambda a: tf.constant(a, tf.float64 if a.dtype.kind == "f" else tf.int32), x)

    visits = [
        ClientData(typed(x), tf.constant(y), info, client_key(0, 1, [i])[0])
        for i, ((x, y), info) in enumerate(zip(data, infos, strict=True))
    ]
    found = engine.next(engine.initialize(), heads, visits)
    alpha, theta = np.array(SIZES) / sum(SIZES), list(model.theta())
    for i, visit in enumerate(visits):
        as_keras = list(visit.x) if isinstance(visit.x, tuple) else visit.x
        _, of_theta, of_head = by_keras(network, as_keras, visit.y, heads[i])
        theta = [t - RHO * alpha[i] * g for t, g in zip(theta, of_theta, strict=True)]
        for ours, start, g in zip(found.client_states[i], heads[i], of_head, strict=True):
            np.testing.assert_allclose(ours, start - RHO * alpha[i] * g, rtol=0, atol=1e-9)
    for ours, wanted in zip(found.server.theta, theta, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-9)
    moved = sum(float(tf.norm(w - s)) for w, s in zip(theta, model.theta(), strict=True))
    assert moved > 1e-3


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    """The same examples as one array of seven numbers, and as a dict of two arrays."""
    folder, data = tmp_path_factory.mktemp("f"), clients(records, (20, 14, 14, 26))
    one = [(np.concatenate([x["age"], x["image"].reshape(len(y), -1)], 1), y) for x, y in data]
    return [tfpfl.Federation.from_clients(d, out=folder / str(i)) for i, d in enumerate((one, data))]


def of_one_array(normed=False):
    keras.utils.set_random_seed(1)
    last = [layers.BatchNormalization()] if normed else []
    return keras.Sequential([keras.Input((7,)), layers.Dense(4, activation="tanh"), *last])


def trained(federation, network, name, **how):
    grouping = how.pop("grouping", "auto")
    model = SplitModel(network, head_init="glorot", adapters=adapters_of(name))
    row = ALGORITHMS[name]
    labels = "local" if row.head == "personal" else "global"
    built = tfpfl.build_algorithm(name, model, federation.population(labels=labels), **how)
    training = tfpfl.Training(built, federation, seed=0, grouping=grouping)
    training.run(rounds=2)
    return [e.loss for e in training.store.evaluations(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["pflego", "fedavg with a schedule and an objective"], "pflego"))
def test_a_round_of_two_arrays_is_that_of_one(one_and_two, name):
    ends = []
    for federation, network in zip(one_and_two, (of_one_array(), two_arrays()), strict=True):
        algorithm = tfpfl.build_algorithm(name.split()[0], SplitModel(network), federation.population())
        if name != "pflego":
            algorithm = with_objective(scheduled(algorithm, "inverse_sqrt"), "fair:1")
        visits = visits_of(algorithm, 1, range(4))
        engine = tfpfl.Simulation(algorithm, federation, held_out=["test"])
        ends.append(engine.next(engine.initialize(), [algorithm.init_client(v.info) for v in visits], visits))
    one, two = ends
    for a, b in zip(*(tf.nest.flatten([end.server, end.client_states]) for end in ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(one.client_metrics, two.client_metrics, strict=True):
        assert float(a["test_loss"]) == pytest.approx(float(b["test_loss"]), rel=1e-4)


@pytest.mark.parametrize("name", slow_but(list(ALGORITHMS), ci=("fedrep", "fedamp", "scaffold", "ditto")))
def test_two_arrays_are_as_good_as_one_for_every_method(one_and_two, name):
    networks = of_one_array(normed=normed(name)), two_arrays(normed=normed(name))
    losses = [trained(clients, network, name) for clients, network in zip(one_and_two, networks, strict=True)]
    assert np.isfinite(losses).all() and len(losses[0]) >= 8
    np.testing.assert_allclose(*losses, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pflego", "fedavg", "per_fedavg", "fedrep", "fedrecon"])
def test_mini_batches_and_all_groupings_agree(one_and_two, name):
    batches = {} if name in ("pflego", "fedrecon") else {"batch_size": 5}
    losses = [trained(one_and_two[1], two_arrays(), name, grouping=g, **batches) for g in ("auto", "one_by_one")]
    losses.append(trained(one_and_two[1], two_arrays(), name, grouping="stacked", **batches))
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["two arrays", "attention", "gru"])
def test_both_engines_agree_and_learn(tmp_path, tff, case):
    make, examples = {
        "two arrays": (two_arrays, records),
        "attention": (attention, masked),
        "gru": (recurrent, lambda rng, n: texts(rng, n)[::2]),
    }[case]
    federation = tfpfl.Federation.from_clients(clients(examples, (40, 30, 30)), out=tmp_path / "f")
    ends = []
    for engine in ("local", "tff"):
        model = SplitModel(make())
        built = tfpfl.build_algorithm("pflego", model, federation.population(), tau=20, rho=0.02, beta=0.1)
        training = tfpfl.Training(built, federation, seed=0, engine=engine)
        training.run(rounds=15)
        history = training.store.history()
        ends.append([e.loss for e in training.store.evaluations(15)])
        assert history[-1]["loss"] < 0.7 * history[0]["loss"]
    np.testing.assert_allclose(*ends, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["arrays", "datasets"])
def test_clients_that_bring_their_arrays_to_tff(one_and_two, tff, how):
    federation = one_and_two[1]
    algorithm = tfpfl.build_algorithm("pflego", SplitModel(two_arrays()), federation.population(), rho=0.1)
    infos = [algorithm.population.info(i) for i in range(4)]
    states = [algorithm.init_client(info) for info in infos]

    def visits(of):
        return [ClientData(*of(*federation.arrays(i)), info, client_key(0, 1, [i])[0]) for i, info in enumerate(infos)]

    wanted = tfpfl.Simulation(algorithm)
    wanted = wanted.next(wanted.initialize(), states, visits(lambda x, y: (x, y)))
    if how == "arrays":
        x = {"age": tf.TensorSpec([None, 1]), "image": tf.TensorSpec([None, 3, 2])}
        process, given = tfpfl.federate(algorithm, (x, tf.TensorSpec([None], tf.int32))), visits(lambda x, y: (x, y))
    else:
        given = visits(lambda x, y: (tf.data.Dataset.from_tensor_slices((x, y)), ()))
        process = tfpfl.federate(algorithm, tf.data.DatasetSpec(given[0].x.element_spec))
    found = process.next(process.initialize(), states, given)
    for a, b in zip(*(tf.nest.flatten([end.server, end.client_states]) for end in (wanted, found)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fault", slow_but([3, 4], 4))
def test_screening_and_chunks_know_several_arrays(one_and_two, fault):
    from tfpfl.algorithms.transforms.faults import broken_data
    from tfpfl.algorithms.transforms.screening import screened

    model, population = SplitModel(two_arrays()), one_and_two[1].population()
    built = tfpfl.build_algorithm("pflego", model, population, chunk=3)
    broken = broken_data(screened(built), lambda data: tf.where(tf.equal(data.info.client_id, 1), fault, 0))
    engine = tfpfl.Simulation(broken, one_and_two[1])
    ids = population.client_ids
    visits = visits_of(broken, 1, ids)
    out = engine.next(engine.initialize(), [broken.init_client(v.info) for v in visits], visits)
    assert [int(m["rejected"]) for m in out.client_metrics] == [0, {3: 1, 4: 2}[fault], 0, 0]


@pytest.mark.slow
def test_padding_changes_nothing(tmp_path):
    """With a mask, what stands in the padded places is not seen: by attention, and by a GRU behind Masking."""
    rng = np.random.default_rng(0)
    tokens, mask, _ = texts(rng, 8)
    model = SplitModel(attention())
    other = np.where(mask > 0, tokens, rng.integers(0, WORDS, tokens.shape))
    phi = [model.features(model.theta(), {"tokens": t, "mask": mask}) for t in (tokens, other)]
    np.testing.assert_allclose(*phi, atol=1e-6)
    keras.utils.set_random_seed(2)
    series = keras.Sequential([keras.Input((LENGTH, 2)), layers.Masking(-1.0), layers.GRU(3)])
    x = rng.normal(size=(8, LENGTH, 2)).astype(np.float32)
    mask[:] = np.arange(LENGTH) < 3 + np.arange(8)[:, None] % 2
    x = np.where(mask[..., None] > 0, x, np.float32(-1))
    model = SplitModel(series)
    found = np.asarray(model.features(model.theta(), x))
    for n in (3, 4):
        of = mask.sum(1) == n
        np.testing.assert_allclose(found[of], series.layers[-1](x[of, :n]), atol=1e-6)


def test_what_a_model_of_several_arrays_says_of_itself():
    model = SplitModel(attention())
    assert model.input_shape == {"mask": (LENGTH,), "tokens": (LENGTH,)}
    assert model.reads == {"mask": "numbers", "tokens": "whole"}
    assert model.vocabulary == {"mask": None, "tokens": WORDS}
    spec = model.example_spec(3)
    assert spec["tokens"] == tf.TensorSpec([3, LENGTH], tf.int32) and spec["mask"].dtype == tf.float32
    tokens, mask, _ = texts(np.random.default_rng(0), 5)
    given = {"tokens": tokens.astype(np.float32), "mask": mask}  # whole numbers, however they come
    wanted = np.asarray(model.backbone({"tokens": tokens, "mask": mask}))
    np.testing.assert_allclose(model.features(model.theta(), given), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.features_in_chunks(model.theta(), given, 2), wanted, rtol=1e-5, atol=1e-6)
    phi, pull_back = model.record(model.theta(), given)
    again, in_chunks = model.record(model.theta(), given, chunk=2)
    np.testing.assert_allclose(again, phi, rtol=1e-5, atol=1e-6)
    for a, b in zip(pull_back(phi), in_chunks(phi), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


class Own(keras.Model):
    """A subclassed model, which does not know its input."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense = layers.Embedding(WORDS, 3), layers.Dense(2)

    def call(self, x):
        return tf.concat([tf.reduce_mean(self.embedding(x["tokens"]), 1), self.dense(x["age"])], 1)


def test_a_subclassed_model_is_told_the_shapes_of_its_arrays():
    model = SplitModel(Own(), input_shape={"tokens": (LENGTH,), "age": (1,)})
    assert model.reads == {"age": "numbers", "tokens": "whole"} and model.vocabulary["tokens"] == WORDS
    x = {"tokens": texts(np.random.default_rng(0), 4)[0], "age": np.ones((4, 1), np.float32)}
    np.testing.assert_allclose(model.features(model.theta(), x), model.backbone(x), rtol=1e-6)


def test_rows_of_structures():
    x = {"a": tf.range(6), "b": tf.reshape(tf.range(12), [6, 2])}
    assert int(tree.num_rows(x)) == 6 and int(tree.num_rows(x["b"])) == 6
    assert tree.rows(x, 1, 3)["b"].numpy().tolist() == [[2, 3], [4, 5]]
    assert tree.gather_rows((x["a"],), [4, 0])[0].numpy().tolist() == [4, 0]


def test_arrays_that_do_not_fit_are_refused_with_what_to_do(tmp_path, one_and_two):
    one, two = one_and_two

    def training(network, federation):
        algorithm = tfpfl.build_algorithm("pflego", SplitModel(network), federation.population())
        return tfpfl.Training(algorithm, federation, seed=0)

    for network, federation, message in (
        (two_arrays(), one, r"takes examples \{'age': \(1,\), 'image': \(3, 2\)\}, the federation's are \(7,\)"),
        (of_one_array(), two, r"takes examples \(7,\), the federation's are \{'age'"),
        (two_arrays(kind="list"), two, r"The federation's examples are a dict: build keras.Model\(inputs=\{"),
        (attention(), two, r"takes examples \{'mask': \(6,\), 'tokens': \(6,\)\}, the federation's are"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            training(network, federation)
    with pytest.raises(InvalidArgument, match="mlp200 takes one array, and examples are several: {'age'"):
        build_network("mlp200", two.example_shape)
    wrong = clients(lambda rng, n: ({"tokens": rng.integers(0, 30, (n, LENGTH)), "mask": np.ones((n, LENGTH))},
                                    np.arange(n) % 2))  # fmt: skip
    federation = tfpfl.Federation.from_clients(wrong, out=tmp_path / "f")
    with pytest.raises(
        InvalidArgument, match=r"examples in 'tokens' go from 0 to 29, but the backbone's Embedding has"
    ):
        training(attention(), federation)
    with pytest.raises(InvalidArgument, match="the backbone takes a dict of the arrays age, image; found EagerTensor"):
        model = SplitModel(two_arrays())
        model.features(model.theta(), tf.zeros([2, 7]))
    with pytest.raises(InvalidArgument, match=r"input shape \{'a': \(None,\)\} is open"):
        a = keras.Input((None,), name="a")
        SplitModel(keras.Model({"a": a}, layers.GlobalMaxPooling1D()(layers.Embedding(5, 3)(a))))


@pytest.mark.slow
def test_a_run_folder_keeps_such_a_model_and_gives_it_out(tmp_path):
    def pixels_and_age(rng, n):
        x, y = records(rng, n)
        return {"age": x["age"], "image": np.clip(100 + 40 * x["image"], 0, 255).astype(np.uint8)}, y

    federation = tfpfl.Federation.from_clients(clients(pixels_and_age, (20, 30)), out=tmp_path / "f")
    two_arrays().save(tmp_path / "mine.keras")
    config = tfpfl.RunConfig(algorithm="pflego", network=str(tmp_path / "mine.keras"), rounds=2)
    with tfpfl.Run.create(config, tmp_path / "run", federation) as run:
        run.train()
        assert run.passes.forward == 1
        scored = {e.client_id: e for e in run.store.evaluations(2) if (e.model, e.split) == ("personal", "test")}
        for client in range(2):
            x, y = federation.raw(client, "test")
            found = run.keras_model(client).predict({k: np.array(v) for k, v in x.items()}, verbose=0)
            assert -np.log(found[np.arange(len(y)), y]).mean() == pytest.approx(scored[client].loss, rel=1e-4)
    done = CliRunner().invoke(
        main, ["model", str(tmp_path / "run"), "--client", "1", "--out", str(tmp_path / "1.keras")]
    )
    assert done.exit_code == 0 and "raw examples age [1], image [3, 2] -> probabilities of 2 classes" in done.output
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(InvalidArgument, match="an example of this run is several arrays, {'age': "):
        read_examples(tmp_path / "x.npy", federation)


@pytest.mark.slow
def test_arrays_may_have_names_that_layers_cannot_have(tmp_path):
    """TensorFlow allows no space and no é in the name of a layer, and Keras no name twice, such as that of the head."""
    rng = np.random.default_rng(0)
    names = ("Größe in cm", "head", "_", "probabilities")

    def person(n):
        x = {name: rng.integers(0, 200, (n, 2)).astype(np.uint8) for name in names}
        return x, x["head"][:, 0] // 100

    federation = tfpfl.Federation.from_clients([person(20), person(30)], out=tmp_path / "f")
    inputs = {name: keras.Input((2,)) for name in names}
    together = keras.layers.Concatenate()(list(inputs.values()))
    keras.Model(inputs, together, name="probabilities").save(tmp_path / "mine.keras")
    config = tfpfl.RunConfig(algorithm="pflego", network=str(tmp_path / "mine.keras"), participation=1, rounds=1)
    with tfpfl.Run.create(config, tmp_path / "run", federation) as run:
        run.train()
        (x, y), made = federation.raw(1, "test"), run.client_model(1)
        scored = {e.client_id: e for e in run.store.evaluations(1) if (e.model, e.split) == ("personal", "test")}[1]
    made.save(tmp_path / "1.keras")
    loaded = keras.models.load_model(tmp_path / "1.keras")
    found = loaded.predict({k: np.array(v) for k, v in x.items()}, verbose=0)
    assert -np.log(found[np.arange(len(y)), y]).mean() == pytest.approx(scored.loss, rel=1e-4)


# ---- pixels inside the model, and half precision


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_but(["float32", "uint8"], "uint8"))
def test_pixels_that_the_model_itself_scales(tmp_path, dtype):
    rng = np.random.default_rng(0)
    data = [(rng.integers(0, 256, (12, 4, 4, 1)).astype(np.uint8), np.arange(12) % 2) for _ in range(2)]
    kept = tfpfl.Federation.from_clients(data, scale=1.0, out=tmp_path / "kept")
    scaled = tfpfl.Federation.from_clients(data, out=tmp_path / "scaled")
    x = kept.arrays(0)[0]
    np.testing.assert_array_equal(x, kept.raw(0)[0])

    def network(inside):
        keras.utils.set_random_seed(1)
        first = [keras.Input((4, 4, 1), dtype=dtype if inside else "float32")]
        first += [layers.Rescaling(1 / 255)] if inside else []
        return keras.Sequential([*first, layers.Flatten(), layers.Dense(3, activation="tanh")])

    ends = []
    for federation, inside in ((kept, True), (scaled, False)):
        algorithm = tfpfl.build_algorithm("pflego", SplitModel(network(inside)), federation.population())
        engine = tfpfl.Simulation(algorithm, federation)
        visits = visits_of(algorithm, 1, [0, 1])
        end = engine.next(engine.initialize(), [algorithm.init_client(v.info) for v in visits], visits)
        ends.append(tf.nest.flatten([end.server, end.client_states]))
    for a, b in zip(*ends, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    if dtype == "uint8":
        with pytest.raises(InvalidArgument, match="Make the federation again with scale=1"):
            tfpfl.Simulation(tfpfl.build_algorithm("pflego", SplitModel(network(True)), scaled.population()), scaled)


def mixed(name):
    keras.utils.set_random_seed(1)
    policy = keras.mixed_precision.Policy(name)
    hidden = [layers.Conv1D(4, 2, activation="tanh"), layers.Flatten(), layers.Dense(3, activation="tanh")]
    stack = [type(layer).from_config({**layer.get_config(), "dtype": policy}) for layer in hidden]
    return keras.Sequential([keras.Input((5, 2)), *stack])


@pytest.mark.slow
def test_mixed_precision_computes_in_half_and_learns_in_whole(tmp_path):
    rng = np.random.default_rng(0)
    network = mixed("mixed_bfloat16")
    model, exact = SplitModel(network), SplitModel(mixed("float32"))
    assert model.dtype == np.float32 and all(w.dtype == np.float32 for w in model.initial_theta)
    x = rng.normal(size=(9, 5, 2)).astype(np.float32)
    phi, pull_back = model.record(model.theta(), tf.constant(x))
    assert phi.dtype == tf.float32
    np.testing.assert_array_equal(phi, tf.cast(network(x), tf.float32))
    wanted, exactly = exact.record(exact.theta(), tf.constant(x))
    assert 1e-5 < float(tf.reduce_max(tf.abs(phi - wanted))) < 0.05  # it did compute in half precision
    for ours, theirs in zip(pull_back(wanted), exactly(wanted), strict=True):
        assert ours.dtype == tf.float32
        np.testing.assert_allclose(ours, theirs, atol=0.05 * float(tf.reduce_max(tf.abs(theirs))) + 1e-3)
    y = np.arange(20) % 2
    data = [((rng.normal(size=(20, 5, 2)) + y[:, None, None]).astype(np.float32), y) for _ in range(3)]
    federation = tfpfl.Federation.from_clients(data, out=tmp_path / "f")
    algorithm = tfpfl.build_algorithm("pflego", model, federation.population(), rho=0.02, beta=0.1)
    engine, losses = tfpfl.Simulation(algorithm, federation), []
    server, states = engine.initialize(), [algorithm.init_client(algorithm.population.info(i)) for i in range(3)]
    for t in range(1, 9):
        end = engine.next(server, states, visits_of(algorithm, t, range(3)))
        server, states = end.server, end.client_states
        losses.append(float(end.metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]


def test_weights_of_half_precision_are_refused_by_name():
    with pytest.raises(InvalidArgument, match=r"\d of the weights of .* that train are bfloat16, .*'mixed_bfloat16'"):
        SplitModel(mixed("bfloat16"))
