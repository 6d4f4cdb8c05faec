"""Rounds on several TFF workers: the workers compute the clients, shard by shard; this process computes the server.

The shards depend on the number of clients alone, and their sums are added in the order of the cohort. So the number of
workers, and which worker computed which shard, do not change a bit of the result. If a worker is lost or takes too
long, another worker computes its shard. A worker that answers again is used again.

TFF itself waits for ever for a lost worker. Here every call to a worker has a deadline, and a worker that computes is
asked once a second whether it is alive.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import lru_cache
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm
from tfpfl.algorithms.exchanges import first_of, second_of
from tfpfl.checks import InvalidArgument
from tfpfl.data.manifest import files_of
from tfpfl.engines import aggregation
from tfpfl.engines.machines import Machines, MachinesError
from tfpfl.engines.packed import side_by_side
from tfpfl.engines.rounds import Part, Rounds
from tfpfl.engines.shards import shards
from tfpfl.engines.tff.process import federated_shard
from tfpfl.engines.tff.worker import CHANNEL_OPTIONS, answers, context_on, require_tff

# Number of shards of a round, at least and at most, and wanted clients per shard. 1, 2, 3 or 6 workers share 6 shards
# equally; 4 workers share 12. A shard costs about 25 ms beside its clients' work, and a worker computes the clients of
# a shard in parallel, so a shard should not have too few clients.
FEWEST, MOST, CLIENTS = 6, 12, 4
ATTEMPTS = 4  # a shard that is lost this often ends the run, because the shard itself may be what kills the workers
SILENCE = 20.0  # seconds without an answer after which a worker is lost
TICK = 1.0  # seconds between two questions to a worker whether it is alive
SILENT = "does not answer"  # why a worker is lost, in messages
log = logging.getLogger(__name__)


class WorkerLost(RuntimeError):
    """A worker could not finish its work, for example because it does not answer; another worker may be able to."""


class WorkFailed(WorkerLost):
    """The worker answered that its computation failed."""


class OtherFederation(InvalidArgument):
    """A worker has no federation, or a different one, at the path of this process's federation."""


class ShardedProcess(Rounds):
    """Executes rounds on TFF workers; `initialize` and `next` are those of `Simulation`.

    Args:
        algorithm, federation, held_out: see `tfpfl.federate`.
        machines: its `workers` and `deadline`.

    Raises:
        Unavailable: TFF is not installed.
        MachinesError: no worker answers. Raised by `next`: no worker was left for `deadline` seconds, or one shard was
            lost four times.
        OtherFederation: a worker has no federation, or a different one, at the federation's path.
    """

    def __init__(self, algorithm: Algorithm, federation, machines: Machines, *, held_out: Sequence[str] = ()):
        require_tff()
        self.workers = workers_of(machines)
        self.workers.require(federation)
        first, clients = None, algorithm
        if algorithm.first is not None:
            first, clients = ShardedProcess(first_of(algorithm), federation, machines), second_of(algorithm)
        self._federation, self._computation = federation, federated_shard(clients, federation, held_out)
        super().__init__(algorithm, self._parts, first=first)

    def _parts(self, message_for: Callable, states: list, visits: list):
        """Yields a `Part` for every shard, in order."""
        own, cut = self.algorithm.message_per_client, shards(len(visits), number=number_of_shards(len(visits)))
        work = [
            (
                [message_for(i) for i in shard] if own else message_for(0),
                [states[i] for i in shard],
                [visits[i] for i in shard],
            )
            for shard in cut
        ]
        for shard, part in zip(cut, self.workers.each(self._computation, work, self._federation), strict=True):
            contribution = aggregation.Contribution(part.sums, part.weight, side_by_side(part.rows))
            clients = list(shard), list(part.client_states), list(part.client_metrics)
            yield Part(*clients, contribution, part.metric_sums)


