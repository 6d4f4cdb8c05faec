"""What a device in C keeps between starts, on a disk that fails: nothing that is there is taken for missing."""

import os
import shutil
import subprocess
from contextlib import closing

import pytest

from helpers.hand_made import manifest_of, write_files, write_manifest
from helpers.native import linked
from helpers.native_live import Proxy, live_programs, missing
from tflite_export.device.live.secure.state import SecureState
from tflite_export.device.live.state import State
from tflite_export.device.live.wire import Signer

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

FAILING = """
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "secure.h"
/* The disk cannot read the file whose path ends with BAD. */
static int fails(const char *path) {
    const char *bad = getenv("BAD");
    size_t length = strlen(path), tail = strlen(bad);
    return length >= tail && strcmp(path + length - tail, bad) == 0 ? errno = EIO : 0;
}
int access(const char *path, int mode) { return fails(path) ? -1 : faccessat(AT_FDCWD, path, mode, 0); }
int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int mode = va_arg(more, int);
    va_end(more);
    return fails(path) ? -1 : openat(AT_FDCWD, path, flags, mode);
}
"""
OPENING = """
int main(int count, char **arguments) {
    float x[] = {0};
    int32_t y[] = {0};
    tfpfl_live_data data = {.train = {.x = x, .numbers = 1, .labels = y, .count = 1}};
    tfpfl_live_options options = {.token = "token", .patience = -1};
    tfpfl_live *live;
    tfpfl_live_open(arguments[count - 2], arguments[count - 1], &data, &options, &live);
    puts(tfpfl_live_error(live));
    tfpfl_live_close(live);
}
"""
READING = """
int main(int count, char **arguments) {
    char error[TFPFL_ERROR_ROOM] = "nothing is there";
    const char *folder = arguments[count - 1];
    tfpfl_model model = {.num_features = 2, .num_classes = 2, .num_backbone_weights = 6};
    struct pending pending;
    struct visited visited;
    struct taken taken;
    struct words body;
    bool found;
    int status = live_pending(folder, &model, &pending, error);
    if (status == 0) status = secure_visit(folder, &model, &visited, error);
    if (status == 0) status = secure_taken(folder, &taken, &found, error);
    if (status == 0) status = secure_message(folder, MASKED, &body, error);
    puts(error);
}
"""
FORGETTING = """
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "secure.h"
/* Says what is deleted, and which folders are written to the disk. */
int unlink(const char *path) {
    if (faccessat(AT_FDCWD, path, F_OK, 0) == 0) printf("- %s\\n", strrchr(path, '/') + 1);
    return unlinkat(AT_FDCWD, path, 0);
}
int fsync(int file) {
    char name[40], path[4096] = "";
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    if (readlink(name, path, sizeof path - 1) > 0) printf("%s\\n", strrchr(path, '/') + 1);
    return 0;
}
int main(int count, char **arguments) {
    char error[TFPFL_ERROR_ROOM] = "";
    const char *folder = arguments[count - 1], *what = arguments[1];
    int lock, status = -1;
    if (strcmp(what, "begin") == 0) status = live_take_folder(folder, &lock, error);
    if (strcmp(what, "update") == 0) status = live_drop(folder, error);
    if (strcmp(what, "attempt") == 0) status = secure_drop_attempt(folder, error);
    if (strcmp(what, "round") == 0) status = secure_drop(folder, error);
    struct words body = {.text = error, .used = 1};
    if (strcmp(what, "keep") == 0) status = secure_keep_message(folder, KEYS, &body, error);
    if (status != 0) puts(error);
}
"""
LIBRARIES = "-lcurl", "-lcrypto"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """{what it does: a program}"""
    folder, library = tmp_path_factory.mktemp("programs"), live_programs() / "libtfpfl_live.a"
    sources = {"open": FAILING + OPENING, "read": FAILING + READING, "forget": FORGETTING}
    return {name: linked(source, folder / name, library, *LIBRARIES) for name, source in sources.items()}


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def said(program, *arguments, bad=""):
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True, env={"BAD": bad})
    return done.stdout.splitlines()


OPENED = ["head.bin", "identity.pem", "member.json", "bundle/manifest.json", "update.npz", "secure/visit.npz"]


