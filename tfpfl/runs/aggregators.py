"""What is done to updates on their way into the sum: clipping, zeroing, compression, privacy, robust statistics.

Most are TFF's own aggregators, for the TFF engine. TFF has no coordinate-wise median and no trimmed mean: those are
ours, work on any engine, and need the server to see single clients' updates; none of this is secure aggregation.

    weighted mean   m = sum_i w_i u_i / sum_i w_i, of u_i clipped, zeroed or compressed; where the algorithm adds
                    w_i u_i (PFLEGO's gradients), the sum is m * sum_i w_i
    private         m = (sum_i clip(u_i) + noise) / r for updates that are averaged: every client counts the same; and
                    (sum_i clip(w_i u_i) + noise) for those that are added
"""

from collections.abc import Callable
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from safetensors.numpy import load, save

from tfpfl.algorithms.contract import Algorithm, kinds
from tfpfl.algorithms.transforms.along import AlongWith
from tfpfl.checks import InvalidArgument, Unavailable, unknown
from tfpfl.engines.tff.worker import require_tff
from tfpfl.models import tree

QUANTIZED_ABOVE = 1000  # so many numbers of a tensor, it is sent in 8 bits each


class Aggregated(NamedTuple):
    """The server's state of a run whose aggregator has one."""

    own: Any
    aggregator: Any


class WithState:
    """A process whose server's state is an `Aggregated`, with the aggregator's part in bytes.

    What it is made of only TFF knows; so a run can be read without.
    """

    def __init__(self, process):
        self._process = process

    @cached_property
    def _first(self):
        return self._process.initialize().aggregator

    def next(self, server: Aggregated, *arguments):
        """As that of the process."""
        state = _from_bytes(server.aggregator, self._first) if len(server.aggregator) else self._first
        output = self._process.next(Aggregated(server.own, state), *arguments)
        return output._replace(server=Aggregated(output.server.own, _to_bytes(output.server.aggregator)))


def _to_bytes(state):
    """A structure's leaves as safetensors: uint8 [n]. A leaf may be text (TFF's private queries keep records so)."""
    leaves = [np.asarray(leaf, order="C") for leaf in tf.nest.flatten(state)]
    leaves = [np.frombuffer(leaf.item(), np.uint8) if leaf.dtype.kind in "SO" else leaf for leaf in leaves]
    return np.frombuffer(save({str(i): leaf for i, leaf in enumerate(leaves)}), np.uint8)


def _from_bytes(saved, like):
    held, wanted = load(saved.tobytes()), tf.nest.flatten(like)
    leaves = [
        held[str(i)].tobytes() if np.asarray(leaf).dtype.kind in "SO" else held[str(i)] for i, leaf in enumerate(wanted)
    ]
    return tf.nest.pack_sequence_as(like, leaves)


# ---- TFF's


def clip(*, norm: float | None = None):
    """Updates longer than `norm` are scaled down to it; without one, to the 0.8-quantile of the norms, estimated."""
    tff = require_tff()
    bound = norm or tff.aggregators.PrivateQuantileEstimationProcess.no_noise(
        initial_estimate=1.0, target_quantile=0.8, learning_rate=0.2
    )
    return tff.aggregators.clipping_factory(bound, tff.aggregators.MeanFactory())


def zero(*, norm: float | None = None):
    """Updates with a number above `norm` count as 0; without one, above 2 m + 1, m the 0.98-quantile, estimated."""
    tff = require_tff()
    if norm is not None:
        return tff.aggregators.zeroing_factory(norm, tff.aggregators.MeanFactory(), norm_order=np.inf)
    return tff.learning.robust_aggregator(zeroing=True, clipping=False, weighted=True)


def robust():
    """TFF's `robust_aggregator`: adaptive zeroing, then adaptive clipping."""
    return require_tff().learning.robust_aggregator(zeroing=True, clipping=True, weighted=True)


def compress(*, bits: int = 8, threshold: int = QUANTIZED_ABOVE):
    """Tensors of more than `threshold` numbers are sent in `bits` bits a number, uniformly quantized."""
    tff = require_tff()
    encoded = tff.aggregators.EncodedSumFactory.quantize_above_threshold(bits, threshold)
    return tff.aggregators.MeanFactory(encoded)


def compressed(algorithm: Algorithm, *, bits: int = 8, threshold: int = QUANTIZED_ABOVE) -> Algorithm:
    """The algorithm whose clients report the bytes that are left to send: `bits` a number, and two floats a tensor."""

    def size(x):
        small, large = x.dtype.size * tf.size(x, tf.int64), (tf.size(x, tf.int64) * bits + 7) // 8 + 8
        return tf.where(tf.size(x) > threshold, large, small)

    def client_update(message, state, data):
        output = algorithm.client_update(message, state, data)
        sizes = tf.add_n([size(x) for x in tf.nest.flatten(output.update)])
        return output._replace(metrics=output.metrics | {"bytes_up": sizes})

    return algorithm._replace(client_update=client_update, one_pass=None)


def dp(*, noise: float, clip: float, clients: float):
    """Gaussian noise of standard deviation noise * clip on the sum of updates clipped to the L2 norm `clip`."""
    tff = require_tff()
    return tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(noise, clients, clip)


def dp_adaptive(*, noise: float, clients: float, clip: float = 0.1):
    """As dp, the norm following the median of the updates' (Andrew et al., 2021); `clip` is where it starts."""
    tff = require_tff()
    counts = max(0.05 * clients, noise)  # it must exceed noise / 2, which TFF's default for few clients does not
    return tff.aggregators.DifferentiallyPrivateFactory.gaussian_adaptive(
        noise,
        clients,
        initial_l2_norm_clip=clip,
        target_unclipped_quantile=0.5,
        learning_rate=0.2,
        clipped_count_stddev=counts,
    )


