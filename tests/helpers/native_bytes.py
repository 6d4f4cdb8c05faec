"""Compares all bytes that the client in C writes with those of the Python client on the same version of LiteRT."""

import subprocess
from pathlib import Path

import numpy as np

from helpers import litert

ROOT = Path(__file__).resolve().parents[2]
EXACT = ("examples", "features", "personalized", "committed", "float32", "int8")
PYTHON = """
import sys
import numpy as np
from tflite_export.device.client import DeviceClient
from tflite_export.device.head_file import save_head
bundle, folder = sys.argv[1:]
client = DeviceClient(bundle, static=True)
raw, theta = (np.fromfile(f"{folder}/{name}.bin", "<f4") for name in ("x", "theta"))
classes = client.kind.is_classes
y = np.fromfile(folder + "/y.bin", "<i4" if classes else "<f4")
y = y if classes else y.reshape(-1, client.bundle.num_classes)
trunk = client.bundle.manifest.get("trunk", {"raw_shape": client.bundle.example_shape})
x = client.examples(raw.reshape(len(y), *trunk["raw_shape"]))
x.tofile(folder + "/examples.python")
client.features(x).tofile(folder + "/features.python")
client.predict(x).tofile(folder + "/probabilities.python")
client.personalize(x, y, held_out=None)
save_head(folder + "/personalized.python", client._head)
open(folder + "/float32.python", "wb").write(client.round(theta, x, y).payload)
update = client.round(theta, x, y, payload="int8")
open(folder + "/int8.python", "wb").write(update.payload)
client.commit(update)
save_head(folder + "/committed.python", client._head)
"""


def write_data(folder, x, y, theta) -> None:
    """What device_core/tests/vectors.c reads."""
    for name, array in zip(("x.bin", "y.bin", "theta.bin"), (x, y, theta), strict=True):
        array.tofile(folder / name)


def unlike_python(programs, bundle, version, data, folder) -> list:
    """The names of the files with other bytes; predictions may differ by 1e-5."""
    write_data(folder, *data)
    for command in (
        [programs / "vectors", bundle.folder, litert.shared_library(version), folder],
        [litert.environment(version), "-c", PYTHON, bundle.folder, folder],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
    found, expected = (np.fromfile(folder / f"probabilities.{end}", "<f4") for end in ("bin", "python"))
    unlike = [] if np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max() else ["probabilities"]
    ends = {"float32": "payload", "int8": "payload"}
    return unlike + [
        name
        for name in EXACT
        if (folder / f"{name}.{ends.get(name, 'bin')}").read_bytes() != (folder / f"{name}.python").read_bytes()
    ]
