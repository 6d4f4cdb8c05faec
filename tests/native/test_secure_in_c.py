"""Secure aggregation in C: what a client computes is that of Python, bit for bit."""

import json
import subprocess

import pytest

from helpers import secure_vectors
from helpers.marks import slow_but
from helpers.native_live import live_programs, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
FOUND = json.loads(secure_vectors.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("sanitized", slow_but([False, True], False))
def test_the_test_vectors(sanitized):
    """From the secrets of the file: keys, agreements, boxes, shares, fixed-point numbers and masked words. The program
    also checks the signatures of the file, and that changed signatures, boxes and points are refused."""
    command = [live_programs(sanitized) / "secure_vectors", secure_vectors.FILE]
    computed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert computed["clients"].keys() == FOUND["clients"].keys()
    for client, about in computed["clients"].items():
        wanted = FOUND["clients"][client]
        wanted |= {name: wanted["told"][name] for name in ("mask", "share")}
        assert len(about) == 10 and about == {name: wanted[name] for name in about}
    for name in ("pairs", "pairs of the second"):
        wanted = [{entry: pair[entry] for entry in pair if entry != "clients"} for pair in FOUND["pairs"]]
        assert computed[name] == wanted
    assert computed["codec_cases"] == [
        {name: case[name] for name in ("norm", "words")} for case in FOUND["codec_cases"]
    ]
