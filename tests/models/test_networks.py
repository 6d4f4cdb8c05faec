"""The papers' networks: their parameter counts, and weights that a seed fixes on every Keras."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tfpfl.checks import InvalidArgument
from tfpfl.data.population import Population
from tfpfl.models import NETWORKS, SplitModel, build_network
from tfpfl.models.networks import default_network

COUNTS = [  # PFLEGO's and PGFed's tables: name, image, body b, M, classes, head h
    ("mlp200", (28, 28, 1), 157_000, 200, 10, 2_010),
    ("mlp200", (28, 28, 1), 157_000, 200, 62, 12_462),
    ("cifar_2conv", (32, 32, 3), 1_754_496, 192, 10, 1_930),
    ("omniglot_4conv", (28, 28, 1), 111_424, 64, 55, 3_575),
    ("fedavg_cnn", (32, 32, 3), 873_408, 512, 10, 5_130),
    ("fedavg_cnn", (32, 32, 3), 873_408, 512, 100, 51_300),
    ("fedavg_cnn", (28, 28, 1), 576_896, 512, 10, 5_130),
    ("conv_bn", (8, 8, 1), 16 * 9 + 2 * 16 + 16 * 32 * 9 + 2 * 32 + (128 + 1) * 64, 64, 10, 650),  # no paper's
]


@pytest.mark.parametrize(("name", "image", "body", "features", "classes", "head"), COUNTS)
def test_parameter_counts_are_those_of_the_papers(name, image, body, features, classes, head):
    model = SplitModel(build_network(name, image))
    info = Population([5], [classes]).info(0)
    assert model.num_backbone_weights == body and model.num_features == features
    assert sum(int(tf.size(w)) for w in model.head(info)) == head
    assert model.features(model.theta(), np.zeros((2, *image), "float32")).shape == (2, features)


def test_every_network_is_counted():
    assert {row[0] for row in COUNTS} == set(NETWORKS)


def test_the_names_of_layers_are_the_same_in_every_call():
    """`train_from` means a layer by its name, and a run builds its network again, also in another process."""
    names = [[layer.name for layer in build_network("fedavg_cnn", (16, 16, 1)).layers] for _ in range(2)]
    assert names[0] == names[1] == ["conv2d", "max_pooling2d", "conv2d_1", "max_pooling2d_1", "flatten", "dense"]
    build_network("mlp200", (4, 4))
    assert SplitModel(build_network("conv_bn", (8, 8, 1)), train_from="conv2d_1").above.input_shape == (4, 4, 16)


def test_weights_are_a_function_of_the_seed_and_layers_differ():
    first, again, other = (build_network("fedavg_cnn", (28, 28, 1), seed=s).get_weights() for s in (3, 3, 4))
    for a, b, c in zip(first, again, other, strict=True):
        assert a.tobytes() == b.tobytes()
        if a.ndim == 1:
            assert not a.any() and not np.signbit(a).any()  # biases are zero, and none is -0
        else:
            assert np.abs(a - c).max() > 0
    dense = build_network("mlp200", (28, 28, 1), seed=3).get_weights()[0]
    assert dense.shape == (784, 200)


@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_are_glorot_uniform(name):
    """Uniform in +- sqrt(6 / (fan in + fan out)): the bound, and the variance within five standard errors."""
    weights = build_network(name, (32, 32, 3) if name != "omniglot_4conv" else (28, 28, 1)).get_weights()
    for kernel in (w for w in weights if w.ndim > 1):
        field = int(np.prod(kernel.shape[:-2]))
        limit = np.sqrt(6 / (field * kernel.shape[-2] + field * kernel.shape[-1]))
        assert np.abs(kernel).max() <= limit and np.abs(kernel).max() > 0.98 * limit
        standard_error = limit**2 * np.sqrt(4 / 45 / kernel.size)
        assert abs(np.mean(kernel.astype(float) ** 2) - limit**2 / 3) < 5 * standard_error


@pytest.mark.parametrize("name", ["mlp200", "omniglot_4conv"])
def test_stax_draws_normal_kernels_and_small_biases(name):
    """Glorot normal without what lies beyond two standard deviations; moments within five standard errors."""
    weights = build_network(name, (28, 28, 1), init="stax").get_weights()
    deviations = [1e-2] if name == "mlp200" else [1e-6] * 4
    cut = 2 / 0.879626  # a normal number within +-2 has the standard deviation 0.879626
    for kernel, bias, deviation in zip(weights[::2], weights[1::2], deviations, strict=True):
        fans = int(np.prod(kernel.shape[:-2])) * (kernel.shape[-2] + kernel.shape[-1])
        drawn = kernel.astype(float) / np.sqrt(2 / fans)
        assert np.abs(drawn).max() <= cut * (1 + 1e-5)
        assert abs(drawn.mean()) < 5 / np.sqrt(drawn.size)
        assert abs(np.mean(drawn**2) - 1) < 5 / np.sqrt(drawn.size)
        within = np.mean(np.abs(drawn) < cut / 2)  # of a uniform distribution it would be 0.5
        assert within == pytest.approx(0.715232, abs=5 * np.sqrt(0.21 / drawn.size))
        assert 0.5 < np.std(bias) / deviation < 1.5 and len(set(bias)) == len(bias)


def test_an_unknown_init():
    with pytest.raises(InvalidArgument, match="init"):
        build_network("mlp200", (28, 28, 1), init="he")


def test_double_precision_networks():
    model = SplitModel(build_network("mlp200", (8, 8, 1), dtype="float64"))
    assert model.dtype == np.float64 and all(w.dtype == tf.float64 for w in model.theta())


def test_default_networks_and_bad_requests():
    assert default_network((32, 32, 3)) == "cifar_2conv" and default_network((28, 28, 1)) == "mlp200"
    with pytest.raises(ValueError, match="unknown network 'lenet'.*mlp200, cifar_2conv"):
        build_network("lenet", (28, 28, 1))
    with pytest.raises(ValueError, match=r"fedavg_cnn needs larger images than \(8, 8, 1\)"):
        build_network("fedavg_cnn", (8, 8, 1))
    with pytest.raises(ValueError, match=r"cifar_2conv is for images .*an example has the shape \(5,\)"):
        build_network("cifar_2conv", (5,))


def test_no_network_is_the_default_of_three_arrays():
    shape = {"age": (1,), "image": (8, 8, 3), "words": (4,)}
    with pytest.raises(InvalidArgument, match="mlp200 takes one array, and examples are several: .'age': .* your own"):
        build_network(default_network(shape), shape)


GRADIENTS = """
import sys
import tfpfl
import numpy as np
import tensorflow as tf
from tfpfl.models import NETWORKS, build_network
found = {}
for name in ("cifar_2conv", "omniglot_4conv", "fedavg_cnn"):
    shape = (28, 28, 1) if name == "omniglot_4conv" else (32, 32, 3)
    model = tfpfl.SplitModel(build_network(name, shape))
    x = np.random.default_rng(0).normal(size=(20, *shape)).astype(np.float32)
    with tf.GradientTape() as tape:
        theta = model.theta()
        tape.watch(theta)
        loss = tf.reduce_sum(model.features(theta, x) ** 2)
    for i, gradient in enumerate(tape.gradient(loss, theta)):
        found[f"{name} {i}"] = gradient.numpy()
np.savez(sys.argv[1], **found)
"""


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_kernels(tmp_path):
    """oneDNN's kernels and TensorFlow's own, in two processes: equal up to the rounding of float32 sums."""
    for given in ("0", "1"):
        command = [sys.executable, "-c", GRADIENTS, str(tmp_path / f"{given}.npz")]
        subprocess.run(command, check=True, env=os.environ | {"TF_ENABLE_ONEDNN_OPTS": given}, capture_output=True)
    own, onednn = (np.load(tmp_path / f"{given}.npz") for given in ("0", "1"))
    assert own.files == onednn.files and len(own.files) > 12
    for name in own.files:
        assert np.abs(own[name] - onednn[name]).max() <= 2e-5 * np.abs(own[name]).max(), name
