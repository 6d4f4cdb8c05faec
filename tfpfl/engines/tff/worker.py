"""Starts TFF workers on this machine, and makes TFF computations run on a worker.

A worker that is started here writes to its own log and ends with the process that started it. TFF's own local context
leaves its worker running after kill -9, and lets it inherit standard output, so that a pipe behind the run never
closes. The modules of TFF used here are private; that is why requirements.lock pins the exact version.
"""

import atexit
import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tfpfl.checks import Unavailable
from tfpfl.engines.machines import MachinesError
from tfpfl.engines.temporary import TemporaryFolder

# On Linux: asks the kernel to kill this process when its parent ends for any reason, then becomes the worker.
_TIED_TO_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
_ISOLATED = Path(__file__).with_name("isolated.py")
_MAX_MESSAGE_BYTES = 2_000_000_000
_START_SECONDS = 60
_ATTEMPTS = 4  # a computation whose worker ended this often is given up, because it may be what ends the workers
_LOG = logging.getLogger(__name__)
_LONGEST_SOCKET = 100  # characters; Linux allows 107
_IS_OPEN = (
    "TFF's worker listens on port %d of every address of this machine, without a password: while this process runs, "
    "every user of this machine, and every other machine that reaches the port, can read and write files as user %d. "
    "It is not isolated, because %s. What to do: allow network namespaces, keep others away from the port, or use the "
    "local engine; --require-isolation refuses to work like this"
)
CHANNEL_OPTIONS = [
    (f"grpc.max_{kind}_length", _MAX_MESSAGE_BYTES) for kind in ("message", "receive_message", "send_message")
]


def require_tff():
    """Imports TensorFlow Federated and returns the module.

    Raises:
        Unavailable: TFF is not installed here; the message says how to install it.
    """
    try:
        import tensorflow_federated as tff
    except ImportError as error:
        raise _without_tff(error) from error
    _end_tffs_own_worker_at_exit()
    return tff


@lru_cache
def _end_tffs_own_worker_at_exit() -> None:
    """Ends the worker of TFF's own context before Python deletes what TFF needs for that.

    TFF ends it when the context is deleted. At the end of a process that may never happen, and then the worker stays;
    or it happens too late, and Python prints "Exception ignored in: ... ServiceManager.__del__".
    """
    atexit.register(_end_tffs_own_worker)


def _end_tffs_own_worker() -> None:
    from tensorflow_federated.python.core.impl.context_stack import context_stack_impl, runtime_error_context

    kinds: list[Any] = [kind for kind in object.__subclasses__() if kind.__qualname__.endswith(".ServiceManager")]
    managers: list[Any] = [thing for kind in kinds for thing in gc.get_referrers(kind) if type(thing) is kind]
    while managers:
        manager = managers.pop()
        process, manager._process = manager._process, None
        if process is not None:
            process.kill()  # SIGINT, which TFF sends, is ignored in background jobs of a shell
            process.wait()
        del manager
    _replaced.clear()
    context_stack_impl.context_stack.set_default_context(runtime_error_context.RuntimeErrorContext())
    gc.collect()


def worker_binary() -> Path:
    """The path of TFF's worker program. It is found without importing TFF, which may take half a minute.

    Raises:
        Unavailable: TFF is not installed here; the message says how to install it.
    """
    spec = find_spec("tensorflow_federated")
    if spec is None or spec.origin is None:
        raise _without_tff("No module named 'tensorflow_federated'")
    return Path(spec.origin).parent / "data" / "worker_binary"


def _without_tff(error) -> Unavailable:
    return Unavailable(
        "the TFF engine needs tensorflow-federated 0.87, which installs on Python 3.11 only, from this project's "
        "requirements.lock: run `make demo` or `make test` in a checkout, or use the local engine (--engine "
        "local). "
        f"Found Python {sys.version_info.major}.{sys.version_info.minor}; the import said: {error}"
    )


def start_worker(port: int, log, concurrency: int = -1, *, outside: str | None = None) -> subprocess.Popen:
    """Starts TFF's worker program as a child of this process. On Linux it ends when this process ends.

    The worker listens on every address of the machine, and has no option to change that.

    Args:
        port: the port on which it listens.
        log: an open file for its output.
        concurrency: how many client computations it runs at the same time; -1 (default): no limit.
        outside: 'unix:PATH' or 'HOST:PORT': run the worker in its own network namespace, so that it can be reached only
            here and not at `port`. See `tfpfl.engines.tff.isolated`. Default: no namespace.

    Raises:
        Unavailable: TFF is not installed, or `outside` is given on a system other than Linux.
    """
    command = [str(worker_binary()), f"--port={port}", f"--max_concurrent_computation_calls={concurrency}"]
    if outside is not None:
        if sys.platform != "linux":
            raise Unavailable(f"an isolated worker needs Linux's network namespaces; found {sys.platform}")
        command = [sys.executable, "-I", str(_ISOLATED), outside, str(port), *command]
    elif sys.platform == "linux":
        command = [sys.executable, "-I", "-c", _TIED_TO_PARENT, *command]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


