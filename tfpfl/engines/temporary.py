"""Temporary folders of this process, deleted when it ends; after a kill -9, by the next process that makes one.

A folder has a file `owner`, which its process has locked. The kernel unlocks it when the process ends, however it ends.
So a folder whose `owner` can be locked belongs to nobody any more. Unlike a process id, a lock is never taken over by
another process.
"""

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_OWNER = "owner"


class TemporaryFolder:
    """A new folder that only this user can enter, deleted when this process ends.

    Also deletes what processes of this user that were killed have left behind under the same prefix.

    Args:
        prefix: how the folder's name begins.
        parent: where it is made; default: the system's folder for temporary files (TMPDIR).
    """

    def __init__(self, prefix: str, parent: str | os.PathLike | None = None):
        parent = Path(parent or tempfile.gettempdir())
        delete_abandoned(prefix, parent)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # mode 0700
        self._lock: int | None = os.open(self.path / f"{_OWNER}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.path / f"{_OWNER}.new", self.path / _OWNER)  # whoever sees `owner` sees it locked
        _folders.append(self)
        atexit.register(self.delete)

    def delete(self) -> None:
        """Deletes the folder with all its files; does nothing if it was deleted or kept before."""
        if self._lock is not None:
            _empty(self.path)
            for _ in range(20):  # a process that is ending may still write into it
                if not self.path.exists():
                    break
                time.sleep(0.1)
                _empty(self.path)
            self._unlock()

    def keep(self) -> None:
        """Makes the folder stay, with all its files, until somebody deletes it by hand."""
        if self._lock is not None:
            (self.path / _OWNER).unlink(missing_ok=True)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            _folders.remove(self)
        atexit.unregister(self.delete)


_folders: list[TemporaryFolder] = []


def delete_all() -> None:
    """Deletes all temporary folders of this process, for a process that ends without the usual end of Python."""
    for folder in list(_folders):
        folder.delete()


def check_own(folder: Path) -> None:
    """Checks a folder of a known name in a place where all users write: another one may have made it beforehand.

    Raises:
        PermissionError: it is a link, belongs to another user, or others may write into it.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{folder} is not a folder that only you can write: delete it, or set TMPDIR to a folder of yours"
        )


def delete_abandoned(prefix: str, parent: Path) -> None:
    """Deletes the folders of this user in `parent` whose name begins with `prefix` and whose process has ended."""
    for path in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # it belongs to a process that lives, or was deleted meanwhile
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue  # another user may have made it, or a link, to have something else deleted
            lock = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _empty(path)
            finally:
                os.close(lock)


def _empty(folder: Path) -> None:
    """Deletes a folder, its file `owner` last: if something cannot be deleted now, a later process will try again."""
    with suppress(OSError):
        for entry in list(folder.iterdir()):
            if entry.name == _OWNER:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        if [entry.name for entry in folder.iterdir()] == [_OWNER]:
            (folder / _OWNER).unlink()
            folder.rmdir()
