"""How many GFLOP/s a local step of the whole model reaches, against one large convolution on the same machine.

    python benchmarks/throughput.py [--repeats 7] [--json FILE]

For each network, with the batch of its paper: FedAvg's visit in the local engine's graph, one client at a time with two
threads inside an operation, and two clients at a time with one thread each (`Simulation`'s way); a plain loop over
`keras.Model` and `tf.GradientTape`, with two threads; and the floor, a convolution 3x3 from 64 to 64 channels on
56 x 56 pixels, forward and both gradients, for a batch of 16. Operations are counted as in `tfpfl.runs.cost`. All take
turns in one process for each number of threads; a ratio is the median of the ratios of neighbouring repeats.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import numpy as np
from listed import Written

CASES = {  # name: (network, shape of an example, classes, examples, batch or None for all, steps)
    "Omniglot, all 480 examples": ("omniglot_4conv", (28, 28, 1), 30, 480, None, 3),
    "CIFAR-10, all 450 examples": ("cifar_2conv", (32, 32, 3), 2, 450, None, 2),
    "CIFAR-10, batches of 10": ("fedavg_cnn", (32, 32, 3), 10, 500, 10, 50),
}
FLOOR = "large convolution"


def measured(threads: int, repeats: int) -> dict[str, list[float]]:
    """{name: GFLOP/s of every repeat}; with one thread inside an operation, two of everything run at a time."""
    import keras
    import tensorflow as tf

    from tfpfl import Population, SplitModel, build_algorithm
    from tfpfl.algorithms.contract import ClientData
    from tfpfl.data.randomness import client_key
    from tfpfl.models import build_network
    from tfpfl.runs.cost import backbone_flops, head_flops

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    rng = np.random.default_rng(0)
    work = {FLOOR: large_convolution(tf)}
    for name, (network, shape, classes, examples, batch, steps) in CASES.items():
        backbone = build_network(network, shape)
        model = SplitModel(backbone)
        population = Population([examples], [classes])
        each, head = backbone_flops(model), head_flops(model.num_features, classes)
        flops = steps * (batch or examples) * (sum(each) + sum(head))
        x = tf.constant(rng.normal(size=(examples, *shape)), tf.float32)
        y = tf.constant(np.arange(examples) % classes, tf.int32)
        how = {"epochs": 1, "batch_size": batch} if batch else {"steps": steps}
        algorithm = build_algorithm("fedavg", model, population, eta=0.01, **how)
        data = ClientData(x, y, population.info(0), client_key(0, 1, [0])[0])
        message, state = algorithm.message(algorithm.init_server()), algorithm.init_client(data.info)
        update = tf.function(algorithm.client_update, autograph=False)
        work[name] = (lambda update=update, given=(message, state, data): update(*given), flops)
        work[f"{name}, keras"] = (keras_loop(tf, keras, network, shape, classes, x, y, batch, steps), flops)
    found: dict[str, list[float]] = {name: [] for name in work}
    at_once = 2 if threads == 1 else 1
    with ThreadPoolExecutor(at_once) as pool:
        for repeat in range(repeats + 1):
            for name, (run, flops) in work.items():
                start = time.perf_counter()
                list(pool.map(lambda _, run=run: run(), range(at_once)))
                if repeat:  # the first one is traced
                    found[name].append(at_once * flops / (time.perf_counter() - start) / 1e9)
    return found


def large_convolution(tf):
    """(a function that runs it once, its FLOPs): forward, gradient of the input, gradient of the filter; 4 times."""
    x, w = tf.random.normal([16, 56, 56, 64]), tf.random.normal([3, 3, 64, 64])

    @tf.function(autograph=False)
    def run():
        total = 0.0
        for i in range(4):
            with tf.GradientTape() as tape:
                tape.watch((x, w))
                out = tf.nn.conv2d(x * (1.0 + i), w, 1, "SAME")
            total += sum(tf.reduce_sum(part) for part in (out, *tape.gradient(out, (x, w))))  # else no one needs `out`
        return total

    return run, 4 * 3 * 2 * 16 * 56 * 56 * 9 * 64 * 64


def keras_loop(tf, keras, network, shape, classes, x, y, batch, steps):
    """The same steps with a Keras model, as a tutorial writes them: a graph for a step, a loop in Python."""
    from tfpfl.models import build_network

    model = keras.Sequential([*build_network(network, shape).layers, keras.layers.Dense(classes)])
    model.build((None, *shape))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x))
        for w, g in zip(model.trainable_weights, tape.gradient(loss, model.trainable_weights), strict=True):
            w.assign_sub(0.01 * g)
        return loss

    def run():
        for i in range(steps):
            part = slice(i * batch, (i + 1) * batch) if batch else slice(None)
            last = step(x[part], y[part])
        return float(last)

    return run


@click.command()
@click.option("--repeats", default=7, show_default=True)
@click.option("--json", "file", type=Written())
@click.option("--threads", type=int, hidden=True)
def main(repeats, file, threads):
    """Prints Markdown."""
    if threads:
        print(json.dumps(measured(threads, repeats)))
        return
    found = {}
    for threads in (2, 1):
        command = [sys.executable, __file__, "--threads", str(threads), "--repeats", str(repeats)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[threads] = json.loads(output.splitlines()[-1])
    print("| work | GFLOP/s, one at a time | of the large convolution | GFLOP/s, two at a time | of the same |")
    print("|---|---:|---:|---:|---:|")
    for name in found[2]:
        row = [name]
        for threads in (2, 1):
            ratios = np.array(found[threads][name]) / np.array(found[threads][FLOOR])
            row += [f"{np.median(found[threads][name]):.0f}", f"{np.median(ratios):.2f}"]
        print("| " + " | ".join(row) + " |")
    if file:
        file.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
