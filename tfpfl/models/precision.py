"""Mixed precision: a backbone that computes in float16 or bfloat16, with weights and features in float32."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument

HALF = (tf.float16, tf.bfloat16)


def dtype_of(backbone: keras.Model, output: Any) -> np.dtype:
    """The dtype in which tfpfl computes with a backbone: that of its features; of half precision, float32.

    Args:
        backbone: a built Keras model.
        output: features that it has computed.

    Raises:
        InvalidArgument: the features are no floating-point numbers; or weights that train have another dtype. Of half
            precision, their small steps would be lost; of another one, a sum over all weights would be of two dtypes.
    """
    dtype = tf.float32 if output.dtype in HALF else output.dtype
    if not dtype.is_floating:
        raise InvalidArgument(
            f"the features of the backbone {backbone.name!r} are {dtype.name}, and a head computes with floating-point "
            "numbers: end it in a layer that gives float32, such as keras.layers.Rescaling(1 / 255) for pixels"
        )
    other = [w for w in backbone.trainable_weights if tf.as_dtype(w.dtype) != dtype]
    if other:
        found = tf.as_dtype(other[0].dtype)
        why = f"its features are {output.dtype.name}: build all of its layers with one dtype, float32 or float64"
        if found in HALF:
            why = (
                f"the small steps of training would be lost. Build it with the policy 'mixed_{found.name}' of "
                "keras.mixed_precision, which keeps weights in float32, or in float32"
            )
        raise InvalidArgument(
            f"{len(other)} of the weights of the backbone {backbone.name!r} that train are {found.name}, the first is "
            f"{other[0].name}, and {why}"
        )
    return np.dtype(dtype.as_numpy_dtype)


def cast_output(apply: Callable, dtype: np.dtype) -> Callable:
    """The function `apply(weights, x)` with its result in `dtype`."""
    return lambda theta, x: tf.cast(apply(theta, x), dtype)
