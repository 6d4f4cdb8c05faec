"""A round of MobileNetV2 with a frozen trunk, against a round in which all of it trains: seconds and bytes.

    python benchmarks/trunk.py [--train-from Conv_1] [--adapters lora:4] [--method pflego] [--rounds 7] [--json FILE]

MobileNetV2 (alpha 0.35, 96 x 96 x 3, random weights, pooling 'avg', BatchNormalization frozen), 6 clients of 40 random
images and 2 classes, all in every round; PFLEGO with tau = 5, or with `--method fedavg` one step with all images. The
two runs take turns, in one process; a ratio is the median of the ratios of neighbouring rounds. The trunk's features
are computed once, before the first round; how long that takes is a row of its own.

MobileNetV2's last convolution alone, Conv_1, has 143,360 of its 382,048 kernel weights. So a cut makes rounds faster,
but only adapters make messages small. FedAvg's messages also have the head, 2,562 weights, and are 1/47.
"""

import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import keras
import numpy as np
from listed import Written

from tfpfl import Federation, Simulation, SplitModel, build_algorithm
from tfpfl.engines.visit import visits
from tfpfl.models import trunk_federation

CLIENTS, EXAMPLES, CLASSES, SHAPE = 6, 40, 2, (96, 96, 3)
SETTINGS = {"fedavg": {"eta": 0.01, "steps": 1}, "pflego": {"tau": 5, "beta": 0.01, "rho": 0.01}}


def mobilenet() -> keras.Model:
    """MobileNetV2 of Keras, with weights from a seed."""
    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNetV2(SHAPE, alpha=0.35, include_top=False, weights=None, pooling="avg")
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False
    return model


def pictures(folder: Path) -> Federation:
    """Random images, which cost as much as others."""
    rng = np.random.default_rng(0)
    y = np.arange(EXAMPLES, dtype=np.int32) % CLASSES
    parts = [{"train": (rng.integers(0, 256, (EXAMPLES, *SHAPE), np.uint8), y)} for _ in range(CLIENTS)]
    for part in parts:
        part["test"] = tuple(a[:CLASSES] for a in part["train"])
    return Federation.from_clients(parts, out=folder / "federation", validation=0.0, scale=2 / 255, shift=-1.0)


class Rounds:
    """The rounds of a method on one model and the federation that it takes."""

    def __init__(self, model: SplitModel, federation: Federation, method: str):
        algorithm = build_algorithm(method, model, federation.population(labels="global"), **SETTINGS[method])
        self._algorithm, self._engine, self._t = algorithm, Simulation(algorithm, federation), 0
        self._ids = algorithm.population.client_ids.tolist()
        self._server = self._engine.initialize()
        self._states = [algorithm.init_client(v.info) for v in visits(algorithm, 0, self._ids)]

    def next(self) -> tuple[float, int, int]:
        """Runs a round: its seconds, and the bytes down and up of one client."""
        self._t += 1
        start = time.perf_counter()
        output = self._engine.next(self._server, self._states, visits(self._algorithm, self._t, self._ids))
        self._server, self._states = output.server, output.client_states
        seconds = time.perf_counter() - start
        return seconds, *(int(output.metrics[f"bytes_{way}"]) // len(self._ids) for way in ("down", "up"))


def measured(train_from: str, adapters: str | None, method: str, rounds: int, folder: Path) -> dict:
    """Seconds, bytes and ratios; the first round of each, which is traced, does not count."""
    federation, backbone = pictures(folder), mobilenet()
    whole, cut = SplitModel(backbone), SplitModel(backbone, train_from=train_from, adapters=adapters)
    start = time.perf_counter()
    features, above = trunk_federation(cut, federation)
    once = time.perf_counter() - start
    runs = Rounds(whole, federation, method), Rounds(above, features, method)
    for run in runs:
        run.next()
    pairs = [[run.next() for run in runs] for _ in range(rounds)]
    seconds = np.array([[took for took, *_ in pair] for pair in pairs])
    _, *sizes = zip(*pairs[-1], strict=True)
    return {
        "method": method,
        "train_from": train_from,
        "adapters": adapters,
        "weights": [model.num_backbone_weights for model in (whole, above)],
        "seconds": [float(s) for s in np.median(seconds, 0)],
        "faster": float(np.median(seconds[:, 0] / seconds[:, 1])),
        "bytes_down": [int(b) for b in sizes[0]],
        "bytes_up": [int(b) for b in sizes[1]],
        "smaller": min(sizes[0][0] / sizes[0][1], sizes[1][0] / sizes[1][1]),
        "trunk_seconds": once,
        "stored_mb": [f.manifest["files"]["x.raw"]["bytes"] / 1e6 for f in (federation, features)],
    }


@click.command()
@click.option("--train-from", default="Conv_1", show_default=True)
@click.option("--adapters", default="lora:4", show_default=True, help="'none' for no adapters.")
@click.option("--method", type=click.Choice(list(SETTINGS)), default="pflego", show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--json", "json_path", type=Written())
def main(train_from, adapters, method, rounds, json_path):
    """Measure, and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        found = measured(train_from, None if adapters == "none" else adapters, method, rounds, Path(folder))
    for name, value in found.items():
        print(f"{name:14}{value}")
    if json_path:
        json_path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
