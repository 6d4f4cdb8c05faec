"""pFedMe: personal models by Moreau envelopes (Dinh, Tran, Nguyen; NeurIPS 2020).

Objective: (1 / I) sum_i F_i(w),  F_i(w) = min_theta l_i(theta) + (lambda / 2) |theta - w|^2.  Here theta is a whole
model, as in the paper, and not a backbone.

Messages: 4d bytes down, 4d up. On the device: the whole model theta_i, used only for prediction; every visit starts
from w. A client that never took part predicts with w. A new client adapts w by the inner problem, with w fixed as the
anchor and one step per batch. The local model is theta_i.

lambda (w_i - theta_i) is the gradient of F_i if the inner problem is solved exactly. beta is 1 in PGFed's comparison; a
beta above 1 extrapolates. The default lambda is that of the authors' code, 15; that of PGFed's code is 1. The authors'
code trains all clients in every round, and averages the w_i of the chosen ones only; here only the chosen ones train,
as with every method, so that the theta_i of the others are older. It also weighs the w_i by N_i; here all count the
same, as in the paper. What it scores as the personal model is w_i, because it keeps theta_i in the parameters to which
it then assigns w_i. Its optimizer has a weight decay of 0.001 on theta (`weight_decay`, here 0). With implicit_prox the
inner step is theta <- (theta - eta_p grad l + eta_p lambda w_i) / (1 + eta_p lambda), which is stable for every lambda.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.method import SEVERAL_MODELS, Method
from tfpfl.algorithms.parts.adaptation import adaptation, near
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer, at_second_rate
from tfpfl.algorithms.parts.local_training import batch_loop, local_solver
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.algorithms.parts.schedules import rate
from tfpfl.checks import check_penalty, check_rates, check_whole_number
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights


class Personal(NamedTuple):
    """What a client keeps: its personal model."""

    theta: Weights  # theta_i
    visited: Any  # bool []: the client had a visit; before the first one theta has no meaning


def pfedme(
    model,
    population,
    *,
    lam: float = 15.0,
    inner_steps: int = 5,
    eta_p: float = 0.01,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    beta: float = 1.0,
    weight_decay: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    implicit_prox: bool = False,
) -> Algorithm:
    """pFedMe: one global model w, and personal models theta_i that are each the solution of a problem regularized
    towards it (Moreau envelope).

    Update rule:

        client(w):  w_i = theta_i = w
                    for every batch D:  theta_i ~ argmin l(theta; D) + (lambda / 2) |theta - w_i|^2
                                            K times, from the last theta_i:
                                            theta_i <- theta_i - eta_p (grad l(theta_i; D) + lambda (theta_i - w_i))
                                        w_i <- w_i - eta lambda (w_i - theta_i)
                    keep theta_i, send w_i - w
        server:     w <- w + beta (1 / r) sum_{i in S} (w_i - w)

    w, w_i and theta_i are whole models, as in the paper; l(theta; D) is the mean cross-entropy on a mini-batch D. S is
    the cohort of r clients.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        lam: lambda, the pull of theta_i towards w_i, >= 0.
        inner_steps: K, the steps on theta_i in every mini-batch, >= 1.
        eta_p: the rate of these steps, >= 0.
        eta, steps, epochs, batch_size: rate, amount and mini-batches of the work on w_i, one step a batch, as in
            `fedavg`.
        beta: the server's rate, >= 0; above 1 it extrapolates.
        weight_decay: adds this times theta_i to the inner gradient, >= 0; default 0.
        client_opt: the optimizer of the inner steps, at the rate eta_p, as in `fedavg`; its state starts anew for every
            mini-batch.
        implicit_prox: take an implicit step on the pull, which is stable for every coefficient. Default: an explicit
            step, by its gradient.

    Returns:
        The `Algorithm`. A client keeps theta_i and predicts with it; before its first visit, with w.

    Raises:
        InvalidArgument: lam, eta, eta_p, beta or weight_decay is negative or not finite, or eta_p has no effect beside
            an optimizer object; inner_steps is below 1; steps, epochs or batch_size is below 1, or steps and epochs are
            both given; clients have different numbers of classes (this method shares one head) and the population has
            no `num_labels`. Warns if eta_p lam >= 2 and the step is explicit: such steps diverge.

    Source:
        Dinh, Tran, Nguyen, NeurIPS 2020, algorithm 1.
    """
    client_opt = at_second_rate(client_opt, 0.01, eta_p=eta_p)
    check_rates(eta=eta, beta=beta, weight_decay=weight_decay)
    check_penalty(eta_p, implicit_prox, lam=lam)
    check_whole_number(1, inner_steps=inner_steps)
    loop = batch_loop(steps=steps, epochs=epochs, batch_size=batch_size)
    inner = {"eta": eta_p, "client_opt": client_opt}
    solve = local_solver(
        **inner, steps=inner_steps, prox=lam, implicit_prox=implicit_prox, suffix="_p", by_default=False
    )
    objective, num_labels = client_loss(model), population.shared_labels()
    decay = (lambda theta: weight_decay / 2 * tree.dot(theta, theta)) if weight_decay else None

    def init_server():
        return Weights(model.theta(), model.shared_head(num_labels))

    def client_update(w, state, data):
        def step(carry, x, y):
            w_i, theta, _ = carry
            theta, loss = solve(objective, theta, data._replace(x=x, y=y), anchor=w_i, penalty=decay)
            return tree.add_scaled(w_i, -rate("eta", eta) * lam, tree.subtract(w_i, theta)), theta, loss

        w_i, theta, loss = loop(step, (w, w, tf.zeros([], model.dtype)), data)
        state = Personal(theta, tf.constant(True))
        return ClientOutput(tree.subtract(w_i, w), tf.ones([], model.dtype), state, {"loss": loss})

    def server_update(w, mean):
        return tree.add_scaled(w, rate("beta", beta, by_default=False), mean)

    def personal_model(w, state, data):
        return tree.where(state.visited, state.theta, w)

    held = near(eta_p, lam, implicit_prox)
    if decay is not None:
        pull = held.get("penalty", lambda theta, w: 0)
        held["penalty"] = lambda theta, w: decay(theta) + pull(theta, w)

    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=lambda info: Personal(init_server(), tf.constant(False)),
        message=lambda w: w,
        client_update=client_update,
        server_update=tree.add if beta == 1 else server_update,
        personal_model=personal_model,
        global_model=lambda w: w,
        local_model=lambda w, output: output.state.theta,
        aggregate="mean",
        adapt=adaptation(model, personal_model, as_optimizer(client_opt, eta_p), batch_size=batch_size, **held),
        shares=None,
    )


PFEDME = Method(
    name="pfedme",
    title="pFedMe",
    builder=pfedme,
    head="shared",
    message="broadcast",
    state="whole model",
    down="d",
    up="d",
    reference="Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020",
    no_objective="what a client minimizes is its Moreau envelope, not its loss. Use fedavg or ditto",
    no_batch_norm=SEVERAL_MODELS,
)
