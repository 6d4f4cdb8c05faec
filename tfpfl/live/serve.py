"""Starts a server of live rounds for a run: makes the bundles, the tokens and the server."""

import asyncio
import hashlib
import json
import operator
import os
import resource
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tflite_export.convert.bundle import export
from tflite_export.convert.personal import device_training, preprocessing_of
from tflite_export.device.arrays import side_by_side
from tflite_export.device.files import write_whole
from tflite_export.device.layout import BROWSER_PROGRAM, PROGRAM
from tflite_export.device.runtime import Bundle, BundleError, write_manifest
from tfpfl.checks import InvalidArgument
from tfpfl.data.layout import is_several
from tfpfl.data.layout import split as parts_of_examples
from tfpfl.data.places import is_places
from tfpfl.data.population import ClientInfo
from tfpfl.live.async_pflego import check_asynchronous
from tfpfl.live.async_rounds import AsyncRounds
from tfpfl.live.page import LivePage, require_page
from tfpfl.live.plan import PLAN, exported_training, plan_of, refusal
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused, Rules
from tfpfl.live.secure_rounds import SecureRounds, check_secure
from tfpfl.live.server import LiveServer
from tfpfl.live.watch import Watch, operator_token
from tfpfl.live.watching import OPERATOR
from tfpfl.models import tree
from tfpfl.models.weights import Head
from tfpfl.runs.folders import LIVE
from tfpfl.runs.training import DivergedError

TOKENS = "tokens.json"  # {client's number: its token}, for the operator; only the file's owner can read it
BUNDLES = "bundles"


def bundles_of(run, browser: bool = False) -> dict[int, Path]:
    """Makes the bundle that the devices of a run start with, for every number of classes: {K: folder}.

    They are kept in the run folder. Their theta and head are the initial ones of the first client with K classes; a
    device gets its own initial head, and the theta of the round.

    Args:
        run: an open `tfpfl.runs.run.Run`.
        browser: whether they need a program for browsers; those that have none get one.

    Raises:
        ExportError: browsers cannot compute this run's rounds.
        InvalidArgument: a bundle that is there is damaged, or devices cannot take part in this run.
    """
    found: dict[int, Path] = {}
    root = run.folder / BUNDLES
    root.mkdir(exist_ok=True)
    for left in root.glob("*.new"):  # by an export that was killed
        shutil.rmtree(left)
    if isinstance(exported_training(run), str):
        return _plans_of(run, root)
    infos = [run.population.info(client) for client in run.population.client_ids.tolist()]
    if is_places(run.federation):  # what can be made before anyone has joined; others are made when one joins
        infos = [infos[0]._replace(num_classes=np.int32(run.federation.num_labels))]
    for info in infos:
        if (k := int(info.num_classes)) not in found:
            found[k] = bundle_for(run, info, browser)
    return found


def bundle_for(run, info: ClientInfo, browser: bool = False) -> Path:
    """The bundle of devices with as many classes as this client; it is made if it is not there.

    Raises:
        InvalidArgument: the one that is there is damaged, so that no device could use it.
    """
    folder = run.folder / BUNDLES / f"k{int(info.num_classes)}"
    if not folder.exists():
        _export(run, info, folder, browser)
        return folder
    try:
        files = Bundle(folder).manifest["files"]
    except BundleError as error:
        raise InvalidArgument(f"{error}. Delete {folder}: the next start makes this bundle again") from error
    if browser and BROWSER_PROGRAM not in files:
        _add_browser_program(run, info, folder)
    return folder


def _plans_of(run, root: Path) -> dict[int, Path]:
    """The bundles of devices that compute with TensorFlow: one, with the plan of the visits alone."""
    if why := refusal(run):
        raise InvalidArgument(f"{run.folder}: devices cannot take part: {why}")
    folder = root / "tf"
    folder.mkdir(exist_ok=True)
    write_whole(folder / PLAN, plan_of(run))
    every = (
        range(1, run.federation.num_labels + 1) if is_places(run.federation) else run.population.num_classes.tolist()
    )
    return dict.fromkeys(every, folder)


def _export(run, info: ClientInfo, out: Path, browser: bool) -> None:
    head = Head(*tree.arrays(run.algorithm.init_client(info)))
    settings = device_training(run.config, run.population, int(info.client_id), run.model)
    source = run.whole, run.model.initial_theta, head
    given: dict[str, Any] = {"training": settings, "preprocessing": preprocessing_of(run.federation)}
    export(source, out=out, inference=False, browser=browser, **given)


