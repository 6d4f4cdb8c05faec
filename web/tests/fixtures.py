"""What the page's tests compare with, computed by TensorFlow, TensorFlow Federated and NumPy.

    python web/tests/fixtures.py FOLDER

Two bundles with a site each, the MLP of a short run on digits and an Omniglot CNN on drawn strokes; for each, features,
personalization and a round by the TFF engine; pixels, pictures, heads and payloads as Python makes them. A round of
small networks such as phones run. A backbone that was taught by many signs (signs.py). Federations of digits for the
page to play, and what the local engine computes of them. And what `tfpfl report` makes of some short runs, and a run
whose clients are devices (live.py). And a bundle that hears (voice.py).
"""

import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
import voice
from safetensors.numpy import save_file
from signs import signs_bundle

import live
from tflite_export import export, write_site
from tflite_export.convert.program import flatten
from tflite_export.device.drawing import drawing_settings, example_of_drawing
from tflite_export.device.head_file import SavedHead, head_bytes, load_head, theta_sha256
from tflite_export.device.payload import encode
from tfpfl import Population, SplitModel, build_algorithm, federate
from tfpfl.algorithms.contract import ClientData
from tfpfl.algorithms.parts import linear_head as heads
from tfpfl.algorithms.parts.optimizers import adam, sgd
from tfpfl.data import Federation, load_source
from tfpfl.data.population import ClientInfo
from tfpfl.engines.tff.worker import require_tff
from tfpfl.models import build_network
from tfpfl.models.weights import Head
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run
from tfpfl.studies.records import Record
from tfpfl.studies.report import write_report

STEPS = 49
BIG = (
    256.0  # a rate so large that theta' is the gradient, up to rounding; a power of 2, so that the rate rounds nothing
)


def digits_bundle(folder):
    """Client 1, with three classes, of a short run."""
    source, rng = load_source("digits"), np.random.default_rng(0)
    clients = []
    for i in range(4):
        classes = np.sort(rng.permutation(10)[: 2 + i % 3])
        rows = rng.permutation(np.flatnonzero(np.isin(source.y_train, classes)))[:150]
        clients.append((source.x_train[rows], source.y_train[rows]))
    federation = Federation.from_clients(clients, out=folder / "federation", name="digits", scale=1 / 16)
    config = RunConfig(
        hyperparameters={"rho": 0.01, "beta": 0.05}, federation=str(federation.path), network="mlp200", rounds=3
    )
    with Run.create(config, folder / "run", federation) as run:
        run.train()
        model = run.model
    return model, export(folder / "run", 1, folder / "mlp", inference=False, browser=True)


def omniglot_bundle(folder):
    """The Omniglot CNN, trained for some seconds, and a client with five kinds of strokes."""
    model, rng = SplitModel(build_network("omniglot_4conv", (28, 28, 1))), np.random.default_rng(1)
    preprocessing = {"scale": 1 / 255, "shift": 0.0, "stored_dtype": "uint8"}
    settings = drawing_settings("omniglot", (28, 28, 1), preprocessing)
    labels = np.arange(100) % 5
    raw = np.stack([example_of_drawing(stroke(rng, label), settings, (28, 28, 1)) for label in labels])
    x = raw.astype(np.float32) * np.float32(1 / 255)
    theta, _ = trained(model, x, labels)
    kernel = 0.3 * rng.standard_normal((model.num_features, 5)).astype(np.float32)
    return model, export(
        (model, theta, Head(kernel, np.zeros(5, np.float32))),
        out=folder / "cnn",
        inference=False,
        browser=True,
        training={"beta": stable_rate(model.features(theta, x).numpy()), "rho": 0.01, "head_rate": 0.01},
        labels=["left", "right", "up", "down", "ring"],
        train=(x, labels),
        preprocessing=preprocessing,
        dataset="omniglot",
    )


def trained(model, x, y, steps=40):
    """(theta, head) after some steps of Adam."""
    kernel = tf.Variable(tf.random.stateless_normal([model.num_features, 5], [1, 2], stddev=0.1))
    variables = [tf.Variable(w) for w in model.initial_theta] + [kernel]
    optimizer = tf.keras.optimizers.Adam(0.003)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            logits = tf.matmul(model.features(tuple(variables[:-1]), x), kernel)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    losses = [float(step()) for _ in range(steps)]
    assert losses[-1] < 0.5 * losses[0], losses  # else the tests of learning would test nothing
    return tuple(v.numpy() for v in variables[:-1]), kernel.numpy()


