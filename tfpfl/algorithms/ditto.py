"""Ditto: a global model by FedAvg, and a personal model near it for every client (Li, Hu, Beirami, Smith; ICML 2021).

Objective: the global w minimizes sum_i alpha_i l_i(w); client i's v_i minimizes l_i(v) + (lambda / 2) |v - w|^2.

Messages: 4d bytes down, 4d up. On the device: the whole model v_i. The v_i of a new client is w^0 (init='w0'), or the
first w that it receives (init='first_broadcast', as in the PFLEGO authors' code). The client adapts v_i with the same
penalty. The local model is v_i.

v_i is pulled towards the w that the client received, as in Ditto's algorithm and in its code. One description uses the
client's own trained copy w_i instead (anchor='local'). Both models use the same batches. lambda = 0 is Local. The
global model is that of FedAvg for every lambda; it weighs clients by their examples, N_i, where the paper weighs them
equally (weighting='uniform'). With implicit_prox the step is v <- (v - eta_p grad l_i(v) + eta_p
lambda w) / (1 + eta_p lambda).
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.method import SEVERAL_MODELS, Method
from tfpfl.algorithms.parts.adaptation import adaptation, near
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer, at_second_rate
from tfpfl.algorithms.parts.local_training import local_solver
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import check_choice, check_penalty
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights


class Personal(NamedTuple):
    """What a client keeps: its personal model."""

    v: Weights  # v_i
    started: Any  # bool []: v has its own value; if false, the client uses the w that it receives


def ditto(
    model,
    population,
    *,
    lam: float = 0.1,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    eta_p: float | None = None,
    steps_p: int | None = None,
    epochs_p: int | None = None,
    anchor: str = "received",
    init: str = "w0",
    implicit_prox: bool = False,
    weighting: str = "examples",
) -> Algorithm:
    """Ditto: a global model by FedAvg, and a personal model for every client with a penalty on its distance to the
    global one.

    Update rule:

        client(w):  w_i = SGD from w on l_i                                      as in FedAvg
                    v_i <- SGD:  v_i <- v_i - eta_p (grad l_i(v_i) + lambda (v_i - w))
                    keep v_i, send w_i - w
        server:     w <- w + sum_{i in S} q_i (w_i - w),    q_i = N_i / sum_{j in S} N_j

    w and v_i are whole models, l_i is client i's mean cross-entropy on its N_i training examples. S is the cohort; q_i
    = N_i / sum_{j in S} N_j.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        lam: lambda, the pull of v_i towards the global model, >= 0; 0 is Local.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the global model's steps, and the weights of the average, as in `fedavg`. The optimizer also
            takes the steps on v_i.
        eta_p: learning rate of v_i, >= 0; None for eta.
        steps_p, epochs_p: work on v_i, one of the two, >= 1; default: as much as on the global model.
        anchor: what v_i is pulled to: 'received' (w) or 'local' (w_i).
        init: v_i before the first visit: 'w0' (the server's model of round 0) or 'first_broadcast' (the first w that
            the client receives).
        implicit_prox: take an implicit step on the pull, which is stable for every coefficient. Default: an explicit
            step, by its gradient.

    Returns:
        The `Algorithm`. A client keeps v_i and predicts with it.

    Raises:
        InvalidArgument: lam, eta, eta_p or momentum is negative or not finite, or eta_p has no effect beside an
            optimizer object; steps, epochs or batch_size is below 1, or steps and epochs are both given; the same for
            steps_p and epochs_p; anchor, init or weighting is not one of the values above; clients have different
            numbers of classes (this method shares one head) and the population has no `num_labels`. Warns if eta_p lam
            >= 2 and the step is explicit: such steps diverge.

    Source:
        Li, Hu, Beirami, Smith, ICML 2021, algorithm 1.
    """
    check_choice(anchor=(anchor, ("received", "local")), init=(init, ("w0", "first_broadcast")))
    solver: dict[str, Any] = {"batch_size": batch_size, "momentum": momentum, "client_opt": client_opt}
    base = fedavg(model, population, eta=eta, steps=steps, epochs=epochs, weighting=weighting, **solver)
    if steps_p is None and epochs_p is None:
        steps_p, epochs_p = steps, epochs
    second = at_second_rate(client_opt, eta_p=eta_p)
    eta_p = eta if eta_p is None else eta_p
    check_penalty(eta_p, implicit_prox, lam=lam)
    work: dict[str, Any] = solver | {"client_opt": second, "steps": steps_p, "epochs": epochs_p}
    solve_p = local_solver(eta=eta_p, prox=lam, implicit_prox=implicit_prox, suffix="_p", **work)
    objective = client_loss(model)

    def init_client(info):
        return Personal(base.init_server(), tf.constant(init == "w0"))

    def own(w, state):
        return tree.where(state.started, state.v, w)

    def client_update(w, state, data):
        shared = base.client_update(w, (), data)
        to = w if anchor == "received" else base.local_model(w, shared)
        v, loss = solve_p(objective, own(w, state), data, anchor=to)
        return ClientOutput(shared.update, shared.weight, Personal(v, tf.constant(True)), {"loss": loss})

    return base._replace(
        init_client=init_client,
        client_update=client_update,
        personal_model=lambda w, state, data: own(w, state),
        global_model=lambda w: w,
        local_model=lambda w, output: output.state.v,
        adapt=adaptation(
            model,
            lambda w, state, data: own(w, state),
            as_optimizer(second, eta_p, momentum=momentum),
            batch_size=batch_size,
            **near(eta_p, lam, implicit_prox),
        ),
        shares=None,
    )


DITTO = Method(
    name="ditto",
    title="Ditto",
    builder=ditto,
    head="shared",
    message="broadcast",
    state="whole model",
    down="d",
    up="d",
    reference="Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021",
    no_batch_norm=SEVERAL_MODELS,
)
