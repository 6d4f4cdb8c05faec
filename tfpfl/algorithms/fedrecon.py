"""FedRecon: rebuild the head for the received theta, then send theta's gradient at this head (Singhal et al., NeurIPS
2021).

Objective: sum_i alpha_i min_W l_i(W, theta), minimized over one block of weights at a time: heads, then theta.

Messages: 4b bytes down, 4b up. On the device: the head W_i, and its labels. A new client gets theta and rebuilds its
head: tau epochs of adaptation on all its examples, from an initial head. The local model is (theta, W_i).

Passes: one forward and one backward, because the head steps and the gradient use the same features (k_theta = 1). With
k_theta > 1 the client takes k_theta steps of rate eta on theta, and sends the change divided by -eta; for k_theta = 1
this is g_i. The paper's method is stateless and splits each client's examples into support and query. The default here
is that of the PFLEGO authors' code: keep the head, and use all examples for both. With reset_head the head is kept only
to evaluate the model after a visit; it is not trained further, and the personal model is rebuilt whenever it is used.
There is no factor I/r. If everyone takes part, the theta step with tau - 1 head steps is that of PFLEGO with tau.
"""

from typing import NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput, OnePass
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts import linear_head as heads
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import body_solver, example_weight, one_pass_update, support_and_query
from tfpfl.algorithms.parts.optimizers import Optimizer, sgd
from tfpfl.algorithms.parts.schedules import divided, paced
from tfpfl.checks import InvalidArgument, check_choice, check_fractions, check_rates, check_whole_number
from tfpfl.models import tree
from tfpfl.models.split import HEAD_INITS
from tfpfl.models.weights import Weights


class Server(NamedTuple):
    """The server's state: theta, and the state of its optimizer."""

    theta: tuple
    slots: tuple


def targets_of(kind, data, head, phi):
    """What a client's outputs are compared with, Y (one-hot labels of classes): [N, K]."""
    return kind.targets(data.y, tf.shape(head.bias)[0], phi.dtype)


def at_the_new_head(kind, head, phi, data, weight):
    """The loss l_i at the new head, as (the client's output without its update, gradient of l_i by the features)."""
    loss, errors = heads.loss_and_errors(head, phi, targets_of(kind, data, head, phi), kind)
    return ClientOutput((), weight(data), head, {"loss": loss}), heads.feature_gradient(head, errors)


