"""A bundle from a stranger: names that lead elsewhere, links, bombs and lies about sizes are refused in one line.

The bundles here are made by hand, without TensorFlow: what is tested happens before a program runs.
"""

import hashlib
import io
import json
import os
import subprocess
import sys
import tracemalloc
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tflite_export.device.runtime import Bundle, BundleError, manifest_hash, write_manifest
from tflite_export.device.verification import verify

SECRET = b"not for the bundle"


@pytest.fixture
def folder(tmp_path):
    """The folder of a bundle with 6 weights and a head of 2 classes, beside a file that is not part of it."""
    (tmp_path / "secret.txt").write_bytes(SECRET)
    out = tmp_path / "bundle"
    out.mkdir()
    (out / "theta.bin").write_bytes(np.arange(6, dtype="<f4").tobytes())
    (out / "head.bin").write_bytes(bytes(52 + 4 * 3 * 2))
    np.savez(out / "check.npz", x=np.zeros((2, 3), np.float32))
    write(out)
    return out


def write(folder: Path, names=(), model=(), **entries) -> None:
    """Writes a manifest that describes the files of the folder, with entries changed as the test asks."""
    model = {
        "example_shape": [3], "num_features": 2, "num_classes": 2, "num_backbone_weights": 6, "static_batch": 32,
        "theta": [{"name": "kernel", "shape": [3, 2], "offset": 0}],
    } | dict(model)  # fmt: skip
    files = {n: described(folder / n) for n in ("theta.bin", "head.bin", "check.npz")} | dict(names)
    training = {"tau": 5, "beta": 0.1, "rho": 0.01, "head_rate": 0.1, "safeguard": True, "rounds": True}
    manifest = {
        "format": 1, "model": model, "files": files, "training": training, "preprocessing": {},
        "labels": {"names": ["a", "b"], "class_ids": [0, 1]}, "signatures": {},
        "check": {"max_relative": None, "l2_relative": 0.01},
    } | entries  # fmt: skip
    write_manifest(folder, manifest)


def described(path: Path) -> dict:
    """The entry of a file in a manifest."""
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def refused(folder, *parts, function=Bundle):
    """The message, which must be one line and contain these parts."""
    with pytest.raises(BundleError) as caught:
        function(folder)
    told = str(caught.value)
    assert "\n" not in told and len(told) < 600
    for part in parts:
        assert part in told, told


def test_the_bundle_of_these_tests_is_accepted(folder):
    assert Bundle(folder).theta().tolist() == [0, 1, 2, 3, 4, 5]


OUTSIDE = ["../secret.txt", "sub/../../secret.txt", "..", ".", "", "a\\..\\b", "C:secret", "theta.bin\0", "a\nb"]


@pytest.mark.parametrize("name", [*OUTSIDE, "absolute"])
def test_a_name_that_leads_out_of_the_folder(folder, name):
    """The entry has the right size and hash: only the name can be the reason."""
    name = str(folder.parent / "secret.txt") if name == "absolute" else name
    write(folder, {name: described(folder.parent / "secret.txt")})
    refused(folder, "a name in files must be a plain name", repr(name)[:80])


@pytest.mark.parametrize("name", ["theta.bin", "manifest.json"])
def test_a_link_is_refused_even_if_the_content_is_right(folder, name):
    moved = folder.parent / "elsewhere"
    (folder / name).rename(moved)
    (folder / name).symlink_to(moved)
    refused(folder, name, "is a link")


@pytest.mark.parametrize("path", [None, 3, b"bundle", ["bundle"]])
def test_what_is_no_path_is_no_bundle(path):
    with pytest.raises(BundleError, match="a bundle is given as the path of its folder, or open; found"):
        Bundle(path)


def test_a_link_to_a_secret_file(folder):
    (folder / "labels.txt").symlink_to(folder.parent / "secret.txt")
    write(folder, {"labels.txt": described(folder.parent / "secret.txt")})
    refused(folder, "labels.txt is a link")


def test_pipes_devices_and_folders_are_not_read(folder):
    """Without care, opening the pipe would wait for ever."""
    entry = {"pipe": {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}}
    os.mkfifo(folder / "pipe")
    write(folder, entry)
    refused(folder, "pipe is no ordinary file")
    (folder / "pipe").unlink()
    (folder / "pipe").mkdir()
    refused(folder, "pipe is no ordinary file")


