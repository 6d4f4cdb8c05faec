"""The backbones of the papers, without their heads.

Initial weights depend on a seed only and are the same with Keras 2 and Keras 3. The numbers of weights are those of
PFLEGO-v2 (table of architectures, as in its authors' code) and of PGFed, section 5.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfpfl.checks import InvalidArgument, check_choice, check_listed, check_type, check_whole_number, unknown
from tfpfl.data.layout import is_several, shape_text
from tfpfl.data.randomness import ModelKey, check_model_seed


def mlp200() -> list[layers.Layer]:
    """PFLEGO's network for MNIST, Fashion-MNIST and EMNIST: 200 hidden units; 157,000 weights for 28x28 images."""
    return [layers.Flatten(), layers.Dense(200, activation="relu")]


def cifar_2conv() -> list[layers.Layer]:
    """PFLEGO's network for CIFAR-10: two 5x5 convolutions and two dense layers; 1,754,496 weights for 32x32x3."""
    convolutions = [
        layer
        for _ in range(2)
        for layer in (
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(3, 2, padding="same"),
        )
    ]
    dense = [layers.Dense(384, activation="relu"), layers.Dense(192, activation="relu")]
    return [*convolutions, layers.Flatten(), *dense]


def omniglot_4conv() -> list[layers.Layer]:
    """PFLEGO's network for Omniglot: four 3x3 convolutions, each followed by 2x2 pooling; 111,424 weights."""
    blocks = [
        layer
        for _ in range(4)
        for layer in (layers.Conv2D(64, 3, padding="same", activation="relu"), layers.MaxPooling2D(2))
    ]
    return [*blocks, layers.Flatten()]


def fedavg_cnn() -> list[layers.Layer]:
    """PGFed's network, from McMahan et al.: two 5x5 convolutions and a dense layer; 873,408 weights for 32x32x3."""
    blocks = [
        layer
        for filters in (32, 64)
        for layer in (layers.Conv2D(filters, 5, activation="relu"), layers.MaxPooling2D(2))
    ]
    return [*blocks, layers.Flatten(), layers.Dense(512, activation="relu")]


