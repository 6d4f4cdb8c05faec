"""Networks that phones run, as programs for a device: how exact, how large, how fast, how much memory.

    python benchmarks/device_networks.py [--networks "ds_cnn;gru"] [--examples 32] [--python PATH] [--chromium]
                                         [--json FILE]

For each network the signatures `round` and `joint_gradient` are converted, for any number of examples and classes. Then
they run in a process of their own, with one thread, on random examples of two classes. `--python` names a Python with
ai-edge-litert and NumPy; without it TensorFlow's interpreter runs them. With `--chromium` LiteRT.js runs them too, in
a browser without threads (`make web` must have been run): its programs have the shapes of these examples, since it
takes no open ones. The columns:

* dtheta: what a round gives against tf.GradientTape of the whole objective after the same 49 steps on the head; the L2
  norm of the difference in units of that of the gradient.
* float64, tape: how far the program, and GradientTape in float32, are from GradientTape in float64.
* round: milliseconds of the processor, the fastest of the calls; ratio: 50 calls of `joint_gradient`, a client's work
  in FedAvg with 50 full steps, in units of a round.
* peak: by how many MiB the process grows at most, from before it opens the program to the end of the first round. Of a
  browser: the memory of WebAssembly after the first round. Its milliseconds are those of the clock.

Weights are random. MobileNetV2's BatchNormalizations have the statistics of sixteen such pictures: with those of a
fresh network nothing would be left of a picture after 52 layers.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CLASSES, STEPS, BETA, RATE = 2, 49, 0.01, 0.01
SIGNATURES = ("round", "joint_gradient")
WORK = {"steps": np.int32(STEPS), "beta": np.float32(BETA), "rate": np.float32(RATE)}


def pictures(rng, labels, shape):
    """float32 [N, *shape]: waves down or up, and noise. Of noise alone a deep network makes one and the same."""
    wave = np.sin(0.6 * np.arange(shape[0]))[:, None, None]
    both = np.where(np.reshape(labels, [-1, 1, 1, 1]) == 1, wave, wave[::-1])
    return (both + 0.3 * rng.standard_normal((len(labels), *shape))).astype(np.float32)


def mobilenet(alpha, pixels, smooth=False):
    """MobileNetV2 of Keras with statistics that are not fresh; `smooth`: with swish in place of ReLU6."""
    import keras

    network = keras.applications.MobileNetV2(
        (pixels, pixels, 3), alpha=alpha, include_top=False, weights=None, pooling="avg"
    )
    if smooth:
        network = keras.models.clone_model(
            network,
            clone_function=lambda layer: (
                keras.layers.Activation("swish", name=layer.name)
                if isinstance(layer, keras.layers.ReLU)
                else type(layer).from_config(layer.get_config())
            ),
        )
    normalizations = [layer for layer in network.layers if isinstance(layer, keras.layers.BatchNormalization)]
    for layer in normalizations:
        layer.momentum, layer.was = 0.0, layer.momentum
    network(pictures(np.random.default_rng(9), np.arange(16) % 2, (pixels, pixels, 3)), training=True)
    for layer in normalizations:
        layer.momentum = layer.was
    return network


def ds_cnn(channels=64, blocks=4):
    """For keywords: a convolution and depthwise separable blocks of so many channels on 49 x 10 coefficients."""
    import keras
    from keras import layers

    x = keras.Input((49, 10, 1))
    h = layers.Conv2D(channels, (10, 4), strides=2, padding="same", use_bias=False)(x)
    h = layers.ReLU()(layers.BatchNormalization()(h))
    for _ in range(blocks):
        h = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(h)
        h = layers.ReLU()(layers.BatchNormalization()(h))
        h = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(channels, 1, use_bias=False)(h)))
    return keras.Model(x, layers.GlobalAveragePooling2D()(h))


def gru(units=128, length=32):
    """So many units over so many steps of 40 numbers."""
    import keras

    return keras.Sequential([keras.Input((length, 40)), keras.layers.GRU(units, unroll=True)])


def transformer(blocks=4, width=128, length=32, tokens=1000):
    """Layers of this width with four heads, on so many tokens of a text; positions are learned."""
    import keras
    from keras import layers

    x = keras.Input((length,), dtype="int32")
    h = layers.Embedding(tokens, width)(x)
    h = layers.Permute((2, 1))(layers.EinsumDense("ndl,dl->ndl", (width, length))(layers.Permute((2, 1))(h)))
    for _ in range(blocks):
        h = layers.Add()([h, layers.MultiHeadAttention(4, width // 4)(*[layers.LayerNormalization()(h)] * 2)])
        inner = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(h))
        h = layers.Add()([h, layers.Dense(width)(inner)])
    return keras.Model(x, layers.GlobalAveragePooling1D()(layers.LayerNormalization()(h)))


NETWORKS = {
    "mobilenet_v2 0.35, 96 px": lambda: mobilenet(0.35, 96),
    "mobilenet_v2 1.0, 160 px": lambda: mobilenet(1.0, 160),
    "mobilenet_v2 smooth 0.35, 96 px": lambda: mobilenet(0.35, 96, smooth=True),
    "mobilenet_v2 smooth 1.0, 160 px": lambda: mobilenet(1.0, 160, smooth=True),
    "ds_cnn": ds_cnn,
    "gru": gru,
    "transformer": transformer,
}
SMALL = {  # for tests
    "ds_cnn": lambda: ds_cnn(8, 2),
    "gru": lambda: gru(6, 5),
    "transformer": lambda: transformer(1, 16, 6, 20),
}


def write(name: str, folder: Path, examples: int, networks=NETWORKS, programs=("program.tflite",)) -> dict:
    """Writes the program, a round's inputs, and what GradientTape says of them.

    Args:
        name: of the network.
        folder: the folder, which is there.
        examples: how many there are.
        networks: {name: function that makes the network}.
        programs: 'program.tflite', for any shapes; 'fixed.tflite', in those of these examples, for LiteRT.js.
    """
    import keras
    import tensorflow as tf

    from tflite_export.convert.check import drawn_examples, fit, gradient
    from tflite_export.convert.program import convert_program, flatten
    from tfpfl import SplitModel
    from tfpfl.models.weights import Head

    keras.utils.set_random_seed(0)
    model, rng = SplitModel(networks[name]()), np.random.default_rng(0)
    about: dict = {"network": name, "weights": model.num_backbone_weights}
    for file in programs:
        begin = time.perf_counter()
        shapes = {"batch": examples, "num_classes": CLASSES} if file == "fixed.tflite" else {}
        (folder / file).write_bytes(convert_program(model, signatures=SIGNATURES, **shapes))
        about.setdefault("convert", time.perf_counter() - begin)
    labels = rng.integers(0, CLASSES, examples).astype(np.int32)
    drawn = pictures(rng, labels, model.input_shape) if len(model.input_shape) == 3 else None
    x = drawn_examples(model, examples, rng) if drawn is None else drawn
    kernel = (0.1 * rng.standard_normal((model.num_features, CLASSES))).astype(np.float32)
    theta, head = model.theta(), Head(tf.constant(kernel), tf.zeros(CLASSES))
    targets = tf.one_hot(labels, CLASSES)
    fitted = fit(head, model.features(theta, x), targets, STEPS, BETA, safeguard=True)
    dtheta = gradient(model, theta, fitted, x, targets)[1]
    exact = _in_double(networks[name], model, fitted, x, labels)
    inputs = {"theta": flatten(model.initial_theta), "x": x, "labels": labels, "kernel": kernel}
    inputs |= {"bias": np.zeros(CLASSES, np.float32), "weights": np.full(examples, 1 / examples, np.float32)}
    np.savez(folder / "round.npz", dtheta=dtheta, exact=exact, **inputs)
    _for_browsers(folder)
    return about


def _for_browsers(folder):
    """The inputs of a round and its gradient, in a file that a page can read."""
    from safetensors.numpy import save_file

    with np.load(folder / "round.npz") as file:
        arrays = {name: file[name] for name in file.files if name != "exact"}
    arrays |= {name: np.reshape(value, [1]) for name, value in WORK.items()}
    save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, folder / "round.safetensors")


def _in_double(network, model, head, x, labels):
    """The same gradient in double precision, by GradientTape: how exact one in float32 can be."""
    import keras
    import tensorflow as tf

    from tflite_export.convert.check import gradient
    from tfpfl import SplitModel

    floatx, policy = keras.backend.floatx(), keras.mixed_precision.global_policy()
    keras.backend.set_floatx("float64")
    keras.mixed_precision.set_global_policy("float64")  # Keras 3 does not follow floatx once it has made a layer
    try:
        backbone = network()
    finally:
        keras.backend.set_floatx(floatx)
        keras.mixed_precision.set_global_policy(policy)
    backbone.set_weights(model.backbone.get_weights())
    double = SplitModel(backbone)
    theta, head = tf.nest.map_structure(lambda w: tf.cast(w, tf.float64), (model.theta(), head))
    x = x if x.dtype == np.int32 else x.astype(np.float64)
    return gradient(double, theta, head, x, tf.one_hot(labels, CLASSES, dtype=tf.float64))[1]


def measure(folder: Path, repeat: int) -> dict:
    """Runs the program in this process, which may have no TensorFlow."""
    from tflite_export.device.bench import any_interpreter
    from tflite_export.device.runtime import Runtime

    with np.load(folder / "round.npz") as file:
        values = {k: file[k] for k in file.files if k not in ("dtheta", "exact")}
    interpreter = any_interpreter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    runtime = Runtime(folder / "program.tflite", interpreter, num_threads=1)
    found = runtime("round", **values, **WORK)["dtheta"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def milliseconds(signature, **inputs):
        runtime(signature, **inputs)
        times = []
        for _ in range(repeat):
            begin = time.thread_time()
            runtime(signature, **inputs)
            times.append(1000 * (time.thread_time() - begin))
        return min(times)

    round_ms, step_ms = milliseconds("round", **values, **WORK), milliseconds("joint_gradient", **values)
    name = f"{runtime.name} {runtime.version}"
    return _row(folder / "program.tflite", name, found, round_ms, step_ms, (peak - before) / 1024)


def measure_in_chromium(folder: Path, repeat: int) -> dict:
    """Has web/tests/networks.spec.ts run the program of fixed shapes."""
    network = folder / "networks" / "network"  # where the fixtures of the page's tests have theirs
    network.mkdir(parents=True)
    for name in ("fixed.tflite", "round.safetensors"):
        os.symlink(folder / name, network / name)
    # The bound of the tests is for small networks; here what was found is reported, whatever it is.
    (network / "about.json").write_text(json.dumps({"bound": 1e9, "repeat": repeat}))
    environment = {**os.environ, "TFPFL_WEB_FIXTURES": str(folder), "TFPFL_BROWSER": "required"}
    command = ["npm", "run", "--silent", "test", "--", "tests/networks.spec.ts"]
    subprocess.run(command, cwd=ROOT / "web", env=environment, stdout=sys.stderr, check=True)
    found = json.loads((network / "found.json").read_text())
    dtheta = np.fromfile(network / "dtheta.bin", "<f4")
    memory = found["memory"] / 2**20
    return _row(folder / "fixed.tflite", found["runtime"], dtheta, found["round"], found["step"], memory)


def _row(program, runtime, dtheta, round_ms, step_ms, peak) -> dict:
    with np.load(program.parent / "round.npz") as file:
        expected, exact = file["dtheta"], file["exact"]
    return {
        "runtime": runtime,
        "bytes": program.stat().st_size,
        "dtheta": _off(dtheta, expected),
        "off": _off(dtheta, exact),
        "tape_off": _off(expected, exact),
        "round_ms": round_ms,
        "ratio": 50 * step_ms / round_ms,
        "peak_mb": peak,
    }


def _off(found, expected):
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def child(python, *arguments) -> dict:
    """Runs this file in a process of its own, and reads the JSON that it prints last."""
    done = subprocess.run([python, __file__, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """The command line: prints a table in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--networks", help=f"Some of {', '.join(NETWORKS)}; the beginning of a name does.")
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--python", action="append", help="Measure with this Python; may be given several times.")
    parser.add_argument("--chromium", action="store_true", help="Measure LiteRT.js in Chromium, too.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        programs = ("program.tflite", "fixed.tflite") if given.chromium else ("program.tflite",)
        print(json.dumps(write(given.write[0], Path(given.write[1]), given.examples, programs=programs)))
        return
    if given.measure:
        print(json.dumps(measure(Path(given.measure), given.repeat)))
        return
    wanted = given.networks.split(";") if given.networks else [""]  # a name may have a comma
    from listed import check_device_options  # a Python that only measures may have neither click nor tfpfl

    check_device_options(parser, wanted, NETWORKS, given.json)
    rows, pythons = [], given.python or [sys.executable]
    print(f"{given.examples} examples, one thread, {os.cpu_count()} processors\n")
    print(
        "| network | weights | kB | converted in s | runtime | dtheta | float64 | tape | round ms | ratio | peak MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in (n for n in NETWORKS if any(n.startswith(w) for w in wanted)):
        with tempfile.TemporaryDirectory() as folder:
            browser = ["--chromium"] if given.chromium else []
            about = child(sys.executable, "--write", name, folder, "--examples", given.examples, *browser)
            ways = [partial(child, python, "--measure", folder, "--repeat", given.repeat) for python in pythons]
            if given.chromium:
                ways.append(partial(measure_in_chromium, Path(folder), given.repeat))
            for way in ways:
                r = about | way()
                rows.append(r)
                exact = " | ".join(f"{r[key]:.1e}" for key in ("dtheta", "off", "tape_off"))
                print(
                    f"| {name} | {r['weights']:,} | {r['bytes'] / 1000:.0f} | {r['convert']:.0f} | {r['runtime']} | "
                    f"{exact} | {r['round_ms']:.1f} | {r['ratio']:.1f} | {r['peak_mb']:.0f} |",
                    flush=True,
                )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
