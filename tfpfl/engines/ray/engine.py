"""Executes rounds on a Ray cluster, or with Ray on the cores of this machine.

The clients of a round are divided into shards, which depend on the number of clients alone. A shard is a Ray task. Any
process of any node computes it as the local engine would, on one thread and in the order of the clients. It returns the
clients' states and the sums of their contributions, which the coordinator adds in the order of the shards. So neither
the nodes nor repetitions after a failure change a bit of the result, if all nodes have the same kind of processor.
"""

import atexit
import logging
import os
import pickle
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm
from tfpfl.algorithms.exchanges import first_of, second_of
from tfpfl.checks import InvalidArgument, Unavailable, extra
from tfpfl.data.federation import Federation
from tfpfl.data.manifest import FederationError, files_of
from tfpfl.engines.graphs import default_threads
from tfpfl.engines.local.simulation import clients_of
from tfpfl.engines.machines import Machines, MachinesError
from tfpfl.engines.rounds import Rounds, joined
from tfpfl.engines.shards import shards
from tfpfl.engines.temporary import TemporaryFolder, check_own
from tfpfl.engines.visit import WithLogits
from tfpfl.models import tree

SHARDS, MOST = 16, 8  # a round has up to 16 shards, more only if a shard would have more than 8 clients
_LONGEST_FOLDER = 20  # characters: the paths of Ray's sockets add 86 to it, and Linux allows 107
_ANSWER_SECONDS = 5  # how long to wait for the head of a cluster
KEPT = 4  # jobs whose algorithm a node's process keeps; a run has two, for rounds with and without held-out splits


class RayEngine(Rounds):
    """Executes rounds on a Ray cluster. Only the clients are computed there; the server and evaluations stay here.

    Args:
        algorithm, federation, held_out, grouping: see `Simulation`.
        recipe: (federation) -> the same algorithm, built anew; it must be picklable.
        machines: its `address` is the cluster, its `deadline` how many seconds to wait for a result. Default: Ray on
            this machine.

    Raises:
        InvalidArgument: `recipe` is None, or `Simulation` refuses the arguments.
        Unavailable: Ray is not installed.
        MachinesError: the cluster does not answer. Raised by `next`: the cluster is lost, or a shard failed.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        recipe: Callable,
        *,
        held_out: Sequence[str] = (),
        grouping: str = "auto",
        machines: Machines | None = None,
    ):
        check_recipe(recipe)
        first, clients = None, algorithm
        if algorithm.first is not None:
            at_first = ExchangeOf(recipe, first_of)
            first = RayEngine(first_of(algorithm), federation, at_first, grouping=grouping, machines=machines)
            clients, recipe = second_of(algorithm), ExchangeOf(recipe, second_of)
        clients_of(clients, federation, held_out, grouping)  # raises here what would be raised on every node
        path, held_out = str(federation.path), held_out if isinstance(held_out, WithLogits) else tuple(held_out)
        self.job = Job(uuid.uuid4().hex, recipe, path, federation.hash, held_out, grouping, versions())
        tasks = Tasks(self.job, federation, algorithm.message_per_client, machines or Machines())
        super().__init__(algorithm, tasks, first=first)


@dataclass(frozen=True)
class ExchangeOf:
    """The recipe of one of an algorithm's two exchanges: `exchange` is `first_of` or `second_of`."""

    recipe: Callable
    exchange: Callable

    def __call__(self, federation: Federation) -> Algorithm:
        return self.exchange(self.recipe(federation))


@dataclass(frozen=True)
class Job:
    """What a process of a node needs to compute shards; it is sent once.

    Args:
        key: a unique name, under which processes keep what they built.
        recipe: (federation) -> the algorithm. An algorithm holds closures and Keras models and cannot be sent itself.
        path, hash: the federation's folder and hash. A node without this folder gets the files from the object store.
        held_out, grouping: see `Simulation`.
        versions: the versions of the packages on which the numbers depend; see `versions`.
    """

    key: str
    recipe: Callable
    path: str
    hash: str
    held_out: tuple
    grouping: str
    versions: dict


