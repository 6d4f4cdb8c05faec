"""FedAS (Yang, Huang, Ye: FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024).

Client i keeps its last backbone theta_i and its head. In a round it receives theta:
    alignment         prototypes p_i,k = mean of the features f(x; theta_i) of class k, with its own last backbone
                      theta <- theta - eta_a grad sum_k MSE(f(x; theta) of class k, p_i,k)          (section 4.2)
    local training    (theta_i, head_i) by SGD on the mean loss, from the aligned theta and its own head
    synchronization   w_i = trace of the Fisher information after training;   theta = sum_i w_i theta_i / sum w_j
                                                                                                    (section 4.3)

Decisions. The trace is that of the authors' code: the squared length of the gradient of the mean loss of a batch,
summed over batches (one here), over backbone and head (`fisher='batch'`); the definition, the mean over examples of
the squared length of an example's gradient, is `fisher='examples'`. MSE is the mean over a class's examples and
features. One step of alignment, as in the code. A client that comes for the first time has theta_i = theta of
round 0 (first='w0', as in the code), or the theta it receives ('received'). The code copies a received backbone into
the client and leaves it there while it is absent, so that it predicts with its own last theta_i and head_i
(model='own'); before its first visit it does so here with the newest theta. With model='server' all predict with the
server's newest theta and head_i.
"""

import numpy as np

from independent.network import (
    Round,
    average,
    backbone_gradient,
    class_means,
    descend,
    features,
    gradient,
    step,
)


def trace(model, x, y, fisher):
    """The trace of the Fisher information."""
    parts = [(x, y)] if fisher == "batch" else [(x[[j]], y[[j]]) for j in range(len(y))]
    squares = [sum(np.sum(a**2) for part in gradient(model, *p)[1] for a in part) for p in parts]
    return np.mean(squares)


def fedas(
    clients,
    start,
    cohorts,
    *,
    eta,
    steps,
    eta_a,
    steps_a=1,
    heads=None,
    fisher="batch",
    first="w0",
    model="server",
):
    theta, num, rounds, everyone = start[0], start[1][0].shape[1], [], range(len(clients))
    heads = dict(heads) if heads else dict.fromkeys(everyone, start[1])
    own, been = dict.fromkeys(everyone, theta), set()
    for cohort in cohorts:
        weights = []
        for i in cohort:
            x, y = clients[i]
            own[i] = theta if first == "received" and i not in been else own[i]
            prototypes, counts = class_means(features(own[i], x), y, num)
            aligned = theta
            for _ in range(steps_a):
                phi = features(aligned, x)
                dphi = 2 * (phi - prototypes[y]) / (counts[y][:, None] * phi.shape[1])
                aligned = step(aligned, eta_a, backbone_gradient(aligned, x, dphi))
            own[i], heads[i] = descend((aligned, heads[i]), x, y, eta, steps)
            been.add(i)
            weights.append(trace((own[i], heads[i]), x, y, fisher))
        theta = average([w / sum(weights) for w in weights], [own[i] for i in cohort])
        newest = everyone if model == "server" else set(everyone) - been
        rounds.append(Round(theta, {i: (theta if i in newest else own[i], heads[i]) for i in everyone}))
    return rounds

