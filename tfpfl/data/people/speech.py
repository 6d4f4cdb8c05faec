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
WORD_RATE = 16_000  # samples a second, and of an example, of `word`
AROUND, QUIET = 320, 1e-3  # samples around which power is averaged; the share of the largest power that is silence
NAME = r"(\d)_([a-z]+)_(\d+)\.wav"


def load_fsdd(path: Path, features: str = "log_mel") -> Source:
    """Reads FSDD with its speakers as natural clients, split by its own rule: recordings 0 to 4 are for test.

    Args:
        path: the folder or archive that has the folder 'recordings' with the files {digit}_{speaker}_{number}.wav.
        features: 'log_mel' for `log_mel` of each recording, uint8 [61, 32, 1]; 'wave' for its first second as it was
            recorded, int32 [8000] with scale 2^-15, for a trunk that has its own features; 'word' for `word` of it,
            int32 [16000] with scale 2^-15, as the trunk `tfpfl.models.speech_embedding` takes it.

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
    if features == "log_mel":
        x = np.stack([log_mel(signal) for signal in signals])
    elif features == "word":
        x = np.stack([np.round(word(signal / 2**15) * 2**15).astype(np.int32) for signal in signals])
    else:
        x = np.stack(signals).astype(np.int32)
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
            content, wanted = file.readframes(LENGTH), 2 * min(file.getnframes(), LENGTH)
    except (wave.Error, EOFError) as error:
        raise InvalidArgument(f"{name} is no WAV file: {error}") from error
    if form != (1, 2, RATE):
        raise InvalidArgument(f"{name} must be mono with 2 bytes a sample at 8000 Hz, found {form}")
    if len(content) != wanted:
        raise InvalidArgument(
            f"{name} is damaged: of the first second it has {len(content)} bytes of sound, and says {wanted}. Get the "
            "file again"
        )
    samples = np.frombuffer(content, "<i2")
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


def word(signal: np.ndarray, rate: int = RATE) -> np.ndarray:
    """A spoken word in the middle of a second of silence: float64 [16000], 16 kHz, with 0.5 as the largest amplitude.

    Where a word begins and ends in a recording says nothing about the word, and a trunk that was trained on words in
    the middle of its window is worse elsewhere. The word lasts from the first to the last sample around which the mean
    power of 20 ms is at least a thousandth (-30 dB) of the largest. A longer word loses its end.

    Args:
        signal: float [n], samples in [-1, 1].
        rate: samples a second; another rate than 16,000 is resampled (`scipy.signal.resample_poly`).

    Raises:
        InvalidArgument: there is no sound in the signal.
    """
    from scipy.signal import resample_poly  # here, because it takes half a second to import

    divisor = int(np.gcd(rate, WORD_RATE))
    signal = np.asarray(resample_poly(np.asarray(signal, np.float64), WORD_RATE // divisor, rate // divisor))
    power = np.convolve(signal**2, np.ones(AROUND) / AROUND, "same")
    loud = np.flatnonzero(power >= QUIET * power.max())
    if not power.any():
        raise InvalidArgument(f"there is no sound in these {len(signal) / WORD_RATE:.2f} s of speech")
    said = signal[loud[0] : loud[-1] + 1][:WORD_RATE]
    before = (WORD_RATE - len(said)) // 2
    return np.pad(said * (0.5 / np.abs(said).max()), (before, WORD_RATE - len(said) - before))


def mel_bands() -> np.ndarray:
    """The height of every band at the frequency of every bin: float64 [32, 129]."""
    low, high = 2595 * np.log10(1 + np.array([LOW, HIGH]) / 700)
    edges = 700 * (10 ** (np.linspace(low, high, BANDS + 2) / 2595) - 1)
    f = np.fft.rfftfreq(WINDOW, 1 / RATE)
    left, middle, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return np.maximum(0, np.minimum((f - left) / (middle - left), (right - f) / (right - middle)))
