"""FedBABU: only the body is trained, the head stays as it is at first (Oh, Kim, Yun; ICLR 2022).

Objective: sum_i alpha_i l_i(W, theta), minimized over theta only. Then each client minimizes l_i, starting from
(theta, W).

Messages: 4b bytes down, 4b up. W is not sent, because every device computes it from the model's seed. On the device:
nothing. A new client gets theta, computes W, and fine-tunes. The local model is (theta_i, W).

W = U V^T from the singular value decomposition of a uniform [0, 1) matrix K x (M + 1), whose last column is the bias,
as in the PFLEGO authors' code; W W^T = I if K <= M + 1. If the model has an initial head (`with_initial_head`), such as
that of Fed3R, it is W. With 'local' labels, output k means a different class for each client. The PFLEGO code does not
fine-tune (steps_ft=0), PGFed fine-tunes for one epoch (epochs_ft=1). The default is the work of one visit.
"""

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.finetune import finetuned, tuning_work
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.local_training import body_solver, example_weight
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.models import tree
from tfpfl.models.weights import Head, Weights


def orthogonal_head(model, num_labels: int) -> Head:
    """The fixed head: the orthogonal matrix [K, M + 1] nearest to a uniform one, a function of the model's seed.

    Returns:
        A `Head` of NumPy arrays.
    """
    with tf.init_scope():  # draw now, outside any graph that is being traced
        uniform = model.shared_head(num_labels, "uniform01")
    u, _, v = np.linalg.svd(np.vstack([uniform.kernel.numpy(), uniform.bias.numpy()[None]]).T, full_matrices=False)
    w = (u @ v).T
    return Head(w[:-1], w[-1])


def fedbabu(
    model,
    population,
    *,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.9,
    client_opt: str | Optimizer = "sgd",
    weighting: str = "examples",
    eta_ft: float | None = None,
    steps_ft: int | None = None,
    epochs_ft: int | None = None,
    part: str = "full",
) -> Algorithm:
    """FedBABU: only the backbone is trained, with one fixed head for all; each client fine-tunes before it predicts.

    Update rule:

        client(theta):          theta_i = SGD from theta on l_i(W, .)          W fixed, the same for all
                                send theta_i - theta
        server:                 theta <- theta + sum_{i in S} q_i (theta_i - theta),   q_i = N_i / sum_{j in S} N_j
        to predict:             v <- SGD from (theta, W) on l_i, E_ft epochs or steps, of all weights, head or body

    theta is the shared backbone, W the fixed head, l_i client i's mean cross-entropy on its N_i training examples. S is
    the cohort.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum (here 0.9)
            and optimizer of the backbone's local steps, and the weights of the average, as in `fedavg`. Another
            optimizer than 'sgd' needs momentum=0.
        eta_ft: rate of the fine-tuning, >= 0; None for eta.
        steps_ft, epochs_ft: E_ft, the fine-tuning's mini-batches or passes; one of the two, >= 0, 0 for none. Default:
            the work of one visit.
        part: what is fine-tuned: 'full' (all weights), 'head' (on cached features) or 'body' (the backbone).

    Returns:
        The `Algorithm`. A client keeps nothing and predicts with its fine-tuned copy of (theta, W).

    Raises:
        InvalidArgument: eta, eta_ft or momentum is negative or not finite, or eta_ft has no effect beside an optimizer
            object; steps, epochs or batch_size is below 1, or steps and epochs are both given; steps_ft or epochs_ft is
            negative, or both are given; part is not 'full', 'head' or 'body'; weighting is neither 'examples' nor
            'uniform'; clients have different numbers of classes (this method shares one head) and the population has no
            `num_labels`.

    Source:
        Oh, Kim, Yun, ICLR 2022, algorithm 1.
    """
    solver = {"batch_size": batch_size, "momentum": momentum, "client_opt": client_opt}
    solve = body_solver(model, eta=eta, steps=steps, epochs=epochs, **solver)
    weight, num_labels = example_weight(model, weighting), population.shared_labels()
    fixed = orthogonal_head(model, num_labels) if model.initial_head is None else model.initial_head

    def with_head(theta):
        return Weights(theta, Head(*(tf.constant(w) for w in fixed)))

    def client_update(theta, state, data):
        theta_i, loss = solve(*with_head(theta), data)
        return ClientOutput(tree.subtract(theta_i, theta), weight(data), state, {"loss": loss})

    base = Algorithm(
        model=model,
        population=population,
        init_server=model.theta,
        init_client=lambda info: (),
        message=lambda theta: theta,
        client_update=client_update,
        server_update=tree.add,
        personal_model=lambda theta, state, data: with_head(theta),
        local_model=lambda theta, output: with_head(tree.add(theta, output.update)),
        aggregate="mean",
        shares="model",
    )
    work = tuning_work(solver, eta, steps, epochs, eta_ft, steps_ft, epochs_ft)
    return finetuned(base, part=part, global_model=with_head, **work)


FEDBABU = Method(
    name="fedbabu",
    title="FedBABU",
    builder=fedbabu,
    head="shared",
    message="broadcast",
    state="nothing",
    evaluates="fine-tuned",
    down="b",
    up="b",
    reference="Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022",
    no_head_init="its fixed head has orthogonal rows",
)
