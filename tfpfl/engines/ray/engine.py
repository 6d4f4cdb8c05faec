"""Executes rounds on a Ray cluster, or with Ray on the cores of this machine.

The clients of a round are divided into shards, which depend on the number of clients alone. A shard is a Ray task. Any
process of any node computes it as the local engine would, on one thread and in the order of the clients. It returns the
clients' states and the sums of their contributions, which the coordinator adds in the order of the shards. So the
number of nodes, which node computed which shard, and repetitions after a failure do not change a bit of the result, if
all nodes have the same kind of processor.
"""

import logging
import os
import shutil
import socket
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm
from tfpfl.checks import InvalidArgument, Unavailable
from tfpfl.data.federation import Federation
from tfpfl.data.manifest import FILES, FederationError
from tfpfl.engines.graphs import default_threads
from tfpfl.engines.local.simulation import clients_of
from tfpfl.engines.machines import Machines, MachinesError
from tfpfl.engines.rounds import Rounds, joined
from tfpfl.engines.shards import shards
from tfpfl.models import tree

SHARDS, MOST = 16, 8  # a round has up to 16 shards, more only if a shard would have more than 8 clients
_ANSWER_SECONDS = 5  # how long to wait for the head of a cluster
KEPT = 4  # jobs whose algorithm a node's process keeps; a run has two, for rounds with and without held-out splits


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
            f"the Ray engine needs Ray, which is not installed: pip install 'tfpfl[ray]'; the import said: {error}"
        ) from error
    return ray


def connect(machines: Machines):
    """Connects to the Ray cluster at `machines.address`, or starts Ray on this machine, and returns the module ray.

    A Ray that is started here ends with this process.

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
                f"this process is connected to Ray at {here} already, not to {machines.address}: use that one, or a "
                "new process"
            )
        return ray
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if machines.address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            # On the loopback device only, because everyone who reaches Ray's ports can run code here.
            ray.init(address="local", num_cpus=default_threads(), _node_ip_address="127.0.0.1", **quiet)
            return ray
        try:
            host, _, port = machines.address.rpartition(":")
            if port.isdecimal():  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
            ray.init(address=machines.address, **quiet)
        except Exception as error:  # ConnectionError, RuntimeError, ValueError, and what gRPC raises
            raise MachinesError(f"no Ray cluster answers at {machines.address}: {error}") from error
    return ray


@dataclass(frozen=True)
class Job:
    """What a process of a node needs once, to work on shards.

    Args:
        key: names this, wherever it was sent.
        recipe: (federation) -> the algorithm, which holds closures and Keras models and cannot be sent itself.
        path, hash: of the federation; where a node has no such folder, the files come from the object store.
        held_out, grouping: as in `Simulation`.
        versions: of what the numbers depend on.
    """

    key: str
    recipe: Callable
    path: str
    hash: str
    held_out: tuple
    grouping: str
    versions: dict


class RayEngine(Rounds):
    """Runs an algorithm's client work on a Ray cluster; the server's and evaluations stay in this process.

    Args:
        algorithm, federation, held_out, grouping: as in `Simulation`.
        recipe: (federation) -> the same algorithm, built anew; it must pickle.
        machines: which cluster, and how long to wait for it.

    Raises:
        ValueError: there is no recipe, or 'fused' or 'stacked' cannot be.
        RuntimeError: Ray is not installed.
        MachinesError: the cluster does not answer. From `next`: it is gone, or a shard's work failed.
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
        clients_of(algorithm, federation, held_out, grouping)  # refuses what would be refused on every node
        path, held_out = str(federation.path), tuple(held_out)
        self.job = Job(uuid.uuid4().hex, recipe, path, federation.hash, held_out, grouping, versions())
        super().__init__(algorithm, Tasks(self.job, federation, algorithm.message_per_client, machines or Machines()))


