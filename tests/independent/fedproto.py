"""FedProto (Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: Federated Prototype Learning across Heterogeneous Clients, AAAI
2022).

arXiv 2105.00243. Clients keep whole models and send prototypes only; the server sends prototypes only.
    client        C_i,j = mean of the features of client i's examples of class j
    server        C_j = (1 / |N_j|) sum_{i in N_j} (|D_i,j| / N_j) C_i,j         N_j: the clients that have class j
    training      client i's loss is its mean cross-entropy + lambda times the distance of prototypes
    prediction    the class whose C_j is nearest to the features

Decisions. The server's mean with 1 / |N_j| shrinks the prototypes, for the weights |D_i,j| / N_j already have the
sum 1: it is taken for a slip, and C_j is the mean with the weights |D_i,j| (weighting='examples'). The code takes
the mean with equal weights ('uniform'). The distance: as in the code, the mean over examples and features of (phi -
C_y)^2; an example of a class without a prototype counts in the mean, with 0. distance='prototypes' is the paper's
form: the sum over the classes of the mean over features of (C_i,j - C_j)^2. C_i,j is taken with the trained model
('after'); the authors' code takes the features of the last epoch, each batch before its step ('last'), and PFLlib
the mean over those of all local steps ('during'). A class that nobody of the cohort has keeps its C_j. In round 1
there are no prototypes, and no distance.
"""

import numpy as np

from independent.network import (
    Round,
    backbone_gradient,
    class_means,
    cross_entropy,
    features,
    head_gradient,
    logits,
    step,
)


def fedproto(
    clients, start, cohorts, *, eta, steps, lam, heads=None, weighting="examples", distance="code", collect="after"
):
    num, width = start[1][0].shape[1], len(start[0][1])
    models = {i: (start[0], heads[i] if heads else start[1]) for i in range(len(clients))}
    c, known, rounds = np.zeros((num, width)), np.zeros(num, bool), []
    for cohort in cohorts:
        sums, counts = 0, 0
        for i in cohort:
            (theta, head), (x, y), seen = models[i], clients[i], []
            for _ in range(steps):
                phi = features(theta, x)
                seen.append(phi)
                dhead, dphi = head_gradient(head, phi, cross_entropy(logits(head, phi), y)[1])
                means, n = class_means(phi, y, num)
                if distance == "code":
                    dphi = dphi + lam * 2 * (phi - c[y]) * known[y][:, None] / phi.size
                else:
                    dphi = dphi + lam * 2 / width * ((means - c) * known[:, None] / np.maximum(n, 1)[:, None])[y]
                theta, head = step(theta, eta, backbone_gradient(theta, x, dphi)), step(head, eta, dhead)
            models[i] = theta, head
            seen.append(features(theta, x))
            which = {"after": seen[-1], "last": seen[-2], "during": np.mean(seen[:-1], 0)}
            sent, n = class_means(which[collect], y, num)
            n = n if weighting == "examples" else (n > 0) * 1.0
            sums, counts = sums + n[:, None] * sent, counts + n
        new = counts > 0
        c, known = np.where(new[:, None], sums / np.maximum(counts, 1)[:, None], c), known | new
        rounds.append(Round((c, known), dict(models)))
    return rounds


def nearest(server, own=None):
    """A head with the outputs |phi|^2 - |phi - C_j|^2, and -100 M for classes without C_j, or that are not in `own`."""
    c, known = server
    known = known if own is None else known & np.isin(np.arange(len(c)), own)
    return 2 * (c * known[:, None]).T, np.where(known, -((c**2).sum(1)), -100.0 * c.shape[1])
