"""The test vectors of secure aggregation, and the libraries behind them against published ones."""

import json

import numpy as np
import pytest

from helpers import secure_vectors
from tflite_export.device.live.secure import exchange, masks, shamir
from tflite_export.device.live.secure.codec import Codec
from tflite_export.device.live.secure.masks import Attempt, PrivateKey, SecureError

FOUND = json.loads(secure_vectors.FILE.read_text(encoding="utf-8"))
ATTEMPT = Attempt(FOUND["run"], FOUND["round"], FOUND["attempt"])


def test_the_file_is_what_the_clients_compute():
    assert secure_vectors.text(secure_vectors.vectors()) == secure_vectors.FILE.read_text(encoding="utf-8")


def test_key_agreement_is_that_of_the_standard():
    """NIST CAVP, ECC CDH primitive, P-256, COUNT = 0."""
    secret = "7d7dc5f71eb29ddaf80d6214632eeae03d9058af1fb6d22ed80badb62bc1a534"
    x, y = (
        "700c48f77f56584c5cc632ca65640db91b6bacce3a4df6b42ce7cc838833d287",
        "db71e509e3fd9b060ddb20ba5c51dcc5948d46fbf640dfe0441782cab85fa4ac",
    )
    agreed = PrivateKey(bytes.fromhex(secret)).agree(bytes.fromhex("04" + x + y))
    assert agreed.hex() == "46fc62106420ff012e54a434fbdd2d25ccc5852060561e68040dd7778997bd7b"


def test_derived_keys_are_those_of_the_standard():
    """RFC 5869, A.3: the first 32 bytes of a key without salt and info."""
    key = masks.derive(b"\x0b" * 22, b"")
    assert key.hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"


def test_random_words_are_the_blocks_of_aes():
    """AES-256 of the blocks 0 and 1 with the key 0, as in the test cases 13 and 14 of the specification of GCM."""
    blocks = bytes.fromhex("dc95c078a2408989ad48a21492842087" + "530f8afbc74536b9a963b4f1c4cb738b")
    assert masks.keystream(bytes(32), 8).tolist() == np.frombuffer(blocks, "<u4").tolist()


def test_shares_are_modulo_the_order_of_the_curve():
    generator = PrivateKey((1).to_bytes(32, "big")).public
    last = PrivateKey((shamir.ORDER - 1).to_bytes(32, "big")).public  # minus the generator: the same x
    assert last[1:33] == generator[1:33] and last != generator
    with pytest.raises(SecureError):
        PrivateKey(shamir.ORDER.to_bytes(32, "big"))


def test_the_words_of_the_file_sum_up():
    """Without this package: the masked words, minus the masks that the file names, are the sum."""
    clients, size = FOUND["clients"], FOUND["codec"]["size"] + 3
    stay = [i for i in clients if int(i) != FOUND["dropped"]]
    total = sum(np.array(clients[i]["masked"], object) for i in stay)
    for i in stay:
        total = total - masks.keystream(bytes.fromhex(clients[i]["self_key"]), size).astype(object)
    for pair in FOUND["pairs"]:
        low, high = map(str, pair["clients"])
        if FOUND["dropped"] in pair["clients"]:
            words = masks.keystream(bytes.fromhex(pair["mask_key"]), size).astype(object)
            total = total - words if low in stay else total + words
    assert [word % 2**32 for word in total] == FOUND["sum"]
    words = sum(np.array(clients[i]["words"], object) for i in stay)
    assert [word % 2**32 for word in words] == FOUND["sum"]


def test_shares_of_the_file_are_values_of_its_polynomials():
    for i, about in FOUND["clients"].items():
        for part, name in enumerate(("seed", "mask")):
            slope = int(about["coefficients"][part], 16)  # t = 2: a line
            for j, other in FOUND["clients"].items():
                if j != i:
                    value = (int(about["private"][name], 16) + slope * (int(j) + 1)) % shamir.ORDER
                    assert other["holds"][i][part] == f"{value:064x}"


