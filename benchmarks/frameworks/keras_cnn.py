"""The small CNN of pfl-research's image benchmarks, without its two dropout layers, in Keras; 1,626,442 weights."""

import keras
from keras import layers

SHAPE, CLASSES = (32, 32, 3), 10


def backbone(*last):
    """All but the last layer, then the layers given: [N, 32, 32, 3] to [N, 128]."""
    return keras.Sequential(
        [
            keras.Input(SHAPE),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            *last,
        ]
    )


def whole():
    """[N, 32, 32, 3] to logits [N, 10]."""
    return backbone(layers.Dense(CLASSES))
