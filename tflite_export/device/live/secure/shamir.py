"""Shamir's shares: any `threshold` of them give the secret, and fewer say nothing about it.

The numbers are those modulo n, the order of the curve P-256 (FIPS 186-5): so a private key of the curve is a secret of
exactly 32 bytes, and OpenSSL and other libraries have n. The share of client i is the polynomial's value at i + 1.

Source:
    Shamir: How to share a secret, Communications of the ACM 22 (11), 1979.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

from tflite_export.device.errors import InvalidInput

ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
SIZE = 32  # bytes of a secret and of a share, most significant first


class ShareError(InvalidInput):
    """There are too few shares, or something is none."""


def split(
    secret: bytes, clients: Iterable[int], threshold: int, draw: Callable[[int], int] = secrets.randbelow
) -> dict[int, bytes]:
    """Shares of a secret: {client: 32 bytes}.

    Args:
        secret: 32 bytes, a number below `ORDER`.
        clients: those who get one, not negative.
        threshold: so many shares give the secret.
        draw: (n) -> a number that is uniform in 0 .. n - 1 and that nobody can guess. It is called threshold - 1 times,
            for the coefficients of x, x^2, ...

    Raises:
        ShareError: the secret is none, there are fewer clients than the threshold, or a client is there twice.
    """
    clients = list(clients)
    if not 1 <= threshold <= len(clients) or len(set(clients)) < len(clients) or min(clients) < 0:
        raise ShareError(f"{len(clients)} shares, of which {threshold} are needed: this cannot be")
    coefficients = [_number(secret), *(draw(ORDER) for _ in range(threshold - 1))]
    return {i: _value(coefficients, i + 1).to_bytes(SIZE, "big") for i in clients}


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret of shares: 32 bytes. Of more shares than the threshold, those of the smallest clients are taken.

    Args:
        shares: {client: its share}.
        threshold: so many are needed.

    Raises:
        ShareError: there are too few, or one is none.
    """
    if len(shares) < threshold:
        raise ShareError(f"{threshold} shares are needed, and {len(shares)} are here")
    chosen = sorted(shares)[:threshold]
    weights = weights_at_zero([i + 1 for i in chosen])
    total = sum(w * _number(shares[i]) for i, w in zip(chosen, weights, strict=True))
    return (total % ORDER).to_bytes(SIZE, "big")


def weights_at_zero(points: Sequence[int]) -> list[int]:
    """What the values of a polynomial at these points count in its value at 0 (Lagrange), modulo `ORDER`."""
    weights = []
    for x in points:
        above, below = 1, 1
        for other in points:
            if other != x:
                above, below = above * other % ORDER, below * (other - x) % ORDER
        weights.append(above * pow(below, -1, ORDER) % ORDER)
    return weights


def _value(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % ORDER
    return value


def _number(share: bytes) -> int:
    number = int.from_bytes(share, "big")
    if len(share) != SIZE or number >= ORDER:
        raise ShareError(f"a share has {SIZE} bytes and is below the order of P-256")
    return number
