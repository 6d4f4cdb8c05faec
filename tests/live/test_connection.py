"""A device's connection to the server: it stays open between requests, and may be closed at any time."""

import ssl
import time
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.certificates import made_certificate
from tflite_export.device.__main__ import main
from tflite_export.device.errors import InvalidInput
from tflite_export.device.live import client as module
from tflite_export.device.live.client import Answer, LiveDevice, ServerError
from tflite_export.device.live.connection import Connection, NotTrusted, trusting
from tflite_export.device.live.rests import Rests
from tfpfl.checks import InvalidArgument
from tfpfl.live.watching import WatchedServer


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

    with serving(Answering) as address:
        yield address, ports


@contextmanager
def serving(handler, tls=None):
    """The address of a server on the loopback; by https, with the certificate and the key of a file."""
    found = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    found.daemon_threads = True
    if tls is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tls)
        found.socket = context.wrap_socket(found.socket, server_side=True)
    thread = Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield f"http{'s' if tls else ''}://127.0.0.1:{found.server_address[1]}"
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


def device(address, folder, **how):
    """A device that has not joined, and the texts of its log."""
    log = []
    examples = {"train": (np.zeros((3, 4), np.float32), np.array([0, 1, 0]))}
    with pytest.raises(ServerError) as error:
        LiveDevice(address, folder, examples, "a token", log=log.append, **how)
    return str(error.value), log


@pytest.mark.parametrize("why", ["nobody that is trusted has signed it", "it is of another address"])
def test_a_certificate_that_is_not_trusted_ends_the_device_at_once(tmp_path, why):
    """Such as one that a user has signed himself, when --ca is forgotten: to ask again for minutes would not help."""
    other = why.startswith("it is of")
    path = made_certificate(tmp_path / "server.pem", address="127.0.0.2" if other else "127.0.0.1")
    with serving(BaseHTTPRequestHandler, path) as address:
        told, log = device(address, tmp_path / "state", context=trusting(path) if other else None)
    assert f"the certificate of {address} is not trusted: " in told and "--ca" in told and not log


def test_a_certificate_that_is_not_trusted_later_is_waited_for():
    """A hotel's network may show its own page for a while; the server that answered before is still there."""
    answer, log = Answer(200, b"ok", ""), []
    known = object.__new__(LiveDevice)
    known.url, known.patience, known.log, known._is_reached = "https://example.org", 300.0, log.append, False
    sent = iter([answer, NotTrusted("whose is it"), answer, NotTrusted("whose is it")])

    def once(*_):
        found = next(sent)
        if isinstance(found, Exception):
            raise found
        return found

    known._once = once
    for _ in range(2):
        assert known._send("GET", "/v1/health", b"", None) is answer
    assert len(log) == 1 and "whose is it" in log[0]
    known._is_reached = False  # as after a start
    with pytest.raises(ServerError, match="whose is it"):
        known._send("GET", "/v1/health", b"", None)


@pytest.mark.parametrize("days", [-3, 3])
def test_a_certificate_whose_time_is_not_now_is_tried_again(tmp_path, days):
    """The clock of a device may be set a little later."""
    path = made_certificate(tmp_path / "server.pem", days=days)
    with serving(BaseHTTPRequestHandler, path) as address:
        told, log = device(address, tmp_path / "state", context=trusting(path), patience=1.0)
    assert f"{address} does not answer: " in told and "certificate" in told and len(log) == 1


def test_the_log_says_once_that_the_server_is_away(tmp_path):
    with serving(BaseHTTPRequestHandler) as address:
        pass
    told, (line,) = device(address, tmp_path / "state", patience=1.5)
    assert f"{address} does not answer: " in told
    assert line.startswith(f"{address} does not answer, and is asked again for 1.5 s: ")


ELSEWHERE = ["example.org", "10.0.2.2:8443", "[2001:db8::1]:8443", "localhost@example.org", "0.0.0.0"]


@pytest.mark.parametrize("host", ELSEWHERE)
def test_a_token_is_not_sent_by_http_to_another_machine(tmp_path, monkeypatch, capsys, host):
    """Whoever is on the way could read it. tests/native compares with what the client in C says."""
    monkeypatch.setattr(Connection, "send", lambda *_: pytest.fail("something was sent"))
    data, state = tmp_path / "data", tmp_path / "state"
    data.mkdir()
    np.savez(data / "train.npz", x=np.zeros((3, 4), np.float32), y=np.array([0, 1, 0]))
    given = [f"http://{host}", "--data", str(data), "--state", str(state), "--token", "a token"]
    assert main(given) == 1 and not state.exists()
    told = capsys.readouterr().err
    assert told.startswith("Error: http is for a server on this machine alone (127.0.0.1, ::1, localhost): others ")
    assert told.endswith(f"Give the server --tls, and the device its address with https://, found 'http://{host}'\n")


