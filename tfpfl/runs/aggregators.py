"""The aggregators of a run: how updates are clipped, zeroed, compressed, made private or combined robustly.

Most are aggregators of TFF, for the TFF engine. TFF has no coordinate-wise median and no trimmed mean. These two are
tfpfl's own and work on all engines; the server then sees the updates of single clients. None is secure aggregation.

    weighted mean   m = sum_i w_i u_i / sum_i w_i, of u_i clipped, zeroed or compressed; where the algorithm adds
                    w_i u_i (PFLEGO's gradients), the sum is m * sum_i w_i
    private         m = (sum_i clip(u_i) + noise) / r for updates that are averaged, with r the clients that are
                    expected to come back: every client counts the same; and
                    (sum_i clip(w_i u_i) + noise) for those that are added
"""

import re
from collections.abc import Sequence
from inspect import signature
from typing import Any

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, check_no_balance, check_one_exchange, kinds
from tfpfl.algorithms.parts.objectives import parsed_objective
from tfpfl.algorithms.transforms.compression import compressed
from tfpfl.algorithms.transforms.normalization import check_not_shared
from tfpfl.algorithms.transforms.robust import median, trimmed_mean
from tfpfl.checks import InvalidArgument, unknown
from tfpfl.engines.tff.aggregators import OF_TFF

PRIVATE = ("dp", "dp_adaptive")  # those with differential privacy
OF_OURS = {f.__name__: f for f in (median, trimmed_mean)}  # name -> (algorithm, arguments) -> algorithm; all engines
AGGREGATORS = OF_TFF | OF_OURS  # all, by name
WHOLE = {"bits": 16, "threshold": 2**31 - 1}  # arguments that are whole numbers: the largest one that TFF takes
NOISE = (1e-6, 1e4)  # the noise multipliers for which epsilon can be computed; with fewer there is no privacy
UNWEIGHTED = (*PRIVATE, *OF_OURS)  # those for which all clients count the same


def written(texts: Sequence[str]) -> dict:
    """The keyword arguments of an aggregator from texts NAME=NUMBER: {name: number}.

    Raises:
        InvalidArgument: a text is written in another way.
    """
    found = {}
    for text in texts:
        match = re.fullmatch(r"(\w+)=(\S+)", str(text))
        name, number = match.groups() if match else ("", "")
        try:
            value = float(number)
        except ValueError as error:
            raise InvalidArgument(
                f"aggregator_args: an argument is written NAME=NUMBER, such as noise=1.0; found {text!r}"
            ) from error
        found[name] = int(value) if value.is_integer() and name in WHOLE else value
    return found


def check_aggregator(name: str | None, arguments: dict, engine: str) -> None:
    """Checks the name and the arguments of an aggregator.

    Args:
        name: a key of `AGGREGATORS`; None: no aggregator.
        arguments: {name: number}.
        engine: the run's engine.

    Raises:
        InvalidArgument: the name or an argument is unknown, a required argument is missing, a value is not a positive
            number (`trim` may be 0), not a whole one where TFF needs that, or a noise outside `NOISE`, the engine
            cannot use this aggregator, or there are arguments but no aggregator.
    """
    if name is None:
        if arguments:
            raise InvalidArgument(
                f"aggregator_args need an aggregator, found {', '.join(arguments)} but no aggregator: name one, or "
                "leave them out"
            )
        return
    if name not in AGGREGATORS:
        raise InvalidArgument(unknown("aggregator", name, AGGREGATORS))
    if name in OF_TFF and engine != "tff":
        raise InvalidArgument(
            f"aggregator {name!r} needs --engine tff, found engine {engine!r}; {', '.join(OF_OURS)} work on any engine"
        )
    known = {k: p for k, p in signature(AGGREGATORS[name]).parameters.items() if k not in ("algorithm", "clients")}
    for argument in arguments:
        if argument not in known:
            raise InvalidArgument(unknown(f"argument of aggregator {name}", argument, known))
    missing = [k for k, p in known.items() if p.default is p.empty and k not in arguments]
    if missing:
        raise InvalidArgument(f"aggregator {name} needs {', '.join(missing)}: --aggregator-args {missing[0]}=VALUE")
    for argument, value in arguments.items():
        positive = argument != "trim"
        if not isinstance(value, int | float) or not np.isfinite(value) or value < 0 or (positive and value == 0):
            raise InvalidArgument(f"{argument} of aggregator {name} must be a positive number, found {value!r}")
        if argument == "noise" and not NOISE[0] <= value <= NOISE[1]:
            raise InvalidArgument(
                f"noise of aggregator {name}, the noise multiplier, must lie between {NOISE[0]:g} and {NOISE[1]:g}, "
                f"found {value!r}"
            )
        most = WHOLE.get(argument)
        if most is not None and not (isinstance(value, int) and value <= most):
            raise InvalidArgument(
                f"{argument} of aggregator {name} must be a whole number from 1 to {most}, found {value!r}"
            )


