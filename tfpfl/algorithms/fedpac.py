"""FedPAC: a shared backbone whose features are aligned, and heads that are combined (Xu, Tong, Huang; ICLR 2023).

Objective: sum_i alpha_i [l_i(W_i, theta) + lambda R_i(theta)]; R_i is the mean squared distance of client i's features
from the centroids of their classes over all clients.

Messages: 4 (d + h) bytes down: theta, the client's own head, and the centroids. 4 (d + 2h - C) up, with C classes:
theta's change, the head, the centroids, and the statistics from which the server finds how to combine heads. On the
device: nothing; the server keeps the combined head of every client, O(I h), and the weights of the last combination
(`matrices`). A new client gets theta and an initial head, and adapts the head. The local model is (theta_i, W_i).

The method needs one exchange. Its two steps, the head and then the backbone, follow one another on the device; the
heads are combined after the round, and the client gets its own when it comes back. (The authors' program hands it to
the client at the end of the round. Nothing else happens to it before the client's next round.)

Where the paper and the two programs differ (FedPAC of the authors, github.com/JianXu95/FedPAC, and FedPAC in PFLlib,
system/flcore/servers/serverpac.py and clients/clientpac.py of commit d832e76):

* Centroids are means over examples, as in the paper and the authors' `protos_aggregation` (tools.py). PFLlib takes the
  mean of the clients' centroids, whatever n_ik is (`proto_aggregation`, serverpac.py line 178).
* A class that nobody in the last cohort had has no centroid. As in the authors' `local_training` (fedpac.py), its
  features are then drawn to the client's own centroid from before the step, from round 2 on; in PFLlib to nothing
  (clientpac.py line 76).
* Weights of heads below `least_weight` = 0.001 become 0, and the rest is divided by its sum, as the authors do
  (`agg_classifier_weighted_p`, tools.py). PFLlib does not divide (serverpac.py line 242). The paper has no such limit.
* PFLlib replaces the clients' heads one after the other, in place, while `uploaded_heads` still refers to them
  (serverpac.py lines 148 to 164). So later clients combine heads that are combined already. Here, as in the paper,
  all combinations are of the heads that were sent.
* PFLlib takes the heads in a random order (serverpac.py line 129), and the statistics in the order of the cohort (line
  42): the weight found for one client's head multiplies the head of another. Where its program has no solution, line
  162 takes a client's id for a place in the cohort.
* Both programs hand the program to a solver of convex programs and repair matrices with negative eigenvalues. P_i is a
  sum of a diagonal and a Gram matrix and has none but by rounding; here it is in float64 (parts/simplex.py).
* The authors' program also has a weight decay of 0.0005, which the paper's update does not have, nor this one. PFLlib
  has one rate for both steps, no momentum, and mini-batches in both.
* PFLlib's statistics are taken when the client gets the model, as here: theta is new, and the client has not trained.

Without these differences PFLlib computes the same, to rounding (tests/algorithms/test_pfllib.py), where mini-batches
divide N_i; PFLlib leaves out the last examples, which fill none.

lam = 0 with combine = False is FedRep, except that the server keeps the heads, and `tau_g` and `tau_f` count epochs.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.method import SEVERAL_MODELS, Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer, at_second_rate
from tfpfl.algorithms.parts.local_training import example_weight, head_solver, local_solver
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.algorithms.parts.server_rows import check_table, row_of
from tfpfl.algorithms.parts.simplex import simplex_minimum
from tfpfl.checks import InvalidArgument, check_choice, check_fractions, check_rates
from tfpfl.models import passes, tree
from tfpfl.models.heads import check_classes
from tfpfl.models.losses import logits
from tfpfl.models.weights import Weights

ONLY_CLASSES = (
    "its centroids and statistics are of the examples of each class. FedRep also trains a head of the client's own and "
    "then a shared backbone, for every kind"
)


class Server(NamedTuple):
    """The server's state; rows are in the order of the population's clients."""

    theta: Any  # the backbone that all share
    heads: Any  # a Head of [I, M, K] and [I, K]: the combined head of every client
    centroids: Any  # [K, M]: of the examples of the last cohort, by class; 0 for a class that it did not have
    shares: Any  # [K]: the share of each class in these examples; all 0 before the first round
    combination: Any  # [I, I]: row i has the weights of the heads in client i's last combined head


class Message(NamedTuple):
    """What a client receives: the backbone, its combined head, and the classes' centroids with their shares."""

    theta: Any
    head: Any  # the client's own
    centroids: Any  # [K, M]
    shares: Any  # [K]


