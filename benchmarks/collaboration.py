"""Clients that learn from each other, on the splits of the papers: accuracy by round, and who listens to whom.

    python benchmarks/collaboration.py dirichlet --out runs/dirichlet [--rounds 8] [--algorithms pgfed,fedrod,...]
    python benchmarks/collaboration.py grouped --out runs/grouped [--rounds 30] [--search-rounds 3] [--network mlp200]
    python benchmarks/collaboration.py attention --out runs/attention [--rounds 30] [--network mlp200]

`dirichlet` is PGFed's setting: CIFAR-10, 25 clients, Dir(0.3), a quarter of the clients a round, five epochs in batches
of 10. `grouped` is FedAMP's practical setting: Fashion-MNIST, 5 groups of 20 clients, 80 % of a client's examples from
the two classes of its group. OUT has a run folder for every method; one that is there is continued, with more rounds
where they are asked for, and one with other settings is refused. `grouped` first searches FedAMP's and HeurFedAMP's
attention and pull, on validation examples. `attention` asks on the same data what the attention does for several widths
sigma: how far the models of a group and of other groups are from each other, who listens to whom, and what accuracy
comes of it. Prints Markdown; writes results.json, and for `grouped` fedamp.png and heurfedamp.png, the attention after
the last round.
"""

import json
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import numpy as np
import tensorflow as tf
from listed import Listed
from rich.console import Console

from tfpfl import Run, RunConfig
from tfpfl.algorithms import get_method
from tfpfl.algorithms.fedamp import cosines, squared_distances
from tfpfl.data.cohorts import cohort
from tfpfl.runs.callbacks import Progress
from tfpfl.runs.continuing import config_to_continue
from tfpfl.runs.federations import open_federation

DIRICHLET = {
    "dataset": "cifar10",
    "source": {"pixels": "signed"},
    "partition": "dirichlet",
    "partition_args": {"alpha": 0.3},
    "clients": 25,
    "validation": 0.0,
    "labels": "global",
    "network": "fedavg_cnn",
    "participation": 0.25,
    "evaluate_every": 1,
}
SGD = {"eta": 0.005, "epochs": 5, "batch_size": 10, "momentum": 0.9}  # of the PGFed authors' examples
# init: docs/collaboration.md says what the authors' rule would change
PGFED = {"mu": 0.1, "eta2": 0.01, "init": "newest"}
DIRICHLET_METHODS = {"pgfed": PGFED, "fedrod": {}, "fedper": {}, "local": {}, "fedavg": {}}

GROUPED = {
    "dataset": "fashion_mnist",
    "partition": "grouped_dominant",
    "partition_args": {"groups": "fashion_mnist"},
    "validation": 0.1,
    "labels": "global",
    "participation": 1.0,
    "evaluate_every": 1,
}
GROUPED_SGD = {"eta": 0.01, "epochs": 1, "batch_size": 10, "momentum": 0.9}
GROUPED_METHODS = ("fedamp", "heurfedamp", "fedavg_ft", "fedavg", "local")
PULL = 1.0  # lambda / alpha
LOWER_PULLS = (0.1, 0.01)  # tried with the attention that was best with PULL
CALIBRATION = 4  # rounds of uniform attention


def trained(folder: Path, rounds: int, console, **config) -> Run:
    """The run in that folder, made or continued up to `rounds`; to be closed. One with other settings is refused."""
    asked = RunConfig(rounds=rounds, **config)
    federation = open_federation(asked)
    if (folder / "config.json").exists():
        run = Run.open(folder, rounds=config_to_continue(asked, folder, federation).rounds)
    else:
        run = Run.create(asked, folder, federation)
    if run.store.round_num < run.config.rounds:
        run.train([Progress(folder.name.ljust(14), console)])
    return run


def by_round(run: Run, split: str = "test") -> dict:
    """round -> mean accuracy over all clients of the model that they predict with (EV-all)."""
    model, found = run.training().model_name, {}
    for e in run.store.evaluations():
        if (e.model, e.split) == (model, split) and e.num_examples:
            found.setdefault(e.round_num, []).append(e.accuracy)
    return {t: sum(values) / len(values) for t, values in found.items()}


