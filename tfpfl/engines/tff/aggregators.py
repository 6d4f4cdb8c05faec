"""TFF's aggregators for the TFF engine (clipping, zeroing, compression, privacy), and how a round uses them."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from safetensors.numpy import load, save

from tfpfl.algorithms.contract import check_no_balance, kinds
from tfpfl.algorithms.transforms.compression import QUANTIZED_ABOVE
from tfpfl.checks import InvalidArgument, one_line
from tfpfl.engines.tff.worker import require_tff
from tfpfl.models import tree


def factory_of(aggregator: Any) -> Any:
    """The aggregator factory of TFF that `federate(aggregator=)` or `Training(aggregator=)` was given; None for none.

    Args:
        aggregator: a factory of `tff.aggregators`, or a function () -> factory. A function can be sent to another
            process or written where TFF is not imported yet.

    Raises:
        InvalidArgument: it is neither.
    """
    if aggregator is None:
        return None
    kinds_of_tff = require_tff().aggregators
    kinds_of_tff = (kinds_of_tff.WeightedAggregationFactory, kinds_of_tff.UnweightedAggregationFactory)
    is_function = isinstance(aggregator, Callable) and not isinstance(aggregator, type)
    made = aggregator() if is_function and not isinstance(aggregator, kinds_of_tff) else aggregator
    if not isinstance(made, kinds_of_tff):
        raise InvalidArgument(
            "aggregator must be a factory of tff.aggregators, such as tff.aggregators.MeanFactory(), or a function () "
            f"-> factory; found {aggregator!r}"
        )
    return made


PROBES = (1e-6, 1.0)  # what clients send to find out whether a result is a mean; the small one is below any clipping


def check_mean(aggregator: Any, clients_per_round: float) -> bool:
    """Checks that the result of an aggregator is a mean of what the clients send, not a sum.

    A round of equal numbers is aggregated, from as many clients as are expected: the mean is this number, or less if it
    is clipped; the sum is as many times larger. An aggregator that adds noise cannot be tested like this. For the one
    of `tff.aggregators` that does, it is checked whether its query divides by a number of clients.

    Args:
        aggregator: a factory of `tff.aggregators`.
        clients_per_round: the expected number of clients in a round.

    Returns:
        Whether it divides by a fixed number of clients, as aggregators with noise do, and not by how many came.

    Raises:
        InvalidArgument: the result is a sum, or the aggregator cannot be executed on single numbers.
    """
    tff = require_tff()
    weighted, name = isinstance(aggregator, tff.aggregators.WeightedAggregationFactory), type(aggregator).__name__
    number = tff.types.to_type(np.float32)
    clients = max(2, round(clients_per_round))

    try:
        process = aggregator.create(number, *((number,) if weighted else ()))

        def of(value, clients):
            more = ([np.float32(1)] * clients,) if weighted else ()
            return float(process.next(process.initialize(), [np.float32(value)] * clients, *more).result)

        nothing, *found = (of(value, clients) for value in (0.0, *PROBES))
        fixed = bool(nothing) or not weighted and of(PROBES[0], 2 * clients) > 1.5 * found[0]
    except Exception as error:  # TFF has many kinds, and its worker's are of gRPC
        raise InvalidArgument(
            f"{name} cannot be executed here on one number of every client: {one_line(error, 300)}. (TFF's secure "
            "sums exist only in its test backend. Set this backend's context after the first call of a function of "
            "tfpfl that uses TFF: that call sets a context of its own)"
        ) from error
    if nothing:  # noise
        query = getattr(aggregator, "_query", None)  # of DifferentiallyPrivateFactory; it has no public name
        is_sum = query is not None and not hasattr(query, "_denominator")
    else:
        # A divisor that is not the number of clients, such as the expected one, changes the result by less than this.
        is_sum = any(abs(result) > value * clients**0.5 for result, value in zip(found, PROBES, strict=True))
    if is_sum:
        raise InvalidArgument(
            f"the result of {name} is the sum of what the clients send; with {clients} clients it "
            f"would move the server {clients} times too far. Give an aggregator whose result is a mean: "
            "tff.aggregators.MeanFactory(inner) or UnweightedMeanFactory(inner) makes one from the factory of a sum. "
            "A method that adds its updates (aggregate='sum') gets its sum back from the mean"
        )
    return fixed


def make_adder(algorithm, aggregator, contribution_type):
    """Makes the way to add up the clients' contributions in a TFF round.

    An aggregator gives a mean, and a method may need a sum. A weighted mean is multiplied by the sum of the weights, an
    unweighted one by the number of clients that came. Of those, a client that was rejected (weight 0) sent zeros: they
    add nothing to a sum, and are not counted in a mean. An aggregator that divides by a fixed number of clients, as
    those with noise do, is multiplied by the expected number; for it, who was rejected is a client with zeros.

    Args:
        algorithm: its `aggregate` says which parts of an update are means.
        aggregator: a factory of `tff.aggregators`; None: plain sums.
        contribution_type: the TFF type of a `Contribution`.

    Returns:
        A TFF computation () -> the aggregator's first state, None for plain sums; and a function (state,
        contributions@CLIENTS) -> (new state, (sums, sum of weights)@SERVER).

    Raises:
        InvalidArgument: there is an aggregator, and the algorithm has a `balance`; or the aggregator's result is a sum.
    """
    tff = require_tff()
    if aggregator is None:

        def add(state, contribution):
            sums = tff.federated_sum(contribution.sums), tff.federated_sum(contribution.weight)
            return state, tff.federated_zip(sums)

        return None, add

    check_no_balance(algorithm, "an aggregator of TFF")
    fixed = check_mean(aggregator, algorithm.population.clients_per_round)
    weighted = isinstance(aggregator, tff.aggregators.WeightedAggregationFactory)
    averaged = [kind == "mean" for kind in kinds(algorithm) if kind != "rows"]
    expected = algorithm.population.clients_per_round

    @tff.tensorflow.computation(contribution_type.sums, contribution_type.weight)
    def value(sums, weight):
        def update(part):
            return tf.nest.map_structure(lambda x: tf.math.divide_no_nan(x, tf.cast(weight, x.dtype)), part)

        return tuple(update(part) if weighted or mean else part for part, mean in zip(sums, averaged, strict=True))

    @tff.tensorflow.computation(contribution_type.weight)
    def counted(weight):  # what a client adds to the factor of the mean, and to the total weight
        return (weight, weight) if weighted else (tf.ones_like(weight), tf.cast(weight > 0, weight.dtype))

    @tff.tensorflow.computation(value.type_signature.result, counted.type_signature.result)
    def as_sums(mean, added):
        factor, weight = added
        if fixed and not weighted:
            factor = weight = tf.constant(expected, weight.dtype)
        return tree.scale(factor, mean), weight

    as_float = tff.tensorflow.computation(lambda weight: tf.cast(weight, tf.float32), contribution_type.weight)
    more = (as_float.type_signature.result,) if weighted else ()
    process = aggregator.create(value.type_signature.result, *more)

    def add(state, contribution):
        values = tff.federated_map(value, (contribution.sums, contribution.weight))
        more = (tff.federated_map(as_float, contribution.weight),) if weighted else ()
        output = process.next(state, values, *more)
        added = tff.federated_sum(tff.federated_map(counted, contribution.weight))
        return output.state, tff.federated_map(as_sums, (output.result, added))

    return process.initialize, add


class Aggregated(NamedTuple):
    """The server's state together with the state of a TFF aggregator."""

    own: Any  # the algorithm's server state
    aggregator: Any  # the aggregator's state; in a `RunStore`, bytes as uint8 [n]


