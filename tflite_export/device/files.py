"""Writes a file in one step, and says what is in one. This module needs nothing but Python."""

import errno
import hashlib
import os
import re
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_CANNOT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_MOST_ATTEMPTS = 100  # to make a file that nobody deletes at once


class NotOnDisk(OSError):
    """A file was replaced, and its folder could not be written to the disk: a loss of power may undo it."""


def describe(path: Path) -> dict:
    """Size and hash of a file, as manifests and sites list them: {'bytes', 'sha256'}."""
    return describe_content(path.read_bytes())


def describe_content(content: bytes) -> dict:
    """The same of a file's content."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_whole(path: str | os.PathLike, content: bytes, mode: int | None = None) -> None:
    """Writes a file. If the process is killed meanwhile, or the power is gone, the old or the new one is there, whole.

    Several threads or processes may write the same file; it is then one of theirs, whole.

    Args:
        path: the file; its folder exists.
        content: what it shall hold.
        mode: its permissions; None: those of the old file, and 0o644 if there is none.

    Raises:
        NotOnDisk: the new one is there, and after a loss of power it may be the old one again.
        OSError: the old one is there.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.new")
    old = _mode_of(path) if mode is None else None
    if mode is None:
        mode = 0o644 if old is None else old
    try:
        with open(_held(temporary, mode), "wb") as file:
            if old is not None and old != stat.S_IMODE(os.fstat(file.fileno()).st_mode):
                os.fchmod(file.fileno(), old)  # the umask took some of it
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            if sys.platform != "win32":  # while it is held: else `remove_leftovers` might delete it just before
                os.replace(temporary, path)
        if sys.platform == "win32":
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    try:
        sync_folder(path.parent)
    except OSError as error:
        why = f"{error.strerror}: the file is the new one, and after a loss of power it may be the old one again"
        raise NotOnDisk(error.errno, why, str(path)) from error


def remove_leftovers(path: str | os.PathLike) -> None:
    """Deletes the files in which killed processes were writing the new content of a file; those of others stay.

    A file is held by a lock as long as somebody writes it. (The number of a process says nothing: after a container has
    started again its process has the old number.) Where there are no such locks, nothing is deleted.
    """
    path = Path(path)
    name = re.compile(rf"{re.escape(path.name)}\.[1-9][0-9]*\.[0-9]+\.new")  # as `write_whole` and the client in C
    with suppress(OSError):  # a folder that cannot be listed, or only be read: the file itself can be used all the same
        for file in path.parent.iterdir():
            if name.fullmatch(file.name):
                _delete_if_nobody_writes(file)


def _held(path: Path, mode: int) -> int:
    """Opens a new file and locks it, as long as it is open."""
    for attempt in range(_MOST_ATTEMPTS):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        if sys.platform != "win32":
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, path) and attempt + 1 < _MOST_ATTEMPTS:  # deleted before it was locked
                os.close(file)
                continue
        break
    return file


def _delete_if_nobody_writes(path: Path) -> None:
    if sys.platform == "win32":
        return
    with suppress(OSError):  # it is locked, a folder, a link, or gone
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):  # and not renamed by now
                path.unlink()
        finally:
            os.close(file)


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _mode_of(path: Path) -> int | None:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:  # there is no such file
        return None


@contextmanager
def written(path: str | os.PathLike, content: bytes) -> Iterator[None]:
    """Writes a file as `write_whole` does. The block makes the content current in memory: exactly if the file is it.

    Raises:
        NotOnDisk: after the block.
    """
    failed = None
    try:
        write_whole(path, content)
    except NotOnDisk as error:
        failed = error
    yield
    if failed is not None:
        raise failed


def sync_folder(folder: str | os.PathLike) -> None:
    """Writes to the disk which names a folder has: new ones are there, and deleted ones do not come back.

    Some file systems have no way to do this, and do it in their own time.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    finally:
        os.close(handle)
