"""What is done to updates on their way into the sum: clipping, zeroing, compression, privacy, robust statistics.

Most are TFF's own aggregators, for the TFF engine. TFF has no coordinate-wise median and no trimmed mean: those are
ours, work on any engine, and need the server to see single clients' updates; none of this is secure aggregation.

    weighted mean   m = sum_i w_i u_i / sum_i w_i, of u_i clipped, zeroed or compressed; where the algorithm adds
                    w_i u_i (PFLEGO's gradients), the sum is m * sum_i w_i
    private         m = (sum_i clip(u_i) + noise) / r for updates that are averaged: every client counts the same; and
                    (sum_i clip(w_i u_i) + noise) for those that are added
"""

from inspect import signature

import numpy as np

from tfpfl.algorithms.contract import Algorithm, kinds
from tfpfl.algorithms.transforms.compression import compressed
from tfpfl.algorithms.transforms.robust import median, trimmed_mean
from tfpfl.checks import InvalidArgument, unknown
from tfpfl.engines.tff.aggregators import OF_TFF, Aggregated
from tfpfl.runs.privacy import Privacy, privacy

PRIVATE = ("dp", "dp_adaptive")
OF_OURS = {f.__name__: f for f in (median, trimmed_mean)}
AGGREGATORS = OF_TFF | OF_OURS


def check_aggregator(name: str | None, arguments: dict, engine: str) -> None:
    """Whether there is such an aggregator, and it has these arguments.

    Raises:
        ValueError: says what there is.
    """
    if name is None:
        if arguments:
            raise InvalidArgument(f"aggregator_args are those of an aggregator, found {', '.join(arguments)} and none")
        return
    if name not in AGGREGATORS:
        raise InvalidArgument(unknown("aggregator", name, AGGREGATORS))
    if name in OF_TFF and engine != "tff":
        raise InvalidArgument(
            f"aggregator {name!r} is TFF's: it needs --engine tff; {', '.join(OF_OURS)} work on any engine"
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


def factory(name: str, arguments: dict, algorithm: Algorithm):
    """A factory of TFF's for this algorithm.

    Raises:
        ValueError: the algorithm's server sees every client's own; then nothing is added up that could be aggregated.
    """
    if "rows" in kinds(algorithm):
        raise InvalidArgument(
            f"aggregator {name!r} is for updates that are added up; here the server sees every client's own"
        )
    made = OF_TFF[name]
    if "clients" in signature(made).parameters:
        arguments = arguments | {"clients": algorithm.population.clients_per_round}
    return made(**arguments)


def with_aggregator(name: str | None, arguments: dict, algorithm: Algorithm) -> Algorithm:
    """What of an aggregator is done by the algorithm's own functions: a robust statistic; counting compressed bytes."""
    if name in OF_OURS:
        return OF_OURS[name](algorithm, **arguments)
    return compressed(algorithm, **arguments) if name == "compress" else algorithm


__all__ = ["AGGREGATORS", "Aggregated", "Privacy", "check_aggregator", "factory", "privacy", "with_aggregator"]