def conv_bn() -> list[layers.Layer]:
    """A small network with BatchNormalization, for FedBN: two 3x3 convolutions and a dense layer of 64 units."""
    blocks = [
        layer
        for filters in (16, 32)
        for layer in (
            layers.Conv2D(filters, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(2, padding="same"),
        )
    ]
    return [*blocks, layers.Flatten(), layers.Dense(64, activation="relu")]


NETWORKS = {network.__name__: network for network in (mlp200, cifar_2conv, omniglot_4conv, fedavg_cnn, conv_bn)}


def default_network(example_shape: Any) -> str:
    """The name of the network that PFLEGO uses for such examples: 'cifar_2conv' for colour images, else 'mlp200'."""
    is_colour = not is_several(example_shape) and len(example_shape) == 3 and example_shape[-1] == 3
    return "cifar_2conv" if is_colour else "mlp200"


INITS = ("keras", "stax")
_BIASES = {True: 1e-6, False: 1e-2}  # stax: standard deviation, of convolutions or of dense layers
_CUT = 0.87962566103423978  # the standard deviation of a normal number that is drawn again beyond 2


def build_network(
    name: str, input_shape: tuple, *, seed: int = 0, dtype: str = "float32", init: str = "keras"
) -> keras.Model:
    """A backbone by its name in `NETWORKS`: a built `keras.Sequential` from examples to features [N, M].

    Initial weights are a function of (seed, position of the weight). Scales of BatchNormalization and its moving
    variances are 1. Layers have the same names in every call.

    Args:
        name: mlp200, cifar_2conv, omniglot_4conv, fedavg_cnn or conv_bn.
        input_shape: the shape of one example, such as (28, 28, 1).
        seed: the seed of the initial weights, from 0 to 2^31 - 1.
        dtype: 'float32' or 'float64'.
        init: the distribution of the initial weights. 'keras': Glorot uniform kernels, biases are 0. 'stax': that of
            the code of PFLEGO's authors, which are the defaults of JAX's stax: Glorot normal kernels, drawn again
            beyond two standard deviations, and normal biases with standard deviation 1e-2, in convolutions 1e-6.

    Raises:
        InvalidArgument: the name or init is unknown, or examples of this shape are too small for the network, or are
            several arrays; or the seed is outside of its range.
    """
    check_type("the network", name, str, "the name of one, such as 'mlp200'")
    if name not in NETWORKS:
        own = "" if "." not in name else ". A network of your own is a FILE.keras, or a function, FILE.py:FUNCTION"
        raise InvalidArgument(unknown("network", name, NETWORKS) + own)
    check_choice(init=(init, INITS), dtype=(dtype, ("float32", "float64")))
    check_model_seed(seed)
    check_listed("input_shape", input_shape, "(28, 28, 1)")
    if is_several(input_shape):
        raise InvalidArgument(
            f"{name} takes one array, and examples are several: {shape_text(input_shape)}. Give a Keras model of your "
            "own"
        )
    check_whole_number(1, **{f"dimension {d} of input_shape": size for d, size in enumerate(input_shape)})
    with names_from_the_first():
        made = NETWORKS[name]()
    stack = [type(layer).from_config({**layer.get_config(), "dtype": dtype}) for layer in made]
    if len(input_shape) != 3 and any(isinstance(layer, layers.Conv2D) for layer in stack):
        raise InvalidArgument(
            f"{name} is for images (height, width, channels), and an example has the shape {tuple(input_shape)}. Use "
            "mlp200 or another network"
        )
    try:
        model = keras.Sequential([keras.Input(tuple(input_shape), dtype=dtype), *stack], name=name)
    except ValueError as error:
        raise InvalidArgument(
            f"{name} needs larger images than {tuple(input_shape)}: {error}. Use mlp200 or another network"
        ) from error
    as_made = {id(w) for layer in stack if isinstance(layer, layers.BatchNormalization) for w in layer.weights}
    of_convolutions = {id(w) for layer in stack if isinstance(layer, layers.Conv2D) for w in layer.weights}
    for i, variable in enumerate(model.trainable_weights):
        if id(variable) not in as_made:
            bias = _BIASES[id(variable) in of_convolutions] if init == "stax" else 0.0
            variable.assign(_draw(variable.shape, seed, i, dtype, init, bias))
    return model


@contextmanager
def names_from_the_first() -> Iterator[None]:
    """Lets Keras name layers as in a new process: conv2d, conv2d_1, ...; then it goes on counting from where it was.

    Otherwise it goes on from network to network, and `train_from` means a layer by its name.
    """
    if keras.__version__.startswith("2."):
        from keras.src.backend import PER_GRAPH_OBJECT_NAME_UIDS as counted

        numbers = dict(counted)
        counted.clear()
        try:
            yield
        finally:
            counted.clear()
            counted.update(numbers)
        return
    from keras.src.backend.common import global_state

    name = "object_name_uids"
    before = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(name, before)


def _draw(shape: tuple, seed: int, position: int, dtype: str, init: str, bias: float) -> np.ndarray:
    """A kernel, or a bias [M]; `bias`: its standard deviation."""
    key = tf.random.experimental.stateless_fold_in(tf.constant([seed, ModelKey.BACKBONE], tf.int32), position)
    if len(shape) == 1 and bias == 0:
        return np.zeros(shape, dtype)  # and not 0 times a negative number, which is -0
    if len(shape) == 1:
        return bias * tf.random.stateless_normal(shape, key, dtype=dtype, alg="philox").numpy()
    receptive_field = int(np.prod(shape[:-2]))
    fans = receptive_field * (shape[-2] + shape[-1])
    if init == "stax":
        drawn = tf.random.stateless_truncated_normal(shape, key, dtype=dtype, alg="philox").numpy()
        return np.sqrt(2.0 / fans) / _CUT * drawn
    limit = np.sqrt(6.0 / fans)
    return tf.random.stateless_uniform(shape, key, -limit, limit, dtype=dtype, alg="philox").numpy()
