"""The loss of a whole model and of a head: mean softmax cross-entropy."""

import tensorflow as tf

from tfpfl.models.weights import Head, Weights


def cross_entropy(logits, y):
    """Mean softmax cross-entropy over the examples: float [].

    Args:
        logits: float [N, K].
        y: int [N], class ids in [0, K).
    """
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def logits(head: Head, phi):
    """The logits phi @ kernel + bias of a head: float [N, K], from the features phi [N, M]."""
    return tf.matmul(phi, head.kernel) + head.bias


def client_loss(model):
    """The loss l_i of a client (PFLEGO, eq. 2): (weights, x, y) -> mean cross-entropy of the model, float []."""

    def objective(weights: Weights, x, y):
        return cross_entropy(model.logits(weights, x), y)

    return objective
