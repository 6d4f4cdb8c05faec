"""Personal adapters: A is shared and B is the client's own (Guo, Zeng, et al.: Selective Aggregation for Low-Rank
Adaptation in Federated Learning, FedSA-LoRA, ICLR 2025).

arXiv 2410.01463. The backbone's weights W, b stay as they are; its layer becomes relu(x (W + s A B) + b), A [D, R]
and B [R, M], B = 0 at first. In every round a client trains A and B together (and the head), by SGD from the A
received and its own B. It sends A; the server takes the mean, with the weights N_i / sum N_j. B stays with the
client.

Decisions. s = alpha / R. The paper's classifier is frozen for its text experiments; here the head is trained, and
either averaged like A (head='shared') or the client's own ('own').
"""

from independent.network import (
    Round,
    average,
    backbone_gradient,
    cross_entropy,
    features,
    head_gradient,
    logits,
    shares,
    step,
)


def whole(frozen, a, b, scale):
    """The backbone with the adapters written into its weights."""
    return frozen[0] + scale * a @ b, frozen[1]


def adapters(clients, frozen, a, b, head, cohorts, *, eta, steps, scale=1.0, own_head=False, heads=None):
    everyone, rounds = range(len(clients)), []
    own = dict.fromkeys(everyone, b)
    heads = dict(heads) if heads else dict.fromkeys(everyone, head)
    for cohort in cohorts:
        found = []
        for i in cohort:
            x, y = clients[i]
            a_i, b_i, head_i = a, own[i], heads[i] if own_head else head
            for _ in range(steps):
                theta = whole(frozen, a_i, b_i, scale)
                phi = features(theta, x)
                dhead, dphi = head_gradient(head_i, phi, cross_entropy(logits(head_i, phi), y)[1])
                dw = backbone_gradient(theta, x, dphi)[0]
                slopes = scale * dw @ b_i.T, scale * a_i.T @ dw, dhead
                a_i, b_i, head_i = step((a_i, b_i, head_i), eta, slopes)
            own[i] = b_i
            heads[i] = head_i
            found.append((a_i, head_i))
        a, mean = average(shares(clients, cohort), found)
        head = head if own_head else mean
        models = {i: (a, own[i], heads[i] if own_head else head) for i in everyone}
        rounds.append(Round((a, head), models))
    return rounds
