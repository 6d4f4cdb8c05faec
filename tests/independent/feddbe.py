"""FedDBE (Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan: Eliminating Domain Bias for Federated Learning in Representation
Space, NeurIPS 2023).

arXiv 2311.14975. Features f are taken for the global part z^g; client i keeps a vector z_i:
    prediction    logits = g(f(x; theta) + z_i; head) PRBM: z_i = 0 at first
    loss          l_i = mean loss + kappa * MSE(m_i, z)                                    MR
    running mean  m_i <- (1 - mu) m_i + mu * mean of f over the batch                      momentum; m_i = 0 at first
    z             = sum_i N_i zbar_i / sum N_j, agreed on once, before training, from the clients' mean features
theta, head and z_i are trained together; the server averages theta and head, with the weights N_i / sum N_j.

Decisions. As in the authors' code, MSE is half of the mean over the features (`half`), m_i starts at 0 in every
visit, and the gradient passes through the newest mean only. As in the code, clients train once without z_i and MR
to find their m_i, and throw the weights away. Where not all clients are there at once, this takes the cohorts of
the first `agreement` rounds, and z is the mean of all m_i sent, with the weights N_i. `mean_features` gives the
agreement of all clients at the first weights, as another `consensus`. A client predicts with the server's newest
weights and its z_i.
"""

import numpy as np

from independent.network import (
    Round,
    average,
    backbone_gradient,
    cross_entropy,
    features,
    head_gradient,
    logits,
    shares,
    softmax,
    step,
)


def mean_features(clients, theta, who=None):
    who = list(range(len(clients)) if who is None else who)
    return sum(
        q * features(theta, clients[i][0]).mean(0) for q, i in zip(shares(clients, who), who, strict=True)
    )


def visit(model, z_i, x, y, z, *, eta, steps, kappa, mu, half=0.5, eta_p=None):
    """(the model, z_i, m) after the client's work. Without a z, in the agreement, there is no MR and no step of z_i."""
    (theta, head), m, eta_p = model, 0.0, eta if eta_p is None else eta_p
    for _ in range(steps):
        phi = features(theta, x)
        m = (1 - mu) * m + mu * phi.mean(0)
        dhead, dphi = head_gradient(head, phi + z_i, cross_entropy(logits(head, phi + z_i), y)[1])
        if z is not None:
            z_i = z_i - eta_p * dphi.sum(0)
            dphi = dphi + kappa * 2 * half * (m - z) / len(z) * mu / len(y)
        theta, head = step(theta, eta, backbone_gradient(theta, x, dphi)), step(head, eta, dhead)
    return (theta, head), z_i, m


def feddbe(clients, start, cohorts, *, eta, steps, kappa, mu, consensus=None, agreement=1, half=0.5, eta_p=None):
    """`consensus`: z, if it is given; else the first `agreement` rounds make it."""
    server, rounds, z, num = start, [], consensus, 0
    own = {i: np.zeros(len(start[0][1])) for i in range(len(clients))}
    given = {"eta": eta, "steps": steps, "kappa": kappa, "mu": mu, "half": half, "eta_p": eta_p}
    for t, cohort in enumerate(cohorts):
        if consensus is None and t < agreement:
            for i in cohort:
                n, m = len(clients[i][1]), visit(server, own[i], *clients[i], None, **given)[2]
                z, num = (m if num == 0 else (num * z + n * m) / (num + n)), num + n
        else:
            found = []
            for i in cohort:
                model, own[i], _ = visit(server, own[i], *clients[i], z, **given)
                found.append(model)
            server = average(shares(clients, cohort), found)
        rounds.append(Round((server, z), {i: (server, z_i) for i, z_i in own.items()}))
    return rounds


def predicted(model, x):
    """The probabilities of the classes."""
    (theta, head), z_i = model
    return softmax(logits(head, features(theta, x) + z_i))