def by_visit(run: Run, round_num: int) -> dict:
    """Mean accuracy after a round of clients that have taken part, and of those that have not: (mean, how many)."""
    came = {int(i) for t in range(1, round_num + 1) for i in cohort(run.config.seed, t, run.population)}
    parts = {"have taken part": [], "have not": []}
    for e in run.store.evaluations(round_num):
        if (e.model, e.split) == (run.training().model_name, "test") and e.num_examples:
            parts["have taken part" if e.client_id in came else "have not"].append(e.accuracy)
    return {what: (float(np.mean(values)) if values else None, len(values)) for what, values in parts.items()}


def markdown(header: list, rows: list) -> str:
    """A table."""
    return "\n".join(
        "| " + " | ".join(map(str, row)) + " |" for row in [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    )


@click.group(help=__doc__)
def main():
    """The experiments."""


@main.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--rounds", default=8, show_default=True)
@click.option(
    "--algorithms", type=Listed("method", DIRICHLET_METHODS), default=",".join(DIRICHLET_METHODS), show_default=True
)
@click.option("--seed", default=0, show_default=True)
def dirichlet(out, rounds, algorithms, seed):
    """PGFed's setting: accuracy by round."""
    console, table, ends, results = Console(width=110), [], [], {}
    for name in algorithms:
        hyperparameters = SGD | DIRICHLET_METHODS[name]
        config = DIRICHLET | {"algorithm": name, "hyperparameters": hyperparameters, "seed": seed}
        with trained(out / name, rounds, console, **config) as run:
            accuracy, parts = by_round(run), by_visit(run, rounds)
            results[name] = {"hyperparameters": run.config.hyperparameters, "test accuracy": accuracy} | parts
        table.append([get_method(name).title, *(f"{100 * accuracy[t]:.2f}" for t in range(1, rounds + 1))])
        ends.append([table[-1][0], table[-1][-1], *(f"{100 * mean:.2f}" if n else "-" for mean, n in parts.values())])
    (out / "results.json").write_text(json.dumps({"seed": seed, "rounds": rounds, "methods": results}, indent=2) + "\n")
    print(markdown(["round", *range(1, rounds + 1)], table))
    counts = [f"{what} ({n})" for what, (_, n) in parts.items()]
    print(f"\nround {rounds}:\n\n" + markdown(["", "all clients", *counts], ends))


@main.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--rounds", default=30, show_default=True)
@click.option("--search-rounds", default=3, show_default=True, help="Of every candidate in the search.")
@click.option("--network", default="mlp200", show_default=True)
@click.option("--seed", default=0, show_default=True)
def grouped(out, rounds, search_rounds, network, seed):
    """FedAMP's practical setting: the best round, and who listens to whom."""
    console = Console(width=110)
    config = GROUPED | {"network": network, "seed": seed}

    def run(name, algorithm, rounds, **hyperparameters):
        asked = {"algorithm": algorithm, "hyperparameters": GROUPED_SGD | hyperparameters}
        return trained(out / name, rounds or search_rounds, console, **config, **asked)

    # FedAMP's sigma is a squared distance between models. Those of local training are far from each other whatever
    # their data; what tells groups apart is the distance while everyone still listens to everyone.
    uniform = {"sigma": 1e6, "alpha": 0.5 * 1e6 / 99, "lam": PULL * 0.5 * 1e6 / 99}
    with run("uniform", "fedamp", CALIBRATION, **uniform) as first:
        models = first.training().server_state().models
        median, cosine_range = scales(models)
        calibrated = first.store.round_num
    print(
        f"after {calibrated} rounds of uniform attention: squared distances of median {median:.4g}, cosines within "
        f"{cosine_range:.2g} of each other (5th to 95th percentile)"
    )
    candidates = {"fedamp": {}, "heurfedamp": {}}
    for scale in (0.3, 1.0):
        for s in (0.9, 5.0):
            sigma, rescale = float(f"{scale * median:.3g}"), s > 1
            what = f"sigma = {scale:g} median, s = {s:g}{', rescaled' if rescale else ''}"
            candidates["fedamp"][what] = {"sigma": sigma, "alpha": s * sigma / 99, "rescale": rescale}
    for sigma in (1000.0, 10_000.0):
        for self_weight in (0.1, 0.5):
            own = {"sigma": sigma, "self_weight": self_weight, "alpha": 1.0}
            candidates["heurfedamp"][f"sigma = {sigma:g}, xi_ii = {self_weight:g}"] = own
    chosen, searched = {}, {}

    def tried(algorithm, what, folder, **given):
        with run(folder, algorithm, None, **given) as done:
            accuracy = [a for t, a in by_round(done, "validation").items() if t <= search_rounds]
        searched[algorithm].append((max(accuracy), what, folder, given))

    def best(algorithm):
        return max(searched[algorithm], key=lambda found: found[0])

    for algorithm, options in candidates.items():
        searched[algorithm] = []
        for i, (what, given) in enumerate(options.items()):
            tried(algorithm, what, f"{algorithm}-{i}", **given, lam=PULL * given["alpha"])
        _, what, _, given = best(algorithm)
        for pull in LOWER_PULLS:
            lam = float(f"{pull * given['alpha']:.3g}")
            tried(algorithm, f"{what}, lambda / alpha = {pull:g}", f"{algorithm}-pull-{pull:g}", **given | {"lam": lam})
        *_, folder, given = best(algorithm)
        chosen[algorithm] = folder, given
        print(f"\n{get_method(algorithm).title}, best validation accuracy of {search_rounds} rounds:\n")
        print(markdown(["", "%"], [[what, f"{100 * value:.2f}"] for value, what, *_ in searched[algorithm]]))

    table, results = [], {}
    for name in GROUPED_METHODS:
        folder, given = chosen.get(name, (name, {}))  # what was chosen goes on from where the search left it
        with run(folder, name, rounds, **given) as done:
            validation, test = by_round(done, "validation"), by_round(done)
            if name in candidates:
                attention = {t: done.store.matrices(t)["attention"] for t in done.store.matrix_rounds()}
                picture(out / f"{name}.png", attention[rounds], get_method(name).title, rounds)
                print(f"{name}: " + shares(attention[rounds]))
        selected, best = max(validation, key=validation.get), max(test, key=test.get)
        title = get_method(name).title
        table.append([title, f"{100 * test[selected]:.2f}", selected, f"{100 * test[best]:.2f}", best])
        results[name] = {"hyperparameters": done.config.hyperparameters, "validation": validation, "test": test}
    found = {"seed": seed, "rounds": rounds, "median squared distance": median, "search": searched, "methods": results}
    (out / "results.json").write_text(json.dumps(found, indent=2) + "\n")
    print("\n" + markdown(["", "test, round by validation", "round", "test, best round", "round"], table))


@main.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--rounds", default=30, show_default=True)
@click.option("--network", default="mlp200", show_default=True)
@click.option("--seed", default=0, show_default=True)
def attention(out, rounds, network, seed):
    """FedAMP's setting: what the attention does, by its width."""
    console, rows, results = Console(width=110), [], {}

    def measured(what, algorithm, rounds, **hyperparameters):
        given = {"algorithm": algorithm, "hyperparameters": GROUPED_SGD | hyperparameters}
        with trained(out / what, rounds, console, **GROUPED | {"network": network, "seed": seed} | given) as run:
            found: dict = {"validation": by_round(run, "validation"), "test": by_round(run)}
            if algorithm in ("fedamp", "heurfedamp"):
                models, weights = run.training().server_state().models, run.store.matrices(rounds)["attention"]
                found |= {"median": scales(models)[0], "inside, outside": of_groups(models)}
                found |= {"own": float(weights.diagonal().mean()), "stays": stays(weights)[0]}
        selected = max(found["validation"], key=found["validation"].get)
        row = [what, selected, f"{100 * found['validation'][selected]:.2f}", f"{100 * found['test'][selected]:.2f}"]
        if "own" in found:
            row += [*(f"{d:.3g}" for d in found["inside, outside"]), f"{found['own']:.2f}", f"{found['stays']:.0%}"]
        rows.append(row + [""] * (8 - len(row)))
        results[what] = found | {"hyperparameters": hyperparameters}
        return found

    measured("local", "local", rounds)
    measured("fedavg_ft", "fedavg_ft", rounds)
    median = measured("uniform", "fedamp", CALIBRATION, sigma=1e6, alpha=0.99e6 / 99, lam=0.0)["median"]
    for scale in (0.3, 0.1):
        # alpha is such that at the median distance all others together have the weight 0.9.
        sigma = float(f"{scale * median:.3g}")
        alpha = float(f"{0.9 * sigma / 99 * np.exp(median / sigma):.3g}")
        for pull in (0.0, 1.0):
            more = {"sigma": sigma, "alpha": alpha, "rescale": True, "lam": pull * alpha}
            measured(f"amp-{scale}-0.9-{pull}", "fedamp", rounds, **more)
    for sigma in (30.0, 100.0, 1e3, 1e4):
        measured(f"heur-{sigma:g}-0.1", "heurfedamp", rounds, sigma=sigma, self_weight=0.1, alpha=1.0, lam=0.0)
    (out / "results.json").write_text(json.dumps({"seed": seed, "runs": results}, indent=2) + "\n")
    header = ["", "round", "validation", "test", "distance in a group", "between groups", "own weight", "in the group"]
    print(markdown(header, rows))


def of_groups(models) -> tuple[float, float]:
    """The median squared distance of two models of a group, and of two of different groups."""
    distances, same = np.asarray(squared_distances(tf.constant(models))), groups()[:, None] == groups()
    return float(np.median(distances[same & ~np.eye(len(models), dtype=bool)])), float(np.median(distances[~same]))


def scales(models) -> tuple:
    """(median squared distance between two models, spread of their cosines)."""
    pairs = ~np.eye(len(models), dtype=bool)
    distances, angles = (np.asarray(f(tf.constant(models)))[pairs] for f in (squared_distances, cosines))
    return float(np.median(distances)), float(np.diff(np.percentile(angles, [5, 95]))[0])


def groups() -> np.ndarray:
    """The group of every client."""
    return np.repeat(np.arange(5), 20)


def stays(attention) -> tuple[float, list[float]]:
    """The part of the weight given to others that stays in the group: of all clients, and of each group."""
    off = np.where(np.eye(len(attention), dtype=bool), 0, attention)
    inside, of = off * (groups()[:, None] == groups()), [groups() == g for g in range(5)]
    return float(inside.sum() / off.sum()), [float(inside[g].sum() / max(off[g].sum(), 1e-30)) for g in of]


def shares(attention) -> str:
    """How much of the attention to others stays in the group, in words."""
    all_of_it, by_group = stays(attention)
    return (
        f"of the weight given to others, {all_of_it:.1%} stays in the group (by group "
        f"{', '.join(f'{b:.1%}' for b in by_group)}; 19 of 99 are {19 / 99:.1%}); "
        f"own weight {attention.diagonal().mean():.3f}"
    )


def picture(path, attention, title, round_num) -> None:
    """A heat map with the clients ordered by group; a client's own weight is left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5.2, 4.6), dpi=110)
    image = axes.imshow(np.where(np.eye(len(attention), dtype=bool), np.nan, attention), cmap="viridis")
    for edge in range(20, 100, 20):
        axes.axhline(edge - 0.5, color="white", linewidth=0.6)
        axes.axvline(edge - 0.5, color="white", linewidth=0.6)
    axes.set(title=f"{title}: xi after round {round_num}", xlabel="client j, by group", ylabel="client i, by group")
    figure.colorbar(image, label="weight of j's model for i")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
