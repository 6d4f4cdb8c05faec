"""Fine-tuning: every client trains the shared model further before it predicts (FedAvg-FT, FedProx-FT).

Objective: first that of the method that trains the shared model, then l_i(v) for each client.

Messages: those of the method; 4d bytes down and 4d up for FedAvg-FT and FedProx-FT. On the device: nothing more than
for the method. A new client gets w and fine-tunes it, as all clients do. The local model after a round is that of the
method, without fine-tuning.

Fine-tuning has no proximal term, because this would keep the personal model near the shared one. The papers that use
this baseline do not give E_ft and eta_ft. The default is the work of one visit, at the learning rate of training.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tfpfl.algorithms.contract import Algorithm, check_head_predicts
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.fedprox import fedprox
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer, at_second_rate
from tfpfl.algorithms.parts.local_training import PARTS, body_solver, head_solver, local_solver
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.algorithms.transforms.normalization import trained_beside_statistics, with_fixed_statistics
from tfpfl.checks import check_choice
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights


def finetuned(
    algorithm: Algorithm,
    *,
    eta_ft: float = 0.007,
    steps_ft: int | None = None,
    epochs_ft: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    part: str = "full",
    global_model: Callable | None = None,
) -> Algorithm:
    """Any algorithm, with fine-tuned personal models; its training does not change.

    Update rule:

        to predict: v <- the algorithm's personal model;  v <- v - eta_ft grad l_i(v), for E_ft epochs or steps

    l_i is client i's mean cross-entropy.

    Args:
        algorithm: the `Algorithm` that trains the shared model, and whose clients predict with a head.
        eta_ft, steps_ft, epochs_ft: rate and amount of the fine-tuning; 0 steps for none. Default: 50 steps.
        batch_size, momentum, client_opt: of the fine-tuning, as in `fedavg`.
        part: what is fine-tuned: 'full' (all weights), 'head' (on cached features) or 'body' (the backbone).
        global_model: (message) -> the algorithm's model, where it has one for everyone: then that is scored as well.

    Returns:
        The `Algorithm`, with another `personal_model`, `global_model` and `adapt`.

    Raises:
        InvalidArgument: eta_ft or momentum is negative or not finite; batch_size is below 1; steps_ft or epochs_ft is
            negative, or both are given; part is not 'full', 'head' or 'body'; or the algorithm has a `predictor`.

    Source:
        A baseline in Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, AAAI 2021.
    """
    check_choice(part=(part, PARTS))
    check_head_predicts(algorithm, "finetuned")
    model = algorithm.model
    rates: dict[str, Any] = {"eta": eta_ft, "momentum": momentum, "client_opt": client_opt}
    work = rates | {"steps": steps_ft, "epochs": epochs_ft, "batch_size": batch_size}
    solvers = {
        "full": local_solver,
        "head": lambda **w: head_solver(model, **w),
        "body": lambda **w: body_solver(model, **w),
    }
    solve, objective = solvers[part](**work, at_least=0, suffix="_ft"), client_loss(model)

    def tuned(weights: Weights, data) -> Weights:
        if part == "full":
            return solve(objective, weights, data)[0]
        solution, _ = solve(weights.theta, weights.head, data)
        return weights._replace(**{"head" if part == "head" else "theta": solution})

    def personal_model(message, state, data):
        weights = algorithm.personal_model(message, state, data)
        return trained_beside_statistics(model, weights, lambda bare: tuned(bare, data))

    def adapt_from(start):
        return adaptation(model, start, optimizer, part=part, batch_size=batch_size)

    optimizer = as_optimizer(client_opt, eta_ft, momentum=momentum)
    adapt = with_fixed_statistics(model, algorithm.personal_model, adapt_from)
    shared = global_model or algorithm.global_model
    left = {"full": None, "head": "backbone", "body": "head"}[part]  # the part that fine-tuning does not change
    shares = left if algorithm.shares in ("model", left) else None
    return algorithm._replace(
        personal_model=personal_model,
        global_model=shared,
        begins=algorithm.begins if shared else algorithm.beginning,
        adapt=adapt,
        shares=shares,
    )


def tuning_work(solver, eta, steps, epochs, eta_ft, steps_ft, epochs_ft) -> dict[str, Any]:
    """The arguments of `finetuned` for a method: what is not given is that of its visits.

    Args:
        solver: the batch_size, momentum and client_opt of a visit.
        eta, steps, epochs: rate and amount of a visit.
        eta_ft, steps_ft, epochs_ft: those of the fine-tuning, as they were given.

    Raises:
        InvalidArgument: eta_ft would have no effect beside the optimizer, which has a rate of its own.
    """
    if steps_ft is None and epochs_ft is None:
        steps_ft, epochs_ft = steps, epochs
    work = solver | {"client_opt": at_second_rate(solver["client_opt"], eta_ft=eta_ft)}
    return work | {"eta_ft": eta if eta_ft is None else eta_ft, "steps_ft": steps_ft, "epochs_ft": epochs_ft}


def fedavg_ft(
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
    eta_ft: float | None = None,
    steps_ft: int | None = None,
    epochs_ft: int | None = None,
    part: str = "full",
) -> Algorithm:
    """FedAvg, and then fine-tuning: before every prediction, a client takes local steps from the shared model.

    Update rule:

        client(w):  w_i = SGD from w on l_i;  send w_i - w
        server:     w <- w + sum_{i in S} q_i (w_i - w),    q_i = N_i / sum_{j in S} N_j
        to predict: v <- w;  v <- v - eta_ft grad l_i(v), for E_ft epochs or steps;  predict with v

    w = (theta, W) is a whole model, theta the backbone and W the head; l_i is client i's mean cross-entropy on its N_i
    training examples. S is the cohort of the round.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the local steps, and the weights of the average, as in `fedavg`.
        eta_ft: rate of the fine-tuning, >= 0; None for eta.
        steps_ft, epochs_ft: E_ft, the fine-tuning's mini-batches or passes; one of the two, >= 0, 0 for none. Default:
            the work of one visit.
        part: what is fine-tuned: 'full' (all weights), 'head' (on cached features) or 'body' (the backbone).

    Returns:
        The `Algorithm`. A client keeps nothing; v is thrown away after the prediction.

    Raises:
        InvalidArgument: eta, eta_ft or momentum is negative or not finite, or eta_ft has no effect beside an optimizer
            object; steps, epochs or batch_size is below 1, or steps and epochs are both given; steps_ft or epochs_ft is
            negative, or both are given; part is not 'full', 'head' or 'body'; weighting is neither 'examples' nor
            'uniform'; clients have different numbers of classes (this method shares one head) and the population has no
            `num_labels`.

    Source:
        A baseline in Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, AAAI 2021; FedAvg is algorithm 1 of McMahan et al.,
        AISTATS 2017.
    """
    solver: dict[str, Any] = {"batch_size": batch_size, "momentum": momentum, "client_opt": client_opt}
    base = fedavg(model, population, eta=eta, steps=steps, epochs=epochs, weighting=weighting, **solver)
    work = tuning_work(solver, eta, steps, epochs, eta_ft, steps_ft, epochs_ft)
    return finetuned(base, part=part, global_model=lambda w: w, **work)


def fedprox_ft(
    model,
    population,
    *,
    mu: float = 0.01,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    straggler: float = 0.0,
    straggler_policy: str = "keep",
    implicit_prox: bool = False,
    weighting: str = "examples",
    eta_ft: float | None = None,
    steps_ft: int | None = None,
    epochs_ft: int | None = None,
    part: str = "full",
) -> Algorithm:
    """FedProx, and then fine-tuning without its penalty: before every prediction, a client takes local steps from the
    shared model.

    Update rule:

        client(w):  w_i = SGD from w on l_i(v) + (mu / 2) |v - w|^2;  send w_i - w
        server:     w <- w + sum_{i in S} q_i (w_i - w),    q_i = N_i / sum_{j in S} N_j
        to predict: v <- w;  v <- v - eta_ft grad l_i(v), for E_ft epochs or steps;  predict with v

    w = (theta, W) is a whole model, theta the backbone and W the head; l_i is client i's mean cross-entropy on its N_i
    training examples. S is the cohort of the round.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        mu, straggler, straggler_policy, implicit_prox: the pull, and who does only a part of its work, as in `fedprox`.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the local steps, and the weights of the average, as in `fedavg`.
        eta_ft: rate of the fine-tuning, >= 0; None for eta.
        steps_ft, epochs_ft: E_ft, the fine-tuning's mini-batches or passes; one of the two, >= 0, 0 for none. Default:
            the work of one visit.
        part: what is fine-tuned: 'full' (all weights), 'head' (on cached features) or 'body' (the backbone).

    Returns:
        The `Algorithm`. A client keeps nothing; v is thrown away after the prediction.

    Raises:
        InvalidArgument: mu, eta, eta_ft or momentum is negative or not finite, or eta_ft has no effect beside an
            optimizer object; steps, epochs or batch_size is below 1, or steps and epochs are both given; straggler is
            outside [0, 1]; straggler_policy or weighting is not one of the values above; steps_ft or epochs_ft is
            negative, or both are given; part is not 'full', 'head' or 'body'; clients have different numbers of classes
            (this method shares one head) and the population has no `num_labels`. Warns if eta mu >= 2 and the step is
            explicit: such steps diverge.

    Source:
        A baseline in Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, AAAI 2021; FedProx is algorithm 2 of Li et al., MLSys
        2020.
    """
    solver: dict[str, Any] = {"batch_size": batch_size, "momentum": momentum, "client_opt": client_opt}
    base = fedprox(
        model,
        population,
        mu=mu,
        eta=eta,
        steps=steps,
        epochs=epochs,
        straggler=straggler,
        straggler_policy=straggler_policy,
        implicit_prox=implicit_prox,
        weighting=weighting,
        **solver,
    )
    work = tuning_work(solver, eta, steps, epochs, eta_ft, steps_ft, epochs_ft)
    return finetuned(base, part=part, global_model=lambda w: w, **work)


FEDAVG_FT = Method(
    name="fedavg_ft",
    title="FedAvg-FT",
    builder=fedavg_ft,
    head="shared",
    message="broadcast",
    state="nothing",
    evaluates="fine-tuned",
    down="d",
    up="d",
    reference="FedAvg, fine-tuned by each client; a baseline in Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: "
    "Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021",
)

FEDPROX_FT = replace(
    FEDAVG_FT,
    name="fedprox_ft",
    title="FedProx-FT",
    builder=fedprox_ft,
    reference="FedProx, fine-tuned by each client; a baseline in Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: "
    "Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021",
)
