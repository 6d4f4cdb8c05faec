"""Clients whose losses are quadratic in the whole model: gradients, Hessians and optima in closed form.

l_i(v) is the mean over examples j of (c |v - m_j|^2 + <z_j, v - m_j>^2) / 2, where m_j and the unit vector z_j are
functions of x_j. So its Hessian A_i has eigenvalues from c to c + 1, and differs between clients and between batches.
"""

import importlib

import numpy as np
import tensorflow as tf

from helpers.toys import Toy

CURVATURE = 0.5  # c


def flat(weights):
    """Flattens all weights into one vector."""
    return tf.concat([tf.reshape(w, [-1]) for w in tf.nest.flatten(weights)], 0)


def of_examples(x, size):
    """The vectors (m, z) of the examples x, each [N, size]."""
    rng = np.random.default_rng(11)
    to_m, to_z = rng.standard_normal((2, int(x.shape[1]), size))
    z = tf.matmul(tf.cast(x, tf.float64), to_z)
    return tf.sin(tf.matmul(tf.cast(x, tf.float64), to_m)), z / tf.norm(z, axis=1, keepdims=True)


def loss(weights, x, y):
    """The quadratic loss l_i; takes the place of the mean cross-entropy."""
    v = flat(weights)
    m, z = of_examples(x, int(sum(np.prod(w.shape) for w in tf.nest.flatten(weights))))
    apart = v - m
    return tf.reduce_mean(CURVATURE * tf.reduce_sum(apart**2, 1) + tf.reduce_sum(z * apart, 1) ** 2) / 2


def use(monkeypatch, *names, objective=loss):
    """Makes `objective` the clients' loss in these algorithms; `names` are their modules in tfpfl.algorithms."""
    for name in names:
        monkeypatch.setattr(importlib.import_module(f"tfpfl.algorithms.{name}"), "client_loss", lambda model: objective)


def quadratic(data: Toy, client_id: int, size: int, rows=slice(None)):
    """(A_i, b_i) on the client's examples `rows`: the gradient of l_i at v is A_i v - b_i."""
    m, z = (t.numpy() for t in of_examples(data.data[client_id][0][rows], size))
    a = CURVATURE * np.eye(size) + z.T @ z / len(z)
    return a, (CURVATURE * m + z * np.sum(z * m, 1, keepdims=True)).mean(0)


def optimum(data: Toy, size: int):
    """The minimum of (1 / I) sum_i l_i."""
    a, b = (np.mean(t, 0) for t in zip(*(quadratic(data, i, size) for i in data.ids), strict=True))
    return np.linalg.solve(a, b)
