"""The loss of a whole model and of a head: mean softmax cross-entropy."""

import tensorflow as tf

from tfpfl.models.weights import Head, Weights


def cross_entropy(logits, y):
    """Mean cross-entropy over examples: float []."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def logits(head: Head, phi):
    """[N, K]."""
    return tf.matmul(phi, head.kernel) + head.bias


def client_loss(model):
    """l_i as a function of (weights, x, y): the mean cross-entropy of the split model (PFLEGO, eq. 2)."""

    def objective(weights: Weights, x, y):
        return cross_entropy(model.logits(weights, x), y)

    return objective
