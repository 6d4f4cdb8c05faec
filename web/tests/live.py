"""Live rounds for the page's tests: what a simulation computes, a server with devices, and signatures.

python web/tests/live.py serve FIXTURES OUT CLIENT ...   a server; the clients named here are browsers, others devices
python web/tests/live.py verify < requests.json          which of the signatures are right
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import litert  # noqa: E402

ROUNDS = 10


def simulate(folder: Path) -> None:
    """Writes to `folder`: a run of ten phones with its bundles, their data, and what a simulation makes of the run."""
    from safetensors.numpy import save_file

    from helpers import phones
    from helpers.live import EXACT
    from tflite_export.convert.program import flatten
    from tfpfl.data.cohorts import cohort
    from tfpfl.live.serve import bundles_of, write_data
    from tfpfl.runs.config import RunConfig
    from tfpfl.runs.run import Run
    from tfpfl.runs.training import Training

    federation = phones.federation(folder / "federation")
    config = RunConfig(
        hyperparameters=EXACT,
        federation=str(federation.path),
        network="mlp200",
        participation=0.5,
        rounds=ROUNDS,
        evaluate_every=2,
    )
    with Run.create(config, folder / "run", federation) as run:
        bundles_of(run, browser=True)
        ids = run.population.client_ids.tolist()
        for client in ids:
            write_data(run.examples, run.population, client, folder / "data" / str(client))
        x, y = run.examples.arrays(ids[-1], "train", run.population.labels)
        np.savez_compressed(folder / "small.npz", x=x, y=y.astype(np.uint8))
        save_file({"x": np.ascontiguousarray(x), "y": y.astype(np.int32)}, folder / "small.safetensors")
        training = Training(run.algorithm, run.examples, seed=config.seed, evaluate_every=2)
        training.run(ROUNDS)
        heads = dict(zip(ids, training.client_states(ids), strict=True))
        theta = flatten(run.algorithm.message(training.server_state()))
        about = {
            "cohorts": [cohort(config.seed, t, run.population).tolist() for t in range(1, ROUNDS + 1)],
            "scores": _scores(training.store),
        }
    write_result(folder / "simulated", theta, heads, about)


def write_result(path: Path, theta, heads: dict, about: dict) -> None:
    """Writes theta and heads to `path`.safetensors, and the rest to `path`.json."""
    from safetensors.numpy import save_file

    arrays = {"theta": theta}
    for client, (kernel, bias) in heads.items():
        arrays |= {f"{client}.kernel": np.asarray(kernel), f"{client}.bias": np.asarray(bias)}
    save_file(
        {name: np.ascontiguousarray(a, np.float32) for name, a in arrays.items()}, path.with_suffix(".safetensors")
    )
    path.with_suffix(".json").write_text(json.dumps(about))


def _scores(store) -> dict:
    return {
        f"{e.round_num} {e.client_id} {e.model} {e.split}": [e.num_examples, e.score, e.loss]
        for e in store.evaluations()
        if e.num_examples
    }


def serve(fixtures: Path, out: Path, browsers: list[int]) -> None:
    """Serves a copy of the run until it is over; prints the address and tokens, and writes what came of it."""
    from helpers.live import serving
    from tflite_export.convert.program import flatten
    from tflite_export.web import PAGE
    from tfpfl.live.page import LivePage
    from tfpfl.live.rules import Rules
    from tfpfl.runs.run import Run

    shutil.copytree(fixtures / "run", out / "run")
    with Run.open(out / "run") as run:
        ids = run.population.client_ids.tolist()
        rules = Rules(wait_for=len(ids), deadline=1000, awake=1e6)
        with serving(run, rules, page=lambda bundles: LivePage(PAGE, bundles[min(bundles)])) as (
            address,
            rounds,
            tokens,
        ):
            print(json.dumps({"address": address, "tokens": tokens}), flush=True)

            others = [i for i in ids if i not in browsers]
            heads = (_processes if litert.VERSIONS else _threads)(run, address, fixtures, tokens, others)
            events = [(what, number, client) for _, _, what, number, client in rounds.book.events()]
            time.sleep(3)  # the browsers hear that it is over
        theta = flatten(run.algorithm.message(run.training().server_state()))
        write_result(out / "live", theta, heads, {"events": events, "scores": _scores(run.store)})


def _processes(run, address: str, fixtures: Path, tokens: dict, clients: list[int]) -> dict:
    """{client: head} of devices that are processes with LiteRT, without TensorFlow; returns when the run is over."""
    from tflite_export.device.head_file import load_head
    from tfpfl.live.demo import processes, start_device

    python = str(litert.environment(litert.VERSIONS[-1], "cryptography", "urllib3"))
    os.environ["PYTHONPATH"] = str(ROOT)
    shutil.copytree(fixtures / "data", run.folder / "data")
    heads = {}
    with processes() as started:
        started += [start_device(address, i, run.folder, python) for i in clients]
        for i, process in zip(clients, started, strict=True):
            if process.wait(600) != 0:
                raise SystemExit((run.folder / "devices" / f"{i}.log").read_text())
            shape = run.model.num_features, int(run.population.info(i).num_classes)
            heads[i] = load_head(run.folder / "devices" / str(i) / "head.bin", *shape)[:2]
    return heads


def _threads(run, address: str, fixtures: Path, tokens: dict, clients: list[int]) -> dict:
    """The same where there is no LiteRT: the devices are threads of this process, with TensorFlow's interpreter."""
    import tensorflow as tf

    from helpers.live import examples_of, in_threads
    from tflite_export.device.live.client import LiveDevice

    devices = {}

    def work(i):
        folder, how = run.folder / "devices" / str(i), {"interpreter": tf.lite.Interpreter}
        devices[i] = LiveDevice(address, folder, examples_of(run, i), tokens[i], **how)
        devices[i].run()

    in_threads([lambda i=i: work(i) for i in clients], seconds=600)
    return {i: device.client.head for i, device in devices.items()}


def verify() -> None:
    """Prints for each request from the standard input whether its signature is right."""
    from tflite_export.device.live import wire

    right = []
    for request in json.load(sys.stdin):
        stamp = wire.Stamp(*(request["headers"][name] for name in (wire.CLIENT, wire.TIME, wire.NONCE, wire.SIGNATURE)))
        try:
            wire.PublicKey(request["key"]).check(stamp, request["method"], request["target"], request["sha256"])
            right.append(True)
        except wire.WireError:
            right.append(False)
    print(json.dumps(right))


if __name__ == "__main__":
    if sys.argv[1] == "verify":
        verify()
    else:
        serve(Path(sys.argv[2]), Path(sys.argv[3]), [int(i) for i in sys.argv[4:]])
