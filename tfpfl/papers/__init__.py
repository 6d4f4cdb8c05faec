"""The papers' tables and figures, run again: cell by cell, as far as wanted, with a ledger of what was found.

`tfpfl reproduce` on the command line. A cell's run is an ordinary run folder, named for what decides its numbers; a
larger scale goes on where a smaller one ended, and experiments that a paper fills from the same runs share them.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from tfpfl.names import unknown
from tfpfl.papers import ledger as ledgers
from tfpfl.papers.experiments import EXPERIMENTS, SCALES, Cell, Experiment, Size
from tfpfl.record import Record
from tfpfl.run import Run, RunConfig, RunError, open_federation, read_config
from tfpfl.training import DivergedError


def experiment(name: str) -> Experiment:
    """An experiment by its name.

    Raises:
        ValueError: an unknown one, with the nearest.
    """
    if name not in EXPERIMENTS:
        raise ValueError(unknown("experiment", name, EXPERIMENTS))
    return EXPERIMENTS[name]


def run_folder(out: Path, cell: Cell, seed: int) -> Path:
    """Where the run of a cell is: one folder for one configuration and seed."""
    config = RunConfig(**cell.config, seed=seed)
    decides = json.dumps({k: v for k, v in cell.config.items()}, sort_keys=True)
    name = f"{config.algorithm}-{config.dataset.replace('/', '-')}-{hashlib.sha256(decides.encode()).hexdigest()[:10]}"
    return Path(out) / f"{name}-s{seed}"


def reproduce(
    name: str,
    *,
    scale: str = "laptop",
    out: Path = Path("runs/reproduce"),
    ledger: Path | None = None,
    only: Sequence[str] = (),
    size: Size | None = None,
    minutes: float | None = None,
    command: str = "",
    callbacks=lambda label: (),
    allow_download: bool = False,
) -> dict:
    """Runs what is missing of an experiment, one seed of every cell first, and adds it to the ledger.

    Args:
        name: in `EXPERIMENTS`.
        scale: 'smoke', 'laptop' or 'full'.
        out: where the run folders are.
        ledger: the file; default OUT/ledger.json.
        only: words; a cell is run if its name has each of them.
        size: rounds and seeds, instead of the scale's.
        minutes: no cell is begun after so many.
        command: for the ledger.
        callbacks: (label of a cell) -> callbacks of its run.
        allow_download: of data sets.

    Returns:
        The experiment's part of the ledger.

    Raises:
        ValueError: an unknown experiment or scale, or no cell has the words.
    """
    found = experiment(name)
    if scale not in SCALES:
        raise ValueError(unknown("scale", scale, SCALES))
    size, path = size or found.sizes[scale], ledger or Path(out) / "ledger.json"
    cells = [cell for cell in found.cells if all(word.lower() in ledgers.key(cell).lower() for word in only)]
    if not cells:
        raise ValueError(
            f"no cell of {name} has {' and '.join(only)} in its name; the first is {ledgers.key(found.cells[0])}"
        )
    ledgers.load(path)  # a file that is no ledger is refused before hours are spent
    started, absent = time.monotonic(), {}
    for seed in range(size.seeds):
        for cell in cells:
            if minutes is not None and time.monotonic() - started > 60 * minutes:
                return ledgers.load(path).get(name, {})
            dataset, why = cell.config["dataset"], None
            if dataset not in absent:
                try:
                    _run(out, cell, seed, size.rounds, callbacks(ledgers.key(cell)), allow_download)
                except FileNotFoundError:
                    absent[dataset] = f"the data set {dataset} is not here"
                except DivergedError as error:
                    why = str(error)
            _note(path, name, found, cell, seed, out, scale, size, command, absent.get(dataset, why))
    return ledgers.load(path).get(name, {})


def draw(name: str, out: Path):
    """The curves of what was run of an experiment: a matplotlib Figure.

    Raises:
        ValueError: an unknown experiment, or nothing of it was run.
    """
    from tfpfl.papers import figures

    found = experiment(name)
    seeds = max(size.seeds for size in found.sizes.values())
    return figures.draw(found, figures.records_of(found, lambda cell, seed: run_folder(out, cell, seed), seeds))


def _run(out: Path, cell: Cell, seed: int, rounds: int, callbacks, allow_download: bool) -> None:
    folder = run_folder(out, cell, seed)
    if (folder / "config.json").exists():
        if (folder / "summary.json").exists() and Record.read(folder).rounds >= rounds:
            return
        run = Run.open(folder, rounds=max(rounds, read_config(folder).rounds))
    else:
        config = RunConfig(**cell.config, rounds=rounds, seed=seed)
        run = Run.create(config, folder, open_federation(config, allow_download=allow_download))
    with run:
        run.train(callbacks)


def _note(path, name, experiment, cell, seed, out, scale, size, command, why) -> None:
    """Adds a cell to the ledger, which another process may have changed in between."""
    ledger = ledgers.load(path)
    found = ledger.setdefault(name, {}).setdefault(ledgers.key(cell), {"seeds": {}})
    folder = run_folder(out, cell, seed)
    try:
        record = Record.read(folder)
    except RunError:  # no round was saved
        record = None
    if record is None:
        found["not run"] = why
    else:
        found.pop("not run", None)
        local = None
        if experiment.measures == "gain over Local":
            (baseline,) = [c for c in experiment.cells if c.column == cell.column and c.method == "local"]
            other = run_folder(out, baseline, seed)
            local = Record.read(other) if (other / "summary.json").exists() else None
        found["seeds"][str(seed)] = ledgers.entry(record, scale, size.rounds, command, local)
    ledgers.save(path, ledger)


__all__ = ["EXPERIMENTS", "SCALES", "Size", "draw", "experiment", "reproduce", "run_folder"]
