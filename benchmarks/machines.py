"""The Ray engine: processes killed in the middle of rounds, what a second process gains, what Ray costs.

    python benchmarks/machines.py kills [--runs 10] [--rounds 20] [--seed 0]
    python benchmarks/machines.py throughput [--rounds 10] [--clients 8] [--examples 200]
    python benchmarks/machines.py overhead [--rounds 20] [--clients 20] [--examples 600]

kills: runs of PFLEGO on two processes, in each of which one process gets a kill -9 at a random moment of a random
round; the end against that of the local engine. throughput: rounds on two single-threaded processes against rounds on
one, in turn. overhead: rounds against those of the local engine, in turn. The data are synthetic. Exits with 1 where a
result differs by 1e-6 or more.
"""

import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import numpy as np
import tensorflow as tf
from listed import Written

from tfpfl import Federation, Simulation, SplitModel, Visit, build_algorithm
from tfpfl.data.randomness import client_key
from tfpfl.engines.ray.engine import RayEngine
from tfpfl.models import build_network


def synthetic(clients: int, examples: int, shape: tuple, folder: Path) -> Federation:
    """Clients with `examples` random images of two classes each: nothing to learn, so gradients do not vanish."""
    rng = np.random.default_rng(0)
    data = []
    for _ in range(clients):
        y = np.arange(examples, dtype=np.int32) % 2
        x = rng.integers(0, 256, (examples, *shape), np.uint8)
        data.append({"train": (x, y), "test": (x[:10], y[:10])})
    return Federation.from_clients(data, out=folder, validation=0.0)


def make(federation, network: str, tau: int):
    """PFLEGO with plain gradient steps: Adam would turn rounding errors of vanishing gradients into whole steps."""
    model = SplitModel(build_network(network, federation.example_shape))
    return build_algorithm("pflego", model, federation.population(), tau=tau, server_opt="sgd")


def announced(federation, folder: str, network: str, tau: int):
    """`make`, in a process that says that it is there."""
    (Path(folder) / str(os.getpid())).touch()
    return make(federation, network, tau)


logging.getLogger("tensorflow").setLevel(logging.ERROR)  # that every run traces its own graphs is meant


class Course:
    """Rounds of one engine, everyone in every round."""

    def __init__(self, engine):
        self.engine, self.population, self.t = engine, engine.algorithm.population, 0
        self.server = engine.initialize()
        self.states = [engine.algorithm.init_client(self.population.info(i)) for i in self.population.client_ids]
        self.seconds = []

    def round(self) -> None:
        """One more."""
        self.t += 1
        ids = self.population.client_ids
        keys = client_key(0, self.t, ids)
        visits = [Visit(self.population.info(i), key) for i, key in zip(ids, keys, strict=True)]
        began = time.perf_counter()
        out = self.engine.next(self.server, self.states, visits)
        self.server, self.states = out.server, tf.nest.map_structure(np.asarray, out.client_states)
        self.seconds.append(time.perf_counter() - began)

    def result(self) -> list:
        """All arrays of the server's and the clients' states."""
        return [np.asarray(leaf) for leaf in tf.nest.flatten((self.server, self.states))]


def difference(a: Course, b: Course) -> float:
    """The largest, over all numbers."""
    return max(float(np.abs(x - y).max()) for x, y in zip(a.result(), b.result(), strict=True))


def in_turn(courses: dict, rounds: int) -> dict:
    """Seconds a round: {name: [rounds]}; the first two rounds, which build_network and trace, do not count."""
    for t in range(rounds + 2):
        for name in courses if t % 2 else reversed(courses):
            courses[name].round()
    return {name: np.array(course.seconds[2:]) for name, course in courses.items()}


def report(seconds: dict, over: str, differs: float, json_path) -> None:
    """Prints seconds a round and the median ratio of neighbouring rounds."""
    result = {"largest_difference": differs, "load": os.getloadavg()[0]}
    for name, values in seconds.items():
        low, middle, high = np.percentile(values, [25, 50, 75])
        ratio = float(np.median(values / seconds[over]))
        result[name] = {"seconds": [low, middle, high], f"over_{over}": ratio}
        click.echo(f"{name:6} {middle:.3f} s a round (quartiles {low:.3f} to {high:.3f}), / {over} {ratio:.3f}")
    click.echo(f"largest difference {differs:.1e}; load of the machine {result['load']:.1f}")
    if json_path:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    if differs >= 1e-6:
        sys.exit("DIFFERENT")


