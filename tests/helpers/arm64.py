"""aarch64 without such a machine: PyPI's ziglang compiles, qemu runs, and LiteRT comes from the wheel for aarch64.

Debian's packages qemu-user-static, libc6-arm64-cross and libstdc++6-arm64-cross have what is needed.
"""

import fcntl
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from helpers.litert import CACHE
from helpers.native import build

LIBRARIES = Path("/usr/aarch64-linux-gnu/lib")
# qemu shows a program the machine's own /proc/cpuinfo, in which XNNPACK finds no ARM processor, and ends the program.
CPUINFO = """processor\t: 0
BogoMIPS\t: 100.00
Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""


def missing() -> str | None:
    """What this machine lacks, as a reason to skip."""
    if shutil.which("qemu-aarch64-static") is None or not (LIBRARIES / "libstdc++.so.6").exists():
        return "there is no qemu for aarch64 (qemu-user-static, libc6-arm64-cross, libstdc++6-arm64-cross)"
    return None


def zig() -> list[str]:
    """The compiler from PyPI, which has the headers of other systems too."""
    folder = CACHE / "ziglang"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "ziglang.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            pip(folder / "bin" / "python", "install", "ziglang")
            (folder / "installed").touch()
    return [str(folder / "bin" / "python"), "-m", "ziglang"]


def compiler() -> str:
    """make's CC."""
    return " ".join([*zig(), "cc -target aarch64-linux-gnu.2.36"])


def archiver() -> str:
    """make's AR."""
    return " ".join([*zig(), "ar"])


def programs() -> Path:
    """The folder with the library and the programs, compiled for aarch64."""
    return build("-arm64", CC=compiler(), AR=archiver())


def litert_library(version: str) -> Path:
    """LiteRT's C library for aarch64."""
    folder = CACHE / f"litert-{version}-aarch64"
    library = folder / "ai_edge_litert" / "libLiteRt.so"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            what = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_27_aarch64"]
            pip(sys.executable, "download", *what, f"--dest={folder}", f"ai-edge-litert=={version}")
            with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
                wheel.extract("ai_edge_litert/libLiteRt.so", folder)
    return library


def pip(python, *arguments) -> None:
    """Runs the pip of an environment."""
    subprocess.run([python, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"], check=True)


def emulated(folder: Path, *command) -> list[str]:
    """The command under qemu, which looks for every file in `folder` first: for libraries, and for /proc/cpuinfo."""
    (folder / "proc").mkdir(parents=True)
    (folder / "proc" / "cpuinfo").write_text(CPUINFO)
    (folder / "lib").symlink_to(LIBRARIES)
    return ["qemu-aarch64-static", "-L", str(folder), *map(str, command)]
