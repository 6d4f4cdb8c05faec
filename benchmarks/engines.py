"""A round through TFF against the same round in process, in turn, in one process.

plain: the local engine, client by client on one thread; local: as it is by default; tff: one client at a time on every
core; packed: TFF with half of the cohort as one client.

    python benchmarks/engines.py [--clients 20] [--examples 600] [--rounds 15] [--tau 50] [--json FILE]

Synthetic images of 28x28 with 2 classes a client, everyone in every round, `mlp200`. Prints seconds a round (median and
quartiles), the median of the ratios of neighbouring rounds, and the largest difference of the results.
"""

import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import numpy as np
import tensorflow as tf
from listed import Written

from tfpfl import Federation, Simulation, SplitModel, Visit, build_algorithm
from tfpfl.data.randomness import client_key
from tfpfl.engines.tff.process import federate
from tfpfl.models import build_network


def synthetic(clients: int, examples: int, folder: Path) -> Federation:
    """Clients with `examples` random images of two classes each: nothing to learn, so gradients do not vanish."""
    rng = np.random.default_rng(0)
    data = []
    for _ in range(clients):
        y = np.arange(examples, dtype=np.int32) % 2
        x = rng.integers(0, 256, (examples, 28, 28, 1), np.uint8)
        data.append({"train": (x, y), "test": (x[:10], y[:10])})
    return Federation.from_clients(data, out=folder, validation=0.0)


@click.command(help=__doc__)
@click.option("--clients", default=20, show_default=True)
@click.option("--examples", default=600, show_default=True)
@click.option("--rounds", default=15, show_default=True)
@click.option("--tau", default=50, show_default=True)
@click.option("--json", "json_path", type=Written())
def main(clients, examples, rounds, tau, json_path):
    """Runs the comparison."""
    with tempfile.TemporaryDirectory() as folder:
        federation = synthetic(clients, examples, Path(folder) / "federation")
        population = federation.population()
        model = SplitModel(build_network("mlp200", federation.example_shape))
        # Plain gradient steps: Adam would turn rounding errors of vanishing gradients into whole steps.
        algorithm = build_algorithm("pflego", model, population, tau=tau, server_opt="sgd")
        engines = {
            "plain": Simulation(algorithm, federation, grouping="one_by_one", threads=1),
            "local": Simulation(algorithm, federation),
            "tff": federate(algorithm, federation),
            "packed": federate(algorithm, federation, pack=-(-clients // 2)),
        }
        ids = population.client_ids
        initial = [algorithm.init_client(population.info(i)) for i in ids]
        state = {name: (engine.initialize(), initial) for name, engine in engines.items()}
        seconds = {name: [] for name in engines}
        for t in range(1, rounds + 3):
            visits = [Visit(population.info(i), key) for i, key in zip(ids, client_key(0, t, ids), strict=True)]
            for name in engines if t % 2 else reversed(engines):
                started = time.perf_counter()
                out = engines[name].next(*state[name], visits)
                tf.nest.map_structure(np.asarray, out.client_states)
                seconds[name].append(time.perf_counter() - started)
                state[name] = out.server, out.client_states
        plain, *others = [tf.nest.flatten(s) for s in state.values()]
        pairs = [pair for other in others for pair in zip(plain, other, strict=True)]
        difference = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    seconds = {name: np.array(s[2:]) for name, s in seconds.items()}  # the first rounds trace and compile
    result = {
        "clients": clients,
        "examples": examples,
        "tau": tau,
        "rounds": rounds,
        "seconds": {name: np.percentile(s, [25, 50, 75]).round(4).tolist() for name, s in seconds.items()},
        "over_plain": {name: float(np.median(s / seconds["plain"])) for name, s in seconds.items()},
        "largest_difference": difference,
    }
    for name, (low, middle, high) in result["seconds"].items():
        over = result["over_plain"][name]
        click.echo(f"{name:6} {middle:.3f} s a round (quartiles {low:.3f} to {high:.3f}), / plain {over:.3f}")
    click.echo(f"largest difference {difference:.1e}")
    if json_path:
        json_path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
