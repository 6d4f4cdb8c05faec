"""The commands that a device has without TensorFlow: what they say of wrong arguments, and their units."""

import sys

import numpy as np
import pytest

from tflite_export.device import bench, verification


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


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_memory_is_in_millions_of_bytes():
    before = bench._reset_peak()
    kept = np.ones(10**7)
    grown = bench._grown(before, bench._status("VmHWM"))
    assert kept.nbytes == 80_000_000 and grown == pytest.approx(80, abs=1)
