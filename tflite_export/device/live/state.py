"""What a device keeps between starts: its key, its number, the bundle, its head, and an update that is on its way.

identity.pem   the private key
member.json    what was said when the device joined: the client's number, and its numbers of examples and classes
run.id         which live rounds the head is of
bundle/        the files from the server
head.bin       the head; see head_file.py
theta.bin      the theta with which the device computed last; see kept_theta.py
update.npz     the update of a round, until the server has said whether it counted it
lock           is locked while a process works with the folder
"""

import fcntl
import io
import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tflite_export.device.errors import InvalidInput
from tflite_export.device.files import sync_folder, write_whole
from tflite_export.device.head_file import SavedHead, head_bytes, head_of
from tflite_export.device.live import wire
from tflite_export.device.live.kept_theta import BUNDLE, HEAD, THETA
from tflite_export.device.live.wire import Signer

KEY, MEMBER, UPDATE, LOCK, RUN = "identity.pem", "member.json", "update.npz", "lock", "run.id"
_OTHER_UPDATE = "update.bin"  # of the client in C


class Pending(NamedTuple):
    """An update whose answer has not come yet."""

    round_num: int
    body: bytes  # what is sent
    head: SavedHead  # the head that becomes current if the server has counted it


def packed(pending: Pending) -> bytes:
    """The content of a file that keeps an update."""
    content = io.BytesIO()
    arrays = {"body": pending.body, "head": head_bytes(pending.head)}
    np.savez(content, round=pending.round_num, **{k: np.frombuffer(v, np.uint8) for k, v in arrays.items()})
    return content.getvalue()


def unpacked(content: bytes, num_features: int, num_classes: int) -> Pending | None:
    """The update that such a file keeps; None if the content is damaged, or the head is none of this client's."""
    try:
        with np.load(io.BytesIO(content)) as found:
            saved = head_of(found["head"].tobytes(), UPDATE, num_features, num_classes)
            return Pending(int(found["round"]), found["body"].tobytes(), saved)
    except MemoryError:  # it may be whole
        raise
    except Exception:  # the readers of archives and of NumPy's headers each raise errors of their own
        return None


class State:
    """The folder of a device.

    Args:
        folder: made if it does not exist.

    Raises:
        InvalidInput: another device works with it, in this process or another one.
        OSError: it cannot be written or locked.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder, self._process = Path(folder), os.getpid()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / LOCK, "wb")  # noqa: SIM115 - it is open as long as the device works
        try:
            # It belongs to this open file. One of `lockf` would end when the process closes any other one of this path.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise InvalidInput(f"{self.folder} is in use: another device works with it") from None
        except OSError as error:  # such as of a file system that has no locks
            self._lock.close()
            error.filename = str(self.folder / LOCK)
            raise
        try:
            self._tidy()
        except BaseException:
            self.close()  # the folder is free for the next try
            raise

    def _tidy(self) -> None:
        """Deletes what a killed process was writing, since secrets may be in it."""
        for path in (*self.folder.glob("*.new"), *self.folder.glob("secure/*.new")):
            if path.is_file():
                path.unlink()
        for folder in (self.folder, self.folder / "secure"):
            if folder.is_dir():  # what is deleted does not come back after a loss of power
                sync_folder(folder)

    def close(self) -> None:
        """Lets another process use the folder."""
        if not self._lock.closed and self._process == os.getpid():
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # to close it is not enough while a forked process has it, too
        self._lock.close()

    update = UPDATE  # the file of an update that is on its way

    @property
    def bundle(self) -> Path:
        """The folder of the bundle."""
        return self.folder / BUNDLE

    @property
    def head(self) -> Path:
        """The file of the head."""
        return self.folder / HEAD

    @property
    def theta(self) -> Path:
        """The file of the theta with which the device computed last."""
        return self.folder / THETA

    def signer(self) -> Signer:
        """The device's key; a new one at the first start."""
        path = self.folder / KEY
        if path.exists():
            return Signer(path.read_bytes(), path)
        signer = Signer()
        write_whole(path, signer.pem, 0o600)
        return signer

    def member(self) -> dict | None:
        """What was said when the device joined; None before.

        'examples' is None in a file of an earlier version, until an update is counted.

        Raises:
            InvalidInput: the file is damaged.
        """
        path = self.folder / MEMBER
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            numbers = {name: int(found[name]) for name in ("client", "classes")}
            examples = wire.entry(found, "examples", int, 1) if "examples" in found else None
            return numbers | {"secure": bool(found.get("secure", False)), "examples": examples}
        except (ValueError, KeyError, TypeError, wire.WireError):
            raise InvalidInput(f"{path} is damaged: delete it, and join again with the token") from None

    def keep_member(self, about: dict) -> None:
        """Keeps what was said when the device joined: the entries that `member` reads."""
        write_whole(self.folder / MEMBER, json.dumps(about).encode())

    def note_examples(self, number: int) -> None:
        """Keeps with how many examples the server counts, if it is not known yet: an update with so many counted."""
        member = self.member()
        if member is not None and member["examples"] is None:
            self.keep_member(json.loads((self.folder / MEMBER).read_text(encoding="utf-8")) | {"examples": number})

    def check_sizes(self, about: dict) -> None:
        """Checks that a device has as many examples and classes as when it joined: the server counts with those.

        Otherwise a plain round would refuse what it computes again and again, and a secure one would never have a sum.

        Args:
            about: 'examples' and 'classes' of its data.

        Raises:
            InvalidInput: it has others.
        """
        member = self.member()
        if member is None:
            return
        if member["examples"] in (None, about["examples"]) and member["classes"] == about["classes"]:
            return
        first = "{examples} training examples of " if member["examples"] is not None else ""
        before, now = ((first + "{classes} classes").format(**told) for told in (member, about))
        raise InvalidInput(
            f"{self.folder} is of a device that joined with {before}, and its data have {now} now: these stay what "
            "they were, since the server counts with them. Give it the examples that it joined with, or join as "
            "another client, with another folder and that client's token"
        )

    def run(self) -> str | None:
        """Which live rounds the folder is of, as their server said; None: not known."""
        path = self.folder / RUN
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None

    def keep_run(self, run: str) -> None:
        """Keeps which live rounds the folder is of. A server's first word on it holds.

        Raises:
            InvalidInput: the folder is of others.
        """
        known = self.run()
        if known is None:
            write_whole(self.folder / RUN, run.encode())
        elif known != run:
            raise InvalidInput(f"{self.folder} has the head of another run: start the device with another --state")

    def keep(self, pending: Pending) -> None:
        """Keeps an update before it is sent."""
        write_whole(self.folder / self.update, packed(pending))

    def pending(self, num_features: int, num_classes: int) -> Pending | None:
        """The update that is on its way, if there is one. One that is damaged cannot be sent, and is dropped.

        Raises:
            InvalidInput: the client in C has one that it has not heard of yet.
            OSError: the file cannot be read now. It stays: the server may have counted the update.
        """
        path, other = self.folder / self.update, self.folder / _OTHER_UPDATE
        if other.exists():
            raise InvalidInput(f"{other} is an update that the client in C has not heard of yet: start it again first")
        if not path.exists():
            return None
        found = unpacked(path.read_bytes(), num_features, num_classes)
        if found is None:
            self.drop()
        return found

    def drop(self) -> None:
        """Forgets the update: the server has answered. After a loss of power, it is gone, too."""
        (self.folder / self.update).unlink(missing_ok=True)
        sync_folder(self.folder)
