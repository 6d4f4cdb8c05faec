"""Spoken digits by speaker: the Free Spoken Digit Dataset (FSDD)."""

import io
import re
import wave
from pathlib import Path

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data.people.files import read_members
from tfpfl.data.source import Source

RATE = 8_000  # samples a second
LENGTH = 8_000  # samples of an example: longer recordings are cut, shorter ones are followed by silence
WINDOW, HOP, BANDS = 256, 128, 32  # 32 ms, every 16 ms
LOW, HIGH = 20.0, 4_000.0  # Hz: the edges of the lowest and the highest band
FLOOR, STEP = -110.0, 0.5  # dB: what is stored as 0, and what one step of a byte means
NAME = r"(\d)_([a-z]+)_(\d+)\.wav"


def load_fsdd(path: Path, features: str = "log_mel") -> Source:
    """Reads FSDD with its speakers as natural clients, split by its own rule: recordings 0 to 4 are for test.

    Args:
        path: the folder or archive that has the folder 'recordings' with the files {digit}_{speaker}_{number}.wav.
        features: 'log_mel' for `log_mel` of each recording, uint8 [61, 32, 1]; 'wave' for its first second as it was
            recorded, int32 [8000] with scale 2^-15, for a trunk that has its own features.

    Raises:
        InvalidArgument: a file is not mono with 16 bits at 8 kHz; or there are not 6 speakers with 50 recordings of 10
            digits each.
    """
    signals, digit, speaker, number = read_recordings(path)
    found = np.unique(np.char.add(np.char.add(speaker, " "), digit.astype(str)), return_counts=True)[1]
    if len(found) != 60 or (found != 50).any():
        raise InvalidArgument(
            f"{path} has {len(digit)} recordings of {len(set(speaker.tolist()))} speakers, but FSDD has 3,000: 6 "
            "speakers, 10 digits, 50 of each. Older releases have fewer: get release v1.0.10 or later"
        )
    x = np.stack([log_mel(s) for s in signals]) if features == "log_mel" else np.stack(signals).astype(np.int32)
    test = number < 5
    return Source.from_arrays(
        x[~test],
        digit[~test],
        x[test],
        digit[test],
        name="fsdd",
        version="1.0.10",
        class_names=["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
        scale=1 / 255 if features == "log_mel" else 2.0**-15,
        key=speaker[~test],
        key_test=speaker[test],
        options={"features": features},
    )


def read_recordings(path: Path) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    """Reads all recordings of a folder or an archive.

    Returns:
        (signals, digit, speaker, number) in the order speaker, digit, number. A signal is int16 [8000].

    Raises:
        InvalidArgument: there are none, or one is not mono with 16 bits at 8 kHz.
    """
    rows = []
    for name, content in read_members(path, rf"recordings/{NAME}").items():
        found = re.search(NAME + "$", name)
        assert found is not None
        rows.append((found[2], int(found[1]), int(found[3]), _samples(content, name)))
    if not rows:
        raise InvalidArgument(f"{path} has no files recordings/DIGIT_SPEAKER_NUMBER.wav: it is not FSDD")
    rows.sort(key=lambda row: row[:3])
    speaker, digit, number, signals = zip(*rows, strict=True)
    return list(signals), np.array(digit), np.array(speaker), np.array(number)


def _samples(content: bytes, name: str) -> np.ndarray:
    try:
        with wave.open(io.BytesIO(content)) as file:
            form = file.getnchannels(), file.getsampwidth(), file.getframerate()
            samples = np.frombuffer(file.readframes(LENGTH), "<i2") if form == (1, 2, RATE) else None
    except (wave.Error, EOFError) as error:
        raise InvalidArgument(f"{name} is no WAV file: {error}") from error
    if samples is None:
        raise InvalidArgument(f"{name} must be mono with 2 bytes a sample at 8000 Hz, found {form}")
    return np.pad(samples, (0, LENGTH - len(samples))).astype(np.int16)


def log_mel(signal: np.ndarray) -> np.ndarray:
    """The energy of a signal over time and frequency, in decibels: uint8 [61, 32, 1].

    Frames of 256 samples (32 ms), one every 128 samples, are weighted with Hann's window w and transformed. The power
    in bin f is |X_f|^2 / (sum(w) / 2)^2, so that a sine of amplitude 1 in the middle of a bin has power 1 there. 32
    triangular bands, equally wide on the mel scale 2595 log10(1 + f / 700) from 20 to 4,000 Hz, each with the height 1,
    sum it up. 10 log10 of a band is stored in steps of 0.5 dB from -110 dB on, so that the bytes, and the hash of a
    federation, do not depend on the last bits of a Fourier transform.

    Args:
        signal: int16 [n], samples at 8 kHz, with 2^15 for amplitude 1.

    Returns:
        uint8 [1 + (n - 256) // 128, 32, 1]: (dB + 110) / 0.5, rounded, from 0 to 255.
    """
    frames = np.lib.stride_tricks.sliding_window_view(signal / 2.0**15, WINDOW)[::HOP]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(frames * window)) ** 2 / (window.sum() / 2) ** 2
    decibel = 10 * np.log10(np.maximum(power @ mel_bands().T, 1e-30))
    return np.clip(np.round((decibel - FLOOR) / STEP), 0, 255).astype(np.uint8)[..., None]


def mel_bands() -> np.ndarray:
    """The height of every band at the frequency of every bin: float64 [32, 129]."""
    low, high = 2595 * np.log10(1 + np.array([LOW, HIGH]) / 700)
    edges = 700 * (10 ** (np.linspace(low, high, BANDS + 2) / 2595) - 1)
    f = np.fft.rfftfreq(WINDOW, 1 / RATE)
    left, middle, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return np.maximum(0, np.minimum((f - left) / (middle - left), (right - f) / (right - middle)))
