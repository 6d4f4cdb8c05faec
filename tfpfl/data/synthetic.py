"""Synthetic data for tests and measurements: a Gaussian cloud per class, and targets with a planted truth."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data.randomness import Stream, generator
from tfpfl.data.targets import check_sort


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


class Planted(NamedTuple):
    """Clients whose targets follow a head of their own on features that all have in common: z = tanh(x A) W_i + b_i."""

    clients: dict[str, tuple[np.ndarray, np.ndarray]]  # {name: (x float32 [N_i, inputs], y float32 [N_i, D])}
    outputs: list[np.ndarray]  # z of every client's examples, float64 [N_i, D]: E y is z, exp(z) or 1 / (1 + exp(-z))
    features: np.ndarray  # A, float64 [inputs, M]
    heads: list[tuple[np.ndarray, np.ndarray]]  # (W_i [M, D], b_i [D]) of every client, float64


def synthetic_targets(
    sort: str,
    num_clients: int = 6,
    num_examples: int | Sequence[int] = 40,
    *,
    width: int = 2,
    inputs: int = 8,
    hidden: int = 4,
    personal: float = 0.5,
    noise: float = 0.1,
    seed: int = 0,
) -> Planted:
    """Draws clients for `Federation.from_clients(made.clients, targets=sort)` whose truth is known.

    Inputs are N(0, 1). The heads are W_i = W + personal * N(0, 1), likewise b_i. Real targets are z + noise * N(0, 1),
    counts are Poisson with the mean exp(z), and binary ones are 1 with the probability 1 / (1 + exp(-2 z)); `outputs`
    then has 2 z and `heads` 2 W_i and 2 b_i, so that the probability is the sigmoid of the outputs.

    Args:
        sort: 'real', 'count' or 'binary'.
        num_clients: I.
        num_examples: N_i, of each client or the same for all.
        width: D, the number of outputs.
        inputs: the number of inputs of an example.
        hidden: M, the number of features.
        personal: how far the heads lie apart; 0 gives all clients one head.
        noise: the standard deviation of the noise of real targets.
        seed: the seed of all draws, >= 0.

    Raises:
        InvalidArgument: an unknown sort, or another number of `num_examples` than clients.
    """
    check_sort(sort)
    sizes = [int(num_examples)] * num_clients if np.ndim(num_examples) == 0 else list(num_examples)  # type: ignore
    if len(sizes) != num_clients:
        raise InvalidArgument(f"num_examples has {len(sizes)} numbers for {num_clients} clients: give one for each")
    rng = generator(seed, Stream.SOURCE)
    features = rng.standard_normal((inputs, hidden)) / np.sqrt(inputs)
    kernel, bias = rng.standard_normal((hidden, width)), 0.5 * rng.standard_normal(width)
    steep = 2.0 if sort == "binary" else 1.0
    clients, outputs, heads = {}, [], []
    for i, size in enumerate(sizes):
        own = (
            steep * (kernel + personal * rng.standard_normal((hidden, width))),
            steep * (bias + personal * rng.standard_normal(width)),
        )
        x = rng.standard_normal((size, inputs)).astype(np.float32)
        z = np.tanh(x.astype(np.float64) @ features) @ own[0] + own[1]
        if sort == "real":
            y = z + noise * rng.standard_normal(z.shape)
        elif sort == "count":
            y = rng.poisson(np.exp(z))
        else:
            y = rng.random(z.shape) < 1 / (1 + np.exp(-z))
        clients[f"client {i}"] = x, y.astype(np.float32)
        outputs.append(z)
        heads.append(own)
    return Planted(clients, outputs, features, heads)
