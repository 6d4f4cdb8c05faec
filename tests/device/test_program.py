"""The device program in tf.lite's interpreter against GradientTape and Keras, with weights that are inputs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from helpers.marks import slow_but
from helpers.networks import OWN, PAPERS
from helpers.truth import examples, random_head, relative, relative_l2, runner, true_gradient, true_steps, varied
from tflite_export.convert.backbone import convert_backbone, convert_predict
from tflite_export.convert.gradients import UnsupportedLayerError
from tflite_export.convert.program import convert_program, flatten, unflatten
from tflite_export.device.ops import check_builtin, operations
from tfpfl.models import SplitModel, build_network
from tfpfl.models.weights import Weights

L2 = {"cifar_2conv": 1e-3}  # near-ties of overlapping windows: a pixel's gradient may go to the neighbour


@pytest.fixture(scope="module", params=slow_but(PAPERS, "mlp200", ci=("omniglot_4conv",)))
def paper(request):
    model = SplitModel(build_network(request.param, PAPERS[request.param]))
    return request.param, model, convert_program(model)


@pytest.mark.slow
def test_every_signature_of_the_papers_networks(paper):
    name, model, content = paper
    theta, head = varied(model), random_head(model, 5)
    x, y = examples(model, 13, 5)
    w = np.full(13, 1 / 13, np.float32)
    flat = flatten(theta)
    phi = runner(content, "features")(theta=flat, x=x)["phi"]
    expected_phi = model.features(theta, x).numpy()
    assert relative(phi, expected_phi) < 1e-5

    out = runner(content, "predict")(theta=flat, x=x, kernel=head.kernel, bias=head.bias)
    expected = tf.nn.softmax(expected_phi @ head.kernel + head.bias).numpy()
    assert np.abs(out["probabilities"] - expected).max() < 1e-5

    beta = np.float32(0.05)
    example = {"labels": y, "weights": w}
    fitted = runner(content, "personalize")(
        phi=phi, **example, kernel=head.kernel, bias=head.bias, steps=np.int32(50), beta=beta
    )
    expected = true_steps(expected_phi, y, head, 50, beta)
    assert fitted["loss"] < fitted["loss_before"]
    assert relative(fitted["kernel"], expected.kernel) < 1e-5
    assert relative(fitted["bias"], expected.bias) < 1e-5

    loss, dtheta, dkernel, dbias = true_gradient(model, theta, head, x, y)
    found = runner(content, "joint_gradient")(theta=flat, x=x, **example, kernel=head.kernel, bias=head.bias)
    bound = (relative_l2, L2[name]) if name in L2 else (relative, 1e-5)
    assert bound[0](found["dtheta"], dtheta) < bound[1]
    assert relative(found["dkernel"], dkernel) < 1e-5
    assert relative(found["dbias"], dbias) < 1e-5
    assert float(found["loss"]) == pytest.approx(loss, rel=1e-5)

    after = true_steps(expected_phi, y, head, 7, beta)
    _, dtheta, dkernel, dbias = true_gradient(model, theta, after, x, y)
    rate = np.float32(0.3)
    arguments = {"kernel": head.kernel, "bias": head.bias, "steps": np.int32(7), "beta": beta, "rate": rate}
    out = runner(content, "round")(theta=flat, x=x, **example, **arguments)
    assert bound[0](out["dtheta"], dtheta) < bound[1]
    assert relative(out["kernel"], after.kernel - rate * dkernel) < 1e-5
    assert relative(out["bias"], after.bias - rate * dbias) < 1e-5


def test_no_operation_is_flex_or_custom(paper):
    _, model, content = paper
    static = convert_program(model, batch=8, num_classes=3, signatures=("round", "joint_gradient"))
    for file in (content, static):
        found = operations(file)
        assert "WHILE" in found and "FULLY_CONNECTED" in found
        assert not [name for name in found if "custom" in name.lower()]


def test_a_file_with_a_flex_operation_is_refused():
    module = tf.Module()
    module.f = tf.function(lambda x: tf.linalg.det(x), input_signature=[tf.TensorSpec([2, 2])])
    converter = tf.lite.TFLiteConverter.from_concrete_functions([module.f.get_concrete_function()], module)
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS, tf.lite.OpsSet.SELECT_TF_OPS]
    with pytest.raises(ValueError, match="FlexMatrixDeterminant"):
        check_builtin(converter.convert())


def test_head_step_has_no_loop_and_repeated_is_personalize(paper):
    _, model, content = paper
    only = convert_program(model, signatures=("head_step",))
    assert "WHILE" not in operations(only)
    rng = np.random.default_rng(3)
    phi = rng.random((9, model.num_features), np.float32)
    example = {"labels": rng.integers(0, 4, 9).astype(np.int32), "weights": np.full(9, 1 / 9, np.float32)}
    head = random_head(model, 4)
    step, kernel, bias = runner(content, "head_step"), *head
    for _ in range(20):
        out = step(phi=phi, **example, kernel=kernel, bias=bias, beta=np.float32(0.03))
        kernel, bias = out["kernel"], out["bias"]
    whole = runner(content, "personalize")(
        phi=phi, **example, kernel=head.kernel, bias=head.bias, steps=np.int32(20), beta=np.float32(0.03)
    )
    assert relative(kernel, whole["kernel"]) < 1e-6


def test_padding_of_the_static_variant_changes_nothing(paper):
    _, model, content = paper
    static = convert_program(model, batch=16, num_classes=4, signatures=("round",))
    theta, head = varied(model), random_head(model, 4)
    x, y = examples(model, 11, 4)
    w = np.full(11, 1 / 11, np.float32)
    arguments = {"theta": flatten(theta), "kernel": head.kernel, "bias": head.bias}
    arguments |= {"steps": np.int32(5), "beta": np.float32(0.05), "rate": np.float32(0.1)}
    expected = runner(content, "round")(x=x, labels=y, weights=w, **arguments)
    padded = [np.concatenate([a, np.ones((5, *a.shape[1:]), a.dtype)]) for a in (x, y)]
    weights = np.concatenate([w, np.zeros(5, np.float32)])
    found = runner(static, "round")(x=padded[0], labels=padded[1], weights=weights, **arguments)
    for name in ("dtheta", "kernel", "bias", "loss"):
        assert relative_l2(found[name], expected[name]) < 1e-5


@pytest.mark.slow
def test_the_safeguard_takes_back_steps_that_raise_the_loss():
    model = SplitModel(build_network("mlp200", (4, 4)))
    rng = np.random.default_rng(0)
    phi = np.repeat(rng.random((3, 200), np.float32), 2, 0)  # the same features twice, with both labels
    y = np.array([0, 1, 0, 1, 1, 0], np.int32)
    head = random_head(model, 2)
    arguments = {"phi": phi, "labels": y, "weights": np.full(6, 1 / 6, np.float32), "steps": np.int32(5)}
    arguments |= {"kernel": head.kernel, "bias": head.bias}
    guarded = convert_program(model, signatures=("personalize",))
    for beta in (1e4, np.nan):
        out = runner(guarded, "personalize")(**arguments, beta=np.float32(beta))
        assert np.array_equal(out["kernel"], head.kernel) and out["loss"] == out["loss_before"]
    free = convert_program(model, safeguard=False, signatures=("personalize",))
    out = runner(free, "personalize")(**arguments, beta=np.float32(1e4))
    assert out["loss"] > out["loss_before"]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(OWN, "strided convolutions", "separable", "attention"))
def test_gradient_of_a_users_own_backbone(name):
    keras.utils.set_random_seed(0)  # of the layers' weights: a drawing whose units are all dead has no gradient
    model = SplitModel(OWN[name]())
    theta, head = varied(model), random_head(model, 3)
    x, y = examples(model, 6, 3)
    content = convert_program(model, signatures=("joint_gradient",))
    found = runner(content, "joint_gradient")(
        theta=flatten(theta), x=x, labels=y, weights=np.full(6, 1 / 6, np.float32), kernel=head.kernel, bias=head.bias
    )
    expected = true_gradient(model, theta, head, x, y)[1]
    assert np.abs(expected).max() > 1e-3
    assert relative(found["dtheta"], expected) < 1e-5


def test_a_gradient_of_its_own_above_what_is_put_in_other_words():
    """Swish keeps tensors for its gradient: those of Keras have an Erf, and a CONV_2D that is computed once more."""
    keras.utils.set_random_seed(0)
    stack = [layers.Conv2D(3, 2, activation="gelu"), layers.Conv2D(2, 2, activation="swish"), layers.Flatten()]
    model = SplitModel(keras.Sequential([keras.Input((4, 5, 2)), *stack]))
    theta, head = varied(model), random_head(model, 3)
    x, y = examples(model, 6, 3)
    content = convert_program(model, signatures=("joint_gradient",))
    found = runner(content, "joint_gradient")(
        theta=flatten(theta), x=x, labels=y, weights=np.full(6, 1 / 6, np.float32), kernel=head.kernel, bias=head.bias
    )
    assert relative(found["dtheta"], true_gradient(model, theta, head, x, y)[1]) < 1e-5
    assert "CONV_2D" not in operations(content)


def gradient_and_features(backbone, x):
    """((dtheta, features) of the device program, those of GradientTape and Keras)."""
    model = SplitModel(backbone)
    theta, head = varied(model), random_head(model, 3)
    y, w = np.arange(len(x), dtype=np.int32) % 3, np.full(len(x), 1 / len(x), np.float32)
    content = convert_program(model, signatures=("features", "joint_gradient"))
    flat = flatten(theta)
    found = runner(content, "joint_gradient")(theta=flat, x=x, labels=y, weights=w, kernel=head.kernel, bias=head.bias)[
        "dtheta"
    ]
    phi = runner(content, "features")(theta=flat, x=x)["phi"]
    return (found, phi), (true_gradient(model, theta, head, x, y)[1], model.features(theta, x).numpy())


@pytest.mark.parametrize("scale", [0.0, 1.0, 200.0])
def test_softplus_of_any_number(scale):
    """The converter's words for it, log(1 + exp(x)), end at 88.7, and at exactly 0 its gradient is a half."""
    keras.utils.set_random_seed(0)
    x = scale * np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    stack = [layers.Dense(6, activation="softplus"), layers.Dense(3)]
    found, expected = gradient_and_features(keras.Sequential([keras.Input((4,)), *stack]), x)
    assert scale < 100 or expected[1].max() > 100
    assert relative(found[0], expected[0]) < 1e-5 and relative(found[1], expected[1]) < 1e-5


