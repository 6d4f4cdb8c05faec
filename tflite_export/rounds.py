"""Runs rounds on simulated devices beside one of tfpfl's engines, to check that both compute the same.

Each client of a round runs the exported .tflite file by the reference client, and sends bytes. The server, the clients
of each round and the initial heads are tfpfl's.
"""

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tflite_export.convert.bundle import export
from tflite_export.convert.personal import ExportError, device_training
from tflite_export.convert.program import STATIC_BATCH, flatten, unflatten
from tflite_export.device import payload as payloads
from tflite_export.device.client import CHUNK, DeviceClient
from tflite_export.device.head_file import SavedHead, theta_sha256
from tfpfl.algorithms.contract import ClientOutput
from tfpfl.checks import InvalidArgument, check_whole_number
from tfpfl.data.cohorts import cohort
from tfpfl.data.layout import num_rows
from tfpfl.engines import aggregation
from tfpfl.engines.engine import check_engine
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.scoring import Scorer
from tfpfl.engines.visit import server_step
from tfpfl.models.weights import Head
from tfpfl.runs.training import Training


class RoundComparison(NamedTuple):
    """How much devices and engine differ after a round."""

    round_num: int
    clients: int
    theta: float  # the largest difference of a weight of theta
    heads: float  # the largest difference of a weight of any client's head
    device_score: float  # mean over clients, on test examples; for classes the accuracy
    engine_score: float
    bytes_up: int  # sent by the devices in this round
    moved: float  # how far a weight of theta is from where it was before the first round, in the engine; the largest

    @property
    def largest(self) -> float:
        """The largest difference of any weight; NaN if one is not finite."""
        return float(np.max([self.theta, self.heads]))


class Devices:
    """All clients of a run as devices, and the server.

    Args:
        algorithm: PFLEGO, built for the population.
        config: of the run: algorithm, hyperparameters, seed.
        federation: the data.
        payload: 'float32' or 'int8'.
        chunk, static, interpreter: of the `DeviceClient`s.

    Raises:
        ExportError: devices cannot take part, such as in a run of another method than PFLEGO; or another `chunk` is
            asked for together with `static`.
    """

    def __init__(
        self, algorithm, config, federation, *, payload="float32", chunk=CHUNK, static=False, interpreter=None
    ):
        if static and chunk != STATIC_BATCH:
            raise ExportError(
                f"the program of fixed shapes (static) computes {STATIC_BATCH} examples at a time, and a chunk of "
                f"{chunk} was asked for: leave one of the two out"
            )
        self.algorithm, self.federation, self.payload = algorithm, federation, payload
        self.population, self.model, self.seed = algorithm.population, algorithm.model, config.seed
        self._config = config
        self._settings(int(self.population.client_ids[0]))  # refuses before anything is converted
        self._device = {"chunk": chunk, "static": static, "interpreter": interpreter or tf.lite.Interpreter}
        self._folder = tempfile.TemporaryDirectory()
        self._clients = {}
        self._bundles = {}
        self.server = algorithm.init_server()
        self.round_num = 0
        self.bytes_up = 0
        self._step = server_step(algorithm)

    def client(self, client_id: int) -> DeviceClient:
        """The device of a client; made at its first visit, with the initial head that every engine gives it."""
        if client_id not in self._clients:
            settings = self._settings(client_id)
            initial = self.algorithm.init_client(self.population.info(client_id))
            head = Head(*map(np.asarray, initial))
            k = len(head.bias)
            if k not in self._bundles:  # one program does for all clients; the static one is made for a K
                self._bundles[k] = export(
                    (self.model, self.model.initial_theta, head),
                    out=Path(self._folder.name) / f"k{k}",
                    training=settings,
                    inference=False,
                )
            device = DeviceClient(self._bundles[k], **self._device)
            device.settings = {**settings, "rounds": True}
            device.start_from(SavedHead(*head, theta_sha256(device.theta)))
            self._clients[client_id] = device
        return self._clients[client_id]

    def _settings(self, client_id):
        settings = device_training(self._config, self.population, client_id, self.model)
        if isinstance(settings, str):
            raise ExportError(f"devices cannot take part: {settings}")
        return settings

    def next(self) -> list[int]:
        """Computes one round on the devices. Returns the ids of its clients."""
        self.round_num += 1
        ids = [int(i) for i in cohort(self.seed, self.round_num, self.population)]
        theta = flatten(self.algorithm.message(self.server))
        contributions, updates, self.bytes_up = [], {}, 0
        for client_id in ids:
            x, y = self.federation.arrays(client_id, "train", self.population.labels)
            device = self.client(client_id)
            update = device.round(theta, taken(device, x), y, payload=self.payload)
            self.bytes_up += len(update.payload)
            updates[client_id] = update
            contributions.append(self._contribution(client_id, update))
        if ids:
            total = tf.nest.map_structure(lambda *parts: tf.add_n(parts), *contributions)
            self.server = self._step(self.server, aggregation.finish(self.algorithm, total, ids), total.weight)
        for client_id, update in updates.items():
            self.client(client_id).commit(update)
        return ids

    def _contribution(self, client_id, update):
        """What the server makes of the bytes and N_i: as after a visit in an engine."""
        gradient = payloads.decode(update.payload, self.model.num_backbone_weights)
        alpha = update.num_examples / self.population.num_examples.sum()
        alpha /= self.population.arrival_of(client_id)
        weight = alpha if self.algorithm.aggregate == "sum" else update.num_examples
        gradient = tuple(tf.constant(g) for g in unflatten(gradient, self.model))
        output = ClientOutput(gradient, tf.constant(weight, tf.float32), (), {})
        return aggregation.contribution(self.algorithm, output)

    def score(self) -> float:
        """Mean over clients on their test examples, all heads with the newest theta."""
        theta = flatten(self.algorithm.message(self.server))
        scores = []
        for client_id in map(int, self.population.client_ids):
            x, y = self.federation.arrays(client_id, "test", self.population.labels)
            if num_rows(x):
                device = self.client(client_id)
                device.receive(theta)
                scores.append(device.score(taken(device, x), y).value)
        return float(np.mean(scores)) if scores else float("nan")

    def close(self) -> None:
        """Removes the temporary folder with the bundles."""
        self._folder.cleanup()


