"""Writes and reads a client's head as a file, with a checksum and the hash of its backbone. Needs NumPy only.

    8 bytes    b"TFPFLH01"
    uint32     M
    uint32     K
    32 bytes   sha256 of the theta (float32, flat) that the head was fitted with
    uint32     crc32 of the numbers
    float32    kernel [M, K], row-major, then bias [K]

A head whose classes are not the bundle's, because one was added, left out or merged on the device, has b"TFPFLH02", and
after the numbers the names of its classes, which the checksum counts too:

    uint32     the number of bytes that follow
    JSON       a list of K texts, UTF-8

b"TFPFLH03" is the same for a head whose classes are the bundle's: the names are those that they had when it was saved.
A client does not take it for a bundle with others, of which its columns would get the names. Clients save heads so.
Those in a bundle, and what older clients saved, have b"TFPFLH01", and nobody knows their names.

All numbers are little-endian. A new head replaces the old file in one step: one of the two is always there, and whole.
"""

import hashlib
import json
import os
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tflite_export.device.errors import InvalidInput, shown
from tflite_export.device.files import remove_leftovers, write_whole, written

_MAGIC, _MAGIC_LABELS, _MAGIC_BUNDLE = b"TFPFLH01", b"TFPFLH02", b"TFPFLH03"
_HEADER = struct.Struct("<8sII32sI")


class HeadError(InvalidInput):
    """A head cannot be used: the file is not a head, is damaged, or the head has another shape or is not finite."""


class SavedHead(NamedTuple):
    """A head, and the hash of the theta that it was fitted with."""

    kernel: np.ndarray  # float32 [M, K]
    bias: np.ndarray  # float32 [K]
    theta_sha256: str
    labels: tuple[str, ...] | None = None  # the names of the K classes, if they are not the bundle's


def theta_sha256(theta: np.ndarray) -> str:
    """The sha256 of theta's little-endian float32 numbers, in hexadecimal: it identifies a backbone."""
    return hashlib.sha256(np.ascontiguousarray(theta, "<f4").tobytes()).hexdigest()


def head_bytes(head: SavedHead, bundle_names: Sequence[str] | None = None) -> bytes:
    """The bytes of the file that holds a head.

    Args:
        head: the head.
        bundle_names: the names of the bundle's classes, which go with a head that has none of its own.

    Raises:
        HeadError: as `check_names`: no client could read the file.
    """
    check_names(head)
    m, k = head.kernel.shape
    numbers = np.ascontiguousarray(head.kernel, "<f4").tobytes() + np.ascontiguousarray(head.bias, "<f4").tobytes()
    magic = _MAGIC
    if head.labels is not None:
        names = json.dumps(head.labels, ensure_ascii=False).encode()
        magic, numbers = _MAGIC_LABELS, numbers + struct.pack("<I", len(names)) + names
    elif bundle_names is not None:
        names = json.dumps(list(bundle_names)).encode()
        magic, numbers = _MAGIC_BUNDLE, numbers + struct.pack("<I", len(names)) + names
    return _HEADER.pack(magic, m, k, bytes.fromhex(head.theta_sha256), zlib.crc32(numbers)) + numbers


def is_unicode(text: str) -> bool:
    """Whether a file can hold a text: it has no half of a surrogate pair."""
    return text.encode("utf-8", "ignore").decode("utf-8") == text


def check_names(head: SavedHead) -> None:
    """Checks that the names of a head can be kept in a file and told apart.

    Raises:
        HeadError: it is no `SavedHead`; a label is no text that UTF-8 can hold, or is there twice; there is not one for
            each class; or theta_sha256 is no hash in hexadecimal.
    """
    if not isinstance(head, SavedHead):
        raise HeadError(f"the head must be a SavedHead(kernel, bias, theta_sha256), found a {type(head).__name__}")
    if not (isinstance(head.theta_sha256, str) and re.fullmatch("[0-9a-f]{64}", head.theta_sha256)):
        raise HeadError(f"theta_sha256 must be 64 hexadecimal digits, found {head.theta_sha256!r}")
    if head.labels is None:
        return
    shape = np.shape(head.kernel)
    if problem := _wrong_names(head.labels, shape[1] if len(shape) == 2 else np.size(head.bias)):
        raise HeadError(problem)
    for name in head.labels:  # a file may have half of a surrogate pair, which JSON can name; none is written into one
        if not is_unicode(name):
            raise HeadError(f"the name of a class must be a text in Unicode, found {name!r}")


def _wrong_names(names: Any, k: int) -> str | None:
    """What is wrong with the names of a head's k classes; None: nothing."""
    if not (isinstance(names, (list, tuple)) and len(names) == k > 0):
        return f"the head has no names for its {k} classes"
    for name in names:
        if not (isinstance(name, str) and name):
            return f"the name of a class must be a text, found {name!r}"
    if (twice := repeated(names)) is not None:
        return f"the names of classes must differ, and {twice!r} is there twice"
    return None


def repeated(names: Sequence[str]) -> str | None:
    """The first of these names that is there more than once; None: all differ."""
    return next((name for name, number in Counter(names).items() if number > 1), None)


