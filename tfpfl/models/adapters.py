"""Adapters: few weights that change the layers of a backbone, whose own weights are frozen.

    lora:R          kernel + A B                   A [in, R], B [R, out]; B = 0 at the start
    lora:R:ALPHA    kernel + (ALPHA / R) A B
    scale_shift     y (1 + s) + b                  y: the layer's output before its activation; s = b = 0 at the start
    bottleneck:R    y + up(relu(down(y)))          y: the layer's output; down [out, R]; up [R, out], 0 at the start

They are added to every trainable Dense layer and 1x1 convolution. At the start the model gives what the backbone gives.
LoRA and scale_shift change the weights before the layer is called, which is exact and costs nothing per example. What
comes after the product with the kernel is added by the layer's activation, which is replaced during a call.

Sources: Hu et al., LoRA (ICLR 2022); Guo et al., FedSA-LoRA (ICLR 2025), where A is shared and B stays with the client;
Lian et al., SSF (NeurIPS 2022); Houlsby et al. (ICML 2019).
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument, check_type
from tfpfl.data.population import Tensor
from tfpfl.data.randomness import ModelKey
from tfpfl.models.layers import flatten

KINDS = ("lora", "scale_shift", "bottleneck")
PARTS = {  # the parts of an adapter, in the order of its weights
    "lora": ("A", "B"),
    "scale_shift": ("scale", "shift"),
    "bottleneck": ("down", "down_bias", "up", "up_bias"),
}
PERSONAL = {"lora": ("A", "B"), "scale_shift": ("scale", "shift"), "bottleneck": ("down", "up")}
_SWAP = threading.RLock()


class Spec(NamedTuple):
    """What adapters are added: parsed from a text such as 'lora:4'."""

    kind: str
    rank: int = 0
    alpha: float = 0.0


class Place(NamedTuple):
    """A layer that has an adapter."""

    layer: Any
    kernel: int  # the position of its kernel among the trainable weights
    bias: int | None  # and of its bias, if it has one


def parse(text: str) -> Spec:
    """The `Spec` of a text: 'lora:R', 'lora:R:ALPHA', 'scale_shift' or 'bottleneck:R'.

    Raises:
        InvalidArgument: it is another text.
    """
    match = re.fullmatch(r"(lora|bottleneck):([1-9]\d{0,5})(?::(\d+(?:\.\d+)?))?", text)
    if text == "scale_shift":
        return Spec(text)
    if match and (match[1] == "lora" or match[3] is None):
        rank, alpha = int(match[2]), float(match[3] or match[2])
        if alpha > 0:
            return Spec(match[1], rank, alpha)
    raise InvalidArgument(
        f"adapters must be written lora:R, lora:R:ALPHA, scale_shift or bottleneck:R, with a rank R from 1 on, such as "
        f"lora:4; found {text!r}"
    )


def check_adapters(adapters: str | None, personal: str | None) -> None:
    """Checks the arguments `adapters` and `personal` of a `SplitModel` as far as that is possible without the backbone.

    Raises:
        InvalidArgument: the adapters are unknown; `personal` is no part of them, or there are none.
    """
    if adapters is not None:
        check_type("adapters", adapters, str, "a text, such as 'lora:4'")
    spec = None if adapters is None else parse(adapters)
    if personal is not None and spec is None:
        raise InvalidArgument(
            f"personal={personal!r} names a part of adapters, but there are no adapters: give adapters='lora:4' or "
            "another kind, or leave personal out"
        )
    if personal is not None and spec is not None and personal not in PERSONAL[spec.kind]:
        raise InvalidArgument(
            f"personal={personal!r}: the parts of {spec.kind} adapters are {', '.join(PERSONAL[spec.kind])}, and one "
            "of them can stay with the client. If all should stay, use the method local, or lg_fedavg, which shares "
            "the head only"
        )


class Adapters:
    """The adapters of a backbone.

    Args:
        text: which ones, such as 'lora:4'.
        backbone: a built Keras model.
        weights: its trainable weights, which are frozen from now on.
        apply: function (weights, x) -> features of the backbone.
        seed: the seed of the initial A and down, which are functions of (seed, position of the layer).

    Attributes:
        names: a name for each weight, such as 'dense/A'.
        initial: the initial weights, a tuple of arrays.

    Raises:
        InvalidArgument: the text is none of those; or the backbone has no layer that takes them.
    """

    def __init__(self, text: str, backbone: keras.Model, weights: tuple, apply: Callable, seed: int) -> None:
        self.spec, self._weights, self._inner = parse(text), weights, apply
        self.places = _places(backbone)
        if not self.places:
            raise InvalidArgument(
                f"adapters={text!r}: the backbone has no trainable Dense layer or 1x1 convolution that could have one. "
                "Take a backbone with such layers, or unfreeze them (trainable=True)"
            )
        found = [self._begin(i, place, seed) for i, place in enumerate(self.places)]
        self.initial = tuple(array for of_layer in found for array in of_layer.values())
        self.names = tuple(
            f"{p.layer.name}/{part}" for p, of_layer in zip(self.places, found, strict=True) for part in of_layer
        )

    def _begin(self, number: int, place: Place, seed: int) -> dict[str, np.ndarray]:
        kind, rank, _ = self.spec
        kernel = self._weights[place.kernel]
        rows, columns = kernel.shape[-2:]
        dtype = kernel.dtype

        def drawn(rows: int, columns: int) -> np.ndarray:
            limit = 1 / np.sqrt(rows)  # uniform, as PyTorch's Linear and PEFT begin A
            key = tf.random.experimental.stateless_fold_in(tf.constant([seed, ModelKey.ADAPTER], tf.int32), number)
            return tf.random.stateless_uniform([rows, columns], key, -limit, limit, dtype, alg="philox").numpy()

        if kind == "lora":
            return {"A": drawn(rows, rank), "B": np.zeros([rank, columns], dtype)}
        if kind == "scale_shift":
            return {"scale": np.zeros(columns, dtype), "shift": np.zeros(columns, dtype)}
        down = {"down": drawn(columns, rank), "down_bias": np.zeros(rank, dtype)}
        return down | {"up": np.zeros([rank, columns], dtype), "up_bias": np.zeros(columns, dtype)}

    def __call__(self, theta: tuple, x: Tensor) -> Tensor:
        """The features of examples x with the adapters' weights theta."""
        weights, activations = self._changed(theta)
        if not activations:
            return self._inner(weights, x)
        with _with_activations(activations):
            return self._inner(weights, x)

    def merged(self, theta: tuple) -> tuple:
        """The weights of a backbone without adapters that gives the same features, in the order of its own weights.

        Raises:
            InvalidArgument: there is none: the adapters are bottlenecks, or a layer that is shifted has no bias.
        """
        weights, activations = self._changed(theta)
        if activations:
            names = ", ".join(repr(layer.name) for layer, _ in activations[:3])
            raise InvalidArgument(
                f"{self.spec.kind} adapters of layers {names}{', ...' if len(activations) > 3 else ''} cannot be "
                "written into the backbone's own weights; LoRA can"
            )
        return weights

    def personal(self, part: str | None) -> tuple[bool, ...]:
        """For each weight whether it belongs to the part of this name, such as 'B' of LoRA; None: no weight does."""
        return tuple(name.rpartition("/")[2].removesuffix("_bias") == part for name in self.names)

    def _changed(self, theta: tuple) -> tuple[tuple, list[tuple[Any, Callable]]]:
        """The backbone's weights under theta, and for some layers what is done before or after the activation."""
        kind, rank, alpha = self.spec
        weights, activations = [tf.convert_to_tensor(w) for w in self._weights], []
        parts = len(PARTS[kind])
        for i, place in enumerate(self.places):
            own = theta[parts * i : parts * (i + 1)]
            kernel = weights[place.kernel]
            if kind == "lora":
                change = tf.matmul(own[0], own[1]) * np.asarray(alpha / rank, kernel.dtype.as_numpy_dtype)
                weights[place.kernel] = kernel + tf.reshape(change, tf.shape(kernel))
            elif kind == "scale_shift":
                weights[place.kernel] = kernel * (1 + own[0])
                if place.bias is not None:
                    weights[place.bias] = weights[place.bias] * (1 + own[0]) + own[1]
                else:
                    activations.append((place.layer, _shifted(place.layer.activation, own[1])))
            else:
                activations.append((place.layer, _narrowed(place.layer.activation, *own)))
        return tuple(weights), activations