def fedrecon(
    model,
    population,
    *,
    tau: int = 50,
    beta: float = 0.007,
    rho: float = 0.001,
    server_opt: str | Optimizer = "adam",
    reset_head: bool = False,
    query_fraction: float = 0.0,
    k_theta: int = 1,
    eta: float = 0.007,
    weighting: str = "examples",
    head_init: str | None = None,
) -> Algorithm:
    """FedRecon: a client first rebuilds its head for the backbone that came, and then sends the backbone's gradient at
    that head.

    Update rule:

        client(theta):  W_i <- an initial head (reset_head), or the one of the last visit
                        tau times:  W_i <- W_i - beta grad_W l_i(W_i, theta)       on support examples, features cached
                        g_i = grad_theta l_i(W_i, theta)                           on query examples, at the new head
                        send g_i
        server:         theta <- optimizer(theta, sum_{i in S} q_i g_i),           q_i = N_i / sum_{j in S} N_j

    theta is the shared backbone, W_i client i's own head, l_i its mean cross-entropy on its N_i training examples. S is
    the cohort of the round.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        tau, beta: full-batch steps on the head, >= 0, and their rate, >= 0.
        rho: rate of the server's optimizer, >= 0.
        server_opt: the server's optimizer: 'sgd', 'momentum' (0.9), 'adam', 'adamw', 'adagrad' or 'yogi', with the rate
            rho. In Python also an optimizer of Keras, TFF or tfpfl, which has a rate of its own.
        reset_head: rebuild from an initial head at every visit (the paper); default: from the last one (the PFLEGO
            authors' code).
        query_fraction: part of the examples for theta's gradient, in [0, 1], the rest being for the head; 0: all for
            both.
        k_theta, eta: full-batch steps on theta, >= 1, and their rate, which does not matter for one step.
        weighting: a client's weight in the mean: 'examples' (q_i) or 'uniform' (1 / r, r clients in the cohort).
        head_init: how a client's head starts: 'glorot', 'uniform01' or 'zeros' (see `SplitModel`); None for the model's
            `head_init`.

    Returns:
        The `Algorithm`. A client keeps W_i and predicts with (theta, W_i).

    Raises:
        InvalidArgument: tau is negative; k_theta is below 1; eta is 0 and k_theta > 1 (the update is divided by it);
            beta, rho or eta is negative or not finite; query_fraction is outside [0, 1]; server_opt, weighting or
            head_init is not one of the values above.

    Source:
        Singhal, Sidahmed, Garrett, Wu, Rush, Prakash, NeurIPS 2021, algorithm 1.
    """
    if tau < 0:
        raise InvalidArgument(f"tau must not be negative, found {tau}")
    check_whole_number(1, k_theta=k_theta)
    if k_theta > 1 and eta == 0:
        raise InvalidArgument("eta must be positive where k_theta > 1: the update is divided by it")
    check_choice(head_init=(head_init or model.head_init, HEAD_INITS))
    check_rates(beta=beta, rho=rho, eta=eta)
    check_fractions(query_fraction=query_fraction)
    server_optimizer = paced(as_optimizer(server_opt, rho, what="server_opt"), "rho")
    # with reset_head, the head is rebuilt for every prediction too, at the same rate
    head_optimizer = sgd(beta) if reset_head else paced(sgd(beta), "beta")
    move_theta = body_solver(model, eta=eta, steps=k_theta, by_default=False)
    weight = example_weight(model, weighting)

    def init_client(info):
        return model.head(info, head_init)

    def init_server():
        theta = model.theta()
        return Server(theta, server_optimizer.init(theta))

    def reconstruct(head, phi, data):
        start = init_client(data.info) if reset_head else head
        return heads.fit(start, phi, targets_of(model.kind, data, start, phi), tau, head_optimizer, model.kind)

    def on_features(theta, head, phi, data):
        return at_the_new_head(model.kind, reconstruct(head, phi, data), phi, data, weight)

    def several_passes(theta, head, data):
        support, query = support_and_query(data, query_fraction) if query_fraction else (data, data)
        phi, pull_back = model.record(theta, query.x)
        head = reconstruct(head, model.features(theta, support.x) if query_fraction else phi, support)
        output, dphi = at_the_new_head(model.kind, head, phi, query, weight)
        if k_theta == 1:
            return output._replace(update=pull_back(dphi))
        theta_i, _ = move_theta(theta, head, query)
        mean = tree.scale(divided("eta", 1 / eta, by_default=False), tree.subtract(theta, theta_i))
        return output._replace(update=mean)

    one_pass = OnePass(theta=lambda theta: theta, on_features=on_features, join=lambda gradient, _: gradient)
    once = k_theta == 1 and not query_fraction

    def server_update(server, gradient):
        slots, theta = server_optimizer.step(server.slots, server.theta, gradient)
        return Server(theta, slots)

    def personal_model(theta, head, data):
        return Weights(theta, reconstruct(head, model.features(theta, data.x), data) if reset_head else head)

    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=init_client,
        message=lambda server: server.theta,
        client_update=one_pass_update(model, one_pass) if once else several_passes,
        server_update=server_update,
        personal_model=personal_model,
        local_model=lambda theta, output: Weights(theta, output.state),
        aggregate="mean",
        adapt=adaptation(model, lambda theta, head, data: Weights(theta, head), head_optimizer, part="head"),
        shares="backbone",
        one_pass=one_pass if once else None,
    )


FEDRECON = Method(
    name="fedrecon",
    title="FedRecon",
    builder=fedrecon,
    head="personal",
    message="broadcast",
    state="head",
    down="b",
    up="b",
    reference="Singhal, Sidahmed, Garrett, Wu, Rush, Prakash: Federated Reconstruction: Partially Local Federated "
    "Learning, NeurIPS 2021",
    presets={"stateless": {"reset_head": True, "query_fraction": 0.5}},
    sends="gradient",
    no_server_opt="its server has an optimizer of its own: server_opt, with the rate rho",
    no_client_opt="its clients send a gradient, which other steps would not give. Use beta and server_opt",
)
