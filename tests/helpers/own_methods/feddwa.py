"""FedDWA, in a file of its own, as a user would write it: `tfpfl run --algorithm feddwa.py:FEDDWA`.

The server keeps the last model of every client and the last guidance model, and computes the weights when it sends.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl import Algorithm, ClientOutput, Method, Weights
from tfpfl.algorithms.parts import adaptation, check_table, local_solver, row_of, sgd
from tfpfl.checks import InvalidArgument
from tfpfl.models import client_loss, tree

EPSILON = 1e-6  # added to squared distances, which are divided by


class Table(NamedTuple):
    """The server's tables, and what a client sends to its row of them."""

    model: Any  # [I, d] or [d]: theta_i after the local work
    guidance: Any  # [I, d] or [d]: one more step from there, which says where the client wants to go


def feddwa(model, population, *, neighbours: int = 3, eta: float = 0.05, steps: int = 10) -> Algorithm:
    """FedDWA: each client gets its own mean of those models that are nearest to where it would go next.

    Args:
        neighbours: number of models in a client's mean, >= 1.
        eta, steps: rate and number of the local SGD steps, as in `fedavg`.
    """
    if neighbours < 1:
        raise InvalidArgument(f"neighbours must be at least 1, found {neighbours}")
    people, num_labels = population.num_clients, population.shared_labels()
    check_table(population, model.num_weights(num_labels), model.dtype, tables=2)
    solve, ahead = (local_solver(eta=eta, steps=n) for n in (steps, 1))
    objective, K = client_loss(model), min(neighbours, people)

    def first():
        return Weights(model.theta(), model.shared_head(num_labels))

    def init_server():
        rows = tf.tile(tree.to_vector(first())[None], [people, 1])
        return Table(rows, rows)

    def weights_of(tables, row):
        squares = tf.reduce_sum((tables.model - tf.gather(tables.guidance, row)) ** 2, 1)
        nearest = tf.math.top_k(-squares, K)
        inverse = 1 / (EPSILON - nearest.values)
        return tf.scatter_nd(nearest.indices[:, None], inverse / tf.reduce_sum(inverse), [people])

    def message(tables, client_id):
        row, known = row_of(population, client_id)
        weights = tf.where(known, weights_of(tables, row), tf.fill([people], tf.cast(1 / people, model.dtype)))
        return tree.from_vector(tf.linalg.matvec(tables.model, weights, transpose_a=True), first())

    def client_update(w, kept, data):
        end, loss = solve(objective, w, data)
        guidance, _ = ahead(objective, end, data)
        upload = Table(tree.to_vector(end), tree.to_vector(guidance))
        return ClientOutput(upload, tf.ones([], model.dtype), kept + 1, {"loss": loss})

    def server_update(tables, sent):
        rows, _ = row_of(population, sent.client_ids)
        return tf.nest.map_structure(lambda t, v: tf.tensor_scatter_nd_update(t, rows[:, None], v), tables, sent.values)

    def personal_model(w, kept, data):
        return w

    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=lambda info: tf.constant(0),  # how often the client took part
        message=message,
        client_update=client_update,
        server_update=server_update,
        personal_model=personal_model,
        local_model=lambda w, output: tree.from_vector(output.update.model, w),
        aggregate="rows",
        matrices=lambda tables: {"weights": tf.map_fn(lambda i: weights_of(tables, i), tf.range(people), model.dtype)},
        adapt=adaptation(model, personal_model, sgd(eta)),
    )


FEDDWA = Method(
    name="feddwa",
    title="FedDWA",
    builder=feddwa,
    head="shared",
    message="per client",
    state="a counter",
    down="d",
    up="2*d",
    reference="Liu, Chen, Zhao, Ma, Zhou: FedDWA: Personalized Federated Learning with Dynamic Weight Adjustment, "
    "IJCAI 2023",
    evaluates="personal",
    presets={"near": {"neighbours": 1}},
)
