"""FedDyn: a regularizer per client, updated at every visit (Acar, Zhao, Matas, Mattina, Whatmough, Saligrama; 2021).

Objective: (1 / I) sum_i l_i(w), one model for all; all clients have the same weight. g_i is client i's gradient at its
last solution. With g_i in the local objectives, a point that is stationary for all clients is stationary for the global
objective. (ICLR 2021)

Messages: 4d bytes down, 4d up. The server takes r from the weights, which are 1. On the device: g_i, of the size of the
model, which starts at 0. h includes the g_i of all clients, also of those that never took part or have left. A new
client gets w and has g_i = 0; it adapts w by SGD, without the regularizer. The local model is v_i.

a is `dyn`, and must be positive. The limit a -> 0 is not FedAvg, because h / a does not go to 0: with fixed local steps
round 1 then gives w + (1 + r / I) mean (v_i - w). With implicit_prox the step is
v <- (v - eta (grad l_i(v) - g_i) + eta a w) / (1 + eta a), which is stable for every a. In PGFed's comparison a client
keeps the momentum of its last visit (`keep_momentum`): then it also keeps d numbers, and its state is a `Kept`.
"""

from typing import NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.local_training import check_kept, resumed_solver
from tfpfl.algorithms.parts.optimizers import sgd
from tfpfl.checks import InvalidArgument, check_penalty
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights


class Server(NamedTuple):
    """The server's state: the model, and the mean of all g_i."""

    w: Weights
    h: Weights  # (1 / I) sum_i g_i


class Kept(NamedTuple):
    """What a client keeps with `keep_momentum`."""

    g: Weights  # g_i
    velocity: Weights  # of the last visit, see `resumed_solver`


def feddyn(
    model,
    population,
    *,
    dyn: float = 0.1,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    keep_momentum: bool = False,
    implicit_prox: bool = False,
) -> Algorithm:
    """FedDyn: one model for all clients; every client has a regularizer, updated at each visit, that makes the clients'
    solutions agree.

    Update rule:

        client(w):  v_i = SGD from w on l_i(v) - <g_i, v> + (a / 2) |v - w|^2         epochs or steps
                    g_i <- g_i - a (v_i - w);  keep g_i, send v_i - w
        server:     h <- h - (a / I) sum_{i in S} (v_i - w)                           so h stays (1 / I) sum_i g_i
                    w <- (1 / r) sum_{i in S} v_i - h / a

    w and v are whole models, l_i is client i's mean cross-entropy, a is `dyn`. S is the cohort, r of I clients.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        dyn: a, the regularizer's coefficient, > 0.
        eta, steps, epochs, batch_size, momentum: rate, amount, mini-batches and momentum of the local SGD, as in
            `fedavg`.
        keep_momentum: whether a client keeps the momentum of its last visit, as in PGFed's code; default: the momentum
            starts at 0 in every visit.
        implicit_prox: take an implicit step on the quadratic part, which is stable for every coefficient. Default: an
            explicit step, by its gradient.

    Returns:
        The `Algorithm`. A client keeps g_i and predicts with w.

    Raises:
        InvalidArgument: dyn is not positive or not finite (the server divides by it); eta or momentum is negative or
            not finite; keep_momentum without momentum; steps, epochs or batch_size is below 1, or steps and epochs are
            both given; clients have different numbers of classes (this method shares one head) and the population has
            no `num_labels`. Warns if eta dyn >= 2 and the step is explicit: such steps diverge.

    Source:
        Acar, Zhao, Matas, Mattina, Whatmough, Saligrama, ICLR 2021, algorithm 1.
    """
    check_penalty(eta, implicit_prox, dyn=dyn)
    if dyn == 0:
        raise InvalidArgument("dyn must be positive, found 0: the server divides by it")
    check_kept(keep_momentum, momentum)
    work = {"eta": eta, "steps": steps, "epochs": epochs, "batch_size": batch_size, "momentum": momentum}
    solve = resumed_solver(**work, prox=dyn, implicit_prox=implicit_prox)
    objective, num_labels = client_loss(model), population.shared_labels()

    def init_server():
        w = Weights(model.theta(), model.shared_head(num_labels))
        return Server(w, tree.zeros_like(w))

    def init_client(info):
        g = init_server().h
        return Kept(g, tree.zeros_like(g)) if keep_momentum else g

    def kept(g, dv, velocity):
        g = tree.add_scaled(g, -dyn, dv)
        return Kept(g, velocity) if keep_momentum else g

    def client_update(w, state, data):
        g, velocity = state if keep_momentum else (state, tree.zeros_like(w) if momentum else ())
        v, velocity, loss = solve(objective, w, velocity, data, anchor=w, penalty=lambda v: -tree.dot(g, v))
        dv = tree.subtract(v, w)
        return ClientOutput(dv, tf.ones([], model.dtype), kept(g, dv, velocity), {"loss": loss})

    def server_update(server, mean_dv, r):
        h = tree.add_scaled(server.h, -dyn / population.num_clients * r, mean_dv)
        return Server(tree.add_scaled(tree.add(server.w, mean_dv), -1 / dyn, h), h)

    def balance(state, output):
        g, velocity = (state.g, output.state.velocity) if keep_momentum else (state, ())
        return kept(g, output.update, velocity)

    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=init_client,
        message=lambda server: server.w,
        client_update=client_update,
        server_update=server_update,
        personal_model=lambda w, g, data: w,
        local_model=lambda w, output: tree.add(w, output.update),
        aggregate="mean",
        adapt=adaptation(model, lambda w, g, data: w, sgd(eta, momentum), batch_size=batch_size),
        shares="model",
        balance=balance,
    )


FEDDYN = Method(
    name="feddyn",
    title="FedDyn",
    builder=feddyn,
    head="shared",
    message="broadcast",
    state="gradient (d)",
    evaluates="global",
    down="d",
    up="d",
    reference="Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic "
    "Regularization, ICLR 2021",
    no_objective="its regularizers are of the mean of all clients' losses. Use fedavg",
    no_server_opt="its server keeps a sum of what its clients keep, and takes its step from it. Use fedprox",
    no_client_opt="its clients read a gradient off their SGD steps, and the server adds these up. Use fedprox",
)
