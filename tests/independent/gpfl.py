"""GPFL (Zhang et al.: Simultaneously Learning Global and Personalized Feature Information for PFL, ICCV 2023).

arXiv 2308.10279; the equations are numbered as on the authors' poster.

A client receives a backbone theta, embeddings C of the classes and the network V of a conditional
valve; it keeps its head. With features f of an example of class y:
    equation 1    f_G = ReLU((gamma + 1) * f + beta),  f_P = ReLU((gamma_i + 1) * f + beta_i)
    equation 2    (gamma, beta) = CoV(g; V),  (gamma_i, beta_i) = CoV(p_i; V)
    equation 3    L_alg = -log softmax over the classes u of cos(f_G, C_u), at y
    equation 4    L_mlg = |f_G - C^_y|,  C^ the embeddings received
    equation 5    L_P   = loss of the own head on f_P
g is the mean of the embeddings, p_i their mean with the client's shares of the classes. The loss is L_P + L_alg +
lambda L_mlg, and mu / 2 times the squared norm of V and C. All parts are trained together, with one rate. The server
averages theta, C and V with the weights N_i / sum N_j.

Decisions. As in the code, CoV has the condition alone as its input, and two maps LayerNorm(ReLU(. A + a)) with a
gain, a shift and the epsilon 1e-5, for gamma and for beta; g and p_i are fixed during a visit and have no gradient;
mu decays C and V, not theta and the head. L_mlg: the code takes the length of the whole batch, as one matrix
(magnitude='batch'); the equation is the mean over examples of the length ('examples'). Conditions are taken from
the embeddings that the client received (conditions='received'). The code takes them from the client's embeddings
before those received overwrite them, and 0 before the first visit's end ('before'). A client predicts by its head
on f_P, with the server's newest theta, C and V.
"""

import numpy as np

from independent.network import (
    Round,
    average,
    backbone_gradient,
    cross_entropy,
    features,
    head_gradient,
    layer_norm,
    logits,
    one_hot,
    shares,
    step,
)


def affine(valve, condition):
    """((gamma, beta), gradient of the valve as a function of theirs). valve: two maps of (A, a, gain, shift)."""
    found, backs = [], []
    for weights, bias, gain, shift in valve:
        inner = condition[None] @ weights + bias
        y, back = layer_norm(np.maximum(inner, 0), gain, shift)
        found.append(y[0])
        backs.append((inner, back))

    def gradients(slopes):
        parts = []
        for d, (inner, back) in zip(slopes, backs, strict=True):
            dx, dgain, dshift = back(d[None])
            dx = dx * (inner > 0)
            parts.append((np.outer(condition, dx[0]), dx[0], dgain, dshift))
        return tuple(parts)

    return found, gradients


def transform(f, valve, condition):
    """(ReLU((gamma + 1) f + beta), a function of its gradient -> gradients of (f, valve))."""
    (gamma, beta), back = affine(valve, condition)
    s = f * (gamma + 1) + beta

    def gradients(d):
        d = d * (s > 0)
        return d * (gamma + 1), back(((d * f).sum(0), d.sum(0)))

    return np.maximum(s, 0), gradients


def normalized(a):
    """(rows of length 1, a function of their gradient -> the gradient of a)."""
    length = np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-12)
    unit = a / length
    return unit, lambda d: (d - unit * (d * unit).sum(1, keepdims=True)) / length


def loss_and_gradient(theta, head, embeddings, valve, x, y, g, p_i, frozen, lam, magnitude="batch"):
    """(loss without the decay, gradients of (theta, head, embeddings, valve))."""
    f = features(theta, x)
    f_p, back_p = transform(f, valve, p_i)
    loss, dz = cross_entropy(logits(head, f_p), y)
    dhead, df_p = head_gradient(head, f_p, dz)

    f_g, back_g = transform(f, valve, g)
    (unit, back_unit), (axes, back_axes) = normalized(f_g), normalized(embeddings)
    angle, dcos = cross_entropy(unit @ axes.T, y)
    gap = f_g - frozen[y]
    if magnitude == "batch":
        length = np.sqrt((gap**2).sum())
        far, dgap = length, gap / length
    else:
        lengths = np.sqrt((gap**2).sum(1, keepdims=True))
        far, dgap = lengths.mean(), gap / lengths / len(y)
    df_g = back_unit(dcos @ axes) + lam * dgap

    (d_p, dvalve_p), (d_g, dvalve_g) = back_p(df_p), back_g(df_g)
    dvalve = tuple(tuple(a + b for a, b in zip(*two, strict=True)) for two in zip(dvalve_p, dvalve_g, strict=True))
    slopes = backbone_gradient(theta, x, d_p + d_g), dhead, back_axes(dcos.T @ unit), dvalve
    return loss + angle + lam * far, slopes


def gpfl(
    clients,
    start,
    embeddings,
    valve,
    cohorts,
    *,
    eta,
    steps,
    lam,
    mu,
    heads=None,
    magnitude="batch",
    conditions="received",
):
    server, rounds, num = (start[0], embeddings, valve), [], len(embeddings)
    heads = dict(heads) if heads else dict.fromkeys(range(len(clients)), start[1])
    part = {i: one_hot(y, num).mean(0) for i, (_, y) in enumerate(clients)}
    before = {i: np.zeros_like(embeddings) for i in heads}
    for cohort in cohorts:
        found = []
        for i in cohort:
            theta, c, v = server
            source = c if conditions == "received" else before[i]
            given = {"g": source.mean(0), "p_i": part[i] @ source, "frozen": c, "lam": lam, "magnitude": magnitude}
            trained = (theta, heads[i], c, v)
            for _ in range(steps):
                *slopes, dc, dv = loss_and_gradient(*trained, *clients[i], **given)[1]
                dc = dc + mu * trained[2]
                pairs = zip(dv, trained[3], strict=True)
                dv = tuple(tuple(d + mu * w for d, w in zip(*two, strict=True)) for two in pairs)
                trained = step(trained, eta, (*slopes, dc, dv))
            heads[i], before[i] = trained[1], trained[2]
            found.append((trained[0], *trained[2:]))
        server = average(shares(clients, cohort), found)
        conditioned = {i: server[1] if conditions == "received" else before[i] for i in heads}
        rounds.append(Round(server, {i: (*server, heads[i], part[i] @ conditioned[i]) for i in heads}))
    return rounds


def predicted(model, x):
    """Logits."""
    theta, _, valve, head, p_i = model
    return logits(head, transform(features(theta, x), valve, p_i)[0])
