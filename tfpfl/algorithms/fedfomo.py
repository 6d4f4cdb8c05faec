"""FedFomo: a client mixes the models of others, weighted by how much each helps it (Zhang, Sapra, Fidler, Yeung,
Alvarez: Personalized Federated Learning with First Order Model Optimization, ICLR 2021).

Objective: l_i(theta_i) for each client. Its validation examples tell which models of others lower its loss.

Messages: M models down (4 M d bytes), one model and M weights up (4d + 4M bytes). All M count as sent, also where fewer
models exist: in round 1 none, and never more than there are other clients. On the device: two whole models. The
server keeps a model and a row of P for every client, O(I d); `matrices` gives P. A new client starts from w^0, or from
the mean of the first models that it receives (init='mean'). It adapts as in a visit: it mixes once, before its first
epoch, and then trains.

A client's own model is always among those that it mixes, besides the M that it receives, as in NVlabs' code. It has
this model on the device, so nothing more is sent, and the model's weight stays there. own_model='visited' is the rule
of PGFed's code: the own model is one of the M, and only if the client was in the last cohort. After a pause, a model
that is better than theta_i^old but worse than theta_i can then replace theta_i as a whole.

Decisions: P grows by the normalized w_n, not by u_n. Among clients with equal P, the lowest id comes first. With
probability epsilon a client gets M random uploads instead (the paper's exploration; default 0). The validation examples
are drawn at a client's first visit and stay the same; the client never trains on them.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.method import SEVERAL_MODELS, Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import local_solver, support_and_query
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.algorithms.parts.server_rows import check_table, row_of
from tfpfl.checks import check_choice, check_fractions, check_whole_number
from tfpfl.models import passes, tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights

EPSILON = 1e-5  # added to the distance of two models, which divides the difference of their losses


class Server(NamedTuple):
    """The server's state; rows are in the order of the population's clients."""

    models: Any  # [I, d]: the last upload of every client
    last: Any  # bool [I]: the upload is from the last round
    P: Any  # [I, I]: how much the model of client n (column) has helped client i (row)
    rounds: Any  # int32 []: rounds done, for the random numbers of exploration


class Message(NamedTuple):
    """What a client receives: models of other clients."""

    models: Any  # [M, d]: theta_n
    valid: Any  # bool [M]: whether the entry is a model; there may be fewer than M


class Upload(NamedTuple):
    """What a client sends: its model, and its weights for the models that it received."""

    model: Any  # [d]: theta_i
    weights: Any  # [M]: w_n


class Personal(NamedTuple):
    """What a client keeps: its model, and the one from which its last training started."""

    theta: Weights  # theta_i
    old: Weights  # theta_i^old
    split: Any  # int32 [2]: the seed of its validation examples
    started: Any  # bool []: the client had a visit


def first_order_weights(loss, message, old):
    """The weights w_n >= 0 of the received models: [M]. They add up to 1, or are all 0 if no model has a lower loss.

    Args:
        loss: (Weights) -> float [], the validation loss L_i.
        message: the `Message` with the models theta_n.
        old: theta_i^old, with whose loss they are compared.
    """
    origin, loss_of_old = tree.to_vector(old), loss(old)

    def gain(theta_n):
        fall = loss_of_old - loss(tree.from_vector(theta_n, old))
        return fall / (tf.norm(theta_n - origin) + EPSILON)

    gains = tf.map_fn(gain, message.models, parallel_iterations=1)
    u = tf.where(message.valid & (gains > 0), gains, tf.zeros_like(gains))
    return tf.math.divide_no_nan(u, tf.reduce_sum(u))


def combined(theta, models, weights):
    """The combined model theta_i + sum_n w_n (theta_n - theta_i)."""
    theta_i = tree.to_vector(theta)
    step = tf.linalg.matvec(models - theta_i, weights, transpose_a=True)
    return tree.from_vector(theta_i + step, theta)


def before_visit(message, state, init):
    """The models (theta_i, theta_i^old) with which a client begins its visit.

    Args:
        init: the models before the first visit: 'w0', or 'mean' for the mean of the received models, if there are any.
    """
    if init == "w0":
        return state.theta, state.old
    valid = tf.cast(message.valid, message.models.dtype)
    total, count = tf.reduce_sum(message.models * valid[:, None], 0), tf.reduce_sum(valid)
    mean = tree.from_vector(total / tf.maximum(count, 1), state.theta)
    new = ~state.started & (count > 0)
    return tree.where(new, mean, state.theta), tree.where(new, mean, state.old)


def with_own(message, theta):
    """The message with the client's own model as one more candidate, the last."""
    own = tree.to_vector(theta)[None]
    return Message(tf.concat([message.models, own], 0), tf.concat([message.valid, [True]], 0))


