"""Makes small runs, and reads all that a run has saved, so that tests can compare two runs bit for bit."""

import json
import sqlite3
from pathlib import Path

from helpers import toys
from tfpfl.data import Federation
from tfpfl.runs.callbacks import Callback
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run

SHORT_END = 2  # a short number of last rounds that are all evaluated, in place of ten
EXAMPLES, CLASSES = (20, 31, 24, 27, 22, 25), (2, 3, 2, 4, 3, 2)


def federation(folder, validation=0.2) -> Federation:
    """Six clients of 20 to 31 examples with a validation and a test part."""
    train = toys.clients(EXAMPLES, CLASSES, dtype="float32")
    test = toys.clients([3 * k for k in CLASSES], CLASSES, dtype="float32", seed=2)
    return Federation.from_clients(
        [{"train": a, "test": b} for a, b in zip(train, test, strict=True)], out=folder, validation=validation
    )


def config(**changes) -> RunConfig:
    """Fourteen rounds of half of the clients, evaluated in rounds 3 and 5 to 14."""
    given = {"algorithm": "pflego", "participation": 0.5, "rounds": 14, "evaluate_every": 3} | changes
    if given.get("sampling") == "range" and "participation" not in changes:
        del given["participation"]  # a range says how many clients a round has
    if given["algorithm"] == "pflego" and "preset" not in given:
        given["hyperparameters"] = {"tau": 4, "beta": 0.05} | given.get("hyperparameters", {})
    return RunConfig(**given)


def saved(folder) -> dict:
    """All tables of the store, with states as bytes, and the history without the seconds."""
    db = sqlite3.connect(f"file:{Path(folder) / 'state.sqlite'}?mode=ro", uri=True)
    tables = {
        name: db.execute(f"SELECT * FROM {name} ORDER BY 1, 2, 3, 4" if name != "server" else "SELECT * FROM server")
        for name in ("server", "client", "evaluation", "matrix")
    }
    found = {name: rows.fetchall() for name, rows in tables.items()}
    history = [json.loads(row) for (row,) in db.execute("SELECT row FROM history ORDER BY round")]
    db.close()
    return found | {"history": [{k: v for k, v in row.items() if k != "seconds"} for row in history]}


class Interrupt(Callback):
    """A callback that raises an error after each of the given rounds."""

    def __init__(self, *rounds, error=KeyboardInterrupt):
        self.rounds, self.error = rounds, error

    def round(self, training, row):
        if row["round"] in self.rounds:
            raise self.error


def train(folder, a_federation, callbacks=(), **changes) -> Run:
    """Creates a run, trains it to its end and closes it."""
    with Run.create(config(**changes), folder, a_federation) as run:
        run.train(callbacks)
    return run
