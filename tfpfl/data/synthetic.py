"""Synthetic data: one Gaussian cloud per class. For tests, and for measurements with many clients."""

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data.randomness import Stream, generator


def blobs(
    num_examples: int, num_classes: int = 10, shape: tuple[int, ...] = (8,), spread: float = 0.5, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Draws examples x = mean of the class + spread * N(0, 1); the class means are drawn from N(0, 1).

    Args:
        num_examples: N, at least `num_classes`.
        num_classes: the number of classes.
        shape: the shape of one example.
        spread: the standard deviation within a class, per feature.
        seed: the seed of all draws, >= 0.

    Returns:
        x float32 [N, *shape] and y int32 [N], in random order; the classes have the same number of examples, to within
        one.

    Raises:
        InvalidArgument: there are fewer examples than classes.
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