class Tasks:
    """Computes the clients of a round as Ray tasks, one for each shard.

    Args:
        job: what the nodes need to build the algorithm.
        federation: the clients' examples, sent to nodes that do not have them.
        message_per_client: whether every client gets its own message.
        machines: its `address` and `deadline`.
    """

    def __init__(self, job: Job, federation: Federation, message_per_client: bool, machines: Machines):
        self._ray = connect(machines)
        self._federation, self._per_client, self._deadline = federation, message_per_client, machines.deadline
        # If a process or node is lost, Ray runs the shard again, on another node if necessary. Errors are raised here.
        self._work = self._ray.remote(num_cpus=1, max_retries=-1)(work_on_shard)
        self._key, self._job = job.key, self._ray.put(job)
        self._files: list | None = None

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields a `Part` for every shard, in the order of the cohort."""
        cut, waiting, done, yielded = shards(len(visits), size=shard_size(len(visits))), {}, {}, 0
        pickled = self._ray.cloudpickle.dumps
        shared = None if self._per_client else self._ray.put(pickled(tree.arrays(message_for(0))))

        def submit(number):
            shard = cut[number]
            message = pickled([tree.arrays(message_for(i)) for i in shard]) if shared is None else shared
            own = pickled(tree.arrays([states[i] for i in shard])), [visits[i] for i in shard]
            waiting[self._work.remote(self._key, [self._job], self._files, shard, message, *own)] = number

        try:
            for number in range(len(cut)):
                submit(number)
            last_news = time.monotonic()
            while waiting:
                left = max(last_news + self._deadline - time.monotonic(), 0)
                ready = self._ray.wait(list(waiting), timeout=left)[0]
                if not ready:
                    raise self._lost([cut[n] for n in waiting.values()], visits)
                number = waiting.pop(ready[0])
                part = self._result(ready[0], [visits[i] for i in cut[number]], left)
                last_news = time.monotonic()
                if part is None:
                    self._send_files()
                    submit(number)
                    continue
                done[number] = part
                while yielded in done:
                    yield done.pop(yielded)
                    yielded += 1
        except Exception:  # but no interruption: Ray may crash this process when it cancels a shard that just ends
            for task in waiting:
                with suppress(Exception):
                    self._ray.cancel(task, force=True)
            raise

    def _result(self, task, visits, seconds):
        errors = self._ray.exceptions
        try:
            return self._ray.get(task, timeout=max(seconds, 1))
        except errors.GetTimeoutError:
            raise self._lost([range(len(visits))], visits) from None
        except errors.RayTaskError as error:
            said = str(error.cause).partition("\n")[0]
            raise MachinesError(f"the work of {_named(visits)} failed on a node of the Ray cluster: {said}") from error
        except errors.RayError as error:
            raise MachinesError(f"the work of {_named(visits)} is lost: {error}") from error

    def _send_files(self):
        """Puts the federation's files into Ray's object store, once, for nodes that do not have them."""
        if self._files is None:
            names = ("manifest.json", *files_of(self._federation.manifest))
            files = {name: np.asarray(np.memmap(self._federation.path / name, np.uint8, "r")) for name in names}
            self._files = [self._ray.put(files)]

    def _lost(self, lost, visits) -> MachinesError:
        missing = [visits[i] for shard in lost for i in shard]
        return MachinesError(
            f"no news from the Ray cluster for {self._deadline:g} s: the work of {_named(missing)} is lost, "
            f"{self._nodes()}. All earlier rounds are saved: continue with `tfpfl resume`"
        )

    def _nodes(self) -> str:
        ask = ThreadPoolExecutor(1)  # on a thread, because this never returns if the cluster's head is lost
        try:
            nodes = ask.submit(self._ray.nodes).result(timeout=_ANSWER_SECONDS)
            return f"{sum(node['Alive'] for node in nodes)} of {len(nodes)} nodes are alive"
        except Exception:
            return "and its head does not answer"
        finally:
            ask.shutdown(wait=False)


def shard_size(clients: int) -> int:
    """The number of clients in a shard. It depends on the number of clients in the round alone, not on the cluster."""
    return min(-(-clients // SHARDS), MOST)


# in a process of a node: job key -> (how to compute clients, whether each has its own message)
_built: dict[Any, Any] = {}


def work_on_shard(
    key: str, job: list, files: list | None, places: Sequence[int], message: bytes, states: bytes, visits: list
):
    """Computes a shard in a process of a node.

    Messages and states come pickled: they may be NamedTuples of the user's own method, whose file is known here only
    when the algorithm is built.

    Args:
        key: the job's key.
        job: a list with a reference to the `Job`.
        files: a list with a reference to the federation's files, {name: uint8 [bytes]}; None: read the job's folder.
        places: the clients' positions in the cohort.
        message: one message for all clients, or a list with one for each, pickled.
        states: one for each client, pickled.
        visits: one for each client.

    Returns:
        The shard's `Part`; None if the node does not have the federation and `files` is None.

    Raises:
        Unavailable: the node has other versions of packages than the coordinator.
    """
    if key not in _built:
        clients = _build(job, files)
        if clients is None:
            return None
        while len(_built) >= KEPT:
            del _built[next(iter(_built))]
        _built[key] = clients
    clients, per_client = _built[key]
    own = tf.nest.map_structure(tf.constant, pickle.loads(message))
    part = joined(clients(lambda i: own[i] if per_client else own, pickle.loads(states), visits))
    return tree.arrays(part._replace(positions=[]))._replace(positions=[places[i] for i in part.positions])


def _build(job: list, files: list | None):
    import ray

    if tf.config.threading.get_intra_op_parallelism_threads() != 1:
        # A node computes one shard per core at the same time; and sums over several threads have no fixed order.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    work = ray.get(job[0])
    if versions() != work.versions:
        raise Unavailable(
            f"node {ray.util.get_node_ip_address()} has {versions()}, the coordinator {work.versions}: the result "
            "would depend on which node computes which client. Install the same versions on all nodes"
        )
    federation = federation_on_node(work.path, work.hash, None if files is None else ray.get(files[0]))
    if federation is None:
        return None
    algorithm = work.recipe(federation)
    return clients_of(algorithm, federation, work.held_out, work.grouping, threads=1), algorithm.message_per_client


def _loaded(folder: str | Path, expected: str) -> Federation | None:
    with suppress(FederationError, OSError):
        found = Federation.load(folder)
        return found if found.hash == expected else None
    return None


def federation_on_node(path: str, expected: str, files: dict | None = None) -> Federation | None:
    """Finds a federation on this node: at `path`, or unpacked earlier, or unpacked now from `files`.

    Args:
        path: the folder that the coordinator uses.
        expected: the federation's hash.
        files: {file name: uint8 [bytes]}; they are unpacked into the node's folder for temporary files.

    Returns:
        The federation; None if the node does not have it and `files` is None.

    Raises:
        FederationError: the files belong to another federation, or are damaged.
        PermissionError: others may write into the folder for temporary files that is this user's by its name.
    """
    root = Path(tempfile.gettempdir()) / f"tfpfl-{os.getuid()}"
    unpacked = root / "federations" / expected
    if not (found := _loaded(path, expected)):
        for folder in (root, root / "federations"):
            folder.mkdir(mode=0o700, exist_ok=True)
            check_own(folder)
        found = _loaded(unpacked, expected)
    if found or files is None:
        return found
    partial = Path(tempfile.mkdtemp(prefix=f".{expected[:12]}.", dir=unpacked.parent))
    try:
        for name, content in files.items():
            content.tofile(partial / name)
        found = Federation.load(partial)
        if found.hash != expected:
            raise FederationError(
                f"the files that this node received are of federation {found.hash[:12]}, not {expected[:12]}"
            )
        shutil.rmtree(unpacked, ignore_errors=True)  # if it is there, it is damaged: otherwise it was returned above
        with suppress(OSError):  # another process of this node has unpacked it meanwhile
            os.rename(partial, unpacked)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Federation.load(unpacked)


def versions() -> dict:
    """The versions of the packages on which the numbers depend: {name: version}."""
    try:
        own = version("tfpfl")
    except PackageNotFoundError:  # a checkout that is not installed
        own = None
    return {"tfpfl": own, "tensorflow": tf.__version__, "keras": keras.__version__, "numpy": np.__version__}


def connect(machines: Machines):
    """Connects to the Ray cluster at `machines.address`, or starts Ray on this machine, and returns the module ray.

    A Ray that is started here ends with this process, and its folder for temporary files goes with it.

    Raises:
        Unavailable: Ray is not installed.
        MachinesError: no Ray cluster answers at the address.
        InvalidArgument: this process is connected to another cluster already.
    """
    ray = require_ray()
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if machines.address not in (None, "auto", here):
            raise InvalidArgument(
                f"this process is connected to Ray at {here} already, not to {machines.address}: use that address or "
                "a new process"
            )
        return ray
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    with warnings.catch_warnings(), _our_sigterm():
        warnings.simplefilter("ignore")
        if machines.address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            folder = TemporaryFolder("tfpfl-ray-", _short_folder())
            atexit.register(_end, ray, folder)
            # On the loopback device only and with a secret, because who gets into Ray's ports can run code here.
            _close_to_others()
            here = {"_node_ip_address": "127.0.0.1", "_temp_dir": str(folder.path)}
            ray.init(address="local", num_cpus=default_threads(), **here, **quiet)
            return ray
        try:
            host, _, port = machines.address.rpartition(":")
            if port.isdecimal():  # tried first, because Ray itself would try for minutes
                socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
            ray.init(address=machines.address, **quiet)
        except Exception as error:  # ConnectionError, RuntimeError, ValueError, and what gRPC raises
            raise MachinesError(f"no Ray cluster answers at {machines.address}: {error}") from error
    return ray


@contextmanager
def _our_sigterm() -> Iterator[None]:
    """Keeps what this process does on SIGTERM. Ray puts a handler of its own in its place, which made it crash."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _short_folder() -> str | None:
    """The parent of Ray's folder: RAY_TMPDIR, or TMPDIR if that is short enough; Ray refuses a longer one."""
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return parent if len(parent) <= _LONGEST_FOLDER else "/tmp"


