"""The loss of a whole model and of a head: mean softmax cross-entropy."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import tensorflow as tf

from tfpfl.data.population import Tensor
from tfpfl.models.weights import Head, Weights

if TYPE_CHECKING:
    from tfpfl.models.split import SplitModel


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean softmax cross-entropy over the examples: float [].

    Args:
        logits: float [N, K].
        y: int [N], class ids in [0, K).
    """
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def logits(head: Head, phi: Tensor) -> Tensor:
    """The logits phi @ kernel + bias of a head: float [N, K], from the features phi [N, M]."""
    return tf.matmul(phi, head.kernel) + head.bias


def client_loss(model: "SplitModel") -> Callable[[Weights, Tensor, Tensor], Tensor]:
    """The loss l_i of a client (PFLEGO, eq. 2): (weights, x, y) -> mean cross-entropy of the model, float []."""

    def objective(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model.logits(weights, x), y)

    return objective