def stable_rate(phi):
    """Half of 1 / L, so that steps on the head do not enlarge the rounding of the features."""
    return float(1 / ((phi**2).sum(1).mean() + 1))


def stroke(rng, label, size=105, pen=3):
    """A drawing of one of five kinds, black on white."""
    grey, t = np.full((size, size), 255, np.uint8), np.linspace(-1, 1, 400)
    a, b = rng.uniform(0.5, 0.8), rng.uniform(-0.15, 0.15)
    curves = [(a * t, b + 0.4 * t), (a * t, b - 0.4 * t), (b + 0 * t, a * t), (a * t, b + 0 * t)]
    curves.append((a * np.cos(np.pi * t), a * np.sin(np.pi * t) + b))
    u, v = curves[label]
    columns, rows = (((1 + p) / 2 * (size - 1)).round().astype(int) for p in (u, v))
    for dx in range(-(pen // 2), pen // 2 + 1):
        for dy in range(-(pen // 2), pen // 2 + 1):
            grey[np.clip(rows + dy, 0, size - 1), np.clip(columns + dx, 0, size - 1)] = 0
    return grey


def by_the_tff_engine(model, bundle, n=30):
    """Inputs, and what TFF computes of them: {name: array}."""
    tff, rng = require_tff(), np.random.default_rng(2)
    # Weights as they are drawn, with biases that are not 0. Of trained ones, a ReLU or a pool of noise may be nearer
    # to its kink than runtimes round, and then a whole number more or less comes into the gradient.
    theta = tuple(w + np.float32(0.02) * rng.standard_normal(w.shape, np.float32) for w in model.initial_theta)
    k = bundle.num_classes
    x = rng.random((n, *bundle.example_shape), np.float32)
    x[: n // 2] = x[: n // 2].round()  # half of them drawings with constant regions
    labels = rng.integers(0, k, n).astype(np.int32)
    head = Head(*(np.asarray(a, np.float32) for a in load_head(bundle.path("head.bin"), bundle.num_features, k)[:2]))
    values = {"theta": flatten(theta), "x": x, "labels": labels, "kernel": head.kernel, "bias": head.bias}

    weights_type = tff.types.to_type([(w.dtype, w.shape) for w in theta])

    @tff.tensorflow.computation(weights_type, tff.TensorType(np.float32, x.shape))
    def features(theta, x):
        return model.features(tuple(theta), x)

    phi_type, y_type = tff.TensorType(np.float32, (n, bundle.num_features)), tff.TensorType(np.int32, (n,))

    values["phi"] = np.asarray(features(list(theta), x))
    beta = stable_rate(values["phi"])

    @tff.tensorflow.computation(phi_type, y_type, [(np.float32, head.kernel.shape), (np.float32, head.bias.shape)])
    def personalize(phi, y, head):
        return heads.fit(Head(*head), phi, tf.one_hot(y, k), STEPS, sgd(beta))

    fitted = personalize(values["phi"], labels, [*head])
    values["fitted.kernel"], values["fitted.bias"] = np.asarray(fitted.kernel), np.asarray(fitted.bias)

    population = Population(num_examples=np.array([n]), num_classes=np.array([k]))
    specs = tf.TensorSpec([None, *x.shape[1:]], tf.float32), tf.TensorSpec([None], tf.int32)
    info = ClientInfo(np.int32(0), np.int32(n), np.int32(k), np.float32(1))
    visit = ClientData(x, labels, info, np.array([0, 0], np.int32))
    for name, rho in (("round", 0.125), ("big", BIG)):
        options = {"tau": STEPS + 1, "beta": beta, "rho": rho, "rule": "exact", "server_opt": "sgd"}
        process = federate(build_algorithm("pflego", model, population, **options), specs)
        server = process.initialize()._replace(theta=tuple(theta))
        out = process.next(server, [head], [visit])
        values[f"{name}.theta"] = flatten(out.server.theta)
        values[f"{name}.kernel"], values[f"{name}.bias"] = (np.asarray(a) for a in out.client_states[0])
    values["dtheta"] = (flatten(theta) - values.pop("big.theta")) / np.float32(BIG)
    values["beta"], values["rate"] = np.float32([beta]), np.float32([0.125])
    return {name: np.ascontiguousarray(a) for name, a in values.items() if not name.startswith("big.")}


def files_of_python(folder, bundle):
    """Heads, payloads and pixels."""
    rng = np.random.default_rng(3)
    kernel = rng.standard_normal((bundle.num_features, 4)).astype(np.float32)
    bias = rng.standard_normal(4).astype(np.float32)
    save_file({"kernel": kernel, "bias": bias}, folder / "head.safetensors")
    (folder / "same.head").write_bytes(head_bytes(SavedHead(kernel, bias, theta_sha256(bundle.theta()))))
    names = tuple(f"class “{i}”" for i in range(len(bias)))
    (folder / "named.head").write_bytes(head_bytes(SavedHead(kernel, bias, theta_sha256(bundle.theta()), names)))
    (folder / "saved.head").write_bytes(head_bytes(SavedHead(kernel, bias, theta_sha256(bundle.theta())), names))
    (folder / "other.head").write_bytes(head_bytes(SavedHead(kernel, bias, theta_sha256(bundle.theta() + 1))))
    gradient = (rng.standard_normal(5000) * np.repeat(10.0 ** rng.integers(-9, 1, 50), 100)).astype(np.float32)
    gradient[1024:2048] = 0
    gradient[3000:3003] = np.abs(gradient).max() * np.float32([0.5, -0.5, 1])
    save_file({"gradient": gradient}, folder / "gradient.safetensors")
    for kind in ("float32", "int8"):
        (folder / f"gradient.{kind}").write_bytes(encode(gradient, kind))

    cases = {}
    for name, dataset, shape, pre in (
        ("omniglot", "omniglot", (28, 28, 1), {"scale": 1 / 255, "shift": 0.0}),
        ("mnist", "mnist", (28, 28, 1), {"scale": 2 / 255, "shift": -1.0}),
        ("digits", "digits", (8, 8, 1), {"scale": 1 / 16, "shift": 0.0}),
    ):
        settings = drawing_settings(dataset, shape, {**pre, "stored_dtype": "uint8"})
        size, pen = settings["size"], settings["pen"]
        drawings = [rng.integers(0, 256, (size, size)).astype(np.uint8)]
        drawings += [stroke(rng, label, size, pen) for label in (4, 0)]
        raw = np.stack([example_of_drawing(d, settings, shape) for d in drawings])
        cases[f"{name}.grey"], cases[f"{name}.raw"] = np.stack(drawings), raw
        cases[f"{name}.x"] = raw.astype(np.float32) * np.float32(pre["scale"]) + np.float32(pre["shift"])
        cases[f"{name}.settings"] = np.int32([size, settings["levels"], settings["resample"] == "area", shape[0]])
    save_file({name: np.ascontiguousarray(a) for name, a in cases.items()}, folder / "pixels.safetensors")
    for label, name in ((2, "line"), (3, "bar"), (4, "ring")):
        picture = tf.io.encode_png(stroke(rng, label)[..., np.newaxis])
        (folder / f"{name}.png").write_bytes(picture.numpy())


ROUNDS = 10
FEDERATIONS = {  # name -> hyperparameters; all members take part in every round
    "members": {},  # the preset paper: Adam, alpha in theta's step only
    "members-exact": {"rule": "exact", "server_opt": "momentum", "rho": 0.05, "head_rate": "rho"},
}


def played_federations(folder):
    """Eight clients with at most 32 training and 32 test examples of three digits: sites, and the engine's rounds."""
    source, rng = load_source("digits"), np.random.default_rng(5)
    clients = {}
    for i in range(8):
        classes, parts = np.sort(rng.permutation(10)[:3]), {}
        for split, x, y in (("train", source.x_train, source.y_train), ("test", source.x_test, source.y_test)):
            rows = rng.permutation(np.flatnonzero(np.isin(y, classes)))[: 32 - (i if split == "train" else 0)]
            parts[split] = (x[rows], y[rows])
        clients[f"school {i}"] = parts
    where = {"out": folder / "members-federation", "name": "digits", "scale": 1 / 16, "validation": 0.0}
    federation = Federation.from_clients(clients, **where)
    for name, hyper in FEDERATIONS.items():
        config = RunConfig(
            hyperparameters=hyper,
            federation=str(federation.path),
            network="mlp200",
            participation=1.0,
            rounds=ROUNDS,
            engine="local",
            evaluate_every=0,
        )
        with Run.create(config, folder / f"{name}-run", federation) as run:
            run.train()
            training, ids = run.training(), run.population.client_ids.tolist()
            theta = run.algorithm.message(training.server_state())
            found = {"theta": flatten(theta)}
            right = []
            for i, head in enumerate(training.client_states(ids)):
                found |= {f"kernel_{i}": np.asarray(head.kernel), f"bias_{i}": np.asarray(head.bias)}
                x, y = federation.arrays(ids[i], "test")
                z = run.model.features(theta, x).numpy() @ np.asarray(head.kernel) + np.asarray(head.bias)
                right.append((z.argmax(1) == y).sum())
            found["right"] = np.int32(right)
            found |= averaged_heads(run, federation) if name == "members" else {}
        save_file({n: np.ascontiguousarray(a) for n, a in found.items()}, folder / f"{name}.safetensors")
        write_site(folder / f"{name}-run", folder / f"site-{name}", members=8)


def averaged_heads(run, federation):
    """One head for all: after every round, the heads are averaged like the gradients. By GradientTape."""
    hyper, population, model = run.config.hyperparameters, run.population, run.model
    classes = sorted({int(c) for i in population.client_ids for c in federation.classes(int(i))})
    theta, optimizer = tuple(map(tf.constant, model.initial_theta)), adam(hyper["rho"])
    slots, shared = optimizer.init(theta), Head(*map(tf.constant, model.shared_head(len(classes))))

    def loss(theta, head, x, y):
        logits = tf.matmul(model.features(theta, x), head.kernel) + head.bias
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))

    @tf.function(reduce_retracing=True)
    def visit(theta, head, x, y):
        start, before = head, loss(theta, head, x, y)
        for _ in tf.range(hyper["tau"] - 1):
            with tf.GradientTape() as tape:
                tape.watch(head)
                now = loss(theta, head, x, y)
            head = Head(*(w - hyper["beta"] * g for w, g in zip(head, tape.gradient(now, head), strict=True)))
        head = Head(*(tf.where(loss(theta, head, x, y) <= before, a, b) for a, b in zip(head, start, strict=True)))
        with tf.GradientTape() as tape:
            tape.watch((theta, head))
            now = loss(theta, head, x, y)
        for_theta, for_head = tape.gradient(now, (theta, head))
        return for_theta, Head(*(w - hyper["rho"] * g for w, g in zip(head, for_head, strict=True)))

    for _ in range(ROUNDS):
        gradients, heads = [], []
        for i in population.client_ids.tolist():
            x, y = federation.arrays(i, "train", "global")
            alpha = population.info(i).alpha
            for_theta, head = visit(theta, shared, x, np.searchsorted(classes, y).astype(np.int32))
            gradients.append([alpha * g for g in for_theta])
            heads.append([alpha * w for w in head])
        shared = Head(*map(tf.add_n, zip(*heads, strict=True)))
        slots, theta = optimizer.step(slots, theta, tuple(map(tf.add_n, zip(*gradients, strict=True))))
    return {"one.theta": flatten(theta), "one.kernel": shared.kernel.numpy(), "one.bias": shared.bias.numpy()}


def reports(folder):
    """Four algorithms, two seeds each, one of them with an attention between the clients; and one run alone."""
    federation = Federation.build("digits", clients=10, seed=0, out=folder / "report-federation")
    records = []
    for algorithm in ("pflego", "fedavg", "local", "fedamp"):
        for seed in range(2):
            run = folder / "report-runs" / f"{algorithm}-s{seed}"
            config = RunConfig(algorithm=algorithm, rounds=6, evaluate_every=1, seed=seed, participation=0.5)
            with Run.create(config, run, federation) as made:
                made.train()
            records.append(Record.read(run))
    write_report(records, folder / "report.html")
    write_report(records[:1], folder / "report-one.html")


def phone_networks(folder):
    """A DS-CNN, a GRU and a transformer in small, and what GradientTape says of a round of each."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from benchmarks.device_networks import SMALL, write

    for name in SMALL:
        network = folder / "networks" / name
        network.mkdir(parents=True)
        write(name, network, 8, SMALL, ("fixed.tflite",))
        (network / "about.json").write_text(json.dumps({"bound": 1e-5, "repeat": 1}))


def main(folder: Path):
    folder.mkdir(parents=True)
    reports(folder)
    (folder / "live").mkdir()
    live.simulate(folder / "live")
    phone_networks(folder)
    played_federations(folder)
    for name, make in (("mlp", digits_bundle), ("cnn", omniglot_bundle)):
        model, bundle = make(folder)
        save_file(by_the_tff_engine(model, bundle), folder / f"{name}.safetensors")
        write_site(bundle.folder, folder / f"site-{name}")
    files_of_python(folder, bundle)
    write_site(signs_bundle(folder).folder, folder / "site-signs")
    voice.main(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