class Tasks:
    """Takes clients through a round as Ray tasks, a shard each."""

    def __init__(self, job: Job, federation: Federation, message_per_client: bool, machines: Machines):
        self._ray = connect(machines)
        self._federation, self._per_client, self._deadline = federation, message_per_client, machines.deadline
        # Ray runs a shard again, elsewhere if need be, when its process or node goes; an error of ours is raised here.
        self._work = self._ray.remote(num_cpus=1, max_retries=-1)(work_on_shard)
        self._key, self._job, self._files = job.key, self._ray.put(job), None

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields a `Part` for every shard, in order."""
        cut, waiting, done, yielded = shards(len(visits), size=shard_size(len(visits))), {}, {}, 0
        shared = None if self._per_client else self._ray.put(tree.arrays(message_for(0)))

        def submit(number):
            shard = cut[number]
            message = [tree.arrays(message_for(i)) for i in shard] if shared is None else shared
            own = tree.arrays([states[i] for i in shard]), [visits[i] for i in shard]
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
        finally:
            for task in waiting:
                with suppress(Exception):
                    self._ray.cancel(task, force=True)

    def _result(self, task, visits, seconds):
        errors = self._ray.exceptions
        try:
            return self._ray.get(task, timeout=max(seconds, 1))
        except errors.GetTimeoutError:
            raise self._lost([range(len(visits))], visits) from None
        except errors.RayTaskError as error:
            said = str(error.cause).partition("\n")[0]
            raise MachinesError(f"the work of {_named(visits)} failed on a node: {said}") from error
        except errors.RayError as error:
            raise MachinesError(f"the work of {_named(visits)} is lost: {error}") from error

    def _send_files(self):
        """Into the object store, once; nodes without the federation take them from there."""
        if self._files is None:
            names = ("manifest.json", *FILES)
            files = {name: np.asarray(np.memmap(self._federation.path / name, np.uint8, "r")) for name in names}
            self._files = [self._ray.put(files)]

    def _lost(self, lost, visits) -> MachinesError:
        missing = [visits[i] for shard in lost for i in shard]
        return MachinesError(
            f"no news from the Ray cluster for {self._deadline:g} s: the work of {_named(missing)} is lost, "
            f"{self._nodes()}. The rounds before are saved: `tfpfl resume` goes on with them"
        )

    def _nodes(self) -> str:
        ask = ThreadPoolExecutor(1)  # the cluster's head may be what is gone
        try:
            nodes = ask.submit(self._ray.nodes).result(timeout=_ANSWER_SECONDS)
            return f"{sum(node['Alive'] for node in nodes)} of {len(nodes)} nodes are alive"
        except Exception:
            return "and its head does not answer"
        finally:
            ask.shutdown(wait=False)


def shard_size(clients: int) -> int:
    """The clients of a shard: a function of the cohort's size alone, never of the cluster's."""
    return min(-(-clients // SHARDS), MOST)


_built = {}  # in a process of a node: what it takes clients through a round with, by the job's key


def work_on_shard(key: str, job: list, files: list | None, places: Sequence[int], message, states: list, visits: list):
    """On a node: the shard's `Part`; None where the federation is not there and its files did not come along.

    Args:
        key, job: the job's key, and a reference to it.
        files: a reference to the federation's files, by name.
        places: of the clients in the cohort.
        message: for all of them, or a list of their own.
        states, visits: theirs.

    Raises:
        RuntimeError: the node has other versions than the coordinator.
    """
    if key not in _built:
        clients = _build(job, files)
        if clients is None:
            return None
        while len(_built) >= KEPT:
            del _built[next(iter(_built))]
        _built[key] = clients
    clients, per_client = _built[key]
    message = tf.nest.map_structure(tf.constant, message)
    part = joined(clients(lambda i: message[i] if per_client else message, states, visits))
    return tree.arrays(part._replace(positions=[]))._replace(positions=[places[i] for i in part.positions])


def _build(job: list, files: list | None):
    import ray

    if tf.config.threading.get_intra_op_parallelism_threads() != 1:
        # A node runs as many shards at a time as it has cores; and sums over threads have no fixed order.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    job = ray.get(job[0])
    if versions() != job.versions:
        raise Unavailable(
            f"node {ray.util.get_node_ip_address()} has {versions()}, the coordinator {job.versions}: the result would "
            "depend on which node did what"
        )
    federation = federation_on_node(job.path, job.hash, None if files is None else ray.get(files[0]))
    if federation is None:
        return None
    algorithm = job.recipe(federation)
    return clients_of(algorithm, federation, job.held_out, job.grouping, threads=1), algorithm.message_per_client


def federation_on_node(path: str, expected: str, files: dict | None = None) -> Federation | None:
    """The federation whose hash is `expected`: at its path, or unpacked on this node before, or now from `files`.

    Args:
        files: uint8 arrays by name; they are unpacked into the node's folder for temporary files.

    Raises:
        FederationError: the files are of another federation, or damaged.
    """
    unpacked = Path(tempfile.gettempdir()) / f"tfpfl-{os.getuid()}" / "federations" / expected
    for folder in (path, unpacked):
        with suppress(FederationError, OSError):
            found = Federation.load(folder)
            if found.hash == expected:
                return found
    if files is None:
        return None
    unpacked.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{expected[:12]}.", dir=unpacked.parent))
    try:
        for name, content in files.items():
            content.tofile(partial / name)
        found = Federation.load(partial)
        if found.hash != expected:
            raise FederationError(f"the files are of federation {found.hash[:12]}, not {expected[:12]}")
        shutil.rmtree(unpacked, ignore_errors=True)  # damaged, or it would have been found
        with suppress(OSError):  # another process of this node was faster
            os.rename(partial, unpacked)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Federation.load(unpacked)


def versions() -> dict:
    """Of what the numbers depend on."""
    return {"tensorflow": tf.__version__, "keras": keras.__version__, "numpy": np.__version__}


def check_recipe(recipe) -> None:
    """Whether nodes can build the algorithm.

    Raises:
        ValueError: there is no recipe.
    """
    if recipe is None:
        raise InvalidArgument(
            "engine 'ray' needs a recipe: a function (federation) -> the algorithm that can be pickled, since the "
            "algorithm itself cannot be sent to another process; a Run brings its own"
        )


def _named(visits) -> str:
    ids = [str(int(v.info.client_id)) for v in visits]
    return f"client{'s' if len(ids) > 1 else ''} {', '.join(ids[:10])}" + (
        f" and {len(ids) - 10} more" if len(ids) > 10 else ""
    )
