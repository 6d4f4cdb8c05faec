"""Compiles the Kotlin class on top of the core, with the real compiler from npm, and runs it on the JVM."""

import fcntl
import shutil
import subprocess
from pathlib import Path

from helpers.litert import CACHE
from helpers.native import CORE, build

COMPILER = "kotlin-compiler@2.4.20"


def java_home() -> Path | None:
    """The folder of the JDK whose compiler is in PATH."""
    found = shutil.which("javac")
    return Path(found).resolve().parents[1] if found else None


def missing() -> str | None:
    """What this machine lacks, as a reason to skip."""
    home = java_home()
    if shutil.which("npm") is None or home is None or not (home / "include" / "jni.h").exists():
        return "there is no npm, or no JDK with jni.h"
    return None


def command(*arguments) -> list[str]:
    """The command that computes the vectors on this machine's JVM."""
    return java(_libraries(), [classes()], "VectorsKt", *arguments)


def _libraries() -> Path:
    return build("-jni", target="jni", JAVA_HOME=str(java_home()))


def classes() -> Path:
    """Compiles Client.kt and Vectors.kt, once for each state of the sources: their folder."""
    folder = _libraries() / "classes"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "compiled").exists():
            compiled(folder, CORE / "kotlin" / "tfpfl" / "Client.kt", CORE / "tests" / "Vectors.kt")
            (folder / "compiled").touch()
    return folder


def compiled(folder: Path, *sources: Path, classpath=()) -> None:
    """Compiles sources in Kotlin and Java, which may use each other, into `folder`. Warnings of Kotlin are errors."""
    folder.mkdir(exist_ok=True)
    path = ":".join(map(str, [*classpath, folder, _compiler() / "lib" / "kotlin-stdlib.jar"]))
    commands = [["bash", _compiler() / "bin" / "kotlinc", "-Werror", "-cp", path, "-d", folder, *sources]]
    in_java = [source for source in sources if source.suffix == ".java"]
    commands += [["javac", "-cp", path, "-d", folder, *in_java]] if in_java else []
    for command in commands:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def java(libraries: Path, classpath, main: str, *arguments) -> list[str]:
    """The command that runs a compiled program with `libraries`, and with the JVM's checks of JNI."""
    path = ":".join(map(str, [*classpath, _compiler() / "lib" / "kotlin-stdlib.jar"]))
    return ["java", "-Xcheck:jni", f"-Djava.library.path={libraries}", "-cp", path, main, *map(str, arguments)]


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
