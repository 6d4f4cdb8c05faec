"""What the suite measures of a finished run beyond its scores: few shots, other people's data, calibration."""

import json
import math
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.runs.files import write_whole
from tfpfl.studies.few_shots import SHOTS
from tfpfl.studies.study.worker import end_with_parent

FILE = "measures.json"  # in the run folder
EPOCHS = 20  # of adapting
ALPHA = 0.1  # of conformal sets


def measure(folder: Path) -> dict:
    """Measures a finished run, and keeps the result in its folder.

    Returns:
        {'shots': {k: [n] scores of the people who never trained, after adapting to k examples of each class; '0' before
        adapting}, 'own', 'others': [n] the model of each person who trained, on its own and on the other people's test
        examples, 'ece', 'nll', 'coverage', 'set_size': [n]}; one threshold of the conformal sets for all. In place of
        what a method cannot have, {'why': text}. And 'of': what was measured, see `_of`.
    """
    from tfpfl.runs.run import Run
    from tfpfl.studies.few_shots import shot_curve
    from tfpfl.studies.out_of_person import calibration, exchange

    with Run.open(folder) as run:

        def shots() -> dict:
            curve = shot_curve(run, SHOTS, draws=1, epochs=EPOCHS)
            by_shots = {str(k): row.tolist() for k, row in zip(curve.shots, curve.by_client, strict=True)}
            return {"0": curve.before.tolist(), **by_shots}

        def others() -> dict:
            found = exchange(run)
            return {"own": found.own.tolist(), "others": found.others.tolist()}

        def trusted() -> dict:
            found = calibration(run, ALPHA, pooled=True)
            return {name: getattr(found, name).tolist() for name in ("ece", "nll", "coverage", "set_size")}

        result = {name: _or_why(part) for name, part in (("shots", shots), ("people", others), ("trust", trusted))}
    result["of"] = _of(folder)
    write_whole(folder / FILE, json.dumps(result))
    return result


def _of(folder: Path) -> dict:
    """What measures belong to: the run, its rounds, and how it is measured. Others are not those of this call."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    of_run = {name: summary[name] for name in ("run_id", "rounds")}
    return of_run | {"shots": list(SHOTS), "epochs": EPOCHS, "alpha": ALPHA}


def _kept(folder: Path) -> dict | None:
    """The measures in a run's folder; None if there are none, or others than this version makes of this run."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("of") == _of(folder) else None


def _or_why(part: Callable[[], dict]) -> dict:
    try:
        return part()
    except InvalidArgument as error:  # the method cannot have it; its message says why
        return {"why": str(error)}


def measured(folders: Sequence[Path], *, processes: int, tell: Callable[[str], None]) -> dict[Path, dict]:
    """The measures of finished runs: read, or made by so many processes where a folder does not have them."""
    missing = [folder for folder in folders if _kept(folder) is None]
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin, (os.getpid(),)) as pool:
        waiting = {pool.submit(measure, folder): folder for folder in missing}
        try:
            for count, future in enumerate(as_completed(waiting), start=1):
                future.result()
                tell(f"measured {waiting[future].name} ({count} of {len(missing)})")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # else all that are left would be measured before the end
            raise
    return {folder: json.loads((folder / FILE).read_text(encoding="utf-8")) for folder in folders}


def _begin(parent: int) -> None:
    """In a process of `measured`: ends it with its parent, and at once by Ctrl-C; what it has not finished is lost."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def over_seeds(found: Sequence[dict], part: str, name: str) -> np.ndarray:
    """float [S, n]: one measure of the runs of all seeds; empty where one of them does not have it."""
    values = [run[part].get(name) for run in found]
    if any(row is None for row in values) or len({len(row) for row in values}) != 1:
        return np.empty((0, 0))
    return np.array([[math.nan if v is None else v for v in row] for row in values], np.float64)
