"""The trunk of a backbone: the frozen layers below a cut, with what is needed to run and to recognize them."""

import hashlib
import json
import sys
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument, one_line
from tfpfl.data.arrays import add_arrays
from tfpfl.data.population import Tensor
from tfpfl.models.functional import inference
from tfpfl.models.inputs import Inputs
from tfpfl.models.layers import flatten
from tfpfl.models.modules_beside import hash_of, modules_beside, with_beside
from tfpfl.models.reading import trace, vocabulary

# What says nothing of the numbers that a layer gives: whether it trains, and how its weights began.
_NO_MATTER = {"trainable", "shared_object_id", "build_config", "compile_config", "registered_name"}
_LINKS = ("inbound_nodes", "input_layers", "output_layers")
_KERAS = ("keras", "tensorflow", "tf_keras", "builtins")


class Trunk:
    """The frozen layers below a cut, as a function of examples. They run as for inference.

    BatchNormalization then uses its stored statistics, and Dropout does nothing. The weights are those of the moment
    when the trunk was made.

    Args:
        model: the layers, a functional Keras model; see `tfpfl.models.cuts.cut`.
        input_shape: the shape of one example; None: what the model says.
        dtype: the dtype of the examples and of the features.

    Attributes:
        reads, vocabulary: what it takes, as in `SplitModel`.
        shape: the shape of the features of one example.
    """

    def __init__(self, model: keras.Model, input_shape: tuple | None, dtype: np.dtype):
        self.model, self.inputs, self.dtype = model, Inputs(model, input_shape), np.dtype(dtype)
        self.input_shape = tuple(self.inputs.shape)
        self.weights, self._apply = inference(model)
        self.reads, self.activation_bytes = "numbers", 0
        traced = trace(self.apply, self.weights, self.inputs, self.dtype, model.weights)
        (self.reads,), self.activation_bytes = traced.reads, traced.activation_bytes
        (self.vocabulary,) = vocabulary(flatten(model), traced)
        self.shape = tuple(int(n) for n in self(np.zeros((1, *self.input_shape), self.dtype)).shape[1:])

    def __call__(self, x: Tensor) -> Tensor:
        """The features of examples x [N, ...]: [N, *shape], without a gradient."""
        return tf.stop_gradient(self.apply(self.weights, x))

    def apply(self, weights: tuple, x: Tensor) -> Tensor:
        """The same, with the weights as tensors: a graph then does not hold a copy of them."""
        x = tf.cast(x, tf.int32 if self.reads == "whole" else self.dtype)
        return tf.cast(self._apply(weights, x), self.dtype)

    @cached_property
    def hash(self) -> str:
        """A sha256 of the weights, the architecture, the dtype and the code of layers that are not Keras's own.

        To the code belong the modules beside a layer's file that it imports; or, of a class without a file, attributes
        that are numbers or texts, or lists or dicts of these. What it reads from elsewhere is not in the hash.

        It does not depend on the names of the layers, which Keras numbers in the order in which they are made.
        """
        layers = flatten(self.model)
        names = {name: f"layer {i}" for i, name in enumerate(dict.fromkeys(layer.name for layer in layers))}
        try:
            architecture = _renamed(json.loads(self.model.to_json()), names)
        except (NotImplementedError, TypeError, ValueError) as error:  # as layers without get_config raise
            raise InvalidArgument(
                f"the trunk's layers cannot be written down, so that its features could not be told from others: "
                f"{one_line(error, 300)}. Give every layer of your own a get_config"
            ) from error
        digest = hashlib.sha256(json.dumps([architecture, str(self.dtype)], sort_keys=True).encode())
        add_arrays(digest, self.weights)
        for code in sorted({code for kind in {type(layer) for layer in layers} for code in _own_code(kind)}):
            digest.update(code)
        return digest.hexdigest()


def _renamed(value: Any, names: dict[str, str], named: bool = False, linked: bool = False) -> Any:
    """The configuration of a model without what does not matter, and with `names` for the names of its layers.

    Other words that are equal to a name, such as that of an activation, stay.

    Args:
        value: a part of the configuration.
        names: new names, by the old ones.
        named: whether this part is what describes a layer, whose entry 'name' is the name.
        linked: whether it is in a list of tensors, each of which is [name of its layer, number, number, ...].
    """
    if isinstance(value, dict):
        named = named or "class_name" in value
        return {
            k: names.get(v, v)
            if k == "name" and named and isinstance(v, str)
            else _renamed(v, names, k == "config" and "class_name" in value, linked or k in _LINKS)
            for k, v in value.items()
            if k not in _NO_MATTER and "initializer" not in k
        }
    if isinstance(value, list):
        if linked and len(value) > 2 and isinstance(value[0], str) and all(type(n) is int for n in value[1:3]):
            value = [names.get(value[0], value[0]), *value[1:]]
        return [_renamed(v, names, linked=linked) for v in value]
    return value


def _own_code(kind: type) -> list[bytes]:
    """The code of a layer's class and its bases, as far as it is not of Keras: hashes of what they are made of."""
    found = []
    for cls in kind.__mro__:
        if cls.__module__.split(".")[0] in _KERAS:
            continue
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if file and Path(file).is_file():
            content = Path(file).read_bytes()
            beside = hash_of(modules_beside(content, Path(file).parent))
            found.append(bytes.fromhex(with_beside(hashlib.sha256(content).hexdigest(), beside)))
        for name, value in sorted(vars(cls).items()):
            function = getattr(value, "__func__", getattr(value, "fget", value))
            code = getattr(function, "__code__", None)
            plain = None if file else _as_plain(value)  # with a file, what it says is in the hash already
            text = plain if code is None else _of_code(code)
            if text is not None and not (code is None and name.startswith("__")):  # such as __module__ and __doc__
                found.append(hashlib.sha256(f"{cls.__qualname__}.{name} {text}".encode()).digest())
    return found


def _as_plain(value: Any) -> str | None:
    """A class attribute as a text; None if it has none that is the same in every process."""
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None


def _of_code(code: CodeType) -> str:
    """What a function does, without where it stands: its bytecode, names and constants."""

    def text(constant: Any) -> str:
        if isinstance(constant, CodeType):
            return _of_code(constant)
        return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)

    return f"{code.co_code.hex()} {code.co_names} {[*map(text, code.co_consts)]}"
