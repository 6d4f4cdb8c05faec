"""FedAS: the received backbone is aligned with the client's own, and well-trained clients count more (Yang, Huang, Ye;
CVPR 2024).

Objective: sum_i alpha_i l_i(theta, W_i), as FedPer's. "Parameter alignment" moves the received theta so that it gives
the mean feature of every class that the client's last backbone gave: W_i then fits to it. "Client synchronization"
weighs clients by the trace F_i of the Fisher information of their models.

Messages: 4b bytes down, 4b up. On the device: the whole model (theta_i, W_i) of its last visit, with which the client
predicts. A new client has the newest theta and an initial head, and adapts both. The local model is (theta_i, W_i).

We follow the authors' code, which is part of PFLlib. There, a client that comes first in a later round has the backbone
of round 0, and is aligned with its features (init='w0'); with init='first_broadcast' it is aligned with those of the
theta that it receives. Before its first visit the code's client predicts with the backbone of round 0, here with the
newest. The trace is a mean over examples of |grad log p(y | x)|^2 (fisher='examples'). The code instead sums
|grad of the mean loss|^2 over mini-batches (fisher='batches'), which is cheaper, and 0 where the gradients of different
examples cancel. The code's mini-batches leave out the last examples, which fill none; here all examples count. The
heads have part in the trace. In the code all clients compute their trace in every round, but it uses only those of the
cohort.

In PFLlib (commit d832e76, system/flcore/) examples are left out in clients/clientas.py line 140 with clientbase.py line
59: a client with fewer than 16 examples is not aligned. The trace is of shuffled mini-batches (clientas.py line 62),
here of those in the order of the examples (`fisher_trace`). After the last round it calls a method that does not exist
(servers/serveras.py line 114), so that nothing is saved. All else computes the same where mini-batches divide N_i;
PFLlib leaves out the last examples, which fill none (tests/algorithms/test_pfllib.py).

Without alignment (eta_align = 0) and with weighting='examples', the server's theta and the heads are those of FedPer.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData, ClientOutput
from tfpfl.algorithms.method import SEVERAL_MODELS, Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import example_weight, local_solver, value_and_gradient
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import check_choice
from tfpfl.models import passes, tree
from tfpfl.models.heads import check_classes
from tfpfl.models.loops import training_loop
from tfpfl.models.losses import client_loss
from tfpfl.models.split import HEAD_INITS
from tfpfl.models.weights import Weights

ONLY_CLASSES = "it aligns the mean features of classes. FedPer and FedRep share a backbone, too, for every kind"


class Personal(NamedTuple):
    """What a client keeps: its model after its last visit."""

    theta: Any  # theta_i
    head: Any  # W_i
    started: Any  # bool []: theta is the client's own; if false, it is that of round 0


def class_means(phi, y, num_classes):
    """The mean feature of every class: [K_i, M]; 0 for a class without examples."""
    return tf.math.unsorted_segment_mean(phi, y, num_classes)


def alignment_loss(phi, y, means):
    """sum_k mean over the examples of class k, and over the features, of (phi - mean of class k)^2: float []."""
    ones = tf.ones([tf.shape(phi)[0]], phi.dtype)
    n = tf.gather(tf.math.unsorted_segment_sum(ones, y, tf.shape(means)[0]), y)
    return tf.reduce_sum(tf.reduce_mean(tf.square(phi - tf.gather(means, y)), 1) / n)


def fisher_trace(objective, weights, data: ClientData, size):
    """sum over chunks of `size` examples of |grad of their mean loss|^2: float []."""

    def one_chunk(start, total):
        x, y = tree.rows(data.x, start, start + size), data.y[start : start + size]
        _, g = value_and_gradient(lambda w: objective(w, x, y), weights)
        return start + size, total + tree.dot(g, g)

    start = (0, tf.zeros([], weights.head.bias.dtype))
    return training_loop(lambda start, _: start < tree.num_rows(data.x), one_chunk, start)[1]


def fedas(
    model,
    population,
    *,
    eta_align: float = 0.01,
    epochs_align: int = 1,
    batch_size_align: int | None = 16,
    weighting: str = "fisher",
    fisher: str = "batches",
    init: str = "w0",
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    head_init: str | None = None,
) -> Algorithm:
    """FedAS: shared backbone and private heads; the backbone is aligned first, and clients count by their Fisher trace.

    Update rule:

        client(theta):  m_k = mean of phi(x; theta_i) over the examples of class k            theta_i of the last visit
                        t = theta;  for every mini-batch D:  t <- t - eta_align grad a(t; D)          alignment
                        (theta_i, W_i) = SGD from (t, W_i) on l_i                             jointly; epochs or steps
                        F_i = sum over mini-batches D of |grad l(theta_i, W_i; D)|^2
                        keep theta_i and W_i, send theta_i - theta and F_i
        server:         theta <- theta + sum_{i in S} f_i (theta_i - theta),    f_i = F_i / sum_{j in S} F_j

        a(t; D) = sum_k (1 / (n_k M)) sum over the n_k examples of class k in D of |phi(x; t) - m_k|^2

    theta is the shared backbone with M features, W_i client i's own head, l(theta, W; D) the mean cross-entropy on a
    mini-batch D. The sum in a is over the classes in D; no gradient goes through m_k. S is the cohort.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        eta_align: the learning rate of the alignment, >= 0; 0 for none.
        epochs_align, batch_size_align: its passes over the client's examples, >= 1, and the examples in one of its
            mini-batches, >= 1; None for all.
        weighting: a client's weight in the average: 'fisher' (f_i), 'examples' (N_i / sum_{j in S} N_j) or 'uniform'
            (1 / r). An aggregator that counts all clients the same, such as median, makes each of them uniform.
        fisher: F_i: 'batches' (the sum above, over the examples in their order, with batch_size) or 'examples' (the
            mean over examples of |grad l|^2, the trace of the empirical Fisher information).
        init: theta_i before the first visit: 'w0' (the backbone of round 0) or 'first_broadcast' (the theta that the
            client receives).
        eta, steps, epochs, batch_size, momentum, client_opt: rate, amount, mini-batches, momentum and optimizer of the
            local steps, as in `fedavg`.
        head_init: how a client's head starts: 'glorot', 'uniform01' or 'zeros' (see `SplitModel`); None for the model's
            `head_init`.

    Returns:
        The `Algorithm`. A client keeps (theta_i, W_i) and predicts with it; before its first visit, with (theta, W_i).

    Raises:
        InvalidArgument: eta_align, eta or momentum is negative or not finite; epochs_align, batch_size_align, steps,
            epochs or batch_size is below 1, or steps and epochs are both given; weighting, fisher, init or head_init is
            not one of the values above; the model's kind is not 'classification'.

    Source:
        Yang, Huang, Ye, CVPR 2024, pages 11986 to 11995, and the authors' code.
    """
    check_classes(model.kind, "FedAS", ONLY_CLASSES)
    check_choice(
        weighting=(weighting, ("fisher", "examples", "uniform")),
        fisher=(fisher, ("batches", "examples")),
        init=(init, ("w0", "first_broadcast")),
        head_init=(head_init or model.head_init, HEAD_INITS),
    )
    work: dict[str, Any] = {"steps": steps, "epochs": epochs, "batch_size": batch_size}
    solve = local_solver(eta=eta, momentum=momentum, client_opt=client_opt, **work)
    align = local_solver(eta=eta_align, epochs=epochs_align, batch_size=batch_size_align, suffix="_align")
    objective = client_loss(model)
    by_examples = None if weighting == "fisher" else example_weight(model, weighting)

    def own_theta(theta, state):
        return state.theta if init == "w0" else tree.where(state.started, state.theta, theta)

    def aligned(theta, state, data):
        if eta_align == 0:
            return theta
        with passes.without_masks():
            own = model.features_in_chunks(own_theta(theta, state), data.x)
        means = class_means(own, data.y, data.info.num_classes)
        return align(lambda t, x, y: alignment_loss(model.features(t, x), y, means), theta, data)[0]

    def weight(weights, data):
        if by_examples is not None:
            return by_examples(data)
        num_examples = tree.num_rows(data.x)
        with passes.without_masks():
            if fisher == "examples":
                return fisher_trace(objective, weights, data, 1) / tf.cast(num_examples, model.dtype)
            return fisher_trace(objective, weights, data, num_examples if batch_size is None else batch_size)

    def client_update(theta, state, data):
        weights, loss = solve(objective, Weights(aligned(theta, state, data), state.head), data)
        state = Personal(weights.theta, weights.head, tf.constant(True))
        return ClientOutput(tree.subtract(weights.theta, theta), weight(weights, data), state, {"loss": loss})

    def personal_model(theta, state, data):
        return Weights(tree.where(state.started, state.theta, theta), state.head)

    return Algorithm(
        model=model,
        population=population,
        init_server=model.theta,
        init_client=lambda info: Personal(model.theta(), model.head(info, head_init), tf.constant(False)),
        message=lambda theta: theta,
        client_update=client_update,
        server_update=tree.add,
        personal_model=personal_model,
        local_model=lambda theta, output: Weights(output.state.theta, output.state.head),
        aggregate="mean",
        adapt=adaptation(
            model, personal_model, as_optimizer(client_opt, eta, momentum=momentum), batch_size=batch_size
        ),
        shares=None,
    )


FEDAS = Method(
    name="fedas",
    title="FedAS",
    builder=fedas,
    head="personal",
    message="broadcast",
    state="whole model",
    down="b",
    up="b",
    reference="Yang, Huang, Ye: FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024",
    only_classes=ONLY_CLASSES,
    no_objective="its clients count by their Fisher information, not by their losses. Use fedper or fedrep",
    no_batch_norm=SEVERAL_MODELS,
)
