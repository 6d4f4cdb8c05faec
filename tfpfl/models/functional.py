"""A Keras model as a pure function of its weights.

Gradients, TFF and cohorts that train in one graph need `apply(weights, x)`, with the weights as tensors and no variable
in the graph. Keras 3 provides `StatelessScope` for this. Keras 2 provides nothing. But its layers read their weights
from attributes, so `apply` replaces these attributes with the given tensors during one call, and then restores them.
"""

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument
from tfpfl.data.population import Tensor

_SWAP = threading.RLock()
# Base classes of layers that may draw random numbers. The last two are from Keras 3: recurrent cells, and images.
_NOISE = ("BaseRandomLayer", "Dropout", "BaseDropout", "GaussianNoise", "GaussianDropout", "AlphaDropout",
          "DropoutRNNCell", "BaseImagePreprocessingLayer")  # fmt: skip


def check_pure(model: keras.Model) -> None:
    """Checks that the model's output depends only on its weights and its input.

    Raises:
        InvalidArgument: the model has a trainable BatchNormalization, or a layer that draws random numbers.
    """
    for layer in flatten(model):
        names = {cls.__name__ for cls in type(layer).__mro__}
        if "BatchNormalization" in names and layer.trainable:
            raise InvalidArgument(
                f"layer {layer.name!r} is a trainable BatchNormalization. Its batch statistics make an example's "
                "features depend on the other examples of the batch, and its moving statistics have no gradient. Use "
                "GroupNormalization or LayerNormalization, or freeze it (trainable=False)"
            )
        config = layer.get_config() if names & set(_NOISE) else {}
        amount = max(float(config.get(name) or 0) for name in ("rate", "stddev", "dropout", "recurrent_dropout"))
        random_augmentation = names & set(_NOISE) and any(name.startswith("Random") for name in names)
        if amount > 0 or random_augmentation:
            raise InvalidArgument(
                f"layer {layer.name!r} ({type(layer).__name__}) draws random numbers. A backbone must be "
                "deterministic: its features are computed once per round and cached. Remove the layer, or set its rate "
                "to 0"
            )


def functional(model: keras.Model) -> tuple[tuple[np.ndarray, ...], Callable[[tuple, Tensor], Tensor]]:
    """Splits a built Keras model into its weights and a pure function.

    Args:
        model: a built `keras.Model` (Sequential, functional or subclassed).

    Returns:
        (weights, apply): the trainable weights as a tuple of arrays, and the function `apply(weights, x)`, which can
        be differentiated with respect to `weights`. Frozen weights (trainable=False) are constants of `apply`.

    Raises:
        InvalidArgument: the model has a trainable BatchNormalization or a layer that draws random numbers; or, with
            Keras 2, a layer keeps weights elsewhere than in its attributes.
    """
    check_pure(model)
    weights = tuple(np.asarray(v) for v in model.trainable_weights)
    frozen = tuple(np.asarray(v) for v in model.non_trainable_weights)
    if keras.__version__.startswith("2."):
        return weights, _keras2(model, frozen)
    variables = [*model.trainable_weights, *model.non_trainable_weights]

    def apply(weights: tuple, x: Tensor) -> Tensor:
        # The same as `model.stateless_call`, which fails for models whose `call` has no argument `training`.
        with keras.StatelessScope(state_mapping=list(zip(variables, [*weights, *frozen], strict=True))):
            return model(x, training=False)

    return weights, apply


def inference(model: keras.Model) -> tuple[tuple[np.ndarray, ...], Callable[[tuple, Tensor], Tensor]]:
    """Splits a built Keras model of any layers into all of its weights, and the function `apply(weights, x)`.

    The function is that of inference: BatchNormalization uses its statistics, and Dropout does nothing.
    """
    variables = [*model.trainable_weights, *model.non_trainable_weights]
    if keras.__version__.startswith("2."):
        return tuple(np.asarray(v) for v in variables), _keras2(model, ())

    def apply(weights: tuple, x: Tensor) -> Tensor:
        with keras.StatelessScope(state_mapping=list(zip(variables, weights, strict=True))):
            return model(x, training=False)

    return tuple(np.asarray(v) for v in variables), apply


def flatten(model: keras.Model) -> list[Any]:
    """The model and all layers in it, also those inside other layers."""
    if hasattr(model, "_flatten_layers"):
        return list(model._flatten_layers())  # includes cells and layers inside layers
    return [model]


def _keras2(model: keras.Model, frozen: tuple[np.ndarray, ...]) -> Callable[[tuple, Tensor], Tensor]:
    variables = [*model.trainable_weights, *model.non_trainable_weights]
    position = {id(v): i for i, v in enumerate(variables)}
    slots = [
        (layer, name, position[id(value)], _cast_of(layer, value))
        for layer in model._flatten_layers()
        for name, value in vars(layer).items()
        if id(value) in position
    ]
    missing = set(range(len(variables))) - {i for _, _, i, _ in slots}
    if missing:
        names = ", ".join(variables[i].name for i in sorted(missing))
        raise InvalidArgument(
            f"weights {names} are not attributes of a layer. Assign each weight to its own attribute, not to a list"
        )

    def apply(weights: tuple, x: Tensor) -> Tensor:
        values = [*weights, *(tf.constant(f) for f in frozen)]
        with _SWAP:
            saved = [(layer, name, layer.__dict__[name]) for layer, name, _, _ in slots]
            try:
                for layer, name, i, cast in slots:
                    layer.__dict__[name] = values[i] if cast is None else tf.cast(values[i], cast)
                return model(x, training=False)
            finally:
                for layer, name, value in saved:
                    layer.__dict__[name] = value

    return apply


def _cast_of(layer: Any, variable: Any) -> Any:
    """The dtype in which a layer of Keras 2 reads its variable in mixed precision; None: as it is."""
    return layer.compute_dtype if type(variable).__name__.startswith("AutoCast") else None
