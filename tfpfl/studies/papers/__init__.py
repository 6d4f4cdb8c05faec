"""Reproduces the papers' tables and figures, and keeps a ledger of the results. `tfpfl reproduce` calls it.

Each cell of a table is one run, in an ordinary run folder whose name has a hash of its configuration. A larger scale
continues the runs of a smaller one, and experiments with the same runs share them. Figures that are not learning curves
are measured after their runs; their data are kept beside the runs as OUT/NAME-sSEED.json.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from tfpfl.checks import InvalidArgument, unknown
from tfpfl.data import Federation
from tfpfl.runs import protocols
from tfpfl.runs.config import RunConfig, RunError
from tfpfl.runs.files import write_whole
from tfpfl.runs.run import Run
from tfpfl.runs.training import DivergedError
from tfpfl.studies.papers import equal_cost
from tfpfl.studies.papers import ledger as ledgers
from tfpfl.studies.papers.elsewhere import data_name, decides, ledger_name, on_federation, said
from tfpfl.studies.papers.experiment import SCALES, Cell, Experiment, Size
from tfpfl.studies.papers.experiments import EXPERIMENTS
from tfpfl.studies.papers.pictures import FIGURES, Picture
from tfpfl.studies.records import Record


def experiment(name: str) -> Experiment | Picture:
    """The experiment of a name in `EXPERIMENTS` (tables) or `FIGURES`.

    Raises:
        InvalidArgument: an unknown name. The message has the closest known one.
    """
    known = EXPERIMENTS | FIGURES
    if name not in known:
        raise InvalidArgument(unknown("experiment", name, known))
    return known[name]


def table_on(name: str, federation: Federation, size: Size, network: str | None = None) -> Experiment:
    """The methods of a paper's table on another federation; see `tfpfl.studies.papers.elsewhere`.

    Args:
        name: a name in `EXPERIMENTS`.
        federation: the data.
        size: the numbers of rounds and seeds.
        network: the backbone of all cells. Default: the table's own, or that which fits the examples.

    Raises:
        InvalidArgument: an unknown name, a figure of `FIGURES`, or a federation without classes.
    """
    found = experiment(name)
    if federation.targets is not None:
        raise InvalidArgument(
            f"{name} compares accuracies, and the federation {federation.path} has {federation.targets.sort} targets "
            "in place of classes. `tfpfl compare` compares methods on them"
        )
    if isinstance(found, Picture):
        raise InvalidArgument(
            f"{name} is a figure: it is measured on clients and classes that only the paper's own data have, so there "
            f"is none on another federation. --federation is for the tables: {', '.join(EXPERIMENTS)}"
        )
    return on_federation(found.at(size), federation, network)


def run_folder(out: Path, cell: Cell, seed: int) -> Path:
    """The run folder of a cell and seed in the folder `out`: ALGORITHM-DATASET-HASH-sSEED."""
    config, data = RunConfig(**cell.config, seed=seed), data_name(cell.config).replace("/", "-")
    return Path(out) / f"{config.algorithm}-{data}-{ledgers.settings(decides(cell.config))}-s{seed}"


def reproduce(
    name: str,
    *,
    scale: str = "laptop",
    out: Path = Path("runs/reproduce"),
    ledger: Path | None = None,
    only: Sequence[str] = (),
    size: Size | None = None,
    first_seed: int = 0,
    minutes: float | None = None,
    command: str = "",
    callbacks=lambda label: (),
    allow_download: bool = False,
    tell=lambda text: None,
    federation: Federation | None = None,
    network: str | None = None,
) -> dict:
    """Runs the cells of an experiment that are missing, and adds the results to the ledger; seed after seed.

    Args:
        name: a name in `EXPERIMENTS` or `FIGURES`.
        scale: 'smoke', 'laptop' or 'full'.
        out: the folder with the run folders.
        ledger: the ledger's file; default: OUT/ledger.json.
        only: words; only cells whose name has all of them are run.
        size: numbers of rounds and seeds, instead of the scale's.
        first_seed: the first of the seeds, >= 0; the others follow it.
        minutes: after this time no further cell is started and no figure is measured; None: no limit.
        command: the command line that the ledger shows for these results.
        callbacks: function (name of a cell) -> callbacks of its run.
        allow_download: whether TensorFlow Datasets may download a data set that is not on this machine.
        tell: called with a line of text on the progress of measuring a figure.
        federation: data on which the methods of a table are trained instead of the paper's; then nothing is compared
            with the paper. None: the paper's data.
        network: only with `federation`: the backbone of all cells, see `table_on`.

    Returns:
        The experiment's part of the ledger at this scale, see `ledger.part`.

    Raises:
        InvalidArgument: an unknown experiment or scale, no cell has all the words, or a figure cannot be measured from
            its runs or on this federation.
        LedgerError: the ledger's file is not a ledger.
        FileNotFoundError: no run of a figure has its data set on this machine. (A table notes such cells as not run.)
    """
    found = experiment(name)
    if scale not in SCALES:
        raise InvalidArgument(unknown("scale", scale, SCALES))
    size, path = size or found.sizes[scale], ledger or Path(out) / "ledger.json"
    entry = name
    if federation is not None:
        found, entry = table_on(name, federation, size, network), ledger_name(name, scale, federation, network)
        tell(said(name, found, federation))
    elif not isinstance(found, Picture):
        found, entry = found.at(size), ledgers.part(name, scale)
    cells = [cell for cell in found.cells if _has_words(cell, only)]
    if found.cells and not cells:
        raise InvalidArgument(
            f"no cell of {name} has {' and '.join(only)} in its name; the first is {ledgers.key(found.cells[0])}"
        )
    ledgers.load(path)  # refuses a file that is not a ledger, before hours of training
    started = time.monotonic()

    def late():
        return minutes is not None and time.monotonic() - started > 60 * minutes

    if isinstance(found, Picture):
        for seed in range(first_seed, first_seed + size.seeds):
            without = _runs_of(cells, seed, size.rounds, out, late, callbacks, allow_download)
            if late():
                break
            _measure(name, found, seed, out, scale, without, path, command, tell)
        return ledgers.load(path).get(name, {})
    absent = {}
    for seed in range(first_seed, first_seed + size.seeds):
        for cell in cells:
            if late():
                return ledgers.load(path).get(entry, {})
            dataset, why = data_name(cell.config), None
            if dataset not in absent:
                try:
                    _run(out, cell, seed, size.rounds, callbacks(ledgers.key(cell)), allow_download)
                except FileNotFoundError:
                    absent[dataset] = f"the data set {dataset} is not here"
                except DivergedError as error:
                    why = str(error)
            told = absent.get(dataset, why)
            _note(path, entry, found, cell, seed, out, scale, size, command, told, diverged=why is not None)
    return ledgers.load(path).get(entry, {})


def draw(
    name: str,
    out: Path,
    scale: str = "laptop",
    table: Experiment | None = None,
    over: Sequence[str] = ("rounds",),
    only: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
):
    """Draws the learning curves of a table's runs at a scale, or a figure of `FIGURES`, as a matplotlib Figure.

    Args:
        name: a name in `EXPERIMENTS` or `FIGURES`.
        out: the folder with the run folders.
        scale: 'smoke', 'laptop' or 'full'.
        table: from `table_on`; it replaces the table's cells.
        over: of a table: what its curves are drawn over, of 'rounds', 'seconds', 'flops' and 'bytes'.
        only: words; only cells whose name has all of them are drawn.
        seeds: those whose runs are drawn; of a figure, the first that was measured. None: from 0 on, as many as the
            largest scale has.

    Raises:
        InvalidArgument: an unknown experiment, or one of which nothing was run in `out`.
    """
    from tfpfl.studies.papers import figures

    found = experiment(name)
    seeds = range(max(size.seeds for size in found.sizes.values())) if seeds is None else seeds
    if isinstance(found, Picture):
        data = next(filter(None, (_read(_data(out, name, seed)) for seed in seeds)), None)
        if not data:
            raise InvalidArgument(f"there is nothing to draw: nothing of {name} was run in {out}")
        return found.draw(data)
    found = table or found.at(found.sizes[scale])
    found = found._replace(cells=tuple(cell for cell in found.cells if _has_words(cell, only)))
    return figures.draw(found, figures.records_of(found, lambda cell, seed: run_folder(out, cell, seed), seeds), over)


def _has_words(cell: Cell, words: Sequence[str]) -> bool:
    return all(word.lower() in ledgers.key(cell).lower() for word in words)


def _run(out: Path, cell: Cell, seed: int, rounds: int, callbacks, allow_download: bool) -> None:
    folder = run_folder(out, cell, seed)
    record = ledgers.finished(folder)
    if record is not None and record.rounds >= rounds:
        return
    if (folder / "config.json").exists():  # a run that was interrupted on the way to more rounds ends after these
        with Run.open(folder) as run:
            saved, evaluated = run.store.round_num, {e.round_num for e in run.store.evaluations()}
        opened = Run.open(folder, rounds=_end(rounds, saved, evaluated))
    else:
        config = RunConfig(**cell.config, rounds=rounds, seed=seed)
        opened = Run.create(config, folder, allow_download=allow_download)
    with opened as run:
        run.train(callbacks)


def _end(rounds: int, saved: int, evaluated: set[int]) -> int:
    """The round with which an interrupted run ends: the one asked for, or the last that is saved.

    If it did not evaluate all of the last ten rounds until then, because it was to have more, it has ten more: the mean
    of the last ten evaluated ones would be that of much earlier models.
    """
    end = max(rounds, saved)
    lacks = set(range(max(1, end - protocols.LAST_ROUNDS + 1), saved + 1)) - evaluated
    return saved + protocols.LAST_ROUNDS if lacks else end


def _runs_of(cells, seed, rounds, out, late, callbacks, allow_download) -> dict:
    """Runs the cells of a figure. Returns {cell: error} for those that diverged or have no data set."""
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
    """Measures a figure from its finished runs, writes its data to a file, and adds its numbers to the ledger."""
    folders = {ledgers.key(cell): run_folder(out, cell, seed) for cell in picture.cells}
    records = {cell: record for cell, folder in folders.items() if (record := ledgers.finished(folder)) is not None}
    runs = {cell: folders[cell] for cell in records}
    datasets = {ledgers.key(cell): cell.config["dataset"] for cell in picture.cells}
    told = {  # the message about a missing data set names a folder of this machine
        cell: f"the data set {datasets[cell]} is not here" if isinstance(error, FileNotFoundError) else str(error)
        for cell, error in without.items()
    }
    if picture.cells and not runs:
        with ledgers.changed(path) as ledger:
            ledger.setdefault(name, {"seeds": {}})["not run"] = next(iter(told.values()), "no run came to an end")
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
    entry["rounds"] = {cell: record.rounds for cell, record in records.items()}
    entry["runs"] = {cell: record.summary.get("run_id", "")[:12] for cell, record in records.items()}
    with ledgers.changed(path) as ledger:
        found = ledger.setdefault(name, {"seeds": {}})
        found.pop("not run", None)
        found["seeds"][str(seed)] = entry


def _data(out: Path, name: str, seed: int) -> Path:
    """The file with the data of a figure."""
    return Path(out) / f"{name}-s{seed}.json"


def _read(path: Path) -> dict:
    """The content of a file of data; {} if there is none or it cannot be read, so that it is measured again."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _write(path: Path, data: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(data) + "\n")


