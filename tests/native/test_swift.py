"""The Swift class on top of the client in C, built by a real Swift compiler and run: the same bytes, the same words."""

import re
import shlex
import subprocess

import numpy as np
import pytest
import tensorflow as tf

from helpers import arm64, litert, swift
from helpers.native import CORE
from helpers.native_bytes import ROOT, unlike_python, write_data
from helpers.phone_bundles import drawn, small_bundle
from tflite_export import DeviceClient
from tflite_export.device.head_file import load_head, save_head

MODULE = CORE / "android" / "tfpfl"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder in which a program is built at its first use: the path of the program."""
    if swift.missing():
        pytest.skip(swift.missing())
    folder, programs = tmp_path_factory.mktemp("swift"), {}

    def program(source=None):
        if source not in programs:
            programs[source] = swift.build(folder, source)
        return programs[source]

    return program


@pytest.fixture(scope="module", params=["classification", "poisson", "tokens"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def bundle(kind, tmp_path_factory):
    return small_bundle(kind, tmp_path_factory.mktemp("bundles"))


def test_package_and_cmake_compile_as_the_makefile_does():
    make = (CORE / "Makefile").read_text()
    swift_package, cmake = (CORE / "Package.swift").read_text(), (MODULE / "CMakeLists.txt").read_text()
    defined = set(re.findall(r"-D(\w+)", make.split("override CFLAGS")[1].split("\n")[0]))
    assert defined == set(re.findall(r'\.define\("(\w+)"', swift_package)) == {"_POSIX_C_SOURCE", "_DARWIN_C_SOURCE"}
    (in_cmake,) = re.findall(r"target_compile_definitions\(tfpfl_jni PRIVATE (.*?)\)", cmake)
    assert {name.split("=")[0] for name in in_cmake.split()} == defined
    assert all("-ffp-contract=off" in text for text in (make, swift_package, cmake))


def test_the_swift_class_has_what_the_kotlin_class_has():
    kotlin = (CORE / "kotlin" / "tfpfl" / "Client.kt").read_text()
    kotlin = kotlin[kotlin.index("\nclass Client(") : kotlin.index("object Native")]
    in_swift = (CORE / "swift" / "TfpflDevice" / "DeviceClient.swift").read_text()
    names = re.findall(r"^    (?:override )?(?:fun|val) (\w+)", kotlin, re.M)
    assert {"predict", "round", "commit", "close", "headIsStale", "exampleShape"} <= set(names)
    assert set(names) <= set(re.findall(r"^    public (?:func|var) (\w+)", in_swift, re.M))


def refusals(bundle, n):
    """What Vectors.swift wrote, line by line: the words of the core, and of Python; 0: the core was not asked."""
    (m, k), shape, p = (bundle.num_features, bundle.num_classes), ["N", *bundle.example_shape], len(bundle.theta())
    dtype, other = ("float32", "int32")[:: 1 if bundle.example_dtype == np.float32 else -1]
    numbers = f"1 examples must be {dtype} {shape}, found {n * int(np.prod(shape[1:]))} numbers for {{}} examples"
    wrong = f"1 label 99 is out of range: this client's are 0..{k - 1}; the head is untouched"
    wrong = wrong if bundle.kind.is_classes else "1 targets must be numbers [1, 2], found none"
    steps = "1 steps must be at least 0 and beta from 0 to 3.4e+38, found steps={}, beta={}"
    return [
        "1 /nowhere/\U0001f600 is not a bundle: it has no manifest.json",
        "1 LiteRT cannot be loaded: /nowhere/lib.so: cannot open shared object file: No such file or directory. "
        "Install its library (in Python's wheel ai-edge-litert it is ai_edge_litert/libLiteRt.so), and name its path "
        "in the option `litert`",
        "0 a path without the character NUL is needed",
        numbers.format(n + 1),
        numbers.format(0),
        "1 there are no examples",
        f"1 examples must be {dtype} {shape}, found {other}",
        wrong,
        "1 the held-out part must lie in (0, 1), found 2.0",
        steps.format(-(2**31), 0.05),
        steps.format(19, "nan"),
        wrong,
        f"1 theta must be float32 [{p}], found float32 [3]",
        "1 unknown payload 'int4': one of float32, int8",
        "1 theta holds NaN or infinity: nothing was changed",
        f"2 this client's head is [{m}, {k}], found [0, {k}]",
        "0 a sha256 has 32 bytes, found 1",
        "0 this client is closed",
    ]


def as_vectors(program, folder, *seen):
    """A script in `folder` that takes the arguments of the program in C and runs the one in Swift."""
    words = [shlex.quote(word) for word in swift.wrapped(program, folders=(program.parents[2], folder, *seen))]
    (folder / "vectors").write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
    (folder / "vectors").chmod(0o755)
    return folder


@pytest.mark.slow
@pytest.mark.litert
@pytest.mark.parametrize("version", litert.with_library())
@pytest.mark.parametrize("n", [9, 75])
def test_swift_gives_the_bytes_and_the_words_of_the_others(built, kind, bundle, programs, version, n, tmp_path):
    """Everything that a client computes, in Python, C and Swift; what it refuses; nothing after `close`."""
    library, c, here = litert.shared_library(version), tmp_path / "c", tmp_path / "swift"
    for folder in (c, here):
        folder.mkdir()
    in_swift = as_vectors(built(CORE / "tests" / "Vectors.swift"), here, bundle.folder, library.parent)
    data = *drawn(kind, n), bundle.theta() * np.float32(0.9)
    assert unlike_python(in_swift, bundle, version, data, here) == []
    assert (here / "refused.txt").read_text(encoding="utf-8").split("\n") == refusals(bundle, n)

    write_data(c, *data)
    subprocess.run([programs / "vectors", bundle.folder, library, c], check=True, capture_output=True)
    made = sorted(path.name for path in c.iterdir() if path.name != "scores.txt")
    assert "committed.bin" in made and "int8.payload" in made and "probabilities.bin" in made
    assert [name for name in made if (c / name).read_bytes() != (here / name).read_bytes()] == []


@pytest.mark.slow
@pytest.mark.litert
@pytest.mark.parametrize("version", litert.with_library(last=True))
def test_a_head_with_classes_of_its_own_keeps_them_in_swift(built, kind, bundle, version, tmp_path):
    names = tuple("a\u00e9\U0001f600z")[: bundle.num_classes]
    first = load_head(bundle.path("head.bin"), bundle.num_features, bundle.num_classes)._replace(labels=names)
    save_head(tmp_path / "state.bin", first)
    library = litert.shared_library(version)
    in_swift = as_vectors(built(CORE / "tests" / "Vectors.swift"), tmp_path, bundle.folder, library.parent)
    write_data(tmp_path, *drawn(kind, 20), bundle.theta() * np.float32(0.9))
    done = subprocess.run([in_swift / "vectors", bundle.folder, library, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heads = [
        load_head(tmp_path / name, bundle.num_features, bundle.num_classes)
        for name in ("personalized.bin", "committed.bin", "state.bin")  # the last: the first of them again
    ]
    assert [head.labels for head in heads] == [names] * 3
    assert np.array_equal(heads[0].kernel, heads[2].kernel) and not np.array_equal(heads[0].kernel, heads[1].kernel)


@pytest.mark.slow
def test_the_swift_listing_in_the_documentation_is_the_example(built, litert_library, tmp_path):
    listing = (CORE / "swift" / "Personalize" / "main.swift").read_text()
    page = (ROOT / "docs" / "native.md").read_text()
    for written in (".package(path: ", '.product(name: "TfpflDevice", package: "device_core")'):  # built by Vectors
        assert written in page and written in swift.PACKAGE.format(core=CORE, core_name=CORE.name, name="App")
    shown = re.findall(r"```swift\n(.*?)```", page, re.S)
    assert shown and all(part in listing for part in shown) and "client.personalize" in shown[0]
    bundle = small_bundle("classification", tmp_path)
    x, y = drawn("classification", 40)
    files = [tmp_path / name for name in ("x.bin", "y.bin", "head.bin")]
    for array, path in zip((x, y), files, strict=False):
        array.tofile(path)
    program, seen = built(), (tmp_path, litert_library.parent)
    command = [program, bundle.folder, litert_library, *files]
    done = swift.run(*command, folders=(program.parents[2], *seen))
    found = DeviceClient(bundle, interpreter=tf.lite.Interpreter, static=True).personalize(x, y)
    kept = "new" if found.kept else "old"
    expected = f"accuracy {found.before.accuracy:.3f} -> {found.after.accuracy:.3f}: the {kept} head is kept\n"
    assert done.stdout == expected and files[2].exists() == found.kept
    done = swift.run(program, tmp_path, *command[2:], folders=(program.parents[2], *seen), check=False)
    assert done.returncode == 1 and done.stderr == f"{tmp_path} is not a bundle: it has no manifest.json\n"


@pytest.mark.slow
def test_the_package_compiles_for_macos_too(tmp_path):
    """The target in C, with the flags of the package, against the headers of macOS that PyPI's ziglang brings."""
    if arm64.missing():
        pytest.skip(arm64.missing())
    package = (CORE / "Package.swift").read_text()
    defined = re.findall(r'\.define\("(\w+)"(?:, to: "(\w+)")?\)', package)
    flags = [f"-D{name}={value or 1}" for name, value in defined] + re.findall(r'unsafeFlags\(\["(.*?)"\]\)', package)
    flags += ["-std=c99", f"-I{CORE / 'include'}", "-Wall", "-Werror"]
    target = ["-target", "aarch64-macos.11.0", "-shared", "-o", tmp_path / "lib.dylib"]
    sources = sorted((CORE / "src").glob("*.c"))
    done = subprocess.run([*arm64.zig(), "cc", *target, *flags, *sources], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lib.dylib").read_bytes()[:4] == bytes.fromhex("cffaedfe"), "a 64-bit Mach-O file"