def _add_browser_program(run, info: ClientInfo, folder: Path) -> None:
    """Adds it to a bundle, whose other files stay: devices that have joined have them."""
    with tempfile.TemporaryDirectory(".new", dir=folder.parent) as temporary:
        _export(run, info, Path(temporary) / "new", True)
        new, old = Bundle(Path(temporary) / "new").manifest, Bundle(folder).manifest
        os.replace(Path(temporary) / "new" / BROWSER_PROGRAM, folder / BROWSER_PROGRAM)
        files = old["files"] | {BROWSER_PROGRAM: new["files"][BROWSER_PROGRAM]}
        write_manifest(folder, old | {"browser": new["browser"], "files": files})


def maker_of_bundles(run, rounds: LiveRounds, bundles: dict[int, Path], browser: bool = False) -> Callable:
    """Makes (info) -> None, which adds to `bundles` what a client needs that joins a run on places."""

    def make(info: ClientInfo) -> None:
        if (k := int(info.num_classes)) not in bundles:
            try:
                made = {k: bundle_for(run, info, browser)}
            except InvalidArgument as error:
                raise Refused(409, f"no program can be made for {k} classes: {error}") from error
            bundles.update(made)
            rounds.programs |= programs_of(made)

    for client in rounds.enrolled.ids if rounds.enrolled is not None else ():
        make(rounds.info(client))
    return make


def programs_of(bundles: dict[int, Path]) -> dict[int, str]:
    """{K: sha256 of the program in the bundle, or of the plan that devices with TensorFlow have in its place}."""
    if plans := {k: folder / PLAN for k, folder in bundles.items() if (folder / PLAN).exists()}:
        return {k: hashlib.sha256(path.read_bytes()).hexdigest() for k, path in plans.items()}
    return {k: Bundle(folder, check=False).manifest["files"][PROGRAM]["sha256"] for k, folder in bundles.items()}


def write_data(federation, population, client: int, folder: Path) -> None:
    """Writes one client's examples as a device reads them: train.npz, validation.npz and test.npz, and about.json.

    Examples of several arrays are packed into one, float32 [N, D]; see tflite_export/device/arrays.py.

    Args:
        federation: the data, as devices have them (`run.federation`): with a frozen trunk, what the trunk takes.
        population: says which labels are read.
        client: the client's id.
        folder: the folder to make, or that is there; these files in it are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation", "test"):
        x, y = federation.arrays(client, split, population.labels)
        if len(y):
            if is_several(federation.example_shape):
                x = side_by_side(parts_of_examples(x))
            np.savez(folder / f"{split}.npz", x=x, y=y)
        else:  # there may be one of another run, which the device would score
            (folder / f"{split}.npz").unlink(missing_ok=True)
    about = {"classes": int(population.info(client).num_classes)}
    (folder / "about.json").write_text(json.dumps(about) + "\n", encoding="utf-8")


def _clients(run, given: Iterable[int]) -> set[int]:
    """The ids of clients, also where they are NumPy's numbers, which SQLite would take for bytes."""
    listed = list(given)
    try:
        ids = {operator.index(client) for client in listed}
    except TypeError:
        raise InvalidArgument(f"clients are named by their ids, whole numbers; found {listed}") from None
    if unknown := sorted(ids - set(run.population.client_ids.tolist())):
        raise InvalidArgument(f"{run.folder} has no client {', '.join(map(str, unknown))}")
    return ids


def _checked_token(client: str, token: Any) -> str:
    if not (isinstance(token, str) and token.isascii() and token.isprintable() and 1 <= len(token) <= 200):
        raise InvalidArgument(f"the token of client {client} must be a text of 1 to 200 characters of ASCII")
    return token


def write_tokens(run, book, new: Iterable[int] = ()) -> dict[int, str]:
    """Makes a token for each client that has none, and writes all of them beside the run: {client: token}.

    Args:
        run: an open `tfpfl.runs.run.Run`.
        book: the run's `Book`.
        new: clients that get another token, so that the old one is of no use any more: a device has to join with it.

    Raises:
        InvalidArgument: the run has no such client; tokens.json is damaged or has a token twice; or it is missing, and
            devices have joined.
    """
    path, ids = run.folder / TOKENS, run.population.client_ids.tolist()
    new = _clients(run, new)
    anew = "put a copy back; or write {} into it, and all clients get new tokens, without which devices are refused"
    if not path.exists() and any(m.key is not None and not m.revoked for m in book.members().values()):
        raise InvalidArgument(f"{path} is missing, and devices have joined with the tokens in it: {anew}")
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        tokens = {int(i): _checked_token(i, token) for i, token in known.items()}
    except (ValueError, AttributeError) as error:
        raise InvalidArgument(f"{path} is damaged ({error}): {anew}") from error
    owners: dict[str, int] = {}
    for client, token in tokens.items():
        if (other := owners.setdefault(token, client)) != client:
            raise InvalidArgument(f"{path} gives clients {other} and {client} the same token: each needs its own")
    wanted = {i: secrets.token_urlsafe(24) if i in new or i not in tokens else tokens[i] for i in ids}
    if wanted != tokens:  # first the file: a token that only the book knows would be lost
        write_whole(path, (json.dumps({str(i): wanted[i] for i in ids}, indent=2) + "\n").encode(), 0o600)
    book.set_tokens(wanted)
    return wanted


