"""FedAvg in tfpfl and in other frameworks: seconds a round, accuracy and memory on the same federation, in one run.

    TFDS_DATA_DIR=... python benchmarks/frameworks/run.py [--rounds 30] [--seeds 0,1,2] [--frameworks "tfpfl;pfl"]
        [--json FILE]

CIFAR-10 shared out at random to 1,000 clients of 50 images, 50 clients a round, one epoch in mini-batches of 10, SGD
with a rate of 0.1, the small CNN of pfl-research without dropout, N_i-weighted mean. Pixels have the mean 0 and the
standard deviation 1, over all channels together; no augmentation. Every framework is a process of its own, pfl and flwr
in virtual environments that are made on the first call in $TFPFL_CACHE/benchmarks (default ~/.cache/tfpfl/benchmarks);
pip's own settings (PIP_FIND_LINKS, ...) choose where a CPU build of PyTorch comes from. All get the same images, the
same weights of round 0, the same cohorts and mini-batches.

With the first seed they take turns, one round each, while the others wait: seconds are those of a round without
evaluation, and ratios are medians over rounds of neighbouring turns. The first rounds, in which graphs are traced, do
not count. The other seeds, which are for accuracy, run two frameworks at a time, with one OpenMP thread each. Memory is
the largest resident set of each of its processes, added up; what several of Ray's processes share counts in each.
"""

import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import date
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import keras_cnn
import numpy as np
import tensorflow as tf
from job import read, write
from rich.console import Console
from rich.table import Table

from tfpfl import Federation, Sampling
from tfpfl.algorithms.parts.local_training import shuffled
from tfpfl.checks import InvalidArgument
from tfpfl.data import load_source
from tfpfl.data.cohorts import cohort
from tfpfl.data.randomness import client_key
from tfpfl.runs.files import check_place

HERE = Path(__file__).parent
OURS = "tfpfl"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
FRAMEWORKS = {  # what Python runs, and what its environment has; None: the environment that this script runs in
    OURS: (["ours.py"], None),
    "bare loop": (["bare_loop.py"], None),
    "pfl": (["pfl_research.py"], "requirements-pfl.txt"),
    "pfl, 2 processes": ([*TORCHRUN, "2", "pfl_research.py"], "requirements-pfl.txt"),
    "tff.learning": (["tff_learning.py"], None),
    "flwr": (["flower.py"], "requirements-flwr.txt"),
}
TIMED_ONLY = {"pfl, 2 processes"}  # for accuracy, pfl in one process says the same
CLIENTS, EXAMPLES, COHORT, BATCH_SIZE, RATE = 1000, 50, 50, 10, 0.1
WARM_UP = 3  # rounds
PATIENCE = 600  # seconds for one answer


class Failed(Exception):
    """A framework could not be installed or run; the others go on."""