@lru_cache
def why_not_isolated() -> str | None:
    """Why this system does not let this user isolate a worker; None if it does. It is tried, once in a process."""
    if sys.platform != "linux":
        return f"network namespaces exist on Linux only, and this is {sys.platform}"
    probe = [sys.executable, "-I", str(_ISOLATED), "probe"]
    done = subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    return None if done.returncode == 0 else (done.stderr.strip() or f"the probe ended with {done.returncode}")


def require_isolation() -> None:
    """Checks that a worker of this process can be isolated.

    Raises:
        Unavailable: it cannot; the message says why and what to do.
    """
    if why := why_not_isolated():
        raise Unavailable(
            f"isolation of TFF's worker is required, but {why}. Allow it, use the local engine, or leave the "
            "requirement out: other users and machines may then reach the worker's port"
        )


class Worker:
    """A TFF worker that serves this process alone, and is ready for work when the constructor returns.

    Args:
        concurrency: see `start_worker`.
        isolate: whether it runs in its own network namespace. It is then reached through a socket in a private folder,
            which no other user can open; otherwise it listens on all addresses of the machine, and a warning says so.
            None (default): if this system allows it. True: or not at all. False: no.

    Raises:
        Unavailable: TFF is not installed, or `isolate` is True and not possible, or the worker did not start within
            60 s. The message says why, or where the log is.
    """

    def __init__(self, concurrency: int = -1, isolate: bool | None = None):
        require_tff()
        import grpc
        import portpicker
        from tensorflow_federated.python.core.impl.executors import remote_executor_grpc_stub

        if isolate:
            require_isolation()
        open_because = "--no-isolation (isolate=False) was given" if isolate is False else why_not_isolated()
        self.port = portpicker.pick_unused_port()
        self._folder = TemporaryFolder("tfpfl-worker-")
        self._handle: int | None = os.open(self._folder.path, os.O_RDONLY)
        self.log, place = self._folder.path / "log", self._folder.path / "socket"
        self.address = f"localhost:{self.port}" if open_because else f"unix:{self._short(place)}"
        with open(self.log, "wb") as log:
            self.process = start_worker(self.port, log, concurrency, outside=None if open_because else f"unix:{place}")
        self.at_exit = False
        atexit.register(self._end)
        if open_because:
            _LOG.warning(_IS_OPEN, self.port, os.getuid(), open_because)
        self.stub = remote_executor_grpc_stub.RemoteExecutorGrpcStub(
            grpc.insecure_channel(self.address, [*CHANNEL_OPTIONS, ("grpc.max_reconnect_backoff_ms", 200)])
        )
        self._wait()

    def _wait(self):
        deadline = time.monotonic() + _START_SECONDS
        while not self.stub.is_ready:
            if self.process.poll() is not None or time.monotonic() > deadline:
                said, code = last_line(self.log), self.process.poll()
                self.close(keep_log=True)
                if code == os.EX_NOPERM:  # what `tfpfl.engines.tff.isolated` ends with
                    raise Unavailable(said)
                how = f"within {_START_SECONDS} s" if code is None else f"but ended by itself ({code})"
                raise Unavailable(f"TFF's worker did not start {how}; see its log, {self.log}")
            time.sleep(0.05)

    def _short(self, path: Path) -> Path:
        """A path to the same file that is short enough for the address of a socket."""
        return path if len(str(path)) <= _LONGEST_SOCKET else Path(f"/proc/self/fd/{self._handle}", path.name)

    def _end(self) -> None:
        self.at_exit = True
        self.close()

    def close(self, keep_log: bool = False) -> None:
        """Kills the worker and, without `keep_log`, deletes its log."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        if keep_log:
            self._folder.keep()
        else:
            self._folder.delete()


def last_line(log: Path) -> str:
    """The last line of a worker's log; '' if the log is empty."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # how an HTTP/2 client begins: preface, settings


