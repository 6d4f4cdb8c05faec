"""Writes a file in one step, and says what is in one. This module needs nothing but Python."""

import hashlib
import os
import threading
from pathlib import Path


def describe(path: Path) -> dict:
    """Size and hash of a file, as manifests and sites list them: {'bytes', 'sha256'}."""
    return describe_content(path.read_bytes())


def describe_content(content: bytes) -> dict:
    """The same of a file's content."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_whole(path: str | os.PathLike, content: bytes, mode: int = 0o644) -> None:
    """Writes a file. If the process is killed meanwhile, or the power is gone, the old or the new one is there, whole.

    Several threads or processes may write the same file; it is then one of theirs, whole.

    Args:
        path: the file; its folder exists.
        content: what it shall hold.
        mode: its permissions.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.new")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)  # the new name must be on disk, too
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
