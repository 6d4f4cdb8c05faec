"""FedCP (Zhang, Hua, Wang, Song, Xue, Ma, Guan: Separating Feature Information for PFL via Conditional Policy, KDD
2023).

arXiv 2307.01217. A client receives an extractor theta, a global head and a policy network; it keeps a head of its
own. For an example with features h = f(x; theta_i):
    condition     C = (v_i / |v_i|) * h, with v_i the sum over the classes of the own head's weights
    policy        a = ReLU(LayerNorm(C U + u)) of length 2M;  r = softmax over its two halves, s = 1 - r
    output        g(s * h; own head) + g(r * h; global head)
    loss          mean loss + lambda MMD(h, h'),  h' the features with the theta received
theta_i, the own head and the policy are trained together; the global head stays as received. The server averages
theta_i, heads and policies with the weights N_i / sum N_j.

Decisions. The code draws Gumbel noise in the softmax; the paper has a softmax, as here. The first half belongs to
the own head. v_i is that of the head before the visit, without gradient; biases are no part of it. MMD is the
code's: kernels exp(-|a - b|^2 / (2 w)), w in 10, 15, 20, 50, summed, with the mean over all pairs, including those
of an example with itself. For the global head a client sends the half of its own plus the half of the one received,
as in the code (upload='half'), or its own head ('own'). The epsilon of LayerNorm is 1e-5. A client predicts with
the server's newest theta, global head and policy, and its own head; v_i is then of its own head.
"""

import numpy as np

from independent.network import (
    Round,
    average,
    backbone_gradient,
    combine,
    cross_entropy,
    features,
    head_gradient,
    layer_norm,
    logits,
    shares,
    step,
)

WIDTHS = (10, 15, 20, 50)


def squared(a, b):
    return np.maximum(((a[:, None] - b[None]) ** 2).sum(2), 0)


def mmd(a, b):
    """(the maximum mean discrepancy, its gradient with respect to a)."""
    n = len(a)

    def kernel(d):
        parts = [np.exp(-d / (2 * w)) for w in WIDTHS]
        return sum(parts), sum(-p / (2 * w) for p, w in zip(parts, WIDTHS, strict=True))

    (aa, daa), (bb, _), (ab, dab) = kernel(squared(a, a)), kernel(squared(b, b)), kernel(squared(a, b))
    same = 4 * (daa.sum(1, keepdims=True) * a - daa @ a)
    cross = 2 * (dab.sum(1, keepdims=True) * a - dab @ b)
    return np.mean(aa + bb - 2 * ab), (same - 2 * cross) / n**2


def context(head):
    v = head[0].sum(1)
    return v / np.linalg.norm(v)


def forward(h, head, top, policy, v):
    """(logits, gradients of (h, head, policy) as a function of that of the logits)."""
    u, b, gain, shift = policy
    normal, back = layer_norm(h * v @ u + b, gain, shift)
    halves, m = np.maximum(normal, 0), h.shape[1]
    s = 1 / (1 + np.exp(halves[:, m:] - halves[:, :m]))
    r = 1 - s

    def gradients(dz):
        dhead, to_own = head_gradient(head, h * s, dz)
        to_top = dz @ top[0].T
        change = s * r * h * (to_own - to_top)
        da, dgain, dshift = back(np.concatenate([change, -change], 1) * (normal > 0))
        dh = to_own * s + to_top * r + (da @ u.T) * v
        return dh, dhead, ((h * v).T @ da, da.sum(0), dgain, dshift)

    return logits(head, h * s) + logits(top, h * r), gradients


def loss_and_gradient(theta, head, policy, x, y, top, v, old, lam):
    """(loss, gradients of (theta, head, policy)); old: the features with the theta received."""
    h = features(theta, x)
    z, gradients = forward(h, head, top, policy, v)
    loss, dz = cross_entropy(z, y)
    dh, dhead, dpolicy = gradients(dz)
    gap, dgap = mmd(h, old)
    return loss + lam * gap, (backbone_gradient(theta, x, dh + lam * dgap), dhead, dpolicy)


def fedcp(clients, start, policy, cohorts, *, eta, steps, lam, heads=None, upload="half"):
    """`policy`: the first (U [M, 2M], u [2M], gain [2M], shift [2M]). start[1] is the first global head."""
    server, rounds = (start[0], start[1], policy), []
    heads = dict(heads) if heads else dict.fromkeys(range(len(clients)), start[1])
    for cohort in cohorts:
        found = []
        for i in cohort:
            theta, top, own = server
            x, y = clients[i]
            v, old, trained = context(heads[i]), features(theta, x), (theta, heads[i], own)
            for _ in range(steps):
                trained = step(trained, eta, loss_and_gradient(*trained, x, y, top, v, old, lam)[1])
            heads[i] = trained[1]
            sent = combine((0.5, heads[i]), (0.5, top)) if upload == "half" else heads[i]
            found.append((trained[0], sent, trained[2]))
        server = average(shares(clients, cohort), found)
        rounds.append(Round(server, {i: (*server, head) for i, head in heads.items()}))
    return rounds


def predicted(model, x):
    """Logits."""
    theta, top, policy, head = model
    return forward(features(theta, x), head, top, policy, context(head))[0]
