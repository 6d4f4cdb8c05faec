"""FedDANE (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: FedDANE: A Federated Newton-Type Method, Asilomar 2019).

Algorithm 2 of arXiv 2001.01920. In every round, from w:
    exchange 1    clients k in S send grad F_k(w);       g = (1 / |S|) sum_{k in S} grad F_k(w)
    exchange 2    clients k in S' look for the smallest
                  F_k(v) + <g - grad F_k(w), v - w> + (mu / 2) |v - w|^2
                  w = (1 / |S'|) sum_{k in S'} w_k

Decisions. F_k is minimized approximately: `steps` steps of gradient descent with the rate `eta`, from w. The paper
draws S' anew; an engine has one cohort a round, so that S' = S, unless `second` gives other ones. The paper draws
client k with probability p_k = n_k / n and averages uniformly; where the draw is uniform, the weights N_k / sum N_j
in both means have the same expectation up to the normalization (weighting='examples').
"""

from independent.network import Round, average, combine, gradient, shares, step


def feddane(clients, start, cohorts, *, eta, steps, mu, weighting="examples", second=None):
    w, rounds = start, []
    for first, then in zip(cohorts, second or cohorts, strict=True):
        sent = [gradient(w, *clients[k])[1] for k in first]
        g = average(shares(clients, first, weighting), sent)
        found = []
        for k in then:
            here, v = gradient(w, *clients[k])[1], w
            for _ in range(steps):
                slope = combine((1, gradient(v, *clients[k])[1]), (1, g), (-1, here), (mu, v), (-mu, w))
                v = step(v, eta, slope)
            found.append(v)
        w = average(shares(clients, then, weighting), found)
        rounds.append(Round((w, g), dict.fromkeys(range(len(clients)), w)))
    return rounds
