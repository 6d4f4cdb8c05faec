"""pFedHN: a hypernetwork at the server makes each client's weights from an embedding of the client (Shamsian, Navon,
Fetaya, Chechik: Personalized Federated Learning using Hypernetworks, ICML 2021).

Objective: sum_i l_i(h(v_i; phi)) over the hypernetwork's weights phi and the clients' embeddings v_i. There is no
global model.

Messages: 4d bytes down (each client its own w_i = h(v_i; phi)), 4d up. On the device: nothing. The server keeps phi,
some 100 d numbers with the defaults and as many of momentum, and I embeddings. The local model is w_i after the
client's steps.

A client that never took part has an embedding that nobody has fitted, and predicts with what the hypernetwork makes of
it. A client outside of the population predicts with that of the mean embedding. To adapt, it is sent phi once (its
`Adaptation.message`), and fits an embedding of its own while phi stays as it is: each step is one of gradient descent
on l_i(h(v; phi)) over v. In the paper the server does this, and the client sends changes of weights as in training.

Paper and code (AvivSham/pFedHN, experiments/pfedhn): the paper's algorithm has one client in a round, and plain steps.
The code's server has momentum 0.9 and weight decay 0.001, and cuts gradients at the norm 50; these are the defaults
here. As in the code, momentum and decay act on all embeddings, those of absent clients too. With a cohort of r clients,
phi takes the mean of their gradients, and each of their embeddings its own, so that r = 1 is the paper's rule. The
code's clients also have a weight decay of 0.00005 and cut their gradients at 50; both are left out. The code draws all
layers as PyTorch does. Here the last layer's bias is w^0, so that all clients start near to the initial model, which
may be a trained one; bias_init='uniform' draws it.
"""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Adaptation, Algorithm, ClientOutput
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.local_training import batch_loop, local_solver, value_and_gradient
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.algorithms.parts.schedules import rate
from tfpfl.algorithms.parts.server_rows import check_table, row_of
from tfpfl.checks import InvalidArgument, check_choice, check_rates, check_whole_number
from tfpfl.data.randomness import ModelKey
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights


class Hyper(NamedTuple):
    """What the server trains; a momentum has the same structure."""

    embeddings: Any  # [I, E]: v_i, in the order of the population's clients
    layers: tuple  # phi: (kernel [in, out], bias [out]) of one layer after the other


class Server(NamedTuple):
    """The server's state: the hypernetwork with all embeddings, and the momentum of both."""

    hyper: Hyper
    velocity: Hyper


class Newcomer(NamedTuple):
    """What a client outside of the population is sent to adapt."""

    embedding: Any  # [E]: the mean of all
    layers: tuple  # phi


class Fit(NamedTuple):
    """What a new client carries from epoch to epoch."""

    layers: tuple  # phi, which stays
    embedding: Any  # [E]: its v


def generated(layers, embeddings):
    """h(v; phi): the weights [..., d] of embeddings [..., E]; rectified layers, the last two linear."""
    *first, middle, last = layers
    for kernel, bias in first:
        embeddings = tf.nn.relu(tf.matmul(embeddings, kernel) + bias)
    for kernel, bias in (middle, last):
        embeddings = tf.matmul(embeddings, kernel) + bias
    return embeddings


