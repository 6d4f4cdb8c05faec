"""Fixed-point numbers in Z_2^32: what is masked is made of integers, so that masks cancel without a rounding error.

NumPy, TensorFlow (float32), TypeScript and C produce the same integers bit for bit. These rules make it easy:

* The norm of the gradient g comes from integers, so the order of the sum is of no account. With m = max |g_j| and e
  such that 2^(e-1) <= m < 2^e:

      a_j  = ceil(|g_j| 2^(18-e))                float64; an integer of at most 2^18
      norm = sqrt(sum a_j^2) 2^(e-18)            the sum in int64, then float64; never below the true norm

  It is too large by 2^-18 sqrt(P) m at most.
* Weight, clipping and scale are one float32 number, the factor:

      h = norm (1 + 2^-20)                       room for the roundings below, so that the clip is never exceeded
      c = clip / h if h > clip, otherwise 1      float64
      f = float32((weight c) 2^exponent)         2^exponent is exact
      v_j = float32(f g_j)                       one rounding

* v_j is rounded at random, away from zero with a probability that is its fraction (but for 2^-24). With u_j the upper
  24 bits of the j-th random word:

      q_j = floor(|v_j|) + [u_j + 1 <= (|v_j| - floor(|v_j|)) 2^24]     all of this is exact in float32

* q_j is at most M = floor((2^31 - 1) / r), with r the most clients that can be in the sum. So no sum can wrap,
  whatever the numbers are. The word is q_j with the sign of v_j, modulo 2^32.
* Numbers below 2^-126 count as 0: some processors take them for it.

Behind the P numbers of the gradient there are three more: N_i; 1 if the gradient was clipped, otherwise 0; and N_i
times the loss, so that the server learns the mean loss and not a client's.
"""

import math
from typing import NamedTuple

import numpy as np

from tflite_export.device.errors import InvalidInput

BITS = 18  # of the integers that the norm is made of
SLACK = 1 + 2.0**-20
MOST_LOSS = 64.0  # a larger loss counts as this one
TAIL = 3  # numbers behind those of the gradient
LARGEST = 2**26  # numbers of a gradient: with more, the sum of squares could leave int64
_TINY = np.float32(2.0**-126)
_FACTORS = 2.0**-100, 2.0**100


class CodecError(InvalidInput):
    """The numbers of a codec do not fit each other, or a gradient cannot be encoded."""


class Encoded(NamedTuple):
    """A device's gradient as the integers that it masks, and what the codec found of its norm."""

    words: np.ndarray  # uint32 [P + 3]
    norm: float  # of the gradient, as the codec finds it
    is_clipped: bool


class Sums(NamedTuple):
    """What the sum of the clients' words says."""

    gradient: np.ndarray  # float64 [P], the sum of weight * gradient
    examples: int  # the sum of N_i
    clipped: int  # how many clients' gradients were clipped
    loss: float  # the sum of N_i * loss


def exponent_for(bound: float, clients: int) -> int:
    """The largest exponent with which a number of at most `bound` can be summed over so many clients.

    Args:
        bound: of one client's number, after its weight.
        clients: the most that can be in the sum.

    Raises:
        CodecError: there is none.
    """
    room = (2**31 - 1) // max(clients, 1) - 1
    if room < 1 or not 0 < bound < math.inf:
        raise CodecError(f"{clients} numbers of at most {bound:g} cannot be summed in 32 bits")
    found = math.floor(math.log2(room / bound)) + 1
    while bound * 2.0**found > room:  # the logarithm is rounded
        found -= 1
    return found


