"""Heads, payloads and hashes in C: the same bytes as in Python, the same messages, and nothing lost at kill -9."""

import hashlib
import os
import re
import runpy
import shutil
import signal
import struct
import subprocess
import time
import zlib

import numpy as np
import pytest

from helpers.marks import slow_but
from helpers.native import CORE, NativeError, linked
from tflite_export.device import payload as payloads
from tflite_export.device.head_file import HeadError, SavedHead, head_bytes, load_head, save_head
from tflite_export.device.payload import PayloadError, decode, encode

FIPS = {  # the examples that NIST publishes with FIPS 180-4
    b"abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    b"": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq": (
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
    ),
    b"a" * 1_000_000: "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
}


@pytest.mark.parametrize("data", FIPS, ids=lambda data: f"{len(data)} bytes")
def test_published_hashes(native, data):
    assert native.sha256(data) == FIPS[data]


def test_hashes_of_every_length(native):
    data = np.random.default_rng(0).bytes(200)
    for size in range(200):
        assert native.sha256(data[:size]) == hashlib.sha256(data[:size]).hexdigest()


def drawn_head(m, k, seed=0):
    rng = np.random.default_rng(seed)
    kernel, bias = rng.standard_normal((m, k)), rng.standard_normal(k)
    return SavedHead(kernel.astype(np.float32), bias.astype(np.float32), hashlib.sha256(rng.bytes(9)).hexdigest())


@pytest.mark.parametrize("m, k", [(1, 1), (7, 3), (200, 62), (4096, 5)])
def test_a_head_has_the_same_bytes_in_both_languages(native, tmp_path, m, k):
    head, ours, theirs = drawn_head(m, k), tmp_path / "c", tmp_path / "python"
    native.save_head(ours, head)
    save_head(theirs, head)
    assert ours.read_bytes() == theirs.read_bytes() == head_bytes(head)
    found = native.load_head(theirs, m, k)
    assert found.theta_sha256 == head.theta_sha256
    assert np.array_equal(found.kernel, head.kernel) and np.array_equal(found.bias, head.bias)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "python"]


def test_a_damaged_head_is_refused_in_the_same_words(native, tmp_path):
    path, content = tmp_path / "head.bin", head_bytes(drawn_head(7, 3))
    huge = b"TFPFLH01" + b"\xff" * 8 + content[16:]  # 2**32 - 1 features and classes: nothing is taken for them
    damaged = [content[:n] for n in (0, 7, 51, 52, len(content) - 1)] + [content + b"\0", b"x" + content[1:], huge]
    damaged += [content[:i] + bytes([content[i] ^ 4]) + content[i + 1 :] for i in (3, 9, 13, 49, 60, len(content) - 1)]
    damaged += [head_bytes(drawn_head(3, 7)), head_bytes(drawn_head(8, 3)), head_bytes(drawn_head(1, 0))]
    for part, bad in (("kernel", np.nan), ("bias", -np.inf)):  # whoever makes a head file can compute its checksum
        head = drawn_head(7, 3)
        getattr(head, part)[-1] = bad
        damaged.append(head_bytes(head))
    for wrong in damaged:
        path.write_bytes(wrong)
        with pytest.raises(HeadError) as expected:
            load_head(path, 7, 3)
        with pytest.raises(NativeError) as found:
            native.load_head(path, 7, 3)
        assert (found.value.kind, str(found.value)) == ("HeadError", str(expected.value))
        assert path.read_bytes() == wrong


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_head_keeps_its_permissions_whatever_the_umask_is(native, tmp_path, mode):
    path, head = tmp_path / "head.bin", drawn_head(2, 2)
    native.save_head(path, head)
    path.chmod(mode)
    before = os.umask(0o077)
    try:
        native.save_head(path, head)
        native.save_head(tmp_path / "new.bin", head)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode
    assert (tmp_path / "new.bin").stat().st_mode & 0o777 == 0o600


def test_a_head_that_cannot_be_written_is_told_and_leaves_nothing(native, tmp_path):
    head = drawn_head(2, 2)
    with pytest.raises(NativeError, match=r"\[Errno 2\] No such file or directory: .*head.bin.*new"):
        native.save_head(tmp_path / "no folder" / "head.bin", head)
    (tmp_path / "folder").mkdir()
    with pytest.raises(NativeError, match="Errno"):
        native.save_head(tmp_path / "folder", head)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(NativeError, match=r"\[Errno 2\] No such file or directory"):
        native.load_head(tmp_path / "none", 2, 2)


