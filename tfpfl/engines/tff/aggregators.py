"""TFF's aggregators for the TFF engine (clipping, zeroing, compression, privacy), and how a round uses them."""

import math
from collections.abc import Callable, Iterator, Mapping
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


def check_mean(aggregator: Any, clients_per_round: float) -> float | None:
    """Checks that the result of an aggregator is a mean of what the clients send, not a sum.

    A round of equal numbers is aggregated, from as many clients as are expected: the mean is this number, or less if it
    is clipped; the sum is as many times larger. An aggregator that adds noise cannot be tested like this. For the one
    of `tff.aggregators` that does, it is checked whether its query divides by a number of clients.

    Args:
        aggregator: a factory of `tff.aggregators`.
        clients_per_round: the expected number of clients in a round.

    Returns:
        The fixed number of clients that it divides by, as aggregators with noise do; None: it divides by how many came.

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
        fixed = not weighted and of(PROBES[0], 2 * clients) > 1.5 * found[0]
    except Exception as error:  # TFF has many kinds, and its worker's are of gRPC
        raise InvalidArgument(
            f"{name} cannot be executed here on one number of every client: {one_line(error, 300)}. (TFF's secure "
            "sums exist only in its test backend. Set this backend's context after the first call of a function of "
            "tfpfl that uses TFF: that call sets a context of its own)"
        ) from error
    divisor = next(_denominators(process.initialize()), None)
    if nothing:  # noise
        query = getattr(aggregator, "_query", None)  # of DifferentiallyPrivateFactory; it has no public name
        is_sum = query is not None and divisor is None
        divisor = clients_per_round if divisor is None else divisor  # of noise that is not TFF's, nothing is known
    else:
        divisor = clients * PROBES[0] / found[0] if fixed and divisor is None else divisor
        # A divisor that is not the number of clients, such as the expected one, changes the result by less than this.
        is_sum = any(abs(result) > value * clients**0.5 for result, value in zip(found, PROBES, strict=True))
    if is_sum:
        raise InvalidArgument(
            f"the result of {name} is the sum of what the clients send; with {clients} clients it "
            f"would move the server {clients} times too far. Give an aggregator whose result is a mean: "
            "tff.aggregators.MeanFactory(inner) or UnweightedMeanFactory(inner) makes one from the factory of a sum. "
            "A method that adds its updates (aggregate='sum') gets its sum back from the mean"
        )
    return divisor


def _denominators(state: Any) -> Iterator[float]:
    """The numbers of clients by which private queries divide a sum, from the state of their aggregator."""
    if hasattr(state, "_asdict"):
        state = state._asdict()
    if isinstance(state, Mapping):
        if "denominator" in state:
            yield float(state["denominator"])
        state = list(state.values())
    if isinstance(state, list | tuple):
        for part in state:
            yield from _denominators(part)


def make_adder(algorithm, aggregator, contribution_type):
    """Makes the way to add up the clients' contributions in a TFF round.

    An aggregator gives a mean, and a method may need a sum. A weighted mean is multiplied by the sum of the weights, an
    unweighted one by the number of clients that came. Of those, a client that was rejected (weight 0) sent zeros: they
    add nothing to a sum, and are not counted in a mean. An aggregator that divides by a fixed number of clients, as
    those with noise do, is multiplied by this number; for it, who was rejected is a client with zeros.

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
    divisor = check_mean(aggregator, algorithm.population.clients_per_round)
    weighted = isinstance(aggregator, tff.aggregators.WeightedAggregationFactory)
    averaged = [kind == "mean" for kind in kinds(algorithm) if kind != "rows"]

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
        if divisor is not None and not weighted:
            whole = weight.dtype.is_integer  # such as N_i as it comes
            factor = tf.constant(divisor, algorithm.model.dtype if whole else weight.dtype)
            weight = tf.cast(tf.math.ceil(factor), weight.dtype) if whole else factor
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
    if len(held) != len(wanted):
        raise InvalidArgument(
            f"the state of this run's aggregator has {len(held)} parts, and {len(wanted)} are needed: it is of another "
            "aggregator, or of an older version of tfpfl. Go on with that one, or begin a new run"
        )
    leaves = [
        held[str(i)].tobytes() if np.asarray(leaf).dtype.kind in "SO" else held[str(i)] for i, leaf in enumerate(wanted)
    ]
    state = tf.nest.pack_sequence_as(like, leaves)
    if (found := list(_denominators(state))) != (needed := list(_denominators(like))):
        raise InvalidArgument(
            f"this run's aggregator divides by {found[0]:g} clients, and {needed[0]:g} are expected to come back: "
            "an older version of tfpfl began the run. Go on with that version, or begin a new run"
        )
    return state


