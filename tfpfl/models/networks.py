"""The papers' backbones (without their heads), drawn from a seed so that every Keras gives the same numbers.

Parameter counts follow PFLEGO-v2 (table of architectures, as its authors' code has it) and PGFed, section 5.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfpfl.checks import InvalidArgument, unknown
from tfpfl.data.randomness import ModelKey


def mlp200():
    """PFLEGO on MNIST, Fashion-MNIST, EMNIST: 200 hidden units; 157,000 weights for 28x28."""
    return [layers.Flatten(), layers.Dense(200, activation="relu")]


def cifar_2conv():
    """PFLEGO on CIFAR-10: two 5x5 convolutions and two dense layers; 1,754,496 weights."""
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


def omniglot_4conv():
    """PFLEGO on Omniglot: four 3x3 convolutions, each halving the image; 111,424 weights."""
    blocks = [
        layer
        for _ in range(4)
        for layer in (layers.Conv2D(64, 3, padding="same", activation="relu"), layers.MaxPooling2D(2))
    ]
    return [*blocks, layers.Flatten()]


def fedavg_cnn():
    """PGFed, after McMahan et al.: two 5x5 convolutions and a dense layer; 873,408 weights for 32x32x3."""
    blocks = [
        layer
        for filters in (32, 64)
        for layer in (layers.Conv2D(filters, 5, activation="relu"), layers.MaxPooling2D(2))
    ]
    return [*blocks, layers.Flatten(), layers.Dense(512, activation="relu")]


NETWORKS = {network.__name__: network for network in (mlp200, cifar_2conv, omniglot_4conv, fedavg_cnn)}


def default_network(example_shape: tuple) -> str:
    """The network that the PFLEGO paper takes for images of this shape: cifar_2conv for colour, else mlp200."""
    return "cifar_2conv" if len(example_shape) == 3 and example_shape[-1] == 3 else "mlp200"


def build_network(name: str, input_shape: tuple, *, seed: int = 0, dtype: str = "float32"):
    """A backbone by name: Glorot uniform kernels drawn from (seed, position of the weight), zero biases.

    Raises:
        ValueError: an unknown name, or an input too small for the network.
    """
    if name not in NETWORKS:
        raise InvalidArgument(unknown("network", name, NETWORKS))
    stack = [type(layer).from_config({**layer.get_config(), "dtype": dtype}) for layer in NETWORKS[name]()]
    try:
        model = keras.Sequential([keras.Input(tuple(input_shape), dtype=dtype), *stack], name=name)
    except ValueError as error:
        raise InvalidArgument(f"{name} needs larger images than {tuple(input_shape)}: {error}") from error
    model.set_weights([_draw(w.shape, seed, i, dtype) for i, w in enumerate(model.get_weights())])
    return model


def _draw(shape, seed, position, dtype):
    if len(shape) == 1:
        return np.zeros(shape, dtype)
    receptive_field = int(np.prod(shape[:-2]))
    limit = np.sqrt(6.0 / (receptive_field * (shape[-2] + shape[-1])))
    key = tf.random.experimental.stateless_fold_in(tf.constant([seed, ModelKey.BACKBONE], tf.int32), position)
    return tf.random.stateless_uniform(shape, key, -limit, limit, dtype=dtype, alg="philox").numpy()
