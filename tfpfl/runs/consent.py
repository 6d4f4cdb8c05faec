"""Which files may run code: networks and methods that this user allowed on this machine, remembered by their sha256.

The memory is a folder in the cache and not in a run folder: somebody who sends a run folder could write it there. It
belongs to the user alone, because several users can share a cache.
"""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from tfpfl.checks import InvalidArgument, one_line
from tfpfl.runs.config import METHOD, METRIC, NETWORK, NETWORK_CODE, RunError, file_hash, read_config
from tfpfl.runs.federations import cache_folder


def allow_code(path: str | os.PathLike) -> None:
    """Lets a network file, or the code in a run folder, run whenever it is loaded, as with the option --allow-code.

    The code can do all that you can do on this machine. A file that is changed afterwards must be allowed again.

    Args:
        path: the file FILE.keras; or a run folder that has one, or whose method or metric is the user's own.

    Raises:
        InvalidArgument: there is no such file, or others can write where this is remembered.
    """
    path = Path(path)
    if not path.is_dir():
        remember(file_hash(path))
        return
    owns: list[tuple[dict, Path]] = []  # what is kept of a method or a metric, and the copy in the folder
    with suppress(RunError):  # whoever opens the folder is told
        config = read_config(path)
        owns += [(config.own_method, path / METHOD)] if config.own_method else []
        owns += [(own, path / METRIC.format(name=n)) for n, own in config.own_metrics.items() if own["sha256"]]
    networks = [path / name for name in (NETWORK, NETWORK_CODE) if (path / name).is_file()]
    if not owns and not networks:
        raise InvalidArgument(
            f"{path} has no method or metric of its own, and it has no {NETWORK}, so that there is no code to allow: "
            "leave --allow-code out"
        )
    for network in networks:
        remember(file_hash(network))
    for own, copy in owns:
        is_file = own["kind"] == "file" and copy.is_file()
        sha256 = file_hash(copy) if is_file else own["sha256"]
        remember(sha256, Path(own["place"]).parent if is_file else None)


def remember(sha256: str, beside: Path | None = None) -> None:
    """Remembers that this user allows a file of this content.

    Args:
        sha256: of the content.
        beside: the folder whose modules the file may import.

    Raises:
        InvalidArgument: others can write where this is remembered, or it is no sha256.
    """
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise InvalidArgument(f"a sha256 has 64 hexadecimal digits, found {one_line(sha256, 80)!r}")
    folder = _folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_mine(folder):
        raise InvalidArgument(f"{folder} belongs to another user, or others can write it: remove it, or run chmod 700")
    (folder / sha256).touch(mode=0o600)
    if beside is not None:
        (folder / sha256).write_text(str(beside), encoding="utf-8")


def is_allowed(sha256: str) -> bool:
    """Whether `allow_code` was called for a file of this content, by this user on this machine."""
    folder = _folder()
    return _is_mine(folder) and _is_mine(folder / sha256)


def folder_of(sha256: str) -> Path | None:
    """The folder whose modules a file of this content may import; None if none is remembered.

    A run folder names it, too; but that folder may come from somebody else.
    """
    told = (_folder() / sha256).read_text(encoding="utf-8") if is_allowed(sha256) else ""
    return Path(told) if told else None


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
