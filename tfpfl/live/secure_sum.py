"""Takes the masks off a sum: what the server computes with the shares that clients revealed.

    sum of x = sum of y - own masks of those in the sum - masks that they share with those who dropped out

It has either the seed or the mask key of a client, and never both.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tflite_export.device.live.secure import masks, shamir
from tflite_export.device.live.secure.exchange import LEAST, Peer
from tflite_export.device.live.secure.masks import Attempt, PrivateKey, SecureError


class Shares(NamedTuple):
    """The fourth message of a client."""

    seeds: Mapping[int, bytes]  # {client in the sum: share of its seed}
    keys: Mapping[int, bytes]  # {client that dropped out: share of its mask key}


class Circle(NamedTuple):
    """Who is in an attempt, when the masked words have come."""

    neighbours: Mapping[int, tuple[int, ...]]  # of all who sent keys
    thresholds: Mapping[int, int]
    boxed: frozenset  # who sent boxes, and so is in the masks of its neighbours
    survivors: frozenset  # whose masked words came

    def opens(self) -> dict[int, int]:
        """{client whose seed or mask key is needed: how many shares of it}."""
        found = {i: self.thresholds[i] for i in self.survivors}
        for i in self.boxed - self.survivors:
            if any(j in self.survivors for j in self.neighbours[i]):
                found[i] = self.thresholds[i]
        return found

    def short_of(self, answered) -> list[int]:
        """The clients of which too few neighbours have answered, or could answer."""
        answered = set(answered)
        return sorted(i for i, t in self.opens().items() if len(answered & set(self.neighbours[i])) < t)


def without_few(neighbours: Mapping[int, tuple[int, ...]], thresholds: Mapping[int, int], here) -> frozenset:
    """The largest part of `here` in which every client has as many neighbours as its threshold."""
    here = set(here)
    while few := [i for i in here if len(here & set(neighbours[i])) < thresholds[i]]:
        here -= set(few)
    return frozenset(here)


def open_sum(
    attempt: Attempt,
    circle: Circle,
    keys: Mapping[int, Peer],
    masked: Mapping[int, np.ndarray],
    shares: Mapping[int, Shares],
) -> np.ndarray:
    """The sum of the survivors' words: uint32 [size].

    Args:
        attempt: the attempt.
        circle: who is in it.
        keys: {client: its public keys}.
        masked: {survivor: uint32 [size]}.
        shares: {client: its fourth message}, of enough of them.

    Raises:
        SecureError: fewer than three clients are in the sum, too few have answered, or the shares of a mask key do
            not give the key that its client advertised.
    """
    if len(masked) < LEAST:
        raise SecureError(f"{len(masked)} clients are in the sum, and {LEAST} must be")
    if short := circle.short_of(shares):
        raise SecureError(f"too few neighbours of client {short[0]} are left")
    total = np.zeros(len(next(iter(masked.values()))), np.uint32)
    for words in masked.values():
        total += words
    needed = circle.opens()
    for i in sorted(circle.survivors):
        seed = shamir.join({j: s.seeds[i] for j, s in shares.items() if i in s.seeds}, needed[i])
        total -= masks.keystream(masks.self_key(attempt, seed, i), len(total))
    for i in sorted(needed.keys() - circle.survivors):
        secret = shamir.join({j: s.keys[i] for j, s in shares.items() if i in s.keys}, needed[i])
        key = PrivateKey(secret)
        if key.public != keys[i].mask:
            raise SecureError(f"the shares of client {i}'s mask key do not fit the key: one of them is wrong")
        for j in circle.neighbours[i]:
            if j in circle.survivors:
                pair = masks.pair_key(attempt, key, i, keys[j].mask, j)
                masks.add_pair(total, pair, j, i, remove=True)
    return total
