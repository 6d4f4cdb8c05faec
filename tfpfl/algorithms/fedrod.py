"""FedRoD: one model that is fair to all classes, and a private head on top (Chen, Chao; ICLR 2022).

Objective: the generic model w = (theta, W) minimizes sum_i alpha_i of client i's balanced softmax loss; client i's head
P_i corrects it to what the client really sees, on l_i.

    client(w):  for every batch (x, y), in one forward pass:  phi = phi(x; theta),  z = phi W
                    w   <- w - eta grad CE(z + log n_i, y)           n_i: how often the client has every class
                    P_i <- P_i - eta_p grad CE(z + phi P_i, y)       z and phi fixed: nothing flows back into w
                keep P_i, send w_i - w
    server:     w <- w + sum_{i in S} q_i (w_i - w),                 q_i = N_i / sum_{j in S} N_j

Messages: 4d bytes down, 4d up. On the device: the head P_i. A client predicts with z + phi P_i, which is the model
(theta, W + P_i), w being the newest; the generic score is that of z. A new client gets w and an initial P_i, and
adapts P_i. Its local model is (theta_i, W_i + P_i).

log n_i is that of a class that the client has, and -1e9 for one that it has not: a probability of 0 without NaN. P_i
starts as a copy of the initial W, as in PGFed's code, or at 0, the paper's residual (`init`); it is linear, without the
paper's hypernetwork. Both steps see the same batches. The loss that is reported is that of z + phi P_i.
"""

from typing import NamedTuple

import tensorflow as tf

from tfpfl import tree
from tfpfl.adaptation import adaptation
from tfpfl.algorithm import Algorithm, ClientOutput, Head, Weights
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.local import check_choice, check_rates, cross_entropy, example_weight, local_solver, logits
from tfpfl.optimizer import sgd

NEVER = -1e9  # log n of a class that a client does not have


class Trained(NamedTuple):
    """What a client works on."""

    w: Weights  # (theta, W)
    p: Head  # P_i


def log_frequencies(y, num_labels, dtype):
    """log n_i: the log of how often each class is in y, `NEVER` for those that are not; [C]."""
    n = tf.reduce_sum(tf.one_hot(y, num_labels, dtype=dtype), 0)
    return tf.where(n > 0, tf.math.log(tf.maximum(n, 1)), tf.constant(NEVER, dtype))


def fedrod(
    model,
    population,
    *,
    eta: float = 0.007,
    eta_p: float | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    weighting: str = "examples",
    init: str = "copy",
) -> Algorithm:
    """FedRoD.

    Args:
        eta, steps, epochs, batch_size, momentum, weighting: of the generic model, as in `fedavg`.
        eta_p: rate of P_i; None for eta, 0 to leave it.
        init: P_i at first: 'copy' (of W in round 0) or 'zeros'.

    Raises:
        ValueError: names the argument, and says what it may be.
    """
    check_choice(init=(init, ("copy", "zeros")))
    eta_p = eta if eta_p is None else eta_p
    check_rates(eta=eta, eta_p=eta_p)
    if eta == 0 < eta_p:
        raise ValueError(f"eta_p={eta_p} is taken in steps of eta, which must then be positive, found 0")
    work = {"eta": eta, "steps": steps, "epochs": epochs, "batch_size": batch_size, "momentum": momentum}
    base, solve = fedavg(model, population, **work, weighting=weighting), local_solver(**work)
    weight, num_labels = example_weight(model, weighting), population.shared_labels()
    ratio = eta_p / eta if eta else 1.0

    def client_update(w, p, data):
        log_n = log_frequencies(data.y, num_labels, model.dtype)

        def objective(trained, x, y):
            (theta, head), p = trained
            phi = model.features(theta, x)
            z = logits(head, phi)
            generic = cross_entropy(z + log_n, y)
            residual = tf.matmul(tf.stop_gradient(phi), p.kernel) + p.bias
            private = cross_entropy(tf.stop_gradient(z) + residual, y)
            slopes = generic + (ratio - 1) * private
            # the value is the private loss; the gradient that of generic + ratio * private, two losses without a weight
            # in common
            return private + (slopes - tf.stop_gradient(slopes))

        trained, loss = solve(objective, Trained(w, p), data)
        update = tree.subtract(trained.w, w)
        return ClientOutput(update, weight(data), trained.p, {"loss": loss})

    def personal(w, p):
        return Weights(w.theta, tree.add(w.head, p))

    return base._replace(
        init_client=lambda info: model.shared_head(num_labels, "zeros" if init == "zeros" else None),
        client_update=client_update,
        personal_model=lambda w, p, data: personal(w, p),
        global_model=lambda w: w,
        local_model=lambda w, output: personal(tree.add(w, output.update), output.state),
        adapt=adaptation(  # with W fixed, a step on P_i is one on W + P_i
            model, lambda w, p, data: personal(w, p), sgd(eta_p, momentum), part="head", batch_size=batch_size
        ),
    )
