"""What a device keeps of a secure round, before it sends anything of it. The files are in the folder `secure`.

visit.npz      the gradient and the new head of the visit; never sent as it is
attempt.json   the attempt's secrets, and what the server said in it
keys, shares, masked, unmask   the messages; one that is there is sent again as it is, and never made anew

All of them are for the owner of the folder alone.
"""

import json
from pathlib import Path

from tflite_export.device.errors import InvalidInput
from tflite_export.device.files import sync_folder, write_whole
from tflite_export.device.live.state import Pending, packed, unpacked
from tflite_export.device.live.wire import PHASES

VISIT, ATTEMPT = "visit.npz", "attempt.json"
_OTHER_VISIT = "update.bin"  # of the client in C


class SecureState:
    """The files.

    Args:
        folder: of the device; `secure` is made in it when something is kept.
    """

    def __init__(self, folder: Path):
        self.folder = folder / "secure"

    def keep_visit(self, visit: Pending) -> None:
        """Keeps the result of a visit, in place of an older one."""
        self._write(VISIT, packed(visit))

    def visit(self, num_features: int, num_classes: int) -> Pending | None:
        """The result of the last visit; None if there is none, or it is damaged.

        Raises:
            InvalidInput: the client in C has one that it has not heard of yet.
            OSError: the file cannot be read now.
        """
        path, other = self.folder / VISIT, self.folder / _OTHER_VISIT
        if other.exists():
            raise InvalidInput(f"{other} is an update that the client in C has not heard of yet: start it again first")
        return unpacked(path.read_bytes(), num_features, num_classes) if path.exists() else None

    def attempt(self) -> dict | None:
        """What is kept of the attempt; None if there is none, or it is damaged: then nothing was sent in it.

        Raises:
            OSError: the file cannot be read now. It stays: messages may have been sent in the attempt.
        """
        try:
            return json.loads((self.folder / ATTEMPT).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def keep_attempt(self, about: dict) -> None:
        """Keeps what is known of the attempt."""
        self._write(ATTEMPT, json.dumps(about).encode())

    def message(self, phase: str) -> bytes | None:
        """The message of a phase, if it was made."""
        path = self.folder / phase
        return path.read_bytes() if path.exists() else None

    def keep_message(self, phase: str, body: bytes) -> None:
        """Keeps a message before it is sent."""
        self._write(phase, body)

    def drop_attempt(self) -> None:
        """Forgets the attempt: first its secrets, so that no message can ever be made with them again.

        On disk, too, the secrets are gone before a message is, and all of it when this returns.
        """
        self._delete(ATTEMPT)
        self._delete(*PHASES)

    def drop(self) -> None:
        """Forgets all: the round is over."""
        self.drop_attempt()
        self._delete(VISIT)

    def _delete(self, *names: str) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        if self.folder.is_dir():
            sync_folder(self.folder)

    def _write(self, name: str, content: bytes) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(self.folder.parent)  # otherwise a loss of power may take it, with what is in it
        write_whole(self.folder / name, content, 0o600)
