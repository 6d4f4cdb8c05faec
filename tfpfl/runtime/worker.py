"""A local TFF worker that is ours: it writes to its own log and ends with the process that started it.

TFF's own local context leaves its worker running after kill -9 and lets it inherit standard output, so that a pipe
behind the run never closes. The modules of TFF used here are private: hence the exact pin in requirements.lock.
"""

import atexit
import os
import subprocess
import sys
import tempfile
import time

# Linux: ask the kernel to end the worker when its parent goes, however that happens; then become the worker.
_TIED_TO_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
_MAX_MESSAGE_BYTES = 2_000_000_000
_START_SECONDS = 60


def require_tff():
    """TensorFlow Federated, or what to do without it.

    Raises:
        RuntimeError: it is not installed here.
    """
    try:
        import tensorflow_federated as tff
    except ImportError as error:
        raise RuntimeError(
            "the TFF engine needs tensorflow-federated 0.87, which installs on Python 3.11 only, from this project's "
            "requirements.lock: run `make demo` or `make test` in a checkout, or use the local engine (--engine "
            "local). "
            f"Found Python {sys.version_info.major}.{sys.version_info.minor}; the import said: {error}"
        ) from error
    return tff


class Worker:
    """TFF's worker binary as a child of this process.

    Args:
        concurrency: how many client computations it runs at once; -1 for no limit.
    """

    def __init__(self, concurrency: int = -1):
        tff = require_tff()
        import grpc
        import portpicker
        from tensorflow_federated.python.core.impl.executors import remote_executor_grpc_stub

        binary = os.path.join(os.path.dirname(tff.__file__), "data", "worker_binary")
        port = portpicker.pick_unused_port()
        self.log = tempfile.NamedTemporaryFile(prefix="tfpfl-worker-", suffix=".log", delete=False)  # noqa: SIM115
        command = [binary, f"--port={port}", f"--max_concurrent_computation_calls={concurrency}"]
        if sys.platform == "linux":
            command = [sys.executable, "-c", _TIED_TO_PARENT, *command]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )
        atexit.register(self.close)
        options = [
            (f"grpc.max_{kind}_length", _MAX_MESSAGE_BYTES) for kind in ("message", "receive_message", "send_message")
        ]
        channel = grpc.insecure_channel(f"localhost:{port}", options)
        self.stub = remote_executor_grpc_stub.RemoteExecutorGrpcStub(channel)
        deadline = time.monotonic() + _START_SECONDS
        while not self.stub.is_ready:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.close(keep_log=True)
                raise RuntimeError(f"TFF's worker did not start within {_START_SECONDS} s; its log is {self.log.name}")
            time.sleep(0.05)

    def close(self, keep_log: bool = False) -> None:
        """Ends the worker; its log goes with it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()
        if not keep_log and os.path.exists(self.log.name):
            os.unlink(self.log.name)


def execution_context(concurrency: int = -1):
    """A TFF execution context on a `Worker` of this process, which is started at the first computation."""
    require_tff()
    from tensorflow_federated.python.core.backends.native import compiler
    from tensorflow_federated.python.core.environments.tensorflow_frontend import tensorflow_computation
    from tensorflow_federated.python.core.impl.execution_contexts import sync_execution_context
    from tensorflow_federated.python.core.impl.executor_stacks import python_executor_stacks
    from tensorflow_federated.python.core.impl.executors import remote_executor
    from tensorflow_federated.python.core.impl.types import placements

    workers = []

    def executor(cardinalities):
        if not workers or workers[-1].process.poll() is not None:
            workers.append(Worker(concurrency))
        cardinalities.setdefault(placements.CLIENTS, 0)
        remote = remote_executor.RemoteExecutor(workers[-1].stub)
        remote.set_cardinalities(cardinalities)
        return remote

    return sync_execution_context.SyncExecutionContext(
        executor_fn=python_executor_stacks.ResourceManagingExecutorFactory(executor_stack_fn=executor),
        compiler_fn=compiler.desugar_and_transform_to_native,
        transform_args=tensorflow_computation.transform_args,
        transform_result=tensorflow_computation.transform_result,
    )


_context = None
_replaced = []


def use_local_worker(concurrency: int | None = None) -> None:
    """Makes a worker of ours the one that TFF computations of this process run on.

    Args:
        concurrency: clients at once; default one a core. More are not faster, and each needs memory.
    """
    global _context
    if _context is None:
        require_tff()
        from tensorflow_federated.python.core.impl.context_stack import context_stack_impl

        _context = execution_context(concurrency or os.cpu_count() or 1)
        # When TFF's own context goes, it ends its worker, if it had started one, by SIGINT and waits for it: for ever
        # where SIGINT is ignored, as in a shell's background jobs. So the context is kept.
        _replaced.append(context_stack_impl.context_stack.current)
        context_stack_impl.context_stack.set_default_context(_context)