def training_and_validation(data, fraction):
    """Splits the client's examples at random, by `data.key`, into (training, validation); fraction 0: all in both."""
    return support_and_query(data, fraction) if fraction else (data, data)


def explore(scores, rows, rounds, *, epsilon, seed):
    """Epsilon-greedy exploration: in each round, a client's row of scores is random with probability epsilon.

    Args:
        scores: float [n, I], rows of P.
        rows: int32 [n], the numbers of these rows.
        rounds: int32 [], the number of rounds before this one.
        epsilon: in [0, 1].
        seed: of the random numbers, >= 0.
    """
    people, seed = scores.shape[1], tf.stack([seed, rounds])
    coins = tf.random.stateless_uniform([people], seed, dtype=scores.dtype, alg="philox")
    others = tf.random.stateless_uniform([people, people], seed + [0, 2**30], dtype=scores.dtype, alg="philox")
    return tf.where(tf.gather(coins, rows)[:, None] < epsilon, tf.gather(others, rows), scores)


def highest(scores, last, count):
    """The `count` clients with the highest scores of those in `last`: (indices [n, count], bool: whether it exists).

    Args:
        scores: float [n, I].
        last: bool [I] or [n, I], who can be chosen.
    """
    best = tf.math.top_k(tf.where(last, scores, -tf.ones_like(scores)), count)
    return best.indices, best.values >= 0


def with_uploads(server, rows, of, uploads):
    """The server's state after a round: new models for the clients `rows` [r], and P_in + w_n for n in `of` [r, M]."""
    pairs = tf.stack([tf.broadcast_to(rows[:, None], tf.shape(of)), of], -1)  # [r, M, 2]: (i, n)
    return Server(
        models=tf.tensor_scatter_nd_update(server.models, rows[:, None], uploads.model),
        last=tf.scatter_nd(rows[:, None], tf.ones_like(rows, tf.bool), tf.shape(server.last)),
        P=tf.tensor_scatter_nd_add(server.P, pairs, uploads.weights),
        rounds=server.rounds + 1,
    )


def mixing_first(alone, mix, fraction):
    """The adaptation `alone` on the training examples, with the mixing of a visit before the first epoch."""

    def epoch(fit, data, n):
        training, validation = training_and_validation(data, fraction)
        theta = fit.weights
        theta = tf.cond(tf.equal(n, 0), lambda: mix(fit.message, theta, theta, validation)[0], lambda: theta)
        return alone.epoch(fit._replace(weights=theta), training, n)

    return alone._replace(epoch=epoch)


