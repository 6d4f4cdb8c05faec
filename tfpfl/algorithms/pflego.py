"""PFLEGO: both parts of the model by exact, distributed SGD (Nikoloutsopoulos et al., arXiv 2202.09848).

Objective (eq. 1): L(theta, W_1..W_I) = sum_i alpha_i l_i(W_i, theta), l_i the mean cross-entropy of client i.

    client(theta):  Phi = phi(X_i; theta), once
                    tau - 1 times:  W_i <- W_i - beta grad_W l_i          on the cached Phi, in closed form
                    gW, gT = grad l_i(W_i, theta)                         both at the same point
                    W_i <- W_i - rho (I/r) c_i gW
                    send gT
    server:         theta <- optimizer(theta, (I/r) sum_{i in S} a_i gT_i)

Messages: theta down, its gradient up: 4b bytes each way. On the device: the head W_i, and its labels. A new client
gets the current theta and an initial head, and adapts by the inner steps on that head, theta frozen; one an epoch.

theta does not move between the first pass and the joint gradient, so the features of the latter are the cached ones:
the recorded forward pass is pulled back with the features' gradient (P - Y) W_i^T / N_i. That is one forward and one
backward pass for any tau, where the paper counts two and one; `on_features` is everything between the two.

Where the paper and its authors' code differ: the paper prints eq. (3), whose head step has no alpha_i, and equates it
with eq. (5), which has it (`rule`). The code weighs by N_i over the *sampled* clients and scales by I/r as well
(`weighting`). Both divide by the number of clients that came; here by the expected number, without which a binomial
cohort biases the step. Where clients drop out with known probabilities
(`population.arrival`), what arrives is divided by them, so that the step stays unbiased; who drops out adds 0. The code
does not restore a head whose inner steps raised its loss (`safeguard`).
"""

from functools import partial
from typing import NamedTuple

import tensorflow as tf

from tfpfl import head as heads
from tfpfl import tree
from tfpfl.adaptation import adaptation
from tfpfl.algorithm import Adaptation, Algorithm, ClientOutput, OnePass, Weights
from tfpfl.local import arrival_of, check_choice, check_rates, one_pass_update
from tfpfl.models.split import HEAD_INITS
from tfpfl.optimizer import OPTIMIZERS, optimizer


class Server(NamedTuple):
    """theta, and the slots of the server's optimizer."""

    theta: tuple
    slots: tuple


def inner_steps(head, phi, targets, steps, inner, safeguard):
    """W_i <- W_i - beta grad_W l_i on the cached features, `steps` times, and then the point of the joint step.

    Args:
        inner: the optimizer; None for Newton's method.
        safeguard: where the steps raised l_i, W_i is what it was.

    Returns:
        (W_i, l_i there, its errors (P - Y) / N_i).
    """
    if not steps:
        return head, *heads.loss_and_errors(head, phi, targets)
    if inner is None:
        new = heads.fit_newton(head, phi, targets, steps)
    else:
        new = heads.fit(head, phi, targets, steps, inner)
    after = (new, *heads.loss_and_errors(new, phi, targets))
    if not safeguard:
        return after
    before = (head, *heads.loss_and_errors(head, phi, targets))
    return tree.where(after[1] <= before[1], after, before)


