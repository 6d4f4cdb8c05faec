"""Gradients of a backbone's operations, made of operations that the runtime of a phone has.

TensorFlow's own gradients use operations such as ReluGrad, MaxPoolGrad and Conv2DBackpropFilter, which TensorFlow Lite
does not have. Here are the same gradients in terms of slices, comparisons, matrix products and forward convolutions.
`tf.gradients` takes them where the forward pass was built within `builtin_gradients()`; the Keras model stays as it is.
`features` is a forward pass in which operations that the converter does not take are put in other words.

At most one axis is open, that of the examples.
"""

from tflite_export.convert.gradients.common import UnsupportedLayerError
from tflite_export.convert.gradients.forward import features, fixed, fixed_features
from tflite_export.convert.gradients.table import GRADIENTS, PLAIN, STOPS, builtin_gradients

__all__ = [
    "GRADIENTS",
    "PLAIN",
    "STOPS",
    "UnsupportedLayerError",
    "builtin_gradients",
    "features",
    "fixed",
    "fixed_features",
]
