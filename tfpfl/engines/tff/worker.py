"""Starts TFF workers on this machine, and makes TFF computations run on a worker.

A worker that is started here writes to its own log and ends with the process that started it. TFF's own local context
leaves its worker running after kill -9, and lets it inherit standard output, so that a pipe behind the run never
closes. The modules of TFF used here are private; that is why requirements.lock pins the exact version.
"""

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tfpfl.checks import Unavailable

# On Linux: asks the kernel to kill this process when its parent ends for any reason, then becomes the worker.
_TIED_TO_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
_ISOLATED = Path(__file__).with_name("isolated.py")
_MAX_MESSAGE_BYTES = 2_000_000_000
_START_SECONDS = 60
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
    return tff


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


class Worker:
    """A TFF worker that serves this process alone, and is ready for work when the constructor returns.

    Args:
        concurrency: see `start_worker`.
        isolate: run it in its own network namespace. It is then reached through a socket in a private folder, which no
            other user can open. Default: it listens on all addresses of the machine.

    Raises:
        Unavailable: TFF is not installed, or the worker did not start within 60 s. The message says why, or where the
            log is.
    """

    def __init__(self, concurrency: int = -1, isolate: bool = False):
        require_tff()
        import grpc
        import portpicker
        from tensorflow_federated.python.core.impl.executors import remote_executor_grpc_stub

        self.port = portpicker.pick_unused_port()
        self._folder = Path(tempfile.mkdtemp(prefix="tfpfl-worker-"))  # mode 0700
        self.log = self._folder / "log"
        self.address = f"unix:{self._folder / 'socket'}" if isolate else f"localhost:{self.port}"
        with open(self.log, "wb") as log:
            outside = self.address if isolate else None
            self.process = start_worker(self.port, log, concurrency, outside=outside)
        atexit.register(self.close)
        self.stub = remote_executor_grpc_stub.RemoteExecutorGrpcStub(
            grpc.insecure_channel(self.address, [*CHANNEL_OPTIONS, ("grpc.max_reconnect_backoff_ms", 200)])
        )
        deadline = time.monotonic() + _START_SECONDS
        while not self.stub.is_ready:
            if self.process.poll() is not None or time.monotonic() > deadline:
                said, code = last_line(self.log), self.process.poll()
                self.close(keep_log=True)
                if isolate and code == os.EX_NOPERM:  # what `tfpfl.engines.tff.isolated` ends with
                    raise Unavailable(said)
                raise Unavailable(f"TFF's worker did not start within {_START_SECONDS} s; see its log, {self.log}")
            time.sleep(0.05)

    def close(self, keep_log: bool = False) -> None:
        """Kills the worker and, without `keep_log`, deletes its log."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if not keep_log:
            shutil.rmtree(self._folder, ignore_errors=True)


def last_line(log: Path) -> str:
    """The last line of a worker's log; '' if the log is empty."""
    lines = log.read_text(errors="replace").strip().splitlines()
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


def execution_context(concurrency: int = -1, isolate: bool = False):
    """Makes a TFF execution context on a `Worker` of this process; see `Worker` for the arguments.

    The first computation starts the worker; a later one starts a new worker if that has ended.
    """
    workers: list[Worker] = []

    def stub():
        if not workers or workers[-1].process.poll() is not None:
            workers.append(Worker(concurrency, isolate))
        return workers[-1].stub

    return context_on(stub)


_context = None  # (the context, whether its worker is isolated)
_replaced: list[Any] = []


def use_local_worker(concurrency: int | None = None, isolate: bool | None = None) -> None:
    """Makes all TFF computations of this process run on a `Worker` that this process starts.

    Args:
        concurrency: number of clients at the same time; default: the number of cores. More are not faster, and each
            needs memory. Ignored if the worker is in use already.
        isolate: see `Worker`; None (default): do not change it.

    Raises:
        Unavailable: TFF is not installed.
    """
    global _context
    if _context is None or isolate not in (None, _context[1]):
        require_tff()
        from tensorflow_federated.python.core.impl.context_stack import context_stack_impl

        _context = execution_context(concurrency or os.cpu_count() or 1, bool(isolate)), bool(isolate)
        # Keep the replaced context: when it is deleted, it sends SIGINT to its worker and waits until the worker ends.
        # That lasts for ever where SIGINT is ignored, as in background jobs of a shell.
        _replaced.append(context_stack_impl.context_stack.current)
        context_stack_impl.context_stack.set_default_context(_context[0])