def save_head(path: str | os.PathLike, head: SavedHead) -> None:
    """Writes a head to a file. If the process is killed meanwhile, the old or the new head is there, whole."""
    write_whole(path, head_bytes(head))


def load_head(
    path: str | os.PathLike, num_features: int, num_classes: int, bundle_names: Sequence[str] | None = None
) -> SavedHead:
    """Reads a head from a file.

    Args:
        path: the file.
        num_features: M.
        num_classes: the K of the bundle; a head with names of its own may have any.
        bundle_names: the names of the bundle's classes, with which those in the file are compared; None: they are not.

    Raises:
        HeadError: the file is not a head, is damaged, or holds a head of another shape, NaN or infinity, or one of a
            bundle whose classes have other names.
    """
    return head_of(Path(path).read_bytes(), path, num_features, num_classes, bundle_names)


class KeptHead:
    """The file that keeps a client's head between starts; without a path the head is in memory only.

    Several clients may have one file. Who saves has read what is in it, or has written it: else the head of another
    would be lost.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._known: bytes | None = None  # what this client has read or written last; None: there was no file

    def load(self, first: Path, num_features: int, num_classes: int, bundle_names: Sequence[str]) -> SavedHead:
        """The head in the file, or if there is none yet, that of the file `first`; see `load_head`.

        Heads that killed processes did not finish writing are deleted.

        Raises:
            HeadError: as `load_head`; or no file can be written at the path.
        """
        about, path = (num_features, num_classes, bundle_names), self._path
        if path is None:
            return load_head(first, *about)
        if not path.parent.is_dir():
            raise HeadError(
                f"{path} cannot keep the head: there is no folder {path.parent}. Make it first, or give another state"
            )
        if path.is_dir():
            raise HeadError(f"{path} cannot keep the head: it is a folder. Give the path of a file in it as the state")
        remove_leftovers(path)
        self._known = _content_of(path)
        return load_head(first, *about) if self._known is None else head_of(self._known, path, *about)

    @contextmanager
    def saving(self, head: SavedHead, bundle_names: Sequence[str]) -> Iterator[None]:
        """Saves a head, where there is a path; the block makes it current in memory, see `files.written`.

        Raises:
            HeadError: as `head_bytes`; or another client has changed the file. (If two save at the very same time, both
                may take it for unchanged.)
        """
        if self._path is None:
            yield
            return
        content, found = head_bytes(head, bundle_names), _content_of(self._path)
        if found is not None and found != self._known:
            raise HeadError(
                f"{self._path} was changed by another client since this one read or saved it: nothing was saved, so "
                "that its head is not lost. Open the client again, and it goes on from there"
            )
        with written(self._path, content):
            self._known = content
            yield


def _content_of(path: Path) -> bytes | None:
    """The bytes of a file; None if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def head_of(
    content: bytes,
    path: str | os.PathLike,
    num_features: int,
    num_classes: int,
    bundle_names: Sequence[str] | None = None,
) -> SavedHead:
    """The head that the bytes of a file are; for the arguments see `load_head`. `path` is for messages."""
    if len(content) < _HEADER.size or content[:8] not in (_MAGIC, _MAGIC_LABELS, _MAGIC_BUNDLE):
        raise HeadError(f"{path} is not a head that tfpfl saved")
    magic, m, k, theta, crc = _HEADER.unpack_from(content)
    body, size = content[_HEADER.size :], 4 * (m * k + k)
    if zlib.crc32(body) != crc or (len(body) != size if magic == _MAGIC else len(body) < size + 4):
        raise HeadError(f"{path} is damaged or cut off")
    labels = None if magic == _MAGIC else _labels(path, body[size:], k)
    if m != num_features or (magic != _MAGIC_LABELS and k != num_classes):
        raise HeadError(
            f"{path} is a head for {k} classes on {m} features; this client has {num_classes} classes on "
            f"{num_features} features"
        )
    values = np.frombuffer(body[:size], "<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise HeadError(f"{path} holds NaN or infinity: the head cannot be used")
    if magic == _MAGIC_BUNDLE:
        if labels is not None and bundle_names is not None:
            _check_same(path, labels, bundle_names)
        labels = None
    return SavedHead(values[: m * k].reshape(m, k), values[m * k :], theta.hex(), labels)


def _check_same(path: str | os.PathLike, names: Sequence[str], bundle_names: Sequence[str]) -> None:
    for i, (name, other) in enumerate(zip(names, bundle_names, strict=True)):
        if name != other:
            raise HeadError(
                f"{path} is the head of a bundle whose output {i} is {shown(name)}; in this one it is {shown(other)}, "
                "and its predictions would have wrong names. Open it with that bundle, or delete it to begin with this "
                "one's"
            )


def _labels(path: str | os.PathLike, content: bytes, k: int) -> tuple[str, ...]:
    """The names of K classes, from what follows the numbers."""
    (size,) = struct.unpack_from("<I", content)
    names: Any = None
    try:
        names = json.loads(content[4:].decode("utf-8")) if len(content) == 4 + size else None
    except (ValueError, RecursionError):
        pass  # told below
    if _wrong_names(names, k) is not None:
        raise HeadError(f"{path} is damaged: it has no names for its {k} classes")
    return tuple(names)
