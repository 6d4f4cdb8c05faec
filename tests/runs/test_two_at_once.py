"""Two processes that begin or continue a run in one folder: one does it, the other is told, and nothing is mixed."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from helpers import small_runs as runs
from tfpfl.cli import main
from tfpfl.runs import run as run_module
from tfpfl.runs.config import RunError, read_config
from tfpfl.runs.locks import InUse, Lock
from tfpfl.runs.run import Run
from tfpfl.studies.records import Record

HOLD = """
import sys
from tfpfl.runs.locks import Lock
lock = Lock(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_by_another_process(path):
    """A process that has the lock of this file until the block ends; it loads no TensorFlow."""
    command = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "locked\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def told(folder, pid):
    return f"another run is being created or trained in {re.escape(str(folder))} by process {pid} since 20.*: wait"


def files(folder):
    return {p.name for p in folder.iterdir()} if folder.exists() else set()


@pytest.mark.slow
def test_a_run_that_nobody_closed_gives_its_folder_back_when_nothing_refers_to_it(six_clients, tmp_path):
    """In a notebook, a cell that runs again makes the same run anew, and nobody has the old one to close it."""
    folder = tmp_path / "run"
    run = Run.create(runs.config(rounds=1), folder, six_clients)
    with pytest.raises(RunError, match="by this process .*: close it: run.close()"):
        Run.open(folder)
    del run
    with Run.open(folder) as run:
        assert not run.is_complete


@pytest.mark.slow
def test_of_two_creations_at_the_same_moment_one_is_told(six_clients, tmp_path, monkeypatch):
    """The second begins while the first writes config.json: then both have seen an empty folder."""
    folder, written, seen = tmp_path / "run", run_module.write_whole, []

    def meanwhile(path, text):
        if not seen:
            seen.append(None)
            with pytest.raises(RunError) as error:
                Run.create(runs.config(seed=2, rounds=1), folder, six_clients)
            seen[0] = str(error.value)
        written(path, text)

    monkeypatch.setattr(run_module, "write_whole", meanwhile)
    with Run.create(runs.config(seed=1, rounds=1), folder, six_clients) as run:
        assert f"by this process {os.getpid()} since" in seen[0] and str(folder) in seen[0]
        run.train()
    assert read_config(folder).seed == 1
    with Run.open(folder) as run:
        assert run.store.round_num == 1 and run.config.seed == 1
    assert Record.read(folder).config.seed == 1


def test_a_folder_in_which_another_process_creates_a_run(six_clients, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with held_by_another_process(folder / "state.sqlite") as process:
        with pytest.raises(RunError, match=told(folder, process.pid)):
            Run.create(runs.config(rounds=1), folder, six_clients)
        assert files(folder) == {"state.sqlite.lock"}  # nothing of the process that has it was taken away
        process.send_signal(signal.SIGKILL)
        process.wait()
    Run.create(runs.config(rounds=1), folder, six_clients).close()  # a killed process blocks nobody
    assert read_config(folder).rounds == 1


def test_the_second_of_two_that_resume_is_told_before_it_reads_any_data(a_run, monkeypatch):
    before = runs.saved(a_run), (a_run / "config.json").read_bytes()
    monkeypatch.setattr(run_module, "open_federation", lambda config: pytest.fail("it has read the data"))
    with (
        held_by_another_process(a_run / "state.sqlite") as process,
        pytest.raises(RunError, match=told(a_run, process.pid)),
    ):
        Run.open(a_run, rounds=20)
    assert (runs.saved(a_run), (a_run / "config.json").read_bytes()) == before
    monkeypatch.undo()
    Run.open(a_run).close()


def test_a_link_in_a_run_folder_is_not_written_through(a_run, tmp_path):
    """An archive can hold links; each of these files is written by whoever resumes or evaluates a run."""
    victim = tmp_path / "victim"
    for name in ("state.sqlite.lock", "history.csv", "clients.csv", "summary.json", "config.json", "tensorboard"):
        path, kept = a_run / name, tmp_path / "kept"
        had = path.exists()
        if had:
            path.rename(kept)
        victim.write_bytes(kept.read_bytes() if kept.is_file() else b"mine")
        before = victim.read_bytes()
        path.symlink_to(victim)
        with pytest.raises(RunError, match=f"{name} is a link: a run would write elsewhere through it"):
            Run.open(a_run)
        assert victim.read_bytes() == before
        path.unlink()
        if had:
            kept.rename(path)
    os.mkfifo(a_run / "history.pipe")
    with pytest.raises(RunError, match="history.pipe is no ordinary file"):
        Run.open(a_run)


def test_a_lock_is_no_link_and_no_pipe(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "a.lock").symlink_to(victim)
    os.mkfifo(tmp_path / "b.lock")
    for name in "ab":
        with pytest.raises(OSError):
            Lock(tmp_path / name)
    assert victim.read_text() == "mine"


def test_a_creation_that_fails_leaves_nothing_and_blocks_nobody(six_clients, tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    there = tmp_path / "there"
    there.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(run_module, "write_whole", full)
        for folder in (tmp_path / "new" / "run", there):
            with pytest.raises(OSError, match="No space left"):
                Run.create(runs.config(), folder, six_clients)
    assert files(tmp_path) == {"there"} and files(there) == set()
    Run.create(runs.config(), there, six_clients).close()


def test_a_report_is_not_written_of_another_configuration_than_that_of_the_run(a_run):
    config = (a_run / "config.json").read_text()
    (a_run / "config.json").write_text(config.replace('"seed": 0', '"seed": 5'))
    with pytest.raises(RunError, match="config.json and state.sqlite in .* are not of one run"):
        Record.read(a_run)
    (a_run / "config.json").write_text(config)
    assert Record.read(a_run).rounds == 7


def test_a_demo_does_not_replace_a_demo_that_is_running(tmp_path):
    folder = tmp_path / "few" / "pflego"
    folder.mkdir(parents=True)
    for name in ("demo", "config.json"):
        (folder / name).touch()
    with held_by_another_process(folder / "state.sqlite") as process:
        found = CliRunner().invoke(main, ["demo", "--engine", "local", "--out", str(tmp_path)])
        assert found.exit_code == 1 and re.search(told(folder, process.pid), found.output)
    assert files(folder) == {"demo", "config.json", "state.sqlite.lock"}


def test_locks_tell_their_owner(tmp_path):
    path = tmp_path / "file"
    lock = Lock(path)
    with pytest.raises(InUse, match=rf"^by this process {os.getpid()} since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d$"):
        Lock(path)
    lock.release()
    lock.release()
    (tmp_path / "file.lock").write_text("4194305 2020-01-01 00:00:00\n")  # a killed owner has left this
    second = Lock(path)
    (tmp_path / "file.lock").write_text("")  # the moment before an owner has written its number
    with pytest.raises(InUse, match="^by another process$"):
        Lock(path)
    second.release()


def test_a_lock_whose_file_was_removed_protects_nothing_and_is_taken_again(tmp_path, monkeypatch):
    """The file goes between opening and locking it, as when a creation fails and removes its folder."""
    opened = []

    def opening(path, *how):
        file = real(path, *how)
        opened.append(path)
        if len(opened) == 1:
            os.unlink(path)
        return file

    real = os.open
    monkeypatch.setattr(os, "open", opening)
    lock = Lock(tmp_path / "file")
    assert len(opened) == 2
    with pytest.raises(InUse):
        Lock(tmp_path / "file")
    lock.release()


def test_a_folder_that_cannot_be_written(six_clients, tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(RunError, match="cannot write in .*/run: Permission denied"):
        Run.create(runs.config(), tmp_path / "run", six_clients)
    assert not (tmp_path / "run").exists()
