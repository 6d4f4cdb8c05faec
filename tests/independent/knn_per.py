"""kNN-Per (Marfoq, Neglia, Vidal, Kameni: Personalized Federated Learning through Local Memorization, ICML 2022).

arXiv 2111.09360. A global model is trained with FedAvg. Client i keeps the features of its training examples, with
their labels, and predicts with
    prediction    h_i(x) = lambda_i h_knn(x) + (1 - lambda_i) h_global(x)                    probabilities
    neighbours    h_knn(y | x) = sum over the k nearest (phi_j, y_j) of [y_j = y] e_j / sum e_j
                  e_j = exp(-d(phi(x), phi_j) / scale)

Decisions. The paper leaves d open (Euclidean in its text); the authors' code takes the squared distance divided by
the number of features times `scale` (distance='code'); 'euclid' and 'squared' have no such factor. Features are of
the global model now, not of the round in which a client was last there. With fewer than k examples, all are
neighbours. The paper tunes lambda_i on each client's data and leaves open how; `chosen` is tfpfl's own way, after
its page: the lambda of 0, 0.1, ..., 1 with the most right answers when each training example is predicted by the
others, of several the one with the least loss, of several still the smallest.
"""

import numpy as np

from independent.network import Round, average, descend, features, logits, one_hot, shares, softmax


def knn_per(clients, start, cohorts, *, eta, steps):
    """The global model after every round."""
    w, rounds = start, []
    for cohort in cohorts:
        w = average(shares(clients, cohort), [descend(w, *clients[i], eta, steps) for i in cohort])
        rounds.append(Round(w, dict.fromkeys(range(len(clients)), w)))
    return rounds


def neighbours(theta, memory, x, num, *, k, scale=1.0, distance="code"):
    """h_knn: probabilities [N, K]."""
    keys, y = features(theta, memory[0]), memory[1]
    square = ((features(theta, x)[:, None] - keys[None]) ** 2).sum(2)
    factor = {"code": square / keys.shape[1], "squared": square, "euclid": np.sqrt(square)}[distance]
    nearest = np.argsort(square, axis=1, kind="stable")[:, :k]
    e = np.exp(-np.take_along_axis(factor, nearest, 1) / scale)
    return np.einsum("nk,nkc->nc", e, one_hot(y[nearest], num)) / e.sum(1, keepdims=True)


def predicted(model, memory, x, *, k, lam, scale=1.0, distance="code"):
    """Probabilities [N, K]."""
    theta, head = model
    near = neighbours(theta, memory, x, head[0].shape[1], k=k, scale=scale, distance=distance)
    return lam * near + (1 - lam) * softmax(logits(head, features(theta, x)))


def chosen(model, memory, *, k, scale=1.0, distance="code"):
    """lambda_i."""
    (theta, head), (x, y), num = model, memory, model[1][0].shape[1]
    if len(y) == 1:
        return 0.0
    others = [np.delete(np.arange(len(y)), j) for j in range(len(y))]
    near = [
        neighbours(theta, (x[o], y[o]), x[[j]], num, k=k, scale=scale, distance=distance)[0]
        for j, o in enumerate(others)
    ]
    p, scores = softmax(logits(head, features(theta, x))), []
    for n in range(11):
        mixed = n / 10 * np.array(near) + (1 - n / 10) * p
        loss = -np.mean(np.log(np.maximum(mixed[np.arange(len(y)), y], 1e-12)))
        scores.append((-np.sum(mixed.argmax(1) == y), loss, n / 10))
    return min(scores)[2]
