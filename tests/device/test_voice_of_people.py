"""The speech trunk with its real weights, against onnxruntime, and the voice demo with people's recordings.

Both read what the user has got into TFPFL_PEOPLE, and skip where it is not. tests/models/test_speech_embedding.py and
test_demo_voice.py check the same with drawn weights and tones, everywhere.
"""

import hashlib
import json

import keras
import numpy as np
import pytest

from helpers.speech_windows import FILE, signals
from tflite_export.demo_voice import demonstrate
from tfpfl.data import load_source
from tfpfl.models.speech_embedding import load_speech_embedding


@pytest.fixture(scope="module")
def trunk():
    pytest.importorskip("onnx")
    try:
        return load_speech_embedding()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_its_windows_are_those_of_onnxruntime(trunk):
    saved = json.loads(FILE.read_text(encoding="utf-8"))
    x, expected = signals(), np.array(saved["windows"]).reshape(2, 288)
    assert hashlib.sha256(x.tobytes()).hexdigest() == saved["signals_sha256"]
    windows = keras.Model(trunk.input, trunk.get_layer("windows").output)
    assert np.abs(windows(x) - expected).max() < 1e-5 * np.abs(expected).max()

    # a second at another loudness is another input: a trunk with a wrong scale would be seen
    assert np.abs(windows(x * 2**15) - expected).max() > 0.05 * np.abs(expected).max()


@pytest.mark.slow
def test_five_utterances_teach_ten_words_to_a_device(trunk, tmp_path):
    try:
        source = load_source("fsdd", features="word")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    found = demonstrate(tmp_path / "bundle", "nicolas", source=source, network=trunk)  # the hardest of the six to hear
    assert len(found.people) == 6 and all(p.few.shape == (5,) for p in found.people)
    assert min(p.all for p in found.people) > 0.95  # else a share of it would say little
    assert min(p.few.mean() / p.all for p in found.people) >= 0.95  # every person's, as well as the mean of people
    assert found.share >= 0.95
    assert found.verification.ok and found.device == found.speaker.few[0] < 1 and found.gap < 1e-5
