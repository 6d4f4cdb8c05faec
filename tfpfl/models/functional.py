"""A Keras model as a pure function of its weights.

Gradients, TFF and clients side by side all need `apply(weights, x)` with the weights as tensors and no variable in
the graph. Keras 3 has `StatelessScope` for that. Keras 2 has nothing: there every layer finds its weights as
attributes, so for the length of one call the attributes are pointed at the given tensors, and back.
"""

import threading

import keras
import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument

_SWAP = threading.RLock()
# Base classes of layers that may draw random numbers; the last two are Keras 3's, of recurrent cells and of images.
_NOISE = ("BaseRandomLayer", "Dropout", "BaseDropout", "GaussianNoise", "GaussianDropout", "AlphaDropout",
          "DropoutRNNCell", "BaseImagePreprocessingLayer")  # fmt: skip


def check_pure(model) -> None:
    """Refuses layers whose output is not a function of weights and input alone.

    Raises:
        ValueError: a trainable BatchNormalization or a layer that draws random numbers, named, with what to do instead.
    """
    for layer in _flatten(model):
        names = {cls.__name__ for cls in type(layer).__mro__}
        if "BatchNormalization" in names and layer.trainable:
            raise InvalidArgument(
                f"layer {layer.name!r} is a trainable BatchNormalization: its moving statistics are neither part of "
                "the backbone's gradient nor personal, and its batch statistics make an example's features depend on "
                "the other examples. Use GroupNormalization or LayerNormalization, or freeze it (trainable=False)"
            )
        config = layer.get_config() if names & set(_NOISE) else {}
        amount = max(float(config.get(name) or 0) for name in ("rate", "stddev", "dropout", "recurrent_dropout"))
        random_augmentation = names & set(_NOISE) and any(name.startswith("Random") for name in names)
        if amount > 0 or random_augmentation:
            raise InvalidArgument(
                f"layer {layer.name!r} ({type(layer).__name__}) draws random numbers: features are computed once a "
                "round and cached, and their gradient is exact only for a deterministic backbone. Remove it, or set "
                "its rate to 0"
            )


def functional(model):
    """Splits a built Keras model into its weights and a pure function.

    Args:
        model: a built `keras.Model` (Sequential, functional or subclassed).

    Returns:
        (weights, apply): the trainable weights as a tuple of arrays, and `apply(weights, x)`, which may be
        differentiated with respect to `weights`. Frozen weights (trainable=False) are constants of `apply`.

    Raises:
        ValueError: see `check_pure`; or a layer whose weights cannot be found.
    """
    check_pure(model)
    weights = tuple(np.asarray(v) for v in model.trainable_weights)
    frozen = tuple(np.asarray(v) for v in model.non_trainable_weights)
    if keras.__version__.startswith("2."):
        return weights, _keras2(model, frozen)
    variables = [*model.trainable_weights, *model.non_trainable_weights]

    def apply(weights, x):
        # As `model.stateless_call`, which fails where `call` takes no `training`.
        with keras.StatelessScope(state_mapping=list(zip(variables, [*weights, *frozen], strict=True))):
            return model(x, training=False)

    return weights, apply


def _flatten(model):
    if hasattr(model, "_flatten_layers"):
        return list(model._flatten_layers())  # includes cells and layers inside layers
    return [model]


def _keras2(model, frozen):
    variables = [*model.trainable_weights, *model.non_trainable_weights]
    position = {id(v): i for i, v in enumerate(variables)}
    slots = [
        (layer, name, position[id(value)])
        for layer in model._flatten_layers()
        for name, value in vars(layer).items()
        if id(value) in position
    ]
    missing = set(range(len(variables))) - {i for _, _, i in slots}
    if missing:
        names = ", ".join(variables[i].name for i in sorted(missing))
        raise InvalidArgument(f"weights {names} are not attributes of a layer (a list of weights, say); name each one")

    def apply(weights, x):
        values = [*weights, *(tf.constant(f) for f in frozen)]
        with _SWAP:
            saved = [(layer, name, layer.__dict__[name]) for layer, name, _ in slots]
            try:
                for layer, name, i in slots:
                    layer.__dict__[name] = values[i]
                return model(x, training=False)
            finally:
                for layer, name, value in saved:
                    layer.__dict__[name] = value

    return apply
