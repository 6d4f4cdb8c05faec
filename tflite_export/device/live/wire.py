"""What a device and the server agree on: versions, headers, kinds of work, and signed requests (docs/live_protocol.md).

Every request after `join` is signed: ECDSA on the curve P-256 with SHA-256 over this text, whose lines end with "\\n":

    tfpfl-1            the protocol
    PUT                the method
    /v1/update/3       path and query
    1790000000         the time of the device, seconds since 1970
    q83vEjRWeJA=       a number that is used once
    9f86d08...         sha256 of the body

An update is one body: a uint32 (little-endian) with the length of the JSON that follows, the JSON, and the payload.
Work that comes with its theta is written in the same way.

The signature is r and s, 32 bytes each, as browsers write it; keys are uncompressed points of 65 bytes. In headers and
JSON, bytes are written in base64.
"""

import base64
import binascii
import hashlib
import json
import math
import os
import secrets
import struct
import sys
from typing import Any, NamedTuple

import numpy as np

from tflite_export.device.errors import InvalidInput

PROTOCOL = 1
CLIENT, TIME, NONCE, SIGNATURE = "Tfpfl-Client", "Tfpfl-Time", "Tfpfl-Nonce", "Tfpfl-Signature"
# sha256 in hexadecimal: of an update, so that it can be checked before the body is read; of a theta as it is sent
BODY = "Tfpfl-Body"
NAME = f"tfpfl-{PROTOCOL}"
VISIT, SCORE, NOTHING, DONE = "visit", "score", "none", "done"  # the kinds of work
KEYS, SHARES, MASKED, UNMASK = "keys", "shares", "masked", "unmask"  # and those of secure rounds, in their order
PHASES = (KEYS, SHARES, MASKED, UNMASK)
SPLITS = ("train", "validation", "test")  # of a device's examples
_KEY_BYTES, _SIGNATURE_BYTES, _NONCE_BYTES = 65, 64, 12
_LARGEST = int(np.finfo(np.float64).max)
_NO_CRYPTOGRAPHY = "signed requests need the package cryptography: pip install cryptography"


class WireError(InvalidInput):
    """A message of the protocol cannot be read, or does not have the right signature."""


class Stamp(NamedTuple):
    """What a request is signed with, as texts of headers."""

    client: str
    time: str
    nonce: str
    signature: str

    def headers(self) -> dict[str, str]:
        """The headers of the request."""
        return dict(zip((CLIENT, TIME, NONCE, SIGNATURE), self, strict=True))


def text_to_sign(method: str, target: str, time: str, nonce: str, body_sha256: str) -> bytes:
    """The text that is signed; see the module."""
    return "".join(f"{line}\n" for line in (NAME, method, target, time, nonce, body_sha256)).encode(
        errors="surrogateescape"
    )


def to_text(content: bytes) -> str:
    """Writes bytes as base64, as headers and JSON have them."""
    return base64.b64encode(content).decode()


def to_bytes(text: str, what: str, size: int | None = None) -> bytes:
    """Bytes from base64.

    Raises:
        WireError: the text is no base64, or has another number of bytes.
    """
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise WireError(f"{what} must be base64") from None
    if size is not None and len(content) != size:
        raise WireError(f"{what} must have {size} bytes, found {len(content)}")
    return content


class Signer:
    """A device's private key.

    Args:
        pem: the key as PEM, from `pem`; None: a new one is made.
        path: the file that it was in; for messages.

    Raises:
        WireError: the package cryptography is missing, or the PEM is no key of this curve.
    """

    def __init__(self, pem: bytes | None = None, path: str | os.PathLike = "identity.pem"):
        ec, serialization = _elliptic()
        if pem is None:
            self._key = ec.generate_private_key(ec.SECP256R1())
            return
        try:
            self._key = serialization.load_pem_private_key(pem, None)
        except (ValueError, TypeError):  # the latter of one with a password
            raise WireError(f"{path} is damaged: delete it and member.json, and join again with the token") from None
        if not isinstance(getattr(self._key, "curve", None), ec.SECP256R1):
            raise WireError(f"{path} is not a key of the curve P-256")

    @property
    def pem(self) -> bytes:
        """The private key; it stays on the device."""
        _, serialization = _elliptic()
        kind, bare = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return self._key.private_bytes(serialization.Encoding.PEM, kind, bare)

    @property
    def public(self) -> str:
        """The public key in base64, for `join`."""
        _, serialization = _elliptic()
        point = serialization.PublicFormat.UncompressedPoint
        return to_text(self._key.public_key().public_bytes(serialization.Encoding.X962, point))

    def stamp(self, client: int, method: str, target: str, body: bytes, time: float) -> Stamp:
        """Signs a request.

        Args:
            client: the client's id.
            method, target: such as 'PUT' and '/v1/update/3', with the query.
            body: the body; empty if there is none.
            time: seconds since 1970.
        """
        when, nonce = str(int(time)), to_text(secrets.token_bytes(_NONCE_BYTES))
        text = text_to_sign(method, target, when, nonce, hashlib.sha256(body).hexdigest())
        return Stamp(str(client), when, nonce, self.sign(text))

    def sign(self, text: bytes) -> str:
        """The signature of a text, as headers and JSON have it."""
        from cryptography.hazmat.primitives.asymmetric import utils
        from cryptography.hazmat.primitives.hashes import SHA256

        ec, _ = _elliptic()
        r, s = utils.decode_dss_signature(self._key.sign(text, ec.ECDSA(SHA256())))
        return to_text(r.to_bytes(32, "big") + s.to_bytes(32, "big"))