@pytest.mark.parametrize("times", slow_but([10, 200], 10))
def test_kill_9_while_saving_leaves_the_old_or_the_new_head(programs, tmp_path, times):
    path = tmp_path / "head.bin"
    rng, seen = np.random.default_rng(0), set()
    for _ in range(times):
        process = subprocess.Popen([programs / "save_forever", path], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()  # it has begun
        time.sleep(float(rng.uniform(0, 0.02)))
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read().split()
        process.wait()
        head = load_head(path, 500, 300)
        value = head.kernel[0, 0]
        assert (head.kernel == value).all() and (head.bias == value).all()
        assert value >= int(said[-1] if said else 1)  # what it said was saved, is
        seen.add(value)
    assert len(seen) > 1, "it was always killed at the same head"


SPECIAL = [0.0, -0.0, 1e-44, -1e-38, 3.4e38, 1.0, 127.0, 63.5, 0.5, 1.5, 2.5, -2.5]


@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("size", [0, 1, 12, 1023, 1024, 1025, 50_000])
def test_a_payload_has_the_same_bytes_in_both_languages(native, kind, size):
    rng = np.random.default_rng(size)
    gradient = (rng.standard_normal(size) * 10.0 ** rng.integers(-44, 30, size)).astype(np.float32)
    gradient[: len(SPECIAL)] = SPECIAL[:size]
    gradient[1024:2048] = np.arange(-512, 512, dtype=np.float32)[: max(size - 1024, 0)] / 2  # halves, between numbers
    payload = encode(gradient, kind)
    assert native.encode(gradient, kind) == payload
    assert np.array_equal(native.decode(payload, size), decode(payload))


def test_bad_payloads_are_refused_in_the_same_words(native):
    good = encode(np.arange(3000, dtype=np.float32), "int8")
    wrong = [good[:n] for n in (0, 4, 15, 16, len(good) - 1)] + [good + b"0", b"x" + good[1:]]
    wrong += [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in (4, 5, 8, 11, 12, 20, len(good) - 1)]
    for payload, size in [(payload, 3000) for payload in wrong] + [(good, 2999), (good, 0)]:
        with pytest.raises(PayloadError) as expected:
            decode(payload, size)
        with pytest.raises(NativeError) as found:
            native.decode(payload, size)
        assert (found.value.kind, str(found.value)) == ("PayloadError", str(expected.value))
    for gradient, kind in ((np.array([1, np.nan]), "int8"), (np.array([np.inf]), "float32"), (np.zeros(3), "int4")):
        with pytest.raises(PayloadError) as expected:
            encode(gradient, kind)
        with pytest.raises(NativeError) as found:
            native.encode(gradient, kind)
        assert str(found.value) == str(expected.value)


def test_the_library_is_small(native):
    assert native.path.stat().st_size <= 100_000
    assert payloads.KINDS == ("float32", "int8"), "a new kind of payload must be known in C, too"


OWN = drawn_head(7, 3)._replace(labels=("a", "\u00fc \u6f22\U0001f600", 'new\n"'))


def test_a_head_with_classes_of_its_own_has_the_same_bytes_in_both_languages(native, tmp_path):
    native.save_head(tmp_path / "c", OWN)
    assert (tmp_path / "c").read_bytes() == head_bytes(OWN)
    for k in (3, 2, 1000):  # the number that the client has does not matter
        found, expected = native.load_head(tmp_path / "c", 7, k), load_head(tmp_path / "c", 7, k)
        assert found.labels == expected.labels == OWN.labels and found.theta_sha256 == OWN.theta_sha256
        assert np.array_equal(found.kernel, OWN.kernel) and np.array_equal(found.bias, OWN.bias)
    with pytest.raises(NativeError, match="the head has no names for its 3 classes"):
        native.save_head(tmp_path / "c", OWN._replace(labels=("a", "b")))
    assert (tmp_path / "c").read_bytes() == head_bytes(OWN)


@pytest.mark.parametrize("magic", [b"TFPFLH02", b"TFPFLH03"])
def test_a_damaged_head_with_names_is_refused_in_the_same_words(native, tmp_path, magic):
    path, content = tmp_path / "head.bin", magic + head_bytes(OWN)[8:]
    numbers = content[52 : 52 + 4 * 8 * 3]

    def with_names(text, size=None, m=7, k=3, magic=magic):
        body = numbers + struct.pack("<I", len(text) if size is None else size) + text
        return magic + struct.pack("<II", m, k) + content[16:48] + struct.pack("<I", zlib.crc32(body)) + body

    wrong = [content[:n] for n in (51, 52, 60, 147, 148, 151, 152, len(content) - 1)] + [content + b" "]
    wrong += [content[:i] + bytes([content[i] ^ 4]) + content[i + 1 :] for i in (3, 9, 13, 49, 60, 149, 160)]
    texts = (b"", b"[]", b'["a", "b"]', b'["a", "b", "c", "d"]', b'["a", "b", 3]', b'{"a": 1, "b": 2, "c": 3}', b"[[[")
    texts += b'["a", "b", "a"]', b'["a", "b", "\\u0061"]', b'["a", "", "c"]'
    texts += (
        b'["a", "b", "\xff"]',
        b'["a", "b", "\xed\xa0\x80"]',
        b'\xef\xbb\xbf["a", "b", "c"]',
        b"[" * 100_000,
        b'"abc"',
    )
    wrong += [with_names(text) for text in texts]
    wrong += [with_names(b'["a", "b", "c"]', size) for size in (0, 14, 16, 2**32 - 1)]
    wrong += [with_names(b'["a", "b", "c"]', m=m, k=k) for m, k in ((6, 3), (8, 3), (2**32 - 1,) * 2, (7, 0), (2, 8))]
    body = struct.pack("<I", 2) + b"[]"  # no class at all
    wrong += [magic + struct.pack("<II", 7, 0) + content[16:48] + struct.pack("<I", zlib.crc32(body)) + body]
    for damaged in wrong:
        path.write_bytes(damaged)
        with pytest.raises(HeadError) as expected:
            load_head(path, 7, 3)
        with pytest.raises(NativeError) as found:
            native.load_head(path, 7, 3)
        assert (found.value.kind, str(found.value)) == ("HeadError", str(expected.value)), damaged[52:]
    for names in (b'["a", "b", "\\ud800"]', b' [ "a" ,"b","c"]\n', b'["a", "ab", "b"]'):
        path.write_bytes(with_names(names))
        assert native.load_head(path, 7, 3).labels == load_head(path, 7, 3).labels


def test_the_library_says_its_version_and_has_it_in_its_name(programs, tmp_path):
    """A program that was linked to it runs with the library alone, without the name that is for linking."""
    version = runpy.run_path(str(CORE.parent / "packaging" / "metadata.py"))["VERSION"]
    source = """
        #include <stdio.h>
        #include <string.h>
        #include "tfpfl_device.h"
        int main(void) { return puts(tfpfl_version()) < 0 || strcmp(tfpfl_version(), TFPFL_VERSION) != 0; }
    """
    program = linked(source, tmp_path / "program", programs / "libtfpfl_device.so")
    name = f"libtfpfl_device.so.{version.split('.')[0]}"
    shutil.copy(programs / name, tmp_path / name)
    done = subprocess.run(
        [program], capture_output=True, text=True, check=False, env={"LD_LIBRARY_PATH": str(tmp_path)}
    )
    assert (done.returncode, done.stdout) == (0, f"{version}\n"), done.stderr
    (tmp_path / name).unlink()
    alone = subprocess.run(
        [program], capture_output=True, text=True, check=False, env={"LD_LIBRARY_PATH": str(tmp_path)}
    )
    assert alone.returncode != 0 and name in alone.stderr


def test_nothing_but_the_functions_of_the_header_is_visible(programs):
    shown = subprocess.run(
        ["nm", "-D", "--defined-only", programs / "libtfpfl_device.so"], capture_output=True, text=True
    )
    names = {line.split()[-1] for line in shown.stdout.splitlines()}
    header = (CORE / "include" / "tfpfl_device.h").read_text()
    assert names == set(re.findall(r"TFPFL_API [^;(]*?(tfpfl_\w+)\(", header)) and "tfpfl_version" in names


def test_the_unit_for_boards_waits_for_all_files_of_examples():
    """x.bin is written before y.bin, and the unit may start in between."""
    unit = (CORE / "systemd" / "tfpfl-personalize.service").read_text()
    command, folder = (re.search(f"^{name}=(.*)$", unit, re.M)[1] for name in ("ExecStart", "WorkingDirectory"))
    needed = [f"{folder}/{name}" for name in command.split() if name in ("x.bin", "y.bin")]
    assert needed == re.findall("^ConditionPathExists=(.*)$", unit, re.M) and len(needed) == 2


def test_the_example_says_which_file_cannot_be_read(programs, tmp_path):
    """A folder has no content, and a missing file has none either."""
    (tmp_path / "x.bin").write_bytes(bytes(70_000))
    (tmp_path / "y.bin").mkdir()
    for x, y, why in (("none.bin", "y.bin", "none.bin: No such file"), ("x.bin", "y.bin", "y.bin: Is a directory")):
        command = [
            programs / "personalize",
            tmp_path,
            "libLiteRt.so",
            tmp_path / x,
            tmp_path / y,
            tmp_path / "head.bin",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and done.stderr.startswith(f"{tmp_path}/{why}") and done.stderr.count("\n") == 1


@pytest.mark.table
@pytest.mark.slow
def test_systemd_understands_the_units_for_boards(programs, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    for path in (CORE / "systemd").iterdir():
        text = path.read_text().replace("/usr/local/bin/personalize", str(programs / "personalize"))
        (tmp_path / path.name).write_text(text)
    (tmp_path / "wrong.service").write_text("[Service]\nExecStart=/nowhere/at/all\nNise=19\n")
    names = ["tfpfl-personalize.timer", "tfpfl-personalize.service", "wrong.service"]
    for name in names:
        command = ["systemd-analyze", "verify", "--man=no", tmp_path / name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = [line for line in done.stderr.splitlines() if any(n in line for n in names)]
        assert bool(said) == (name == "wrong.service"), done.stderr