@pytest.mark.parametrize("url", ["http://127.0.0.1:84433", "http://localhost:port", "https://[::1"])
def test_an_address_that_cannot_be_one_is_refused_at_once(tmp_path, url):
    """It was asked again and again; the first one was another port of this machine, which got the token."""
    examples = {"train": (np.zeros((3, 4), np.float32), np.array([0, 1, 0]))}
    said = "a server's address is such as https://example.org:8443, found "
    with pytest.raises(InvalidInput, match=said):
        LiveDevice(url, tmp_path / "state", examples, "a token")
    with pytest.raises(InvalidArgument, match=said):
        WatchedServer(url, "an-operators-token")


def test_patience_begins_when_the_server_goes_away(tmp_path, monkeypatch):
    """A download that takes longer than the patience and breaks off once is asked for again: 300 seconds long."""
    clock, asked = [1000.0], []

    def once(self, *about):
        clock[0] += 100 if asked else 400
        asked.append(about)
        raise ConnectionError("it broke off")

    monkeypatch.setattr(LiveDevice, "_once", once)
    its_clock = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: None, time=time.time)
    monkeypatch.setattr(module, "time", its_clock)
    told, log = device("http://127.0.0.1:9", tmp_path, patience=300.0)
    assert told == "http://127.0.0.1:9 does not answer: it broke off" and len(log) == 1
    assert len(asked) == 4  # at 1400, 1500, 1600 and 1700 seconds


def test_a_server_on_this_machine_is_asked_without_a_proxy(server, monkeypatch):
    """Otherwise the proxy of a company would get the enrolment token, and could reach no server here."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with closing(Connection(server[0], None)) as connection:
        assert connection.send("GET", "/v1/health", b"", {})[:2] == (200, b"ok")
    with closing(Connection("http://127.0.0.3:9", None)) as connection, pytest.raises(OSError, match="proxy"):
        connection.send("GET", "/v1/health", b"", {})  # others are asked through it


@contextmanager
def proxies(monkeypatch, **named):
    """These alone are named by the environment."""
    with monkeypatch.context() as patched:
        for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
            patched.delenv(name, raising=False)
        for name, value in named.items():
            patched.setenv(name, value)
        yield


def test_a_proxy_without_a_scheme_is_one_by_http(server, monkeypatch):
    """As for curl, and so for the client in C."""
    address, ports = server
    for name, value in (("http_proxy", address.removeprefix("http://")), ("HTTP_PROXY", address)):
        with (
            proxies(monkeypatch, **{name: value}),
            closing(Connection("http://device.invalid:9", None)) as connection,
        ):
            assert connection.send("GET", "/v1/health", b"", {})[:2] == (200, b"ok")
    assert len(ports) == 2


@pytest.mark.parametrize("proxy", ["socks5://10.1.2.3:3128", "http://[", "10.1.2.3:99999", "http://:3128", "://x"])
def test_a_proxy_that_is_none_is_told_with_its_variable(proxy, monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY"):
        with proxies(monkeypatch, **{name: proxy}), pytest.raises(InvalidInput, match=f"^{name} names a proxy") as told:
            Connection("https://example.org", None)
        assert proxy in str(told.value)


def test_what_is_told_of_a_proxy_has_no_password(monkeypatch):
    with (
        proxies(monkeypatch, http_proxy="socks5://me:secret@10.1.2.3:3128"),
        pytest.raises(InvalidInput, match="found '10.1.2.3:3128'") as told,
    ):
        Connection("http://example.org", None)
    assert "secret" not in str(told.value) and told.value.__cause__ is None


@pytest.mark.parametrize(
    "said",
    [
        b"{}",
        b'{"client": -1, "classes": 2}',
        b'{"client": "0", "classes": 2}',
        b'{"client": 0, "classes": 0}',
        b'{"client": 0, "classes": true}',
        b'{"client": 4294967296, "classes": 2}',
    ],
)
def test_an_answer_that_names_no_client_makes_no_member(tmp_path, said):
    """Such as of a proxy in the server's place: the next start joins. In the words of the client in C."""

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_):
            pass

    with serving(Answering) as address:
        told, log = device(address, tmp_path)
    assert told == "the server's answer has no client and classes that a device can use" and not log
    assert not (tmp_path / "member.json").exists()


@pytest.mark.parametrize("said", [b"{}", b'{"kind": 3}', b'{"kind": null}'])
def test_an_answer_that_names_no_work_is_told(said):
    """In the words of the client in C."""
    known = object.__new__(LiveDevice)
    known._settle_update, known._rests, known._ask = lambda: None, Rests(pytest.fail), lambda *_: Answer(200, said)
    known._half, known._last = False, ("", np.zeros(0, np.float32))
    with pytest.raises(ServerError, match="^the server's answer has no kind that a device can use$"):
        known.step(0)


@pytest.mark.parametrize("wait, rest", [(25.0, 15.0), (3.0, 3.0)])
def test_a_device_that_does_not_know_a_work_asks_again_later(wait, rest):
    """As a browser does: a newer server answers such a device at once, again and again."""
    paused, known = [], object.__new__(LiveDevice)
    known._settle_update = known._settle_secure = lambda: None
    known._rests, known._ask = Rests(pytest.fail), lambda *_: Answer(200, b'{"kind": "dance"}')
    known._half, known._last = False, ("", np.zeros(0, np.float32))
    known._rests.sleep = paused.append
    assert known.step(wait) and paused == [rest]
