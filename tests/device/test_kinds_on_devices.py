"""Heads that are not for classes: programs, scores and rounds on devices against TensorFlow and the engine."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from helpers.marks import slow_but
from helpers.truth import relative
from tflite_export import BundleError, DeviceClient, ExportError, Neighbours, export, simulate_round, verify
from tflite_export.device.bench import WORK, measure
from tflite_export.device.kinds import Kind
from tflite_export.device.layout import PREDICT
from tflite_export.device.runtime import Runtime
from tfpfl.data import Federation
from tfpfl.models import SplitModel
from tfpfl.models.heads import head_kind
from tfpfl.models.weights import Head
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run

KINDS = ["multilabel", "regression", "poisson", "quantile:0.9", "huber:0.5"]
SORTS = {"multilabel": "binary", "poisson": "count"}
INTERPRETER = tf.lite.Interpreter


def drawn(kind, examples, outputs=2, seed=0):
    """Examples [N, 4] and targets that depend on them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, 4)).astype("f")
    z = x @ rng.normal(size=(4, outputs)) + 0.3 * rng.normal(size=(examples, outputs))
    y = {"multilabel": z > 0, "poisson": rng.poisson(np.exp(np.clip(0.3 * z, -3, 2)))}.get(kind.split(":")[0], z)
    return x, y.astype("f")


@pytest.mark.parametrize("kind", ["classification", *KINDS])
def test_scores_and_predictions_are_tensorflows(kind):
    rng, ours, truth = np.random.default_rng(1), Kind(kind), head_kind(kind)
    z = 2 * rng.normal(size=(30, 3))
    y = rng.integers(0, 3, 30) if ours.is_classes else drawn(kind, 30, 3)[1]
    found = ours.score(z, y)
    np.testing.assert_allclose(ours.mean(z), truth.mean(tf.constant(z)), rtol=1e-12)
    assert found.loss == pytest.approx(float(truth.loss(tf.constant(z), y)), rel=1e-9)
    expected = tf.reduce_mean(tf.cast(truth.correct(z, y), "float64")) if truth.counts else truth.score(z, y)
    assert found.value == pytest.approx(float(expected), rel=1e-9)
    assert found.name == truth.label.score.name
    better = found._replace(value=found.value + (0.1 if truth.label.score.larger_is_better else -0.1))
    assert better.better_than(found) and not found.better_than(better) and not found.better_than(found)
    assert found._replace(loss=found.loss - 1).better_than(found)
    assert not better._replace(loss=np.nan).better_than(found)


@pytest.mark.filterwarnings("error")
def test_a_sigmoid_of_large_numbers_says_nothing():
    found = Kind("multilabel").mean(np.array([[-200, 0, 200]], np.float32))
    assert found.tolist() == [[0, 0.5, 1]] and found.dtype == np.float32


def network():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((4,)), layers.Dense(6, activation="relu"), layers.Dense(5, activation="tanh")])


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(KINDS, "regression", ci=KINDS))
def test_every_signature_and_a_clients_life(kind, tmp_path):
    model, (x, y) = SplitModel(network(), kind=kind), drawn(kind, 40)
    rng = np.random.default_rng(4)
    head = Head(0.1 * rng.normal(size=(5, 2)).astype("f"), np.zeros(2, "f"))
    bundle = export((model, model.initial_theta, head), out=tmp_path / "b", train=(x, y), test=(x, y))
    assert bundle.manifest["model"]["kind"] == model.kind.text
    card = (bundle.folder / "MODEL_CARD.md").read_text()
    assert card.startswith("# Model of a client\n") and f"Output: 2 numbers of the kind {model.kind.text}, in" in card
    assert "classes" not in card
    assert verify(bundle, interpreter=INTERPRETER).ok
    whole = Runtime(bundle.path(PREDICT), INTERPRETER)("predict", x=x)["predictions"]
    client = DeviceClient(bundle, tmp_path / "head.bin", interpreter=INTERPRETER)
    assert relative(client.predict(x), whole) < 1e-5
    assert relative(whole, model.kind.mean(model.features(model.theta(), x) @ head.kernel + head.bias)) < 1e-5
    done = client.personalize(x, y, steps=200, beta=0.1)
    assert done.kept and done.after.better_than(done.before) and done.loss < done.loss_before
    for bad, said in (
        (y[:, :1], r"targets must be numbers \[40, 2\]"),
        (np.where(np.arange(40)[:, None] == 7, np.nan, y), "of example 7 must be"),
        (np.where(np.arange(40)[:, None] == 7, -1, y), "of example 7 must be"),
    ):
        if kind in SORTS or not (np.asarray(bad) == -1).any():
            with pytest.raises(BundleError, match=said):
                client.round(client.theta, x, bad)
    with pytest.raises(ValueError, match="has no classes that could be added"):
        client.add_class("new")
    with pytest.raises(BundleError, match="the nearest examples vote for classes: take `DeviceClient.predict`"):
        Neighbours(client, x, y)


