"""The files that only predict: export and `verify` compare them with TensorFlow, each by its own bound."""

import shutil

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from tflite_export import Bundle, ExportError, Runtime, convert_backbone, export, verify
from tflite_export.convert import bundle as bundles
from tflite_export.device import layout
from tfpfl.checks import TfpflWarning
from tfpfl.models import SplitModel
from tfpfl.models.weights import Head

LITE = tf.lite.Interpreter
FILES = [layout.BACKBONE, layout.PREDICT, layout.BACKBONE_FLOAT16, layout.BACKBONE_DYNAMIC_INT8, layout.BACKBONE_INT8]
TRUNKS = [layout.TRUNK_FLOAT16, layout.TRUNK_INT8]
RNG = np.random.default_rng(0)
X, Y = RNG.random((60, 12), np.float32), RNG.integers(0, 3, 60)


def network(seed=0):
    """Layers of 64 and 32 units; the first is called 'low'."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(64, "relu", name="low"), keras.layers.Dense(32, "relu", name="high")]
    return keras.Sequential([keras.Input((12,)), *layers])


def exported(out, trunk=False):
    model = SplitModel(network(), train_from="high" if trunk else None)
    above = model.above or model
    head = Head(RNG.normal(size=(32, 3)).astype("f"), RNG.normal(size=3).astype("f"))
    return export((model, above.initial_theta, head), out=out, rounds=False, train=(X, Y), test=(X, Y))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("plain") / "b")


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("frozen") / "b", trunk=True)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["plain", "frozen"])
def test_verify_compares_every_file_that_predicts(which, request):
    bundle = request.getfixturevalue(which)
    found, bounds = verify(bundle, interpreter=LITE), bundle.manifest["check"]["files"]
    programs = {name for name in bundle.manifest["files"] if name.endswith(".tflite")}
    assert found.ok and {c.file for c in found.comparisons} == programs
    inexact = set(layout.INEXACT) & programs
    assert set(bounds) == inexact | ({layout.PREDICT} if which == "frozen" else set())
    for c in found.comparisons:
        assert c.l2_relative <= (bounds[c.file] if c.file in inexact else 1e-5)
    assert all(1e-3 <= bounds[name] < 0.3 for name in inexact)
    assert inexact <= set(found.worst()), "by their own names: they are no rounding"


@pytest.mark.parametrize("name", [*FILES, *TRUNKS])
def test_verify_notices_other_weights(plain, frozen, name, tmp_path, request):
    bundle = frozen if name in TRUNKS else plain
    copy = Bundle(shutil.copytree(bundle.folder, tmp_path / "copy"), check=False)
    (copy.folder / name).write_bytes(other_weights(name))
    assert {c.file for c in verify(copy, interpreter=LITE).comparisons if not c.ok} == {name}


def other_weights(name):
    """The file of a network that was initialized with another seed."""
    if name in TRUNKS:
        trunk = SplitModel(network(1), train_from="high").trunk
        batch = None if name == layout.TRUNK else bundles.STATIC_BATCH
        return bundles.convert_trunk(trunk, bundles.TRUNKS[name], X, batch)
    model = SplitModel(network(1))
    if name == layout.PREDICT:
        return bundles.convert_predict(model, (model.initial_theta, Head(np.ones((32, 3), "f"), np.zeros(3, "f"))))
    return bundles.convert_backbone(model, model.initial_theta, bundles.BACKBONES[name], X)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_an_export_with_other_weights_writes_nothing(name, tmp_path, monkeypatch):
    """As if the converter had taken a wrong constant in one of the files."""
    content, save = other_weights(name), bundles._save
    monkeypatch.setattr(
        bundles, "_save", lambda folder, file, given: save(folder, file, content if file == name else given)
    )
    with pytest.raises(ExportError, match=f"the conversion went wrong: .*{name}"):
        exported(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_of_before_stays_right(frozen, tmp_path):
    """It says nothing about files of another precision: these are left out."""
    folder = shutil.copytree(frozen.folder, tmp_path / "old")
    manifest = {k: v for k, v in frozen.manifest.items() if k != "hash"}
    manifest["check"] = {k: v for k, v in manifest["check"].items() if k != "files"}
    bundles.write_manifest(folder, manifest)
    found = verify(folder, interpreter=LITE)
    assert found.ok and not {c.file for c in found.comparisons} & {*layout.INEXACT, layout.PREDICT}


def test_int8_knows_the_ranges_of_all_classes_if_examples_are_sorted_by_class(tmp_path):
    model = SplitModel(network())
    x = RNG.random((360, 12), np.float32) * np.repeat(np.array([0.2, 1, 5], "f"), 120)[:, None]
    (tmp_path / "int8").write_bytes(convert_backbone(model, model.initial_theta, "full int8", x))
    phi = Runtime(tmp_path / "int8", LITE)("features", x=x)["phi"]
    expected = np.asarray(model.features(model.theta(), x))
    assert np.linalg.norm(phi - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.slow
def test_without_training_examples_there_is_no_int8(tmp_path):
    """The converter makes a float file of no examples, and the model card called it full int8."""
    model, head = SplitModel(network()), Head(np.ones((32, 3), "f"), np.zeros(3, "f"))
    given = {"rounds": False, "train": (X[:0], Y[:0]), "test": (X, Y)}
    bundle = export((model, model.initial_theta, head), out=tmp_path / "b", **given)
    assert layout.BACKBONE_INT8 not in {*bundle.manifest["files"], *bundle.manifest["quality"]}
    assert layout.BACKBONE_DYNAMIC_INT8 in bundle.manifest["files"]


@pytest.mark.slow
def test_one_training_example_says_nothing_of_ranges(tmp_path):
    model = SplitModel(network(), train_from="high")
    head = Head(np.ones((32, 3), "f"), np.zeros(3, "f"))
    given = {"rounds": False, "train": (X[:1], Y[:1]), "test": (X[:0], Y[:0])}
    with pytest.warns(TfpflWarning, match="one training example says nothing of the ranges"):
        bundle = export((model, model.above.initial_theta, head), out=tmp_path / "b", **given)
    assert not {layout.BACKBONE_INT8, layout.TRUNK_INT8} & {*bundle.manifest["files"]}
    assert verify(bundle, interpreter=LITE).ok


@pytest.mark.slow
def test_a_network_that_cannot_be_quantized_has_its_other_files(tmp_path):
    masked = [keras.layers.Masking(), keras.layers.SimpleRNN(3, unroll=True)]
    model = SplitModel(keras.Sequential([keras.Input((4, 5)), *masked]))
    x = RNG.normal(size=(20, 4, 5)).astype("f")
    head = Head(np.ones((3, 3), "f"), np.zeros(3, "f"))
    with pytest.warns(TfpflWarning, match="backbone_int8.tflite is left out: the converter .* cannot quantize"):
        bundle = export((model, model.initial_theta, head), out=tmp_path / "b", train=(x, Y[:20]), test=(x, Y[:20]))
    assert layout.BACKBONE_INT8 not in bundle.manifest["files"] and layout.BACKBONE in bundle.manifest["files"]


@pytest.mark.slow
def test_precisions_are_measured_in_parts_of_the_test_examples(tmp_path, monkeypatch):
    """All at once, a network for pictures took gigabytes for a client with many of them."""
    rows = []

    class Recorded(Runtime):
        def __call__(self, signature, **inputs):
            rows.extend(len(inputs[name]) for name in {"x", "raw"} & set(inputs))
            return super().__call__(signature, **inputs)

    monkeypatch.setattr(bundles, "Runtime", Recorded)
    model = SplitModel(network(), train_from="high")
    head = Head(RNG.normal(size=(32, 3)).astype("f"), np.zeros(3, "f"))
    source = model, model.above.initial_theta, head
    personal = bundles.personal_model(source, None, train=(X, Y), test=(X, Y))
    measured = bundles._write_inference(tmp_path, personal)
    assert max(rows) == 32 and {quality["examples"] for quality in measured.values()} == {60}
    truth = Runtime(tmp_path / layout.PREDICT, LITE)("predict", x=X)["probabilities"].argmax(1) == Y
    assert measured[layout.BACKBONE]["accuracy"] == measured[layout.TRUNK]["accuracy"] == truth.mean()
