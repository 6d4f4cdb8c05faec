"""Takes part in live rounds from the command line: python -m tflite_export.device URL --data DIR --state DIR

It needs NumPy, ai-edge-litert and cryptography, and no TensorFlow.
"""

import argparse
import json
import os
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tflite_export.device.bench import any_interpreter
from tflite_export.device.errors import InvalidInput
from tflite_export.device.live.client import LiveDevice
from tflite_export.device.live.connection import trusting
from tflite_export.device.live.wire import SPLITS, WireError, entry

_DAMAGED = (zipfile.BadZipFile, zlib.error)


def read_examples(folder: Path) -> dict:
    """A device's examples, for `LiveDevice`.

    Args:
        folder: it has train.npz, and if there are such examples validation.npz and test.npz, each with x, preprocessed
            [N, ...], and y, labels [N] or targets [N, K]; and if there is one about.json with K as 'classes'.

    Raises:
        InvalidInput: train.npz is missing, or a file cannot be read.
    """
    found: dict = {}
    for split in SPLITS:
        path = folder / f"{split}.npz"
        if not path.exists():
            continue
        try:
            with np.load(path) as arrays:
                found[split] = arrays["x"], arrays["y"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, *_DAMAGED) as error:
            raise InvalidInput(f"{path} must be a file of NumPy with the arrays x and y: {error}") from error
        if not (found[split][0].ndim and found[split][1].ndim):
            raise InvalidInput(f"{path} must have arrays of examples, and x or y is a single number")
        if len(found[split][0]) != len(found[split][1]):
            raise InvalidInput(f"{path} has {len(found[split][0])} examples and {len(found[split][1])} labels")
    if "train" not in found:
        raise InvalidInput(f"{folder} has no train.npz: a device needs examples")
    about = folder / "about.json"
    try:
        told = json.loads(about.read_text(encoding="utf-8")) if about.exists() else None
        found["classes"] = None if told is None else entry(told, "classes", int, 1)
    except (ValueError, AttributeError, WireError) as error:
        raise InvalidInput(f'{about} must be JSON such as {{"classes": 3}}: {error}') from error
    return found


def take_part(
    url: str,
    data: Path,
    state: Path,
    token: str | None = None,
    most: int | None = None,
    patience: float = 300.0,
    ca: Path | None = None,
    half: bool = False,
    secure: bool = False,
    device: Callable = LiveDevice,
) -> int:
    """Takes part in live rounds until the run is over, and prints what happens. Returns how many updates counted.

    Args:
        url: the server's address.
        data: see `read_examples`.
        state: where the device keeps its key, bundle and head.
        token: the enrolment token, at the first start; default: $TFPFL_TOKEN.
        most: end after so many updates that counted.
        patience: seconds for which the server may be away.
        ca: the certificate that the server's must be signed by, as PEM; default: those that Python trusts.
        half: ask for theta in half precision.
        secure: send no update that is not masked.
        device: the class of the device.

    Raises:
        InvalidInput: see `LiveDevice`; `most` is less than 1; or the certificate cannot be read.
    """
    if most is not None and most < 1:
        raise InvalidInput(f"--most must be at least 1, found {most}: leave it out, and the device ends with the run")
    opened = device(
        url,
        state,
        read_examples(data),
        token or os.environ.get("TFPFL_TOKEN"),
        interpreter=any_interpreter() if device is LiveDevice else None,
        patience=patience,
        context=None if ca is None else trusting(ca),
        log=lambda text: print(text, flush=True),
        half=half,
        secure=secure,
    )
    counted = opened.run(most)
    print(f"{counted} updates were counted", flush=True)
    return counted


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tflite_export.device", description="Take part in live rounds.")
    parser.add_argument("url", help="the server's address, such as http://127.0.0.1:8443")
    parser.add_argument(
        "--data", type=Path, required=True, help="the folder with train.npz, and test.npz if there is one"
    )
    parser.add_argument("--state", type=Path, required=True, help="where the device keeps its key, bundle and head")
    parser.add_argument("--token", help="the enrolment token, at the first start. Default: $TFPFL_TOKEN")
    parser.add_argument(
        "--most", type=int, help="end after so many updates that counted. Default: when the run is over"
    )
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for which the server may be away (300)")
    parser.add_argument("--ca", type=Path, help="the certificate that the server's must be signed by, as PEM")
    parser.add_argument("--half", action="store_true", help="ask for theta in half precision, for half of the bytes")
    parser.add_argument("--secure", action="store_true", help="send no update that is not masked")
    try:
        take_part(**vars(parser.parse_args(arguments)))
    except (InvalidInput, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