class Own(NamedTuple):
    """What the server needs of each client by itself."""

    head: Any
    variance: Any  # V_i, float []
    means: Any  # h_i [K, M]: h_ik = p_ik mu_ik


class Update(NamedTuple):
    """What a client sends: its step of the backbone, its sums for the centroids, and its head with statistics."""

    theta: Any  # theta_i - theta
    shares: Any  # p_i [K], n_ik / N_i
    centroids: Any  # [K, M]: p_ik times the mean of phi over class k, at theta_i
    own: Any  # an `Own`


def class_means(phi, y, num_classes: int):
    """(p [K], h [K, M]): the share of each class in the examples, and it times the mean of the class's features."""
    one_hot = tf.one_hot(y, num_classes, dtype=phi.dtype)
    number = tf.cast(tf.shape(phi)[0], phi.dtype)
    return tf.reduce_sum(one_hot, 0) / number, tf.matmul(one_hot, phi, transpose_a=True) / number


def head_weights(variances, means, least: float):
    """The weights a_ij of the cohort's heads in each client's combined head: float64 [r, r], row i of client i.

    Args:
        variances: V_j, float [r].
        means: h_jk, float [r, K, M].
        least: smaller weights become 0, and the others of the row are divided by their sum. If all were smaller, those
            that are close to the largest one stay.
    """
    variances, means = tf.cast(variances, tf.float64), tf.cast(means, tf.float64)
    flat = tf.reshape(means, [tf.shape(means)[0], -1])

    def of(own):
        away = own[None] - flat
        a = simplex_minimum(tf.linalg.diag(variances) + tf.matmul(away, away, transpose_b=True))
        largest = tf.reduce_max(a)
        a = tf.where(a > tf.where(largest > least, tf.cast(least, a.dtype), 0.999 * largest), a, tf.zeros_like(a))
        return a / tf.reduce_sum(a)

    size = tf.shape(flat)[0]  # 0 in a round of which all clients are rejected; map_fn has no shape for its result then
    return tf.cond(
        size > 0, lambda: tf.map_fn(of, flat, parallel_iterations=1), lambda: tf.zeros([size, size], tf.float64)
    )


