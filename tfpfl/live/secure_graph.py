"""Who shares masks with whom: everybody with everybody, or in large cohorts with k neighbours in a circle.

Source:
    Bell, Bonawitz, Gascón, Lepoint, Raykova: Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, CCS
    2020: the circle is their Harary graph in random order, and `degree` checks the three conditions of their section 3,
    two of them with the exact tails of the hypergeometric distribution.
"""

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache

from scipy.stats import hypergeom

from tflite_export.device.live.secure.exchange import Peer
from tflite_export.device.live.secure.masks import Attempt

COMPLETE = 64  # with up to so many clients, all are neighbours
CURIOUS = 0.1  # of the clients work with the server
AWAY = 0.3  # of the clients drop out
SAFE = 40  # bits: the probability that masks can be opened, or that sums come apart, is below 2^-SAFE
SURE = 10  # bits: the probability that too many of a client's neighbours drop out is below 2^-SURE


def threshold_of(neighbours: int, part: float) -> int:
    """t: so many of a client's neighbours can open its masks."""
    return math.floor(part * neighbours) + 1


@lru_cache(64)
def degree(clients: int, part: float) -> int:
    """The number of a client's neighbours.

    Args:
        clients: n, those who have sent keys.
        part: see `Rules.threshold`.
    """
    for k in range(2, clients - 1, 2) if clients > COMPLETE else ():
        curious, gone = math.ceil(CURIOUS * clients), math.ceil(AWAY * clients)
        t, others = threshold_of(k, part), clients - 1
        opened = clients * hypergeom.sf(t - 1, others, min(curious, others), k)  # t or more of k neighbours are curious
        lost = clients * hypergeom.sf(k - t, others, min(gone, others), k)  # fewer than t of k neighbours stay
        apart = clients * ((curious + gone) / clients) ** (k / 2)  # k / 2 in a row are curious or gone
        if opened <= 2.0**-SAFE and apart <= 2.0**-SAFE and lost <= 2.0**-SURE:
            return k
    return clients - 1


def neighbours(attempt: Attempt, keys: Mapping[int, Peer], part: float) -> dict[int, tuple[int, ...]]:
    """The neighbours of each client, ascending.

    Args:
        attempt: the attempt.
        keys: {client: its public keys} of all who have sent theirs.
        part: see `Rules.threshold`.
    """
    ids = sorted(keys)
    k = degree(len(ids), part)
    if k == len(ids) - 1:
        return {i: tuple(j for j in ids if j != i) for i in ids}
    digest = hashlib.sha256(b"".join(keys[i].mask + keys[i].share for i in ids)).digest()
    circle = sorted(ids, key=lambda i: hashlib.sha256(attempt.info("graph", i) + digest).digest())
    steps = [step for step in range(-k // 2, k // 2 + 1) if step]
    return {i: tuple(sorted(circle[(at + step) % len(ids)] for step in steps)) for at, i in enumerate(circle)}
