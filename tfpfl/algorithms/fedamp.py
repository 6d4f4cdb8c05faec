"""FedAMP and HeurFedAMP: clients with similar models attend to each other (Huang, Chu, Zhou, Wang, Liu, Pei, Zhang:
Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021).

Objective: sum_i l_i(w_i) + lambda sum_{i<j} A(|w_i - w_j|^2), A(x) = 1 - exp(-x / sigma). There is no global model.

Messages: 4d bytes down (each client gets its own u_i, and its xi_ii for the logs), 4d up. On the device: the whole
model w_i. The server keeps the last model of every client, O(I d); `matrices` gives xi. In the paper all clients take
part in every round. Here a client can miss a round; the others then use its last model.

A client that never took part has weight 0 in all sums, and its own u_i is w^0, as for all clients in round 1. A new
client predicts with w^0 until its first upload. There is no `adapt`: before a client has uploaded a model that the
server can compare with others, it could only train from w^0 by itself.

Decisions: the factor 2 of the gradient is a part of alpha, as in the paper's weights. All clients start from one w^0
(in the paper's algorithm each client has its own, but averages of unrelated models are useless). The penalty is the
squared distance, and its gradient is used; one popular library uses the distance without its gradient, which has no
effect. xi_ii can be negative if alpha (I - 1) > sigma. Then there is a warning; rescale=True scales the weights of
others to sums of at most 1.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.method import SEVERAL_MODELS, Method
from tfpfl.algorithms.parts.local_training import local_solver
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.algorithms.parts.schedules import divided, factor
from tfpfl.algorithms.parts.server_rows import check_table, row_of
from tfpfl.checks import InvalidArgument, check_choice, check_fractions, check_penalty, check_rates, warn_user
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights

EPSILON = 1e-12  # smallest norm in the denominator of a cosine


class Server(NamedTuple):
    """The server's state; rows are in the order of the population's clients."""

    models: Any  # [I, d]: the last w_j that was sent
    present: Any  # bool [I]: whether a w_j was ever sent
    attention: Any  # [I, I]: xi


class Message(NamedTuple):
    """What a client receives: its mixture of all models."""

    u: Weights
    self_weight: Any  # float []: xi_ii


def squared_distances(models):
    """The squared distances |w_i - w_j|^2 of models [I, d]: [I, I], symmetric."""
    # Subtracting the mean first avoids cancellation if the models are close to each other.
    models = models - tf.reduce_mean(models, 0)
    squares = tf.reduce_sum(models * models, 1)
    found = squares[:, None] + squares[None] - 2 * tf.matmul(models, models, transpose_b=True)
    return tf.maximum((found + tf.transpose(found)) / 2, 0)


def cosines(models):
    """The cosines cos(w_i, w_j) of models [I, d]: [I, I]."""
    unit = models / tf.maximum(tf.norm(models, axis=1, keepdims=True), EPSILON)
    return tf.matmul(unit, unit, transpose_b=True)


def others(present):
    """The pairs (i, j) of different clients that have both sent a model: bool [I, I]."""
    return present[:, None] & present[None] & ~tf.eye(tf.size(present), dtype=tf.bool)


def attention(models, present, *, alpha, sigma, rescale=False):
    """The weights xi of FedAMP: [I, I], symmetric; every row sums to 1."""
    weights = tree.as_dtype(alpha / sigma, models.dtype) * tf.exp(-squared_distances(models) / sigma)
    weights = tf.where(others(present), weights, tf.zeros_like(weights))
    sums = tf.reduce_sum(weights, 1)
    if rescale:
        weights /= tf.maximum(tf.reduce_max(sums), 1)
        sums = tf.reduce_sum(weights, 1)
    return tf.linalg.set_diag(weights, 1 - sums)


def heuristic_attention(models, present, *, sigma, self_weight):
    """The weights xi of HeurFedAMP: [I, I], rows sum to 1; the diagonal is `self_weight`, or 1 without other models."""
    mask = others(present)
    scores = tf.where(mask, tree.as_dtype(sigma, models.dtype) * cosines(models), models.dtype.min)
    powers = tf.where(mask, tf.exp(scores - tf.reduce_max(scores, 1, keepdims=True)), tf.zeros_like(scores))
    shares = tf.math.divide_no_nan(powers, tf.reduce_sum(powers, 1, keepdims=True))
    rest = tree.as_dtype(1 - self_weight, models.dtype)
    own = tf.where(tf.reduce_any(mask, 1), tree.as_dtype(self_weight, models.dtype), tf.ones([], models.dtype))
    return tf.linalg.set_diag(rest * shares, own)


def fedamp(
    model,
    population,
    *,
    lam: float = 1.0,
    alpha: float = 0.1,
    sigma: float = 10.0,
    rescale: bool = False,
    start: str = "u",
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    implicit_prox: bool = False,
) -> Algorithm:
    """FedAMP: clients with similar models attend to each other. There is no global model: each client is pulled to its
    own mixture u_i of all clients' models.

    Update rule:

        server:       xi_ij = alpha exp(-|w_i - w_j|^2 / sigma) / sigma for j != i,  xi_ii = 1 - sum_{j != i} xi_ij
                      u_i   <- sum_j xi_ij w_j                          that is, U <- W - (alpha / 2) grad A(W)
        client(u_i):  w_i <- SGD from u_i on l_i(w) + (lambda / (2 alpha)) |w - u_i|^2
                      keep w_i, send w_i

    w_i is client i's whole model as it was last sent, l_i its mean cross-entropy, I the number of clients.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        lam: lambda, >= 0; a client is pulled to u_i by lambda / alpha.
        alpha: alpha_k, the step on the attraction between models, > 0; the theory's choice is lambda / sqrt(rounds).
        sigma: the scale of the squared distance, > 0; models at a larger distance hardly attract each other. The median
            squared distance is a good first value.
        rescale: divide the weights of others where they would sum to more than 1; default: take them as they are, and
            warn.
        start: where local training starts: 'u' (u_i) or 'w' (the client's own last model).
        eta, steps, epochs, batch_size, momentum, client_opt: rate, amount, mini-batches, momentum and optimizer of the
            local steps, as in `fedavg`.
        implicit_prox: take an implicit step on the pull, which is stable for every coefficient. Default: an explicit
            step, by its gradient.

    Returns:
        The `Algorithm`. A client keeps w_i and predicts with it. `matrices` gives xi.

    Raises:
        InvalidArgument: alpha or sigma is not positive or not finite; lam, eta or momentum is negative or not finite;
            steps, epochs or batch_size is below 1, or steps and epochs are both given; start is neither 'u' nor 'w';
            clients have different numbers of classes (this method shares one head) and the population has no
            `num_labels`; the server's table of I models does not fit into memory. Warns if eta lam / alpha >= 2 and the
            step is explicit (such steps diverge), and if alpha (I - 1) / sigma > 1.

    Source:
        Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, AAAI 2021, algorithm 1.
    """
    check_rates(lam=lam, alpha=alpha, sigma=sigma)
    for name, value in (("alpha", alpha), ("sigma", sigma)):
        if value <= 0:
            raise InvalidArgument(f"{name} must be greater than 0, found {value}")
    check_penalty(eta, implicit_prox, **{"lam / alpha": lam / alpha})
    closest = alpha * (population.num_clients - 1) / sigma
    if closest > 1 and not rescale:
        warn_user(
            f"alpha (I - 1) / sigma is {closest:.3g}: where models are close, the weights of others sum to more than 1 "
            "and a client's own is negative; take a smaller alpha, a larger sigma, or rescale=True (--rescale)"
        )
    solver: dict[str, Any] = {"eta": eta, "steps": steps, "epochs": epochs, "batch_size": batch_size}
    solver |= {"momentum": momentum, "client_opt": client_opt}
    weigh = {"alpha": alpha, "sigma": sigma, "rescale": rescale}
    return _attentive(
        model, population, lambda *table: attention(*table, **weigh), lam / alpha, start, implicit_prox, solver, True
    )


def heurfedamp(
    model,
    population,
    *,
    lam: float = 1.0,
    alpha: float = 0.1,
    sigma: float = 10.0,
    self_weight: float = 0.1,
    start: str = "u",
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    implicit_prox: bool = False,
) -> Algorithm:
    """HeurFedAMP: FedAMP whose weights come from the cosine between models, and whose self-weight xi_ii is given.

    Update rule:

        server:       xi_ij = (1 - xi_ii) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i, w_h)) for j != i
                      u_i   <- sum_j xi_ij w_j
        client(u_i):  w_i <- SGD from u_i on l_i(w) + (lambda / (2 alpha)) |w - u_i|^2
                      keep w_i, send w_i

    w_i is client i's whole model as it was last sent, l_i its mean cross-entropy, I the number of clients.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        lam, alpha: lambda >= 0 and alpha > 0: a client is pulled to u_i by lambda / alpha.
        sigma: how much the cosine between two models matters, >= 0; 0: all others count alike.
        self_weight: the weight xi_ii of a client's own model, in [0, 1].
        start, eta, steps, epochs, batch_size, momentum, client_opt, implicit_prox: start, rate, amount, mini-batches,
            momentum and optimizer of the local steps, and the pull's step, as in `fedamp`.

    Returns:
        The `Algorithm`. A client keeps w_i and predicts with it. `matrices` gives xi.

    Raises:
        InvalidArgument: alpha is not positive or not finite; lam, sigma, eta or momentum is negative or not finite;
            self_weight is outside [0, 1]; steps, epochs or batch_size is below 1, or steps and epochs are both given;
            start is neither 'u' nor 'w'; clients have different numbers of classes (this method shares one head) and
            the population has no `num_labels`; the server's table of I models does not fit into memory. Warns if eta
            lam / alpha >= 2 and the step is explicit: such steps diverge.

    Source:
        Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, AAAI 2021, the heuristic variant of algorithm 1.
    """
    check_rates(lam=lam, alpha=alpha, sigma=sigma)
    check_fractions(self_weight=self_weight)
    if alpha <= 0:
        raise InvalidArgument(f"alpha must be greater than 0, found {alpha}")
    check_penalty(eta, implicit_prox, **{"lam / alpha": lam / alpha})
    solver: dict[str, Any] = {"eta": eta, "steps": steps, "epochs": epochs, "batch_size": batch_size}
    solver |= {"momentum": momentum, "client_opt": client_opt}
    weigh = {"sigma": sigma, "self_weight": self_weight}
    return _attentive(
        model,
        population,
        lambda *table: heuristic_attention(*table, **weigh),
        lam / alpha,
        start,
        implicit_prox,
        solver,
    )


def _attentive(model, population, weigh, pull, start, implicit_prox, solver, attracts=False) -> Algorithm:
    """FedAMP (`attracts`) and HeurFedAMP; they differ only in the weights, `weigh`."""
    check_choice(start=(start, ("u", "w")))
    solve = local_solver(**solver, prox=lambda: divided("alpha", pull), implicit_prox=implicit_prox)
    objective, num_labels, people = client_loss(model), population.shared_labels(), population.num_clients
    num_weights = model.num_weights(num_labels)
    check_table(population, num_weights + people, model.dtype)

    def first():
        return Weights(model.theta(), model.shared_head(num_labels))

    def init_server():
        models = tf.tile(tree.to_vector(first())[None], [people, 1])
        return Server(models, tf.zeros([people], tf.bool), tf.eye(people, dtype=model.dtype))

    def message(server, client_id):
        row, known = row_of(population, client_id)
        xi, w_0 = server.attention[row], first()
        if attracts and (times := factor("alpha")) is not None:  # the weights of others have alpha_k as a factor
            xi = tf.tensor_scatter_nd_update(times * xi, row[None, None], (1 - times * (1 - xi[row]))[None])
        u = tree.from_vector(tf.linalg.matvec(server.models, xi, transpose_a=True), w_0)
        return Message(tree.where(known, u, w_0), tf.where(known, xi[row], tf.ones_like(xi[row])))

    def client_update(message, w, data):
        w, loss = solve(objective, message.u if start == "u" else w, data, anchor=message.u)
        metrics = {"loss": loss, "self_weight": message.self_weight}
        return ClientOutput(tree.to_vector(w), tf.ones([], model.dtype), w, metrics)

    def server_update(server, sent):
        rows = row_of(population, sent.client_ids)[0][:, None]
        models = tf.tensor_scatter_nd_update(server.models, rows, sent.values)
        present = tf.tensor_scatter_nd_update(server.present, rows, tf.ones_like(sent.client_ids, tf.bool))
        return Server(models, present, weigh(models, present))

    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=lambda info: first(),
        message=message,
        client_update=client_update,
        server_update=server_update,
        personal_model=lambda message, w, data: w,
        local_model=lambda message, output: output.state,
        aggregate="rows",
        matrices=lambda server: {"attention": server.attention},
        shares=None,
    )


FEDAMP = Method(
    name="fedamp",
    title="FedAMP",
    builder=fedamp,
    head="shared",
    message="per client",
    state="whole model",
    down="d",
    up="d",
    reference="Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on Non-IID "
    "Data, AAAI 2021",
    no_objective="its server keeps the model or the gradient of every client, and adds up nothing. Use fedavg",
    no_server_opt="its server keeps what every client sends, and does not only add a mean. Use client_opt",
    no_batch_norm=SEVERAL_MODELS,
)

HEURFEDAMP = replace(FEDAMP, name="heurfedamp", title="HeurFedAMP", builder=heurfedamp)
