"""Files that the core in C writes in one step: what two threads, a failing disk and a failing LiteRT make of them."""

import subprocess

from helpers.native import linked
from tflite_export.device.head_file import load_head

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


def said(program, *arguments):
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
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