@pytest.mark.parametrize("name", OPENED)
def test_a_file_that_cannot_be_found_now_is_not_made_anew(programs, tmp_path, name):
    """With one error of the disk, a device asked for its first head in place of the one that it had learned, or made
    another key."""
    state, asked = tmp_path / "state", []
    state.mkdir()
    write_files(state / "bundle")
    write_manifest(state / "bundle", manifest_of(state / "bundle"))
    shutil.copy(state / "bundle" / "head.bin", state / "head.bin")
    (state / "identity.pem").write_bytes(Signer().pem)
    (state / "member.json").write_text('{"client": 0, "classes": 2}')
    (state / "lock").touch()
    before = contents(state)

    def ask(method, path, body, headers):
        asked.append(path)
        return 200, [], b'{"client": 0, "classes": 2}' if path == "/v1/join" else before["head.bin"]

    with Proxy() as proxy:
        proxy.ask = ask
        lines = said(programs["open"], proxy.address, state, bad=f"/{name}")
    assert lines == [f"[Errno 5] Input/output error: '{state / name}'"] and not asked
    assert contents(state) == before


@pytest.mark.parametrize("name", ["update.bin", "secure/update.bin", "secure/attempt.bin", "secure/masked"])
def test_what_is_on_its_way_is_not_forgotten(programs, tmp_path, name):
    path = tmp_path / name
    assert said(programs["read"], tmp_path, bad="/none") == ["nothing is there"]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"what may have been sent")
    assert said(programs["read"], tmp_path, bad=f"/{name}") == [f"[Errno 5] Input/output error: '{path}'"]
    assert path.exists()


FORGOTTEN = {  # in the client in C; that in Python has other names
    "begin": ["- head.bin.7.0.new", "- keys.7.0.new", "state", "secure"],
    "update": ["- update.bin", "state"],
    "attempt": ["- attempt.bin", "secure", "- keys", "- shares", "- masked", "- unmask", "secure"],
    "round": ["- attempt.bin", "secure", "- keys", "- shares", "- masked", "- unmask", "- update.bin", "secure"],
}
NAMES = {"- attempt.bin": "- attempt.json", "- update.bin": "- visit.npz"}


def filled(state):
    """A folder with all that a device may have to forget."""
    (state / "secure").mkdir(parents=True)
    for name in ("update.bin", "update.npz", "head.bin.7.0.new", "secure/keys.7.0.new", "secure/attempt.bin"):
        (state / name).write_bytes(b"secret")
    for name in ("attempt.json", "visit.npz", "update.bin", "keys", "shares", "masked", "unmask"):
        (state / "secure" / name).write_bytes(b"secret")


@pytest.mark.parametrize("what", FORGOTTEN)
def test_what_is_deleted_does_not_come_back_after_a_loss_of_power(programs, tmp_path, what):
    """The folder is written to the disk: of an attempt first without the secrets, and then without the messages."""
    state = tmp_path / "state"
    filled(state)
    for name in ("update.npz", "secure/visit.npz") if what == "begin" else ():
        (state / name).unlink()
    assert said(programs["forget"], what, state) == FORGOTTEN[what]
    shutil.rmtree(state / "secure")  # nothing of it is there at first
    assert said(programs["forget"], what, state) == [line for line in FORGOTTEN[what] if line == "state"]


@pytest.mark.parametrize("what", FORGOTTEN)
def test_what_is_deleted_in_python_does_not_come_back_either(tmp_path, monkeypatch, what):
    state, seen = tmp_path / "state", []
    filled(state)
    delete = os.unlink

    def unlink(path, *more, **how):
        seen.extend([f"- {os.path.basename(path)}"] if os.path.exists(path) else [])
        delete(path, *more, **how)

    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(os, "fsync", lambda file: seen.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}"))))
    with closing(State(state)) as device:
        if what != "begin":
            seen.clear()
            secure = SecureState(state)
            {"update": device.drop, "attempt": secure.drop_attempt, "round": secure.drop}[what]()
    expected = {
        "update": ["- update.npz", "state"],
        "round": [*FORGOTTEN["attempt"], "- update.bin", "secure"],
    }
    assert seen == [NAMES.get(line, line) for line in expected.get(what, FORGOTTEN[what])]


@pytest.mark.parametrize("language", ["C", "Python"])
def test_a_folder_that_is_made_stays_after_a_loss_of_power(programs, tmp_path, monkeypatch, language):
    """The device's folder is written to the disk when `secure` is made in it; else all that is kept there could go."""
    state, seen = tmp_path / "state", []
    state.mkdir()
    monkeypatch.setattr(os, "fsync", lambda file: seen.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}"))))
    for expected in (["state", "secure"], ["secure"]):
        seen.clear()
        if language == "C":
            seen.extend(said(programs["forget"], "keep", state))
        else:
            SecureState(state).keep_message("keys", b"a message")
        assert [name for name in seen if not name.endswith(".new")] == expected
    assert (state / "secure").stat().st_mode & 0o777 == 0o700
