"""Compares all bytes that the client in C writes with those of the Python client on the same version of LiteRT, and
with those of the Kotlin class on the JVM."""

import subprocess
from pathlib import Path

import numpy as np

from helpers import kotlin, litert
from tflite_export.device.head_file import load_head

ROOT = Path(__file__).resolve().parents[2]
EXACT = ("examples", "features", "personalized", "committed", "float32", "int8")
PYTHON = """
import sys
import numpy as np
from tflite_export.device.client import DeviceClient
from tflite_export.device.head_file import save_head
bundle, folder = sys.argv[1:]
client = DeviceClient(bundle, static=True)
raw, theta = np.fromfile(folder + "/x.bin", client.bundle.example_dtype), np.fromfile(folder + "/theta.bin", "<f4")
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


BYTES = ["examples.bin", "features.bin", "probabilities.bin", "float32.payload", "int8.payload"]
BYTES += ["personalized.bin", "committed.bin"]


def unlike_on_the_jvm(programs, bundle, version, data, folder, wrong) -> list:
    """The names of the files that the Kotlin class writes with other bytes; and what it refuses in other words.

    `wrong` is what is said of wrong labels or targets.
    """
    library, c, jvm = litert.shared_library(version), folder / "c", folder / "jvm"
    for place, command in (
        (c, [programs / "vectors", bundle.folder, library, c]),
        (jvm, kotlin.command(bundle.folder, library, jvm)),
    ):
        place.mkdir()
        write_data(place, *data)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "WARNING in native method" not in done.stdout, done.stdout + done.stderr
    named = load_head(jvm / "named.bin", bundle.num_features, bundle.num_classes)
    unlike = [] if named.labels == tuple(f"\U0001f600{i}" for i in range(bundle.num_classes)) else ["named.bin"]
    unlike += [name for name in BYTES if (c / name).read_bytes() != (jvm / name).read_bytes()]
    refused = [  # by Vectors.kt
        "1 /nowhere/\U0001f600 is not a bundle: it has no manifest.json",
        "1 LiteRT cannot be loaded: ",
        "2 the classes have changed since the round: its head is of no use any more",
        f"1 examples must be {bundle.example_dtype} ['N', ",
        wrong,
        "1 the held-out part must lie in (0, 1), found 2.0",
        "1 there are no examples",
        "1 theta must be float32 [",
        "1 unknown payload 'int4': one of float32, int8",
        "1 theta holds NaN or infinity: nothing was changed",
    ]
    lines = (jvm / "refused.txt").read_text(encoding="utf-8").split("\n")
    return unlike + [line for line, start in zip(lines, refused, strict=True) if not line.startswith(start)]
