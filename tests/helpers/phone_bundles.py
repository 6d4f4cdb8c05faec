"""Small bundles with rounds, and data for them: for classes, of tokens, and for counts with a frozen layer below."""

import keras
import numpy as np
from keras import layers

from tflite_export import export
from tflite_export.device.runtime import Bundle
from tfpfl.models import SplitModel, build_network
from tfpfl.models.weights import Head

CLASSES, OUTPUTS, RAW, TOKENS = 4, 2, (3, 2), 9
TRAINING = {"tau": 20, "beta": 0.05, "rho": 0.01, "head_rate": 0.03, "safeguard": True}


def small_bundle(kind: str, folder) -> Bundle:
    """A bundle of 'classification' (8 x 8 images), of 'tokens' for classes, or of 'poisson' with a trunk."""
    rng = np.random.default_rng(0)
    if kind == "classification":
        model, outputs, known = SplitModel(build_network("mlp200", (8, 8, 1))), CLASSES, {}
    elif kind == "tokens":
        stack = [layers.Embedding(TOKENS, 3), layers.Flatten(), layers.Dense(5, activation="tanh")]
        model, outputs, known = SplitModel(keras.Sequential([keras.Input((4,)), *stack])), CLASSES, {}
    else:
        x = inputs = keras.Input(RAW)
        x = layers.Flatten()(layers.Dense(2, activation="relu", name="first")(layers.Dense(4, activation="tanh")(x)))
        backbone = keras.Model(inputs, layers.Dense(5, activation="tanh")(x))
        model, outputs = SplitModel(backbone, kind=kind, train_from="first"), OUTPUTS
        known = dict.fromkeys(("train", "test"), drawn(kind, 40))
    theta = tuple((rng.standard_normal(w.shape) / 16).astype(np.float32) for w in model.initial_theta)
    head = Head(np.zeros((model.num_features, outputs), np.float32), np.zeros(outputs, np.float32))
    return export((model, theta, head), out=folder / "bundle", inference=False, training=TRAINING, **known)


def drawn(kind: str, n: int, seed: int = 0):
    """(x, y): raw examples, and labels or counts that depend on them."""
    rng = np.random.default_rng(seed)
    if kind == "classification":
        y = rng.integers(0, CLASSES, n).astype(np.int32)
        return (rng.random((n, 8, 8, 1)) * (1 + y[:, None, None, None]) / 4).astype(np.float32), y
    if kind == "tokens":
        x = rng.integers(0, TOKENS, (n, 4)).astype(np.int32)
        return x, (x[:, 0] % CLASSES).astype(np.int32)
    x = rng.random((n, *RAW)).astype(np.float32)
    return x, rng.poisson(np.exp(x[:, 0])).astype(np.float32)
