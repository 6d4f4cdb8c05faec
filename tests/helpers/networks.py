"""Backbones for the tests of the export: `PAPERS` are those of the papers, `OWN` are such as a user may build."""

import keras
import numpy as np
from keras import layers

PAPERS = {"mlp200": (8, 8), "omniglot_4conv": (28, 28, 1), "fedavg_cnn": (28, 28, 1), "cifar_2conv": (32, 32, 3)}


def sequential(*stack, shape=(9, 8, 2)):
    return lambda: keras.Sequential([keras.Input(shape), *[layer() for layer in stack]])


def residual():
    inputs = x = keras.Input((8, 8, 2))
    x = layers.Conv2D(6, 3, padding="same", activation="relu")(x)
    y = layers.Conv2D(6, 3, padding="same")(x)
    x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.Multiply()([x, layers.Conv2D(6, 1, activation="sigmoid")(x)])  # a gate
    y = layers.Conv2D(4, 1, strides=2)(x)
    z = layers.AveragePooling2D(2)(x)
    x = layers.Concatenate()([y, z])
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(x))


def normalized():
    model = sequential(
        lambda: layers.Conv2D(5, 3, activation="relu"),
        lambda: layers.BatchNormalization(trainable=False),
        lambda: layers.Conv2D(3, 3, activation="relu"),
        lambda: layers.GlobalAveragePooling2D(),
    )()
    rng = np.random.default_rng(0)
    frozen = next(layer for layer in model.layers if "batch" in layer.name)
    frozen.set_weights([0.5 + rng.random(w.shape) for w in frozen.get_weights()])
    return model


OWN = {
    "strided convolutions": sequential(
        lambda: layers.Conv2D(5, 3, strides=2, padding="same", activation="relu"),
        lambda: layers.Conv2D(4, 2, strides=3, activation="tanh"),
        lambda: layers.Flatten(),
    ),
    "strided convolution wider than its kernel": sequential(
        lambda: layers.Conv2D(3, 3, activation="sigmoid"),
        lambda: layers.Conv2D(4, 1, strides=2, padding="same"),
        lambda: layers.Flatten(),
    ),
    "average pools": sequential(
        lambda: layers.Conv2D(3, 3, padding="same", activation="relu"),
        lambda: layers.AveragePooling2D(3, 2, padding="same"),
        lambda: layers.Conv2D(3, 2, padding="valid"),
        lambda: layers.AveragePooling2D(2, 1),
        lambda: layers.Flatten(),
    ),
    "max pools": sequential(
        lambda: layers.ZeroPadding2D(((1, 2), (0, 3))),
        lambda: layers.Conv2D(3, 3, padding="same"),
        lambda: layers.ZeroPadding2D(1),
        lambda: layers.MaxPooling2D(3, 1, padding="same"),
        lambda: layers.MaxPooling2D((3, 2), 2),
        lambda: layers.LeakyReLU(),
        lambda: layers.Flatten(),
        lambda: layers.Dense(7, activation="relu6"),
    ),
    "residual": residual,
    "frozen normalization": normalized,
}