def rounds_of(run, rules: Rules, now: float) -> LiveRounds:
    """The live rounds of a run, as the rules say; see `LiveRounds`, `AsyncRounds` and `SecureRounds`."""
    if rules.secure:
        return SecureRounds(run, rules, now)
    return (LiveRounds if rules.buffer is None else AsyncRounds)(run, rules, now)


def write_end(run, rounds: LiveRounds, end: BaseException) -> None:
    """Writes history.csv and summary.json of rounds that were stopped or diverged: nothing else does for a live run."""
    if run.store.round_num:
        run.stop_reason = str(end) if isinstance(end, DivergedError) else None
        rounds.write_history()
        run.write_summary()


def serve(
    run,
    rules: Rules | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8443,
    tls: tuple[Path, Path] | None = None,
    on_start: Callable[[str], None] | None = None,
    page: Path | None = None,
    new_tokens: Iterable[int] = (),
    revoked: Iterable[int] = (),
) -> None:
    """Serves a run until its last round is saved. Then, or if it is stopped or diverges, its summary is written.

    Args:
        run: an open `tfpfl.runs.run.Run`; its rounds so far are continued.
        rules: how rounds are run; default: `Rules()`.
        host, port, tls, on_start: see `LiveServer.run`.
        page: the folder of the page with which browser tabs join, see `LivePage`; None: no page.
        new_tokens: clients that get another token, see `write_tokens`.
        revoked: clients whose tokens and devices are refused from now on. The open round does not wait for them; what
            they sent before counts.

    Raises:
        InvalidArgument: devices cannot take part in this run, the server cannot listen there, there is no page, or the
            run has no such client.
        DivergedError: theta is not finite after a round. All earlier rounds are saved.
        ExportError: there is a page, and browsers cannot compute this run's rounds.
        BookError: live.sqlite of the run folder cannot be used.
    """
    revoked, new_tokens = sorted(_clients(run, revoked)), _clients(run, new_tokens)
    rules = rules or Rules()
    if rules.secure:  # before bundles are made, which takes a while
        check_secure(run, rules)
    elif rules.buffer is not None:
        check_asynchronous(run)
    if page is not None:
        require_page(page)
        if isinstance(why := exported_training(run), str):
            raise InvalidArgument(f"browsers cannot take part in {run.folder}: {why}")
    bundles = bundles_of(run, browser=page is not None)
    files = None if page is None else LivePage(page, bundles[min(bundles)])
    made = [LIVE, f"{LIVE}-wal", f"{LIVE}-shm", TOKENS, OPERATOR] if not (run.folder / LIVE).exists() else []
    made, listens = [name for name in made if not (run.folder / name).exists()], False
    rounds: LiveRounds | None = None

    def started(address):
        nonlocal listens
        listens = True
        if on_start is not None:
            on_start(address)

    try:
        rounds = rounds_of(run, rules, time.time())
        write_tokens(run, rounds.book, new_tokens)
        for client in revoked:
            rounds.book.revoke(client, time.time())
        rounds.refresh()
        rounds.programs = programs_of(bundles)
        rounds.on_enrolled = maker_of_bundles(run, rounds, bundles, browser=page is not None)
        watch = Watch(rounds, operator_token(run.folder))

        few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every poll that waits is a file

        async def main():
            await LiveServer(rounds, bundles, page=files, watch=watch).run(host, port, tls, started)

        try:
            asyncio.run(main())
        except (KeyboardInterrupt, DivergedError) as end:
            write_end(run, rounds, end)
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
        run.write_summary()
    finally:
        if rounds is not None:
            rounds.close(has_begun=listens)
        if not listens:  # nothing has happened: the run folder is as it was
            for name in made:
                (run.folder / name).unlink(missing_ok=True)
