"""Seconds a round, against the floor: one forward and one backward pass of the cohort's examples, in one batch.

    python benchmarks/rounds.py methods [--network mlp200] [--rounds 15] [--slow-rounds 15] [--json FILE]
    python benchmarks/rounds.py tau [--network omniglot_4conv] [--plot FILE.png] [--json FILE]
    python benchmarks/rounds.py memory [--network mlp200] [--json FILE]
    python benchmarks/rounds.py bare [--rounds 5] [--methods fedavg,ditto,...] [--json FILE]

Synthetic images, everyone in every round, tau = 50; `mlp200`: 20 clients of 540 examples and 2 classes (MNIST,
High-Pers); `omniglot_4conv` and `cifar_2conv`: 5 clients of 120 examples. What is compared runs in turn, in one
process; a ratio is the median of the ratios of neighbouring rounds. `memory` runs each in a process of its own. `bare`
compares a round of every method with a loop over the clients that does the same passes of the whole model and steps of
the head (`tfpfl.runs.cost` counts them), in one graph, and nothing else: no messages, no states, no sum of updates.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import numpy as np
import tensorflow as tf
from listed import Listed, Written

from tfpfl import Federation, Simulation, SplitModel, Visit, build_algorithm
from tfpfl.algorithms import ALGORITHMS, ClientData, get_method
from tfpfl.data.randomness import client_key
from tfpfl.models import build_network, tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights
from tfpfl.runs.cost import Work, count_work

CASES = {  # network: (clients, examples, classes, shape)
    "mlp200": (20, 540, 2, (28, 28, 1)),
    "omniglot_4conv": (5, 120, 20, (28, 28, 1)),
    "cifar_2conv": (5, 120, 2, (32, 32, 3)),
    "conv_bn": (5, 120, 2, (28, 28, 1)),
}
MODELS = {"fedbn": ("conv_bn", {}), "adapters": ("mlp200", {"adapters": "lora:4"})}  # what these two methods are about
METHODS = {  # name: (algorithm, its options, those of the Simulation)
    "PFLEGO": ("pflego", {}, {}),
    "PFLEGO, plain": ("pflego", {}, {"grouping": "one_by_one", "threads": 1}),
    "FedRecon": ("fedrecon", {}, {}),
    "FedSGD": ("fedsgd", {}, {}),
    "FedRep": ("fedrep", {}, {}),
    "FedPer": ("fedper", {}, {}),
    "FedAvg": ("fedavg", {}, {}),
}
SLOW = ("FedPer", "FedAvg")
network_option = click.option("--network", type=click.Choice(list(CASES)), default="mlp200", show_default=True)
json_option = click.option("--json", "json_path", type=Written())


class Case:
    """A federation of random images, a model, and rounds of algorithms on them, each from its own initial state."""

    def __init__(self, network: str, folder: str, **model):
        clients, examples, classes, shape = CASES[network]
        rng = np.random.default_rng(0)
        y = np.arange(examples, dtype=np.int32) % classes
        data = [{"train": (rng.integers(0, 256, (examples, *shape), np.uint8), y)} for _ in range(clients)]
        for part in data:
            part["test"] = tuple(a[:classes] for a in part["train"])
        self.federation = Federation.from_clients(data, out=Path(folder) / "federation", validation=0.0)
        self.population = self.federation.population()
        self.model = SplitModel(build_network(network, self.federation.example_shape), **model)
        self.ids = self.population.client_ids

    def floor(self):
        """A function that runs the passes and nothing else, on examples that are in memory."""
        x = tf.concat([self.federation.arrays(i)[0] for i in self.ids], 0)
        dphi = tf.random.stateless_normal([len(x), self.model.num_features], [0, 1])

        @tf.function
        def passes(theta):
            phi, pull_back = self.model.record(theta, x)
            return pull_back(dphi)

        theta = self.model.theta()
        return lambda: [g.numpy() for g in passes(theta)]

    def work(self, name: str, options: dict) -> Work:
        """The passes and head steps of a client's first visit."""
        client = self.ids[0]
        x, y = self.federation.arrays(client)
        data = ClientData(tf.constant(x), tf.constant(y), self.population.info(client), client_key(0, 1, self.ids)[0])
        return count_work(lambda model: build_algorithm(name, model, self.population, **options), self.model, data)

    def bare(self, work: Work):
        """A function that does a cohort's passes and head steps by plain SGD, client by client, and nothing else."""
        objective, rate = client_loss(self.model), 0.007
        steps, head_steps = round(work.passes.backward), round(work.head_steps)
        looks = round(work.passes.forward - work.passes.backward)
        shared = bool(head_steps and not looks)  # the head is fitted to features of a pass that goes back afterwards

        def step(loss, weights):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                value = loss(weights)
            return tree.add_scaled(weights, -rate, tape.gradient(value, weights))

        @tf.function
        def client(weights, x, y):
            for _ in tf.range(steps - shared):
                weights = step(lambda w: objective(w, x, y), weights)
            phi = tf.zeros([len(x), self.model.num_features])
            for _ in tf.range(looks):
                phi = self.model.features(weights.theta, x)
            if shared:
                phi, pull_back = self.model.record(weights.theta, x)
            head = weights.head
            for _ in tf.range(head_steps):
                head = step(lambda h: self.model.kind.loss(tf.matmul(phi, h.kernel) + h.bias, y), head)
            theta = tree.add_scaled(weights.theta, -rate, pull_back(phi)) if shared else weights.theta
            return Weights(theta, head), tf.reduce_sum(phi)

        info = self.population.info
        parts = [tuple(map(tf.constant, self.federation.arrays(i))) for i in self.ids]
        starts = [Weights(self.model.theta(), self.model.head(info(i))) for i in self.ids]
        return lambda: [tf.nest.map_structure(np.asarray, client(w, *p)) for w, p in zip(starts, parts, strict=True)]

    def round(self, name: str, options: dict, how: dict):
        """A function that runs a round, again and again from the same state."""
        algorithm = build_algorithm(name, self.model, self.population, **options)
        simulation = Simulation(algorithm, self.federation, **how)
        server = simulation.initialize()
        info = self.population.info
        states = [tf.nest.map_structure(np.asarray, algorithm.init_client(info(i))) for i in self.ids]
        visits = [Visit(info(i), key) for i, key in zip(self.ids, client_key(0, 1, self.ids), strict=True)]

        def run():
            output = simulation.next(server, states, visits)
            tf.nest.map_structure(np.asarray, (output.server, output.client_states))

        return run


