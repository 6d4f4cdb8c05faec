"""The server of live rounds: HTTP around `LiveRounds`. docs/live_protocol.md has every message.

One process and one event loop. Whatever writes runs in one thread of its own, one after the other; a poll reads what
is there and waits for a change. What a device sends is checked for its size before it is read, for its signature before
it is parsed, and is never executed.
"""

import asyncio
import hashlib
import logging
import math
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from tflite_export.device import payload as payloads
from tflite_export.device.head_file import SavedHead, head_bytes
from tflite_export.device.live import wire
from tflite_export.device.live.wire import MASKED
from tfpfl.checks import InvalidArgument, TfpflError
from tfpfl.live.gate import SLOWEST_BODY, Gate
from tfpfl.live.page import LivePage
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused
from tfpfl.live.secure_rounds import SecureRounds
from tfpfl.live.shown import Shown
from tfpfl.live.thetas import Shared, Thetas
from tfpfl.live.watch import Watch, WatchPage

LONGEST_WAIT = 30.0  # seconds of a poll; proxies cut longer ones
SLOWEST_HEAD = 20.0  # seconds in which a connection's first request must have come, but for its body
_LARGE_AT_ONCE = 32  # updates that are in memory at the same time, each of another client
_SMALL = 16 * 1024  # bytes of a body that is no update
_PHASE = "{phase:keys|shares|masked|unmask}"
_logger = logging.getLogger(__name__)


def _is_half(request: web.Request) -> bool:
    """Whether a device asks for theta in half precision."""
    if (half := request.query.get("half", "0")) not in ("0", "1"):
        raise wire.WireError("half must be 0 or 1")
    return half == "1"


def _since(request: web.Request) -> int:
    """The round after which a history begins."""
    since = request.query.get("since", "0")
    if not (since.isascii() and since.isdigit() and len(since) < 10):
        raise wire.WireError("since must be the number of a round")
    return int(since)


