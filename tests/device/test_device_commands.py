"""The commands that a device has without TensorFlow: what they say of wrong arguments and files, and their units."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tflite_export.device import bench, verification
from tflite_export.device.__main__ import take_part
from tflite_export.device.errors import InvalidInput
from tflite_export.device.live.work import check_examples


@pytest.mark.parametrize(
    "main, arguments, said",
    [
        (verification.main, [], "arguments are required: bundle"),
        (verification.main, ["a", "b"], "unrecognized arguments: b"),
        (bench.main, ["a", "--examples", "32,a"], "'a' is not a whole number of at least 1"),
        (bench.main, ["a", "--threads", "0"], "'0' is not a whole number of at least 1"),
        (bench.main, ["a", "--repeat", "0"], "'0' is not a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(main, arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_more_threads_than_any_device_has_are_refused_before_a_process_starts():
    with pytest.raises(InvalidInput, match="an interpreter takes 1 to 256 threads, found 1, 99999"):
        bench.bench("no bundle", threads=(1, 99999))


def test_memory_is_in_millions_of_bytes():
    assert bench._grown(1_000, 1_000 + 78_125) == 80  # of KiB
    assert bench._grown(1_000, 900) == 0 and bench._grown(None, 900) is None


MEASURED = """
import numpy as np
from tflite_export.device import bench
before = bench._reset_peak()
kept = np.ones(10**7)
print(bench._grown(before, bench._status("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_peak_of_a_process_is_measured():
    """In a process of its own, since others free memory of this one; roughly, since the kernel counts late."""
    folder = Path(bench.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", MEASURED], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 50 < float(done.stdout) < 110


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_certificate_that_cannot_be_read_is_named(content, tmp_path):
    np.savez(tmp_path / "train.npz", x=np.zeros((2, 3), np.float32), y=np.zeros(2, np.int32))
    if content is not None:
        (tmp_path / "ca.pem").write_text(content)
    with pytest.raises(InvalidInput, match=r"the certificate .*ca\.pem cannot be used: "):
        take_part("https://127.0.0.1:1", tmp_path, tmp_path / "s", "token", ca=tmp_path / "ca.pem", device=print)


def test_labels_that_are_names_are_refused_before_the_device_joins():
    x = np.zeros((2, 3), np.float32)
    numbers, names = np.array([0, 1]), np.array(["cat", "dog"])
    check_examples({"train": (x, numbers), "test": (x, numbers)})
    for examples in ({"train": (x, names)}, {"train": (x, numbers), "test": (x, names)}):
        with pytest.raises(InvalidInput, match="must be numbers, found <U3: classes are numbered from 0"):
            check_examples(examples)


def test_examples_that_are_texts_are_refused_before_the_device_joins():
    with pytest.raises(InvalidInput, match="the examples x of train must be numbers, preprocessed, found <U3"):
        check_examples({"train": (np.array([["1.5"], ["2"]]), np.array([0, 1]))})
    masked = np.ma.array([[1.0], [2.0]], np.float32, mask=[[True], [False]])
    with pytest.raises(InvalidInput, match="the examples x of train: 1 values of a masked array are masked"):
        check_examples({"train": (masked, np.array([0, 1]))})
