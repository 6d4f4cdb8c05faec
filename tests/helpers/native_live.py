"""Devices in C: their library, processes that can be killed, and a proxy that loses what a test wants to be lost."""

import ctypes
import http.client
import os
import subprocess
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from helpers.native import NO_COMPILER, Examples, Head, NativeError, build, compiler, examples_in, head_out
from tflite_export.device.live import wire

SPLITS = ("train", "validation", "test")
OWN_CLOCK = "own_clock"  # the folder, in that of the programs, of a library whose clock only its own pauses move
_NEEDED = """
#include <curl/curl.h>
#include <openssl/evp.h>
#if OPENSSL_VERSION_NUMBER < 0x30000000L
#error too old
#endif
int main(void) { return curl_easy_init() == NULL || EVP_sha256() == NULL; }
"""


@cache
def missing() -> str | None:
    """Why devices in C cannot be built here; None: they can."""
    if compiler() is None:
        return NO_COMPILER
    command = [compiler(), "-x", "c", "-", "-o", os.devnull, "-lcurl", "-lcrypto"]
    done = subprocess.run(command, input=_NEEDED, capture_output=True, text=True, check=False)
    if done.returncode:
        return "libcurl and OpenSSL 3 with headers are not here (Debian: libcurl4-openssl-dev, libssl-dev)"
    return None


def write_raw(folder, examples) -> None:
    """Writes the examples of a device as device_core/examples/live.c reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        x, y = examples.get(split, ((), ()))
        if len(y):
            np.asarray(x, "<f4").tofile(folder / f"{split}_x.bin")
            np.asarray(y, "<i4").tofile(folder / f"{split}_y.bin")
    (folder / "classes.txt").write_text(f"{examples['classes']}\n")


class _Data(ctypes.Structure):
    _fields_ = [*((split, Examples) for split in SPLITS), ("classes", ctypes.c_size_t)]


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)


class _Options(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_char_p) for name in ("token", "litert", "trunk", "certificate")),
        ("patience", ctypes.c_double),
        ("log", _LOG),
        ("context", ctypes.c_void_p),
        ("secure", ctypes.c_int),
    ]


class NativeLive:
    """A device in C, in this process; the server is asked once if `patience` is below 0.

    With the library in `OWN_CLOCK`, `time()` is its clock: no pause takes any time.
    """

    def __init__(self, folder, url, state, examples, token, litert, patience=-1.0, certificate=None, secure=False):
        # TensorFlow shows its BoringSSL to all libraries of the process: this one must look into its own OpenSSL first.
        first_its_own = getattr(os, "RTLD_DEEPBIND", 0)
        path = next(folder.glob("libtfpfl_live.[sd]*"))
        self._library = ctypes.CDLL(str(path), mode=ctypes.DEFAULT_MODE | first_its_own)
        self._library.tfpfl_live_error.restype = ctypes.c_char_p
        self._library.tfpfl_live_counted.restype = ctypes.c_size_t
        if folder.name == OWN_CLOCK:
            self.time = self._library.own_time
            self.time.restype = ctypes.c_double
        self.told: list[str] = []
        given = {split: examples_in(*examples[split]) for split in SPLITS if split in examples}
        data = _Data(**{split: value for split, (value, _) in given.items()}, classes=examples.get("classes", 0))
        log = _LOG(lambda _, text: self.told.append(text.decode()))
        self._kept = given, log
        texts = (None if value is None else os.fsencode(value) for value in (token, litert, None, certificate))
        options = _Options(*texts, patience, log, None, secure)
        self._live = ctypes.c_void_p()
        arguments = ctypes.byref(data), ctypes.byref(options), ctypes.byref(self._live)
        try:
            self._done(self._library.tfpfl_live_open(url.encode(), os.fsencode(state), *arguments))
        except NativeError:
            self.close()
            raise

    def _done(self, status) -> None:
        if status:
            text = self._library.tfpfl_live_error(self._live).decode("utf-8", "replace")
            raise NativeError(min(status, 4), text)

    def step(self, wait=0.0) -> bool:
        goes_on = ctypes.c_int()
        self._done(self._library.tfpfl_live_step(self._live, ctypes.c_double(wait), ctypes.byref(goes_on)))
        return bool(goes_on.value)

    def run(self, most=0) -> int:
        counted = ctypes.c_size_t()
        self._done(self._library.tfpfl_live_run(self._live, ctypes.c_size_t(most), ctypes.byref(counted)))
        assert counted.value == self._library.tfpfl_live_counted(self._live)
        return counted.value

    @property
    def head(self):
        """The present head, of the client with which an app predicts."""
        self._library.tfpfl_current_head.restype = ctypes.c_void_p
        return head_out(Head.from_address(self._library.tfpfl_current_head(self._client)))

    @property
    def head_is_stale(self) -> bool:
        return bool(self._library.tfpfl_head_is_stale(self._client))

    @property
    def _client(self):
        self._library.tfpfl_live_client.restype = ctypes.c_void_p
        return ctypes.c_void_p(self._library.tfpfl_live_client(self._live))

    def close(self) -> None:
        self._library.tfpfl_live_close(self._live)
        self._live = ctypes.c_void_p()


class Lost(Exception):
    """The connection ends here, without an answer."""


class Proxy:
    """Forwards requests to a server that may change.

    Args:
        hook: (when, method, path, client) -> None, which may raise `Lost`; `when` is 'before' the server has the
            request, 'after' it has answered, and 'told' when the device has the answer.
        tls: an `ssl.SSLContext`, for https.
    """

    def __init__(self, hook=lambda *_: None, tls=None):
        self.target: str | None = None  # such as 'http://127.0.0.1:1234'; None: the server is away
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self):
                self.close_connection = False
                about = self.command, self.path, int(self.headers.get("Tfpfl-Client", -1))
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                try:
                    hook("before", *about)
                    status, headers, answer = proxy.ask(self.command, self.path, body, self.headers)
                    hook("after", *about)
                    self.send_response_only(status)
                    for name, value in headers:
                        if name.lower() in ("content-type", "content-encoding", wire.BODY.lower()):
                            self.send_header(name, value)
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)
                    self.wfile.flush()
                    hook("told", *about)
                except (Lost, OSError, http.client.HTTPException):
                    self.close_connection = True

            do_GET = do_POST = do_PUT = do_CONNECT = forward

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # devices that are killed
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.address = f"http{'s' if tls else ''}://127.0.0.1:{self._server.server_address[1]}"

    def ask(self, method, path, body, headers):
        if self.target is None:
            raise Lost
        connection = http.client.HTTPConnection(self.target.removeprefix("http://"), timeout=60)
        try:
            passed = {name: value for name, value in headers.items() if name.lower() not in ("host", "connection")}
            connection.request(method, path, body or None, passed)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


def live_programs(sanitized=False):
    """The folder with the library for live rounds, its example, and the program of its test vectors."""
    return build("-live-sanitized", target="live-sanitized") if sanitized else build("-live", target="live-programs")
