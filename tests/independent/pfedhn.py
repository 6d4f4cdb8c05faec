"""pFedHN (Shamsian, Navon, Fetaya, Chechik: Personalized Federated Learning using Hypernetworks, ICML 2021).

Algorithm 1 of arXiv 2103.04628. The server has a network h with weights phi and an embedding v_i for each client.
    sends         theta_i = h(v_i; phi)
    client        K steps of SGD from theta_i;   sends  delta = theta~_i - theta_i
    server        phi <- phi + alpha (d theta_i / d phi)^T delta,    v_i <- v_i + alpha_v (d theta_i / d v_i)^T delta

h, as in the authors' code: linear, then `n_hidden` times ReLU and linear, then one linear map for each array of the
client's model, which are here the columns of one matrix.

Decisions. The paper has one client in a step. With a cohort, the changes of phi are added with the weights 1 / r
(weighting='uniform') or N_i / sum N_j ('examples'), all taken at the same phi. v_i changes with the same weight
(embedding='weighted'), or with the weight 1 ('whole'). The code clips the whole gradient to a length (`clip`), and
takes momentum and weight decay (`momentum`, `decay`), on the embeddings of all clients, also of those that are
absent; the paper has none of them. A client predicts with h(v_i; phi) of the server's newest weights.
"""

import numpy as np

from independent.network import Round, combine, descend, shares


def forward(v, layers):
    """(flat weights of the client, a function of their gradient -> gradients of (v, layers))."""
    inputs, a = [], v
    for n, (w, b) in enumerate(layers):
        a = a if n == 0 or n == len(layers) - 1 else np.maximum(a, 0)
        inputs.append(a)
        a = a @ w + b

    def back(d):
        slopes = []
        for n in range(len(layers) - 1, -1, -1):
            slopes.append((np.outer(inputs[n], d), d))
            d = d @ layers[n][0].T
            if n not in (0, len(layers) - 1):
                d = d * (inputs[n] > 0)
        return d, tuple(reversed(slopes))

    return a, back


def flat(model):
    return np.concatenate([a.ravel() for part in model for a in part])


def unflat(vector, like):
    """A model of the shapes of `like`."""
    shapes = [a.shape for part in like for a in part]
    ends = np.cumsum([np.prod(shape) for shape in shapes])[:-1]
    arrays = [a.reshape(shape) for a, shape in zip(np.split(vector, ends), shapes, strict=True)]
    return tuple(arrays[:2]), tuple(arrays[2:])


def pfedhn(
    clients,
    like,
    embeddings,
    layers,
    cohorts,
    *,
    eta,
    steps,
    alpha,
    alpha_v=None,
    weighting="uniform",
    embedding="weighted",
    clip=None,
    momentum=0.0,
    decay=0.0,
):
    v, rounds, speed = embeddings.copy(), [], None
    alpha_v = alpha if alpha_v is None else alpha_v
    for cohort in cohorts:
        slopes, moved = [], {}
        for q, i in zip(shares(clients, cohort, weighting), cohort, strict=True):
            sent, back = forward(v[i], layers)
            model = unflat(sent, like)
            dv, dlayers = back(flat(descend(model, *clients[i], eta, steps)) - sent)
            slopes.append((q, dlayers))
            moved[i] = (q if embedding == "weighted" else 1.0) * dv
        change = combine(*slopes)
        if clip is not None:
            squares = sum(np.sum(a**2) for part in change for a in part) + sum(np.sum(d**2) for d in moved.values())
            shrink = min(1.0, clip / np.sqrt(squares))
            change, moved = combine((shrink, change)), {i: shrink * d for i, d in moved.items()}
        rise = np.array([moved.get(i, np.zeros(v.shape[1])) for i in range(len(clients))])
        force = combine((1, (rise, change)), (-decay, (v, layers)))
        speed = force if speed is None else combine((momentum, speed), (1, force))
        v, layers = v + alpha_v * speed[0], combine((1, layers), (alpha, speed[1]))
        models = {i: unflat(forward(v[i], layers)[0], like) for i in range(len(clients))}
        rounds.append(Round((v, layers), models))
    return rounds
