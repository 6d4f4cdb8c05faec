"""A live run on this machine: a server and a few devices, each a process of its own."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from tflite_export.convert.program import flatten
from tflite_export.device.head_file import load_head
from tfpfl.checks import Unavailable, extra
from tfpfl.live.book import Book
from tfpfl.runs.folders import LIVE
from tfpfl.runs.run import Run
from tfpfl.runs.training import Training

try:
    from tfpfl.live.serve import TOKENS, write_data
except ModuleNotFoundError as error:
    raise Unavailable(f"live rounds need the package {error.name}: {extra('live')}") from error

STARTS = 180.0  # seconds in which the server must listen; it makes the bundles first


@contextmanager
def processes() -> Iterator[list]:
    """A list for processes; those that still run at the end are ended."""
    started: list[subprocess.Popen] = []
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def start_server(folder: Path, log: Path, *options: str, port: int = 0, python: str = sys.executable):
    """Starts `tfpfl serve` as a process: (process, address).

    Args:
        folder: the run folder.
        log: the file for what it prints.
        options: of the command.
        port: 0: any.
        python: the interpreter.

    Raises:
        Unavailable: it did not start; the message has what it printed last.
    """
    command = [python, "-m", "tfpfl", "serve", str(folder), "--port", str(port), *options]
    process = _start(command, log)
    until = time.monotonic() + STARTS
    while time.monotonic() < until and process.poll() is None:
        if found := re.search(r"Listening on (\S+);", log.read_text(encoding="utf-8", errors="replace")):
            return process, found[1]
        time.sleep(0.05)
    process.kill()
    raise Unavailable(f"the server did not start: {_last_line(log)} (its log is {log})")


def start_device(address: str, client: int, folder: Path, python: str = sys.executable) -> subprocess.Popen:
    """Starts a device as a process.

    Args:
        address: the server's.
        client: the client's id; its examples are in folder/data/CLIENT, and its state in folder/devices/CLIENT.
        folder: the run folder.
        python: the interpreter; it needs NumPy, cryptography, urllib3 and ai-edge-litert or TensorFlow.
    """
    token = json.loads((folder / TOKENS).read_text(encoding="utf-8"))[str(client)]
    log, state = folder / "devices" / f"{client}.log", folder / "devices" / str(client)
    log.parent.mkdir(exist_ok=True)
    command = [python, "-m", "tflite_export.device", address, "--data", str(folder / "data" / str(client))]
    return _start([*command, "--state", str(state)], log, TFPFL_TOKEN=token)


def _start(command: list[str], log: Path, **environment: str) -> subprocess.Popen:
    file: IO[bytes]
    with open(log, "ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**os.environ, **environment}
        )


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def write_all_data(folder: Path) -> list[int]:
    """Writes all clients' examples of a run to folder/data/CLIENT, for `start_device`. Returns the clients' ids."""
    with Run.open(folder) as run:
        ids = run.population.client_ids.tolist()
        for client in ids:
            write_data(run.federation, run.population, client, folder / "data" / str(client))
    return ids


def events_of(folder: Path) -> list[tuple]:
    """All that happened in a live run that nobody serves now, as `Book.events` gives it."""
    with Run.open(folder) as run:
        book = Book(folder / LIVE, run.config.run_id)
    try:
        return book.events()
    finally:
        book.close()


def run_live(folder: Path, *options: str, port: int = 0) -> None:
    """Runs a run's rounds with a server and one process for each client, until the last round is saved.

    Args:
        folder: a run folder whose run is closed.
        options: of `tfpfl serve`.
        port: 0: any.

    Raises:
        Unavailable: the server or a device ended with an error; the message names its log.
    """
    ids = write_all_data(folder)
    with processes() as started:
        server, address = start_server(folder, folder / "server.log", *options, port=port)
        started.append(server)
        devices = {client: start_device(address, client, folder) for client in ids}
        started += devices.values()
        for client, process in devices.items():
            if process.wait() != 0:
                log = folder / "devices" / f"{client}.log"
                raise Unavailable(f"device {client} ended: {_last_line(log)} (its log is {log})")
        if server.wait(60) != 0:
            raise Unavailable(f"the server ended: {_last_line(folder / 'server.log')}")


class Away(NamedTuple):
    """The largest differences between a live run and the same rounds in one process: of theta and of the heads."""

    theta: float
    heads: float


def away_from_simulation(folder: Path) -> Away:
    """Compares a live run with the same rounds in this process.

    Args:
        folder: the run folder; the states of its devices are in folder/devices/CLIENT, as `start_device` puts them.
    """
    with Run.open(folder) as run:
        ids = run.population.client_ids.tolist()
        live = flatten(run.algorithm.message(run.training().server_state()))
        training = Training(run.algorithm, run.examples, seed=run.config.seed, evaluate_every=0, splits=())
        training.run(run.store.round_num)
        theta = np.abs(live - flatten(run.algorithm.message(training.server_state()))).max()
        heads = []
        for client, state in zip(ids, training.client_states(ids), strict=True):
            found = load_head(folder / "devices" / str(client) / "head.bin", *state.kernel.shape)
            heads += [np.abs(found.kernel - state.kernel).max(), np.abs(found.bias - state.bias).max()]
        return Away(float(theta), float(max(heads)))
