"""Three methods that tfpfl has had for long, to see that the comparison itself is right.

FedRep (Collins et al., ICML 2021, algorithm 1): tau_h steps on the head with theta fixed, then tau_b on theta with
the new head; the server averages theta. Weights N_i / sum N_j, where the paper's are equal.

Ditto (Li et al., ICML 2021, algorithm 1): FedAvg for w; v_i <- v_i - eta (grad l_i(v_i) + lambda (v_i - w)), with
the w received.

SCAFFOLD (Karimireddy et al., ICML 2020, algorithm 1, option II): steps along g - c_i + c; equal weights; c gets the
sum of the cohort's changes divided by the number of all clients.
"""

from independent.network import (
    Round,
    average,
    backbone_gradient,
    combine,
    cross_entropy,
    descend,
    features,
    gradient,
    head_gradient,
    logits,
    shares,
    step,
)


def fedrep(clients, start, cohorts, *, eta_h, tau_h, eta_b, tau_b, heads=None):
    theta, rounds = start[0], []
    heads = dict(heads) if heads else dict.fromkeys(range(len(clients)), start[1])
    for cohort in cohorts:
        found = []
        for i in cohort:
            (x, y), own, head = clients[i], theta, heads[i]
            phi = features(own, x)
            for _ in range(tau_h):
                head = step(head, eta_h, head_gradient(head, phi, cross_entropy(logits(head, phi), y)[1])[0])
            for _ in range(tau_b):
                phi = features(own, x)
                dphi = head_gradient(head, phi, cross_entropy(logits(head, phi), y)[1])[1]
                own = step(own, eta_b, backbone_gradient(own, x, dphi))
            heads[i] = head
            found.append(own)
        theta = average(shares(clients, cohort), found)
        rounds.append(Round(theta, {i: (theta, head) for i, head in heads.items()}))
    return rounds


def ditto(clients, start, cohorts, *, eta, steps, lam):
    w, rounds, own = start, [], dict.fromkeys(range(len(clients)), start)
    for cohort in cohorts:
        found = []
        for i in cohort:
            found.append(descend(w, *clients[i], eta, steps))
            for _ in range(steps):
                pull = combine((1, gradient(own[i], *clients[i])[1]), (lam, own[i]), (-lam, w))
                own[i] = step(own[i], eta, pull)
        w = average(shares(clients, cohort), found)
        rounds.append(Round(w, dict(own)))
    return rounds


def scaffold(clients, start, cohorts, *, eta, steps):
    x, zero, rounds, everyone = start, combine((0, start)), [], range(len(clients))
    c, kept = zero, dict.fromkeys(everyone, zero)
    for cohort in cohorts:
        found, changes = [], []
        for i in cohort:
            y = x
            for _ in range(steps):
                y = step(y, eta, combine((1, gradient(y, *clients[i])[1]), (-1, kept[i]), (1, c)))
            new = combine((1, kept[i]), (-1, c), (1 / (steps * eta), x), (-1 / (steps * eta), y))
            changes.append(combine((1, new), (-1, kept[i])))
            found.append(y)
            kept[i] = new
        x = average(shares(clients, cohort, "uniform"), found)
        c = combine((1, c), *[(1 / len(clients), d) for d in changes])
        rounds.append(Round((x, c), dict.fromkeys(everyone, x)))
    return rounds
