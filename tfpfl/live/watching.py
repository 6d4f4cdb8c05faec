"""Asks a server of live rounds how they go, as its operator. It needs no TensorFlow, so it may be another machine.

server = WatchedServer("http://127.0.0.1:8443", token)
state = server.state()                   # who is here, who is late, bytes; state["history"]: all rounds so far
"""

import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from tfpfl.checks import InvalidArgument, Unavailable

OPERATOR = "operator.token"  # the file of the run folder with the token that watching needs
# What a client does, those first that need a look: it is waited for and half of the time is over; it is waited for; the
# round has what it wants of it; nothing is to do; not heard of lately; it never joined; its token was revoked.
STATES = ("late", "working", "sent", "here", "away", "not joined", "revoked")
_AGAIN = 20  # rounds that are asked for again each time; servers of before do not say which are still being scored
_TIMEOUT = 20.0  # seconds until an answer must have come
_LONGEST_PAUSE = 5.0  # seconds between attempts while the server is away
_MOST_BYTES = 50_000_000  # of an answer
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class _Straight(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the token is for this server alone."""

    def redirect_request(self, *_args: Any) -> None:
        return None


class WatchedServer:
    """A server of live rounds, for its operator.

    Args:
        url: its address, such as 'https://example.org'; or that of its page with the token behind '#'.
        token: the operator's token; default: the one in `url`.
        patience: seconds for which the server may be away.
        context: for https, with the server's certificate; default: those that Python trusts.
        waiting: (reason, seconds) -> None, called before each pause while the server is away.

    Raises:
        InvalidArgument: this is no address of a server, there is no token, or others could read it on its way.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        patience: float = 30.0,
        context: ssl.SSLContext | None = None,
        waiting: Callable[[str, float], None] = lambda why, seconds: None,
    ):
        try:
            parts = urllib.parse.urlsplit(url)
            is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # such as a bracket that is not closed, or a port above 65535
            is_server = False
        if not is_server:
            raise InvalidArgument(f"a server's address is such as https://example.org:8443, found {url!r}")
        token = (token or parts.fragment).strip()
        if not token:
            raise InvalidArgument(f"the operator's token is missing: it is in {OPERATOR} of the run folder")
        if not (token.isascii() and token.isprintable()):
            raise InvalidArgument("the operator's token has characters that no token has")
        if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            raise InvalidArgument(f"others could read the operator's token on its way to {parts.hostname}: use https")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/watch')}"
        self._headers, self._patience, self._waiting = {"Authorization": f"Bearer {token}"}, patience, waiting
        how: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)] if context else []
        if parts.hostname in _LOOPBACK:
            how.append(urllib.request.ProxyHandler({}))  # no proxy gets the token either
        self._open = urllib.request.build_opener(_Straight(), *how).open
        self.history: list[dict] = []  # the rows of all rounds that were read so far
        self.last: dict | None = None  # the last answer
        self._scored = 0  # the rounds after this one are asked for again: scores may come after a round is saved

    def state(self) -> dict:
        """How the rounds go now, with the history of all rounds; docs/live_protocol.md says what is in it.

        Raises:
            Unavailable: the server does not answer for longer than `patience`, refuses the token, or is no server of
                live rounds.
        """
        since, scored = min(self._scored, max(len(self.history) - _AGAIN, 0)), []
        while True:
            found = self._asked(f"/v1/watch?since={since}")
            try:
                rows = found["history"]
                self.history[since : since + len(rows)] = rows
                since += len(rows)
                full = not rows or since >= found["saved"]
                scored.append((found.get("scoring") or since + 1) - 1)
            except (KeyError, TypeError) as error:
                raise Unavailable(f"{self.url} answers, but not as a server of live rounds does") from error
            if full:
                del self.history[since:]
                self._scored = min(scored)
                self.last = found | {"history": self.history}
                return self.last

    def _asked(self, target: str) -> dict:
        until, pause = time.monotonic() + self._patience, 0.5
        while True:
            try:
                return self._once(target)
            except (OSError, http.client.HTTPException) as error:
                why = str(getattr(error, "reason", error)) or type(error).__name__
                left = until - time.monotonic()
                if left <= 0:
                    raise Unavailable(f"{self.url} does not answer for {self._patience:g} s: {why}") from error
            self._waiting(why, left)
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _once(self, target: str) -> dict:
        request = urllib.request.Request(self.url + target, headers=self._headers)
        try:
            with self._open(request, timeout=_TIMEOUT) as answer:
                found = json.loads(answer.read(_MOST_BYTES))
                if not isinstance(found, dict):
                    raise Unavailable(f"{self.url} answers, but not as a server of live rounds does")
                return found
        except urllib.error.HTTPError as error:
            with error:
                if error.code >= 500 or error.code in (408, 429):
                    raise ConnectionError(f"status {error.code}") from error
                why = _reason(error.read(10_000))
            if error.code == 404:
                raise Unavailable(f"{self.url} is no server of live rounds, or one of an older version") from error
            raise Unavailable(f"{self.url} refused ({error.code}): {why}") from error
        except (ValueError, RecursionError) as error:
            raise Unavailable(f"{self.url} answers, but not as a server of live rounds does") from error


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:100].decode("utf-8", "replace") or "no reason was given"
