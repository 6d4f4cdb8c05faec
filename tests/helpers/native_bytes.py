"""Compares all bytes that the client in C writes with those of the Python client on the same version of LiteRT, and
with those of the Kotlin class on the JVM; and its numbers with those of another processor."""

import subprocess
from pathlib import Path

import numpy as np

from helpers import arm64, arm64_system, kotlin, litert
from helpers.truth import relative
from tflite_export.device.head_file import load_head
from tflite_export.device.payload import decode

ROOT = Path(__file__).resolve().parents[2]
EXACT = ("examples", "features", "personalized", "committed", "float32", "int8")
PYTHON = """
import pathlib, shutil, sys
import numpy as np
from tflite_export.device.client import DeviceClient
from tflite_export.device.head_file import save_head
bundle, folder, *trunk = sys.argv[1:]
state = pathlib.Path(folder, "head.python")
def keep(name):
    to = pathlib.Path(folder, name)
    shutil.copy(state, to) if state.exists() else save_head(to, client._head)
client = DeviceClient(bundle, state, static=True, trunk=trunk[0] if trunk else None)
raw, theta = np.fromfile(folder + "/x.bin", client.bundle.example_dtype), np.fromfile(folder + "/theta.bin", "<f4")
classes = client.kind.is_classes
y = np.fromfile(folder + "/y.bin", "<i4" if classes else "<f4")
y = y if classes else y.reshape(-1, client.bundle.num_classes)
about = client.bundle.manifest.get("trunk", {"raw_shape": client.bundle.example_shape})
x = client.examples(raw.reshape(len(y), *about["raw_shape"]))
x.tofile(folder + "/examples.python")
client.features(x).tofile(folder + "/features.python")
client.predict(x).tofile(folder + "/probabilities.python")
client.personalize(x, y, held_out=None)
keep("personalized.python")
open(folder + "/float32.python", "wb").write(client.round(theta, x, y).payload)
update = client.round(theta, x, y, payload="int8")
open(folder + "/int8.python", "wb").write(update.payload)
client.commit(update)
keep("committed.python")
"""


def write_data(folder, x, y, theta) -> None:
    """What device_core/tests/vectors.c reads."""
    for name, array in zip(("x.bin", "y.bin", "theta.bin"), (x, y, theta), strict=True):
        array.tofile(folder / name)


def unlike_python(programs, bundle, version, data, folder, *trunk) -> list:
    """The names of the files with other bytes, with any file of the trunk; predictions may differ by 1e-5."""
    write_data(folder, *data)
    for command in (
        [programs / "vectors", bundle.folder, litert.shared_library(version), folder, *trunk],
        [litert.environment(version), "-c", PYTHON, bundle.folder, folder, *trunk],
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
    of_fit = "steps must be at least 0 and beta from 0 to 3.4e+38, found"
    refused = [  # by Vectors.kt
        "1 /nowhere/\U0001f600 is not a bundle: it has no manifest.json",
        "1 LiteRT cannot be loaded: ",
        "2 the classes have changed since the round: its head is of no use any more",
        *3 * [f"1 examples must be {bundle.example_dtype} ['N', "],
        wrong,
        "1 the held-out part must lie in (0, 1), found 2.0",
        f"1 {of_fit} steps=-2147483648, beta=",
        f"1 {of_fit} steps={bundle.manifest['training']['tau'] - 1}, beta=nan",
        "1 there are no examples",
        "1 theta must be float32 [",
        "1 unknown payload 'int4': one of float32, int8",
        "1 theta holds NaN or infinity: nothing was changed",
    ]
    lines = (jvm / "refused.txt").read_text(encoding="utf-8").split("\n")
    return unlike + [line for line, start in zip(lines, refused, strict=True) if not line.startswith(start)]


def unlike_on_aarch64(programs, bundle, version, data, folder, language) -> tuple[dict, list]:
    """Computes everything in C or on the JVM for aarch64, under qemu: (far, unlike).

    `far`: the files whose numbers are not those of C on this machine, with their relative errors. `unlike`: the names
    of those whose bytes are not those of C on aarch64.
    """
    here, c, there = folder / "here", folder / "c", folder / "there"
    library = arm64.litert_library(version)
    program = [arm64.programs() / "vectors", bundle.folder, library]
    _computed(here, [programs / "vectors", bundle.folder, litert.shared_library(version), here], data)
    if language == "C":
        _computed(there, arm64.emulated(folder / "root", *program, there), data)
        return _far(bundle, there, here), []
    _computed(c, arm64_system.command(*program, c), data)
    said = _computed(there, arm64_system.jvm(bundle.folder, library, there), data)
    assert "WARNING in native method" not in said, said
    return _far(bundle, there, here), [n for n in BYTES if (there / n).read_bytes() != (c / n).read_bytes()]


def _computed(place, command, data) -> str:
    """What a program printed that computes everything in the folder `place`."""
    place.mkdir()
    write_data(place, *data)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _far(bundle, there, here) -> dict:
    def numbers(path):
        if path.suffix == ".payload":
            return decode(path.read_bytes())
        if path.name in ("personalized.bin", "committed.bin"):
            head = load_head(path, bundle.num_features, bundle.num_classes)
            return np.append(head.kernel, head.bias)
        return np.fromfile(path, bundle.example_dtype if path.name == "examples.bin" else "<f4")

    heads = (load_head(place / "committed.bin", bundle.num_features, bundle.num_classes) for place in (here, there))
    assert len({head.theta_sha256 for head in heads}) == 1
    away = {name: relative(numbers(there / name), numbers(here / name)) for name in BYTES}
    # int8: the next number at most.
    return {name: far for name, far in away.items() if far >= (1 / 127 if name == "int8.payload" else 1e-5)}
