"""Asynchronous rounds by a virtual clock, in this process: the server is the one of the live rounds.

    theta, log = simulate(run, buffer=5, seconds=lambda client, visit: 2.0, steps=100)

`Phones` also computes a log again, see `async_replay`.
"""

from collections.abc import Callable

import numpy as np

from tflite_export.convert.program import flatten
from tflite_export.device import payload as payloads
from tflite_export.device.bench import any_interpreter
from tflite_export.device.client import DeviceClient, Update
from tflite_export.device.head_file import SavedHead, theta_sha256
from tfpfl.live.arrivals import Timed, clocked
from tfpfl.live.async_pflego import check_asynchronous, server_of
from tfpfl.live.plan import visit_settings
from tfpfl.live.serve import bundles_of
from tfpfl.models import tree


class Phones:
    """All clients of a run as devices in this process.

    Args:
        run: an open `tfpfl.runs.run.Run`; its bundles are made if they are not there.
        interpreter: class of the interpreter; default: that of devices on this machine, see `any_interpreter`.
    """

    def __init__(self, run, interpreter=None):
        self.run, self._interpreter = run, interpreter or any_interpreter()
        self._bundles = bundles_of(run)
        self._clients: dict[int, DeviceClient] = {}

    def client(self, client: int) -> DeviceClient:
        """The device of a client; at its first visit, it has the head that every engine gives it."""
        if client not in self._clients:
            info = self.run.population.info(client)
            device = DeviceClient(self._bundles[int(info.num_classes)], interpreter=self._interpreter)
            head = tree.arrays(self.run.algorithm.init_client(info))
            device.start_from(SavedHead(head.kernel, head.bias, theta_sha256(device.theta)))
            self._clients[client] = device
        return self._clients[client]

    def visit(self, client: int, theta: np.ndarray, per_step: float, payload: str = "float32") -> Update:
        """Computes a visit. The head changes with `commit`.

        Args:
            client: its number.
            theta: float32 [P].
            per_step: how often the client arrives in a step, see `Ticket`.
            payload: how the gradient is sent.
        """
        device = self.client(client)
        settings = visit_settings(self.run, self.run.population, client, per_step)
        device.settings = {**device.settings, **settings, "rounds": True}
        x, y = self.run.federation.arrays(client, "train", self.run.population.labels)
        x = x.astype(device.bundle.example_dtype, copy=False) if isinstance(x, np.ndarray) else x
        return device.round(theta, device.examples(x), y, payload=payload)

    def commit(self, client: int, update: Update) -> None:
        """Makes the head of a visit current: the server has counted it."""
        self.client(client).commit(update)


def simulate(
    run,
    buffer: int,
    seconds: Callable[[int, int], float],
    steps: int,
    *,
    payload: str = "float32",
    phones: Phones | None = None,
    on_step: Callable[[int, float, np.ndarray], bool] | None = None,
) -> tuple[np.ndarray, list[Timed]]:
    """Simulates a run's asynchronous rounds by a virtual clock; nothing of the run is changed.

    Args:
        run: an open `tfpfl.runs.run.Run` of PFLEGO, with all clients in every round.
        buffer: K.
        seconds: (client, number of its visit) -> the virtual seconds that it takes.
        steps: number of steps of the server.
        payload: how gradients are sent, 'float32' or 'int8'.
        phones: the clients, before their first visit, so that the caller has their heads; default: made here.
        on_step: (step, virtual seconds, theta [P]) -> whether to stop, called after each step.

    Returns:
        (theta [P] at the end, the log).

    Raises:
        InvalidArgument: the run's rounds cannot be asynchronous.
    """
    check_asynchronous(run)
    clients = Phones(run) if phones is None else phones
    server = server_of(run.algorithm, buffer, run.algorithm.init_server())

    def theta_of(state):
        return flatten(run.algorithm.message(state))

    def visit(arrival, state, per_step):
        update = clients.visit(arrival.client, theta_of(state), per_step, payload)
        clients.commit(arrival.client, update)
        return payloads.decode(update.payload, run.model.num_backbone_weights)

    def until(now):
        stop = on_step is not None and on_step(server.version, now, theta_of(server.state))
        return bool(stop) or server.version >= steps

    log = clocked(server, visit, seconds, until)
    return theta_of(server.state), log
