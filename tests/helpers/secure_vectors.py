"""Writes tests/device/secure_vectors.json: every number on the way of secure aggregation, for all clients to check.

    python tests/helpers/secure_vectors.py

All secrets are hashes of their names, so the file is always the same. Bytes are hexadecimal, but for `told`, which is
as the server sends it; numbers of float32 are their 32 bits as an integer. `holds` has, for each other client, its
share of the other's seed and of the other's mask key.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.hashes import SHA256

from tflite_export.device.live import wire
from tflite_export.device.live.secure import exchange, masks, shamir
from tflite_export.device.live.secure.codec import Codec
from tflite_export.device.live.secure.masks import Attempt, PrivateKey

FILE = Path(__file__).resolve().parents[1] / "device" / "secure_vectors.json"
CLIENTS, DROPPED, THRESHOLD = (2, 5, 7, 11), 11, 2
ATTEMPT = Attempt("3f0a9c", 12, 1)


def secret(*names) -> bytes:
    """32 bytes, a number from 1 to n - 1."""
    number = int.from_bytes(hashlib.sha256(" ".join(map(str, names)).encode()).digest(), "big")
    return (1 + number % (shamir.ORDER - 1)).to_bytes(32, "big")


def bits(numbers) -> list[int]:
    """The bits of float32 numbers."""
    return np.asarray(numbers, np.float32).view(np.uint32).tolist()


class _Drawn:
    """Coefficients and nonces that are hashes of their names."""

    def __init__(self, client):
        self.client, self.coefficients, self.nonces = client, [], 0

    def draw(self, n):
        assert n == shamir.ORDER
        number = int.from_bytes(secret("coefficient", self.client, len(self.coefficients)), "big")
        self.coefficients.append(number)
        return number

    def nonce(self, size):
        self.nonces += 1
        return hashlib.sha256(f"nonce {self.client} {self.nonces}".encode()).digest()[:size]


class _Named(wire.Signer):
    """A signer with a key that is a hash, and signatures that are always the same (RFC 6979)."""

    def __init__(self, client):
        self._key = ec.derive_private_key(int.from_bytes(secret("identity", client), "big"), ec.SECP256R1())

    def sign(self, text):
        r, s = utils.decode_dss_signature(self._key.sign(text, ec.ECDSA(SHA256(), deterministic_signing=True)))
        return wire.to_text(r.to_bytes(32, "big") + s.to_bytes(32, "big"))


def gradients(size):
    """{client: float32 [size]}: of usual numbers, with large and tiny ones, zero, and longer than the clip."""
    draw = np.random.default_rng(27)
    found = {client: draw.normal(0, 0.05, size).astype(np.float32) for client in CLIENTS}
    found[2][:6] = 0.0, -0.0, 1e-40, -1e-30, 2.0**-24, -0.75
    found[5] *= np.float32(300)
    found[7][:] = np.float32(0)
    return found


def codec_cases() -> list[dict]:
    """Gradients with what becomes of them."""
    draw, cases = np.random.default_rng(28), []
    shapes = [  # (size, clients, clip, max_weight, weight, scale of the numbers)
        (5, 3, 1.0, 1.0, 1.0, 0.1), (8, 100, 100.0, 0.02, 0.01, 1e-3), (8, 10, 0.5, 3.0, 2.5, 10.0),
        (40, 1000, 1.0, 1e-3, 7e-4, 1e-6), (16, 4, 1e-3, 1.0, 1 / 3, 1.0), (7, 3, 1e20, 1.0, 1.0, 1e19),
        (9, 64, 1.0, 1.0, 1e-9, 1.0), (6, 2**20, 4.0, 1.0, 1.0, 1.0),
    ]  # fmt: skip
    for size, clients, clip, most, weight, scale in shapes:
        gradient = (draw.standard_normal(size) * scale).astype(np.float32)
        codec = Codec(size, clients, clip, most, 600)
        random = draw.integers(0, 2**32, codec.words, dtype=np.uint32)
        random[:2] = 0, 2**32 - 1
        loss = float(np.float32(draw.normal(2, 40)))
        found = codec.encode(gradient, weight, 257, loss, random)
        about = _codec(codec) | {"weight": weight, "examples": 257, "loss": loss, "norm": found.norm}
        words = {"gradient": bits(gradient), "random": random.tolist(), "words": found.words.tolist()}
        cases.append(about | words)
    largest = Codec(3, 5, 1.0, 1.0, 10)
    rounded = np.full(6, 2**32 - 1, np.uint32)
    one = largest.encode(np.float32([1, 0, 0]), 1.0, 10, 64.0, rounded)  # the largest number that there can be
    words = {"gradient": bits([1, 0, 0]), "random": rounded.tolist(), "words": one.words.tolist()}
    cases.append(_codec(largest) | {"weight": 1.0, "examples": 10, "loss": 64.0, "norm": one.norm} | words)
    return cases


def _codec(codec: Codec) -> dict:
    names = ("size", "clients", "clip", "max_weight", "max_examples", "exponent", "loss_exponent")
    return {name: getattr(codec, name) for name in names}


def vectors() -> dict:
    """The content of the file."""
    codec = Codec(20, len(CLIENTS), 2.0, 0.5, 100)
    weights, examples = dict(zip(CLIENTS, (0.5, 0.125, 0.3, 0.075), strict=True)), {2: 100, 5: 25, 7: 60, 11: 15}
    secrets = {i: exchange.Secrets(*(secret(n, i) for n in ("mask", "share", "seed", "rounding"))) for i in CLIENTS}
    signers = {i: _Named(i) for i in CLIENTS}
    keys = {i: exchange.advertise(ATTEMPT, i, secrets[i], signers[i]) for i in CLIENTS}
    told = {i: {"client": i, "identity": signers[i].public} | keys[i] for i in CLIENTS}
    peers = {i: exchange.checked_peer(ATTEMPT, told[i]) for i in CLIENTS}
    drawn = {i: _Drawn(i) for i in CLIENTS}
    others = {i: [peers[j] for j in CLIENTS if j != i] for i in CLIENTS}
    boxes = {
        i: exchange.close(ATTEMPT, i, secrets[i], others[i], THRESHOLD, drawn[i].draw, drawn[i].nonce) for i in CLIENTS
    }
    survivors = [i for i in CLIENTS if i != DROPPED]
    total, clients = np.zeros(codec.words, np.uint32), {}
    for i, gradient in gradients(codec.size).items():
        loss = float(np.float32(0.7 * i))
        random = exchange.random_words(ATTEMPT, i, secrets[i], codec.words)
        encoded = codec.encode(gradient, weights[i], examples[i], loss, random)
        masked = exchange.mask(ATTEMPT, i, secrets[i], others[i], encoded.words)
        held = exchange.open_boxes(
            ATTEMPT, i, secrets[i], {p.client: p for p in others[i]}, {j: boxes[j][i] for j in CLIENTS if j != i}
        )
        own = masks.self_key(ATTEMPT, secrets[i].seed, i)
        rounding = masks.derive(secrets[i].rounding, ATTEMPT.info(masks.ROUNDING, i))
        clients[i] = {
            "private": {name: value.hex() for name, value in secrets[i]._asdict().items()},
            "told": told[i],
            "coefficients": [f"{number:064x}" for number in drawn[i].coefficients],  # of the seed, then of the mask key
            "self_key": own.hex(),
            "self_words": masks.keystream(own, 4).tolist(),
            "rounding_key": rounding.hex(),
            "boxes": {str(j): box.hex() for j, box in boxes[i].items()},
            "holds": {str(j): [share.hex() for share in both] for j, both in held.items()},
            "weight": weights[i],
            "examples": examples[i],
            "loss": loss,
            "gradient": bits(gradient),
            "random": random.tolist(),
            "norm": encoded.norm,
            "words": encoded.words.tolist(),
            "masked": masked.tolist(),
        }
        if i in survivors:
            mine, of_others = exchange.answer(held, [j for j in survivors if j != i], THRESHOLD)
            clients[i]["unmask"] = {
                "self": {str(j): share.hex() for j, share in mine.items()},
                "mask": {str(j): share.hex() for j, share in of_others.items()},
            }
            total += encoded.words
    pairs = []
    for a in CLIENTS:
        for b in [b for b in CLIENTS if b > a]:
            mine, key = PrivateKey(secrets[a].mask), PrivateKey(secrets[a].share)
            mask = masks.pair_key(ATTEMPT, mine, a, peers[b].mask, b)
            boxes_of = (masks.share_key(ATTEMPT, key, peers[b].share, *both).hex() for both in ((a, b), (b, a)))
            pairs.append(
                {"clients": [a, b], "mask_agreement": mine.agree(peers[b].mask).hex(), "mask_key": mask.hex()}
                | {"mask_words": masks.keystream(mask, 4).tolist()}
                | {"share_agreement": key.agree(peers[b].share).hex(), "share_keys": list(boxes_of)}
            )
    sums = codec.decode(total)
    return {
        "run": ATTEMPT.run,
        "round": ATTEMPT.round_num,
        "attempt": ATTEMPT.number,
        "threshold": THRESHOLD,
        "dropped": DROPPED,
        "codec": _codec(codec),
        "info": {"mask": ATTEMPT.info(masks.MASK, 2, 5).decode(), "self": ATTEMPT.info(masks.SELF, 2).decode()},
        "clients": {str(i): about for i, about in clients.items()},
        "pairs": pairs,
        "sum": total.tolist(),
        "decoded": {"examples": sums.examples, "clipped": sums.clipped, "loss": sums.loss}
        | {"gradient": sums.gradient.tolist()},
        "codec_cases": codec_cases(),
    }


def text(found: dict) -> str:
    """The file's content: JSON, each entry of the outer objects in one line."""
    outer = []
    for name, value in found.items():
        if name in ("clients", "pairs", "codec_cases"):
            items = value.items() if isinstance(value, dict) else ((None, one) for one in value)
            lines = ",\n".join((f'  "{key}": ' if key else "  ") + json.dumps(one) for key, one in items)
            outer.append(f' "{name}": {"{["[isinstance(value, list)]}\n{lines}\n {"}]"[isinstance(value, list)]}')
        else:
            outer.append(f' "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(outer) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text(vectors()), encoding="utf-8")
