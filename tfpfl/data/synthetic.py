"""Classes drawn as Gaussian clouds: data for tests and for measurements of scale, made in memory in no time."""

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data.randomness import Stream, generator


def blobs(
    num_examples: int, num_classes: int = 10, shape: tuple[int, ...] = (8,), spread: float = 0.5, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Examples x = mean of the class + spread * N(0, 1), with class means drawn from N(0, 1).

    Returns:
        x float32 [N, *shape] and y int32 [N]; classes have equal shares, in a random order.
    """
    if num_examples < num_classes:
        raise InvalidArgument(f"{num_examples} examples are too few for {num_classes} classes")
    rng = generator(seed, Stream.SOURCE)
    means = rng.standard_normal((num_classes, *shape), np.float32)
    y = rng.permutation(np.arange(num_examples, dtype=np.int32) % num_classes)
    x = rng.standard_normal((num_examples, *shape), np.float32)
    x *= np.float32(spread)
    x += means[y]
    return x, y
