"""FedPAC (Xu, Tong, Huang: Personalized FL with Feature Alignment and Classifier Collaboration, ICLR 2023).

Algorithm 1 of arXiv 2306.11867. In every round, for the clients i of the cohort, which have received theta, c and,
after their last visit, a combined classifier phi_i:
    statistics     of the features f(x; theta) with the theta received: for every class k
                   h_i,k = p_i(k) E[f | k],   V_i = (sum_k p_i(k) E[|f|^2 | k] - sum_k |h_i,k|^2) / n_i
    head           phi_i <- phi_i - eta_g grad l_i                                with theta fixed
    extractor      theta_i <- theta_i - eta_f grad (l_i + lambda R_i)             with the new phi_i fixed
    alignment      R_i = (1 / n_i) sum_l (1 / d) |f(x_l; theta_i) - c_{y_l}|^2
    aggregation    theta = sum_i n_i theta_i / sum n_j
    centroids      c_k = sum_i n_i,k c_i,k / sum_i n_i,k, c_i,k the class means of features of the new theta_i
    combination    phi_i = sum_j alpha_ij phi_j, where alpha_i is the point of the simplex with the smallest
                   sum_j alpha_j^2 V_j + sum_k |h_i,k - sum_j alpha_j h_j,k|^2

Decisions. d, the length of the features, divides as in the authors' code (an MSE). There are no centroids in round
1, and R_i = 0. A class that no client of the cohort has keeps its centroid, and one that never had any adds 0 to
R_i, but its examples count in n_i (missing='keep'). Or, as in the authors' code, centroids are of the last cohort
only, and where there is none from round 2 on, features are drawn to the client's own class mean with the theta
received ('own'). The paper weighs by n_i,k; the code of PFLlib weighs clients equally (`centroids='uniform'`). The
classifiers are combined among the clients of the cohort only; whoever is absent keeps its own. The authors' code
sets alphas below 0.001 to 0 and divides by the sum of the rest; the paper does not (`threshold`). It also lifts
small eigenvalues if rounding has made the matrix indefinite, which is not done here. The smallest point is found
exactly: for every set of clients that may have alpha > 0 in closed form, the best of those that are allowed.
"""

from itertools import combinations

import numpy as np

from independent.network import (
    Round,
    average,
    backbone_gradient,
    class_means,
    cross_entropy,
    features,
    head_gradient,
    logits,
    shares,
    step,
)


def statistics(theta, x, y, num):
    """(h [K, M], V)."""
    phi = features(theta, x)
    means, counts = class_means(phi, y, num)
    p = counts / len(y)
    h = p[:, None] * means
    squares = sum(p[k] * np.mean(np.sum(phi[y == k] ** 2, 1)) for k in range(num) if counts[k])
    return h, (squares - np.sum(h**2)) / len(y)


def smallest_on_simplex(matrix):
    """The a >= 0 with sum 1 and the smallest a' matrix a, for a positive definite matrix."""
    num, best, value = len(matrix), None, np.inf
    for size in range(1, num + 1):
        for support in combinations(range(num), size):
            part = np.linalg.solve(matrix[np.ix_(support, support)], np.ones(size))
            a = np.zeros(num)
            a[list(support)] = part / part.sum()
            if (a >= 0).all() and a @ matrix @ a < value:
                best, value = a, a @ matrix @ a
    return best


def fedpac(
    clients,
    start,
    cohorts,
    *,
    eta_g,
    steps_g,
    eta_f,
    steps_f,
    lam,
    heads=None,
    centroids="examples",
    weighting="examples",
    threshold=0.0,
    missing="keep",
    combined=True,
):
    theta, num = start[0], start[1][0].shape[1]
    heads = dict(heads) if heads else dict.fromkeys(range(len(clients)), start[1])
    c, known, rounds = np.zeros((num, len(theta[1]))), np.zeros(num, bool), []
    for cohort in cohorts:
        found, trained, stats, sums, counts = [], [], [], 0, 0
        for i in cohort:
            x, y = clients[i]
            stats.append(statistics(theta, x, y, num))
            own, head, phi = theta, heads[i], features(theta, x)
            aims, pulled = c, known
            if missing == "own":
                aims = np.where(known[:, None], c, class_means(phi, y, num)[0])
                pulled = np.full(num, known.any())
            for _ in range(steps_g):
                head = step(head, eta_g, head_gradient(head, phi, cross_entropy(logits(head, phi), y)[1])[0])
            for _ in range(steps_f):
                phi = features(own, x)
                dphi = head_gradient(head, phi, cross_entropy(logits(head, phi), y)[1])[1]
                dphi = dphi + lam * 2 * (phi - aims[y]) * pulled[y][:, None] / phi.size
                own = step(own, eta_f, backbone_gradient(own, x, dphi))
            means, n = class_means(features(own, x), y, num)
            n = n if centroids == "examples" else n > 0
            sums, counts = sums + n[:, None] * means, counts + n
            found.append(own)
            trained.append(head)
        theta = average(shares(clients, cohort, weighting), found)
        new = counts > 0
        before = c if missing == "keep" else 0.0
        c = np.where(new[:, None], sums / np.maximum(counts, 1)[:, None], before)
        known = known | new if missing == "keep" else new
        for i, (h_i, _) in zip(cohort, stats, strict=True):
            gaps = np.array([(h_i - h_j).ravel() for h_j, _ in stats])
            alpha = smallest_on_simplex(np.diag([v for _, v in stats]) + gaps @ gaps.T)
            alpha = np.where(alpha > threshold, alpha, 0)
            heads[i] = average(alpha / alpha.sum(), trained)
        if not combined:
            heads |= dict(zip(cohort, trained, strict=True))
        rounds.append(Round((theta, c, known), {i: (theta, heads[i]) for i in heads}))
    return rounds