class PublicKey:
    """A device's public key, with which the server checks signatures.

    Args:
        text: the key in base64, from `Signer.public`.

    Raises:
        WireError: it is no point of the curve.
    """

    def __init__(self, text: str):
        ec, _ = _elliptic()
        self.bytes = to_bytes(text, "the public key", _KEY_BYTES)
        try:
            self._key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), self.bytes)
        except ValueError:
            raise WireError("the public key is no point of the curve P-256") from None

    def check(self, stamp: Stamp, method: str, target: str, body_sha256: str) -> None:
        """Checks a signature.

        Raises:
            WireError: the request was not signed with this key.
        """
        to_bytes(stamp.nonce, NONCE, _NONCE_BYTES)
        self.verify(text_to_sign(method, target, stamp.time, stamp.nonce, body_sha256), stamp.signature)

    def verify(self, text: bytes, signature: str) -> None:
        """Checks the signature of a text.

        Raises:
            WireError: it was not signed with this key.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import utils
        from cryptography.hazmat.primitives.hashes import SHA256

        ec, _ = _elliptic()
        both = to_bytes(signature, SIGNATURE, _SIGNATURE_BYTES)
        r, s = int.from_bytes(both[:32], "big"), int.from_bytes(both[32:], "big")
        try:
            self._key.verify(utils.encode_dss_signature(r, s), text, ec.ECDSA(SHA256()))
        except InvalidSignature:
            raise WireError("the signature is not this client's, or what it signed was changed on its way") from None


def pack(about: dict, content: bytes) -> bytes:
    """A body of JSON and bytes, such as what a device says of its update, and the payload."""
    told = json.dumps(about).encode()
    return struct.pack("<I", len(told)) + told + content


_MOST_JSON = 16 * 1024  # bytes


def unpack(body: bytes) -> tuple[dict, bytes]:
    """(the JSON, the bytes) of a body.

    Raises:
        WireError: the body is cut off, or its first part is no JSON object, or one of more than 16 kB.
    """
    size = struct.unpack_from("<I", body)[0] if len(body) >= 4 else 0
    if not 0 < size <= len(body) - 4:
        raise WireError("the body begins with the length of its JSON, and is shorter than that")
    if size > _MOST_JSON:  # read, it takes many times its size in memory
        raise WireError(f"the JSON of a body has at most {_MOST_JSON} bytes, and this one {size}")
    return read_json(body[4 : 4 + size]), body[4 + size :]


def to_half(theta: bytes) -> bytes:
    """A theta of float32 numbers in half precision (float16), little-endian.

    Raises:
        WireError: a number is too large for it (65504 at most).
    """
    numbers = np.frombuffer(theta, "<f4")
    if np.abs(numbers).max(initial=0.0) > np.finfo(np.float16).max:
        raise WireError("this theta has numbers that are too large for half precision: ask for it without half")
    return numbers.astype("<f2").tobytes()


def read_json(content: bytes) -> dict:
    """A JSON object.

    Raises:
        WireError: the bytes are something else.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise WireError("the body is not JSON") from None
    if not isinstance(found, dict):
        raise WireError("the body must be a JSON object")
    return found


def entry(message: dict, name: str, kind: type, low: float = -math.inf, high: float = math.inf) -> Any:
    """An entry of a message, checked.

    Args:
        message: the JSON object.
        name: of the entry.
        kind: int, float (an integer does, too), str, bool or list.
        low, high: of a number; or of the length of a text or list.

    Raises:
        WireError: it is missing, or of another kind or size.
    """
    value: Any = message.get(name)
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    size = value if isinstance(value, (int, float)) else len(value) if isinstance(value, (str, list)) else math.nan
    if kind is float and isinstance(size, int) and abs(size) > _LARGEST:  # float() could not hold it
        fits = False
    if not fits or not low <= size <= high:  # also NaN
        shown = repr(value) if len(repr(value)) < 60 else "something longer"
        raise WireError(f"{name} must be {kind.__name__} from {low:g} to {high:g}, found {shown}")
    return float(value) if kind is float else value


def entry_or(message: dict, name: str, kind: type, low: float, other: Any) -> Any:
    """A number of a message that is at least `low`; `other` where it is missing or no such number."""
    try:
        return entry(message, name, kind, low, 2**31 - 1 if kind is int else sys.float_info.max)
    except WireError:
        return other


def _elliptic():
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise WireError(_NO_CRYPTOGRAPHY) from error
    return ec, serialization
