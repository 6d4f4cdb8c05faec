"""All methods on two federations, searched with the same budget: one table, clients that took part and newcomers apart.

    python benchmarks/all_methods.py --out runs/all_methods [--processes 2] [--methods pflego,fedavg,...]
        [--data fashion,cifar]

* fashion: 9,000 images of Fashion-MNIST, round robin among 60 clients with 5 classes each; `mlp200`.
* cifar: 6,000 images of CIFAR-10, Dirichlet 0.1 among 40 clients; the CNN in small_cnn.py.

10 clients of the first and 6 of the second are kept out of training; afterwards they adapt as in `tfpfl new-clients`.
A fifth of the others takes part in a round. Local work is two epochs in batches of 20 for methods that run SGD, 20 head
steps for those that cache features. Each method is searched over four settings on validation examples with seed 0, then
trained with three seeds. OUT is a study (docs/studies.md): the same command continues where it stopped.
"""

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import csv

import click
import numpy as np
from listed import Listed

from tfpfl import Federation, Run
from tfpfl.checks import InvalidArgument
from tfpfl.data import Source, load_source
from tfpfl.studies import adapt_new_clients, run_study

ROUNDS, SEEDS = 40, [0, 1, 2]
SGD = {"epochs": 2, "batch_size": 20}
RATES = {"eta": [0.01, 0.03, 0.1, 0.3]}
TWO_RATES = {"eta": [0.03, 0.1]}
HEADS = {"tau": 20}

# Each method: what is fixed, and the four settings that are tried.
METHODS: dict[str, tuple[dict, dict]] = {
    "pflego": (HEADS, {"beta": [0.03, 0.1], "rho": [0.001, 0.003]}),
    "fedrecon": (HEADS, {"beta": [0.03, 0.1], "rho": [0.001, 0.003]}),
    "fedavg": (SGD, RATES),
    "local": (SGD, RATES),
    "fedsgd": ({}, {"eta": [0.03, 0.1, 0.3, 1.0]}),
    "fedprox": (SGD, TWO_RATES | {"mu": [0.01, 0.1]}),
    "scaffold": (SGD, RATES),
    "feddyn": (SGD, TWO_RATES | {"dyn": [0.01, 0.1]}),
    "fedavg_ft": (SGD, RATES),
    "fedprox_ft": (SGD, TWO_RATES | {"mu": [0.01, 0.1]}),
    "fedper": (SGD, RATES),
    "fedrep": ({"tau_h": 1, "tau_b": 1, "unit": "epochs", "batch_size": 20},
               {"eta_h": [0.03, 0.1], "eta_b": [0.03, 0.1]}),
    "fedbabu": (SGD, RATES),
    "lg_fedavg": (SGD, RATES),
    "fedrod": (SGD, RATES),
    "ditto": (SGD, TWO_RATES | {"lam": [0.1, 1.0]}),
    "pfedme": (SGD, {"eta": [0.03, 0.1], "lam": [1.0, 15.0]}),
    "apfl": (SGD, TWO_RATES | {"mixing": [0.25, 0.75]}),
    "per_fedavg": (SGD, {"eta_inner": [0.01, 0.1], "beta": [0.03, 0.1]}),
    "layerwise": (SGD, TWO_RATES | {"kappa": [0.25, 0.75]}),
    "fedfomo": (SGD, RATES),
    "fedamp": (SGD, TWO_RATES | {"alpha": [0.1, 1.0]}),
    "heurfedamp": (SGD, TWO_RATES | {"self_weight": [0.1, 0.5]}),
    "pgfed": (SGD, TWO_RATES | {"mu": [0.1, 1.0]}),
    "pgfedmo": (SGD, TWO_RATES | {"mu": [0.1, 1.0]}),
    "fedbn": (SGD, RATES),
    "feddane": (SGD, TWO_RATES | {"mu": [0.001, 0.1]}),
    "fedpac": ({"tau_g": 1, "tau_f": 2, "unit": "epochs", "batch_size": 20},
               {"eta_g": [0.03, 0.1], "eta_f": [0.03, 0.1]}),
    "knn_per": (SGD, RATES),
    "fed3r": ({"epochs_ft": 2, "batch_size": 20}, {"lam": [0.01, 1.0], "eta_ft": [0.001, 0.01]}),
    "fedproto": (SGD, TWO_RATES | {"lam": [0.1, 1.0]}),
    "pfedhn": (SGD, {"eta": [0.01, 0.1], "alpha": [0.01, 0.1]}),
    "fedala": (SGD, RATES),
    "feddbe": (SGD, TWO_RATES | {"kappa": [1.0, 50.0]}),
    "fedas": (SGD, RATES),
    "fedcp": (SGD, TWO_RATES | {"lam": [1.0, 5.0]}),
    "gpfl": (SGD, TWO_RATES | {"mu": [0.01, 0.1]}),
    "adapters": (SGD, RATES),
}  # fmt: skip
EXTRA = {"fedbn": {"network": "conv_bn"}, "adapters": {"adapters": "lora:4"}}  # what these two are about


