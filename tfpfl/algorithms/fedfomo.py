"""FedFomo: a client mixes others' models by how much each would help it (Zhang, Sapra, Fidler, Yeung, Alvarez:
Personalized Federated Learning with First Order Model Optimization, ICLR 2021).

Objective: l_i(w_i) for each client, on its own validation examples: w_i is moved to where these say that it is lower.

    client(w_1..w_M):  u_n = max(0, (L_i(w_i^old) - L_i(w_n)) / (|w_n - w_i^old| + 1e-5))  L_i: validation examples
                       w_i <- sum_n u_n w_n / sum_n u_n  where some u_n > 0;  w_i^old = w_i
                       w_i <- SGD from w_i on l_i                                         on the other examples
                       keep w_i and w_i^old, send w_i and u / sum u
    server:            P_in += u_n / sum u;  P starts as the identity
                       next, client i gets those M of the last round's uploads whose P_in are largest

Messages: M models down (4 M d bytes), one model and M weights up (4d + 4M). On the device: two whole models. The server
keeps a model and a row of P for every client, O(I d), and `matrices` gives P. A new client has w^0, or (init='mean')
the mean of the models that it receives first; it adapts as in a visit: it mixes once, before its first epoch.

Decisions: u is normalized before it is added to P. Of equals in P, the client with the lowest id goes first; with
probability epsilon a client gets M uploads at random instead (the paper's exploration; default 0). The validation
examples are drawn at a client's first visit and stay the same: the client never trains on them.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl import tree
from tfpfl.adaptation import adaptation
from tfpfl.algorithm import Algorithm, ClientOutput, Weights
from tfpfl.local import check_choice, check_fractions, client_loss, local_solver, support_and_query
from tfpfl.optimizer import sgd
from tfpfl.table import check_table, row_of

EPSILON = 1e-5


class Server(NamedTuple):
    """What the server keeps; rows in the order of the population's clients."""

    models: Any  # [I, d]: the last upload of every client
    last: Any  # bool [I]: it was made in the last round
    P: Any  # [I, I]: how much each has helped each
    rounds: Any  # int32 []: that were, for epsilon


class Message(NamedTuple):
    """What a client receives."""

    models: Any  # [M, d]
    valid: Any  # bool [M]: it is a model; there may be fewer uploads than M


class Upload(NamedTuple):
    """What a client sends."""

    model: Any  # [d]: w_i
    weights: Any  # [M]: u / sum u, or all 0


class Personal(NamedTuple):
    """What a client keeps."""

    w: Weights  # w_i
    old: Weights  # w_i^old
    split: Any  # int32 [2]: the seed of its validation examples
    started: Any  # bool []: it was visited


