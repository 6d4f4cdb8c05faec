"""What secure aggregation costs: a client's CPU, its upload, and the server's time.

    python benchmarks/secure.py client [--clients 100] [--numbers 111424] [--repeat 9]
    python benchmarks/secure.py cohort [--clients 100] [--numbers 111424] [--drop 0.1]
    python benchmarks/secure.py cases [--cases 10000]

`client`: CPU milliseconds of one of many clients for its four messages, as a device makes them, with the files that it
keeps; and the bytes of the messages against a float32 payload. `cohort`: a whole attempt in one process; the server's
seconds from the last message to the sum, and whether the sum is that of the integers. `cases`: random cohorts whose
decoded sum is compared with the integer sum, bit for bit.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
import numpy as np

from tflite_export.device import payload
from tflite_export.device.head_file import SavedHead
from tflite_export.device.live import wire
from tflite_export.device.live.secure import exchange
from tflite_export.device.live.secure.codec import Codec
from tflite_export.device.live.secure.masks import Attempt, PrivateKey
from tflite_export.device.live.secure.state import SecureState
from tflite_export.device.live.secure.visits import SecureVisits
from tflite_export.device.live.state import Pending
from tfpfl.live import secure_graph as graph
from tfpfl.live.secure_sum import Circle, Shares, open_sum, without_few

RUN = "0123456789abcdef"


@click.group()
def main():
    """See the module."""


def told(attempt, client, secrets, signer):
    """A client as its neighbours are told of it."""
    return {"client": client, "identity": signer.public} | exchange.advertise(attempt, client, secrets, signer)


def machine() -> str:
    """The processor, for the line that is printed."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "this processor")


@main.command()
@click.option("--clients", default=100)
@click.option("--numbers", default=111_424)
@click.option("--repeat", default=9)
@click.option("--seed", default=0)
def client(clients, numbers, repeat, seed):
    """One client's CPU and bytes."""
    draw = np.random.default_rng(seed)
    attempt, me = Attempt(RUN, 1, 1), clients // 2
    secrets = {i: exchange.Secrets.drawn() for i in range(clients)}
    signers = {i: wire.Signer() for i in range(clients)}
    about = {i: told(attempt, i, secrets[i], signers[i]) for i in range(clients)}
    peers = {i: exchange.checked_peer(attempt, one) for i, one in about.items()}
    near = graph.neighbours(attempt, peers, 0.5)[me]
    t = graph.threshold_of(len(near), 0.5)
    codec = Codec(numbers, clients, 100.0, 1.0 / clients, 600)
    names = ("size", "clients", "clip", "max_weight", "max_examples", "exponent", "loss_exponent")
    gradient = draw.normal(0, 1e-3, numbers).astype(np.float32)
    plain = payload.encode(gradient)
    visited = Pending(
        1,
        wire.pack({"theta": "0" * 64, "examples": 600, "loss": 0.5, "scores": []}, plain),
        SavedHead(np.zeros((2, 2), np.float32), np.zeros(2, np.float32), "00" * 32),
    )
    times, bytes_up = [], {}
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            state = SecureState(Path(folder))
            device = SecureVisits(state, me, signers[me])
            spent = {}

            def message(work, device=device, spent=spent):
                work = json.loads(json.dumps({"round": 1, "attempt": 1, "seconds": 9.0} | work))
                begin = time.process_time()
                body = device.message(work, visited)
                spent[work["kind"]] = time.process_time() - begin
                bytes_up[work["kind"]] = len(body)
                return body

            told_codec = {name: getattr(codec, name) for name in names}
            first = {"kind": "keys", "run": RUN, "codec": told_codec, "weight": 1.0 / clients}
            mine = json.loads(message(first))
            my = exchange.Peer(me, *(wire.to_bytes(mine[name], name) for name in ("mask", "share")))
            message({"kind": "shares", "threshold": t, "peers": [about[i] for i in near]})
            boxes = {}
            for i in near:  # what the neighbours closed; each of them only for this client
                box = exchange.close(attempt, i, secrets[i], [my], 1)[me]
                boxes[str(i)] = wire.to_text(box)
            message({"kind": "masked", "boxes": boxes})
            message({"kind": "unmask", "survivors": list(near)[: max(t, int(0.9 * len(near)))]})
            times.append(spent)
    totals = [1000 * sum(spent.values()) for spent in times]
    parts = ", ".join(f"{phase} {1000 * median(s[phase] for s in times):.1f}" for phase in wire.PHASES)
    print(f"{clients} clients, {numbers} numbers, {len(near)} neighbours, t = {t}, on {machine()}")
    print(f"CPU of a client: {median(totals):.1f} ms ({min(totals):.1f} to {max(totals):.1f}): {parts}")
    total = sum(bytes_up.values())
    print(f"upload: {total} bytes, {total / len(plain):.3f} times float32 ({len(plain)} bytes): {bytes_up}")


