"""Keys, key agreement, and masks. All primitives are those of the package cryptography; docs/secure.md says which.

Every key that is derived has a purpose of its own, and belongs to one attempt of one round of one run, and to the
clients who use it: HKDF's `info` are these, one a line.
"""

from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tflite_export.device.errors import InvalidInput

NAME = "tfpfl-secure-1"
MASK, SELF, SHARE, ROUNDING = "mask", "self", "share", "rounding"  # purposes of keys
_CURVE, _POINT, _KEY, _NONCE = ec.SECP256R1(), 65, 32, 12


class SecureError(InvalidInput):
    """Something in a secure round is not as it must be: the device takes no part in this attempt."""


class Attempt(NamedTuple):
    """An attempt of a round. If too few clients are left in it, the round begins again, with other keys."""

    run: str  # the run's id
    round_num: int
    number: int  # of the attempt, from 1

    def info(self, purpose: str, *clients: int) -> bytes:
        """What a key is for: HKDF's `info`, and the text before which names a signature."""
        lines = (NAME, self.run, self.round_num, self.number, purpose, *clients)
        return "".join(f"{line}\n" for line in lines).encode()


class PrivateKey:
    """A private key of the curve P-256.

    Args:
        secret: its number, 32 bytes with the most significant first; None: a new one is made.

    Raises:
        SecureError: it is no private key.
    """

    def __init__(self, secret: bytes | None = None):
        try:
            number = None if secret is None else int.from_bytes(secret, "big")
            self._key = ec.generate_private_key(_CURVE) if number is None else ec.derive_private_key(number, _CURVE)
        except ValueError:
            raise SecureError("this is no private key of the curve P-256") from None

    @property
    def secret(self) -> bytes:
        """The private key as a number below the order of P-256: 32 bytes, most significant first."""
        return self._key.private_numbers().private_value.to_bytes(_KEY, "big")

    @property
    def public(self) -> bytes:
        """The public key, an uncompressed point: 65 bytes."""
        form = serialization.PublicFormat.UncompressedPoint
        return self._key.public_key().public_bytes(serialization.Encoding.X962, form)

    def agree(self, public: bytes) -> bytes:
        """The secret that only the two owners know (ECDH, the x coordinate): 32 bytes.

        Raises:
            SecureError: `public` is no point of the curve.
        """
        return self._key.exchange(ec.ECDH(), public_point(public))


def public_point(public: bytes) -> ec.EllipticCurvePublicKey:
    """A public key.

    Raises:
        SecureError: it is no point of the curve P-256.
    """
    try:
        if len(public) != _POINT:
            raise ValueError
        return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, public)
    except ValueError:
        raise SecureError("this is no point of the curve P-256") from None


def derive(secret: bytes, info: bytes) -> bytes:
    """A key for one purpose: HKDF-SHA256 without a salt, 32 bytes."""
    return HKDF(hashes.SHA256(), _KEY, None, info).derive(secret)


def keystream(key: bytes, size: int) -> np.ndarray:
    """Random words of a key: uint32 [size], AES-256-CTR from counter 0, read as little-endian."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(4 * size)), "<u4")


def pair_key(attempt: Attempt, mine: PrivateKey, client: int, public: bytes, other: int) -> bytes:
    """The key of the mask that two clients share.

    Args:
        attempt: the attempt.
        mine: the private mask key of `client`.
        client: its number.
        public: the public mask key of `other`.
        other: the other's number.
    """
    return derive(mine.agree(public), attempt.info(MASK, min(client, other), max(client, other)))


def add_pair(words: np.ndarray, key: bytes, client: int, other: int, remove: bool = False) -> None:
    """Adds the mask of a pair to the words of `client`: the smaller client adds it, the larger one subtracts it.

    Args:
        words: uint32 [size], changed in place.
        key: from `pair_key`.
        client: whose words they are.
        other: the other of the pair.
        remove: take the mask away that the client has added.
    """
    change = np.add if (client < other) != remove else np.subtract
    change(words, keystream(key, len(words)), out=words)


def self_key(attempt: Attempt, seed: bytes, client: int) -> bytes:
    """The key of the mask that a client alone adds, from its seed."""
    return derive(seed, attempt.info(SELF, client))


def share_key(attempt: Attempt, mine: PrivateKey, public: bytes, sender: int, receiver: int) -> bytes:
    """The key with which `sender` closes its one box for `receiver`; both can derive it."""
    return derive(mine.agree(public), attempt.info(SHARE, sender, receiver))


def close_box(key: bytes, nonce: bytes, content: bytes, about: bytes) -> bytes:
    """A content that only the owner of the key can read: the nonce, and AES-256-GCM of the content with `about`."""
    return nonce + AESGCM(key).encrypt(nonce, content, about)


def open_box(key: bytes, box: bytes, about: bytes) -> bytes:
    """The content of a box.

    Raises:
        SecureError: it was closed with another key, or changed on its way.
    """
    try:
        return AESGCM(key).decrypt(box[:_NONCE], box[_NONCE:], about)
    except (InvalidTag, ValueError):
        raise SecureError("a share was changed on its way, or is not for this client") from None
