"""PFLEGO and four peers against what the script of PFLEGO's authors computed: MNIST, two classes a client, float64.

Its numbers are in files beside the project: split, first weights, cohorts; losses, accuracies and theta of every round.
The script scores a round's clients with the model that each has right after its local work, pooled over examples.
"""

import os
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy.special import logsumexp

from helpers.marks import slow_but
from helpers.toys import Toy
from tfpfl.algorithms import build_algorithm
from tfpfl.algorithms.pflego import PRESETS
from tfpfl.data.population import Population, Sampling
from tfpfl.data.tfds import load_tfds_images, tfds_folder
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import SplitModel
from tfpfl.models.weights import Head

TRUTH = Path(os.environ.get("TFPFL_TRUTH", "")).expanduser()
SAME = {  # file: (method, its hyperparameters)
    "pflego_code": ("pflego", PRESETS["code"] | {"tau": 50, "beta": 0.007, "rho": 0.001}),
    "fedrecon": ("fedrecon", {"tau": 10, "beta": 0.01, "rho": 0.001}),
    "fedrep": ("fedrep", {"tau_h": 7, "tau_b": 3, "eta_h": 0.01, "eta_b": 0.01, "momentum": 0.9}),
    "fedper": ("fedper", {"steps": 10, "eta": 0.01}),
    "fedbabu": ("fedbabu", {"steps": 10, "eta": 0.01, "momentum": 0.9, "steps_ft": 0}),
}


class Script:
    """One file of the script's numbers, as data, first weights and cohorts.

    Args:
        name: the name of the file.
        images: {'train', 'test'}: MNIST, uint8 [N, 28, 28, 1].
    """

    def __init__(self, name: str, images: dict):
        self.saved = np.load(TRUTH / f"{name}.npz")
        self.train, self.test = (self.clients(part, images[part]) for part in ("train", "test"))
        network = keras.Sequential(
            [
                keras.Input((784,), dtype="float64"),
                keras.layers.Dense(200, activation="relu", dtype="float64"),
            ]
        )
        network.set_weights([self.saved["start_theta_0"], self.saved["start_theta_1"]])
        self.model = SplitModel(network)
        num = len(self.train)
        rate = self.saved["sampled"].shape[1] / num
        self.population = Population([len(y) for _, y in self.train], [2] * num, 2, sampling=Sampling(rate=rate))
        self.data = Toy(self.model, self.population, self.train)

    def clients(self, part: str, pixels: np.ndarray) -> list:
        """[(x, y)] of every client, with its labels numbered from 0 on."""
        index, ends, labels = (self.saved[f"{part}_{what}"] for what in ("index", "offsets", "labels"))
        found = []
        for a, b in zip(ends, ends[1:], strict=False):
            x = pixels[index[a:b]].reshape(b - a, 784).astype(np.float64) * self.saved["pixel_scale"]
            found.append((x, np.unique(labels[a:b], return_inverse=True)[1].astype(np.int32)))
        return found

    def first_head(self, client: int) -> Head:
        w = self.saved[f"start_W_{client}"]
        return Head(w[:, :-1].T.copy(), w[:, -1].copy())

    def scores(self, algorithm, message, states, cohort, visits) -> dict:
        """{loss and accuracy of both parts}: of the round's clients right after their work, pooled over examples."""
        found = {}
        message, states = tf.nest.map_structure(tf.constant, (message, states))
        models = [
            algorithm.local_model(message, algorithm.client_update(message, state, visit))
            for state, visit in zip(states, visits, strict=True)
        ]
        for part, data in (("train", self.train), ("test", self.test)):
            z = [self.model.logits(w, tf.constant(data[i][0])).numpy() for w, i in zip(models, cohort, strict=True)]
            y = [data[i][1] for i in cohort]
            losses = [logsumexp(a, axis=1) - a[np.arange(len(b)), b] for a, b in zip(z, y, strict=True)]
            found[f"{part}_loss"] = np.concatenate(losses).mean()
            found[f"{part}_acc"] = np.mean(np.concatenate([a.argmax(1) == b for a, b in zip(z, y, strict=True)]))
        return found


@pytest.fixture(scope="module")
def images(tfds_data):
    if not TRUTH.name:
        pytest.skip("the script's numbers are not here (set TFPFL_TRUTH)")
    source = load_tfds_images("mnist", tfds_folder("mnist", tfds_data("mnist"), False))
    return {"train": source.x_train, "test": source.x_test}


def flat(theta) -> np.ndarray:
    return np.concatenate([np.ravel(w) for w in theta])


def compare(script, algorithm, process, rounds):
    """Runs the script's rounds, and compares what it saved: theta of all, losses and accuracies of four."""
    saved, server = script.saved, process.initialize()
    states = {i: algorithm.init_client(script.population.info(i, "float64")) for i in script.data.ids}
    if any(np.shape(leaf) == (200, 2) for leaf in tf.nest.flatten(states[0])):
        states = {i: script.first_head(i) for i in states}
    for r in range(rounds):
        cohort = [int(i) for i in saved["sampled"][r]]
        visits, olds = [script.data.visit(i, r + 1) for i in cohort], [states[i] for i in cohort]
        message = algorithm.message(server)
        scored = script.scores(algorithm, message, olds, cohort, visits) if r in (0, 1, 3, rounds - 1) else {}
        for name, value in scored.items():
            assert value == pytest.approx(float(saved[name][r]), rel=1e-12, abs=1e-13), (r, name)
        output = process.next(server, olds, visits)
        server = output.server
        states |= dict(zip(cohort, output.client_states, strict=True))
        message = tf.nest.map_structure(tf.constant, algorithm.message(server))
        theta = flat(algorithm.personal_model(message, states[cohort[0]], visits[0]).theta)
        assert np.linalg.norm(theta) == pytest.approx(float(saved["theta_norm"][r]), rel=1e-12), r
        if f"theta_after_{r + 1}" in saved.files:
            np.testing.assert_allclose(theta, saved[f"theta_after_{r + 1}"], atol=1e-11)


def read(name, images, monkeypatch):
    """(the script's numbers, the method on its data, with its first weights)."""
    script = Script(name, images)
    one_for_all = sys.modules["tfpfl.algorithms.fedbabu"]
    monkeypatch.setattr(one_for_all, "orthogonal_head", lambda *_: script.first_head(0))
    method, hyperparameters = SAME[name]
    return script, build_algorithm(method, script.model, script.population, **hyperparameters)


@pytest.mark.parametrize("name", slow_but(list(SAME), "fedrecon", ci=SAME))
def test_the_local_engine_gives_the_scripts_numbers(name, images, monkeypatch):
    script, algorithm = read(name, images, monkeypatch)
    compare(script, algorithm, Simulation(algorithm), len(script.saved["sampled"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_tff_gives_the_scripts_numbers(name, images, monkeypatch, tff):
    from tfpfl.engines.tff.process import federate

    script, algorithm = read(name, images, monkeypatch)
    specs = (tf.TensorSpec([None, 784], tf.float64), tf.TensorSpec([None], tf.int32))
    compare(script, algorithm, federate(algorithm, specs), 4)
