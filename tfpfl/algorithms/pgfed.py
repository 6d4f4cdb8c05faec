"""PGFed and PGFedMo: every client minimizes all risks, those of others to first order (Luo, Mendieta, Chen, Wu: PGFed:
Personalize Each Client's Global Objective for Federated Learning, ICCV 2023, arXiv 2212.01448).

Objective of client i: F_i(w) = l_i(w) + mu sum_j A_ij l_j(w). Client i does not have the data of client j, so l_j is
replaced by its first-order approximation at j's last model w_j with gradient G_j:
l_j(w_j) + G_j . (w - w_j) = (s_j + mu G_j . w) / mu with s_j = mu (l_j(w_j) - G_j . w_j). The coefficients A_ij >= 0,
the weights of the others' risks, are learned too.

Messages: 3d + 2I numbers down, 2d + I up: 2.5 times the bytes of FedAvg. On the device: the whole model v_i, and for
PGFedMo also aux_i, and the momentum with `keep_momentum`. The server keeps d numbers and a row of A for every client,
O(I d); `matrices` gives A. A client that never took part predicts with w^0, as in the authors' code; init='newest' lets
it predict with the newest w, which raises the mean over all clients in early rounds, and with it "rounds to 70 %". A
new client, one outside the population, gets w and adapts it by SGD on l_i (the paper's fine-tuning). In round 1 there
is no last cohort S, and the round is one of FedAvg; with mu = 0 every round is. Its bytes are counted as those of the
other rounds.

Decisions: A starts at 1 / r, where r is the expected number of clients in a round. The sums over j in S include j = i
if i was in S. A changes before the model, with the old v (as in the authors' code; in the paper's algorithm after it),
and is at least 0 (the code; the paper says only "positive"). The weights q_i add up to 1 (the code; not in the paper's
algorithm). A round without clients changes nothing: S stays the last cohort that was not empty. The momentum starts at
0 in every visit; in the authors' code a client keeps it (`keep_momentum`).
"""

from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.method import SEVERAL_MODELS, Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import (
    batch_loop,
    check_kept,
    example_weight,
    step_gradient,
    whole_gradient,
)
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.algorithms.parts.schedules import paced, rate
from tfpfl.algorithms.parts.server_rows import check_table, row_of
from tfpfl.checks import check_choice, check_fractions, check_rates
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights


class Server(NamedTuple):
    """The server's state; rows are in the order of the population's clients."""

    w: Weights
    A: Any  # [I, I]
    gradients: Any  # [I, d]: G_j of the last cohort, 0 for all others
    offsets: Any  # [I]: s_j of the last cohort, 0 for all others
    last: Any  # bool [I]: whether the client was in the last cohort


class Message(NamedTuple):
    """What a client receives: the model, and the first-order risks of the others."""

    w: Weights
    g_t: Weights
    g_bar: Weights
    s: Any  # [I]
    A_i: Any  # [I]
    some: Any  # bool []: there was a cohort before this round


class Report(NamedTuple):
    """What a client reports about its risk and its row of A."""

    gradient: Any  # [d]: G_i
    offset: Any  # float []: s_i
    A_i: Any  # [I]


class Update(NamedTuple):
    """What a client sends: its change of the model, and its report."""

    delta: Weights  # v_i - w
    report: Report


class Buffer(NamedTuple):
    """PGFedMo's moving average of the others' gradients."""

    aux: Weights
    filled: Any  # bool []: aux has a value from a visit


class Personal(NamedTuple):
    """What a client keeps: its personal model, and PGFedMo's buffer."""

    v: Weights
    started: Any  # bool []: the client had a visit; before the first one v has no meaning
    buffer: Any  # PGFedMo's Buffer; PGFed has none: ()
    slots: Any = ()  # keep_momentum: the momentum of its last visit


def pgfed(
    model,
    population,
    *,
    mu: float = 0.1,
    eta: float = 0.007,
    eta2: float = 0.01,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    keep_momentum: bool = False,
    weighting: str = "examples",
    init: str = "w0",
) -> Algorithm:
    """PGFed: every client minimizes the risks of all clients, those of others to first order, and learns their weights.

    Update rule:

        client(w, g_t, g_bar, s, A_i):   g_t = mu sum_j A_ij G_j,  g_bar = (mu / |S|) sum_j G_j,  j in S
            aux = g_t
            v <- w; for each mini-batch:  A_ij <- max(0, A_ij - eta2 (s_j + g_bar . v))    for j in S
                                          v <- SGD step on grad l_i(v; batch) + aux        momentum acts on both
            keep v, send v - w, G_i = grad l_i(v) and s_i = mu (l_i(v) - G_i . v) on all examples, and A_i
        server:  w <- w + sum_i q_i (v_i - w);  keep A_i, and of this cohort G_i and s_i

    w and v are whole models, l_i is client i's mean cross-entropy; the last cohort is S, and q_i = N_i / sum_{j in S}
    N_j over the present one.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        mu: the weight of the others' risks, >= 0; 0 is FedAvg.
        eta2: learning rate of the matrix A, >= 0.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the local steps, and the weights of the average, as in `fedavg`.
        keep_momentum: whether a client keeps the momentum of its last visit, as in the authors' code; default: the
            momentum starts at 0 in every visit.
        init: the model of a client before its first visit: 'w0' (that of round 0, as in the authors' code) or 'newest'
            (the server's newest w).

    Returns:
        The `Algorithm`. A client keeps v and predicts with it. `matrices` gives A.

    Raises:
        InvalidArgument: mu, eta, eta2 or momentum is negative or not finite; keep_momentum without momentum; steps,
            epochs or batch_size is below 1, or steps and epochs are both given; weighting is neither 'examples' nor
            'uniform'; init is neither 'w0' nor 'newest'; clients have different numbers of classes (this method shares
            one head) and the population has no `num_labels`; the server's table of I gradients does not fit into
            memory.

    Source:
        Luo, Mendieta, Chen, Wu, ICCV 2023, algorithm 1.
    """
    work = {"steps": steps, "epochs": epochs, "batch_size": batch_size}
    return _pgfed(model, population, None, mu, eta, eta2, momentum, client_opt, keep_momentum, weighting, init, work)


