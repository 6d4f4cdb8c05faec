"""The option --cohort: how many clients a round of a live run invites.

The size is a part of the run's configuration, because PFLEGO's step counts with it. So it can be set before round 1,
and the run is then the one that `tfpfl run` would make with this participation. Later it is refused.
"""

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfpfl.checks import InvalidArgument
from tfpfl.live.serve import BUNDLES
from tfpfl.runs.config import RunConfig, entries, read_config
from tfpfl.runs.files import write_whole
from tfpfl.runs.folders import LIVE, STATE, locked_folder
from tfpfl.runs.locks import InUse, Lock
from tfpfl.runs.run import Run


def sizes(text: str) -> tuple[int, int]:
    """The smallest and the largest cohort of a text such as '20' or '10-20'.

    Raises:
        InvalidArgument: it is no such text, or the sizes are not 1 <= smallest <= largest.
    """
    low, dash, high = text.partition("-")
    both = (low, high if dash else low)
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in both):
        raise InvalidArgument(f"a cohort is a number of clients such as 20, or a range such as 10-20; found {text!r}")
    found = int(both[0]), int(both[1])
    if not 1 <= found[0] <= found[1]:
        raise InvalidArgument(f"a cohort needs at least 1 client, and the smaller number first; found {text!r}")
    return found


def with_cohort(run: Run, text: str) -> Run:
    """The run with another cohort; it stays as it is if it has this cohort already.

    One number is the size of every cohort; of a run with sampling 'binomial', it is the size on average. A range makes
    the sampling 'range'.

    Args:
        run: an open run. If another one is returned, it is closed.
        text: see `sizes`.

    Raises:
        InvalidArgument: see `sizes`; there are fewer clients; or the run has begun with another cohort. Then the run is
            still open.
    """
    (low, high), people = sizes(text), run.population.num_clients
    if high > people:
        raise InvalidArgument(f"a cohort of {high} clients is more than the {people} clients of {run.folder}")
    wanted: dict[str, Any] = {"sampling": "range", "sampling_range": (low, high)}
    if low == high:
        kind = "binomial" if run.config.sampling == "binomial" else "fixed"
        wanted = {"sampling": kind, "participation": low / people, "sampling_range": None}
    config = replace(run.config, **wanted)
    if _same(config, run.config, people):
        return run
    if run.store.round_num or _is_open(run):
        raise InvalidArgument(
            f"{run.folder} draws {_shown(run.config, people)} in a round, and has begun: with another cohort it would "
            "be another run. Leave --cohort out, or make a new folder: tfpfl run --create-only"
        )
    folder = run.folder
    run.close()
    _become(folder, config.run_id, json.dumps(entries(config), indent=2) + "\n")
    made = Run.open(folder)
    if made.config.run_id != config.run_id:  # a start that failed meanwhile has put the old one back
        made.close()
        raise InvalidArgument(f"{folder}: another start of the server came in between: start this one again")
    return made


@contextmanager
def as_it_was(folder: Path) -> Iterator[Callable[[], None]]:
    """Puts config.json back at the end: a server that never listened has not changed the run.

    It gives a function; once it is called, what was changed stays.

    Args:
        folder: the folder of a run that is not open, before the block and after it.

    Raises:
        RunError: it is none.
    """
    path, before, stays = folder / "config.json", read_config(folder), []
    content = path.read_text(encoding="utf-8")
    if not (folder / STATE).exists():  # only `_become` leaves a run without it; it may have been killed half-way
        with _book_of(folder, before.run_id):
            pass
    try:
        yield lambda: stays.append(True)
    finally:
        if not stays and path.read_text(encoding="utf-8") != content:
            _put_back(folder, before.run_id, content)


def _become(folder: Path, run_id: str, content: str) -> None:
    """Makes a folder, whose run has no rounds, that of the run with this config.json. Its devices stay."""
    with locked_folder(folder) as lock:
        _write(folder, run_id, content)
    lock.release()


def _put_back(folder: Path, run_id: str, content: str) -> None:
    """Gives a folder its old config.json, unless another server has the folder: then it has changed the file."""
    try:
        lock = Lock(folder / STATE)
    except InUse:
        return
    try:
        if read_config(folder).run_id != run_id:  # another cohort
            _write(folder, run_id, content)
        else:  # another number of rounds
            write_whole(folder / "config.json", content)
    finally:
        lock.release()


def _write(folder: Path, run_id: str, content: str) -> None:
    for name in (STATE, f"{STATE}-wal", f"{STATE}-shm"):  # it has no rounds, and the id of the other run
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / BUNDLES, ignore_errors=True)  # their manifests tell the rate of the other cohort
    with _book_of(folder, run_id):  # both, or nothing
        write_whole(folder / "config.json", content)


@contextmanager
def _book_of(folder: Path, run_id: str) -> Iterator[None]:
    """Makes live.sqlite, if it is there, that of the run with this id; not if the block fails."""
    if not (folder / LIVE).exists():
        yield
        return
    with closing(sqlite3.connect(folder / LIVE)) as book, book:
        book.execute("UPDATE about SET run_id = ?", (run_id,))
        yield


def _is_open(run: Run) -> bool:
    """Whether a round is open."""
    path = run.folder / LIVE
    if not path.exists():
        return False
    try:
        with closing(sqlite3.connect(path)) as book:
            return bool(book.execute("SELECT 1 FROM opened").fetchone())
    except sqlite3.Error:
        return True  # a book that cannot be read is told of when it is opened


def _same(a: RunConfig, b: RunConfig, people: int) -> bool:
    return a.sampling == b.sampling and _shown(a, people) == _shown(b, people)


def _shown(config: RunConfig, people: int) -> str:
    """The cohort in words."""
    plan = config.sampling_plan()
    if plan.kind == "range":
        return f"{plan.low} to {plan.high} clients"
    return f"{plan.expected(people):g} of {people} clients" + (" on average" if plan.kind == "binomial" else "")
