"""Who can reach TFF's worker: nobody else by default, and where that is impossible, a run says so or refuses."""

import errno
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

from helpers.network import addresses, listening, reached
from helpers.processes import descendants
from tfpfl.checks import InvalidArgument, Unavailable
from tfpfl.cli import main
from tfpfl.engines.machines import Machines
from tfpfl.engines.tff import isolated
from tfpfl.engines.tff import worker as worker_module
from tfpfl.engines.tff.worker import Worker, require_isolation, use_local_worker, why_not_isolated

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
SCRIPT = str(Path(isolated.__file__))

# Starts a program in a user namespace in which nobody may make a further user or network namespace.
FORBIDDEN = """
import ctypes, os, sys
uid = os.getuid()
if ctypes.CDLL(None).unshare(0x10000000):
    sys.exit("no user namespaces")
texts = {"self/setgroups": "deny", "self/uid_map": f"{uid} {uid} 1"}
texts |= {f"sys/user/max_{kind}_namespaces": "0" for kind in ("net", "user")}
for file, text in texts.items():
    with open(f"/proc/{file}", "w") as f:
        f.write(text)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def forbidden(*arguments):
    """The command of Python with these arguments, where no namespace may be made; skips where that cannot be had."""
    command = [sys.executable, "-c", FORBIDDEN]
    if subprocess.run([*command, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip("this system has no user namespaces, so that none can be forbidden")
    return [*command, *map(str, arguments)]


@pytest.fixture
def allowed():
    """Skips where this system really does not allow it."""
    if why := why_not_isolated():
        pytest.skip(why)


@pytest.fixture
def not_allowed(monkeypatch):
    """As if this system did not."""
    monkeypatch.setattr(worker_module, "why_not_isolated", lambda: "this test forbids it")


@contextmanager
def worker(**how):
    found = Worker(2, **how)
    try:
        yield found
    finally:
        found.close()


def test_a_worker_is_isolated_without_being_asked(tff, allowed):
    with worker() as found:
        assert reached(found.port) == []
        folder = os.path.dirname(found.address.removeprefix("unix:"))
        assert os.stat(folder).st_mode & 0o777 == 0o700
    with worker(isolate=False) as found:
        assert reached(found.port) == addresses()


def test_a_worker_that_cannot_be_isolated_says_so_in_one_line(tff, not_allowed, caplog):
    with caplog.at_level(logging.WARNING, worker_module.__name__), worker() as found:
        assert reached(found.port) == addresses()
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"port {found.port} of every address" in said and "this test forbids it" in said
    assert "every user of this machine" in said and "What to do" in said and "\n" not in said
    assert f"as user {os.getuid()}" in said


def test_where_isolation_is_required_and_impossible(tff, not_allowed, tmp_path):
    for refused in (require_isolation, lambda: Worker(2, isolate=True), lambda: use_local_worker(isolate=True)):
        with pytest.raises(Unavailable, match="isolation of TFF's worker is required, but this test forbids it"):
            refused()
    for flag in ("--require-isolation", "--isolate"):
        result = CliRunner().invoke(main, ["run", "--engine", "tff", flag, "--out", str(tmp_path / "run")])
        assert result.exit_code == 1 and not (tmp_path / "run").exists()
        assert "isolation of TFF's worker is required" in result.output and result.output.count("\n") == 1


def test_options_that_contradict(tmp_path):
    def error(*arguments):
        result = CliRunner().invoke(main, ["run", "--out", str(tmp_path / "run"), *arguments])
        assert result.exit_code == 1 and not (tmp_path / "run").exists()
        return result.output

    assert "--require-isolation is for --engine tff" in error("--require-isolation")
    assert "--no-isolation is for --engine tff" in error("--no-isolation", "--engine", "ray")
    assert "Leave out what is said of isolation" in error("--engine", "tff", "--workers", "here:1", "--no-isolation")
    for isolate in (True, False):
        with pytest.raises(InvalidArgument, match="there are others: here:1"):
            Machines(workers=("here:1",), isolate=isolate)
    Machines(workers=("here:1",))


def test_where_namespaces_are_really_forbidden():
    """The limits of this user are 0 there, for user namespaces and for networks."""
    probe = subprocess.run(forbidden("-I", SCRIPT, "probe"), capture_output=True, text=True, check=False)
    assert probe.returncode == os.EX_NOPERM
    assert "does not let this user make a network namespace (No space left on device; see sysctl" in probe.stderr
    assert len(probe.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_worker_command_where_namespaces_are_forbidden(tff):
    port = pytest.importorskip("portpicker").pick_unused_port()
    command = forbidden("-m", "tfpfl", "worker", "--isolate", "--port", port)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "this system does not let this user make a network namespace" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and reached(port) == []


def test_what_an_isolated_program_sees(allowed, tmp_path):
    """The folder it was started in, through which relative paths lead; and of networks the loopback device alone."""
    (tmp_path / "a.txt").write_text("found")
    program = ["sh", "-c", "cat a.txt; tail -n +3 /proc/net/dev | wc -l"]
    command = [sys.executable, "-I", SCRIPT, f"unix:{tmp_path / 'socket'}", "1", *program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["found1"] and not done.stderr


def test_an_error_of_one_connection_does_not_end_the_others(monkeypatch):
    """The client may be gone already, or too many files may be open for a moment."""
    came = [OSError(24, "Too many open files"), (one := socket.socket(), None), KeyboardInterrupt]
    seen = []
    monkeypatch.setattr(isolated, "relay", lambda connection, port: seen.append((connection, port)))
    listener = mock.Mock(accept=mock.Mock(side_effect=came))
    with pytest.raises(KeyboardInterrupt):
        isolated.accept(listener, 7)
    one.close()
    assert seen == [(one, 7)]


@pytest.mark.parametrize("with_splice", [True, False])
def test_what_comes_through_is_what_was_sent(with_splice, monkeypatch):
    def missing(*_):
        raise OSError(errno.ENOSYS, "there is no splice here")

    if not with_splice:
        monkeypatch.setattr(os, "splice", missing)
    (ours, outside), (inside, theirs) = socket.socketpair(), socket.socketpair()
    sent, found = os.urandom(5_000_000), bytearray()
    threading.Thread(target=isolated.pump, args=(outside, inside), daemon=True).start()
    threading.Thread(target=lambda: (ours.sendall(sent), ours.close()), daemon=True).start()
    while part := theirs.recv(2**20):
        found += part
    assert found == sent  # and then the end: whoever closes is closed
    for end in (outside, inside, theirs):
        end.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root has rights over files of others")
def test_an_isolated_worker_of_root_reads_what_root_reads(allowed, tmp_path):
    """In a user namespace it would have no rights over other users' files."""
    (tmp_path / "a.txt").write_text("found")
    (tmp_path / "a.txt").chmod(0o600)
    os.chown(tmp_path / "a.txt", 65534, 65534)
    command = [sys.executable, "-I", SCRIPT, f"unix:{tmp_path / 'socket'}", "1", "cat", str(tmp_path / "a.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "found", done.stderr


def test_a_long_folder_for_temporary_files(tff, allowed, tmp_path, monkeypatch):
    """The path of a socket has at most 107 characters."""
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with worker() as found:
        assert found.log.is_relative_to(long) and reached(found.port) == []
    assert not list(long.iterdir())


@contextmanager
def running(command, folder):
    """A run of very many rounds, from its first rounds on; and what it says."""
    rounds = ["--rounds", "1000000", "--evaluate-every", "0", "--out", str(folder), "--algorithm", "fedavg"]
    said = open(folder.with_suffix(".log"), "w+")
    process = subprocess.Popen([*command, *rounds], stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 180
        while not (folder / "state.sqlite-wal").exists() or (folder / "state.sqlite-wal").stat().st_size < 50_000:
            assert process.poll() is None and time.monotonic() < end, folder.with_suffix(".log").read_text()
            time.sleep(0.1)
        yield process.pid
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        said.close()


@pytest.mark.slow
def test_no_port_is_open_while_a_run_lasts(tff, allowed, tmp_path):
    with running([sys.executable, "-m", "tfpfl", "run", "--engine", "tff"], tmp_path / "run") as pid:
        assert any("worker_binary" in name(p) for p in descendants(pid))
        assert listening([pid, *descendants(pid)]) == []
    assert "listens on port" not in (tmp_path / "run.log").read_text()


@pytest.mark.slow
def test_a_run_where_namespaces_are_forbidden_names_the_port(tff, tmp_path):
    command = forbidden("-m", "tfpfl", "run", "--engine", "tff")
    with running(command, tmp_path / "run") as pid:
        (port,) = listening([pid, *descendants(pid)])
    lines = [line for line in (tmp_path / "run.log").read_text().splitlines() if "TFF's worker listens" in line]
    assert len(lines) == 1 and re.search(rf"port {port}\b.*does not let this user make a network namespace", lines[0])
    required = subprocess.run([*command, "--require-isolation"], cwd=tmp_path, capture_output=True, text=True)
    assert required.returncode == 1 and "isolation of TFF's worker is required" in required.stderr
    assert len(required.stderr.splitlines()) == 1 and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_demo_where_namespaces_are_forbidden(tff, tmp_path):
    command = forbidden("-m", "tfpfl", "demo", "--rounds", 2, "--out", tmp_path / "demo")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "PFLEGO" in done.stdout, done.stderr
    assert (done.stdout + done.stderr).count("TFF's worker listens on port") == 1


IN_THREADS = r"""
import os, sys, threading
from pathlib import Path
import tensorflow_federated as tff
from helpers.network import listening
from helpers.processes import descendants
from helpers.toys import backbone, initial_states, on_disk, visits_by_id
from tfpfl.algorithms import fedsgd
from tfpfl.engines.machines import Machines
from tfpfl.engines.engine import make_engine
from tfpfl.engines.tff.evaluation import federated_evaluation
from tfpfl.models import SplitModel

federation = on_disk(Path(sys.argv[1]), (6, 9), (2, 2))
algorithm = fedsgd(SplitModel(backbone("float32")), federation.population())
states = list(initial_states(algorithm, algorithm.population).values())
given = states, visits_by_id(algorithm.population, [0, 1], 1)
made, losses, errors = [], [], []

def make():
    made.append(make_engine("tff", algorithm, federation, machines=Machines(isolate=True)))

def a_round():
    try:
        output = made[0].next(made[0].initialize(), *given)
        losses.append(float(output.metrics["loss"]))
        federated_evaluation(algorithm, federation, ["test"])(output.server, *given)
    except BaseException as error:
        errors.append(error)

def in_threads(*functions):
    threads = [threading.Thread(target=f) for f in functions]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

in_threads(make)  # in another thread than the one that imported TFF, whose context is TFF's own
a_round()
in_threads(a_round, a_round)
in_threads(a_round)
mine = [os.getpid(), *descendants(os.getpid())]

def is_worker(pid):
    try:
        return b"worker_binary" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:  # it ended meanwhile
        return False

workers = [pid for pid in mine if is_worker(pid)]
print(len(losses), len(set(losses)), errors, len(workers), listening(mine))
"""


@pytest.mark.slow
def test_every_thread_uses_the_isolated_worker(tff, allowed, tmp_path):
    """One worker for all, also where a process is made in one thread and runs in others."""
    command = [sys.executable, "-c", IN_THREADS, str(tmp_path / "federation")]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=False)
    assert done.stdout.split("\n")[-2:] == ["4 1 [] 1 []", ""], (done.stdout, done.stderr[-2000:])


def name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
    except OSError:
        return ""


def test_a_listening_socket_is_found():
    """What the tests above rely on."""
    with socket.create_server(("", 0)) as server:
        assert server.getsockname()[1] in listening([os.getpid()])
