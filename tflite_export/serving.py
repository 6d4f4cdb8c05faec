"""Serves a site to this machine's own browser, until Ctrl-C."""

import signal
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tfpfl.checks import Unavailable

HOST = "127.0.0.1"
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",  # these two isolate the page, which WebAssembly needs for threads
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the next site on this port is another one
}


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # The system's own table of types may lack some, or have others.
    extensions_map = {
        "": "application/octet-stream",
        ".html": "text/html; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".svg": "image/svg+xml",
        ".png": "image/png",
        ".json": "application/json",
        ".webmanifest": "application/manifest+json",
        ".wasm": "application/wasm",
    }

    def guess_type(self, path):
        return self.extensions_map.get(Path(path).suffix.lower(), self.extensions_map[""])

    def send_head(self):
        # A page of somebody else, whose name leads here, must not read the members' examples.
        name = (self.headers.get("Host") or "").partition(":")[0]  # browsers leave out port 80
        if name not in (HOST, "localhost"):
            self.send_error(403, f"this site is for http://{HOST} only")
            return None
        return super().send_head()

    def list_directory(self, path):
        self.send_error(404)

    def end_headers(self):
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format, *args):
        pass


class SiteServer:
    """A server of the files of one folder, on 127.0.0.1 only. Use it in a `with` statement.

    Args:
        folder: the folder of a site.
        port: the TCP port; 0 takes any that is free.

    Raises:
        Unavailable: the port is taken, or may not be used.
    """

    def __init__(self, folder: Path, port: int = 0):
        try:
            self._server = ThreadingHTTPServer((HOST, port), partial(_Handler, directory=str(folder)))
        except OSError as error:
            raise Unavailable(
                f"port {port} of {HOST} cannot be used ({error.strerror or error}): give another one with --port, or "
                "--port 0 for any that is free"
            ) from error
        self._server.daemon_threads = True
        self.url = f"http://{HOST}:{self._server.server_address[1]}/"

    def __enter__(self) -> "SiteServer":
        self._ended = threading.Event()
        # From now on, not only from `wait` on: a Ctrl-C that comes in between is one to end in order, too.
        self._before = {n: signal.signal(n, lambda *_: self._ended.set()) for n in (signal.SIGINT, signal.SIGTERM)}
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self) -> None:
        """Returns when the process is asked to end: Ctrl-C, or SIGTERM."""
        while not self._ended.wait(0.2):  # in short turns, since Windows cannot interrupt a wait
            pass