class WithState:
    """Wraps a process whose server state is an `Aggregated`, and converts the aggregator's state to and from bytes.

    The structure of that state is known to TFF only. As bytes, a run can be opened where TFF is not installed.
    """

    def __init__(self, process):
        self._process = process

    @cached_property
    def _first(self):
        return self._process.initialize().aggregator

    def next(self, server: Aggregated, *arguments):
        """Executes one round; arguments and result are those of the wrapped process, with the state in bytes."""
        state = _from_bytes(server.aggregator, self._first) if len(server.aggregator) else self._first
        output = self._process.next(Aggregated(server.own, state), *arguments)
        return output._replace(server=Aggregated(output.server.own, _to_bytes(output.server.aggregator)))


def _to_bytes(state):
    """Saves the leaves of a structure as safetensors: uint8 [n]. A leaf may be text, as in TFF's private queries."""
    leaves = [np.asarray(leaf, order="C") for leaf in tf.nest.flatten(state)]
    leaves = [np.frombuffer(leaf.item(), np.uint8) if leaf.dtype.kind in "SO" else leaf for leaf in leaves]
    return np.frombuffer(save({str(i): leaf for i, leaf in enumerate(leaves)}), np.uint8)


def _from_bytes(saved, like):
    held, wanted = load(saved.tobytes()), tf.nest.flatten(like)
    leaves = [
        held[str(i)].tobytes() if np.asarray(leaf).dtype.kind in "SO" else held[str(i)] for i, leaf in enumerate(wanted)
    ]
    return tf.nest.pack_sequence_as(like, leaves)


