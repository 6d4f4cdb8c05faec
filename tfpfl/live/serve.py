"""Starts a server of live rounds for a run: makes the bundles, the tokens and the server."""

import asyncio
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tflite_export.convert.bundle import export
from tflite_export.convert.personal import device_training
from tflite_export.device.layout import PROGRAM
from tflite_export.device.live.state import write_whole
from tflite_export.device.runtime import Bundle
from tfpfl.live.rounds import LiveRounds, Rules
from tfpfl.live.server import LiveServer
from tfpfl.models import tree
from tfpfl.models.weights import Head

TOKENS = "tokens.json"  # {client's number: its token}, for the operator; only the file's owner can read it
BUNDLES = "bundles"


def bundles_of(run) -> dict[int, Path]:
    """Makes the bundle that the devices of a run start with, for every number of classes: {K: folder}.

    They are kept in the run folder. Their theta and head are the initial ones of the first client with K classes; a
    device gets its own initial head, and the theta of the round.

    Args:
        run: an open `tfpfl.runs.run.Run`.
    """
    found: dict[int, Path] = {}
    root = run.folder / BUNDLES
    root.mkdir(exist_ok=True)
    for client, k in zip(run.population.client_ids.tolist(), run.population.num_classes.tolist(), strict=True):
        if k in found:
            continue
        found[k] = root / f"k{k}"
        if not found[k].exists():
            head = Head(*tree.arrays(run.algorithm.init_client(run.population.info(client))))
            settings = device_training(run.config, run.population, client)
            export((run.model, run.model.initial_theta, head), out=found[k], training=settings, inference=False)
    return found


def programs_of(bundles: dict[int, Path]) -> dict[int, str]:
    """{K: sha256 of the program in the bundle}."""
    return {k: Bundle(folder, check=False).manifest["files"][PROGRAM]["sha256"] for k, folder in bundles.items()}


def write_data(federation, population, client: int, folder: Path) -> None:
    """Writes one client's examples as a device reads them: train.npz, validation.npz and test.npz, and about.json.

    Args:
        federation: the data, as the run's model takes them (`run.examples`).
        population: says which labels are read.
        client: the client's id.
        folder: the folder to make, or that is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation", "test"):
        x, y = federation.arrays(client, split, population.labels)
        if len(y):
            np.savez(folder / f"{split}.npz", x=x, y=y)
    about = {"classes": int(population.info(client).num_classes)}
    (folder / "about.json").write_text(json.dumps(about) + "\n", encoding="utf-8")


def write_tokens(run, book) -> dict[int, str]:
    """Makes a token for each client that has none, and writes all of them beside the run: {client: token}."""
    path = run.folder / TOKENS
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    made = book.new_tokens(run.population.client_ids.tolist())
    tokens = {int(i): token for i, token in known.items()} | made
    if made:
        text = json.dumps({str(i): tokens[i] for i in sorted(tokens)}, indent=2) + "\n"
        write_whole(path, text.encode(), 0o600)
    return tokens


def serve(
    run,
    rules: Rules | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8443,
    tls: tuple[Path, Path] | None = None,
    on_start: Callable[[str], None] | None = None,
) -> None:
    """Serves a run until its last round is saved.

    Args:
        run: an open `tfpfl.runs.run.Run` of PFLEGO; its rounds so far are continued.
        rules: how rounds are run; default: `Rules()`.
        host, port, tls, on_start: see `LiveServer.run`.

    Raises:
        InvalidArgument: devices cannot take part in this run, or the server cannot listen there.
        BookError: live.sqlite of the run folder cannot be used.
    """
    bundles = bundles_of(run)
    rounds = LiveRounds(run, rules or Rules(), time.time())
    try:
        write_tokens(run, rounds.book)
        rounds.refresh()
        rounds.programs = programs_of(bundles)

        few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every poll that waits is a file

        async def main():
            await LiveServer(rounds, bundles).run(host, port, tls, on_start)

        try:
            asyncio.run(main())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
        run.write_summary()
    finally:
        rounds.close()
