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
        InvalidArgument: the features have half precision, and so has a weight: its small steps would be lost.
    """
    if output.dtype not in HALF:
        return np.dtype(output.dtype.as_numpy_dtype)
    half = [w for w in backbone.weights if tf.as_dtype(w.dtype) in HALF]
    if half:
        raise InvalidArgument(
            f"the backbone {backbone.name!r} computes in {output.dtype.name}, and {len(half)} of its weights have this "
            f"dtype, the first is {half[0].name}: the small steps of training would be lost. Build it with the policy "
            f"'mixed_{output.dtype.name}' of keras.mixed_precision, which keeps weights in float32, or in float32"
        )
    return np.dtype(np.float32)


def cast_output(apply: Callable, dtype: np.dtype) -> Callable:
    """The function `apply(weights, x)` with its result in `dtype`."""
    return lambda theta, x: tf.cast(apply(theta, x), dtype)
