"""The fixed-point codec: exact arithmetic on fractions says the same, the clip holds, and no sum can wrap."""

from fractions import Fraction
from math import ceil, floor, sqrt

import numpy as np
import pytest

from tflite_export.device.live.secure.codec import MOST_LOSS, SLACK, Codec, CodecError, exponent_for, norm_of

DRAW = np.random.default_rng(27)


def cases(n):
    """n codecs and gradients of many sizes and scales."""
    draw = np.random.default_rng(1)
    for _ in range(n):
        size, clients = int(draw.integers(1, 40)), int(draw.integers(1, 3000))
        clip, most = float(10 ** draw.uniform(-3, 3)), float(10 ** draw.uniform(-4, 2))
        codec = Codec(size, clients, clip, most, 500)
        gradient = (draw.standard_normal(size) * 10 ** draw.uniform(-8, 4, size)).astype(np.float32)
        gradient[draw.random(size) < 0.1] = 0
        random = draw.integers(0, 2**32, codec.words, dtype=np.uint32)
        yield codec, gradient, float(most * draw.uniform(0.01, 1)), int(draw.integers(1, 500)), random


def exactly(codec, gradient, weight, examples, loss, random):
    """The words by fractions of integers; only the three roundings that the rules name are floating point."""
    sizes = [abs(Fraction(float(g))) if abs(float(g)) >= 2.0**-126 else Fraction(0) for g in gradient]
    largest, e = max(sizes), 0
    while largest and largest >= Fraction(2) ** e:
        e += 1
    while largest and largest < Fraction(2) ** (e - 1):
        e -= 1
    squares = sum(ceil(s * Fraction(2) ** (18 - e)) ** 2 for s in sizes)
    norm = sqrt(float(squares)) * 2.0 ** (e - 18) if largest else 0.0
    h = norm * SLACK
    f = np.float32(weight * (codec.clip / h if h > codec.clip else 1.0) * 2.0**codec.exponent)
    numbers = [np.float32(float(f) * float(g)) if s else 0.0 for g, s in zip(gradient, sizes, strict=True)]
    tail = np.float32(min(max(loss, -MOST_LOSS), MOST_LOSS) * examples * 2.0**codec.loss_exponent)
    found = []
    for v, word in zip([*numbers, tail], [*random[: codec.size], random[-1]], strict=True):
        exact = abs(Fraction(float(v)))
        up = Fraction((int(word) >> 8) + 1) <= (exact - floor(exact)) * 2**24
        q = min(floor(exact) + up, (2**31 - 1) // codec.clients)
        found.append((-q if v < 0 else q) % 2**32)
    return [*found[:-1], examples, int(h > codec.clip), found[-1]]


def test_the_words_are_those_of_exact_arithmetic():
    for codec, gradient, weight, examples, random in cases(300):
        loss = float(np.float32(random[0] / 2**25))
        found = codec.encode(gradient, weight, examples, loss, random)
        assert found.words.tolist() == exactly(codec, gradient, weight, examples, loss, random)
        true = sqrt(sum(Fraction(float(g)) ** 2 for g in gradient))
        room = 2.0**-17 * sqrt(codec.size) * float(np.abs(gradient).max())
        assert true * (1 - 1e-12) <= found.norm <= true + room


def test_what_a_client_adds_is_within_its_clip():
    """Each number is rounded by less than 1; before that, the norm is at most weight * clip * 2^exponent."""
    for codec, gradient, weight, examples, random in cases(300):
        loud = (gradient * np.float32(1e6)).astype(np.float32)
        words = codec.encode(loud, weight, examples, 1.0, random).words[: codec.size].view(np.int32)
        shortened = np.maximum(np.abs(words.astype(np.float64)) - 1, 0)
        assert np.sqrt((shortened**2).sum()) <= weight * codec.clip * 2.0**codec.exponent


def test_no_sum_of_all_clients_wraps():
    for clients in (1, 3, 100, 2**20):
        codec = Codec(4, clients, 1.0, 1.0, 3)
        signs = np.float32([1, -1, 0, 0]) * np.float32(1e30)
        words = codec.encode(signs, 1.0, 3, 1e30, np.zeros(7, np.uint32)).words.view(np.int32).astype(object)
        assert all(abs(int(word)) * clients < 2**31 for word in words)


def test_rounding_is_unbiased_and_decodes():
    gradient = np.float32([0.3, -0.7, 1e-3, 0.0])
    codec, n = Codec(4, 1000, 1.0, 1.0, 10, exponent=5, loss_exponent=2), 4000
    assert codec.encode(gradient * 0, 1.0, 1, 0.0, np.zeros(7, np.uint32)).words.tolist() == [0, 0, 0, 0, 1, 0, 0]
    total, examples = np.zeros(4), 0
    for _ in range(n):
        random = DRAW.integers(0, 2**32, codec.words, dtype=np.uint32)
        sums = codec.decode(codec.encode(gradient, 0.5, 7, 1.3, random).words)
        assert np.abs(sums.gradient - 0.5 * gradient).max() < 2.0**-5 and sums.clipped == 0
        total, examples = total + sums.gradient, examples + sums.examples
    assert examples == 7 * n
    assert np.abs(total / n - 0.5 * gradient).max() < 4 * 0.5 * 2.0**-5 / np.sqrt(n)  # four deviations


def test_the_largest_exponent_is_taken():
    for clients in (1, 7, 100, 10**6):
        for bound in (1e-9, 0.3, 1.0, 2.0**20, 1e3):
            if (2**31 - 1) // clients > 2:
                e, room = exponent_for(bound, clients), (2**31 - 1) // clients - 1
                assert bound * 2.0**e <= room < bound * 2.0 ** (e + 1)


def test_what_is_refused():
    codec, random = Codec(2, 3, 1.0, 1.0, 10), np.zeros(5, np.uint32)
    for bad in (np.float32([np.nan, 0]), np.float32([np.inf, 0]), np.float32([1])):
        with pytest.raises(CodecError):
            codec.encode(bad, 1.0, 1, 0.0, random)
    for weight, examples, loss in ((1.1, 1, 0.0), (0.0, 1, 0.0), (1.0, 11, 0.0), (1.0, 0, 0.0), (1.0, 1, np.nan)):
        with pytest.raises(CodecError):
            codec.encode(np.float32([1, 0]), weight, examples, loss, random)
    for how in ((0, 3, 1, 1, 1), (1, 2**31, 1, 1, 1), (1, 3, np.inf, 1, 1), (1, 3, 1, 1, 2**31), (1, 3, 1, 1, 1, 40)):
        with pytest.raises(CodecError):
            Codec(*how)
    assert norm_of(np.float32([0, 0])) == 0.0
