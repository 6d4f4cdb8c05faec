"""kill -9 at ten random moments of a run; is the end the same?

    python benchmarks/crash.py [--engine local|tff] [--rounds 60] [--kills 10] [--seed 0]

Runs `python -m tfpfl run` once without interruption, and once killed and continued by `python -m tfpfl resume` until
it is done. Moments are random in the time that the command works on rounds. Prints when it was killed and what was
saved, and compares server state, client states, evaluations and history (without its seconds) bit for bit. Exits with 1
where anything differs.
"""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click


def saved(folder: Path) -> dict:
    """Every table of a run's store, in bytes; of the history all but the seconds. Reading mends nothing."""
    path = folder / "state.sqlite"
    if not path.exists():
        return {"server": [], "client": [], "evaluation": [], "history": []}
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        found = {t: db.execute(f"SELECT * FROM {t}").fetchall() for t in ("server", "client", "evaluation")}
        history = [json.loads(row) for (row,) in db.execute("SELECT row FROM history ORDER BY round")]
    except sqlite3.OperationalError:  # killed before the tables were there
        return {"server": [], "client": [], "evaluation": [], "history": []}
    finally:
        db.close()
    return found | {"history": [{k: v for k, v in row.items() if k != "seconds"} for row in history]}


def start(*arguments) -> subprocess.Popen:
    """`python -m tfpfl ...`"""
    command = [sys.executable, "-m", "tfpfl", *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen) -> None:
    """Waits for it, and shows its error where it failed."""
    error = process.communicate()[1].decode(errors="replace")
    if process.returncode:
        sys.exit(f"the command ended with {process.returncode}:\n{error}")


@click.command(help=__doc__)
@click.option("--engine", type=click.Choice(["local", "tff"]), default="local", show_default=True)
@click.option("--rounds", default=60, show_default=True)
@click.option("--kills", default=10, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the moments.")
def main(engine, rounds, kills, seed):
    """Runs the comparison."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as root:
        os.environ["TFPFL_CACHE"] = str(Path(root) / "cache")
        whole, killed = Path(root) / "whole", Path(root) / "killed"
        asked = ["run", "--engine", engine, "--rounds", rounds, "--clients", 20, "--participation", 0.5, "--tau", 10]
        asked += ["--evaluate-every", 7]
        began = time.perf_counter()
        finish(start(*asked, "--out", whole))
        print(f"engine {engine}, {rounds} rounds without interruption: {time.perf_counter() - began:.1f} s")
        print(f"{'kill':>4}  {'command':<7}  {'seconds':>7}  {'rounds saved':>12}  what was there")
        done, number = 0, 0
        while number < kills:
            command = ["resume", killed] if (killed / "config.json").exists() else [*asked, "--out", killed]
            began = time.perf_counter()
            process = start(*command)
            # The first kill comes before any round; the others some way into what each may do of the rest.
            target = done + (rng.randint(1, max(1, 2 * (rounds - done) // (kills - number + 1))) if number else 0)
            pause = rng.random() * (4 if number == 0 else 0.3)
            while process.poll() is None and len(saved(killed)["history"]) < min(target, rounds):
                time.sleep(0.005)
            time.sleep(pause)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            if process.returncode != -signal.SIGKILL:
                sys.exit(f"the run was over before kill {number + 1}: take more --rounds")
            number, seconds = number + 1, time.perf_counter() - began
            done = len(saved(killed)["history"])
            there = ", ".join(sorted(p.name for p in killed.iterdir())) if killed.exists() else "nothing"
            print(f"{number:>4}  {command[0]:<7}  {seconds:>7.1f}  {done:>12}  {there}", flush=True)
        finish(start("resume", killed))
        expected, found = saved(whole), saved(killed)
        sizes = ", ".join(f"{len(rows)} of {name}" for name, rows in expected.items())
        different = [name for name in expected if expected[name] != found[name]]
        different += [
            p for p in ("clients.csv", "config.json") if (whole / p).read_bytes() != (killed / p).read_bytes()
        ]
    if different or len(expected["history"]) != rounds:
        sys.exit(f"DIFFERENT: {', '.join(different) or 'rounds are missing'}")
    print(f"after {kills} kills the run equals the uninterrupted one bit for bit ({sizes})")


if __name__ == "__main__":
    main()
