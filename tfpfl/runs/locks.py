"""Locks a file, so that one process at a time writes it. The kernel unlocks it when that process ends, however it ends.

The lock is taken on `FILE.lock`, in which its owner writes its process number and the time.
"""

import errno
import fcntl
import os
import re
import stat
import time
import weakref
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from tfpfl.checks import InvalidArgument

_READ_TIMES, _READ_EVERY = 20, 0.01  # a new owner writes its number a moment after it has the lock


class InUse(InvalidArgument):
    """Another process, or this one a second time, has the lock. The message says who has had it since when."""

    is_ours = False  # whether it is this process


class Lock:
    """An exclusive lock for `path`, from the moment it is made until `release`, or until nothing refers to it.

    Attributes:
        path: the file of the lock. It stays when the lock is released; its owner may delete it before that.

    Args:
        path: the file that is protected; `path.lock` is made beside it.

    Raises:
        InUse: it is locked already.
        OSError: `path.lock` cannot be written, or is a link.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(f"{path}.lock")
        held: int | None = None
        while held is None:
            # It is emptied below, and a folder from elsewhere can hold a link to a file of the user.
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise OSError(errno.EINVAL, "it is no ordinary file", self.path)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(file)
                used = InUse(owner := _owner(self.path))
                used.is_ours = owner.startswith("by this process")
                raise used from error
            except OSError:
                os.close(file)
                raise
            if _is_at(file, self.path):
                held = file
            else:  # its last owner removed it after this process had opened it
                os.close(file)
        # in a notebook, a run that nobody closed is lost when its cell runs again; then nobody could close it
        self._finalizer = weakref.finalize(self, _close, held, os.getpid())
        self._finalizer.atexit = False  # the kernel unlocks then; a forked child may have given the number to a file
        with suppress(OSError):  # only told to others; a full disk is noticed when something is saved
            os.ftruncate(held, 0)
            os.write(held, f"{os.getpid()} {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())

    def release(self) -> None:
        """Unlocks. A second call does nothing, nor does one in a process that was forked while it was locked."""
        self._finalizer()


def _close(file: int, process: int) -> None:
    if process == os.getpid():
        with suppress(OSError):
            os.ftruncate(file, 0)
        fcntl.flock(file, fcntl.LOCK_UN)  # to close it is not enough while a forked process has it, too
    os.close(file)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _owner(path: Path) -> str:
    """Who has the lock, as text: 'by process 4711 since 2026-11-22 06:10:00'."""
    found = None
    for _ in range(_READ_TIMES):
        with suppress(OSError, UnicodeDecodeError), open(path, encoding="ascii") as file:
            found = re.fullmatch(r"(\d+) (.{19})\n", file.read()) or found
        if found and _is_alive(int(found[1])):  # otherwise it is what a killed owner has left
            break
        time.sleep(_READ_EVERY)
    if found is None:
        return "by another process"
    return f"by {'this process' if int(found[1]) == os.getpid() else 'process'} {found[1]} since {found[2]}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it belongs to another user
    return True