@contextmanager
def little_memory():
    """Python takes less than 40 MB at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 40 * 10**6
    finally:
        tracemalloc.stop()


def enlarge(path):
    """600 MB that take no space on the disk."""
    with open(path, "r+b") as file:
        file.truncate(600 * 10**6)


def test_a_file_much_larger_than_it_says_is_not_read(folder):
    enlarge(folder / "theta.bin")
    with little_memory():
        refused(folder, "theta.bin is damaged", "600,000,000 bytes, and not the 24")


@pytest.mark.parametrize("entry", [{}, {"bytes": 24}, None, [], "24", {"bytes": "24", "sha256": 3}])
def test_an_entry_without_size_or_hash(folder, entry):
    write(folder, {"theta.bin": entry})
    refused(folder, "theta.bin")


@pytest.mark.parametrize("name", ["theta.bin", "check.npz"])
@pytest.mark.parametrize("size", [-1, 0, 10**18, 10**30, 2.5, "many", None])
def test_a_lie_about_the_size(folder, name, size):
    write(folder, {name: described(folder / name) | {"bytes": size}})
    refused(folder, name, "bytes")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"num_backbone_weights": 10**12}, "model.num_backbone_weights must be an integer from 1 to"),
        ({"num_backbone_weights": 10**9}, "files.theta.bin.bytes is 24, but the sizes in model take 4000000000"),
        ({"static_batch": 10**9}, "model.static_batch must be an integer from 1 to 4096, found 1000000000"),
    ],
)
def test_a_lie_about_the_model(folder, model, told):
    write(folder, model=model)
    refused(folder, told)


UNREADABLE = {"deep": "[" * 200_000, "number": "1" * 5_000, "cut": '{"format": 1', "half": "\ud800", "list": "[]"}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_a_manifest_that_no_reader_can_read(folder, text):
    (folder / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(folder, "manifest.json cannot be read")


def test_a_manifest_that_is_much_too_large(folder):
    enlarge(folder / "manifest.json")
    with little_memory():
        refused(folder, "this is no manifest")


# ---- check.npz is an archive


def npy(shape, numbers=0, dtype="<f4") -> bytes:
    """An .npy file whose header promises this shape."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
    return out.getvalue() + bytes(4 * numbers)


def with_check(folder, content: dict, compression=zipfile.ZIP_STORED):
    """Writes check.npz and the manifest that describes it."""
    with zipfile.ZipFile(folder / "check.npz", "w", compression) as archive:
        for name, member in content.items():
            archive.writestr(name, member)
    write(folder)


def test_arrays_are_read_as_numpy_reads_them(folder):
    from tflite_export.device.bundle_files import stored_arrays

    rng = np.random.default_rng(0)
    arrays = {"a": rng.random((3, 4), np.float32), "f": np.asfortranarray(rng.random((2, 5))), "n": np.int32(7),
              "none": np.zeros((0, 3), np.int64), "with.dots": np.arange(5)}  # fmt: skip
    np.savez(folder / "check.npz", **arrays)
    found = stored_arrays(folder / "check.npz")
    with np.load(folder / "check.npz") as expected:
        assert set(found) == set(expected.files) == set(arrays)
        for name, value in found.items():
            assert value.dtype == expected[name].dtype and value.shape == expected[name].shape
            assert np.array_equal(value, expected[name])


def test_an_archive_that_unpacks_to_much_more(folder):
    """100 MB of zeros in 100 kB; a real bomb has more."""
    with_check(folder, {"x.npy": npy((25_000_000,), 25_000_000)}, zipfile.ZIP_DEFLATED)
    assert (folder / "check.npz").stat().st_size < 200_000
    with little_memory():
        refused(folder, "check.npz cannot be read: its arrays would be larger than the file", function=verify)


def test_a_compressed_array_is_refused(folder):
    with_check(folder, {"x.npy": npy((3,)) + os.urandom(12)}, zipfile.ZIP_BZIP2)
    with pytest.raises(BundleError, match="check.npz cannot be read"):
        verify(folder)