def in_turn(functions: dict, rounds: int, first: int = 2) -> dict:
    """name -> seconds [rounds], after the first calls of each, which trace and compile."""
    seconds = {name: [] for name in functions}
    for t in range(rounds + first):
        for name in list(functions) if t % 2 else reversed(functions):
            started = time.perf_counter()
            functions[name]()
            seconds[name].append(time.perf_counter() - started)
    return {name: np.array(s[first:]) for name, s in seconds.items()}


def written(result: dict, path: Path | None) -> None:
    """Keeps a result."""
    if path:
        path.write_text(json.dumps(result, indent=2) + "\n")


@click.group(help=__doc__)
def main():
    """Runs one of the comparisons."""


@main.command()
@network_option
@click.option("--rounds", default=15, show_default=True)
@click.option("--slow-rounds", default=15, show_default=True, help=f"Of {' and '.join(SLOW)}, 50 passes a round.")
@click.option("--skip", multiple=True, type=click.Choice(list(METHODS)), help="Leave a method out; may be repeated.")
@json_option
def methods(network, rounds, slow_rounds, skip, json_path):
    """Every method against the floor, and against PFLEGO."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case(network, folder)
        floor = {"floor": case.floor()}
        made = {name: case.round(*METHODS[name]) for name in METHODS if name not in skip}
        quick = in_turn(floor | {n: f for n, f in made.items() if n not in SLOW}, rounds)
        slow = [name for name in SLOW if name in made and slow_rounds]
        slow = {n: in_turn({"PFLEGO": made["PFLEGO"], n: made[n]}, slow_rounds, first=1) for n in slow}
    result = {"network": network, "rounds": rounds, "slow_rounds": slow_rounds, "methods": {}}
    for name, seconds in quick.items():
        over_pflego = float(np.median(seconds / quick["PFLEGO"]))
        over_floor = float(np.median(seconds / quick["floor"]))
        result["methods"][name] = {"seconds": float(np.median(seconds)), "/ floor": over_floor, "/ PFLEGO": over_pflego}
    for name, pair in slow.items():
        over_pflego = float(np.median(pair[name] / pair["PFLEGO"]))
        result["methods"][name] = {"seconds": float(np.median(pair[name])), "/ PFLEGO": over_pflego}
    for name, row in result["methods"].items():
        click.echo(f"{name:14} {row['seconds']:8.4f} s   / floor {row.get('/ floor', float('nan')):6.2f}"
                   f"   / PFLEGO {row['/ PFLEGO']:6.2f}")  # fmt: skip
    written(result, json_path)


@main.command()
@network_option
@click.option("--rounds", default=15, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path))
@json_option
def tau(network, rounds, plot, json_path):
    """PFLEGO's round for tau in {1, 5, 25, 50, 100}."""
    taus = (1, 5, 25, 50, 100)
    with tempfile.TemporaryDirectory() as folder:
        case = Case(network, folder)
        seconds = in_turn({t: case.round("pflego", {"tau": t}, {}) for t in taus}, rounds)
    ratios = {t: float(np.median(seconds[t] / seconds[1])) for t in taus}
    result = {"network": network, "rounds": rounds, "seconds": {t: float(np.median(s)) for t, s in seconds.items()},
              "over_tau_1": ratios}  # fmt: skip
    for t in taus:
        click.echo(f"tau {t:4} {result['seconds'][t]:8.4f} s   / tau 1 {ratios[t]:.3f}")
    written(result, json_path)
    if plot:
        import matplotlib.pyplot as plt

        fig, axes = plt.subplots(figsize=(5, 3), layout="constrained")
        axes.plot(taus, [result["seconds"][t] for t in taus], marker="o", label="a round of PFLEGO")
        axes.set(xlabel="tau, local steps", ylabel="seconds a round", ylim=(0, None), title=network)
        axes.plot(taus, [t * result["seconds"][1] for t in taus], ls="--", color="grey", label="tau full steps")
        axes.set_ylim(0, 4 * result["seconds"][100])
        axes.legend(frameon=False)
        fig.savefig(plot, dpi=120)


