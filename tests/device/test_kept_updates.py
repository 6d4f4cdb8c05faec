"""An update that a device keeps until the server has answered: nothing but damage makes it be dropped."""

import errno
from pathlib import Path

import numpy as np
import pytest

from tflite_export.device.head_file import SavedHead
from tflite_export.device.live import state as states
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
