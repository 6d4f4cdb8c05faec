"""check.npz: what `verify` compares says something, and is not more exact than numbers can be."""

import json
import shutil
import warnings

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from tflite_export import Bundle, BundleError, ExportError, export, verify
from tflite_export.convert.check import write_check
from tflite_export.convert.personal import personal_model
from tflite_export.device.runtime import write_manifest
from tfpfl.checks import TfpflWarning
from tfpfl.models import SplitModel
from tfpfl.models.weights import Head

LITE = tf.lite.Interpreter
RNG = np.random.default_rng(0)


def network(*below, kind="classification"):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), *below, keras.layers.Dense(16, "relu")]
    return SplitModel(keras.Sequential(layers), kind=kind)


def head(k):
    return Head(RNG.normal(0, 0.3, (16, k)).astype("f"), np.zeros(k, "f"))


@pytest.mark.parametrize("safeguard", [True, False])
def test_the_steps_on_the_head_lower_its_loss_also_where_features_are_large(safeguard, tmp_path):
    """With `safeguard` the head would be the old one, as if a program did nothing; without, numbers overflow."""
    normalization = keras.layers.Normalization(mean=[50.0, 60.0, 70.0, 80.0], variance=[25.0] * 4)
    model = network(normalization, kind="regression")
    personal = personal_model(
        (model, model.initial_theta, head(1)), None, training={"safeguard": safeguard, "beta": 1e-5}
    )
    bounds = write_check(tmp_path, *personal.weights, personal)
    values = dict(np.load(tmp_path / "check.npz"))
    assert all(np.isfinite(value).all() for value in values.values()) and bounds["l2_relative"] < 0.01
    assert values["personalize.loss"] < values["personalize.loss_before"]
    assert np.abs(values["personalize.kernel"] - values["kernel"]).max() > 100 * 1e-5 * np.abs(values["kernel"]).max()


@pytest.mark.parametrize("several", [False, True])
def test_predicted_counts_are_finite_also_where_examples_are_much_smaller_than_the_drawn_ones(several, tmp_path):
    """A predicted count is exp(z). It was infinite, and the export said that its own manifest was changed."""
    model = network(keras.layers.Rescaling(1000.0), kind="poisson")
    if several:
        words, sound = keras.Input((2,), name="words"), keras.Input((4,), name="sound")
        known = keras.layers.Flatten()(keras.layers.Embedding(9, 3)(words))
        both = keras.layers.Concatenate()([known, keras.layers.Rescaling(1000.0)(sound)])
        model = SplitModel(
            keras.Model({"words": words, "sound": sound}, keras.layers.Dense(16, "relu")(both)), kind="poisson"
        )
    personal = personal_model((model, model.initial_theta, Head(np.ones((16, 2), "f"), np.zeros(2, "f"))), None)
    bounds = write_check(tmp_path, *personal.weights, personal)
    values = dict(np.load(tmp_path / "check.npz"))
    assert all(np.isfinite(value).all() for value in values.values()) and bounds["l2_relative"] < 0.01
    assert 1 < values["predict.predictions"].max() <= 1e4 and np.abs(values["joint_gradient.dtheta"]).max() > 0
    assert not several or values["x"][:, 4:].max() > 1  # tokens stay as they were drawn


@pytest.mark.parametrize("unit", [0, 3])
def test_a_unit_that_rounding_may_put_on_the_other_side_of_its_kink_is_in_the_bound(unit, tmp_path):
    """No draw that moves weights in their last digit crosses the kink; a runtime may, which rounds in another order."""
    model = network()
    personal = personal_model((model, model.initial_theta, head(3)), None)
    assert write_check(tmp_path, *personal.weights, personal)["l2_relative"] == 1e-5
    x = np.load(tmp_path / "check.npz")["x"]
    kernel, bias = (np.array(w, np.float64) for w in model.initial_theta)
    z = x[8].astype(np.float64) @ kernel[:, unit]

    def away(digits):
        moved = bias.copy()
        moved[unit] = -z + digits * 1.2e-7 * abs(z)
        return kernel.astype("f"), moved.astype("f")

    def found(theta):
        bounds = write_check(tmp_path, theta, personal.weights[1], personal)
        return bounds, np.load(tmp_path / "check.npz")["joint_gradient.dtheta"]

    bounds, on = found(away(2))
    _, off = found(away(-2))
    jump = np.linalg.norm(on - off) / np.linalg.norm(on)
    assert bounds["max_relative"] is None and 1e-4 < jump < bounds["l2_relative"] < 3 * jump + 1e-3
    assert found(away(300))[0] == {"max_relative": 1e-5, "l2_relative": 1e-5}


