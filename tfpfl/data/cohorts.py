"""The cohort of a round: a function of (seed, round) only, so that a resumed run continues exactly."""

import numpy as np

from tfpfl.data.population import Population
from tfpfl.data.randomness import COHORT_SIZE_UNTIL_FORMAT_4, Stream, random_bits, uniform


def cohort(seed: int, round_num: int, population: Population, present: np.ndarray | None = None) -> np.ndarray:
    """Draws the clients of one round, as `population.sampling` says.

    Every client has random bits for the round. 'fixed' and 'range' take the r clients with the smallest bits, which is
    uniform sampling without replacement. 'binomial' takes every client whose bits, as a number in [0, 1), are below the
    rate; this may be nobody.

    While some clients are away, each of the n present ones is drawn as often as if all I were there: a cohort of r
    becomes one of n r / I clients. If that is no whole number, it is rounded up or down at random, so that it is right
    on average; this may be nobody. So P(i in the cohort) I / E[r] is 1 for every client that is present, with every
    kind of sampling, and a method that weights with I / r, such as PFLEGO, stays unbiased.

    Args:
        seed: the seed of the run, >= 0.
        round_num: the round, >= 0; training starts with round 1.
        population: the clients and their sampling.
        present: int [n], ascending: the clients of the population that can be sampled; default: all of them.

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
    if sampling.kind == "binomial":
        return ids[uniform(seed, Stream.COHORT, round_num, ids) < sampling.rate]
    bits = random_bits(seed, Stream.COHORT, round_num, ids)
    if sampling.kind == "range":
        stream = COHORT_SIZE_UNTIL_FORMAT_4 if sampling.old_sizes else Stream.COHORT_SIZE
        draw = int(random_bits(seed, stream, round_num, [0])[0])
        size = sampling.low + draw % (sampling.high - sampling.low + 1)  # the bias is below 1e-9: the draw has 64 bits
    else:
        size = int(sampling.expected(population.num_clients))
    if sampling.old_shares:
        size = min(size, len(ids)) if sampling.kind == "range" else int(sampling.expected(len(ids)))
    elif len(ids) < population.num_clients:
        size, rest = divmod(size * len(ids), population.num_clients)
        size += int(uniform(seed, Stream.COHORT_SHARE, round_num, [0])[0] * population.num_clients < rest)
    return ids[np.sort(np.argpartition(bits, size - 1)[:size])]
