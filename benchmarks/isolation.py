"""What the isolation of TFF's worker costs: the same rounds on an isolated worker and on an open one, in turn.

    python benchmarks/isolation.py [--algorithm pflego] [--clients 20] [--examples 600] [--rounds 20] [--json FILE]

Everyone in every round; synthetic images of 28x28 with 2 classes a client, `mlp200`. The states of the server and of
all clients go to the worker and come back in every round: heads with pflego, whole models with ditto, which therefore
sends much more. Prints seconds a round (median and quartiles), the median and the quartiles of the ratios of
neighbouring rounds, and the largest difference of the results. --same takes two open workers, which shows what the
measurement itself is good for.
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

from tfpfl import Federation, SplitModel, Visit, build_algorithm
from tfpfl.data.randomness import client_key
from tfpfl.engines.tff.process import federate
from tfpfl.engines.tff.worker import Worker, context_on
from tfpfl.models import build_network


def synthetic(clients: int, examples: int, folder: Path) -> Federation:
    """Clients with `examples` random images of two classes each."""
    rng = np.random.default_rng(0)
    data = []
    for _ in range(clients):
        y = np.arange(examples, dtype=np.int32) % 2
        x = rng.integers(0, 256, (examples, 28, 28, 1), np.uint8)
        data.append({"train": (x, y), "test": (x[:10], y[:10])})
    return Federation.from_clients(data, out=folder, validation=0.0)


class Course:
    """Rounds of one worker; its state and seconds."""

    def __init__(self, process, population, initial, isolate: bool):
        self.process, self.population, self.worker = process, population, Worker(os.cpu_count() or 1, isolate)
        self.context, self.seconds = context_on(lambda: self.worker.stub), []
        self.server, self.states = None, initial

    def round(self, t: int) -> None:
        """One more."""
        from tensorflow_federated.python.core.impl.context_stack import context_stack_impl

        ids = self.population.client_ids
        visits = [Visit(self.population.info(i), key) for i, key in zip(ids, client_key(0, t, ids), strict=True)]
        with context_stack_impl.context_stack.install(self.context):
            self.server = self.process.initialize() if self.server is None else self.server
            began = time.perf_counter()
            out = self.process.next(self.server, self.states, visits)
            self.server, self.states = out.server, tf.nest.map_structure(np.asarray, out.client_states)
            self.seconds.append(time.perf_counter() - began)

    def result(self) -> list:
        """All arrays of the server's and the clients' states."""
        return [np.asarray(leaf) for leaf in tf.nest.flatten((self.server, self.states))]


@click.command(help=__doc__)
@click.option("--algorithm", default="pflego", show_default=True)
@click.option("--clients", default=20, show_default=True)
@click.option("--examples", default=600, show_default=True)
@click.option("--rounds", default=20, show_default=True)
@click.option("--same", is_flag=True)
@click.option("--json", "json_path", type=Written())
def main(algorithm, clients, examples, rounds, same, json_path):
    """Runs the comparison."""
    with tempfile.TemporaryDirectory() as folder:
        federation = synthetic(clients, examples, Path(folder) / "federation")
        population = federation.population(shared_slots=True)
        model = SplitModel(build_network("mlp200", federation.example_shape))
        # Plain gradient steps: Adam would turn rounding errors of vanishing gradients into whole steps.
        how = {"tau": 50, "server_opt": "sgd"} if algorithm == "pflego" else {}
        method = build_algorithm(algorithm, model, population, **how)
        initial = [method.init_client(population.info(i)) for i in population.client_ids]
        process = federate(method, federation)
        courses = {
            "open": Course(process, population, initial, False),
            "other": Course(process, population, initial, not same),
        }
        for t in range(1, rounds + 3):
            for name in courses if t % 2 else reversed(courses):
                courses[name].round(t)
        pairs = zip(*(course.result() for course in courses.values()), strict=True)
        difference = max(float(np.abs(np.subtract(a, b, dtype=float)).max(initial=0.0)) for a, b in pairs)
    seconds = {name: np.array(course.seconds[2:]) for name, course in courses.items()}  # the first two rounds trace
    ratios = seconds["other"] / seconds["open"]
    sent = sum(leaf.nbytes for leaf in courses["open"].result())
    result = {
        "state_bytes": sent,
        "seconds": {name: np.percentile(s, [25, 50, 75]).round(5).tolist() for name, s in seconds.items()},
        "ratio": np.percentile(ratios, [25, 50, 75]).round(4).tolist(),
        "largest_difference": difference,
        "load": os.getloadavg()[0],
    }
    for name, (low, middle, high) in result["seconds"].items():
        label = name if name == "open" or same else "isolated"
        click.echo(f"{label:9} {middle:.4f} s a round (quartiles {low:.4f} to {high:.4f})")
    low, middle, high = result["ratio"]
    click.echo(f"ratio {middle:.3f} (quartiles {low:.3f} to {high:.3f}); states of {sent / 1e6:.2f} MB each way")
    click.echo(f"largest difference {difference:.1e}; load of the machine {result['load']:.1f}")
    if json_path:
        json_path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