def _note(path, name, experiment, cell, seed, out, scale, size, command, why, diverged) -> None:
    """Adds a cell to the ledger."""
    folder = run_folder(out, cell, seed)
    try:
        record = Record.read(folder)
    except RunError:  # no round was saved
        record = None
    with ledgers.changed(path) as ledger:
        found = ledger.setdefault(name, {}).setdefault(ledgers.key(cell), {"seeds": {}})
        if record is None:
            found["not run"] = why
            return
        found.pop("not run", None)
        now = ledgers.entry(record, scale, size.rounds, command, diverged)
        before = found["seeds"].get(str(seed), {})
        if all(before.get(name) == now[name] for name in ("run", "rounds")):
            if record.rounds > size.rounds:  # told by the command that made the rounds
                now |= {name: before[name] for name in ("scale", "asked", "command")}
            if before.get("diverged"):  # this command did not train it
                now["diverged"] = True
        ledgers.put(found, seed, now, ledgers.settings(decides(cell.config)))
        told = {"accuracy": equal_cost.note, ledgers.GAIN: ledgers.note_gains}.get(experiment.measures)
        if told is not None:
            told(ledger[name], experiment, cell.column, seed, lambda cell, seed: run_folder(out, cell, seed))


__all__ = ["EXPERIMENTS", "FIGURES", "SCALES", "Size", "draw", "experiment", "reproduce", "run_folder", "table_on"]