# ---- ours, for any engine


def median(algorithm: Algorithm) -> Algorithm:
    """The algorithm with the coordinate-wise median of the cohort's updates instead of their weighted mean."""
    return _with_statistic(algorithm, lambda rows: _trimmed(rows, 0.5))


def trimmed_mean(algorithm: Algorithm, *, trim: float = 0.1) -> Algorithm:
    """With the mean over the cohort, of every coordinate, without its `trim` smallest and largest part.

    Raises:
        ValueError: trim outside [0, 0.5).
    """
    if not 0 <= trim < 0.5:
        raise InvalidArgument(f"trim lies in [0, 0.5), found {trim}")
    return _with_statistic(algorithm, lambda rows: _trimmed(rows, trim))


OF_TFF = {f.__name__: f for f in (clip, zero, robust, compress, dp, dp_adaptive)}
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


def _trimmed(rows, trim: float):
    """[r, ...] -> [...]: the mean of what is left of every coordinate; 0.5 leaves one or two in the middle."""
    number = tf.shape(rows)[0]
    cut = tf.minimum(tf.cast(tf.floor(trim * tf.cast(number, tf.float64)), tf.int32), (number - 1) // 2)
    return tf.reduce_mean(tf.sort(rows, axis=0)[cut : number - cut], axis=0)


def _with_statistic(algorithm: Algorithm, statistic: Callable) -> Algorithm:
    sent = kinds(algorithm)
    if "rows" in sent:
        raise InvalidArgument(
            "a robust statistic is for updates that are added up; here the server sees every client's own"
        )
    weighed = AlongWith(algorithm.aggregate, "weight")
    rows = "rows" if isinstance(algorithm.aggregate, str) else ("rows",) * len(sent)

    def client_update(message, state, data):
        output = algorithm.client_update(message, state, data)
        return output._replace(update=weighed.put_on(output.update, output.weight))

    def server_update(server, aggregated):
        total = tf.reduce_sum(aggregated.weight.values)

        def of(kind, part):
            value = tf.nest.map_structure(statistic, part.values)
            return tree.scale(total, value) if kind == "sum" else value

        values = aggregated._make([*map(of, sent, aggregated[:-1]), total])
        return algorithm.server_update(server, weighed.take_off(values))

    def local_model(message, output):
        return algorithm.local_model(message, output._replace(update=weighed.take_off(output.update)))

    return algorithm._replace(
        client_update=client_update,
        server_update=server_update,
        local_model=local_model,
        aggregate=weighed.put_on(rows, "rows"),
        one_pass=None,
    )


# ---- privacy


class Privacy(NamedTuple):
    """(epsilon, delta) of what the server released, for whole clients: with or without one of them."""

    epsilon: float
    delta: float
    text: str  # how it was counted


def require_accounting():
    """dp-accounting, or what to do without it.

    Raises:
        RuntimeError: it is not installed here.
    """
    try:
        import dp_accounting
    except ImportError as error:
        raise Unavailable("epsilon is counted by dp-accounting: pip install 'tfpfl[dp]'") from error
    return dp_accounting


def privacy(noise: float, population, rounds: int, *, delta: float | None = None, adaptive: bool = False) -> Privacy:
    """The (epsilon, delta) of a run's backbone, or whatever its clients send, by dp-accounting's RDP accountant.

    Args:
        noise: the noise multiplier.
        population: with the sampling. 'binomial' is counted as Poisson sampling, with the neighbour that lacks one
            client; 'fixed' as sampling without replacement, with the neighbour in which one client is another, so
            that the sum may change by twice the norm; 'range' without amplification, as if everyone always came.
        rounds: that were made.
        delta: default: 1 / I^1.1.
        adaptive: of dp_adaptive, whose noisy count of clipped updates is a part of the same multiplier.

    Personal heads and the losses that clients report are not covered: heads stay on the device; losses are in this
    simulation's logs.

    Raises:
        RuntimeError: dp-accounting is not installed.
    """
    dp_accounting = require_accounting()
    from dp_accounting.rdp import RdpAccountant

    people, sampling = population.num_clients, population.sampling
    delta = people**-1.1 if delta is None else delta
    event = dp_accounting.GaussianDpEvent(noise)
    relation, text = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, "every client in every round"
    if sampling.kind == "binomial":
        event = dp_accounting.PoissonSampledDpEvent(sampling.rate, event)
        text = f"Poisson sampling at {sampling.rate:g}"
    elif sampling.kind == "fixed" and sampling.expected(people) < people:
        size = int(sampling.expected(people))
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        half = dp_accounting.GaussianDpEvent(noise / 2)  # of the sum's sensitivity, which is 2 clip here
        event = dp_accounting.SampledWithoutReplacementDpEvent(people, size, half)
        text = f"{size} of {people} clients without replacement"
    accountant = RdpAccountant(neighboring_relation=relation)
    accountant.compose(event, rounds)
    more = "; the clipping norm's estimate included" if adaptive else ""
    return Privacy(
        float(accountant.get_epsilon(delta)), delta, f"{rounds} rounds, noise multiplier {noise:g}, {text}{more}"
    )


__all__ = ["AGGREGATORS", "Aggregated", "Privacy", "check_aggregator", "factory", "privacy", "with_aggregator"]
