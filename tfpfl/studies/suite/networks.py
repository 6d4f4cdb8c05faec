"""The backbones of the suite: small ones, so that the whole suite takes minutes on two cores."""

import keras
from keras import layers
from keras.initializers import GlorotUniform


def _network(input_shape, seed, *parts):
    """The layers one after the other, with initial kernels that depend on the seed only."""
    for n, layer in enumerate(parts):
        if hasattr(layer, "kernel_initializer"):
            layer.kernel_initializer = GlorotUniform(seed=seed + n)
    return keras.Sequential([keras.Input(input_shape), *parts])


def speech(input_shape, seed):
    """Two 3x3 convolutions of 16 and 32 filters with stride 2, a dense layer of 64."""
    convolutions = [layers.Conv2D(filters, 3, 2, padding="same", activation="relu") for filters in (16, 32)]
    return _network(input_shape, seed, *convolutions, layers.Flatten(), layers.Dense(64, activation="relu"))


def movement(input_shape, seed):
    """Two convolutions over time of 32 filters with stride 2, their mean over time, a dense layer of 64."""
    convolutions = [layers.Conv1D(32, 5, 2, padding="same", activation="relu") for _ in range(2)]
    pooled = layers.GlobalAveragePooling1D()
    return _network(input_shape, seed, *convolutions, pooled, layers.Dense(64, activation="relu"))


def vowels(input_shape, seed):
    """Two dense layers of 64."""
    return _network(input_shape, seed, layers.Dense(64, activation="relu"), layers.Dense(64, activation="relu"))


def drawings(input_shape, seed):
    """Three 3x3 convolutions of 16, 32 and 32 filters with stride 2, a dense layer of 64."""
    convolutions = [layers.Conv2D(filters, 3, 2, padding="same", activation="relu") for filters in (16, 32, 32)]
    return _network(input_shape, seed, *convolutions, layers.Flatten(), layers.Dense(64, activation="relu"))