def _quantile(initial: float, target: float, rate: float):
    """A process that estimates a quantile of the clients' numbers, of those that are not 0.

    It is `PrivateQuantileEstimationProcess.no_noise` of TFF (Andrew et al., 2021) but for the zeros: they are of
    clients that were rejected or sent nothing, and would make the limit of all others smaller. With b the part of the
    others that is at most the estimate c: c <- c exp(-rate (b - target)).
    """
    tff = require_tff()

    @tff.tensorflow.computation(np.float32, np.float32)
    def told(estimate, number):
        there = tf.cast(number > 0, tf.float32)
        return tf.stack([there * tf.cast(number <= estimate, tf.float32), there])

    @tff.tensorflow.computation(np.float32, told.type_signature.result)
    def moved(estimate, sums):
        away = sums[0] - target * sums[1]
        return estimate * tf.exp(-rate * tf.math.divide_no_nan(away, sums[1]))

    first = tff.tensorflow.computation(lambda: tf.constant(initial))
    on_server = tff.FederatedType(np.float32, tff.SERVER)

    @tff.federated_computation(on_server, tff.FederatedType(np.float32, tff.CLIENTS))
    def following(estimate, numbers):
        sums = tff.federated_sum(tff.federated_map(told, (tff.federated_broadcast(estimate), numbers)))
        return tff.federated_map(moved, (estimate, sums))

    return tff.templates.EstimationProcess(
        tff.federated_computation(lambda: tff.federated_eval(first, tff.SERVER)),
        following,
        tff.federated_computation(lambda estimate: estimate, on_server),
    )


def clip(*, norm: float | None = None):
    """Scales updates whose L2 norm exceeds `norm` down to it. None: the norm follows the estimated 0.8-quantile."""
    tff = require_tff()
    return tff.aggregators.clipping_factory(norm or _quantile(1.0, 0.8, 0.2), tff.aggregators.MeanFactory())


def zero(*, norm: float | None = None):
    """Replaces updates by 0 whose largest absolute number exceeds `norm`.

    None: the limit is 2 m + 1, where m follows the estimated 0.98-quantile of these largest numbers.
    """
    return _zeroing(require_tff().aggregators.MeanFactory(), norm)


def _zeroing(inner, norm: float | None = None):
    tff = require_tff()
    limit: Any = norm
    if norm is None:
        more = tff.tensorflow.computation(lambda m: 2 * m + 1, np.float32)
        on_server = tff.FederatedType(np.float32, tff.SERVER)
        more_on_server = tff.federated_computation(lambda m: tff.federated_map(more, m), on_server)
        limit = _quantile(10.0, 0.98, math.log(10.0)).map(more_on_server)
    return tff.aggregators.zeroing_factory(limit, inner, norm_order=np.inf)


def robust():
    """First `zero`, then `clip`, both with limits that follow estimated quantiles.

    It is TFF's `robust_aggregator`, but that who was rejected or zeroed does not count in the limits.
    """
    return _zeroing(clip())


def compress(*, bits: int = 8, threshold: int = QUANTIZED_ABOVE):
    """Quantizes tensors of more than `threshold` numbers uniformly to `bits` bits per number.

    As TFF's `EncodedSumFactory.quantize_above_threshold`, a number is rounded up or down at random, right on average;
    but its random numbers are made of the tensor itself, so that a run can be repeated.
    """
    tff = require_tff()

    class QuantizedSum(tff.aggregators.UnweightedAggregationFactory):
        def create(self, value_type):
            @tff.tensorflow.computation(value_type)
            def sent(value):
                def of(x):
                    return _quantized(x, bits) if x.dtype.is_floating and x.shape.num_elements() > threshold else x

                return tf.nest.map_structure(of, value)

            @tff.federated_computation
            def initialize():
                return tff.federated_value((), tff.SERVER)

            @tff.federated_computation(initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS))
            def following(state, value):
                total = tff.federated_sum(tff.federated_map(sent, value))
                return tff.templates.MeasuredProcessOutput(state, total, tff.federated_value((), tff.SERVER))

            return tff.templates.AggregationProcess(initialize, following)

    return tff.aggregators.MeanFactory(QuantizedSum())


def _quantized(x, bits: int):
    """The numbers that a server reads of a tensor that is sent with `bits` bits a number."""
    words = tf.reshape(tf.bitcast(x, tf.int32), [-1])
    words = tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, 15))  # so that a sign changes several bits
    places = tf.range(1, 2 * tf.size(words), 2)  # odd, so that no word loses bits; a sum of int32 has no order
    seed = tf.stack([tf.reduce_sum(words), tf.reduce_sum(words * places)])
    random = tf.random.stateless_uniform(tf.shape(x), seed, dtype=x.dtype, alg="philox")
    low, steps = tf.reduce_min(x), 2**bits - 1
    step = (tf.reduce_max(x) - low) / steps
    return low + step * tf.minimum(tf.floor(tf.math.divide_no_nan(x - low, step) + random), steps)


def dp(*, noise: float, clip: float, clients: float):
    """Clips updates to the L2 norm `clip`, and adds Gaussian noise to their sum (standard deviation noise * clip).

    Args:
        noise: the noise multiplier.
        clip: the L2 norm.
        clients: the expected number of clients that come back in a round, by which the sum is divided.
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
