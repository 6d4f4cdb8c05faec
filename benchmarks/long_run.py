"""Does anything grow in a long run? Thousands of rounds in one process, then a resume.

    python benchmarks/long_run.py FOLDER [--rounds 3000] [--engine local|tff] [--algorithm pflego] [--json FILE]

Trains on digits: 20 clients of 2 classes, 5 of them in a round, evaluated every 100 rounds. After every 100 rounds it
prints the resident memory of this process and of the processes that it started, the median seconds of a round (from
one commit to the next, without the rounds that are evaluated), and the sizes of the store and of the whole folder.
Then a copy of the folder is resumed in a new process for some more rounds, the original continues here, and both are
compared bit for bit. Called again with the same FOLDER, it continues the run, by at least as many rounds as are
resumed. Exits with 1 where the two differ.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import numpy as np
import psutil
from listed import Written

from tfpfl.runs import Callback, Run, RunConfig

MORE = 20  # rounds after the resume
STEP = 100  # rounds between two lines


class Growth(Callback):
    """Prints a line after every `STEP` rounds, and appends it to a file beside the run folder."""

    def __init__(self, run: Run, log: Path):
        self.run, self.log, self.seconds, self.last = run, log, [], time.perf_counter()
        self.lines: list[dict] = []  # of this process
        if not run.store.round_num:  # an earlier run in a folder of this name
            log.unlink(missing_ok=True)

    def round(self, training, row):
        """Measures the time since the last commit, and what there is after every `STEP` rounds."""
        now = time.perf_counter()
        if not training.is_evaluated(row["round"], training.store.round_num + 1000):
            self.seconds.append(now - self.last)
        if row["round"] % STEP == 0:
            line = {"round": row["round"], "seconds": float(np.median(self.seconds)), **sizes(self.run.folder)}
            self.lines.append(line)
            with open(self.log, "a") as file:
                file.write(json.dumps(line) + "\n")
            show(line)
            self.seconds.clear()
        self.last = time.perf_counter()


def sizes(folder: Path) -> dict:
    """Bytes: resident memory of this process and of its children; the store with its log; the folder."""
    process = psutil.Process()
    children = sum(child.memory_info().rss for child in process.children(recursive=True))
    store = sum(file.stat().st_size for file in folder.glob("state.sqlite*"))
    whole = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {"memory": process.memory_info().rss, "children": children, "store": store, "folder": whole}


def show(line: dict) -> None:
    """Prints one line of the table."""
    numbers = "  ".join(f"{line[name] / 1e6:9.2f}" for name in ("memory", "children", "store", "folder"))
    print(f"{line['round']:6,}  {1e3 * line['seconds']:8.1f}  {numbers}", flush=True)


def saved(folder: Path) -> dict:
    """The states of a run in bytes, and its history without seconds and without the scores of evaluated rounds."""
    db = sqlite3.connect(f"file:{folder / 'state.sqlite'}?mode=ro", uri=True)
    try:
        states = {t: db.execute(f"SELECT * FROM {t} ORDER BY 1").fetchall() for t in ("server", "client")}
        rows = [json.loads(row) for (row,) in db.execute("SELECT row FROM history ORDER BY round")]
    finally:
        db.close()
    return states | {"history": [(row["round"], row["clients"], row["loss"]) for row in rows]}


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--rounds", type=click.IntRange(STEP), default=3000, show_default=True)
@click.option("--engine", type=click.Choice(["local", "tff"]), default="local", show_default=True)
@click.option("--algorithm", default="pflego", show_default=True)
@click.option("--json", "json_path", type=Written())
def main(folder, rounds, engine, algorithm, json_path):
    """Runs the rounds, then the resume and the comparison."""
    work = {"tau": 10} if algorithm == "pflego" else {}
    config = RunConfig(algorithm=algorithm, clients=20, partition_args={"K": 2}, participation=0.25, rounds=rounds,
                       evaluate_every=STEP, engine=engine, hyperparameters=work)  # fmt: skip
    log, copy = folder.with_name(f"{folder.name}.jsonl"), folder.with_name(f"{folder.name}-copy")
    print("round   ms/round   MB: memory    children      store     folder")
    with Run.create_or_resume(config, folder) as run:
        growth = Growth(run, log)
        run.train([growth])
        rounds = run.store.round_num  # more than were asked for, if an earlier call has resumed the run
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        run.config.rounds = rounds + MORE
        run.train()
    began = time.perf_counter()
    command = [sys.executable, "-m", "tfpfl", "resume", str(copy), "--rounds", str(rounds + MORE)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    here, resumed = saved(folder), saved(copy)
    lines = growth.lines  # memory of two processes does not compare
    if lines:
        first, last = lines[min(1, len(lines) - 1)], lines[-1]
        print(f"rounds {first['round']} to {last['round']}: memory {(last['memory'] - first['memory']) / 1e6:+.1f} MB, "
              f"of children {(last['children'] - first['children']) / 1e6:+.1f} MB, store "
              f"{(last['store'] - first['store']) / (last['round'] - first['round'] or 1):+.0f} bytes a round, folder "
              f"{(last['folder'] - first['folder']) / (last['round'] - first['round'] or 1):+.0f}")  # fmt: skip
    print(f"a new process resumed {MORE} rounds after round {rounds} in {seconds:.1f} s, with its start and evaluation")
    if json_path:
        json_path.write_text(json.dumps({"lines": lines, "resume_seconds": seconds, "same": here == resumed}) + "\n")
    different = [name for name in here if here[name] != resumed[name]]
    if different or len(here["history"]) != rounds + MORE:
        sys.exit(f"DIFFERENT: {', '.join(different) or 'rounds are missing'}")
    print("both ended with the same bits")


if __name__ == "__main__":
    main()
