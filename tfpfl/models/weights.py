"""The weights of a model that is split into a backbone and a head: `Weights` and `Head`."""

from typing import NamedTuple

from tfpfl.data.population import Tensor


class Head(NamedTuple):
    """The last layer of the model: logits = phi @ kernel + bias. PFLEGO writes W_i for the pair."""

    kernel: Tensor  # [M, K_i]
    bias: Tensor  # [K_i]


class Weights(NamedTuple):
    """The weights of a whole model: the backbone theta and the head W_i. PFLEGO writes psi_i for the pair."""

    theta: tuple  # the backbone's weights, in the order of the Keras model's trainable weights
    head: Head
