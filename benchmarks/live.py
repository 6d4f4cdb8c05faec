"""Live rounds under kills, the server's share of a round, and thousands of devices that wait.

    python benchmarks/live.py kills --python PATH [--clients 20] [--tabs 0] [--rounds 40] [--server-kills 10] [--seed 0]
                                    [--secure]
    python benchmarks/live.py share --python PATH [--clients 20] [--rounds 40]
    python benchmarks/live.py idle [--devices 2000] [--invited 20]

PATH is a Python with NumPy, ai-edge-litert, cryptography and urllib3; the server runs in this one. `kills`: the
server is ended by SIGKILL again and again while rounds are computed, and so are 30 % of the devices; all start again.
Theta and all heads are compared with the simulation, and every update is counted in the server's log. `--tabs 3`:
three tabs of Chromium take part, too, one of which is closed and opened again (after `make web`; TFPFL_CHROMIUM names
another than /usr/bin/chromium). `--secure`: the same with secure rounds. `share`: CPU seconds of the server's process
for each round in which all clients take part. `idle`: devices that wait in long polls, from one load generator on the
loopback; the server's memory, and the seconds from the end of one round to the invitation of all members of the next.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import aiohttp
import click
import numpy as np
import psutil

from tflite_export.device.live import wire
from tfpfl import Federation, Run, RunConfig
from tfpfl.live.demo import (
    away_from_simulation,
    events_of,
    processes,
    start_device,
    start_server,
    write_all_data,
)
from tfpfl.live.serve import TOKENS

EXACT = {"rho": 0.01, "beta": 0.05, "rule": "exact", "server_opt": "sgd"}


WEB = Path(__file__).resolve().parents[1] / "web"


def new_run(folder: Path, clients: int, rounds: int, participation: float, seed: int) -> list[int]:
    """Makes a run on digits and the files of its devices. Returns the clients' ids."""
    config = RunConfig(
        hyperparameters=EXACT, dataset="digits", partition_args={"K": 3}, clients=clients, network="mlp200",
        participation=participation, rounds=rounds, seed=seed, evaluate_every=0,
    )  # fmt: skip
    with Run.create(config, folder):
        pass
    return write_all_data(folder)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def last_round(log: Path) -> int:
    """The last round that a device of which this is the log says was counted."""
    return sum("counted" in line and "not" not in line for line in log.read_text().splitlines())


@click.group()
def main():
    """See the module."""


@main.command()
@click.option("--python", required=True)
@click.option("--clients", default=20)
@click.option("--tabs", default=0)
@click.option("--rounds", default=40)
@click.option("--server-kills", default=10)
@click.option("--seed", default=0)
@click.option("--secure", is_flag=True)
def kills(python, clients, tabs, rounds, server_kills, seed, secure):
    """SIGKILL for the server and for 30 % of the devices, while rounds are computed."""
    draw, folder = random.Random(seed), Path(tempfile.mkdtemp()) / "run"
    everyone, port = new_run(folder, clients + tabs, rounds, 0.5, seed), free_port()
    ids, in_tabs = everyone[:clients], everyone[clients:]
    options = ("--wait-for", str(len(everyone)), "--deadline", "600", "--joins", "1000")
    options += ("--web", str(WEB / "dist")) if tabs else ()
    options += ("--secure", "--secure-phase", "600") if secure else ()
    dying = draw.sample(ids, round(0.3 * clients))
    killed = {"server": 0, "devices": 0}
    with processes() as started:
        server, address = start_server(folder, folder / "server.log", *options, port=port)
        devices = {i: start_device(address, i, folder, python) for i in ids}
        started += [server, *devices.values()]
        browser = None
        if tabs:
            command = ["node", WEB / "tests" / "tabs.mjs", address, folder, *in_tabs]
            with open(folder / "tabs.log", "wb") as log:
                browser = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
            started.append(browser)
            while server.poll() is None and not any(map(last_round, (folder / "devices").glob("*.log"))):
                time.sleep(0.2)  # until all have joined, and round 1 is under way
        while server.poll() is None:
            time.sleep(draw.uniform(0.3, 2.0))
            if dying:
                victim = dying[-1]
                log = folder / "devices" / f"{victim}.log"
                if log.exists() and last_round(log):  # it has taken part: it is in the middle of the run
                    os.kill(devices[dying.pop()].pid, signal.SIGKILL)
                    devices[victim].wait()
                    killed["devices"] += 1
                    devices[victim] = start_device(address, victim, folder, python)
                    started.append(devices[victim])
            if killed["server"] < server_kills and server.poll() is None:
                os.kill(server.pid, signal.SIGKILL)
                server.wait()
                killed["server"] += 1
                server, _ = start_server(folder, folder / f"server{killed['server']}.log", *options, port=port)
                started.append(server)
        for process in devices.values():
            process.wait(60)
        if browser is not None and browser.wait(120) != 0:
            raise click.ClickException((folder / "tabs.log").read_text())
    with Run.open(folder) as run:
        done = [row["clients"] for row in run.store.history()]
    arrived = [(t, i) for _, _, what, t, i in events_of(folder) if what == "arrived"]
    away = away_from_simulation(folder)
    print(f"killed: the server {killed['server']} times, devices {killed['devices']} times; in {folder}")
    if tabs:
        print((folder / "tabs.log").read_text().strip())
    print(
        f"{len(done)} rounds, {sum(done)} visits; in the log {len(arrived)}, of which {len(set(arrived))} are different"
    )
    print(f"away from the simulation: theta {away.theta:.1e}, heads {away.heads:.1e}")
    if secure:
        failed = sum(what.startswith("failed") for _, _, what, *_ in events_of(folder))
        print(f"secure rounds, of which {failed} attempts failed")


