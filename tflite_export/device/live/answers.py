"""What a server answers to a device, and how the device reads it: a proxy in its place may say anything."""

import re
from typing import Any, NamedTuple

from tflite_export.device.errors import InvalidInput, shown
from tflite_export.device.live import wire

_FILE = re.compile("[A-Za-z0-9_][A-Za-z0-9_.-]{0,80}")
_LATEST = 1e15  # seconds since 1970
_LONGEST = 16  # characters of a word, such as the kind of a payload


class ServerError(InvalidInput):
    """The server refused what the device needs, or is away for too long. The message says what it said."""


def unusable(what: str) -> ServerError:
    """The error of an answer without an entry, or with one of another kind."""
    return ServerError(f"the server's answer has no {what} that a device can use")


class Answer(NamedTuple):
    """What the server answered to a request: the status of HTTP, and the body."""

    status: int
    body: bytes
    digest: str = ""  # the sha256 of the body, if the server says it

    @property
    def error(self) -> str:
        """The server's reason, of an answer that refuses."""
        try:
            told = str(wire.read_json(self.body)["error"])
            return told.encode("utf-8", "replace").decode()  # half of a surrogate pair could not be printed
        except (wire.WireError, KeyError, ValueError):  # the last of a number with too many digits
            return self.body[:200].decode("utf-8", "replace")

    @property
    def time(self) -> float | None:
        """The server's time, which an answer with status 401 has."""
        try:
            found = wire.entry_or(wire.read_json(self.body), "time", float, 0, None)
        except wire.WireError:
            return None
        return found if found is not None and found < _LATEST else None


def files_of(answer: dict) -> list[str]:
    """The names of a bundle's files.

    Raises:
        ServerError: there are none, or one is no name of a file in a bundle.
    """
    names = answer.get("files")
    if not isinstance(names, list):
        raise unusable("files")
    for name in names:
        if not (isinstance(name, str) and _FILE.fullmatch(name)):
            raise ServerError(f"the server names a file {shown(name)}, which is no file of a bundle")
    return names


def round_of(work: dict, what: str = "round") -> int:
    """The round of a work.

    Raises:
        ServerError: it names none. `what` is the message's.
    """
    if (number := wire.entry_or(work, "round", int, 1, None)) is None:
        raise unusable(what)
    return number


def theta_of(work: dict, what: str = "theta") -> str:
    """The name of a work's theta, its sha256.

    Raises:
        ServerError: it names none. `what` is the message's.
    """
    name = work.get("theta")
    if not (isinstance(name, str) and re.fullmatch("[0-9a-f]{64}", name)):
        raise unusable(what)
    return name


def round_and_theta(work: dict) -> tuple[int, str]:
    """(round, name of theta) of a visit, or of scores.

    Raises:
        ServerError: one is missing.
    """
    both = "round and theta"
    return round_of(work, both), theta_of(work, both)


def settings_of(work: dict) -> dict[str, Any]:
    """The settings of a visit: tau, beta, head_rate, and if the server says it, safeguard.

    Raises:
        ServerError: they are missing, or one of them is.
    """
    told: Any = work.get("settings")
    told = told if isinstance(told, dict) else {}
    kinds: tuple[tuple[str, type, int], ...] = (("tau", int, 1), ("beta", float, 0), ("head_rate", float, 0))
    found = {name: wire.entry_or(told, name, kind, low, None) for name, kind, low in kinds}
    if None in found.values():
        raise unusable("settings")
    return found | ({"safeguard": told["safeguard"] is True} if "safeguard" in told else {})


def payload_of(work: dict) -> str:
    """How a visit's gradient is to be sent.

    Raises:
        ServerError: the work does not say it.
    """
    if not (isinstance(found := work.get("payload"), str) and len(found) < _LONGEST):
        raise unusable("payload")
    return found


def splits_of(work: dict) -> list[str]:
    """The splits whose scores are asked for; those that no device has are left out."""
    named: Any = work.get("splits")
    return [split for split in named if split in wire.SPLITS] if isinstance(named, list) else []
