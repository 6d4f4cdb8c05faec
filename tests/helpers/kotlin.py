"""Compiles the Kotlin class on top of the core, with the real compiler from npm, and runs it on the JVM."""

import fcntl
import shutil
import subprocess
from pathlib import Path

from helpers.litert import CACHE
from helpers.native import CORE, build

COMPILER = "kotlin-compiler@2.4.20"


def _java_home() -> Path | None:
    found = shutil.which("javac")
    return Path(found).resolve().parents[1] if found else None


def missing() -> str | None:
    """What this machine lacks, as a reason to skip."""
    home = _java_home()
    if shutil.which("npm") is None or home is None or not (home / "include" / "jni.h").exists():
        return "there is no npm, or no JDK with jni.h"
    return None


def command(*arguments) -> list[str]:
    """Compiles Client.kt and Vectors.kt, once for each state of the sources: the command that runs them."""
    libraries = build("-jni", target="jni", JAVA_HOME=str(_java_home()))
    compiler, folder = _compiler(), libraries / "classes"
    with open(libraries / "classes.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "compiled").exists():
            sources = [CORE / "kotlin" / "tfpfl" / "Client.kt", CORE / "tests" / "Vectors.kt"]
            kotlinc = ["bash", compiler / "bin" / "kotlinc", "-Werror", "-d", folder, *sources]
            done = subprocess.run(list(map(str, kotlinc)), capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            (folder / "compiled").touch()
    classes = f"{folder}:{compiler / 'lib' / 'kotlin-stdlib.jar'}"
    options = ["-Xcheck:jni", f"-Djava.library.path={libraries}", "-cp", classes]
    return ["java", *options, "VectorsKt", *map(str, arguments)]


def _compiler() -> Path:
    root = CACHE / "kotlin"
    folder, done = root / "node_modules" / "kotlin-compiler", root / "installed"
    root.mkdir(parents=True, exist_ok=True)
    with open(f"{root}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            subprocess.run(["npm", "install", "--silent", "--prefix", str(root), COMPILER], check=True, cwd=root)
            done.touch()
    return folder