@pytest.mark.parametrize("name", slow_but(["elu", "relu", "selu"], "selu"))
def test_an_activation_at_exactly_0(name):
    """The paper of a drawing is 0, and so is what a first layer makes of it as long as its bias is 0."""
    keras.utils.set_random_seed(0)
    model = SplitModel(keras.Sequential([keras.Input((4,)), layers.Dense(6, activation=name)]))
    theta, head = model.initial_theta, random_head(model, 3)
    x, y = np.zeros((6, 4), np.float32), np.array([0, 1, 2, 0, 1, 1], np.int32)
    x[0] = 1
    content = convert_program(model, signatures=("joint_gradient",))
    found = runner(content, "joint_gradient")(
        theta=flatten(theta), x=x, labels=y, weights=np.full(6, 1 / 6, np.float32), kernel=head.kernel, bias=head.bias
    )
    assert relative(found["dtheta"], true_gradient(model, theta, head, x, y)[1]) < 1e-5


@pytest.mark.parametrize("select", ["Select", "SelectV2"])
def test_a_softmax_over_several_axes_in_int8(select):
    """The interpreter ended the process at the converter's words for IsFinite, which logsumexp asks for."""
    keras.utils.set_random_seed(0)
    picked = getattr(tf.raw_ops, select)
    of = {"Select": ("condition", "x", "y"), "SelectV2": ("condition", "t", "e")}[select]

    def finite(x):
        return picked(**dict(zip(of, (tf.math.is_finite(x), x, tf.zeros_like(x)), strict=True)))

    stack = [layers.Dense(5), layers.Lambda(finite), layers.Softmax(axis=(1, 2)), layers.Flatten()]
    backbone = keras.Sequential([keras.Input((4, 5)), *stack])
    x = np.random.default_rng(0).normal(size=(9, 4, 5)).astype(np.float32)
    found, expected = gradient_and_features(backbone, x)
    assert relative(found[0], expected[0]) < 1e-5 and relative(found[1], expected[1]) < 1e-5
    model = SplitModel(backbone)
    phi = runner(convert_backbone(model, model.initial_theta, "full int8", x), "features")(x=x)["phi"]
    assert np.isfinite(phi).all() and phi.shape == (9, 20)  # how good they are is measured by the export


