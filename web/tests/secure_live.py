"""Secure rounds for the page's tests: browsers, processes in C and devices in Python, and one that drops out.

python web/tests/secure_live.py FIXTURES OUT CLIENT ...   the clients named here are browsers

Two of the others are processes in C. One of them is killed in the last round when the server has its shares, and
started again when that phase is over. (After it, the server would give it more weight, since it comes more rarely.) The
first line that is printed is JSON: the address and the tokens, or why a part is missing.
"""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import litert, native_live  # noqa: E402

ROUNDS, GONE = 3, 3
IN_C = (1, GONE)


def main(fixtures: Path, out: Path, browsers: list[int]) -> None:
    """Serves until the run is over, and writes what came of it, and what a simulation makes of the same arrivals."""
    why = native_live.missing()
    if why is None and not litert.present_libraries():
        why = "there is no C library of LiteRT here: set TFPFL_LITERT to versions from 2.0 on, such as 2.3.0"
    if why is not None:
        print(json.dumps({"missing": why}), flush=True)
        return
    from helpers.live import EXACT, serving
    from live import write_result
    from tflite_export.convert.program import flatten
    from tflite_export.web import PAGE
    from tfpfl.data import Federation
    from tfpfl.live import serve
    from tfpfl.live.page import LivePage
    from tfpfl.live.rules import Rules
    from tfpfl.runs.config import RunConfig
    from tfpfl.runs.run import Run
    from tfpfl.runs.training import Training

    federation = Federation.load(fixtures / "federation")
    how = {"network": "mlp200", "participation": 1.0, "rounds": ROUNDS, "evaluate_every": 0}
    config = RunConfig(hyperparameters=EXACT, federation=str(federation.path), **how)
    with Run.create(config, out / "run", federation) as run:
        shutil.copytree(fixtures / "run" / serve.BUNDLES, out / "run" / serve.BUNDLES)
        ids = run.population.client_ids.tolist()
        rules = Rules(wait_for=len(ids), secure=True, deadline=600, phase=600, awake=1e6)
        devices = Devices(run, out, [i for i in ids if i not in browsers])
        with (
            native_live.Proxy(devices.hook) as proxy,
            serving(run, rules, page=lambda bundles: LivePage(PAGE, bundles[min(bundles)])) as (
                address,
                devices.rounds,
                tokens,
            ),
        ):
            proxy.target = address
            print(json.dumps({"address": address, "tokens": tokens}), flush=True)
            devices.work(address, proxy.address, tokens)
            events = [(what, number, client) for _, _, what, number, client in devices.rounds.book.events()]
            time.sleep(3)  # the browsers hear that it is over
        theta = flatten(run.algorithm.message(run.training().server_state()))
        write_result(out / "live", theta, devices.heads, {"events": events, "said": devices.said})
        came = {t: [c for what, number, c in events if what == "arrived" and number == t] for t in range(1, ROUNDS + 1)}
        training = Training(run.algorithm, run.examples, seed=config.seed, evaluate_every=0)
        clients = run.population.client_ids
        training._arrived = lambda t: (clients[[i in came[t] for i in ids]], clients[:0], {"round": t})
        training.run(ROUNDS)
        heads = dict(zip(ids, training.client_states(ids), strict=True))
        write_result(out / "simulated", flatten(run.algorithm.message(training.server_state())), heads, {})


class Devices:
    """The devices that are no browsers: two processes in C, and threads with TensorFlow's interpreter."""

    def __init__(self, run, out: Path, clients: list[int]):
        self.run, self.out, self.clients = run, out, clients
        self.heads, self.said, self.rounds = {}, {}, None
        self.programs, self.gone, self.process = native_live.live_programs(), threading.Event(), None

    def hook(self, when: str, method: str, path: str, client: int) -> None:
        """Kills the one that drops out before it sends its masked words, and ends the phase without it."""
        if client == GONE and path == f"/v1/secure/{ROUNDS}/masked" and when == "before":
            self.process.kill()
            self.gone.set()
            raise native_live.Lost

    def in_c(self, address: str, client: int, token: str) -> None:
        from helpers.live import examples_of
        from tflite_export.device.head_file import load_head

        libraries = litert.present_libraries()
        state, data = self.out / f"device{client}", self.out / f"data{client}"
        native_live.write_raw(data, examples_of(self.run, client))
        command = [self.programs / "live", address, data, state, libraries[max(libraries)], token]
        self.said[client] = ""
        while True:
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                if client == GONE:
                    self.process = process
                said, error = process.communicate()
            self.said[client] += said
            if process.returncode != -9:
                break
            while self.rounds.view.waiting != {GONE}:
                time.sleep(0.05)
            self.rounds.view = self.rounds.view._replace(deadline=0.0)  # nobody else has anything to send
            while self.rounds.view.kind == "masked":
                time.sleep(0.05)
        if process.returncode != 0:
            raise SystemExit(error)
        shape = self.run.model.num_features, int(self.run.population.info(client).num_classes)
        self.heads[client] = load_head(state / "head.bin", *shape)[:2]

    def in_python(self, address: str, client: int, token: str) -> None:
        import tensorflow as tf

        from helpers.live import examples_of
        from tflite_export.device.live.client import LiveDevice

        given = examples_of(self.run, client), token
        device = LiveDevice(address, self.out / f"device{client}", *given, interpreter=tf.lite.Interpreter)
        device.run()
        self.heads[client] = device.client.head

    def work(self, address: str, through: str, tokens: dict) -> None:
        """All of them, until the run is over; those in C through the proxy."""
        from helpers.live import in_threads

        def one(i):
            self.in_c(through, i, tokens[i]) if i in IN_C else self.in_python(address, i, tokens[i])

        in_threads([lambda i=i: one(i) for i in self.clients], seconds=900)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(i) for i in sys.argv[3:]])
