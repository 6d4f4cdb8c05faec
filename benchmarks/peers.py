"""Methods on one federation, with the same cohorts, batches and initial weights: the table "The peers".

    python benchmarks/peers.py --out runs/peers [--dataset fashion_mnist] [--rounds 40] [--algorithms pflego,fedavg,...]
        [--partition round_robin] [--participation 0.2] [--network NAME] [--seed 0] [--engine local]

Hyperparameters are the defaults. OUT has a run folder for every algorithm; one that is there is continued, so the
command can be interrupted and repeated; one with other settings is refused.
"""

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
from listed import Listed
from rich.console import Console

from tfpfl import Run, RunConfig
from tfpfl.algorithms import ALGORITHMS
from tfpfl.runs.callbacks import Progress
from tfpfl.studies.comparison import compare_runs
from tfpfl.studies.tables import comparison

PEERS = (  # those of the table in docs/measured.md; some others need a network with layers of their own
    "pflego,fedrecon,fedsgd,fedrep,fedper,fedbabu,fedavg,fedavg_ft,fedprox,fedprox_ft,ditto,layerwise,local"
)


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--dataset", default="fashion_mnist", show_default=True)
@click.option("--clients", type=int, default=100, show_default=True, help="Ignored by the natural partition.")
@click.option("--partition", default="round_robin", show_default=True, help="round_robin: 2 classes a client.")
@click.option("--participation", default=0.2, show_default=True)
@click.option("--network")
@click.option("--rounds", default=40, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--engine", type=click.Choice(["local", "tff"]), default="local", show_default=True)
@click.option("--evaluate-every", default=10, show_default=True)
@click.option("--algorithms", type=Listed("method", ALGORITHMS), default=PEERS, show_default=True)
def main(out, algorithms, clients, **settings):
    """Runs what is missing, prints the table."""
    console = Console(width=110)
    settings["clients"] = None if settings["partition"] == "natural" else clients
    configs = [RunConfig(algorithm=name, **settings) for name in algorithms]
    done = []
    for folder in compare_runs(configs, out, callbacks=lambda label: [Progress(label.ljust(26), console)]):
        with Run.open(folder) as run:
            done.append((run.write_summary(), run.results()))
            losses = [round(row["loss"], 3) for row in run.store.history() if "loss" in row]
        told = f"{run.config.title}: loss of the last local step by round: {losses}"
        console.print(told, soft_wrap=True, highlight=False)
    title = f"{settings['dataset']}, {settings['rounds']} rounds, seed {settings['seed']}, engine {settings['engine']}"
    console.print(comparison(done, title))


if __name__ == "__main__":
    main()