def _places(backbone: keras.Model) -> list[Place]:
    """The layers that take adapters: Keras's own Dense and 1x1 convolutions with a trainable kernel, in order."""
    position = {id(v): i for i, v in enumerate(backbone.trainable_weights)}
    kinds = (keras.layers.Dense, keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
    found = []
    for layer in dict.fromkeys(flatten(backbone)):
        if type(layer) not in kinds or id(layer.kernel) not in position:
            continue
        pointwise = all(n == 1 for n in getattr(layer, "kernel_size", ())) and getattr(layer, "groups", 1) == 1
        if pointwise and getattr(layer, "data_format", "channels_last") == "channels_last":
            bias = layer.bias if layer.use_bias else None
            found.append(Place(layer, position[id(layer.kernel)], None if bias is None else position[id(bias)]))
    return found


def _shifted(activation: Callable, shift: Tensor) -> Callable:
    return lambda y: activation(y + tf.cast(shift, y.dtype))


def _narrowed(activation: Callable, down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor) -> Callable:
    def changed(y: Tensor) -> Tensor:
        y = activation(y)
        first, offset, second, shift = (tf.cast(w, y.dtype) for w in (down, down_bias, up, up_bias))
        inner = tf.nn.relu(tf.tensordot(y, first, 1) + offset)
        return y + tf.ensure_shape(tf.tensordot(inner, second, 1) + shift, y.shape)

    return changed


@contextmanager
def _with_activations(activations: list[tuple[Any, Callable]]) -> Iterator[None]:
    """Lets layers use these activations. One thread at a time: the layers are the same for all."""
    with _SWAP:
        saved = [(layer, layer.__dict__["activation"]) for layer, _ in activations]
        try:
            for layer, activation in activations:
                layer.__dict__["activation"] = activation
            yield
        finally:
            for layer, activation in saved:
                layer.__dict__["activation"] = activation
