"""Rounds on several TFF workers: what a killed worker costs, and what a second worker gains.

    python benchmarks/tff_machines.py kill [--workers 3] [--rounds 20] [--kills 10] [--seed 0]
    python benchmarks/tff_machines.py throughput [--rounds 6] [--clients 24]

`kill`: runs of so many rounds on workers of this machine. In each, kill -9 of the worker that has just been given a
random part of a random round, at a random moment of its work; it is started again on the same port two rounds later.
Prints what the round took, beside the run's median round; how many parts were done again; and the largest difference
from an uninterrupted run (server and client states). Exits with 1 where a result differs by more than 1e-6.

`throughput`: the seconds of rounds of the CIFAR-10 network on random pictures, with one worker and with two, in turn
and in one process. Each worker has one thread on a core of its own, so the machine needs two idle cores.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from threading import Timer

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import keras
import numpy as np
import portpicker
import tensorflow as tf

from tfpfl.algorithms import build_algorithm
from tfpfl.data import Federation
from tfpfl.data.population import Sampling
from tfpfl.engines.machines import Machines
from tfpfl.engines.tff.worker import answers, start_worker
from tfpfl.engines.tff.workers import Remote, ShardedProcess, number_of_shards
from tfpfl.models import SplitModel, build_network
from tfpfl.runs.callbacks import Callback
from tfpfl.runs.store import RunStore
from tfpfl.runs.training import Training


class Local:
    """A worker of this machine, on a port of its own; on `core` alone and with one thread, if that is given."""

    def __init__(self, folder: Path, core: int | None = None):
        self.port, self.folder, self.core = portpicker.pick_unused_port(), folder, core
        self.name = f"localhost:{self.port}"
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        ours = os.sched_getaffinity(0)
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})  # inherited
        with open(self.folder / f"{self.port}.log", "ab") as log:
            self.process = start_worker(self.port, log, 1 if self.core is not None else 2)
        os.sched_setaffinity(0, ours)
        while not answers(self.name):
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()


class Clock(Callback):
    """When every round began and ended; starts what is due in a round."""

    def __init__(self, due=None):
        self.due, self.seconds, self.began = due or {}, [], None

    def start(self, training, rounds):
        """Round 1 begins."""
        self._begin(1)

    def round(self, training, row):
        """A round is over, and the next begins."""
        self.seconds.append(time.perf_counter() - self.began)
        self._begin(row["round"] + 1)

    def _begin(self, round_num):
        self.began = time.perf_counter()
        if round_num in self.due:
            self.due[round_num]()


class Given:
    """Counts the parts of a round as they are given to workers, and kills the worker that gets one of them."""

    def __init__(self, workers):
        self.by_name, self.parts, self.victim = {w.name: w for w in workers}, 0, None
        self._counting, self._run = False, Remote.run
        Remote.run = lambda remote, *arguments: self._begin(remote) or self._run(remote, *arguments)

    def kill_at(self, part, moment):
        """From now on, until it has happened."""
        self.parts, self.victim, self._counting, self._at = 0, None, True, (part, moment)

    def stop_counting(self):
        """The round is over."""
        self._counting = False

    def _begin(self, remote):
        if self._counting:
            self.parts += 1
            if self.parts == self._at[0]:
                self.victim = self.by_name[remote.name]
                Timer(self._at[1], self.victim.kill).start()


@click.group(help=__doc__)
def main():
    """The two measurements."""


@main.command()
@click.option("--workers", "number", default=3, show_default=True)
@click.option("--rounds", default=20, show_default=True)
@click.option("--kills", default=10, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of rounds, moments and victims.")
def kill(number, rounds, kills, seed):
    """A worker is killed in the middle of a round."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as root:
        federation = Federation.build("digits", "round_robin", clients=30, K=2, out=Path(root) / "federation")
        layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(30, activation="tanh")]
        population = federation.population(Sampling("fixed", 0.8))
        algorithm = build_algorithm("pflego", SplitModel(keras.Sequential(layers)), population, tau=1500, beta=0.001)
        workers = [Local(Path(root)) for _ in range(number)]
        machines = Machines(workers=tuple(w.name for w in workers), deadline=120)

        given, parts = Given(workers), number_of_shards(24)

        def run(due=None):
            clock, store = Clock(due), RunStore()
            how = {"engine": "tff", "machines": machines, "splits": ("test",), "evaluate_every": 0}
            training = Training(algorithm, federation, store=store, callbacks=[clock], **how)
            training.run(rounds)
            states = training.server_state(), training.client_states(population.client_ids.tolist())
            return [np.asarray(leaf) for leaf in tf.nest.flatten(states)], clock.seconds

        run()  # warm
        expected, seconds = run()
        usual = statistics.median(seconds)
        print(f"{rounds} rounds of 24 clients on {number} workers: median {usual:.2f} s, longest {max(seconds):.2f} s")
        print("kill  round  part  worker  after s  that round s  done again  largest difference")
        bad = []
        for n in range(1, kills + 1):
            t, part, moment = rng.randint(2, rounds - 3), rng.randint(1, parts), rng.random() * usual * number / parts
            due = {
                t: lambda part=part, moment=moment: given.kill_at(part, moment),
                t + 1: given.stop_counting,
                t + 2: lambda: given.victim.start(),
            }
            found, seconds = run(due)
            pairs = zip(found, expected, strict=True)
            difference = max(float(np.abs(a - b).max(initial=0)) for a, b in pairs if a.dtype.kind == "f")
            place, again = workers.index(given.victim) + 1, given.parts - parts
            print(
                f"{n:>4}  {t:>5}  {part:>4}  {place:>6}  {moment:>7.2f}  {seconds[t - 1]:>12.2f}  {again:>10}  "
                f"{difference:>18.2g}",
                flush=True,
            )
            bad += [n] if difference > 1e-6 else []
        for worker in workers:
            worker.kill()
    if bad:
        sys.exit(f"DIFFERENT after kills {bad}")
    print(f"all {kills} runs ended by themselves, with the result of the uninterrupted one within 1e-6")


