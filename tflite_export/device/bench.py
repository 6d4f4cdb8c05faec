"""Measures a bundle on this machine: time, memory and bytes. Needs NumPy and an interpreter of .tflite files only.

    python -m tflite_export.device.bench BUNDLE [--examples 32,100,300,600] [--threads 1,2] [--repeat 20]

Each row is measured in its own process. `features`, `personalize` (tau - 1 steps on the head, with features already
computed) and `round` are run by the reference client, in chunks. Time is the median of the calls. Memory is how much
resident memory grows at most during the first call, with the bundle and the examples loaded before. A full step is one
forward and backward pass over all examples (joint_gradient). The ratio is the time of tau full steps, as FedAvg trains
locally, divided by the time of a round.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from tflite_export.device import payload
from tflite_export.device.bundle_files import stored_arrays
from tflite_export.device.client import CHUNK, DeviceClient
from tflite_export.device.errors import InvalidInput
from tflite_export.device.layout import CHECK
from tflite_export.device.other_python import run_with
from tflite_export.device.runtime import MOST_THREADS, Bundle, BundleError, runtime_version

EXAMPLES, THREADS, REPEAT = (32, 100, 300, 600), (1, 2), 20
WORK = ("features", "personalize", "round")


def bench(bundle, *, examples=EXAMPLES, threads=THREADS, repeat=REPEAT, chunk=CHUNK, python=None) -> dict:
    """Measures time, memory and bytes of a bundle, each row in a new process.

    Args:
        bundle: the folder, or an open `Bundle`.
        examples: the numbers N of training examples to measure with.
        threads: the numbers of threads of the interpreter to measure with.
        repeat: number of calls that are timed; fewer, but at least 3, if they take more than 5 seconds.
        chunk: number of examples that are computed at a time.
        python: path of another Python that has ai-edge-litert and NumPy; default: this Python.

    Returns:
        {'runtime', 'tau', 'chunk', 'rows': [{work, examples, threads, milliseconds, calls, megabytes,
        full_step_milliseconds, ratio}], 'files': {name: bytes}, 'wire': {what: {down, up}}}.

    Raises:
        BundleError: the bundle is damaged, the Python cannot be started, or measuring fails.
        InvalidInput: a number of threads is out of range.
    """
    if not all(1 <= t <= MOST_THREADS for t in threads):
        raise InvalidInput(f"an interpreter takes 1 to {MOST_THREADS} threads, found {', '.join(map(str, threads))}")
    bundle = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    rounds = bundle.manifest["training"]["rounds"]
    rows, runtime = [], None
    for work in WORK if rounds else WORK[:2]:
        for n in examples:
            for t in threads:
                measured = _in_own_process(bundle.folder, work, n, t, repeat, chunk, python)
                runtime = measured.pop("runtime")
                rows.append({"work": work, "examples": n, "threads": t, **measured})
    return {
        "runtime": runtime,
        "tau": bundle.manifest["training"]["tau"],
        "chunk": chunk,
        "rows": rows,
        "files": {n: f["bytes"] for n, f in bundle.manifest["files"].items() if n.endswith((".tflite", ".bin"))},
        "wire": wire(bundle) if rounds else {},
    }


def wire(bundle: Bundle) -> dict:
    """{method and precision: {'down', 'up'}}: the bytes that a client receives and sends in a round."""
    p, head = bundle.num_backbone_weights, (bundle.num_features + 1) * bundle.num_classes
    return {
        "PFLEGO, float32": {"down": 4 * p, "up": payload.num_bytes(p, "float32")},
        "PFLEGO, int8 up": {"down": 4 * p, "up": payload.num_bytes(p, "int8")},
        "FedAvg, float32": {"down": 4 * (p + head), "up": 4 * (p + head)},
    }


def table(result: dict) -> str:
    """The result of `bench` as Markdown."""
    lines = [
        f"{result['runtime']}, chunks of {result['chunk']}, tau {result['tau']}, {os.cpu_count()} processors",
        "",
        "| work | N | threads | ms | peak MB | tau full steps / this |",
        "|---|---|---|---|---|---|",
    ]
    for r in result["rows"]:
        ratio = f"{r['ratio']:.1f}" if r.get("ratio") else ""
        memory = "-" if r["megabytes"] is None else f"{r['megabytes']:.1f}"
        lines.append(
            f"| {r['work']} | {r['examples']} | {r['threads']} | {r['milliseconds']:.2f} | {memory} | {ratio} |"
        )
    lines += ["", "| file | bytes |", "|---|---|"]
    lines += [f"| {name} | {size:,} |" for name, size in sorted(result["files"].items())]
    if result["wire"]:
        lines += ["", "| a client's round | bytes down | bytes up |", "|---|---|---|"]
        lines += [f"| {name} | {b['down']:,} | {b['up']:,} |" for name, b in result["wire"].items()]
    return "\n".join(lines)


def _in_own_process(folder, work, n, threads, repeat, chunk, python):
    sizes = [str(number) for number in (n, threads, repeat, chunk)]
    done = run_with(python or sys.executable, "bench", str(folder), "--measure", work, *sizes)
    if done.returncode != 0:
        (last,) = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise BundleError(f"measuring {work} failed: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(folder, work: str, n: int, threads: int, repeat: int, chunk: int, interpreter=None) -> dict:
    """Measures one row in this process: `work` with n examples. Returns milliseconds, calls, megabytes and runtime."""
    client = DeviceClient(folder, interpreter=interpreter or any_interpreter(), num_threads=threads, chunk=chunk)
    rng = np.random.default_rng(0)
    # Those of check.npz, again and again: they are what the model takes, and of them its numbers do not overflow.
    x = np.resize(stored_arrays(client.bundle.path(CHECK))["x"], (n, *client.bundle.example_shape))
    k = client.bundle.num_classes
    y = rng.integers(0, k, n).astype(np.int32) if client.kind.is_classes else np.ones((n, k), np.float32)
    phi = rng.random((n, client.bundle.num_features), np.float32)
    steps, beta = client.settings["tau"] - 1, client.settings["beta"]
    sent = client.theta * np.float32(1.0001)  # in a round theta is the server's, not the exported one
    calls = {
        "features": lambda: client.features(x),
        "personalize": lambda: client.fit_head(phi, y, steps, beta),
        "round": lambda: client.round(sent, x, y),
    }
    before = _reset_peak()
    calls[work]()
    peak = _status("VmHWM")
    milliseconds, times = _median(calls[work], repeat)
    row = {
        "milliseconds": milliseconds,
        "calls": times,
        "megabytes": _grown(before, peak),
        "runtime": " ".join(runtime_version(client.runtime.interpreter_class)),
    }
    if work == "round":
        full, _ = _median(lambda: client.joint_gradient(x, y, *client.head), repeat)
        row |= {"full_step_milliseconds": full, "ratio": client.settings["tau"] * full / milliseconds}
    return row


def any_interpreter():
    """The class of ai-edge-litert's interpreter; if that is not installed, TensorFlow's."""
    from tflite_export.device.runtime import default_interpreter

    try:
        return default_interpreter()
    except BundleError:
        import tensorflow as tf

        return tf.lite.Interpreter


def _median(call, repeat, at_most_seconds=5.0):
    call()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < repeat and (len(times) < 3 or time.perf_counter() - started < at_most_seconds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1000 * float(np.median(times)), len(times)


def _grown(before: int | None, peak: int | None) -> float | None:
    """By how many MB (1,000,000 bytes) memory has grown, of two numbers of KiB; None if one of them is not known."""
    return None if before is None or peak is None else max(peak - before, 0) * 1024 / 1e6


def _reset_peak():
    """Sets the peak of resident memory back to the present value, and returns this in KiB; None if not on Linux."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(field):
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(field + ":")), None)


def _numbers(text: str) -> list[int]:
    return [_number(part) for part in text.split(",")]


def _number(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def main(arguments=None) -> int:
    """The command line of this module. It prints Markdown; 0 if all is well, 2 if the bundle cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tflite_export.device.bench")
    parser.add_argument("bundle")
    parser.add_argument("--examples", type=_numbers, default=EXAMPLES, metavar="N,N,...")
    parser.add_argument("--threads", type=_numbers, default=THREADS, metavar="N,N,...")
    parser.add_argument("--repeat", type=_number, default=REPEAT, metavar="N")
    parser.add_argument("--chunk", type=_number, default=CHUNK, metavar="N")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    try:
        if given.measure:
            work, *numbers = given.measure
            print(json.dumps(measure(given.bundle, work, *map(int, numbers))))
            return 0
        sizes = {"examples": given.examples, "threads": given.threads, "repeat": given.repeat, "chunk": given.chunk}
        print(table(bench(given.bundle, **sizes)))
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