def fedfomo(
    model,
    population,
    *,
    candidates: int = 8,
    validation_fraction: float = 0.2,
    epsilon: float = 0.0,
    init: str = "w0",
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
) -> Algorithm:
    """FedFomo.

    Args:
        candidates: M, the models that a client receives; at most the clients of a round.
        validation_fraction: part of the client's examples for L_i, the rest being for training; 0: all for both.
        epsilon: the probability that a client's candidates are random ones.
        init: the model of a client before its first visit, 'w0' or 'mean'.
        eta, steps, epochs, batch_size, momentum: of the local training, as in `fedavg`.

    Raises:
        ValueError: names the argument, and says what it may be; or the server's table does not fit in memory.
    """
    if candidates < 1:
        raise ValueError(f"candidates must be at least 1, found {candidates}")
    check_fractions(validation_fraction=validation_fraction, epsilon=epsilon)
    check_choice(init=(init, ("w0", "mean")))
    solve = local_solver(eta=eta, steps=steps, epochs=epochs, batch_size=batch_size, momentum=momentum)
    objective, num_labels, people = client_loss(model), population.shared_labels(), population.num_clients
    num_weights = model.num_weights(num_labels)
    check_table(population, num_weights + people, model.dtype)
    M = min(candidates, population.sampling.most(people))

    def first():
        return Weights(model.theta(), model.shared_head(num_labels))

    def init_server():
        models = tf.tile(tree.to_vector(first())[None], [people, 1])
        P = tf.eye(people, dtype=model.dtype)
        return Server(models, tf.zeros([people], tf.bool), P, tf.constant(0))

    def chosen(server, client_ids):
        """The rows of these clients' candidates [n, M], and which of them exist."""
        rows, known = row_of(population, client_ids)
        scores = tf.where(known[:, None], tf.gather(server.P, rows), tf.zeros_like(server.P[:1]))
        if epsilon:
            seed = tf.stack([model.seed, server.rounds])
            coins = tf.random.stateless_uniform([people], seed, dtype=model.dtype, alg="philox")
            others = tf.random.stateless_uniform([people, people], seed + [0, 2**30], dtype=model.dtype, alg="philox")
            random = tf.gather(coins, rows) < epsilon
            scores = tf.where(random[:, None], tf.gather(others, rows), scores)
        scores = tf.where(server.last, scores, -tf.ones_like(scores))
        best = tf.math.top_k(scores, M)
        return best.indices, best.values >= 0

    def message(server, client_id):
        rows, valid = chosen(server, tf.reshape(client_id, [1]))
        return Message(tf.gather(server.models, rows[0]), valid[0])

    def own(message, state):
        """(w_i, w_i^old) before the visit."""
        if init == "w0":
            return state.w, state.old
        count = tf.reduce_sum(tf.cast(message.valid, model.dtype))
        total = tf.reduce_sum(message.models * tf.cast(message.valid, model.dtype)[:, None], 0)
        mean = tree.from_vector(total / tf.maximum(count, 1), state.w)
        use = ~state.started & (count > 0)
        return tree.where(use, mean, state.w), tree.where(use, mean, state.old)

    def usefulness(message, old, data):
        """u_n: [M]."""
        origin, loss = tree.to_vector(old), objective(old, data.x, data.y)

        def one(w_n):
            fall = loss - objective(tree.from_vector(w_n, old), data.x, data.y)
            return tf.maximum(fall / (tf.norm(w_n - origin) + EPSILON), 0)

        u = tf.map_fn(one, message.models, parallel_iterations=1)
        return tf.where(message.valid, u, tf.zeros_like(u))

    def parts(data):
        """The examples for training, and those for L_i."""
        return support_and_query(data, validation_fraction) if validation_fraction else (data, data)

    def helped(message, w, old, query):
        """(the model after mixing, u / sum u)"""
        u = usefulness(message, old, query)
        total = tf.reduce_sum(u)
        weights = tf.math.divide_no_nan(u, total)
        mixed = tree.from_vector(tf.linalg.matvec(message.models, weights, transpose_a=True), w)
        return tree.where(total > 0, mixed, w), weights

    def client_update(message, state, data):
        split = tf.where(state.started, state.split, data.key)
        support, query = parts(data._replace(key=split))
        old, weights = helped(message, *own(message, state), query)
        w, loss = solve(objective, old, support._replace(key=data.key))
        update = Upload(tree.to_vector(w), weights)
        return ClientOutput(
            update, tf.ones([], model.dtype), Personal(w, old, split, tf.constant(True)), {"loss": loss}
        )

    def server_update(server, sent):
        rows = row_of(population, sent.client_ids)[0]
        of, _ = chosen(server, sent.client_ids)
        pairs = tf.stack([tf.broadcast_to(rows[:, None], tf.shape(of)), of], -1)  # [r, M, 2]: who was helped, by whom
        return Server(
            tf.tensor_scatter_nd_update(server.models, rows[:, None], sent.values.model),
            tf.scatter_nd(rows[:, None], tf.ones_like(rows, tf.bool), [people]),
            tf.tensor_scatter_nd_add(server.P, pairs, sent.values.weights),
            server.rounds + 1,
        )

    alone = adaptation(
        model, lambda message, state, data: own(message, state)[0], sgd(eta, momentum), batch_size=batch_size
    )

    def adapt_epoch(fit, data, n):
        support, query = parts(data)
        w = fit.weights
        w = tf.cond(tf.equal(n, 0), lambda: helped(fit.message, w, w, query)[0], lambda: w)
        return alone.epoch(fit._replace(weights=w), support, n)

    def init_client(info):
        return Personal(first(), first(), tf.zeros([2], tf.int32), tf.constant(False))

    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=init_client,
        message=message,
        client_update=client_update,
        server_update=server_update,
        personal_model=lambda message, state, data: own(message, state)[0],
        local_model=lambda message, output: output.state.w,
        aggregate="rows",
        matrices=lambda server: {"P": server.P},
        adapt=alone._replace(epoch=adapt_epoch),
    )
