"""The rate of PFLEGO's last head step: rho I / r as in the paper, beta, or bounded by 1 / L (`head_rate`).

    python benchmarks/head_rate.py --out runs/head_rate [--setting omniglot] [--head-rates rho,safe] [--seeds 0,1,2]

Settings, with the rates of the paper or its authors' commands: `omniglot`, 10 of the 50 alphabets, 2 a round, drawings
not rotated, 150 rounds; `mnist` and `fashion`, 100 clients of two classes, 20 a round, 100 rounds. OUT has a run folder
for every setting, rate and seed; one that is there is continued. Prints Markdown: test accuracy in % of the models
right after the local work of a round's clients (EV-local) and of all clients after the server's step (EV-all), mean of
the ten rounds up to a round and of the seeds; and the share of examples whose client's loss the last step raised.
"""

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import numpy as np
from listed import Listed, Several
from rich.console import Console

from tfpfl import Run, RunConfig
from tfpfl.runs.callbacks import Progress

LABELS = {"partition": "round_robin", "partition_args": {"K": 2}, "clients": 100}
SETTINGS = {  # name: (configuration, hyperparameters, rounds that are shown)
    "omniglot": (
        {"dataset": "omniglot", "source": {"augment": "none"}, "partition": "natural", "new_clients": 40,
         "network": "omniglot_4conv"},
        {"tau": 50, "beta": 0.007, "rho": 0.003},
        (50, 75, 100, 150),
    ),
    "mnist": ({"dataset": "mnist", **LABELS}, {"tau": 50, "beta": 0.007, "rho": 0.001}, (20, 50, 100)),
    "fashion": ({"dataset": "fashion_mnist", **LABELS}, {"tau": 50, "beta": 0.007, "rho": 0.001}, (20, 50, 100)),
}  # fmt: skip


def shown(rows: list[dict], round_num: int) -> tuple[float, float, float]:
    """(EV-local, EV-all, share of raised losses), means of the ten rounds up to `round_num`."""
    last = [row for row in rows if round_num - 10 < row["round"] <= round_num]
    names = ("local copy test accuracy", "personal test accuracy", "raised")
    local, everyone, raised = (np.mean([row[n] for row in last if row.get(n) is not None]) for n in names)
    return 100 * local, 100 * everyone, 100 * raised


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--setting", type=click.Choice(list(SETTINGS)), multiple=True, default=list(SETTINGS))
@click.option("--head-rates", type=Listed("head rate", ("rho", "beta", "safe")), default="rho,beta,safe")
@click.option("--seeds", type=Several(int), default="0,1,2")
def main(out, setting, head_rates, seeds):
    """Trains what is missing and prints the table."""
    console = Console(stderr=True)
    print("| setting | head_rate | round | EV-local | EV-all | last steps that raise a loss |")
    print("|---|---|---|---|---|---|")
    for name in setting:
        config, hyper, rounds = SETTINGS[name]
        for rate in head_rates:
            histories = []
            for seed in seeds:
                asked = RunConfig(
                    algorithm="pflego", rounds=max(rounds), seed=seed, data_seed=0, participation=0.2,
                    evaluate_every=1 if name == "omniglot" else 5,
                    hyperparameters={**hyper, "head_rate": rate}, **config,
                )  # fmt: skip
                with Run.create_or_resume(asked, out / f"{name}-{rate}-s{seed}") as run:
                    if not run.is_complete:
                        run.train([Progress(f"{name}, {rate}, seed {seed}", console)])
                    histories.append(run.store.history())
            for t in rounds:
                found = np.array([shown(rows, t) for rows in histories])
                (local, everyone, raised), spread = found.mean(0), np.ptp(found, 0)
                print(
                    f"| {name} | {rate} | {t} | {local:.2f} (range {spread[0]:.2f}) | {everyone:.2f} (range "
                    f"{spread[1]:.2f}) | {raised:.0f} % |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
