"""Files that the core in C writes in one step: what two threads, a failing disk and a failing LiteRT make of them."""

import errno
import fcntl
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
LEFT = """
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "core.h"
static const char *path;
static int calls, without, late;
/* While a head is saved, another client of this process is opened. */
int fsync(int file) {
    (void)file;
    if (calls++ == 0) remove_leftovers(path);
    return 0;
}
int flock(int file, int how) {
    char name[1000], link[40];
    if (without) return errno = ENOLCK, -1;
    if (late && late--) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
        ssize_t length = readlink(link, name, sizeof name - 1);
        name[length > 0 ? length : 0] = 0;
        unlink(name);
        puts("deleted");
    }
    return (int)syscall(SYS_flock, file, how);
}
int main(int count, char **arguments) {
    float kernel[] = {1, 2}, bias[] = {3, 4};
    char error[TFPFL_ERROR_ROOM], own[1000];
    tfpfl_head head = {1, 2, kernel, bias, {0}, NULL, 0};
    path = arguments[count - 1];
    without = strcmp(arguments[1], "without") == 0;
    late = strcmp(arguments[1], "late") == 0;
    snprintf(own, sizeof own, "%s.%ld.5.new", path, (long)getpid());
    close(open(own, O_CREAT | O_WRONLY, 0600));
    if (strcmp(arguments[1], "open") == 0) remove_leftovers(path);
    else if (tfpfl_head_save(path, &head, error) != 0) puts(error);
    if (access(own, F_OK) == 0) puts("its own is left"), unlink(own);
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


@pytest.fixture(scope="module")
def leaving(programs, tmp_path_factory):
    return linked(LEFT, tmp_path_factory.mktemp("programs") / "leaving", programs / "libtfpfl_device.a")


def test_what_killed_processes_left_is_deleted_whatever_their_numbers(leaving, tmp_path):
    """In a container each process has the number of the one that was killed before. What is written just now stays."""
    left = [f"head.bin.{process}.12.new" for process in (1, os.getpid(), 10**20)]
    others = [f"{name}.1.0.new" for name in ("head.bi", "head.bin2", "ahead.bin", "head.bin.bin")]
    others += [f"head.bin.1{end}" for end in (".0", ".new", "..new", ".0.new2", ".0.0.new", ".x.new")]
    others += ["head.bin..0.new", "head.bin.0.0.new", "head.bin.-1.0.new", "head.bin.1.9.new"]
    for name in left + others:
        (tmp_path / name).write_bytes(b"half of a head")
    (tmp_path / "head.bin.1.7.new").mkdir()
    (tmp_path / "head.bin.1.8.new").symlink_to(tmp_path / others[0])
    with open(tmp_path / "head.bin.1.9.new") as written:
        fcntl.flock(written, fcntl.LOCK_EX)  # as the client in Python does
        assert said(leaving, "open", tmp_path / "head.bin") == ""
    others += ["head.bin.1.7.new", "head.bin.1.8.new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize(("how", "lines"), [("save", ""), ("late", "deleted\n"), ("without", "its own is left\n")])
def test_a_client_that_is_opened_leaves_the_file_that_another_one_writes(leaving, tmp_path, how, lines):
    """Also if it has no lock yet, and is deleted; on a file system without locks nothing is."""
    assert said(leaving, how, tmp_path / "head.bin") == lines
    assert load_head(tmp_path / "head.bin", 1, 2).bias.tolist() == [3, 4] and len(list(tmp_path.iterdir())) == 1


def test_a_client_deletes_what_was_left_of_its_head(failing, bundle, litert_library, tmp_path):
    """Also if the path of the head has no folder."""
    for state in (tmp_path / "head.bin", "head.bin"):
        left = tmp_path / "head.bin.1.0.new"
        left.write_bytes(b"half of a head")
        command = [failing, bundle.folder, litert_library, state]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == "42\n" and not left.exists()