def pgfedmo(
    model,
    population,
    *,
    mu: float = 0.1,
    beta: float = 0.5,
    eta: float = 0.007,
    eta2: float = 0.01,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    keep_momentum: bool = False,
    weighting: str = "examples",
    init: str = "w0",
) -> Algorithm:
    """PGFedMo: PGFed with momentum for the gradients of the others.

    Update rule:

        client(w, g_t, g_bar, s, A_i):   g_t = mu sum_j A_ij G_j,  g_bar = (mu / |S|) sum_j G_j,  j in S
            aux = (1 - beta) g_t + beta aux_i, kept as aux_i;  the first time, aux = g_t
            v <- w; for each mini-batch:  A_ij <- max(0, A_ij - eta2 (s_j + g_bar . v))    for j in S
                                          v <- SGD step on grad l_i(v; batch) + aux        momentum acts on both
            keep v, send v - w, G_i = grad l_i(v) and s_i = mu (l_i(v) - G_i . v) on all examples, and A_i
        server:  w <- w + sum_i q_i (v_i - w);  keep A_i, and of this cohort G_i and s_i

    w and v are whole models, l_i is client i's mean cross-entropy; the last cohort is S, and q_i = N_i / sum_{j in S}
    N_j over the present one.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        beta: the weight of the old aux_i in aux, in [0, 1]; 0 is PGFed.
        mu, eta, eta2, steps, epochs, batch_size, momentum, client_opt, keep_momentum, weighting, init: as in `pgfed`.

    Returns:
        The `Algorithm`. A client keeps v and aux_i, and predicts with v. `matrices` gives A.

    Raises:
        InvalidArgument: beta is outside [0, 1]; mu, eta, eta2 or momentum is negative or not finite; keep_momentum
            without momentum; steps, epochs or batch_size is below 1, or steps and epochs are both given; weighting is
            neither 'examples' nor 'uniform'; init is neither 'w0' nor 'newest'; clients have different numbers of
            classes (this method shares one head) and the population has no `num_labels`; the server's table of I
            gradients does not fit into memory.

    Source:
        Luo, Mendieta, Chen, Wu, ICCV 2023, algorithm 1 with its momentum.
    """
    check_fractions(beta=beta)
    work = {"steps": steps, "epochs": epochs, "batch_size": batch_size}
    return _pgfed(model, population, beta, mu, eta, eta2, momentum, client_opt, keep_momentum, weighting, init, work)


def gradients_of_others(server, A_i, mu):
    """g_t = mu sum_j A_ij G_j and g_bar = (mu / |S|) sum_j G_j over the last cohort S, each in the shape of a model."""
    cohort = tf.cast(server.last, A_i.dtype)
    coefficients = tf.stack([A_i, tf.math.divide_no_nan(cohort, tf.reduce_sum(cohort))])
    g_t, g_bar = tf.unstack(mu * tf.matmul(coefficients, server.gradients))  # the rows of clients outside S are 0
    return tree.from_vector(g_t, server.w), tree.from_vector(g_bar, server.w)


def with_momentum(message, buffer, beta):
    """PGFedMo's (aux, new buffer): aux = (1 - beta) g_t + beta aux_i, or g_t if the buffer was never filled."""
    mixed = tree.add_scaled(tree.scale(1 - beta, message.g_t), beta, buffer.aux)
    aux = tree.where(buffer.filled, mixed, message.g_t)
    kept = Buffer(aux, tf.constant(True))
    return tree.where(message.some, (aux, kept), (message.g_t, buffer))  # round 1 does not fill the buffer


