"""What every framework's process shares: the job that it reads, and the turns in which it works. NumPy only.

A process is started with the job's folder and answers on its standard output, one JSON line each:

    (once, when it could run a round)   {"ready": true, "versions": {...}, "note": "..."}
    round                               {"seconds": 3.1}
    save FILE                           {"saved": FILE}; the global model's weights, in the order and layout of Keras
    quit                                (the process ends)

It reads the next line only when it is done: while it waits, it does nothing. What a framework prints goes to the
standard error.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Job(NamedTuple):
    """FedAvg on a federation in which every client has the same number of examples."""

    seed: int
    batch_size: int
    rate: float
    federation: str  # the folder of the same clients as a tfpfl.Federation
    scale: float
    shift: float  # the input of the network is x * scale + shift
    x: np.ndarray  # uint8 [clients, examples, 32, 32, 3], memory-mapped
    y: np.ndarray  # int32 [clients, examples]
    cohorts: np.ndarray  # int64 [rounds, clients of a round]
    orders: np.ndarray  # uint8 [rounds, clients of a round, examples]: in which each of them takes its examples
    weights: list  # of round 0: kernels HWIO and [in, out], each with its bias

    @property
    def clients(self) -> int:
        """I."""
        return len(self.x)

    @property
    def examples(self) -> int:
        """N_i."""
        return self.x.shape[1]

    def visit(self, round_num: int, place: int) -> tuple[np.ndarray, np.ndarray]:
        """The examples of one client of a round, x uint8 and y, in the order in which it takes them."""
        i, order = self.cohorts[round_num - 1, place], self.orders[round_num - 1, place]
        return self.x[i][order], self.y[i][order]


def load_job(folder) -> Job:
    """Opens the folder that `run.py` wrote."""
    folder = Path(folder)
    settings = json.loads((folder / "job.json").read_text())
    arrays = {name: np.load(folder.parent / f"{name}.npy", mmap_mode="r") for name in ("x", "y")}
    arrays |= {name: np.load(folder / f"{name}.npy") for name in ("cohorts", "orders")}
    return Job(**settings, **arrays, weights=read(folder / "weights.npz"))


def read(path) -> list:
    """Weights that `write` wrote."""
    with np.load(path) as file:
        return [file[name] for name in file.files]


def write(path, weights) -> None:
    """Weights, a list of arrays, as one file."""
    np.savez(path, *[np.asarray(w) for w in weights])


class Turns:
    """This process's turns.

    Args:
        weights: a function that gives the global model's weights as arrays, asked only between rounds.
    """

    def __init__(self, weights):
        self.weights = weights
        self._commands = os.fdopen(os.dup(0), "r")
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # neither a framework's prints nor its children get in between
        os.dup2(2, 1)
        self._started = 0.0

    def ready(self, versions: dict, note: str = "") -> None:
        """Everything that comes before round 1 is done."""
        self._say(ready=True, versions={"python": sys.version.split()[0], **versions}, note=note)

    def begin(self) -> bool:
        """Waits for the next round, and starts its clock; False if there is none."""
        for line in self._commands:
            command, _, argument = line.strip().partition(" ")
            if command == "round":
                self._started = time.perf_counter()
                return True
            if command == "quit":
                break
            write(argument, self.weights())
            self._say(saved=argument)
        return False

    def end(self) -> None:
        """The new global model is there: stops the clock."""
        self._say(seconds=time.perf_counter() - self._started)

    def _say(self, **answer) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)
