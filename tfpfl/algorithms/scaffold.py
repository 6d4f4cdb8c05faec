"""SCAFFOLD: control variates against client drift (Karimireddy, Kale, Mohri, Reddi, Stich, Suresh; ICML 2020).

Objective: (1 / I) sum_i l_i(x), one model for all; all clients have the same weight. c_i estimates the gradient of
client i, and c = (1 / I) sum_i c_i that of the objective. So g_i(y) - c_i + c estimates the gradient of the objective.

Messages: 8d bytes down, 8d up. On the device: c_i, of the size of the model, which starts at 0. c includes the c_i of
all clients, also of those that never took part or have left. A new client gets x and c, and has c_i = 0. It adapts x by
SGD without c, because c would pull it towards the objective of all. The local model is y_i.

With eval_model='local' a client also keeps its last y_i and predicts with it; this explains FedAMP's table best. Option
II divides by K eta, so eta must not be 0. It is a mean of gradients only without momentum, so there is no momentum.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.local_training import batch_loop, step_gradient, whole_gradient
from tfpfl.algorithms.parts.optimizers import sgd
from tfpfl.algorithms.parts.schedules import factor, rate
from tfpfl.checks import InvalidArgument, check_choice, check_rates
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights


class Server(NamedTuple):
    """The server's state, and the message."""

    x: Weights
    c: Weights  # (1 / I) sum_i c_i


class Control(NamedTuple):
    """What a client keeps: its control variate, and perhaps its last model."""

    c: Weights  # c_i
    y: Any  # eval_model='local': its last y_i
    visited: Any  # bool []: eval_model='local': the client had a visit, so y has a value


class Update(NamedTuple):
    """What a client sends: its changes of model and control variate."""

    dy: Weights  # y_i - x
    dc: Weights  # c_i+ - c_i


def scaffold(
    model,
    population,
    *,
    eta: float = 0.007,
    eta_g: float = 1.0,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    option: str = "II",
    eval_model: str = "global",
) -> Algorithm:
    """SCAFFOLD: one model for all clients; control variates c_i and c correct the drift of their local steps.

    Update rule:

        client(x, c):  y_i = x;  K times:  y_i <- y_i - eta (g_i(y_i) - c_i + c)      epochs or steps, no momentum
                       c_i+ = g_i(x)                               option I: a gradient on all examples, one more pass
                              c_i - c + (x - y_i) / (K eta)        option II: the mean of the gradients just seen
                       keep c_i+, send (y_i - x, c_i+ - c_i)
        server:        x <- x + eta_g (1 / r) sum_{i in S} (y_i - x)
                       c <- c + (1 / I) sum_{i in S} (c_i+ - c_i)  so c stays the mean over all I, absent ones included

    x and y_i are whole models, g_i is the gradient of client i's mean cross-entropy, on a mini-batch in the steps. S is
    the cohort, r of I clients; K is the number of local steps.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        eta, steps, epochs, batch_size: rate, amount and mini-batches of the local SGD, as in `fedavg`.
        eta_g: the server's learning rate for x, >= 0.
        option: how c_i is renewed: 'I' (a gradient at x, one more pass) or 'II' (the mean of the gradients just seen).
        eval_model: what a client predicts with: 'global' (x), or 'local' (its last y_i, which it then keeps; x before
            its first visit).

    Returns:
        The `Algorithm`. A client keeps c_i.

    Raises:
        InvalidArgument: eta is not positive or not finite (option II divides by it); eta_g is negative or not finite;
            steps, epochs or batch_size is below 1, or steps and epochs are both given; option or eval_model is not one
            of the values above; option is 'I' and the model has batch_norm 'local' or 'shared'; clients have different
            numbers of classes (this method shares one head) and the population has no `num_labels`.

    Source:
        Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020, algorithm 1.
    """
    check_choice(option=(option, ("I", "II")), eval_model=(eval_model, ("global", "local")))
    check_rates(eta=eta, eta_g=eta_g)
    if eta == 0:
        raise InvalidArgument("eta must be positive, found 0: the control variates divide by it")
    if option == "I" and model.batch_statistics:
        raise InvalidArgument(
            f"option='I' takes a gradient on all of a client's examples in parts, and with batch_norm="
            f"{model.batch_norm!r} the statistics of all examples of a step normalize. Use option='II', or "
            "batch_norm='frozen'"
        )
    loop = batch_loop(steps=steps, epochs=epochs, batch_size=batch_size)
    objective, num_labels, keeps_y = client_loss(model), population.shared_labels(), eval_model == "local"

    def init_server():
        x = Weights(model.theta(), model.shared_head(num_labels))
        return Server(x, tree.zeros_like(x))

    def init_client(info):
        x, c = init_server()
        return Control(c, x, tf.constant(False)) if keeps_y else Control(c, (), ())

    def client_update(message, state, data):
        x, c = message
        drift = tree.subtract(c, state.c)

        paced = factor("eta") is not None  # then the rate can be 0, so the gradients are added up and not divided out

        def step(carry, batch_x, batch_y):
            y, num_steps, _, seen = carry
            loss, g = step_gradient(objective, y, data._replace(x=batch_x, y=batch_y), batch_size)
            y = tree.add_scaled(y, -rate("eta", eta), tree.add(g, drift))
            return y, num_steps + 1, loss, tree.add(seen, g) if paced else ()

        zero = tf.zeros([], model.dtype)
        y, num_steps, loss, seen = loop(step, (x, zero, zero, tree.zeros_like(x) if paced else ()), data)
        if option == "I":
            _, new_c = whole_gradient(objective, x, data)
        elif paced:
            new_c = tree.scale(1 / num_steps, seen)
        else:
            new_c = tree.add_scaled(tree.scale(-1, drift), 1 / (num_steps * eta), tree.subtract(x, y))
        update = Update(tree.subtract(y, x), tree.subtract(new_c, state.c))
        state = Control(new_c, y, tf.constant(True)) if keeps_y else Control(new_c, (), ())
        return ClientOutput(update, tf.ones([], model.dtype), state, {"loss": loss})

    def server_update(server, aggregate):
        mean_dy, sum_dc = aggregate
        return Server(
            tree.add_scaled(server.x, rate("eta_g", eta_g, by_default=False), mean_dy),
            tree.add_scaled(server.c, 1 / population.num_clients, sum_dc),
        )

    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=init_client,
        message=lambda server: server,
        client_update=client_update,
        server_update=server_update,
        personal_model=lambda server, state, data: (
            tree.where(state.visited, state.y, server.x) if keeps_y else server.x
        ),
        global_model=(lambda server: server.x) if keeps_y else None,
        local_model=lambda server, output: tree.add(server.x, output.update.dy),
        aggregate=Update(dy="mean", dc="sum"),
        adapt=adaptation(model, lambda server, state, data: server.x, sgd(eta), batch_size=batch_size),
        shares=None if keeps_y else "model",
        balance=lambda state, output: output.state._replace(c=tree.add(state.c, output.update.dc)),
    )


SCAFFOLD = Method(
    name="scaffold",
    title="SCAFFOLD",
    builder=scaffold,
    head="shared",
    message="broadcast",
    state="control variate (d)",
    evaluates="global",
    evaluates_if={("eval_model", "local"): "personal"},
    down="2d",
    up="2d",
    reference="Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for "
    "Federated Learning, ICML 2020",
    no_objective="its control variates are of the mean of all clients' losses. Use fedavg",
    no_server_opt="its server also averages control variates, which belong to plain SGD. Use eta_g, its server's rate",
    no_client_opt="its control variates are means of the gradients of plain SGD steps. Use fedavg",
)
