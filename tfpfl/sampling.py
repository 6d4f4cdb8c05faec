"""Who takes part in a round, and the randomness of every visit.

Both are pure functions of (seed, round) and of a client's id: never of what ran before, so that a resumed run continues
exactly, and never of the algorithm, so that methods are compared on the same cohorts and the same batches.

The bits come from SplitMix64, whose n-th output can be computed alone: client i of a round gets output i of a generator
that NumPy's SeedSequence starts for (seed, purpose, round). Both are fixed algorithms: the cohorts stay the same under
any version of NumPy. SplitMix64 is a bijection of its counter, so two clients of one round never share a key.
"""

import numpy as np

from tfpfl.algorithm import Population

# What the bits are for: each purpose has a stream of its own.
_COHORT, _COHORT_SIZE, _CLIENT_KEY = 1, 2, 3


def cohort(seed: int, round_num: int, population: Population, present: np.ndarray | None = None) -> np.ndarray:
    """The clients of one round, as `population.sampling` says.

    'fixed' and 'range' take the r clients with the smallest bits, which is uniform without replacement; 'binomial'
    takes every client whose bits, read as a number in [0, 1), lie below the rate, and may take nobody.

    Args:
        seed: of the run, >= 0.
        round_num: >= 0; training starts at 1.
        present: the clients that can be sampled; default: all of the population. Of fewer, as large a part is taken.

    Returns:
        int64 [r], ascending client ids.

    Raises:
        ValueError: the seed or the round is negative.

    Examples:
        >>> from tfpfl import Population, Sampling
        >>> people = Population([30] * 10, [2] * 10, sampling=Sampling("fixed", rate=0.3))
        >>> [cohort(0, t, people).tolist() for t in (1, 2, 1)]
        [[5, 7, 9], [4, 8, 9], [5, 7, 9]]
    """
    sampling, ids = population.sampling, population.client_ids if present is None else present
    if not len(ids):
        return ids
    bits = _bits(seed, _COHORT, round_num, ids)
    if sampling.kind == "binomial":
        return ids[_in_0_1(bits) < sampling.rate]
    if sampling.kind == "range":
        draw = int(_bits(seed, _COHORT_SIZE, round_num, np.zeros(1, np.int64))[0])
        size = sampling.low + draw % (sampling.high - sampling.low + 1)  # bias below 1e-9: the draw has 64 bits
        size = min(size, len(ids))
    else:
        size = int(sampling.expected(len(ids)))
    return ids[np.sort(np.argpartition(bits, size - 1)[:size])]


def uniform(seed: int, purpose: int, round_num: int, client_ids) -> np.ndarray:
    """A number in [0, 1) for every client: float64 [n], a function of all four.

    Args:
        purpose: other numbers are independent; this module has 1 to 3.
    """
    return _in_0_1(_bits(seed, purpose, round_num, np.asarray(client_ids, np.int64)))


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
    bits = _bits(seed, _CLIENT_KEY, round_num, np.asarray(client_ids, np.int64))
    return np.stack([bits >> np.uint64(32), bits & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32).view(np.int32)


def _in_0_1(bits: np.ndarray) -> np.ndarray:
    return (bits >> np.uint64(11)) * 2.0**-53


def _bits(seed: int, purpose: int, round_num: int, counter: np.ndarray) -> np.ndarray:
    """Output `counter[j]` of the SplitMix64 of (seed, purpose, round): uint64 [n]."""
    if seed < 0 or round_num < 0:
        raise ValueError(f"seed and round must not be negative, found seed {seed}, round {round_num}")
    start = np.random.SeedSequence(int(seed), spawn_key=(purpose, int(round_num))).generate_state(1, np.uint64)
    z = start + (counter.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
