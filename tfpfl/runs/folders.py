"""Takes a run folder for this process: a new one to create a run in, or that of a run to go on with."""

import gc
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tfpfl.data import Federation
from tfpfl.data.places import is_places
from tfpfl.runs.config import METHOD, METRIC, NETWORK, NETWORK_CODE, RunError
from tfpfl.runs.locks import InUse, Lock

STATE = "state.sqlite"
DEMO = "demo"  # the empty file in a run folder of a demo, which a later demo may replace
LIVE = "live.sqlite"  # if there is one, the heads are on devices: see `tfpfl.live`
_LOCK = f"{STATE}.lock"  # a creation makes it first: where it is not, all else is the user's own
_LEFTOVERS = (NETWORK, NETWORK_CODE, f"{NETWORK}.new", METHOD, METRIC.format(name="*"), "config.json.new", _LOCK)
_WRITTEN = (*_LEFTOVERS, "config.json", f"{STATE}*", "history.csv*", "clients.csv*", "summary.json*", "tensorboard")


@contextmanager
def new_folder(folder: Path) -> Iterator[Lock]:
    """Makes and locks the folder of a new run. If the block raises an error, all that was made is removed again.

    Args:
        folder: it must not exist, or be empty; what a creation that was killed has left does not count. Its lock tells
            such files from the user's own of the same names.

    Yields:
        The lock. It stays locked after the block; whoever gets it releases it.

    Raises:
        RunError: the folder holds something, or another process creates or trains a run in it.
    """
    check_free(folder)
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    was_locked = (folder / _LOCK).exists()
    try:
        with locked_folder(folder) as lock:
            check_free(folder, was_locked)  # again, because another process may have created a run meanwhile
            before = set(folder.iterdir())
            if before == {folder / _LOCK}:
                before = set()
            try:
                yield lock
            except BaseException:
                for path in set(folder.iterdir()) - before:
                    with suppress(OSError):
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                raise
    except BaseException:
        for path in made:
            with suppress(OSError):  # another process has put something into it
                path.rmdir()
        raise


def check_no_links(folder: Path) -> None:
    """Checks that a run's folder holds files and folders only. What is written into a link would be written elsewhere.

    Raises:
        RunError: something in it is a link, a pipe or a device. The message names it.
    """
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in sorted(folders + files)):
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                what = "a link" if path.is_symlink() else "no ordinary file"
                raise RunError(
                    f"{path} is {what}: a run would write elsewhere through it. Put the file itself in its place"
                )


def read_kept(path: Path, expected: str, what: str) -> bytes:
    """Reads a file that a run folder keeps: its network.keras, or the file of its method.

    Args:
        path: the file.
        expected: its sha256 in config.json.
        what: what the file is, for messages.

    Raises:
        RunError: the file is missing, or its sha256 differs.
    """
    if not path.exists():
        raise RunError(f"{path} is missing: without it the run's {what} is unknown. Put the file back")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != expected:
        raise RunError(f"{path} was changed: its sha256 is not the one in config.json. Put the original file back")
    return content


@contextmanager
def locked_folder(folder: Path) -> Iterator[Lock]:
    """Locks a run folder. It stays locked after the block, unless the block raises an error.

    Raises:
        RunError: another process creates or trains a run in it, its lock cannot be written, or it holds links.
    """
    check_no_links(folder)
    try:
        lock = _locked(folder / STATE)
    except InUse as error:
        end = "wait until it ends, or end it. A run folder is written by one process at a time"
        if error.is_ours:
            end = "close it: run.close(), or `with Run.open(...) as run`. A run is in one object at a time"
        raise RunError(f"another run is being created or trained in {folder} {error}: {end}") from error
    except OSError as error:
        raise RunError(f"cannot write in {folder}: {error.strerror}") from error
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def _locked(path: Path) -> Lock:
    try:
        return Lock(path)
    except InUse as error:
        if not error.is_ours:
            raise
        gc.collect()  # it may be of a run that nothing refers to any more, as after a notebook's cell has run again
        return Lock(path)


def remove_demo(folder: Path) -> None:
    """Deletes the run folder of an earlier demo, which has the file `DEMO`; any other folder is left alone.

    Raises:
        RunError: the demo is still running.
    """
    if (folder / DEMO).is_file() and (folder / "config.json").is_file():  # a folder of this name may be anything
        with locked_folder(folder) as lock:
            shutil.rmtree(folder)
        lock.release()


def check_free(folder: Path, was_locked: bool | None = None) -> None:
    """Checks that a new run would overwrite nothing.

    Args:
        folder: where the run shall be created.
        was_locked: whether a creation had begun in it before, of which files may be left; None: if its lock is there.
    """
    if not folder.exists():
        return
    if folder.is_dir():
        found = list(folder.iterdir())
        left = _LEFTOVERS if was_locked or (was_locked is None and folder / _LOCK in found) else (_LOCK,)
        if all(any(path.match(name) for name in left) for path in found):
            return
    hint = f"; continue it with `tfpfl resume {folder}`" if (folder / "config.json").exists() else ""
    raise RunError(f"{folder} exists and is not empty{hint}. For a new run use another folder (--out)")


def remove_new(folder: Path, made: bool) -> None:
    """Removes what the creation of a run and its first round have written. The user's own files stay.

    Args:
        folder: the run folder, which this process has locked.
        made: whether the creation made the folder, so that it is removed too if nothing else is in it.
    """
    for path in folder.iterdir():
        if any(path.match(name) for name in _WRITTEN):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if made and folder.resolve() != Path.cwd() and not any(folder.iterdir()):
        folder.rmdir()


def check_state_is_here(folder: Path) -> None:
    """Checks that a run which had rounds has its state, so that it does not begin again.

    Raises:
        RunError: there is a history.csv, but no state; or a history of rounds, and the file of the state is empty.
    """
    state, history = folder / STATE, folder / "history.csv"
    if not history.exists():
        return
    is_empty = state.exists() and not state.stat().st_size and len(history.read_bytes().splitlines()) > 1
    if is_empty or not state.exists():
        what = "empty" if is_empty else "missing"
        raise RunError(f"{state} is {what}: the run has a history.csv, but its state is lost. Put the file back")


def check_heads_are_here(folder: Path, federation: Federation | None = None) -> None:
    """Checks that the clients' states are in a run folder.

    Args:
        folder: the run folder.
        federation: the run's data; None: the caller needs none.

    Raises:
        RunError: the run's rounds are live, so that every head is on its device; or the data are only on devices.
    """
    if federation is not None and is_places(federation):
        raise RunError(
            f"{folder} is a run on places: the data of its clients are on devices, which join. Make it with tfpfl run "
            f"--create-only, and run its rounds with tfpfl serve {folder}"
        )
    if (folder / LIVE).exists():
        raise RunError(
            f"{folder} has live rounds: the heads are on the devices, and only they can use or score them. Its scores "
            "are in history.csv and summary.json; `tfpfl serve` goes on with its rounds"
        )
