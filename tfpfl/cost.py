"""What a visit costs a client: passes through the backbone, counted while it runs, and not by reading the code."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.algorithm import Algorithm, ClientData


class Passes(NamedTuple):
    """Passes of a client's training set through the backbone in one visit; a mini-batch of N_i / 10 is a tenth."""

    forward: float
    backward: float


class Counter:
    """Counts the examples that go forward through a model's backbone, and those whose gradient comes back."""

    def __init__(self, model):
        self.forward = self.backward = 0
        self.model = copy.copy(model)
        apply = model._apply

        def counted_apply(weights, x):
            return self._counted(apply(weights, x))

        self.model._apply = counted_apply

    def _counted(self, phi):
        @tf.custom_gradient
        def identity(phi):
            with tf.control_dependencies([tf.numpy_function(self._add_forward, [tf.shape(phi)[0]], tf.int32)]):
                out = tf.identity(phi)

            def gradient(dphi):
                with tf.control_dependencies([tf.numpy_function(self._add_backward, [tf.shape(phi)[0]], tf.int32)]):
                    return tf.identity(dphi)

            return out, gradient

        return identity(phi)

    def _add_forward(self, examples):
        self.forward += int(examples)
        return np.int32(0)

    def _add_backward(self, examples):
        self.backward += int(examples)
        return np.int32(0)


def count_passes(build: Callable[..., Algorithm], model, data: ClientData) -> Passes:
    """Runs one first visit of a client and counts.

    Args:
        build: model -> Algorithm.
        model: the SplitModel.
        data: the client's examples.
    """
    counter = Counter(model)
    algorithm = build(counter.model)
    server = algorithm.init_server()
    per_client = algorithm.message_per_client
    message = algorithm.message(server, data.info.client_id) if per_client else algorithm.message(server)
    state = algorithm.init_client(data.info)
    tf.function(algorithm.client_update, autograph=False)(message, state, data)
    examples = int(data.info.num_examples)
    return Passes(counter.forward / examples, counter.backward / examples)