@main.command()
@click.option("--python", required=True)
@click.option("--clients", default=20)
@click.option("--rounds", type=click.IntRange(7), default=40, help="The first five build graphs.")
def share(python, clients, rounds):
    """CPU seconds of the server for a round of all clients."""
    folder = Path(tempfile.mkdtemp()) / "run"
    ids = new_run(folder, clients, rounds, 1.0, 0)
    with processes() as started:
        server, address = start_server(folder, folder / "server.log", "--wait-for", str(clients), "--joins", "1000")
        devices = [start_device(address, i, folder, python) for i in ids]
        started += [server, *devices]
        process, marks = psutil.Process(server.pid), []
        while server.poll() is None:
            done = last_round(folder / "devices" / f"{ids[0]}.log")
            if done and (not marks or done > marks[-1][0]):
                times = process.cpu_times()
                marks.append((done, times.user, times.system, time.monotonic()))
            time.sleep(0.005)
    first = next(m for m in marks if m[0] >= 5)  # the first rounds build graphs
    user, system, wall = (1000 * (marks[-1][k] - first[k]) / (marks[-1][0] - first[0]) for k in (1, 2, 3))
    parts = f"{user:.0f} its own, {system:.0f} the kernel's"
    print(f"{clients} clients: {user + system:.0f} ms of the server's CPU ({parts}) in a round of {wall:.0f} ms")


@main.command()
@click.option("--devices", default=2000)
@click.option("--invited", default=20)
def idle(devices, invited):
    """Devices that wait: the server's memory, and how long an invitation takes."""
    folder = Path(tempfile.mkdtemp())
    rng = np.random.default_rng(0)
    y = np.array([0, 1, 0, 1], np.int32)
    people = {}
    for i in range(devices):
        x = rng.random((4, 8), np.float32)
        people[f"phone {i}"] = {"train": (x, y), "test": (x[:2], y[:2])}
    Federation.from_clients(people, out=folder / "federation", name="many", validation=0.0)
    config = RunConfig(
        hyperparameters=EXACT, federation=str(folder / "federation"), network="mlp200", rounds=3,
        participation=invited / devices, evaluate_every=0,
    )  # fmt: skip
    with Run.create(config, folder / "run"):
        pass
    with processes() as started:
        options = ("--wait-for", str(devices), "--joins", str(2 * devices), "--deadline", "2")
        server, address = start_server(folder / "run", folder / "server.log", *options)
        started.append(server)
        tokens = json.loads((folder / "run" / TOKENS).read_text())
        process = psutil.Process(server.pid)
        before = process.memory_info().rss
        seconds, waiting = asyncio.run(_wait(address, tokens, invited, lambda: process.memory_info().rss))
    print(f"{devices} devices wait: the server has {before / 1e6:.0f} MB before and {waiting / 1e6:.0f} MB then")
    print(f"the {invited} members of a round knew of it after {seconds:.2f} s")


async def _wait(address, tokens, invited, memory):
    """(seconds until all members of round 1 knew, the server's memory while all wait)."""
    signers = {int(i): wire.Signer() for i in tokens}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session:

        async def join(client):
            about = {"protocol": 1, "token": tokens[str(client)], "examples": 4, "classes": 2}
            body = json.dumps(about | {"key": signers[client].public}).encode()
            async with session.post(f"{address}/v1/join", data=body) as answer:
                assert answer.status == 200, await answer.text()

        async def poll(client):
            while True:
                target = "/v1/work?wait=25"
                headers = signers[client].stamp(client, "GET", target, b"", time.time()).headers()
                async with session.get(address + target, headers=headers) as answer:
                    found = await answer.json()
                    if answer.status == 200 and found["kind"] == wire.VISIT:
                        return time.monotonic()
                    assert answer.status == 200 or "sign" in found["error"], found

        clients = list(signers)
        for client in clients[:-1]:
            await join(client)
        polls = [asyncio.ensure_future(poll(client)) for client in clients]  # the last one has not joined: 401
        polls[-1].cancel()
        await asyncio.sleep(10)
        waiting, began = memory(), time.monotonic()
        await join(clients[-1])  # now the first round opens
        polls[-1] = asyncio.ensure_future(poll(clients[-1]))
        told: set = set()
        while len(told) < invited:
            done, _ = await asyncio.wait(polls, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            told |= done
            polls = [p for p in polls if p not in done]
        seconds = max(p.result() for p in told) - began
        for p in polls:
            p.cancel()
        return seconds, waiting


if __name__ == "__main__":
    sys.exit(main())
