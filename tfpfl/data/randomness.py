"""The random numbers of data and runs: every purpose has its own number.

A random number depends on a seed, a purpose, and a round or a client. It never depends on earlier draws, on the
algorithm or on the engine. So a resumed run continues exactly, and methods are compared on the same cohorts and the
same batches.

    Stream      purposes of NumPy's generators and of `random_bits`; the seed is that of the data or of the run
    ModelKey    purposes of TensorFlow's keys [seed, purpose], for initial weights
    Fold        purposes within a client's visit; the key of the visit is folded with this number

Data and run often have the same seed. So no two streams may start from the same entropy, also if one belongs to the
data and the other to the run. To add a purpose, add a member with a new number. Never change a number: saved runs, and
federations that are built again, depend on it.

The run's bits come from SplitMix64, whose n-th output can be computed without the outputs before it: client i gets
output i of a generator that starts from NumPy's SeedSequence of (seed, purpose, round). Both algorithms are fixed, so
the numbers are the same with every version of NumPy. SplitMix64 is a bijection of its counter, so two clients of one
round never have the same key.
"""

from enum import IntEnum, unique

import numpy as np
from numpy.typing import ArrayLike

from tfpfl.checks import InvalidArgument, check_numbers


@unique
class Stream(IntEnum):
    """The purposes of random streams. Each comment says whether the seed is that of the data or of the run, and what
    the stream's index is.
    """

    SOURCE = -1  # data: examples of 'synthetic', train and test split of Omniglot; no index
    NEW_CLIENTS = -2  # data: which clients never train; index: the number of clients in the federation
    PARTITION = 0  # data: which client has which examples; no index
    COHORT = 1  # run: the cohort of a round; index: the round
    VALIDATION = 2  # data: a client's validation examples; index: the client
    CLIENT_KEY = 3  # run: the key of a client's visit; index: the round
    DROPS = 4  # run: which clients drop out of a round; index: the round
    CLIENT_DROPOUT = 5  # run: each client's probability to drop out; index: 0
    CLIENT_SPEED = 6  # run: each client's mean speed; index: 0
    JITTER = 7  # run: a client's speed in a round; index: the round
    COHORT_SIZE = 8  # run: the size of a cohort under 'range' sampling; index: the round
    COHORT_SHARE = 10  # run: whether a cohort is rounded up while some clients are away; index: the round
    CLIENT_TEST = 9  # data: a client's test examples, in `Federation.from_clients`; index: the client
    BETWEEN = 12  # run: which of the clients that drop out do so between two exchanges; index: the round
    PRETRAINING = 13  # run: the order of examples in `tfpfl pretrain`; index: the epoch
    PRETRAINING_LAYERS = 14  # run: what layers draw in `tfpfl pretrain`, such as Dropout's masks; index: the epoch
    SHOTS = 11  # run: which examples a new client is given first; index: the client, + 2^32 for each further draw
    POOL_TEST = 1_000  # data: a client's test examples, in partitioners that split off a test part; index: the client


# Run folders up to format 4 drew the size of a cohort from the stream of the validation cut. Such runs still do.
COHORT_SIZE_UNTIL_FORMAT_4 = int(Stream.VALIDATION)


@unique
class ModelKey(IntEnum):
    """The second number of TensorFlow's keys [seed of the run, purpose] for initial weights.

    FedFomo's exploration in round t uses the keys [seed, t] and [seed, 2^30 + t].
    """

    BACKBONE = 0  # folded with the position of the weight
    HEAD = 1  # folded with the client
    ADAPTER = 2  # folded with the position of the layer among those with adapters
    HYPERNETWORK = 3  # of pFedHN, folded with the position of the layer; 0 are the embeddings
    CATEGORIES = 4  # GPFL: its table of classes, and folded with 1, ..., 4 its valve
    POLICY = 5  # FedCP: its policy network


