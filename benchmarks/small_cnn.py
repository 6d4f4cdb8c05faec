"""A small convolutional backbone, for tables of many methods: `--network small_cnn.py:small_cnn`."""

import keras
from keras import initializers, layers


def small_cnn(input_shape, seed):
    """Two 3x3 convolutions of 16 and 32 filters with stride 2, and a dense layer of 64: 136,000 weights for 32x32x3."""

    def glorot(n):
        return initializers.GlorotUniform(seed=seed + n)

    convolutions = [
        layers.Conv2D(filters, 3, 2, padding="same", activation="relu", kernel_initializer=glorot(n))
        for n, filters in enumerate((16, 32))
    ]
    dense = layers.Dense(64, activation="relu", kernel_initializer=glorot(2))
    return keras.Sequential([keras.Input(input_shape), *convolutions, layers.Flatten(), dense])