def pflego(
    model,
    population,
    *,
    tau: int = 50,
    beta: float = 0.007,
    rho: float = 0.001,
    rule: str = "eq3",
    weighting: str = "alpha",
    server_opt: str = "adam",
    inner_opt: str = "gd",
    safeguard: bool = True,
    head_init: str | None = None,
    recompute: bool = False,
    chunk: int | None = None,
) -> Algorithm:
    """PFLEGO; the defaults are the preset 'paper'.

    Args:
        tau: local steps, of which tau - 1 are on the head alone; 1 is plain SGD on all parameters.
        beta: rate of those steps (for inner_opt='newton': unused).
        rho: rate of the joint step, of theta's optimizer and of the head's last step.
        rule: 'exact' (c_i = alpha_i, eq. 5: the step is an unbiased gradient step) or 'eq3' (c_i = 1).
        weighting: 'alpha' (a_i = N_i / N over all clients, eq. 4) or 'sampled' (over the cohort, as the code does).
        server_opt: sgd, momentum or adam.
        inner_opt: gd, momentum, adam or newton (damped, conjugate gradients); any will do that lowers l_i.
        safeguard: restore W_i where the inner steps raised l_i.
        head_init: see SplitModel; None for the model's own.
        recompute: run the forward pass twice instead of keeping its activations.
        chunk: and for at most this many examples at a time, for bounded memory.

    Raises:
        ValueError: names the argument, and says what it may be.
    """
    check_choice(
        rule=(rule, ("exact", "eq3")),
        weighting=(weighting, ("alpha", "sampled")),
        server_opt=(server_opt, tuple(OPTIMIZERS)),
        inner_opt=(inner_opt, ("gd", "momentum", "adam", "newton")),
        head_init=(head_init or model.head_init, HEAD_INITS),
    )
    if tau < 1:
        raise ValueError(f"tau must be at least 1 (the joint step), found {tau}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 example, found {chunk}")
    check_rates(beta=beta, rho=rho)
    server_optimizer = optimizer(server_opt, rho)
    inner = None if inner_opt == "newton" else optimizer("sgd" if inner_opt == "gd" else inner_opt, beta)
    scale = population.num_clients / population.clients_per_round
    arrival = arrival_of(population, model.dtype)

    def init_server():
        theta = model.theta()
        return Server(theta, server_optimizer.init(theta))

    def init_client(info):
        return model.head(info, head_init)

    def on_features(theta, head, phi, data):
        targets = tf.one_hot(data.y, tf.shape(head.bias)[0], dtype=phi.dtype)
        head, loss, errors = inner_steps(head, phi, targets, tau - 1, inner, safeguard)
        c = data.info.alpha if rule == "exact" else tf.ones([], phi.dtype)
        c /= arrival(data.info)
        new_head = tree.add_scaled(head, -rho * scale * c, heads.gradient(phi, errors))

        weight = data.info.alpha / arrival(data.info)
        if weighting == "sampled":
            weight = tf.cast(data.info.num_examples, phi.dtype)
        output = ClientOutput((), weight, new_head, {"loss": loss})
        return output, heads.feature_gradient(head, errors)

    one_pass = OnePass(theta=lambda theta: theta, on_features=on_features, join=lambda gradient, _: gradient)

    def server_update(server, gradient):
        slots, theta = server_optimizer.step(server.slots, server.theta, tree.scale(scale, gradient))
        return Server(theta, slots)

    def personal_model(theta, head, data):
        return Weights(theta, head)

    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=init_client,
        message=lambda server: server.theta,
        client_update=one_pass_update(model, one_pass, recompute=recompute, chunk=chunk),
        server_update=server_update,
        personal_model=personal_model,
        local_model=lambda theta, output: Weights(theta, output.state),
        aggregate="sum" if weighting == "alpha" else "mean",
        adapt=newton_epochs(model) if inner is None else adaptation(model, personal_model, inner, part="head"),
    )


def newton_epochs(model) -> Adaptation:
    """Newton steps of a new client's head, one an epoch."""

    def epoch(fit, data, n):
        theta, head, phi = fit
        targets = tf.one_hot(data.y, tf.shape(head.bias)[0], dtype=phi.dtype)
        return theta, heads.fit_newton(head, phi, targets, 1), phi

    return Adaptation(
        start=lambda theta, head, data: (theta, head, model.features(theta, data.x)),
        epoch=epoch,
        model=lambda fit: Weights(*fit[:2]),
    )


PRESETS = {
    "exact": {"rule": "exact", "weighting": "alpha", "server_opt": "sgd"},
    "paper": {"rule": "eq3", "weighting": "alpha", "server_opt": "adam"},
    "code": {
        "rule": "eq3",
        "weighting": "sampled",
        "server_opt": "adam",
        "head_init": "uniform01",
        "safeguard": False,
    },
}
pflego_exact = partial(pflego, **PRESETS["exact"])  # for theory: psi <- psi - rho * an unbiased gradient
pflego_paper = partial(pflego, **PRESETS["paper"])
pflego_code = partial(pflego, **PRESETS["code"])
