"""Whose network files may run code: those that this user allowed on this machine, remembered by their sha256.

The memory is a folder in the cache and not in a run folder: somebody who sends a run folder could write it there.
"""

import os
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
        InvalidArgument: there is no such file.
    """
    path = Path(path)
    if path.is_dir() and not (path / NETWORK).is_file():
        raise InvalidArgument(f"{path} has no {NETWORK}, so that there is no code to allow: leave --allow-code out")
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file_hash(path / NETWORK if path.is_dir() else path)).touch()


def is_allowed(sha256: str) -> bool:
    """Whether `allow_code` was called for a file of this content, by this user on this machine."""
    return (_folder() / sha256).is_file()


def _folder() -> Path:
    return cache_folder() / "allowed_code"
