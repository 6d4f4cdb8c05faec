"""Who takes part in a round: a pure function of (seed, round), so that a resumed run continues exactly."""

import numpy as np

from tfpfl.data.population import Population
from tfpfl.data.randomness import COHORT_SIZE_UNTIL_FORMAT_4, Stream, random_bits, uniform


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
    if sampling.kind == "binomial":
        return ids[uniform(seed, Stream.COHORT, round_num, ids) < sampling.rate]
    bits = random_bits(seed, Stream.COHORT, round_num, ids)
    if sampling.kind == "range":
        stream = COHORT_SIZE_UNTIL_FORMAT_4 if sampling.old_sizes else Stream.COHORT_SIZE
        draw = int(random_bits(seed, stream, round_num, [0])[0])
        size = sampling.low + draw % (sampling.high - sampling.low + 1)  # bias below 1e-9: the draw has 64 bits
        size = min(size, len(ids))
    else:
        size = int(sampling.expected(len(ids)))
    return ids[np.sort(np.argpartition(bits, size - 1)[:size])]