class Codec:
    """The codec of a round; all its clients have the same numbers but for the weight.

    Args:
        size: P, how many numbers a gradient has.
        clients: r, the most clients that can be in the sum.
        clip: a gradient with a larger norm is made shorter, to this norm.
        max_weight: the largest weight of a client.
        max_examples: the largest N_i.
        exponent, loss_exponent: of the powers of two that the numbers are multiplied by; None: the largest that fit.

    Raises:
        CodecError: sums could wrap with these numbers.
    """

    def __init__(
        self,
        size: int,
        clients: int,
        clip: float,
        max_weight: float,
        max_examples: int,
        exponent: int | None = None,
        loss_exponent: int | None = None,
    ):
        self.size, self.clients, self.clip = int(size), int(clients), float(clip)
        self.max_weight, self.max_examples = float(max_weight), int(max_examples)
        if not 1 <= self.size <= LARGEST or self.clients < 1 or self.max_examples < 1:
            raise CodecError(f"no codec for {size} numbers, {clients} clients and {max_examples} examples")
        if not (0 < self.clip < math.inf and 0 < self.max_weight < math.inf):
            raise CodecError(f"the clip and the weights must be positive, found {clip} and {max_weight}")
        bound, loss = self.max_weight * self.clip, self.max_examples * MOST_LOSS
        self.exponent = exponent_for(bound, self.clients) if exponent is None else int(exponent)
        self.loss_exponent = exponent_for(loss, self.clients) if loss_exponent is None else int(loss_exponent)
        self.most = (2**31 - 1) // self.clients  # M
        scaled = (bound, self.exponent), (loss, self.loss_exponent)
        if any(abs(e) > 100 or b * 2.0**e > self.most - 1 for b, e in scaled) or self.max_examples > self.most:
            raise CodecError(f"the sum of {clients} clients would not fit into 32 bits with clip {clip}")

    @property
    def words(self) -> int:
        """How many words a message has."""
        return self.size + TAIL

    def encode(self, gradient: np.ndarray, weight: float, examples: int, loss: float, random: np.ndarray) -> Encoded:
        """Encodes what one client sends.

        Args:
            gradient: float32 [P].
            weight: what its gradient counts in the sum, at most `max_weight`.
            examples: N_i.
            loss: the mean over its examples.
            random: uint32 [P + 3] random words, used once; those of N_i and of the clipped are of no account.

        Raises:
            CodecError: the gradient has another size or is not finite, or a number is out of its range.
        """
        gradient = np.asarray(gradient, np.float32)
        if gradient.shape != (self.size,) or random.shape != (self.words,) or random.dtype != np.uint32:
            raise CodecError(f"a gradient of {self.size} numbers is expected, found {gradient.shape}")
        if not np.isfinite(gradient).all() or not math.isfinite(loss):
            raise CodecError("the gradient or the loss is not finite: it cannot be sent")
        if not 0 < weight <= self.max_weight or not 1 <= examples <= self.max_examples:
            raise CodecError(f"a weight of {weight:g} and {examples} examples are out of range")
        gradient = np.where(np.abs(gradient) < _TINY, np.float32(0), gradient)
        norm = norm_of(gradient)
        h = norm * SLACK
        ratio = self.clip / h if h > self.clip else 1.0
        scaled = (float(weight) * ratio) * 2.0**self.exponent
        if not _FACTORS[0] < scaled < _FACTORS[1]:
            raise CodecError(f"a gradient of norm {norm:g} cannot be clipped to {self.clip:g}")
        numbers = np.empty(self.words, np.float32)
        np.multiply(gradient, np.float32(scaled), out=numbers[: self.size])
        bounded = min(max(float(np.float32(loss)), -MOST_LOSS), MOST_LOSS)
        numbers[self.size :] = 0, 0, np.float32(bounded * examples * 2.0**self.loss_exponent)
        words = rounded(numbers, random, self.most)
        words[self.size], words[self.size + 1] = examples, h > self.clip
        return Encoded(words, norm, h > self.clip)

    def decode(self, total: np.ndarray) -> Sums:
        """What the clients' words sum up to.

        Args:
            total: uint32 [P + 3], their sum modulo 2^32.

        Raises:
            CodecError: it has another size.
        """
        if total.shape != (self.words,) or total.dtype != np.uint32:
            raise CodecError(f"a sum of {self.words} words is expected, found {total.shape}")
        signed = total.view(np.int32)
        gradient = signed[: self.size].astype(np.float64) * 2.0**-self.exponent
        examples, clipped, loss = (int(word) for word in signed[self.size :])
        return Sums(gradient, examples, clipped, loss * 2.0**-self.loss_exponent)


def norm_of(gradient: np.ndarray) -> float:
    """The norm of a gradient, float32 [P], as the codec finds it; see the module."""
    sizes = np.abs(gradient).astype(np.float64)
    largest = float(sizes.max(initial=0.0))
    if largest == 0:
        return 0.0
    _, e = math.frexp(largest)
    integers = np.ceil(np.ldexp(sizes, BITS - e)).astype(np.int64)
    return math.ldexp(math.sqrt(float(np.square(integers).sum())), e - BITS)


def rounded(numbers: np.ndarray, random: np.ndarray, most: int) -> np.ndarray:
    """Rounds numbers at random: uint32 [n], modulo 2^32.

    Args:
        numbers: float32 [n].
        random: uint32 [n] random words.
        most: M, the largest integer.
    """
    sizes = np.abs(numbers)
    floors = np.floor(sizes)
    up = (random >> np.uint32(8)).astype(np.float32) + np.float32(1) <= (sizes - floors) * np.float32(2**24)
    integers = np.minimum(floors.astype(np.int64) + up, most)
    return np.where(numbers < 0, -integers, integers).astype(np.int32).view(np.uint32)
