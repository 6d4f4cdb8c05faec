"""Secure aggregation in C: what a client computes is that of Python, bit for bit."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from helpers import secure_vectors
from helpers.marks import slow_but
from helpers.native import linked
from helpers.native_live import live_programs, missing
from tflite_export.device.live import client as module

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


REFUSING = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "secure.h"
int nanosleep(const struct timespec *time, struct timespec *left) {
    (void)left;
    printf("%g\\n", (double)time->tv_sec + 1e-9 * (double)time->tv_nsec);
    return 0;
}
static void say(void *context, const char *text) { (void)context, puts(text); }
int main(int count, char **arguments) {
    struct json work;
    char error[TFPFL_ERROR_ROOM], *text = strdup(arguments[1]);
    struct tfpfl_live live = {.folder = arguments[count - 1], .log = say};
    if (json_read(&work, text, strlen(text), error) != 0) return puts(error), 1;
    int status = live_take_part(&live, UNMASK, &work);
    json_free(&work);
    return status;
}
"""
WAYS = {  # the entries of a work that a device refuses, how its attempt is called, and how long it rests
    '"attempt": 3, "seconds": 0.5': (3, "0.5"),
    '"attempt": 3, "seconds": 1e9': (3, "2"),
    '"attempt": 3, "seconds": 0': (3, ""),
    '"attempt": 3, "seconds": -1': (3, "2"),
    '"attempt": 3, "seconds": NaN': (3, "2"),
    '"attempt": 3, "seconds": Infinity': (3, "2"),
    '"attempt": 3, "seconds": "soon"': (3, "2"),
    '"attempt": 3': (3, "2"),
    '"attempt": -3, "seconds": 1.5': (0, "1.5"),
    '"attempt": "third", "seconds": true': (0, "2"),
    '"seconds": null': (0, "2"),
}


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    library = live_programs() / "libtfpfl_live.a"
    return linked(REFUSING, tmp_path_factory.mktemp("programs") / "refusing", library, "-lcurl", "-lcrypto")


@pytest.mark.parametrize("entries", WAYS)
def test_a_device_that_refuses_rests_whatever_the_server_says(refusing, tmp_path, monkeypatch, entries):
    """With fewer than 0 seconds the device in C asked again without a pause, and that in Python ended."""
    text, (attempt, rest) = f'{{"kind": "unmask", "round": 1, {entries}}}', WAYS[entries]
    command = [refusing, text, tmp_path]
    told, *rested = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told.startswith(f"round 1, attempt {attempt}: this device takes no part: ")
    assert rested == ([rest] if rest else [])
    log, slept = [], []
    device = module.LiveDevice.__new__(module.LiveDevice)
    device.log, device._secure = log.append, SimpleNamespace(refuse=lambda why: None)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=slept.append))
    device._refuse(json.loads(text), "why")
    assert log == [f"round 1, attempt {attempt}: this device takes no part: why"]
    assert slept == [float(rest or 0)]
