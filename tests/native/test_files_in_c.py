"""Files that the core in C writes in one step: what two threads, a failing disk and a failing LiteRT make of them."""

import errno
import os
import subprocess
import sys

import pytest

from helpers.native import linked
from helpers.phone_bundles import small_bundle
from tflite_export.device.head_file import load_head

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="its programs put functions in the place of those of Linux"
)

TWO = """
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
#include "tfpfl_device.h"
static pthread_barrier_t written;
/* Both threads have their head in a file before either gives it the name. */
int fsync(int file) {
    (void)file;
    static __thread int waited;
    if (!waited++) pthread_barrier_wait(&written);
    return 0;
}
static const char *path;
static void *save(void *value) {
    float kernel[600], bias[3];
    char error[TFPFL_ERROR_ROOM];
    tfpfl_head head = {200, 3, kernel, bias, {0}, NULL, 0};
    for (int i = 0; i < 600; i++) kernel[i] = *(float *)value;
    for (int i = 0; i < 3; i++) bias[i] = *(float *)value;
    if (tfpfl_head_save(path, &head, error) != 0) puts(error);
    return NULL;
}
int main(int count, char **arguments) {
    pthread_t threads[2];
    float values[] = {1, 2};
    path = arguments[count - 1];
    pthread_barrier_init(&written, NULL, 2);
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, save, &values[i]);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}
"""

FAILING = """
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "tfpfl_device.h"
/* The disk fails with the number that the environment names, if there is one. */
int fsync(int file) {
    struct stat about;
    if (fstat(file, &about) != 0) return -1;
    const char *number = getenv(S_ISDIR(about.st_mode) ? "OF_FOLDERS" : "OF_FILES");
    return number == NULL ? 0 : (errno = atoi(number), -1);
}
int main(int count, char **arguments) {
    tfpfl_client *client;
    tfpfl_options options = {.litert = arguments[2], .state = arguments[count - 1]};
    int status = tfpfl_open(arguments[1], &options, &client);
    if (status == 0) {
        tfpfl_head head = *tfpfl_current_head(client);
        float *bias = calloc(head.num_classes, 4);
        for (size_t i = 0; i < head.num_classes; i++) bias[i] = 42;
        head.bias = bias;
        status = tfpfl_start_from(client, &head);
        printf("%g\\n", (double)tfpfl_current_head(client)->bias[0]);
        free(bias);
    }
    if (status != 0) printf("%d %s\\n", status, tfpfl_error(client));
    tfpfl_close(client);
}
"""
LIKELY = "the file is the new one, and after a loss of power it may be the old one again"


def said(program, *arguments, **environment):
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_threads_save_one_head(programs, tmp_path):
    """Neither takes the other's file: the one under the name is whole, and both saves are done."""
    program, folder = linked(TWO, tmp_path / "two", programs / "libtfpfl_device.a", "-pthread"), tmp_path / "state"
    folder.mkdir()
    (folder / "head.bin.7.0.new").write_bytes(b"of a process that was killed")
    assert said(program, folder / "head.bin") == ""
    head = load_head(folder / "head.bin", 200, 3)
    assert (
        head.kernel[0, 0] in (1, 2)
        and (head.kernel == head.kernel[0, 0]).all()
        and (head.bias == head.kernel[0, 0]).all()
    )
    assert sorted(path.name for path in folder.iterdir()) == ["head.bin", "head.bin.7.0.new"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return small_bundle("classification", tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def failing(programs, tmp_path_factory):
    return linked(FAILING, tmp_path_factory.mktemp("programs") / "failing", programs / "libtfpfl_device.a")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_write_folders_to_the_disk(failing, bundle, litert_library, tmp_path, number):
    """Its folders are taken as they are: else no head could ever be saved there."""
    path = tmp_path / "head.bin"
    assert said(failing, bundle.folder, litert_library, path, OF_FOLDERS=str(number)) == "42\n"
    assert load_head(path, bundle.num_features, bundle.num_classes).bias[0] == 42


def test_a_head_that_was_replaced_is_the_present_one_also_after_an_error(failing, bundle, litert_library, tmp_path):
    """The head in memory is the one in the file, whatever the disk says of the folder."""
    path = tmp_path / "head.bin"
    lines = said(failing, bundle.folder, litert_library, path, OF_FILES="5").splitlines()
    assert lines[0] == "0" and lines[1].startswith(f"4 [Errno 5] Input/output error: '{path}.")
    assert not list(tmp_path.iterdir())
    lines = said(failing, bundle.folder, litert_library, path, OF_FOLDERS="5").splitlines()
    assert lines == ["42", f"4 [Errno 5] Input/output error: {LIKELY}: '{path}'"]
    assert load_head(path, bundle.num_features, bundle.num_classes).bias[0] == 42


def test_what_a_killed_process_has_left_of_a_head_goes_when_a_client_is_opened(
    failing, bundle, litert_library, tmp_path
):
    """It has a head in it. What a process that is there writes just now stays, and so do the files of others."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = [f"head.bin.{gone.pid}.{number}.new" for number in (0, 12)]
    others = [f"{name}.{gone.pid}.0.new" for name in ("head.bi", "head.bin2", "ahead.bin", "head.bin.bin")]
    others += [f"head.bin.{gone.pid}{end}" for end in (".0", ".new", "..new", ".0.new2", ".0.0.new", ".x.new")]
    others += [f"head.bin.{os.getpid()}.0.new", "head.bin..0.new", "head.bin.0.0.new", "head.bin.-1.0.new"]
    others += ["head.bin.99999999999999999999.0.new"]
    for name in left + others:
        (tmp_path / name).write_bytes(b"half of a head")
    (tmp_path / f"head.bin.{gone.pid}.7.new").mkdir()
    assert said(failing, bundle.folder, litert_library, tmp_path / "head.bin") == "42\n"
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == sorted([*others, "head.bin", f"head.bin.{gone.pid}.7.new"])
    for name in left:
        (tmp_path / name).write_bytes(b"half of a head")
    done = subprocess.run(
        [failing, bundle.folder, litert_library, "head.bin"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "42\n" and not [name for name in left if (tmp_path / name).exists()]