@click.command(help=__doc__)
@click.option("--rounds", default=30, show_default=True)
@click.option("--seeds", default="0,1,2", show_default=True)
@click.option("--frameworks", default=";".join(FRAMEWORKS), show_default=True)
@click.option("--evaluate-every", default=10, show_default=True, help="Rounds; the last one in any case.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(rounds, seeds, frameworks, evaluate_every, json_path):
    """Runs all, prints the table."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_all)
    seeds, names = [int(s) for s in seeds.split(",")], frameworks.split(";")
    if unknown := set(names) - set(FRAMEWORKS):
        raise click.ClickException(f"unknown frameworks {sorted(unknown)}: some of {';'.join(FRAMEWORKS)}")
    if rounds <= WARM_UP:
        raise click.ClickException(f"--rounds must be above {WARM_UP}, which do not count; found {rounds}")
    try:
        if json_path:
            check_place(json_path)
    except InvalidArgument as error:
        raise click.ClickException(str(error)) from error
    console = Console(width=120)
    try:
        source = load_source("cifar10")
    except FileNotFoundError as error:
        raise click.ClickException(f"set TFDS_DATA_DIR to where tfds.load has prepared CIFAR-10: {error}") from error
    results = {name: {"accuracy": {}, "seconds": [], "cpu_seconds": [], "peak_mb": 0} for name in names}
    pythons = {}
    for name in names:
        try:
            pythons[name] = environment(FRAMEWORKS[name][1], console)
        except Failed as error:
            results[name]["error"] = str(error)
    with tempfile.TemporaryDirectory(prefix="tfpfl-frameworks-") as folder:
        folder = Path(folder)
        federation = write_federation(source, folder)
        accuracy = accuracy_on(source, federation)
        evaluated = {*range(evaluate_every, rounds, evaluate_every), rounds}
        for seed in seeds:
            job = write_job(federation, folder, seed, rounds)
            run = in_turns if seed == seeds[0] else two_at_a_time
            run(job, seed, evaluated, rounds, pythons, results, accuracy, console)
    summary = summarize(results)
    console.print(table(results, summary, rounds, seeds))
    for name, result in results.items():
        if "error" in result:
            console.print(f"{name}: {result['error']}", highlight=False, markup=False, soft_wrap=True)
    if json_path:
        setting = {"clients": CLIENTS, "examples": EXAMPLES, "cohort": COHORT, "batch_size": BATCH_SIZE, "rate": RATE}
        about = {"date": str(date.today()), "cpus": len(os.sched_getaffinity(0)), "rounds": rounds, "seeds": seeds}
        report = {**about, "warm_up": WARM_UP, "setting": setting, "summary": summary, "frameworks": results}
        json_path.write_text(json.dumps(report, indent=2) + "\n")


def environment(requirements: str | None, console) -> str:
    """The interpreter of an environment with these requirements, made where there is none yet.

    Raises:
        Failed: pip could not install them.
    """
    if requirements is None:
        return sys.executable
    content = (HERE / requirements).read_bytes()
    digest = hashlib.sha256(content + sys.version.encode()).hexdigest()[:12]
    cache = Path(os.environ.get("TFPFL_CACHE") or Path.home() / ".cache" / "tfpfl")
    folder = cache / "benchmarks" / f"{Path(requirements).stem.removeprefix('requirements-')}-{digest}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        console.print(f"making {folder}", soft_wrap=True, highlight=False)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_suffix(".log")
        with open(log, "w") as out:
            for command in (
                [sys.executable, "-m", "venv", folder],
                [python, "-m", "pip", "install", "-r", HERE / requirements],
            ):
                if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out).returncode:
                    raise Failed(f"could not be installed: {last_error(log)} ({log})")
        (folder / "installed").touch()
    return str(python)


def write_federation(source, folder: Path) -> Federation:
    """Everybody's images, for tfpfl as a Federation and for the others as arrays."""
    order = np.random.default_rng(0).permutation(len(source.x_train))[: CLIENTS * EXAMPLES].reshape(CLIENTS, EXAMPLES)
    x, y = source.x_train[order], source.y_train[order].astype(np.int32)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    clients = [{"train": client} for client in zip(x, y, strict=True)]
    parts = {"validation": 0.0, "test_fraction": 0.0}
    mean = source.x_train.mean(dtype=np.float64)
    std = np.sqrt(np.mean([np.square(image - mean).mean() for image in source.x_train]))
    scale, shift = 1 / std, -mean / std
    return Federation.from_clients(clients, out=folder / "federation", scale=scale, shift=shift, **parts)


def write_job(federation, folder: Path, seed: int, rounds: int) -> Path:
    """The job file of one seed, see `job.Job`: Glorot uniform kernels, zero biases, tfpfl's cohorts."""
    out = folder / f"seed-{seed}"
    out.mkdir()
    rng = np.random.default_rng(seed)
    shapes = [w.shape for w in keras_cnn.whole().get_weights()]
    fans = [np.prod(s[:-2], dtype=int) * sum(s[-2:]) for s in shapes]
    write(
        out / "weights.npz",
        [
            (rng.uniform(-1, 1, s) * np.sqrt(6 / fan) if len(s) > 1 else np.zeros(s)).astype(np.float32)
            for s, fan in zip(shapes, fans, strict=True)
        ],
    )
    population = federation.population(Sampling(rate=COHORT / CLIENTS), labels="global")
    cohorts = np.stack([cohort(seed, t, population) for t in range(1, rounds + 1)])
    np.save(out / "cohorts.npy", cohorts)
    # The order that tfpfl's clients draw for themselves, so that all take the same mini-batches.
    keys = np.concatenate([client_key(seed, t, ids) for t, ids in enumerate(cohorts, start=1)])
    orders = tf.map_fn(lambda key: shuffled(EXAMPLES, key, 0), keys, fn_output_signature=tf.int32)
    np.save(out / "orders.npy", orders.numpy().reshape(rounds, COHORT, EXAMPLES).astype(np.uint8))
    pixels = {name: federation.manifest["preprocessing"][name] for name in ("scale", "shift")}
    job = {"seed": seed, "batch_size": BATCH_SIZE, "rate": RATE, "federation": str(federation.path), **pixels}
    (out / "job.json").write_text(json.dumps(job))
    return out


def accuracy_on(source, federation):
    """A function of a file of weights: the accuracy on all test images, in %."""
    model = keras_cnn.whole()
    logits = tf.function(lambda x: model(federation.decode(x)), autograph=False)

    def accuracy(path) -> float:
        model.set_weights(read(path))
        parts = [tf.argmax(logits(source.x_test[i : i + 500]), 1) for i in range(0, len(source.x_test), 500)]
        return float(100 * np.mean(np.concatenate(parts) == source.y_test))

    return accuracy


RUNNING = set()


class Worker:
    """A framework's process. Every method raises `Failed` where it does not answer."""

    def __init__(self, name: str, python: str, job: Path, **environment: str):
        self.log, self.weights = job / f"{name}.log", job / f"{name}.npz"
        self._log = open(self.log, "w")
        self._process = subprocess.Popen(
            [python, *FRAMEWORKS[name][0], job],
            cwd=HERE,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        RUNNING.add(self)
        self._known = {}  # every process that was ever seen below this one: its id and when it started

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Asks it to end, and ends what is left: TFF's worker and Ray's daemons may outlive Python."""
        RUNNING.discard(self)
        self.processes()
        try:
            self._process.stdin.write("quit\n")
            self._process.stdin.close()
            self._process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self.kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def kill(self):
        """Ends it and all that it started, at once."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def ask(self, command: str) -> dict:
        """Says something, and waits for the answer."""
        try:
            self._process.stdin.write(command + "\n")
        except OSError as error:
            raise Failed(f"ended: {last_error(self.log)}") from error
        return self.answer()

    def answer(self) -> dict:
        """The next line that it says."""
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        line = self._process.stdout.readline() if ready else None
        if not line:
            why = f"no answer within {PATIENCE} s" if line is None else "ended"
            raise Failed(f"{why}: {last_error(self.log)}")
        return json.loads(line)

    def processes(self) -> list[int]:
        """It and its descendants, those included whose parent has ended since they were first seen."""
        stats = {int(p.name): s for p in Path("/proc").iterdir() if p.name.isdigit() and (s := stat(p.name))}
        found = {self._process.pid}
        while more := {pid for pid, s in stats.items() if int(s[1]) in found} - found:
            found |= more
        self._known |= {pid: stats[pid][19] for pid in found if pid in stats}
        return [pid for pid, started in self._known.items() if pid in stats and stats[pid][19] == started]

    def cpu_seconds(self) -> float:
        """That its processes have used so far."""
        ticks = sum(int(s[11]) + int(s[12]) for pid in self.processes() if (s := stat(pid)))
        return ticks / os.sysconf("SC_CLK_TCK")

    def peak_mb(self) -> float:
        """The largest resident set of each of its processes, added up."""
        total = 0
        for pid in self.processes():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        return total * 1024 / 1e6  # the kernel counts KiB


def end_all(*_):
    """On a signal: leaves no process behind, whatever waits for it."""
    for worker in list(RUNNING):
        worker.kill()
    sys.exit(1)


def stat(pid) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None where the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def last_error(log: Path) -> str:
    """The last line of a log that says something about an error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "ERROR" in line]
    return (errors or lines or ["no output"])[-1][:300]


def in_turns(job, seed, evaluated, rounds, pythons, results, accuracy, console):
    """One round of each at a time, in an order that rotates: what is timed."""
    with ExitStack() as stack:
        workers = {}
        for name, python in pythons.items():
            worker = stack.enter_context(Worker(name, python, job))
            attempt(results, name, lambda n, w=worker: results[n].update(w.answer()) or workers.update({n: w}))
        idle = []
        for t in range(1, rounds + 1):
            order = list(workers)
            for name in order[t % len(order) :] + order[: t % len(order)] if order else ():
                before = {n: w.cpu_seconds() for n, w in workers.items()}
                started = time.perf_counter()
                answer = attempt(results, name, lambda n: workers[n].ask("round"))
                lasted = time.perf_counter() - started
                if answer is None:
                    workers.pop(name)
                    continue
                used = {n: w.cpu_seconds() - before[n] for n, w in workers.items()}
                idle.append(sum(s for n, s in used.items() if n != name) / lasted)
                results[name]["seconds"].append(answer["seconds"])
                results[name]["cpu_seconds"].append(used[name])
                results[name]["peak_mb"] = max(results[name]["peak_mb"], workers[name].peak_mb())
            latest = ", ".join(f"{n} {results[n]['seconds'][-1]:.2f}" for n in workers)
            console.print(f"seed {seed}, round {t}: {latest}", soft_wrap=True, highlight=False)
            if t in evaluated:
                for name in list(workers):
                    score(results, name, workers[name], seed, t, accuracy)
        console.print(f"those that waited used {np.median(idle or [0]):.2f} CPUs", highlight=False)


def two_at_a_time(job, seed, evaluated, rounds, pythons, results, accuracy, console):
    """All rounds of a framework, and another one beside it: for accuracy only."""

    def one(name):
        # Threads of OpenMP that wait for each other while another process has the core slow PyTorch down tenfold.
        with Worker(name, pythons[name], job, OMP_NUM_THREADS="1") as worker:
            worker.answer()
            for t in range(1, rounds + 1):
                worker.ask("round")
                if t in evaluated:
                    worker.ask(f"save {worker.weights.with_suffix(f'.{t}.npz')}")
            return worker.weights

    started = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        healthy = [name for name in pythons if "error" not in results[name] and name not in TIMED_ONLY]
        futures = {name: pool.submit(one, name) for name in healthy}
        for name in healthy:
            weights = attempt(results, name, lambda n: futures[n].result())
            if weights is not None:
                scores = {t: accuracy(weights.with_suffix(f".{t}.npz")) for t in sorted(evaluated)}
                results[name]["accuracy"][seed] = scores
    console.print(f"seed {seed}: {time.perf_counter() - started:.0f} s", highlight=False)


def score(results, name, worker, seed, t, accuracy):
    """Notes the accuracy of a framework's global model."""
    if attempt(results, name, lambda n: worker.ask(f"save {worker.weights}")):
        results[name]["accuracy"].setdefault(seed, {})[t] = accuracy(worker.weights)


def attempt(results, name, action):
    """action(name), or None and a note where it failed."""
    try:
        return action(name)
    except Failed as error:
        results[name]["error"] = str(error)
        return None


def summarize(results) -> dict:
    """Medians and quartiles over the rounds that count; ratios to ours of the same round; accuracy over seeds."""
    summary = {}
    ours = results.get(OURS, {})
    for name, result in results.items():
        seconds = np.array(result["seconds"][WARM_UP:])
        row = summary[name] = {"peak_mb": round(result["peak_mb"])}
        if len(seconds):
            row["seconds"] = np.percentile(seconds, [25, 50, 75]).round(3).tolist()
            row["cpu_seconds"] = round(float(np.median(result["cpu_seconds"][WARM_UP:])), 2)
            reference = np.array(ours.get("seconds", [])[WARM_UP:][: len(seconds)])
            if len(reference):
                ratios = seconds[: len(reference)] / reference
                row["ratio"] = np.percentile(ratios, [25, 50, 75]).round(3).tolist()
        final = {seed: scores[max(scores)] for seed, scores in result["accuracy"].items()}
        if final:
            row["accuracy"] = {seed: round(a, 2) for seed, a in final.items()}
            row["mean_accuracy"] = round(float(np.mean(list(final.values()))), 2)
            differences = [
                a - scores[max(scores)] for s, a in final.items() if (scores := ours.get("accuracy", {}).get(s))
            ]
            if differences:
                row["difference"] = round(float(np.mean(differences)), 2)
    return summary


def table(results, summary, rounds, seeds) -> Table:
    """For people."""
    out = Table(title=f"FedAvg on CIFAR-10, {rounds} rounds, seeds {', '.join(map(str, seeds))}", title_justify="left")
    for column in ("", "s a round", "/ tfpfl", "CPU s", "accuracy", "- tfpfl", "peak MB", "versions"):
        out.add_column(column, justify="left" if column in ("", "versions") else "right")
    for name, row in summary.items():
        if "seconds" in row:
            low, middle, high = row["seconds"]
            cells = [f"{middle:.2f} ({low:.2f}-{high:.2f})", f"{row['ratio'][1]:.2f}" if "ratio" in row else ""]
            cells.append(f"{row['cpu_seconds']:.1f}")
        else:
            cells = ["failed" if "error" in results[name] else "", "", ""]
        cells.append(" ".join(f"{a:.1f}" for a in row.get("accuracy", {}).values()))
        cells.append(f"{row['difference']:+.2f}" if "difference" in row else "")
        versions = results[name].get("versions", {})
        cells += [f"{row['peak_mb']:,}", ", ".join(f"{k} {v}" for k, v in versions.items() if k != "python")]
        out.add_row(name, *cells)
    return out


if __name__ == "__main__":
    main()