def part(name: str, train: int, test: int) -> Source:
    """The first `train` and `test` images of a data set, in an order drawn with seed 0."""
    whole, drawn = load_source(name), np.random.default_rng(0)
    rows = [drawn.permutation(len(y))[:n] for y, n in ((whole.y_train, train), (whole.y_test, test))]
    return whole._replace(
        name=f"{name}_{train}",
        x_train=whole.x_train[rows[0]],
        y_train=whole.y_train[rows[0]],
        x_test=whole.x_test[rows[1]],
        y_test=whole.y_test[rows[1]],
    )


def federations(out: Path) -> dict:
    """The two federations, made if they are not in `out` yet."""
    made = {
        "fashion": ("fashion_mnist", (6000, 3000), "round_robin", 60, {"K": 5}),
        "cifar": ("cifar10", (5000, 1000), "dirichlet", 40, {"alpha": 0.1, "min_samples": 20}),
    }
    for name, (source, counts, partition, clients, arguments) in made.items():
        if not (out / name).exists():
            Federation.build(
                part(source, *counts), partition, clients=clients, seed=0, validation=0.2, out=out / name, **arguments
            )
    return {name: out / name for name in made}


NEW = {"fashion": 10, "cifar": 6}  # clients that are kept out of training


def study(places: dict, methods: list[str]) -> dict:
    """The study as docs/studies.md describes it."""
    network = {"fashion": "mlp200", "cifar": f"{Path(__file__).resolve().with_name('small_cnn.py')}:small_cnn"}
    return {
        "title": "All methods",
        "seeds": SEEDS,
        "run": {"rounds": ROUNDS, "participation": 0.2},
        "search": {"kind": "grid", "rounds": 20},
        "data": {
            name: {"title": name, "federation": str(place), "new_clients": NEW[name], "network": network[name]}
            for name, place in places.items()
        },
        "methods": {
            name: {"hyperparameters": METHODS[name][0], "search": METHODS[name][1], **EXTRA.get(name, {})}
            for name in methods
        },
    }


def newcomers(folders: list[Path], out: Path) -> dict:
    """{run folder: test accuracy of clients that never trained, before and after 20 epochs}; kept in newcomers.csv."""
    known, file = {}, out / "newcomers.csv"
    if file.exists():
        with file.open() as lines:
            known = {out / row["run"]: (row["before"], row["after"]) for row in csv.DictReader(lines)}
    with file.open("a", newline="") as lines:
        table = csv.writer(lines)
        if not lines.tell():  # also where a first call was interrupted before its first row
            table.writerow(["run", "before", "after"])
        for folder in folders:
            if folder not in known:
                with Run.open(folder) as run:
                    try:
                        means = adapt_new_clients(run, epochs=20).means
                        known[folder] = (means[0], means[-1])
                    except InvalidArgument:  # a client becomes personal only by taking part
                        known[folder] = ("", "")
                table.writerow([folder.relative_to(out), *known[folder]])
                lines.flush()
    return {folder: tuple(float(v) if v != "" else np.nan for v in pair) for folder, pair in known.items()}


def table(results, added: dict) -> str:
    """The table in Markdown: for each federation accuracy of those that train, and of newcomers; then costs."""
    heads = [f"{d.title}: {what}" for d in results.study.data for what in ("EV-all", "worst 10 %", "newcomers")]
    lines = [["method", *heads, "bytes", "passes", "s a round"], ["---"] * (len(heads) + 4)]
    for method in results.study.methods:
        line, costs = [method.title], None
        for data in results.study.data:
            row = next((r for r in results.by_data[data.title] if r["algorithm"] == method.title), None)
            if row is None:
                line += ["", "", ""]
                continue
            cell = next(c for c in results.cells if c.data.name == data.name and c.method.name == method.name)
            found = np.array([added[folder] for folder in cell.folders.values()]) * 100
            line += [
                f"{row['accuracy']:.1f} ± {row['accuracy ±']:.1f}", f"{row['worst 10 %']:.1f}",
                f"{found[:, 0].mean():.1f} → {found[:, 1].mean():.1f}" if np.isfinite(found).all() else "none",
            ]  # fmt: skip
            costs = costs or [str(row[name]) for name in ("bytes a visit", "passes", "s a round")]
        lines.append(line + (costs or ["", "", ""]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--processes", default=2, show_default=True)
@click.option("--methods", type=Listed("method", METHODS), default=",".join(METHODS), show_default="all")
@click.option("--data", type=Listed("data set", NEW), default="fashion,cifar", show_default=True)
def main(out, processes, methods, data):
    """Runs what is missing, prints the table."""
    out.mkdir(parents=True, exist_ok=True)
    places = {name: place for name, place in federations(out).items() if name in data}
    results = run_study(study(places, methods), out / "study", processes=processes)
    folders = [folder for cell in results.cells for folder in cell.folders.values()]
    text = table(results, newcomers(folders, out))
    (out / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
