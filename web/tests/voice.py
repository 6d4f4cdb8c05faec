"""A small bundle that hears, and what Python computes of examples that the page made.

    python web/tests/voice.py FOLDER                          # the bundle, and its site in FOLDER/site-voice
    python web/tests/voice.py --fit BUNDLE EXAMPLES OUT       # features, and a head fitted as the page does it
    python web/tests/voice.py --read FOLDER EXAMPLES          # the WAV files of a speaker of FSDD, by tfpfl's `word`

The backbone is 32 filters of 8 ms with a stride of 4 ms, as they are drawn, and the mean of their outputs over the
second: enough to tell tones and, a little, voices apart.
EXAMPLES and OUT are safetensors files: x float32 [N, 16000], labels int32 [N], fit int32 [N] (1: the head is fitted to
it); phi float32 [N, M], kernel [M, K], bias [K], guesses int32 [N].
"""

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

RATE = SAMPLES = 16000
WORDS = ["low", "middle", "high"]
STEPS = 300


def voice_bundle(folder: Path):
    """The exported toy network, untrained, with words of three tones as its client's examples."""
    import keras

    from tflite_export import export
    from tfpfl import SplitModel
    from tfpfl.models.weights import Head

    keras.utils.set_random_seed(0)
    # As the frames of a picture of one column: convolutions of one dimension are the same thing.
    layers = [
        keras.Input((SAMPLES,)),
        keras.layers.Reshape((SAMPLES // 64, 64, 1)),
        keras.layers.Conv2D(32, (2, 64), activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
    ]
    model = SplitModel(keras.Sequential(layers))
    rng = np.random.default_rng(0)
    # Filters of a pitch each (mel-like), so that the features do not all say how loud it is.
    theta = list(model.initial_theta)
    pitch = np.geomspace(100, 4000, 32)
    t = np.arange(128) / RATE
    phase = rng.uniform(0, 2 * np.pi, 32)
    waves = np.cos(2 * np.pi * pitch * t[:, np.newaxis] + phase) * np.hanning(128)[:, np.newaxis]
    theta[0] = waves.reshape(2, 64, 1, 32).astype(np.float32)
    kernel = 0.1 * rng.standard_normal((model.num_features, len(WORDS))).astype(np.float32)
    labels = np.arange(12, dtype=np.int32) % len(WORDS)
    times = np.arange(SAMPLES) / RATE
    x = np.stack([tone(times, label, 1 + i / 100) for i, label in enumerate(labels)]).astype(np.float32)
    return export(
        (model, tuple(theta), Head(kernel, np.zeros(len(WORDS), np.float32))),
        out=folder / "voice",
        inference=False,
        browser=True,
        training={"beta": 0.05, "rho": 0.01, "head_rate": 0.01},
        labels=WORDS,
        train=(x, labels),
        preprocessing={"kind": "audio", "rate": RATE, "samples": SAMPLES},
    )


def tone(t, label, pitch=1.0):
    """0.4 s of a tone, that comes and goes smoothly, at the beginning. voice.ts has the same."""
    inside = (t >= 0) & (t < 0.4)
    return 0.5 * inside * np.sin(np.pi * t / 0.4) ** 2 * np.sin(2 * np.pi * 300 * 2.0**label * pitch * t)


def fit(bundle: str, examples: str, out: str):
    """By the reference client of a device."""
    import tensorflow as tf

    from tflite_export.device.client import DeviceClient
    from tflite_export.device.head_file import SavedHead, theta_sha256

    given = load_file(examples)
    x, labels, rows = given["x"], given["labels"], np.flatnonzero(given["fit"])
    client = DeviceClient(bundle, interpreter=tf.lite.Interpreter)
    phi = np.asarray(client.features(x))
    k = int(labels.max()) + 1
    zero = np.zeros((phi.shape[1], k), np.float32), np.zeros(k, np.float32)
    client.start_from(SavedHead(*zero, theta_sha256(client.bundle.theta()), tuple(map(str, range(k)))))
    beta = 2 / ((phi[rows].astype(np.float64) ** 2).sum(1).mean() + 1)
    kernel, bias, *_ = client.fit_head(phi[rows], labels[rows], STEPS, beta)
    found = {"phi": phi, "kernel": np.asarray(kernel), "bias": np.asarray(bias)}
    found["guesses"] = (phi @ kernel + bias).argmax(1).astype(np.int32)
    save_file({name: np.ascontiguousarray(a) for name, a in found.items()}, out)


def read(folder: str, out: str):
    """DIGIT_SPEAKER_NUMBER.wav, 8 kHz, in the order of the names: numbers 5 to 9 fit a head, 0 to 4 test it."""
    from scipy.io import wavfile

    from tfpfl.data.people.speech import word

    paths = sorted(Path(folder).glob("*.wav"))
    x = np.zeros((len(paths), SAMPLES), np.float32)
    for row, path in zip(x, paths, strict=True):
        rate, sound = wavfile.read(path)
        row[:] = word(sound / 2**15, rate)
    digits, numbers = (np.int32([path.stem.split("_")[i] for path in paths]) for i in (0, 2))
    save_file({"x": x, "labels": digits, "fit": (numbers >= 5).astype(np.int32)}, out)


def main(folder: Path):
    from tflite_export import write_site

    folder.mkdir(parents=True, exist_ok=True)
    write_site(voice_bundle(folder).folder, folder / "site-voice")


if __name__ == "__main__":
    if sys.argv[1] == "--fit":
        fit(*sys.argv[2:])
    elif sys.argv[1] == "--read":
        read(*sys.argv[2:])
    else:
        main(Path(sys.argv[1]))
