"""APFL: every client mixes its own model with the global one (Deng, Kamani, Mahdavi; arXiv 2003.13461).

Objective: the global w minimizes sum_i alpha_i l_i(w); client i's v_i minimizes l_i(a_i v_i + (1 - a_i) w).

Messages: 4d bytes down, 4d up. On the device: the whole model v_i, and the number a_i. A client predicts with
a_i v_i + (1 - a_i) w, where w is the newest global model. The v_i of a new client is w^0 (init='w0') or the first w
that it receives (init='first_broadcast'). The client adapts v_i, and a_i if eta_a > 0, while w is fixed. The local
model is a_i v_i + (1 - a_i) w_i.

a_i starts at `mixing`. By default it is fixed, as in PGFed's comparison; the paper adapts it (eta_a > 0). a_i = 0 is
FedAvg, a_i = 1 is Local, and the global model is that of FedAvg for every a_i. It weighs clients by their examples,
N_i, where the paper weighs them equally (weighting='uniform'). Each model has its own momentum; the
papers use none.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Adaptation, Algorithm, ClientOutput
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.method import SEVERAL_MODELS, Method
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import batch_loop, example_weight, value_and_gradient
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.algorithms.parts.schedules import paced, rate
from tfpfl.checks import check_choice, check_fractions, check_rates
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights


class Personal(NamedTuple):
    """What a client keeps: its own model, and how much of it is in the mixture."""

    v: Weights  # v_i
    a: Any  # float []: a_i
    started: Any  # bool []: v has its own value; if false, the client uses the w that it receives


def mixed(a, v, w):
    """The mixture a v + (1 - a) w of two models."""
    return tree.add_scaled(tree.scale(a, v), 1 - a, w)


def apfl(
    model,
    population,
    *,
    mixing: float = 0.5,
    eta_a: float = 0.0,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    init: str = "w0",
    weighting: str = "examples",
) -> Algorithm:
    """APFL: every client mixes its own model with the global one.

    Update rule:

        client(w):  w_i = w;  for every batch, with vbar = a_i v_i + (1 - a_i) w_i and all gradients before all steps:
                        w_i <- w_i - eta grad l_i(w_i)                                       as in FedAvg
                        v_i <- v_i - eta a_i grad l_i(vbar)                                  the a_i is the chain rule's
                        a_i <- clip(a_i - eta_a <grad l_i(vbar), v_i - w_i>, 0, 1)           eta_a = 0: a_i is fixed
                    keep v_i and a_i, send w_i - w
        server:     w <- w + sum_{i in S} q_i (w_i - w),    q_i = N_i / sum_{j in S} N_j

    w, w_i and v_i are whole models, a_i in [0, 1] is a number, l_i client i's mean cross-entropy on its N_i training
    examples (in the steps, on a mini-batch). S is the cohort; q_i = N_i / sum_{j in S} N_j.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        mixing: the initial a_i in [0, 1], the share of the client's own model in its predictions.
        eta_a: learning rate of a_i, >= 0; default 0, a_i is fixed.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the steps on both models, and the weights of the average, as in `fedavg`.
        init: v_i before the first visit: 'w0' (the server's model of round 0) or 'first_broadcast' (the first w that
            the client receives).

    Returns:
        The `Algorithm`. A client keeps v_i and a_i, and predicts with a_i v_i + (1 - a_i) w.

    Raises:
        InvalidArgument: mixing is outside [0, 1]; eta, eta_a or momentum is negative or not finite; steps, epochs or
            batch_size is below 1, or steps and epochs are both given; init or weighting is not one of the values above;
            clients have different numbers of classes (this method shares one head) and the population has no
            `num_labels`.

    Source:
        Deng, Kamani, Mahdavi, arXiv 2003.13461.
    """
    check_fractions(mixing=mixing)
    check_rates(eta_a=eta_a)
    check_choice(init=(init, ("w0", "first_broadcast")))
    work = {"steps": steps, "epochs": epochs, "batch_size": batch_size}
    rates: dict[str, Any] = {"eta": eta, "momentum": momentum, "client_opt": client_opt}
    base = fedavg(model, population, weighting=weighting, **rates, **work)
    loop, one_epoch = batch_loop(**work), batch_loop(epochs=1, batch_size=batch_size)
    optimizer = paced(as_optimizer(client_opt, eta, momentum=momentum), "eta")
    weight, objective = example_weight(model, weighting), client_loss(model)

    def init_client(info):
        return Personal(base.init_server(), tf.constant(mixing, model.dtype), tf.constant(init == "w0"))

    def own(w, state):
        return tree.where(state.started, state.v, w)

    def own_step(w_i, v, a, slots_v, x, y):
        loss, gradient = value_and_gradient(lambda u: objective(u, x, y), mixed(a, v, w_i))
        away = rate("eta_a", eta_a) * tree.dot(gradient, tree.subtract(v, w_i)) if eta_a else 0
        new_a = tf.clip_by_value(a - away, 0, 1) if eta_a else a
        slots_v, v = optimizer.step(slots_v, v, tree.scale(a, gradient))
        return v, new_a, slots_v, loss

    def client_update(w, state, data):
        def step(carry, x, y):
            w_i, v, a, slots_w, slots_v, _ = carry
            _, gradient_w = value_and_gradient(lambda u: objective(u, x, y), w_i)
            v, a, slots_v, loss = own_step(w_i, v, a, slots_v, x, y)
            slots_w, w_i = optimizer.step(slots_w, w_i, gradient_w)
            return w_i, v, a, slots_w, slots_v, loss

        v, zero = own(w, state), tf.zeros([], model.dtype)
        w_i, v, a, _, _, loss = loop(step, (w, v, state.a, optimizer.init(w), optimizer.init(v), zero), data)
        return ClientOutput(tree.subtract(w_i, w), weight(data), Personal(v, a, tf.constant(True)), {"loss": loss})

    def adapt_epoch(carry, data, n):
        w, *of_the_client = carry

        def step(carry, x, y):
            return own_step(w, *carry, x, y)[:3]

        return w, *one_epoch(step, tuple(of_the_client), data, first=n)

    adapt = Adaptation(
        start=lambda w, state, data: (w, own(w, state), state.a, optimizer.init(w)),
        epoch=adapt_epoch,
        model=lambda carry: mixed(carry[2], carry[1], carry[0]),
    )

    return base._replace(
        init_client=init_client,
        client_update=client_update,
        personal_model=lambda w, state, data: mixed(state.a, own(w, state), w),
        global_model=lambda w: w,
        local_model=lambda w, output: mixed(output.state.a, output.state.v, tree.add(w, output.update)),
        adapt=adapt,
        shares=None,
    )


APFL = Method(
    name="apfl",
    title="APFL",
    builder=apfl,
    head="shared",
    message="broadcast",
    state="whole model",
    down="d",
    up="d",
    reference="Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning, arXiv 2003.13461",
    no_batch_norm=SEVERAL_MODELS,
)
