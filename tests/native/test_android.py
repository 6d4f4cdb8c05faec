"""The project for Android, as far as it can be checked here: CMake builds its C library, its worker runs on the JVM.

WorkManager and Android's own classes are stubs in `android/stubs`, with the signatures of the real ones. Gradle, the
NDK and a device were not used.
"""

import os
import re
import shutil
import struct
import subprocess
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from helpers import kotlin
from helpers.native import CORE, NativeClient
from helpers.native_bytes import ROOT, write_data
from helpers.phone_bundles import drawn, small_bundle
from tflite_export.device.head_file import head_bytes

PROJECT, HERE = CORE / "android", ROOT / "tests" / "native" / "android"
MODULE = PROJECT / "tfpfl"
JNI, NATIVE = (path.read_text() for path in (CORE / "kotlin" / "tfpfl_jni.c", ROOT / "docs" / "native.md"))
WORKER = MODULE / "src" / "main" / "kotlin" / "tfpfl" / "android"


@pytest.fixture(scope="module")
def jni(tmp_path_factory):
    """The folder with libtfpfl_jni, configured and built by CMake as Gradle does it, but for the JVM here."""
    if kotlin.missing() or shutil.which("cmake") is None:
        pytest.skip(kotlin.missing() or "there is no cmake here")
    folder = tmp_path_factory.mktemp("jni")
    warnings = "-DCMAKE_C_FLAGS=-Wall -Wextra -Werror -Wno-missing-field-initializers"
    for command in (
        ["cmake", "-S", MODULE, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", warnings],
        ["cmake", "--build", folder],
    ):
        environment = {**os.environ, "JAVA_HOME": str(kotlin.java_home())}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


SAID = """[tfpfl.round] UPDATE 86400000
refused at first: Success REFUSED null; old head; [r7 52016 40]; [REFUSED]; []; asked true; 2 synced
taken: Success TAKEN null; new head; [r7 52016 40]; [TAKEN]; []; asked true; 3 synced
refused: Success REFUSED null; old head; [r7 52016 40]; [REFUSED]; []; asked true; 2 synced
lost: Retry null null; old head; [r7 52016 40]; [UNREACHABLE ({network})]; [update.bin]; asked true; 1 synced
lost again: Retry null null; old head; [r7 52016 40]; [UNREACHABLE ({network})]; [update.bin]; asked false; 0 synced
lost a third time: Failure UNREACHABLE {network}; old head; [r7 52016 40]; [UNREACHABLE ({network})]; [update.bin]; \
asked false; 0 synced
sent again: Success TAKEN null; new head; [r7 52016 40]; [TAKEN]; []; asked false; 2 synced
no way to the invitation: Retry null null; old head; []; [UNREACHABLE (no address)]; []; asked false; 0 synced
an error of the app: threw a bug; old head; [r7 52016 40]; []; [update.bin]; asked true; 1 synced
sent again, and refused: Success REFUSED null; old head; [r7 52016 40]; [REFUSED]; []; asked false; 1 synced
lost: Retry null null; old head; [r7 52016 40]; [UNREACHABLE ({network})]; [update.bin]; asked true; 1 synced
damaged: Success NO_ROUND null; old head; []; [NO_ROUND]; []; asked true; 1 synced
cut off: Success NO_ROUND null; old head; []; [NO_ROUND]; []; asked true; 1 synced
lost: Retry null null; old head; [r7 52016 40]; [UNREACHABLE ({network})]; [update.bin]; asked true; 1 synced
taken, but the classes have changed: Failure UNUSABLE {names}; old head; [r7 52016 40]; [UNUSABLE ({names})]; []; \
asked false; 3 synced
taken, but the app has saved a head: Failure UNUSABLE {changed}; new head; [r7 52016 40]; [UNUSABLE ({changed})]; []; \
asked true; 4 synced
taken, while the app has a client: Success TAKEN null; new head; [r7 52016 40]; [TAKEN]; []; asked true; 3 synced
{changed}
no round: Success NO_ROUND null; old head; []; [NO_ROUND]; []; asked true; 0 synced
another theta: Failure UNUSABLE {theta}; old head; []; [UNUSABLE ({theta})]; []; asked true; 0 synced
another payload: Failure UNUSABLE {payload}; old head; []; [UNUSABLE ({payload})]; []; asked true; 0 synced
no examples: Success NO_EXAMPLES null; old head; []; [NO_EXAMPLES]; []; asked true; 0 synced
wrong examples: Failure UNUSABLE {numbers}; old head; []; [UNUSABLE ({numbers})]; []; asked true; 0 synced
stopped before it was sent: Success STOPPED null; old head; []; [STOPPED]; []; asked true; 0 synced
taken, and stopped: Success TAKEN null; new head; [r8 13068 40]; [TAKEN]; []; asked true; 3 synced
cannot be kept: Failure UNUSABLE {unwritten}; old head; []; [UNUSABLE ({unwritten})]; [update.bin.new]; asked true; \
0 synced
kept, but perhaps not for long: Failure UNUSABLE {unsynced}; old head; []; [UNUSABLE ({unsynced})]; [update.bin]; \
asked true; 0 synced
sent at last: Success TAKEN null; new head; [r7 52016 40]; [TAKEN ({unsynced})]; []; asked false; 0 synced
taken, but its file stays: Success TAKEN null; new head; [r9 52016 40]; [TAKEN (FOLDER/update.bin cannot be deleted)]; \
[update.bin]; asked true; 2 synced
cannot be read: Failure UNUSABLE {unread}; old head; []; [UNUSABLE ({unread})]; [update.bin]; asked false; 0 synced
an error of the app's disk: threw a file of the app is gone; old head; []; []; []; asked true; 0 synced
the app's Application does not implement tfpfl.android.RoundApp
[]
""".format(
    network="the network is gone",
    names="the classes have changed since the round: its head is of no use any more",
    changed="FOLDER/head.bin was changed by another client since this one read or saved it: nothing was saved, so that "
    "its head is not lost. Open the client again, and it goes on from there",
    theta="theta must be float32 [13000], found float32 [3]",
    payload="unknown payload 'int4': one of float32, int8",
    unwritten="FOLDER/update.bin cannot be written: FOLDER/update.bin.new (Is a directory)",
    unsynced="FOLDER cannot be written to the disk: fsync failed: 5",
    unread="FOLDER/update.bin cannot be read: FOLDER/update.bin (Is a directory)",
    numbers="examples must be float32 ['N', 8, 8, 1], found 2560 numbers for 13000 examples",
)


@pytest.mark.slow
def test_a_worker_commits_what_the_server_has_taken_and_nothing_else(jni, native, litert_library, tmp_path):
    """What it sends and the head that it then has are those of the client in C; with the JVM's checks of JNI."""
    classes, stubs = tmp_path / "classes", tmp_path / "stubs"
    kotlin.compiled(stubs, *sorted((HERE / "stubs").iterdir()))
    sources = CORE / "kotlin" / "tfpfl" / "Client.kt", CORE / "examples" / "PersonalApp.kt", HERE / "Rounds.kt"
    kotlin.compiled(classes, *sources, *sorted(WORKER.iterdir()), classpath=[stubs])
    bundle = small_bundle("classification", tmp_path)
    (x, y), theta = drawn("classification", 40), bundle.theta() * np.float32(0.9)
    write_data(tmp_path, x, y, theta)
    command = kotlin.java(jni, [classes, stubs], "RoundsKt", litert_library, tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "WARNING in native method" not in done.stdout, done.stdout + done.stderr
    assert done.stdout.replace(str(tmp_path), "FOLDER") == SAID

    client = NativeClient(native, bundle.folder, litert=litert_library)
    assert (tmp_path / "lost.payload").read_bytes() == (tmp_path / "second.payload").read_bytes()
    visits = ("first", "float32", "first.head"), ("second", "float32", "second.head"), ("third", "int8", "third.head")
    for name, kind, head in visits:
        update = client.round(theta, x, y, payload=kind)
        client.commit(update)
        assert (tmp_path / f"{name}.payload").read_bytes() == update.payload
        assert (tmp_path / head).read_bytes() == head_bytes(update.head, bundle.labels)


@pytest.mark.slow
def test_the_library_of_cmake_fits_pages_of_16_kilobytes(jni):
    (library,) = jni.glob("libtfpfl_jni.so")
    content = library.read_bytes()
    start, size, count = *struct.unpack_from("<Q", content, 32), *struct.unpack_from("<HH", content, 54)
    headers = [content[start + i * size : start + (i + 1) * size] for i in range(count)]
    loaded = [struct.unpack_from("<Q", header, 48)[0] for header in headers if header[:4] == b"\1\0\0\0"]
    assert len(loaded) > 1 and set(loaded) == {16384}


def test_what_gradle_reads_names_what_is_there():
    build = (MODULE / "build.gradle.kts").read_text()
    for pattern in (r'file\("(.*?)"\)', r'srcDir\("(.*?)"\)', r'consumerProguardFiles\("(.*?)"\)'):
        (path,) = re.findall(pattern, build)
        assert (MODULE / path).exists(), path
    assert (MODULE / "../../kotlin/tfpfl/Client.kt").exists()
    (namespace,) = re.findall(r'namespace = "(.*?)"', build)
    assert all(f"package {namespace}\n" in path.read_text() for path in WORKER.iterdir())
    client = (CORE / "kotlin" / "tfpfl" / "Client.kt").read_text()
    kept = re.findall(r"-keep class tfpfl\.(\w+)", (MODULE / "keep.pro").read_text())
    assert len(kept) == 2 and all(re.search(rf"(class|object) {name}\b", client) for name in kept)
    assert all(f"tfpfl/{name}" in JNI or f"tfpfl_{name}_" in JNI for name in kept)
    assert 'include(":tfpfl")' in (PROJECT / "settings.gradle.kts").read_text()
    plugins = re.findall(r'id\("(.*?)"\)', build)
    assert plugins == re.findall(r'id\("(.*?)"\) version', (PROJECT / "build.gradle.kts").read_text())
    manifest = ElementTree.parse(MODULE / "src" / "main" / "AndroidManifest.xml").getroot()
    (permission,) = manifest.findall("uses-permission")
    assert permission.get("{http://schemas.android.com/apk/res/android}name") == "android.permission.INTERNET"


def test_no_backup_takes_what_must_not_leave_the_device():
    """Android's Auto Backup uploads filesDir; only this sentence, wherever it stands, may name it."""
    texts = {path.name: path.read_text() for path in CORE.rglob("*.kt")} | {"native.md": NATIVE}
    for name, text in texts.items():
        rest = re.sub(r"Auto Backup\s+(\*\s+)?uploads\s+(\*\s+)?what\s+(\*\s+)?is\s+(\*\s+)?in `?filesDir", "", text)
        assert not re.search(r"\b(filesDir|getFilesDir|cacheDir|getExternalFilesDir)\b", rest), name
    for text in (texts["PersonalApp.kt"], NATIVE):
        for name in ("update.bin", "head.bin", "head_theta.bin", "bundle"):
            assert f'File(noBackupFilesDir, "{name}")' in text
    swift = NATIVE.partition("## Swift")[2].partition("\n## ")[0]
    assert "values.isExcludedFromBackup = true; try folder.setResourceValues(values)" in swift


def test_the_kotlin_listings_in_the_documentation_are_the_example():
    shown = re.findall(r"```kotlin\n(.*?)```", NATIVE, re.S)
    assert shown and all(part in (CORE / "examples" / "PersonalApp.kt").read_text() for part in shown)
