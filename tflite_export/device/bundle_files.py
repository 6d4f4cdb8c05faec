"""Opens the files of a bundle that may come from a stranger. Needs NumPy only.

A manifest can name any file and any size. So a name must be that of a file in the bundle's own folder, links and
devices are not opened, and no more is read or unpacked than the sizes on disk allow. Every error is a `BundleError` of
one line, raised before memory is taken.
"""

import hashlib
import json
import os
import stat
import zipfile
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tflite_export.device.errors import BundleError

MANIFEST_BYTES = 16_000_000  # a manifest has some 10 kB, and some 30 bytes more for each class


def open_file(folder: Path, name: str) -> BinaryIO:
    """Opens a file of the bundle for reading.

    Raises:
        FileNotFoundError: there is no such file.
        BundleError: the name leads out of the folder, or the file is a link, a device or a folder.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or any(c in "/\\:\0\n\r" for c in name):
        raise BundleError(f"{folder}: its manifest names the file {name!r}; a file of a bundle lies in its own folder")
    path = folder / name
    if path.is_symlink():
        raise BundleError(f"{path} is a link; a bundle holds its files themselves. Copy the file in its place")
    # Without O_NONBLOCK, opening a named pipe would wait for ever; O_NOFOLLOW: it became a link just now.
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise BundleError(f"{path} is no ordinary file, but a folder, a pipe or a device")
    return os.fdopen(number, "rb")


def read_json(folder: Path, name: str) -> Any:
    """Reads the JSON of the manifest.

    Raises:
        FileNotFoundError: there is no such file.
        BundleError: as `open_file`; or the file is too large for a manifest.
        ValueError: it is not JSON in UTF-8.
    """
    with open_file(folder, name) as file:
        content = file.read(MANIFEST_BYTES + 1)
    if len(content) > MANIFEST_BYTES:
        raise BundleError(f"{folder / name} is larger than {MANIFEST_BYTES:,} bytes: this is no manifest of a bundle")
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise BundleError(f"{folder} is not a bundle: its {name} cannot be read, it is nested too deeply") from error


def check_file(folder: Path, name: str, expected: Any) -> None:
    """Compares a file with its entry in the manifest: {'bytes', 'sha256', ...}.

    Raises:
        BundleError: the file is missing, or is not the one that the manifest describes; or as `open_file`.
    """
    try:
        with open_file(folder, name) as file:
            size = os.fstat(file.fileno()).st_size
            # The size first: a file of other size, however large, is not read.
            same = size == expected["bytes"] and _sha256(file) == expected["sha256"]
    except FileNotFoundError:
        raise BundleError(f"{folder} is incomplete: {name} is missing") from None
    except (KeyError, TypeError) as error:
        raise BundleError(f"{folder}: its manifest does not tell size and sha256 of {name}") from error
    if not same:
        what = f"it has {size:,} bytes" if size != expected["bytes"] else "its sha256 is not the one in the manifest"
        told = f", and not the {expected['bytes']!r} of the manifest" if size != expected["bytes"] else ""
        raise BundleError(f"{folder / name} is damaged: {what}{told}")


def _sha256(file: BinaryIO) -> str:
    found = hashlib.sha256()
    while block := file.read(1 << 20):
        found.update(block)
    return found.hexdigest()


def stored_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads an .npz file that `numpy.savez` wrote: {name: array}.

    Its arrays are stored as they are. A compressed one could unpack to any size, and is refused; so is a header that
    promises more numbers than follow it.

    Raises:
        BundleError: the file is not of this kind.
    """
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > os.path.getsize(path):
                raise BundleError("its arrays would be larger than the file")
            for entry in entries:
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                    raise BundleError(f"{entry.filename!r} is compressed; arrays of a bundle are not")
                with archive.open(entry) as member:
                    found[entry.filename.removesuffix(".npy")] = _array(member, entry)
    except Exception as error:  # the readers of archives and of NumPy's headers each raise errors of their own
        raise BundleError(f"{path} cannot be read: {' '.join(str(error).split()) or type(error).__name__}") from error
    return found


def _array(member, entry: zipfile.ZipInfo) -> np.ndarray:
    version = np.lib.format.read_magic(member)
    if version != (1, 0):
        raise BundleError(f"{entry.filename!r} is an array of format {version}, not (1, 0)")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
    rest = entry.file_size - member.tell()
    if dtype.hasobject or dtype.itemsize * prod(shape) != rest or any(n < 0 for n in shape):
        raise BundleError(f"{entry.filename!r} promises {dtype} {list(shape)}, but {rest:,} bytes follow")
    return np.frombuffer(member.read(), dtype).reshape(shape, order="F" if fortran else "C")
