"""Fed3R (Fani, Camoriano, Caputo, Ciccone: Accelerating Heterogeneous FL with Closed-form Classifiers, ICML 2024).

arXiv 2406.01116. Features phi are of a backbone that is not trained. Each client sends once, whenever it comes,
    client        A_i = sum phi phi^T,   b_i = sum phi onehot(y)^T
    server        W = (sum_i A_i + lambda I)^-1 sum_i b_i
    then          every class's column of W is divided by its length
A client that was counted is not counted again. What is refined per client starts from W.

Decisions. As in the authors' code, phi ends with a 1, so that the last row of W is a bias; lambda is also on the
bias; the length of a column is that of its weights without the bias, by which the bias is divided, too. A column of
length 0 stays 0 (the code divides it by 1e-6). bias=False: no 1. Refinement: `steps` steps of gradient descent on
the client's mean loss of the logits divided by a temperature, as in the authors' code, from the newest W, on the head
only or on all weights (part='full'). With `local_labels` it starts with logits of -10,000, after the division, for the
classes that the client does not have. The models here have the divided head.
"""

import numpy as np

from independent.network import Round, combine, cross_entropy, features, gradient, head_gradient, logits, one_hot, step

LOW = -1e4


def solved(a, b, lam, bias=True, normalize=True):
    """The head (V, c) of the sums."""
    w = np.linalg.solve(a + lam * np.eye(len(a)), b)
    v, c = (w[:-1], w[-1]) if bias else (w, np.zeros(w.shape[1]))
    length = np.linalg.norm(v, axis=0) if normalize else np.ones(w.shape[1])
    length = np.where(length == 0, 1, length)
    return v / length, c / length


def refined(theta, divided, x, y, eta, steps, part="head", temperature=1.0):
    """The model after `steps` steps on the head, or on all weights; its head is divided by the temperature."""
    head, phi = combine((temperature, divided)), features(theta, x)
    for _ in range(steps):
        divided = combine((1 / temperature, head))
        if part == "full":
            d_theta, d_divided = gradient((theta, divided), x, y)[1]
            theta = step(theta, eta, d_theta)
        else:
            d_divided = head_gradient(divided, phi, cross_entropy(logits(divided, phi), y)[1])[0]
        head = step(head, eta / temperature, d_divided)
    return theta, combine((1 / temperature, head))


def only_own(head, y):
    """The head with a bias of -10,000 for classes that are not in y."""
    absent = ~np.isin(np.arange(len(head[1])), y)
    return head[0], np.where(absent, LOW, head[1])


def fed3r(
    clients,
    theta,
    num,
    cohorts,
    *,
    lam,
    eta=0.0,
    steps=0,
    bias=True,
    normalize=True,
    temperature=1.0,
    part="head",
    local_labels=False,
):
    a = b = 0.0
    counted, rounds = set(), []
    for cohort in cohorts:
        for i in cohort:
            if i not in counted:
                x, y = clients[i]
                phi = features(theta, x)
                phi = np.hstack([phi, np.ones((len(y), 1))]) if bias else phi
                a, b = a + phi.T @ phi, b + phi.T @ one_hot(y, num)
                counted.add(i)
        head = combine((1 / temperature, solved(a, b, lam, bias, normalize)))
        models = {}
        for i, (x, y) in enumerate(clients):
            models[i] = refined(
                theta, only_own(head, y) if local_labels else head, x, y, eta, steps, part, temperature
            )
        rounds.append(Round((a, b, head), models))
    return rounds
