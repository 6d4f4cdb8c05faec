"""Two hundred runs in which something goes wrong on purpose: is a round lost, a state poisoned, a run stuck?

    python benchmarks/faults.py [--runs 200] [--rounds 8] [--seed 0] [--kinds KIND,...]

Each run has a fault of one kind, drawn with its moment from (seed, number of the run):

    client faults   with probability 0.3 a visit: work that is not finite, an update 1e6 times too large, no examples,
                    examples that are not finite, a label outside (see
                    `tfpfl.algorithms.transforms.faults`); the run has --on-broken reject
    dropout         half of all sampled clients do not come back
    kill            kill -9 of the run at a random moment, up to three times, and resumed
    disk full       the run folder is a tmpfs that is too small; it is made larger, and the run resumed (needs root)
    worker kill     a TFF worker of three is killed in the middle of a round, and comes back (needs TFF)

After every run all rounds must be there, none that was ever saved may be missing, and every number of the server's and
of the clients' states be finite; after kill, disk full and worker kill the end must be that of a run without the fault
(1e-6; without workers bit for bit). A run that takes longer than --patience seconds is stuck. Exits with 1 where
anything is wrong.
"""

import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import click
import numpy as np
from listed import Listed
from safetensors.numpy import load

CLIENT_FAULTS = ("not finite", "huge", "no examples", "examples not finite", "label outside")
KINDS = (*CLIENT_FAULTS, "dropout", "kill", "disk full", "worker kill")
ALGORITHMS = ("pflego", "fedper", "fedavg", "ditto")
CHANCE = 0.3  # of a client fault, a visit
MAX_NORM = 1e3  # an honest update of these runs is shorter than 10
TMPFS = "mount", "-t", "tmpfs", "-o"


def work(folder: str, asked: dict, fault: str | None, workers: tuple = ()) -> None:
    """In a process of its own: begins the run, or goes on with it, with clients that have this fault."""
    from tfpfl.algorithms import build_algorithm
    from tfpfl.algorithms.transforms import faults
    from tfpfl.algorithms.transforms.screening import screened
    from tfpfl.engines.machines import Machines
    from tfpfl.runs.config import RunConfig
    from tfpfl.runs.run import Run
    from tfpfl.runs.store import StoreError

    sys.stderr = open(os.devnull, "w")
    try:
        with Run.create_or_resume(RunConfig(**asked), folder) as run:
            if fault in CLIENT_FAULTS:
                which = faults.drawn(**{fault.replace(" ", "_"): CHANCE})
                own = build_algorithm(run.config.algorithm, run.model, run.population, **run.config.hyperparameters)
                run.algorithm = faults.broken_data(screened(faults.broken_work(own, which), max_norm=MAX_NORM), which)
            if workers:
                run.machines = Machines(workers=workers, deadline=60)
            run.train()
    except (StoreError, OSError):
        sys.exit(3)


def saved(folder: Path) -> dict:
    """{'history', 'server', 'client'} of a run as it is on disk now."""
    path = folder / "state.sqlite"
    if not path.exists():
        return {"history": [], "server": [], "client": []}
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        history = [json.loads(row) for (row,) in db.execute("SELECT row FROM history ORDER BY round")]
        return {
            "history": [{k: v for k, v in row.items() if k != "seconds"} for row in history],
            "server": [arrays(s) for (s,) in db.execute("SELECT state FROM server")],
            "client": [arrays(s) for (s,) in db.execute("SELECT state FROM client ORDER BY id")],
        }
    except sqlite3.OperationalError:  # not made yet
        return {"history": [], "server": [], "client": []}
    finally:
        db.close()


def arrays(state: bytes) -> list:
    found = load(state)
    return [found[str(i)] for i in range(len(found))]


def poisoned(found: dict) -> bool:
    return any(not np.isfinite(a).all() for state in found["server"] + found["client"] for a in state)


def difference(a: dict, b: dict) -> float:
    """The largest between two ends; infinite where they do not have the same rounds and clients."""
    shapes = [[x.shape for state in end["server"] + end["client"] for x in state] for end in (a, b)]
    if len(a["history"]) != len(b["history"]) or shapes[0] != shapes[1]:
        return np.inf
    pairs = zip(a["server"] + a["client"], b["server"] + b["client"], strict=True)
    return max(float(np.abs(np.float64(x) - y).max(initial=0)) for s, t in pairs for x, y in zip(s, t, strict=True))


