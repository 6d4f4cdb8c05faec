"""Environments with Flower, made once and kept, and its processes on the loopback.

A node has Flower and LiteRT, and no TensorFlow. The server has Flower, and TensorFlow from an environment that has the
newest one: with 2.14, Flower's protobuf cannot share an environment.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from helpers.litert import CACHE
from tfpfl.live.demo import processes

ROOT = Path(__file__).resolve().parents[2]
FLOWER = ("flwr>=1.41,<2",)
DEVICE = (*FLOWER, "ai-edge-litert>=1.4,<3", "numpy>=1.26,<3")
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
NEWEST = 2, 16  # TensorFlow with Keras 3; its protobuf is not bound to 3 or 4


class NoEnvironment(Exception):
    """An environment cannot be made here; the message says why."""


def newest_python() -> str:
    """A Python whose TensorFlow can share an environment with Flower: this one, or TFPFL_OTHER_PYTHON."""
    if tuple(map(int, version("tensorflow").split(".")[:2])) >= NEWEST:
        return sys.executable
    other = os.environ.get("TFPFL_OTHER_PYTHON")
    if not other:
        raise NoEnvironment("TFPFL_OTHER_PYTHON names no Python with a newer TensorFlow than 2.14")
    return other


def node_python() -> Path:
    """The Python of an environment with Flower and LiteRT."""
    return _environment(sys.executable, "node", DEVICE)


def server_python() -> Path:
    """The Python of an environment with Flower, and what `newest_python` has."""
    python = newest_python()
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout.strip()
    return _environment(python, f"server-{hashlib.sha256(packages.encode()).hexdigest()[:8]}", FLOWER, packages)


def _environment(python: str, name: str, packages, others: str | None = None) -> Path:
    query = "import sys; print('%d.%d' % sys.version_info[:2])"
    tag = subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout.strip()
    folder = CACHE / f"flower-{name}-py{tag}"
    found, done = folder / "bin" / "python", folder / "installed"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            for command in _commands(folder, python, found, packages):
                made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
                if made.returncode:
                    raise NoEnvironment(f"{' '.join(command[:4])}: {made.stderr.strip()[-300:]}")
            if others:  # it comes after what was installed here, and so does its protobuf
                (folder / "lib" / f"python{tag}" / "site-packages" / "others.pth").write_text(f"{others}\n")
            done.touch()  # last: an installation that broke off is made again
    return found


def _commands(folder, python, found, packages):
    if shutil.which("uv"):
        yield ["uv", "venv", "--quiet", "--no-project", "--python", python, str(folder)]
        yield ["uv", "pip", "install", "--quiet", "--python", str(found), *packages]
    else:
        yield [python, "-m", "venv", str(folder)]
        yield [str(found), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Flower:
    """A SuperLink and its nodes, as processes on the loopback.

    Args:
        folder: for logs and for Flower's own files; made if it does not exist.
        started: the list for its processes.
    """

    def __init__(self, folder: Path, started: list):
        self.folder, self._started = folder, started
        self.nodes: dict[int, subprocess.Popen] = {}
        self.port, home = free_port(), folder / "flwr"
        home.mkdir(parents=True)
        here = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (home / "config.toml").write_text(here)
        options = ["--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        self.superlink = self._start(
            server_python(), "flower-superlink", [*options, "--disable-runtime-dependency-installation"], "superlink"
        )

    def environment(self, python: Path) -> dict:
        """The variables of a process of Flower: its programs are those beside `python`."""
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        home = {"FLWR_HOME": str(self.folder / "flwr"), "PYTHONPATH": str(ROOT), "PATH": path}
        return {**os.environ, **QUIET, **home, "TF_CPP_MIN_LOG_LEVEL": "3"}

    def _start(self, python, program, options, name, **variables):
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [str(python.parent / program), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.environment(python), **variables},
            )
        self._started.append(process)
        return process

    def start_node(self, client: int, data: Path, state: Path, token: str) -> None:
        """Starts the node of a client."""
        options = ["--insecure", "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1"]
        config = ["--node-config", f'data="{data}" state="{state}"']
        options += ["--port", str(free_port()), *config]
        self.nodes[client] = self._start(node_python(), "flower-supernode", options, f"node{client}", TFPFL_TOKEN=token)

    def wait(self, seconds: float = 180.0) -> None:
        """Returns when the SuperLink listens."""
        until = time.monotonic() + seconds
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except OSError:
                assert self.superlink.poll() is None and time.monotonic() < until, self.log("superlink")[-2000:]
                time.sleep(0.2)

    def flwr(self, *arguments) -> dict:
        """What a command of `flwr` says as JSON."""
        self.wait()
        python = server_python()
        command = [str(python.parent / "flwr"), *map(str, arguments), "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment(python), timeout=1800)
        found = json.loads(done.stdout[done.stdout.index("{") :])
        assert found["success"], found
        return found

    def log(self, name: str) -> str:
        """What a process has printed."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""


@contextmanager
def flower(folder: Path):
    """A `Flower` whose processes are ended at the end."""
    with processes() as started:
        yield Flower(folder, started)