def clip(*, norm: float | None = None):
    """Scales updates whose L2 norm exceeds `norm` down to it. None: the norm follows the estimated 0.8-quantile."""
    tff = require_tff()
    bound = norm or tff.aggregators.PrivateQuantileEstimationProcess.no_noise(
        initial_estimate=1.0, target_quantile=0.8, learning_rate=0.2
    )
    return tff.aggregators.clipping_factory(bound, tff.aggregators.MeanFactory())


def zero(*, norm: float | None = None):
    """Replaces updates by 0 whose largest absolute number exceeds `norm`.

    None: the limit is 2 m + 1, where m follows the estimated 0.98-quantile of these largest numbers.
    """
    tff = require_tff()
    if norm is not None:
        return tff.aggregators.zeroing_factory(norm, tff.aggregators.MeanFactory(), norm_order=np.inf)
    return tff.learning.robust_aggregator(zeroing=True, clipping=False, weighted=True)


def robust():
    """TFF's `robust_aggregator`: first `zero`, then `clip`, both with limits that follow estimated quantiles."""
    return require_tff().learning.robust_aggregator(zeroing=True, clipping=True, weighted=True)


def compress(*, bits: int = 8, threshold: int = QUANTIZED_ABOVE):
    """Quantizes tensors of more than `threshold` numbers uniformly to `bits` bits per number."""
    tff = require_tff()
    encoded = tff.aggregators.EncodedSumFactory.quantize_above_threshold(bits, threshold)
    return tff.aggregators.MeanFactory(encoded)


def dp(*, noise: float, clip: float, clients: float):
    """Clips updates to the L2 norm `clip`, and adds Gaussian noise to their sum (standard deviation noise * clip).

    Args:
        noise: the noise multiplier.
        clip: the L2 norm.
        clients: the expected number of clients in a round, by which the sum is divided.
    """
    tff = require_tff()
    return tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(noise, clients, clip)


def dp_adaptive(*, noise: float, clients: float, clip: float = 0.1):
    """Does the same as `dp`, but the clipping norm follows the median norm of the updates (Andrew et al., 2021).

    Args:
        noise, clients: see `dp`.
        clip: the clipping norm of the first round.
    """
    tff = require_tff()
    counts = max(0.05 * clients, noise)  # must exceed noise / 2; for few clients TFF's default is smaller
    return tff.aggregators.DifferentiallyPrivateFactory.gaussian_adaptive(
        noise,
        clients,
        initial_l2_norm_clip=clip,
        target_unclipped_quantile=0.5,
        learning_rate=0.2,
        clipped_count_stddev=counts,
    )


OF_TFF = {f.__name__: f for f in (clip, zero, robust, compress, dp, dp_adaptive)}