@unique
class Fold(IntEnum):
    """The numbers with which a client's key is folded. Epochs 0, 1, ... use their own number, see `shuffled`."""

    STRAGGLER = -1  # whether the client is a straggler, and how much of its work a straggler does
    SPLIT = -2  # which of its examples are the support set, and which the query set
    FAULT = -3  # whether an injected fault breaks the client, and which one
    MASKS = -4  # the masks of Dropout and of other random layers
    FIRST_EXCHANGE = -5  # everything in the first exchange of a round that has two
    ROUNDING = -6  # how the numbers of an update are rounded under secure aggregation
    NOISE = -7  # the noise that is added to them


def check_model_seed(seed: int) -> None:
    """Checks the seed of initial weights, which is an int32 in TensorFlow's keys.

    Raises:
        InvalidArgument: another seed would be taken in its place.
    """
    check_numbers(seed=seed)
    if not 0 <= seed < 2**31 or seed != int(seed):
        raise InvalidArgument(
            f"seed must lie in 0..{2**31 - 1}, found {seed}: a whole number, with which weights are drawn as int32"
        )


def entropy(seed: int, stream: int, index: int = 0) -> np.random.SeedSequence:
    """The seed sequence from which a stream starts.

    Args:
        seed: the seed of the data or of the run, >= 0.
        stream: a `Stream`.
        index: a round or a client, >= 0; the comment of the stream says which.

    Raises:
        InvalidArgument: the seed or the index is negative or no whole number.
    """
    given = seed, index
    try:
        seed, index = int(seed), int(index)
    except (TypeError, ValueError, OverflowError):
        seed = index = -1
    if given != (seed, index):
        raise InvalidArgument(f"seed, round and client must be whole numbers, found seed {given[0]!r} and {given[1]!r}")
    if seed < 0 or index < 0:
        raise InvalidArgument(
            f"seed, round and client must not be negative, found seed {seed} and round or client {index}"
        )
    if stream == Stream.SOURCE:
        return np.random.SeedSequence(seed)
    if stream == Stream.NEW_CLIENTS:
        return np.random.SeedSequence((seed, index))
    if stream == Stream.PARTITION:
        return np.random.SeedSequence(seed, spawn_key=(int(stream),))
    if stream == Stream.POOL_TEST:
        return np.random.SeedSequence(seed, spawn_key=(int(stream) + index,))
    return np.random.SeedSequence(seed, spawn_key=(int(stream), index))


def generator(seed: int, stream: int, index: int = 0) -> np.random.Generator:
    """A NumPy generator for a stream; arguments and errors are those of `entropy`."""
    return np.random.default_rng(entropy(seed, stream, index))


def random_bits(seed: int, stream: int, round_num: int, counter: ArrayLike) -> np.ndarray:
    """Output `counter[j]` of the SplitMix64 of (seed, stream, round): uint64 [n].

    Args:
        seed: the seed of the run, >= 0.
        stream: a `Stream`.
        round_num: the round, >= 0.
        counter: int [n], the client ids.

    Raises:
        ValueError: the seed or the round is negative.
    """
    start = entropy(seed, stream, round_num).generate_state(1, np.uint64)
    z = start + (np.asarray(counter, np.int64).astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seed: int, stream: int, round_num: int, client_ids: ArrayLike) -> np.ndarray:
    """A random number in [0, 1) for every client: float64 [n]. The arguments are those of `random_bits`."""
    return (random_bits(seed, stream, round_num, client_ids) >> np.uint64(11)) * 2.0**-53


def client_key(seed: int, round_num: int, client_ids: ArrayLike) -> np.ndarray:
    """The key of every client's visit: a stateless seed for `tf.random.stateless_*`.

    Args:
        seed: the seed of the run, >= 0.
        round_num: the round, >= 0.
        client_ids: int [n], in any order.

    Returns:
        int32 [n, 2], row j for `client_ids[j]`; different for every client of the round.

    Raises:
        ValueError: the seed or the round is negative.
    """
    bits = random_bits(seed, Stream.CLIENT_KEY, round_num, client_ids)
    return np.stack([bits >> np.uint64(32), bits & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32).view(np.int32)
