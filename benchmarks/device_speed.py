"""How fast the exported round is: against a round in NumPy, and against this machine's matrix product.

    python benchmarks/device_speed.py --python PATH_WITH_LITERT [--networks "gru;ds_cnn"] [--examples 32] [--json FILE]

For each network `round` is converted for any number of examples and classes: features, 49 steps on the head of two
classes, and the gradient of everything. `--python` names a Python with ai-edge-litert and NumPy. There, in one process
with one thread, the program and the round of `numpy_networks.py` take turns on the same inputs. The columns:

* GFLOP: of all products, forward and backward, as the NumPy layers count them. Both are judged by this number, also
  where one of them computes more.
* ms: of the processor, the fastest of the calls. NumPy / program: the median of the pairs.
* GFLOP/s, and sgemm: NumPy's product of two matrices of 1024 x 1024 in the same process, the fastest of the calls that
  lie between the pairs.
* of half: the program's GFLOP/s in units of half of sgemm's.
* off: the L2 norm of the difference of both gradients, in units of that of the gradient.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
for _library in ("OPENBLAS", "OMP", "MKL"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy_networks  # noqa: E402

CLASSES, STEPS, BETA, RATE = 2, 49, 0.01, 0.01
SHAPES = {"cifar_2conv": (32, 32, 3)}  # of the examples of this project's networks; others have MNIST's


def keras_model(name: str):
    """The network as a SplitModel."""
    import device_networks
    import keras

    from tfpfl.models import SplitModel, build_network
    from tfpfl.models.networks import NETWORKS

    keras.utils.set_random_seed(0)
    if name in NETWORKS:
        return SplitModel(build_network(name, SHAPES.get(name, (28, 28, 1))))
    return SplitModel(device_networks.NETWORKS[name]())


def statistics(model) -> list:
    """The stored mean and variance of each BatchNormalization in turn."""
    return [np.asarray(w) for w in model.backbone.non_trainable_weights if "seed" not in w.name]


def inputs(model, examples: int) -> dict:
    """A round's inputs."""
    from tflite_export.convert.check import drawn_examples
    from tflite_export.convert.program import flatten

    rng = np.random.default_rng(0)
    kernel = (0.1 * rng.standard_normal((model.num_features, CLASSES))).astype(np.float32)
    return {
        "theta": flatten(model.initial_theta),
        "x": drawn_examples(model, examples, rng),
        "labels": rng.integers(0, CLASSES, examples).astype(np.int32),
        "weights": np.full(examples, 1 / examples, np.float32),
        "kernel": kernel,
        "bias": np.zeros(CLASSES, np.float32),
        "steps": np.int32(STEPS),
        "beta": np.float32(BETA),
        "rate": np.float32(RATE),
    }


def write(name: str, folder: Path, examples: int) -> dict:
    """Writes the program, a round's inputs, and the statistics that are no part of theta."""
    from tflite_export.convert.program import convert_program

    model = keras_model(name)
    content = convert_program(model, signatures=("round",))
    (folder / "program.tflite").write_bytes(content)
    np.savez(folder / "inputs.npz", **inputs(model, examples))
    np.savez(folder / "statistics.npz", *statistics(model))
    return {"network": name, "bytes": len(content)}


def measure(name: str, folder: Path, repeat: int) -> dict:
    """Runs the program and NumPy's round in turns, in this process, which needs no TensorFlow."""
    from tflite_export.device.bench import any_interpreter
    from tflite_export.device.runtime import Runtime

    with np.load(folder / "inputs.npz") as file:
        given = {k: file[k] for k in file.files}
    with np.load(folder / "statistics.npz") as file:
        network = numpy_networks.Network(name, [file[k] for k in file.files])
    runtime = Runtime(folder / "program.tflite", any_interpreter(), num_threads=1)
    matrix = np.random.default_rng(0).random((1024, 1024), np.float32)
    found, expected = runtime("round", **given)["dtheta"], network.round(**given)["dtheta"].copy()
    flops = network.flops()
    times: dict[str, list] = {"program": [], "numpy": [], "sgemm": []}
    works = (lambda: runtime("round", **given), lambda: network.round(**given), lambda: matrix @ matrix)
    for _ in range(repeat):
        for key, work in zip(times, works, strict=True):
            begin = time.thread_time()
            work()
            times[key].append(time.thread_time() - begin)
    sgemm = 2 * 1024**3 / min(times["sgemm"]) / 1e9
    gflops = {key: flops / min(times[key]) / 1e9 for key in ("program", "numpy")}
    return {
        "runtime": f"{runtime.name} {runtime.version}",
        "gflop": flops / 1e9,
        "program_ms": 1000 * min(times["program"]),
        "numpy_ms": 1000 * min(times["numpy"]),
        "ratio": float(np.median(np.divide(times["numpy"], times["program"]))),
        "program_gflops": gflops["program"],
        "numpy_gflops": gflops["numpy"],
        "sgemm": sgemm,
        "of_half": gflops["program"] / (sgemm / 2),
        "off": float(np.linalg.norm(found - expected) / np.linalg.norm(expected)),
    }


def child(python, *arguments) -> dict:
    """Runs this file in a process of its own, and reads the JSON that it prints last."""
    import subprocess

    done = subprocess.run([python, __file__, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """The command line: prints a table in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--networks", help=f"Some of {'; '.join(numpy_networks.NETWORKS)}; the beginning does.")
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--python", default=sys.executable, help="A Python with an interpreter of .tflite files.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        print(json.dumps(write(given.write[0], Path(given.write[1]), given.examples)))
        return
    if given.measure:
        print(json.dumps(measure(given.measure[0], Path(given.measure[1]), given.repeat)))
        return
    wanted = given.networks.split(";") if given.networks else [""]  # a name may have a comma
    from listed import check_device_options  # a Python that only measures may have neither click nor tfpfl

    check_device_options(parser, wanted, numpy_networks.NETWORKS, given.json)
    rows = []
    for name in (n for n in numpy_networks.NETWORKS if any(n.startswith(w) for w in wanted)):
        with tempfile.TemporaryDirectory() as folder:
            about = child(sys.executable, "--write", name, folder, "--examples", given.examples)
            r = about | child(given.python, "--measure", name, folder, "--repeat", given.repeat)
        if not rows:
            print(f"{given.examples} examples, one thread, {r['runtime']}, {os.cpu_count()} processors\n")
            print(
                "| network | GFLOP | program ms | NumPy ms | NumPy / program | program GFLOP/s | NumPy | sgemm |",
                end="",
            )
            print(" of half | off |\n|---|---|---|---|---|---|---|---|---|---|")
        rows.append(r)
        print(
            f"| {name} | {r['gflop']:.3f} | {r['program_ms']:.2f} | {r['numpy_ms']:.2f} | {r['ratio']:.2f} | "
            f"{r['program_gflops']:.0f} | {r['numpy_gflops']:.0f} | {r['sgemm']:.0f} | {r['of_half']:.2f} | "
            f"{r['off']:.0e} |",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