@click.group(help=__doc__)
def main():
    """The measurements."""


@main.command()
@click.option("--runs", default=10, show_default=True)
@click.option("--rounds", default=20, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the moments.")
def kills(runs, rounds, seed):
    """kill -9 of a process at a random moment of a random round."""
    rng, worst = random.Random(seed), 0.0
    with tempfile.TemporaryDirectory() as root:
        federation = synthetic(16, 300, (28, 28, 1), Path(root) / "federation")
        how = {"network": "mlp200", "tau": 50}
        expected = Course(Simulation(make(federation, **how), federation))
        for _ in range(rounds):
            expected.round()
        click.echo(
            f"{'run':>3}  {'round':>5}  {'usual':>7}  {'killed after':>12}  {'that round':>10}  {'difference':>10}"
        )
        for number in range(1, runs + 1):
            folder = Path(root) / str(number)
            folder.mkdir()
            recipe = partial(announced, folder=str(folder), **how)
            course = Course(RayEngine(make(federation, **how), federation, recipe))
            hit, fraction = rng.randint(3, rounds), rng.random()
            for t in range(1, rounds + 1):
                if t == hit:
                    usual = float(np.median(course.seconds[1:]))
                    victim = rng.choice(sorted(int(p.name) for p in folder.iterdir() if p.name != str(os.getpid())))
                    threading.Timer(fraction * usual, os.kill, (victim, signal.SIGKILL)).start()
                course.round()
            differs = difference(course, expected)
            worst = max(worst, differs)
            after, took = fraction * usual, course.seconds[hit - 1]
            click.echo(f"{number:>3}  {hit:>5}  {usual:>5.2f} s  {after:>10.2f} s  {took:>8.2f} s  {differs:>10.1e}")
    if worst >= 1e-6:
        sys.exit("DIFFERENT")
    click.echo(f"all {runs} runs ended by themselves; the largest difference from the local engine is {worst:.1e}")


@main.command()
@click.option("--rounds", default=10, show_default=True)
@click.option("--clients", default=8, show_default=True)
@click.option("--examples", default=200, show_default=True)
@click.option("--json", "json_path", type=Written())
def throughput(rounds, clients, examples, json_path):
    """Two processes against one, on a convolutional network."""
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("two processes need two cores")
    import ray

    # Where tasks of one and of two CPUs take turns, Ray ends the process that is idle meanwhile, and starts another.
    stay = {"kill_idle_workers_interval_ms": 0}
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    ray.init(address="local", num_cpus=2, _node_ip_address="127.0.0.1", _system_config=stay, **quiet)
    with tempfile.TemporaryDirectory() as root:
        federation = synthetic(clients, examples, (32, 32, 3), Path(root) / "federation")
        recipe = partial(make, network="cifar_2conv", tau=10)
        courses = {name: Course(RayEngine(recipe(federation), federation, recipe)) for name in ("one", "two")}
        tasks = courses["one"].engine._clients
        tasks._work = tasks._work.options(num_cpus=2)  # of two: one shard at a time
        seconds = in_turn(courses, rounds)
        report(seconds, "one", difference(*courses.values()), json_path)


@main.command()
@click.option("--rounds", default=20, show_default=True)
@click.option("--clients", default=20, show_default=True)
@click.option("--examples", default=600, show_default=True)
@click.option("--tau", default=50, show_default=True)
@click.option("--json", "json_path", type=Written())
def overhead(rounds, clients, examples, tau, json_path):
    """Against the local engine, on a dense network."""
    with tempfile.TemporaryDirectory() as root:
        federation = synthetic(clients, examples, (28, 28, 1), Path(root) / "federation")
        recipe = partial(make, network="mlp200", tau=tau)
        algorithm = recipe(federation)
        courses = {
            "local": Course(Simulation(algorithm, federation)),
            "plain": Course(Simulation(algorithm, federation, grouping="one_by_one")),
            "ray": Course(RayEngine(algorithm, federation, recipe)),
        }
        seconds = in_turn(courses, rounds)
        differs = max(difference(courses["local"], courses[name]) for name in ("plain", "ray"))
        report(seconds, "local", differs, json_path)


if __name__ == "__main__":
    main()
