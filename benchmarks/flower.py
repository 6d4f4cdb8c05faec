"""Seconds of a round with Flower's nodes, and with tfpfl's own server: the same run, the same two devices on LiteRT.

    python benchmarks/flower.py [--rounds 5]

All processes are on the loopback. The environments are those of tests/live/test_flower.py, made once and kept.
TFPFL_OTHER_PYTHON names a Python with TensorFlow 2.16 or newer, if this one has an older. Both devices score every
round, so it has two parts: the visits, and the scores of the new theta.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import click
import numpy as np

from helpers.flower import flower, node_python, server_python
from tflite_export.convert.program import flatten
from tfpfl import Run, RunConfig
from tfpfl.live.demo import processes, start_device, start_server
from tfpfl.live.flower import write_app
from tfpfl.live.rules import Rules
from tfpfl.live.serve import TOKENS, write_data

CLIENTS = (0, 1)


def new_run(folder: Path, rounds: int) -> None:
    """Makes a run on digits, and the files of its devices in folder/data."""
    config = RunConfig(
        hyperparameters={"rho": 0.01, "beta": 0.05, "rule": "exact", "server_opt": "sgd"}, dataset="digits",
        partition_args={"K": 5}, clients=2, network="mlp200", participation=1.0, rounds=rounds, evaluate_every=1,
    )  # fmt: skip
    with Run.create(config, folder) as run:
        for client in CLIENTS:
            write_data(run.federation, run.population, client, folder / "data" / str(client))
        write_app(run, folder / "app", Rules(wait_for=2, deadline=600.0))


def with_flower(folder: Path) -> None:
    """Runs the rounds of a run folder with a SuperLink and two nodes."""
    tokens = json.loads((folder / TOKENS).read_text())
    with flower(folder / "flower") as link:
        for i in CLIENTS:
            link.start_node(i, folder / "data" / str(i), folder / "devices" / str(i), tokens[str(i)])
        link.flwr("run", folder / "app", "here")
        until = time.monotonic() + 3600
        while not (folder / "summary.json").exists():
            if time.monotonic() > until:
                raise click.ClickException(f"the rounds do not end; logs are in {folder / 'flower'}")
            time.sleep(0.5)
        time.sleep(3)  # the ServerApp closes the run


def with_own_server(folder: Path) -> None:
    """Runs the rounds of a run folder with `tfpfl serve` and two devices."""
    with processes() as started:
        server, address = start_server(folder, folder / "server.log", "--wait-for", "2")
        started.append(server)
        started += [start_device(address, i, folder, str(node_python())) for i in CLIENTS]
        server.wait(3600)


@click.command()
@click.option("--rounds", default=5)
def main(rounds):
    """See the module."""
    node_python(), server_python()
    base = Path(tempfile.mkdtemp())
    new_run(base / "flower", rounds)
    shutil.copytree(base / "flower", base / "own")
    thetas = []
    for name, work in (("own", with_own_server), ("flower", with_flower)):
        work(base / name)
        with Run.open(base / name) as run:
            seconds = [row["seconds"] for row in run.store.history()]
            thetas.append(flatten(run.algorithm.message(run.training().server_state())))
        each = ", ".join(f"{s:.2f}" for s in seconds)
        print(f"{name}: {statistics.median(seconds):.2f} s a round (median of {each})", flush=True)
    print(f"theta differs by {np.abs(thetas[0] - thetas[1]).max():.1e} between the two; in {base}")


if __name__ == "__main__":
    main()
