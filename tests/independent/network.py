"""A network with one hidden layer of ReLU units and a linear head; its loss and its gradients, by hand.

    phi = relu(x W + b)          theta = (W [D, M], b [M])
    z = phi V + c                head  = (V [M, K], c [K])
    loss = mean over examples of (log sum_k exp z_k - z_y)

A model is (theta, head). All gradients are of the mean over the examples, with all examples in one batch.
"""

from typing import Any, NamedTuple

import numpy as np


class Round(NamedTuple):
    """What there is after a round."""

    server: Any  # what the server holds
    models: dict  # {client: what it predicts with}, of all clients, also of those that were absent


def features(theta, x):
    return np.maximum(x @ theta[0] + theta[1], 0)


def logits(head, phi):
    return phi @ head[0] + head[1]


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def one_hot(y, num):
    return np.eye(num)[y]


def cross_entropy(z, y):
    """(the mean loss, its gradient with respect to the logits)."""
    p, rows = softmax(z), np.arange(len(y))
    shifted = z - z.max(1, keepdims=True)
    loss = np.mean(np.log(np.exp(shifted).sum(1)) - shifted[rows, y])
    return loss, (p - one_hot(y, z.shape[1])) / len(y)


def head_gradient(head, phi, dz):
    """(gradient of the head, gradient of the features) from that of the logits."""
    return (phi.T @ dz, dz.sum(0)), dz @ head[0].T


def backbone_gradient(theta, x, dphi):
    """The gradient of theta from that of the features."""
    d = dphi * (x @ theta[0] + theta[1] > 0)
    return x.T @ d, d.sum(0)


def gradient(model, x, y):
    """(loss, gradient of the model)."""
    theta, head = model
    phi = features(theta, x)
    loss, dz = cross_entropy(logits(head, phi), y)
    dhead, dphi = head_gradient(head, phi, dz)
    return loss, (backbone_gradient(theta, x, dphi), dhead)


def combine(*terms):
    """sum of factor * weights over the terms (factor, weights); weights are an array or a nested tuple of arrays."""
    first = terms[0][1]
    if isinstance(first, tuple):
        return tuple(combine(*[(f, w[i]) for f, w in terms]) for i in range(len(first)))
    return sum(f * w for f, w in terms)


def step(weights, rate, slope):
    """A step of gradient descent."""
    return combine((1.0, weights), (-rate, slope))


def descend(model, x, y, eta, steps):
    """`steps` steps of gradient descent on the whole model."""
    for _ in range(steps):
        model = step(model, eta, gradient(model, x, y)[1])
    return model


def shares(clients, cohort, weighting="examples"):
    """The weights of a cohort's clients in an average: N_i / sum of N_j, or 1 / r."""
    counts = [len(clients[i][1]) if weighting == "examples" else 1 for i in cohort]
    return [n / sum(counts) for n in counts]


def average(weights, models):
    return combine(*zip(weights, models, strict=True))


def class_means(phi, y, num):
    """(means [K, M] with rows of 0 for absent classes, counts [K])."""
    counts = one_hot(y, num).sum(0)
    return one_hot(y, num).T @ phi / np.maximum(counts, 1)[:, None], counts


def layer_norm(x, gain, shift, eps=1e-5):
    """Every row less its mean, divided by the root of its variance plus eps; then gain and shift.

    Returns:
        (the result, a function of its gradient -> the gradients of (x, gain, shift)).
    """
    deviation = np.sqrt(x.var(1, keepdims=True) + eps)
    normal = (x - x.mean(1, keepdims=True)) / deviation

    def back(d):
        e = d * gain
        dx = (e - e.mean(1, keepdims=True) - normal * (e * normal).mean(1, keepdims=True)) / deviation
        return dx, (d * normal).sum(0), d.sum(0)

    return normal * gain + shift, back
