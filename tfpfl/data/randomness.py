"""Every purpose of randomness, and the numbers that it gets.

Whatever is random is a function of a seed, of its purpose, and of a round or a client: never of what was drawn before,
of the algorithm, or of the engine. So a resumed run continues exactly, and methods are compared on the same cohorts and
the same batches.

    Stream      generators that start from a seed: of the data, or of the run
    ModelKey    TensorFlow's keys [seed, purpose], from which initial weights are drawn
    Fold        what the key of a client's visit is folded with

Data and run often have the same seed, so no two streams start from the same entropy, whichever of the two they belong
to. A new purpose is a new member with a new number; numbers that are in use stay, since saved runs rely on them, and
federations that are made again.

The run's bits come from SplitMix64, whose n-th output can be computed alone: client i gets output i of a generator that
NumPy's SeedSequence starts for (seed, purpose, round). Both are fixed algorithms: the numbers stay the same under any
version of NumPy. SplitMix64 is a bijection of its counter, so two clients of one round never share a key.
"""

from enum import IntEnum, unique

import numpy as np


@unique
class Stream(IntEnum):
    """What is drawn from a seed. The comment says from whose seed, and what the stream's index is."""

    SOURCE = -1  # data: what a data set draws by itself (synthetic's examples, Omniglot's cut); no index
    NEW_CLIENTS = -2  # data: which clients never train; index: the number of clients of the federation
    PARTITION = 0  # data: who holds which examples; no index
    COHORT = 1  # run: who takes part in a round; index: the round
    VALIDATION = 2  # data: a client's validation examples; index: the client
    CLIENT_KEY = 3  # run: the key of a client's visit; index: the round
    DROPS = 4  # run: who drops out of a round; index: the round
    CLIENT_DROPOUT = 5  # run: each client's own probability of that; index: 0
    CLIENT_SPEED = 6  # run: each client's own speed; index: 0
    JITTER = 7  # run: a client's speed in a round; index: the round
    COHORT_SIZE = 8  # run: the size of a cohort under 'range' sampling; index: the round
    CLIENT_TEST = 9  # data: a client's test examples, in `Federation.from_clients`; index: the client
    POOL_TEST = 1_000  # data: a client's test examples, in partitioners that cut them; index: the client


# Until run folders had format 5, the size of a cohort was drawn from the validation cut's stream. Such runs go on so.
COHORT_SIZE_UNTIL_FORMAT_4 = int(Stream.VALIDATION)


@unique
class ModelKey(IntEnum):
    """The second number of TensorFlow's keys [seed of the run, purpose] for initial weights.

    FedFomo explores by the keys [seed, t] and [seed, 2^30 + t] in round t.
    """

    BACKBONE = 0  # folded with the position of the weight
    HEAD = 1  # folded with the client


@unique
class Fold(IntEnum):
    """What the key of a client's visit is folded with, other than the epochs 0, 1, ... of `local.shuffled`."""

    STRAGGLER = -1  # whether the client is a straggler, and how much of its work it then does
    SPLIT = -2  # which of its examples are the support, and which the query
    FAULT = -3  # whether it is broken on purpose, and how


def entropy(seed: int, stream: int, index: int = 0) -> np.random.SeedSequence:
    """What a stream starts from.

    Args:
        seed: >= 0, of the data or of the run.
        stream: a `Stream`.
        index: >= 0, what the stream's comment says.

    Raises:
        ValueError: the seed or the index is negative.
    """
    seed, index = int(seed), int(index)
    if seed < 0 or index < 0:
        raise ValueError(f"a seed and a round or client must not be negative, found seed {seed} and {index}")
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
    """NumPy's generator of a stream; arguments and errors as in `entropy`."""
    return np.random.default_rng(entropy(seed, stream, index))


def random_bits(seed: int, stream: int, round_num: int, counter) -> np.ndarray:
    """Output `counter[j]` of the SplitMix64 of (seed, stream, round): uint64 [n].

    Args:
        seed: of the run, >= 0.
        stream: a `Stream`.
        round_num: >= 0.
        counter: int [n], the client ids.

    Raises:
        ValueError: the seed or the round is negative.
    """
    start = entropy(seed, stream, round_num).generate_state(1, np.uint64)
    z = start + (np.asarray(counter, np.int64).astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seed: int, stream: int, round_num: int, client_ids) -> np.ndarray:
    """A number in [0, 1) for every client: float64 [n], a function of all four; arguments as in `random_bits`."""
    return (random_bits(seed, stream, round_num, client_ids) >> np.uint64(11)) * 2.0**-53


def client_key(seed: int, round_num: int, client_ids) -> np.ndarray:
    """The stateless seed of each client's visit, for `tf.random.stateless_*`.

    Args:
        seed: of the run, >= 0.
        round_num: >= 0.
        client_ids: int [n], in any order.

    Returns:
        int32 [n, 2], row j for `client_ids[j]`; different for every client of the round.

    Raises:
        ValueError: the seed or the round is negative.
    """
    bits = random_bits(seed, Stream.CLIENT_KEY, round_num, client_ids)
    return np.stack([bits >> np.uint64(32), bits & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32).view(np.int32)
