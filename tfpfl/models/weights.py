"""The weights of a model that is split into a backbone and a head."""

from typing import NamedTuple

from tfpfl.data.population import Tensor


class Head(NamedTuple):
    """The last, linear layer: logits = phi @ kernel + bias. PFLEGO's W_i is this pair."""

    kernel: Tensor  # [M, K_i]
    bias: Tensor  # [K_i]


class Weights(NamedTuple):
    """A whole model, split: psi_i = (theta, W_i)."""

    theta: tuple  # the backbone's weights, in the order of the Keras model's trainable weights
    head: Head
