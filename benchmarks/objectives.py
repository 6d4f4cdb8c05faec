"""What `fair:q` and `cvar:p` do for the worst clients: Fashion-MNIST, 100 clients with two classes each.

    python benchmarks/objectives.py --out runs/objectives [--rounds 100] [--algorithm fedavg]
        [--objectives mean,fair:1] [--seeds 0,1,2]

OUT has a run folder for every objective and seed; one that is there is continued. Prints Markdown: test accuracy of the
models that clients predict with, and that of the worst tenth of the clients (EV-all, mean of the last ten rounds).
"""

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import numpy as np
from rich.console import Console

from tfpfl import PROTOCOLS, Run, RunConfig
from tfpfl.algorithms import get_method
from tfpfl.runs.callbacks import Progress
from tfpfl.runs.protocols import find

SETTING = {
    "dataset": "fashion_mnist",
    "partition": "round_robin",
    "partition_args": {"K": 2},
    "clients": 100,
    "data_seed": 0,
    "participation": 0.2,
    "labels": "global",
    "evaluate_every": 0,
}
HYPER = {  # the rates of the comparisons in docs/measured.md
    "pflego": {"tau": 50, "beta": 0.007, "rho": 0.001},
    "fedavg": {"eta": 0.1, "epochs": 1, "batch_size": 50},
}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--rounds", default=100)
@click.option("--algorithm", default="fedavg")
@click.option("--objectives", default="mean,fair:0.5,fair:1,fair:2,cvar:0.5")
@click.option("--seeds", default="0")
def main(out, rounds, algorithm, objectives, seeds):
    """Trains what is missing and prints the table."""
    console = Console(stderr=True)
    print("| objective | mean | worst 10 % | mean against the mean's | worst 10 % against the mean's |")
    print("|---|---|---|---|---|")
    base = None
    for objective in objectives.split(","):
        found = []
        for seed in map(int, seeds.split(",")):
            config = RunConfig(
                algorithm=algorithm, objective=objective, rounds=rounds, seed=seed, **SETTING,
                hyperparameters=HYPER.get(algorithm, {}),
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
