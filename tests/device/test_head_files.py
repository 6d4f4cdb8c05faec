"""Files that are written in one step."""

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from tflite_export.device.files import write_whole


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
