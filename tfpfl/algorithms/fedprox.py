"""FedProx: FedAvg for clients of different data and speed (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith; MLSys 2020).

Objective: sum_i alpha_i l_i(w), one model for all; each client works on F_i(v) = l_i(v) + (mu / 2) |v - w|^2.

    client(w):  e_i = E, or for a straggler (probability p_s) U{1..E}      epochs or steps
                w_i = SGD from w on F_i for e_i:  v <- v - eta (grad l_i(v) + mu (v - w))
                send w_i - w
    server:     w <- w + sum_{i in S} q_i (w_i - w)                       FedProx: with the stragglers' partial work
                                                                         (FedAvg: without; nobody on time: w stays)

Messages: 4d bytes down, 4d up. On the device: nothing. A new client gets w, and adapts as FedAvg's, without penalty.
Its local model is w_i.

mu = 0 without stragglers is FedAvg, and with straggler_policy='drop' FedAvg on the same slow clients: who is late, and
how much it gets done, is drawn from (seed, round, client) alone. With implicit_prox the step is
v <- (v - eta grad l_i(v) + eta mu w) / (1 + eta mu), which no mu makes unstable. The paper lets mu and momentum meet in
the local solver; here explicit momentum carries the penalty's gradient too, implicit momentum only that of l_i. The
paper samples by N_i and averages uniformly; here cohorts are uniform and the average weighs by q_i, as in FedAvg
(`weighting`).
"""

import tensorflow as tf

from tfpfl import tree
from tfpfl.algorithm import Algorithm, ClientOutput
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.local import check_choice, check_penalty, client_loss, example_weight, local_solver, straggles


def fedprox(
    model,
    population,
    *,
    mu: float = 0.01,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    straggler: float = 0.0,
    straggler_policy: str = "keep",
    implicit_prox: bool = False,
    weighting: str = "examples",
) -> Algorithm:
    """FedProx.

    Args:
        mu: the pull towards the received model.
        eta, steps, epochs, batch_size, momentum, weighting: as in `fedavg`.
        straggler: p_s, the probability that a client does only a part of its work.
        straggler_policy: 'keep' what stragglers did (FedProx) or 'drop' it (FedAvg).
        implicit_prox: take the penalty's step implicitly, for stiff mu.

    Raises:
        ValueError: names the argument, and says what it may be.
    """
    work = {"eta": eta, "steps": steps, "epochs": epochs, "batch_size": batch_size, "momentum": momentum}
    solve = local_solver(**work, prox=mu, implicit_prox=implicit_prox, straggler=straggler)
    check_choice(straggler_policy=(straggler_policy, ("keep", "drop")))
    check_penalty(eta, implicit_prox, mu=mu)
    weight, objective = example_weight(model, weighting), client_loss(model)

    def client_update(w, state, data):
        w_i, loss = solve(objective, w, data, anchor=w)
        q = weight(data)
        if straggler_policy == "drop":
            q = tf.where(straggles(data.key, straggler), tf.zeros_like(q), q)
        return ClientOutput(tree.subtract(w_i, w), q, state, {"loss": loss})

    return fedavg(model, population, **work, weighting=weighting)._replace(client_update=client_update)
