"""FedAvg: one model for all, the average of locally trained copies (McMahan et al., AISTATS 2017).

Objective: sum_i alpha_i l_i(w) with w = (theta, W) shared by all clients.

    client(w):  w_i = SGD from w on l_i            epochs or steps, mini-batches or full batch
                send w_i - w
    server:     w <- w + sum_{i in S} q_i (w_i - w),  q_i = N_i / sum_{j in S} N_j

Messages: 4d bytes down, 4d up (the difference: the average is the same, and clipping or noise has something to act on).
On the device: nothing. A new client gets w, and adapts by SGD on all of it. The local model, scored by the PFLEGO
authors' code, is w_i.
"""

import tensorflow as tf

from tfpfl import tree
from tfpfl.adaptation import adaptation
from tfpfl.algorithm import Algorithm, ClientOutput, Weights
from tfpfl.local import client_loss, local_solver
from tfpfl.optimizer import sgd


def fedavg(
    model,
    population,
    *,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    weighting: str = "examples",
) -> Algorithm:
    """FedAvg.

    Args:
        eta: local learning rate.
        steps, epochs: local work, one of the two; default 50 steps (the PFLEGO study's tau).
        batch_size: examples a step; None for all (the PFLEGO study).
        momentum: of the local SGD; its slots start at 0 at every visit.
        weighting: 'examples' (q_i) or 'uniform' (1/r).

    Raises:
        ValueError: names the argument, and says what it may be.
    """
    solve = local_solver(eta=eta, steps=steps, epochs=epochs, batch_size=batch_size, momentum=momentum)
    if weighting not in ("examples", "uniform"):
        raise ValueError(f"weighting must be 'examples' or 'uniform', found {weighting!r}")
    objective, num_labels = client_loss(model), population.shared_labels()

    def client_update(w, state, data):
        w_i, loss = solve(objective, w, data)
        weight = tf.cast(data.info.num_examples, model.dtype) if weighting == "examples" else tf.ones([], model.dtype)
        return ClientOutput(tree.subtract(w_i, w), weight, state, {"loss": loss})

    return Algorithm(
        model=model,
        population=population,
        init_server=lambda: Weights(model.theta(), model.shared_head(num_labels)),
        init_client=lambda info: (),
        message=lambda w: w,
        client_update=client_update,
        server_update=tree.add,
        personal_model=lambda w, state, data: w,
        local_model=lambda w, output: tree.add(w, output.update),
        aggregate="mean",
        adapt=adaptation(model, lambda w, state, data: w, sgd(eta, momentum), batch_size=batch_size),
    )