def _close_to_others() -> None:
    """Lets only those into the Ray that will be started who have a secret: other users reach 127.0.0.1, too.

    A `RAY_AUTH_MODE` of the user's own stays as it is.

    Raises:
        Unavailable: this Ray cannot be closed in this way.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return
    try:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        AuthenticationTokenLoader.instance().reset_cache()
        Config.initialize("")  # Ray read the environment when it was imported, and has to read it again
    except (ImportError, AttributeError) as error:
        raise Unavailable(
            "this version of Ray cannot be closed to other users of this machine: take Ray 2.52, another engine or, "
            f"if nobody else uses the machine, RAY_AUTH_MODE=disabled. Ray said: {error}"
        ) from error


def _end(ray, folder: TemporaryFolder) -> None:
    """Ends the Ray that was started here, and deletes its folder, which Ray itself would leave."""
    ray.shutdown()
    folder.delete()


def require_ray():
    """Imports Ray and returns the module.

    Raises:
        Unavailable: Ray is not installed here; the message says how to install it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
    except ImportError as error:
        raise Unavailable(
            f"the Ray engine needs Ray, which is not installed: {extra('ray')}; the import said: {error}"
        ) from error
    return ray


def check_recipe(recipe) -> None:
    """Checks that there is a recipe with which nodes can build the algorithm.

    Raises:
        InvalidArgument: `recipe` is None.
    """
    if recipe is None:
        raise InvalidArgument(
            "engine 'ray' needs a recipe, found None. It is a picklable function (federation) -> the algorithm, since "
            "an algorithm cannot be sent to another process. A Run makes its own"
        )


def _named(visits) -> str:
    ids = [str(int(v.info.client_id)) for v in visits]
    return f"client{'s' if len(ids) > 1 else ''} {', '.join(ids[:10])}" + (
        f" and {len(ids) - 10} more" if len(ids) > 10 else ""
    )
