"""An update that a device keeps until the server has answered: nothing but damage makes it be dropped."""

import errno
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tflite_export.device.errors import InvalidInput
from tflite_export.device.head_file import SavedHead
from tflite_export.device.live import state as states
from tflite_export.device.live.client import LiveDevice, ServerError
from tflite_export.device.live.secure import state as secure_states
from tflite_export.device.live.secure.state import SecureState
from tflite_export.device.live.state import Pending, State

HEAD = SavedHead(np.arange(6, dtype=np.float32).reshape(3, 2), np.ones(2, np.float32), "ab" * 32)
KEPT = Pending(7, b"what is sent", HEAD)


@pytest.fixture(params=["update", "visit of a secure round"])
def kept(request, tmp_path):
    """The file, and what reads it."""
    device = State(tmp_path)
    if request.param == "update":
        device.keep(KEPT)
        yield tmp_path / "update.npz", lambda: device.pending(3, 2)
    else:
        secure = SecureState(tmp_path)
        secure.keep_visit(KEPT)
        yield tmp_path / "secure" / "visit.npz", lambda: secure.visit(3, 2)
    device.close()


def is_kept(found):
    (number, body, head), (*_, expected) = found, KEPT
    same = np.array_equal(head.kernel, expected.kernel) and np.array_equal(head.bias, expected.bias)
    return same and (number, body, head.theta_sha256) == (7, KEPT.body, expected.theta_sha256)


def test_one_changed_bit_never_stops_the_device(kept):
    """A changed method of compression or an encryption was an error of Python's own, at every start."""
    path, read = kept
    whole = path.read_bytes()
    dropped = 0
    for i in range(len(whole)):
        content = bytearray(whole)
        content[i] ^= 1
        path.write_bytes(content)
        found = read()
        dropped += found is None
        assert found is None or is_kept(found)
    assert dropped > len(whole) / 2


def test_it_is_read_on_a_full_disk_and_stays_where_it_cannot_be_read(kept, monkeypatch):
    """The server may have counted it, and then the head in it is the client's."""
    path, read = kept

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for module in (states, secure_states):
        monkeypatch.setattr(module, "write_whole", full)
    assert is_kept(read())
    monkeypatch.setattr(Path, "read_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        read()
    monkeypatch.undo()
    assert is_kept(read())


def test_a_folder_is_of_one_device_whatever_else_the_process_closes(tmp_path):
    """A lock of `lockf` ended when any other file of this path was closed, such as by a device that had failed."""

    def another_process():
        code = f"from tflite_export.device.live.state import State; State({str(tmp_path)!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return done.returncode, done.stderr.splitlines()[-1:]

    with closing(State(tmp_path)):
        (tmp_path / "head.bin.new").touch()
        with pytest.raises(InvalidInput, match="is in use: another device works with it"):
            State(tmp_path)
        assert (tmp_path / "head.bin.new").exists()  # the first one may be writing it
        (tmp_path / "lock").open("wb").close()
        code, (said,) = another_process()
        assert code == 1 and said.endswith("is in use: another device works with it")
    assert another_process() == (0, [])


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EWOULDBLOCK])
def test_a_file_system_without_locks_is_not_told_as_another_device(number, tmp_path, monkeypatch):
    """In the words of the client in C: `system_error` there."""

    def flock(file, how):
        files.append(file)
        raise OSError(number, os.strerror(number))

    files = []
    monkeypatch.setattr(states.fcntl, "flock", flock)
    told = f"[Errno {number}] {os.strerror(number)}: '{tmp_path / 'lock'}'"
    if number == errno.EWOULDBLOCK:
        told = f"{tmp_path} is in use: another device works with it"
    with pytest.raises((OSError, InvalidInput), match=f"^{re.escape(told)}$"):
        State(tmp_path)
    assert files[0].closed


def test_a_device_that_cannot_begin_leaves_its_folder_free(tmp_path):
    """At once: not when Python finds time to collect what is left of it."""
    examples = {"train": (np.ones((2, 3), np.float32), np.array([0, 1]))}
    for _ in range(2):
        with pytest.raises(ServerError, match="does not answer"):
            LiveDevice("http://127.0.0.1:9", tmp_path, examples, "token", patience=0.0)


def test_an_attempt_that_cannot_be_read_is_not_begun_anew(tmp_path, monkeypatch):
    """Its messages may have been sent, and others with the same secrets would show what the masks hide."""
    secure = SecureState(tmp_path)
    assert secure.attempt() is None
    secure.keep_attempt({"key": [1, 1]})

    def failing(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_text", failing)
    with pytest.raises(OSError, match="Input/output error"):
        secure.attempt()
    monkeypatch.undo()
    assert secure.attempt() == {"key": [1, 1]}
    (tmp_path / "secure" / "attempt.json").write_text("{")
    assert secure.attempt() is None