def taken(device, x):
    """A federation's examples as a device takes them."""
    return x.astype(device.bundle.example_dtype, copy=False) if isinstance(x, np.ndarray) else device.examples(x)


def rounding(hyperparameters: dict) -> float:
    """The largest difference of a weight that is rounding, in rounds with these hyperparameters of PFLEGO.

    1e-5. Adam and its kin divide a gradient by its own size plus a small number, of Adam 1e-8. So where a gradient is
    nearly 0 and its rounding is 1e-10, as it is where other gradients are 0.01, that moves the weight by rho / 100.
    There a hundredth of rho is rounding, if that is more.
    """
    adaptive = hyperparameters["server_opt"] in ("adam", "adamw", "adagrad", "yogi")
    return max(1e-5, 0.01 * hyperparameters["rho"]) if adaptive else 1e-5


def simulate_round(
    run,
    rounds: int = 5,
    *,
    engine: str = "local",
    payload: str = "float32",
    chunk: int = CHUNK,
    static: bool = False,
    interpreter=None,
    accuracy_every: int = 1,
) -> list[RoundComparison]:
    """Computes the first rounds of a run again, on devices and in an engine, and compares them.

    Args:
        run: an open `tfpfl.runs.run.Run`, for its configuration; nothing of it is changed. Or (algorithm, config,
            federation).
        rounds: number of rounds, from the initial state.
        engine: 'local' or 'tff'.
        payload, chunk, static, interpreter: see `Devices`.
        accuracy_every: score all clients every so many rounds, and after the last; NaN in between.
    """
    if not isinstance(run, tuple) and not hasattr(run, "algorithm"):
        raise InvalidArgument(f"the run must be a tfpfl.Run, which Run.open(folder) opens; found {run!r}")
    check_whole_number(0, rounds=rounds, accuracy_every=accuracy_every)
    algorithm, config, federation = run if isinstance(run, tuple) else (run.algorithm, run.config, run.examples)
    devices = Devices(
        algorithm, config, federation, payload=payload, chunk=chunk, static=static, interpreter=interpreter
    )
    process, evaluation = _process(engine, algorithm, federation), Scorer(algorithm, federation, ("test",))
    visits = Training(algorithm, federation, seed=config.seed).visits
    ids = algorithm.population.client_ids.tolist()
    server = process.initialize()
    start = flatten(algorithm.message(server))
    states = {i: algorithm.init_client(algorithm.population.info(i)) for i in ids}
    found = []
    try:
        for t in range(1, rounds + 1):
            took_part = devices.next()
            if took_part:
                out = process.next(server, [states[i] for i in took_part], visits(t, took_part))
                server, states = out.server, states | dict(zip(took_part, out.client_states, strict=True))
            scored = t == rounds or (accuracy_every and t % accuracy_every == 0)
            theta = flatten(algorithm.message(server))
            heads = [_difference(devices.client(i).head, states[i]) for i in ids]
            scores = evaluation(server, [states[i] for i in ids], visits(t, ids)) if scored else []
            row = RoundComparison(
                round_num=t,
                clients=len(took_part),
                theta=_largest(flatten(algorithm.message(devices.server)) - theta),
                heads=float(np.max(heads)),  # Python's max may leave out a NaN
                device_score=devices.score() if scored else float("nan"),
                engine_score=_mean_score(scores),
                bytes_up=devices.bytes_up,
                moved=_largest(theta - start),
            )
            found.append(row)
    finally:
        devices.close()
    return found


def _process(engine, algorithm, federation):
    if engine == "local":
        return Simulation(algorithm, federation)
    if engine == "tff":
        check_engine(engine)
        from tfpfl.engines.tff.process import federate  # needs TensorFlow Federated

        return federate(algorithm, federation)
    raise ExportError(f"unknown engine {engine!r}: local or tff")


def _difference(head, other):
    return float(np.max([_largest(a - np.asarray(b)) for a, b in zip(head, other, strict=True)]))


def _largest(difference):
    return float(np.abs(difference).max())


def _mean_score(scores):
    scored = [s for s in scores if int(s["test_examples"])]
    each = [float(s["test_score"] if "test_score" in s else s["test_correct"] / s["test_examples"]) for s in scored]
    return float(np.mean(each)) if each else float("nan")
