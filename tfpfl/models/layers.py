"""Layers that are no functions of weights and input in Keras: BatchNormalization, Dropout and its kind.

While a `SplitModel` calls its backbone, their `call` is replaced by a function of the `Pass` that is traced: masks come
from its key, and batch statistics move its statistics. Keras's own state, random generators and moving statistics, is
never read or written in a graph. The same masks come on Keras 2 and Keras 3, from the same key.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument
from tfpfl.models.passes import Pass, fold

# Base classes of layers that may draw random numbers. The last two are from Keras 3: recurrent cells, and images.
_NOISE = {
    *("BaseRandomLayer", "Dropout", "BaseDropout", "GaussianNoise", "GaussianDropout", "AlphaDropout"),
    *("DropoutRNNCell", "BaseImagePreprocessingLayer", "Attention", "AdditiveAttention", "BaseDenseAttention"),
}
_IMAGES = ("Random", "RandAugment", "MixUp", "CutMix", "AugMix")  # how names of layers begin that change images
_AMOUNTS = ("rate", "stddev", "dropout", "recurrent_dropout")
_SELU = -1.7580993408473766  # what AlphaDropout sets a number to: minus scale times alpha of the SELU


class SpecialLayers:
    """The layers of a model that are replaced while it is called.

    Args:
        model: a built Keras model.

    Attributes:
        draws: whether a layer draws random numbers.
        moving: the moving statistics of the trainable BatchNormalization layers, as Keras's variables.
        places: where these stand in `model.non_trainable_weights`.
        own: for each of `model.trainable_weights` whether it is a scale or offset of a BatchNormalization.

    Raises:
        InvalidArgument: a layer draws random numbers in a way that cannot be replaced, changes weights by itself, or
            keeps a state from one call to the next.
    """

    def __init__(self, model: keras.Model) -> None:
        self._random: list[tuple[Any, Callable]] = []
        self._normalizing: list[tuple[Any, tuple[int, ...]]] = []
        self.moving: list[Any] = []
        parameters: set[int] = set()
        for layer in flatten(model):
            names = {cls.__name__ for cls in type(layer).__mro__}
            # SyncBatchNormalization of Keras 2.14 is no subclass of BatchNormalization.
            if {"BatchNormalization", "SyncBatchNormalization"} & names and layer.trainable:
                self._normalizing.append((layer, (len(self.moving), len(self.moving) + 1)))
                self.moving += [layer.moving_mean, layer.moving_variance]
                parameters |= {id(w) for w in layer.trainable_weights}
            elif "SpectralNormalization" in names and layer.trainable:
                raise InvalidArgument(
                    f"layer {layer.name!r} ({type(layer).__name__}) changes the kernel of its layer in every pass of "
                    "training, which is no step of any method here: leave it out, or freeze it (trainable=False)"
                )
            elif "RNN" in names and layer.stateful:
                raise InvalidArgument(
                    f"layer {layer.name!r} ({type(layer).__name__}) has stateful=True: it would begin an example with "
                    "the state that another one left, of whatever client. Build it without"
                )
            elif (draw := _drawing(layer, names)) is not None:
                self._random.append((layer, draw))
        self.draws = bool(self._random)
        position = {id(v): i for i, v in enumerate(model.non_trainable_weights)}
        self.places = tuple(position[id(v)] for v in self.moving)
        self.own = tuple(id(w) in parameters for w in model.trainable_weights)

    def __bool__(self) -> bool:
        return self.draws or bool(self.moving)

    def check_batch_statistics(self) -> None:
        """Checks that every trainable BatchNormalization can normalize with batch statistics.

        Raises:
            InvalidArgument: there is none; or one is of another class than Keras's, over several axes, or an older
                variant.
        """
        if not self._normalizing:
            raise InvalidArgument(
                "the backbone has no trainable BatchNormalization, so batch_norm='local' and 'shared' have no effect. "
                "Leave batch_norm out, or take a backbone that has such layers, for example the network conv_bn"
            )
        for layer, _ in self._normalizing:
            variant = getattr(layer, "renorm", False) or getattr(layer, "virtual_batch_size", None)
            if (
                type(layer).__name__ not in ("BatchNormalization", "SyncBatchNormalization")
                or variant
                or not _of(layer)
                or not (isinstance(layer.axis, int) or len(layer.axis) == 1)
            ):
                raise InvalidArgument(
                    f"layer {layer.name!r} ({type(layer).__name__}) is not Keras's plain BatchNormalization over "
                    "one axis, whose batch statistics are known. Use batch_norm='frozen', or replace the layer"
                )

    @contextmanager
    def replaced(self, now: Pass | None) -> Iterator[None]:
        """Replaces the layers' functions for a call of the model. The caller sees to it that only one thread does so.

        Args:
            now: the pass that is traced; None for evaluation.
        """
        functions: list[tuple[Any, Callable]] = []
        for number, (layer, draw) in enumerate(self._random):
            functions.append((layer, _identity if now is None or now.key is None else _Masked(draw, now.key, number)))
        if now is not None and now.batch:
            functions += [(layer, partial(_normalized, layer, places, now)) for layer, places in self._normalizing]
        try:
            for layer, function in functions:
                layer.__dict__["call"] = function
            yield
        finally:
            for layer, _ in functions:
                layer.__dict__.pop("call", None)


def flatten(model: keras.Model) -> list[Any]:
    """The model and all layers in it, also those inside other layers."""
    if hasattr(model, "_flatten_layers"):
        return list(model._flatten_layers())  # includes cells and layers inside layers
    return [model]


def penalty(model: keras.Model, weights_rest: bool = False) -> str | None:
    """Which layer of a model that was called adds a penalty to Keras's loss, in words; None if none does.

    It has a regularizer or a constraint on weights that train, or calls `add_loss`.

    Args:
        model: the model.
        weights_rest: none of its weights trains, but what it computes changes, as with adapters.
    """
    kinds = "activity_regularizer" if weights_rest else ("_regularizer", "_constraint")
    for layer in (each for each in flatten(model) if each.trainable):
        for name, value in vars(layer).items():
            if callable(value) and name.removeprefix("_").endswith(kinds):
                return f"layer {layer.name!r} has {name.removeprefix('_')}={type(value).__name__}"
        # As `add_weight` was told: the layer's own weights, not those of layers in it; of Keras 2 or 3.
        own = getattr(layer, "_trainable_weights", None) or getattr(layer, "_trainable_variables", None) or ()
        for weight in () if weights_rest else own:
            for name in ("regularizer", "constraint"):
                if (value := getattr(weight, name, None)) is not None:
                    return f"layer {layer.name!r} has a weight with {name}={type(value).__name__}"
        # Keras's `losses` are also those of weights at rest, so they would not do.
        losses = ("_losses", "_eager_losses", *([] if weights_rest else ["_callable_losses"]))
        if any(getattr(layer, name, ()) for name in losses):
            return f"layer {layer.name!r} calls add_loss"
    return None


def _of(layer: Any) -> bool:
    """Whether a layer's class is Keras's own, so that what it computes is known."""
    return type(layer).__module__.split(".")[0] in ("keras", "tf_keras")


def _drawing(layer: Any, names: set[str]) -> Callable | None:
    """The function (x, key) -> output of a layer that draws random numbers; None for one that does not.

    Raises:
        InvalidArgument: the layer draws, but in another way than those of `_DRAWS`.
    """
    if not names & _NOISE:
        return None
    config = layer.get_config()
    amount = max(float(config.get(name) or 0) for name in _AMOUNTS)
    of_images = any(name.startswith(_IMAGES) for name in names)
    if amount <= 0 and not of_images:
        return None
    kind = type(layer).__name__
    if kind in _DRAWS and _of(layer):
        return partial(_DRAWS[kind], amount, layer)
    if of_images:
        instead = "Change the images when the federation is made, or leave the layer out"
    elif "cell" in layer.name or names & {"DropoutRNNCell", "DropoutRNNCellMixin"}:
        instead = "Set dropout and recurrent_dropout to 0, and put a Dropout layer before or after"
    else:
        instead = "Set its rate to 0, or use Dropout, SpatialDropout, GaussianNoise, GaussianDropout or AlphaDropout"
    raise InvalidArgument(
        f"layer {layer.name!r} ({kind}) draws random numbers in a way of its own. In a backbone, random numbers must "
        f"be functions of the client's key, so that every engine and a resumed run draw the same. {instead}"
    )


def _identity(x: Any, *_: Any, **__: Any) -> Any:
    return x


class _Masked:
    """The call of one random layer in one pass. A layer that is used twice draws twice."""

    def __init__(self, draw: Callable, key: Callable, number: int) -> None:
        self._draw, self._key, self._number, self._calls = draw, key, number, 0

    def __call__(self, x: Any, *_: Any, **__: Any) -> Any:
        key = fold(fold(self._key(), self._number), self._calls)
        self._calls += 1
        return self._draw(x, key)


def _uniform(shape: Any, key: Any, dtype: Any) -> Any:
    """Uniform in [0, 1): float32 numbers, so that a mask is the same in every dtype."""
    return tf.cast(tf.random.stateless_uniform(shape, key, dtype=tf.float32, alg="philox"), dtype)


def _normal(shape: Any, key: Any, dtype: Any) -> Any:
    return tf.cast(tf.random.stateless_normal(shape, key, dtype=tf.float32, alg="philox"), dtype)


def _noise_shape(layer: Any, x: Any) -> Any:
    """The shape of a mask: 1 where all numbers along an axis share it."""
    shape, rank = tf.shape(x), x.shape.rank
    if type(layer).__name__.startswith("Spatial"):
        channels = rank - 1 if getattr(layer, "data_format", "channels_last") != "channels_first" else 1
        sizes = [i in (0, channels) for i in range(rank)]
        return [shape[i] if its_own else 1 for i, its_own in enumerate(sizes)]
    wanted = getattr(layer, "noise_shape", None)
    if wanted is None:
        return shape
    return [shape[i] if size is None else size for i, size in enumerate(wanted)]


def _dropout(rate: float, layer: Any, x: Any, key: Any) -> Any:
    kept = _uniform(_noise_shape(layer, x), key, tf.float32) >= rate
    return x * tf.cast(kept, x.dtype) * np.asarray(1 / (1 - rate) if rate < 1 else 0, x.dtype.as_numpy_dtype)


def _alpha_dropout(rate: float, layer: Any, x: Any, key: Any) -> Any:
    if rate >= 1:
        return tf.zeros_like(x)
    kept = tf.cast(_uniform(_noise_shape(layer, x), key, tf.float32) >= rate, x.dtype)
    scale = ((1 - rate) * (1 + rate * _SELU**2)) ** -0.5
    a, b, dropped = (np.asarray(v, x.dtype.as_numpy_dtype) for v in (scale, -scale * _SELU * rate, _SELU))
    return a * (x * kept + dropped * (1 - kept)) + b


def _gaussian_dropout(rate: float, layer: Any, x: Any, key: Any) -> Any:
    spread = np.asarray(np.sqrt(rate / (1 - rate)), x.dtype.as_numpy_dtype)
    return x * (1 + spread * _normal(tf.shape(x), key, x.dtype))


def _gaussian_noise(stddev: float, layer: Any, x: Any, key: Any) -> Any:
    return x + np.asarray(stddev, x.dtype.as_numpy_dtype) * _normal(tf.shape(x), key, x.dtype)


_DRAWS: dict[str, Callable] = {
    **{name: _dropout for name in ("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D")},
    "AlphaDropout": _alpha_dropout,
    "GaussianDropout": _gaussian_dropout,
    "GaussianNoise": _gaussian_noise,
}


def _normalized(layer: Any, places: tuple[int, ...], now: Pass, x: Any, *_: Any, mask: Any = None, **__: Any) -> Any:
    """A BatchNormalization in training: the statistics of the batch normalize, and the moving ones follow them.

    The variance divides by the number of values n, as in Keras 3. (Keras 2 moves its moving variance with a divisor of
    n - 1 where it uses a fused kernel, for images in float32.)
    """
    if mask is not None:
        error: Any = InvalidArgument(
            f"layer {layer.name!r}: batch statistics of padded sequences are not supported. Use batch_norm='frozen', "
            "or LayerNormalization"
        )
        error._keras_call_info_injected = True  # so that Keras adds no pages about the call
        raise error
    axis = layer.axis if isinstance(layer.axis, int) else list(layer.axis)[0]
    axis %= x.shape.rank
    along = [i for i in range(x.shape.rank) if i != axis]
    shape = [x.shape[axis] if i == axis else 1 for i in range(x.shape.rank)]
    given, x = x.dtype, x if x.dtype.size > 2 else tf.cast(x, tf.float32)  # as Keras does in mixed precision
    mean, variance = tf.nn.moments(x, along, keepdims=True)
    assert now.statistics is not None
    uses = now.moves(places)  # of this layer before, in this pass
    rate = np.asarray(uses / (uses + 1) if now.forget else layer.momentum, x.dtype.as_numpy_dtype)
    before = [now.statistics[place] for place in places]
    moved = [
        tf.cast(rate, old.dtype) * old + tf.cast((1 - rate) * tf.reshape(new, [-1]), old.dtype)
        for old, new in zip(before, (mean, variance), strict=True)
    ]
    now.move(places, tuple(moved))
    parameters = (None if v is None else tf.cast(_value(v), x.dtype) for v in (layer.gamma, layer.beta))
    scale, offset = (None if v is None else tf.reshape(v, shape) for v in parameters)
    return tf.cast(tf.nn.batch_normalization(x, mean, variance, offset, scale, layer.epsilon), given)


def _value(variable: Any) -> Any:
    """The tensor that stands for a layer's weight during a call."""
    return variable if tf.is_tensor(variable) else tf.convert_to_tensor(variable.value)
