"""A round costs what its cohort costs: 100,000 clients against 1,000, with the same number of them in a round.

    python benchmarks/population.py [--rounds 15] [--cohort 50] [--json FILE]

Synthetic clients of 8 examples with 16 features and 2 to 4 classes; PFLEGO, tau = 10, a dense backbone, the local
engine, everything that a round of `tfpfl.Training` does: drawing the cohort, reading states, the round, one transaction
in the SQLite store. Both populations run in turn, in one process; the memory is the growth of the resident set from
before the large federation is opened to after its last round.
"""

import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import keras
import numpy as np
import psutil
from listed import Written

from tfpfl import Federation, Sampling, SplitModel, Training, build_algorithm
from tfpfl.runs.store import RunStore

EXAMPLES, FEATURES = 8, 16


def synthetic(clients: int, folder: Path) -> None:
    """A federation of clouds, one a class; client i has 2 + i % 3 classes."""
    rng = np.random.default_rng(0)
    means = rng.standard_normal((4, FEATURES))

    def client(i):
        y = np.arange(EXAMPLES, dtype=np.int32) % (2 + i % 3)
        return {"train": ((means[y] + rng.standard_normal((EXAMPLES, FEATURES))).astype(np.float32), y)}

    Federation.from_clients([client(i) | {"test": client(i)["train"]} for i in range(clients)], out=folder,
                            validation=0.0)  # fmt: skip


def training(folder: Path, cohort: int) -> Training:
    """A run on a federation, with its store beside it."""
    federation = Federation.load(folder)
    backbone = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(32, activation="relu")])
    population = federation.population(Sampling("range", low=cohort, high=cohort))
    algorithm = build_algorithm("pflego", SplitModel(backbone), population, tau=10)
    return Training(algorithm, federation, store=RunStore(folder.with_suffix(".sqlite")), evaluate_every=0)


@click.command(help=__doc__)
@click.option("--rounds", default=15, show_default=True)
@click.option("--cohort", default=50, show_default=True)
@click.option("--json", "json_path", type=Written())
def main(rounds, cohort, json_path):
    """Runs the comparison."""
    process = psutil.Process()
    with tempfile.TemporaryDirectory() as root:
        folders = {clients: Path(root) / str(clients) for clients in (1_000, 100_000)}
        for clients, folder in folders.items():
            synthetic(clients, folder)
        runs = {1_000: training(folders[1_000], cohort)}
        few_rounds(runs[1_000], 3)
        before = process.memory_info().rss
        started = time.perf_counter()
        runs[100_000] = training(folders[100_000], cohort)
        opened = time.perf_counter() - started
        few_rounds(runs[100_000], 3)
        seconds = {clients: [] for clients in runs}
        for t in range(rounds):
            for clients in runs if t % 2 else reversed(runs):
                started = time.perf_counter()
                few_rounds(runs[clients], 1)
                seconds[clients].append(time.perf_counter() - started)
        grown = process.memory_info().rss - before
        store = sum(file.stat().st_size for file in Path(root).glob("100000.sqlite*"))  # with its write-ahead log
    seconds = {clients: np.array(s) for clients, s in seconds.items()}
    result = {
        "rounds": rounds,
        "cohort": cohort,
        "seconds": {clients: float(np.median(s)) for clients, s in seconds.items()},
        "ratio": float(np.median(seconds[100_000] / seconds[1_000])),
        "seconds_to_open": opened,
        "memory_growth_bytes": grown,
        "store_bytes": store,
        "clients_in_store_at_most": (rounds + 3) * cohort,
    }
    for clients, s in result["seconds"].items():
        click.echo(f"{clients:7,} clients {s:.4f} s a round")
    held = f"the store holds the states of at most {(rounds + 3) * cohort} clients in {store / 1e6:.2f} MB"
    click.echo(f"ratio {result['ratio']:.3f}; opening took {opened:.1f} s; memory grew by {grown / 1e6:.0f} MB; {held}")
    if json_path:
        json_path.write_text(json.dumps(result, indent=2) + "\n")


def few_rounds(run: Training, more: int) -> None:
    """Trains on; the last ten rounds of a training are evaluated on all clients, and so here the end is far away."""
    run.evaluate_every, last = 0, run.store.round_num + more
    server = run.server_state()
    while run.store.round_num < last:
        server = run._round(run.store.round_num + 1, 10**6, server)


if __name__ == "__main__":
    main()