@pytest.mark.parametrize("equation", ["abc,cd->abd", "abc,cd->adb", "abc,bcd->abd"])
def test_no_activation_is_lost_behind_a_product_of_einsum(equation):
    keras.utils.set_random_seed(0)
    shape = (6, 5) if equation.endswith("adb") else (5, 6)
    dense = layers.EinsumDense(equation, output_shape=shape, activation="relu")
    x = np.random.default_rng(0).normal(size=(7, 5, 3)).astype(np.float32)
    backbone = keras.Sequential([keras.Input((5, 3)), dense, layers.Flatten()])
    found, expected = gradient_and_features(backbone, x)
    assert (expected[1] == 0).any()  # the ReLU has something to do
    assert relative(found[0], expected[0]) < 1e-5 and relative(found[1], expected[1]) < 1e-5


def test_a_slice_that_is_longer_than_its_axis():
    x = inputs = keras.Input((5, 3))
    backbone = keras.Model(inputs, layers.Flatten()(layers.Dense(4)(x)[:, -10:, :9]))
    found, expected = gradient_and_features(backbone, np.random.default_rng(0).random((4, 5, 3), np.float32))
    assert relative(found[0], expected[0]) < 1e-5 and relative(found[1], expected[1]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own statistics", "activations", "attention"])
def test_files_for_prediction_of_layers_that_are_put_in_other_words(name):
    model = SplitModel(OWN[name]())
    theta, head = varied(model), random_head(model, 3)
    x, _ = examples(model, 6, 3)
    expected = model.features(theta, x)
    assert relative(runner(convert_backbone(model, theta), "features")(x=x)["phi"], expected) < 1e-5
    found = runner(convert_predict(model, Weights(theta, head)), "predict")(x=x)["probabilities"]
    assert np.abs(found - tf.nn.softmax(expected @ head.kernel + head.bias)).max() < 1e-5


@pytest.mark.parametrize(
    "layer, reason",
    [
        (lambda: layers.Conv2DTranspose(4, 3, name="bad"), "'bad'.*Conv2DTranspose.*take UpSampling2D and Conv2D"),
        (lambda: layers.Conv2D(4, 3, groups=2, name="bad"), "'bad'.*Conv2D"),
        (lambda: layers.UpSampling2D(2, interpolation="bilinear", name="bad"), "'bad'.*UpSampling2D"),
        (lambda: layers.Lambda(tf.sin, name="bad"), "'bad'.*Sin has no gradient"),
    ],
)
def test_a_layer_without_builtin_gradient_is_refused_by_name(layer, reason):
    stack = [keras.Input((8, 8, 2)), layers.Conv2D(4, 3), layer(), layers.Flatten()]
    model = SplitModel(keras.Sequential(stack))
    with pytest.raises(UnsupportedLayerError, match=reason):
        convert_program(model)


def test_a_model_in_double_precision_is_refused():
    with pytest.raises(ValueError, match="float64"):
        convert_program(SplitModel(build_network("mlp200", (4, 4), dtype="float64")))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_layers_of_mixed_precision_are_refused(policy):
    stack = [layers.Dense(5, dtype=policy, name="half"), layers.Dense(3, dtype="float32")]
    model = SplitModel(keras.Sequential([keras.Input((4,)), *stack]))
    for convert in (convert_program, lambda m: convert_backbone(m, m.initial_theta)):
        with pytest.raises(ValueError, match=f"'half'.*computes in {policy[6:]} .*build the same network in float32"):
            convert(model)


def test_flatten_and_unflatten_are_inverse():
    model = SplitModel(build_network("omniglot_4conv", (28, 28, 1)))
    theta = varied(model)
    assert all(np.array_equal(a, b) for a, b in zip(unflatten(flatten(theta), model), theta, strict=True))
    assert flatten(theta).shape == (model.num_backbone_weights,)
