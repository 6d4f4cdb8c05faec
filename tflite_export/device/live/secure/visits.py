"""A device in secure rounds: which message it sends when it is asked for one, and what it refuses.

What it has said once in an attempt, it says again and never otherwise: one vector with its masks, one list of
survivors.
"""

import json
from typing import Any

import numpy as np

from tflite_export.device import payload as payloads
from tflite_export.device.live import wire
from tflite_export.device.live.secure import exchange
from tflite_export.device.live.secure.codec import Codec
from tflite_export.device.live.secure.exchange import Held, Peer, Secrets
from tflite_export.device.live.secure.masks import Attempt, SecureError
from tflite_export.device.live.secure.state import SecureState
from tflite_export.device.live.state import Pending
from tflite_export.device.live.wire import KEYS, MASKED, SHARES, UNMASK

_CODEC = ("size", "clients", "max_examples", "exponent", "loss_exponent")


class SecureVisits:
    """The secure rounds of one device.

    Args:
        state: what is kept.
        client: its number.
        signer: its key.
    """

    def __init__(self, state: SecureState, client: int, signer: wire.Signer):
        self._state, self._client, self._signer = state, client, signer

    def message(self, work: dict, visit: Pending | None) -> bytes:
        """What the device sends for this work; it is on disk when this returns.

        Args:
            work: as the server says it.
            visit: what the device has computed in this round; needed in the first and the third phase.

        Raises:
            SecureError, WireError: something is not as it must be, and the device takes no part in this attempt.
        """
        phase = wire.entry(work, "kind", str)
        key = [wire.entry(work, "round", int, 1), wire.entry(work, "attempt", int, 1)]
        kept = self._state.attempt()
        if kept is None or kept["key"] != key:
            if phase != KEYS:
                raise SecureError("the device has no keys of this attempt: it was started anew, or joined later")
            if kept is not None and kept["key"] >= key:
                raise SecureError(f"the server asks for attempt {key}, after {kept['key']}: attempts never come back")
            self._state.drop_attempt()
            kept = self._begin(key, work, visit)
            self._state.keep_attempt(kept)
        if kept.get("refused"):
            raise SecureError(kept["refused"])
        if phase == UNMASK and kept.get("survivors") not in (None, _survivors(work)):
            raise SecureError("the server names other survivors than before: the device does not answer twice")
        if (body := self._state.message(phase)) is None:
            body = getattr(self, f"_{phase}")(Attempt(kept["run"], *key), kept, work, visit)
            self._state.keep_attempt(kept)
            self._state.keep_message(phase, body)
        return body

    def refuse(self, why: str) -> None:
        """Takes no part in the present attempt any more."""
        if (kept := self._state.attempt()) is not None and not kept.get("refused"):
            self._state.keep_attempt(kept | {"refused": why})

    def _begin(self, key: list[int], work: dict, visit: Pending | None) -> dict[str, Any]:
        codec, weight = _codec(work), wire.entry(work, "weight", float, 0, 1e30)
        if visit is None:
            raise SecureError("the visit of this round is gone")
        about, payload = wire.unpack(visit.body)
        gradient = payloads.decode(payload, codec.size)
        if not 0 < weight <= codec.max_weight or not about["examples"] <= codec.max_examples:
            raise SecureError("the codec of this round is not made for this client's weight and examples")
        if not np.isfinite(gradient).all():
            raise SecureError("the gradient is not finite")
        secrets = {name: value.hex() for name, value in Secrets.drawn()._asdict().items()}
        told = {name: work["codec"][name] for name in (*_CODEC, "clip", "max_weight")}
        run = wire.entry(work, "run", str, 1, 200)
        if not run.isprintable():  # a line feed would make two names of one
            raise wire.WireError("run must be the id of a run")
        return {"key": key, "run": run, "secrets": secrets, "codec": told, "weight": weight}

    def _keys(self, attempt: Attempt, kept: dict, work: dict, visit) -> bytes:
        told = exchange.advertise(attempt, self._client, _secrets(kept), self._signer)
        return _bytes({"attempt": attempt.number} | told)

    def _shares(self, attempt: Attempt, kept: dict, work: dict, visit) -> bytes:
        told = wire.entry(work, "peers", list, 0, 100_000)
        if not all(isinstance(one, dict) for one in told):
            raise wire.WireError("a peer must be a JSON object")
        peers = [exchange.checked_peer(attempt, one) for one in told]
        if len({p.client for p in peers} | {self._client}) <= len(peers):
            raise SecureError("a neighbour is there twice, or it is this device")
        if len({key for p in peers for key in (p.mask, p.share)}) < 2 * len(peers):
            raise SecureError("two neighbours have the same key")
        t = exchange.checked_threshold(wire.entry(work, "threshold", int, 1), len(peers))
        boxes = exchange.close(attempt, self._client, _secrets(kept), peers, t)
        kept |= {"threshold": t, "peers": {str(p.client): [p.mask.hex(), p.share.hex()] for p in peers}}
        texts = {str(i): wire.to_text(box) for i, box in boxes.items()}
        return _bytes({"attempt": attempt.number, "boxes": texts})

    def _masked(self, attempt: Attempt, kept: dict, work: dict, visit: Pending | None) -> bytes:
        peers, secrets = self._peers(kept), _secrets(kept)
        boxes = _by_client(work, "boxes", exchange.BOX)
        held = exchange.open_boxes(attempt, self._client, secrets, peers, boxes)
        if len(held) < kept["threshold"]:
            raise SecureError(f"{len(held)} neighbours are left, and {kept['threshold']} must be")
        if visit is None:
            raise SecureError("the visit of this round is gone")
        about, payload = wire.unpack(visit.body)
        codec = Codec(**kept["codec"])
        random = exchange.random_words(attempt, self._client, secrets, codec.words)
        gradient = payloads.decode(payload, codec.size)
        encoded = codec.encode(gradient, kept["weight"], about["examples"], about["loss"], random)
        words = exchange.mask(attempt, self._client, secrets, [peers[i] for i in held], encoded.words)
        kept["held"] = {str(i): [one.seed.hex(), one.mask.hex()] for i, one in held.items()}
        return wire.pack({"attempt": attempt.number, "theta": about["theta"]}, words.astype("<u4").tobytes())

    def _unmask(self, attempt: Attempt, kept: dict, work: dict, visit) -> bytes:
        if self._state.message(MASKED) is None:
            raise SecureError("the server asks for shares before this device has sent its words")
        held = {int(i): Held(*map(bytes.fromhex, both)) for i, both in kept["held"].items()}
        survivors = _survivors(work)
        mine, others = exchange.answer(held, survivors, kept["threshold"])
        kept["survivors"] = survivors
        named = {"self": mine, "mask": others}
        texts = {name: {str(i): wire.to_text(s) for i, s in shares.items()} for name, shares in named.items()}
        return _bytes({"attempt": attempt.number} | texts)

    def _peers(self, kept: dict) -> dict[int, Peer]:
        if self._state.message(SHARES) is None:
            raise SecureError("the server asks for words before this device has sent its shares")
        return {int(i): Peer(int(i), *map(bytes.fromhex, both)) for i, both in kept["peers"].items()}


def _secrets(kept: dict) -> Secrets:
    return Secrets(**{name: bytes.fromhex(value) for name, value in kept["secrets"].items()})


def _codec(work: dict) -> Codec:
    told: Any = work.get("codec")
    if not isinstance(told, dict):
        raise wire.WireError("codec must be a JSON object")
    how = {name: wire.entry(told, name, int, -200, 2**31) for name in _CODEC}
    return Codec(**how, **{name: wire.entry(told, name, float, 0) for name in ("clip", "max_weight")})


def _survivors(work: dict) -> list[int]:
    found = wire.entry(work, "survivors", list, 0, 100_000)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
        raise wire.WireError("survivors must be numbers of clients")
    return sorted(set(found))


def _by_client(about: dict, name: str, size: int) -> dict[int, bytes]:
    found: Any = about.get(name)
    if not isinstance(found, dict) or not all(i.isascii() and i.isdigit() and len(i) < 10 for i in found):
        raise wire.WireError(f"{name} must be a JSON object whose names are clients")
    return {int(i): wire.to_bytes(text, name, size) for i, text in found.items()}


def _bytes(about: dict) -> bytes:
    return json.dumps(about).encode()
