"""Writes a file in one step, and says what is in one. This module needs nothing but Python."""

import errno
import hashlib
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CANNOT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


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
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            if old is not None and old != stat.S_IMODE(os.fstat(file.fileno()).st_mode):
                os.fchmod(file.fileno(), old)  # the umask took some of it
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    try:
        sync_folder(path.parent)
    except OSError as error:
        why = f"{error.strerror}: the file is the new one, and after a loss of power it may be the old one again"
        raise NotOnDisk(error.errno, why, str(path)) from error


def remove_leftovers(path: str | os.PathLike) -> None:
    """Deletes the files in which killed processes were writing the new content of a file; running ones keep theirs.

    Whether a process runs is known on POSIX systems; elsewhere nothing is deleted.
    """
    path = Path(path)
    name = re.compile(rf"{re.escape(path.name)}\.([1-9][0-9]*)\.[0-9]+\.new")  # as `write_whole` and the client in C
    with suppress(OSError):  # a folder that cannot be listed, or only be read: the file itself can be used all the same
        for file in path.parent.iterdir() if os.name == "posix" else ():
            if (found := name.fullmatch(file.name)) and not _runs(int(found[1])):
                file.unlink()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it is another user's, or no system has such a number
        pass
    return True


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
