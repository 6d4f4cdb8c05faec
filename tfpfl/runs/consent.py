"""Whose network files may run code: those that this user allowed on this machine, remembered by their sha256.

The memory is a folder in the cache and not in a run folder: somebody who sends a run folder could write it there. It
belongs to the user alone, because several users can share a cache.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

from tfpfl.checks import InvalidArgument
from tfpfl.runs.config import NETWORK, file_hash
from tfpfl.runs.federations import cache_folder


def allow_code(path: str | os.PathLike) -> None:
    """Lets a network file run code of its own whenever it is loaded, as with the option --allow-code.

    The code can do all that you can do on this machine. A file that is changed afterwards must be allowed again.

    Args:
        path: the file FILE.keras, or a run folder that has one.

    Raises:
        InvalidArgument: there is no such file, or others can write where this is remembered.
    """
    path = Path(path)
    if path.is_dir() and not (path / NETWORK).is_file():
        raise InvalidArgument(f"{path} has no {NETWORK}, so that there is no code to allow: leave --allow-code out")
    folder = _folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_mine(folder):
        raise InvalidArgument(f"{folder} belongs to another user, or others can write it: remove it, or run chmod 700")
    (folder / file_hash(path / NETWORK if path.is_dir() else path)).touch(mode=0o600)


def is_allowed(sha256: str) -> bool:
    """Whether `allow_code` was called for a file of this content, by this user on this machine."""
    folder = _folder()
    return _is_mine(folder) and _is_mine(folder / sha256)


def _folder() -> Path:
    return cache_folder() / f"allowed_code_of_user_{os.getuid()}"


def _is_mine(path: Path) -> bool:
    """Whether there is such a file or folder of this user, no link, which nobody else can write."""
    try:
        found = path.lstat()
    except OSError:
        return False
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.getuid() and not others_write and not stat.S_ISLNK(found.st_mode)