@main.command()
@click.option("--clients", default=100)
@click.option("--numbers", default=111_424)
@click.option("--drop", default=0.1, help="The part of the clients that send no words.")
@click.option("--seed", default=0)
def cohort(clients, numbers, drop, seed):
    """A whole attempt; the server's time for the sum."""
    draw = np.random.default_rng(seed)
    attempt, ids = Attempt(RUN, 1, 1), range(clients)
    secrets = {i: exchange.Secrets.drawn() for i in ids}
    keys = {i: exchange.Peer(i, PrivateKey(s.mask).public, PrivateKey(s.share).public) for i, s in secrets.items()}
    near = graph.neighbours(attempt, keys, 0.5)
    limits = {i: graph.threshold_of(len(n), 0.5) for i, n in near.items()}
    boxes = {i: exchange.close(attempt, i, secrets[i], [keys[j] for j in near[i]], limits[i]) for i in ids}
    gone = set(draw.choice(clients, int(drop * clients), replace=False).tolist())
    words, masked, shares = {}, {}, {}
    for i in ids:
        if i not in gone:
            words[i] = draw.integers(0, 2**32, numbers, dtype=np.uint32)
            masked[i] = exchange.mask(attempt, i, secrets[i], [keys[j] for j in near[i]], words[i])
    for i in masked:
        held = exchange.open_boxes(attempt, i, secrets[i], keys, {j: boxes[j][i] for j in near[i]})
        shares[i] = Shares(*exchange.answer(held, [j for j in near[i] if j in masked], limits[i]))
    circle = Circle(near, limits, without_few(near, limits, ids), frozenset(masked))
    begin = time.process_time()
    total = open_sum(attempt, circle, keys, masked, shares)
    seconds = time.process_time() - begin
    exact = total.tolist() == (sum(w.astype(np.uint64) for w in words.values()) % 2**32).tolist()
    print(
        f"{clients} clients, {numbers} numbers, {len(near[0])} neighbours, {len(gone)} dropped out, on {machine()}: "
        f"the server's CPU for the sum is {seconds:.2f} s; it is {'' if exact else 'NOT '}that of the integers"
    )


@main.command()
@click.option("--cases", default=10_000)
@click.option("--seed", default=0)
def cases(cases, seed):
    """Random cohorts: codec, masks, dropouts and decoding against the integers."""
    draw, same, opened, begin = np.random.default_rng(seed), 0, 0, time.monotonic()
    for case in range(cases):
        n, size = int(draw.integers(3, 7)), int(draw.integers(1, 30))
        codec = Codec(size, n, float(10 ** draw.uniform(-2, 2)), 1.0, 500)
        attempt, ids = Attempt(f"{case}", case + 1, 1), sorted(draw.choice(10**6, n, replace=False).tolist())
        secrets = {i: exchange.Secrets.drawn() for i in ids}
        keys = {i: exchange.Peer(i, PrivateKey(s.mask).public, PrivateKey(s.share).public) for i, s in secrets.items()}
        near = graph.neighbours(attempt, keys, 0.5)
        limits = {i: graph.threshold_of(len(x), 0.5) for i, x in near.items()}
        boxes = {i: exchange.close(attempt, i, secrets[i], [keys[j] for j in near[i]], limits[i]) for i in ids}
        here = ids[: n - int(draw.integers(0, n - limits[ids[0]]))]
        words, masked, shares = {}, {}, {}
        for i in here:
            gradient = (draw.standard_normal(size) * 10 ** draw.uniform(-6, 3)).astype(np.float32)
            random = exchange.random_words(attempt, i, secrets[i], codec.words)
            how = float(draw.uniform(0.01, 1)), int(draw.integers(1, 500)), float(draw.normal(1, 30))
            words[i] = codec.encode(gradient, *how, random).words
            masked[i] = exchange.mask(attempt, i, secrets[i], [keys[j] for j in near[i]], words[i])
        for i in here:
            held = exchange.open_boxes(attempt, i, secrets[i], keys, {j: boxes[j][i] for j in near[i]})
            shares[i] = Shares(*exchange.answer(held, [j for j in near[i] if j in masked], limits[i]))
        circle = Circle(near, limits, frozenset(ids), frozenset(here))
        if len(here) < exchange.LEAST or circle.short_of(shares):
            continue
        opened += 1
        sums = codec.decode(open_sum(attempt, circle, keys, masked, shares))
        integers = [sum(int(w[j]) - (int(w[j]) >> 31 << 32) for w in words.values()) for j in range(codec.words)]
        exact = [q * 2.0**-codec.exponent for q in integers[:size]]
        same += sums.gradient.tolist() == exact and [sums.examples, sums.clipped] == integers[size:-1]
    print(
        f"{opened} of {cases} random cases have enough clients left; in {same} of these the decoded sum is that of the "
        f"integers, bit for bit (seed {seed}, {time.monotonic() - begin:.0f} s)"
    )


if __name__ == "__main__":
    main()
