"""Encodes the gradient of theta, which a device sends in a round: as float32, or as int8 with a scale for each block.

    4 bytes   b"TFPG"
    uint32    kind: 0 float32, 1 int8
    uint32    P
    uint32    crc32 of what follows
    kind 0:   float32[P]
    kind 1:   float32[ceil(P / 1024)] scales, int8[P]; number j is int8[j] * scale[j // 1024]

All numbers are little-endian. Needs NumPy only.
"""

import struct
import zlib

import numpy as np

from tflite_export.device.errors import InvalidInput

BLOCK = 1024
KINDS = ("float32", "int8")
_MAGIC = b"TFPG"
_HEADER = struct.Struct("<4sIII")


class PayloadError(InvalidInput):
    """The bytes are not a gradient that we encoded, or the gradient cannot be sent."""


def encode(gradient: np.ndarray, kind: str = "float32") -> bytes:
    """Encodes a gradient, float32 [P], as bytes.

    Args:
        gradient: the gradient.
        kind: 'float32', or 'int8', which needs about a quarter of the bytes and is less exact.

    Raises:
        PayloadError: the gradient is not a vector or not finite, or the kind is unknown.
    """
    if kind not in KINDS:
        raise PayloadError(f"unknown payload {kind!r}: one of {', '.join(KINDS)}")
    gradient = np.ascontiguousarray(gradient, "<f4")
    if gradient.ndim != 1 or not np.isfinite(gradient).all():
        raise PayloadError("a gradient to be sent must be a finite vector")
    if kind == "float32":
        body = gradient.tobytes()
    else:
        blocks = np.pad(gradient, (0, -len(gradient) % BLOCK)).reshape(-1, BLOCK)
        scales = (np.abs(blocks).max(1) / 127).astype("<f4")
        # A block whose scale is 0, or so small that it was rounded to 0, is sent as zeros.
        quantized = np.rint(np.divide(blocks, scales[:, None], where=scales[:, None] > 0, out=np.zeros_like(blocks)))
        body = scales.tobytes() + np.clip(quantized, -127, 127).astype(np.int8).reshape(-1)[: len(gradient)].tobytes()
    return _HEADER.pack(_MAGIC, KINDS.index(kind), len(gradient), zlib.crc32(body)) + body


def decode(payload: bytes, size: int | None = None) -> np.ndarray:
    """Decodes a gradient: float32 [P].

    Args:
        payload: the bytes from `encode`.
        size: the expected P; None: any.

    Raises:
        PayloadError: the bytes are not a gradient, were cut off or changed, or P is not `size`.
    """
    if len(payload) < _HEADER.size or payload[:4] != _MAGIC:
        raise PayloadError("these bytes are not a gradient of tfpfl")
    _, kind, length, crc = _HEADER.unpack_from(payload)
    body = payload[_HEADER.size :]
    blocks = -(-length // BLOCK)
    if kind >= len(KINDS) or len(body) != num_bytes(length, KINDS[kind]) - _HEADER.size or zlib.crc32(body) != crc:
        raise PayloadError("the gradient was cut off or changed on its way")
    if size is not None and length != size:
        raise PayloadError(f"a gradient of {length} numbers came, but theta has {size}")
    if KINDS[kind] == "float32":
        return np.frombuffer(body, "<f4").astype(np.float32)
    scales = np.frombuffer(body, "<f4", blocks)
    values = np.frombuffer(body, np.int8, offset=4 * blocks).astype(np.float32)
    return values * np.repeat(scales, BLOCK)[:length].astype(np.float32)


def num_bytes(length: int, kind: str = "float32") -> int:
    """Number of bytes that encode a gradient of `length` numbers."""
    return _HEADER.size + (4 * length if kind == "float32" else length + 4 * -(-length // BLOCK))