def check_method(name: str, algorithm: Algorithm) -> None:
    """Checks that an aggregator can combine the updates of a method.

    Args:
        name: a key of `AGGREGATORS`.
        algorithm: the method, before `with_aggregator`.

    Raises:
        InvalidArgument: the algorithm's server receives the updates of single clients (rows), not a mean or sum; or it
            keeps a sum of what its clients keep (`Algorithm.balance`); or the aggregator is of TFF and a round has two
            exchanges (`Algorithm.first`); or the model has batch_norm='shared'; or the aggregator is private and the
            model is not of float32.
    """
    if "rows" in kinds(algorithm):
        raise InvalidArgument(
            f"aggregator {name!r} needs a method whose updates are averaged or added; the server of this method "
            "receives every client's own update. Leave out the aggregator"
        )
    if name in OF_TFF:
        check_one_exchange(algorithm, f"aggregator {name!r}")
    check_no_balance(algorithm, f"aggregator {name!r}")
    check_not_shared(algorithm, f"aggregator {name!r}")
    if name in PRIVATE and algorithm.model.dtype != tf.float32:
        found = tf.as_dtype(algorithm.model.dtype).name
        raise InvalidArgument(f"aggregator {name!r} adds noise in float32; the model has {found}: make one of float32")


def check_objective(config: Any) -> None:
    """Checks that the aggregator of a `RunConfig`, if it has one, leaves its objective a meaning.

    Raises:
        InvalidArgument: the objective is 'cvar'; or it is 'fair', which is in the weights of what the clients send, and
            the aggregator does not weight clients.
    """
    name, objective = config.aggregator, config.objective
    kind = "mean" if name is None else parsed_objective(objective)[0]
    if kind == "cvar":
        raise InvalidArgument(
            f"objective={objective!r} cannot be used with aggregator={name!r}: every client also sends its loss, which "
            "an aggregator would change or hide. Leave one of the two out, or take the objective fair:q"
        )
    if kind == "fair" and name in UNWEIGHTED and config.method.sends == "update":
        raise InvalidArgument(
            f"objective={objective!r} would change nothing with aggregator={name!r}: it is in the weights of this "
            "method's updates, and this aggregator counts all clients the same. Leave one of the two out, or take a "
            "method whose clients send a gradient, such as pflego or fedsgd"
        )


def check_method_can_have_it(config: Any) -> None:
    """Checks that the method of a `RunConfig` can have its aggregator.

    Raises:
        InvalidArgument: it cannot; the message says why (`Method.no_median` and `Method.no_compress`).
    """
    reasons = dict.fromkeys(OF_OURS, config.method.no_median) | {"compress": config.method.no_compress}
    if why := reasons.get(config.aggregator):
        raise InvalidArgument(f"{config.algorithm} cannot have aggregator={config.aggregator!r}: {why}")


def factory(name: str, arguments: dict, algorithm: Algorithm) -> Any:
    """Makes the TFF aggregator factory of this name for an algorithm.

    Args:
        name: a key of `OF_TFF`.
        arguments: {name: number}.
        algorithm: gives the expected number of clients that come back in a round, if the aggregator needs it.

    Raises:
        InvalidArgument: the aggregator cannot combine this algorithm's updates, see `check_method`; or it is private,
            and there is one client, which it could hide among no others.
    """
    check_method(name, algorithm)
    if name in PRIVATE and algorithm.population.num_clients < 2:
        raise InvalidArgument(
            f"aggregator {name!r} hides who of several clients took part, and there is one: take more clients, or "
            "leave out the aggregator"
        )
    made = OF_TFF[name]
    if "clients" in signature(made).parameters:
        arguments = arguments | {"clients": algorithm.population.clients_that_arrive}
    return made(**arguments)


def with_aggregator(name: str | None, arguments: dict, algorithm: Algorithm) -> Algorithm:
    """Wraps an algorithm with the part of an aggregator that needs no TFF.

    Args:
        name: a key of `AGGREGATORS`; None: no aggregator.
        arguments: {name: number}.
        algorithm: the algorithm to wrap.

    Returns:
        For median and trimmed_mean an algorithm with this aggregation; for compress one that counts compressed bytes;
        for all others the algorithm itself. With an aggregator it has no `balance`: `check_method` is asked when a run
        is created, and a run that an older version created continues as it began.
    """
    if name is not None:
        algorithm = algorithm._replace(balance=None)
    if name in OF_OURS:
        return OF_OURS[name](algorithm, **arguments)
    return compressed(algorithm, **arguments) if name == "compress" else algorithm
