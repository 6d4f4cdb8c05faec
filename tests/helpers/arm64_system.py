"""A JVM for aarch64: Debian's packages, unpacked into the cache for qemu.

`make native-arm64-test` gets it; nothing is installed. The programs in C run in the same folder, with its libraries.
"""

import os
import shutil

from helpers import arm64, debian, kotlin
from helpers.litert import CACHE
from helpers.native import build

SYSTEM = CACHE / "aarch64"
ROOT = SYSTEM / "root"
RELEASE = "bookworm"
PACKAGES = ["openjdk-17-jre-headless", "libc6", "libgcc-s1", "libstdc++6", "zlib1g"]  # without what only screens need


def missing(language: str) -> str | None:
    """What this machine lacks for a language, as a reason to skip."""
    if language == "C":
        return arm64.missing()
    if shutil.which("qemu-aarch64-static") is None:
        return "there is no qemu for aarch64 (qemu-user-static)"
    if not (SYSTEM / "installed").exists():
        return "there is no JVM for aarch64: `make native-arm64-test` gets Debian's, 46 MB"
    return kotlin.missing()


def install() -> None:
    """Fetches Debian's packages for aarch64 by apt, and unpacks them into the cache."""
    if (SYSTEM / "installed").exists():
        return
    for program in ("qemu-aarch64-static", "apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise SystemExit(f"there is no {program} here: without it, only what is compiled for aarch64 can be had")
    shutil.rmtree(SYSTEM, ignore_errors=True)
    environment = debian.own_apt(SYSTEM / "apt", RELEASE, "arm64")
    archives = SYSTEM / "apt" / "archives"
    debian.apt(environment, "update")
    debian.apt(environment, "download", *PACKAGES, cwd=archives)
    ROOT.mkdir()
    debian.unpack(archives, ROOT, ["./usr/share/doc", "./usr/share/man"])
    for link in ROOT.rglob("*"):  # qemu would follow them to this machine's own files
        if link.is_symlink() and os.readlink(link).startswith("/"):
            target = os.path.relpath(f"{ROOT}{os.readlink(link)}", link.parent)
            link.unlink()
            link.symlink_to(target)
    (ROOT / "proc").mkdir()
    (ROOT / "proc" / "cpuinfo").write_text(arm64.CPUINFO)
    shutil.rmtree(SYSTEM / "apt")
    (SYSTEM / "installed").touch()


def command(*words) -> list[str]:
    """The command line with which a program for aarch64 runs here; qemu looks for every file in the folder first."""
    return ["qemu-aarch64-static", "-L", str(ROOT), *map(str, words)]


def jvm(*arguments) -> list[str]:
    """The command that computes the vectors in Kotlin, whose classes are those of this machine."""
    make = {"CC": arm64.compiler(), "AR": arm64.archiver(), "JAVA_HOME": str(kotlin.java_home())}
    libraries = build("-jni-arm64", target="jni", **make)
    java = ROOT / "usr/lib/jvm/java-17-openjdk-arm64/bin/java"
    # Interpreted: machine code that is written while it runs is qemu's weak side. The core is compiled as always.
    how = ["-Xint", "-XX:+UseSerialGC"]
    return command(java, *how, *kotlin.java(libraries, [kotlin.classes()], "VectorsKt", *arguments)[1:])