def test_any_threshold_of_the_shares_gives_the_secret_and_one_fewer_fits_every_secret():
    draw = np.random.default_rng(3)
    for n, t in ((1, 1), (2, 2), (5, 3), (9, 5), (63, 32)):
        secret, ids = secure_vectors.secret("a secret", n), draw.choice(10**6, n, replace=False).tolist()
        shares = shamir.split(secret, ids, t)
        for _ in range(5):
            some = draw.choice(ids, t, replace=False).tolist()
            assert shamir.join({i: shares[i] for i in some}, t) == secret
        if t > 1:  # t - 1 shares and any secret are values of one polynomial
            other = secure_vectors.secret("another", n)
            points = [0, *(i + 1 for i in some[1:])]
            values = [int.from_bytes(s, "big") for s in (other, *(shares[i] for i in some[1:]))]
            at = some[0] + 1
            forged = 0
            for k, x in enumerate(points):
                above, below = 1, 1
                for y in points[:k] + points[k + 1 :]:
                    above, below = above * (at - y) % shamir.ORDER, below * (x - y) % shamir.ORDER
                forged += values[k] * above * pow(below, -1, shamir.ORDER)
            mixed = {some[0]: (forged % shamir.ORDER).to_bytes(32, "big")} | {i: shares[i] for i in some[1:]}
            assert shamir.join(mixed, t) == other
    with pytest.raises(shamir.ShareError, match="needed"):
        shamir.join({1: bytes(32)}, 2)
    with pytest.raises(shamir.ShareError, match="cannot be"):
        shamir.split(bytes(32), [1, 2], 3)
    with pytest.raises(shamir.ShareError, match="below the order"):
        shamir.split(b"\xff" * 32, [1, 2], 2)


def test_codec_cases_of_the_file():
    for case in FOUND["codec_cases"]:
        codec = Codec(**{name: case[name] for name in FOUND["codec"]})
        gradient, random = (np.array(case[name], np.uint32) for name in ("gradient", "random"))
        how = case["weight"], case["examples"], case["loss"]
        found = codec.encode(gradient.view(np.float32), *how, random)
        assert found.words.tolist() == case["words"] and found.norm == case["norm"]


def test_what_a_client_refuses():
    told = {int(i): about["told"] for i, about in FOUND["clients"].items()}
    peers = {i: exchange.checked_peer(ATTEMPT, about) for i, about in told.items()}
    for changed in ({"mask": told[5]["mask"]}, {"signature": told[5]["signature"]}, {"client": 5}):
        with pytest.raises(ValueError, match="signature"):
            exchange.checked_peer(ATTEMPT, told[2] | changed)
    with pytest.raises(ValueError, match="signature"):  # of another attempt
        exchange.checked_peer(ATTEMPT._replace(number=2), told[2])
    about = FOUND["clients"]["5"]
    secrets = exchange.Secrets(**{name: bytes.fromhex(value) for name, value in about["private"].items()})
    others = {i: peer for i, peer in peers.items() if i != 5}
    box = bytes.fromhex(FOUND["clients"]["2"]["boxes"]["5"])
    assert exchange.open_boxes(ATTEMPT, 5, secrets, others, {2: box})[2].seed.hex() == about["holds"]["2"][0]
    for sender, bad in ((7, box), (2, box[:-1] + bytes([box[-1] ^ 1])), (2, box[:20]), (9, box)):
        with pytest.raises(SecureError):
            exchange.open_boxes(ATTEMPT, 5, secrets, others, {sender: bad})
    for t, k in ((1, 2), (1, 1), (2, 1), (4, 3), (2, 5), (5, 10)):
        with pytest.raises(SecureError, match="not safe"):
            exchange.checked_threshold(t, k)
    held = {i: exchange.Held(b"s", b"m") for i in (2, 7, 11)}
    assert exchange.answer(held, [2, 7], 2) == ({2: b"s", 7: b"s"}, {11: b"m"})
    with pytest.raises(SecureError, match="nothing is revealed"):
        exchange.answer(held, [2], 2)
    with pytest.raises(SecureError, match="closed no box"):
        exchange.answer(held, [2, 3], 2)
