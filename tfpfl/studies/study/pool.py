"""Runs the jobs of several plans, several processes at a time, and remembers in a file which runs are finished."""

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from tfpfl.studies.study.plan import Cell, Job, Outcome, Plan
from tfpfl.studies.study.worker import DIVERGED, sent

WORKER = (sys.executable, "-m", "tfpfl.studies.study.worker")
PATIENCE = 3.0  # seconds that runs have to end by themselves before they are killed
_PACKAGES = Path(__file__).resolve().parents[3]  # the folder of the package tfpfl
_GONE = "gone"  # the state of a run whose folder was deleted, so that it is trained again


class Ledger:
    """The finished runs of a study, one JSON object a line: run folder, rounds, state and seconds.

    A run that failed is not in it, so that the same command tries it again.

    Args:
        path: the file; it is made with the first run.
    """

    def __init__(self, path: Path):
        self.path = path
        self._found: dict[tuple[str, int], Outcome] = {}
        with suppress(FileNotFoundError):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError, KeyError, TypeError):  # the last line of a study that was killed
                    row = json.loads(line)
                    if row["state"] == _GONE:
                        self._forget(row["run"])
                    else:
                        self._found[row["run"], row["rounds"]] = Outcome(row["state"], float(row["seconds"]))

    def outcome(self, job: Job) -> Outcome | None:
        """How the run of this job ended; None if it is not finished, or its folder is gone."""
        key = self._key(job)
        if not (job.folder / "config.json").exists() and self._forget(key[0]):
            # Other stages of a search have the same folder. It will be there again, with the first stage's rounds.
            self._write({"run": key[0], "state": _GONE})
        return self._found.get(key)

    def _forget(self, run: str) -> list:
        """Forgets what is known of a run folder that is gone. Returns what that was."""
        return [self._found.pop(key) for key in list(self._found) if key[0] == run]

    def add(self, job: Job, outcome: Outcome) -> None:
        """Remembers that a run is finished."""
        run, rounds = self._key(job)
        self._write({"run": run, "rounds": rounds, "state": outcome.state, "seconds": round(outcome.seconds, 3)})
        self._found[run, rounds] = outcome

    def _write(self, row: dict) -> None:
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _key(self, job: Job) -> tuple[str, int]:
        return str(job.folder.relative_to(self.path.parent)), job.config.rounds


@dataclass
class _Place:
    """A plan, and the outcomes of its present list of jobs as far as they are known."""

    plan: Plan
    jobs: list[Job] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)


class _Running(NamedTuple):
    process: subprocess.Popen
    place: _Place
    number: int
    log: Path
    since: float


def work(
    plans: Sequence[Plan],
    ledger: Ledger,
    logs: Path,
    *,
    processes: int = 1,
    ended: Callable[[Job, Outcome], None] = lambda job, outcome: None,
    known: Callable[[Job], None] = lambda job: None,
    worker: Sequence[str] = WORKER,
) -> list[Cell]:
    """Runs all jobs of all plans. A run that fails does not stop the others.

    Args:
        plans: the plans; those that stand first are served first.
        ledger: the runs that are finished already, which are not run again.
        logs: a folder for what runs print. The files of runs that did not fail are removed.
        processes: the number of runs at the same time.
        ended: called with every job that was run, and its outcome.
        known: called with every job that is not run, because its run is finished already.
        worker: the command that does a run; see `tfpfl.studies.study.worker`.

    Returns:
        What each plan returns, in their order.
    """
    cells: dict[int, Cell] = {}
    order = {id(plan): i for i, plan in enumerate(plans)}
    waiting: deque[tuple[_Place, int]] = deque()
    running: list[_Running] = []

    def go_on(place: _Place, outcomes: list[Outcome] | None) -> None:
        """Asks the plan for its next jobs, until one of them has to be run."""
        while True:
            try:
                place.jobs = next(place.plan) if outcomes is None else place.plan.send(outcomes)
            except StopIteration as end:
                cells[order[id(place.plan)]] = end.value
                return
            found = {i: ledger.outcome(job) for i, job in enumerate(place.jobs)}
            place.outcomes = {i: outcome for i, outcome in found.items() if outcome is not None}
            for i in place.outcomes:
                known(place.jobs[i])
            if len(place.outcomes) < len(place.jobs):
                waiting.extend((place, i) for i in found if i not in place.outcomes)
                return
            outcomes = [place.outcomes[i] for i in range(len(place.jobs))]

    for plan in plans:
        go_on(_Place(plan), None)
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                place, number = waiting.popleft()
                running.append(_start(place, number, logs, processes, worker))
            time.sleep(0.02)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                job, outcome = run.place.jobs[run.number], _outcome(run)
                if outcome.state != "failed":
                    ledger.add(job, outcome)
                ended(job, outcome)
                run.place.outcomes[run.number] = outcome
                if len(run.place.outcomes) == len(run.place.jobs):
                    go_on(run.place, [run.place.outcomes[i] for i in range(len(run.place.jobs))])
    finally:
        _end([run.process for run in running])
    return [cells[i] for i in range(len(plans))]


def _start(place: _Place, number: int, logs: Path, processes: int, worker: Sequence[str]) -> _Running:
    job = place.jobs[number]
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{'-'.join(job.folder.parts[-3:])}-r{job.config.rounds}.txt"
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_PACKAGES), environment.get("PYTHONPATH"))))
    if processes > 1:  # each run has its share of the cores; the numbers do not depend on it
        threads = str(max((os.cpu_count() or 1) // processes, 1))
        environment = {"TF_NUM_INTRAOP_THREADS": threads, "TF_NUM_INTEROP_THREADS": threads} | environment
    with open(log, "wb") as output:
        process = subprocess.Popen(
            worker, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as given:  # a broken pipe: its exit code says more
        asked = {
            "config": asdict(job.config),
            "folder": str(job.folder),
            "parent": os.getpid(),
            "code": sent(job.config),
            "path": sys.path,  # where modules of the user's own may be
        }
        given.write(json.dumps(asked).encode())
    return _Running(process, place, number, log, time.monotonic())


def _outcome(run: _Running) -> Outcome:
    seconds, code = time.monotonic() - run.since, run.process.returncode
    if code in (0, DIVERGED):
        run.log.unlink(missing_ok=True)
        return Outcome("done" if code == 0 else "diverged", seconds)
    lines = run.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    why = f"{lines[-1] if lines else 'it printed nothing'} ({how}; all that it printed is in {run.log})"
    return Outcome("failed", seconds, why)


def _end(processes: list[subprocess.Popen]) -> None:
    """Ends runs that are still running; their finished rounds are saved."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + PATIENCE
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