def after_round(server, rows, update):
    """The server's state after a round: w + sum_i q_i (v_i - w), and the A_i, G_i and s_i of the cohort.

    Args:
        server: the state before the round.
        rows: int32 [r, 1], the rows of the cohort's clients.
        update: an `Update`: the mean of v_i - w, and the reports as `Rows`.
    """
    report = update.report.values
    # A client can learn A_ij only for clients j of the last cohort, whose gradients it received.
    A_i = tf.where(server.last, report.A_i, tf.gather_nd(server.A, rows))
    return Server(
        w=tree.add(server.w, update.delta),
        A=tf.tensor_scatter_nd_update(server.A, rows, A_i),
        gradients=tf.scatter_nd(rows, report.gradient, tf.shape(server.gradients)),
        offsets=tf.scatter_nd(rows, report.offset, tf.shape(server.offsets)),
        last=tf.scatter_nd(rows, tf.ones_like(rows[:, 0], tf.bool), tf.shape(server.last)),
    )


def _pgfed(
    model, population, beta, mu, eta, eta2, momentum, client_opt, keep_momentum, weighting, init, work
) -> Algorithm:
    """PGFed (`beta` None) and PGFedMo."""
    check_rates(mu=mu, eta=eta, eta2=eta2, momentum=momentum)
    check_kept(keep_momentum, momentum)
    check_choice(init=(init, ("w0", "newest")))
    loop, optimizer = batch_loop(**work), paced(as_optimizer(client_opt, eta, momentum=momentum), "eta")
    objective, weight = client_loss(model), example_weight(model, weighting)
    num_labels, people = population.shared_labels(), population.num_clients
    num_weights = model.num_weights(num_labels)
    check_table(population, num_weights + people, model.dtype)

    def first():
        return Weights(model.theta(), model.shared_head(num_labels))

    def new_row():
        return tf.fill([people], tree.as_dtype(1 / population.clients_per_round, model.dtype))

    def init_server():
        return Server(
            w=first(),
            A=tf.tile(new_row()[None], [people, 1]),
            gradients=tf.zeros([people, num_weights], model.dtype),
            offsets=tf.zeros([people], model.dtype),
            last=tf.zeros([people], tf.bool),
        )

    def init_client(info):
        w_0 = first()
        slots = optimizer.init(w_0) if keep_momentum else ()
        return Personal(w_0, tf.constant(False), () if beta is None else Buffer(w_0, tf.constant(False)), slots)

    def message(server, client_id):
        row, known = row_of(population, client_id)
        A_i = tf.where(known, server.A[row], new_row())
        g_t, g_bar = gradients_of_others(server, A_i, mu)
        return Message(server.w, g_t, g_bar, server.offsets, A_i, tf.reduce_any(server.last))

    def client_update(message, state, data):
        aux, buffer = (message.g_t, ()) if beta is None else with_momentum(message, state.buffer, beta)

        def one_batch(carry, x, y):
            v, slots, A_i, _ = carry
            loss, g = step_gradient(objective, v, data._replace(x=x, y=y), work["batch_size"])
            A_i = tf.maximum(A_i - rate("eta2", eta2) * (message.s + tree.dot(message.g_bar, v)), 0)
            slots, v = optimizer.step(slots, v, tree.add(g, aux))
            return v, slots, A_i, loss

        slots = state.slots if keep_momentum else optimizer.init(message.w)
        start = (message.w, slots, message.A_i, tf.zeros([], model.dtype))
        v, slots, A_i, loss = loop(one_batch, start, data)
        l_i, G_i = whole_gradient(objective, v, data)
        report = Report(tree.to_vector(G_i), mu * (l_i - tree.dot(G_i, v)), A_i)
        state = Personal(v, tf.constant(True), buffer, slots if keep_momentum else ())
        return ClientOutput(Update(tree.subtract(v, message.w), report), weight(data), state, {"loss": loss})

    def server_update(server, update):
        return after_round(server, row_of(population, update.report.client_ids)[0][:, None], update)

    def personal_model(message, state, data):
        return state.v if init == "w0" else tree.where(state.started, state.v, message.w)

    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=init_client,
        message=message,
        client_update=client_update,
        server_update=server_update,
        personal_model=personal_model,
        global_model=lambda message: message.w,
        local_model=lambda message, output: output.state.v,
        aggregate=Update("mean", "rows"),
        matrices=lambda server: {"A": server.A},
        adapt=adaptation(model, lambda message, state, data: message.w, optimizer, batch_size=work["batch_size"]),
        shares=None,
    )


PGFED = Method(
    name="pgfed",
    title="PGFed",
    builder=pgfed,
    head="shared",
    message="per client",
    state="whole model",
    down="3d + 2I",
    up="2d + I",
    reference="Luo, Mendieta, Chen, Wu: PGFed: Personalize Each Client's Global Objective for Federated Learning, "
    "ICCV 2023",
    older={6: {"init": "newest"}},
    no_objective="its server keeps the model or the gradient of every client, and adds up nothing. Use fedavg",
    no_server_opt="its server keeps what every client sends, and does not only add a mean. Use client_opt",
    no_batch_norm=SEVERAL_MODELS,
)

PGFEDMO = replace(PGFED, name="pgfedmo", title="PGFedMo", builder=pgfedmo, state="whole model and a gradient")
