"""Temporary folders: private, deleted at the end, and after a kill by the next process; never somebody else's."""

import os
import signal
import subprocess
import sys

import pytest

from tfpfl.engines import temporary
from tfpfl.engines.temporary import TemporaryFolder

KILLED = """
import os, signal, sys
from temporary import TemporaryFolder  # as a file: the package would import TensorFlow
folder = TemporaryFolder("tfpfl-test-", sys.argv[1])
(folder.path / "a").mkdir()
(folder.path / "a" / "b").write_text("c")
print(folder.path.name, flush=True)
"""


@pytest.fixture
def made(tmp_path):
    """Makes folders in the test's own, and deletes them at the end."""
    found = []

    def make():
        found.append(TemporaryFolder("tfpfl-test-", tmp_path))
        return found[-1]

    yield make
    for folder in found:
        folder.delete()


def names(folder) -> set:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"])
def test_a_folder_goes_with_its_process_or_with_the_next(end, made, tmp_path):
    env = {**os.environ, "PYTHONPATH": os.path.dirname(temporary.__file__)}
    command = [sys.executable, "-c", KILLED + end, tmp_path]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGKILL if "kill" in end else 0), done.stderr
    assert names(tmp_path) == ({done.stdout.strip()} if end else set())
    ours = made()
    assert names(tmp_path) == {ours.path.name}


def test_folders_in_use_stay(made, tmp_path):
    first, second = made(), made()
    assert first.path.stat().st_mode & 0o777 == 0o700
    (first.path / "file").write_text("")
    first.delete()
    first.delete()
    assert names(tmp_path) == {second.path.name}
    second.keep()
    third = made()
    assert names(tmp_path) == {second.path.name, third.path.name}  # kept for somebody to read


def test_what_others_have_put_there_stays(made, tmp_path, monkeypatch):
    """A link, a folder without an owner, a file; and all that belongs to another user."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "owner").write_text("")
    (tmp_path / "tfpfl-test-link").symlink_to(precious)
    (tmp_path / "tfpfl-test-empty").mkdir()
    (tmp_path / "tfpfl-test-file").write_text("")
    made()
    assert names(tmp_path) >= {"precious", "tfpfl-test-link", "tfpfl-test-empty", "tfpfl-test-file"}
    assert names(precious) == {"owner"}
    abandoned = tmp_path / "tfpfl-test-abandoned"
    abandoned.mkdir()
    (abandoned / "owner").write_text("")
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    made()
    assert abandoned.exists()
    monkeypatch.undo()
    made()
    assert not abandoned.exists()


def test_all_at_once(made, tmp_path):
    made()
    made()
    temporary.delete_all()
    assert names(tmp_path) == set()