class Steady:
    """A clock that is never set back: otherwise a round would wait until its deadline is here for the second time.

    Args:
        clock: () -> seconds since 1970, which may be set back.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._last, self._ahead, self._lock = clock, -math.inf, 0.0, threading.Lock()

    def __call__(self) -> float:
        """Seconds since 1970, and what the clock was set back by."""
        with self._lock:
            now = self._clock()
            self._ahead += max(self._last - now, 0.0)
            self._last = now
            return now + self._ahead


class LiveServer:
    """Answers devices.

    Args:
        rounds: the rounds.
        bundles: {K: the folder with the bundle for heads of K classes}.
        clock: () -> seconds since 1970.
        page: the page with which a browser tab is a device; None: the server has none.
        watch: what an operator sees; None: nothing. With a page and this, the page shows how the rounds go.
    """

    def __init__(
        self,
        rounds: LiveRounds,
        bundles: dict[int, Path],
        clock=time.time,
        page: LivePage | None = None,
        watch: Watch | None = None,
    ):
        self.rounds, self.bundles, self._clock, self._page, self._watch = rounds, bundles, clock, page, watch
        self._thetas = Thetas(lambda: rounds.thetas)
        self._now = Steady(clock)
        self._gate = Gate(rounds.rules.joins, clock())
        self._changed = asyncio.Event()
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)
        self._sending: set[int] = set()  # the clients whose large bodies are on their way
        self._in_time: set = set()  # connections that have sent the whole head of a request
        self._since: dict = {}  # {connection: when it was first seen}
        self._writer = ThreadPoolExecutor(1, "tfpfl-rounds")
        self._shown = Shown(watch, self._now, self._written) if page and watch else None
        self.done = asyncio.Event()
        registry = CollectorRegistry()
        self._registry = registry
        self._requests = Counter("tfpfl_requests", "Answers by status", ["status"], registry=registry)
        self._received = Counter("tfpfl_received_bytes", "Bytes of bodies", registry=registry)
        Gauge("tfpfl_round", "The last round that is saved", registry=registry).set_function(
            lambda: float(rounds.saved)
        )
        Gauge("tfpfl_waiting", "Clients that the round waits for", registry=registry).set_function(
            lambda: float(len(rounds.view.waiting))
        )
        Gauge("tfpfl_awake", "Clients that were heard of lately", registry=registry).set_function(
            lambda: float(len(rounds.awake(self._now())))
        )
        self._most = payloads.num_bytes(rounds.update_size) + _SMALL
        self._secure = rounds if isinstance(rounds, SecureRounds) else None

    def app(self) -> web.Application:
        """The application, for aiohttp's runner."""
        app = web.Application(middlewares=[self._answer], client_max_size=self._most)
        app.add_routes(
            [
                web.get("/v1/health", self._health),
                web.get("/metrics", self._metrics),
                web.post("/v1/join", self._join),
                web.get("/v1/work", self._work),
                web.get("/v1/theta/{name:[0-9a-f]{64}}", self._theta),
                web.get("/v1/head", self._head),
                web.get("/v1/bundle", self._bundle),
                web.get("/v1/bundle/{name:[A-Za-z0-9_.]{1,80}}", self._file),
                web.put("/v1/update/{round:[0-9]{1,9}}", self._update),
                web.put("/v1/score/{round:[0-9]{1,9}}", self._score),
                # in every run: a device that is now for secure rounds alone asks what became of an update of before
                web.get("/v1/secure/{round:[0-9]{1,9}}", self._state_of),
                *([web.put(f"/v1/secure/{{round:[0-9]{{1,9}}}}/{_PHASE}", self._message)] if self._secure else ()),
                *([web.get("/v1/watch", self._state), *WatchPage().routes()] if self._watch else ()),
                *([web.get("/v1/shown", self._show)] if self._shown else ()),
                *(self._page.routes() if self._page else ()),
            ]
        )
        return app

    @web.middleware
    async def _answer(self, request, handler):
        self._in_time.add(request.protocol)
        try:
            response = await handler(request)
        except Refused as error:
            response = self._error(error.status, str(error))
        except wire.WireError as error:
            response = self._error(400, str(error))
        except web.HTTPRequestEntityTooLarge:
            response = self._error(413, f"a body has at most {self._most} bytes")
        except web.RequestPayloadError:
            response = self._error(400, "the body is not what its headers say")
        except TimeoutError:
            response = self._error(408, f"the body, or more of an update, did not come in {SLOWEST_BODY:g} s")
        except web.HTTPException as error:
            response = self._error(error.status, error.reason)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            is_known = isinstance(error, TfpflError)  # such as a full disk; all others are bugs
            _logger.error("%s %s: %s", request.method, request.path, error, exc_info=not is_known)
            response = self._error(500, "the server failed; its log says more")
        self._requests.labels(str(response.status)).inc()
        response.headers.setdefault("Cache-Control", "no-store")
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    def _error(self, status: int, message: str) -> web.Response:
        about = {"error": message, "round": self.rounds.view.round_num}
        if status == 401:
            about["time"] = round(self._clock(), 3)  # a device whose clock is wrong signs with this one
        return web.json_response(about, status=status)

    async def _body(self, request, most: int = _SMALL) -> bytes:
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise Refused(415, "bodies are taken as they are, without Content-Encoding")
        if (request.content_length or 0) > most:
            raise web.HTTPRequestEntityTooLarge(most, request.content_length or 0)
        parts, size, loop = [], 0, asyncio.get_running_loop()
        async with asyncio.timeout(SLOWEST_BODY) as limit:
            async for part in request.content.iter_chunked(65536):
                size += len(part)
                if most > _SMALL:  # it takes as long as it needs, if it only comes
                    limit.reschedule(loop.time() + SLOWEST_BODY)
                if size > most:
                    raise web.HTTPRequestEntityTooLarge(most, size)
                parts.append(part)
        self._received.inc(size)
        return b"".join(parts)

    async def _signed(self, request) -> tuple[int, bytes]:
        """(client, body) of a request that a client has signed."""
        member, stamp = self._gate.who(self.rounds, request, self._clock())
        body = await self._body(request)
        digest = hashlib.sha256(body).hexdigest()
        self._gate.check(member, stamp, request, digest, self._clock())
        return member.client, body

    @asynccontextmanager
    async def _signed_large(self, request, most: int):
        """`_signed`, of a large body; its place in memory is taken until the caller is ready with it.

        It is read only from one who has signed its hash: nobody else can keep others from sending.
        """
        member, stamp = self._gate.who(self.rounds, request, self._clock())
        digest = request.headers.get(wire.BODY, "")
        self._gate.check(member, stamp, request, digest, self._clock())
        if member.client in self._sending:
            raise Refused(429, f"an update of client {member.client} is on its way already: wait")
        self._sending.add(member.client)
        try:
            async with self._large:
                body = await self._body(request, most)
                if hashlib.sha256(body).hexdigest() != digest:
                    raise Refused(400, f"the body does not have the hash in {wire.BODY}: it was changed on its way")
                yield member.client, body
        finally:
            self._sending.discard(member.client)

    async def _written(self, function, *arguments):
        """Runs what writes, in its thread; then wakes the polls if something changed."""
        before = self.rounds.view
        try:
            return await asyncio.get_running_loop().run_in_executor(self._writer, partial(function, *arguments))
        finally:
            now = self.rounds.view
            if now.kind == wire.DONE:
                self.done.set()
            if (now.kind, now.round_num) != (before.kind, before.round_num):
                self._changed.set()
                self._changed = asyncio.Event()

    async def _health(self, _):
        view = self.rounds.view
        return web.json_response({"protocol": wire.PROTOCOL, "round": view.round_num, "doing": view.kind})

    async def _state(self, request):
        assert self._watch is not None  # otherwise there is no such route
        self._watch.check(request.headers.get("Authorization", ""))
        return web.json_response(await self._written(self._watch.state, _since(request), self._now()))

    async def _show(self, request):
        assert self._shown is not None  # otherwise there is no such route
        return web.json_response(await self._shown.state(_since(request)))

    async def _metrics(self, _):
        return web.Response(body=generate_latest(self._registry), content_type="text/plain")

    async def _join(self, request):
        self._gate.may_join(request.remote or "", self._now())
        about = wire.read_json(await self._body(request))
        token = wire.entry(about, "token", str, 1, 200)
        if not token.isascii():
            raise Refused(401, "this token is unknown: ask for one")
        return web.json_response(await self._written(self.rounds.join, token, about, self._now()))

    async def _work(self, request):
        client, _ = await self._signed(request)
        if self._secure is not None:
            self._secure.require(request.query.get("secure"))
        try:
            wait = min(max(float(request.query.get("wait", 0)), 0.0), LONGEST_WAIT)
        except ValueError:
            raise wire.WireError("wait must be a number of seconds") from None
        until = asyncio.get_running_loop().time() + (wait if wait == wait else 0.0)
        while True:
            changed = self._changed
            if (found := self.rounds.work(client, self._now())) is not None:
                return self._with_theta(request, found)
            left = until - asyncio.get_running_loop().time()
            if left <= 0:
                return web.json_response({"kind": wire.NOTHING})
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)

    def _with_theta(self, request, work: dict) -> web.Response:
        """Work as a device asked for it: with its theta, if the device says that it has another one or none."""
        have, name, half = request.query.get("have"), work.get("theta"), _is_half(request)
        if have is None or name is None or have == name:
            return web.json_response(work)
        try:
            theta = self._thetas.get(name, half)
        except (Refused, wire.WireError):  # it asks for the theta by itself, and is told
            return web.json_response(work)
        return web.Response(body=Shared(wire.pack(work, b""), theta.content), headers={wire.BODY: theta.digest})

    async def _theta(self, request):
        await self._signed(request)
        return self._thetas.response(request, request.match_info["name"], _is_half(request))

    async def _head(self, request):
        client, _ = await self._signed(request)
        head = self.rounds.head(client)
        return web.Response(
            body=head_bytes(SavedHead(head.kernel, head.bias, "00" * 32)), content_type="application/octet-stream"
        )

    def _folder(self, client: int) -> Path:
        return self.bundles[int(self.rounds.info(client).num_classes)]

    async def _bundle(self, request):
        client, _ = await self._signed(request)
        names = sorted(path.name for path in self._folder(client).iterdir())
        return web.json_response({"files": names})

    async def _file(self, request):
        client, _ = await self._signed(request)
        path = self._folder(client) / request.match_info["name"]
        if request.match_info["name"] not in {p.name for p in self._folder(client).iterdir()}:
            raise Refused(404, "the bundle has no such file")
        return web.FileResponse(path)

    async def _update(self, request):
        number = int(request.match_info["round"])
        async with self._signed_large(request, self._most) as (client, body):
            return web.json_response(await self._written(self.rounds.update, client, number, body, self._now()))

    async def _score(self, request):
        client, body = await self._signed(request)
        number, about = int(request.match_info["round"]), wire.read_json(body)
        return web.json_response(await self._written(self.rounds.score, client, number, about, self._now()))

    async def _message(self, request):
        assert self._secure is not None  # otherwise there is no such route
        phase, number = request.match_info["phase"], int(request.match_info["round"])
        most = self._most if phase == MASKED else self._secure.message_size
        async with self._signed_large(request, most) as (client, body):
            given = client, number, phase, body, self._now()
            return web.json_response(await self._written(self._secure.message, *given))

    async def _state_of(self, request):
        client, _ = await self._signed(request)
        number = int(request.match_info["round"])
        return web.json_response(await self._written(self.rounds.state, client, number))

    async def _tell(self) -> None:
        """Answers for a while after the last round, so that whoever was heard of lately learns that it is over."""
        until = asyncio.get_running_loop().time() + min(self.rounds.rules.deadline, 60.0)
        while asyncio.get_running_loop().time() < until:
            if set(self.rounds.awake(self._now()).tolist()) <= self.rounds.told:
                break
            await asyncio.sleep(0.2)
        watched = self._watch is not None and self._watch.is_watched(self._now())
        await asyncio.sleep(3.0 if watched else 0.5)  # the last answers are on their way

    def _close_slow(self, server) -> None:
        """Closes the connections whose first request does not come."""
        now, here = asyncio.get_running_loop().time(), server.connections
        self._since = {c: self._since.get(c, now) for c in here}
        self._in_time &= set(here)
        for connection, since in self._since.items():
            if connection not in self._in_time and now - since > SLOWEST_HEAD:
                connection.force_close()

    async def run(self, host: str, port: int, tls: tuple[Path, Path] | None = None, on_start=None) -> None:
        """Serves until the last round is saved and all devices that ask have been told.

        Args:
            host, port: where to listen; port 0: a free one.
            tls: files of the certificate and its key; None: plain HTTP.
            on_start: (address) -> None, called when it listens.

        Raises:
            InvalidArgument: the port is in use, or the certificate cannot be read.
        """
        context = None
        if tls is not None:
            try:
                context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                context.load_cert_chain(*map(str, tls))
            except (OSError, ssl.SSLError) as error:
                raise InvalidArgument(f"the certificate {tls[0]} with the key {tls[1]}: {error}") from error
        quiet = logging.getLogger(f"{__name__}.http")  # of bytes that are no HTTP, aiohttp logs the stack trace
        quiet.disabled = True
        how: dict[str, Any] = {"access_log": None, "logger": quiet, "keepalive_timeout": 75, "shutdown_timeout": 2}
        runner = web.AppRunner(self.app(), **how)
        await runner.setup()
        try:
            try:
                site = web.TCPSite(runner, host, port, ssl_context=context, backlog=1024)
                await site.start()
            except OSError as error:
                raise InvalidArgument(f"cannot listen on {host}:{port}: {error.strerror}") from error
            found = runner.addresses[0]
            if on_start is not None:
                name = f"[{host}]" if ":" in host else host
                on_start(f"http{'s' if context else ''}://{name}:{found[1]}")
            await self._written(self.rounds.tick, self._now())
            while not self.done.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.done.wait(), 1.0)
                self._close_slow(runner.server)
                await self._written(self.rounds.tick, self._now())
            await self._tell()
        finally:
            await runner.cleanup()
            self._writer.shutdown()
