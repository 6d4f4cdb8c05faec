"""What `fair:q` and `cvar:p` do for the worst clients: Fashion-MNIST, 100 clients with two classes each.

    python benchmarks/objectives.py --out runs/objectives [--rounds 300] [--algorithm fedavg]
        [--objectives mean,fair:1] [--seeds 0,1,2]

OUT has a run folder for every objective and seed; one that is there is continued. Prints Markdown: test accuracy of the
models that clients predict with, and that of the worst tenth of the clients (EV-all, mean of the last ten evaluations).

FedAvg takes here one step on all examples of all clients, and the server's optimizer is Adam. So a round follows the
gradient of the objective, and a step is as long for one objective as for another. A smaller loss has a shorter
gradient: plain gradient descent with one rate would compare objectives that are trained to different depths.
"""

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import numpy as np
from listed import Several
from rich.console import Console

from tfpfl import PROTOCOLS, Run, RunConfig
from tfpfl.algorithms import ALGORITHMS, get_method
from tfpfl.algorithms.parts.objectives import parsed_objective
from tfpfl.runs.callbacks import Progress
from tfpfl.runs.protocols import find

SETTING = {
    "dataset": "fashion_mnist",
    "partition": "round_robin",
    "partition_args": {"K": 2},
    "clients": 100,
    "data_seed": 0,
    "labels": "global",
    "evaluate_every": 5,
}
HYPER = {  # PFLEGO's rates are those of the comparisons in docs/measured.md
    "fedavg": {"eta": 1.0, "steps": 1, "server_opt": "adam", "server_eta": 0.003},
    "pflego": {"tau": 50, "beta": 0.007, "rho": 0.001},
}
PARTICIPATION = {"fedavg": 1.0}  # else 0.2


def objective(text: str) -> str:
    """The text of an objective, which is checked."""
    parsed_objective(text)
    return text


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--rounds", default=300)
@click.option("--algorithm", type=click.Choice(list(ALGORITHMS)), default="fedavg")
@click.option("--objectives", type=Several(objective), default="mean,fair:1,fair:2,cvar:0.5")
@click.option("--seeds", type=Several(int), default="0")
def main(out, rounds, algorithm, objectives, seeds):
    """Trains what is missing and prints the table."""
    console = Console(stderr=True)
    print("| objective | mean | worst 10 % | mean against the mean's | worst 10 % against the mean's |")
    print("|---|---|---|---|---|")
    base = None
    for objective in objectives:
        found = []
        for seed in seeds:
            config = RunConfig(
                algorithm=algorithm, objective=objective, rounds=rounds, seed=seed,
                participation=PARTICIPATION.get(algorithm, 0.2), hyperparameters=HYPER.get(algorithm, {}), **SETTING,
            )  # fmt: skip
            folder = out / f"{algorithm}-{objective.replace(':', '-')}-s{seed}"
            with Run.create_or_resume(config, folder) as run:
                if not run.is_complete:
                    run.train([Progress(f"{get_method(algorithm).title}, {objective}", console)])
                result = find(run.results(), PROTOCOLS["EV-all"])
                found.append((result.accuracy, result.worst_decile))
        mean, worst = 100 * np.mean(found, 0)
        base = base or (mean, worst)
        print(
            f"| {objective} | {mean:.2f} | {worst:.2f} | {mean - base[0]:+.2f} | {worst - base[1]:+.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
