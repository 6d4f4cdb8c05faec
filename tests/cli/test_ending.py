"""A command that is asked to end: one line that says how to continue, an exit code, and nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers import small_runs as runs
from helpers.marks import slow_but
from helpers.processes import alive, descendants
from tfpfl.cli import ending, main
from tfpfl.runs import training

MANY = ("--rounds", "1000000", "--evaluate-every", "0")
SMALL = ("--algorithm", "fedavg", "--steps", "2", "--clients", "5", *MANY)
NEEDS_TFF = pytest.mark.skipif(
    find_spec("tensorflow_federated") is None,
    reason="TensorFlow Federated is not installed (requirements.lock has it)",
)


def arguments(pid: int) -> str:
    """Of a process; '' if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def answer_to_signals():
    """A process that is started in the background, or under nohup, would else ignore some of them."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class Command:
    """`tfpfl ...` in a process of its own, with its own folder for temporary files."""

    def __init__(self, folder: Path, temporary: Path, *arguments, program=("-m", "tfpfl")):
        self.folder, self.temporary = folder, temporary
        self.said = open(folder / "said", "w+")
        env = {**os.environ, "TMPDIR": str(self.temporary), "TFPFL_CACHE": str(folder / "cache")}
        self.process = subprocess.Popen(
            [sys.executable, *program, *map(str, arguments)],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self.said,
            stderr=subprocess.STDOUT,
            preexec_fn=answer_to_signals,
        )

    def text(self) -> str:
        return (self.folder / "said").read_text()

    def until(self, condition, seconds=180):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None, self.text()
            time.sleep(0.05)
        return self

    def until_it_says(self, text):
        return self.until(lambda: text in self.text())

    def until_rounds(self, *run):
        """Until this run, of a folder below this one, has rounds."""
        wal = self.folder.joinpath(*run, "state.sqlite-wal")
        return self.until(lambda: wal.exists() and wal.stat().st_size > 50_000)

    def end(self, number) -> int:
        """Its exit code after a signal. Nothing of it lives on; only Ray's agents do for a minute, after kill -9."""
        others = [p for p in descendants(self.process.pid) if number != signal.SIGKILL or "agent" not in arguments(p)]
        self.process.send_signal(number)
        code = self.process.wait(120)
        end = time.monotonic() + 120
        while any(map(alive, others)):
            assert time.monotonic() < end, [p for p in others if alive(p)]
            time.sleep(0.05)
        return code

    def left(self) -> list:
        return sorted(path.name for path in self.temporary.iterdir())


@pytest.fixture
def started(tmp_path):
    """Starts a command, and ends it at the test's end whatever happened."""
    commands, temporary = [], Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # Ray needs a short path

    def start(*arguments, **how):
        commands.append(Command(tmp_path, temporary, *arguments, **how))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()
        command.process.wait()
        command.said.close()
    shutil.rmtree(temporary, ignore_errors=True)


def check_said(command, name, how):
    """One line, in the end, of what ended it and how to continue."""
    last = command.text().strip().splitlines()[-1]
    assert last.startswith(name) and last.endswith(f"Continue with: {how}") and "Traceback" not in command.text()


@pytest.mark.slow
def test_sigterm_ends_a_run_and_says_how_to_continue(started, tmp_path):
    command = started("run", *SMALL, "--out", "a run").until_rounds("a run")
    assert command.end(signal.SIGTERM) == 143
    check_said(command, "Ended by SIGTERM; ", "tfpfl resume 'a run'")
    done = len(runs.saved(tmp_path / "a run")["history"])
    assert f"; {done} rounds are saved. " in command.text() and done > 0
    assert (tmp_path / "a run" / "history.csv").read_text().count("\n") == done + 1
    assert command.left() == []


def engines():
    ray = [
        pytest.mark.slow,
        pytest.mark.table,
        pytest.mark.skipif(find_spec("ray") is None, reason="Ray, an extra, is not installed"),
    ]
    return [pytest.param("tff", marks=[pytest.mark.slow, NEEDS_TFF]), pytest.param("ray", marks=ray)]


@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize(
    ("number", "code"),
    slow_but([(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)], (signal.SIGTERM, 143)),
)
def test_workers_leave_nothing(engine, number, code, started, tmp_path):
    command = started("run", "--engine", engine, *SMALL, "--out", "run").until_rounds("run")
    assert any(name.startswith({"tff": "tfpfl-worker-", "ray": "tfpfl-ray-"}[engine]) for name in command.left())
    assert command.end(number) == code
    check_said(command, {130: "Interrupted; "}.get(code, f"Ended by {number.name}; "), "tfpfl resume run")
    assert command.left() == []


