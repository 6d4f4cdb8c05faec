"""The end of `make demo`: one client of a run becomes a bundle, which is verified and personalizes."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from tflite_export.convert.bundle import export
from tflite_export.device.bench import any_interpreter
from tflite_export.device.client import DeviceClient
from tflite_export.device.head_file import SavedHead, theta_sha256
from tflite_export.device.kinds import Score
from tflite_export.device.layout import HEAD, INEXACT, PROGRAM, THETA
from tflite_export.device.runtime import Bundle
from tflite_export.device.verification import Verification, verify
from tflite_export.rounds import taken
from tfpfl.checks import InvalidArgument, one_line
from tfpfl.data import find_client
from tfpfl.data.population import ClientInfo


class Demonstration(NamedTuple):
    """What was exported, and how it does on the client's test examples."""

    bundle: Bundle
    verification: Verification
    exported: Score  # with the head of the run
    before: Score  # with a head that has seen nothing, as a new client starts
    after: Score  # with that head after so many steps on the device
    steps: int
    bytes: int  # of what an app needs for it: program, theta and head

    def lines(self) -> list[str]:
        """The result in lines of text for the terminal."""
        exact = (c.max_relative for c in self.verification.comparisons if c.file not in INEXACT)
        b, worst = self.bundle, max(exact, default=0.0)
        verdict = "what TensorFlow does" if self.verification.ok else "NOT what TensorFlow does"
        return [
            f"Client {b.manifest['client']} exported to {b.folder}: program, theta and head take {self.bytes:,} bytes",
            f"{self.verification.runtime} computes {verdict} (largest difference {worst:.1e}), builtin operations only",
            f"On its test examples: {_percent(self.exported)} with the run's head; with a new head "
            f"{_percent(self.before)}, after {self.steps} steps on the device {_percent(self.after)}",
        ]


def demonstrate(run, client: int | str | None, out, steps: int = 20) -> Demonstration:
    """Exports, verifies, and personalizes a new head on the client's training examples.

    Args:
        run: an open `tfpfl.runs.run.Run`, or its folder.
        client: its number or its name; None: the first client of the run.
        out: the folder of the bundle; must not exist.
        steps: of the head, at the run's rate beta.

    Raises:
        InvalidArgument: there is no such client, or it has fewer than 4 training examples or no test example; or as
            `export`.
    """
    if not hasattr(run, "federation"):
        from tfpfl.runs.run import Run

        with Run.open(run, engine="local") as opened:
            return demonstrate(opened, client, out, steps)
    client = int(run.population.client_ids[0]) if client is None else find_client(run.federation, client)
    train, test = (run.examples.arrays(client, split, run.population.labels) for split in ("train", "test"))
    for split, found, least in (("training", len(train[1]), 4), ("test", len(test[1]), 1)):
        if found < least:  # before the export, which takes a while
            raise InvalidArgument(
                f"client {client} ({one_line(run.federation.client_names[client])}) has {found} {split} examples, and "
                f"the demonstration needs {least} or more: take another client"
            )
    bundle, interpreter = export(run, client, Path(out)), any_interpreter()
    verification = verify(bundle, interpreter=interpreter)
    device = DeviceClient(bundle, interpreter=interpreter)
    train, test = ((taken(device, x), y) for x, y in (train, test))
    exported = device.score(*test)
    info = ClientInfo(np.int32(client), np.int32(len(train[1])), np.int32(bundle.num_classes), np.float32(0))
    kernel, bias = map(np.asarray, run.model.head(info))
    device.start_from(SavedHead(kernel, bias, theta_sha256(device.theta)))
    before = device.score(*test)
    device.personalize(*train, steps=steps)
    sizes = [bundle.manifest["files"][name]["bytes"] for name in (PROGRAM, THETA, HEAD)]
    return Demonstration(bundle, verification, exported, before, device.score(*test), steps, sum(sizes))


def _percent(score):
    return f"{100 * score.value:.1f} %" if score.name == "accuracy" else f"{score.name} {score.value:.4g}"
