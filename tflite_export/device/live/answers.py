"""What a server answers to a device."""

import json
from typing import NamedTuple

from tflite_export.device.errors import InvalidInput


class ServerError(InvalidInput):
    """The server refused what the device needs, or is away for too long. The message says what it said."""


class Answer(NamedTuple):
    """What the server answered to a request: the status of HTTP, and the body."""

    status: int
    body: bytes
    digest: str = ""  # the sha256 of the body, if the server says it

    @property
    def error(self) -> str:
        """The server's reason, of an answer that refuses."""
        try:
            return str(json.loads(self.body)["error"])
        except (ValueError, KeyError, TypeError):
            return self.body[:200].decode("utf-8", "replace")

    @property
    def time(self) -> float | None:
        """The server's time, which an answer with status 401 has."""
        try:
            return float(json.loads(self.body)["time"])
        except (ValueError, KeyError, TypeError):
            return None
