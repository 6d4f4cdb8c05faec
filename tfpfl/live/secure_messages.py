"""What clients send and are told in the phases of a secure round, apart from the masked words."""

from typing import Any

from tflite_export.device.live import wire
from tflite_export.device.live.secure.exchange import Peer


def told_of(client: int, identity: str | None, about: dict) -> dict:
    """What the neighbours of a client are told of it."""
    keys = {name: about.get(name) for name in ("mask", "share", "signature")}
    return keys | {"client": client, "identity": identity}


def public_keys(about: dict) -> set[bytes]:
    """The public keys of a message, which was checked when it came."""
    return {wire.to_bytes(about[name], name) for name in ("mask", "share")}


def peer_of(about: dict) -> Peer:
    """The public keys of a client, whose message was checked when it came."""
    return Peer(about["client"], *(wire.to_bytes(about[name], name) for name in ("mask", "share")))


def by_client(about: dict, name: str, size: int) -> dict[int, bytes]:
    """{client: bytes} of an entry of a message.

    Raises:
        WireError: it is something else.
    """
    found: Any = about.get(name)
    if not isinstance(found, dict) or not all(i.isascii() and i.isdigit() and str(int(i[:10])) == i for i in found):
        raise wire.WireError(f"{name} must be a JSON object whose names are clients")
    return {int(i): wire.to_bytes(text, name, size) for i, text in found.items()}