def number_of_shards(clients: int) -> int:
    """The number of shards of a round with this many clients: 6 to 12, but at most one per client."""
    return min(clients, max(FEWEST, min(MOST, clients // CLIENTS)))


@lru_cache
def workers_of(machines: Machines) -> "Workers":
    """Makes the connections to a run's TFF workers; equal `machines` share them."""
    return Workers(machines.workers, machines.deadline)


class Workers:
    """Distributes computations over several TFF workers.

    Args:
        names: 'host:port' of every worker.
        deadline: seconds that a worker may take for one computation.
    """

    def __init__(self, names: Sequence[str], deadline: float):
        self.deadline = deadline
        self.remotes = [Remote(name, deadline) for name in names]

    def require(self, federation) -> None:
        """Connects to the workers, and checks that they have this federation.

        Workers that do not answer are logged; they are used when they answer later.

        Raises:
            MachinesError: no worker answers.
            OtherFederation: a worker has no federation, or a different one, at the federation's path.
        """
        for remote in self.remotes:
            remote.begin(remote.enter, federation)
        wait([remote.job for remote in self.remotes])
        for remote in self.remotes:
            if isinstance(remote.job.exception(), OtherFederation):
                raise remote.job.exception()
        for remote in self.remotes:
            remote.end()
        if not any(remote.is_in for remote in self.remotes):
            raise MachinesError(f"no worker answers ({self._why()}). `tfpfl worker` starts one")

    def each(self, computation, work: list, federation) -> list:
        """Computes computation(*arguments) on the workers for all `arguments` in `work`; results in the same order.

        Raises:
            MachinesError: see `ShardedProcess`.
        """
        results, waiting, losses = [None] * len(work), deque(range(len(work))), [0] * len(work)
        last_seen = time.monotonic()
        given: dict[Any, Any] = {}  # remote -> the index in `work` of what it computes
        try:
            while waiting or given:
                for remote in self.remotes:
                    if remote.job is None and remote.is_in and waiting:
                        given[remote] = waiting.popleft()
                        remote.begin(remote.run, computation, work[given[remote]])
                    elif remote.job is None and not remote.is_in and remote.may_be_tried():
                        remote.begin(remote.enter, federation)
                if any(remote.is_in for remote in self.remotes):
                    last_seen = time.monotonic()
                elif time.monotonic() - last_seen > self.deadline:
                    raise MachinesError(
                        f"no worker was left for {self.deadline:g} s ({self._why()}). All earlier rounds are saved: "
                        "start workers, and continue with `tfpfl resume`"
                    )
                if jobs := [remote.job for remote in self.remotes if remote.job is not None]:
                    wait(jobs, TICK / 5, FIRST_COMPLETED)
                else:  # all are away, and `wait` for nothing would return at once
                    time.sleep(TICK / 5)
                for remote in self.remotes:
                    if remote.job is None or not remote.job.done():
                        if remote in given and remote.is_silent():
                            remote.leave(f"{SILENT} for {SILENCE:g} s")
                        continue
                    place = given.pop(remote, None)
                    result = remote.end()
                    if place is None:
                        continue
                    if remote.is_in:
                        results[place] = result
                        continue
                    losses[place] += 1
                    if losses[place] >= ATTEMPTS:
                        raise MachinesError(
                            f"a shard of the round was lost {ATTEMPTS} times, the last time with {remote.name} "
                            f"({remote.why}). All earlier rounds are saved; continue with `tfpfl resume`. If a shard "
                            f"takes longer than {self.deadline:g} s, use a larger --deadline"
                        )
                    waiting.appendleft(place)
        finally:
            for remote in given:  # only after an error: otherwise their threads would keep this process alive
                remote.leave("the round was given up")
        return results

    def _why(self) -> str:
        return "; ".join(f"{remote.name}: {remote.why or 'working'}" for remote in self.remotes)


class Remote:
    """One worker, and the thread that talks to it. A TFF context belongs to the thread that installs it.

    `job` is what the thread does now. `enter` and `run` are executed by that thread, all other methods by the caller's.
    """

    def __init__(self, name: str, deadline: float):
        self.name, self.deadline = name, deadline
        self.is_in = False
        self.why: str | None = None
        self.job: Any = None  # the Future of what it does, or None
        self._link: Any = None  # the Link, or None
        self._federation, self._seen, self._tried = None, 0.0, 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tfpfl-{name}")

    def begin(self, function: Callable, *arguments) -> None:
        """Starts function(*arguments) on the thread, as its job."""
        self._tried = self._seen = time.monotonic()
        self.job = self._thread.submit(function, *arguments)
        if self.is_in:
            Thread(target=self._watch, args=(self.job,), daemon=True).start()

    def end(self):
        """Waits for the job and returns its result; None if the worker was lost. Other errors are raised."""
        job, self.job = self.job, None
        try:
            result = job.result()
        except (WorkerLost, OtherFederation) as error:
            self._lost(str(error))
            return None
        if not self.is_in:
            self.is_in = True
            if self.why is not None:
                log.warning("worker %s is there", self.name)
            self.why = None
        return result

    def leave(self, why: str) -> None:
        """Closes the connection, so that the job ends at once; `why` is the reason, for messages."""
        self._link.close(why)

    def may_be_tried(self) -> bool:
        """Whether it is time to try this worker again: more than one second after the last job began."""
        return time.monotonic() - self._tried > TICK

    def is_silent(self) -> bool:
        """Whether a worker that computes has not answered for `SILENCE` seconds."""
        return time.monotonic() - self._seen > SILENCE

    def enter(self, federation) -> None:
        """Connects to the worker and checks its federation, unless that was done before.

        Raises:
            WorkerLost: the worker does not answer.
            OtherFederation: the worker has no federation, or a different one, at the federation's path.
        """
        if self.is_in and self._federation is federation:
            return
        if not answers(self.name):
            raise WorkerLost(SILENT)
        if self._link is not None:
            self._link.close("a new connection was made")
        self._link = Link(self.name)
        check_federation(self._link, self.name, federation, self.deadline)
        self._federation = federation

    def run(self, computation, arguments):
        """Computes computation(*arguments) on the worker, within the deadline.

        Raises:
            WorkerLost: the worker was lost, the computation failed, or the deadline passed.
        """
        return self._link.run(computation, arguments, self.deadline)

    def _lost(self, why: str) -> None:
        if self._link is not None:
            self._link.close(why)
        self.is_in = False
        if self.why is None or why not in (self.why, SILENT):
            log.warning("worker %s is left out: %s", self.name, why)
        self.why = why

    def _watch(self, job: Future) -> None:
        done = Event()
        job.add_done_callback(lambda _: done.set())
        while not done.wait(TICK):
            if answers(self.name, SILENCE / 2):
                self._seen = time.monotonic()


class Link:
    """A connection to a worker, with a TFF context that uses it. A closed connection is never opened again."""

    def __init__(self, name: str):
        import grpc
        from tensorflow_federated.proto.v0 import executor_pb2_grpc

        # Its own pool, so that gRPC does not reuse a connection to an earlier worker at the same address.
        options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(name, options)
        self._context = context_on(lambda: Stub(executor_pb2_grpc.ExecutorGroupStub(self._channel), self))
        self.until = 0.0
        self.closed: str | None = None

    def run(self, computation, arguments, seconds: float):
        """Computes computation(*arguments) on the worker.

        Raises:
            WorkerLost: the connection broke or was closed, or the computation failed or took more than `seconds`.
        """
        from tensorflow_federated.python.core.impl.context_stack import context_stack_impl

        self.until = time.monotonic() + seconds
        with context_stack_impl.context_stack.install(self._context):
            return computation(*arguments)

    def close(self, why: str) -> None:
        """Closes the connection and ends what runs on it; `why` is the reason, for messages."""
        self.closed = self.closed or why
        self._channel.close()


class Stub:
    """The gRPC stub with which a TFF executor calls a worker.

    Unlike TFF's own stub, every call has a deadline, and a failed call is not repeated.
    """

    def __init__(self, calls, link: Link):
        self._calls, self._link = calls, link

    def __getattr__(self, name):
        call = getattr(self._calls, name.title().replace("_", ""))  # create_value is CreateValue of the service
        link, tidying = self._link, name.startswith("dispose")

        def asked(request):
            import grpc

            if tidying and link.closed is not None:
                return None  # what it would delete was lost with the worker
            seconds = max(link.until - time.monotonic(), 0.001)
            try:
                return call(request, timeout=min(seconds, SILENCE) if tidying else seconds)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed
                if tidying:
                    return None
                raise _as_ours(error, link) from error

        return asked


def _as_ours(error, link: Link) -> Exception:
    import grpc

    if link.closed is not None:
        return WorkerLost(link.closed)
    if not isinstance(error, grpc.RpcError):
        return error
    code, lines = error.code(), (error.details() or "").splitlines()
    said = f"{code.name}: {lines[0] if lines else ''}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return WorkerLost("took longer than the deadline")
    if code is grpc.StatusCode.UNAVAILABLE:
        return WorkerLost(f"the connection broke ({said})")
    if code is grpc.StatusCode.CANCELLED:
        return WorkerLost("its connection was given up")
    return WorkFailed(said)


def check_federation(link: Link, name: str, federation, seconds: float) -> None:
    """Checks that a worker reads the same manifest and the same files at the federation's path as this process.

    Raises:
        WorkerLost: the worker was lost meanwhile.
        OtherFederation: the worker cannot read the folder, or finds other contents; the message says what it found.
    """
    tff, path = require_tff(), Path(federation.path)
    read_manifest = tff.tensorflow.computation(lambda: tf.io.read_file(str(path / "manifest.json")))
    read_files = tff.tensorflow.computation(lambda: _fingerprints(federation))
    try:
        manifest = link.run(read_manifest, (), seconds)
    except WorkFailed as error:
        raise OtherFederation(
            f"worker {name} cannot read {path}/manifest.json ({error}). Every worker reads clients' examples there: "
            "copy the folder to the same path on its machine"
        ) from error
    try:
        found = str(json.loads(manifest)["hash"])
    except (ValueError, TypeError, KeyError):
        found = "a manifest.json that cannot be read"
    if found != federation.hash:
        raise OtherFederation(
            f"worker {name} has {found[:64]} at {path}, this process has {federation.hash}: copy the folder to that "
            "path on its machine"
        )
    try:
        there = np.asarray(link.run(read_files, (), seconds))
    except WorkFailed as error:
        raise OtherFederation(f"worker {name} cannot read all files of {path} ({error})") from error
    for file, ours, theirs in zip(files_of(federation.manifest), _fingerprints_here(federation), there, strict=True):
        if not np.array_equal(ours, theirs):
            raise OtherFederation(
                f"worker {name} has another {file} at {path} than the manifest and this process: copy the folder again"
            )


def _fingerprints(federation):
    """uint8 [files, 8]: FarmHash of every file, mapped into memory and not copied. TensorFlow has no SHA-256."""

    def of(file):
        size, path = federation.manifest["files"][file]["bytes"], str(federation.path / file)
        return tf.fingerprint(tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=[1, size], memory_region_name=path))

    with tf.device("CPU"):
        return tf.concat([of(file) for file in files_of(federation.manifest)], 0)


@lru_cache
def _fingerprints_here(federation) -> np.ndarray:
    return tf.function(_fingerprints)(federation).numpy()