@pytest.mark.slow
def test_a_round_is_measured_also_where_examples_are_much_smaller_than_1(tmp_path):
    """With examples in [0, 1) predicted counts were infinite: the round diverged, and bench ended with it."""
    keras.utils.set_random_seed(3)
    stack = [layers.Rescaling(1000.0), layers.Dense(5, activation="relu")]
    model = SplitModel(keras.Sequential([keras.Input((4,)), *stack]), kind="poisson")
    head = Head(np.ones((5, 2), "f"), np.zeros(2, "f"))
    bundle = export((model, model.initial_theta, head), out=tmp_path / "b", inference=False)
    for work in WORK:
        assert measure(bundle, work, 40, 1, 1, 32, INTERPRETER)["milliseconds"] > 0


@pytest.fixture(scope="module")
def make_run(tmp_path_factory):
    def make(kind):
        out = tmp_path_factory.mktemp("kinds")
        people = {f"person {i}": drawn(kind, 12 + i, seed=i) for i in range(5)}
        federation = Federation.from_clients(
            people, out=out / "federation", targets=SORTS.get(kind, "real"), class_names=["left", "right"]
        )
        config = RunConfig(
            hyperparameters={"server_opt": "sgd", "rho": 0.02, "tau": 5, "beta": 0.05},
            network="mlp200",
            kind=kind,
            participation=0.6,
            rounds=2,
            evaluate_every=0,
        )
        return Run.create(config, out / "run", federation)

    return make


@pytest.mark.parametrize("kind", slow_but(KINDS, ci=("poisson", "multilabel", "quantile:0.9")))
def test_rounds_of_devices_are_the_engines_and_a_client_is_exported(kind, make_run, tmp_path):
    with make_run(kind) as run:
        rows = simulate_round(run, 2)
        assert max(max(row.theta, row.heads) for row in rows) < 1e-5
        assert rows[-1].device_score == pytest.approx(rows[-1].engine_score, rel=1e-4)
        run.train()
        bundle = export(run, 2, tmp_path / "b", inference=False)
        x, y = run.federation.arrays(2, "test")
        training = run.training()
        expected = training.evaluate(training.server_state(), splits=("test",))
    assert bundle.manifest["labels"]["names"] == ["left", "right"]
    (row,) = [row for row in expected if row.client_id == 2]
    found = DeviceClient(bundle, interpreter=INTERPRETER).score(x, y)
    assert found.loss == pytest.approx(row.loss, rel=1e-4) and found.value == pytest.approx(row.score, rel=1e-4)


def test_a_page_is_for_classes(tmp_path):
    model = SplitModel(network(), kind="regression")
    head = Head(np.zeros((5, 2), "f"), np.zeros(2, "f"))
    with pytest.raises(ExportError, match="nor for labels that are not classes"):
        export((model, model.initial_theta, head), out=tmp_path / "b", browser=True)
