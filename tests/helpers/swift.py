"""Builds the Swift package and programs on top of it with a real compiler, where there is one.

That is the one in PATH, or Debian's, which `make native-swift` keeps in TFPFL_CACHE. Debian has it from its release 13
on; it runs on older ones too, in a root folder of its own with the libraries of that release.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from helpers import debian
from helpers.litert import CACHE
from helpers.native import CORE

RELEASE, PACKAGES = "trixie", ["swiftlang", "libc6-dev", "libstdc++-14-dev"]
TOOLCHAIN = CACHE / "swift"
BIN = "/usr/libexec/swift/bin"  # in the root folder
LEFT_OUT = (
    "./usr/share/doc",
    "./usr/share/man",
    "*/embedded",
    "*lldb*",
    "*sourcekit*",
    "*/clangd",
    "*/docc",
    "*libLTO*",
)
PACKAGE = """// swift-tools-version:5.9
import PackageDescription

let package = Package(
    name: "App",
    dependencies: [.package(path: "{core}")],
    targets: [
        .executableTarget(
            name: "{name}", dependencies: [.product(name: "TfpflDevice", package: "{core_name}")], path: ".")
    ]
)
"""


def missing() -> str | None:
    """What this machine lacks, as a reason to skip."""
    if shutil.which("swift"):
        return None
    if not (TOOLCHAIN / "installed").exists():
        return "there is no Swift compiler: `make native-swift` gets Debian's, 540 MB"
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0:
        return "Debian's Swift needs a file system of its own, and `unshare -rm` is not allowed here"
    return None


def run(*command, folders=(), check=True) -> subprocess.CompletedProcess:
    """Runs a command where the compiler is, and what it has compiled; there it sees `folders`."""
    done = subprocess.run(wrapped(*command, folders=folders), capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def wrapped(*command, folders=()) -> list[str]:
    """The command line with which a program of the toolchain, or one that it has compiled, starts."""
    words = list(map(str, command))
    if shutil.which("swift"):
        return words
    root = shlex.quote(str(TOOLCHAIN / "root"))
    lines = [
        f'mkdir -p {root}"{folder}" && mount --rbind "{folder}" {root}"{folder}"'
        for folder in ("/proc", "/dev", *folders)
    ]
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    enter = f'exec env -i PATH={BIN}:/usr/bin HOME=/tmp LC_ALL=C.UTF-8 {shutil.which("chroot", path=path)} {root} "$@"'
    return [shutil.which("unshare"), "-rm", shutil.which("sh"), "-ec", "\n".join([*lines, enter]), "sh", *words]


def build(folder: Path, source: Path | None = None) -> Path:
    """Builds a program of one file on top of the package, or the package's own example: the program.

    Warnings are errors, and the rules of Swift 6 for threads hold.
    """
    name = "personalize" if source is None else source.stem
    package, scratch = CORE, folder / f"build-{name}"
    scratch.mkdir()
    flags = ["-Xswiftc", "-warnings-as-errors"]
    if source is not None:
        package = folder / name
        package.mkdir()
        shutil.copy(source, package / "main.swift")
        content = PACKAGE.format(core=CORE, core_name=CORE.name, name=name)
        (package / "Package.swift").write_text(content)
    else:
        flags += ["-Xswiftc", "-swift-version", "-Xswiftc", "6"]
    command = ["swift", "build", "--package-path", package, "--scratch-path", scratch, "--product", name, *flags]
    run(*command, folders=(CORE, folder))
    return scratch / "debug" / name


def install() -> None:
    """Fetches Debian's compiler and what it needs by apt, and unpacks it into the cache; nothing is installed."""
    if shutil.which("swift") or (TOOLCHAIN / "installed").exists():
        return
    if shutil.which("apt-get") is None:
        raise SystemExit("there is no apt-get here: install Swift 5.9 or newer, so that `swift` is in PATH")
    shutil.rmtree(TOOLCHAIN, ignore_errors=True)
    environment = debian.own_apt(TOOLCHAIN / "apt", RELEASE)
    debian.apt(environment, "update")
    debian.apt(environment, "install", "--yes", "--download-only", "--no-install-recommends", *PACKAGES)
    root = TOOLCHAIN / "root"
    for place in ("bin", "sbin", "lib", "lib64"):  # as in a system that has merged them with /usr
        (root / "usr" / place).mkdir(parents=True)
        (root / place).symlink_to(f"usr/{place}")
    (root / "tmp").mkdir()
    debian.unpack(TOOLCHAIN / "apt" / "archives", root, LEFT_OUT)
    shutil.rmtree(TOOLCHAIN / "apt")
    (TOOLCHAIN / "installed").touch()
