"""Counts the bytes that clients send if their updates are quantized."""

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm
from tfpfl.algorithms.exchanges import on_both

QUANTIZED_ABOVE = 1000  # tensors with more numbers than this are sent with 8 bits per number


def compressed(algorithm: Algorithm, *, bits: int = 8, threshold: int = QUANTIZED_ABOVE) -> Algorithm:
    """The algorithm with a client metric 'bytes_up': the bytes of a quantized update. The update itself is not changed.

    A quantized tensor takes `bits` per number and 8 bytes for its range. Of a round with two exchanges, both count.

    Args:
        algorithm: any `Algorithm`.
        bits: bits per number of a quantized tensor.
        threshold: only tensors with more numbers than this are quantized.
    """

    def size(x):
        small, large = x.dtype.size * tf.size(x, tf.int64), (tf.size(x, tf.int64) * bits + 7) // 8 + 8
        return tf.where(tf.size(x) > threshold, large, small)

    if algorithm.first is not None:
        return on_both(algorithm, lambda exchange: compressed(exchange, bits=bits, threshold=threshold))

    def client_update(message, state, data):
        output = algorithm.client_update(message, state, data)
        sizes = sum((size(x) for x in tf.nest.flatten(output.update)), tf.zeros([], tf.int64))  # Local sends nothing
        return output._replace(metrics=output.metrics | {"bytes_up": sizes})

    return algorithm._replace(client_update=client_update, one_pass=None)
