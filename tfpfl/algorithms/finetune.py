"""Fine-tuning: a shared model made personal by local training, at the moment it is used (FedAvg-FT, FedProx-FT).

Objective: that of the method that trained the shared model, and then l_i(v) for each client alone.

    training:               as FedAvg, FedProx or any other algorithm: the same messages, the same state
    personal model of i:    v = the algorithm's personal model
                            v <- SGD on l_i, for E_ft epochs or steps      of all weights, of the head, or of the body
                            predict with v; v is thrown away

Messages: those of the method, 4d bytes down and up for FedAvg-FT and FedProx-FT. On the device: nothing more. A new
client gets w and fine-tunes it: E_ft epochs of adapting are its personal model. Its local model after a round is the
method's, not fine-tuned: no method's round includes it.

No proximal term while fine-tuning: it would hold the personal model to what it is to leave. E_ft and eta_ft are not
given in the papers that use this baseline; the default is the work of one visit, at the rate of training.
"""

from collections.abc import Callable

from tfpfl.adaptation import adaptation
from tfpfl.algorithm import Algorithm, Weights
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.fedprox import fedprox
from tfpfl.local import PARTS, body_solver, check_choice, client_loss, head_solver, local_solver
from tfpfl.optimizer import sgd


def finetuned(
    algorithm: Algorithm,
    *,
    eta_ft: float = 0.007,
    steps_ft: int | None = None,
    epochs_ft: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    part: str = "full",
    global_model: Callable | None = None,
) -> Algorithm:
    """Any algorithm, with fine-tuned personal models; its training does not change.

    Args:
        eta_ft, steps_ft, epochs_ft, batch_size, momentum: of the fine-tuning, as in `fedavg`; 0 steps for none.
        part: what is trained: 'full', 'head' (on cached features) or 'body'.
        global_model: (message) -> the algorithm's model, where it has one for everyone: then that is scored as well.

    Raises:
        ValueError: names the argument, and says what it may be.
    """
    check_choice(part=(part, PARTS))
    model = algorithm.model
    work = {"eta": eta_ft, "steps": steps_ft, "epochs": epochs_ft, "batch_size": batch_size, "momentum": momentum}
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
        return tuned(algorithm.personal_model(message, state, data), data)

    adapt = adaptation(model, algorithm.personal_model, sgd(eta_ft, momentum), part=part, batch_size=batch_size)
    shared = global_model or algorithm.global_model
    return algorithm._replace(personal_model=personal_model, global_model=shared, adapt=adapt)


def tuning_work(steps, epochs, steps_ft, epochs_ft) -> dict:
    """E_ft where it is given, and otherwise the work of one visit."""
    if steps_ft is None and epochs_ft is None:
        return {"steps_ft": steps, "epochs_ft": epochs}
    return {"steps_ft": steps_ft, "epochs_ft": epochs_ft}


def fedavg_ft(
    model,
    population,
    *,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    weighting: str = "examples",
    eta_ft: float | None = None,
    steps_ft: int | None = None,
    epochs_ft: int | None = None,
    part: str = "full",
) -> Algorithm:
    """FedAvg, then fine-tuning.

    Args:
        eta, steps, epochs, batch_size, momentum, weighting: as in `fedavg`.
        eta_ft: rate of the fine-tuning; None for eta.
        steps_ft, epochs_ft: E_ft, one of the two; default: the work of one visit. 0 for none, which is FedAvg.
        part: 'full', 'head' or 'body'.

    Raises:
        ValueError: names the argument, and says what it may be.
    """
    solver = {"batch_size": batch_size, "momentum": momentum}
    base = fedavg(model, population, eta=eta, steps=steps, epochs=epochs, weighting=weighting, **solver)
    work = tuning_work(steps, epochs, steps_ft, epochs_ft)
    work |= solver | {"eta_ft": eta if eta_ft is None else eta_ft}
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
    straggler: float = 0.0,
    straggler_policy: str = "keep",
    implicit_prox: bool = False,
    weighting: str = "examples",
    eta_ft: float | None = None,
    steps_ft: int | None = None,
    epochs_ft: int | None = None,
    part: str = "full",
) -> Algorithm:
    """FedProx, then fine-tuning without its penalty; the arguments are those of `fedprox` and of `fedavg_ft`.

    Raises:
        ValueError: names the argument, and says what it may be.
    """
    solver = {"batch_size": batch_size, "momentum": momentum}
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
    work = tuning_work(steps, epochs, steps_ft, epochs_ft)
    work |= solver | {"eta_ft": eta if eta_ft is None else eta_ft}
    return finetuned(base, part=part, global_model=lambda w: w, **work)
