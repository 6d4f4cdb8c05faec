"""Server optimizers: the server takes a step of an optimizer with the mean of its clients' updates.

FedAvgM, FedAdagrad, FedAdam and FedYogi (Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive
Federated Optimization, ICLR 2021, algorithm 2; FedAvgM is of Hsu, Qi, Brown, arXiv 1909.06335). The mean of the updates
is minus a gradient, the "pseudo-gradient": plain SGD with rate 1 adds the mean, as the method itself does.
"""

from typing import Any, NamedTuple

from tfpfl.algorithms.contract import Algorithm, kinds
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.optimizers import SECOND_MOMENTS, Optimizer, adaptive, check_options, sgd
from tfpfl.algorithms.parts.schedules import paced
from tfpfl.algorithms.transforms.along import as_message, of_own
from tfpfl.checks import InvalidArgument, check_rates, unknown
from tfpfl.models import tree

SERVER_OPTIMIZERS = ("sgd", "momentum", *SECOND_MOMENTS)


class Optimized(NamedTuple):
    """The server's state together with the state of its optimizer."""

    own: Any  # the algorithm's server state
    slots: Any  # the optimizer's state


def server_optimized(
    algorithm: Algorithm,
    *,
    server_opt: str | Optimizer = "sgd",
    server_eta: float = 1.0,
    server_beta_1: float | None = None,
    server_beta_2: float | None = None,
    server_epsilon: float | None = None,
) -> Algorithm:
    """The algorithm with a server that takes a step of an optimizer, instead of adding the mean of the updates.

    With delta the mean of the clients' updates, weighted as the method says:

        sgd:       w <- w + eta delta
        momentum:  v <- beta_1 v + delta;  w <- w + eta v                                              FedAvgM
        others:    m <- beta_1 m + (1 - beta_1) delta;  v <- (see below);  w <- w + eta m / (sqrt(v) + epsilon)
        adagrad:   v + delta^2                                                                         FedAdagrad
        adam:      beta_2 v + (1 - beta_2) delta^2                                                     FedAdam
        yogi:      v - (1 - beta_2) delta^2 sign(v - delta^2)                                          FedYogi

    At first m is 0 and v is epsilon^2 (0 for 'momentum'). Biases are not corrected, as in the paper.

    Args:
        algorithm: an `Algorithm` whose server adds a mean: its `aggregate` is 'mean' and its `server_update` is
            `tfpfl.models.tree.add`.
        server_opt: what the server does with the mean of the updates: 'sgd', 'momentum', 'adagrad', 'adam' or 'yogi'.
            In Python also an optimizer of Keras, TFF or tfpfl, which has a rate of its own; it gets minus the mean as
            the gradient.
        server_eta: the server's learning rate, >= 0. With 'sgd' and 1 the server adds the mean.
        server_beta_1: the momentum of 'momentum', and the decay of m, in [0, 1); None for 0.9, and for 0 with
            'adagrad'.
        server_beta_2: the decay of v with 'adam' and 'yogi', in [0, 1); None for 0.99.
        server_epsilon: added to the root of v, > 0, the paper's tau; None for 0.001. A larger one adapts less.

    Returns:
        The algorithm, whose server state is an `Optimized`. With 'sgd' and rate 1, the algorithm itself.

    Raises:
        InvalidArgument: the server does not add a mean; server_opt is unknown; an option is out of range, or has no
            effect with this server_opt.
    """
    options = {"server_beta_1": server_beta_1, "server_beta_2": server_beta_2, "server_epsilon": server_epsilon}
    takes = {"momentum": ("beta_1",), "adagrad": ("beta_1", "epsilon")}
    takes |= dict.fromkeys(("adam", "yogi"), ("beta_1", "beta_2", "epsilon"))
    check_rates(server_eta=server_eta)
    name = server_opt if isinstance(server_opt, str) else type(server_opt).__name__
    check_options("server_opt", name, options, takes.get(name, ()))
    if server_eta != 1 and not isinstance(server_opt, str) and not callable(server_opt):
        raise InvalidArgument(f"server_eta={server_eta} has no effect: the optimizer {name} has a rate of its own")
    if server_opt == "sgd" and server_eta == 1:
        return algorithm
    check_adds_mean(algorithm)
    made = _optimizer(server_opt, server_eta, server_beta_1, server_beta_2, server_epsilon)
    # The updates of scheduled clients are shorter already; an adaptive server takes no shorter steps for that.
    optimizer = paced(made, "server_eta", by_default=not made.proportional)

    def init_server() -> Optimized:
        own = algorithm.init_server()
        return Optimized(own, optimizer.init(own))

    def server_update(server: Optimized, mean: Any) -> Optimized:
        slots, own = optimizer.step(server.slots, server.own, tree.scale(-1, mean))
        return Optimized(own, slots)

    adapt = algorithm.adapt
    return algorithm._replace(
        init_server=init_server,
        server_update=server_update,
        message=as_message(algorithm, of_own(algorithm.message)),
        matrices=of_own(algorithm.matrices),
        adapt=adapt and adapt._replace(message=of_own(adapt.message)),
    )


def _optimizer(server_opt: Any, eta: float, beta_1: float | None, beta_2: float | None, epsilon: float | None) -> Any:
    """The `Optimizer` of these options."""
    if not isinstance(server_opt, str):
        return as_optimizer(server_opt, eta, what="server_opt")
    if server_opt not in SERVER_OPTIMIZERS:
        raise InvalidArgument(unknown("server_opt", server_opt, SERVER_OPTIMIZERS))
    beta_1 = (0.0 if server_opt == "adagrad" else 0.9) if beta_1 is None else beta_1
    if server_opt in ("sgd", "momentum"):
        return sgd(eta, beta_1 if server_opt == "momentum" else 0.0)
    beta_2, epsilon = (0.99 if beta_2 is None else beta_2), (0.001 if epsilon is None else epsilon)
    return adaptive(server_opt, eta, beta_1, beta_2, epsilon)


def adds_mean(algorithm: Algorithm) -> bool:
    """Whether the server adds the mean of its clients' updates to its state, and does nothing else."""
    plain = algorithm.balance is None and algorithm.first is None
    return plain and algorithm.aggregate == "mean" and algorithm.server_update is tree.add


def check_adds_mean(algorithm: Algorithm) -> None:
    """Checks that a server optimizer fits to an algorithm.

    Raises:
        InvalidArgument: the server does something else than adding a mean. The message says what.
    """
    if adds_mean(algorithm):
        return
    if "rows" in kinds(algorithm):
        why = "the server receives every client's own update, not their mean"
    elif algorithm.balance is not None:
        why = "the server keeps a sum of what its clients keep, which another step would break"
    elif algorithm.first is not None:
        why = "a round has two exchanges, and the server's state is more than what the second one adds to"
    elif algorithm.aggregate != "mean":
        why = f"the server gets {algorithm.aggregate!r} of the updates, not one mean"
    else:
        why = (
            "the server does not just add the mean: it has a rate, an optimizer or a rule of its own, or a schedule "
            "(make scheduled(server_optimized(...)), not the other way round)"
        )
    raise InvalidArgument(
        f"server_opt and server_eta are for methods whose server adds the mean of the updates to its state "
        f"(aggregate='mean' and server_update=tfpfl.models.tree.add); here {why}. Leave them out, and use the method's "
        "own hyperparameters of the server, if it has any"
    )
