"""The thetas of the rounds as they are sent: in half precision or not, compressed or not; each is computed once."""

import asyncio
import gzip
import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from aiohttp import Payload, web

from tflite_export.device.live import wire
from tfpfl.live.rules import Refused

_PIECE = 2**18  # bytes that are copied for a device at a time
_SLOWEST_PIECE = 300.0  # seconds; beside a piece, the operating system holds a few megabytes that are on their way


class Sent(NamedTuple):
    """A theta as it is sent."""

    content: bytes  # float32 or float16, little-endian
    digest: str  # the sha256 of the content


class Shared(Payload):
    """The body of an answer, made of bytes that many answers share. A device that reads no more of it is cut off.

    Args:
        parts: what the body has, one after the other.
    """

    def __init__(self, *parts: bytes):
        super().__init__(parts, content_type="application/octet-stream")
        self._size = sum(map(len, parts))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The body as text, as aiohttp wants it to have one."""
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer) -> None:
        """Sends it; a device has `_SLOWEST_PIECE` seconds for each piece.

        Raises:
            ConnectionResetError: it took longer.
        """
        for content in self._value:
            part = memoryview(content)
            for begin in range(0, len(part), _PIECE):
                try:
                    async with asyncio.timeout(_SLOWEST_PIECE):
                        await writer.write(part[begin : begin + _PIECE])
                except TimeoutError:
                    if writer.transport is not None:
                        writer.transport.abort()  # without waiting for what it has not read
                    raise ConnectionResetError(f"no more of an answer was read in {_SLOWEST_PIECE:g} s") from None


class Thetas:
    """What devices get of the rounds' thetas.

    Args:
        whole: () -> {sha256: float32 numbers, little-endian}, those that are needed now.
    """

    def __init__(self, whole):
        self._whole = whole
        self._halves: dict[str, Sent] = {}
        self._compressed: dict[str, bytes] = {}

    def get(self, name: str, half: bool) -> Sent:
        """A theta by its name, the sha256 of its float32 numbers.

        Raises:
            Refused: it is not needed any more (410).
            WireError: `half`, and a number is too large for half precision.
        """
        whole: Mapping[str, bytes] = self._whole()
        if (content := whole.get(name)) is None:
            raise Refused(410, "this theta is not needed any more: ask for work again")
        if not half:
            return Sent(content, name)
        if name not in self._halves:
            content = wire.to_half(content)
            kept = {n: sent for n, sent in self._halves.items() if n in whole}
            self._halves = kept | {name: Sent(content, hashlib.sha256(content).hexdigest())}
        return self._halves[name]

    def response(self, request: web.Request, name: str, half: bool) -> web.Response:
        """A theta as the answer to a request; compressed if the device takes that."""
        found = self.get(name, half)
        headers = {"Cache-Control": "private, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
        if half:
            headers[wire.BODY] = found.digest  # the name is the hash of the float32 numbers
        content = found.content
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            headers["Content-Encoding"] = "gzip"
            content = self._gzip(found)
        return web.Response(body=Shared(content), headers=headers)

    def _gzip(self, found: Sent) -> bytes:
        if found.digest not in self._compressed:
            needed = {*self._whole(), *(sent.digest for sent in self._halves.values())}
            self._compressed = {digest: c for digest, c in self._compressed.items() if digest in needed}
            self._compressed[found.digest] = gzip.compress(found.content, 6, mtime=0)
        return self._compressed[found.digest]
