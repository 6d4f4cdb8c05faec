"""A backbone that was taught by signs of many hands, none of which the page's test draws (signs.spec.ts).

A sign is one to three curves through random points. Every drawing of it is turned, slanted, stretched and moved, and
its points tremble. One hundred signs with twelve drawings each teach the Omniglot CNN by Adam, as one classifier: it
stands for a run of PFLEGO, which needs minutes.
"""

import numpy as np
import tensorflow as tf

from tflite_export import export
from tflite_export.device.drawing import drawing_settings, example_of_drawing
from tfpfl import SplitModel
from tfpfl.models import build_network
from tfpfl.models.weights import Head

SHAPE = (28, 28, 1)
PREPROCESSING = {"scale": 1 / 255, "shift": 0.0, "stored_dtype": "uint8"}
SIGNS, DRAWINGS, STEPS, BATCH = 100, 12, 150, 100


def signs_bundle(folder):
    """The bundle of the page, with a head of zeros."""
    model = SplitModel(build_network("omniglot_4conv", SHAPE))
    x, labels = drawings(np.random.default_rng(4))
    theta = taught(model, x, labels)
    head = Head(np.zeros((model.num_features, 5), np.float32), np.zeros(5, np.float32))
    return export(
        (model, theta, head),
        out=folder / "signs",
        inference=False,
        browser=True,
        training={"beta": 0.01, "rho": 0.003, "head_rate": 0.003},
        labels=[f"sign {k}" for k in range(5)],
        preprocessing=PREPROCESSING,
        dataset="omniglot",
    )


def drawings(rng):
    """x float32 [SIGNS * DRAWINGS, 28, 28, 1] and labels int32."""
    settings = drawing_settings("omniglot", SHAPE, PREPROCESSING)
    raw = []
    for _ in range(SIGNS):
        strokes = [rng.uniform(-0.7, 0.7, (rng.integers(2, 6), 2)) for _ in range(rng.integers(1, 4))]
        raw += [example_of_drawing(drawn(rng, strokes, settings), settings, SHAPE) for _ in range(DRAWINGS)]
    return np.stack(raw).astype(np.float32) / 255, np.repeat(np.arange(SIGNS, dtype=np.int32), DRAWINGS)


def drawn(rng, strokes, settings):
    """A drawing of a sign, uint8 [size, size], black on white."""
    size, r = settings["size"], settings["pen"] // 2
    angle, slant = rng.uniform(-0.17, 0.17), rng.uniform(-0.12, 0.12)
    turned = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    hand = turned @ np.array([[rng.uniform(0.8, 1.1), slant], [0, rng.uniform(0.8, 1.1)]])
    place = rng.uniform(-0.12, 0.12, 2)
    grey = np.full((size, size), 255, np.uint8)
    for points in strokes:
        line = curve((points + rng.normal(0, 0.04, points.shape)) @ hand.T + place)
        columns, rows = ((1 + line) / 2 * (size - 1)).round().astype(int).T
        for dx in range(-r, r + 1):
            for dy in range(-r, r + 1):
                grey[np.clip(rows + dy, 0, size - 1), np.clip(columns + dx, 0, size - 1)] = 0
    return grey


def curve(points, steps=60):
    """Points of a Catmull-Rom spline through `points`, close together."""
    ends = np.vstack([2 * points[0] - points[1], points, 2 * points[-1] - points[-2]])
    t = np.linspace(0, 1, steps)[:, np.newaxis]
    basis = np.concatenate([-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, -(t**2) + t**3], 1)
    return np.vstack([basis / 2 @ ends[i : i + 4] for i in range(len(points) - 1)])


def taught(model, x, labels):
    """The backbone's weights after training."""
    kernel = tf.Variable(tf.random.stateless_normal([model.num_features, SIGNS], [1, 2], stddev=0.1))
    variables = [tf.Variable(w) for w in model.initial_theta] + [kernel]
    optimizer, rng = tf.keras.optimizers.Adam(0.003), np.random.default_rng(5)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            logits = tf.matmul(model.features(tuple(variables[:-1]), x), kernel)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    for _ in range(STEPS):
        rows = rng.integers(0, len(x), BATCH)
        loss = float(step(x[rows], labels[rows]))
    assert loss < 1, loss  # else nothing was taught
    return tuple(v.numpy() for v in variables[:-1])