def pfedhn(
    model,
    population,
    *,
    embed_dim: int | None = None,
    hidden_dim: int = 100,
    n_hidden: int = 3,
    alpha: float = 0.01,
    embed_alpha: float | None = None,
    hyper_momentum: float = 0.9,
    wd: float = 0.001,
    clip: float | None = 50.0,
    bias_init: str = "w0",
    eta: float = 0.005,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.9,
    client_opt: str | Optimizer = "sgd",
    eta_new: float = 0.1,
) -> Algorithm:
    """pFedHN: the server's hypernetwork makes a whole model for each client, from an embedding that it learns of it.

    Update rule:

        server:       w_i = h(v_i; phi)                                      a message for each client
        client(w_i):  w_i' = SGD from w_i on l_i;  send w_i' - w_i
        server:       D_i  = w_i - w_i'
                      g    = 1 / r sum_{i in S} (dh(v_i; phi) / dphi)^T D_i
                      g_i  = (dh(v_i; phi) / dv_i)^T D_i for i in S,  0 for all others
                      (g, g_1, ..., g_I) is scaled to the norm `clip` if it is longer, as one vector
                      u    <- hyper_momentum u + g + wd phi;       phi <- phi - alpha u
                      u_i  <- hyper_momentum u_i + g_i + wd v_i;   v_i <- v_i - embed_alpha u_i    for all I clients
        new client:   v = mean of all v_i;  v <- v - eta_new grad_v l(h(v; phi))                   phi stays

        h(v; phi) = K_{L+1} (K_L relu(... relu(K_1 v + b_1) ...) + b_L) + b_{L+1},    L = n_hidden + 1

    w_i = (theta_i, W_i) is client i's whole model as one vector: the backbone's weights in their order, then the head's
    kernel and bias. l_i is its mean cross-entropy, S the cohort of r clients. Layers 1 to L have hidden_dim outputs,
    with relu after each but the L-th; the last has d. Initial v_i are normal with variance 1; kernels and biases are
    uniform in +-1 / sqrt(number of inputs), but for the last bias, which is w^0. All u start at 0.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        embed_dim: the length of an embedding, >= 1; None for floor(1 + I / 4), as in the authors' code.
        hidden_dim, n_hidden: outputs of a hidden layer, >= 1, and the number of relus, >= 0.
        alpha: learning rate of the weights of the hypernetwork, >= 0.
        embed_alpha: learning rate of the embeddings of clients, >= 0; None for alpha.
        hyper_momentum, wd: momentum and weight decay of both, >= 0. The paper's algorithm has 0 and 0.
        clip: the largest norm of the server's gradient, > 0; None: no limit, as in the paper.
        bias_init: the last layer's first bias: 'w0', the initial model, or 'uniform', as the other layers'.
        eta, steps, epochs, batch_size, momentum, client_opt: rate, amount, mini-batches, momentum and optimizer of the
            local steps, as in `fedavg`.
        eta_new: rate of a new client's steps on its embedding, >= 0; an epoch has the mini-batches of batch_size.

    Returns:
        The `Algorithm`. A client keeps nothing and predicts with h(v_i; phi).

    Raises:
        InvalidArgument: embed_dim or hidden_dim is below 1, n_hidden is negative; clip is not positive or not finite;
            alpha, embed_alpha, hyper_momentum, wd, eta, momentum or eta_new is negative or not finite; bias_init is not
            one of the values above; steps, epochs or batch_size is below 1, or steps and epochs are both given; clients
            have different numbers of classes (this method shares the width of the head) and the population has no
            `num_labels`; the hypernetwork does not fit into memory.

    Source:
        Shamsian, Navon, Fetaya, Chechik, ICML 2021, algorithm 1.
    """
    check_choice(bias_init=(bias_init, ("w0", "uniform")))
    embed_alpha = alpha if embed_alpha is None else embed_alpha
    check_rates(alpha=alpha, embed_alpha=embed_alpha, hyper_momentum=hyper_momentum, wd=wd, eta_new=eta_new)
    people, num_labels = population.num_clients, population.shared_labels()
    embed_dim = 1 + people // 4 if embed_dim is None else embed_dim
    check_whole_number(1, embed_dim=embed_dim, hidden_dim=hidden_dim)
    check_whole_number(0, n_hidden=n_hidden)
    if clip is not None and not 0 < clip < float("inf"):
        raise InvalidArgument(f"clip must be greater than 0 and finite, found {clip}; give none for no limit")
    num_weights = model.num_weights(num_labels)
    sizes = [embed_dim, *[hidden_dim] * (n_hidden + 1), num_weights]
    numbers = sum((a + 1) * b for a, b in zip(sizes, sizes[1:], strict=False))
    check_table(population, embed_dim + -(-numbers // people), model.dtype, tables=2)
    solve = local_solver(
        eta=eta, steps=steps, epochs=epochs, batch_size=batch_size, momentum=momentum, client_opt=client_opt
    )
    objective = client_loss(model)

    def first():
        return Weights(model.theta(), model.shared_head(num_labels))

    def init_server():
        seed = tf.constant([model.seed, ModelKey.HYPERNETWORK], tf.int32)

        def seed_of(place):
            return tf.random.experimental.stateless_fold_in(seed, place)

        layers = []
        for place, (inputs, outputs) in enumerate(zip(sizes, sizes[1:], strict=False), 1):
            shape = [inputs + 1, outputs]
            drawn = tf.random.stateless_uniform(shape, seed_of(place), -1, 1, dtype=model.dtype, alg="philox")
            drawn /= tree.as_dtype(np.sqrt(inputs), model.dtype)
            layers.append((drawn[:-1], drawn[-1]))
        if bias_init == "w0":
            layers[-1] = (layers[-1][0], tree.to_vector(first()))
        shape = [people, embed_dim]
        embeddings = tf.random.stateless_normal(shape, seed_of(0), dtype=model.dtype, alg="philox")
        hyper = Hyper(embeddings, tuple(layers))
        return Server(hyper, tree.zeros_like(hyper))

    def weights_of(layers, embedding) -> Weights:
        return tree.from_vector(generated(layers, embedding[None])[0], first())

    def message(server, client_id):
        embeddings, layers = server.hyper
        row, known = row_of(population, client_id)
        return weights_of(layers, tf.where(known, embeddings[row], tf.reduce_mean(embeddings, 0)))

    def client_update(w, state, data):
        new, loss = solve(objective, w, data)
        return ClientOutput(tree.to_vector(tree.subtract(new, w)), tf.ones([], model.dtype), state, {"loss": loss})

    def gradient(hyper, sent):
        rows = row_of(population, sent.client_ids)[0]
        own = tf.gather(hyper.embeddings, rows)
        with tf.GradientTape() as tape:
            tape.watch((own, hyper.layers))
            made = generated(hyper.layers, own)
        of_own, of_layers = tape.gradient(made, (own, hyper.layers), output_gradients=-sent.values)
        of_all = tf.scatter_nd(rows[:, None], of_own, tf.shape(hyper.embeddings, out_type=rows.dtype))
        found = Hyper(of_all, tree.scale(1 / tf.cast(tf.size(rows), model.dtype), of_layers))
        if clip is None:
            return found
        norm, limit = tf.sqrt(tree.dot(found, found)), tree.as_dtype(clip, model.dtype)
        return tree.scale(limit / tf.maximum(norm, limit), found)

    def server_update(server, sent):
        move = tree.add_scaled(gradient(server.hyper, sent), wd, server.hyper)
        velocity = tree.add_scaled(move, hyper_momentum, server.velocity)
        # What clients send is shorter already where their rate is, so these follow a schedule only if it names them.
        of_phi, of_v = rate("alpha", alpha, by_default=False), rate("embed_alpha", embed_alpha, by_default=False)
        embeddings = tree.add_scaled(server.hyper.embeddings, -of_v, velocity.embeddings)
        return Server(Hyper(embeddings, tree.add_scaled(server.hyper.layers, -of_phi, velocity.layers)), velocity)

    loop = batch_loop(epochs=1, batch_size=batch_size)

    def epoch(fit, data, n):
        def step(embedding, x, y):
            _, slope = value_and_gradient(lambda v: objective(weights_of(fit.layers, v), x, y), embedding)
            return tree.add_scaled(embedding, -eta_new, slope)

        return fit._replace(embedding=loop(step, fit.embedding, data, first=n))

    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=lambda info: (),
        message=message,
        client_update=client_update,
        server_update=server_update,
        personal_model=lambda w, state, data: w,
        local_model=lambda w, output: tree.add(w, tree.from_vector(output.update, w)),
        aggregate="rows",
        adapt=Adaptation(
            start=lambda newcomer, state, data: Fit(newcomer.layers, newcomer.embedding),
            epoch=epoch,
            model=lambda fit: weights_of(fit.layers, fit.embedding),
            message=lambda server: Newcomer(tf.reduce_mean(server.hyper.embeddings, 0), server.hyper.layers),
        ),
        shares=None,
    )


PFEDHN = Method(
    name="pfedhn",
    title="pFedHN",
    builder=pfedhn,
    head="shared",
    message="per client",
    state="nothing",
    down="d",
    up="d",
    reference="Shamsian, Navon, Fetaya, Chechik: Personalized Federated Learning using Hypernetworks, ICML 2021",
    no_objective="its server trains a hypernetwork by every client's own change, and adds up no model. Use fedavg",
    no_server_opt="its server has an optimizer of its own. Use alpha, hyper_momentum and wd",
    no_batch_norm=dict.fromkeys(
        ("local", "shared"), "the server makes all weights of a client, and has no statistics of layers. Use 'frozen'"
    ),
)