def answers(address: str, seconds: float = 5.0) -> bool:
    """Whether a gRPC server at 'HOST:PORT' answers an HTTP/2 greeting within `seconds`.

    A stopped process or a tunnel without a server accepts a connection too, but does not answer.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds) as s:
            s.sendall(_HELLO)
            return bool(s.recv(1))
    except OSError:
        return False


def context_on(stub: Callable):
    """Makes a TFF execution context whose computations run on a worker.

    Args:
        stub: () -> the gRPC stub of the worker; called for every computation.
    """
    require_tff()
    from tensorflow_federated.python.core.backends.native import compiler
    from tensorflow_federated.python.core.environments.tensorflow_frontend import tensorflow_computation
    from tensorflow_federated.python.core.impl.execution_contexts import sync_execution_context
    from tensorflow_federated.python.core.impl.executor_stacks import python_executor_stacks
    from tensorflow_federated.python.core.impl.executors import remote_executor
    from tensorflow_federated.python.core.impl.types import placements

    def executor(cardinalities):
        cardinalities.setdefault(placements.CLIENTS, 0)
        remote = remote_executor.RemoteExecutor(stub())
        remote.set_cardinalities(cardinalities)
        return remote

    return sync_execution_context.SyncExecutionContext(
        executor_fn=python_executor_stacks.ResourceManagingExecutorFactory(executor_stack_fn=executor),
        compiler_fn=compiler.desugar_and_transform_to_native,
        transform_args=tensorflow_computation.transform_args,
        transform_result=tensorflow_computation.transform_result,
    )


def execution_context(concurrency: int = -1, isolate: bool | None = None):
    """Makes a TFF execution context on a `Worker` of this process; see `Worker` for the arguments.

    The first computation starts the worker. If that has ended, a new one is started, and computes again what was lost.

    Raised by a computation:
        MachinesError: its worker ended four times, such as for lack of memory. TFF itself would try for ever.
    """
    workers: list[Worker] = []
    one_at_a_time = threading.Lock()  # threads that begin together share one worker
    ended = 0  # how many workers have ended since a computation was finished

    def stub():
        nonlocal ended
        with one_at_a_time:
            # At the end of the process, a thread may still compute: no worker is started for it, which would stay.
            if workers and workers[-1].process.poll() is not None and not workers[-1].at_exit:
                worker, ended = workers.pop(), ended + 1
                worker.close(keep_log=ended >= _ATTEMPTS)
                if ended >= _ATTEMPTS:
                    ended = 0
                    raise MachinesError(
                        f"TFF's worker ended by itself {_ATTEMPTS} times, perhaps because this machine has too little "
                        f"memory for it; see the log of the last one, {worker.log}. All earlier rounds are saved: "
                        "continue with `tfpfl resume`"
                    )
                _LOG.warning("TFF's worker ended by itself; a new one computes its work again")
            if not workers:
                workers.append(Worker(concurrency, isolate))
            return workers[-1].stub

    context = context_on(stub)
    invoke = context.invoke

    def counted(computation, argument):
        nonlocal ended
        result = invoke(computation, argument)
        ended = 0
        return result

    context.invoke = counted
    return context


_context: tuple | None = None  # (the context, the `isolate` of its worker)
_making = threading.Lock()
_of_thread = threading.local()  # `context`: the one that `use_local_worker` gave to this thread
_replaced: set[Any] = set()


def use_local_worker(concurrency: int | None = None, isolate: bool | None = None) -> None:
    """Makes all TFF computations of this thread run on a `Worker` that this process starts, one for all its threads.

    TFF has a context for every thread, so every thread that computes must call this; `on_local_worker` does.

    Args:
        concurrency: number of clients at the same time; default: the number of cores. More are not faster, and each
            needs memory. Ignored if the worker is in use already.
        isolate: see `Worker`; None (default): what an earlier call said, in any thread, or else as in `Worker`.

    Raises:
        Unavailable: TFF is not installed, or `isolate` is True and not possible.
    """
    global _context
    if isolate:
        require_isolation()
    with _making:
        if _context is None or isolate not in (None, _context[1]):
            require_tff()
            _context = execution_context(concurrency or os.cpu_count() or 1, isolate), isolate
        context = _context[0]
    # A default context that a user sets afterwards in this thread stays.
    if getattr(_of_thread, "context", None) is not context:
        from tensorflow_federated.python.core.impl.context_stack import context_stack_impl

        # Keep the replaced context: when it is deleted, it sends SIGINT to its worker and waits until the worker ends.
        # That lasts for ever where SIGINT is ignored, as in background jobs of a shell.
        _replaced.add(context_stack_impl.context_stack._stack[0])
        context_stack_impl.context_stack.set_default_context(context)
        _of_thread.context = context


def on_local_worker(computation, check: Callable | None = None):
    """A TFF computation that runs on the worker of `use_local_worker`, whatever thread calls it.

    Args:
        computation: the TFF computation.
        check: called with the arguments of every call that computes, before it; None: nothing.

    Returns:
        The computation, which can also be called in another computation. There, nothing is checked.

    Raises:
        Unavailable: TFF is not installed.
    """
    tff: Any = require_tff()

    class OnLocalWorker(tff.Computation):
        """`computation` behind `use_local_worker` and the check of its arguments."""

        @property
        def type_signature(self):
            return computation.type_signature

        def __call__(self, *arguments, **named):
            if not any(isinstance(a, tff.Value) for a in (*arguments, *named.values())):
                use_local_worker()
                if check is not None:
                    check(*arguments, **named)
            return computation(*arguments, **named)

        def __hash__(self):
            return hash(computation)

        def __getattr__(self, name):
            return getattr(computation, name)

    return OnLocalWorker()
