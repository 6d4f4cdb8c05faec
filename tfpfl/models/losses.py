"""The loss of a whole model and of a head: that of its kind, the mean softmax cross-entropy for classes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfpfl.data.population import Tensor
from tfpfl.models.heads import CLASSIFICATION
from tfpfl.models.weights import Head, Weights

if TYPE_CHECKING:
    from tfpfl.models.split import SplitModel


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean softmax cross-entropy over the examples: float [].

    Args:
        logits: float [N, K].
        y: int [N], class ids in [0, K).
    """
    return CLASSIFICATION.loss(logits, y)


def logits(head: Head, phi: Tensor) -> Tensor:
    """The logits phi @ kernel + bias of a head: float [N, K], from the features phi [N, M]."""
    return tf.matmul(phi, head.kernel) + head.bias


class MeanLoss:
    """A mean over examples, as a function (weights, x, y) -> float [].

    Args:
        function: the function.
        block: how many examples its gradient is best computed for at a time, `SplitModel.block`; None: all at once.
    """

    def __init__(self, function: Callable[[Any, Tensor, Tensor], Tensor], block: int | None) -> None:
        self._function, self.block = function, block

    def __call__(self, weights: Any, x: Tensor, y: Tensor) -> Tensor:
        """The mean over the examples x, y at these weights."""
        return self._function(weights, x, y)


def client_loss(model: "SplitModel") -> MeanLoss:
    """The loss l_i of a client (PFLEGO, eq. 2): (weights, x, y) -> mean loss of the model's kind, float []."""

    def objective(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        return model.kind.loss(model.logits(weights, x), y)

    return MeanLoss(objective, model.block)
