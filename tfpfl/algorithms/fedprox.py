"""FedProx: FedAvg for clients with different data and speed (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith; MLSys 2020).

Objective: sum_i alpha_i l_i(w), one model for all; each client works on F_i(v) = l_i(v) + (mu / 2) |v - w|^2.

Messages: 4d bytes down, 4d up. On the device: nothing. A new client gets w and adapts it as in FedAvg, without the
penalty. The local model is w_i.

mu = 0 without stragglers is FedAvg. mu = 0 with straggler_policy='drop' is FedAvg with the same slow clients: which
client is slow, and how much it does, depends only on (seed, round, client). With implicit_prox the step is
v <- (v - eta grad l_i(v) + eta mu w) / (1 + eta mu), which is stable for every mu. The paper leaves open how mu and
momentum combine. Here momentum includes the gradient of the penalty if the step is explicit, and only that of l_i if it
is implicit. The paper samples clients in proportion to N_i and averages uniformly. Here sampling is uniform and the
average has the weights q_i, as in FedAvg (`weighting`).
"""

from typing import Any

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.local_training import example_weight, local_solver, straggles
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import check_choice, check_penalty
from tfpfl.models import tree
from tfpfl.models.losses import client_loss


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
    client_opt: str | Optimizer = "sgd",
    straggler: float = 0.0,
    straggler_policy: str = "keep",
    implicit_prox: bool = False,
    weighting: str = "examples",
) -> Algorithm:
    """FedProx: FedAvg with a penalty that keeps clients near the model that they received; slow clients may do only a
    part of their work.

    Update rule:

        client(w):  e_i = E, or for a straggler (probability p_s) U{1..E}
                    w_i <- w;  for e_i epochs or steps:  w_i <- w_i - eta (grad l(w_i; D) + mu (w_i - w))
                    send w_i - w
        server:     w <- w + sum_{i in S} q_i (w_i - w),    q_i = N_i / sum_{j in S} N_j
                    'drop': without stragglers in S; w stays where nobody is on time

    w = (theta, W) is a whole model, theta the backbone and W the head; l_i is client i's mean cross-entropy on its N_i
    training examples, l(w; D) that on a mini-batch D. S is the cohort of the round, of r clients, and E the local work
    in epochs or steps.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        mu: the pull towards the received model, >= 0; 0 for none.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the local steps, and the weights of the average, as in `fedavg`. The optimizer gets the
            gradient together with that of the pull.
        straggler: p_s, the probability in [0, 1] that a client does only a part of its work; default 0.
        straggler_policy: 'keep' what stragglers did (FedProx), or 'drop' it (FedAvg). Their own states, such as local
            statistics of BatchNormalization, stay as their work left them.
        implicit_prox: take an implicit step on the pull, which is stable for every coefficient. Default: an explicit
            step, by its gradient.

    Returns:
        The `Algorithm`. A client keeps nothing and predicts with w.

    Raises:
        InvalidArgument: mu, eta or momentum is negative or not finite; steps, epochs or batch_size is below 1, or steps
            and epochs are both given; straggler is outside [0, 1]; straggler_policy or weighting is not one of the
            values above; clients have different numbers of classes (this method shares one head) and the population has
            no `num_labels`. Warns if eta mu >= 2 and the step is explicit: such steps diverge.

    Source:
        Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020, algorithm 2.
    """
    work: dict[str, Any] = dict(eta=eta, steps=steps, epochs=epochs, batch_size=batch_size, momentum=momentum)
    work |= {"client_opt": client_opt}
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


FEDPROX = Method(
    name="fedprox",
    title="FedProx",
    builder=fedprox,
    head="shared",
    message="broadcast",
    state="nothing",
    evaluates="global",
    down="d",
    up="d",
    reference="Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, "
    "MLSys 2020",
)
