"""FedALA (Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for PFL, AAAI 2023).

Algorithm 1 of arXiv 2212.01197. Client i keeps its last model Theta_i and weights W_i, and receives Theta:
    start         Theta^_i = Theta_i + (Theta - Theta_i) * [1 in the lower layers; W_i in the p top layers]
    learning      W_i <- clip(W_i - eta_w grad_{W_i} L(Theta^_i), 0, 1), where grad_{W_i} L = (Theta - Theta_i) * grad L
    then          Theta_i = Theta^_i - alpha grad L, repeatedly;       Theta = sum_i N_i Theta_i / sum N_j
W_i = 1 at first. In the first visit in which it is learned, it is learned until it converges, later for one epoch.
In round 1 nothing is learned.

Decisions. Converged means as in the authors' code: the standard deviation of the losses of the last 10 epochs is
below `threshold`, after 11 epochs or more; `most` bounds the epochs. All examples are used (s = 100 %), so that an
epoch is one step. Nothing is learned where the top layers equal those received; the code compares the first array
of the model instead, which is the same in round 1. A client that comes late has the layers of Theta^0 until then. A
client that is absent learns nothing; in the code all clients learn before every evaluation. After a round client i
predicts with Theta^_i of the start, from the newest Theta, its last Theta_i and W_i. top='head' (p = 1) or 'all'.
"""

import numpy as np

from independent.network import Round, average, combine, descend, gradient, shares


def mixed(new, old, weights, top):
    """Theta^_i."""
    (theta, head), (old_theta, old_head) = new, old
    theta = theta if top == "head" else between(old_theta, theta, weights[0])
    return theta, between(old_head, head, weights[1])


def between(old, new, weights):
    return tuple(a + (b - a) * w for a, b, w in zip(old, new, weights, strict=True))


def fedala(clients, start, cohorts, *, eta, steps, eta_w, threshold=0.1, most=100, top="head", window=10):
    server, rounds, everyone = start, [], range(len(clients))
    ones = tuple(tuple(np.ones_like(a) for a in part) for part in start)
    kept, weights, begun = dict.fromkeys(everyone, start), dict.fromkeys(everyone, ones), set()
    for cohort in cohorts:
        found = []
        for i in cohort:
            gap = combine((1, server), (-1, kept[i]))
            if any(np.any(a) for part in (gap if top == "all" else gap[1:]) for a in part):
                losses, w = [], weights[i]
                while True:
                    loss, slope = gradient(mixed(server, kept[i], w, top), *clients[i])
                    w = tuple(
                        tuple(np.clip(a - eta_w * g * d, 0, 1) for a, g, d in zip(*parts, strict=True))
                        for parts in zip(w, slope, gap, strict=True)
                    )
                    losses.append(loss)
                    if i in begun or len(losses) == most:
                        break
                    if len(losses) > window and np.std(losses[-window:]) < threshold:
                        break
                weights[i] = w
                begun.add(i)
            model = mixed(server, kept[i], weights[i], top)
            kept[i] = descend(model, *clients[i], eta, steps)
            found.append(kept[i])
        server = average(shares(clients, cohort), found)
        rounds.append(Round(server, {i: mixed(server, kept[i], weights[i], top) for i in everyone}))
    return rounds
