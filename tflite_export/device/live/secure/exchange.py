"""What a client computes for its four messages. It knows no network and no disk; `secure.device` has these.

keys      advertise   the two public keys, signed
shares    close       one box for each neighbour: its shares of the seed and of the mask key
masked    mask        the words of the gradient, with the masks of all neighbours whose boxes came, and its own
unmask    answer      shares of the seeds of those who are in the sum, and of the mask keys of those who dropped out
"""

import secrets as _random
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from tflite_export.device.live import wire
from tflite_export.device.live.secure import masks, shamir
from tflite_export.device.live.secure.masks import Attempt, PrivateKey, SecureError

NONCE = 12
BOX = NONCE + 2 * shamir.SIZE + 16  # bytes of what one neighbour sends another: two shares, encrypted
LEAST = 3  # clients in a sum; the sum over two says to each of them what the other one sent


class Secrets(NamedTuple):
    """What a client draws for an attempt, 32 bytes each. None of it is ever used in another one."""

    mask: bytes  # the private mask key, from which the masks of pairs come; it is shared
    share: bytes  # the private share key, with which boxes are closed; it is never shared
    seed: bytes  # of the own mask; it is shared
    rounding: bytes  # of the random rounding

    @classmethod
    def drawn(cls) -> "Secrets":
        """New secrets, from the random numbers of the operating system."""
        seed = (1 + _random.randbelow(shamir.ORDER - 1)).to_bytes(32, "big")
        return cls(PrivateKey().secret, PrivateKey().secret, seed, _random.token_bytes(32))


class Peer(NamedTuple):
    """The two public keys of a client with whom masks are shared, as 65 bytes each."""

    client: int
    mask: bytes
    share: bytes


class Held(NamedTuple):
    """What a client holds for a neighbour: shares of its secrets."""

    seed: bytes
    mask: bytes


def keys_text(attempt: Attempt, client: int, mask: bytes, share: bytes) -> bytes:
    """What a client signs, so that its neighbours know whose keys they have."""
    return attempt.info(wire.KEYS, client) + f"{wire.to_text(mask)}\n{wire.to_text(share)}\n".encode()


def advertise(attempt: Attempt, client: int, secrets: Secrets, signer: wire.Signer) -> dict:
    """The first message, but for the attempt: 'mask', 'share', 'signature'."""
    mask, share = PrivateKey(secrets.mask).public, PrivateKey(secrets.share).public
    signature = signer.sign(keys_text(attempt, client, mask, share))
    return {"mask": wire.to_text(mask), "share": wire.to_text(share), "signature": signature}


def checked_peer(attempt: Attempt, about: dict) -> Peer:
    """A neighbour as the server tells of it: 'client', 'identity', and its first message.

    Raises:
        WireError: something is missing, or the keys were not signed by this identity.
        SecureError: a key is no point of the curve.
    """
    client = wire.entry(about, "client", int, 0, 10**9)
    mask, share = (wire.to_bytes(wire.entry(about, name, str, 1, 200), name, 65) for name in ("mask", "share"))
    identity = wire.PublicKey(wire.entry(about, "identity", str, 1, 200))
    identity.verify(keys_text(attempt, client, mask, share), wire.entry(about, "signature", str, 1, 200))
    for point in (mask, share):
        masks.public_point(point)
    return Peer(client, mask, share)


def checked_threshold(threshold: int, peers: int) -> int:
    """The threshold t that the server has chosen for so many neighbours.

    Raises:
        SecureError: the server, and fewer clients than a half, could open what this client sends.
    """
    if peers < LEAST - 1 or not peers < 2 * threshold <= 2 * peers:
        raise SecureError(f"{peers} neighbours of which {threshold} can open a client's masks: this is not safe")
    return threshold


def close(
    attempt: Attempt,
    client: int,
    secrets: Secrets,
    peers: Iterable[Peer],
    threshold: int,
    draw: Callable[[int], int] = _random.randbelow,
    nonce: Callable[[int], bytes] = _random.token_bytes,
) -> dict[int, bytes]:
    """The second message: a box for each neighbour, {client: box}.

    Args:
        attempt, client, secrets: who and where.
        peers: the neighbours.
        threshold: so many of them can open the masks.
        draw: see `shamir.split`; first for the seed, then for the mask key.
        nonce: (n) -> n random bytes.
    """
    peers, key = list(peers), PrivateKey(secrets.share)
    ids = [peer.client for peer in peers]
    seeds = shamir.split(secrets.seed, ids, threshold, draw)
    keys = shamir.split(secrets.mask, ids, threshold, draw)
    boxes = {}
    for peer in peers:
        about = attempt.info(masks.SHARE, client, peer.client)
        derived = masks.share_key(attempt, key, peer.share, client, peer.client)
        boxes[peer.client] = masks.close_box(derived, nonce(NONCE), seeds[peer.client] + keys[peer.client], about)
    return boxes


def open_boxes(
    attempt: Attempt, client: int, secrets: Secrets, peers: Mapping[int, Peer], boxes: Mapping[int, bytes]
) -> dict[int, Held]:
    """What a client's neighbours have closed for it: {neighbour: shares}.

    Raises:
        SecureError: a box is not of a neighbour, or cannot be opened.
    """
    key, found = PrivateKey(secrets.share), {}
    for sender, box in boxes.items():
        if sender not in peers:
            raise SecureError(f"client {sender} is no neighbour, and there is a box of it")
        derived = masks.share_key(attempt, key, peers[sender].share, sender, client)
        content = masks.open_box(derived, box, attempt.info(masks.SHARE, sender, client))
        if len(content) != 2 * shamir.SIZE:
            raise SecureError(f"the box of client {sender} does not hold two shares")
        found[sender] = Held(content[: shamir.SIZE], content[shamir.SIZE :])
    return found


def random_words(attempt: Attempt, client: int, secrets: Secrets, size: int) -> np.ndarray:
    """The words with which a client rounds: uint32 [size]."""
    return masks.keystream(masks.derive(secrets.rounding, attempt.info(masks.ROUNDING, client)), size)


def mask(attempt: Attempt, client: int, secrets: Secrets, peers: Iterable[Peer], words: np.ndarray) -> np.ndarray:
    """The third message: the words with all masks, uint32 [size].

    Args:
        attempt, client, secrets: who and where.
        peers: the neighbours whose boxes came.
        words: uint32 [size], from `Codec.encode`.
    """
    masked, key = words.copy(), PrivateKey(secrets.mask)
    masked += masks.keystream(masks.self_key(attempt, secrets.seed, client), len(words))
    for peer in peers:
        masks.add_pair(masked, masks.pair_key(attempt, key, client, peer.mask, peer.client), client, peer.client)
    return masked


def answer(held: Mapping[int, Held], survivors: Iterable[int], threshold: int) -> tuple[dict, dict]:
    """The fourth message: ({survivor: share of its seed}, {other neighbour: share of its mask key}).

    Args:
        held: from `open_boxes`.
        survivors: the neighbours that are in the sum, as the server says.
        threshold: so many of them there must be.

    Raises:
        SecureError: one is no neighbour whose box came, or there are too few: the sum would say too much.
    """
    survivors = set(survivors)
    if strange := sorted(survivors - held.keys()):
        raise SecureError(f"client {strange[0]} is said to be in the sum, and has closed no box")
    if len(survivors) < threshold:
        raise SecureError(f"{len(survivors)} neighbours are in the sum, and {threshold} must be: nothing is revealed")
    return (
        {i: held[i].seed for i in sorted(survivors)},
        {i: held[i].mask for i in sorted(held.keys() - survivors)},
    )
