"""A device's connection to the server: it stays open between requests, and may be closed at any time."""

from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tflite_export.device.live.connection import Connection


@pytest.fixture
def server():
    """(address, the ports that its requests came from)."""
    ports = []

    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            ports.append(self.client_address[1])
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_):
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    found.daemon_threads = True
    thread = Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{found.server_address[1]}", ports
    found.shutdown()
    found.server_close()
    thread.join()


def test_it_stays_open_and_after_close_a_request_opens_another(server):
    address, ports = server
    with closing(Connection(address, None)) as connection:
        for _ in range(3):
            assert connection.send("GET", "/v1/health", b"", {})[:2] == (200, b"ok")
        assert len(set(ports)) == 1
        connection.close()
        for _ in range(2):
            assert connection.send("GET", "/v1/health", b"", {})[0] == 200
        assert ports[3] == ports[4] != ports[0]
