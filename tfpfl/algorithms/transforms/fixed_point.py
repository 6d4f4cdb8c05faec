"""Fixed-point numbers in Z_2^32, in TensorFlow: what clients send under secure aggregation, as docs/secure.md says.

`tflite_export/device/live/secure/codec.py` makes the same integers with NumPy, bit for bit; its docstring has the
formulas, and says why the order of no sum is of any account. A test compares the two on random cases.
"""

import math
from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.checks import InvalidArgument

BITS = 18  # of the integers that the norm is made of
SLACK = 1 + 2.0**-20
MOST_LOSS = 64.0  # a larger loss counts as this one
TAIL = 3  # numbers behind those of the update: N_i, whether it was clipped, and N_i times the loss
LARGEST = 2**26  # numbers of an update: with more, the sum of squares could leave int64
_TINY = 2.0**-126


class FixedPoint(NamedTuple):
    """The numbers of a codec; `fixed_point` makes one. They are the same for all clients of a run."""

    size: int  # P, how many numbers an update has
    clients: int  # r, the most clients that can be in a sum
    clip: float  # C: an update with a larger L2 norm is made shorter, to this norm
    max_weight: float  # W
    max_examples: int  # the largest N_i
    exponent: int  # s: numbers are multiplied by 2^s
    loss_exponent: int

    @property
    def words(self) -> int:
        """How many words a message has."""
        return self.size + TAIL

    @property
    def most(self) -> int:
        """M, the largest integer of one client: the sum of r of them stays in int32."""
        return (2**31 - 1) // self.clients

    @property
    def sensitivity(self) -> float:
        """The largest L2 norm of the integers of one client: W C 2^s, and less than 1 more for every number."""
        return self.max_weight * self.clip * 2.0**self.exponent + math.sqrt(self.size)

    def encode(self, update: Any, weight: Any, examples: Any, loss: Any, random: Any) -> tuple[Any, Any]:
        """Encodes what one client sends.

        Args:
            update: float32 [P], finite.
            weight: float64 [], what the update counts in the sum, at most `max_weight`.
            examples: int32 [], N_i.
            loss: float [], the mean over its examples.
            random: uint32 [P + 3], random words.

        Returns:
            (words int64 [P + 3], signed, of at most M in size; whether the update was clipped: bool []).
        """
        tiny = tf.abs(update) < tf.constant(_TINY)  # some processors take these numbers for 0
        g = tf.where(tiny, tf.zeros_like(update), update)
        h = norm_of(g) * SLACK
        clip = tf.constant(self.clip, tf.float64)
        ratio = tf.where(h > clip, clip / h, tf.ones_like(h))
        factor = tf.cast((weight * ratio) * tf.constant(2.0**self.exponent, tf.float64), tf.float32)
        bounded = tf.clip_by_value(tf.cast(tf.cast(loss, tf.float32), tf.float64), -MOST_LOSS, MOST_LOSS)
        of_loss = bounded * tf.cast(examples, tf.float64) * tf.constant(2.0**self.loss_exponent, tf.float64)
        numbers = tf.concat([factor * g, tf.zeros([2]), tf.cast(of_loss, tf.float32)[None]], 0)
        words = rounded(numbers, random, self.most)
        clipped = h > clip
        counts = tf.stack([tf.cast(examples, tf.int64), tf.cast(clipped, tf.int64)])
        return tf.concat([words[: self.size], counts, words[self.size + 2 :]], 0), clipped

    def decode(self, words: Any) -> Any:
        """The numbers of an update, from one client's words or from a sum of such words, int64 [P + 3]: float64 [P]."""
        return tf.cast(words[: self.size], tf.float64) * tf.constant(2.0**-self.exponent, tf.float64)


def fixed_point(
    size: int, clients: int, clip: float, max_weight: float, max_examples: int, *, room: float = 1.0
) -> FixedPoint:
    """Makes the codec with the largest exponents that fit.

    Args:
        size, clients, clip, max_weight, max_examples: see `FixedPoint`.
        room: how many times W C one client's numbers may be, with the noise that is added to them; at least 1.

    Raises:
        InvalidArgument: sums could leave 32 bits with these numbers, or there are too many numbers.
    """
    if size > LARGEST:
        raise InvalidArgument(f"an update of {size:,} numbers is too long for --secure: {LARGEST:,} is the most")
    exponents = (_exponent(b, clients) for b in (max_weight * clip * room, max_examples * MOST_LOSS))
    return FixedPoint(size, clients, clip, max_weight, max_examples, *exponents)


def norm_of(update: Any) -> Any:
    """The L2 norm of an update, float32 [P], as the codec finds it, never below the true one: float64 []."""
    sizes = tf.abs(update)
    largest = tf.reduce_max(sizes)
    # 2^(e-1) <= largest < 2^e; the exponent of a float32 is its bits 23 to 30
    e = tf.bitcast(largest, tf.int32) // 2**23 - 126
    integers = tf.cast(tf.math.ceil(tf.cast(sizes, tf.float64) * _power_of_two(BITS - e)), tf.int64)
    norm = tf.sqrt(tf.cast(tf.reduce_sum(integers * integers), tf.float64)) * _power_of_two(e - BITS)
    return tf.where(largest > 0, norm, tf.zeros_like(norm))


def rounded(numbers: Any, random: Any, most: int) -> Any:
    """Rounds numbers at random: float32 [n] and uint32 [n] random words to int64 [n], of at most `most` in size."""
    sizes = tf.abs(numbers)
    floors = tf.floor(sizes)
    upper = tf.cast(tf.cast(random, tf.int64) // 2**8, tf.float32)
    up = upper + 1.0 <= (sizes - floors) * 2.0**24
    integers = tf.minimum(tf.cast(floors, tf.int64) + tf.cast(up, tf.int64), most)
    return tf.where(numbers < 0, -integers, integers)


def wrapped(words: Any) -> Any:
    """Integers modulo 2^32, read as int32: what a server has that adds up uint32 words. int64 [n]."""
    return tf.math.floormod(words + 2**31, 2**32) - 2**31


def _power_of_two(exponent: Any) -> Any:
    """2^exponent, exactly: float64 [], for an exponent int32 [] of -1000 to 1000."""
    return tf.bitcast((tf.cast(exponent, tf.int64) + 1023) * 2**52, tf.float64)


def _exponent(bound: float, clients: int) -> int:
    """The largest exponent with which a number of at most `bound` can be summed over so many clients."""
    room = (2**31 - 1) // clients - 1
    if room < 1 or not 0 < bound < math.inf:
        raise InvalidArgument(f"{clients} numbers of at most {bound:g} cannot be summed in 32 bits: take a smaller one")
    found = math.floor(math.log2(room / bound)) + 1
    while bound * 2.0**found > room:  # the logarithm is rounded
        found -= 1
    if abs(found) > 100:
        raise InvalidArgument(f"numbers of at most {bound:g} are too small or too large for --secure: check the clip")
    return found
