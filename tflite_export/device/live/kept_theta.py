"""The theta with which a live device computed last, beside its head: together they are the client's personal model.

theta.bin, all numbers little-endian:

    8 bytes    b"TFPFLT01"
    32 bytes   sha256 of the numbers
    float32    theta, flat

It is written, whole, before the update of a visit is kept, and so before the head of this visit can become current; and
before scores are sent. A head says with which theta it was trained. If the power is gone between the two, or the update
is not counted, or scores were of a newer theta, the head is stale, and `head_is_stale` says so.
"""

import hashlib
import os
from pathlib import Path

import numpy as np

from tflite_export.device.client import CHUNK, DeviceClient
from tflite_export.device.errors import InvalidInput
from tflite_export.device.files import write_whole
from tflite_export.device.head_file import load_head
from tflite_export.device.runtime import Bundle

BUNDLE, HEAD, THETA = "bundle", "head.bin", "theta.bin"  # in a device's folder
_MAGIC = b"TFPFLT01"
_HEADER = len(_MAGIC) + 32


def keep_theta(path: Path, theta: np.ndarray) -> None:
    """Keeps theta, float32 [P], in place of an older one."""
    numbers = np.ascontiguousarray(theta, "<f4").tobytes()
    header = _MAGIC + hashlib.sha256(numbers).digest()
    if not _begins_with(path, header, _HEADER + len(numbers)):  # the same theta is not written again
        write_whole(path, header + numbers)


def kept_theta(path: Path, count: int) -> np.ndarray | None:
    """The theta of P = `count` numbers that a file keeps, float32 [P]; None: there is none, or it is damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    numbers = content[_HEADER:]
    if len(numbers) != 4 * count or content[:_HEADER] != _MAGIC + hashlib.sha256(numbers).digest():
        return None
    theta = np.frombuffer(numbers, "<f4").astype(np.float32)
    return theta if np.isfinite(theta).all() else None


def receive_kept(client: DeviceClient, path: Path) -> None:
    """Gives a client the theta that a file keeps, if there is one that fits."""
    if (theta := kept_theta(path, client.bundle.num_backbone_weights)) is not None:
        client.receive(theta)


def open_state(
    folder: str | os.PathLike, *, interpreter=None, num_threads: int = 1, chunk: int = CHUNK, trunk: str | None = None
) -> DeviceClient:
    """Opens the personal model of a live device, to predict with it: its theta and its head.

    The device may work meanwhile. What the app does to the client, such as `personalize`, stays in memory: the head in
    the folder is the device's.

    Args:
        folder: the device's folder, STATE.
        interpreter, num_threads, chunk, trunk: see `DeviceClient`.

    Raises:
        InvalidInput: the device has no bundle or no head yet, or one of them is damaged.
    """
    folder = Path(folder)
    client = DeviceClient(
        Bundle(folder / BUNDLE), interpreter=interpreter, num_threads=num_threads, chunk=chunk, trunk=trunk
    )
    if not (folder / HEAD).exists():
        raise InvalidInput(f"{folder} has no head yet: a live device gets it from its server when it starts")
    about = client.bundle.num_features, client.bundle.num_classes, client.bundle.labels
    client.start_from(load_head(folder / HEAD, *about))
    receive_kept(client, folder / THETA)
    return client


def _begins_with(path: Path, header: bytes, size: int) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(header)) == header and os.fstat(file.fileno()).st_size == size
    except FileNotFoundError:
        return False
