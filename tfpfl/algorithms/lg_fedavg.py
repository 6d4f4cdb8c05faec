"""LG-FedAvg: private bodies under a shared head (Liang et al.: Think Locally, Act Globally; arXiv 2001.01523).

Objective: sum_i alpha_i l_i(W, theta_i) with one shared head W and a private body theta_i for every client. FedPer has
it the other way round.

Messages: 4h bytes down, 4h up; bodies are not sent. On the device: the body theta_i. A new client gets W, starts from
the initial backbone theta^0, and adapts only this body. The local model is (theta_i, W_i).

All clients start from one w^0. The paper starts from a model trained by FedAvg: with pretrain_rounds=P the first P
rounds are FedAvg, and the clients' bodies then start from its theta. new_body='average' gives a new client the average
of the last cohort's bodies. With either option bodies are sent: 4d bytes down and 4d up in every round (after the
pretraining a body of zeros, unless bodies are averaged). Body and head are updated together; one code base alternates.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import example_weight, local_solver
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import check_choice, check_whole_number
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Head, Weights


class Shared(NamedTuple):
    """The server's state, the message and, as differences, the update."""

    head: Head
    theta: Any  # the start for clients without their own body; () if no bodies are sent
    rounds: Any  # int32 []: rounds done; () if no bodies are sent, and in the update


class Body(NamedTuple):
    """What a client keeps: its body."""

    theta: tuple  # theta_i
    own: Any  # bool []: theta is the client's own; if false, it uses the theta that it receives


def lg_fedavg(
    model,
    population,
    *,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    weighting: str = "examples",
    pretrain_rounds: int = 0,
    new_body: str = "initial",
) -> Algorithm:
    """LG-FedAvg: private backbones and one shared head; FedPer has it the other way round.

    Update rule:

        client(W):  (theta_i, W_i) = SGD from (theta_i, W) on l_i             jointly; epochs or steps
                    keep theta_i, send W_i - W
        server:     W <- W + sum_{i in S} q_i (W_i - W),                      q_i = N_i / sum_{j in S} N_j

    theta_i is client i's own backbone, W the shared head, l_i client i's mean cross-entropy on its N_i training
    examples. S is the cohort.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the local steps, and the weights of the average, as in `fedavg`.
        pretrain_rounds: this many rounds of FedAvg first, >= 0; rounds in which nobody takes part do not count.
        new_body: the backbone of a client at its first visit: 'initial' (theta^0, or what the pretraining
            left) or 'average' (of the last cohort's, weighted as the heads are).

    Returns:
        The `Algorithm`. A client keeps theta_i and predicts with (theta_i, W).

    Raises:
        InvalidArgument: pretrain_rounds is negative; eta or momentum is negative or not finite; steps, epochs or
            batch_size is below 1, or steps and epochs are both given; new_body or weighting is not one of the values
            above; clients have different numbers of classes (this method shares one head) and the population has no
            `num_labels`.

    Source:
        Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, arXiv 2001.01523, algorithm 1.
    """
    check_choice(new_body=(new_body, ("initial", "average")))
    check_whole_number(0, pretrain_rounds=pretrain_rounds)
    rates = {"eta": eta, "momentum": momentum, "client_opt": client_opt}
    solve = local_solver(**rates, steps=steps, epochs=epochs, batch_size=batch_size)
    weight, objective, num_labels = example_weight(model, weighting), client_loss(model), population.shared_labels()
    sends_bodies = pretrain_rounds > 0 or new_body == "average"

    def init_server():
        head = model.shared_head(num_labels)
        return Shared(head, model.theta(), tf.constant(0)) if sends_bodies else Shared(head, (), ())

    def body(message, state):
        return tree.where(state.own, state.theta, message.theta) if sends_bodies else state.theta

    def client_update(message, state, data):
        (theta, head), loss = solve(objective, Weights(body(message, state), message.head), data)
        sent, own = (), tf.constant(True)
        if sends_bodies:
            own = message.rounds >= pretrain_rounds
            sent = tree.subtract(theta, message.theta)
            if new_body == "initial":
                sent = tree.where(own, tree.zeros_like(sent), sent)
        update = Shared(tree.subtract(head, message.head), sent, ())
        return ClientOutput(update, weight(data), Body(theta, own), {"loss": loss})

    def server_update(server, mean):
        theta = tree.add(server.theta, mean.theta)
        return Shared(tree.add(server.head, mean.head), theta, server.rounds + 1)

    def personal_model(message, state, data):
        return Weights(body(message, state), message.head)

    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=lambda info: Body(model.theta(), tf.constant(not sends_bodies)),
        message=lambda server: server,
        client_update=client_update,
        server_update=server_update if sends_bodies else tree.add,
        personal_model=personal_model,
        local_model=lambda message, output: Weights(output.state.theta, tree.add(message.head, output.update.head)),
        aggregate="mean",
        adapt=adaptation(
            model, personal_model, as_optimizer(client_opt, eta, momentum=momentum), part="body", batch_size=batch_size
        ),
        shares="head",
    )


LG_FEDAVG = Method(
    name="lg_fedavg",
    title="LG-FedAvg",
    builder=lg_fedavg,
    head="shared",
    message="broadcast",
    state="backbone",
    down="h",
    up="h",
    reference="Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: "
    "Federated Learning with Local and Global Representations, arXiv 2001.01523",
    no_batch_norm={
        "shared": "each client has a backbone of its own, so statistics have no common meaning. Use 'local'"
    },
)
