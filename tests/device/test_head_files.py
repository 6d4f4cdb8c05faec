"""Files that are written in one step."""

import errno
import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import tensorflow as tf

from helpers.phone_bundles import small_bundle
from tflite_export.device.client import DeviceClient
from tflite_export.device.files import NotOnDisk, remove_leftovers, write_whole
from tflite_export.device.head_file import HeadError, SavedHead, load_head, save_head


def test_two_threads_write_one_file(tmp_path, monkeypatch):
    """Both have their content in a file before either gives it the name: neither takes the other's."""
    written, sync = Barrier(2), os.fsync

    def together(file):
        written.wait(timeout=30)
        sync(file)

    monkeypatch.setattr(os, "fsync", together)
    contents = [b"a" * 1000, b"b" * 2000]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda content: write_whole(tmp_path / "head.bin", content), contents))
    assert (tmp_path / "head.bin").read_bytes() in contents
    assert os.listdir(tmp_path) == ["head.bin"]


def test_what_killed_processes_left_is_deleted_whatever_their_numbers(tmp_path):
    """In a container each process has the number of the one that was killed before."""
    left = [tmp_path / f"head.bin.{process}.123.new" for process in (1, os.getpid(), os.getppid(), 10**40)]
    others = [
        tmp_path / f"head.bin{more}"
        for more in (".1.new", ".1.2.new.txt", ".0.1.new", ".1.x.new", ".new", "2.1.2.new", ".1.2.3.new")
    ]
    others += [tmp_path / "headxbin.1.123.new", tmp_path / "a.head.bin.1.123.new"]
    for file in (*left, *others):
        file.write_bytes(b"a head")
    (tmp_path / "head.bin.1.7.new").mkdir()
    (tmp_path / "head.bin.1.8.new").symlink_to(others[0])
    others += [tmp_path / "head.bin.1.7.new", tmp_path / "head.bin.1.8.new"]
    remove_leftovers(tmp_path / "head.bin")
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_client_that_is_opened_leaves_the_file_that_another_one_writes(tmp_path, monkeypatch):
    sync, seen = os.fsync, []

    def meanwhile(file):
        remove_leftovers(tmp_path / "head.bin")
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        sync(file)

    (tmp_path / "head.bin.1.2.new").write_bytes(b"left")
    monkeypatch.setattr(os, "fsync", meanwhile)
    write_whole(tmp_path / "head.bin", b"new")
    (written,) = seen[0]
    assert written.startswith(f"head.bin.{os.getpid()}.") and seen[1] == ["head.bin"]
    assert (tmp_path / "head.bin").read_bytes() == b"new"


def test_a_file_that_is_deleted_before_it_is_held_is_made_again(tmp_path, monkeypatch):
    lock, deleted = fcntl.flock, []

    def late(file, how):
        if not deleted:
            deleted.extend(tmp_path.glob("*.new"))
            deleted[0].unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write_whole(tmp_path / "head.bin", b"new")
    assert len(deleted) == 1 and (tmp_path / "head.bin").read_bytes() == b"new"


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """Heads are saved there, and nothing is deleted: somebody may be writing it."""
    left = tmp_path / "head.bin.1.2.new"
    left.write_bytes(b"half of a head")

    def none(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    write_whole(tmp_path / "head.bin", b"new")
    remove_leftovers(tmp_path / "head.bin")
    assert (tmp_path / "head.bin").read_bytes() == b"new" and left.exists()


@pytest.mark.slow
def test_a_client_deletes_what_was_left_of_its_head(tmp_path):
    left = tmp_path / f"head.bin.{os.getpid()}.123.new"
    left.write_bytes(b"half of a head")
    client = DeviceClient(
        small_bundle("classification", tmp_path), tmp_path / "head.bin", interpreter=tf.lite.Interpreter
    )
    assert not left.exists()
    client.start_from(SavedHead(*client.head, client.theta_sha256))
    assert (tmp_path / "head.bin").exists()


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "head.bin"
    write_whole(path, b"old")
    path.chmod(mode)
    write_whole(path, b"new")
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == mode
    write_whole(path, b"newer", 0o640)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("names", [("a", ""), ("a", "a"), ("a", "\ud800")])
def test_a_head_that_no_client_could_open_is_not_written(tmp_path, names):
    head = SavedHead(np.zeros((3, 2), np.float32), np.zeros(2, np.float32), "0" * 64, names)
    with pytest.raises(HeadError, match="name"):
        save_head(tmp_path / "head.bin", head)
    assert not list(tmp_path.iterdir())


def failing(kind, number):
    """os.fsync, which fails for files or for folders."""

    def sync(file):
        if kind(os.fstat(file).st_mode):
            raise OSError(number, os.strerror(number))

    return sync


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_write_folders_to_the_disk(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", failing(stat.S_ISDIR, number))
    write_whole(tmp_path / "head.bin", b"new")
    assert (tmp_path / "head.bin").read_bytes() == b"new"


@pytest.mark.slow
def test_a_head_that_was_replaced_is_the_present_one_also_after_an_error(tmp_path, monkeypatch):
    """The head in memory is the one in the file, whatever the disk says of the folder; an added class counts."""
    path, bundle = tmp_path / "head.bin", small_bundle("classification", tmp_path)
    client = DeviceClient(bundle, path, interpreter=tf.lite.Interpreter)
    head = client._head
    new = head._replace(bias=head.bias + np.float32(42))
    monkeypatch.setattr(os, "fsync", failing(stat.S_ISREG, errno.EIO))
    with pytest.raises(OSError, match=r"^\[Errno 5\] Input/output error$"):
        client.start_from(new)
    assert client.head[1] is head.bias and not path.exists()
    monkeypatch.setattr(os, "fsync", failing(stat.S_ISDIR, errno.EIO))
    with pytest.raises(NotOnDisk) as error:
        client.start_from(new)
    why = "the file is the new one, and after a loss of power it may be the old one again"
    assert str(error.value) == f"[Errno 5] Input/output error: {why}: '{path}'"
    kept = load_head(path, bundle.num_features, bundle.num_classes)
    assert np.array_equal(client.head[1], new.bias) and np.array_equal(kept.bias, new.bias)
    with pytest.raises(NotOnDisk):
        client.add_class("one more")
    assert client.labels[-1] == "one more" and client._class_changes == 1
