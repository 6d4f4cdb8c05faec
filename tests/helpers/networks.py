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


def separable():
    """Depthwise convolutions: with strides, several kernels a channel, dilation, and unlike strides beside them."""
    inputs = x = keras.Input((9, 8, 2))
    x = layers.DepthwiseConv2D(3, strides=2, padding="same", depth_multiplier=2, activation="relu6")(x)
    x = layers.SeparableConv2D(3, 2, activation="swish")(x)
    y = layers.DepthwiseConv2D(2, dilation_rate=2, padding="same")(layers.UpSampling2D((1, 2))(x))
    y = layers.Conv2D(3, 3, strides=(2, 1), padding="same")(y)
    return keras.Model(inputs, layers.Concatenate()([layers.GlobalMaxPooling2D()(y), layers.Flatten()(x)]))


def sequence():
    """Convolutions and pools along a sequence."""
    inputs = x = keras.Input((13, 3))
    x = layers.Conv1D(4, 3, strides=2, padding="same", activation="elu")(x)
    x = layers.MaxPooling1D(2, 1)(x)
    x = layers.Conv1D(4, 2, padding="causal", activation="softplus")(x)
    y = layers.AveragePooling1D(2)(layers.Conv1D(3, 2, dilation_rate=2, activation="selu")(x))
    return keras.Model(inputs, layers.Concatenate()([layers.GlobalMaxPooling1D()(x), layers.Flatten()(y)]))


def activations():
    """Every activation that is no layer of its own, and what merges arrays."""
    inputs = keras.Input((6,))
    names = ("gelu", "hard_sigmoid", "softsign", "exponential", "swish", "softmax", "elu")
    parts = [layers.Dense(5, activation=name)(inputs) for name in names]
    small = layers.Minimum()([parts[0], layers.Subtract()([parts[1], parts[2]])])
    large = layers.Maximum()([parts[3], layers.Average()([parts[4], parts[5]])])
    approximate = keras.layers.Lambda(lambda x: keras.activations.gelu(x, approximate=True))(layers.Dense(5)(inputs))
    return keras.Model(inputs, layers.Concatenate()([small, large, parts[6], approximate]))


def own_statistics():
    """Normalizations by the statistics of an example."""
    inputs = x = keras.Input((5, 4, 3))
    x = layers.GroupNormalization(2)(layers.Conv2D(4, 2)(x))
    x = layers.LayerNormalization(axis=[1, 2])(x)
    x = layers.LayerNormalization()(layers.Dense(6)(layers.Reshape((6, 8))(x)))
    return keras.Model(inputs, layers.UnitNormalization()(layers.Flatten()(x)))


def recurrent():
    """A GRU, both ways, that hands every step on to an LSTM, both ways."""
    first = layers.Bidirectional(layers.GRU(2, unroll=True, return_sequences=True))
    return keras.Sequential([keras.Input((4, 3)), first, layers.Bidirectional(layers.LSTM(3, unroll=True))])


def attention(tokens=11, length=5, width=8):
    """A layer of a transformer on tokens, of which 0 is padding."""
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(tokens, width)(inputs)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 3)(x, x)])
    x = layers.Add()([x, layers.Dense(width)(layers.Dense(6, activation="gelu")(layers.LayerNormalization()(x)))])
    weights = layers.Softmax()(layers.Dot((2, 2))([x, layers.Dense(width)(x)]))
    return keras.Model(inputs, layers.GlobalAveragePooling1D()(layers.Dot((2, 1))([weights, x])))


def masked(tokens=11):
    """Padded tokens, which a GRU leaves out."""
    inputs = keras.Input((4,), dtype="int32")
    return keras.Model(inputs, layers.GRU(3, unroll=True)(layers.Embedding(tokens, 4, mask_zero=True)(inputs)))


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
    "separable": separable,
    "sequence": sequence,
    "activations": activations,
    "own statistics": own_statistics,
    "recurrent": recurrent,
    "attention": attention,
    "masked": masked,
}
