"""Which files may run code: networks and methods that this user allowed on this machine, remembered by their sha256.

A file may import modules that lie beside it. So the folders are remembered, too, in which the user has named a file of
this content, or allowed it.

The memory is a folder in the cache and not in a run folder: somebody who sends a run folder could write it there. It
belongs to the user alone, because several users can share a cache.
"""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from tfpfl.checks import InvalidArgument, one_line
from tfpfl.models.modules_beside import hash_of, modules_beside
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
    place = None
    with suppress(RunError):  # whoever opens the folder is told
        config = read_config(path)
        place = config.network_place
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
    copies = [(path / NETWORK_CODE, place)] if path / NETWORK_CODE in networks else []
    for own, copy in owns:
        if own["kind"] == "file" and copy.is_file():
            copies.append((copy, own["place"]))
        else:
            remember(own["sha256"])
    for copy, place in copies:  # its modules lie beside the original, or were put beside the copy
        for folder in (path.resolve(), *([Path(place).parent] if place else [])):
            remember(file_hash(copy), folder)


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
    if beside is not None and folders_of(sha256)[:1] != [beside]:
        with open(folder / sha256, "ab") as file:
            file.write(b"\0" + os.fsencode(beside))  # before there were several, the file had one name alone


def is_allowed(sha256: str) -> bool:
    """Whether `allow_code` was called for a file of this content, by this user on this machine."""
    folder = _folder()
    return _is_mine(folder) and _is_mine(folder / sha256)


def folders_of(sha256: str) -> list[Path]:
    """The folders whose modules a file of this content may import; the one that was remembered last is first."""
    told = (_folder() / sha256).read_bytes() if is_allowed(sha256) else b""
    return list(dict.fromkeys(Path(os.fsdecode(name)) for name in reversed(told.split(b"\0")) if name))


def place_of(copy: Path, content: bytes, sha256: str, place: str | None, beside: str | None) -> Path:
    """Where the copy of a file of the user's own is loaded from: its modules are found in the folder of this path.

    A run folder names the original's folder; but it may come from somebody else. So only a folder is used that this
    user has allowed for a file of this content, and of these the one that has the modules with which the run was
    created.

    Args:
        copy: the copy in the run folder.
        content: its content.
        sha256: of the content; it was allowed.
        place: the original's path, as the run folder names it; None: a network of a run that is older than this entry.
        beside: the `hash_of` the modules beside the original; None: a run that is older than this entry.

    Raises:
        RunError: the modules that it would import lie in no folder that was allowed for it.
    """
    original = Path(place) if place else copy
    folders = sorted(folders_of(sha256), key=lambda folder: folder != original.parent)
    hashes = {folder: hash_of(modules_beside(content, folder)) for folder in (*folders, copy.parent)}
    fits = [folder for folder in folders if (hashes[folder] if beside is None else hashes[folder] == beside)]
    if not fits and (beside is None or original.parent in folders):
        fits = folders  # it imports nothing from there; or whoever loads it says that the modules were changed
    if fits:
        return fits[0] / (original.name or copy.name)
    if beside or hashes[copy.parent]:
        raise RunError(
            f"{copy} imports modules that lie beside {original}, and they are code of whoever made the run. If you "
            f"made them, or have read and trust them, use --allow-code; they may also lie beside {copy}"
        )
    return copy


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
