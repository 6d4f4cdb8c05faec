"""First-order optimizers as pure functions of tensors, for steps of the server and of a head.

Optimizers of Keras own variables, and optimizers of TFF need TFF. These need only TensorFlow.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfpfl.checks import InvalidArgument
from tfpfl.models import tree


class Optimizer(NamedTuple):
    """An optimizer as two functions: `init(weights) -> slots`, `step(slots, weights, gradient) -> (slots, weights)`.

    The slots are the optimizer's state.
    """

    init: Callable
    step: Callable


class AdamSlots(NamedTuple):
    """The state of Adam between two steps."""

    step: tf.Tensor  # int32 []: steps done
    first: tuple  # moving mean of the gradient
    second: tuple  # moving mean of its square


def sgd(rate: float, momentum: float = 0.0) -> Optimizer:
    """SGD with momentum: v <- momentum v + g; w <- w - rate v, with v = 0 at first."""
    if not momentum:
        return Optimizer(lambda weights: (), lambda slots, weights, g: ((), tree.add_scaled(weights, -rate, g)))

    def step(velocity, weights, gradient):
        velocity = tree.add_scaled(gradient, momentum, velocity)
        return velocity, tree.add_scaled(weights, -rate, velocity)

    return Optimizer(tree.zeros_like, step)


def adam(rate: float, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8) -> Optimizer:
    """Adam with both bias corrections (Kingma and Ba, 2015, algorithm 1)."""

    def init(weights):
        return AdamSlots(tf.constant(0), tree.zeros_like(weights), tree.zeros_like(weights))

    def step(slots, weights, gradient):
        t = slots.step + 1
        first = tree.add_scaled(tree.scale(beta_1, slots.first), 1 - beta_1, gradient)
        second = tree.add_scaled(
            tree.scale(beta_2, slots.second), 1 - beta_2, tf.nest.map_structure(tf.square, gradient)
        )

        def move(w, m, v):
            power = tf.cast(t, w.dtype)
            m_hat = m / (1 - tree.as_dtype(beta_1, w.dtype) ** power)
            v_hat = v / (1 - tree.as_dtype(beta_2, w.dtype) ** power)
            return w - rate * m_hat / (tf.sqrt(v_hat) + epsilon)

        return AdamSlots(t, first, second), tf.nest.map_structure(move, weights, first, second)

    return Optimizer(init, step)


OPTIMIZERS = {"sgd": sgd, "momentum": lambda rate: sgd(rate, momentum=0.9), "adam": adam}


def optimizer(name: str, rate: float) -> Optimizer:
    """An `Optimizer` by its name in `OPTIMIZERS`: 'sgd', 'momentum' (SGD with momentum 0.9) or 'adam'.

    Raises:
        InvalidArgument: the name is unknown, or the rate is negative.
    """
    if name not in OPTIMIZERS:
        raise InvalidArgument(f"unknown optimizer {name!r}: one of {', '.join(OPTIMIZERS)}")
    if rate < 0:
        raise InvalidArgument(f"a learning rate must not be negative, found {rate}")
    return OPTIMIZERS[name](rate)
