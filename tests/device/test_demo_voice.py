"""The voice demo on a toy: tones as words, and a small network of the trunk's shape."""

import keras
import numpy as np
import pytest
from click.testing import CliRunner
from keras import layers

from tflite_export.cli import main
from tflite_export.demo_voice import demonstrate
from tfpfl.checks import InvalidArgument
from tfpfl.data.people.speech import word
from tfpfl.data.source import Source

WORDS = {"low": 300, "middle": 900, "high": 2_700}  # Hz


def tones(speakers=("ann", "bob"), train=12, test=5):
    """Each word is a tone with a pitch and a place of its own in every recording."""
    rng = np.random.default_rng(0)

    def said(hertz, shift):
        t = np.arange(rng.integers(3_000, 6_000)) / 16_000
        tone = np.sin(2 * np.pi * hertz * shift * rng.uniform(0.95, 1.05) * t) + rng.normal(0, 0.05, len(t))
        return np.round(word(np.pad(tone, (rng.integers(0, 6_000), 0)), 16_000) * 2**15).astype(np.int32)

    def part(count):
        rows = [(said(h, 1 + 0.1 * s), c, n) for s, n in enumerate(speakers) for c, h in enumerate(WORDS.values())
                for _ in range(count)]  # fmt: skip
        x, y, key = zip(*rows, strict=True)
        return np.stack(x), np.array(y), np.array(key)

    (x, y, key), (x_test, y_test, key_test) = part(train), part(test)
    return Source.from_arrays(
        x, y, x_test, y_test, name="tones", class_names=list(WORDS), scale=2.0**-15, key=key, key_test=key_test
    )


def network():
    """Power of 32 bands of frequency, in 99 frames; the weights are cosines and sines."""
    inputs = keras.Input((16_000,))
    x = layers.Reshape((16_000, 1))(inputs)
    n, hertz = np.arange(320) / 16_000, np.linspace(100, 3_500, 32)
    made = [layers.Conv1D(32, 320, 160, use_bias=False) for _ in range(2)]
    power = layers.Add()([layers.Multiply()([wave, wave]) for wave in (conv(x) for conv in made)])
    x = layers.LayerNormalization(center=False, scale=False)(layers.GlobalAveragePooling1D()(power))
    for conv, wave in zip(made, (np.cos, np.sin), strict=True):
        conv.set_weights([wave(2 * np.pi * n[:, None] * hertz)[:, None, :].astype(np.float32)])
    return keras.Model(inputs, x)


@pytest.mark.slow
def test_few_utterances_teach_a_head_and_the_device_learns_the_same(tmp_path):
    found = demonstrate(tmp_path / "b", "bob", 5, 2, source=tones(), network=network())
    assert [p.name for p in found.people] == ["ann", "bob"] and found.speaker.name == "bob"
    assert found.share >= 0.95 and found.people[0].all > 0.9
    assert found.verification.ok and found.device == found.speaker.few[0]
    assert found.gap < 1e-5  # accuracies of 100 % would not tell heads of other utterances apart
    assert found.bundle.manifest["labels"]["names"] == list(WORDS)
    assert "With 5 utterances" in "\n".join(found.lines())


def test_a_speaker_that_is_not_there_and_missing_data_are_told(tmp_path, monkeypatch):
    with pytest.raises(InvalidArgument, match="speaker.*ann, bob"):
        demonstrate(tmp_path / "b", "eve", source=tones(), network=network())
    monkeypatch.setenv("TFPFL_PEOPLE", str(tmp_path))
    result = CliRunner().invoke(main, ["demo-voice", "--out", str(tmp_path / "b")])
    assert result.exit_code == 1 and "git clone --depth 1" in result.output and "Traceback" not in result.output
