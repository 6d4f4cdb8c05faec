"""A LiteRT that fails in the middle: the core says so, and touches no memory that is not its own."""

import subprocess

import pytest

from helpers.native import build, linked

LITERT = """
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
typedef void *handle;
static int one;
/* Whether this function is the one that fails. */
static int ends(const char *name) { return strcmp(getenv("FAILS"), name) == 0 ? 3 : 0; }
#define GIVES(name, arguments, to) int LiteRt##name arguments { *to = &one; return ends(#name); }
#define DOES(name, arguments) int LiteRt##name arguments { return ends(#name); }
#define FREES(name) void LiteRt##name(handle h) { (void)h; }
GIVES(CreateEnvironment, (int n, const void *o, handle *out), out)
GIVES(CreateModelFromFile, (const char *path, handle *out), out)
GIVES(CreateOptions, (handle *out), out)
GIVES(CreateCompiledModel, (handle e, handle m, handle o, handle *out), out)
GIVES(GetModelSignature, (handle m, size_t i, handle *out), out)
GIVES(GetSignatureInputTensorByIndex, (handle s, size_t i, handle *out), out)
GIVES(GetSignatureOutputTensorByIndex, (handle s, size_t i, handle *out), out)
GIVES(GetCompiledModelInputBufferRequirements, (handle c, size_t s, size_t i, handle *out), out)
GIVES(GetCompiledModelOutputBufferRequirements, (handle c, size_t s, size_t i, handle *out), out)
GIVES(CreateManagedTensorBufferFromRequirements, (handle e, const void *t, handle r, handle *out), out)
DOES(SetOptionsHardwareAccelerators, (handle o, int a))
DOES(GetTensorBufferPackedSize, (handle b, size_t *n))
DOES(LockTensorBuffer, (handle b, void **m, int l))
DOES(UnlockTensorBuffer, (handle b))
DOES(RunCompiledModel, (handle c, size_t s, size_t n, handle *in, size_t k, handle *out))
FREES(DestroyEnvironment) FREES(DestroyModel) FREES(DestroyOptions) FREES(DestroyCompiledModel)
void LiteRtDestroyTensorBuffer(handle buffer) { *(volatile char *)buffer; }
int LiteRtGetNumModelSignatures(handle m, size_t *n) { *n = 1; return ends("GetNumModelSignatures"); }
int LiteRtGetSignatureKey(handle s, const char **key) { *key = "features"; return ends("GetSignatureKey"); }
int LiteRtGetNumSignatureInputs(handle s, size_t *n) { *n = 9; return ends("GetNumSignatureInputs"); }
int LiteRtGetNumSignatureOutputs(handle s, size_t *n) { *n = 2; return ends("GetNumSignatureOutputs"); }
int LiteRtGetSignatureInputName(handle s, size_t i, const char **n) { *n = "x"; return ends("GetSignatureInputName"); }
int LiteRtGetSignatureOutputName(handle s, size_t i, const char **n) { *n = "y"; return ends("GetSignatureInputName"); }
int LiteRtGetRankedTensorType(handle t, void *type) { memset(type, 0, 72); return ends("GetRankedTensorType"); }
"""
RUNNING = """
#include <stdio.h>
#include "core.h"
int main(int count, char **arguments) {
    char error[TFPFL_ERROR_ROOM];
    struct runtime *runtime;
    int status = runtime_open(&runtime, arguments[count - 1], "a/program", error);
    for (int i = 0; i < 2; i++) {  /* it may be asked again */
        if (status == 0 || i > 0) status = runtime_run(runtime, "features", NULL, 0, NULL, 0, error);
        puts(error);
        if (status == 0) return 1;
    }
    runtime_close(runtime);
}
"""
DESCRIBING = ["GetNumSignatureInputs", "GetNumSignatureOutputs", "GetSignatureInputName", "GetRankedTensorType"]


@pytest.fixture(scope="module")
def running(programs, tmp_path_factory):
    """(a program that runs a signature, LiteRT's library), both with the sanitizers of addresses and leaks."""
    folder = tmp_path_factory.mktemp("programs")
    sanitizers, library = "-fsanitize=address,undefined", build("-sanitized", target="sanitized") / "libtfpfl_device.a"
    fake = linked(LITERT, folder / "libLiteRt.so", "-shared", "-fPIC")
    return linked(RUNNING, folder / "running", library, sanitizers), fake


@pytest.mark.parametrize("name", DESCRIBING)
def test_a_failure_while_a_signature_is_described(running, name):
    """After one of GetNumSignatureOutputs, buffers were freed that were never made."""
    program, fake = running
    done = subprocess.run([program, fake], capture_output=True, text=True, check=False, env={"FAILS": name})
    assert done.returncode == 0, done.stdout + done.stderr
    why = "LiteRT cannot run signature 'features' of program; it may be too old for it: a failure of the runtime (3)"
    assert done.stdout.splitlines() == [why, why]