class Case:
    """One run with its fault."""

    def __init__(self, number, kind, rng, root, context, how):
        self.kind, self.rng, self.context, self.how = kind, rng, context, how
        self.folder = root / f"run{number}"
        self.asked = asked = {"algorithm": rng.choice(ALGORITHMS), "seed": rng.randrange(4), "rounds": how["rounds"]}
        asked |= {"clients": 10, "participation": 0.5, "data_seed": 0, "evaluate_every": 4}
        if kind in CLIENT_FAULTS:
            asked["on_broken"] = "reject"
        if kind == "dropout":
            asked["dropout"] = 0.5
        self.most, self.events, self.workers = 0, Counter(), ()

    def start(self):
        """The run's process."""
        process = self.context.Process(target=work, args=(str(self.folder), self.asked, self.kind, self.workers))
        process.start()
        return process

    def watch(self, process, until=None) -> bool:
        """Waits for the end, or for so many saved rounds; False where it is stuck."""
        deadline = time.monotonic() + self.how["patience"]
        while process.is_alive():
            if time.monotonic() > deadline:
                process.kill()
                process.join()
                return False
            rounds = len(saved(self.folder)["history"])
            self.most = max(self.most, rounds)
            if until is not None and rounds >= until:
                return True
            time.sleep(0.02)
        process.join()
        return True

    def run(self) -> dict:
        """What became of it."""
        stuck = not getattr(self, self.kind.replace(" ", "_"), self.plain)()
        found = saved(self.folder)
        rounds = [row["round"] for row in found["history"]]
        self.events["rejected"] += sum(row.get("rejected", 0) for row in found["history"])
        self.events["dropped"] += sum(row.get("dropped", 0) for row in found["history"])
        return {
            "stuck": stuck,
            "lost": len(rounds) < self.most or rounds != list(range(1, self.how["rounds"] + 1)),
            "poisoned": poisoned(found),
            "end": found,
        }

    def plain(self) -> bool:
        return self.watch(self.start())

    def kill(self) -> bool:
        for _ in range(self.rng.randint(1, 3)):
            process = self.start()
            if not self.watch(process, until=self.rng.randint(0, self.how["rounds"])):
                return False
            time.sleep(self.rng.random() * 0.3)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                self.events["killed"] += 1
            process.join()
        return self.watch(self.start())

    def disk_full(self) -> bool:
        self.folder.mkdir()
        small = self.rng.randint(120, 400)
        subprocess.run([*TMPFS, f"size={small}k", "tmpfs", str(self.folder)], check=True)
        try:
            process = self.start()
            if not self.watch(process):
                return False
            self.events["disk was full"] += process.exitcode == 3
            subprocess.run(["mount", "-o", "remount,size=64m", str(self.folder)], check=True)
            if not (self.folder / "config.json").exists():  # it was full before the run had begun
                for left in self.folder.iterdir():
                    left.unlink()
            well = self.watch(self.start())
            copy = self.folder.with_name(self.folder.name + "-end")
            copy.mkdir()
            with closing(sqlite3.connect(self.folder / "state.sqlite")) as a:
                with closing(sqlite3.connect(copy / "state.sqlite")) as b:
                    a.backup(b)
        finally:
            subprocess.run(["umount", str(self.folder)], check=True)
        self.folder = copy
        return well

    def worker_kill(self) -> bool:
        import portpicker

        self.asked["engine"] = "tff"
        ports = [portpicker.pick_unused_port() for _ in range(3)]
        self.workers = tuple(f"localhost:{port}" for port in ports)
        command = [sys.executable, "-m", "tfpfl", "worker", "--port"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        servers = [subprocess.Popen([*command, str(port)], **quiet) for port in ports]
        try:
            process = self.start()
            if not self.watch(process, until=self.rng.randint(0, self.how["rounds"] - 2)):
                return False
            time.sleep(self.rng.random())
            victim = self.rng.randrange(3)
            servers[victim].kill()
            servers[victim].wait()
            self.events["worker killed"] += process.is_alive()
            time.sleep(self.rng.random() * 2)
            servers[victim] = subprocess.Popen([*command, str(ports[victim])], **quiet)
            return self.watch(process)
        finally:
            for server in servers:
                server.terminate()
            for server in servers:
                server.wait()


@click.command(help=__doc__)
@click.option("--runs", default=200, show_default=True)
@click.option("--rounds", default=8, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the faults.")
@click.option("--kinds", type=Listed("kind of fault", KINDS), help="Only these, with commas between.")
@click.option("--patience", default=180.0, show_default=True, help="Seconds after which a run is stuck.")
def main(runs, rounds, seed, kinds, patience):
    """Runs all, and prints the table."""
    kinds = kinds or KINDS
    context = multiprocessing.get_context("forkserver")
    transforms = "tfpfl.algorithms.transforms"
    context.set_forkserver_preload(["tfpfl.runs.run", f"{transforms}.faults", f"{transforms}.screening"])
    table, wrong, ends = {kind: Counter() for kind in kinds}, [], {}
    with tempfile.TemporaryDirectory() as root:
        os.environ["TFPFL_CACHE"], began = str(Path(root) / "cache"), time.perf_counter()
        how = {"rounds": rounds, "patience": patience}
        for number in range(runs):
            rng, kind = random.Random(f"{seed} {number}"), kinds[number % len(kinds)]
            case = Case(number, kind, rng, Path(root), context, how)
            found = case.run()
            problems = [name for name in ("stuck", "lost", "poisoned") if found[name]]
            if kind in ("kill", "disk full", "worker kill"):
                key = case.asked["algorithm"], case.asked["seed"]
                if key not in ends:
                    sound = Case(
                        f"{number}-sound", "sound", random.Random(f"{seed} {number}"), Path(root), context, how
                    )
                    ends[key] = sound.run()["end"]
                if difference(found["end"], ends[key]) > (1e-6 if kind == "worker kill" else 0):
                    problems.append("different")
            table[kind] += Counter(runs=1, **case.events) + Counter(problems)
            if problems:
                wrong.append(f"run {number} ({kind}, {case.asked}): {', '.join(problems)}")
                print(wrong[-1], flush=True)
            if (number + 1) % 20 == 0:
                print(f"{number + 1} runs, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    names = ["runs", "rejected", "dropped", "killed", "disk was full", "worker killed"]
    names += ["lost", "poisoned", "stuck", "different"]
    print("| fault | " + " | ".join(names) + " |\n|---|" + "---:|" * len(names))
    for kind, counts in [*table.items(), ("all", sum(table.values(), Counter()))]:
        print(f"| {kind} | " + " | ".join(str(counts[name]) for name in names) + " |")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
