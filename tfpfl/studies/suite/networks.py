"""The backbones of the suite: small ones, so that the whole suite takes minutes on two cores."""

import keras
import tensorflow as tf
from keras import layers
from keras.initializers import GlorotUniform


def _network(input_shape, seed, *parts):
    """The layers one after the other, with initial kernels that depend on the seed only, each of its own draws."""
    for n, layer in enumerate(parts):
        if hasattr(layer, "kernel_initializer"):
            layer.kernel_initializer = GlorotUniform(seed=1_000 * seed + n)
    return keras.Sequential([keras.Input(input_shape), *parts])


def speech(input_shape, seed):
    """Two 3x3 convolutions of 16 and 32 filters with stride 2, a dense layer of 64."""
    convolutions = [layers.Conv2D(filters, 3, 2, padding="same", activation="relu") for filters in (16, 32)]
    return _network(input_shape, seed, *convolutions, layers.Flatten(), layers.Dense(64, activation="relu"))


class Statistics(layers.Layer):
    """The mean, the deviation, and ten times the mean absolute step of every axis over time: [N, T, A] to [N, 3 A]."""

    def call(self, x):
        step = 10 * tf.reduce_mean(tf.abs(x[:, 1:] - x[:, :-1]), 1)
        return tf.concat([tf.reduce_mean(x, 1), tf.math.reduce_std(x, 1), step], 1)


def movement(input_shape, seed):
    """`Statistics`, a dense layer of 64; docs/people.md says why no convolutions."""
    return _network(input_shape, seed, Statistics(), layers.Dense(64, activation="relu"))


def vowels(input_shape, seed):
    """Two dense layers of 64."""
    return _network(input_shape, seed, layers.Dense(64, activation="relu"), layers.Dense(64, activation="relu"))


def drawings(input_shape, seed):
    """Three 3x3 convolutions of 16, 32 and 32 filters with stride 2, a dense layer of 64."""
    convolutions = [layers.Conv2D(filters, 3, 2, padding="same", activation="relu") for filters in (16, 32, 32)]
    return _network(input_shape, seed, *convolutions, layers.Flatten(), layers.Dense(64, activation="relu"))
