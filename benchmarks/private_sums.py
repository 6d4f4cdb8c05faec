"""What differential privacy under secure aggregation costs, by the number of clients: FedAvg on Fashion-MNIST.

    python benchmarks/private_sums.py [--clients 100,1000,10000] [--noise 0,1,4] [--seeds 0,1,2] [--rounds 30]

Every client has six training pictures, drawn without regard to their class; the 10,000 test pictures are divided among
the clients. So the three populations differ in their number of clients and in nothing else: pictures are made smaller
to 14 x 14 (means of four pixels), and the network is dense with 32 units. A tenth of the clients takes part in a round
(Poisson sampling), with five steps of gradient descent; updates count the same and are clipped to --clip. Noise 0 is
secure aggregation without noise and with the same clip.

Prints a row for each run, and then the table: test accuracy over all clients, mean of the last ten rounds, the two
epsilons of the run, and delta. Runs are kept in --out, and not repeated.
"""

import tempfile
from collections import defaultdict
from pathlib import Path

import click
import keras
import numpy as np
from listed import Several

from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation, load_source
from tfpfl.runs.config import RunConfig
from tfpfl.runs.protocols import EV_ALL, find
from tfpfl.runs.run import Run

TRAIN = 6  # pictures of a client


def federation(people: int, folder: Path) -> Path:
    """A federation of so many clients: {folder}/{people}."""
    path = folder / f"{people}-clients"
    if path.exists():
        return path
    source = load_source("fashion_mnist")
    draw = np.random.default_rng(27)
    parts = []
    for x, y, shares in ((source.x_train, source.y_train, TRAIN), (source.x_test, source.y_test, None)):
        small = x.reshape(len(x), 14, 2, 14, 2).astype(np.float32).mean((2, 4)).round().astype(np.uint8)
        order = draw.permutation(len(x))[: people * shares if shares else len(x)]
        parts.append([(small[some][..., None], y[some]) for some in np.array_split(order, people)])
    clients = {
        str(i): {"train": train, "validation": (test[0][:0], test[1][:0]), "test": test}
        for i, (train, test) in enumerate(zip(*parts, strict=True))
    }
    Federation.from_clients(clients, out=path, name="fashion_mnist 14 x 14", validation=0.0)
    return path


def network(folder: Path) -> Path:
    """The backbone's file."""
    path = folder / "dense32.keras"
    if not path.exists():
        layers = [keras.Input((14, 14, 1)), keras.layers.Flatten(), keras.layers.Dense(32, "relu")]
        keras.Sequential(layers).save(path)
    return path


def number_of_clients(text: str) -> int:
    """A number of clients for whom there are six training pictures each."""
    if not 1 <= int(text) <= 10_000:
        raise InvalidArgument(
            f"clients must be from 1 to 10,000, since MNIST has 60,000 training pictures; found {text}"
        )
    return int(text)


@click.command()
@click.option("--clients", type=Several(number_of_clients), default="100,1000,10000")
@click.option("--noise", type=Several(float), default="0,1,4", help="Noise multipliers; 0: no noise.")
@click.option("--seeds", type=Several(int), default="0,1,2")
@click.option("--rounds", default=30)
@click.option("--clip", default=1.0)
@click.option("--eta", default=0.3)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Default: a folder that is deleted.")
def main(clients, noise, seeds, rounds, clip, eta, out):
    """Runs what is missing, and prints the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, found = out or Path(temporary), defaultdict(list)
        folder.mkdir(parents=True, exist_ok=True)
        for people in clients:
            for z in noise:
                for seed in seeds:
                    config = RunConfig(
                        algorithm="fedavg",
                        hyperparameters={"eta": eta, "steps": 5, "weighting": "uniform"},
                        federation=str(federation(people, folder)),
                        network=str(network(folder)),
                        participation=0.1,
                        sampling="binomial",
                        rounds=rounds,
                        seed=seed,
                        evaluate_every=0,
                        grouping="stacked",
                        secure=True,
                        secure_clip=clip,
                        secure_noise=z or None,
                    )
                    place = folder / f"{people}-{z:g}-{seed}-{rounds}-{clip:g}-{eta:g}"
                    with Run.create_or_resume(config, place) as run:
                        if not run.is_complete:
                            run.train()
                        accuracy, private = find(run.results(), EV_ALL).score, run.privacy
                        history = run.store.history()
                    clipped = np.mean([row["clipped"] for row in history if "clipped" in row])
                    seconds = sum(row["seconds"] for row in history)
                    epsilons = (private.epsilon, private.released, private.delta) if private else (np.inf,) * 3
                    found[people, z].append((100 * accuracy, *epsilons, clipped))
                    told = " ".join(f"{number:.4g}" for number in found[people, z][-1])
                    print(f"{people} clients, noise {z:g}, seed {seed}: {told} ({seconds:.0f} s)", flush=True)
    print("\n| clients | noise multiplier | epsilon: server | epsilon: released | delta | EV-all | clipped |")
    print("|---|---|---|---|---|---|---|")
    for (people, z), rows in found.items():
        mean, spread = np.mean(rows, 0), np.ptp(np.array(rows)[:, 0]) / 2
        values = f"{z:g} | {mean[1]:.3g} | {mean[2]:.3g} | {mean[3]:.2g}" if z else "none | | | "
        print(f"| {people:,} | {values} | {mean[0]:.2f} ± {spread:.2f} | {100 * mean[4]:.0f} % |")


if __name__ == "__main__":
    main()