def fedpac(
    model,
    population,
    *,
    lam: float = 1.0,
    eta_g: float = 0.1,
    eta_f: float = 0.01,
    tau_g: int = 1,
    tau_f: int = 5,
    unit: str = "epochs",
    batch_size: int | None = None,
    momentum: float = 0.5,
    client_opt: str | Optimizer = "sgd",
    combine: bool = True,
    least_weight: float = 0.001,
) -> Algorithm:
    """FedPAC: a client trains its head, then the backbone, whose features are drawn to common centroids of the classes;
    the server combines the heads of the cohort for each client, with weights from statistics of the features.

    Update rule:

        client(theta, W_i, c, s):
            h_ik  = 1 / N_i sum of phi(x) over the n_ik examples of class k, at theta;  mu_ik = h_ik N_i / n_ik
            V_i   = (1 / N_i sum |phi(x)|^2 - sum_k |h_ik|^2) / N_i
            W_i   <- SGD from W_i on l_i(., theta), rate eta_g, tau_g epochs         theta fixed
            t_k   = c_k if s_k > 0, else mu_ik
            theta_i <- SGD from theta on l_i(W_i, .) + lambda R_i, rate eta_f, tau_f epochs       the new W_i fixed
                     R_i = mean over examples and features of (phi(x) - t_y)^2;  0 if all s_k are 0 (round 1)
            p_ik  = n_ik / N_i;  h'_ik as h_ik, but at theta_i
            send theta_i - theta, W_i, V_i, h_i, p_i, h'_i
        server:
            theta <- theta + sum_{i in S} q_i (theta_i - theta),     q_i = N_i / sum_{j in S} N_j
            s_k   <- sum_i q_i p_ik;   c_k <- sum_i q_i h'_ik / s_k, or 0 if s_k = 0
            for every i in S:  a_i = argmin over a >= 0, sum_j a_j = 1 of  a' P_i a,  j and l in S
                                     P_i[j, l] = V_j [j = l] + sum_k <h_ik - h_jk, h_ik - h_lk>
                               a_ij <- 0 where a_ij <= least_weight;  a_i <- a_i / sum_j a_ij
                               W_i <- sum_j a_ij W_j, of the heads that were sent

    theta is the shared backbone, phi its M features, W_i client i's head for all K classes, l_i the mean cross-entropy
    on its N_i training examples. S is the cohort of the round. W_i of a client that is not in S stays. All W_i
    begin as one common head.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        lam: lambda >= 0, how strongly features are drawn to the centroids; 0 for not at all.
        eta_g, eta_f: learning rates of the head and of the backbone, >= 0.
        tau_g, tau_f: local work on the head, then on the backbone, >= 1.
        unit: what tau_g and tau_f count: 'steps' (mini-batches) or 'epochs'.
        batch_size: examples in a mini-batch, >= 1; None for all.
        momentum: of both phases, >= 0; it starts at 0 in each.
        client_opt: the optimizer of both phases, as in `fedavg`; its state starts anew in each.
        combine: whether heads are combined. If not, every client keeps the head that it sent.
        least_weight: heads with smaller weights are left out of a combination, in [0, 1); 0 for the exact minimum.

    Returns:
        The `Algorithm`. A client predicts with (theta, W_i), which the server keeps. `matrices` gives a_ij. The metric
        'loss' has the alignment in it.

    Raises:
        InvalidArgument: lam, a rate or momentum is negative or not finite, or eta_f has no effect beside an optimizer
            object; tau_g, tau_f or batch_size is below 1; unit is not one of the values above; least_weight is outside
            [0, 1); the model's kind is not classification; clients have different numbers of classes (this method has
            heads of one width) and the population has no `num_labels`; the server's table of I heads does not fit into
            memory.

    Source:
        Xu, Tong, Huang, ICLR 2023, and the authors' code.
    """
    check_classes(model.kind, "FedPAC", ONLY_CLASSES)
    check_choice(unit=(unit, ("steps", "epochs")))
    check_rates(lam=lam)
    check_fractions(least_weight=least_weight)
    if least_weight == 1:
        raise InvalidArgument("least_weight must be below 1, found 1: it would leave out every head")
    solver: dict[str, Any] = {"batch_size": batch_size, "momentum": momentum, "client_opt": client_opt}
    fit_head = head_solver(model, eta=eta_g, **{unit: tau_g}, suffix="_g", **solver)
    second = at_second_rate(client_opt, 0.01, eta_f=eta_f)
    fit_body = local_solver(eta=eta_f, **{unit: tau_f}, suffix="_f", **solver | {"client_opt": second})
    weight, num_labels, people = example_weight(model, "examples"), population.shared_labels(), population.num_clients
    check_table(population, model.num_weights(num_labels) - model.num_backbone_weights + people, model.dtype)

    def first_head():
        return model.shared_head(num_labels)

    def init_server():
        heads = tf.nest.map_structure(lambda w: tf.tile(w[None], [people] + [1] * len(w.shape)), first_head())
        centroids = tf.zeros([num_labels, model.num_features], model.dtype)
        return Server(model.theta(), heads, centroids, centroids[:, 0], tf.eye(people, dtype=model.dtype))

    def message(server, client_id):
        row, known = row_of(population, client_id)
        own = tf.nest.map_structure(lambda w: w[row], server.heads)
        return Message(server.theta, tree.where(known, own, first_head()), server.centroids, server.shares)

    def client_update(message, state, data):
        theta = message.theta
        with passes.without_masks():
            phi = model.features(theta, data.x)
        p, h = class_means(phi, data.y, num_labels)
        number = tf.cast(data.info.num_examples, phi.dtype)
        variance = (tf.reduce_mean(tf.reduce_sum(phi * phi, 1)) - tf.reduce_sum(h * h)) / number
        head, _ = fit_head(theta, message.head, data)

        own = tf.math.divide_no_nan(h, p[:, None])
        target = tf.where(message.shares[:, None] > 0, message.centroids, own)
        strength = tree.as_dtype(lam, phi.dtype) * tf.cast(tf.reduce_any(message.shares > 0), phi.dtype)

        def objective(theta, x, y):
            phi = model.features(theta, x)
            away = phi - tf.gather(target, y)
            return model.kind.loss(logits(head, phi), y) + strength * tf.reduce_mean(away * away)

        theta_i, loss = fit_body(objective, theta, data)
        with passes.without_masks():
            _, now = class_means(model.features(theta_i, data.x), data.y, num_labels)
        update = Update(tree.subtract(theta_i, theta), p, now, Own(head, variance, h))
        return ClientOutput(update, weight(data), state, {"loss": loss})

    def server_update(server, sent):
        rows, (heads, variances, means) = row_of(population, sent.own.client_ids)[0], sent.own.values
        if combine:
            a = tf.cast(head_weights(variances, means, least_weight), model.dtype)
        else:
            a = tf.eye(tf.shape(rows)[0], dtype=model.dtype)
        combined = tf.nest.map_structure(lambda w: tf.tensordot(a, w, 1), heads)
        put = tf.tensor_scatter_nd_update
        whole = tf.transpose(put(tf.zeros([people, tf.shape(rows)[0]], a.dtype), rows[:, None], tf.transpose(a)))
        return Server(
            tree.add(server.theta, sent.theta),
            tf.nest.map_structure(lambda table, new: put(table, rows[:, None], new), server.heads, combined),
            tf.math.divide_no_nan(sent.centroids, sent.shares[:, None]),
            sent.shares,
            put(server.combination, rows[:, None], whole),
        )

    def personal_model(message, state, data):
        return Weights(message.theta, message.head)

    head_optimizer = as_optimizer(client_opt, eta_g, momentum=momentum)
    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=lambda info: (),
        message=message,
        client_update=client_update,
        server_update=server_update,
        personal_model=personal_model,
        local_model=lambda message, output: Weights(
            tree.add(message.theta, output.update.theta), output.update.own.head
        ),
        aggregate=Update(theta="mean", shares="mean", centroids="mean", own="rows"),
        matrices=lambda server: {"combination": server.combination},
        adapt=adaptation(model, personal_model, head_optimizer, part="head", batch_size=batch_size),
        shares="backbone",
    )


FEDPAC = Method(
    name="fedpac",
    only_classes=ONLY_CLASSES,
    title="FedPAC",
    builder=fedpac,
    head="shared",
    message="per client",
    state="nothing",
    down="d + h",
    up="d + 2h - C",
    reference="Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration, "
    "ICLR 2023",
    no_objective="its server keeps the head of every client, and adds up more than one thing. Use fedrep or fedavg",
    no_server_opt="its server keeps what every client sends, and does not only add a mean. Use client_opt",
    no_batch_norm=SEVERAL_MODELS,
)