@main.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--steps", default=10, show_default=True, help="Local steps, on all examples of a client.")
@click.option("--methods", "names", type=Listed("method", ALGORITHMS), default=",".join(ALGORITHMS), show_default="all")
@json_option
def bare(rounds, steps, names, json_path):
    """Every method against a bare loop of the same arithmetic."""
    result = {"rounds": rounds, "steps": steps, "methods": {}}
    for name in names:
        network, model = MODELS.get(name, ("mlp200", {}))
        with tempfile.TemporaryDirectory() as folder:
            case = Case(network, folder, **model)
            method = get_method(name)
            if method.model is not None:  # layers of the method's own
                case.model = method.model(case.model)
            known = method.hyperparameters
            options = {"steps": steps} if "steps" in known else {"tau": steps} if "tau" in known else {}
            work = case.work(name, options)
            seconds = in_turn({"method": case.round(name, options, {}), "bare": case.bare(work)}, rounds, first=1)
            ratio = float(np.median(seconds["method"] / seconds["bare"]))
            row = {which: float(np.median(s)) for which, s in seconds.items()} | {"ratio": ratio, "work": work}
            result["methods"][name] = row
            told = f"{work.passes.forward:.4g} + {work.passes.backward:.4g} passes, {work.head_steps:.4g} head steps"
            click.echo(f"{name:12} {row['method']:7.3f} s   / bare loop {ratio:5.2f}   ({told})")
    written(result, json_path)


@main.command()
@network_option
@click.option("--method", type=click.Choice(["imports", "floor", *METHODS]), help="Only this one, in this process.")
@json_option
def memory(network, method, json_path):
    """The peak resident set of a process that runs three rounds of a method and nothing else."""
    if method is None:
        found = {}
        for name in ("imports", "floor", *METHODS):
            command = [sys.executable, __file__, "memory", "--network", network, "--method", name]
            found[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            click.echo(f"{name:14} {found[name] / 1e6:8.0f} MB")
        written({"network": network, "peak_bytes": found}, json_path)
        return
    with tempfile.TemporaryDirectory() as folder:
        case = Case(network, folder)
        if method != "imports":
            run = case.floor() if method == "floor" else case.round(*METHODS[method])
            for _ in range(3):
                run()
    click.echo(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    main()
