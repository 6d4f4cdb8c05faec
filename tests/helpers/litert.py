"""Environments with a version of ai-edge-litert and NumPy, and nothing else: made once with uv or pip, and kept.

LiteRT and the pinned TensorFlow do not share an environment. TFPFL_LITERT names the versions, such as "1.4.0 2.3.0";
'newest' takes what the index has. They are kept in TFPFL_CACHE (by default ~/.cache/tfpfl).
"""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

VERSIONS = os.environ.get("TFPFL_LITERT", "").split()
CACHE = Path(os.environ.get("TFPFL_CACHE") or Path.home() / ".cache" / "tfpfl")


def versions(*others: str) -> list[str]:
    """The versions that TFPFL_LITERT names, and those of `others` whose environment is there already."""
    return [*VERSIONS, *(v for v in others if v not in VERSIONS and (_folder(v) / "installed").exists())]


def with_library(last: bool = False) -> list:
    """Parameters for a test: the versions of TFPFL_LITERT that have a C library, or the last of them only.

    Where it names none, the test is skipped, and says why.
    """
    found = [version for version in VERSIONS if not version.startswith("1.")]
    why = "no LiteRT with a C library is asked for (set TFPFL_LITERT)"
    return found[-1:] if found and last else found or [pytest.param("none", marks=pytest.mark.skip(why))]


def _folder(version, *others):
    return CACHE / "-".join(("litert", version, *others, f"py{sys.version_info.major}.{sys.version_info.minor}"))


def environment(version: str, *others: str) -> Path:
    """The Python of an environment with this version of ai-edge-litert, and `others`, names of packages."""
    folder = _folder(version, *others)
    python, done = folder / "bin" / "python", folder / "installed"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            for command in _commands(folder, python, version, others):
                subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
            done.touch()  # last: an installation that broke off is made again
    return python


def _commands(folder, python, version, others):
    package = "ai-edge-litert" if version == "newest" else f"ai-edge-litert=={version}"
    if shutil.which("uv"):
        yield ["uv", "venv", "--quiet", "--no-project", "--python", sys.executable, str(folder)]
        yield ["uv", "pip", "install", "--quiet", "--python", str(python), package, "numpy", *others]
    else:
        yield [sys.executable, "-m", "venv", str(folder)]
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        yield [*command, package, "numpy", *others]


def shared_library(version: str) -> Path | None:
    """LiteRT's C library in the environment of this version; None: it has none, since only 2.0 and newer bring it."""
    folder = environment(version).parents[1]
    return next(folder.glob("lib/python3*/site-packages/ai_edge_litert/libLiteRt.*"), None)


def present_libraries() -> dict[str, Path]:
    """LiteRT's C libraries by version: those that TFPFL_LITERT names, else those that are in the cache already."""
    if VERSIONS:
        found = {version: shared_library(version) for version in VERSIONS}
        return {version: path for version, path in found.items() if path is not None}
    paths = CACHE.glob("litert-*/lib/python3*/site-packages/ai_edge_litert/libLiteRt.*")
    return {path.parents[4].name.split("-")[1]: path for path in sorted(paths)}
