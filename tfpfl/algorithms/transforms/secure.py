"""Secure aggregation without a network: `secured(algorithm)` sends the integers that the live protocol would mask.

    client:   u_i <- u_i min(1, C / ||u_i||);   x_i = integers of w_i u_i 2^s, rounded at random;   x_i <- x_i + eta_i
    server:   sum_i w_i u_i = 2^-s sum_i x_i, of the clients that arrived; the sum of integers is exact

The masks of the protocol (docs/secure.md) cancel in the sum to the last bit, so a simulation leaves them out. eta_i is
noise of the discrete Gaussian N_Z(0, sigma^2) for differential privacy, a share of the noise of the whole sum; without
it, eta_i = 0.

Source:
    Kairouz, Liu, Steinke: The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation,
    ICML 2021, algorithm 1. With 32 bits for a number, no rotation is needed to flatten the updates.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData, ClientOutput, check_one_exchange, kinds
from tfpfl.algorithms.transforms.discrete_gaussian import discrete_gaussian
from tfpfl.algorithms.transforms.fixed_point import FixedPoint, fixed_point, wrapped
from tfpfl.algorithms.transforms.normalization import check_not_shared
from tfpfl.checks import InvalidArgument, traced_by_design, warn_user
from tfpfl.data.population import ClientInfo, Population
from tfpfl.data.randomness import Fold
from tfpfl.models import passes, tree

LEAST = 3  # clients: a sum over two tells one of them what the other has sent
CLIP = 100.0  # as `tfpfl serve --secure` has it: no update of a usual model is longer
VISITS = 1000  # in so many a client's weight is looked for, if it is 0 in some
UNEQUAL = 100.0  # times the median weight: from there on a warning says that the others' integers are coarse
HOPELESS = 2.0**20  # times the median weight: there the others' integers have a third of their 31 bits left
TAILS = 12.0  # standard deviations of a client's noise for which there is room; outside with a probability of 4e-33


class Sent(NamedTuple):
    """What a client sends; both parts are added up."""

    words: Any  # int64 [P + 3], see `FixedPoint`
    weight: Any  # float []: w_i, which follows from N_i, and that is no secret


class Shares(NamedTuple):
    """The noise of a run in integers."""

    sigma: int  # of each client's N_Z(0, sigma^2)
    clients: int  # r, the number of clients for which the noise multiplier is the one that was asked for


def secured(
    algorithm: Algorithm, *, clip: float = CLIP, noise: float | None = None, weights: np.ndarray | None = None
) -> Algorithm:
    """The algorithm under secure aggregation: clients send integers, and the server has their sum alone.

    Apply it after all other transforms. The engine asks `Algorithm.sent` for the integers after the client's own model
    was scored. If the method has a `balance`, the client keeps the state that goes with its integers.

    Args:
        algorithm: an `Algorithm` whose server adds up updates.
        clip: C, the L2 norm to which longer updates are scaled down, before their weight.
        noise: the noise multiplier z: the noise on the sum of r = `clients_per_round` clients, at least 3, has
            the standard deviation z W C, with W the largest weight. None: no noise.
        weights: float [I], the clients' weights; default: `weights_of(algorithm)`.

    Returns:
        The algorithm. Its clients have one more metric: 'clipped', 1 if the update was clipped. 'bytes_up' is the size
        of the masked words.

    Raises:
        InvalidArgument: the server needs every client's own update, makes a message for each client, or averages
            moving statistics; a round has two exchanges, or fewer than three clients; clients send nothing; clip or
            noise is not positive; weights follow from the examples, are all 0, or one is a million times the others; or
            the numbers do not fit into 32 bits.
    """
    check_method(algorithm)
    for name, value in (("clip", clip), ("noise", noise)):
        if value is not None and not 0 < value < math.inf:
            raise InvalidArgument(f"secure_{name} must be a positive number, found {value}")
    spec, codec, shares = _planned(algorithm, clip, noise, weights)
    whole = isinstance(algorithm.aggregate, str)

    def sent(state: Any, output: ClientOutput, visit: Any) -> ClientOutput:
        weight, largest = tf.cast(output.weight, tf.float64), tf.constant(codec.max_weight, tf.float64)
        fits = tf.debugging.assert_less_equal(weight, largest, "a weight that does not follow from N_i alone")
        with tf.control_dependencies([] if fits is None else [fits]):
            weight = tf.identity(weight)
        random = tf.random.stateless_uniform(
            [codec.words], _seed(visit.key, Fold.ROUNDING), None, None, tf.uint32, alg="philox"
        )
        update = tf.concat([tf.reshape(tf.cast(x, tf.float32), [-1]) for x in tf.nest.flatten(output.update)], 0)
        words, clipped = codec.encode(update, weight, visit.info.num_examples, output.metrics["loss"], random)
        if shares is not None:
            eta = discrete_gaussian(shares.sigma, codec.size, _seed(visit.key, Fold.NOISE))
            noisy = tf.clip_by_value(words[: codec.size] + eta, -codec.most, codec.most)
            tail = words[codec.size : codec.size + 1], tf.zeros([2], tf.int64)  # the loss would have no noise
            words = tf.concat([noisy, *tail], 0)
        accepted, kept = output.weight > 0, output.state
        if algorithm.balance is not None:
            own = _structure(tf.math.divide_no_nan(codec.decode(words), weight), spec)
            balanced = algorithm.balance(state, output._replace(update=own))
            kept = tree.where(accepted, balanced, kept)
        metrics = output.metrics | {
            "clipped": tf.cast(clipped, algorithm.model.dtype),
            "bytes_up": tf.constant(4 * codec.words, tf.int64),
        }
        sends = accepted
        if shares is not None:  # its noise is counted, so a client of weight 0 sends it, too, unless it was rejected
            sends = tf.equal(output.metrics.get("rejected", 0), 0)
        one = tf.where(sends, tf.ones_like(output.weight), tf.zeros_like(output.weight))
        return ClientOutput(Sent(words, output.weight), one, kept, OrderedDict(sorted(metrics.items())))

    def server_update(server: Any, total: Sent) -> Any:
        sums = _structure(codec.decode(wrapped(total.words)), spec)
        parts = [sums] if whole else sums
        named = zip(kinds(algorithm), parts, strict=True)
        found = [_mean(part, total.weight) if kind == "mean" else part for kind, part in named]
        updated = algorithm.step(server, found[0] if whole else type(algorithm.aggregate)(*found), total.weight)
        return tree.where(total.weight > 0, updated, server)  # noise alone, of clients of weight 0, is no step

    return algorithm._replace(
        sent=sent, server_update=server_update, aggregate=Sent("sum", "sum"), one_pass=None, balance=None
    )


def codec_of(algorithm: Algorithm, clip: float = CLIP, noise: float | None = None) -> tuple[FixedPoint, Shares | None]:
    """The codec and the noise with which `secured` sends the updates of this algorithm; arguments as there."""
    return _planned(algorithm, clip, noise, None)[1:]


def check_method(algorithm: Algorithm) -> None:
    """Checks that the sum of a cohort's updates is all that a method's server needs.

    Raises:
        InvalidArgument: see `secured`.
    """
    if "rows" in kinds(algorithm) or algorithm.message_per_client:
        raise InvalidArgument(
            "--secure gives the server the sum of the updates and nothing else, but the server of this method needs "
            "every client's own update, or makes a message for each client from what this client sent. Take another "
            "method, or leave out --secure"
        )
    check_one_exchange(algorithm, "--secure")
    check_not_shared(algorithm, "--secure, which clips updates,")
    r = algorithm.population.sampling.most(algorithm.population.num_clients)
    if r < LEAST:
        raise InvalidArgument(
            f"--secure needs at least {LEAST} clients in a round, found {r}: the sum over fewer says what one of them "
            "sent. Take a larger --participation"
        )


def quorum(members: int, threshold: float = 0.5) -> int:
    """How many clients of a round must send their integers, so that the sum can be opened.

    Every client needs t = floor(F k) + 1 of its k neighbours, and all members of a round are neighbours. It is as if
    all who drop out had sent their keys before. (In a live round, k are the neighbours of those who sent keys, and
    above 64 members fewer than all, but the part F is the same.)

    Args:
        members: how many clients the round began with.
        threshold: F, in [1/2, 1).

    Examples:
        >>> [quorum(members) for members in (3, 4, 10, 100)]
        [3, 3, 6, 51]
    """
    return max(LEAST, math.floor(threshold * (members - 1)) + 2)


def weights_of(algorithm: Algorithm) -> np.ndarray:
    """The weight of every client's update, float64 [I]. It follows from the client's facts, not from its examples.

    If a method gives some visits the weight 0, such as those of stragglers, it is that of the others.
    A visit is traced, and TensorFlow computes only as much of it as the weight needs, which is nearly nothing.

    Raises:
        InvalidArgument: the weight is another one for other examples.
    """
    return _traced(algorithm)[1]()


def _traced(algorithm: Algorithm) -> tuple[Any, Callable]:
    """(shapes and dtypes of an update, a function () -> the weights of all clients)."""
    specs: list = []
    model, population = algorithm.model, algorithm.population

    def weight(info: ClientInfo, key: Any, other: Any) -> Any:
        x, y = model.blank_examples(1, info.num_classes)
        x = tf.nest.map_structure(lambda t: t + tf.cast(other, t.dtype) if t.dtype.is_floating else t, x)
        y += tf.where(other, info.num_classes - 1, 0) if model.kind.label.is_classes else tf.cast(other, y.dtype)
        with passes.drawing(key):
            message, state = algorithm.message(algorithm.init_server()), algorithm.init_client(info)
            output = algorithm.client_update(message, state, ClientData(x, y, info, key))
        specs.append(tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), output.update))
        return tf.cast(tree.as_tensor(output.weight, model.dtype), tf.float64)

    scalar = tf.TensorSpec([], tf.int32)
    graph = traced_by_design(tf.function(weight, autograph=False)).get_concrete_function(
        ClientInfo(scalar, scalar, scalar, tf.TensorSpec([], model.dtype)),
        tf.TensorSpec([2], tf.int32),
        tf.TensorSpec([], tf.bool),
    )

    def of(client_id: int, visit: int = 0, other: bool = False) -> float:
        info = population.info(client_id, model.dtype)
        return float(graph(*(tf.convert_to_tensor(fact) for fact in (*info, np.array([0, visit], np.int32), other))))

    def if_it_counts(client_id: int) -> float:  # FedProx gives a straggler that it drops the weight 0
        return next((found for visit in range(VISITS) if (found := of(client_id, visit))), 0.0)

    def weights() -> np.ndarray:
        some = int(population.client_ids[np.argmax(population.num_classes)])
        if of(some) != of(some, other=True):
            raise InvalidArgument(
                "--secure needs weights that follow from N_i alone, because the server is told them. In this method a "
                "client's weight depends on its examples. Give --weighting examples or uniform, if the method has it, "
                "or take another method"
            )
        arrival = np.ones(population.num_clients) if population.arrival is None else population.arrival
        facts = np.stack([population.num_examples, population.num_classes, arrival], 1)
        _, first, like = np.unique(facts, axis=0, return_index=True, return_inverse=True)
        return np.array([if_it_counts(int(i)) for i in population.client_ids[first]])[np.reshape(like, -1)]

    return specs[0], weights


def _planned(algorithm: Algorithm, clip: float, noise: float | None, weights: np.ndarray | None) -> tuple:
    """(shapes and dtypes of an update, its codec, its noise)."""
    spec, found = _traced(algorithm)
    for leaf in tf.nest.flatten(spec):
        if not leaf.dtype.is_floating or not leaf.shape.is_fully_defined():
            raise InvalidArgument(
                f"--secure needs updates of floating-point numbers with one shape for all clients, found {leaf}"
            )
    size = sum(leaf.shape.num_elements() for leaf in tf.nest.flatten(spec))
    if not size:
        raise InvalidArgument(
            "--secure hides what clients send, and with this method they send nothing: leave out --secure"
        )
    population = algorithm.population
    r = population.sampling.most(population.num_clients)
    expected = max(LEAST, round(population.clients_per_round))  # of fewer there is no sum
    weight = _largest(population, found() if weights is None else np.asarray(weights))
    room = 1.0 if noise is None else 1 + TAILS * noise / math.sqrt(expected)
    codec = fixed_point(size, r, float(clip), weight, int(population.num_examples.max()), room=room)
    if noise is None:
        return spec, codec, None
    sigma = math.ceil(noise * codec.sensitivity / math.sqrt(expected))
    return spec, codec, Shares(sigma, expected)


def _largest(population: Population, weights: np.ndarray) -> float:
    """W, the largest weight of clients that can be in a sum; all integers have the resolution that it leaves them.

    Raises:
        InvalidArgument: all weights are 0, or one of them is so large that the integers of the others are mostly 0.
    """
    if population.arrival is not None:  # who is never in time is in no sum
        ids, weights = population.client_ids[population.arrival > 0], weights[population.arrival > 0]
    else:
        ids = population.client_ids
    if not weights.any():
        raise InvalidArgument(
            "--secure sums up weighted updates, and with these settings all weights are 0: no client's work would ever "
            "count. Look at what drops clients, such as straggler=1 with straggler_policy='drop'"
        )
    first, median = int(np.argmax(weights)), float(np.median(weights[weights > 0]))
    if (times := weights[first] / median) < UNEQUAL:
        return float(weights[first])
    told = (
        f"with --secure all clients send integers with the resolution that the largest weight leaves them, and client "
        f"{ids[first]} has {times:.3g} times the median weight"
    )
    arrival = 1.0 if population.arrival is None else population.arrival[population.arrival > 0][first]
    if arrival < 0.1:
        told += f", because it comes back in {arrival:.2g} of its rounds only: take a larger --round-deadline, or less "
        told += "--dropout"
    else:
        told += ". Take a smaller --secure-clip, or --weighting uniform if the method has it"
    if times > HOPELESS:
        raise InvalidArgument(f"{told}. So little would be left of the others' updates that nothing could be learned")
    warn_user(f"{told}. The others' updates are rounded that much more coarsely")
    return float(weights[first])


def _seed(key: Any, purpose: Fold) -> Any:
    return tf.random.experimental.stateless_fold_in(key, int(purpose))


def _structure(vector: Any, spec: Any) -> Any:
    """The numbers of a vector, float64 [P], in a structure of these shapes and dtypes."""
    leaves = tf.nest.flatten(spec)
    parts = tf.split(vector, [leaf.shape.num_elements() for leaf in leaves])
    shaped = [tf.cast(tf.reshape(part, leaf.shape), leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    return tf.nest.pack_sequence_as(spec, shaped)


def _mean(part: Any, weight: Any) -> Any:
    return tf.nest.map_structure(lambda x: tf.math.divide_no_nan(x, tf.cast(weight, x.dtype)), part)
