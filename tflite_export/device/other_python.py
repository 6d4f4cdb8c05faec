"""Runs a module of this folder in another Python, such as one with LiteRT. Needs the standard library only."""

import subprocess
from pathlib import Path

from tflite_export.device.errors import BundleError


def run_with(python, module: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs `main` of a module of this folder in a Python that need not have this package, and keeps what it prints.

    Raises:
        BundleError: the Python cannot be started.
    """
    # The place of this package comes last: beside it may be packages of this Python, which the other one cannot use.
    code = f"import sys; sys.path.append({str(Path(__file__).resolve().parents[2])!r}); "
    code += f"from tflite_export.device.{module} import main; sys.exit(main())"
    try:
        return subprocess.run([str(python), "-c", code, *arguments], capture_output=True, text=True)
    except OSError as error:
        raise BundleError(f"{python} cannot be started: {error.strerror}") from error
