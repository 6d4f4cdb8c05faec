"""The papers' tables and figures, run again: cell by cell, as far as wanted, with a ledger of what was found.

`tfpfl reproduce` on the command line. A cell's run is an ordinary run folder, named for what decides its numbers; a
larger scale goes on where a smaller one ended, and experiments that a paper fills from the same runs share them. What a
figure shows that is not a curve is measured after its runs, and kept beside them as OUT/NAME-sSEED.json.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from tfpfl.checks import InvalidArgument, unknown
from tfpfl.runs.config import RunConfig, RunError
from tfpfl.runs.files import write_whole
from tfpfl.runs.run import Run
from tfpfl.runs.training import DivergedError
from tfpfl.studies.papers import ledger as ledgers
from tfpfl.studies.papers.experiments import EXPERIMENTS, SCALES, Cell, Experiment, Size
from tfpfl.studies.papers.pictures import FIGURES, Picture
from tfpfl.studies.records import Record


def experiment(name: str) -> Experiment | Picture:
    """An experiment by its name: a table, or a figure of `FIGURES`.

    Raises:
        ValueError: an unknown one, with the nearest.
    """
    known = EXPERIMENTS | FIGURES
    if name not in known:
        raise InvalidArgument(unknown("experiment", name, known))
    return known[name]


def run_folder(out: Path, cell: Cell, seed: int) -> Path:
    """Where the run of a cell is: one folder for one configuration and seed."""
    config = RunConfig(**cell.config, seed=seed)
    decides = json.dumps(cell.config, sort_keys=True)
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
    tell=lambda text: None,
) -> dict:
    """Runs what is missing of an experiment, one seed of every cell first, and adds it to the ledger.

    Args:
        name: in `EXPERIMENTS` or `FIGURES`.
        scale: 'smoke', 'laptop' or 'full'.
        out: where the run folders are.
        ledger: the file; default OUT/ledger.json.
        only: words; a cell is run if its name has each of them.
        size: rounds and seeds, instead of the scale's.
        minutes: no cell is begun after so many, and no figure measured.
        command: for the ledger.
        callbacks: (label of a cell) -> callbacks of its run.
        allow_download: of data sets.
        tell: how far the measuring of a figure is, in words.

    Returns:
        The experiment's part of the ledger.

    Raises:
        ValueError: an unknown experiment or scale, no cell has the words, or a figure cannot be made of its runs.
        FileNotFoundError: the data of all of a figure's runs are absent. (In a table such cells are noted as not run.)
    """
    found = experiment(name)
    if scale not in SCALES:
        raise InvalidArgument(unknown("scale", scale, SCALES))
    size, path = size or found.sizes[scale], ledger or Path(out) / "ledger.json"
    found = found if isinstance(found, Picture) else found.at(size)
    cells = [cell for cell in found.cells if all(word.lower() in ledgers.key(cell).lower() for word in only)]
    if found.cells and not cells:
        raise InvalidArgument(
            f"no cell of {name} has {' and '.join(only)} in its name; the first is {ledgers.key(found.cells[0])}"
        )
    ledgers.load(path)  # a file that is no ledger is refused before hours are spent
    started = time.monotonic()

    def late():
        return minutes is not None and time.monotonic() - started > 60 * minutes

    if isinstance(found, Picture):
        for seed in range(size.seeds):
            without = _runs_of(cells, seed, size.rounds, out, late, callbacks, allow_download)
            if late():
                break
            _measure(name, found, seed, out, scale, without, path, command, tell)
        return ledgers.load(path).get(name, {})
    absent = {}
    for seed in range(size.seeds):
        for cell in cells:
            if late():
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


def draw(name: str, out: Path, scale: str = "laptop"):
    """The curves of what was run of an experiment at a scale, or what a figure of `FIGURES` shows: a matplotlib Figure.

    Raises:
        ValueError: an unknown experiment, or nothing of it was run.
    """
    from tfpfl.studies.papers import figures

    found = experiment(name)
    if isinstance(found, Picture):
        data = _read(_data(out, name, 0))
        if not data:
            raise InvalidArgument(f"there is nothing to draw: nothing of {name} was run in {out}")
        return found.draw(data)
    seeds = max(size.seeds for size in found.sizes.values())
    found = found.at(found.sizes[scale])
    return figures.draw(found, figures.records_of(found, lambda cell, seed: run_folder(out, cell, seed), seeds))


def _run(out: Path, cell: Cell, seed: int, rounds: int, callbacks, allow_download: bool) -> None:
    folder = run_folder(out, cell, seed)
    if (folder / "summary.json").exists() and Record.read(folder).rounds >= rounds:
        return
    config = RunConfig(**cell.config, rounds=rounds, seed=seed)
    with Run.create_or_resume(config, folder, allow_download=allow_download) as run:
        run.train(callbacks)


def _runs_of(cells, seed, rounds, out, late, callbacks, allow_download) -> dict:
    """Runs the cells of a figure; {cell: the error, of those that have no data or diverged}."""
    without: dict[str, Exception] = {}
    absent: dict[str, Exception] = {}
    for cell in cells:
        if late():
            break
        name, dataset = ledgers.key(cell), cell.config["dataset"]
        if dataset not in absent:
            try:
                _run(out, cell, seed, rounds, callbacks(name), allow_download)
            except FileNotFoundError as error:
                absent[dataset] = error
            except DivergedError as error:
                without[name] = error
        if dataset in absent:
            without[name] = absent[dataset]
    return without


def _measure(name, picture, seed, out, scale, without, path, command, tell) -> None:
    """Measures what a figure shows of the runs that there are, keeps it, and adds its numbers to the ledger."""
    folders = {ledgers.key(cell): run_folder(out, cell, seed) for cell in picture.cells}
    runs = {cell: folder for cell, folder in folders.items() if (folder / "summary.json").exists()}
    datasets = {ledgers.key(cell): cell.config["dataset"] for cell in picture.cells}
    told = {  # the error of absent data has a folder of this machine in it
        cell: f"the data set {datasets[cell]} is not here" if isinstance(error, FileNotFoundError) else str(error)
        for cell, error in without.items()
    }
    if picture.cells and not runs:
        ledger = ledgers.load(path)
        ledger.setdefault(name, {"seeds": {}})["not run"] = next(iter(told.values()), "no run came to an end")
        ledgers.save(path, ledger)
        raise next(
            iter(without.values()), InvalidArgument(f"there is no figure {name}: none of its runs came to an end")
        )
    entry = {"scale": scale, "command": command, "without": told}
    kept = _data(out, name, seed)
    data = picture.measure(
        runs, scale=scale, seed=seed, kept=_read(kept), save=lambda data: _write(kept, data), tell=tell
    )
    entry["numbers"] = picture.numbers(data)
    _write(kept, data)
    records = {cell: Record.read(folder) for cell, folder in runs.items()}
    entry["rounds"] = {cell: record.rounds for cell, record in records.items()}
    entry["runs"] = {cell: record.summary.get("run_id", "")[:12] for cell, record in records.items()}
    ledger = ledgers.load(path)
    found = ledger.setdefault(name, {"seeds": {}})
    found.pop("not run", None)
    found["seeds"][str(seed)] = entry
    ledgers.save(path, ledger)


def _data(out: Path, name: str, seed: int) -> Path:
    """What a figure shows."""
    return Path(out) / f"{name}-s{seed}.json"


def _read(path: Path) -> dict:
    """{} where there is none yet, or it cannot be read: then it is measured again."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _write(path: Path, data: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(data) + "\n")


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


__all__ = ["EXPERIMENTS", "FIGURES", "SCALES", "Size", "draw", "experiment", "reproduce", "run_folder"]