@main.command()
@click.option("--rounds", default=6, show_default=True, help="Of each, after one that is not counted.")
@click.option("--clients", default=24, show_default=True)
@click.option("--examples", default=100, show_default=True, help="Of a client.")
@click.option("--steps", default=10, show_default=True, help="Of SGD with 50 pictures, of every client.")
def throughput(rounds, clients, examples, steps):
    """One worker and two, in turn."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("two workers need two cores")
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as root:
        data = [
            (rng.integers(0, 256, (examples, 32, 32, 3), np.uint8), np.arange(examples) % 2) for _ in range(clients)
        ]
        federation = Federation.from_clients(data, out=Path(root) / "federation", validation=0, test_fraction=0)
        model = SplitModel(build_network("cifar_2conv", federation.example_shape, seed=0), seed=0)
        algorithm = build_algorithm("fedavg", model, federation.population(labels="global"), steps=steps, batch_size=50)
        for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
            os.environ[name] = "1"  # inherited by the workers; this process has its threads already
        workers = [Local(Path(root), core) for core in cores]
        seconds = {}
        for number in (1, 2):
            machines = Machines(workers=tuple(w.name for w in workers[:number]))
            training = Training(algorithm, federation, engine="tff", machines=machines)
            seconds[number] = (ShardedProcess(algorithm, federation, machines), training, [])
        for t in range(rounds + 1):
            for process, training, times in seconds.values():
                ids = algorithm.population.client_ids.tolist()
                states, visits = training.client_states(ids), training.visits(1, ids)
                server = training.server_state()
                began = time.perf_counter()
                process.next(server, states, visits)
                if t:
                    times.append(time.perf_counter() - began)
        for worker in workers:
            worker.kill()
    one, two = (statistics.median(times) for _, _, times in seconds.values())
    ratios = [a / b for a, b in zip(seconds[1][2], seconds[2][2], strict=True)]
    print(f"{clients} clients of {examples} pictures, {steps} steps of FedAvg on cifar_2conv, {rounds} rounds of each")
    print(f"one worker {one:.2f} s a round, two workers {two:.2f} s: {one / two:.2f} times")
    print(f"round by round {min(ratios):.2f} to {max(ratios):.2f} times; load of the machine {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
