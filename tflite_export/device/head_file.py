"""Writes and reads a client's head as a file, with a checksum and the hash of its backbone. Needs NumPy only.

    8 bytes    b"TFPFLH01"
    uint32     M
    uint32     K
    32 bytes   sha256 of the theta (float32, flat) that the head was fitted with
    uint32     crc32 of the numbers
    float32    kernel [M, K], row-major, then bias [K]

All numbers are little-endian. A new head replaces the old file in one step: one of the two is always there, and whole.
"""

import hashlib
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tflite_export.device.errors import InvalidInput

_MAGIC = b"TFPFLH01"
_HEADER = struct.Struct("<8sII32sI")


class HeadError(InvalidInput):
    """A head cannot be used: the file is not a head, is damaged, or the head has another shape or is not finite."""


class SavedHead(NamedTuple):
    """A head, and the hash of the theta that it was fitted with."""

    kernel: np.ndarray  # float32 [M, K]
    bias: np.ndarray  # float32 [K]
    theta_sha256: str


def theta_sha256(theta: np.ndarray) -> str:
    """The sha256 of theta's little-endian float32 numbers, in hexadecimal: it identifies a backbone."""
    return hashlib.sha256(np.ascontiguousarray(theta, "<f4").tobytes()).hexdigest()


def head_bytes(head: SavedHead) -> bytes:
    """The bytes of the file that holds a head."""
    m, k = head.kernel.shape
    numbers = np.ascontiguousarray(head.kernel, "<f4").tobytes() + np.ascontiguousarray(head.bias, "<f4").tobytes()
    return _HEADER.pack(_MAGIC, m, k, bytes.fromhex(head.theta_sha256), zlib.crc32(numbers)) + numbers


def save_head(path: str | os.PathLike, head: SavedHead) -> None:
    """Writes a head to a file. If the process is killed meanwhile, the old or the new head is there, whole."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with open(temporary, "wb") as file:
            file.write(head_bytes(head))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)  # the new name must be on disk, too
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_head(path: str | os.PathLike, num_features: int, num_classes: int) -> SavedHead:
    """Reads a head from a file.

    Raises:
        HeadError: the file is not a head, is damaged, or holds a head of another shape.
    """
    content = Path(path).read_bytes()
    if len(content) < _HEADER.size or content[:8] != _MAGIC:
        raise HeadError(f"{path} is not a head that tfpfl saved")
    _, m, k, theta, crc = _HEADER.unpack_from(content)
    numbers = content[_HEADER.size :]
    if len(numbers) != 4 * (m * k + k) or zlib.crc32(numbers) != crc:
        raise HeadError(f"{path} is damaged or cut off")
    if (m, k) != (num_features, num_classes):
        raise HeadError(
            f"{path} is a head for {k} classes on {m} features; this client has {num_classes} classes on "
            f"{num_features} features"
        )
    values = np.frombuffer(numbers, "<f4").astype(np.float32)
    return SavedHead(values[: m * k].reshape(m, k), values[m * k :], theta.hex())