def test_numbers_that_overflow_in_tensorflow_are_told_as_such(tmp_path):
    model = network(keras.layers.Rescaling(1e30))
    personal = personal_model((model, model.initial_theta, Head(np.full((16, 2), 1e30, "f"), np.zeros(2, "f"))), None)
    with pytest.raises(ExportError, match=r"TensorFlow itself computes NaN or infinity \(.*predict.probabilities"):
        write_check(tmp_path, *personal.weights, personal)


def test_no_step_on_the_head_raises_its_loss_also_where_it_ends_lower(tmp_path):
    """Steps that swing to and fro make large numbers of rounding, which no runtime repeats."""
    model = network(keras.layers.Rescaling(25.0))
    nothing = Head(np.zeros((16, 3), "f"), np.zeros(3, "f"))
    personal = personal_model((model, model.initial_theta, nothing), None, training={})
    write_check(tmp_path, *personal.weights, personal)
    values = dict(np.load(tmp_path / "check.npz"))
    fitted, losses = Head(values["kernel"], values["bias"]), []
    onehot = np.eye(3)[values["labels"]]
    for _ in range(int(values["steps"])):
        z = values["features.phi"] @ fitted.kernel + fitted.bias
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        losses.append(-np.log(p[onehot == 1]).mean())
        error = float(values["beta"]) * (p - onehot) / len(z)
        fitted = Head(fitted.kernel - values["features.phi"].T @ error, fitted.bias - error.sum(0))
    assert float(values["beta"]) < 0.01 and np.all(np.diff(losses) < 1e-5)
    assert np.abs(fitted.kernel - values["personalize.kernel"]).max() < 1e-5 * np.abs(fitted.kernel).max()


@pytest.mark.slow
def test_a_backbone_that_is_dead_is_said(tmp_path):
    """All its units are below 0 for every example, as after a run that diverged: files agree, whatever they compute."""
    model = network()
    kernel, bias = model.initial_theta
    for theta, said in (((kernel, bias - 1e3), "features, all 0, for 12"), ((0 * kernel, bias + 1), "features for 12")):
        personal = personal_model((model, theta, head(2)), None, training={})
        with pytest.warns(TfpflWarning, match=f"the backbone gives the same {said} different drawn examples"):
            write_check(tmp_path, *personal.weights, personal)
    personal = personal_model((model, model.initial_theta, head(2)), None, training={})
    with warnings.catch_warnings():
        warnings.simplefilter("error", TfpflWarning)
        write_check(tmp_path, *personal.weights, personal)


@pytest.fixture(scope="module")
def of_one_class(tmp_path_factory):
    model = network()
    source = model, model.initial_theta, head(1)
    return export(source, out=tmp_path_factory.mktemp("one") / "b", inference=False, browser=True)


@pytest.mark.slow
def test_a_client_of_one_class_can_be_exported_for_rounds(of_one_class, tmp_path):
    """All its gradients are 0 but for rounding, which was compared with itself."""
    assert verify(of_one_class, interpreter=LITE).ok
    folder = shutil.copytree(of_one_class.folder, tmp_path / "copy")
    (of_one_class.theta() * np.float32(1.001)).tofile(folder / "theta.bin")
    wrong = {
        f"{c.signature}.{c.output}"
        for c in verify(Bundle(folder, check=False), interpreter=LITE).comparisons
        if not c.ok
    }
    assert wrong == {"features.phi", "features_one.phi"}


class OneIsOff(LITE):
    """TensorFlow Lite, where `features_one` is off by 1 %."""

    def get_signature_runner(self, signature_key=None):
        runner = super().get_signature_runner(signature_key)
        if signature_key != "features_one":
            return runner

        class Off:
            get_input_details = runner.get_input_details

            def __call__(self, **inputs):
                return {name: 1.01 * value for name, value in runner(**inputs).items()}

        return Off()


@pytest.mark.slow
def test_verify_needs_a_program(of_one_class, tmp_path):
    folder = shutil.copytree(of_one_class.folder, tmp_path / "copy")
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in [name for name in manifest["files"] if name.endswith(".tflite")]:
        del manifest["files"][name]
    del manifest["hash"]
    write_manifest(folder, manifest)
    with pytest.raises(BundleError, match="has no program whose numbers could be checked"):
        verify(folder, interpreter=LITE)


@pytest.mark.slow
def test_verify_runs_the_signature_for_one_example_too(of_one_class):
    found = verify(of_one_class, interpreter=OneIsOff)
    assert {c.signature for c in found.comparisons if not c.ok} == {"features_one"}