def fedfomo(
    model,
    population,
    *,
    candidates: int = 8,
    validation_fraction: float = 0.2,
    epsilon: float = 0.0,
    own_model: str = "always",
    init: str = "w0",
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
) -> Algorithm:
    """FedFomo: a client moves towards those other clients' models that have a lower loss on its validation examples,
    and then trains.

    Update rule:

        client(theta_1..theta_M):
            u_n = max(0, (L_i(theta_i^old) - L_i(theta_n)) / (|theta_n - theta_i^old| + 1e-5)),  w_n = u_n / sum_m u_m
            theta_i <- theta_i + sum_n w_n (theta_n - theta_i)          where no theta_n is better, all w_n are 0;
                                                                        theta_i itself is one of the theta_n
            theta_i^old <- theta_i;  theta_i <- SGD from theta_i on l_i
            keep theta_i and theta_i^old, send theta_i and all w_n
        server:
            P_in <- P_in + w_n                                          P is the identity at first
            client i gets next those M of the last round's theta_n, n != i, whose P_in are largest; with probability
            epsilon, any M of them

    theta is a whole model here, as in the paper; L_i is client i's mean cross-entropy on its validation examples, l_i
    that on its other ones. M is `candidates`.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        candidates: M, the models that a client receives, >= 1; at most as many as a cohort has clients.
        validation_fraction: part of the client's examples for L_i, in [0, 1], the rest being for training; 0: all for
            both.
        epsilon: the probability in [0, 1] that a client's candidates are random ones; default 0.
        own_model: when the client's own model is a candidate: 'always' (besides the M received), or 'visited' (as one
            of the M, if the client was in the last cohort).
        init: the model of a client before its first visit: 'w0' (that of round 0), or 'mean' (of the models that it
            receives first).
        eta, steps, epochs, batch_size, momentum, client_opt: rate, amount, mini-batches, momentum and optimizer of the
            local steps, as in `fedavg`.

    Returns:
        The `Algorithm`. A client keeps theta_i and theta_i^old, and predicts with theta_i. `matrices` gives P.

    Raises:
        InvalidArgument: candidates is below 1; validation_fraction or epsilon is outside [0, 1]; own_model is neither
            'always' nor 'visited'; init is neither 'w0' nor 'mean'; eta or momentum is negative or not finite; steps,
            epochs or batch_size is below 1, or steps and epochs are both given; clients have different numbers of
            classes (this method shares one head) and the population has no `num_labels`; the server's table of I models
            does not fit into memory.

    Source:
        Zhang, Sapra, Fidler, Yeung, Alvarez, ICLR 2021.
    """
    check_whole_number(1, candidates=candidates)
    check_fractions(validation_fraction=validation_fraction, epsilon=epsilon)
    check_choice(own_model=(own_model, ("always", "visited")), init=(init, ("w0", "mean")))
    rates = {"eta": eta, "momentum": momentum, "client_opt": client_opt}
    solve = local_solver(**rates, steps=steps, epochs=epochs, batch_size=batch_size)
    objective, num_labels, people = client_loss(model), population.shared_labels(), population.num_clients
    check_table(population, model.num_weights(num_labels) + people, model.dtype)
    M = min(candidates, population.sampling.most(people))

    def first():
        return Weights(model.theta(), model.shared_head(num_labels))

    def init_server():
        models = tf.tile(tree.to_vector(first())[None], [people, 1])
        return Server(models, tf.zeros([people], tf.bool), tf.eye(people, dtype=model.dtype), tf.constant(0))

    def candidates_of(server, client_ids):
        """(these clients' rows [n], the rows of their candidates [n, M], which of the candidates exist [n, M])"""
        rows, known = row_of(population, client_ids)
        P_i = tf.where(known[:, None], tf.gather(server.P, rows), tf.zeros_like(server.P[:1]))
        if epsilon:
            P_i = explore(P_i, rows, server.rounds, epsilon=epsilon, seed=model.seed)
        others = server.last
        if own_model == "always":  # the client has its own model already
            others &= ~(tf.one_hot(rows, people, on_value=True, off_value=False) & known[:, None])
        return rows, *highest(P_i, others, M)

    def message(server, client_id):
        _, of, valid = candidates_of(server, tf.reshape(client_id, [1]))
        return Message(tf.gather(server.models, of[0]), valid[0])

    def mix(message, theta, old, validation):
        """(theta_i + sum_n w_n (theta_n - theta_i), the weights w_n of the models received)"""
        all_of_them = with_own(message, theta) if own_model == "always" else message
        with passes.without_masks():  # a mask of Dropout would choose the models, too
            weights = first_order_weights(lambda at: objective(at, validation.x, validation.y), all_of_them, old)
        return combined(theta, all_of_them.models, weights), weights[: message.models.shape[0]]

    def client_update(message, state, data):
        split = tf.where(state.started, state.split, data.key)
        training, validation = training_and_validation(data._replace(key=split), validation_fraction)
        start, weights = mix(message, *before_visit(message, state, init), validation)
        theta, loss = solve(objective, start, training._replace(key=data.key))
        upload = Upload(tree.to_vector(theta), weights)
        state = Personal(theta, start, split, tf.constant(True))  # the start of this training is the next theta_i^old
        return ClientOutput(upload, tf.ones([], model.dtype), state, {"loss": loss})

    def server_update(server, sent):
        rows, of, _ = candidates_of(server, sent.client_ids)
        return with_uploads(server, rows, of, sent.values)

    def personal_model(message, state, data):
        return before_visit(message, state, init)[0]

    alone = adaptation(model, personal_model, as_optimizer(client_opt, eta, momentum=momentum), batch_size=batch_size)

    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=lambda info: Personal(first(), first(), tf.zeros([2], tf.int32), tf.constant(False)),
        message=message,
        client_update=client_update,
        server_update=server_update,
        personal_model=personal_model,
        local_model=lambda message, output: output.state.theta,
        aggregate="rows",
        matrices=lambda server: {"P": server.P},
        adapt=mixing_first(alone, mix, validation_fraction),
        shares=None,
    )


FEDFOMO = Method(
    name="fedfomo",
    title="FedFomo",
    builder=fedfomo,
    head="shared",
    message="per client",
    state="two whole models",
    down="candidates*d",
    up="d + candidates",
    reference="Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model "
    "Optimization, ICLR 2021",
    older={6: {"own_model": "visited"}},
    no_objective="its server keeps the model or the gradient of every client, and adds up nothing. Use fedavg",
    no_server_opt="its server keeps what every client sends, and does not only add a mean. Use client_opt",
    no_batch_norm=SEVERAL_MODELS,
)