@pytest.mark.parametrize("engine", engines())
def test_what_a_killed_run_leaves_is_deleted_by_the_next(engine, started, tmp_path):
    command = started("run", "--engine", engine, *SMALL, "--out", "run").until_rounds("run")
    assert command.end(signal.SIGKILL) == -signal.SIGKILL
    (left,) = (name for name in command.left() if name.startswith("tfpfl-"))
    command = started("run", "--engine", engine, *SMALL, "--out", "other").until_rounds("other")
    assert left not in command.left()
    assert command.end(signal.SIGTERM) == 143 and command.left() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "run"),
    [
        (("compare", "--algorithms", "local,fedavg"), "local-s0"),
        (("sweep", "--algorithm", "fedavg", "--grid", "eta=0.1,0.2"), "fedavg-*"),
    ],
)
def test_studies_end_like_runs(arguments, run, started, tmp_path):
    command = started(*arguments, "--clients", "5", *MANY[:2], "--out", "out")
    command.until(lambda: any(p.stat().st_size > 50_000 for p in (tmp_path / "out").glob(f"{run}/state.sqlite-wal")))
    assert command.end(signal.SIGTERM) == 143
    check_said(command, "Ended by SIGTERM; finished rounds are saved. ", ending.SAME_COMMAND)
    assert command.left() == []


STUCK = """
import hashlib, signal, sys, threading
from tfpfl.cli import ending, main
import click

ending.PATIENCE = 0.5

@main.command()
def stuck():
    from tfpfl.engines.temporary import TemporaryFolder
    TemporaryFolder("tfpfl-stuck-")
    with ending.resumable("tfpfl resume somewhere"):
        print("it waits now", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # a call of many minutes that lets other threads work

@main.command()
def writing():
    import subprocess
    from tfpfl.engines.temporary import TemporaryFolder
    place = TemporaryFolder("tfpfl-written-").path / "file"
    program = f"while mkdir -p {place.parent} && : > {place}; do :; done"
    with ending.resumable("tfpfl resume somewhere"):
        subprocess.Popen(["sh", "-c", program])
        print("it waits now", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

@main.command()
def waiting():
    threading.Thread(target=lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)).start()
    with ending.resumable("tfpfl resume somewhere"):
        print("it waits now", flush=True)
        signal.pause()

@main.command()
def computing():
    import time
    import tensorflow as tf, tensorflow_federated as tff
    from tfpfl.engines import temporary
    from tfpfl.engines.tff.worker import use_local_worker

    delete_all = temporary.delete_all
    temporary.delete_all = lambda: (time.sleep(3), delete_all())  # time enough to miss a worker

    def compute():
        use_local_worker()
        add = tff.tensorflow.computation(lambda x: x + 1, tf.int32)
        add(1)
        print("it waits now", flush=True)
        while True:
            add(1)

    threading.Thread(target=compute).start()
    with ending.resumable("tfpfl resume somewhere"):
        signal.pause()

main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stuck", "writing", "waiting", pytest.param("computing", marks=NEEDS_TFF)])
def test_a_call_that_does_not_return(name, started):
    """Of the main thread, while a child process may write into a temporary folder, or of another thread."""
    command = started(name, program=("-c", STUCK)).until_it_says("it waits now")
    assert command.end(signal.SIGTERM) == 143
    check_said(command, "Ended by SIGTERM; finished rounds are saved. ", "tfpfl resume somewhere")
    assert command.text().count("Continue with") == 1 and command.left() == []


def test_signals_that_are_ignored_stay_so(started):
    """As under nohup."""
    program = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from tfpfl.cli import ending\n"
        "ending.end_with_signals()\n"
        "signal.raise_signal(signal.SIGHUP)\n"  # does not return if the signal ends the process
        "print('it lives on', flush=True)"
    )
    command = started(program=("-c", program))
    assert command.process.wait(180) == 0, command.text()
    assert command.text().endswith("it lives on\n")


@pytest.mark.parametrize("arguments", [("compare", "--algorithms", "local"), ("sweep", "--grid", "beta=0.1,0.2")])
def test_a_study_that_is_interrupted_by_the_keyboard(arguments, six_clients, elsewhere, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Training, "_round", interrupted)
    result = CliRunner().invoke(main, [*arguments, "--clients", "5", "--rounds", "2", "--out", "out"])
    assert result.exit_code == 130, result.output
    assert f"Interrupted; finished rounds are saved. Continue with: {ending.SAME_COMMAND}" in result.output
