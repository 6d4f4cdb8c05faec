"""The bytes that clients send when their updates are quantized."""

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm

QUANTIZED_ABOVE = 1000  # so many numbers of a tensor, it is sent in 8 bits each


def compressed(algorithm: Algorithm, *, bits: int = 8, threshold: int = QUANTIZED_ABOVE) -> Algorithm:
    """The algorithm whose clients report the bytes that are left to send: `bits` a number, and two floats a tensor."""

    def size(x):
        small, large = x.dtype.size * tf.size(x, tf.int64), (tf.size(x, tf.int64) * bits + 7) // 8 + 8
        return tf.where(tf.size(x) > threshold, large, small)

    def client_update(message, state, data):
        output = algorithm.client_update(message, state, data)
        sizes = tf.add_n([size(x) for x in tf.nest.flatten(output.update)])
        return output._replace(metrics=output.metrics | {"bytes_up": sizes})

    return algorithm._replace(client_update=client_update, one_pass=None)
