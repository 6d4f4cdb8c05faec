"""FedPer: a shared body and private heads, trained together (Arivazhagan, Aggarwal, Singh, Choudhary; arXiv
1912.00818).

Objective: sum_i alpha_i l_i(W_i, theta).

Messages: 4b bytes down, 4b up. On the device: the head W_i, and its labels. A new client gets theta and an initial
head, and adapts only the head. The local model is (theta_i, W_i).

FedPer is FedAvg without sending the head. The private part of the paper may have several layers; here it is the linear
head, as in the comparisons of PFLEGO and PGFed. One full-batch step with full participation is the same as PFLEGO's
rule 'eq3' with tau = 1 and rho = eta.
"""

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.local_training import example_weight, local_solver
from tfpfl.algorithms.parts.optimizers import sgd
from tfpfl.checks import check_choice
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.split import HEAD_INITS
from tfpfl.models.weights import Weights


def fedper(
    model,
    population,
    *,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
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
        eta, steps, epochs, batch_size, momentum, weighting: rate, amount, mini-batches and momentum of the local SGD,
            and the weights of the average, as in `fedavg`.
        head_init: how a client's head starts: 'glorot', 'uniform01' or 'zeros' (see `SplitModel`); None for the model's
            `head_init`.

    Returns:
        The `Algorithm`. A client keeps W_i and predicts with (theta, W_i).

    Raises:
        InvalidArgument: eta or momentum is negative or not finite; steps, epochs or batch_size is below 1, or steps and
            epochs are both given; weighting is neither 'examples' nor 'uniform'; head_init is not one of the values
            above.

    Source:
        Arivazhagan, Aggarwal, Singh, Choudhary, arXiv 1912.00818, algorithms 1 and 2.
    """
    check_choice(head_init=(head_init or model.head_init, HEAD_INITS))
    solve = local_solver(eta=eta, steps=steps, epochs=epochs, batch_size=batch_size, momentum=momentum)
    weight, objective = example_weight(model, weighting), client_loss(model)

    def client_update(theta, head, data):
        (theta_i, head), loss = solve(objective, Weights(theta, head), data)
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
        adapt=adaptation(model, personal_model, sgd(eta, momentum), part="head", batch_size=batch_size),
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