@pytest.mark.parametrize("shape", [(10**12,), (3, 10**9), (2,), (-1, -3), (10**30,)])
def test_a_header_that_lies(folder, shape):
    with_check(folder, {"x.npy": npy(shape, 3)})
    refused(folder, "check.npz cannot be read", "promises", function=verify)


def test_entries_that_share_their_bytes(folder):
    """Many entries of an archive may name one place: the sum of their sizes is what counts."""
    with zipfile.ZipFile(folder / "check.npz", "w") as archive:
        archive.writestr("x.npy", npy((1000,), 1000))
        entry = archive.filelist[0]
        for i in range(100):
            other = zipfile.ZipInfo(f"y{i}.npy")
            for name in ("header_offset", "file_size", "compress_size", "CRC", "compress_type"):
                setattr(other, name, getattr(entry, name))
            archive.filelist.append(other)
            archive.NameToInfo[other.filename] = other
        archive._didModify = True
    write(folder)
    refused(folder, "larger than the file", function=verify)


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"\x93NUMPY", b"not an archive at all"])
def test_a_check_that_is_no_archive(folder, content):
    (folder / "check.npz").write_bytes(content)
    write(folder)
    refused(folder, "check.npz cannot be read", function=verify)


@pytest.mark.parametrize("header", ["{(", "{'descr': (), 'fortran_order': False, 'shape': ()}", "-" * 9000 + "1"])
def test_a_header_that_no_reader_can_read(folder, header):
    text = header.encode() + b"\n"
    with_check(folder, {"x.npy": b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text})
    refused(folder, "check.npz cannot be read", function=verify)


@pytest.mark.parametrize(
    ("browser", "told"),
    [
        ({"room": 1, "batch": 8, "head_batch": 8}, "browser.room is 1, but the model has 2 classes"),
        ({"room": 2**31 - 1, "batch": 8, "head_batch": 8}, "browser.room must be an integer from 1 to 65536"),
        ({"room": 16, "batch": 10**6, "head_batch": 8}, "browser.batch must be an integer from 1 to 4096"),
    ],
)
def test_a_lie_about_the_program_of_a_page(folder, browser, told):
    write(folder, browser=browser)
    refused(folder, told)


def test_nothing_in_an_archive_is_executed(folder):
    """An array of objects is a pickle, which runs code when it is loaded."""
    np.savez(folder / "check.npz", x=np.array([{"a": 1}], dtype=object))
    write(folder)
    refused(folder, "check.npz cannot be read", function=verify)


# ---- what the other commands do with such a bundle


def test_a_site_does_not_publish_a_linked_file(folder, tmp_path):
    from tflite_export.web import write_site

    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("<!doctype html>")
    (folder / "program_browser.tflite").write_bytes(b"x")
    (folder / "client.safetensors").symlink_to(tmp_path / "secret.txt")
    secret = {"client.safetensors": described(tmp_path / "secret.txt")}
    program = {"program_browser.tflite": described(folder / "program_browser.tflite")}
    write(folder, secret | program, browser={"room": 40, "batch": 8, "head_batch": 8})
    refused(folder, "client.safetensors is a link", function=lambda f: write_site(f, tmp_path / "site", page=page))
    assert not (tmp_path / "site").exists()


def test_the_command_line_says_it_in_one_line(folder):
    write(folder, {"../secret.txt": described(folder.parent / "secret.txt")})
    code = "import sys; from tflite_export.device.verification import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert done.returncode == 2 and not done.stderr and "../secret.txt" in told["error"] and not told["ok"]


@pytest.mark.parametrize("content", [b"", b"junk", b"\xff" * 300], ids=["empty", "junk", "ff"])
def test_a_program_that_is_none_is_refused_by_verify(folder, content):
    (folder / "program.tflite").write_bytes(content)
    write(folder, {"program.tflite": described(folder / "program.tflite")})
    refused(folder, "program.tflite: this is no .tflite file, or it is damaged", function=verify)


def test_the_hash_of_a_manifest_is_no_signature(folder):
    """Whoever writes a manifest can compute its hash, so nothing here may rely on it: the tests above write it anew."""
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["hash"] == manifest_hash(manifest)
