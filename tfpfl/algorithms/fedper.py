"""FedPer: a shared body and private heads, trained together (Arivazhagan, Aggarwal, Singh, Choudhary; arXiv
1912.00818).

Objective: sum_i alpha_i l_i(W_i, theta).

Messages: 4b bytes down, 4b up. On the device: the head W_i, and its labels. A new client gets theta and an initial
head, and adapts only the head. The local model is (theta_i, W_i).

FedPer is FedAvg without sending the head. The private part of the paper may have several layers; here it is the linear
head, as in the comparisons of PFLEGO and PGFed. One full-batch step with full participation is the same as PFLEGO's
rule 'eq3' with tau = 1 and rho = eta. In PGFed's comparison a client keeps the momentum of its last visit
(`keep_momentum`): then it also keeps b + h numbers, and its state is a `Kept`.
"""

from typing import Any, NamedTuple

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import check_kept, example_weight, local_step, resumed_solver
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import check_choice
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.split import HEAD_INITS
from tfpfl.models.weights import Weights


class Kept(NamedTuple):
    """What a client keeps with `keep_momentum`."""

    head: Any  # W_i
    velocity: Weights  # of the last visit, see `resumed_solver`


def fedper(
    model,
    population,
    *,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    keep_momentum: bool = False,
    weighting: str = "examples",
    head_init: str | None = None,
) -> Algorithm:
    """FedPer: a shared backbone and private heads, both trained together; FedAvg without sending the head.

    Update rule:

        client(theta):  (theta_i, W_i) = SGD from (theta, W_i) on l_i          jointly; epochs or steps
                        keep W_i, send theta_i - theta
        server:         theta <- theta + sum_{i in S} q_i (theta_i - theta),   q_i = N_i / sum_{j in S} N_j

    theta is the shared backbone, W_i client i's own head, l_i its mean cross-entropy on its N_i training examples. S is
    the cohort of the round.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the local steps, and the weights of the average, as in `fedavg`.
        keep_momentum: whether a client keeps the momentum of its last visit, as in PGFed's code; default: the momentum
            starts at 0 in every visit.
        head_init: how a client's head starts: 'glorot', 'uniform01' or 'zeros' (see `SplitModel`); None for the model's
            `head_init`.

    Returns:
        The `Algorithm`. A client keeps W_i and predicts with (theta, W_i).

    Raises:
        InvalidArgument: eta or momentum is negative or not finite; keep_momentum without momentum; steps, epochs or
            batch_size is below 1, or steps and epochs are both given; weighting is neither 'examples' nor 'uniform';
            head_init is not one of the values above.

    Source:
        Arivazhagan, Aggarwal, Singh, Choudhary, arXiv 1912.00818, algorithms 1 and 2.
    """
    check_choice(head_init=(head_init or model.head_init, HEAD_INITS))
    check_kept(keep_momentum, momentum)
    rates: dict[str, Any] = {"eta": eta, "momentum": momentum, "client_opt": client_opt}
    solve = resumed_solver(**rates, steps=steps, epochs=epochs, batch_size=batch_size)
    weight, objective = example_weight(model, weighting), client_loss(model)
    first_slots = local_step(**rates).init

    def at_rest(theta, head):
        return first_slots(Weights(theta, head))

    def init_client(info):
        head = model.head(info, head_init)
        return Kept(head, at_rest(model.theta(), head)) if keep_momentum else head

    def client_update(theta, state, data):
        head, velocity = state if keep_momentum else (state, at_rest(theta, state))
        (theta_i, head), velocity, loss = solve(objective, Weights(theta, head), velocity, data)
        state = Kept(head, velocity) if keep_momentum else head
        return ClientOutput(tree.subtract(theta_i, theta), weight(data), state, {"loss": loss})

    def personal_model(theta, state, data):
        return Weights(theta, state.head if keep_momentum else state)

    def local_model(theta, output):
        return personal_model(tree.add(theta, output.update), output.state, None)

    return Algorithm(
        model=model,
        population=population,
        init_server=model.theta,
        init_client=init_client,
        message=lambda theta: theta,
        client_update=client_update,
        server_update=tree.add,
        personal_model=personal_model,
        local_model=local_model,
        aggregate="mean",
        adapt=adaptation(
            model, personal_model, as_optimizer(client_opt, eta, momentum=momentum), part="head", batch_size=batch_size
        ),
        shares="backbone",
    )


FEDPER = Method(
    name="fedper",
    title="FedPer",
    builder=fedper,
    head="personal",
    message="broadcast",
    state="head",
    down="b",
    up="b",
    reference="Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers, "
    "arXiv 1912.00818",
)
