"""A Keras model as a pure function of its weights.

Gradients, TFF and cohorts that train in one graph need `apply(weights, x)`, with the weights as tensors and no variable
in the graph. Keras 3 provides `StatelessScope` for this. Keras 2 provides nothing. But its layers read their weights
from attributes, so `apply` replaces these attributes with the given tensors during one call, and then restores them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument
from tfpfl.data.population import Tensor
from tfpfl.models import passes
from tfpfl.models.layers import SpecialLayers

_SWAP = threading.RLock()


class PureModel:
    """A built Keras model as a pure function of its weights, made by `functional`.

    Args:
        model: the model.

    Attributes:
        layers: the layers that are replaced during a call, see `SpecialLayers`.
        statistics: the moving statistics of the trainable BatchNormalization layers, a tuple of arrays.

    Raises:
        InvalidArgument: as `functional`.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model, self.layers = model, SpecialLayers(model)
        self._frozen = tuple(np.asarray(v) for v in model.non_trainable_weights)
        self.statistics = tuple(self._frozen[place] for place in self.layers.places)
        self._variables = [*model.trainable_weights, *model.non_trainable_weights]
        self._num_weights = len(model.trainable_weights)
        self._slots = _slots(model, self._variables) if keras.__version__.startswith("2.") else None

    def __call__(self, weights: tuple, x: Tensor) -> Tensor:
        """The model's output.

        Args:
            weights: the trainable weights; if the moving statistics follow, this is evaluation with those.
            x: the input.
        """
        weights, statistics = tuple(weights[: self._num_weights]), tuple(weights[self._num_weights :])
        now = None if statistics else passes.current()
        if now is not None and now.statistics is not None:
            statistics = now.statistics
        frozen: list[Any] = list(self._frozen)
        for place, value in zip(self.layers.places, statistics):  # noqa: B905  none: the stored ones
            frozen[place] = value
        with self._holding([*weights, *frozen]):
            if not self.layers:
                return self._model(x, training=False)
            with _SWAP, self.layers.replaced(now):
                return self._model(x, training=False)

    def check_batch_statistics(self, x: Any) -> None:
        """Checks that batch statistics can normalize, by a pass that counts for nothing.

        Args:
            x: examples of zeros.

        Raises:
            InvalidArgument: as `SpecialLayers.check_batch_statistics`; or a layer that normalizes gets a mask.
        """
        self.layers.check_batch_statistics()
        with passes.measuring(tuple(map(tf.constant, self.statistics))):
            self(tuple(map(tf.convert_to_tensor, self._model.trainable_weights)), x)

    @contextmanager
    def _holding(self, values: list) -> Iterator[None]:
        """Lets the layers read these values instead of their variables."""
        if self._slots is None:
            # The same as `model.stateless_call`, which fails for models whose `call` has no argument `training`.
            scope = keras.StatelessScope(state_mapping=list(zip(self._variables, values, strict=True)))
            given = [scope.get_current_value(variable) for variable in self._variables]
            with scope:
                yield
            now = [scope.get_current_value(variable) for variable in self._variables]
            changed = [v.path for v, a, b in zip(self._variables, given, now, strict=True) if a is not b]
            if changed:
                raise InvalidArgument(
                    f"a layer changes its weights {', '.join(changed)} when it is called, and this change would be "
                    "lost: what it counts would differ from engine to engine. Leave out assign in the layer's call"
                )
            return
        with _swapped(self._slots, values):
            yield


def functional(model: keras.Model) -> tuple[tuple[np.ndarray, ...], PureModel]:
    """Splits a built Keras model into its weights and a pure function.

    Args:
        model: a built `keras.Model` (Sequential, functional or subclassed).

    Returns:
        (weights, apply): the trainable weights as a tuple of arrays, and the function `apply(weights, x)`, which can
        be differentiated with respect to `weights`. Frozen weights (trainable=False) and moving statistics are
        constants of `apply`, except in a `passes.Pass` that says otherwise.

    Raises:
        InvalidArgument: the model has a layer that draws random numbers in a way that cannot be replaced; or, with
            Keras 2, a layer keeps weights elsewhere than in its attributes. `apply` raises it if, with Keras 3, a layer
            assigns to its weights.
    """
    return tuple(np.asarray(v) for v in model.trainable_weights), PureModel(model)


def inference(model: keras.Model) -> tuple[tuple[np.ndarray, ...], Callable[[tuple, Tensor], Tensor]]:
    """Splits a built Keras model of any layers into all of its weights, and the function `apply(weights, x)`.

    The function is that of inference: BatchNormalization uses its statistics, and Dropout does nothing.
    """
    variables = [*model.trainable_weights, *model.non_trainable_weights]
    slots = _slots(model, variables) if keras.__version__.startswith("2.") else None

    def apply(weights: tuple, x: Tensor) -> Tensor:
        if slots is not None:
            with _swapped(slots, list(weights)):
                return model(x, training=False)
        with keras.StatelessScope(state_mapping=list(zip(variables, weights, strict=True))):
            return model(x, training=False)

    return tuple(np.asarray(v) for v in variables), apply


@contextmanager
def _swapped(slots: list[tuple[Any, str, int, Any]], values: list) -> Iterator[None]:
    """For Keras 2: puts the values in the place of the weights, as tensors: recurrent layers ask for their rank."""
    values = [tf.convert_to_tensor(value) for value in values]
    with _SWAP:
        saved = [(layer, name, layer.__dict__[name]) for layer, name, _, _ in slots]
        try:
            for layer, name, i, cast in slots:
                layer.__dict__[name] = values[i] if cast is None else tf.cast(values[i], cast)
            yield
        finally:
            for layer, name, value in saved:
                layer.__dict__[name] = value


def _slots(model: keras.Model, variables: list) -> list[tuple[Any, str, int, Any]]:
    """For Keras 2, (layer, attribute, number of the weight, dtype to cast to) for every attribute that is a weight."""
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
    return slots


def _cast_of(layer: Any, variable: Any) -> Any:
    """The dtype in which a layer of Keras 2 reads its variable in mixed precision; None: as it is."""
    return layer.compute_dtype if type(variable).__name__.startswith("AutoCast") else None
