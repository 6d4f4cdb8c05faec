"""FedRep: a shared body and private heads, trained one after the other (Collins, Hassani, Mokhtari, Shakkottai; ICML
2021).

Objective: sum_i alpha_i l_i(W_i, theta).

Messages: 4b bytes down, 4b up. On the device: the head W_i, and its labels. A new client gets theta and an initial
head, and adapts only the head, as in the first phase. The local model is (theta_i, W_i).

Passes: one forward pass for all head steps, then one forward and one backward pass per body step. Both phases use the
shuffles of the epochs 0, 1, ..., and both start with momentum 0. The paper's algorithm averages uniformly
(`weighting`). PFLEGO-v2 gives a momentum of 0.999 and 5 body steps for FedBABU; its code uses them for FedRep, with 45
+ 5 steps. PGFed counts in epochs (`unit`): 1 or 5 for the head, 5 for the body.
"""

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer, at_second_rate
from tfpfl.algorithms.parts.local_training import body_solver, example_weight, head_solver
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import InvalidArgument, check_choice
from tfpfl.models import tree
from tfpfl.models.split import HEAD_INITS
from tfpfl.models.weights import Weights


def fedrep(
    model,
    population,
    *,
    tau_h: int = 45,
    tau_b: int = 5,
    eta_h: float = 0.007,
    eta_b: float = 0.007,
    unit: str = "steps",
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    weighting: str = "examples",
    head_init: str | None = None,
) -> Algorithm:
    """FedRep: a shared backbone and private heads, trained one after the other: first the head, then the backbone.

    Update rule:

        client(theta):  W_i = SGD from W_i on l_i(., theta), tau_h steps         theta fixed: on features computed once
                        theta_i = SGD from theta on l_i(W_i, .), tau_b steps     the new head fixed
                        keep W_i, send theta_i - theta
        server:         theta <- theta + sum_{i in S} q_i (theta_i - theta),     q_i = N_i / sum_{j in S} N_j

    theta is the shared backbone, W_i client i's own head, l_i its mean cross-entropy on its N_i training examples. S is
    the cohort of the round.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        tau_h, tau_b: local work on the head, then on the backbone, >= 0; one of them may be 0.
        eta_h, eta_b: learning rates of the two, >= 0.
        unit: what tau_h and tau_b count: 'steps' (mini-batches) or 'epochs'.
        batch_size: examples in a mini-batch, >= 1; None for all.
        momentum: of both phases, >= 0; default 0, none.
        client_opt: the optimizer of both phases, as in `fedavg`; its state starts anew in each.
        weighting: a client's weight in the average: 'examples' (q_i) or 'uniform' (1 / r, r clients in the cohort).
        head_init: how a client's head starts: 'glorot', 'uniform01' or 'zeros' (see `SplitModel`); None for the model's
            `head_init`.

    Returns:
        The `Algorithm`. A client keeps W_i and predicts with (theta, W_i).

    Raises:
        InvalidArgument: tau_h or tau_b is negative, or both are 0; eta_h, eta_b or momentum is negative or not finite,
            or eta_b has no effect beside an optimizer object; batch_size is below 1; unit or weighting is not one of
            the values above; head_init is not one of the values above.

    Source:
        Collins, Hassani, Mokhtari, Shakkottai, ICML 2021, algorithm 1.
    """
    check_choice(unit=(unit, ("steps", "epochs")), head_init=(head_init or model.head_init, HEAD_INITS))
    for name, tau in (("tau_h", tau_h), ("tau_b", tau_b)):
        if tau < 0:
            raise InvalidArgument(f"{name} must not be negative, found {tau}")
    if tau_h + tau_b == 0:
        raise InvalidArgument("tau_h + tau_b must be at least 1: with both 0 nothing is trained")
    solver = {"batch_size": batch_size, "momentum": momentum, "client_opt": client_opt, "at_least": 0}
    fit_head = head_solver(model, eta=eta_h, **{unit: tau_h}, suffix="_h", **solver)
    second = at_second_rate(client_opt, 0.007, eta_b=eta_b)
    fit_body = body_solver(model, eta=eta_b, **{unit: tau_b}, suffix="_b", **solver | {"client_opt": second})
    weight, head_optimizer = example_weight(model, weighting), as_optimizer(client_opt, eta_h, momentum=momentum)

    def client_update(theta, head, data):
        theta_i = theta
        if tau_h:
            head, loss = fit_head(theta, head, data)
        if tau_b:
            theta_i, loss = fit_body(theta, head, data)
        return ClientOutput(tree.subtract(theta_i, theta), weight(data), head, {"loss": loss})

    def personal_model(theta, head, data):
        return Weights(theta, head)

    return Algorithm(
        model=model,
        population=population,
        init_server=model.theta,
        init_client=lambda info: model.head(info, head_init),
        message=lambda theta: theta,
        client_update=client_update,
        server_update=tree.add,
        personal_model=personal_model,
        local_model=lambda theta, output: Weights(tree.add(theta, output.update), output.state),
        aggregate="mean",
        adapt=adaptation(model, personal_model, head_optimizer, part="head", batch_size=batch_size),
        shares="backbone",
    )


FEDREP = Method(
    name="fedrep",
    title="FedRep",
    builder=fedrep,
    head="personal",
    message="broadcast",
    state="head",
    down="b",
    up="b",
    reference="Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized "
    "Federated Learning, ICML 2021",
)
